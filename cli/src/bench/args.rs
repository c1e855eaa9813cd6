//! The arguments of `bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use paged_attention::Dtype;
use paged_attention_bench_kit::{Options, Selection};
use paged_attention_cases::{CaseSpec, growth};

use super::shape::{self, Shapes};
use crate::choosing::{ChoosingFlags, Which};

const ABOUT: &str = "\
Measure the kernels against the adapter's own limits and an unfused baseline.

Every result is compared with float64 before anything is timed. Then rounds: each times, one after the other, the \
adapter's limits and, per shape, the kernels on scattered pages of 16, the same kernels on contiguous keys and values \
(one page per sequence) and on pages of a single token, decodes and prompts of a mixed batch in calls of their own, an \
unfused baseline of three kernels, and plain reading of as many bytes as the shape's keys and values have. Ratios are \
medians of the ratios inside single rounds, so that a slow spell of the machine hits both sides; shares of a limit are \
best over best.

With --growth: how the time of a prompt and of a single token grows with the number of keys.";

const HELP: &str = "\
Shapes (causal; query heads / KV heads; d is the head dimension)
  P1  prefill 1024, 8/8 heads, d 64      D1  decode, 4096 keys, 32/8 heads, d 128
  P2  prefill 512, 9/3 heads, d 64       D2  decode, 8 sequences of 1024 keys, 9/3 heads, d 64
  P3  prefill 1024, 8/2 heads, d 128     D3  decode, 16384 keys, 8/8 heads, d 128
  M1  63 decodes, 512 to 1024 keys, and a prompt of 512, in one call; 9/3 heads, d 64
  M2  the same, 8/2 heads, d 128
  q=1,kv=2048,heads=16/4,dim=128         one of your own; seqs=8 makes it a batch

Columns
  share      of the multiply-add rate (prefill) or of the reading rate at this size (decode), best over best; in a
             mixed batch prompts need the one and decodes the other, one after the other
  paged      time on scattered pages over time on contiguous keys and values
  page 1     time on pages of a single token over time on contiguous keys and values
  mixed      time of a mixed batch in one call over time of its decodes and its prompts in calls of their own
  unfused    time of the unfused baseline, which computes in f32, over time on scattered pages
  encode us  microseconds to record the call, median of 1,000
  GFLOP, MB  counted, not measured: two operations per multiply-add of a visible pair; keys and values read once

Examples:
  paged-attention bench --shape P1 --shape D1
  paged-attention bench --shape q=2048,kv=2048,heads=32/8,dim=128 --dtype f16 --json
  paged-attention bench --plot shares.svg
  paged-attention bench --growth --plot growth.svg

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
    /// What to measure: P1 to P3, D1 to D3, M1, M2, all, or q=..,kv=..,heads=Q/KV,dim=..[,seqs=..]; may be repeated
    #[arg(long, value_name = "SHAPE", value_parser = shape::parse, default_value = "all")]
    pub shape: Vec<Shapes>,

    /// Instead of shapes: prompts of 512 to 8192 tokens, and single tokens over 1024 to 131072 keys, with fitted curves
    #[arg(long, conflicts_with = "shape")]
    pub growth: bool,

    /// Tokens per page
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..), default_value_t = Options::FULL.page_size)]
    pub page_size: u32,

    /// Type of queries, keys and values; outputs are f32
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32")]
    pub dtype: BenchDtype,

    /// Use this adapter: its index as `doctor` lists it, or a part of its name, backend or driver
    #[arg(long, value_name = "NAME|INDEX")]
    pub adapter: Option<String>,

    /// Three short rounds instead of seven, and short curves: to see that everything runs, not to quote
    #[arg(long)]
    pub quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,

    /// Draw the shares of the limits, or the curves, as SVG
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,

    /// Which kernels run.
    #[command(flatten)]
    pub choosing: ChoosingFlags,
}

impl BenchArgs {
    /// The shapes asked for, each once.
    pub fn shapes(&self) -> Vec<CaseSpec> {
        let mut shapes: Vec<CaseSpec> = Vec::new();
        for spec in self.shape.iter().flat_map(|shapes| &shapes.0) {
            if !shapes.iter().any(|known| known.name == spec.name) {
                shapes.push(spec.clone().dtype(self.dtype.into()));
            }
        }
        shapes
    }

    /// Prompts and single tokens whose times are to lie on curves.
    pub fn growth_shapes(&self) -> [Vec<CaseSpec>; 2] {
        let points = if self.quick { 3 } else { usize::MAX };
        growth().map(|shapes| shapes.into_iter().take(points).map(|spec| spec.dtype(self.dtype.into())).collect())
    }

    /// How to measure.
    pub fn options(&self) -> Options {
        let selection = match self.choosing.variants {
            Which::Base => Selection::Base,
            Which::Chosen | Which::Quick => Selection::Chosen,
            Which::Named(variants) => Selection::These(variants),
        };
        Options { selection, page_size: self.page_size, ..if self.quick { Options::QUICK } else { Options::FULL } }
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

    use super::*;
    use crate::args::{Cli, Command};

    fn parsed(arguments: &[&str]) -> Result<BenchArgs, String> {
        let all = ["paged-attention", "bench"].iter().chain(arguments);
        match Cli::try_parse_from(all).map_err(|error| error.to_string())?.command {
            Command::Bench(args) => Ok(args),
            _ => Err("another command".to_owned()),
        }
    }

    fn names(args: &BenchArgs) -> Vec<String> {
        args.shapes().into_iter().map(|spec| spec.name).collect()
    }

    #[test]
    fn defaults() {
        let args = parsed(&[]).unwrap();
        assert_eq!(names(&args), ["P1", "P2", "P3", "D1", "D2", "D3", "M1", "M2"]);
        assert_eq!((args.dtype, args.choosing.variants), (BenchDtype::F32, Which::Chosen));
        assert!(args.options().rounds >= 7 && args.options().rounds % 2 == 1);
        assert_eq!(args.options().page_size, 16);
        assert!(!args.json && !args.growth && args.plot.is_none() && args.adapter.is_none());
        assert!(args.shapes().iter().all(|spec| spec.kv == Dtype::F32 && spec.causal));
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
        let args = parsed(&["--growth", "--page-size", "1"]).unwrap();
        assert_eq!((args.growth, args.options().page_size), (true, 1));
        let lengths =
            args.growth_shapes().map(|specs| specs.iter().map(|spec| spec.seqs[0].kv_len).collect::<Vec<_>>());
        assert_eq!((lengths[0].first(), lengths[0].last()), (Some(&512), Some(&8192)));
        assert_eq!((lengths[1].first(), lengths[1].last()), (Some(&1024), Some(&131_072)));
        assert!(parsed(&["--growth", "--shape", "P1"]).is_err());
        for refused in
            [["--dtype", "bf16"], ["--variants", "best"], ["--shape", "P4"], ["--shape", ""], ["--page-size", "0"]]
        {
            assert!(parsed(&refused).is_err(), "{refused:?}");
        }
    }
}
