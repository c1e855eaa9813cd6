//! Pipelines, each made once.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::time::Instant;

use super::{RunError, Runner};
use crate::attention::{Attention, AttentionConfig, AttentionIo, Workspace};
use crate::batch::Batch;
use crate::geometry::PageSize;
use crate::kernels::{self, KernelConfig, KernelId, Kernels, Layouts, PipelineKey};
use crate::kv::{Append, AppendError, AppendPlan, AppendSource, KvLayout, Rotary, Rotation};
use crate::plan::DevicePlan;

/// How long each kernel took to compile, its first dispatch included, in milliseconds.
///
/// Taken when the pipeline was made; configurations share those that are alike.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CompileTimes {
    /// The prefill kernel.
    pub prefill_ms: f64,
    /// The decode kernel.
    pub decode_ms: f64,
    /// The merge kernel.
    pub merge_ms: f64,
    /// The append kernel.
    pub append_ms: f64,
}

impl CompileTimes {
    /// All four kernels.
    pub fn total_ms(&self) -> f64 {
        self.prefill_ms + self.decode_ms + self.merge_ms + self.append_ms
    }

    fn of(&mut self, kernel: KernelId) -> &mut f64 {
        match kernel {
            KernelId::Prefill => &mut self.prefill_ms,
            KernelId::Decode => &mut self.decode_ms,
            KernelId::Merge => &mut self.merge_ms,
            KernelId::Append => &mut self.append_ms,
        }
    }
}

/// Kernels that have been dispatched.
#[derive(Clone, Debug)]
pub(super) struct Built {
    pub(super) kernels: Kernels,
    pub(super) compile: CompileTimes,
}

/// What a runner has compiled.
#[derive(Debug, Default)]
pub(super) struct Pipelines {
    /// By source: other variants of one kernel leave the other kernels as they are.
    made: HashMap<String, (wgpu::ComputePipeline, f64)>,
    built: HashMap<PipelineKey, Built>,
    /// A test's, to be taken instead of those that would be compiled.
    inserted: HashMap<PipelineKey, Kernels>,
}

impl Runner {
    /// The kernels for a configuration, compiled and dispatched once. Blocks.
    ///
    /// # Errors
    /// [`RunError::Build`], or that the device failed.
    pub fn kernels(&mut self, config: &KernelConfig) -> Result<Kernels, RunError> {
        self.built(config).map(|built| built.kernels)
    }

    /// Puts kernels in the place of those that would be compiled, so that a test can run changed ones.
    #[doc(hidden)]
    pub fn insert_kernels(&mut self, kernels: Kernels) {
        let key = kernels.config().pipeline_key();
        self.pipelines.built.remove(&key);
        self.pipelines.inserted.insert(key, kernels);
    }

    /// Some drivers compile when a pipeline is made, others when it is dispatched for the first time. Both are done
    /// here and counted, so that the time that a run reports is its own.
    pub(super) fn built(&mut self, config: &KernelConfig) -> Result<Built, RunError> {
        let config = &config.within(&self.device.limits());
        let key = config.pipeline_key();
        if let Some(built) = self.pipelines.built.get(&key) {
            return Ok(built.clone());
        }
        let mut compile = CompileTimes::default();
        let mut fresh: Vec<(KernelId, Option<String>)> = Vec::new();
        let kernels = match self.pipelines.inserted.get(&key) {
            Some(kernels) => {
                fresh.extend(KernelId::ALL.map(|kernel| (kernel, None)));
                kernels.clone()
            }
            None => {
                let (device, made) = (&self.device, &self.pipelines.made);
                let layouts = Layouts::new(device, config)?;
                let mut make = |kernel: KernelId| {
                    let wgsl = kernel.wgsl(config)?;
                    if let Some((pipeline, ms)) = made.get(&wgsl) {
                        *compile.of(kernel) = *ms;
                        return Ok(pipeline.clone());
                    }
                    let started = Instant::now();
                    let (name, layout) = (kernel.entry_point(), layouts.of(kernel));
                    let pipeline = pollster::block_on(kernels::pipeline(device, name, wgsl.clone(), layout))?;
                    *compile.of(kernel) = started.elapsed().as_secs_f64() * 1e3;
                    fresh.push((kernel, Some(wgsl)));
                    Ok::<_, RunError>(pipeline)
                };
                let [prefill, decode, merge, append] = KernelId::ALL;
                let pipelines = [make(prefill)?, make(decode)?, make(merge)?, make(append)?];
                Kernels::assemble(device, config, layouts, pipelines)
            }
        };
        let first: Vec<KernelId> = fresh.iter().map(|(kernel, _)| *kernel).collect();
        let dispatched = self.scoped(|| self.dispatch_first(&kernels, &first))?;
        // A lost device makes pipelines that are none, and says nothing.
        self.check_failure()?;
        for ((kernel, wgsl), ms) in fresh.into_iter().zip(dispatched) {
            *compile.of(kernel) += ms;
            if let Some(wgsl) = wgsl {
                self.pipelines.made.insert(wgsl, (kernels.pipeline(kernel).clone(), *compile.of(kernel)));
            }
        }
        let built = Built { kernels, compile };
        self.pipelines.built.insert(key, built.clone());
        Ok(built)
    }

    /// Dispatches kernels with nothing to do, one after the other, and says how many milliseconds each took.
    fn dispatch_first(&self, kernels: &Kernels, which: &[KernelId]) -> Result<Vec<f64>, RunError> {
        let device = &self.device;
        let KernelConfig { geometry, q, kv, new_rows, out, modifiers, segments, .. } = *kernels.config();
        // Of the segments of a pool in several groups, one more than a dispatch binds.
        let pages = segments.get().saturating_add(modifiers.grouped.into());
        let layout = KvLayout::new(geometry, kv, PageSize::ONE, pages)?.with_segment_pages(NonZeroU32::MIN);
        let (options, extras) = modifiers.example(&geometry);
        let attention =
            Attention::with_kernels(kernels.clone(), &AttentionConfig { q, out, layout, new_rows, options, extras })?;
        let batch = Batch { q_indptr: &[0], page_indptr: &[0], page_ids: &[], kv_len: &[] };
        let workspace = Workspace::new(device, 0)?;
        let head_bytes = 8 * (u64::from(geometry.q_heads()) + u64::from(geometry.kv_heads()));
        let kv = layout.create_segments(device)?;
        let kv: Vec<_> = kv.iter().map(wgpu::Buffer::as_entire_buffer_binding).collect();
        let buffers = [0, 0, 0, head_bytes, 0].map(|bytes| self.buffer("warm-up", bytes, wgpu::BufferUsages::STORAGE));
        let [a, b, c, d, e] = buffers;
        let (a, b, c, d, e) = (a?, b?, c?, d?, e?);
        let [q, out, lse, heads, bias] = [&a, &b, &c, &d, &e].map(wgpu::Buffer::as_entire_buffer_binding);
        let head_scales = layout.dtypes().has_head_scales().then(|| heads.clone());
        let heads = (modifiers.heads() || head_scales.is_some()).then_some(heads);
        let bias = modifiers.bias.map(|_| bias);
        let source = AppendSource { k: q.clone(), v: q.clone(), kv: kv.clone(), head_scales };
        let rotary = new_rows.rotary.map(Rotary::example).transpose().map_err(AppendError::from)?;
        let rotation = rotary.as_ref().map(|rotary| Rotation { rotary, positions: None });
        let append = AppendPlan::converting(&layout, &batch, new_rows.dtype, rotation)?;
        let append = Append::upload(device, &append)?;
        let append = append.bind(device, kernels, source, &workspace)?.of_one_workgroup();
        let plan = if modifiers.mask { attention.plan_masked(&batch, &[])? } else { attention.plan(&batch)? };
        let plan = DevicePlan::upload(device, &plan)?;
        let io = AttentionIo { q, kv, out, lse, heads, bias };
        let call = attention.bind(device, &plan, io, &workspace)?;
        let dispatch = |kernel: &KernelId| {
            let started = Instant::now();
            self.finish(|pass| match kernel {
                KernelId::Append => append.encode(pass),
                _ => call.clone().of_one_workgroup(*kernel).encode(pass),
            })?;
            Ok(started.elapsed().as_secs_f64() * 1e3)
        };
        which.iter().map(dispatch).collect()
    }

    /// Records a pass, submits it and waits for its end.
    pub(super) fn finish(&self, record: impl FnOnce(&mut wgpu::ComputePass<'_>)) -> Result<(), RunError> {
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        record(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
        self.queue.submit([encoder.finish()]);
        self.wait()
    }
}
