//! The paged KV cache on the device: where a row lies, the pages' buffer, and appending to it.

mod append;
mod layout;

#[cfg(test)]
pub(crate) use append::AppendParams;
pub use append::{Append, AppendCall, AppendError, AppendPlan, AppendSource};
pub(crate) use append::{SourceVectors, append_buffer_bytes};
pub use layout::{KvLayout, LayoutError, RowLayout};
