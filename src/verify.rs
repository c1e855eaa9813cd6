//! The validation that the command, the tests and users' own suites share.

use std::fmt;

use thiserror::Error;

use crate::case::Case;
use crate::chains::Chains;
use crate::geometry::Dtype;
use crate::reference::bound::{BoundError, RowBound, check_chains};
use crate::reference::{DenseRow, Problem, for_rows};

/// A result to be judged: what a kernel returned for a [`Case`].
#[derive(Clone, Copy, Debug)]
pub struct Computed<'a> {
    /// `[total_q, q_heads, v_head_dim]`.
    pub out: &'a [f32],
    /// `[total_q, q_heads]`, natural logarithm.
    pub lse: &'a [f32],
    /// The type in which the kernel stored `out`.
    pub out_dtype: Dtype,
    /// One entry per sequence.
    pub chains: &'a [Chains],
}

/// How far a result was off, against the bound of [`crate::reference::bound`].
///
/// An error that is NaN counts as infinite, and so does a ratio whose bound is 0 while the error is not. Every figure
/// is 0 where there are no elements.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// Elements compared: those of `out` and of `lse`.
    pub elements: usize,
    /// Largest `|found - expected|` of `out`.
    pub max_abs_error: f64,
    /// Largest `|found - expected|` of `lse`; 0 for a row without keys whose `lse` is `-inf`.
    pub max_abs_error_lse: f64,
    /// Largest error over bound, of `out` and `lse`. At most 1 in a result that is right.
    pub max_bound_ratio: f64,
    /// Largest error over bound of `out`.
    pub max_bound_ratio_out: f64,
    /// Largest error over bound of `lse`.
    pub max_bound_ratio_lse: f64,
    /// Sum of squared errors of `out` over the sum of squares of the reference.
    pub nmse: f64,
    /// The element with the largest ratio (the first of them); `None` without elements.
    pub worst: Option<Worst>,
}

/// Which of the two results an element belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// `out`, `[total_q, q_heads, v_head_dim]`.
    Out,
    /// `lse`, `[total_q, q_heads]`.
    Lse,
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Out => "out",
            Self::Lse => "lse",
        })
    }
}

/// One element of a result.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Worst {
    /// The result it belongs to.
    pub what: Quantity,
    /// Packed query row.
    pub row: usize,
    /// Query head.
    pub head: usize,
    /// Dimension of the value; `None` for `lse`.
    pub dim: Option<usize>,
    /// What the kernel returned.
    pub found: f32,
    /// What the float64 reference says.
    pub expected: f64,
    /// The largest error that a correct kernel can have here.
    pub bound: f64,
    /// `|found - expected| / bound`.
    pub ratio: f64,
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}, {}", self.what, self.row, self.head)?;
        if let Some(dim) = self.dim {
            write!(f, ", {dim}")?;
        }
        let Self { found, expected, bound, ratio, .. } = self;
        write!(f, "] = {found:e}, expected {expected:.9e}, bound {bound:.3e}, ratio {ratio:.4}")
    }
}

/// A result that cannot be judged.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// `out` or `lse` has the wrong number of elements.
    #[error("`{what}` has {found} elements; {needed} are needed")]
    Length {
        /// The result.
        what: Quantity,
        /// Elements found.
        found: usize,
        /// Elements needed.
        needed: usize,
    },
    /// No bound can be stated for these chains.
    #[error(transparent)]
    Bound(#[from] BoundError),
}

impl Report {
    /// Whether every element is inside the bound.
    pub fn passed(&self) -> bool {
        self.max_bound_ratio <= 1.0
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "     max abs error   error / bound")?;
        for (what, error, ratio) in [
            (Quantity::Out, self.max_abs_error, self.max_bound_ratio_out),
            (Quantity::Lse, self.max_abs_error_lse, self.max_bound_ratio_lse),
        ] {
            writeln!(f, "{what}  {error:>13.3e}   {ratio:>13.4}")?;
        }
        writeln!(f, "nmse {:>13.3e}   of {} elements", self.nmse, self.elements)?;
        if let Some(worst) = &self.worst {
            writeln!(f, "worst: {worst}")?;
        }
        f.write_str(if self.passed() { "inside the bound" } else { "OUTSIDE THE BOUND" })
    }
}

/// Compares a result with the dense float64 reference, element by element.
///
/// A row that sees no key must be exactly 0 (of either sign) with `lse` exactly `-inf`. NaN is never inside the bound,
/// nor is infinity elsewhere. Rows are shared out over the processors; the report does not depend on how many there
/// are.
///
/// # Errors
/// [`VerifyError::Length`] if `out` or `lse` is not as long as the case needs, [`VerifyError::Bound`] if the chains do
/// not fit the case.
pub fn verify(case: &Case, computed: &Computed<'_>) -> Result<Report, VerifyError> {
    check_chains(case, computed.chains)?;
    let (heads, dims) = (case.geometry().q_heads() as usize, case.geometry().v_head_dim() as usize);
    let rows = case.q_indptr().last().map_or(0, |total_q| *total_q as usize) * heads;
    for (what, found, needed) in
        [(Quantity::Out, computed.out.len(), rows * dims), (Quantity::Lse, computed.lse.len(), rows)]
    {
        if found != needed {
            return Err(VerifyError::Length { what, found, needed });
        }
    }
    let judge = |problem: &Problem<'_>, (dense, bound): &mut (DenseRow, RowBound), row: usize, head: usize| {
        let task = problem.row(row, head)?;
        let at = row * heads + head;
        let out = computed.out.get(at * dims..(at + 1) * dims)?;
        let lse = *computed.lse.get(at)?;
        dense.attend(&task);
        bound.fill(&task, dense, computed.chains.get(task.seq)?, computed.out_dtype);
        let mut verdict = Verdict::default();
        for (dim, ((found, expected), bound)) in out.iter().zip(&dense.out).zip(&bound.out).enumerate() {
            verdict.judge(Quantity::Out, (row, head, Some(dim)), f64::from(*found), *expected, *bound);
        }
        verdict.judge(Quantity::Lse, (row, head, None), f64::from(lse), dense.lse, bound.lse);
        Some(verdict)
    };

    let mut all = Verdict::default();
    // The lengths have been checked, so that there is a verdict on every row.
    for_rows(case, <(DenseRow, RowBound)>::default, judge, |row| row.into_iter().for_each(|row| all.add(row)));
    Ok(Report {
        elements: all.elements,
        max_abs_error: all.error_out,
        max_abs_error_lse: all.error_lse,
        max_bound_ratio: f64::max(all.ratio_out, all.ratio_lse),
        max_bound_ratio_out: all.ratio_out,
        max_bound_ratio_lse: all.ratio_lse,
        nmse: all.nmse(),
        worst: all.worst,
    })
}

/// `|found - expected|`, infinite where it is NaN, and 0 where both are the same infinity; and its part of the bound: 0 of 0
/// is as it should be, anything of 0 is not.
pub(crate) fn error_and_ratio(found: f64, expected: f64, bound: f64) -> (f64, f64) {
    let error = if found == expected { 0.0 } else { finite_or_infinity((found - expected).abs()) };
    (error, if error == 0.0 { 0.0 } else { finite_or_infinity(error / bound) })
}

fn finite_or_infinity(x: f64) -> f64 {
    if x.is_nan() { f64::INFINITY } else { x }
}

/// What is known of one row, or of all so far.
#[derive(Default)]
pub(crate) struct Verdict {
    pub elements: usize,
    pub error_out: f64,
    pub error_lse: f64,
    pub ratio_out: f64,
    pub ratio_lse: f64,
    squared_error: f64,
    square: f64,
    pub worst: Option<Worst>,
}

impl Verdict {
    /// `place` is row, head, and dimension of an `out`.
    pub(crate) fn judge(
        &mut self,
        what: Quantity,
        (row, head, dim): (usize, usize, Option<usize>),
        found: f64,
        expected: f64,
        bound: f64,
    ) {
        let (error, ratio) = error_and_ratio(found, expected, bound);
        self.elements += 1;
        match what {
            Quantity::Out => {
                self.error_out = self.error_out.max(error);
                self.ratio_out = self.ratio_out.max(ratio);
                self.squared_error += error * error;
                self.square += expected * expected;
            }
            Quantity::Lse => {
                self.error_lse = self.error_lse.max(error);
                self.ratio_lse = self.ratio_lse.max(ratio);
            }
        }
        self.consider(Worst { what, row, head, dim, found: found as f32, expected, bound, ratio });
    }

    /// Sum of squared errors of `out` over the sum of squares of what is expected.
    pub(crate) fn nmse(&self) -> f64 {
        if self.squared_error == 0.0 { 0.0 } else { self.squared_error / self.square }
    }

    fn consider(&mut self, element: Worst) {
        if self.worst.is_none_or(|worst| element.ratio > worst.ratio) {
            self.worst = Some(element);
        }
    }

    pub(crate) fn add(&mut self, row: Self) {
        self.elements += row.elements;
        self.error_out = self.error_out.max(row.error_out);
        self.error_lse = self.error_lse.max(row.error_lse);
        self.ratio_out = self.ratio_out.max(row.ratio_out);
        self.ratio_lse = self.ratio_lse.max(row.ratio_lse);
        self.squared_error += row.squared_error;
        self.square += row.square;
        if let Some(worst) = row.worst {
            self.consider(worst);
        }
    }
}
