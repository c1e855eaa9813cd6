//! Exact attention over a paged KV cache on any GPU, through [`wgpu`].

pub mod adapter;
mod batch;
mod case;
mod chains;
mod geometry;
pub mod reference;
mod runner;
mod tensor;
mod verify;

pub use batch::{Batch, BatchError};
pub use case::{AttentionOptions, Case, CaseError, KvSource, SCORE_LOG2_MAX};
pub use chains::Chains;
pub use geometry::{Dtype, GeometryError, HEAD_DIM_MAX, HeadGeometry, PageSize, ROW_ALIGN, padded_dim};
pub use runner::{KernelUse, Output, RunError, RunOptions, Runner};
pub use tensor::{Tensor, TensorError};

pub use verify::{Computed, Report, VerifyError, Worst, verify};
pub use wgpu;
