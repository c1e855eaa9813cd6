//! The start-up test: does a kernel compute a small case right on this device?

use std::num::NonZeroU32;

use thiserror::Error;

use crate::case::{Case, CaseError, CaseExtras, KvSource};
use crate::geometry::{Dtype, HeadGeometry, PageSize};
use crate::kernels::KernelConfig;
use crate::kv::{AppendError, Rotary};
use crate::plan::SharedPrefix;
use crate::runner::{Output, RunError, RunOptions, Runner};
use crate::tensor::{Tensor, TensorError};
use crate::verify::{Computed, VerifyError, verify};
use crate::verify_storage::verify_stored_rows;

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
    /// Keys or values in the pages are outside the bound.
    #[error("keys or values in the pages are off by {ratio:.3} times the bound")]
    Stored {
        /// Largest error over bound.
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

/// Tile rows (query rows times the group) of the prompt, unless two query rows take more.
const PROMPT_TILE_ROWS: u32 = 592;

/// The largest group that the short chunk is run with.
const CHUNK_GROUP_MAX: u32 = 64;

/// Query heads that are compared with the reference: all of a group up to this size, so many of a larger one.
const HEADS_COMPARED: u32 = 64;

/// The largest group whose kernels are tested: one KV head for all of the 65,536 query heads that the command takes.
const GROUP_MAX: u32 = 1 << 16;

/// Query rows and keys: a prompt with a ragged last tile, single tokens with one and with two splits, a short chunk.
/// The larger the group, the shorter the prompt; the chunk goes where it would only be another prompt.
fn lengths(group: u32) -> Vec<(u32, u32)> {
    let prompt = (PROMPT_TILE_ROWS / group).clamp(2, 37);
    let mut lengths = vec![(prompt, prompt + 34), (1, 45), (1, 300)];
    if group <= CHUNK_GROUP_MAX {
        lengths.push((2, 19));
    }
    lengths
}

/// Runs prefill, decode and merge on a case of their own and compares with the float64 reference, whatever the
/// variants' neighbours say.
pub(crate) fn self_test(runner: &mut Runner, config: &KernelConfig) -> Result<(), RunError> {
    let case = case(config)?;
    let page_size = PageSize::new(7).map_err(CaseError::from)?;
    let pages = case.lengths().iter().map(|(_, kv_len)| page_size.pages_for(*kv_len)).sum();
    // Where a dispatch does not bind them all: three groups, of which the last has segments of the one before.
    let segments = match config.modifiers.grouped {
        true => config.segments.saturating_mul(NonZeroU32::MIN.saturating_add(1)).saturating_add(1),
        false => config.segments,
    };
    let (segment_pages, page_ids) = segmented(pages, segments);
    let options = RunOptions {
        segment_pages: Some(segment_pages),
        page_ids: Some(page_ids),
        kv: Some(config.kv),
        rotary: config.new_rows.rotary.map(Rotary::example).transpose().map_err(AppendError::from)?,
        out_dtype: config.out,
        variants: Some(config.variants),
        shared_prefixes: if config.modifiers.shared_prefixes { prefixes(&case) } else { Vec::new() },
        ..RunOptions::new(page_size)
    };
    let output = runner.run(&case, &options)?;
    // What the append has made of keys and values is judged first, then the attention over that.
    let case = match &output.stored {
        Some(stored) => {
            let ratio = verify_stored_rows(&case, stored)?;
            if ratio > 1.0 {
                return Err(SelfTestError::Stored { ratio }.into());
            }
            stored.case(&case)?
        }
        None => case,
    };
    let sample = Sample::new(case.geometry().q_heads());
    let (compared, out, lse) = sample.take(case, &output)?;
    let computed = Computed { out: &out, lse: &lse, out_dtype: config.out, chains: &output.chains };
    let report = verify(&compared, &computed).map_err(SelfTestError::from)?;
    if report.passed() { Ok(()) } else { Err(SelfTestError::Outside { ratio: report.max_bound_ratio }.into()) }
}

/// Pages per segment, and ids of pages, so that a pool of so many pages in use has so many segments. Neighbours lie in
/// other segments, where there are enough pages.
fn segmented(pages: u32, segments: NonZeroU32) -> (NonZeroU32, Vec<u32>) {
    let size = NonZeroU32::new(pages.div_ceil(segments.get())).unwrap_or(NonZeroU32::MIN);
    let mut ids: Vec<u32> = (0..pages).map(|page| page % segments * size.get() + page / segments).collect();
    // The last segment has a page, in use or not.
    if let Some(last) = ids.last_mut() {
        *last = (*last).max(segments.get().saturating_mul(size.get()) - 1);
    }
    (size, ids)
}

/// A prefix of every sequence but the last, each of a single one since they have no page in common; of the third, another
/// inside. They end inside steps.
fn prefixes(case: &Case) -> Vec<SharedPrefix> {
    let lengths = case.lengths();
    let prefix = |(seq, tokens): (usize, u32)| SharedPrefix { seqs: seq..seq + 1, tokens };
    let whole = lengths.iter().enumerate().take(3);
    let mut prefixes: Vec<SharedPrefix> = whole.map(|(seq, (_, kv_len))| prefix((seq, kv_len / 2 + 1))).collect();
    prefixes.extend(lengths.get(2).map(|(_, kv_len)| prefix((2, kv_len - 3))));
    prefixes
}

/// The query heads to compare: evenly spread, the first and the last among them.
struct Sample {
    heads: usize,
    chosen: Vec<usize>,
}

impl Sample {
    fn new(heads: u32) -> Self {
        let count = u64::from(heads.min(HEADS_COMPARED));
        let steps = count.saturating_sub(1).max(1);
        let chosen = (0..count).map(|at| (at * u64::from(heads - 1) / steps) as usize).collect();
        Self { heads: heads as usize, chosen }
    }

    /// The case with the chosen heads alone, and their part of its result.
    fn take(&self, case: Case, output: &Output) -> Result<(Case, Vec<f32>, Vec<f32>), SelfTestError> {
        if self.chosen.len() == self.heads {
            return Ok((case, output.out.clone(), output.lse.clone()));
        }
        let geometry = case.geometry();
        let (dim, v_dim) = (geometry.head_dim(), geometry.v_head_dim());
        let chosen = self.chosen.len() as u32;
        let part = HeadGeometry::with_v_head_dim(chosen, 1, dim, v_dim).map_err(CaseError::from)?;
        let rows = case.q().shape().first().copied().unwrap_or(0);
        let q = self.columns(&case.q().to_f32(), dim as usize);
        let q = Tensor::from_f32(case.q().dtype(), &[rows, self.chosen.len(), dim as usize], &q)?;
        let of_heads = |values: &Option<Vec<f32>>| {
            values.as_ref().map(|values| self.chosen.iter().filter_map(|head| values.get(*head)).copied().collect())
        };
        let mut extras = case.extras().clone();
        extras.alibi_slopes = of_heads(&extras.alibi_slopes);
        extras.sinks = of_heads(&extras.sinks);
        let part = Case::new(part, *case.options(), q, case.q_indptr().to_vec(), case.kv().clone())?;
        let part = part.with_extras(extras)?;
        Ok((part, self.columns(&output.out, v_dim as usize), self.columns(&output.lse, 1)))
    }

    /// The chosen heads of `[rows, heads, dim]`.
    fn columns(&self, values: &[f32], dim: usize) -> Vec<f32> {
        let rows = values.chunks_exact(self.heads * dim);
        let heads = rows.flat_map(|row| self.chosen.iter().filter_map(|head| row.get(head * dim..(head + 1) * dim)));
        heads.flatten().copied().collect()
    }
}

fn case(config: &KernelConfig) -> Result<Case, SelfTestError> {
    let (group, dims) = (config.geometry.group(), (config.geometry.head_dim(), config.geometry.v_head_dim()));
    if group > GROUP_MAX {
        return Err(SelfTestError::Setup(format!("{group} query heads share a KV head; at most {GROUP_MAX} may")));
    }
    // One KV head does; the number of heads is not compiled in.
    let geometry = if config.geometry.is_latent() {
        HeadGeometry::latent(group, dims.0, dims.1)
    } else {
        HeadGeometry::with_v_head_dim(group, 1, dims.0, dims.1)
    };
    let geometry = geometry.map_err(CaseError::from)?;
    let lengths = lengths(group);
    let ends = |length: fn(&(u32, u32)) -> u32| {
        let mut end = 0;
        let mut ends = vec![0];
        ends.extend(lengths.iter().map(|lengths| {
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
    let k = tensor(2, config.new_rows.dtype, kv_rows, 1, dims.0)?;
    let v = if geometry.is_latent() {
        k.first_of_rows(dims.1 as usize)
    } else {
        tensor(3, config.new_rows.dtype, kv_rows, 1, dims.1)?
    };
    let (options, extras) = config.modifiers.example(&geometry);
    let case = Case::new(geometry, options.with_causal(true), q, q_indptr, KvSource::Contiguous { k, v, kv_indptr })?;
    let pairs = case.score_indptr().last().copied().unwrap_or(0) as usize;
    let numbers = |seed: u32, count: u32| (0..count).map(|index| noise(index ^ (seed << 28))).collect::<Vec<f32>>();
    let bias = |dtype| {
        let mut values = numbers(7, pairs as u32);
        values.iter_mut().filter(|value| **value < -1.9).for_each(|value| *value = f32::NEG_INFINITY);
        Tensor::from_f32(dtype, &[1, pairs], &values)
    };
    let tensors = CaseExtras {
        alibi_slopes: extras.alibi_slopes.then(|| numbers(4, group).iter().map(|slope| slope / 16.0).collect()),
        sinks: extras.sinks.then(|| numbers(5, group)),
        mask: extras.mask.then(|| numbers(6, pairs as u32).iter().map(|number| *number > -1.0).collect()),
        bias: extras.bias.map(|kind| bias(kind.dtype)).transpose()?,
    };
    Ok(case.with_extras(tensors)?)
}

/// A number between -2 and 2 from a mixed counter (the finaliser of MurmurHash3).
pub(crate) fn noise(index: u32) -> f32 {
    let mut x = index.wrapping_mul(0x9e37_79b9);
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    ((x ^ (x >> 16)) >> 8) as f32 / 4_194_304.0 - 2.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chains::Chains;
    use crate::kernels::{AdapterFacts, DECODE_ROWS_MAX, Modifiers, Variants};
    use crate::reference::dense;

    #[test]
    fn every_group_prefills_and_decodes_with_bounded_work() {
        for group in (1..2000).chain([GROUP_MAX]) {
            let lengths = lengths(group);
            let rows: u32 = lengths.iter().map(|(q_len, _)| q_len * group).sum();
            assert!(rows <= 2 * PROMPT_TILE_ROWS || rows <= 4 * group, "{group}: {rows} tile rows");
            assert!(lengths.iter().any(|(q_len, _)| *q_len > 1 && q_len * group > DECODE_ROWS_MAX), "{group}");
            assert!(lengths.contains(&(1, 45)) && lengths.contains(&(1, 300)), "{group}");
            let sample = Sample::new(group);
            assert!(sample.chosen.len() <= HEADS_COMPARED as usize && sample.chosen.is_sorted_by(|a, b| a < b));
            assert_eq!((sample.chosen.first(), sample.chosen.last()), (Some(&0), Some(&(group as usize - 1))));
        }
    }

    /// Heads are independent, so the reference of some is a part of the reference of all.
    #[test]
    fn a_sample_of_the_heads_is_judged_as_the_whole() {
        let geometry = HeadGeometry::with_v_head_dim(150, 1, 8, 16).unwrap();
        let variants = Variants::base(&AdapterFacts::PLAIN_GPU, &geometry);
        let config = KernelConfig {
            geometry,
            q: Dtype::F16,
            kv: Dtype::F32.into(),
            new_rows: Dtype::F32.into(),
            out: Dtype::F32,
            modifiers: Modifiers::NONE,
            segments: NonZeroU32::MIN,
            variants,
        };
        let whole = case(&config).unwrap();
        let reference = dense(&whole);
        let narrow = |values: &[f64]| values.iter().map(|x| *x as f32).collect();
        let chains = Chains { dot: 8, accumulate: 300, step_keys: 1, scaled: false, order: Vec::new() };
        let output = Output {
            stored: None,
            out: narrow(&reference.out),
            lse: narrow(&reference.lse),
            out_dtype: Dtype::F32,
            chains: vec![chains; whole.seqs()],
            kernels: Vec::new(),
            choice: None,
            gpu_ms: None,
            wall_ms: 0.0,
            workspace_bytes: 0,
            submits: 1,
        };
        let (compared, out, lse) = Sample::new(150).take(whole, &output).unwrap();
        assert_eq!(compared.q().shape().get(1), Some(&64));
        let computed = Computed { out: &out, lse: &lse, out_dtype: Dtype::F32, chains: &output.chains };
        let report = verify(&compared, &computed).unwrap();
        assert!(report.passed() && report.elements == lse.len() * 17, "{report}");
        let mut wrong = out.clone();
        wrong.swap(5, 16 * 3 + 5);
        assert!(!verify(&compared, &Computed { out: &wrong, ..computed }).unwrap().passed());
    }
}
