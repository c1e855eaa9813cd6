//! Tile sizes: each is decided here once, for the shaders, the plan, the memory checks and the error bound.

use crate::chains::Chains;
use crate::geometry::{HeadGeometry, ROW_ALIGN, padded_dim};

/// Invocations per workgroup, in every kernel.
pub const LANES: u32 = 64;

/// Keys per split of a decode. Splits start at absolute multiples of it, so that a sequence is cut alike alone and in
/// any batch. 4,096 keys of 8 KV heads make 128 workgroups; up to 256 keys need no merge.
pub const SPLIT_KEYS: u32 = 256;

/// A sequence with more tile rows (`q_len * group`) than this, and more than one query row, takes the prefill
/// kernel; every other one decodes. Depends on the sequence alone, so that neighbours in a batch change no bits.
pub const DECODE_ROWS_MAX: u32 = 16;

/// Workgroup memory that WebGPU guarantees, in bytes: what the kernels stay within.
pub const WORKGROUP_BYTES_MAX: u32 = 16_384;

/// Workgroup memory for the prefill kernel's key and value tile, in bytes: half of what is guaranteed, so that
/// two workgroups fit where there is no more.
const PREFILL_TILE_BYTES_MAX: u32 = 8_192;

/// Keys per online-softmax step of the prefill kernel, fixed in its source.
pub const STEP_KEYS: u32 = 4;

/// Query rows that one decode workgroup holds in registers at most.
const DECODE_TILE_ROWS_MAX: u32 = 8;

/// The sizes that a head geometry leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Chunks of 8 elements in a query or key row.
    pub qk_chunks: u32,
    /// Chunks of 8 elements in a value or output row.
    pub v_chunks: u32,
    /// Keys that the prefill kernel stages at a time.
    pub prefill_tile_keys: u32,
    /// Tile rows of a decode workgroup.
    pub decode_rows: u32,
    /// `decode_rows` rounded up to a power of two: lanes are shared out over so many rows.
    pub row_slots: u32,
    /// f32 words of the decode kernel's score tile.
    pub scores: u32,
    /// Keys whose values a decode workgroup reads at a time.
    pub key_streams: u32,
    /// Rows whose key streams are joined at a time.
    pub join_rows: u32,
    /// Rows of a merge workgroup.
    pub merge_rows: u32,
}

impl Tiles {
    /// The sizes for one head geometry.
    pub fn new(geometry: &HeadGeometry) -> Self {
        let qk_chunks = padded_dim(geometry.head_dim()) / ROW_ALIGN;
        let v_chunks = padded_dim(geometry.v_head_dim()) / ROW_ALIGN;
        let key_bytes = 32 * (qk_chunks + v_chunks);
        // The largest power of two that fits; HEAD_DIM_MAX leaves room for 4 keys, which is one step.
        let prefill_tile_keys = 1 << (PREFILL_TILE_BYTES_MAX / key_bytes).clamp(STEP_KEYS, LANES / 2).ilog2();
        let rows_max = (1..=DECODE_TILE_ROWS_MAX)
            .rev()
            .find(|rows| decode_bytes(*rows, qk_chunks) <= WORKGROUP_BYTES_MAX)
            .unwrap_or(1);
        // Row tiles of equal height: a group of 9 makes 5 + 4, not 8 + 1.
        let decode_rows = geometry.group().div_ceil(geometry.group().div_ceil(rows_max));
        let scores = decode_scores(decode_rows);
        Self {
            qk_chunks,
            v_chunks,
            prefill_tile_keys,
            decode_rows,
            row_slots: decode_rows.next_power_of_two(),
            scores,
            key_streams: LANES / v_chunks,
            join_rows: scores / (8 * LANES),
            merge_rows: LANES / v_chunks,
        }
    }

    /// Bytes of workgroup memory of the prefill kernel.
    pub fn prefill_bytes(&self) -> u32 {
        32 * self.prefill_tile_keys * (self.qk_chunks + self.v_chunks) + 8 * LANES
    }

    /// Bytes of workgroup memory of the decode kernel.
    pub fn decode_bytes(&self) -> u32 {
        decode_bytes(self.decode_rows, self.qk_chunks)
    }

    /// Whether a sequence takes the decode kernel.
    pub fn decodes(q_len: u32, group: u32) -> bool {
        q_len == 1 || u64::from(q_len) * u64::from(group) <= u64::from(DECODE_ROWS_MAX)
    }

    /// The longest rounding chains of a sequence's rows, for the error bound.
    pub fn chains(&self, geometry: &HeadGeometry, q_len: u32, kv_len: u32) -> Chains {
        // `dot` of four elements is a chain of 4; then one addition per vector or pair of vectors.
        if Self::decodes(q_len, geometry.group()) {
            let splits = kv_len.div_ceil(SPLIT_KEYS).max(1);
            let split_keys = kv_len.min(SPLIT_KEYS);
            let parts = LANES / self.row_slots;
            let values = split_keys.div_ceil(self.key_streams) + 1 + self.key_streams;
            let sums = split_keys.div_ceil(parts) + parts;
            // A merge multiplies and adds.
            let merges = if splits > 1 { 2 * splits + 1 } else { 0 };
            Chains { dot: 5 + self.qk_chunks, step_keys: SPLIT_KEYS, accumulate: values.max(sums) + merges }
        } else {
            // A step makes a sum of four products and joins it to the rescaled accumulator.
            let accumulate = 4 + 2 * kv_len.div_ceil(STEP_KEYS);
            Chains { dot: 4 + 2 * self.qk_chunks, step_keys: STEP_KEYS, accumulate }
        }
    }
}

fn decode_scores(rows: u32) -> u32 {
    (rows * SPLIT_KEYS).max(8 * LANES)
}

fn decode_bytes(rows: u32, qk_chunks: u32) -> u32 {
    32 * rows * qk_chunks + 4 * decode_scores(rows) + 4 * SPLIT_KEYS + 8 * LANES
}
