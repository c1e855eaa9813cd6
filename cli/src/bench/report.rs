//! What was measured: as a table for people, and as JSON.

use std::fmt::Write;

use paged_attention_bench_kit::{ERROR_MAX, Limits, Measured, Options, median};
use serde::Serialize;

use super::args::BenchArgs;
use crate::choosing::Chosen;
use crate::report::AdapterName;

/// The whole report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub adapter: AdapterName,
    /// Version of the crate.
    version: &'static str,
    /// Rounds; fewer than seven are not worth quoting.
    rounds: usize,
    quick: bool,
    /// As `--variants` says.
    variants: String,
    page_size: u32,
    limits: LimitFigures,
    pub shapes: Vec<ShapeFigures>,
}

/// What the adapter can do at most.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct LimitFigures {
    /// Multiply-adds of f32 in registers, best round.
    fma_gflops: f64,
    fma_gflops_median: f64,
    /// An almost empty dispatch with submit and wait, median.
    dispatch_us: f64,
    /// The same as one of 100 in a submit.
    dispatch_among_us: f64,
}

/// One shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ShapeFigures {
    pub name: String,
    pub dtype: String,
    /// Kernels that ran, joined by `+`.
    pub kernel: String,
    pub median_ms: f64,
    pub best_ms: f64,
    /// At the median.
    pub gflops: f64,
    /// At the median.
    pub kv_gbps: f64,
    /// Reading as many bytes: best round, best way.
    pub read_gbps: f64,
    read_pattern: String,
    /// Of the limit, best over best.
    pub share: f64,
    /// `fma` or `read`.
    pub limit: &'static str,
    pub paged_over_contiguous: f64,
    /// Null where the baseline cannot run.
    pub unfused_over_this: Option<f64>,
    no_unfused: Option<String>,
    /// Counted: operations.
    flop: f64,
    /// Counted: bytes of keys and values.
    kv_bytes: f64,
    /// Largest distance from float64, of all contenders.
    max_abs_error: f64,
    rows_checked: usize,
    rows: usize,
    /// Milliseconds of compiling, whichever shape had the kernels made.
    compile_ms: f64,
    stepped_down: Vec<String>,
    /// How the variants were chosen; null where they were named.
    choice: Option<Chosen>,
    /// Seconds per round, for whoever wants other statistics.
    seconds: Seconds,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Seconds {
    paged: Vec<f64>,
    contiguous: Vec<f64>,
    unfused: Vec<f64>,
}

impl Report {
    /// From what a session returns.
    pub fn new(
        adapter: &wgpu::AdapterInfo,
        args: &BenchArgs,
        options: &Options,
        limits: &Limits,
        shapes: &[Measured],
    ) -> Self {
        Self {
            adapter: AdapterName::new(adapter),
            version: env!("CARGO_PKG_VERSION"),
            rounds: options.rounds,
            quick: args.quick,
            variants: args.choosing.variants.to_string(),
            page_size: options.page_size,
            limits: LimitFigures {
                fma_gflops: limits.fma_best(),
                fma_gflops_median: median(&limits.fma_gflops),
                dispatch_us: median(&limits.dispatch_us),
                dispatch_among_us: median(&limits.dispatch_among_us),
            },
            shapes: shapes.iter().map(|shape| ShapeFigures::new(shape, limits)).collect(),
        }
    }

    /// The table.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: &str| {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{name:<9} {value}");
        };
        let AdapterName { adapter, backend, driver } = &self.adapter;
        line("adapter", &format!("{adapter} ({backend}, {driver})"));
        line(
            "limits",
            &format!(
                "multiply-adds {:.1} GFLOP/s (median {:.1}); dispatch {:.0} us alone, {:.1} us among 100",
                self.limits.fma_gflops,
                self.limits.fma_gflops_median,
                self.limits.dispatch_us,
                self.limits.dispatch_among_us
            ),
        );
        let error = self.shapes.iter().map(|shape| shape.max_abs_error).fold(0.0, f64::max);
        line("checked", &format!("every result against float64: largest error {error:.1e}, {ERROR_MAX:.0e} allowed"));
        line(
            "rounds",
            &format!(
                "{}{}; variants {}; pages of {}, scattered",
                self.rounds,
                if self.quick { " short ones (--quick): not to be quoted" } else { "" },
                self.variants,
                self.page_size
            ),
        );
        text.push('\n');
        let head = [
            "shape",
            "dtype",
            "median ms",
            "best ms",
            "rate",
            "limit",
            "share",
            "paged",
            "unfused",
            "GFLOP",
            "MB",
            "kernel",
        ];
        let rows = self.shapes.iter().map(ShapeFigures::row);
        let rows: Vec<[String; 12]> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
        let mut widths = [0; 12];
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        for row in &rows {
            let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            let _ = writeln!(text, "{}", cells.join("  ").trim_end());
        }
        for shape in &self.shapes {
            if let Some(why) = &shape.no_unfused {
                let _ = writeln!(text, "{}: no unfused baseline: {why}", shape.name);
            }
            if shape.rows_checked < shape.rows {
                let _ = writeln!(text, "{}: {} of {} rows were checked", shape.name, shape.rows_checked, shape.rows);
            }
            for line in shape.choice.iter().flat_map(Chosen::lines) {
                let _ = writeln!(text, "{}: {line}", shape.name);
            }
        }
        text
    }
}

impl ShapeFigures {
    fn new(shape: &Measured, limits: &Limits) -> Self {
        Self {
            name: shape.problem.name.clone(),
            dtype: shape.problem.dtype.to_string(),
            kernel: shape.kernel.clone(),
            median_ms: 1e3 * shape.median_s(),
            best_ms: 1e3 * shape.best_s(),
            gflops: shape.gflops(),
            kv_gbps: shape.kv_gbps(),
            read_gbps: shape.read_gbps(),
            read_pattern: shape.series.read_pattern.clone(),
            share: shape.share(limits),
            limit: if shape.problem.decodes() { "read" } else { "fma" },
            paged_over_contiguous: shape.paged_over_contiguous(),
            unfused_over_this: shape.unfused_over_this(),
            no_unfused: shape.no_unfused.clone(),
            flop: shape.problem.flop(),
            kv_bytes: shape.problem.kv_bytes(),
            max_abs_error: shape.errors.iter().map(|(_, error)| *error).fold(0.0, f64::max),
            rows_checked: shape.coverage.0,
            rows: shape.coverage.1,
            compile_ms: shape.compile_ms,
            stepped_down: shape.stepped_down.clone(),
            choice: shape.choice.as_ref().map(Chosen::from),
            seconds: Seconds {
                paged: shape.series.paged.clone(),
                contiguous: shape.series.contiguous.clone(),
                unfused: shape.series.unfused.clone(),
            },
        }
    }

    /// The median of the baseline's share of the same limit.
    pub fn unfused_share(&self) -> Option<f64> {
        let best = self.seconds.unfused.iter().copied().fold(f64::INFINITY, f64::min);
        best.is_finite().then(|| self.share * self.best_ms / (1e3 * best))
    }

    fn row(&self) -> [String; 12] {
        let rate = match self.limit {
            "read" => format!("{:.2} GB/s", self.kv_gbps),
            _ => format!("{:.2} GFLOP/s", self.gflops),
        };
        [
            self.name.clone(),
            self.dtype.clone(),
            format!("{:.3}", self.median_ms),
            format!("{:.3}", self.best_ms),
            rate,
            if self.limit == "read" { format!("read {:.2} GB/s", self.read_gbps) } else { "multiply-add".to_owned() },
            format!("{:.3}", self.share),
            format!("{:.3}", self.paged_over_contiguous),
            self.unfused_over_this.map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
            format!("{:.3}", 1e-9 * self.flop),
            format!("{:.1}", 1e-6 * self.kv_bytes),
            self.kernel.clone(),
        ]
    }
}
