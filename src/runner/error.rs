//! What can go wrong with a run.

use thiserror::Error;

use crate::attention::BindError;
use crate::buffers::OutOfMemory;
use crate::case::CaseError;
use crate::kernels::BuildError;
use crate::kv::{AppendError, LayoutError};
use crate::plan::{PlanError, UploadError};
use crate::selftest::SelfTestError;
use crate::status::StatusError;
use crate::tensor::TensorError;

/// A run that did not happen or did not finish. Nothing of it is kept.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum RunError {
    /// The adapter gave no device.
    #[error("the adapter gave no device: {0}")]
    Device(String),
    /// The page ids for contiguous keys and values cannot be used.
    #[error("{found} page ids were given; the {tokens} tokens in pages of {page_size} need {needed}, each once")]
    PageIds {
        /// Ids given, repeated ones not counted.
        found: usize,
        /// Ids needed.
        needed: usize,
        /// Tokens of all sequences.
        tokens: u64,
        /// Tokens per page.
        page_size: u32,
    },
    /// Keys that lie in pages are to be rotated: sequences may share pages, at other positions.
    #[error("the keys are in pages already; only contiguous keys are rotated")]
    RotatedPages,
    /// A tensor does not fit into one buffer of the device.
    #[error("`{buffer}` needs {needed} bytes; the device allows {found}")]
    TooLarge {
        /// Which buffer.
        buffer: &'static str,
        /// The device's limit.
        found: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// The case does not suit the options.
    #[error(transparent)]
    Case(#[from] CaseError),
    /// The kernels could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The pool could not be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The step could not be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The append could not be planned.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// Keys and values read back make no tensor: a fault of this crate.
    #[error(transparent)]
    Stored(#[from] TensorError),
    /// A plan did not reach the device.
    #[error(transparent)]
    Upload(#[from] UploadError),
    /// The call could not be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// Kernels that do not compute right on this device.
    #[error(transparent)]
    SelfTest(#[from] SelfTestError),
    /// The kernels reported a failure.
    #[error(transparent)]
    Status(#[from] StatusError),
    /// The device reported an error.
    #[error("the device failed: {0}")]
    Failed(String),
    /// The device has no memory. The runner stays in use.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The device was lost: it takes no work any more, and a new runner is needed.
    #[error("the device was lost: {0}")]
    Lost(String),
}
