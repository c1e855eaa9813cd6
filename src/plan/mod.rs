//! Planning: from a ragged batch to work items, in pure host code.
//!
//! The same batch gives the same plan, on every machine. What becomes of a sequence (its kernel, its splits)
//! depends on that sequence alone, so its bits are the same in every batch.

mod mask;

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

use std::ops::Range;

use self::mask::{Mask, Run};
use crate::batch::{Batch, BatchError, NO_PAGE};
use crate::case::AttentionOptions;
use crate::chains::Chains;
use crate::geometry::{HeadGeometry, PageSize};
use crate::kernels::{ItemOrder, KernelId, Tiles};
use crate::kv::{KvLayout, RowLayout};

/// A batch that cannot be planned.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// An index tensor is unusable.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// A sequence's query rows and keys together pass 32 bits.
    #[error("sequence {seq} has {q_len} query rows and {kv_len} keys; together they must stay below 2^32")]
    TooLong {
        /// The sequence.
        seq: usize,
        /// Its query rows.
        q_len: u32,
        /// Its keys.
        kv_len: u32,
    },
    /// The scale is not finite, or not in f32.
    #[error("scale is {found}; a number that is finite in f32, times log2(e), is needed")]
    Scale {
        /// The scale found.
        found: f64,
    },
    /// The softcap is no positive number, or not in f32.
    #[error("softcap is {found}; a positive number that is finite in f32, times log2(e), is needed")]
    Softcap {
        /// The softcap found.
        found: f64,
    },
    /// The mask has not an entry for every query row and key.
    #[error("the mask has {found} entries; {needed} are needed, one for every query row and key of its sequence")]
    Mask {
        /// Entries found.
        found: usize,
        /// Entries needed.
        needed: u64,
    },
    /// A mask was given and the configuration has none, or the other way round.
    #[error("a mask is {}; the configuration says otherwise", if *.given { "given" } else { "left out" })]
    MaskGiven {
        /// Whether it was given.
        given: bool,
    },
    /// A sequence needs a page that its table says it has not.
    #[error("entry {entry} of the page table of sequence {seq} is `NO_PAGE`; its rows see keys of that page")]
    NoPage {
        /// The sequence.
        seq: usize,
        /// The entry, counted from the sequence's first.
        entry: u32,
    },
    /// A count that the kernels keep in 32 bits is too large.
    #[error("the batch needs {needed} {what}; at most {limit} are possible in one call")]
    TooMany {
        /// What is counted.
        what: &'static str,
        /// How many are needed.
        needed: u64,
        /// The largest number.
        limit: u64,
    },
}

/// Parameters of the attention kernels. The shader's `Params` has the same fields in the same order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub(crate) struct Params {
    pub k_rows: RowLayout,
    pub v_rows: RowLayout,
    pub k_scales: RowLayout,
    pub v_scales: RowLayout,
    pub q_factor: f32,
    pub softcap_log2: f32,
    pub reach_left: u32,
    pub reach_right: u32,
    pub kv_heads: u32,
    pub page_size: u32,
    pub page_count: u32,
    pub bias_head_stride: u32,
    pub page_ids: u32,
    pub masks: u32,
    pub runs: u32,
    pub prefill_items: u32,
    pub prefill_groups: u32,
    pub decode_items: u32,
    pub decode_groups: u32,
    pub merge_items: u32,
    pub merge_groups: u32,
}

/// A plan that did not reach the device.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("there is no buffer to write the plan of {bytes} bytes into: {message}")]
pub struct UploadError {
    /// Bytes of the plan.
    pub bytes: u64,
    /// The device's message.
    pub message: String,
}

/// What one step's attention consists of: made once per step, used for every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub(crate) params: Params,
    pub(crate) words: Vec<u32>,
    pub(crate) total_q: u32,
    pub(crate) layout: KvLayout,
    tiles: Tiles,
    pub(crate) score_pairs: u64,
    workspace_bytes: u64,
    chains: Vec<Chains>,
}

/// A reach that has no end, in [`Params`].
const UNLIMITED: u32 = u32::MAX;

impl Plan {
    /// Plans attention of `batch` over a pool of `layout`. `mask` has an entry for every query row and key of its
    /// sequence, row by row, or is left out; `bias_per_head` says whether each query head has a bias of its own.
    pub(crate) fn new(
        batch: &Batch<'_>,
        layout: &KvLayout,
        options: &AttentionOptions,
        tiles: &Tiles,
        mask: Option<&[bool]>,
        bias_per_head: bool,
    ) -> Result<Self, PlanError> {
        batch.validate(layout.page_size(), layout.page_count())?;
        let log2 = |factor: f64| (factor * std::f64::consts::LOG2_E) as f32;
        let (q_factor, softcap_log2) = match options.softcap {
            Some(cap) => ((options.scale / cap) as f32, log2(cap)),
            None => (log2(options.scale), 0.0),
        };
        if !q_factor.is_finite() {
            return Err(PlanError::Scale { found: options.scale });
        }
        if let Some(found) = options.softcap
            && !(softcap_log2.is_normal() && softcap_log2 > 0.0)
        {
            return Err(PlanError::Softcap { found });
        }
        let geometry = layout.geometry();
        let mask = mask.map(|mask| Mask::new(mask, batch)).transpose()?;
        let lists = WorkLists::new(batch, layout, options, tiles, mask.as_ref())?;
        let kv_heads = geometry.kv_heads();
        let groups = |items: &[Item], what| {
            let needed = items.len() as u64 * u64::from(kv_heads);
            count(what, needed)
        };
        let mut words = Vec::with_capacity(lists.words as usize + batch.page_ids.len());
        words.extend(lists.sequences.iter().flatten());
        let masked = mask.is_some();
        let mut list = |items: &[Item]| {
            let start = words.len() as u64;
            words.extend(items.iter().flat_map(|item| item.words(masked)));
            start
        };
        let starts = [list(&lists.prefill), list(&lists.decode), list(&lists.merge)];
        let masks = words.len() as u64;
        words.extend(mask.into_iter().flat_map(|mask| mask.words));
        let runs = words.len() as u64;
        words.extend(lists.runs.iter().flat_map(Run::words));
        let page_ids = words.len() as u64;
        words.extend_from_slice(batch.page_ids);
        count("plan words", words.len() as u64)?;
        let [prefill_items, decode_items, merge_items] = starts.map(|start| start as u32);
        let [k_rows, v_rows, k_scales, v_scales] = layout.strides();
        let params = Params {
            k_rows,
            v_rows,
            k_scales,
            v_scales,
            q_factor,
            softcap_log2,
            reach_left: options.window_left.unwrap_or(UNLIMITED),
            reach_right: if options.causal { 0 } else { options.window_right.unwrap_or(UNLIMITED) },
            kv_heads,
            page_size: layout.page_size().get(),
            page_count: layout.page_count(),
            bias_head_stride: if bias_per_head { count("elements of a head's bias", lists.score_pairs)? } else { 0 },
            page_ids: page_ids as u32,
            masks: masks as u32,
            runs: runs as u32,
            prefill_items,
            prefill_groups: groups(&lists.prefill, "prefill workgroups")?,
            decode_items,
            decode_groups: groups(&lists.decode, "decode workgroups")?,
            merge_items,
            merge_groups: groups(&lists.merge, "merge workgroups")?,
        };
        Ok(Self {
            params,
            words,
            total_q: batch.total_q(),
            layout: *layout,
            tiles: *tiles,
            score_pairs: lists.score_pairs,
            workspace_bytes: workspace_bytes(lists.states, tiles)?,
            chains: lists.chains,
        })
    }

    /// Bytes of partial states that the plan needs; 0 where no sequence is split.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// Per sequence, the rounding chains that the error bound needs.
    pub fn chains(&self) -> &[Chains] {
        &self.chains
    }

    /// Query rows of all sequences.
    pub fn total_q(&self) -> u32 {
        self.total_q
    }

    /// Workgroups of each attention kernel, in the order in which they are dispatched.
    pub fn workgroups(&self) -> [(KernelId, u32); 3] {
        [
            (KernelId::Prefill, self.params.prefill_groups),
            (KernelId::Decode, self.params.decode_groups),
            (KernelId::Merge, self.params.merge_groups),
        ]
    }

    /// Bytes of the step's device buffer.
    pub fn device_bytes(&self) -> u64 {
        plan_buffer_bytes(self.words.len() as u64)
    }
}

/// Where the plan's words start in its device buffer: past the parameters, at the largest offset alignment that a
/// device may ask for.
pub(crate) const PARAMS_BYTES: u64 = 256;

/// A plan on the device.
#[derive(Clone, Debug)]
pub struct DevicePlan {
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) params: Params,
    pub(crate) layout: KvLayout,
    pub(crate) tiles: Tiles,
    pub(crate) total_q: u32,
    pub(crate) score_pairs: u64,
    pub(crate) workspace_bytes: u64,
}

impl DevicePlan {
    /// Creates one small buffer and writes the plan into it as it is made: nothing is queued, so any number of
    /// plans may be recorded before one submit.
    ///
    /// # Errors
    /// [`UploadError`] where the device allows no buffer of that size, has no memory, or is lost.
    pub fn upload(device: &wgpu::Device, plan: &Plan) -> Result<Self, UploadError> {
        let words = bytemuck::cast_slice(&plan.words);
        let buffer = plan_buffer(device, "attention plan", bytemuck::bytes_of(&plan.params), words)?;
        Ok(Self {
            buffer,
            params: plan.params,
            layout: plan.layout,
            tiles: plan.tiles,
            total_q: plan.total_q,
            score_pairs: plan.score_pairs,
            workspace_bytes: plan.workspace_bytes,
        })
    }
}

/// Bytes of the device buffer of a plan with `words` words: an empty binding is not allowed.
pub(crate) fn plan_buffer_bytes(words: u64) -> u64 {
    PARAMS_BYTES + words.max(1) * 4
}

/// A buffer with parameters at its start and words from [`PARAMS_BYTES`] on, written as it is made.
pub(crate) fn plan_buffer(
    device: &wgpu::Device,
    label: &str,
    params: &[u8],
    words: &[u8],
) -> Result<wgpu::Buffer, UploadError> {
    let bytes = plan_buffer_bytes(words.len() as u64 / 4);
    let limits = device.limits();
    let allowed = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
    if bytes > allowed {
        return Err(UploadError { bytes, message: format!("the device allows {allowed}") });
    }
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some(label),
        size: bytes,
        usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::STORAGE,
        mapped_at_creation: true,
    });
    for (offset, part) in [(0, params), (PARAMS_BYTES, words)] {
        if !part.is_empty() {
            let range = offset..offset + part.len() as u64;
            let mapped = buffer.slice(range).get_mapped_range_mut();
            mapped.map_err(|error| UploadError { bytes, message: error.to_string() })?.copy_from_slice(part);
        }
    }
    buffer.unmap();
    Ok(buffer)
}

/// Bytes of a partial state: (m, l) in a vector of 4 f32, then the accumulator.
fn state_bytes(tiles: &Tiles) -> u64 {
    u64::from(1 + 2 * tiles.v_chunks) * 16
}

/// Bytes of `states` partial states.
///
/// # Errors
/// [`PlanError::TooMany`] if the kernels cannot count them.
pub(crate) fn workspace_bytes(states: u64, tiles: &Tiles) -> Result<u64, PlanError> {
    count("vectors of partial states", states.saturating_mul((1 + 2 * tiles.v_chunks).into()))?;
    Ok(states * state_bytes(tiles))
}

/// Checks the rows of a call.
///
/// # Errors
/// [`PlanError::TooMany`] if the kernels cannot count the vectors of their tensors.
pub(crate) fn check_rows(total_q: u32, geometry: &HeadGeometry, tiles: &Tiles) -> Result<(), PlanError> {
    let rows_all = u64::from(total_q) * u64::from(geometry.q_heads());
    count("output vectors", rows_all.saturating_mul((2 * tiles.qk_chunks.max(tiles.v_chunks)).into())).map(|_| ())
}

/// What a sequence adds to a plan and to its workspace, counted without making the lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SequenceSize {
    /// Words of its record and of its work items; its page ids take a word each beside these.
    pub words: u64,
    /// Partial states.
    pub states: u64,
}

impl SequenceSize {
    /// Of a sequence of a batch that [`check_rows`] has passed.
    ///
    /// # Errors
    /// [`PlanError::TooLong`], for the sequence `seq`.
    pub fn new(
        seq: usize,
        geometry: &HeadGeometry,
        tiles: &Tiles,
        options: &AttentionOptions,
        (q_len, kv_len): (u32, u32),
    ) -> Result<Self, PlanError> {
        // A kernel adds to a position a reach to the right of up to all rows and keys.
        let right = if options.causal { 0 } else { options.window_right.unwrap_or(0) };
        if q_len.checked_add(kv_len).and_then(|sum| sum.checked_add(right.min(sum))?.checked_add(1)).is_none() {
            return Err(PlanError::TooLong { seq, q_len, kv_len });
        }
        let rows = q_len * geometry.group();
        let splits = tiles.splits(geometry, q_len, visible(options, (q_len, kv_len), 0..q_len)).len() as u64;
        let (merges, states) = if splits > 1 {
            (rows.div_ceil(tiles.merge_rows), splits * u64::from(rows) * u64::from(geometry.kv_heads()))
        } else {
            (0, 0)
        };
        let items = splits * u64::from(rows.div_ceil(tiles.tile_rows(geometry, q_len)));
        Ok(Self { words: RECORD_WORDS as u64 + ITEM_WORDS as u64 * (items + u64::from(merges)), states })
    }
}

/// The keys that causal mask and window leave to some rows of a sequence. Both ends rise from row to row.
fn visible(options: &AttentionOptions, (q_len, kv_len): (u32, u32), rows: Range<u32>) -> Range<u32> {
    if rows.is_empty() {
        return 0..0;
    }
    let [first, last] = [rows.start, rows.end - 1].map(|row| options.visible(q_len, kv_len, row));
    first.start..last.end.max(first.start)
}

/// Words of a sequence's record in a plan.
pub(crate) const RECORD_WORDS: usize = 9;

/// Words of a work item; with a mask, two more.
pub(crate) const ITEM_WORDS: usize = 4;

/// Rows and keys of a sequence that one workgroup per KV head works on.
#[derive(Clone, Copy, Debug)]
struct Item {
    seq: u32,
    first_row: u32,
    key_begin: u32,
    key_end: u32,
    /// With a mask: its first run, and how many there are.
    first_run: u32,
    runs: u32,
}

impl Item {
    fn words(&self, masked: bool) -> impl Iterator<Item = u32> {
        let words = [self.seq, self.first_row, self.key_begin, self.key_end, self.first_run, self.runs];
        words.into_iter().take(if masked { ITEM_WORDS + 2 } else { ITEM_WORDS })
    }
}

struct WorkLists {
    sequences: Vec<[u32; RECORD_WORDS]>,
    prefill: Vec<Item>,
    decode: Vec<Item>,
    merge: Vec<Item>,
    runs: Vec<Run>,
    words: u64,
    states: u64,
    /// Pairs of a query row and a key of its sequence.
    score_pairs: u64,
    chains: Vec<Chains>,
}

impl WorkLists {
    fn new(
        batch: &Batch<'_>,
        layout: &KvLayout,
        options: &AttentionOptions,
        tiles: &Tiles,
        mask: Option<&Mask>,
    ) -> Result<Self, PlanError> {
        let geometry = layout.geometry();
        let group = geometry.group();
        check_rows(batch.total_q(), geometry, tiles)?;
        let mut lists = Self {
            sequences: Vec::with_capacity(batch.seqs()),
            prefill: Vec::new(),
            decode: Vec::new(),
            merge: Vec::new(),
            runs: Vec::new(),
            words: 0,
            states: 0,
            score_pairs: 0,
            chains: Vec::with_capacity(batch.seqs()),
        };
        let mut mask_words = 0_u64;
        let spans = batch.q_indptr.iter().zip(batch.q_indptr.iter().skip(1));
        for (index, ((q_begin, q_end), (page_begin, kv_len))) in
            spans.zip(batch.page_indptr.iter().zip(batch.kv_len)).enumerate()
        {
            let (seq, q_len, kv_len) = (count("sequences", index as u64)?, q_end - q_begin, *kv_len);
            let lengths = (q_len, kv_len);
            let size = SequenceSize::new(index, geometry, tiles, options, lengths)?;
            let rows = q_len * group;
            let seen = visible(options, lengths, 0..q_len);
            check_pages(batch, layout.page_size(), index, &seen)?;
            let split_keys = tiles.split_keys(geometry, q_len);
            let splits = tiles.splits(geometry, q_len, seen);
            lists.sequences.push([
                *q_begin,
                q_len,
                kv_len,
                *page_begin,
                lists.states as u32,
                splits.len() as u32,
                splits.start,
                mask_words as u32,
                lists.score_pairs as u32,
            ]);
            lists.score_pairs += u64::from(q_len) * u64::from(kv_len);
            lists.words += size.words;
            lists.states += size.states;
            // Records hold in 32 bits how many states lie before a sequence's own.
            workspace_bytes(lists.states, tiles)?;
            lists.chains.push(tiles.chains(geometry, q_len, kv_len).scaled(layout.dtypes().has_scales()));
            let decodes = Tiles::decodes(q_len, group);
            let tile_rows = tiles.tile_rows(geometry, q_len);
            for split in splits.clone() {
                let split_begin = split * split_keys;
                let split_end = kv_len.min(split_begin.saturating_add(split_keys));
                for first_row in (0..rows).step_by(tile_rows as usize) {
                    let last_row = first_row.saturating_add(tile_rows - 1).min(rows - 1);
                    let tokens = first_row / group..last_row / group + 1;
                    let seen = visible(options, lengths, tokens.clone());
                    let mut keys = seen.start.max(split_begin)..seen.end.min(split_end);
                    let first_run = lists.runs.len();
                    if let Some(mask) = mask {
                        mask.runs(mask_words as usize, kv_len, tokens, keys, &mut lists.runs);
                        let own = lists.runs.get(first_run..).unwrap_or_default();
                        keys = own.first().map_or(0, |run| run.begin)..own.last().map_or(0, |run| run.end);
                    }
                    // Without keys an item still belongs to its split.
                    let keys = if keys.is_empty() { split_begin..split_begin } else { keys };
                    let item = Item {
                        seq,
                        first_row,
                        key_begin: keys.start,
                        key_end: keys.end,
                        first_run: first_run as u32,
                        runs: (lists.runs.len() - first_run) as u32,
                    };
                    if decodes { &mut lists.decode } else { &mut lists.prefill }.push(item);
                }
            }
            mask_words += u64::from(q_len) * u64::from(kv_len.div_ceil(32));
            let splits = splits.len();
            if splits > 1 {
                let starts = (0..rows).step_by(tiles.merge_rows as usize);
                lists.merge.extend(starts.map(|first_row| Item {
                    seq,
                    first_row,
                    key_begin: 0,
                    key_end: kv_len,
                    first_run: 0,
                    runs: 0,
                }));
            }
        }
        // Records hold in 32 bits where a sequence's mask and bias begin.
        count("words of masks", mask_words)?;
        count("pairs of query row and key", lists.score_pairs)?;
        count("words of runs", lists.runs.len() as u64 * 3)?;
        // The sort is stable, so the order is the same on every machine.
        lists.prefill.sort_by_key(|item| std::cmp::Reverse(item.key_end - item.key_begin));
        if tiles.prefill.order == ItemOrder::Alternating {
            let large = lists.prefill.len().div_ceil(2);
            let small = lists.prefill.split_off(large);
            let mut small = small.into_iter().rev();
            lists.prefill = lists.prefill.into_iter().flat_map(|item| [Some(item), small.next()]).flatten().collect();
        }
        Ok(lists)
    }
}

/// Checks that a sequence has the pages of the keys that its rows see.
fn check_pages(batch: &Batch<'_>, page_size: PageSize, seq: usize, seen: &Range<u32>) -> Result<(), PlanError> {
    let begin = batch.page_indptr.get(seq).map_or(0, |begin| *begin as usize);
    let entries = seen.start / page_size.get()..page_size.pages_for(seen.end);
    let missing = |entry: &u32| batch.page_ids.get(begin + *entry as usize) == Some(&NO_PAGE);
    match if seen.is_empty() { None } else { entries.into_iter().find(missing) } {
        Some(entry) => Err(PlanError::NoPage { seq, entry }),
        None => Ok(()),
    }
}

/// A count that the kernels keep in 32 bits.
pub(crate) fn count(what: &'static str, needed: u64) -> Result<u32, PlanError> {
    u32::try_from(needed).map_err(|_| PlanError::TooMany { what, needed, limit: u32::MAX.into() })
}

#[cfg(test)]
mod tests;
