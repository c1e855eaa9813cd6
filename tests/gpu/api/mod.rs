//! The embedding interface, as an application uses it: its own device, queue, buffers and encoders.

mod append;
mod host;
mod outputs;
mod recording;
mod steps;
mod work_items;
