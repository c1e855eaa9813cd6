//! Float64 attention that shares nothing with the kernels, and how far a kernel may be from it.
//!
//! - [`dense`] materialises the scores of a row: the definition of attention, and what results are compared with.
//! - [`online`] is the online-softmax recurrence that the kernels follow, in float64.
//! - [`bound`] states how far an f32 kernel may be off, element by element.
//! - [`storage`] states what the way into the pages may do to keys and values: rotation, rounding, quantisation.
//!
//! Inputs of every storage type are exact in f32, and a product of two f32 is exact in f64.

pub mod bound;
mod dense;
mod online;
mod parallel;
mod problem;
pub mod storage;
mod sum;

use std::num::NonZeroUsize;

use crate::case::Case;

pub(crate) use dense::DenseRow;
pub use online::{OnlineRow, online_row};
pub(crate) use parallel::for_rows;
pub(crate) use problem::Problem;

/// What attention returns, in float64.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// `[total_q, q_heads, v_head_dim]`; exactly 0 in a row that sees no key.
    pub out: Vec<f64>,
    /// `[total_q, q_heads]`, natural logarithm, sinks included; `-inf` for a row that sees no key and has no sink.
    pub lse: Vec<f64>,
}

/// Dense attention: every score of a row is made and kept, then the softmax, then the weighted mean.
///
/// Scores are off by at most `(head_dim / 8 + 5) * 2^-53 * |scale| * sum |q_i k_i|`, and by a few units in the last place
/// of what soft cap, ALiBi and bias make of them; what follows adds at most `(16 + 2 ln n) * 2^-53 * max |V|` for `n` keys,
/// the exponential being within one unit in the last place.
pub fn dense(case: &Case) -> Reference {
    by_row(case, |problem, row, head| {
        let Some(task) = problem.row(row, head) else { return (Vec::new(), f64::NEG_INFINITY) };
        let mut dense = DenseRow::default();
        dense.attend(&task);
        (dense.out, dense.lse)
    })
}

/// The online-softmax recurrence over blocks of `block` keys, from the same scores as [`dense`].
pub fn online(case: &Case, block: NonZeroUsize) -> Reference {
    by_row(case, |problem, row, head| {
        let Some(task) = problem.row(row, head) else { return (Vec::new(), f64::NEG_INFINITY) };
        let mut dense = DenseRow::default();
        dense.make_scores(&task);
        let scores = dense.score.get(..task.keys.len()).unwrap_or_default();
        let values: Vec<f32> = task.seen_v().flatten().copied().collect();
        let OnlineRow { out, lse } = online_row(scores, &values, task.v_head_dim, block, task.sink);
        (out, lse)
    })
}

fn by_row(case: &Case, attend: impl Fn(&Problem<'_>, usize, usize) -> (Vec<f64>, f64) + Sync) -> Reference {
    let mut reference = Reference { out: Vec::new(), lse: Vec::new() };
    let work = |problem: &Problem<'_>, (): &mut (), row, head| attend(problem, row, head);
    for_rows(
        case,
        || (),
        work,
        |(out, lse)| {
            reference.out.extend(out);
            reference.lse.push(lse);
        },
    );
    reference
}
