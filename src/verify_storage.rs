//! The validation of what pages hold: are keys and values as near to the case's own as their types allow, and the result?

use std::fmt;

use crate::case::{Case, CaseError, SequenceKv};
use crate::reference::bound::RowBound;
use crate::reference::storage::{RowErrors, Rows, Storage, rotated};
use crate::reference::{DenseRow, Problem, Reference, dense, for_rows};
use crate::runner::StoredKv;
use crate::verify::{Quantity, Verdict, Worst, error_and_ratio};

/// How far stored keys and values are from exact ones, element by element, and what that does to the result, both against
/// the bounds of [`crate::reference::storage`] and [`crate::reference::bound`].
///
/// All figures are of exact arithmetic: the kernels' own is judged by [`crate::verify()`], on the case that
/// [`StoredKv::case`] returns.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct StorageReport {
    /// Largest `|stored - exact|` of a key's elements.
    pub max_abs_error_k: f64,
    /// Largest `|stored - exact|` of a value's elements.
    pub max_abs_error_v: f64,
    /// Largest error over bound of a key's elements.
    pub max_bound_ratio_k: f64,
    /// Largest error over bound of a value's elements.
    pub max_bound_ratio_v: f64,
    /// Largest difference of `out` between stored and exact keys and values.
    pub max_abs_error: f64,
    /// Largest difference of `lse`.
    pub max_abs_error_lse: f64,
    /// Largest difference over bound of `out`.
    pub max_bound_ratio_out: f64,
    /// Largest difference over bound of `lse`.
    pub max_bound_ratio_lse: f64,
    /// Sum of squared differences of `out` over the sum of squares for exact keys and values.
    pub nmse: f64,
    /// The element of the result with the largest ratio (the first of them); `None` without elements.
    pub worst: Option<Worst>,
}

impl StorageReport {
    /// The largest of all ratios.
    pub fn max_bound_ratio(&self) -> f64 {
        let Self { max_bound_ratio_k, max_bound_ratio_v, max_bound_ratio_out, max_bound_ratio_lse, .. } = *self;
        [max_bound_ratio_k, max_bound_ratio_v, max_bound_ratio_out, max_bound_ratio_lse].into_iter().fold(0.0, f64::max)
    }

    /// Whether every element is inside its bound.
    pub fn passed(&self) -> bool {
        self.max_bound_ratio() <= 1.0
    }
}

impl fmt::Display for StorageReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "     max abs error   error / bound")?;
        for (what, error, ratio) in [
            ("k", self.max_abs_error_k, self.max_bound_ratio_k),
            ("v", self.max_abs_error_v, self.max_bound_ratio_v),
            ("out", self.max_abs_error, self.max_bound_ratio_out),
            ("lse", self.max_abs_error_lse, self.max_bound_ratio_lse),
        ] {
            writeln!(f, "{what:<3}  {error:>13.3e}   {ratio:>13.4}")?;
        }
        write!(f, "nmse {:>13.3e}", self.nmse)
    }
}

/// Judges what the pages hold for `case`: the rows, and the results that exact arithmetic makes of them.
///
/// # Errors
/// [`CaseError`] if stored or rotated keys and values lie outside the supported ranges, which they can where the case is
/// at their edge.
pub fn verify_storage(case: &Case, stored: &StoredKv) -> Result<StorageReport, CaseError> {
    let judged = Judged::new(case, stored)?;
    let mut report = StorageReport::default();
    let errors = judged.rows(&mut report);
    judged.results(&errors, &mut report);
    Ok(report)
}

/// The same for the rows alone: the largest error over bound.
///
/// # Errors
/// As [`verify_storage`].
pub(crate) fn verify_stored_rows(case: &Case, stored: &StoredKv) -> Result<f64, CaseError> {
    let mut report = StorageReport::default();
    Judged::new(case, stored)?.rows(&mut report);
    Ok(report.max_bound_ratio())
}

struct Judged<'a> {
    case: &'a Case,
    /// With its keys rotated, in f32.
    exact: Case,
    /// With the keys and values that the pages hold.
    stored: Case,
    storage: Storage<'a>,
}

/// Of the keys and of the values of each KV head of a sequence.
type SequenceErrors = Vec<[RowErrors; 2]>;

impl<'a> Judged<'a> {
    fn new(case: &'a Case, stored: &'a StoredKv) -> Result<Self, CaseError> {
        let exact = match &stored.rotary {
            Some(rotary) => rotated(case, rotary)?,
            None => case.clone(),
        };
        Ok(Self { case, exact, stored: stored.case(case)?, storage: Storage::new(case, stored) })
    }

    /// Judges the rows of every sequence; what they may be off by is for the results.
    fn rows(&self, report: &mut StorageReport) -> Vec<SequenceErrors> {
        let geometry = self.case.geometry();
        let (dim, v_dim) = (geometry.head_dim() as usize, geometry.v_head_dim() as usize);
        let sequence = |seq: usize| {
            let kv = [self.case, &self.exact, &self.stored].map(|case| case.sequence_kv(seq));
            let [Some(new), Some(exact), Some(stored)] = kv else { return Vec::new() };
            let heads = 0..geometry.kv_heads() as usize;
            let errors = heads.map(|head| {
                let rows = |of: fn(&SequenceKv, usize) -> &[f32], dim| Rows {
                    new: of(&new, head),
                    exact: of(&exact, head),
                    dim,
                };
                let (keys, values) = (rows(SequenceKv::k, dim), rows(SequenceKv::v, v_dim));
                let k = self.storage.key_errors(head, keys);
                let v = if geometry.is_latent() { k.clone() } else { self.storage.value_errors(head, values) };
                for ((rows, errors, stored), (error, ratio)) in [
                    ((keys, &k, stored.k(head)), (&mut report.max_abs_error_k, &mut report.max_bound_ratio_k)),
                    ((values, &v, stored.v(head)), (&mut report.max_abs_error_v, &mut report.max_bound_ratio_v)),
                ] {
                    let pairs = rows.exact.chunks_exact(rows.dim).zip(stored.chunks_exact(rows.dim));
                    for ((exact, stored), floor) in pairs.zip(&errors.floor) {
                        for (exact, stored) in exact.iter().zip(stored) {
                            let bound = floor + errors.part * f64::from(exact.abs());
                            let judged = error_and_ratio(f64::from(*stored), f64::from(*exact), bound);
                            (*error, *ratio) = (error.max(judged.0), ratio.max(judged.1));
                        }
                    }
                }
                [k, v]
            });
            errors.collect()
        };
        (0..self.case.seqs()).map(sequence).collect()
    }

    fn results(&self, errors: &[SequenceErrors], report: &mut StorageReport) {
        let geometry = self.case.geometry();
        let (heads, dims) = (geometry.q_heads() as usize, geometry.v_head_dim() as usize);
        let group = geometry.group() as usize;
        let Reference { out, lse } = dense(&self.stored);
        let judge = |problem: &Problem<'_>, (dense, bound): &mut (DenseRow, RowBound), row: usize, head: usize| {
            let task = problem.row(row, head)?;
            let [keys, values] = errors.get(task.seq)?.get(head / group)?;
            let at = row * heads + head;
            dense.attend(&task);
            bound.fill_stored(&task, dense, keys, values);
            let mut verdict = Verdict::default();
            let of_out = out.get(at * dims..(at + 1) * dims)?.iter().zip(&dense.out).zip(&bound.out);
            for (dim, ((found, exact), bound)) in of_out.enumerate() {
                verdict.judge(Quantity::Out, (row, head, Some(dim)), *found, *exact, *bound);
            }
            verdict.judge(Quantity::Lse, (row, head, None), *lse.get(at)?, dense.lse, bound.lse);
            Some(verdict)
        };
        let mut all = Verdict::default();
        for_rows(&self.exact, <(DenseRow, RowBound)>::default, judge, |row| {
            row.into_iter().for_each(|row| all.add(row));
        });
        (report.max_abs_error, report.max_abs_error_lse) = (all.error_out, all.error_lse);
        (report.max_bound_ratio_out, report.max_bound_ratio_lse) = (all.ratio_out, all.ratio_lse);
        report.nmse = all.nmse();
        report.worst = all.worst;
    }
}
