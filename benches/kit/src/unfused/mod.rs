//! The baseline: attention as three kernels that write scores and weights to memory, on contiguous f32 tensors.

use paged_attention::Chains;
use paged_attention_cases::Heads;

use crate::error::BenchError;
use crate::gpu::{Gpu, dispatch};
use crate::judge::{Accuracy, Judge};
use crate::problem::{Packed, Problem};

/// Buffers, pipelines and bind groups of one problem.
#[derive(Debug)]
pub struct Unfused {
    steps: Vec<Step>,
    /// `[total_q, q_heads, v_head_dim]`.
    out: wgpu::Buffer,
    chains: Vec<Chains>,
}

#[derive(Debug)]
struct Step {
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
    grid: [u32; 3],
}

impl Unfused {
    /// Uploads the tensors and makes the pipelines.
    ///
    /// Single-token batches get kernels of their own, which read K and V once per KV head. A problem in 16 bits is
    /// computed from the same values in f32.
    ///
    /// # Errors
    /// [`BenchError::Shape`] where the scores do not fit into a binding or a grid: what fused kernels do not need.
    pub fn new(gpu: &Gpu, problem: &Problem) -> Result<Self, BenchError> {
        let Heads { q_heads, kv_heads, head_dim, v_head_dim } = problem.spec().heads;
        let refuse = |why: String| Err(BenchError::Shape { name: problem.name().to_owned(), why });

        let mut table: Vec<u32> = Vec::new();
        let (mut q_start, mut kv_start, mut score_count) = (0, 0, 0u64);
        let lengths = problem.case().lengths();
        for (q_len, kv_len) in lengths.iter().copied() {
            // A sequence without keys still has a row to point at.
            let stride = kv_len.max(1).next_multiple_of(4);
            let Ok(start) = u32::try_from(score_count) else {
                return refuse("there are more scores than 32 bits count".to_owned());
            };
            table.extend([q_start, q_len, kv_start, kv_len, start, stride]);
            q_start += q_len;
            kv_start += kv_len;
            score_count += u64::from(q_heads) * u64::from(q_len) * u64::from(stride);
        }
        let score_bytes = 4 * score_count;
        let binding_bytes = gpu.binding_bytes_max();
        let Packed { k, v, .. } = problem.packed()?;
        let tensors = [problem.case().q(), k, v].map(paged_attention::Tensor::to_f32);
        let tensor_bytes = 4 * tensors.iter().map(|tensor| tensor.len() as u64).max().unwrap_or(0);
        if score_bytes.max(tensor_bytes) > binding_bytes {
            return refuse(format!(
                "{score_bytes} bytes of scores, {tensor_bytes} of a tensor; a binding holds {binding_bytes}"
            ));
        }

        let [q, k, v] = tensors.map(|tensor| gpu.upload("rows", &tensor));
        let seqs = gpu.upload("seqs", &table);
        let scores = gpu.zeros("scores", score_count);
        let out = gpu.zeros("out", u64::from(q_start * q_heads * v_head_dim));

        let prelude = format!(
            "const Q_HEADS: u32 = {q_heads}u;\nconst KV_HEADS: u32 = {kv_heads}u;\n\
             const HEAD_DIM: u32 = {head_dim}u;\nconst V_HEAD_DIM: u32 = {v_head_dim}u;\n\
             const SCALE: f32 = {:?}f;\nconst CAUSAL: bool = {};\n",
            problem.case().options().scale as f32,
            problem.case().options().causal,
        );
        let step = |name: &str, source: &str, buffers: &[&wgpu::Buffer], grid: [u32; 3]| {
            let pipeline = gpu.pipeline(name, format!("{prelude}{}{source}", include_str!("common.wgsl")));
            Step { bind_group: gpu.bind(&pipeline, buffers), pipeline, grid }
        };

        let seq_count = lengths.len() as u32;
        let q_len_max = lengths.iter().map(|(q_len, _)| *q_len).max().unwrap_or(0);
        let kv_len_max = lengths.iter().map(|(_, kv_len)| *kv_len).max().unwrap_or(0);
        let rows = q_len_max.div_ceil(64);
        let columns = v_head_dim.div_ceil(64);
        let heads = seq_count * q_heads;
        let kv_pairs = seq_count * kv_heads;
        let axis_max = gpu.device().limits().max_compute_workgroups_per_dimension;
        if [kv_len_max.div_ceil(64), q_len_max, heads].iter().any(|groups| *groups > axis_max) {
            return refuse(format!("more than {axis_max} workgroups on an axis"));
        }
        let decode = problem.decodes();
        let (first, third) = if decode {
            (
                step(
                    "scores_decode",
                    include_str!("scores_decode.wgsl"),
                    &[&q, &k, &scores, &seqs],
                    [kv_len_max.div_ceil(64), 1, kv_pairs],
                ),
                step(
                    "values_decode",
                    include_str!("values_decode.wgsl"),
                    &[&scores, &v, &out, &seqs],
                    [columns, 1, kv_pairs],
                ),
            )
        } else {
            (
                step(
                    "scores_tiled",
                    include_str!("scores_tiled.wgsl"),
                    &[&q, &k, &scores, &seqs],
                    [kv_len_max.div_ceil(64), rows, heads],
                ),
                step(
                    "values_tiled",
                    include_str!("values_tiled.wgsl"),
                    &[&scores, &v, &out, &seqs],
                    [columns, rows, heads],
                ),
            )
        };
        let second = step("softmax", include_str!("softmax.wgsl"), &[&scores, &seqs], [q_len_max, 1, heads]);
        Ok(Self { steps: vec![first, second, third], out, chains: problem.longest_chains() })
    }

    /// Whether the result of the last run is right.
    ///
    /// # Errors
    /// [`BenchError::Wrong`], [`BenchError::Device`].
    pub fn accuracy(&self, gpu: &Gpu, judge: &Judge<'_>) -> Result<Accuracy, BenchError> {
        judge.accuracy("unfused", &gpu.read(&self.out)?, None, &self.chains)
    }

    /// Records the three dispatches.
    pub fn encode(&self, encoder: &mut wgpu::CommandEncoder) {
        for Step { pipeline, bind_group, grid } in &self.steps {
            dispatch(encoder, pipeline, bind_group, *grid);
        }
    }
}
