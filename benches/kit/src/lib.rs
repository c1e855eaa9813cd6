//! What the benches and `paged-attention bench` share: shapes, contenders, the adapter's own limits, paired rounds.
//!
//! A figure from a machine with neighbours is worth little by itself. A [`Session`] therefore times everything once
//! per round, limits and baseline included, and ratios are medians of the ratios inside single rounds.

mod error;
mod gpu;
mod growth;
mod judge;
pub mod limits;
mod paged;
mod problem;
mod session;
mod unfused;

pub use error::BenchError;
pub use gpu::{Gpu, Record, best, dispatch, median};
pub use growth::{Curve, Fit, Growth, Point};
pub use judge::{Accuracy, Judge};
pub use paged::{Paged, Paging, Selection};
pub use problem::{Packed, Problem};
pub use session::{Contender, Limits, Measured, Options, Series, Session};
pub use unfused::Unfused;
