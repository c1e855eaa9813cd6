//! The arguments of `budget`.

use std::path::PathBuf;

use clap::{Args, value_parser};
use paged_attention::PageSize;

use super::lengths::{self, Source};
use crate::settings;

const ABOUT: &str = "\
Count what keys and values take in memory, what pages leave unused, and how many requests fit.

Everything is counted, nothing is measured and no GPU is needed. A token takes 2 * layers * kv-heads * head-dim * bytes. \
A request leaves slots unused at the end of its last page; what that comes to is counted over all lengths of a \
distribution, beside what a reservation of the longest length for every request leaves unused. With --memory, the parts \
of a device's memory are listed and the requests that fit are counted, in pages and with reservations.";

const HELP: &str = "\
Lengths, in tokens: of a request's prompt and of all that is generated
  uniform:1:512     every length from 1 to 512, equally likely
  fixed:2048        always the same
  file:PATH         those of a file, one per line, equally likely: a trace of your own requests

Sizes take a unit: 24GiB (2^30), 24GB (10^9), 512MiB, 1.5GiB; without one they are bytes.

Examples:
  paged-attention budget --layers 32 --kv-heads 8 --head-dim 128 --bytes 2 --tokens 4096
  paged-attention budget --layers 32 --kv-heads 8 --head-dim 128 --bytes 2 --tokens 4096 \\
      --lengths file:lengths.txt --page-size 32 --figures figures/
  paged-attention budget --layers 32 --q-heads 32 --kv-heads 8 --head-dim 128 --bytes 2 --tokens 4096 \\
      --lengths uniform:1:4096 --memory 24GiB --weights 16GB --headroom 1GiB --prefill-rows 512

--figures writes kv-gib.svg and .csv (size against tokens for several numbers of KV heads), and tail-waste.svg and
.csv (mean unused slots against page size, beside those of a reservation).

Exit status: 0 counted, 2 an argument, the file of lengths or the place for the figures is unusable.

docs/budget.md has the equations, a worked example and the fields of the JSON object.";

/// `budget`.
#[derive(Clone, Debug, Args)]
#[command(about = "Count what keys and values take in memory, what pages leave unused, and how many requests fit",
          long_about = ABOUT, after_long_help = HELP, after_help = "--help has examples.")]
pub struct BudgetArgs {
    /// Layers of the model
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    pub layers: u32,

    /// Key and value heads per layer
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    pub kv_heads: u32,

    /// Elements of a key row, and of a value row
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    pub head_dim: u32,

    /// Bytes of an element: 2 for f16 and bf16, 4 for f32
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    pub bytes: u32,

    /// Tokens of one request, exactly: what the total is for, without pages
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u64).range(1..))]
    pub tokens: u64,

    /// Tokens per page
    #[arg(long, value_name = "TOKENS", value_parser = settings::parse_page_size, default_value = "16")]
    pub page_size: PageSize,

    /// Lengths of requests: uniform:FIRST:LAST, fixed:TOKENS or file:PATH
    #[arg(long, value_name = "LENGTHS", value_parser = lengths::parse, default_value = "uniform:1:512")]
    pub lengths: Source,

    /// Tokens that every request reserves where there are no pages [default: the longest of --lengths]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..))]
    pub reserve: Option<u32>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,

    /// Write two figures, each as SVG and CSV, into this folder; it is made if it does not exist
    #[arg(long, value_name = "FOLDER")]
    pub figures: Option<PathBuf>,

    /// What shares the device's memory.
    #[command(flatten)]
    pub memory: MemoryFlags,
}

/// Flags about a device's memory.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "How many requests fit")]
pub struct MemoryFlags {
    /// Memory of the device
    #[arg(long, value_name = "SIZE", value_parser = parse_size, allow_hyphen_values = true)]
    pub memory: Option<u64>,

    /// The model's weights
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0", requires = "memory",
          allow_hyphen_values = true)]
    pub weights: u64,

    /// The model's own activations per query row, beside the rows that attention reads and writes
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0", requires = "memory",
          allow_hyphen_values = true)]
    pub activations_per_row: u64,

    /// Buffers for exchange with other devices
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0", requires = "memory",
          allow_hyphen_values = true)]
    pub communication: u64,

    /// Whatever else lies in the device's memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0", requires = "memory",
          allow_hyphen_values = true)]
    pub other: u64,

    /// What is to stay free
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0", requires = "memory",
          allow_hyphen_values = true)]
    pub headroom: u64,

    /// Query heads per layer [default: as many as KV heads]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..), requires = "memory")]
    pub q_heads: Option<u32>,

    /// Tokens of a prompt that one step takes at most [default: all of the longest]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..), requires = "memory")]
    pub prefill_rows: Option<u32>,
}

/// A number of bytes, with or without a unit.
fn parse_size(text: &str) -> Result<u64, String> {
    parse_size::parse_size(text)
        .map_err(|error| format!("{error}; a size such as 24GiB, 24GB or a number of bytes is needed"))
}
