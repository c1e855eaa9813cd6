//! The paged KV cache: whose pages are whose (pure host code), and on the device where a row lies, the pages' buffers,
//! appending to them and copying them.

mod append;
mod chain;
mod copies;
mod dtypes;
mod groups;
mod invariants;
mod layout;
mod pages;
mod pool;
mod pool_view;
mod prefix;
mod rotary;
mod store;
mod table;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use append::AppendParams;
pub use append::{Append, AppendCall, AppendError, AppendPlan, AppendSource, NewRows, Rotation};
pub(crate) use append::{SourceVectors, append_buffer_bytes};
pub use chain::{Namespace, TokenChain};
#[cfg(test)]
pub(crate) use copies::CopyParams;
pub use copies::{CopyError, PageCopies, ToHost};
pub use dtypes::{FP8_MAX, HEAD_SCALE_MAX, HEAD_SCALE_MIN, INT8_MAX, KvDtype, KvDtypeError, KvDtypes};
pub(crate) use groups::SegmentGroups;
pub use invariants::InvariantError;
pub use layout::{KvLayout, LayoutError, RowLayout, RowOrder};
pub use pool::{BlockPool, PageCounts, PoolConfig, PoolError, Refused};
pub use pool_view::{PoolView, fp8_to_f32};
pub use prefix::PrefixStats;
pub use rotary::{Pairing, Rotary, RotaryError, RotaryShape};
pub use store::{KvStore, StoreError};
pub use table::{BlockTable, PageCopy, SwappedTable};
