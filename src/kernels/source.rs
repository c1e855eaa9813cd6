//! The shaders' text: plain WGSL files, joined, behind constants for one configuration.

use std::fmt::Write;

use super::template;
use super::tiles::{LANES, SPLIT_KEYS, append_row_lanes};
use super::variant::{DecodeVariant, Variants};
use super::{BuildError, KernelConfig};
use crate::geometry::Dtype;
use crate::kv::{KvDtype, Pairing};
use crate::plan::{ITEM_WORDS, RECORD_WORDS};
use crate::status::STATUS_WORDS;

/// What all kernels share.
const COMMON: [&str; 4] = [
    include_str!("../../shaders/lib/address.wgsl"),
    include_str!("../../shaders/lib/pages.wgsl"),
    include_str!("../../shaders/lib/grid.wgsl"),
    include_str!("../../shaders/lib/status.wgsl"),
];

/// What the kernels of attention share besides.
const ATTENTION: [&str; 5] = [
    include_str!("../../shaders/lib/attention.wgsl"),
    include_str!("../../shaders/lib/scores.wgsl"),
    ROWS,
    include_str!("../../shaders/lib/softmax.wgsl"),
    include_str!("../../shaders/lib/attention_rows.wgsl"),
];

/// What an append that converts shares with others.
const CONVERSION: [&str; 3] = [APPEND, ROWS, include_str!("../../shaders/lib/pack.wgsl")];

const APPEND: &str = include_str!("../../shaders/lib/append.wgsl");

const ROWS: &str = include_str!("../../shaders/lib/rows.wgsl");

/// The kernels there are. Each is one shader file with one entry point of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelId {
    /// Many query rows: a lane owns whole rows, and keys pass by.
    Prefill,
    /// Few query rows: one split of the keys per workgroup.
    Decode,
    /// Joins the partial states of split sequences.
    Merge,
    /// Writes new keys and values into pages; one of two files, whether rows are copied or converted.
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

    /// The files that make up the kernel; their order does not matter to WGSL.
    fn files(self, config: &KernelConfig) -> impl Iterator<Item = &'static str> {
        let (shared, own): (&[&str], _) = match self {
            Self::Prefill => (&ATTENTION, include_str!("../../shaders/prefill.wgsl")),
            Self::Decode => (&ATTENTION, include_str!("../../shaders/decode.wgsl")),
            Self::Merge => (&ATTENTION, include_str!("../../shaders/merge.wgsl")),
            Self::Append if config.append_copies() => (&[APPEND], include_str!("../../shaders/append.wgsl")),
            Self::Append => (&CONVERSION, include_str!("../../shaders/append_converted.wgsl")),
        };
        COMMON.iter().chain(shared).copied().chain([own])
    }

    /// Bytes of workgroup memory that the kernel declares.
    pub fn workgroup_bytes(self, config: &KernelConfig) -> u32 {
        match self {
            Self::Decode => config.tiles().decode_bytes(),
            // The largest magnitude that each lane has seen.
            Self::Append if config.kv.of(&config.geometry).has_row_scales() => 4 * LANES,
            Self::Prefill | Self::Merge | Self::Append => 0,
        }
    }

    /// The subgroup size that the kernel is built for; 0 where it uses no subgroups.
    pub fn subgroup(self, config: &KernelConfig) -> u32 {
        match self {
            Self::Prefill => config.variants.prefill.subgroup,
            Self::Decode => config.variants.decode.subgroup(),
            Self::Merge | Self::Append => 0,
        }
    }

    /// Invocations of a workgroup.
    pub fn lanes(self, config: &KernelConfig) -> u32 {
        match self {
            Self::Prefill => config.variants.prefill.lanes,
            Self::Decode => config.tiles().decode_lanes,
            Self::Merge | Self::Append => LANES,
        }
    }

    /// Storage buffers that the kernel binds.
    pub fn storage_buffers(self, config: &KernelConfig) -> u32 {
        self.other_storage_buffers(config).saturating_add(config.segments.get())
    }

    /// Storage buffers besides the segments of the pool, whose bindings are the last: binding 0 is a uniform buffer.
    pub(crate) fn other_storage_buffers(self, config: &KernelConfig) -> u32 {
        match self {
            Self::Prefill | Self::Decode | Self::Merge => Bindings::new(config).kv - 1,
            Self::Append => 4 + u32::from(config.kv.of(&config.geometry).has_head_scales()),
        }
    }

    /// The whole WGSL module for `config`: constants, shared functions, the kernel.
    ///
    /// # Errors
    /// [`BuildError::Template`] for a shader file with a broken template.
    pub fn wgsl(self, config: &KernelConfig) -> Result<String, BuildError> {
        let constants = constants(self, config);
        module(self.entry_point(), &constants, self.files(config))
    }
}

/// One module of the constants and the files, whose templates are expanded with them.
pub(super) fn module(
    kernel: &'static str,
    constants: &[(&'static str, u32)],
    files: impl IntoIterator<Item = &'static str>,
) -> Result<String, BuildError> {
    let lookup = |name: &str| constants.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    let mut expanded = String::new();
    for file in files {
        expanded.push('\n');
        expanded
            .push_str(&template::expand(file, &lookup).map_err(|message| BuildError::Template { kernel, message })?);
    }
    let mut text = String::from("// Constants of one configuration; written by the host.\n");
    // Only what is mentioned: kernels that do not depend on a variant have the same text with every one.
    for (name, value) in constants.iter().filter(|(name, _)| expanded.contains(name)) {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "const {name} = {value}u;");
    }
    text.push_str(&expanded);
    Ok(text)
}

/// Binding numbers of the attention kernels' last buffers; those before are the same for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bindings {
    /// Of the slopes and sinks, and of the scales of heads.
    pub heads: Option<u32>,
    /// Of the bias.
    pub bias: Option<u32>,
    /// Of the first segment of the pages; the others follow, and nothing else.
    pub kv: u32,
}

impl Bindings {
    pub(crate) fn new(config: &KernelConfig) -> Self {
        let modifiers = &config.modifiers;
        let mut next = 6;
        let mut number = |is_there: bool| {
            let number = is_there.then_some(next);
            next += u32::from(is_there);
            number
        };
        let heads = number(modifiers.heads() || config.kv.of(&config.geometry).has_head_scales());
        let bias = number(modifiers.bias.is_some());
        Self { heads, bias, kv: next }
    }
}

fn dtype_code(dtype: Dtype) -> u32 {
    kv_dtype_code(dtype.into())
}

fn kv_dtype_code(dtype: KvDtype) -> u32 {
    match dtype {
        KvDtype::F32 => 0,
        KvDtype::F16 => 1,
        KvDtype::Bf16 => 2,
        KvDtype::Int8 => 3,
        KvDtype::Fp8 => 4,
    }
}

fn constants(kernel: KernelId, config: &KernelConfig) -> Vec<(&'static str, u32)> {
    let (geometry, tiles, Variants { prefill, decode }) = (&config.geometry, config.tiles(), config.variants);
    let (modifiers, bindings) = (&config.modifiers, Bindings::new(config));
    let kv = config.kv.of(geometry);
    let rotary = config.new_rows.rotary;
    vec![
        ("GROUP", geometry.group()),
        ("HEAD_DIM", geometry.head_dim()),
        ("V_HEAD_DIM", geometry.v_head_dim()),
        ("LATENT", geometry.is_latent().into()),
        ("QK_CHUNKS", tiles.qk_chunks),
        ("V_CHUNKS", tiles.v_chunks),
        ("V_VECS", 2 * tiles.v_chunks),
        ("Q_DTYPE", dtype_code(config.q)),
        ("K_DTYPE", kv_dtype_code(kv.k)),
        ("V_DTYPE", kv_dtype_code(kv.v)),
        ("OUT_DTYPE", dtype_code(config.out)),
        ("K_SCALED", kv.k.float().is_none().into()),
        ("V_SCALED", kv.v.float().is_none().into()),
        ("SCALED", kv.has_scales().into()),
        ("K_ROW_SCALES", kv.k.has_row_scales().into()),
        ("V_ROW_SCALES", kv.v.has_row_scales().into()),
        ("ROW_SCALES", kv.has_row_scales().into()),
        ("K_HEAD_SCALES", kv.k.has_head_scales().into()),
        ("V_HEAD_SCALES", kv.v.has_head_scales().into()),
        ("HEAD_SCALES", kv.has_head_scales().into()),
        ("STATUS_WORDS", STATUS_WORDS),
        ("SEQUENCE_WORDS", RECORD_WORDS as u32),
        ("ITEM_WORDS", ITEM_WORDS as u32 + if modifiers.mask { 2 } else { 0 }),
        ("BEGIN", (modifiers.window_left || modifiers.shared_prefixes).into()),
        ("SOURCES", modifiers.names_sources().into()),
        ("SHARED", modifiers.shared_prefixes.into()),
        ("SOFTCAP", modifiers.softcap.into()),
        ("ALIBI", modifiers.alibi.into()),
        ("SINKS", modifiers.sinks.into()),
        ("MASK", modifiers.mask.into()),
        ("HEADS", modifiers.heads().into()),
        ("BIAS", modifiers.bias.is_some().into()),
        ("BIAS_F32", (modifiers.bias == Some(Dtype::F32)).into()),
        ("HEADS_BINDING", bindings.heads.unwrap_or(0)),
        ("BIAS_BINDING", bindings.bias.unwrap_or(0)),
        ("KV_BINDING", kernel.other_storage_buffers(config) + 1),
        ("SEGMENTS", config.segments.get()),
        ("GROUPED", modifiers.grouped.into()),
        ("SEGMENTED", (config.segments.get() > 1 || modifiers.grouped).into()),
        ("WRITES_PAGES", (kernel == KernelId::Append).into()),
        ("PAGES_IN_WORDS", (kernel == KernelId::Append && !config.append_copies()).into()),
        ("LANES", LANES),
        ("NEW_DTYPE", dtype_code(config.new_rows.dtype)),
        ("V_ROWS", (!geometry.is_latent()).into()),
        ("ROW_LANES", append_row_lanes(geometry)),
        ("ROTARY", rotary.is_some().into()),
        ("ROTARY_FIRST", rotary.map_or(0, |rotary| rotary.first)),
        ("ROTARY_DIMS", rotary.map_or(0, |rotary| rotary.dims)),
        ("HALF_SPLIT", rotary.is_some_and(|rotary| rotary.pairing == Pairing::HalfSplit).into()),
        ("PREFILL_LANES", prefill.lanes),
        ("PREFILL_SUBGROUP", prefill.subgroup),
        ("ROWS_PER_LANE", prefill.rows_per_lane),
        ("STEP_KEYS", prefill.step_keys),
        // Chunks of a step's keys and values that each lane of a subgroup loads.
        ("K_LOADS", (prefill.step_keys * tiles.qk_chunks).div_ceil(prefill.subgroup.max(1))),
        ("V_LOADS", (prefill.step_keys * tiles.v_chunks).div_ceil(prefill.subgroup.max(1))),
        ("DECODE_LANES", tiles.decode_lanes),
        ("DECODE_SUBGROUP", decode.subgroup()),
        ("STREAMS", matches!(decode, DecodeVariant::Streams { .. }).into()),
        ("SPLIT_KEYS", SPLIT_KEYS),
        ("DECODE_ROWS", tiles.decode_rows),
        ("LANES_PER_KEY", tiles.lanes_per_key),
        ("KEY_LANE_BITS", tiles.lanes_per_key.ilog2()),
        // Chunks of a query that each lane of a subgroup holds.
        ("Q_LOADS", tiles.qk_chunks.div_ceil(tiles.lanes_per_key)),
        ("PARTS", tiles.decode_lanes / tiles.row_slots),
        ("SCORES", tiles.scores),
        ("KEY_STREAMS", tiles.key_streams),
        ("JOINS", (tiles.key_streams > 1).into()),
        ("V_SPAN", tiles.v_span),
        // Cache lines of 64 bytes that a value takes.
        ("V_ROW_LINES", (8 * tiles.v_chunks * kv.v.bytes()).div_ceil(64)),
        ("MERGE_ROWS", tiles.merge_rows),
    ]
}
