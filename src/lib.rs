//! Exact attention over a paged KV cache on any GPU, through [`wgpu`].

pub mod adapter;
mod attention;
mod batch;
mod case;
mod chains;
mod geometry;
pub mod kernels;
mod kv;
mod plan;
pub mod reference;
mod runner;
mod status;
mod tensor;
mod verify;

pub use attention::{Attention, AttentionConfig, AttentionIo, BindError, Call, Workspace};
pub use batch::{Batch, BatchError};
pub use case::{AttentionOptions, Case, CaseError, KvSource, SCORE_LOG2_MAX, SequenceKv};
pub use chains::Chains;
pub use geometry::{Dtype, GeometryError, HEAD_DIM_MAX, HeadGeometry, PageSize, ROW_ALIGN, padded_dim};
pub use kernels::{BuildError, KernelConfig, Kernels};
pub use kv::{Append, AppendCall, AppendError, AppendPlan, AppendSource, KvLayout, LayoutError, RowLayout};
pub use plan::{DevicePlan, Plan, PlanError, UploadError};
pub use runner::{KernelUse, Output, RunError, RunOptions, Runner};
pub use status::{STATUS_BYTES, Status, StatusError};
pub use tensor::{Tensor, TensorError};

pub use verify::{Computed, Quantity, Report, VerifyError, Worst, verify};
pub use wgpu;
