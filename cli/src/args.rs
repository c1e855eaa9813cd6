//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::bench::BenchArgs;
use crate::budget::BudgetArgs;
use crate::choosing::ChoosingFlags;
use crate::settings;
use crate::tune::TuneArgs;

/// Exact attention over a paged KV cache, on any GPU.
#[derive(Debug, Parser)]
#[command(name = "paged-attention", version, max_term_width = 100, after_help = TOP_EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const TOP_EXAMPLES: &str = "\
Examples:
  paged-attention doctor                                 which GPU would be used, and do its kernels work?
  paged-attention attend case.safetensors --causal       run a case and compare it with float64
  paged-attention attend --help                          what a case file holds
  paged-attention budget --help                          how much memory do keys and values take?

docs/case-format.md describes the file, the reports and the exit status in full.";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run attention over the tensors of a file and compare the result with float64
    Attend(AttendArgs),
    /// List the adapters, say which one is chosen and why, and test the kernels on them
    Doctor(DoctorArgs),
    /// Measure the kernels against the adapter's own limits and an unfused baseline
    Bench(BenchArgs),
    /// Count what keys and values take in memory, what pages leave unused, and how many requests fit
    Budget(BudgetArgs),
    /// Measure the variants of the kernels on an adapter, and write a table for --tuning
    Tune(TuneArgs),
}

const ATTEND_ABOUT: &str = "\
Run attention over the tensors of a file and compare the result with float64.

Reads queries, keys and values from a safetensors file, writes the keys and values into pages on the GPU, \
attends, and compares every element of the result with a dense float64 reference and with the error bound that \
the library states. A folder stands for the *.safetensors files in it, in the order of their names.";

const ATTEND_HELP: &str = "\
A case file holds
  q         [total_q, q_heads, head_dim]                 F32, F16 or BF16: query rows, packed
  k, v      [total_kv, kv_heads, head_dim | v_head_dim]  F32, F16 or BF16: keys and values, packed
  q_indptr, kv_indptr  [seqs + 1]                        I32, U32 or I64: sequence i owns the rows
                                                         indptr[i] .. indptr[i+1]; may be left out
                                                         for one sequence
or, where the keys and values are paged already, instead of k, v and kv_indptr
  k_pages, v_pages     [pages, page_size, kv_heads, head_dim | v_head_dim]
  page_indptr [seqs + 1], page_ids, kv_len [seqs]        the page table in CSR form
What changes the scores may be there as well
  alibi_slopes         [q_heads]                         F32: adds slope * (j - pos) for key j, row at pos
  sinks                [q_heads]                         F32: a logit that joins the softmax's denominator
  mask                 [sum of q_len * kv_len]           U8 or BOOL: 1 = visible; row-major, sequence after
                                                         sequence
  bias                 [1 | q_heads, sum of q_len * kv_len]  F32 or F16: added to the score; -inf hides a key
and metadata strings `causal`, `scale`, `window_left`, `window_right` and `softcap`. Query row i of a
sequence sits at position kv_len - q_len + i; query head h reads KV head h / (q_heads / kv_heads). Rows
come first, then heads: [heads, rows, dim] must be transposed, and a batch [batch, rows, heads, dim] be
packed to [batch * rows, heads, dim].

Such a file from Python:
  import numpy as np
  from safetensors.numpy import save_file
  q = np.random.randn(5, 8, 64).astype(np.float16)    # 5 query rows, 8 heads
  k = np.random.randn(37, 2, 64).astype(np.float16)   # 37 keys, 2 KV heads
  v = np.random.randn(37, 2, 64).astype(np.float16)
  save_file({'q': q, 'k': k, 'v': v}, 'case.safetensors', metadata={'causal': 'true'})

Examples:
  paged-attention attend case.safetensors --out result.safetensors
  paged-attention attend case.safetensors --page-size 8 --shuffle-pages 1 --json
  paged-attention attend suite/ more/*.safetensors --out results/

Results: `out` [total_q, q_heads, v_head_dim], F32 unless --out-dtype says otherwise, and `lse`
[total_q, q_heads], F32, natural logarithm. With one CASE, OUT is a file; with several or with a
folder, OUT is a folder, made if it does not exist, that gets one file per case under the case's
name.

Exit status, the largest over all cases:
  0  ran, and every element is inside the stated error bound
  1  ran, result written, and an element is outside the bound (the report names the worst)
  2  the input, an option or the place for the result is unusable; checked before a GPU is used,
     and no result is written (of several cases, those that are usable still run)
  3  no usable adapter, or the device failed

docs/case-format.md describes the file, the limits and the JSON report in full.";

/// `attend`.
#[derive(Clone, Debug, Args)]
#[command(about = "Run attention over the tensors of a file and compare the result with float64",
          long_about = ATTEND_ABOUT, after_long_help = ATTEND_HELP,
          after_help = "--help says what a case file holds.")]
pub struct AttendArgs {
    /// Case files in safetensors format, or folders of them
    #[arg(required = true, value_name = "CASE|FOLDER")]
    pub cases: Vec<PathBuf>,

    /// Write `out` and `lse` here: a file, or a folder where there are several cases
    #[arg(long, value_name = "OUT")]
    pub out: Option<PathBuf>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,

    /// Use this adapter: its index as `doctor` lists it, or a part of its name, backend or driver
    #[arg(long, value_name = "NAME|INDEX")]
    pub adapter: Option<String>,

    /// What is computed.
    #[command(flatten)]
    pub settings: SettingFlags,

    /// How keys and values lie in memory.
    #[command(flatten)]
    pub paging: PagingFlags,

    /// Which kernels run.
    #[command(flatten)]
    pub choosing: ChoosingFlags,

    /// Type of the output rows
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32")]
    pub out_dtype: OutDtype,
}

/// Flags that win over the metadata of the same name.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "What is computed (wins over the file's metadata)")]
pub struct SettingFlags {
    /// Whether query row i sees only the keys up to its own position; alone it means true [file's default: false]
    #[arg(long, value_name = "true|false", value_parser = settings::parse_causal, num_args = 0..=1,
          default_missing_value = "true")]
    pub causal: Option<bool>,

    /// The factor of q . k [file's default: 1/sqrt(head_dim)]
    #[arg(long, value_name = "X", value_parser = settings::parse_scale, allow_hyphen_values = true)]
    pub scale: Option<f64>,

    /// Keys that a row sees to the left of its own position; -1 is no limit [file's default: -1]
    #[arg(long, value_name = "N", value_parser = settings::parse_window, allow_hyphen_values = true)]
    pub window_left: Option<settings::Side>,

    /// Keys that a row sees to the right of its own position; -1 is no limit [file's default: -1]
    #[arg(long, value_name = "N", value_parser = settings::parse_window, allow_hyphen_values = true)]
    pub window_right: Option<settings::Side>,

    /// Soft cap: a score s becomes X * tanh(s / X); 0 is none [file's default: 0]
    #[arg(long, value_name = "X", value_parser = settings::parse_softcap, allow_hyphen_values = true)]
    pub softcap: Option<settings::Cap>,
}

/// Flags about pages.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "How keys and values lie in memory")]
pub struct PagingFlags {
    /// Tokens per page for contiguous keys and values [default: 16]
    #[arg(long, value_name = "TOKENS", value_parser = settings::parse_page_size, allow_hyphen_values = true)]
    pub page_size: Option<paged_attention::PageSize>,

    /// Scatter the pages at random over a pool of twice the need; the same seed gives the same places
    #[arg(long, value_name = "SEED", allow_hyphen_values = true)]
    pub shuffle_pages: Option<u64>,

    /// Read prefixes that sequences next to each other share once: those of TOKENS tokens and more, as the page ids of a
    /// paged file tell; alone it means 1
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..), num_args = 0..=1,
          require_equals = true, default_missing_value = "1")]
    pub share_prefixes: Option<u32>,

    /// Type in which the pages hold keys and values [default: the file's]: f32, f16, bf16, int8 (a scale for every token
    /// and head) or fp8 (e4m3, a scale for every head: its largest magnitude over 448); K/V where they differ: int8/f16
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<paged_attention::KvDtypes>,

    /// What comes first inside a page
    #[arg(long, value_name = "ORDER", value_enum, default_value_t)]
    pub layout: Layout,
}

/// `doctor`.
#[derive(Clone, Debug, Args)]
#[command(after_help = DOCTOR_HELP)]
pub struct DoctorArgs {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,

    /// Look at this adapter only: its index in the list, or a part of its name, backend or driver
    #[arg(long, value_name = "NAME|INDEX")]
    pub adapter: Option<String>,

    /// Which kernels run.
    #[command(flatten)]
    pub choosing: ChoosingFlags,
}

const DOCTOR_HELP: &str = "\
Every adapter is opened and runs one small case per kernel, which is compared with float64; what is
compiled and tested is said on standard error. The adapter with index 0 is the one that `attend` uses
unless told otherwise: a real device before a software renderer, among equals Vulkan, Metal and DX12
before OpenGL. A software renderer behind OpenGL is tested only if it is the only one or --adapter
names it: its compiler takes minutes. With --tuning the table's entries are tested too, on the adapter
that it was made on.
WGPU_BACKEND (vulkan, metal, dx12, gl) narrows the list.

Exit status: 0 if an adapter passes every test, 3 if none does.";

/// `--out-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutDtype {
    /// 32-bit float
    F32,
    /// 16-bit float
    F16,
}

impl From<OutDtype> for paged_attention::Dtype {
    fn from(dtype: OutDtype) -> Self {
        match dtype {
            OutDtype::F32 => Self::F32,
            OutDtype::F16 => Self::F16,
        }
    }
}

/// `--layout`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Layout {
    /// [page, slot, head, dim]
    Slot,
    /// [page, head, slot, dim]
    #[default]
    Head,
}

impl From<Layout> for paged_attention::RowOrder {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Slot => Self::SlotHead,
            Layout::Head => Self::HeadSlot,
        }
    }
}
