//! The arguments of `bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use paged_attention::Dtype;
use paged_attention_bench_kit::{Options, Selection};

use super::shape::{self, Shapes};
use crate::choosing::{ChoosingFlags, Which};

const ABOUT: &str = "\
Measure the kernels against the adapter's own limits and an unfused baseline.

Every result is compared with float64 before anything is timed. Then rounds: each times, one after the other, the \
adapter's limits and, per shape, the kernels on scattered pages of 16, the same kernels on contiguous keys and values \
(one page per sequence), an unfused baseline of three kernels, and plain reading of as many bytes as the shape's keys \
and values have. Ratios are medians of the ratios inside single rounds, so that a slow spell of the machine hits both \
sides; shares of a limit are best over best.";

const HELP: &str = "\
Shapes (causal; query heads / KV heads; d is the head dimension)
  P1  prefill 1024, 8/8 heads, d 64      D1  decode, 4096 keys, 32/8 heads, d 128
  P2  prefill 512, 9/3 heads, d 64       D2  decode, 8 sequences of 1024 keys, 9/3 heads, d 64
  P3  prefill 1024, 8/2 heads, d 128     D3  decode, 16384 keys, 8/8 heads, d 128
  q=1,kv=2048,heads=16/4,dim=128         one of your own; seqs=8 makes it a batch

Columns
  share      of the multiply-add rate (prefill) or of the reading rate at this size (decode), best over best
  paged      time on scattered pages over time on contiguous keys and values
  unfused    time of the unfused baseline, which computes in f32, over time on scattered pages
  GFLOP, MB  counted, not measured: two operations per multiply-add of a visible pair; keys and values read once

Examples:
  paged-attention bench --shape P1 --shape D1
  paged-attention bench --shape q=2048,kv=2048,heads=32/8,dim=128 --dtype f16 --json
  paged-attention bench --plot shares.svg

Exit status:
  0  measured
  1  a result is wrong; nothing is timed
  2  an argument, a shape or the place for the plot is unusable
  3  no usable adapter, or the device failed";

/// `bench`.
#[derive(Clone, Debug, Args)]
#[command(about = "Measure the kernels against the adapter's own limits and an unfused baseline",
          long_about = ABOUT, after_long_help = HELP, after_help = "--help lists the shapes.")]
pub struct BenchArgs {
    /// What to measure: P1, P2, P3, D1, D2, D3, all, or q=..,kv=..,heads=Q/KV,dim=..[,seqs=..]; may be repeated
    #[arg(long, value_name = "SHAPE", value_parser = shape::parse, default_value = "all")]
    pub shape: Vec<Shapes>,

    /// Type of queries, keys and values; outputs are f32
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32")]
    pub dtype: BenchDtype,

    /// Use this adapter: its index as `doctor` lists it, or a part of its name, backend or driver
    #[arg(long, value_name = "NAME|INDEX")]
    pub adapter: Option<String>,

    /// Three short rounds instead of seven: to see that everything runs, not to quote
    #[arg(long)]
    pub quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,

    /// Draw the shares of the limits as SVG
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,

    /// Which kernels run.
    #[command(flatten)]
    pub choosing: ChoosingFlags,
}

impl BenchArgs {
    /// The shapes asked for, each once.
    pub fn shapes(&self) -> impl Iterator<Item = &shape::Shape> {
        let mut seen = Vec::new();
        self.shape.iter().flat_map(|shapes| &shapes.0).filter(move |shape| {
            let new = !seen.contains(&shape.name());
            seen.push(shape.name());
            new
        })
    }

    /// How to measure.
    pub fn options(&self) -> Options {
        let selection = match self.choosing.variants {
            Which::Base => Selection::Base,
            Which::Chosen | Which::Quick => Selection::Chosen,
            Which::Named(variants) => Selection::These(variants),
        };
        Options { selection, ..if self.quick { Options::QUICK } else { Options::FULL } }
    }
}

/// `--dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchDtype {
    /// 32-bit float
    F32,
    /// 16-bit float
    F16,
}

impl From<BenchDtype> for Dtype {
    fn from(dtype: BenchDtype) -> Self {
        match dtype {
            BenchDtype::F32 => Self::F32,
            BenchDtype::F16 => Self::F16,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use paged_attention_bench_kit::NAMES;

    use super::*;
    use crate::args::{Cli, Command};

    fn parsed(arguments: &[&str]) -> Result<BenchArgs, String> {
        let all = ["paged-attention", "bench"].iter().chain(arguments);
        match Cli::try_parse_from(all).map_err(|error| error.to_string())?.command {
            Command::Bench(args) => Ok(args),
            _ => Err("another command".to_owned()),
        }
    }

    fn names(args: &BenchArgs) -> Vec<&str> {
        args.shapes().map(shape::Shape::name).collect()
    }

    #[test]
    fn defaults() {
        let args = parsed(&[]).unwrap();
        assert_eq!(names(&args), NAMES);
        assert_eq!((args.dtype, args.choosing.variants), (BenchDtype::F32, Which::Chosen));
        assert!(args.options().rounds >= 7 && args.options().rounds % 2 == 1);
        assert!(!args.json && args.plot.is_none() && args.adapter.is_none());
    }

    #[test]
    fn shapes_and_flags() {
        let custom = "q=3,kv=40,heads=4/2,dim=16";
        let args = parsed(&["--shape", "d2", "--shape", custom, "--shape", "D2", "--quick"]).unwrap();
        assert_eq!(names(&args), ["D2", custom]);
        assert!(args.options().rounds < 7);
        let args = parsed(&["--dtype", "f16", "--variants", "base", "--json", "--plot", "x.svg"]).unwrap();
        assert_eq!((args.dtype, args.options().selection), (BenchDtype::F16, Selection::Base));
        let names = "prefill-uniform-r1k4l64+decode-workgroup";
        let args = parsed(&["--variants", names]).unwrap();
        assert_eq!(args.options().selection, Selection::These(names.parse().unwrap()));
        for refused in [["--dtype", "bf16"], ["--variants", "best"], ["--shape", "P4"], ["--shape", ""]] {
            assert!(parsed(&refused).is_err(), "{refused:?}");
        }
    }
}
