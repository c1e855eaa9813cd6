//! Whether a result is right: [`paged_attention::verify()`], on all rows or on a sample.

use std::borrow::Cow;

use paged_attention::{Case, Chains, Computed, Dtype, KvSource, Report, Tensor, verify};
use paged_attention_cases::Heads;

use crate::error::BenchError;
use crate::problem::{Packed, Problem};

/// Above so many multiply-adds, results are judged in a sample of their rows.
const JUDGED_FMA_MAX: f64 = 1.2e9;

/// Judges results of one problem.
#[derive(Debug)]
pub struct Judge<'a> {
    problem: &'a Problem,
    /// The problem's case, or one whose sequences are rows of it.
    case: Cow<'a, Case>,
    /// The rows that are the sequences of `case`; `None` where `case` is the problem's own.
    sample: Option<Vec<Sampled>>,
    total_rows: usize,
}

/// A query row, and the sequence of the problem that it belongs to.
#[derive(Clone, Copy, Debug)]
struct Sampled {
    row: usize,
    seq: usize,
}

/// How near a result that is right is to float64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accuracy {
    /// The largest `|found - expected|` of an output.
    pub max_abs_error: f64,
    /// The largest error over bound.
    pub max_bound_ratio: f64,
}

impl Accuracy {
    /// The larger figures of the two.
    #[must_use]
    pub fn or_worse(self, other: Self) -> Self {
        Self {
            max_abs_error: self.max_abs_error.max(other.max_abs_error),
            max_bound_ratio: self.max_bound_ratio.max(other.max_bound_ratio),
        }
    }
}

impl<'a> Judge<'a> {
    /// Takes the case as it is; of a large one, rows that are spread evenly, the last among them.
    ///
    /// # Errors
    /// [`BenchError::Shape`].
    pub fn new(problem: &'a Problem) -> Result<Self, BenchError> {
        Self::with_work(problem, JUDGED_FMA_MAX)
    }

    fn with_work(problem: &'a Problem, fma_max: f64) -> Result<Self, BenchError> {
        let total_rows = problem.case().q_indptr().last().map_or(0, |rows| *rows as usize);
        let stride = (problem.flop() / 2.0 / fma_max).ceil() as usize;
        if stride <= 1 {
            return Ok(Self { problem, case: Cow::Borrowed(problem.case()), sample: None, total_rows });
        }
        let mut sample = Vec::new();
        for (seq, ends) in problem.case().q_indptr().windows(2).enumerate() {
            let [start, end] = ends else { continue };
            let rows = *start as usize..*end as usize;
            let chosen = rows.filter(|row| (row + 1) % stride == 0 || row + 1 == total_rows);
            sample.extend(chosen.map(|row| Sampled { row, seq }));
        }
        let case = case_of(problem, &sample)?;
        Ok(Self { problem, case: Cow::Owned(case), sample: Some(sample), total_rows })
    }

    /// Rows that are compared, and rows that there are.
    pub fn coverage(&self) -> (usize, usize) {
        (self.sample.as_ref().map_or(self.total_rows, Vec::len), self.total_rows)
    }

    /// Compares a result with the float64 reference, element by element, against the bound for kernels with `chains` (one
    /// per sequence of the problem). A contender that returns no log-sum-exp is judged by its outputs.
    ///
    /// # Errors
    /// [`BenchError::Wrong`]; [`BenchError::Shape`] where the chains do not suit the problem.
    pub fn accuracy(
        &self,
        contender: &'static str,
        out: &[f32],
        lse: Option<&[f32]>,
        chains: &[Chains],
    ) -> Result<Accuracy, BenchError> {
        let name = || self.problem.name().to_owned();
        let Heads { q_heads, v_head_dim, .. } = self.problem.spec().heads;
        let out = self.rows(out, q_heads as usize * v_head_dim as usize);
        let has_lse = lse.is_some();
        let lse = match lse {
            Some(lse) => self.rows(lse, q_heads as usize),
            None => Cow::Owned(vec![f32::NAN; self.coverage().0 * q_heads as usize]),
        };
        let chains: Cow<'_, [Chains]> = match &self.sample {
            None => Cow::Borrowed(chains),
            Some(sample) => sample.iter().filter_map(|sampled| chains.get(sampled.seq)).cloned().collect(),
        };
        let computed = Computed { out: &out, lse: &lse, out_dtype: Dtype::F32, chains: &chains };
        let report = verify(&self.case, &computed)
            .map_err(|error| BenchError::Shape { name: name(), why: format!("{contender}: {error}") })?;
        let Report { max_abs_error, max_bound_ratio, max_bound_ratio_out, .. } = report;
        let max_bound_ratio = if has_lse { max_bound_ratio } else { max_bound_ratio_out };
        if max_bound_ratio <= 1.0 {
            Ok(Accuracy { max_abs_error, max_bound_ratio })
        } else {
            Err(BenchError::Wrong { name: name(), contender, error: max_abs_error, ratio: max_bound_ratio })
        }
    }

    /// The rows that are compared. What lies behind the last row is the buffer's.
    fn rows<'b>(&self, whole: &'b [f32], row_len: usize) -> Cow<'b, [f32]> {
        match &self.sample {
            None => Cow::Borrowed(whole.get(..self.total_rows * row_len).unwrap_or(whole)),
            Some(sample) => {
                let rows = sample.iter().filter_map(|sampled| whole.get(sampled.row * row_len..)?.get(..row_len));
                rows.flatten().copied().collect::<Vec<_>>().into()
            }
        }
    }
}

/// Each row as a sequence that ends where the row's sight does. All share the problem's keys, in pages of one token.
fn case_of(problem: &Problem, sample: &[Sampled]) -> Result<Case, BenchError> {
    let whole = problem.case();
    let Packed { k, v, kv_indptr } = problem.packed()?;
    let refuse = |error: &dyn std::fmt::Display| BenchError::Shape {
        name: problem.name().to_owned(),
        why: format!("no sample of the rows could be made: {error}"),
    };
    let lengths = whole.lengths();
    let (mut q, mut page_indptr, mut page_ids, mut kv_len) = (Vec::new(), vec![0], Vec::new(), Vec::new());
    let row_bytes = whole.q().bytes().len() / whole.q().shape().first().copied().unwrap_or(1).max(1);
    for Sampled { row, seq } in sample {
        let (Some(q_start), Some(kv_start), Some((q_len, seq_kv_len))) =
            (whole.q_indptr().get(*seq), kv_indptr.get(*seq), lengths.get(*seq))
        else {
            continue;
        };
        let seen = whole.options().visible(*q_len, *seq_kv_len, *row as u32 - q_start).end;
        q.extend(whole.q().bytes().get(row * row_bytes..(row + 1) * row_bytes).unwrap_or_default());
        page_ids.extend(*kv_start..kv_start + seen);
        page_indptr.push(page_ids.len() as u32);
        kv_len.push(seen);
    }
    let in_pages = |tensor: &Tensor| {
        let mut shape = tensor.shape().to_vec();
        shape.insert(1, 1);
        Tensor::from_bytes(tensor.dtype(), &shape, tensor.bytes().to_vec()).map_err(|error| refuse(&error))
    };
    let mut shape = whole.q().shape().to_vec();
    shape.splice(..1, [kv_len.len()]);
    let q = Tensor::from_bytes(whole.q().dtype(), &shape, q).map_err(|error| refuse(&error))?;
    let q_indptr = (0..=kv_len.len() as u32).collect();
    let kv = KvSource::Paged { k_pages: in_pages(k)?, v_pages: in_pages(v)?, page_indptr, page_ids, kv_len };
    Case::new(*whole.geometry(), *whole.options(), q, q_indptr, kv).map_err(|error| refuse(&error))
}

#[cfg(test)]
mod tests {
    use paged_attention::reference::dense;
    use paged_attention_cases::timed;

    use super::*;

    /// A sample judges as the whole does, and a wrong element of a row that it has is noticed.
    #[test]
    fn samples() {
        let spec = timed("x", Heads::new(4, 2, 16).with_v(8), vec![(9, 20), (1, 7), (0, 3), (5, 5)]);
        let problem = Problem::new(spec.dtype(Dtype::F16)).unwrap();
        let narrow = |values: Vec<f64>| -> Vec<f32> { values.into_iter().map(|x| x as f32).collect() };
        let reference = dense(problem.case());
        let (mut out, lse) = (narrow(reference.out), narrow(reference.lse));
        let chains = problem.longest_chains();
        let whole = Judge::new(&problem).unwrap();
        let sample = Judge::with_work(&problem, problem.flop() / 2.0 / 3.5).unwrap();
        assert_eq!((whole.coverage(), sample.coverage()), ((15, 15), (4, 15)));
        let rows: Vec<_> = sample.sample.iter().flatten().map(|sampled| (sampled.row, sampled.seq)).collect();
        assert_eq!(rows, [(3, 0), (7, 0), (11, 3), (14, 3)]);
        for judge in [&whole, &sample] {
            for lse in [Some(&lse[..]), None] {
                let accuracy = judge.accuracy("reference", &out, lse, &chains).unwrap();
                assert!(accuracy.max_abs_error < 1e-6 && accuracy.max_bound_ratio < 1.0, "{accuracy:?}");
            }
            assert!(judge.accuracy("no sums", &out, Some(&vec![0.0; lse.len()]), &chains).is_err());
            assert!(judge.accuracy("short", &out[32..], None, &chains).is_err());
        }
        for (row, of_sample) in [(7, true), (8, false)] {
            let right = std::mem::replace(&mut out[row * 32 + 31], f32::NAN);
            assert!(whole.accuracy("wrong", &out, None, &chains).is_err());
            assert_eq!(sample.accuracy("wrong", &out, None, &chains).is_err(), of_sample);
            out[row * 32 + 31] = right;
        }
    }
}
