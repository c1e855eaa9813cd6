//! Why there are no figures.

use paged_attention::RunError;
use paged_attention::adapter::AdapterError;
use thiserror::Error;

/// A bench that did not come to its end.
#[derive(Debug, Error)]
pub enum BenchError {
    /// There is no adapter to use.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The crate refused or failed.
    #[error("{name}: {error}")]
    Run {
        /// The shape, or what was being prepared.
        name: String,
        /// Its error.
        error: RunError,
    },
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(String),
    /// A shape that cannot be measured.
    #[error("{name}: {why}")]
    Shape {
        /// The shape.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// A result outside the error bound: its time is worth nothing.
    #[error("{name}: the result of `{contender}` is outside the bound: off by {error:.2e}, {ratio:.2} times the bound")]
    Wrong {
        /// The shape.
        name: String,
        /// Who computed it.
        contender: &'static str,
        /// Largest distance from float64.
        error: f64,
        /// Largest error over bound.
        ratio: f64,
    },
    /// A result that should have the bits of another one.
    #[error("{name}: the result of `{contender}` is not bit for bit that of `paged`")]
    Differs {
        /// The shape.
        name: String,
        /// Who computed it.
        contender: &'static str,
    },
}
