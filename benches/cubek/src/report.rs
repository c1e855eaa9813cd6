//! What was measured: as a table for people, and as JSON.

use std::fmt::Write;

use paged_attention::{adapter, wgpu};
use paged_attention_bench_kit::{Accuracy, Problem, best, median};
use serde::Serialize;

/// The whole report.
#[derive(Debug, Serialize)]
pub struct Report {
    adapter: String,
    /// Versions that ran.
    versions: Versions,
    /// Multiply-adds of f32 in registers, 10^9 operations per second: best round, and median. Far apart on a machine
    /// with neighbours; quote ratios only where they are close.
    fma_gflops: f64,
    fma_gflops_median: f64,
    rounds: usize,
    shapes: Vec<ShapeFigures>,
    /// Shapes that cubek cannot do, and why.
    refused: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Versions {
    paged_attention: &'static str,
    cubek_attention: &'static str,
    cubecl: &'static str,
    cubecl_runtime: &'static str,
}

/// One shape on both sides.
#[derive(Debug, Serialize)]
pub struct ShapeFigures {
    name: String,
    /// Our kernels, joined by `+`.
    kernel: String,
    this: Side,
    cubek: Side,
    /// Median of the rounds' ratios of cubek's time to ours.
    cubek_over_this: f64,
    /// Counted: two operations per multiply-add of a visible pair.
    flop: f64,
    /// Counted: bytes of keys and values, each once.
    kv_bytes: f64,
    decodes: bool,
}

/// Times of one side.
#[derive(Debug, Serialize)]
struct Side {
    median_ms: f64,
    best_ms: f64,
    /// At the median.
    gflops: f64,
    /// At the median.
    kv_gbps: f64,
    /// Largest distance from float64, and largest error over bound.
    max_abs_error: f64,
    max_bound_ratio: f64,
    /// Seconds of one call, per round.
    seconds: Vec<f64>,
}

impl ShapeFigures {
    /// From the accuracy and the seconds per round: ours, cubek's.
    pub fn new(problem: &Problem, kernel: String, accuracy: [Accuracy; 2], seconds: [Vec<f64>; 2]) -> Self {
        let [this, cubek] = seconds;
        let ratios: Vec<f64> = cubek.iter().zip(&this).map(|(cubek, this)| cubek / this).collect();
        Self {
            name: problem.name().to_owned(),
            kernel,
            this: Side::new(problem, accuracy[0], this),
            cubek: Side::new(problem, accuracy[1], cubek),
            cubek_over_this: median(&ratios),
            flop: problem.flop(),
            kv_bytes: problem.kv_bytes(),
            decodes: problem.decodes(),
        }
    }

    fn row(&self) -> [String; 9] {
        let time = |ms: f64| format!("{ms:.3}");
        let rate = |side: &Side| match self.decodes {
            true => format!("{:.2} GB/s", side.kv_gbps),
            false => format!("{:.2} GFLOP/s", side.gflops),
        };
        [
            self.name.clone(),
            time(self.this.median_ms),
            time(self.this.best_ms),
            rate(&self.this),
            time(self.cubek.median_ms),
            time(self.cubek.best_ms),
            rate(&self.cubek),
            format!("{:.2}", self.cubek_over_this),
            self.kernel.clone(),
        ]
    }
}

impl Side {
    fn new(problem: &Problem, accuracy: Accuracy, seconds: Vec<f64>) -> Self {
        let median_s = median(&seconds);
        Self {
            median_ms: 1e3 * median_s,
            best_ms: 1e3 * best(&seconds),
            gflops: 1e-9 * problem.flop() / median_s,
            kv_gbps: 1e-9 * problem.kv_bytes() / median_s,
            max_abs_error: accuracy.max_abs_error,
            max_bound_ratio: accuracy.max_bound_ratio,
            seconds,
        }
    }
}

impl Report {
    /// From what was measured.
    pub fn new(
        adapter: &wgpu::AdapterInfo,
        cubecl_runtime: &'static str,
        fma_gflops: &[f64],
        shapes: Vec<ShapeFigures>,
        refused: Vec<String>,
    ) -> Self {
        Self {
            adapter: adapter::describe(adapter),
            versions: Versions {
                paged_attention: locked("paged-attention"),
                cubek_attention: locked("cubek-attention"),
                cubecl: locked("cubecl"),
                cubecl_runtime,
            },
            fma_gflops: fma_gflops.iter().copied().fold(0.0, f64::max),
            fma_gflops_median: median(fma_gflops),
            rounds: fma_gflops.len(),
            shapes,
            refused,
        }
    }

    /// The table.
    pub fn text(&self) -> String {
        let Versions { paged_attention, cubek_attention, cubecl, cubecl_runtime } = self.versions;
        let sides = || self.shapes.iter().flat_map(|shape| [&shape.this, &shape.cubek]);
        let largest = |figure: fn(&Side) -> f64| sides().map(figure).fold(0.0, f64::max);
        let mut text = format!(
            "adapter  {}\n\
             this     paged-attention {paged_attention}, scattered pages of {}\n\
             cubek    cubek-attention {cubek_attention}, cubecl {cubecl} as {cubecl_runtime}, Strategy::Unit, contiguous\n\
             checked  every result against float64: largest error {:.1e}, over bound {:.3}\n\
             rounds   {}; multiply-adds {:.1} GFLOP/s (median {:.1})\n\n",
            self.adapter,
            crate::PAGE_SIZE,
            largest(|side| side.max_abs_error),
            largest(|side| side.max_bound_ratio),
            self.rounds,
            self.fma_gflops,
            self.fma_gflops_median,
        );
        let head = ["shape", "ms", "best", "rate", "cubek ms", "best", "rate", "cubek/this", "kernel"];
        let rows: Vec<_> =
            std::iter::once(head.map(str::to_owned)).chain(self.shapes.iter().map(ShapeFigures::row)).collect();
        let mut widths = [0; 9];
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.len().max(*width);
            }
        }
        for row in &rows {
            let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            // Writing to a String does not fail.
            let _ = writeln!(text, "{}", cells.join("  ").trim_end());
        }
        for refused in &self.refused {
            let _ = writeln!(text, "{refused}");
        }
        text
    }
}

/// The version of a package in the lock file that this program was built with.
fn locked(package: &str) -> &'static str {
    const LOCK: &str = include_str!("../Cargo.lock");
    let entry = format!("name = \"{package}\"\nversion = \"");
    let version = LOCK.split_once(&entry).and_then(|(_, rest)| rest.split_once('"'));
    version.map_or("of unknown version", |(version, _)| version)
}

#[cfg(test)]
mod tests {
    use paged_attention_cases::{Heads, timed};

    use super::*;

    #[test]
    fn versions_are_those_pinned() {
        assert_eq!([locked("cubek-attention"), locked("cubecl")], ["0.3.1", "0.11.1"]);
        assert!(locked("paged-attention").starts_with(|first: char| first.is_ascii_digit()));
    }

    /// The ratio is the median of ratios, not the ratio of medians.
    #[test]
    fn figures_from_rounds() {
        let problem = Problem::new(timed("x", Heads::new(2, 1, 8), vec![(3, 4)])).unwrap();
        let accuracy = [1e-7, 2e-7].map(|max_abs_error| Accuracy { max_abs_error, max_bound_ratio: 0.0 });
        let seconds = [vec![1.0, 2.0, 4.0], vec![5.0, 2.0, 12.0]];
        let figures = ShapeFigures::new(&problem, String::new(), accuracy, seconds);
        assert_eq!(figures.cubek_over_this, 3.0);
        assert_eq!((figures.this.median_ms, figures.this.best_ms), (2e3, 1e3));
        assert_eq!((figures.cubek.median_ms, figures.cubek.best_ms), (5e3, 2e3));
        assert_eq!((figures.cubek.gflops, figures.cubek.max_abs_error), (1e-9 * figures.flop / 5.0, 2e-7));
    }
}
