//! What a run was like: as a table for people, and as JSON.

use std::collections::BTreeSet;
use std::fmt::Write;

use paged_attention::{Case, KvSource, Output, PageSize, Report};
use serde::{Serialize, Serializer};

/// Exit status: every element inside the bound.
pub const PASSED: u8 = 0;
/// Exit status: an element outside the bound.
pub const OUTSIDE: u8 = 1;
/// Exit status: input, option or output place unusable.
pub const UNUSABLE: u8 = 2;
/// Exit status: no adapter, or the device failed.
pub const NO_DEVICE: u8 = 3;

/// The adapter that ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AdapterName {
    /// The adapter's name.
    pub adapter: String,
    /// `vulkan`, `metal`, `dx12` or `gl`.
    pub backend: String,
    /// Driver and version.
    pub driver: String,
}

impl AdapterName {
    /// From what the backend tells.
    pub fn new(info: &wgpu::AdapterInfo) -> Self {
        Self {
            adapter: info.name.clone(),
            backend: info.backend.to_string(),
            driver: paged_attention::adapter::driver(info),
        }
    }
}

/// A kernel that ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Kernel {
    /// Such as `prefill-base`.
    pub name: String,
    /// Why it was chosen.
    pub reason: String,
    /// Workgroups dispatched.
    pub workgroups: u32,
}

/// Sizes and settings of a case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shape {
    pub seqs: usize,
    pub total_q: u64,
    pub total_kv: u64,
    pub q_heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub v_head_dim: u32,
    pub q_dtype: String,
    pub kv_dtype: String,
    pub out_dtype: String,
    pub page_size: u32,
    pub paged_input: bool,
    pub causal: bool,
    pub scale: f64,
}

impl Shape {
    /// Reads them off a case; `page_size` is for one that is not paged yet.
    pub fn new(case: &Case, page_size: PageSize, out_dtype: paged_attention::Dtype) -> Self {
        let lengths = case.lengths();
        let geometry = case.geometry();
        let kv_dtype = match case.kv() {
            KvSource::Contiguous { k, .. } | KvSource::Paged { k_pages: k, .. } => k.dtype(),
        };
        Self {
            seqs: case.seqs(),
            total_q: lengths.iter().map(|(q_len, _)| u64::from(*q_len)).sum(),
            total_kv: lengths.iter().map(|(_, kv_len)| u64::from(*kv_len)).sum(),
            q_heads: geometry.q_heads(),
            kv_heads: geometry.kv_heads(),
            head_dim: geometry.head_dim(),
            v_head_dim: geometry.v_head_dim(),
            q_dtype: case.q().dtype().to_string(),
            kv_dtype: kv_dtype.to_string(),
            out_dtype: out_dtype.to_string(),
            page_size: case.page_size().unwrap_or(page_size).get(),
            paged_input: case.page_size().is_some(),
            causal: case.options().causal,
            scale: case.options().scale,
        }
    }

    /// `2 seqs, 5 rows × 8 heads on 37 keys × 2 heads, d 64`
    fn line(&self) -> String {
        let dims = if self.head_dim == self.v_head_dim {
            format!("d {}", self.head_dim)
        } else {
            format!("d {} / {}", self.head_dim, self.v_head_dim)
        };
        format!(
            "{} seq{}, {} rows x {} heads on {} keys x {} heads, {dims}",
            self.seqs,
            if self.seqs == 1 { "" } else { "s" },
            self.total_q,
            self.q_heads,
            self.total_kv,
            self.kv_heads
        )
    }
}

/// The element with the largest measured/bound ratio.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorstElement {
    /// `out` or `lse`.
    pub what: String,
    pub row: u64,
    pub head: u64,
    /// Element of the row; null for `lse`.
    pub dim: Option<u64>,
    #[serde(serialize_with = "finite_or_name")]
    pub found: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub expected: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub bound: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub ratio: f64,
}

/// One case that ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    pub passed: bool,
    #[serde(flatten)]
    pub adapter: AdapterName,
    pub kernel: Vec<Kernel>,
    pub shape: Shape,
    #[serde(serialize_with = "finite_or_name")]
    pub max_abs_error: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub max_bound_ratio: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub max_bound_ratio_out: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub max_bound_ratio_lse: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub nmse: f64,
    pub worst: Option<WorstElement>,
    pub gpu_ms: Option<f64>,
    pub wall_ms: f64,
    pub workspace_bytes: u64,
    pub out: Option<String>,
}

impl Measured {
    /// Puts together what ran and how it was judged.
    pub fn new(adapter: AdapterName, shape: Shape, output: &Output, report: &Report, out: Option<String>) -> Self {
        Self {
            passed: report.passed(),
            adapter,
            kernel: output
                .kernels
                .iter()
                .map(|used| Kernel {
                    name: used.kernel.to_string(),
                    reason: used.reason.clone(),
                    workgroups: used.workgroups,
                })
                .collect(),
            shape,
            max_abs_error: report.max_abs_error,
            max_bound_ratio: report.max_bound_ratio,
            max_bound_ratio_out: report.max_bound_ratio_out,
            max_bound_ratio_lse: report.max_bound_ratio_lse,
            nmse: report.nmse,
            worst: report.worst.as_ref().map(|worst| WorstElement {
                what: worst.what.to_string(),
                row: worst.row as u64,
                head: worst.head as u64,
                dim: worst.dim.map(|dim| dim as u64),
                found: worst.found,
                expected: worst.expected,
                bound: worst.bound,
                ratio: worst.ratio,
            }),
            gpu_ms: output.gpu_ms,
            wall_ms: output.wall_ms,
            workspace_bytes: output.workspace_bytes,
            out,
        }
    }

    fn time(&self) -> String {
        match self.gpu_ms {
            Some(gpu_ms) => format!("{gpu_ms:.3} ms on the GPU, {:.3} ms in all", self.wall_ms),
            None => format!("{:.3} ms in all (the adapter has no timestamps)", self.wall_ms),
        }
    }

    fn kernels(&self) -> String {
        let names: BTreeSet<&str> = self.kernel.iter().map(|kernel| kernel.name.as_str()).collect();
        names.into_iter().collect::<Vec<_>>().join("+")
    }

    /// `outside the bound: out[row 3, head 1, dim 7] is 0.1, 0.2 is expected within 1e-7 (ratio 1e6)`
    fn verdict(&self) -> String {
        let element = self.worst.as_ref().map(|worst| {
            let dim = worst.dim.map_or(String::new(), |dim| format!(", dim {dim}"));
            format!(
                "{}[row {}, head {}{dim}] is {:e}, expected {:e} within {:.3e}, ratio {:.3}",
                worst.what, worst.row, worst.head, worst.found, worst.expected, worst.bound, worst.ratio
            )
        });
        match (self.passed, element) {
            (true, _) => "inside the bound".to_owned(),
            (false, Some(element)) => format!("OUTSIDE the bound; worst: {element}"),
            (false, None) => "OUTSIDE the bound".to_owned(),
        }
    }
}

/// One case, whether it ran or not.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CaseResult {
    /// The file.
    pub case: String,
    /// Its exit status.
    pub exit: u8,
    /// Why it did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What came out where it ran.
    #[serde(flatten)]
    pub measured: Option<Measured>,
}

/// Several cases.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    pub exit: u8,
    pub adapter: Option<String>,
    pub backend: Option<String>,
    pub driver: Option<String>,
    /// Names of the kernels that ran in any case.
    pub kernel: Vec<String>,
    /// The largest over the cases, as the next three.
    #[serde(serialize_with = "finite_or_name")]
    pub max_abs_error: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub max_bound_ratio: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub nmse: f64,
    /// The case with the largest ratio.
    pub worst_case: Option<String>,
    /// Sums over the cases that ran; null where a case has no time on the GPU.
    pub gpu_ms: Option<f64>,
    pub wall_ms: f64,
    pub case_count: usize,
    pub passed: usize,
    pub outside_bound: usize,
    pub unusable: usize,
    pub device_failed: usize,
    pub cases: Vec<CaseResult>,
}

impl Summary {
    /// Sums up.
    pub fn new(cases: Vec<CaseResult>) -> Self {
        let ran: Vec<(&CaseResult, &Measured)> =
            cases.iter().filter_map(|case| Some((case, case.measured.as_ref()?))).collect();
        let adapter = ran.first().map(|(_, measured)| measured.adapter.clone());
        let max = |value: fn(&Measured) -> f64| ran.iter().map(|(_, m)| value(m)).fold(0.0, worse);
        let kernels: BTreeSet<String> =
            ran.iter().flat_map(|(_, m)| m.kernel.iter().map(|kernel| kernel.name.clone())).collect();
        let max_bound_ratio = max(|m| m.max_bound_ratio);
        let count = |exit| cases.iter().filter(|case| case.exit == exit).count();
        Self {
            exit: cases.iter().map(|case| case.exit).max().unwrap_or(PASSED),
            adapter: adapter.as_ref().map(|name| name.adapter.clone()),
            backend: adapter.as_ref().map(|name| name.backend.clone()),
            driver: adapter.map(|name| name.driver),
            kernel: kernels.into_iter().collect(),
            max_abs_error: max(|m| m.max_abs_error),
            max_bound_ratio,
            nmse: max(|m| m.nmse),
            worst_case: ran
                .iter()
                .find(|(_, m)| m.max_bound_ratio == max_bound_ratio || m.max_bound_ratio.is_nan())
                .map(|(case, _)| case.case.clone()),
            gpu_ms: ran.iter().map(|(_, m)| m.gpu_ms).sum(),
            wall_ms: ran.iter().map(|(_, m)| m.wall_ms).sum(),
            case_count: cases.len(),
            passed: count(PASSED),
            outside_bound: count(OUTSIDE),
            unusable: count(UNUSABLE),
            device_failed: count(NO_DEVICE),
            cases,
        }
    }
}

/// The larger, where NaN is larger than anything.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// The table for one case.
pub fn single(result: &CaseResult) -> String {
    let mut text = String::new();
    let Some(m) = &result.measured else {
        return text;
    };
    let mut line = |name: &str, value: &str| {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{name:<9} {value}");
    };
    let AdapterName { adapter, backend, driver } = &m.adapter;
    line("case", &result.case);
    line("adapter", &format!("{adapter} ({backend}, {driver})"));
    if m.kernel.is_empty() {
        line("kernels", "none: nothing to compute");
    }
    for (index, kernel) in m.kernel.iter().enumerate() {
        let Kernel { name, reason, workgroups } = kernel;
        line(if index == 0 { "kernels" } else { "" }, &format!("{name}, {workgroups} workgroups: {reason}"));
    }
    let shape = &m.shape;
    line("shape", &shape.line());
    line(
        "",
        &format!(
            "q {}, kv {}, out {}, pages of {}{}, {}, scale {}",
            shape.q_dtype,
            shape.kv_dtype,
            shape.out_dtype,
            shape.page_size,
            if shape.paged_input { " (the file's)" } else { "" },
            if shape.causal { "causal" } else { "not causal" },
            shape.scale
        ),
    );
    line("errors", &format!("max |out - float64| {:.3e}, nmse {:.3e}", m.max_abs_error, m.nmse));
    line("ratio", &format!("measured/bound {:.3} of out, {:.3} of lse", m.max_bound_ratio_out, m.max_bound_ratio_lse));
    line("time", &m.time());
    if let Some(out) = &m.out {
        line("written", out);
    }
    line("verdict", &m.verdict());
    text
}

/// The table for several cases.
pub fn several(summary: &Summary) -> String {
    let mut text = String::new();
    if let (Some(adapter), Some(backend), Some(driver)) = (&summary.adapter, &summary.backend, &summary.driver) {
        let _ = writeln!(text, "adapter   {adapter} ({backend}, {driver})\n");
    }
    let rows: Vec<[String; 7]> = std::iter::once(
        ["", "ratio out", "ratio lse", "max error", "ms", "case", "kernels and shape"].map(str::to_owned),
    )
    .chain(summary.cases.iter().map(|case| match &case.measured {
        Some(m) => [
            if m.passed { "ok" } else { "OUTSIDE" }.to_owned(),
            format!("{:.3}", m.max_bound_ratio_out),
            format!("{:.3}", m.max_bound_ratio_lse),
            format!("{:.2e}", m.max_abs_error),
            format!("{:.3}", m.gpu_ms.unwrap_or(m.wall_ms)),
            case.case.clone(),
            format!("{}; {}", m.kernels(), m.shape.line()),
        ],
        None => {
            let status = if case.exit == UNUSABLE { "UNUSABLE" } else { "NOT RUN" };
            let dash = || "-".to_owned();
            [status.into(), dash(), dash(), dash(), dash(), case.case.clone(), dash()]
        }
    }))
    .collect();
    let mut widths = [0; 7];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    for row in &rows {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(text, "{}", cells.join("  ").trim_end());
    }
    text.push('\n');
    for case in summary.cases.iter() {
        if let Some(measured) = case.measured.as_ref().filter(|measured| !measured.passed) {
            let _ = writeln!(text, "{}: {}", case.case, measured.verdict());
        }
    }
    let _ = write!(
        text,
        "{} cases: {} inside the bound, {} outside, {} unusable, {} not run",
        summary.case_count, summary.passed, summary.outside_bound, summary.unusable, summary.device_failed
    );
    if let Some(worst) = &summary.worst_case {
        let _ = write!(text, "; largest measured/bound ratio {:.3} in {worst}", summary.max_bound_ratio);
    }
    text.push('\n');
    text
}

/// JSON has no NaN and no infinity, and a `null` would pass for "small" in some readers: a name does not.
fn finite_or_name<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() {
        serializer.serialize_f64(*value)
    } else {
        serializer.serialize_str(if value.is_nan() {
            "NaN"
        } else if *value > 0.0 {
            "inf"
        } else {
            "-inf"
        })
    }
}
