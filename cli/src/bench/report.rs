//! What was measured: as a table for people, and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;

use paged_attention_bench_kit::{Contender, Limits, Measured, Options, best, median};
use serde::Serialize;

use super::args::BenchArgs;
use crate::choosing::Chosen;
use crate::report::AdapterName;

/// What every report of `bench` begins with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Header {
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
}

/// The whole report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub header: Header,
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
    /// `fma`, `read`, or `fma+read` for a mixed batch.
    pub limit: &'static str,
    pub paged_over_contiguous: f64,
    /// Pages of a single token.
    page_of_one_over_contiguous: f64,
    /// One call over decodes and prompts in calls of their own; null where the shape has not both.
    together_over_apart: Option<f64>,
    /// Null where the baseline cannot run.
    pub unfused_over_this: Option<f64>,
    no_unfused: Option<String>,
    /// Counted: operations.
    flop: f64,
    /// Counted: bytes of keys and values.
    kv_bytes: f64,
    /// Recording one call, median of 1,000.
    encode_us: f64,
    /// Largest distance from float64, and largest error over bound, of the call and the baseline.
    max_abs_error: f64,
    max_bound_ratio: f64,
    rows_checked: usize,
    rows: usize,
    /// Milliseconds of compiling, whichever shape had the kernels made.
    compile_ms: f64,
    stepped_down: Vec<String>,
    /// How the variants were chosen; null where they were named.
    choice: Option<Chosen>,
    /// Seconds per round of each contender, for whoever wants other statistics.
    seconds: BTreeMap<&'static str, Vec<f64>>,
}

impl Header {
    /// Of a run on `adapter`.
    pub fn new(adapter: &wgpu::AdapterInfo, args: &BenchArgs, options: &Options) -> Self {
        Self {
            adapter: AdapterName::new(adapter),
            version: env!("CARGO_PKG_VERSION"),
            rounds: options.rounds,
            quick: args.quick,
            variants: args.choosing.variants.to_string(),
            page_size: options.page_size,
        }
    }

    /// How many there were.
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// A line each for the adapter, what `more` says, and the rounds.
    pub fn text(&self, more: &[(&str, String)]) -> String {
        let AdapterName { adapter, backend, driver } = &self.adapter;
        let first = ("adapter", format!("{adapter} ({backend}, {driver})"));
        let rounds = format!(
            "{}{}; variants {}; pages of {}, scattered",
            self.rounds,
            if self.quick { " short ones (--quick): not to be quoted" } else { "" },
            self.variants,
            self.page_size
        );
        let last = ("rounds", rounds);
        [&first].into_iter().chain(more).chain([&last]).map(|(name, value)| format!("{name:<9} {value}\n")).collect()
    }
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
            header: Header::new(adapter, args, options),
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
        let limits = format!(
            "multiply-adds {:.1} GFLOP/s (median {:.1}); dispatch {:.0} us alone, {:.1} us among 100",
            self.limits.fma_gflops,
            self.limits.fma_gflops_median,
            self.limits.dispatch_us,
            self.limits.dispatch_among_us
        );
        let checked = accuracy(self.shapes.iter().map(|shape| (shape.max_abs_error, shape.max_bound_ratio)));
        let mut text = self.header.text(&[("limits", limits), ("checked", checked)]);
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
            "page 1",
            "mixed",
            "unfused",
            "encode us",
            "GFLOP",
            "MB",
            "kernel",
        ];
        let rows = self.shapes.iter().map(ShapeFigures::row);
        text.push_str(&aligned(std::iter::once(head.map(str::to_owned)).chain(rows).collect()));
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

/// What the line on the check says of `(error, error over bound)` of many results.
pub fn accuracy(results: impl Iterator<Item = (f64, f64)>) -> String {
    let (error, ratio) = results.fold((0.0, 0.0), |(a, b), (error, ratio)| (f64::max(a, error), f64::max(b, ratio)));
    format!("every result against float64: largest error {error:.1e}, largest error over bound {ratio:.3}")
}

/// Rows as lines, columns under each other.
pub fn aligned<const N: usize>(rows: Vec<[String; N]>) -> String {
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in &rows {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        // Writing to a String does not fail.
        let _ = writeln!(text, "{}", cells.join("  ").trim_end());
    }
    text
}

impl ShapeFigures {
    fn new(shape: &Measured, limits: &Limits) -> Self {
        use Contender::{Apart, Contiguous, PageOfOne, Paged, Unfused};
        let together_over_apart = shape.ratio(Paged, Apart);
        Self {
            name: shape.problem.name().to_owned(),
            dtype: shape.problem.dtype().to_string(),
            kernel: shape.kernel.clone(),
            median_ms: 1e3 * shape.median_s(),
            best_ms: 1e3 * shape.best_s(),
            gflops: shape.gflops(),
            kv_gbps: shape.kv_gbps(),
            read_gbps: shape.read_gbps(),
            read_pattern: shape.series.read_pattern.clone(),
            share: shape.share(limits),
            limit: match (shape.problem.decodes(), together_over_apart) {
                (_, Some(_)) => "fma+read",
                (true, None) => "read",
                (false, None) => "fma",
            },
            // These take part in every shape.
            paged_over_contiguous: shape.ratio(Paged, Contiguous).unwrap_or(f64::NAN),
            page_of_one_over_contiguous: shape.ratio(PageOfOne, Contiguous).unwrap_or(f64::NAN),
            together_over_apart,
            unfused_over_this: shape.ratio(Unfused, Paged),
            no_unfused: shape.no_unfused.clone(),
            flop: shape.problem.flop(),
            kv_bytes: shape.problem.kv_bytes(),
            encode_us: shape.encode_us,
            max_abs_error: shape.accuracy.max_abs_error,
            max_bound_ratio: shape.accuracy.max_bound_ratio,
            rows_checked: shape.coverage.0,
            rows: shape.coverage.1,
            compile_ms: shape.compile_ms,
            stepped_down: shape.stepped_down.clone(),
            choice: shape.choice.as_ref().map(Chosen::from),
            seconds: shape.series.seconds.iter().map(|(who, seconds)| (who.name(), seconds.clone())).collect(),
        }
    }

    /// The baseline's share of the same limit, best over best.
    pub fn unfused_share(&self) -> Option<f64> {
        let best_s = best(self.seconds.get(Contender::Unfused.name())?);
        Some(self.share * self.best_ms / (1e3 * best_s))
    }

    fn row(&self) -> [String; 15] {
        let ratio = |ratio: Option<f64>, digits| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.digits$}"));
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
            match self.limit {
                "fma" => "multiply-add".to_owned(),
                "read" => format!("read {:.2} GB/s", self.read_gbps),
                _ => "both".to_owned(),
            },
            format!("{:.3}", self.share),
            format!("{:.3}", self.paged_over_contiguous),
            format!("{:.3}", self.page_of_one_over_contiguous),
            ratio(self.together_over_apart, 3),
            ratio(self.unfused_over_this, 2),
            format!("{:.1}", self.encode_us),
            format!("{:.3}", 1e-9 * self.flop),
            format!("{:.1}", 1e-6 * self.kv_bytes),
            self.kernel.clone(),
        ]
    }
}
