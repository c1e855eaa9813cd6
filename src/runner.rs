//! The convenience layer: host tensors in, host tensors out. It submits and waits, and says so.

use thiserror::Error;

use crate::case::Case;
use crate::chains::Chains;
use crate::geometry::{Dtype, PageSize};

/// A run that did not happen or did not finish. Nothing of it is kept.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum RunError {
    /// The adapter gave no device.
    #[error("the adapter gave no device: {0}")]
    Device(String),
}

/// How a case is laid out and what comes back.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RunOptions {
    /// Tokens per page for contiguous keys and values (a paged case has its own).
    pub page_size: PageSize,
    /// For contiguous keys and values: the page ids to use, one per page needed, each once; `None` takes
    /// them in order. Ids may exceed the number of pages needed: the pool then has spare pages.
    pub page_ids: Option<Vec<u32>>,
    /// Type of the output rows: [`Dtype::F32`] or [`Dtype::F16`].
    pub out_dtype: Dtype,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self { page_size: PageSize::new(16).unwrap_or_else(|_| unreachable!()), page_ids: None, out_dtype: Dtype::F32 }
    }
}

/// One kernel that a run dispatched, and why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelUse {
    /// The kernel's name, such as `prefill-base`.
    pub kernel: &'static str,
    /// Why it was chosen.
    pub reason: String,
    /// Workgroups dispatched.
    pub workgroups: u32,
}

/// What a run returns.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Output {
    /// `[total_q, q_heads, v_head_dim]`, without padding, as f32 whatever `out_dtype`.
    pub out: Vec<f32>,
    /// `[total_q, q_heads]`, natural logarithm; `-inf` for a row that sees no key.
    pub lse: Vec<f32>,
    /// The type in which the kernel stored `out`.
    pub out_dtype: Dtype,
    /// One entry per sequence, for the error bound.
    pub chains: Vec<Chains>,
    /// The kernels that ran.
    pub kernels: Vec<KernelUse>,
    /// Time on the GPU, where the adapter has timestamps.
    pub gpu_ms: Option<f64>,
    /// Time from the first upload to the last byte read back; pipelines are not included.
    pub wall_ms: f64,
    /// Bytes of split-KV partial states.
    pub workspace_bytes: u64,
}

/// Owns a device and the pipelines made on it, and runs cases.
#[derive(Debug)]
pub struct Runner {}

impl Runner {
    /// Opens a device on `adapter` with the limits the kernels can use. Blocks.
    ///
    /// # Errors
    /// [`RunError::Device`].
    pub fn new(adapter: &wgpu::Adapter) -> Result<Self, RunError> {
        let _ = adapter;
        Err(RunError::Device("not yet".into()))
    }

    /// Runs one case: writes its keys and values into pages (contiguous input through the append kernel),
    /// attends, and reads the result back. Submits and blocks.
    ///
    /// # Errors
    /// [`RunError`].
    pub fn run(&mut self, case: &Case, options: &RunOptions) -> Result<Output, RunError> {
        let _ = (case, options);
        Err(RunError::Device("not yet".into()))
    }
}
