//! The adapter, and what every test does with a case.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use paged_attention::kernels::{AdapterFacts, KernelConfig, KernelId, Tiles, Variants};
use paged_attention::{
    Case, Computed, Dtype, HeadGeometry, Output, PageSize, Report, RunError, RunOptions, Runner, adapter, verify,
    verify_storage, wgpu,
};
use paged_attention_cases::{
    Alibi, Bias, BiasValues, CaseSpec, Heads, KvInput, Mask, Modifiers, Sinks, append_page_ids, build, write_case,
};

/// A bias of each head, of which a part hides its keys.
pub const HIDING_BIAS: Bias = Bias { per_head: true, dtype: Dtype::F16, values: BiasValues::Hiding(20) };

/// All that changes scores or hides keys, together.
pub const EVERY_MODIFIER: Modifiers = Modifiers {
    window_left: Some(330),
    window_right: None,
    softcap: Some(4.0),
    alibi: Some(Alibi::Customary),
    sinks: Some(Sinks::Within(10.0)),
    mask: Some(Mask::Random(70)),
    bias: Some(HIDING_BIAS),
};

/// One device for all tests of the process.
pub struct Gpu {
    runner: Mutex<Runner>,
    adapter: wgpu::Adapter,
}

/// The device, or `None` where GPU tests are to be left out.
///
/// # Panics
/// Where there is no adapter.
pub fn gpu() -> Option<&'static Gpu> {
    static GPU: OnceLock<Result<Option<Gpu>, String>> = OnceLock::new();
    match GPU.get_or_init(open) {
        Ok(gpu) => gpu.as_ref(),
        Err(why) => panic!("{why}"),
    }
}

fn open() -> Result<Option<Gpu>, String> {
    if std::env::var("PAGED_ATTENTION_SKIP_GPU").is_ok_and(|value| value == "1") {
        say("PAGED_ATTENTION_SKIP_GPU=1: tests that need an adapter are left out");
        return Ok(None);
    }
    let wanted = std::env::var("PAGED_ATTENTION_ADAPTER").ok();
    let adapter = pollster::block_on(adapter::discover(wanted.as_deref())).map_err(|error| {
        format!("{error}\nTo leave out the tests that need an adapter, set PAGED_ATTENTION_SKIP_GPU=1.")
    })?;
    say(&format!("adapter: {}", adapter::describe(&adapter.get_info())));
    let runner = Runner::new(&adapter).map_err(|error| error.to_string())?;
    Ok(Some(Gpu { runner: Mutex::new(runner), adapter }))
}

/// A line for whoever watches, past the capture of the test harness.
pub fn say(line: &str) {
    // Nobody may be watching.
    let _ = writeln!(std::io::stderr(), "{line}");
}

impl Gpu {
    /// Runs a case. Other tests wait only as long as the device is busy.
    pub fn run(&self, case: &Case, options: &RunOptions) -> Result<Output, RunError> {
        let variants = match options.variants {
            Some(variants) => variants,
            None => self.variants(|base| options.kernels(case, base), case.geometry())?,
        };
        // A test that failed while it held the lock left no half-made state: a run either returns or has no effect.
        let mut runner = self.runner.lock().unwrap_or_else(PoisonError::into_inner);
        runner.run(case, &RunOptions { variants: Some(variants), ..options.clone() })
    }

    /// The variants that all tests use: the runner's choice, or what `PAGED_ATTENTION_VARIANTS` says: `base` for those
    /// without subgroups, `gpu` for those that a GPU with the adapter's subgroups would get.
    pub fn variants(
        &self,
        config: impl Fn(Variants) -> KernelConfig,
        geometry: &HeadGeometry,
    ) -> Result<Variants, RunError> {
        let mut runner = self.runner.lock().unwrap_or_else(PoisonError::into_inner);
        let facts = AdapterFacts::new(runner.adapter_info(), runner.device());
        let base = Variants::base(&facts, geometry);
        match std::env::var("PAGED_ATTENTION_VARIANTS").as_deref() {
            Ok("base") => Ok(base),
            Ok("gpu") => Ok(Variants::candidates(&AdapterFacts { cpu: false, ..facts }, geometry)[0]),
            Ok(other) => panic!("PAGED_ATTENTION_VARIANTS is {other:?}; base or gpu is needed"),
            Err(_) => {
                let choice = runner.choose(&config(base))?;
                assert_eq!(choice.stepped_down, [], "a variant failed its self-test");
                Ok(choice.variants)
            }
        }
    }

    /// What the adapter says of itself.
    pub fn facts(&self) -> AdapterFacts {
        let runner = self.runner.lock().unwrap_or_else(PoisonError::into_inner);
        AdapterFacts::new(runner.adapter_info(), runner.device())
    }

    /// The variants without subgroups, and with the adapter's subgroups those for a CPU and those for a GPU, whichever
    /// the adapter is; or the one choice that `PAGED_ATTENTION_VARIANTS` asks for.
    pub fn every_variant(&self, geometry: &HeadGeometry) -> Vec<Variants> {
        let facts = self.facts();
        let first = |cpu| Variants::candidates(&AdapterFacts { cpu, ..facts }, geometry)[0];
        match std::env::var("PAGED_ATTENTION_VARIANTS").as_deref() {
            Ok("base") => vec![Variants::base(&facts, geometry)],
            Ok("gpu") => vec![first(false)],
            _ => {
                let mut all = vec![Variants::base(&facts, geometry)];
                for variants in [first(true), first(false)] {
                    if !all.contains(&variants) {
                        all.push(variants);
                    }
                }
                all
            }
        }
    }

    /// Runs a description with the page size, pages and output type that it asks for.
    pub fn run_spec(&self, spec: &CaseSpec) -> Result<(Case, Output), String> {
        let case = build(spec).map_err(|error| error.to_string())?;
        let output = self.run(&case, &run_options(spec)).map_err(|error| error.to_string())?;
        Ok((case, output))
    }

    /// The adapter, for a test that opens a device of its own.
    pub fn adapter(&self) -> &wgpu::Adapter {
        &self.adapter
    }

    /// A second runner on the same adapter.
    pub fn fresh_runner(&self) -> Runner {
        Runner::new(&self.adapter).unwrap()
    }

    /// A runner on a device with other limits.
    pub fn limited_runner(&self, limits: wgpu::Limits) -> Runner {
        Runner::with_limits(&self.adapter, limits).unwrap()
    }
}

/// How a description asks to be run.
pub fn run_options(spec: &CaseSpec) -> RunOptions {
    let contiguous = matches!(spec.kv_input, KvInput::Contiguous(_));
    RunOptions {
        page_ids: contiguous.then(|| append_page_ids(spec).unwrap()),
        out_dtype: spec.out,
        ..RunOptions::new(spec.page_size().unwrap())
    }
}

/// Options for a case that was not made from a description.
pub fn plain_options(page_size: u32) -> RunOptions {
    RunOptions::new(PageSize::new(page_size).unwrap())
}

/// Judges an output: against the bound, and by what must hold whatever the bound says.
pub fn judge(case: &Case, output: &Output) -> Result<Report, String> {
    shape_and_rows(case, output)?;
    // What the pages hold is judged by itself, then what the kernels make of that.
    let seen = match &output.stored {
        Some(stored) => {
            let report = verify_storage(case, stored).map_err(|error| error.to_string())?;
            if !report.passed() {
                let worst = report.worst.map(|worst| worst.to_string()).unwrap_or_default();
                return Err(format!("stored keys and values are outside the bound: {worst}\n{report}"));
            }
            Some(stored.case(case).map_err(|error| error.to_string())?)
        }
        None => None,
    };
    let case = seen.as_ref().unwrap_or(case);
    let computed = Computed { out: &output.out, lse: &output.lse, out_dtype: output.out_dtype, chains: &output.chains };
    let report = verify(case, &computed).map_err(|error| error.to_string())?;
    if report.passed() {
        Ratios::note(case, output, &report);
        Ok(report)
    } else {
        Err(format!(
            "outside the bound: ratio {:.3} (out {:.3}, lse {:.3}), {}",
            report.max_bound_ratio,
            report.max_bound_ratio_out,
            report.max_bound_ratio_lse,
            report.worst.map(|worst| worst.to_string()).unwrap_or_default()
        ))
    }
}

/// The largest measured/bound of each variant in this process. A case counts for the kernel of its worst row.
#[derive(Default)]
struct Ratios {
    largest: BTreeMap<String, f64>,
    changed: bool,
}

static RATIOS: Mutex<Ratios> = Mutex::new(Ratios { largest: BTreeMap::new(), changed: false });

impl Ratios {
    fn note(case: &Case, output: &Output, report: &Report) {
        let Some(worst) = &report.worst else { return };
        let seq = case.q_indptr().partition_point(|begin| *begin as usize <= worst.row) - 1;
        let decodes = Tiles::decodes(case.lengths()[seq].0, case.geometry().group());
        let kernel = if decodes { KernelId::Decode } else { KernelId::Prefill }.entry_point();
        let Some(ran) = output.kernels.iter().find(|ran| ran.kernel.starts_with(kernel)) else { return };
        let mut ratios = RATIOS.lock().unwrap_or_else(PoisonError::into_inner);
        let largest = ratios.largest.get(&ran.kernel).copied();
        if largest.is_none_or(|largest| report.max_bound_ratio > largest) {
            ratios.largest.insert(ran.kernel.clone(), report.max_bound_ratio);
            ratios.changed = true;
        }
    }

    /// Says them where they have grown since they were last said: the last such line of a run is the whole run's.
    fn say() {
        let mut ratios = RATIOS.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::take(&mut ratios.changed) {
            let list: Vec<String> =
                ratios.largest.iter().map(|(kernel, ratio)| format!("{kernel} {ratio:.4}")).collect();
            say(&format!("largest measured/bound so far: {}", list.join(", ")));
        }
    }
}

/// Sizes are right, nothing is NaN, rows without keys are exactly empty. Shares no code with the verifier.
fn shape_and_rows(case: &Case, output: &Output) -> Result<(), String> {
    let (heads, dim) = (case.geometry().q_heads() as usize, case.geometry().v_head_dim() as usize);
    let rows = case.lengths().iter().map(|(q, _)| *q as usize).sum::<usize>() * heads;
    if (output.out.len(), output.lse.len(), output.chains.len()) != (rows * dim, rows, case.seqs()) {
        return Err(format!(
            "{} outputs, {} sums and {} chains for {rows} rows of {dim} in {} sequences",
            output.out.len(),
            output.lse.len(),
            output.chains.len(),
            case.seqs()
        ));
    }
    let sees = visibility(case);
    let hides = case.extras().mask.is_some() || case.extras().bias.is_some();
    let mut index = 0;
    for (seq, (q_len, kv_len)) in case.lengths().into_iter().enumerate() {
        for row in 0..q_len {
            for head in 0..heads {
                let reach = case.options().visible(q_len, kv_len, row);
                let seen = if hides { reach.filter(|key| sees(seq, row, head, *key)).count() } else { reach.len() };
                let empty = case.extras().sinks.as_ref().map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
                let (out, lse) = (&output.out[index * dim..(index + 1) * dim], output.lse[index]);
                let place = format!("sequence {seq}, row {row}, head {head}");
                if out.iter().any(|x| !x.is_finite()) {
                    return Err(format!("{place}: {out:?}"));
                }
                let off =
                    if empty.is_finite() { (lse - empty).abs() > 1e-6 * (1.0 + empty.abs()) } else { lse != empty };
                if seen == 0 && (out.iter().any(|x| x.to_bits() != 0) || off) {
                    return Err(format!("{place} sees no key, but has the sum {lse} and the output {out:?}"));
                }
                if seen > 0 && !lse.is_finite() {
                    return Err(format!("{place} sees {seen} keys, but has the sum {lse}"));
                }
                index += 1;
            }
        }
    }
    Ok(())
}

/// Which keys a row sees, by all that can hide one: `(sequence, row, head, key)`.
fn visibility(case: &Case) -> impl Fn(usize, u32, usize, u32) -> bool {
    let (starts, lengths, options) = (case.score_indptr(), case.lengths(), *case.options());
    let mask = case.extras().mask.clone();
    let bias = case.extras().bias.as_ref().map(|bias| (bias.shape()[0] > 1, bias.shape()[1], bias.to_f32()));
    move |seq, row, head, key| {
        let (q_len, kv_len) = lengths[seq];
        let pair = starts[seq] as usize + row as usize * kv_len as usize + key as usize;
        options.visible(q_len, kv_len, row).contains(&key)
            && mask.as_ref().is_none_or(|mask| mask[pair])
            && bias.as_ref().is_none_or(|(per_head, pairs, bias)| {
                bias[usize::from(*per_head) * head * pairs + pair] != f32::NEG_INFINITY
            })
    }
}

/// Where two outputs differ in a bit.
pub fn difference(a: &Output, b: &Output) -> Option<String> {
    [("out", &a.out, &b.out), ("lse", &a.lse, &b.lse)].into_iter().find_map(|(tensor, a, b)| bits(tensor, a, b))
}

/// Where two tensors differ in a bit.
pub fn bits(tensor: &str, a: &[f32], b: &[f32]) -> Option<String> {
    if a.len() != b.len() {
        return Some(format!("{tensor}: {} elements against {}", a.len(), b.len()));
    }
    let differing: Vec<usize> = (0..a.len()).filter(|i| a[*i].to_bits() != b[*i].to_bits()).collect();
    let first = *differing.first()?;
    Some(format!(
        "{tensor}: {} of {} elements differ, first at {first}: {:e} against {:e}",
        differing.len(),
        a.len(),
        a[first],
        b[first]
    ))
}

/// Rows of one sequence in an output.
pub struct Rows {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
}

/// Query rows `start .. end` of sequence `seq`.
pub fn rows_of(case: &Case, output: &Output, seq: usize, start: u32, end: u32) -> Rows {
    let (heads, dim) = (case.geometry().q_heads() as usize, case.geometry().v_head_dim() as usize);
    let first = case.q_indptr()[seq] as usize;
    let range = (first + start as usize) * heads..(first + end as usize) * heads;
    Rows { out: output.out[range.start * dim..range.end * dim].to_vec(), lse: output.lse[range].to_vec() }
}

/// The kernel that serves a sequence: short ones, their group counted in, take the decode kernel.
pub fn is_decode(heads: &Heads, q_len: u32) -> bool {
    q_len == 1 || q_len * (heads.q_heads / heads.kv_heads) <= 16
}

/// Storage types with the geometries that most rows of the table use, so that no test needs a pipeline of its own.
pub const CONFIGS: [(Dtype, Heads); 3] =
    [(Dtype::F32, Heads::new(2, 2, 64)), (Dtype::F16, Heads::new(4, 2, 64)), (Dtype::Bf16, Heads::new(4, 1, 64))];

/// What a test has seen: all failures, and how near the bound came.
pub struct Tally {
    test: &'static str,
    start: Instant,
    count: usize,
    worst: Option<(f64, String)>,
    failures: Vec<String>,
}

impl Tally {
    pub fn new(test: &'static str) -> Self {
        Self { test, start: Instant::now(), count: 0, worst: None, failures: Vec::new() }
    }

    /// A case was inside the bound, with this ratio.
    pub fn ratio(&mut self, ratio: f64, what: impl ToString) {
        self.count += 1;
        if self.worst.as_ref().is_none_or(|(worst, _)| ratio > *worst) {
            self.worst = Some((ratio, what.to_string()));
        }
    }

    /// Something holds.
    pub fn held(&mut self) {
        self.count += 1;
    }

    /// Something is wrong; the case is kept as a file.
    pub fn fail(&mut self, what: impl ToString, case: Option<&Case>, why: impl ToString) {
        self.count += 1;
        let mut text = format!("{}\n    {}", what.to_string(), why.to_string());
        if let Some(case) = case {
            // The first few tell enough, and each may take 100 MB.
            if self.failures.len() < 5 {
                let path = self.file();
                match write_case(case, &path) {
                    Ok(()) => write!(text, "\n    kept as {}", path.display()),
                    Err(error) => write!(text, "\n    {error}"),
                }
                .unwrap();
            }
        }
        say(&format!("{}: FAILED {text}", self.test));
        self.failures.push(text);
    }

    fn file(&self) -> PathBuf {
        let name = format!("{}-{}.safetensors", self.test.replace('/', "-"), self.failures.len());
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
    }

    /// Runs and judges a description.
    pub fn check(&mut self, gpu: &Gpu, spec: &CaseSpec) -> Option<(Case, Output)> {
        let case = match build(spec) {
            Ok(case) => case,
            Err(error) => {
                self.fail(spec, None, error);
                return None;
            }
        };
        let output = self.check_case(gpu, spec, &case, &run_options(spec))?;
        Some((case, output))
    }

    /// Runs and judges a case.
    pub fn check_case(&mut self, gpu: &Gpu, what: impl ToString, case: &Case, options: &RunOptions) -> Option<Output> {
        match gpu.run(case, options) {
            Err(error) => self.fail(what, Some(case), format!("did not run: {error}")),
            Ok(output) => match judge(case, &output) {
                Ok(report) => {
                    self.ratio(report.max_bound_ratio, what);
                    return Some(output);
                }
                Err(why) => self.fail(what, Some(case), why),
            },
        }
        None
    }

    /// The same in every variant.
    pub fn check_every_variant(&mut self, gpu: &Gpu, what: impl fmt::Display, case: &Case, options: &RunOptions) {
        for variants in gpu.every_variant(case.geometry()) {
            let options = RunOptions { variants: Some(variants), ..options.clone() };
            self.check_case(gpu, format!("{what}, {variants}"), case, &options);
        }
    }

    /// Counts as held where nothing differs.
    pub fn same(&mut self, what: impl ToString, case: &Case, difference: Option<String>) {
        match difference {
            None => self.held(),
            Some(why) => self.fail(what, Some(case), why),
        }
    }

    /// The summary, and the end of a test that has seen a failure.
    ///
    /// # Panics
    /// With all failures.
    pub fn finish(self) {
        let worst = match &self.worst {
            Some((ratio, what)) => format!(", largest measured/bound {ratio:.4} ({})", shortened(what)),
            None => String::new(),
        };
        let seconds = self.start.elapsed().as_secs_f64();
        say(&format!("{}: {} checks in {seconds:.1} s{worst}", self.test, self.count));
        Ratios::say();
        assert!(
            self.failures.is_empty(),
            "{} of {} failed:\n  {}",
            self.failures.len(),
            self.count,
            self.failures.join("\n  ")
        );
    }
}

/// The start of a text.
pub fn shortened(text: &str) -> String {
    match text.char_indices().nth(160) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
