//! `paged-attention tune`: measures the variants on an adapter, and writes a table of them.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use paged_attention::kernels::{AdapterFacts, KernelConfig, Variants};
use paged_attention::{Dtype, HeadGeometry, Modifiers, TUNE_BUDGET, Timing, Tuned};
use serde::Serialize;

use crate::attend::{bar, complain, print, printed};
use crate::choosing::{Choosing, Pair};
use crate::report::{self, AdapterName};
use crate::{device, output};

const ABOUT: &str = "\
Measure the variants of the kernels on an adapter, and write a table for --tuning.

For each shape, the variants that the rule prefers and others that differ from them are compiled, tested like every \
kernel before it is used, and timed in turn, round after round: decode kernels over a few thousand keys, prefill \
kernels over a prompt. The fastest is used; among those within 5 per cent of it, the one that compiles in the least \
time. The table is good for this adapter, its driver and this version alone.";

const HELP: &str = "\
A shape is a group size (query heads over KV heads), head dimensions and storage types; every --heads goes with every
--head-dim and every --dtype. The table is lines of text, which may be edited: the first prefill and the first decode
variant of a shape are used. What its notes say after # is for people.

Examples:
  paged-attention tune --out table.txt
  paged-attention tune --heads 9/3 --head-dim 64 --dtype f16 --out table.txt
  paged-attention tune --head-dim 64 --head-dim 128 --heads 8/8 --heads 32/8 > table.txt
  paged-attention attend case.safetensors --tuning table.txt

Exit status:
  0  measured
  2  an argument or the place for the table is unusable
  3  no usable adapter, or the device failed";

/// `tune`.
#[derive(Clone, Debug, Args)]
#[command(about = "Measure the variants of the kernels on an adapter, and write a table for --tuning",
          long_about = ABOUT, after_long_help = HELP, after_help = "--help says what is measured.")]
pub struct TuneArgs {
    /// Query heads over KV heads; may be repeated
    #[arg(long, value_name = "Q/KV", value_parser = parse_heads, default_value = "8/8")]
    pub heads: Vec<(u32, u32)>,

    /// Dimension of the heads, or of keys / of values; may be repeated
    #[arg(long, value_name = "D|D/V", value_parser = parse_dims, default_value = "64")]
    pub head_dim: Vec<(u32, u32)>,

    /// Type of queries, keys and values; may be repeated
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32")]
    pub dtype: Vec<TuneDtype>,

    /// Type of the output rows
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32")]
    pub out_dtype: crate::args::OutDtype,

    /// Seconds per shape, beside the time to compile what the rule prefers
    #[arg(long, value_name = "SECONDS", value_parser = parse_budget, default_value_t = TUNE_BUDGET.as_secs_f64(),
          allow_hyphen_values = true)]
    pub budget: f64,

    /// Write the table here as well as to standard output
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,

    /// Use this adapter: its index as `doctor` lists it, or a part of its name, backend or driver
    #[arg(long, value_name = "NAME|INDEX")]
    pub adapter: Option<String>,
}

/// `--dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TuneDtype {
    /// 32-bit float
    F32,
    /// 16-bit float
    F16,
    /// bfloat16
    Bf16,
}

impl From<TuneDtype> for Dtype {
    fn from(dtype: TuneDtype) -> Self {
        match dtype {
            TuneDtype::F32 => Self::F32,
            TuneDtype::F16 => Self::F16,
            TuneDtype::Bf16 => Self::Bf16,
        }
    }
}

fn number(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| format!("`{text}` is no whole number"))
}

fn parse_heads(text: &str) -> Result<(u32, u32), String> {
    let (q_heads, kv_heads) = text.split_once('/').ok_or("two numbers, Q/KV, are needed")?;
    let (q_heads, kv_heads) = (number(q_heads)?, number(kv_heads)?);
    HeadGeometry::new(q_heads, kv_heads, 1).map_err(|error| error.to_string())?;
    Ok((q_heads, kv_heads))
}

fn parse_dims(text: &str) -> Result<(u32, u32), String> {
    let (head_dim, v_head_dim) = text.split_once('/').unwrap_or((text, text));
    let (head_dim, v_head_dim) = (number(head_dim)?, number(v_head_dim)?);
    HeadGeometry::with_v_head_dim(1, 1, head_dim, v_head_dim).map_err(|error| error.to_string())?;
    Ok((head_dim, v_head_dim))
}

fn parse_budget(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds from 0 to 3600 is needed".to_owned()),
    }
}

impl TuneArgs {
    /// Every shape once.
    fn configs(&self) -> Result<Vec<KernelConfig>, String> {
        let mut configs: Vec<KernelConfig> = Vec::new();
        for (q_heads, kv_heads) in &self.heads {
            for (head_dim, v_head_dim) in &self.head_dim {
                let geometry = HeadGeometry::with_v_head_dim(*q_heads, *kv_heads, *head_dim, *v_head_dim)
                    .map_err(|error| error.to_string())?;
                let variants = Variants::base(&AdapterFacts::PLAIN_GPU, &geometry);
                for dtype in self.dtype.iter().copied().map(Dtype::from) {
                    let config = KernelConfig {
                        geometry,
                        q: dtype,
                        kv: dtype.into(),
                        new_rows: dtype.into(),
                        out: self.out_dtype.into(),
                        modifiers: Modifiers::NONE,
                        segments: std::num::NonZeroU32::MIN,
                        variants,
                    };
                    if !configs.iter().any(|known| known.shape() == config.shape()) {
                        configs.push(config);
                    }
                }
            }
        }
        Ok(configs)
    }
}

/// The whole report.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Report {
    exit: u8,
    #[serde(flatten)]
    adapter: AdapterName,
    /// Version of the crate.
    version: String,
    /// Where the table went.
    out: Option<String>,
    shapes: Vec<ShapeReport>,
    /// The table's text.
    table: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct ShapeReport {
    shape: String,
    #[serde(flatten)]
    variants: Pair,
    /// What is chosen without the table.
    rule: Pair,
    timed: Vec<Times>,
    left_out: Vec<LeftOut>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Times {
    variant: String,
    run_ms: f64,
    compile_ms: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct LeftOut {
    variant: String,
    reason: String,
}

impl<V: ToString> From<&Timing<V>> for Times {
    fn from(timing: &Timing<V>) -> Self {
        Self { variant: timing.variant.to_string(), run_ms: timing.run_ms, compile_ms: timing.compile_ms }
    }
}

impl From<&Tuned> for ShapeReport {
    fn from(tuned: &Tuned) -> Self {
        let entry = &tuned.entry;
        let left_out = tuned.left_out.iter().map(|(variant, reason)| (variant.clone(), reason.clone()));
        Self {
            shape: entry.shape().to_string(),
            variants: Pair::from(&entry.variants()),
            rule: Pair::from(&tuned.rule.variants),
            timed: entry.prefill().iter().map(Times::from).chain(entry.decode().iter().map(Times::from)).collect(),
            left_out: left_out.map(|(variant, reason)| LeftOut { variant, reason }).collect(),
        }
    }
}

impl ShapeReport {
    fn run_ms(&self, variant: &str) -> Option<f64> {
        self.timed.iter().find(|times| times.variant == variant).map(|times| times.run_ms)
    }

    /// What the table does not say, as comments in it.
    fn notes(&self) -> String {
        let mut text = format!("\n# {}\n", self.shape);
        // Writing to a String does not fail.
        for (own, rule) in [(&self.variants.prefill, &self.rule.prefill), (&self.variants.decode, &self.rule.decode)] {
            let _ = match (self.run_ms(own), self.run_ms(rule)) {
                _ if own == rule => writeln!(text, "#   {own}, as by the rule"),
                (Some(own_ms), Some(rule_ms)) => {
                    writeln!(text, "#   {own}; the rule's {rule} takes {:.2} times as long", rule_ms / own_ms)
                }
                _ => writeln!(text, "#   {own}; the rule's {rule} has no time"),
            };
        }
        for LeftOut { variant, reason } in &self.left_out {
            let _ = writeln!(text, "#   {variant} left out: {}", reason.replace('\n', " "));
        }
        text
    }
}

/// Runs the subcommand and returns the exit status.
pub fn run(args: &TuneArgs) -> u8 {
    match measured(args) {
        Ok(report) => printed(print(args.json, &report, || report.table.clone()), report.exit),
        Err((status, message)) => {
            complain(&message);
            status
        }
    }
}

fn measured(args: &TuneArgs) -> Result<Report, (u8, String)> {
    let unusable = |message: String| (report::UNUSABLE, message);
    let configs = args.configs().map_err(unusable)?;
    if let Some(out) = &args.out {
        output::check_file(out).map_err(|error| unusable(error.to_string()))?;
    }
    let mut device = device::open(args.adapter.as_deref(), Choosing::BY_RULE)?;
    let mut tuning = device.empty_table();
    let mut shapes = Vec::new();
    let progress = bar("measuring", configs.len());
    for config in &configs {
        progress.set_message(config.shape().to_string());
        let tuned = device
            .tune(config, Duration::from_secs_f64(args.budget))
            .map_err(|error| (report::NO_DEVICE, format!("{}: {error}", config.shape())))?;
        shapes.push(ShapeReport::from(&tuned));
        tuning.insert(tuned.entry);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let table = shapes.iter().fold(tuning.to_string(), |text, shape| text + &shape.notes());
    if let Some(out) = &args.out {
        output::write_text(out, &table).map_err(|error| unusable(error.to_string()))?;
    }
    Ok(Report {
        exit: report::PASSED,
        adapter: device.name().clone(),
        version: tuning.key().version().to_owned(),
        out: args.out.as_ref().map(|out| out.display().to_string()),
        shapes,
        table,
    })
}
