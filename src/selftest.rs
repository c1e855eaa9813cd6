//! The start-up test: does a kernel compute a small case right on this device?

use thiserror::Error;

use crate::case::{AttentionOptions, Case, CaseError, KvSource};
use crate::geometry::{Dtype, HeadGeometry, PageSize};
use crate::kernels::KernelConfig;
use crate::runner::{RunError, RunOptions, Runner};
use crate::tensor::{Tensor, TensorError};
use crate::verify::{Computed, VerifyError, verify};

/// Why kernels are not trusted.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SelfTestError {
    /// A result is outside the bound.
    #[error("the self-test's error is {ratio:.3} times the bound")]
    Outside {
        /// Largest measured error over bound.
        ratio: f64,
    },
    /// The test itself could not be set up: a fault of this crate.
    #[error("the self-test could not be set up: {0}")]
    Setup(String),
}

impl From<CaseError> for SelfTestError {
    fn from(error: CaseError) -> Self {
        Self::Setup(error.to_string())
    }
}

impl From<TensorError> for SelfTestError {
    fn from(error: TensorError) -> Self {
        Self::Setup(error.to_string())
    }
}

impl From<VerifyError> for SelfTestError {
    fn from(error: VerifyError) -> Self {
        Self::Setup(error.to_string())
    }
}

/// Query rows and keys: a prompt with a ragged last tile, single tokens with one and with two splits, a short chunk.
const LENGTHS: [(u32, u32); 4] = [(37, 71), (1, 45), (1, 300), (2, 19)];

/// Runs prefill, decode and merge on a case of their own and compares with the float64 reference, whatever the
/// variants' neighbours say.
pub(crate) fn self_test(runner: &mut Runner, config: &KernelConfig) -> Result<(), RunError> {
    let case = case(config)?;
    let options = RunOptions {
        out_dtype: config.out,
        variants: Some(config.variants),
        ..RunOptions::new(PageSize::new(7).map_err(CaseError::from)?)
    };
    let output = runner.run(&case, &options)?;
    let computed = Computed { out: &output.out, lse: &output.lse, out_dtype: config.out, chains: &output.chains };
    let report = verify(&case, &computed).map_err(SelfTestError::from)?;
    if report.passed() { Ok(()) } else { Err(SelfTestError::Outside { ratio: report.max_bound_ratio }.into()) }
}

fn case(config: &KernelConfig) -> Result<Case, SelfTestError> {
    let (group, dims) = (config.geometry.group(), (config.geometry.head_dim(), config.geometry.v_head_dim()));
    // One KV head does; the number of heads is not compiled in.
    let geometry = HeadGeometry::with_v_head_dim(group, 1, dims.0, dims.1).map_err(CaseError::from)?;
    let ends = |length: fn(&(u32, u32)) -> u32| {
        let mut end = 0;
        let mut ends = vec![0];
        ends.extend(LENGTHS.iter().map(|lengths| {
            end += length(lengths);
            end
        }));
        (ends, end)
    };
    let (q_indptr, q_rows) = ends(|(q_len, _)| *q_len);
    let (kv_indptr, kv_rows) = ends(|(_, kv_len)| *kv_len);
    let tensor = |seed: u32, dtype: Dtype, rows: u32, heads: u32, dim: u32| {
        let shape = [rows, heads, dim].map(|extent| extent as usize);
        let values: Vec<f32> = (0..rows * heads * dim).map(|index| noise(index ^ (seed << 28))).collect();
        Tensor::from_f32(dtype, &shape, &values)
    };
    let q = tensor(1, config.q, q_rows, group, dims.0)?;
    let k = tensor(2, config.kv, kv_rows, 1, dims.0)?;
    let v = tensor(3, config.kv, kv_rows, 1, dims.1)?;
    let options = AttentionOptions::new(&geometry).with_causal(true);
    Ok(Case::new(geometry, options, q, q_indptr, KvSource::Contiguous { k, v, kv_indptr })?)
}

/// A number between -2 and 2 from a mixed counter (the finaliser of MurmurHash3).
fn noise(index: u32) -> f32 {
    let mut x = index.wrapping_mul(0x9e37_79b9);
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    ((x ^ (x >> 16)) >> 8) as f32 / 4_194_304.0 - 2.0
}
