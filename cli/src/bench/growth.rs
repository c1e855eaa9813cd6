//! How time grows with length: as a table for people, and as JSON.

use std::fmt::Write;

use paged_attention_bench_kit::{Curve, Growth, Options, Point, best, median};
use serde::Serialize;

use super::args::BenchArgs;
use super::report::{Header, accuracy, aligned};

/// The whole report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GrowthReport {
    #[serde(flatten)]
    pub header: Header,
    dtype: String,
    /// Whole prompts.
    pub prefill: PrefillCurve,
    /// Single tokens.
    pub decode: DecodeCurve,
}

/// `time = factor * tokens ^ exponent`, least squares of the logarithms.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PrefillCurve {
    pub exponent: f64,
    pub factor_ms: f64,
    /// Of the logarithms.
    r_squared: f64,
    /// The largest `|measured / curve - 1|`.
    residual_max: f64,
    pub points: Vec<PointFigures>,
}

/// `time = fixed + per_key * keys`, least squares of the relative residuals.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecodeCurve {
    pub fixed_us: f64,
    pub per_key_ns: f64,
    r_squared: f64,
    /// The largest `|measured / curve - 1|`.
    residual_max: f64,
    pub points: Vec<PointFigures>,
}

/// One length.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PointFigures {
    pub kv_len: u32,
    pub kernel: String,
    pub median_ms: f64,
    pub best_ms: f64,
    max_abs_error: f64,
    max_bound_ratio: f64,
    rows_checked: usize,
    rows: usize,
    /// Seconds per round.
    seconds: Vec<f64>,
}

impl GrowthReport {
    /// From what was measured.
    pub fn new(adapter: &wgpu::AdapterInfo, args: &BenchArgs, options: &Options, growth: &Growth) -> Self {
        let Growth { prefill, decode } = growth;
        let points = |curve: &Curve| curve.points.iter().map(PointFigures::new).collect();
        Self {
            header: Header::new(adapter, args, options),
            dtype: paged_attention::Dtype::from(args.dtype).to_string(),
            prefill: PrefillCurve {
                exponent: prefill.fit.slope,
                factor_ms: 1e3 * prefill.fit.intercept.exp(),
                r_squared: prefill.fit.r_squared,
                residual_max: prefill.fit.residual_max,
                points: points(prefill),
            },
            decode: DecodeCurve {
                fixed_us: 1e6 * decode.fit.intercept,
                per_key_ns: 1e9 * decode.fit.slope,
                r_squared: decode.fit.r_squared,
                residual_max: decode.fit.residual_max,
                points: points(decode),
            },
        }
    }

    /// The table.
    pub fn text(&self) -> String {
        let points = || self.prefill.points.iter().chain(&self.decode.points);
        let checked = accuracy(points().map(|point| (point.max_abs_error, point.max_bound_ratio)));
        let mut text = self.header.text(&[("checked", checked)]);
        text.push('\n');
        let head = ["keys", "dtype", "median ms", "best ms", "curve ms", "rows checked", "kernel"].map(str::to_owned);
        let row = |point: &PointFigures, curve_ms: f64| {
            [
                point.kv_len.to_string(),
                self.dtype.clone(),
                format!("{:.3}", point.median_ms),
                format!("{:.3}", point.best_ms),
                format!("{curve_ms:.3}"),
                format!("{} of {}", point.rows_checked, point.rows),
                point.kernel.clone(),
            ]
        };
        let prefill = self.prefill.points.iter().map(|point| row(point, self.prefill.at_ms(point.kv_len.into())));
        let decode = self.decode.points.iter().map(|point| row(point, self.decode.at_ms(point.kv_len.into())));
        text.push_str(&aligned([head].into_iter().chain(prefill).chain(decode).collect()));
        let PrefillCurve { exponent, r_squared, residual_max, .. } = self.prefill;
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "\nprefill: tokens to the power of {exponent:.3}; R2 of the logarithms {r_squared:.6}, largest residual {:.1}%",
            1e2 * residual_max
        );
        let DecodeCurve { fixed_us, per_key_ns, r_squared, residual_max, .. } = self.decode;
        let _ = writeln!(
            text,
            "decode: {fixed_us:.1} us + {per_key_ns:.2} ns per key; R2 {r_squared:.6}, largest residual {:.1}%",
            1e2 * residual_max
        );
        text
    }
}

impl PrefillCurve {
    /// The curve's time for so many tokens.
    pub fn at_ms(&self, tokens: f64) -> f64 {
        self.factor_ms * tokens.powf(self.exponent)
    }
}

impl DecodeCurve {
    /// The line's time for so many keys.
    pub fn at_ms(&self, keys: f64) -> f64 {
        1e-3 * self.fixed_us + 1e-6 * self.per_key_ns * keys
    }
}

impl PointFigures {
    fn new(point: &Point) -> Self {
        Self {
            kv_len: point.kv_len,
            kernel: point.kernel.clone(),
            median_ms: 1e3 * median(&point.seconds),
            best_ms: 1e3 * best(&point.seconds),
            max_abs_error: point.accuracy.max_abs_error,
            max_bound_ratio: point.accuracy.max_bound_ratio,
            rows_checked: point.coverage.0,
            rows: point.coverage.1,
            seconds: point.seconds.clone(),
        }
    }
}
