//! How much work goes into one submit: a display's driver ends what takes some two seconds.

use std::time::Duration;

use crate::kernels::KernelId;
use crate::plan::Plan;

/// Time that a submit of a [`Runner`](super::Runner) takes at most, by what was measured before.
pub const SUBMIT_TIME: Duration = Duration::from_millis(250);

/// Multiply-adds per second before anything was measured: less than software drivers on two cores do.
const RATE_FIRST: f64 = 1e9;

/// Slices that make a submit, so that one more or less may go into it when the rate changes.
const SLICES_PER_SUBMIT: u64 = 4;

/// The largest factor between one rate and the next: a single short timing is not believed.
const GROWTH_MAX: f64 = 2.0;

/// Rates, measured from submit to submit, and what follows from them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pace {
    submit: Duration,
    /// Multiply-adds per second of prefill, decode and merge.
    rates: [f64; 3],
}

impl Default for Pace {
    fn default() -> Self {
        Self { submit: SUBMIT_TIME, rates: [RATE_FIRST; 3] }
    }
}

/// Slices that are submitted together, and the seconds that they are to take.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Portion {
    pub(super) end: usize,
    pub(super) seconds: f64,
    kernels: [bool; 3],
}

impl Portion {
    /// A single slice.
    pub(super) fn one(begin: usize) -> Self {
        Self { end: begin + 1, seconds: 0.0, kernels: [false; 3] }
    }
}

fn place(kernel: KernelId) -> usize {
    match kernel {
        KernelId::Prefill | KernelId::Append => 0,
        KernelId::Decode => 1,
        KernelId::Merge => 2,
    }
}

impl Pace {
    pub(super) fn with_submit(self, submit: Duration) -> Self {
        Self { submit, ..self }
    }

    fn seconds(&self, kernel: KernelId, work: u64) -> f64 {
        work as f64 / self.rates.get(place(kernel)).copied().unwrap_or(RATE_FIRST)
    }

    /// Cuts a plan so that several slices make a submit.
    pub(super) fn cut(&self, plan: &mut Plan) {
        let seconds = self.submit.as_secs_f64() / SLICES_PER_SUBMIT as f64;
        plan.cut(|kernel| (seconds / self.seconds(kernel, 1)) as u64);
    }

    /// The slices from number `begin` on that go into the next submit, at least one.
    pub(super) fn portion(&self, works: &[(KernelId, u64)], begin: usize) -> Portion {
        let mut portion = Portion { end: begin, seconds: 0.0, kernels: [false; 3] };
        for (kernel, work) in works.iter().skip(begin) {
            let seconds = portion.seconds + self.seconds(*kernel, *work);
            if portion.end > begin && seconds > self.submit.as_secs_f64() {
                break;
            }
            portion.end += 1;
            portion.seconds = seconds;
            if let Some(kernel) = portion.kernels.get_mut(place(*kernel)) {
                *kernel = true;
            }
        }
        portion
    }

    /// Takes into account that a submit was over after `measured`.
    pub(super) fn note(&mut self, portion: &Portion, measured: Duration) {
        let factor = (portion.seconds / measured.as_secs_f64().max(1e-9)).min(GROWTH_MAX);
        for (rate, _) in self.rates.iter_mut().zip(portion.kernels).filter(|(_, was_there)| *was_there) {
            // A clock that stands still, or a machine that was halted, is no rate to go by for ever.
            *rate = (*rate * factor).clamp(RATE_FIRST / 1e3, RATE_FIRST * 1e9);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use KernelId::{Decode, Merge, Prefill};

    #[test]
    fn portions_keep_to_the_time() {
        let pace = Pace::default().with_submit(Duration::from_secs(1));
        let second = RATE_FIRST as u64;
        let works = [(Prefill, second / 2), (Prefill, second / 2), (Prefill, 3 * second), (Decode, 1), (Merge, second)];
        let mut ends = vec![0];
        while ends.last() < Some(&works.len()) {
            let portion = pace.portion(&works, *ends.last().unwrap());
            assert!(portion.seconds <= 1.0 || portion.seconds == 3.0);
            ends.push(portion.end);
        }
        // What is too long by itself goes alone.
        assert_eq!(ends, [0, 2, 3, 4, 5]);
    }

    #[test]
    fn rates_follow_what_is_measured() {
        let mut pace = Pace::default();
        let works = [(Prefill, RATE_FIRST as u64), (Prefill, RATE_FIRST as u64)];
        let portion = pace.portion(&works, 0);
        assert_eq!((portion.end, portion.seconds), (1, 1.0));
        // Four times as slow as thought is believed at once, four times as fast step by step; others stay.
        pace.note(&portion, Duration::from_secs(4));
        assert_eq!(pace.rates, [RATE_FIRST / 4.0, RATE_FIRST, RATE_FIRST]);
        for rate in [0.5, 1.0, 2.0, 2.0] {
            let portion = pace.portion(&works, 0);
            let seconds = works[0].1 as f64 / (2.0 * RATE_FIRST);
            pace.note(&portion, Duration::from_secs_f64(seconds));
            assert!((pace.rates[0] / RATE_FIRST - rate).abs() < 1e-6, "{:?}", pace.rates);
        }
        pace.note(&pace.portion(&works, 0), Duration::ZERO);
        assert!(pace.rates.iter().all(|rate| rate.is_finite()));
    }
}
