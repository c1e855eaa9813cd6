//! The paged KV cache: whose pages are whose (pure host code), and on the device where a row lies, the pages' buffer, and
//! appending to it.

mod append;
mod chain;
mod invariants;
mod layout;
mod pages;
mod pool;
mod prefix;
mod table;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use append::AppendParams;
pub use append::{Append, AppendCall, AppendError, AppendPlan, AppendSource};
pub(crate) use append::{SourceVectors, append_buffer_bytes};
pub use chain::{Namespace, TokenChain};
pub use invariants::InvariantError;
pub use layout::{KvLayout, LayoutError, RowLayout, RowOrder};
pub use pool::{BlockPool, PageCounts, PoolConfig, PoolError, Refused};
pub use prefix::PrefixStats;
pub use table::{BlockTable, PageCopy, SwappedTable};
