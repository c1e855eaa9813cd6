//! The convenience layer: host tensors in, host tensors out. It submits and waits, and says so.

mod choice;
mod error;
mod host;
mod options;
mod pace;
mod pipelines;
mod timestamps;
mod tune;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use self::choice::{Choice, ChosenBy, Preference};
pub use self::error::RunError;
use self::host::{NewTokens, PADDING, PageTable, head_scales, padded, paged_bytes, stored_rows, unpadded};
pub use self::options::RunOptions;
pub use self::pace::SUBMIT_TIME;
use self::pace::{Pace, Portion};
pub use self::pipelines::CompileTimes;
use self::pipelines::Pipelines;
use self::timestamps::{Queries, elapsed_ms};
pub use self::tune::{TUNE_BUDGET, Tuned};
use crate::attention::{Attention, AttentionConfig, AttentionIo, BindError, Extras, Workspace};
use crate::buffers::{self};
use crate::case::{Case, CaseError, CaseExtras, KvSource};
use crate::chains::Chains;
use crate::geometry::{Dtype, padded_dim};
use crate::kernels::{AdapterFacts, DECODE_ROWS_MAX, KernelId, KernelShape, Modifiers, SPLIT_KEYS, Variants};
use crate::kv::{
    Append, AppendCall, AppendPlan, AppendSource, KvDtypes, LayoutError, NewRows, PoolView, Rotary, Rotation,
};
use crate::plan::DevicePlan;
use crate::status::{STATUS_BYTES, Status};

/// Slopes and sinks of a case, as the kernels want them; zeros for what it has not.
fn head_words(case: &Case) -> Vec<u8> {
    let CaseExtras { alibi_slopes, sinks, .. } = case.extras();
    let of_head = |values: &Option<Vec<f32>>, head: usize| {
        values.as_ref().and_then(|values| values.get(head)).copied().unwrap_or(0.0)
    };
    let heads = 0..case.geometry().q_heads() as usize;
    heads.flat_map(|head| [of_head(alibi_slopes, head), of_head(sinks, head)]).flat_map(f32::to_le_bytes).collect()
}

/// One kernel that a run dispatched, and why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelUse {
    /// The kernel's name and variant, such as `prefill-broadcast32-r2k4`.
    pub kernel: String,
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
    /// What the pages hold, where that is not the case's keys and values bit for bit.
    pub stored: Option<StoredKv>,
    /// The type in which the kernel stored `out`.
    pub out_dtype: Dtype,
    /// One entry per sequence, for the error bound.
    pub chains: Vec<Chains>,
    /// The kernels that ran.
    pub kernels: Vec<KernelUse>,
    /// How their variants were chosen; `None` where the options named them, or nothing was to be computed.
    pub choice: Option<Choice>,
    /// Time on the GPU, where the adapter has timestamps: from the first attention kernel to the end of the last.
    pub gpu_ms: Option<f64>,
    /// Time from the submission to the last byte read back; uploads and pipelines are not included.
    pub wall_ms: f64,
    /// Bytes of split-KV partial states.
    pub workspace_bytes: u64,
    /// In how many submits the attention was.
    pub submits: u32,
}

/// Keys and values as pages hold them: rotated, rounded, quantised.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredKv {
    /// Their types in the pages.
    pub dtypes: KvDtypes,
    /// Scales of keys and values, `[kv_heads]`, where either is fp8; empty otherwise.
    pub head_scales: Vec<[f32; 2]>,
    /// How keys were rotated before.
    pub rotary: Option<Rotary>,
    /// Keys and values in f32, each times its scale, in the place of the case's own.
    pub kv: KvSource,
}

impl StoredKv {
    /// The case that the kernels saw: `case` with the keys and values that its pages hold.
    ///
    /// # Errors
    /// [`CaseError`] if these lie outside the supported ranges, which they can where the case is at their edge.
    pub fn case(&self, case: &Case) -> Result<Case, CaseError> {
        case.clone().with_kv(self.kv.clone())
    }
}

/// Owns a device and the pipelines made on it, and runs cases.
///
/// ```no_run
/// use paged_attention::{
///     AttentionOptions, Case, Computed, Dtype, HeadGeometry, KvSource, Output, PageSize, RunOptions, Runner, Tensor, adapter, verify,
/// };
///
/// // A prompt of 5 tokens: 4 query heads over 2 KV heads of dimension 64.
/// let heads = HeadGeometry::new(4, 2, 64)?;
/// let rows = |heads: usize| {
///     let values: Vec<f32> = (0..5 * heads * 64).map(|i| (i as f32).sin()).collect();
///     Tensor::from_f32(Dtype::F32, &[5, heads, 64], &values)
/// };
/// let kv = KvSource::Contiguous { k: rows(2)?, v: rows(2)?, kv_indptr: vec![0, 5] };
/// let options = AttentionOptions::new(&heads).with_causal(true);
/// let case = Case::new(heads, options, rows(4)?, vec![0, 5], kv)?;
///
/// let mut runner = Runner::new(&pollster::block_on(adapter::discover(None))?)?;
/// let output = runner.run(&case, &RunOptions::new(PageSize::new(16)?))?;
/// assert_eq!(output.out.len(), 5 * 4 * 64);
/// // Whoever wants to know: the same in float64, and whether the result lies inside the bound.
/// let Output { out, lse, out_dtype, chains, .. } = &output;
/// assert!(verify(&case, &Computed { out, lse, out_dtype: *out_dtype, chains })?.passed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Runner {
    info: wgpu::AdapterInfo,
    device: wgpu::Device,
    queue: wgpu::Queue,
    facts: AdapterFacts,
    pipelines: Pipelines,
    preference: Preference,
    choices: HashMap<(KernelShape, NewRows, Modifiers, NonZeroU32), Choice>,
    pace: Pace,
    /// The first error that no scope caught, or that the device was lost.
    failure: Arc<Mutex<Option<RunError>>>,
}

impl Runner {
    /// Opens a device on `adapter` with the limits the kernels can use: its largest bindings, and as many as it has. Blocks.
    ///
    /// # Errors
    /// [`RunError::Device`].
    pub fn new(adapter: &wgpu::Adapter) -> Result<Self, RunError> {
        let adapter_limits = adapter.limits();
        let limits = wgpu::Limits {
            max_storage_buffer_binding_size: adapter_limits.max_storage_buffer_binding_size,
            max_buffer_size: adapter_limits.max_buffer_size,
            max_storage_buffers_per_shader_stage: adapter_limits.max_storage_buffers_per_shader_stage,
            ..wgpu::Limits::default().or_worse_values_from(&adapter_limits)
        };
        Self::with_limits(adapter, limits)
    }

    /// Opens a device with limits of the caller's choice. Blocks.
    ///
    /// # Errors
    /// [`RunError::Device`].
    pub fn with_limits(adapter: &wgpu::Adapter, required_limits: wgpu::Limits) -> Result<Self, RunError> {
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("paged-attention"),
            required_features: adapter.features() & (wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::SUBGROUP),
            required_limits,
            ..wgpu::DeviceDescriptor::default()
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor))
            .map_err(|error| RunError::Device(error.to_string()))?;
        let failure = Arc::new(Mutex::new(None));
        let noted = failure.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            lock(&noted).get_or_insert(RunError::Failed(error.to_string()));
        }));
        let noted = failure.clone();
        device.set_device_lost_callback(move |reason, message| {
            // Whatever was wrong before, this is final.
            *lock(&noted) = Some(RunError::Lost(format!("{reason:?}: {message}")));
        });
        let info = adapter.get_info();
        let facts = AdapterFacts::new(&info, &device);
        let (pipelines, preference, choices) = (Pipelines::default(), Preference::default(), HashMap::new());
        let pace = Pace::default();
        Ok(Self { info, device, queue, facts, pipelines, preference, choices, pace, failure })
    }

    /// Makes no submit take longer than about `time`, instead of [`SUBMIT_TIME`]: a call with more work is spread over
    /// several submits, each of which is waited for. How much work that is, is measured from one submit to the next,
    /// beginning with little. It changes no bit.
    pub fn bound_submits(&mut self, time: Duration) {
        self.pace = self.pace.clone().with_submit(time);
    }

    /// The adapter that the device was opened on.
    pub fn adapter_info(&self) -> &wgpu::AdapterInfo {
        &self.info
    }

    /// The device, for a caller who wants to record on it.
    pub fn device(&self) -> &wgpu::Device {
        &self.device
    }

    /// The device's queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.queue
    }

    /// Runs one case: writes its keys and values into pages (contiguous input through the append kernel),
    /// attends, and reads the result back. Submits and blocks.
    ///
    /// # Errors
    /// [`RunError`].
    pub fn run(&mut self, case: &Case, options: &RunOptions) -> Result<Output, RunError> {
        let (table, layout) = options.lay_out(case)?;
        let layout = match options.segment_pages {
            Some(_) => layout,
            None => layout.within(&self.device.limits())?,
        };
        let geometry = *case.geometry();
        let config = AttentionConfig {
            q: case.q().dtype(),
            out: options.out_dtype,
            layout,
            new_rows: options.new_rows(case),
            options: *case.options(),
            extras: options.extras(case),
        };
        let base = Variants::base(&self.facts, &geometry);
        let choice = match options.variants {
            Some(_) => None,
            // Nothing is computed, so there is nothing to choose by.
            None if case.q_indptr().last().is_none_or(|rows| *rows == 0) => None,
            None => Some(self.choose(&config.kernels(base))?),
        };
        let variants = options.variants.or(choice.as_ref().map(|choice| choice.variants)).unwrap_or(base);
        let kernels = self.kernels(&config.kernels(variants))?;
        let attention = Attention::with_kernels(kernels, &config)?;
        let attention = attention.with_workspace_max(options.workspace_max.unwrap_or(u64::MAX));
        let batch = table.batch(case);
        let mask = case.extras().mask.as_deref();
        let mut plan = match (options.shared_prefixes.as_slice(), mask) {
            ([], None) => attention.plan(&batch)?,
            ([], Some(mask)) => attention.plan_masked(&batch, mask)?,
            (prefixes, mask) => attention.plan_shared(&batch, prefixes, mask)?,
        };

        match options.submit_work_max {
            Some(work_max) => plan.cut(|_| work_max),
            None => self.pace.cut(&mut plan),
        }

        let mut pace = self.pace.clone();
        let submitted = self.scoped(|| self.submit(case, &table, &attention, &plan, options, &mut pace))?;
        let Submitted { readback, pages, scales, timestamps, ends, append_groups, workgroups, submits, started } =
            submitted;
        let bytes = self.read(&readback)?;
        let wall_ms = started.elapsed().as_secs_f64() * 1e3;
        let gpu_ms = match timestamps {
            Some(buffer) => elapsed_ms(&self.read(&buffer)?, self.queue.get_timestamp_period()),
            None => None,
        };
        self.check_failure()?;
        let part = |from: u64, to: u64| bytes.get(from as usize..to as usize).unwrap_or_default();
        let [out_end, lse_end, status_end] = ends;
        Status::from_bytes(part(lse_end, status_end)).check(workgroups)?;
        self.pace = pace;
        let stored = match pages {
            Some(pages) => {
                let bytes = self.read(&pages)?;
                let head_scales = scales.unwrap_or_default();
                let kv = stored_rows(case, &table, &PoolView::new(&layout, &bytes, &head_scales))?;
                Some(StoredKv { dtypes: layout.dtypes(), head_scales, rotary: options.rotary.clone(), kv })
            }
            None => None,
        };
        Ok(Output {
            stored,
            out: unpadded(
                part(0, out_end),
                options.out_dtype,
                geometry.v_head_dim(),
                padded_dim(geometry.v_head_dim()),
            ),
            lse: unpadded(part(out_end, lse_end), Dtype::F32, 1, 1),
            out_dtype: options.out_dtype,
            chains: plan.chains().to_vec(),
            kernels: std::iter::once((KernelId::Append, append_groups))
                .chain(plan.workgroups())
                .filter_map(|(kernel, workgroups)| kernel_use(&variants, kernel, workgroups))
                .collect(),
            choice,
            gpu_ms,
            wall_ms,
            workspace_bytes: plan.workspace_bytes(),
            submits,
        })
    }

    /// Whether the device was lost, or has had an error that no scope caught: from then on there are no results.
    fn check_failure(&self) -> Result<(), RunError> {
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    /// What is said of a call that failed with `error`: where the device is lost, all else follows from that; and missing
    /// memory is the same error whatever the buffer.
    fn explained(&self, error: RunError) -> RunError {
        // A loss is told when the device is asked.
        let _ = self.device.poll(wgpu::PollType::Poll);
        match &*lock(&self.failure) {
            Some(lost @ RunError::Lost(_)) => lost.clone(),
            _ => match error {
                RunError::Layout(LayoutError::OutOfMemory(missing))
                | RunError::Bind(BindError::OutOfMemory(missing)) => missing.into(),
                error => error,
            },
        }
    }

    /// Does `work` with error scopes of its own: what the device finds wrong with it is this call's error, and no
    /// later one's.
    fn scoped<T>(&self, work: impl FnOnce() -> Result<T, RunError>) -> Result<T, RunError> {
        use wgpu::ErrorFilter::{Internal, OutOfMemory, Validation};
        // Scopes are of this thread, and nothing is awaited inside them.
        let [a, b, c] = [OutOfMemory, Validation, Internal].map(|filter| self.device.push_error_scope(filter));
        let result = work();
        let (c, b, a) = (c.pop(), b.pop(), a.pop());
        match pollster::block_on(a).or(pollster::block_on(b)).or(pollster::block_on(c)) {
            Some(error) => Err(self.explained(RunError::Failed(error.to_string()))),
            None => result.map_err(|error| self.explained(error)),
        }
    }

    fn submit(
        &self,
        case: &Case,
        table: &PageTable,
        attention: &Attention,
        plan: &crate::plan::Plan,
        options: &RunOptions,
        pace: &mut Pace,
    ) -> Result<Submitted, RunError> {
        let rotary = options.rotary.as_ref();
        let (device, config) = (&self.device, attention.config());
        let (layout, geometry) = (&config.layout, config.layout.geometry());
        let workspace = Workspace::new(device, plan.workspace_bytes())?;
        // Without rows there is nothing to read back.
        let bytes = config.buffer_bytes(plan.total_q());
        let (out_bytes, lse_bytes) = if plan.total_q() > 0 { (bytes.out, bytes.lse) } else { (0, 0) };
        let output = |label, bytes: u64| -> Result<wgpu::Buffer, RunError> {
            self.buffer(label, bytes, wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC)
        };
        let q = self.upload("q", &padded(case.q(), geometry.head_dim()))?;
        let out = output("out", out_bytes)?;
        let lse = output("lse", lse_bytes)?;
        let kv = layout.create_segments(device)?;
        let bound = || kv.iter().map(wgpu::Buffer::as_entire_buffer_binding).collect();
        let converts = !config.new_rows.copied(layout.dtypes());
        let scales = if layout.dtypes().has_head_scales() { Some(head_scales(case, layout, rotary)) } else { None };
        let append = match case.kv() {
            KvSource::Paged { k_pages, v_pages, .. } if !converts => {
                let pool = paged_bytes(layout, k_pages, v_pages);
                let mut rest = pool.as_slice();
                for (buffer, bytes) in kv.iter().zip(layout.segment_bytes()) {
                    let (segment, after) = rest.split_at_checked(bytes as usize).unwrap_or((rest, &[]));
                    self.queue.write_buffer(buffer, 0, segment);
                    rest = after;
                }
                None
            }
            _ => {
                let new = NewTokens::new(case, table);
                let rotation = rotary.map(|rotary| Rotation { rotary, positions: None });
                let append = AppendPlan::converting(layout, &new.batch(), config.new_rows.dtype, rotation)?;
                let append = Append::upload(device, &append)?;
                let [k, v] = [self.upload("k", &new.k)?, self.upload("v", &new.v)?];
                if converts {
                    for (buffer, bytes) in kv.iter().zip(layout.segment_bytes()) {
                        self.queue.write_buffer(buffer, 0, &vec![PADDING; bytes as usize]);
                    }
                }
                let scales = match &scales {
                    Some(scales) => Some(self.upload("head scales", bytemuck::cast_slice(scales))?),
                    None => None,
                };
                let source = AppendSource {
                    k: k.as_entire_buffer_binding(),
                    v: v.as_entire_buffer_binding(),
                    kv: bound(),
                    head_scales: scales.as_ref().map(wgpu::Buffer::as_entire_buffer_binding),
                };
                Some(append.bind(device, attention.kernels(), source, &workspace)?)
            }
        };
        let append_groups = append.as_ref().map_or(0, AppendCall::workgroups);
        let Extras { alibi_slopes, sinks, bias, .. } = config.extras;
        let mut heads = if alibi_slopes || sinks { head_words(case) } else { Vec::new() };
        heads.extend_from_slice(bytemuck::cast_slice(scales.as_deref().unwrap_or_default()));
        let heads = if heads.is_empty() { None } else { Some(self.upload("heads", &heads)?) };
        let bias = match (&case.extras().bias, bias) {
            (Some(tensor), Some(_)) => {
                let mut bytes = tensor.bytes().to_vec();
                bytes.resize(bytes.len().next_multiple_of(4), 0);
                Some(self.upload("bias", &bytes)?)
            }
            _ => None,
        };
        let io = AttentionIo {
            q: q.as_entire_buffer_binding(),
            kv: bound(),
            out: out.as_entire_buffer_binding(),
            lse: lse.as_entire_buffer_binding(),
            heads: heads.as_ref().map(wgpu::Buffer::as_entire_buffer_binding),
            bias: bias.as_ref().map(wgpu::Buffer::as_entire_buffer_binding),
        };
        let call = attention.bind(device, &DevicePlan::upload(device, plan)?, io, &workspace)?;
        let workgroups = append_groups.wrapping_add(call.workgroups());

        let ends = [out_bytes, out_bytes + lse_bytes, out_bytes + lse_bytes + STATUS_BYTES];
        let readback = self.buffer("readback", ends[2], wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST)?;
        let queries = Queries::new(device);
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        if let Some(append) = &append {
            append.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
        }
        let works: Vec<_> = plan.slices().iter().map(|slice| (slice.kernel, plan.work(slice))).collect();
        let started = Instant::now();
        let (mut begin, mut submits) = (0, 0);
        loop {
            let portion = match options.submit_work_max {
                Some(_) => Portion::one(begin),
                None => pace.portion(&works, begin),
            };
            let is_last = portion.end >= works.len();
            let descriptor = wgpu::ComputePassDescriptor {
                label: Some("attention"),
                timestamp_writes: queries.as_ref().and_then(|queries| queries.writes(begin == 0, is_last)),
            };
            call.encode_slices(&mut encoder.begin_compute_pass(&descriptor), begin..portion.end);
            submits += 1;
            if is_last {
                break;
            }
            let next = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let submitted = Instant::now();
            self.queue.submit([std::mem::replace(&mut encoder, next).finish()]);
            self.wait()?;
            pace.note(&portion, submitted.elapsed());
            begin = portion.end;
        }
        for (source, bytes, offset) in
            [(&out, out_bytes, 0), (&lse, lse_bytes, ends[0]), (workspace.status(), STATUS_BYTES, ends[1])]
        {
            if bytes > 0 {
                encoder.copy_buffer_to_buffer(source, 0, &readback, offset, bytes);
            }
        }
        let pages = if converts {
            let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
            let pages = self.buffer("pages read back", layout.bytes(), usage)?;
            let mut offset = 0;
            for (buffer, bytes) in kv.iter().zip(layout.segment_bytes()) {
                encoder.copy_buffer_to_buffer(buffer, 0, &pages, offset, bytes);
                offset += bytes;
            }
            Some(pages)
        } else {
            None
        };
        let timestamps = queries.map(|queries| queries.resolve(&mut encoder));
        self.queue.submit([encoder.finish()]);
        Ok(Submitted { readback, pages, scales, timestamps, ends, append_groups, workgroups, submits, started })
    }

    fn buffer(&self, label: &'static str, bytes: u64, usage: wgpu::BufferUsages) -> Result<wgpu::Buffer, RunError> {
        let limits = self.device.limits();
        let found = if usage.contains(wgpu::BufferUsages::STORAGE) {
            buffers::binding_bytes(&limits)
        } else {
            limits.max_buffer_size
        };
        if bytes > found {
            return Err(RunError::TooLarge { buffer: label, found, needed: bytes });
        }
        let descriptor =
            wgpu::BufferDescriptor { label: Some(label), size: bytes.max(16), usage, mapped_at_creation: false };
        Ok(buffers::create(&self.device, &descriptor)?)
    }

    fn upload(&self, label: &'static str, bytes: &[u8]) -> Result<wgpu::Buffer, RunError> {
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
        let buffer = self.buffer(label, bytes.len() as u64, usage)?;
        self.queue.write_buffer(&buffer, 0, bytes);
        Ok(buffer)
    }

    /// Waits for all that was submitted.
    fn wait(&self) -> Result<(), RunError> {
        let waited = self.device.poll(wgpu::PollType::wait_indefinitely());
        waited.map(|_| ()).map_err(|error| self.explained(RunError::Failed(error.to_string())))
    }

    /// Waits for the device and copies a mappable buffer.
    fn read(&self, buffer: &wgpu::Buffer) -> Result<Vec<u8>, RunError> {
        let (sender, receiver) = std::sync::mpsc::channel();
        buffer.map_async(wgpu::MapMode::Read, .., move |result| {
            // The receiver waits below; it is gone only if the wait failed.
            let _ = sender.send(result);
        });
        self.wait()?;
        match receiver.try_recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(self.explained(RunError::Failed(error.to_string()))),
            Err(_) => return Err(self.explained(RunError::Failed("the device did not answer a read-back".into()))),
        }
        let mapped = buffer.slice(..).get_mapped_range();
        let mapped = mapped.map_err(|error| self.explained(RunError::Failed(error.to_string())))?;
        Ok(mapped.to_vec())
    }
}

/// What a failure leaves behind is whole: it is written at once.
fn lock(failure: &Mutex<Option<RunError>>) -> MutexGuard<'_, Option<RunError>> {
    failure.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Submitted {
    readback: wgpu::Buffer,
    /// The pages, where they hold other rows than the case's.
    pages: Option<wgpu::Buffer>,
    /// Scales of the KV heads.
    scales: Option<Vec<[f32; 2]>>,
    timestamps: Option<wgpu::Buffer>,
    /// Where output, log-sum-exp and status end in `readback`.
    ends: [u64; 3],
    append_groups: u32,
    /// Of all kernels together.
    workgroups: u32,
    /// Of attention.
    submits: u32,
    started: Instant,
}

fn kernel_use(variants: &Variants, kernel: KernelId, workgroups: u32) -> Option<KernelUse> {
    let (kernel, reason) = match kernel {
        KernelId::Prefill => (
            variants.prefill.to_string(),
            format!("sequences with more than one query row and more than {DECODE_ROWS_MAX} tile rows"),
        ),
        KernelId::Decode => (
            variants.decode.to_string(),
            format!("sequences with one query row or at most {DECODE_ROWS_MAX} tile rows"),
        ),
        KernelId::Merge => (
            "merge".into(),
            format!("sequences whose keys were split (decodes: every {SPLIT_KEYS}), or that share prefixes"),
        ),
        KernelId::Append => ("append".into(), "new keys and values".into()),
    };
    (workgroups > 0).then_some(KernelUse { kernel, reason, workgroups })
}
