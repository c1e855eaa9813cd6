//! Ours: the crate's own kernels on a paged cache, through plan, upload, bind and encode.

use std::time::Instant;

use paged_attention::kernels::{AdapterFacts, KernelId, Variants};
use paged_attention::{
    Append, AppendPlan, AppendSource, Attention, AttentionConfig, AttentionIo, Batch, Call, CaseError, Chains, Choice,
    DevicePlan, Dtype, Extras, KvLayout, Status, Workspace,
};
use paged_attention_cases::{PageOrder, Pool, append_page_ids};

use crate::error::BenchError;
use crate::gpu::{Gpu, median, of_shape};
use crate::judge::{Accuracy, Judge};
use crate::problem::{Packed, Problem};

/// Calls whose recording is timed.
const RECORDED_CALLS: usize = 1000;

/// How keys and values lie in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paging {
    /// Pages of so many tokens, scattered over the pool.
    Scattered(u32),
    /// One page per sequence, in order: per sequence and head, all keys and then all values lie one after the other, as
    /// in a cache without pages. The same kernels run.
    Contiguous,
}

impl Paging {
    fn pool(self, problem: &Problem) -> Pool {
        match self {
            Self::Scattered(page_size) => Pool::new(page_size).times(1),
            Self::Contiguous => {
                let longest = problem.spec().seqs.iter().map(|seq| seq.kv_len).max().unwrap_or(1);
                Pool::new(longest.max(1)).times(1).order(PageOrder::InOrder)
            }
        }
    }
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
    call: Call,
    /// `[total_q, q_heads, v_head_dim]`, f32.
    pub out: wgpu::Buffer,
    lse: wgpu::Buffer,
    chains: Vec<Chains>,
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
        let name = problem.name();
        let pool_spec = problem.spec().clone().contiguous(paging.pool(problem));
        let page_size = pool_spec.page_size().map_err(|error| of_shape(name)(CaseError::from(error)))?;
        let page_ids = append_page_ids(&pool_spec)
            .map_err(|error| BenchError::Shape { name: name.to_owned(), why: error.to_string() })?;
        let kv_len: Vec<u32> = problem.spec().seqs.iter().map(|seq| seq.kv_len).collect();
        let mut page_indptr = vec![0];
        let mut page_count = 0;
        page_indptr.extend(kv_len.iter().map(|kv_len| {
            page_count += page_size.pages_for(*kv_len);
            page_count
        }));
        let (case, Packed { k, v, kv_indptr }) = (problem.case(), problem.packed()?);
        let q_indptr = case.q_indptr();
        let batch = Batch { q_indptr, page_indptr: &page_indptr, page_ids: &page_ids, kv_len: &kv_len };

        let run = |error| of_shape(name)(error);
        let layout = KvLayout::new(*case.geometry(), problem.dtype(), page_size, page_count).map_err(of_shape(name))?;
        let config = AttentionConfig {
            q: case.q().dtype(),
            out: Dtype::F32,
            layout,
            new_rows: problem.dtype().into(),
            options: *case.options(),
            extras: Extras::NONE,
        };
        let base = Variants::base(&AdapterFacts::new(gpu.runner.adapter_info(), gpu.runner.device()), case.geometry());
        let started = Instant::now();
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
        let attention = Attention::with_kernels(kernels, &config).map_err(of_shape(name))?;
        let plan = attention.plan(&batch).map_err(of_shape(name))?;
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
        let workspace = Workspace::new(device, plan.workspace_bytes()).map_err(of_shape(name))?;
        let kv = layout.create_buffer(device).map_err(of_shape(name))?;
        let q = gpu.upload("q", case.q().bytes());
        let [k, v] = [("k", k), ("v", v)].map(|(label, tensor)| gpu.upload(label, tensor.bytes()));
        let bytes = config.buffer_bytes(plan.total_q());
        let (out, lse) = (gpu.zeros("out", bytes.out / 4), gpu.zeros("lse", bytes.lse / 4));

        // Every token is new.
        let append_plan = AppendPlan::new(&layout, &Batch { q_indptr: kv_indptr, ..batch });
        let append = append_plan.map_err(of_shape(name))?;
        let append = Append::upload(device, &append).map_err(of_shape(name))?;
        let source = AppendSource {
            k: k.as_entire_buffer_binding(),
            v: v.as_entire_buffer_binding(),
            kv: vec![kv.as_entire_buffer_binding()],
            head_scales: None,
        };
        let append = append.bind(device, attention.kernels(), source, &workspace).map_err(of_shape(name))?;
        let io = AttentionIo {
            q: q.as_entire_buffer_binding(),
            kv: vec![kv.as_entire_buffer_binding()],
            out: out.as_entire_buffer_binding(),
            lse: lse.as_entire_buffer_binding(),
            heads: None,
            bias: None,
        };
        let device_plan = DevicePlan::upload(device, &plan).map_err(of_shape(name))?;
        let call = attention.bind(device, &device_plan, io, &workspace).map_err(of_shape(name))?;

        let chains = plan.chains().to_vec();
        let paged = Self { call, out, lse, chains, kernel, compile_ms, stepped_down, choice };
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        append.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
        paged.encode(&mut encoder);
        gpu.runner.queue().submit([encoder.finish()]);
        let status: Vec<u32> = gpu.read(workspace.status())?;
        let word = |index: usize| status.get(index).copied().unwrap_or(0);
        let dispatched = append.workgroups().wrapping_add(paged.call.workgroups());
        Status::from_words([word(0), word(1)]).check(dispatched).map_err(of_shape(name))?;
        Ok(paged)
    }

    /// Records the call.
    pub fn encode(&self, encoder: &mut wgpu::CommandEncoder) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        self.call.encode(&mut pass);
    }

    /// Whether the result of the last run is right.
    ///
    /// # Errors
    /// [`BenchError::Wrong`], [`BenchError::Device`].
    pub fn accuracy(&self, gpu: &Gpu, judge: &Judge<'_>, contender: &'static str) -> Result<Accuracy, BenchError> {
        judge.accuracy(contender, &gpu.read(&self.out)?, Some(&gpu.read(&self.lse)?), &self.chains)
    }

    /// The bits of the last run's output.
    ///
    /// # Errors
    /// [`BenchError::Device`].
    pub fn bits(&self, gpu: &Gpu) -> Result<Vec<u32>, BenchError> {
        gpu.read(&self.out)
    }

    /// Microseconds to record the call, median of 1,000: each into a pass and a command buffer of its own, from the pass's
    /// beginning to the command buffer's end, since wgpu checks and translates what a pass holds only there.
    pub fn encode_us(&self, gpu: &Gpu) -> f64 {
        let microseconds = |_| {
            let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let start = Instant::now();
            self.encode(&mut encoder);
            let _commands = encoder.finish();
            1e6 * start.elapsed().as_secs_f64()
        };
        median(&(0..RECORDED_CALLS).map(microseconds).collect::<Vec<_>>())
    }
}
