//! How time grows: with the square of a prompt, in a line with the keys of a single token.
//!
//! A model's step reads each layer's keys once, so they come from memory, however few they are. Calls of a short single
//! token are therefore timed over several copies of its keys, which together take as much room as the longest ones.

use paged_attention_cases::CaseSpec;

use crate::error::BenchError;
use crate::gpu::{Gpu, median};
use crate::judge::{Accuracy, Judge};
use crate::paged::{Paged, Paging};
use crate::problem::Problem;
use crate::session::Options;

/// One length.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Keys of the sequence.
    pub kv_len: u32,
    /// The kernels that ran.
    pub kernel: String,
    /// How near the result is to float64.
    pub accuracy: Accuracy,
    /// Output rows that were compared, and that there are.
    pub coverage: (usize, usize),
    /// Seconds, a value per round.
    pub seconds: Vec<f64>,
}

impl Point {
    /// `(keys, median seconds)`.
    fn at(&self) -> (f64, f64) {
        (f64::from(self.kv_len), median(&self.seconds))
    }
}

/// A curve through points.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// Of the curve in its own coordinates.
    pub slope: f64,
    /// Likewise.
    pub intercept: f64,
    /// The share of the squared differences from the mean that the curve explains, in its own coordinates.
    pub r_squared: f64,
    /// The largest `|measured / curve - 1|`.
    pub residual_max: f64,
}

impl Fit {
    /// `ln y = slope * ln x + intercept`, least squares.
    pub fn power(points: &[(f64, f64)]) -> Self {
        let logs: Vec<_> = points.iter().map(|(x, y)| (x.ln(), y.ln(), 1.0)).collect();
        Self::least_squares(&logs, |y, curve| (y - curve).exp())
    }

    /// `y = slope * x + intercept`, least squares of the relative residuals: noise is in proportion to a time.
    pub fn straight(points: &[(f64, f64)]) -> Self {
        let points: Vec<_> = points.iter().map(|(x, y)| (*x, *y, 1.0 / (y * y))).collect();
        Self::least_squares(&points, |y, curve| y / curve)
    }

    /// Of `(x, y, weight)`; `ratio` is of a measured `y` to the curve's.
    fn least_squares(points: &[(f64, f64, f64)], ratio: fn(f64, f64) -> f64) -> Self {
        let weighted_mean = |value: fn(&(f64, f64, f64)) -> f64| {
            let weights: f64 = points.iter().map(|(.., weight)| weight).sum();
            points.iter().map(|point| point.2 * value(point)).sum::<f64>() / weights
        };
        let (x_mean, y_mean) = (weighted_mean(|(x, ..)| *x), weighted_mean(|(_, y, _)| *y));
        let moment = |other: fn(&(f64, f64, f64)) -> f64, mean: f64| -> f64 {
            points.iter().map(|point| point.2 * (point.0 - x_mean) * (other(point) - mean)).sum()
        };
        let slope = moment(|(_, y, _)| *y, y_mean) / moment(|(x, ..)| *x, x_mean);
        let intercept = y_mean - slope * x_mean;
        let plain_mean = points.iter().map(|(_, y, _)| y).sum::<f64>() / points.len() as f64;
        let (mut unexplained, mut all, mut residual_max) = (0.0, 0.0, 0.0);
        for (x, y, _) in points {
            let curve = slope * x + intercept;
            unexplained += (y - curve).powi(2);
            all += (y - plain_mean).powi(2);
            residual_max = f64::max(residual_max, (ratio(*y, curve) - 1.0).abs());
        }
        Self { slope, intercept, r_squared: 1.0 - unexplained / all, residual_max }
    }
}

/// Points of one kind of shape, shortest first, and the curve that they should lie on.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// The points.
    pub points: Vec<Point>,
    /// Its fit to the medians.
    pub fit: Fit,
}

/// Both curves.
#[derive(Clone, Debug, PartialEq)]
pub struct Growth {
    /// Whole prompts: [`Fit::power`].
    pub prefill: Curve,
    /// Single tokens: [`Fit::straight`].
    pub decode: Curve,
}

struct Timed {
    point: Point,
    /// The same call on copies of its buffers.
    copies: Vec<Paged>,
    repeats: u32,
}

impl Timed {
    fn encode(&self, encoder: &mut wgpu::CommandEncoder) {
        self.copies.iter().for_each(|paged| paged.encode(encoder));
    }

    /// Seconds of one call.
    fn seconds(&self, gpu: &Gpu) -> Result<f64, BenchError> {
        let calls = self.repeats * self.copies.len() as u32;
        Ok(gpu.seconds(&|encoder| self.encode(encoder), self.repeats)? / f64::from(calls))
    }
}

impl Growth {
    /// Steps that [`Growth::measure`] reports.
    pub fn steps(points: usize, options: &Options) -> usize {
        points * (1 + options.rounds)
    }

    /// Judges every shape's result, then times all of them in every round, every other one backwards. `step` hears what is
    /// about to be done.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn measure(
        gpu: &mut Gpu,
        [prefill, decode]: [Vec<CaseSpec>; 2],
        options: &Options,
        step: &mut dyn FnMut(&str),
    ) -> Result<Self, BenchError> {
        let prefill_count = prefill.len();
        let problems: Vec<Problem> = prefill.into_iter().chain(decode).map(Problem::new).collect::<Result<_, _>>()?;
        let kv_bytes_max = problems.iter().map(Problem::kv_bytes).fold(0.0, f64::max);
        let mut shapes = Vec::new();
        for problem in problems {
            step(&format!("checking {}", problem.name()));
            let judge = Judge::new(&problem)?;
            let copies = if problem.decodes() { (kv_bytes_max / problem.kv_bytes()) as usize } else { 1 };
            let paging = Paging::Scattered(options.page_size);
            let copies: Vec<Paged> = (0..copies.max(1))
                .map(|_| Paged::new(gpu, &problem, paging, options.selection))
                .collect::<Result<_, _>>()?;
            let Some(paged) = copies.first() else { continue };
            let point = Point {
                kv_len: problem.spec().seqs.iter().map(|seq| seq.kv_len).max().unwrap_or(0),
                kernel: paged.kernel.clone(),
                accuracy: paged.accuracy(gpu, &judge, "paged")?,
                coverage: judge.coverage(),
                seconds: Vec::new(),
            };
            let mut timed = Timed { point, copies, repeats: 1 };
            timed.repeats = gpu.repeats(&|encoder| timed.encode(encoder), options.target_s)?;
            shapes.push(timed);
        }
        for round in 0..options.rounds {
            let mut order: Vec<&mut Timed> = shapes.iter_mut().collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for timed in order {
                step(&format!("round {} of {}, {} keys", round + 1, options.rounds, timed.point.kv_len));
                let seconds = timed.seconds(gpu)?;
                timed.point.seconds.push(seconds);
            }
        }
        let mut prefill: Vec<Point> = shapes.into_iter().map(|timed| timed.point).collect();
        let decode = prefill.split_off(prefill_count);
        let curve = |points: Vec<Point>, fit: fn(&[(f64, f64)]) -> Fit| {
            let fit = fit(&points.iter().map(Point::at).collect::<Vec<_>>());
            Curve { points, fit }
        };
        Ok(Self { prefill: curve(prefill, Fit::power), decode: curve(decode, Fit::straight) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fits() {
        let xs = [512.0, 1024.0, 2048.0, 4096.0];
        let square = Fit::power(&xs.map(|x| (x, 3e-9 * x * x)));
        assert!((square.slope - 2.0).abs() < 1e-12 && (square.intercept.exp() - 3e-9).abs() < 1e-20, "{square:?}");
        assert!(square.residual_max < 1e-9 && square.r_squared > 1.0 - 1e-12, "{square:?}");
        let line = Fit::straight(&xs.map(|x| (x, 5e-5 + 2e-7 * x)));
        assert!((line.slope - 2e-7).abs() < 1e-18 && (line.intercept - 5e-5).abs() < 1e-14, "{line:?}");
        assert!(line.residual_max < 1e-9 && line.r_squared > 1.0 - 1e-12, "{line:?}");
        // One point a tenth above: the curve goes between, and the residual says so.
        for fit in [Fit::power, Fit::straight] {
            let bent = fit(&xs.map(|x| (x, if x == 1024.0 { 1.1 * x } else { x })));
            assert!((0.03..0.1).contains(&bent.residual_max), "{bent:?}");
            assert!((0.98..0.9999).contains(&bent.r_squared), "{bent:?}");
        }
        // Curvature is seen.
        let square = Fit::straight(&xs.map(|x| (x, x * x)));
        assert!(square.residual_max > 0.3, "{square:?}");
    }
}
