//! One tiny case per kernel, for `doctor`: enough to see that a driver compiles the kernel and computes with it.

use paged_attention::kernels::Variants;
use paged_attention::{AttentionOptions, Case, Choice, Dtype, HeadGeometry, KvSource, PageSize, RunOptions, Tensor};
use serde::Serialize;

use crate::attend;
use crate::device::Device;
use crate::pages::{shuffled, splitmix64};
use crate::report::Kernel;

/// A kernel's name and the case that makes it run.
pub struct SelfTest {
    /// The kernel family: the first part of the names of its variants.
    pub kernel: &'static str,
    build: fn() -> Result<Problem, String>,
}

/// A case and how to lay it out.
struct Problem {
    case: Case,
    options: RunOptions,
}

/// How a self-test ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The kernel family.
    pub kernel: &'static str,
    /// Whether the kernel ran and the result is inside the bound.
    pub passed: bool,
    /// The variants that were chosen for the case.
    pub chosen: Option<Chosen>,
    /// The kernels that ran and why.
    pub ran: Vec<Kernel>,
    /// Largest measured error over the bound.
    pub max_bound_ratio: Option<f64>,
    /// What went wrong.
    pub error: Option<String>,
}

/// A pair of variants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// Such as `prefill-broadcast32-r2k4`.
    pub prefill: String,
    /// Such as `decode-exchange32`.
    pub decode: String,
}

impl From<&Variants> for Pair {
    fn from(variants: &Variants) -> Self {
        Self { prefill: variants.prefill.to_string(), decode: variants.decode.to_string() }
    }
}

/// The variants that the library chose, and those that it would have liked better.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Chosen {
    #[serde(flatten)]
    pub variants: Pair,
    /// Time to compile all kernels of the case.
    pub compile_ms: f64,
    /// Variants that come first by the rule, and what was wrong with each.
    pub stepped_down: Vec<SteppedDown>,
}

/// Variants that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SteppedDown {
    #[serde(flatten)]
    pub variants: Pair,
    pub reason: String,
}

impl From<&Choice> for Chosen {
    fn from(choice: &Choice) -> Self {
        let stepped_down = choice.stepped_down.iter();
        Self {
            variants: Pair::from(&choice.variants),
            compile_ms: choice.compile_ms,
            stepped_down: stepped_down
                .map(|(variants, reason)| SteppedDown { variants: Pair::from(variants), reason: reason.clone() })
                .collect(),
        }
    }
}

/// One per kernel.
pub const ALL: [SelfTest; 4] = [
    SelfTest { kernel: "append", build: append },
    SelfTest { kernel: "prefill", build: prefill },
    SelfTest { kernel: "decode", build: decode },
    SelfTest { kernel: "merge", build: merge },
];

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
        let Problem { case, options } = (self.build)()?;
        verdict.chosen = Some(Chosen::from(&device.choose(&case, &options)?));
        let output = device.run(&case, &options)?;
        verdict.ran = output.kernels.iter().map(Kernel::from).collect();
        let report = attend::judge(&case, &output)?;
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

/// Contiguous keys of two sequences, scattered over a pool of small pages.
fn append() -> Result<Problem, String> {
    let geometry = HeadGeometry::with_v_head_dim(4, 2, 40, 24).map_err(text)?;
    let mut random = Random(1);
    let kv = KvSource::Contiguous {
        k: random.tensor(Dtype::F16, &[42, 2, 40])?,
        v: random.tensor(Dtype::F16, &[42, 2, 24])?,
        kv_indptr: vec![0, 37, 42],
    };
    let q = random.tensor(Dtype::F32, &[2, 4, 40])?;
    let case = Case::new(geometry, AttentionOptions::new(&geometry), q, vec![0, 1, 2], kv).map_err(text)?;
    let mut options = RunOptions::new(PageSize::new(4).map_err(text)?);
    options.page_ids = Some(shuffled(&case, options.page_size, 1));
    Ok(Problem { case, options })
}

/// A prompt on top of a cached prefix, and a short one.
fn prefill() -> Result<Problem, String> {
    paged(HeadGeometry::new(6, 2, 64), Dtype::F16, &[(40, 59), (17, 17)], 2)
}

/// Single tokens, one of them without a key.
fn decode() -> Result<Problem, String> {
    paged(HeadGeometry::new(8, 2, 64), Dtype::Bf16, &[(1, 70), (1, 1), (1, 0), (1, 16)], 3)
}

/// A single token on a sequence so long that it is worked on in parts.
fn merge() -> Result<Problem, String> {
    paged(HeadGeometry::new(2, 1, 32), Dtype::F32, &[(1, 5000)], 4)
}

/// A causal case in pages of 16 in falling order, with NaN in every slot that no sequence owns.
fn paged(
    geometry: Result<HeadGeometry, paged_attention::GeometryError>,
    dtype: Dtype,
    lengths: &[(u32, u32)],
    seed: u64,
) -> Result<Problem, String> {
    const PAGE_SIZE: u32 = 16;
    let geometry = geometry.map_err(text)?;
    let page_size = PageSize::new(PAGE_SIZE).map_err(text)?;
    let page_count: u32 = lengths.iter().map(|(_, kv_len)| page_size.pages_for(*kv_len)).sum();
    let (mut q_indptr, mut page_indptr) = (vec![0], vec![0]);
    let (mut rows, mut pages) = (0, 0);
    // How many slots of each page are owned; page ids fall while positions rise.
    let mut owned = vec![0; page_count as usize];
    for (q_len, kv_len) in lengths {
        rows += q_len;
        q_indptr.push(rows);
        for page in 0..page_size.pages_for(*kv_len) {
            let slots = (kv_len - page * PAGE_SIZE).min(PAGE_SIZE);
            if let Some(owned) = owned.iter_mut().rev().nth((pages + page) as usize) {
                *owned = slots;
            }
        }
        pages += page_size.pages_for(*kv_len);
        page_indptr.push(pages);
    }
    let mut random = Random(seed);
    let mut pool = |dim: u32| {
        let row = (geometry.kv_heads() * dim) as usize;
        let mut values = Vec::with_capacity(owned.len() * PAGE_SIZE as usize * row);
        for slots in &owned {
            for slot in 0..PAGE_SIZE {
                values.extend((0..row).map(|_| if slot < *slots { random.uniform() } else { f32::NAN }));
            }
        }
        let shape = [owned.len(), PAGE_SIZE as usize, geometry.kv_heads() as usize, dim as usize];
        Tensor::from_f32(dtype, &shape, &values).map_err(text)
    };
    let kv = KvSource::Paged {
        k_pages: pool(geometry.head_dim())?,
        v_pages: pool(geometry.v_head_dim())?,
        page_indptr,
        page_ids: (0..page_count).rev().collect(),
        kv_len: lengths.iter().map(|(_, kv_len)| *kv_len).collect(),
    };
    let q = random.tensor(dtype, &[rows as usize, geometry.q_heads() as usize, geometry.head_dim() as usize])?;
    let options = AttentionOptions::new(&geometry).with_causal(true);
    let case = Case::new(geometry, options, q, q_indptr, kv).map_err(text)?;
    Ok(Problem { case, options: RunOptions::new(page_size) })
}

/// Reproducible values between -2 and 2.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f32 {
        (splitmix64(&mut self.0) >> 40) as f32 / (1 << 22) as f32 - 2.0
    }

    fn tensor(&mut self, dtype: Dtype, shape: &[usize]) -> Result<Tensor, String> {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.uniform()).collect();
        Tensor::from_f32(dtype, shape, &values).map_err(text)
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The case of one kernel, for other tests.
#[cfg(test)]
pub fn case(kernel: &str) -> Option<Case> {
    let test = ALL.iter().find(|test| test.kernel == kernel)?;
    Some((test.build)().ok()?.case)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_valid() {
        for test in ALL {
            if let Err(error) = (test.build)() {
                panic!("{}: {error}", test.kernel);
            }
        }
    }

    #[test]
    fn owned_slots_are_finite_and_others_are_not() {
        let case = decode().unwrap().case;
        let KvSource::Paged { k_pages, page_ids, kv_len, .. } = case.kv() else { panic!("not paged") };
        let values = k_pages.to_f32();
        let row = 2 * 64;
        // Sequences take 5, 1, 0 and 1 pages: ids 6 5 4 3 2, 1, -, 0.
        assert_eq!(
            (page_ids.as_slice(), kv_len.as_slice()),
            ([6, 5, 4, 3, 2, 1, 0].as_slice(), [70, 1, 0, 16].as_slice())
        );
        for (page, owned) in [16, 1, 6, 16, 16, 16, 16].into_iter().enumerate() {
            for slot in 0..16 {
                let at = (page * 16 + slot) * row;
                assert_eq!(
                    values[at..at + row].iter().all(|x| x.is_finite()),
                    slot < owned,
                    "page {page}, slot {slot}"
                );
            }
        }
    }
}
