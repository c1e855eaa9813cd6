//! The shaders' text: plain WGSL files, joined, behind constants for one configuration.

use std::fmt::Write;

use super::KernelConfig;
use super::tiles::{LANES, SPLIT_KEYS, Tiles};
use crate::geometry::Dtype;

const ADDRESS: &str = include_str!("../../shaders/lib/address.wgsl");
const ATTENTION: &str = include_str!("../../shaders/lib/attention.wgsl");
const ATTENTION_ROWS: &str = include_str!("../../shaders/lib/attention_rows.wgsl");
const GRID: &str = include_str!("../../shaders/lib/grid.wgsl");
const ROWS: &str = include_str!("../../shaders/lib/rows.wgsl");
const SOFTMAX: &str = include_str!("../../shaders/lib/softmax.wgsl");
const STATUS: &str = include_str!("../../shaders/lib/status.wgsl");

/// The kernels there are. Each is one shader file with one entry point of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelId {
    /// Many query rows: tiles of keys in workgroup memory, a lane per row.
    Prefill,
    /// Few query rows: one split of the keys per workgroup.
    Decode,
    /// Joins the partial states of split sequences.
    Merge,
    /// Writes new keys and values into pages.
    Append,
}

impl KernelId {
    /// All kernels.
    pub const ALL: [Self; 4] = [Self::Prefill, Self::Decode, Self::Merge, Self::Append];

    /// The entry point's name.
    pub const fn entry_point(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Merge => "merge",
            Self::Append => "append",
        }
    }

    fn files(self) -> &'static [&'static str] {
        match self {
            Self::Prefill => &[
                ADDRESS,
                GRID,
                STATUS,
                ATTENTION,
                ROWS,
                SOFTMAX,
                ATTENTION_ROWS,
                include_str!("../../shaders/prefill.wgsl"),
            ],
            Self::Decode => &[
                ADDRESS,
                GRID,
                STATUS,
                ATTENTION,
                ROWS,
                SOFTMAX,
                ATTENTION_ROWS,
                include_str!("../../shaders/decode.wgsl"),
            ],
            Self::Merge => &[
                ADDRESS,
                GRID,
                STATUS,
                ATTENTION,
                ROWS,
                SOFTMAX,
                ATTENTION_ROWS,
                include_str!("../../shaders/merge.wgsl"),
            ],
            Self::Append => &[ADDRESS, GRID, STATUS, include_str!("../../shaders/append.wgsl")],
        }
    }

    /// Bytes of workgroup memory that the kernel declares.
    pub fn workgroup_bytes(self, config: &KernelConfig) -> u32 {
        let tiles = Tiles::new(&config.geometry);
        match self {
            Self::Prefill => tiles.prefill_bytes(),
            Self::Decode => tiles.decode_bytes(),
            Self::Merge | Self::Append => 0,
        }
    }

    /// Storage buffers that the kernel binds.
    pub const fn storage_buffers(self) -> u32 {
        match self {
            Self::Prefill | Self::Decode | Self::Merge => 7,
            Self::Append => 5,
        }
    }

    /// The whole WGSL module for `config`.
    pub fn wgsl(self, config: &KernelConfig) -> String {
        let mut text = constants(config);
        for file in self.files() {
            text.push('\n');
            text.push_str(file);
        }
        text
    }
}

fn dtype_code(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
    }
}

fn constants(config: &KernelConfig) -> String {
    let geometry = &config.geometry;
    let tiles = Tiles::new(geometry);
    let mut text = String::from("// Constants of one configuration; written by the host.\n");
    for (name, value) in [
        ("LANES", LANES),
        ("GROUP", geometry.group()),
        ("HEAD_DIM", geometry.head_dim()),
        ("V_HEAD_DIM", geometry.v_head_dim()),
        ("QK_CHUNKS", tiles.qk_chunks),
        ("QK_VECS", 2 * tiles.qk_chunks),
        ("V_CHUNKS", tiles.v_chunks),
        ("V_VECS", 2 * tiles.v_chunks),
        ("Q_DTYPE", dtype_code(config.q)),
        ("KV_DTYPE", dtype_code(config.kv)),
        ("OUT_DTYPE", dtype_code(config.out)),
        ("TILE_KEYS", tiles.prefill_tile_keys),
        ("SPLIT_KEYS", SPLIT_KEYS),
        ("DECODE_ROWS", tiles.decode_rows),
        ("PARTS", LANES / tiles.row_slots),
        ("SCORES", tiles.scores),
        ("KEY_STREAMS", tiles.key_streams),
        ("JOIN_ROWS", tiles.join_rows),
        ("MERGE_ROWS", tiles.merge_rows),
    ] {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "const {name} = {value}u;");
    }
    text
}
