//! `paged-attention budget`: bytes of keys and values, unused slots, and the requests that fit. No device is opened.

mod args;
mod figures;
mod lengths;
mod report;

use std::path::PathBuf;

use paged_attention::budget::{BudgetError, KvShape, Lengths, MemoryConfig, MemoryModel};
use paged_attention::kernels::{AdapterFacts, Variants};
use paged_attention::{AttentionConfig, AttentionOptions, Dtype, Extras, GeometryError, HeadGeometry, KvLayout};
use thiserror::Error;

pub use args::BudgetArgs;

use crate::attend::{complain, print, printed};
use crate::error::InputError;
use crate::report as exit;
use report::{Memory, Report};

/// Something that nothing can be counted with: exit status 2.
#[derive(Debug, Error)]
pub enum Unusable {
    /// The numbers do not go together.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// Heads that there are no kernels for.
    #[error("--memory counts the buffers of the kernels: {0}")]
    Geometry(#[from] GeometryError),
    /// An element size in which no pages are stored.
    #[error("--memory counts pages as they are stored, in elements of 2 or 4 bytes; --bytes is {found}")]
    Bytes {
        /// The size.
        found: u32,
    },
    /// The file of lengths cannot be read.
    #[error("--lengths file:{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        error: InputError,
    },
    /// A line of the file is no length.
    #[error("--lengths file:{}: line {number} is {found:?}; {needed} is needed", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        number: usize,
        /// Its text.
        found: String,
        /// What should be there.
        needed: &'static str,
    },
    /// The file holds no lengths, or too many.
    #[error("--lengths file:{}: {error}", path.display())]
    Lengths {
        /// The file.
        path: PathBuf,
        /// Why.
        error: BudgetError,
    },
    /// No figures can be written.
    #[error("--figures {}: {message}", folder.display())]
    Figures {
        /// The folder.
        folder: PathBuf,
        /// Why.
        message: String,
    },
}

/// Runs the subcommand and returns the exit status.
pub fn run(args: &BudgetArgs) -> u8 {
    match counted(args) {
        Ok(report) => printed(print(args.json, &report, || report.text()), exit::PASSED),
        Err(error) => {
            complain(&error);
            exit::UNUSABLE
        }
    }
}

fn counted(args: &BudgetArgs) -> Result<Report, Unusable> {
    let lengths = args.lengths.load()?;
    let memory = args.memory.memory.map(|memory| fit(args, &lengths, memory)).transpose()?;
    let mut report = Report::new(args, &lengths, memory)?;
    if let Some(folder) = &args.figures {
        report.figures = figures::write(folder, args, &lengths)?;
    }
    Ok(report)
}

/// Equation 1 for the model, with as many KV heads as it has or with another number of them.
fn shape(args: &BudgetArgs, kv_heads: u32) -> Result<KvShape, BudgetError> {
    KvShape::new(args.layers, kv_heads, args.head_dim, args.bytes)
}

/// Tokens that each request reserves where there are no pages.
fn reserved(args: &BudgetArgs, lengths: &Lengths) -> u32 {
    args.reserve.unwrap_or(lengths.longest())
}

/// The requests that fit, in pages and with reservations.
fn fit(args: &BudgetArgs, lengths: &Lengths, memory: u64) -> Result<Memory, Unusable> {
    let flags = &args.memory;
    let dtype = match args.bytes {
        2 => Dtype::F16,
        4 => Dtype::F32,
        found => return Err(Unusable::Bytes { found }),
    };
    let geometry = HeadGeometry::new(flags.q_heads.unwrap_or(args.kv_heads), args.kv_heads, args.head_dim)?;
    let layout = KvLayout::new(geometry, dtype, args.page_size, 1).map_err(BudgetError::from)?;
    let options = AttentionOptions::new(&geometry).with_causal(true);
    let config = MemoryConfig {
        attention: AttentionConfig {
            q: Dtype::F32,
            out: Dtype::F32,
            layout,
            new_rows: dtype.into(),
            options,
            extras: Extras::NONE,
        },
        variants: Variants::base(&AdapterFacts::PLAIN_GPU, &geometry),
        layers: args.layers,
        prefill_rows: flags.prefill_rows.unwrap_or(u32::MAX),
        activation_row_bytes: flags.activations_per_row,
        weights: flags.weights,
        communication: flags.communication,
        other: flags.other,
        headroom: flags.headroom,
    };
    let paged = MemoryModel::new(&config, lengths)?;
    let reserving = MemoryModel::reserving(&config, lengths, reserved(args, lengths))?;
    Ok(Memory::new(memory, &config, lengths, &paged, &reserving)?)
}
