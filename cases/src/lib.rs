//! The case table that the tests, benches and command of `paged-attention` share.
//!
//! A [`CaseSpec`] describes an attention problem in a line: heads, storage types, lengths, pages, the kind of
//! values and a seed. [`build`] makes the [`Case`](paged_attention::Case) of it, always the same one.
//! [`quick`] and [`full`] are the table, [`options`] its rows for what changes scores, [`crossed`] draws such options at
//! random, and [`shared`] has trees of prefixes that sequences share; [`write_case`] keeps a case as a file that the command reads.
//!
//! ```
//! use paged_attention_cases::{CaseSpec, Heads, Values, build};
//!
//! let spec = CaseSpec::new("two decodes", Heads::new(4, 2, 64), [(1, 100), (1, 7)]).values(Values::Peaky).seed(3);
//! let case = build(&spec)?;
//! assert_eq!(case.lengths(), [(1, 100), (1, 7)]);
//! # Ok::<(), paged_attention_cases::SpecError>(())
//! ```

mod crossed;
mod file;
mod layout;
mod modifiers;
mod options;
mod purposes;
mod shared;
mod spec;
mod table;
mod values;

pub use crossed::{Crossed, KernelSpec, OptionSet, crossed, crossed_kernels};
pub use file::{FileError, write_case};
pub use layout::{append_page_ids, assemble, build};
pub use modifiers::{Alibi, Bias, BiasValues, Mask, Modifiers, Sinks};
pub use options::{options, options_full};
pub use purposes::{growth, self_tests, shared_speed, speed, timed};
pub use shared::{SharedSpec, share_pages, shared};
pub use spec::{CaseSpec, Heads, KvInput, PageOrder, Poison, Pool, Seq, SpecError, Values};
pub use table::{full, quick};
pub use values::{Sequence, generate, loud_key};
