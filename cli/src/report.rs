//! What a run was like: as a table for people, and as JSON.

use std::collections::BTreeSet;

use paged_attention::{
    Case, CaseExtras, KernelUse, KvDtypes, KvLayout, Output, PageSize, Report, RunOptions, StorageReport, Worst,
};
use serde::{Serialize, Serializer};

use crate::choosing::Chosen;

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
    /// Such as `prefill-broadcast32-r2k4l64`.
    pub name: String,
    /// Why it was chosen.
    pub reason: String,
    /// Workgroups dispatched.
    pub workgroups: u32,
}

impl From<&KernelUse> for Kernel {
    fn from(used: &KernelUse) -> Self {
        Self { name: used.kernel.to_string(), reason: used.reason.clone(), workgroups: used.workgroups }
    }
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
    /// Type in which the pages hold keys and values.
    pub kv_dtype: String,
    /// Type in which the file has them.
    pub kv_input_dtype: String,
    /// Bytes of a token's keys and values in the pages, padding and scales included.
    pub kv_bytes_per_token: Option<f64>,
    /// The same in f16.
    pub kv_bytes_per_token_f16: Option<f64>,
    pub out_dtype: String,
    pub page_size: u32,
    pub paged_input: bool,
    pub causal: bool,
    pub scale: f64,
    /// Null where there is no limit, as the next one.
    pub window_left: Option<u32>,
    pub window_right: Option<u32>,
    /// Null where there is none.
    pub softcap: Option<f64>,
    /// Tensors that change scores: those of `alibi_slopes`, `sinks`, `mask` and `bias` that the case has.
    pub extras: Vec<&'static str>,
}

impl Shape {
    /// Reads them off a case; `page_size` is for one that is not paged yet.
    pub fn new(case: &Case, page_size: PageSize, options: &RunOptions) -> Self {
        let lengths = case.lengths();
        let geometry = case.geometry();
        let page_size = case.page_size().unwrap_or(page_size);
        let stored = options.kv_dtypes(case);
        let per_token = |dtypes: KvDtypes| {
            let layout = KvLayout::new(*geometry, dtypes, page_size, 1).ok()?;
            Some(layout.page_bytes() as f64 / f64::from(page_size.get()))
        };
        let out_dtype = options.out_dtype;
        let options = case.options();
        let CaseExtras { alibi_slopes, sinks, mask, bias, .. } = case.extras();
        Self {
            seqs: case.seqs(),
            total_q: lengths.iter().map(|(q_len, _)| u64::from(*q_len)).sum(),
            total_kv: lengths.iter().map(|(_, kv_len)| u64::from(*kv_len)).sum(),
            q_heads: geometry.q_heads(),
            kv_heads: geometry.kv_heads(),
            head_dim: geometry.head_dim(),
            v_head_dim: geometry.v_head_dim(),
            q_dtype: case.q().dtype().to_string(),
            kv_dtype: stored.to_string(),
            kv_input_dtype: case.kv().dtype().to_string(),
            kv_bytes_per_token: per_token(stored),
            kv_bytes_per_token_f16: per_token(paged_attention::Dtype::F16.into()),
            out_dtype: out_dtype.to_string(),
            page_size: page_size.get(),
            paged_input: case.page_size().is_some(),
            causal: options.causal,
            scale: options.scale,
            window_left: options.window_left,
            window_right: options.window_right,
            softcap: options.softcap,
            extras: [
                ("alibi_slopes", alibi_slopes.is_some()),
                ("sinks", sinks.is_some()),
                ("mask", mask.is_some()),
                ("bias", bias.is_some()),
            ]
            .into_iter()
            .filter_map(|(name, given)| given.then_some(name))
            .collect(),
        }
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

impl From<&Worst> for WorstElement {
    fn from(worst: &Worst) -> Self {
        Self {
            what: worst.what.to_string(),
            row: worst.row as u64,
            head: worst.head as u64,
            dim: worst.dim.map(|dim| dim as u64),
            found: f64::from(worst.found),
            expected: worst.expected,
            bound: worst.bound,
            ratio: worst.ratio,
        }
    }
}

/// How a result was judged.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// The kernels' arithmetic, on the keys and values that the pages hold.
    pub report: Report,
    /// Where these are not the case's own: how far they are from them, and what that does to the result.
    pub storage: Option<StorageReport>,
}

/// What storing keys and values in another type does, in exact arithmetic.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stored {
    /// Largest error of an element of the result that exact arithmetic makes of the stored keys and values.
    #[serde(serialize_with = "finite_or_name")]
    pub max_abs_error: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub nmse: f64,
    /// Error over bound, of the elements of keys and values, and of the result.
    #[serde(serialize_with = "finite_or_name")]
    pub max_bound_ratio_k: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub max_bound_ratio_v: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub max_bound_ratio_out: f64,
    #[serde(serialize_with = "finite_or_name")]
    pub max_bound_ratio_lse: f64,
    pub worst: Option<WorstElement>,
}

impl From<&StorageReport> for Stored {
    fn from(report: &StorageReport) -> Self {
        Self {
            max_abs_error: report.max_abs_error,
            nmse: report.nmse,
            max_bound_ratio_k: report.max_bound_ratio_k,
            max_bound_ratio_v: report.max_bound_ratio_v,
            max_bound_ratio_out: report.max_bound_ratio_out,
            max_bound_ratio_lse: report.max_bound_ratio_lse,
            worst: report.worst.as_ref().map(WorstElement::from),
        }
    }
}

/// One case that ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    pub passed: bool,
    #[serde(flatten)]
    pub adapter: AdapterName,
    pub kernel: Vec<Kernel>,
    /// How the variants were chosen; null where they were named, or nothing was computed.
    pub choice: Option<Chosen>,
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
    /// Where the pages hold another type than the file.
    pub storage: Option<Stored>,
    pub gpu_ms: Option<f64>,
    pub wall_ms: f64,
    pub workspace_bytes: u64,
    pub out: Option<String>,
}

impl Measured {
    /// Puts together what ran and how it was judged.
    pub fn new(adapter: AdapterName, shape: Shape, output: &Output, judged: &Judged, out: Option<String>) -> Self {
        let Judged { report, storage } = judged;
        Self {
            passed: report.passed() && storage.as_ref().is_none_or(StorageReport::passed),
            storage: storage.as_ref().map(Stored::from),
            adapter,
            kernel: output.kernels.iter().map(Kernel::from).collect(),
            choice: output.choice.as_ref().map(Chosen::from),
            shape,
            max_abs_error: report.max_abs_error,
            max_bound_ratio: report.max_bound_ratio,
            max_bound_ratio_out: report.max_bound_ratio_out,
            max_bound_ratio_lse: report.max_bound_ratio_lse,
            nmse: report.nmse,
            worst: report.worst.as_ref().map(WorstElement::from),
            gpu_ms: output.gpu_ms,
            wall_ms: output.wall_ms,
            workspace_bytes: output.workspace_bytes,
            out,
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
