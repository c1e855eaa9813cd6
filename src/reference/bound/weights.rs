//! What happens to weights when scores are off: how often sums are rescaled, and how far a weight can move.

use crate::reference::DenseRow;

/// How often a step's sums can be rescaled by later steps.
#[derive(Debug, Default)]
pub(super) struct Rescales {
    /// `[steps]`: later steps that can move the running maximum, for a key of this step.
    pub per_step: Vec<u32>,
    /// Steps whose lower end no later step has reached yet, with falling lower ends.
    open: Vec<(usize, f64)>,
    /// Difference of neighbouring entries of `per_step`, while it is made.
    change: Vec<i64>,
}

impl Rescales {
    /// Step `t` counts for a key of step `u < t` if its largest `s_i + T_i` is above the largest `s_i - T_i` of all
    /// steps `u .. t`. So it counts for all `u` after the last step whose lower end it does not exceed.
    pub fn count(&mut self, scores: &[f64], errors: &[f64], step_ends: &[usize]) {
        let steps = step_ends.len();
        self.open.clear();
        self.change.clear();
        self.change.resize(steps + 1, 0);
        let (mut keys, mut start) = (scores.iter().zip(errors), 0);
        for (t, end) in step_ends.iter().enumerate() {
            let (mut upper, mut lower) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
            for (score, error) in keys.by_ref().take(end - start) {
                (upper, lower) = (f64::max(upper, score + error), f64::max(lower, score - error));
            }
            let blocked = self.open.partition_point(|(_, lower)| *lower >= upper);
            let first = blocked.checked_sub(1).and_then(|at| self.open.get(at)).map_or(0, |(u, _)| u + 1);
            // It counts for `first .. t`.
            if let Some(change) = self.change.get_mut(first) {
                *change += 1;
            }
            if let Some(change) = self.change.get_mut(t) {
                *change -= 1;
            }
            while self.open.pop_if(|(_, open)| *open <= lower).is_some() {}
            self.open.push((t, lower));
            start = *end;
        }
        self.per_step.clear();
        let mut count = 0;
        self.per_step.extend(self.change.iter().take(steps).map(|change| {
            count += change;
            u32::try_from(count).unwrap_or(0)
        }));
    }
}

/// The second set of coefficients: how far each weight can be moved, the others at their extremes.
///
/// In logarithms throughout, since both weights and their growth may be far outside the range of f64.
#[derive(Debug, Default)]
pub(super) struct Extremes {
    /// `max |p'_j - p_j|`.
    pub coefficient: Vec<f64>,
    /// `ln(p_j) + D_j`.
    pub upper_log: Vec<f64>,
    /// `ln(p_j) - D_j`.
    lower_log: Vec<f64>,
}

impl Extremes {
    pub fn fill(&mut self, dense: &DenseRow, share: &[f64], delta: &[f64]) {
        self.upper_log.clear();
        self.lower_log.clear();
        for (score, delta) in dense.score.iter().zip(delta) {
            self.upper_log.push(score - dense.lse + delta);
            self.lower_log.push(score - dense.lse - delta);
        }
        let (uppers, lowers) = (SumOfOthers::new(&self.upper_log), SumOfOthers::new(&self.lower_log));
        self.coefficient.clear();
        let logs = self.upper_log.iter().zip(&self.lower_log);
        self.coefficient.extend(logs.zip(share).enumerate().map(|(j, ((upper, lower), p))| {
            let most = 1.0 / (1.0 + (lowers.without(j, *lower) - upper).exp());
            let least = 1.0 / (1.0 + (uppers.without(j, *upper) - lower).exp());
            f64::max(most - p, p - least).max(0.0)
        }));
    }
}

/// `ln(sum_(i != j) e^(x_i))` for any `j`.
struct SumOfOthers {
    largest_at: usize,
    largest: f64,
    /// The largest of the rest, and the sum of the rest in units of it.
    next: f64,
    rest: f64,
}

impl SumOfOthers {
    fn new(logs: &[f64]) -> Self {
        let (mut largest_at, mut largest, mut next) = (0, f64::NEG_INFINITY, f64::NEG_INFINITY);
        for (at, log) in logs.iter().copied().enumerate() {
            if log > largest {
                (largest_at, largest, next) = (at, log, largest);
            } else {
                next = next.max(log);
            }
        }
        let others = logs.iter().enumerate().filter(|(at, _)| *at != largest_at);
        let rest = if next > f64::NEG_INFINITY { others.map(|(_, log)| (log - next).exp()).sum() } else { 0.0 };
        Self { largest_at, largest, next, rest }
    }

    fn without(&self, j: usize, log: f64) -> f64 {
        if j == self.largest_at {
            return if self.rest > 0.0 { self.next + self.rest.ln() } else { f64::NEG_INFINITY };
        }
        // What cancels in the difference is small beside the largest, to which it is added.
        let rest = (self.rest - (log - self.next).exp()).max(0.0);
        self.largest + (rest * (self.next - self.largest).exp()).ln_1p()
    }
}
