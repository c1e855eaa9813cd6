//! Ours: the crate's own kernels on a paged cache, through plan, upload, bind and encode.

use paged_attention::kernels::{AdapterFacts, KernelId, Variants};
use paged_attention::{
    Append, AppendPlan, AppendSource, Attention, AttentionConfig, AttentionIo, AttentionOptions, Batch, Call,
    CaseError, Choice, DevicePlan, Dtype, Extras, HeadGeometry, KvLayout, PageSize, Status, Workspace,
};

use crate::error::BenchError;
use crate::gpu::{Gpu, of_shape};
use crate::problem::Problem;

/// How keys and values lie in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paging {
    /// Pages of so many tokens, scattered over the pool.
    Scattered(u32),
    /// One page per sequence, in order: per sequence and head, all keys and then all values lie one after the other, as
    /// in a cache without pages. The same kernels run.
    Contiguous,
}

/// Which kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Those that need no device feature.
    Base,
    /// Those that the runner chooses.
    Chosen,
    /// These, untested but for the result.
    These(Variants),
}

/// A call that is ready to be recorded.
#[derive(Debug)]
pub struct Paged {
    attention: Attention,
    call: Call,
    /// `[total_q, q_heads, v_head_dim]`, f32.
    pub out: wgpu::Buffer,
    /// The kernels that it dispatches, as `prefill-broadcast8-r4k2l16` or `decode-streams8+merge`.
    pub kernel: String,
    /// Milliseconds that the kernels took to compile and run once, whichever shape had them made.
    pub compile_ms: f64,
    /// Variants that were preferred, and why they were not taken.
    pub stepped_down: Vec<String>,
    /// How the runner chose, where it did.
    pub choice: Option<Choice>,
}

impl Paged {
    /// Writes the keys and values into pages, binds the call and runs it once.
    ///
    /// # Errors
    /// [`BenchError::Run`], [`BenchError::Device`].
    pub fn new(gpu: &mut Gpu, problem: &Problem, paging: Paging, selection: Selection) -> Result<Self, BenchError> {
        let Problem { q_heads, kv_heads, head_dim, v_head_dim, causal, dtype, .. } = *problem;
        let geometry = HeadGeometry::with_v_head_dim(q_heads, kv_heads, head_dim, v_head_dim)
            .map_err(|error| of_shape(&problem.name)(CaseError::from(error)))?;
        let kv_len: Vec<u32> = problem.lengths.iter().map(|(_, kv_len)| *kv_len).collect();
        let page_tokens = match paging {
            Paging::Scattered(tokens) => tokens,
            Paging::Contiguous => kv_len.iter().copied().max().unwrap_or(1).max(1),
        };
        let page_size = PageSize::new(page_tokens).map_err(|error| of_shape(&problem.name)(CaseError::from(error)))?;
        let ends = |count: &dyn Fn(&(u32, u32)) -> u32| -> Vec<u32> {
            let mut end = 0;
            let counts = problem.lengths.iter().map(|lengths| {
                end += count(lengths);
                end
            });
            std::iter::once(0).chain(counts.collect::<Vec<_>>()).collect()
        };
        let (q_indptr, kv_indptr) = (ends(&|lengths| lengths.0), ends(&|lengths| lengths.1));
        let page_indptr = ends(&|lengths| page_size.pages_for(lengths.1));
        let page_count = page_indptr.last().copied().unwrap_or(0);
        let page_ids = match paging {
            Paging::Scattered(_) => scattered(page_count),
            Paging::Contiguous => (0..page_count).collect(),
        };
        let batch = Batch { q_indptr: &q_indptr, page_indptr: &page_indptr, page_ids: &page_ids, kv_len: &kv_len };

        let run = |error| of_shape(&problem.name)(error);
        let layout = KvLayout::new(geometry, dtype, page_size, page_count).map_err(of_shape(&problem.name))?;
        let options = AttentionOptions::new(&geometry).with_causal(causal).with_scale(problem.scale.into());
        let config = AttentionConfig { q: dtype, out: Dtype::F32, layout, options, extras: Extras::NONE };
        let base = Variants::base(&AdapterFacts::new(gpu.runner.adapter_info(), gpu.runner.device()), &geometry);
        let started = std::time::Instant::now();
        let choice = match selection {
            Selection::Base | Selection::These(_) => None,
            Selection::Chosen => Some(gpu.runner.choose(&config.kernels(base)).map_err(run)?),
        };
        let variants = match (selection, &choice) {
            (Selection::These(variants), _) => variants,
            (_, Some(choice)) => choice.variants,
            (_, None) => base,
        };
        let kernels = gpu.runner.kernels(&config.kernels(variants)).map_err(run)?;
        let measured_ms = 1e3 * started.elapsed().as_secs_f64();
        let compile_ms = choice.as_ref().map_or(measured_ms, |choice| choice.compile.total_ms());
        let refused = choice.iter().flat_map(|choice| &choice.stepped_down);
        let stepped_down = refused.map(|(variants, why)| format!("{variants}: {why}")).collect();
        let attention = Attention::with_kernels(kernels, &config).map_err(of_shape(&problem.name))?;
        let plan = attention.plan(&batch).map_err(of_shape(&problem.name))?;
        let kernel = plan
            .workgroups()
            .into_iter()
            .filter(|(_, workgroups)| *workgroups > 0)
            .map(|(kernel, _)| match kernel {
                KernelId::Prefill => variants.prefill.to_string(),
                KernelId::Decode => variants.decode.to_string(),
                KernelId::Merge | KernelId::Append => kernel.entry_point().to_owned(),
            })
            .collect::<Vec<_>>()
            .join("+");

        let device = gpu.runner.device();
        let workspace = Workspace::new(device, plan.workspace_bytes()).map_err(of_shape(&problem.name))?;
        let kv = layout.create_buffer(device).map_err(of_shape(&problem.name))?;
        let q = gpu.upload("q", &problem.bytes_of(&problem.q)?);
        let k = gpu.upload("k", &problem.bytes_of(&problem.k)?);
        let v = gpu.upload("v", &problem.bytes_of(&problem.v)?);
        let out = gpu.zeros("out", u64::from(plan.total_q() * q_heads * v_head_dim));
        let lse = gpu.zeros("lse", u64::from(plan.total_q() * q_heads));

        // Every token is new.
        let append_plan = AppendPlan::new(&layout, &Batch { q_indptr: &kv_indptr, ..batch });
        let append = append_plan.map_err(of_shape(&problem.name))?;
        let append = Append::upload(device, &append).map_err(of_shape(&problem.name))?;
        let source = AppendSource {
            k: k.as_entire_buffer_binding(),
            v: v.as_entire_buffer_binding(),
            kv: kv.as_entire_buffer_binding(),
        };
        let append = append.bind(device, attention.kernels(), source, &workspace).map_err(of_shape(&problem.name))?;
        let io = AttentionIo {
            q: q.as_entire_buffer_binding(),
            kv: kv.as_entire_buffer_binding(),
            out: out.as_entire_buffer_binding(),
            lse: lse.as_entire_buffer_binding(),
            heads: None,
            bias: None,
        };
        let device_plan = DevicePlan::upload(device, &plan).map_err(of_shape(&problem.name))?;
        let call = attention.bind(device, &device_plan, io, &workspace).map_err(of_shape(&problem.name))?;

        let paged = Self { attention, call, out, kernel, compile_ms, stepped_down, choice };
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        append.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
        paged.encode(&mut encoder);
        gpu.runner.queue().submit([encoder.finish()]);
        let status: Vec<u32> = gpu.read(workspace.status())?;
        let word = |index: usize| status.get(index).copied().unwrap_or(0);
        let dispatched = append.workgroups().wrapping_add(paged.call.workgroups());
        Status::from_words([word(0), word(1)]).check(dispatched).map_err(of_shape(&problem.name))?;
        Ok(paged)
    }

    /// Records the call.
    pub fn encode(&self, encoder: &mut wgpu::CommandEncoder) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        self.attention.encode(&mut pass, &self.call);
    }
}

/// The ids `0 .. count` in an order in which few neighbours stay neighbours, as in a cache that has been in use.
fn scattered(count: u32) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..count).collect();
    ids.sort_by_key(|id| id.wrapping_mul(0x9e37_79b9).rotate_left(13));
    ids
}
