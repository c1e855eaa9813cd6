//! The embedding interface, as an application uses it: its own device, queue, buffers and encoders.

mod append;
mod copies;
pub mod host;
mod isolation;
mod outputs;
mod recording;
mod steps;
mod work_items;

pub use host::{Host, Layer, batch, host};
