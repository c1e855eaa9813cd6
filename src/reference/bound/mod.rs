//! How far an f32 kernel may be from exact attention: a bound for every element of `out` and `lse`.
//!
//! The bound is a theorem about any kernel that follows the rules below, not an estimate: it holds for every input that
//! [`Case`] accepts, whatever the order of sums. Symbols, for one query row and head with `n` visible keys:
//!
//! | symbol | meaning |
//! | --- | --- |
//! | `s_j`, `A_j` | exact score, `scale * q . k_j` without options; `abs(scale) * sum_i abs(q_i k_ji)` |
//! | `p_j`, `o`, `lse` | exact weights (they sum to 1), output and log-sum-exp |
//! | `eps` | `2^-23`: WGSL leaves the direction of rounding open, so the unit is a whole unit in the last place |
//! | `gamma(n)` | `n eps / (1 - n eps)`: `n` roundings in a chain (Higham 2002, lemma 3.1) |
//!
//! # What the kernel does
//!
//! 1. Scores are kept in units of log2: `x_j = (q . k_j) * c` or `(c q) . k_j`, with `c = scale * log2(e)` in f32. Options
//!    come in as under "Options of the scores".
//! 2. A step takes in [`Chains::step_keys`] keys at successive positions, the first step from position 0, under one
//!    running maximum: `m` is the largest `x_j` so far. (Fewer `step_keys` than a kernel's give a larger bound: 1 fits
//!    every kernel that goes through a sequence, or each split of it, in order.) Where a kernel goes through keys in another
//!    order ([`Chains::order`]), "successive" and "later" are meant in that order.
//! 3. Weights are `exp2(x_j - m)`. A step that moves the maximum from `m` to `m'` multiplies the sum `l` and the
//!    accumulator by `exp2(m - m')`. **A step that does not move it multiplies by exactly 1**: by selection, or on
//!    devices whose `exp2(0)` is 1. WGSL would let it be off by 3 units, once a step, which no useful bound survives.
//!    A key that the row does not see (causal mask, window, mask, a bias of `-inf`) is no part of this: it moves no
//!    maximum and adds to no sum, and a step without a visible key changes nothing.
//! 4. Splits start at multiples of `step_keys`, with no maximum, and leave `(m, l, acc)`. They are folded from left to
//!    right in the same way.
//! 5. A sink joins last: `m' = max(m, sink log2(e))`, `l' = l f + exp2(sink log2(e) - m')`, `acc' = acc f`, with one
//!    `f = exp2(m - m')`, which is exactly 1 where the sink is not above the maximum.
//! 6. `out = acc / l`, by a division or by a reciprocal, then rounded to the output type; `lse = (m + log2 l) * ln 2`. With
//!    a sink, `f / l'` may be made first.
//!
//! # Weights
//!
//! A sink is one more key here, of score `s = sink`, without a value, in a step of its own after all others.
//!
//! The largest computed score is a reference point that cancels. A kernel's weights, relative to their sum, are those
//! of exact softmax over `s_j + d_j` with `abs(d_j) <= D_j`:
//!
//! ```text
//! T_j = gamma(dot + 3) A_j + U                      the score: its dot product, and 3 for splitting a fused
//!                                                   multiply-add, rounding `c`, and multiplying by it; more with
//!                                                   options, and 2 eps abs(s) + U for a sink
//! G_j = max_i (s_i + T_i) - (s_j - T_j)             at least the distance to the computed maximum
//! D_j = T_j + eps (3 R_j + (2 log2(e) + 1) G_j)     exponentials and their arguments
//! ```
//!
//! `exp2(x)` may be off by `3 + 2 abs(x)` units (WGSL, "Accuracy of built-in functions"). A key's weight is a product
//! of `R_j` exponentials whose arguments add up to its distance from the final maximum, hence `2 log2(e) G_j`; rounding
//! the arguments adds `G_j` once. `R_j` is 1 for the weight itself, 1 for the fold of its split into those before, and
//! 1 for each later step that can move the maximum. Step `t` can, for a key of step `u`, if its largest `s_i + T_i` is
//! above the largest `s_i - T_i` of the steps `u .. t`: that is so wherever splits begin, since a split's maximum is
//! over at least those steps. The number of steps that set a record grows like the logarithm of their number on
//! unordered data. `U` covers numbers below `2^-126`, which may be flushed to zero anywhere.
//!
//! # Options of the scores
//!
//! Each takes a score with its error `T` to the next. What is added may be added by a fused multiply-add, or by a product
//! and a sum; constants that hold `log2(e)` are rounded once.
//!
//! *Soft cap* `C`: the kernel makes `x = scale q . k / C` as above, `(q . k) * c` or `(c q) . k` with `c = scale / C`; then
//! `y = abs(x) * 2 log2(e)`, `e = exp2(-y)`, `t = (1 - e) / (1 + e)`, and `t * (C log2(e))` with the sign of `x`. Let
//! `T_x = gamma(dot + 3) A / C + U` be the error of `x`, `near = max(abs(x) - T_x, 0)` and `far = abs(x) + T_x` the ends of
//! where the computed one can be, and `S = 1 - tanh(near)^2`, the largest slope of `tanh` there. The argument is off by
//! `T_x` and by the two roundings of `y`; a relative error `d` of `e` moves `t` by `2 e d / (1 + e)^2 = S d / 2`, with
//! `d <= (3 + 2 y) eps` by the exponential; the difference, the sum, the quotient (2.5), the constant and the product are
//! relative to the result:
//!
//! ```text
//! T <- C min(2 + 16 eps, S (T_x + 2 eps far + eps (1.5 + 2 log2(e) far)) + 6.5 eps min(far, 1) + U)
//! ```
//!
//! which is at most about `10 eps C` beside what the dot product brings, and `6.5 eps C` where the cap is reached.
//!
//! *ALiBi* adds `a = slope * d`, `d = j - pos`, a difference of integers as one f32: exact up to 2^24, rounded once beyond.
//! The slope's constant and the product are 2 roundings:
//!
//! ```text
//! T <- T + (2 or 3) eps abs(a) + eps abs(s + a) + U
//! ```
//!
//! *Bias* adds `b` times the constant `log2(e)`:
//!
//! ```text
//! T <- T + 2 eps abs(b) + eps abs(s + b) + U
//! ```
//!
//! # From weights to the output
//!
//! The perturbed output is `o' = sum_j p_j e^(d_j) v_j / Z`, `Z = sum_j p_j e^(d_j)`. As `sum_j p_j (v_j - o) = 0`,
//!
//! ```text
//! o' - o = sum_j p_j (e^(d_j) - 1) (v_j - o) / Z,   Z >= sum_j p_j e^(-D_j) >= e^(-E),   E = sum_j p_j D_j
//! abs(o' - o) <= sum_j c_j abs(v_j - o),            c_j = p_j (e^(D_j) - 1) e^E                          (first)
//! ```
//!
//! the middle one by Jensen's inequality. To first order this is the best possible bound from `D_j` alone. Where some
//! `D_j` are large it explodes; each weight then has extremes of its own, with all other weights at theirs:
//!
//! ```text
//! p'_j <= p_j e^(D_j)  / (p_j e^(D_j)  + sum_(i != j) p_i e^(-D_i))
//! p'_j >= p_j e^(-D_j) / (p_j e^(-D_j) + sum_(i != j) p_i e^(D_i))
//! ```
//!
//! and `c_j = max abs(p'_j - p_j)` (second). Either set is valid for a whole row; the one with the smaller
//! `sum_j c_j (1 - p_j)` is taken, since `abs(v_j - o) <= (1 - p_j) max_i abs(v_j - v_i)`. As `o'` is a mean of values,
//! the largest `abs(v_j - o)` bounds its distance too. Call the smallest of these `B`.
//!
//! Let `V` bound `sum_j p'_j abs(v_j)`: the first way gives `e^(max D + E) sum_j p_j abs(v_j)`, and the largest `abs(v_j)`
//! always does. Then, with `H = accumulate + 1` (a product, then the sums; 2 more with a sink, which rescales the sum and
//! adds to it),
//!
//! ```text
//! abs(out - o) <= B + gamma(H) / (1 - gamma(H)) (V + abs(o) + B) + 3.5 eps (abs(o) + B + ...) + flushed + stored
//! abs(lse' - lse) <= ln(sum_j p_j e^(D_j)) + gamma(H) / (1 - gamma(H)) + ln 2 max(2^-21, 3 eps log2 l)
//!                    + 3 eps (abs(lse) + ...) + flushed
//! ```
//!
//! 3.5: a reciprocal may be off by 2.5 units, and its product is rounded; 4.5 with a sink, whose factor is one more. A row
//! that sees no key is exactly 0, whatever its sink. WGSL's `log2` is good to `2^-21` for `l` in
//! `[0.5, 2]` and to 3 units elsewhere. `flushed` counts, per key, a weight, a product, two sums and a rescaled sum.
//! `stored` is one unit of the output type, and what may be flushed in it. Terms of second order in `eps` are covered
//! by a factor `1 + 2^-14`, as are the roundings of the reference and of this bound themselves (below `2^-28` of it).
//!
//! # Scales
//!
//! Keys and values that are stored with scales (int8, fp8) are judged as the numbers that the pages hold: stored element
//! times scale. Scores are then multiplied by the key's scale before anything else, weights by the value's after they were
//! summed; `dot` and `accumulate` count this rounding and that of the reference's product. What storing itself does to
//! keys and values is stated apart from this bound, in [`super::storage`].
//!
//! # Sources
//!
//! N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., SIAM 2002 (sections 3.1 and 4.2: chains,
//! and sums in any order). P. Blanchard, D. J. Higham, N. J. Higham, "Accurately computing the log-sum-exp and softmax
//! functions", *IMA J. Numer. Anal.* 41 (2021): the shifted algorithm, and that errors of scores act on softmax like
//! errors of its input. W3C, *WebGPU Shading Language*, section "Floating point accuracy".

mod weights;

use std::f64::consts::{LN_2, LOG2_E};
use std::ops::Range;

use thiserror::Error;

use self::weights::{Extremes, Rescales};
use super::problem::RowTask;
use super::storage::RowErrors;
use super::{DenseRow, Problem, for_rows};
use crate::case::Case;
use crate::chains::Chains;
use crate::geometry::Dtype;

/// `2^-23`, the unit of f32 rounding in a free direction.
const EPS: f64 = 1.0 / 8_388_608.0;

/// `2^-126`, below which an f32 may be flushed to zero.
const TINY: f64 = f32::MIN_POSITIVE as f64;

/// `2^24`: whole numbers up to it are exact in f32.
const EXACT_INTEGERS: u64 = 1 << 24;

/// `2^-40`: more than what two results in float64 differ by, relative to their scores, values and sums.
const FLOAT64: f64 = 1.0 / 1_099_511_627_776.0;

/// Covers second-order terms, and the rounding of the reference.
const SECOND_ORDER: f64 = 1.0 + 1.0 / 16_384.0;

/// Up to this largest `D_j`, the first set of coefficients is taken without looking at the second, and `e^D - 1` as
/// `D + D^2`, which is above it.
const SMALL: f64 = 0.125;

/// The longest chain that a bound is stated for.
const CHAIN_MAX: u32 = 1 << 20;

/// Chains that no bound can be stated for.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BoundError {
    /// There must be one [`Chains`] per sequence.
    #[error("`chains` has {found} entries; one for each of {needed} sequences is needed")]
    Count {
        /// Entries found.
        found: usize,
        /// Sequences of the case.
        needed: usize,
    },
    /// A chain is too long for a useful bound, a step takes in no key, or the order is none of the sequence's keys.
    #[error(
        "sequence {seq}: {found:?}; `step_keys` of at least 1, chains of at most {CHAIN_MAX}, and an order that has every key \
         once, in ranges that begin at multiples of `step_keys`, are needed"
    )]
    Chains {
        /// The sequence.
        seq: usize,
        /// Its chains.
        found: Chains,
    },
}

/// The largest errors that a correct kernel can have.
#[derive(Clone, Debug, PartialEq)]
pub struct Bounds {
    /// `[total_q, q_heads, v_head_dim]`; 0 in a row that sees no key.
    pub out: Vec<f64>,
    /// `[total_q, q_heads]`; 0 in a row that sees no key and has no sink.
    pub lse: Vec<f64>,
}

/// The bound of every element of `case`'s result, for a kernel with `chains` (one per sequence) that stores `out` as
/// `out_dtype`.
///
/// # Errors
/// [`BoundError`], if `chains` does not fit the case or cannot be used.
pub fn bounds(case: &Case, chains: &[Chains], out_dtype: Dtype) -> Result<Bounds, BoundError> {
    check_chains(case, chains)?;
    let mut all = Bounds { out: Vec::new(), lse: Vec::new() };
    let work = |problem: &Problem<'_>, (dense, bound): &mut (DenseRow, RowBound), row, head| match problem
        .row(row, head)
        .and_then(|task| Some((chains.get(task.seq)?, task)))
    {
        Some((chains, task)) => {
            dense.attend(&task);
            bound.fill(&task, dense, chains, out_dtype);
            (bound.out.clone(), bound.lse)
        }
        None => (Vec::new(), 0.0),
    };
    for_rows(case, <(DenseRow, RowBound)>::default, work, |(out, lse)| {
        all.out.extend(out);
        all.lse.push(lse);
    });
    Ok(all)
}

pub(crate) fn check_chains(case: &Case, chains: &[Chains]) -> Result<(), BoundError> {
    if chains.len() != case.seqs() {
        return Err(BoundError::Count { found: chains.len(), needed: case.seqs() });
    }
    // Chains of a sequence without query rows are nobody's.
    let unusable = |c: &Chains, kv_len: u32| {
        c.step_keys == 0 || c.dot.max(c.accumulate) > CHAIN_MAX || !(c.order.is_empty() || is_order(c, kv_len))
    };
    let mut all = chains.iter().zip(case.lengths()).enumerate();
    match all.find(|(_, (chains, (q_len, kv_len)))| *q_len > 0 && unusable(chains, *kv_len)) {
        Some((seq, (found, _))) => Err(BoundError::Chains { seq, found: found.clone() }),
        None => Ok(()),
    }
}

/// Whether the order has each of the keys once, and no step lies in two of its ranges.
fn is_order(chains: &Chains, kv_len: u32) -> bool {
    let mut ranges: Vec<_> = chains.order.iter().collect();
    ranges.sort_unstable_by_key(|range| (range.start, range.end));
    let follows = |end: u32, range: &&Range<u32>| {
        (range.start == end && range.end >= end && end.is_multiple_of(chains.step_keys)).then_some(range.end)
    };
    ranges.iter().try_fold(0, follows) == Some(kv_len)
}

/// What is known of a row's `D_j`.
struct Spread {
    delta_max: f64,
    /// Whether all are at most [`SMALL`].
    small: bool,
    /// `sum_j p_j D_j`.
    mean: f64,
    /// `sum_j p_j (e^(D_j) - 1)`; infinite where it was not made, the deltas being large.
    growth: f64,
}

/// One row's bound. Reused from row to row.
#[derive(Debug, Default)]
pub(crate) struct RowBound {
    /// `[v_head_dim]`.
    pub out: Vec<f64>,
    pub lse: f64,
    /// `p_j`.
    share: Vec<f64>,
    /// `T_j`.
    score: Vec<f64>,
    /// `D_j`.
    delta: Vec<f64>,
    /// `c_j`.
    coefficient: Vec<f64>,
    second: Extremes,
    /// The keys, by their places among those that are seen, in the order in which they are gone through; then the sink.
    places: Vec<usize>,
    /// `[steps]`: where the places of each step with a visible key end.
    step_ends: Vec<usize>,
    rescales: Rescales,
    absolute: Vec<f64>,
    distance: Vec<f64>,
    distance_max: Vec<f64>,
}

impl RowBound {
    /// `dense` must be the same row's.
    pub(crate) fn fill(&mut self, task: &RowTask<'_>, dense: &DenseRow, chains: &Chains, out_dtype: Dtype) {
        self.out.clear();
        self.out.resize(task.v_head_dim, 0.0);
        self.lse = 0.0;
        if dense.score.is_empty() {
            return;
        }
        let shift = self.fill_delta(task, dense, chains);
        let Spread { delta_max, small, mean, growth } = self.spread(task, dense);

        let (sink_roundings, sink_factor) = if task.sink.is_some() { (2, 1.0) } else { (0, 0.0) };
        let sum_chain = gamma(chains.accumulate.saturating_add(1 + sink_roundings));
        let sum_chain = sum_chain / (1.0 - sum_chain);
        let keys = dense.score.len() as f64;
        let stretch = if small { (delta_max + mean).exp() } else { f64::INFINITY };
        // With scales, a weight times its scale may be flushed before it meets an element of up to 448.
        let lost_weight = if chains.scaled { 448.0 } else { 0.0 };
        // Without a key, there is nothing that could be off.
        let seen = if task.keys.is_empty() { &[] } else { task.v_max };
        let elements = self.out.iter_mut().zip(&dense.out).zip(seen);
        let sums = self.absolute.iter().zip(&self.distance).zip(&self.distance_max);
        for (((bound, out), v_max), ((absolute, distance), distance_max)) in elements.zip(sums) {
            let weights = if small { *distance } else { distance.min(*distance_max) };
            let reach = out.abs() + weights;
            let absolute = (stretch * absolute).min(*v_max);
            let sums = sum_chain * (absolute + reach);
            let division = (3.5 + sink_factor) * EPS * (reach + sums);
            let flushed = TINY * (keys * (2.0 * v_max + 5.0 + lost_weight) + 3.0);
            let total = (weights + sums + division + flushed) * SECOND_ORDER;
            *bound = total + stored(out.abs(), total, out_dtype);
        }

        let weights = self.lse_error(delta_max, small, growth);
        let weight_sum_log2 = (dense.lse - shift + weights + sum_chain) * LOG2_E;
        let log2 = f64::max(4.0 * EPS, 3.0 * EPS * weight_sum_log2) * LN_2;
        let error = weights + sum_chain + log2 + TINY * (4.0 * keys + 2.0);
        self.lse = (error + 3.0 * EPS * (dense.lse.abs() + error)) * SECOND_ORDER;
    }

    /// The same for what storing does to keys and values, in exact arithmetic: how far the result of the stored ones may be
    /// from that of the exact ones, which `task` and `dense` have. `keys` and `values` are of the row's KV head.
    ///
    /// Scores are off by `abs(scale) * sum_i abs(q_i) e_ji`, with `e` of [`super::storage`] (no option makes more of it:
    /// a soft cap has no slope above 1), which takes the place of `D_j`; then values are off by `sum_j p'_j e_j`. Both
    /// results are made in float64, which counts where nothing else is off.
    pub(crate) fn fill_stored(&mut self, task: &RowTask<'_>, dense: &DenseRow, keys: &RowErrors, values: &RowErrors) {
        self.out.clear();
        self.out.resize(task.v_head_dim, 0.0);
        self.lse = 0.0;
        if dense.score.is_empty() {
            return;
        }
        self.fill_share(dense);
        let q_sum: f64 = task.q.iter().map(|x| f64::from(x.abs())).sum();
        let floor = |errors: &RowErrors, key: &u32| errors.floor.get(*key as usize).copied().unwrap_or(f64::INFINITY);
        let magnitudes = task.keys.iter().zip(&dense.magnitude);
        self.delta.clear();
        self.delta.extend(magnitudes.map(|(key, magnitude)| {
            task.scale.abs() * q_sum * floor(keys, key) + (keys.part + FLOAT64) * magnitude + FLOAT64
        }));
        self.delta.extend(task.sink.map(|_| 0.0));
        let Spread { delta_max, small, mean, growth } = self.spread(task, dense);

        let stretch = if small { (delta_max + mean).exp() } else { f64::INFINITY };
        let floors = || task.keys.iter().map(|key| floor(values, key));
        let floor_max = floors().fold(0.0, f64::max);
        let floor_mean: f64 = self.share.iter().zip(floors()).map(|(p, floor)| p * floor).sum();
        let elements = self.out.iter_mut().zip(task.v_max);
        let sums = self.absolute.iter().zip(&self.distance).zip(&self.distance_max);
        for ((bound, v_max), ((absolute, distance), distance_max)) in elements.zip(sums) {
            let weights = if small { *distance } else { distance.min(*distance_max) };
            let values = (stretch * (floor_mean + values.part * absolute)).min(floor_max + values.part * v_max);
            *bound = (weights + values + FLOAT64 * v_max) * SECOND_ORDER;
        }
        self.lse = (self.lse_error(delta_max, small, growth) + FLOAT64 * dense.lse.abs()) * SECOND_ORDER;
    }

    /// Fills `share`, `score` and `delta`; returns `max_i (s_i - T_i)`, which the computed maximum is not below.
    fn fill_delta(&mut self, task: &RowTask<'_>, dense: &DenseRow, chains: &Chains) -> f64 {
        self.fill_share(dense);
        self.fill_score_errors(task, dense, chains);
        self.fill_places(task, chains);
        self.fill_step_ends(task, chains.step_keys);
        let ends = || dense.score.iter().zip(&self.score);
        let top = ends().map(|(score, error)| score + error).fold(f64::NEG_INFINITY, f64::max);
        let bottom = ends().map(|(score, error)| score - error).fold(f64::NEG_INFINITY, f64::max);
        let in_order = |values: &[f64]| -> Vec<f64> {
            self.places.iter().filter_map(|place| values.get(*place)).copied().collect()
        };
        if chains.order.is_empty() {
            self.rescales.count(&dense.score, &self.score, &self.step_ends);
        } else {
            self.rescales.count(&in_order(&dense.score), &in_order(&self.score), &self.step_ends);
        }
        self.delta.clear();
        self.delta.resize(self.score.len(), 0.0);
        let mut begin = 0;
        for (end, rescales) in self.step_ends.iter().zip(&self.rescales.per_step) {
            // The weight itself, the fold of its split, and the steps that can move the maximum.
            let exponentials = 3.0 * (2.0 + f64::from(*rescales));
            for place in self.places.get(begin..*end).unwrap_or_default() {
                let number = |values: &[f64]| values.get(*place).copied().unwrap_or(f64::INFINITY);
                let (score, error) = (number(&dense.score), number(&self.score));
                let distance = top - (score - error);
                if let Some(delta) = self.delta.get_mut(*place) {
                    *delta = (error + EPS * (exponentials + (2.0 * LOG2_E + 1.0) * distance)) * SECOND_ORDER;
                }
            }
            begin = *end;
        }
        bottom
    }

    /// Fills `places`.
    fn fill_places(&mut self, task: &RowTask<'_>, chains: &Chains) {
        self.places.clear();
        if chains.order.is_empty() {
            self.places.extend(0..task.keys.len());
        }
        for range in &chains.order {
            let [begin, end] = [range.start, range.end].map(|end| task.keys.partition_point(|key| *key < end));
            self.places.extend(begin..end);
        }
        self.places.extend(task.sink.map(|_| task.keys.len()));
    }

    fn fill_share(&mut self, dense: &DenseRow) {
        self.share.clear();
        self.share.extend(dense.weight.iter().map(|weight| weight / dense.weight_sum));
    }

    /// From `delta` to the sums over values.
    fn spread(&mut self, task: &RowTask<'_>, dense: &DenseRow) -> Spread {
        let delta_max = self.delta.iter().copied().fold(0.0, f64::max);
        let small = delta_max <= SMALL;
        let mean: f64 = self.share.iter().zip(&self.delta).map(|(p, delta)| p * delta).sum();
        let growth: f64 = if small {
            self.share.iter().zip(&self.delta).map(|(p, delta)| p * delta * (1.0 + delta)).sum()
        } else {
            f64::INFINITY
        };
        self.make_coefficients(dense, small, mean);
        self.sum_values(task, dense, small);
        Spread { delta_max, small, mean, growth }
    }

    /// `ln(sum_j p_j e^(D_j))`, which is at most the largest `D_j`.
    fn lse_error(&self, delta_max: f64, small: bool, growth: f64) -> f64 {
        if small { growth } else { log_sum_exp_shifted(&self.second.upper_log).min(delta_max) }
    }

    /// Fills `score`.
    fn fill_score_errors(&mut self, task: &RowTask<'_>, dense: &DenseRow, chains: &Chains) {
        // What a kernel multiplies `q . k` by.
        let cap = task.softcap.unwrap_or(1.0);
        let factor = task.scale.abs() / cap;
        let q_sum: f64 = task.q.iter().map(|x| f64::from(x.abs())).sum();
        // Flushed to zero: inputs, products and sums of either way to scale, and the score itself.
        let ways = 2.0 * task.head_dim as f64;
        let flushed = TINY * (factor * (ways + q_sum + task.k_sum_max) + task.k_sum_max + ways + 1.0);
        // With scales, what is flushed counts a scale, of which each stored element is at least the 512th part.
        let scale = if chains.scaled { TINY * ways * (1.0 + factor) * 512.0 * task.k_sum_max } else { 0.0 };
        let flushed = flushed + scale;
        // A factor below 2^-126 may be flushed, which takes the whole score with it.
        let lost = if factor * LOG2_E < TINY * 1.001 { 1.0 } else { 0.0 };
        let chain = gamma(chains.dot.saturating_add(3)) + lost;
        self.score.clear();
        let keys = task.keys.iter().zip(dense.scaled.iter().zip(&dense.magnitude));
        self.score.extend(keys.enumerate().map(|(index, (key, (scaled, magnitude)))| {
            let of_dot = chain * (magnitude / cap) + flushed;
            let (mut score, mut error) = match task.softcap {
                Some(cap) => (cap * (scaled / cap).tanh(), cap * tanh_error((scaled / cap).abs(), of_dot)),
                None => (*scaled, of_dot),
            };
            if let Some(slope) = task.slope {
                let (distance, added) = ((i64::from(*key) - task.position).unsigned_abs(), task.alibi(*key));
                let roundings = if distance > EXACT_INTEGERS { 3.0 } else { 2.0 };
                let flushed = TINY * (distance as f64 + slope.abs() + 2.0);
                score += added;
                error += EPS * (roundings * added.abs() + score.abs()) + flushed;
            }
            if task.bias.is_some() {
                let added = task.bias(index);
                score += added;
                error += EPS * (2.0 * added.abs() + score.abs()) + 4.0 * TINY;
            }
            error
        }));
        self.score.extend(task.sink.map(|sink| 2.0 * EPS * sink.abs() + 4.0 * TINY));
    }

    /// Fills `step_ends`. Steps are counted from position 0, whatever of them is hidden.
    fn fill_step_ends(&mut self, task: &RowTask<'_>, step_keys: u32) {
        self.step_ends.clear();
        let step = |place: &usize| task.keys.get(*place).map(|key| key / step_keys);
        let mut end = 0;
        for places in self.places.chunk_by(|a, b| step(a) == step(b)) {
            end += places.len();
            self.step_ends.push(end);
        }
    }

    /// Fills `coefficient`, and `second` unless the deltas are small.
    fn make_coefficients(&mut self, dense: &DenseRow, small: bool, mean: f64) {
        let stretch = mean.exp();
        self.coefficient.clear();
        let pairs = self.share.iter().zip(&self.delta);
        if small {
            self.coefficient.extend(pairs.map(|(p, delta)| p * delta * (1.0 + delta) * stretch));
            return;
        }
        self.second.fill(dense, &self.share, &self.delta);
        // Beyond this the first set cannot be the smaller one, and may overflow.
        if mean > 1.0 {
            self.coefficient.extend(&self.second.coefficient);
            return;
        }
        self.coefficient.extend(pairs.zip(&self.second.upper_log).map(|((p, delta), upper_log)| {
            let grown = if *delta < 1.0 { p * delta.exp_m1() } else { upper_log.exp() - p };
            grown * stretch
        }));
        let size = |coefficients: &[f64]| -> f64 {
            coefficients.iter().zip(&self.share).map(|(coefficient, p)| coefficient * (1.0 - p)).sum()
        };
        // Written so that an overflow in the first set leads to the second.
        let first = size(&self.coefficient);
        if !(first.is_finite() && first <= size(&self.second.coefficient)) {
            self.coefficient.clear();
            self.coefficient.extend(&self.second.coefficient);
        }
    }

    /// Per dimension: `sum_j p_j |v_j|`, `sum_j c_j |v_j - o|` and, unless the deltas are small, `max_j |v_j - o|`.
    fn sum_values(&mut self, task: &RowTask<'_>, dense: &DenseRow, small: bool) {
        for sums in [&mut self.absolute, &mut self.distance, &mut self.distance_max] {
            sums.clear();
            sums.resize(task.v_head_dim, 0.0);
        }
        let keys = self.share.iter().zip(&self.coefficient).zip(task.seen_v());
        for ((p, coefficient), v) in keys {
            let sums = self.absolute.iter_mut().zip(&mut self.distance);
            for (((absolute, distance), v), out) in sums.zip(v).zip(&dense.out) {
                let v = f64::from(*v);
                *absolute += p * v.abs();
                *distance += coefficient * (v - out).abs();
            }
            if !small {
                for ((max, v), out) in self.distance_max.iter_mut().zip(v).zip(&dense.out) {
                    *max = f64::max(*max, (f64::from(*v) - out).abs());
                }
            }
        }
        // The sink, whose value is 0.
        if let Some(coefficient) = self.coefficient.get(task.keys.len()) {
            let sums = self.distance.iter_mut().zip(&mut self.distance_max).zip(&dense.out);
            for ((distance, max), out) in sums {
                *distance += coefficient * out.abs();
                *max = f64::max(*max, out.abs());
            }
        }
    }
}

/// How far a kernel's `tanh(x)` may be off where its argument is off by `error`, the factor after it counted in. See
/// "Options of the scores".
fn tanh_error(x: f64, error: f64) -> f64 {
    let (near, far) = (f64::max(x - error, 0.0), x + error);
    let e = (-2.0 * near).exp();
    let slope = 4.0 * e / ((1.0 + e) * (1.0 + e));
    let argument = error + EPS * (2.0 * far + 1.5 + 2.0 * LOG2_E * far) + TINY;
    f64::min(slope * argument + 6.5 * EPS * far.min(1.0) + 4.0 * TINY, 2.0 + 16.0 * EPS)
}

/// `n` roundings in a chain: `|theta| <= n eps / (1 - n eps)`.
fn gamma(n: u32) -> f64 {
    let n = f64::from(n) * EPS;
    n / (1.0 - n)
}

/// What storing a value within `error` of `out` may add: one unit in the last place, or all of it where it may be
/// flushed.
fn stored(out: f64, error: f64, dtype: Dtype) -> f64 {
    let (unit, smallest) = match dtype {
        // The division's own rounding.
        Dtype::F32 => return 0.0,
        Dtype::F16 => (1.0 / 1024.0, 1.0 / 16_384.0),
        Dtype::Bf16 => (1.0 / 128.0, TINY),
    };
    let largest = out + error;
    let flushed = if out - error < smallest { largest.min(smallest) } else { 0.0 };
    f64::max(unit * largest, flushed)
}

/// `ln(sum e^x)`, for numbers of any size.
fn log_sum_exp_shifted(logs: &[f64]) -> f64 {
    let max = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + logs.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests;
