//! Measures variants on the device.

use std::fmt;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use super::{Choice, ChosenBy, CompileTimes, RunError, Runner};
use crate::attention::{Attention, AttentionConfig, AttentionIo, Call, Extras, Workspace};
use crate::batch::Batch;
use crate::case::{AttentionOptions, CaseError};
use crate::geometry::{Dtype, HeadGeometry, PageSize};
use crate::kernels::{Alternatives, DECODE_ROWS_MAX, KernelConfig, Modifiers, Variants};
use crate::kv::KvLayout;
use crate::plan::DevicePlan;
use crate::selftest::noise;
use crate::status::{STATUS_BYTES, Status};
use crate::tensor::Tensor;
use crate::tuning::{Timing, TuningEntry};

/// Time that [`Runner::tune`] takes for a shape where nothing else is asked for.
pub const TUNE_BUDGET: Duration = Duration::from_secs(8);

/// A single timing repeats a short call until it lasts about so long.
const TIMING_MS: f64 = 5.0;

/// Share of the time after which no other variant is compiled: the rest is for the rounds.
const PREPARING: f64 = 0.7;

/// Rounds of timings: at least, however short the time, and at most.
const ROUNDS_MIN: usize = 7;
const ROUNDS_MAX: usize = 25;

/// A variant that takes so many times as long as the fastest in all of the first rounds is not timed again.
const HOPELESS: f64 = 2.0;
const ROUNDS_FIRST: usize = 5;

/// Query heads of the work that is timed, unless a KV head has more.
const Q_HEADS: u32 = 8;

/// What tuning one shape came to.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Tuned {
    /// The times of what ran, for a [`crate::Tuning`].
    pub entry: TuningEntry,
    /// What is chosen without a table.
    pub rule: Choice,
    /// Names of variants that have no time, and why.
    pub left_out: Vec<(String, String)>,
}

impl Runner {
    /// Measures the variants for `config` (whose own are not looked at): those that the rule prefers and that pass the
    /// self-test, and others that differ from them ([`Alternatives`]), each of which has to pass it too. Once the rule's
    /// are compiled it takes about `budget` ([`TUNE_BUDGET`] will do), or as long as two of each kernel need. Blocks.
    ///
    /// Decode kernels run over a few thousand keys per sequence, prefill kernels over a prompt, both larger on a GPU
    /// than on a CPU. The variants of a kernel are timed in turn, round after round, so that a slow spell of the machine
    /// hits them alike; what counts is the lower quartile of the rounds, and among those that are nearly as fast as the
    /// fastest the time to compile. Promising variants come first: where time is short, the others are left out, and
    /// named.
    ///
    /// # Errors
    /// As [`Runner::choose`]; [`RunError::Failed`] where the device fails.
    pub fn tune(&mut self, config: &KernelConfig, budget: Duration) -> Result<Tuned, RunError> {
        // What happens to scores, and where the pool lies, changes little in which variant is the fastest; a table is for
        // all of it.
        let config = &KernelConfig { modifiers: Modifiers::NONE, segments: NonZeroU32::MIN, ..*config };
        let rule = self.first_that_passes(config, None, ChosenBy::Rule)?;
        let Alternatives { prefill, decode } = Alternatives::new(&rule.variants, &self.facts, &config.geometry);
        let mut left_out = Vec::new();
        let geometry = heads(config)?;
        let cpu = self.facts.cpu;

        let (started, load) =
            (Instant::now(), Load::new(self, config, geometry, &decode_lengths(config, &geometry, cpu))?);
        let variants = |decode| Variants { decode, ..rule.variants };
        let time = Time { started, budget: budget / 2 };
        let decode = self.timed(&load, decode, variants, |times| times.decode_ms, time, &mut left_out)?;
        let budget = budget.saturating_sub(started.elapsed());

        let (started, load) = (Instant::now(), Load::new(self, config, geometry, &[prefill_lengths(&geometry, cpu)])?);
        let variants = |prefill| Variants { prefill, ..rule.variants };
        let time = Time { started, budget };
        let prefill = self.timed(&load, prefill, variants, |times| times.prefill_ms, time, &mut left_out)?;

        let entry = TuningEntry::measured(config.shape(), prefill, decode);
        let entry = entry.ok_or_else(|| RunError::Failed("no variant could be timed".into()))?;
        Ok(Tuned { entry, rule, left_out })
    }

    /// Times what compiles and passes the self-test; `left_out` gets the rest.
    fn timed<V: Copy + fmt::Display>(
        &mut self,
        load: &Load,
        candidates: Vec<V>,
        with: impl Fn(V) -> Variants,
        compile_ms: fn(&CompileTimes) -> f64,
        time: Time,
        left_out: &mut Vec<(String, String)>,
    ) -> Result<Vec<Timing<V>>, RunError> {
        let mut contenders = Vec::new();
        for variant in candidates {
            if contenders.len() >= 2 && time.spent() > PREPARING {
                left_out.push((variant.to_string(), "no time was left".to_owned()));
                continue;
            }
            let config = KernelConfig { variants: with(variant), ..load.kernels };
            let contender =
                self.tested(&config).and_then(|times| Contender::new(self, load, &config, variant, compile_ms(&times)));
            match contender {
                Ok(contender) => contenders.push(contender),
                Err(error) => left_out.push((variant.to_string(), error.to_string())),
            }
        }
        self.check_failure()?;
        for round in 0..ROUNDS_MAX {
            if round >= ROUNDS_MIN && time.spent() > 1.0 {
                break;
            }
            let hopeless = HOPELESS * contenders.iter().map(Contender::best_ms).fold(f64::INFINITY, f64::min);
            let mut order: Vec<_> = contenders.iter_mut().collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for contender in order {
                if round < ROUNDS_FIRST || contender.best_ms() <= hopeless {
                    contender.time(self)?;
                }
            }
        }
        let mut timings = Vec::new();
        for contender in contenders {
            let Contender { variant, compile_ms, .. } = contender;
            match contender.check(self) {
                Ok(()) => timings.push(Timing { variant, run_ms: contender.lower_quartile_ms(), compile_ms }),
                Err(error) => left_out.push((variant.to_string(), error.to_string())),
            }
        }
        Ok(timings)
    }
}

/// A stretch of time that is to be kept to.
#[derive(Clone, Copy)]
struct Time {
    started: Instant,
    budget: Duration,
}

impl Time {
    /// The share that is gone; more than 1 where it is over.
    fn spent(&self) -> f64 {
        self.started.elapsed().as_secs_f64() / self.budget.as_secs_f64()
    }
}

/// Work that is like what a kernel is for, on the device.
struct Load {
    kernels: KernelConfig,
    config: AttentionConfig,
    lengths: Vec<(u32, u32)>,
    q: wgpu::Buffer,
    kv: wgpu::Buffer,
    scales: Option<wgpu::Buffer>,
    out: wgpu::Buffer,
    lse: wgpu::Buffer,
}

/// As many heads as a model has, of the group that is tuned.
fn heads(config: &KernelConfig) -> Result<HeadGeometry, RunError> {
    let geometry = &config.geometry;
    let (group, head_dim, v_head_dim) = (geometry.group(), geometry.head_dim(), geometry.v_head_dim());
    let kv_heads = (Q_HEADS / group).max(1);
    let heads = match geometry.is_latent() {
        true => HeadGeometry::latent(group * kv_heads, head_dim, v_head_dim),
        false => HeadGeometry::with_v_head_dim(group * kv_heads, kv_heads, head_dim, v_head_dim),
    };
    Ok(heads.map_err(CaseError::from)?)
}

/// A prompt, at the end of a longer one where many heads share its keys.
fn prefill_lengths(geometry: &HeadGeometry, cpu: bool) -> (u32, u32) {
    let rows = if cpu { 512 } else { 2048 };
    let prompt = (rows * Q_HEADS / geometry.q_heads()).max(DECODE_ROWS_MAX / geometry.group() + 1).max(2);
    (prompt, prompt.max(rows))
}

/// Single tokens of sequences whose keys and values are too many for a cache: 16 MiB on a CPU, else 64 MiB, but short
/// rows take their time as well.
fn decode_lengths(config: &KernelConfig, geometry: &HeadGeometry, cpu: bool) -> Vec<(u32, u32)> {
    let (bytes_max, rows_max) = if cpu { (1 << 24, 1 << 16) } else { (1 << 26, 1 << 20) };
    let vectors = config.kv.k.row_vectors(geometry.head_dim()) + config.kv.v.row_vectors(geometry.v_head_dim());
    let tokens = (bytes_max / (16 * vectors)).min(rows_max) / geometry.kv_heads();
    let kv_len = tokens.clamp(1, 4096);
    vec![(1, kv_len); (tokens / kv_len).clamp(1, 64) as usize]
}

impl Load {
    fn new(
        runner: &Runner,
        config: &KernelConfig,
        geometry: HeadGeometry,
        lengths: &[(u32, u32)],
    ) -> Result<Self, RunError> {
        let page_size = PageSize::new(16).map_err(CaseError::from)?;
        let pages = lengths.iter().map(|(_, kv_len)| page_size.pages_for(*kv_len)).sum();
        let layout = KvLayout::new(geometry, config.kv, page_size, pages)?;
        let options = AttentionOptions::new(&geometry).with_causal(true);
        let attention = AttentionConfig {
            q: config.q,
            out: config.out,
            layout,
            new_rows: config.new_rows,
            options,
            extras: Extras::NONE,
        };
        let bytes = attention.buffer_bytes(lengths.iter().map(|(q_len, _)| q_len).sum());
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
        let kv = layout.create_buffer(&runner.device)?;
        let q = runner.buffer("q", bytes.q, usage)?;
        fill(&runner.queue, &q, config.q)?;
        // As f32 they are good scales, and any bytes are stored elements.
        fill(&runner.queue, &kv, config.kv.float().unwrap_or(Dtype::F32))?;
        let scales = if layout.dtypes().has_head_scales() {
            let bytes = 8 * u64::from(geometry.kv_heads());
            let scales = runner.buffer("head scales", bytes, usage)?;
            runner.queue.write_buffer(&scales, 0, &1.0_f32.to_le_bytes().repeat(bytes as usize / 4));
            Some(scales)
        } else {
            None
        };
        Ok(Self {
            kernels: *config,
            config: attention,
            lengths: lengths.to_vec(),
            q,
            kv,
            scales,
            out: runner.buffer("out", bytes.out, usage)?,
            lse: runner.buffer("lse", bytes.lse, usage)?,
        })
    }

    /// Puts the pages of all sequences in order.
    fn with_batch<T>(&self, work: impl FnOnce(&Batch<'_>) -> T) -> T {
        let page_size = self.config.layout.page_size();
        let (mut rows, mut pages) = (0, 0);
        let [mut q_indptr, mut page_indptr, mut kv_len] = [vec![0], vec![0], Vec::new()];
        for (q_len, kv) in &self.lengths {
            rows += q_len;
            pages += page_size.pages_for(*kv);
            q_indptr.push(rows);
            page_indptr.push(pages);
            kv_len.push(*kv);
        }
        let page_ids: Vec<u32> = (0..pages).collect();
        work(&Batch { q_indptr: &q_indptr, page_indptr: &page_indptr, page_ids: &page_ids, kv_len: &kv_len })
    }
}

/// Numbers between -2 and 2, the same ones again and again: what they are does not matter, but zeros take less power.
fn fill(queue: &wgpu::Queue, buffer: &wgpu::Buffer, dtype: Dtype) -> Result<(), RunError> {
    let values: Vec<f32> = (0..1 << 16).map(noise).collect();
    let block = Tensor::from_f32(dtype, &[values.len()], &values).map_err(crate::selftest::SelfTestError::from)?;
    let mut offset = 0;
    while offset < buffer.size() {
        let bytes = block.bytes();
        let rest = (buffer.size() - offset).min(bytes.len() as u64);
        queue.write_buffer(buffer, offset, bytes.get(..rest as usize).unwrap_or(bytes));
        offset += rest;
    }
    Ok(())
}

/// A variant in the rounds.
struct Contender<V> {
    variant: V,
    compile_ms: f64,
    call: Call,
    workspace: Workspace,
    /// Calls per timing.
    repeats: u32,
    /// Calls so far.
    calls: u32,
    /// Of one call, per round.
    times_ms: Vec<f64>,
}

impl<V> Contender<V> {
    /// Runs it twice, so that nothing is compiled or placed in memory later on.
    fn new(
        runner: &mut Runner,
        load: &Load,
        config: &KernelConfig,
        variant: V,
        compile_ms: f64,
    ) -> Result<Self, RunError> {
        let attention = Attention::with_kernels(runner.kernels(config)?, &load.config)?;
        let plan = load.with_batch(|batch| attention.plan(batch))?;
        let device = &runner.device;
        let workspace = Workspace::new(device, plan.workspace_bytes())?;
        let [q, kv, out, lse] = [&load.q, &load.kv, &load.out, &load.lse].map(wgpu::Buffer::as_entire_buffer_binding);
        let plan = DevicePlan::upload(device, &plan)?;
        let heads = load.scales.as_ref().map(wgpu::Buffer::as_entire_buffer_binding);
        let call =
            attention.bind(device, &plan, AttentionIo { q, kv: vec![kv], out, lse, heads, bias: None }, &workspace)?;
        let (repeats, calls, times_ms) = (1, 0, Vec::new());
        let mut contender = Self { variant, compile_ms, call, workspace, repeats, calls, times_ms };
        contender.time(runner)?;
        contender.time(runner)?;
        let once = contender.times_ms.pop().unwrap_or(TIMING_MS);
        contender.repeats = ((TIMING_MS / once) as u32).clamp(1, 1000);
        contender.times_ms.clear();
        Ok(contender)
    }

    /// One timing: recording, submission and execution.
    fn time(&mut self, runner: &Runner) -> Result<(), RunError> {
        let started = Instant::now();
        runner.scoped(|| runner.finish(|pass| (0..self.repeats).for_each(|_| self.call.encode(pass))))?;
        self.times_ms.push(started.elapsed().as_secs_f64() * 1e3 / f64::from(self.repeats));
        self.calls += self.repeats;
        Ok(())
    }

    /// Whether all calls came to their end: what does nothing is fast.
    fn check(&self, runner: &Runner) -> Result<(), RunError> {
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let readback = runner.buffer("readback", STATUS_BYTES, usage)?;
        let mut encoder = runner.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(self.workspace.status(), 0, &readback, 0, STATUS_BYTES);
        runner.queue.submit([encoder.finish()]);
        let status = Status::from_bytes(&runner.read(&readback)?);
        Ok(status.check(self.call.workgroups().wrapping_mul(self.calls))?)
    }

    fn best_ms(&self) -> f64 {
        self.times_ms.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn lower_quartile_ms(&self) -> f64 {
        let mut sorted = self.times_ms.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 4).copied().unwrap_or(f64::INFINITY)
    }
}
