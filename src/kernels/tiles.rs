//! Tile sizes: each is decided here once, for the shaders, the plan, the memory checks and the error bound.

use std::ops::Range;

use super::variant::{DecodeVariant, PrefillVariant, Variants};
use crate::chains::{Chains, gcd};
use crate::geometry::{HeadGeometry, ROW_ALIGN, padded_dim};

/// Invocations per workgroup of the kernels without variants, and of the decode kernel without subgroups.
pub const LANES: u32 = 64;

/// Keys per split of a decode. Splits start at absolute multiples of it, so that a sequence is cut alike alone and in
/// any batch. 4,096 keys of 8 KV heads make 128 workgroups; up to 256 keys need no merge.
pub const SPLIT_KEYS: u32 = 256;

/// Keys per split of a prefix that sequences share and that takes the prefill kernel, with at most [`SHARED_ROWS_SPLIT_MAX`]
/// tile rows; a multiple of every step. Such a prefix has few row tiles, and a GPU is filled by its splits. The longer, the
/// fewer partial states there are to merge.
pub const SHARED_SPLIT_KEYS: u32 = 512;

/// Above so many tile rows a shared prefix is split as a prompt is: row tiles are enough, and partial states many.
pub const SHARED_ROWS_SPLIT_MAX: u32 = 256;

/// A sequence with more tile rows (`q_len * group`) than this, and more than one query row, takes the prefill
/// kernel; every other one decodes. Depends on the sequence alone, so that neighbours in a batch change no bits.
pub const DECODE_ROWS_MAX: u32 = 16;

/// Workgroup memory that WebGPU guarantees, in bytes: what the kernels stay within.
pub const WORKGROUP_BYTES_MAX: u32 = 16_384;

/// Query rows that one decode workgroup holds in registers at most.
const DECODE_TILE_ROWS_MAX: u32 = 8;

/// The sizes that a head geometry and a choice of variants lead to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Chunks of 8 elements in a query or key row.
    pub qk_chunks: u32,
    /// Chunks of 8 elements in a value or output row.
    pub v_chunks: u32,
    /// The prefill kernel's own sizes.
    pub prefill: PrefillVariant,
    /// Lanes of a decode workgroup.
    pub decode_lanes: u32,
    /// Tile rows of a decode workgroup.
    pub decode_rows: u32,
    /// `decode_rows` rounded up to a power of two: lanes are shared out over so many rows.
    pub row_slots: u32,
    /// Lanes that share a key of the decode kernel.
    pub lanes_per_key: u32,
    /// f32 words of the decode kernel's score tile.
    pub scores: u32,
    /// Keys whose values a decode workgroup reads at a time.
    pub key_streams: u32,
    /// Chunks of a value that a decode lane takes.
    pub v_span: u32,
    /// Rows of a merge workgroup.
    pub merge_rows: u32,
    pub(crate) decode: DecodeVariant,
    /// Whether keys or values have scales, which the decode kernel keeps for the keys of a split.
    pub(crate) scaled: bool,
}

/// Lanes that share a row of an append that converts.
pub(crate) fn append_row_lanes(geometry: &HeadGeometry) -> u32 {
    let chunks = padded_dim(geometry.head_dim().max(geometry.v_head_dim())) / ROW_ALIGN;
    chunks.next_power_of_two().min(LANES)
}

impl Tiles {
    /// The sizes for one head geometry, of keys and values without scales.
    pub fn new(geometry: &HeadGeometry, variants: &Variants) -> Self {
        Self::with_scales(geometry, variants, false)
    }

    /// The sizes for one head geometry; `scaled` says whether keys or values have scales.
    pub fn with_scales(geometry: &HeadGeometry, variants: &Variants, scaled: bool) -> Self {
        let Variants { prefill, decode } = *variants;
        let qk_chunks = padded_dim(geometry.head_dim()) / ROW_ALIGN;
        let v_chunks = padded_dim(geometry.v_head_dim()) / ROW_ALIGN;
        let decode_lanes = match decode.subgroup() {
            0 => LANES,
            subgroup => subgroup,
        };
        let lanes_per_key = match decode {
            DecodeVariant::Workgroup => 1,
            // Every lane holds a part of the queries.
            DecodeVariant::Streams { subgroup } => subgroup,
            DecodeVariant::Exchange { subgroup } => qk_chunks.next_power_of_two().min(subgroup),
        };
        let sizes = |decode_rows: u32| Self {
            qk_chunks,
            v_chunks,
            prefill,
            decode_lanes,
            decode_rows,
            row_slots: decode_rows.next_power_of_two(),
            lanes_per_key,
            scores: (decode_rows * SPLIT_KEYS).max(8 * decode_lanes),
            // A subgroup on a CPU takes one key at a time: lanes are few, and idle ones cost nothing there.
            key_streams: if matches!(decode, DecodeVariant::Streams { .. }) {
                1
            } else {
                (decode_lanes / v_chunks).max(1)
            },
            v_span: v_chunks.div_ceil(decode_lanes),
            merge_rows: LANES / v_chunks,
            decode,
            scaled,
        };
        // Every row has a lane at least when weights are made.
        let rows_max = (1..=DECODE_TILE_ROWS_MAX.min(decode_lanes))
            .rev()
            .find(|rows| sizes(*rows).decode_bytes() <= WORKGROUP_BYTES_MAX)
            .unwrap_or(1);
        // Row tiles of equal height: a group of 9 makes 5 + 4, not 8 + 1.
        sizes(geometry.group().div_ceil(geometry.group().div_ceil(rows_max)))
    }

    /// Tile rows of a prefill workgroup.
    pub fn prefill_rows(&self) -> u32 {
        self.prefill.lanes * self.prefill.rows_per_lane
    }

    /// Bytes of workgroup memory of the decode kernel: queries (where no subgroup holds them), scores, rows, a
    /// flag, scales, partial maxima and sums.
    pub fn decode_bytes(&self) -> u32 {
        let queries = if self.decode == DecodeVariant::Workgroup { 32 * self.decode_rows * self.qk_chunks } else { 0 };
        let scales = if self.scaled { 8 * SPLIT_KEYS } else { 0 };
        queries + 4 * self.scores + 8 * SPLIT_KEYS + 16 + scales + 8 * self.decode_lanes
    }

    /// Whether a sequence takes the decode kernel.
    pub fn decodes(q_len: u32, group: u32) -> bool {
        q_len == 1 || u64::from(q_len) * u64::from(group) <= u64::from(DECODE_ROWS_MAX)
    }

    /// How the `q_len` query rows of a sequence go through keys, of which they see none but `visible`; or those of all
    /// sequences that share a prefix.
    pub fn pass(
        &self,
        geometry: &HeadGeometry,
        q_len: u32,
        keys: Range<u32>,
        visible: Range<u32>,
        shared: bool,
    ) -> Pass {
        let decodes = Self::decodes(q_len, geometry.group());
        let split_keys = match decodes {
            true => SPLIT_KEYS,
            // Rows have been counted in 32 bits (`check_rows`).
            false if shared && q_len.saturating_mul(geometry.group()) <= SHARED_ROWS_SPLIT_MAX => {
                SHARED_SPLIT_KEYS.next_multiple_of(self.prefill.step_keys).min(self.prefill.split_keys)
            }
            false => self.prefill.split_keys,
        };
        let splits =
            if visible.is_empty() { 0..1 } else { visible.start / split_keys..visible.end.div_ceil(split_keys) };
        let tile_rows = if decodes { self.decode_rows } else { self.prefill_rows() };
        Pass { decodes, tile_rows, keys, split_keys, splits }
    }

    /// The longest rounding chains of rows whose keys are gone through in `passes`, one after the other, for the error
    /// bound.
    pub fn chains<'a>(&self, passes: impl Iterator<Item = &'a Pass>) -> Chains {
        // A dot product is one chain over the padded row, after scaling the query; an exchange ends it with a tree.
        let dot = 1 + 8 * self.qk_chunks + self.lanes_per_key.ilog2();
        let (mut step_keys, mut accumulate, mut states) = (0, 0, 0);
        for pass in passes {
            let split_keys = (pass.keys.end - pass.keys.start).min(pass.split_keys);
            let (step, chain) = if pass.decodes {
                let parts = self.decode_lanes / self.row_slots;
                let values = split_keys.div_ceil(self.key_streams) + 1 + self.key_streams;
                let sums = split_keys.div_ceil(parts) + parts;
                (SPLIT_KEYS, values.max(sums))
            } else {
                let step = self.prefill.step_keys;
                // A step makes a sum of its products, then multiplies what was before and adds; a first step may be cut.
                (step, step + 1 + 2 * (split_keys.div_ceil(step) + u32::from(!pass.keys.start.is_multiple_of(step))))
            };
            // Steps that divide those of every pass, and where each begins, fit all of them.
            step_keys = gcd(gcd(step_keys, step), pass.keys.start);
            accumulate = accumulate.max(chain);
            states += pass.splits.len() as u32;
        }
        // A merge multiplies and adds.
        let merges = if states > 1 { 2 * states + 1 } else { 0 };
        Chains { dot, step_keys, accumulate: accumulate + merges, scaled: false, order: Vec::new() }
    }
}

/// How rows go through keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Whether the decode kernel takes them.
    pub decodes: bool,
    /// Tile rows of a workgroup.
    pub tile_rows: u32,
    /// The keys.
    pub keys: Range<u32>,
    /// Keys per split.
    pub split_keys: u32,
    /// The splits that hold keys which are seen, at least one; split `i` begins at key `i * split_keys`.
    pub splits: Range<u32>,
}
