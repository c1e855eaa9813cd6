//! One tiny case per kernel, for `doctor`: enough to see that a driver compiles the kernel and computes with it.

use paged_attention::RunOptions;
use paged_attention_cases::{CaseSpec, KvInput, append_page_ids, build, self_tests};
use serde::Serialize;

use crate::attend;
use crate::choosing::Chosen;
use crate::device::Device;
use crate::report::Kernel;

/// A row of the case table and the kernel that it makes run.
pub struct SelfTest {
    /// The kernel family: the first part of the names of its variants.
    pub kernel: &'static str,
    spec: CaseSpec,
}

/// One per kernel.
pub fn all() -> Vec<SelfTest> {
    self_tests().into_iter().map(|(kernel, spec)| SelfTest { kernel, spec }).collect()
}

/// How a self-test ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The kernel family.
    pub kernel: &'static str,
    /// Whether the kernel ran and the result is inside the bound.
    pub passed: bool,
    /// The variants that were chosen for the case; none where they were named.
    pub chosen: Option<Chosen>,
    /// The kernels that ran and why.
    pub ran: Vec<Kernel>,
    /// Largest measured error over the bound.
    pub max_bound_ratio: Option<f64>,
    /// What went wrong.
    pub error: Option<String>,
}

impl SelfTest {
    /// Runs the case and compares it with float64.
    pub fn run(&self, device: &mut Device) -> Verdict {
        let mut verdict = Verdict {
            kernel: self.kernel,
            passed: false,
            chosen: None,
            ran: Vec::new(),
            max_bound_ratio: None,
            error: None,
        };
        match self.measure(device, &mut verdict) {
            Ok(()) => verdict.passed = true,
            Err(error) => verdict.error = Some(error),
        }
        verdict
    }

    fn measure(&self, device: &mut Device, verdict: &mut Verdict) -> Result<(), String> {
        let case = build(&self.spec).map_err(text)?;
        let page_size = self.spec.page_size().map_err(text)?;
        let contiguous = matches!(self.spec.kv_input, KvInput::Contiguous(_));
        let page_ids = contiguous.then(|| append_page_ids(&self.spec).map_err(text)).transpose()?;
        let options = RunOptions { page_ids, ..RunOptions::new(page_size) };
        verdict.chosen = device.choose_for(&case, &options)?.as_ref().map(Chosen::from);
        let output = device.run(&case, &options)?;
        verdict.ran = output.kernels.iter().map(Kernel::from).collect();
        let report = attend::judge(&case, &output)?.report;
        verdict.max_bound_ratio = Some(report.max_bound_ratio).filter(|ratio| ratio.is_finite());
        if !report.passed() {
            return Err(format!("outside the error bound, ratio {:.3}", report.max_bound_ratio));
        }
        if !verdict.ran.iter().any(|used| used.name.starts_with(self.kernel)) {
            return Err("another kernel ran in its place".to_owned());
        }
        Ok(())
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
