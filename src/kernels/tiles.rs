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

/// Query rows that one decode workgroup holds in registers at most.
const DECODE_TILE_ROWS_MAX: u32 = 8;

/// What runs the kernels. Registers and caches differ so much that the tile sizes do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Processor {
    /// A graphics processor: few registers per lane, many lanes.
    Gpu,
    /// A driver that runs shaders on the CPU: vectors of 4 to 16 lanes, loads that cost as much as arithmetic.
    Cpu,
}

impl Processor {
    /// What an adapter says of itself.
    pub fn of(adapter: &wgpu::AdapterInfo) -> Self {
        match adapter.device_type {
            wgpu::DeviceType::Cpu => Self::Cpu,
            _ => Self::Gpu,
        }
    }
}

/// The sizes that a head geometry leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Chunks of 8 elements in a query or key row.
    pub qk_chunks: u32,
    /// Chunks of 8 elements in a value or output row.
    pub v_chunks: u32,
    /// Lanes of a prefill workgroup.
    pub prefill_lanes: u32,
    /// Tile rows that each of them owns.
    pub rows_per_lane: u32,
    /// Keys per online-softmax step of the prefill kernel.
    pub step_keys: u32,
    /// Keys per split of a prefill; a multiple of `step_keys`.
    pub prefill_split_keys: u32,
    /// Tile rows of a decode workgroup.
    pub decode_rows: u32,
    /// `decode_rows` rounded up to a power of two: lanes are shared out over so many rows.
    pub row_slots: u32,
    /// f32 words of the decode kernel's score tile.
    pub scores: u32,
    /// Keys whose values a decode workgroup reads at a time.
    pub key_streams: u32,
    /// Rows of a merge workgroup.
    pub merge_rows: u32,
}

impl Tiles {
    /// The sizes for one head geometry.
    pub fn new(geometry: &HeadGeometry, processor: Processor) -> Self {
        let qk_chunks = padded_dim(geometry.head_dim()) / ROW_ALIGN;
        let v_chunks = padded_dim(geometry.v_head_dim()) / ROW_ALIGN;
        // A row takes a query and an accumulator in registers: 128 words at head dimension 64. Two rows fit into the
        // 255 registers of a GPU's lane only below that. On a CPU registers spill to a cache that is near, and a load
        // that serves four rows is what counts; short steps keep the compiler's work small.
        let row_words = 8 * (qk_chunks + v_chunks);
        let (prefill_lanes, rows_per_lane, step_keys) = match processor {
            Processor::Gpu if row_words <= 96 => (LANES, 2, 4),
            Processor::Gpu => (LANES, 1, 4),
            Processor::Cpu if row_words <= 256 => (LANES / 4, 4, 2),
            Processor::Cpu => (LANES / 2, 2, 2),
        };
        // Prefill has rows enough to fill a GPU, so its keys need no split. Software drivers get one where their loops
        // would end: llvmpipe of Mesa 22 stops after 65,535 iterations of an invocation.
        let prefill_split_keys = match processor {
            Processor::Gpu => 1 << 31,
            Processor::Cpu => 1 << 15,
        };
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
            prefill_lanes,
            rows_per_lane,
            step_keys,
            prefill_split_keys,
            decode_rows,
            row_slots: decode_rows.next_power_of_two(),
            scores,
            key_streams: LANES / v_chunks,
            merge_rows: LANES / v_chunks,
        }
    }

    /// Tile rows of a prefill workgroup.
    pub fn prefill_rows(&self) -> u32 {
        self.prefill_lanes * self.rows_per_lane
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
        // A dot product is one chain over the padded row, after scaling the query.
        let dot = 1 + 8 * self.qk_chunks;
        let (split_keys, splits) = self.splits(geometry, q_len, kv_len);
        let split_keys = kv_len.min(split_keys);
        // A merge multiplies and adds.
        let merges = if splits > 1 { 2 * splits + 1 } else { 0 };
        if Self::decodes(q_len, geometry.group()) {
            let parts = LANES / self.row_slots;
            let values = split_keys.div_ceil(self.key_streams) + 1 + self.key_streams;
            let sums = split_keys.div_ceil(parts) + parts;
            Chains { dot, step_keys: SPLIT_KEYS, accumulate: values.max(sums) + merges }
        } else {
            // A step makes a sum of its products, then multiplies what was before and adds.
            let accumulate = self.step_keys + 1 + 2 * split_keys.div_ceil(self.step_keys) + merges;
            Chains { dot, step_keys: self.step_keys, accumulate }
        }
    }

    /// Keys per split of a sequence, and how many splits it has (at least 1).
    pub fn splits(&self, geometry: &HeadGeometry, q_len: u32, kv_len: u32) -> (u32, u32) {
        let split_keys = if Self::decodes(q_len, geometry.group()) { SPLIT_KEYS } else { self.prefill_split_keys };
        (split_keys, kv_len.div_ceil(split_keys).max(1))
    }
}

fn decode_scores(rows: u32) -> u32 {
    (rows * SPLIT_KEYS).max(8 * LANES)
}

fn decode_bytes(rows: u32, qk_chunks: u32) -> u32 {
    32 * rows * qk_chunks + 4 * decode_scores(rows) + 4 * SPLIT_KEYS + 8 * LANES
}
