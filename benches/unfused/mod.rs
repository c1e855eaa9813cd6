//! The baseline: attention as three kernels that write scores and weights to memory, on contiguous f32 tensors.

use crate::gpu::{Gpu, dispatch};
use crate::problem::Problem;

/// Buffers, pipelines and bind groups of one problem.
pub struct Unfused {
    steps: Vec<Step>,
    /// `[total_q, q_heads, v_head_dim]`.
    pub out: wgpu::Buffer,
    /// Size of the score matrix.
    pub score_bytes: u64,
}

struct Step {
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
    grid: [u32; 3],
}

impl Unfused {
    /// Uploads the tensors and makes the pipelines.
    ///
    /// Single-token batches get kernels of their own, which read K and V once per KV head.
    pub fn new(gpu: &Gpu, problem: &Problem) -> Self {
        let Problem { q_heads, kv_heads, head_dim, v_head_dim, causal, .. } = *problem;
        assert!(q_heads.is_multiple_of(kv_heads), "{q_heads} query heads over {kv_heads} KV heads");
        assert!(head_dim.is_multiple_of(4) && v_head_dim.is_multiple_of(4), "dimensions are read as vec4");

        let mut table: Vec<u32> = Vec::new();
        let (mut q_start, mut kv_start, mut score_count) = (0, 0, 0u64);
        for (q_len, kv_len) in problem.lengths.iter().copied() {
            // A sequence without keys still has a row to point at.
            let stride = kv_len.max(1).next_multiple_of(4);
            let start = u32::try_from(score_count).expect("scores are addressed with 32 bits");
            table.extend([q_start, q_len, kv_start, kv_len, start, stride]);
            q_start += q_len;
            kv_start += kv_len;
            score_count += u64::from(q_heads) * u64::from(q_len) * u64::from(stride);
        }
        let score_bytes = 4 * score_count;
        let binding_bytes = gpu.device.limits().max_storage_buffer_binding_size;
        assert!(score_bytes <= binding_bytes, "{score_bytes} bytes of scores; a binding holds {binding_bytes}");

        let q = gpu.upload("q", &problem.q);
        let k = gpu.upload("k", &problem.k);
        let v = gpu.upload("v", &problem.v);
        let seqs = gpu.upload("seqs", &table);
        let scores = gpu.zeros("scores", score_count);
        let out = gpu.zeros("out", u64::from(q_start * q_heads * v_head_dim));

        let prelude = format!(
            "const Q_HEADS: u32 = {q_heads}u;\nconst KV_HEADS: u32 = {kv_heads}u;\n\
             const HEAD_DIM: u32 = {head_dim}u;\nconst V_HEAD_DIM: u32 = {v_head_dim}u;\n\
             const SCALE: f32 = {:?}f;\nconst CAUSAL: bool = {causal};\n",
            problem.scale,
        );
        let step = |name: &str, source: &str, buffers: &[&wgpu::Buffer], grid: [u32; 3]| {
            let pipeline = gpu.pipeline(name, format!("{prelude}{}{source}", include_str!("common.wgsl")));
            Step { bind_group: gpu.bind(&pipeline, buffers), pipeline, grid }
        };

        let seq_count = problem.lengths.len() as u32;
        let q_len_max = problem.lengths.iter().map(|(q_len, _)| *q_len).max().unwrap_or(0);
        let kv_len_max = problem.lengths.iter().map(|(_, kv_len)| *kv_len).max().unwrap_or(0);
        let rows = q_len_max.div_ceil(64);
        let columns = v_head_dim.div_ceil(64);
        let heads = seq_count * q_heads;
        let kv_pairs = seq_count * kv_heads;
        let decode = problem.lengths.iter().all(|(q_len, _)| *q_len == 1);
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
        Self { steps: vec![first, second, third], out, score_bytes }
    }

    /// Records the three dispatches.
    pub fn encode(&self, encoder: &mut wgpu::CommandEncoder) {
        for step in 0..self.steps.len() {
            self.encode_step(encoder, step);
        }
    }

    /// Records one of the three dispatches.
    pub fn encode_step(&self, encoder: &mut wgpu::CommandEncoder, step: usize) {
        let Step { pipeline, bind_group, grid } = &self.steps[step];
        dispatch(encoder, pipeline, bind_group, *grid);
    }
}
