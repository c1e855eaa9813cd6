//! Planning: from a ragged batch to work items, in pure host code.
//!
//! The same batch gives the same plan, on every machine. What becomes of a sequence (its kernel, its splits)
//! depends on that sequence alone, so its bits are the same in every batch. Where it shares prefixes, it depends on them
//! too: on their tokens, and on the number of rows that share each.

mod device;
mod mask;
mod most;
mod ranges;
mod shared;
mod slices;
mod work;

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

pub use self::device::{DevicePlan, PlanCapacity, UploadError, WriteError};
pub(crate) use self::device::{PARAMS_BYTES, PlanBuffer, Written, blocks_of, plan_buffer_bytes};
use self::mask::{Mask, Run};
pub(crate) use self::most::Need;
pub use self::most::StepMax;
use self::shared::Levels;
pub use self::shared::{SharedPrefix, SharedPrefixError};
pub(crate) use self::slices::Dispatch;
pub use self::slices::Slice;
use self::slices::Span;
use self::work::{Item, Step, WorkLists};
use crate::attention::{Extras, Purpose};
use crate::batch::{Batch, BatchError};
use crate::case::AttentionOptions;
use crate::chains::Chains;
use crate::geometry::HeadGeometry;
use crate::kernels::{KernelId, Tiles};
use crate::kv::{RowLayout, SegmentGroups};

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
    /// The softcap is out of range.
    #[error("softcap is {found}; {:e} to {:e} is supported", crate::SOFTCAP_MIN, crate::SOFTCAP_MAX)]
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
    /// The batch cannot share the prefixes that were named.
    #[error(transparent)]
    SharedPrefix(#[from] SharedPrefixError),
    /// Shared prefixes were named, and the kernels know of none.
    #[error("shared prefixes are given; the configuration says otherwise")]
    SharedPrefixesGiven,
    /// A sequence needs a page that its table says it has not.
    #[error("entry {entry} of the page table of sequence {seq} is `NO_PAGE`; its rows see keys of that page")]
    NoPage {
        /// The sequence.
        seq: usize,
        /// The entry, counted from the sequence's first.
        entry: u32,
    },
    /// Partial states that are needed at the same time do not fit into a workspace: those of a tile row of a sequence, or those
    /// of all sequences that share a prefix.
    #[error(
        "a row of sequence {seq}, or the sequences from it on that share a prefix, need {needed} bytes of partial states at the \
         same time; a workspace may have {limit}"
    )]
    Workspace {
        /// The sequence, or the first of them.
        seq: usize,
        /// Bytes needed.
        needed: u64,
        /// The largest number ([`crate::Attention::with_workspace_max`]).
        limit: u64,
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
    pub owners: u32,
    pub prefill_items: u32,
    pub prefill_groups: u32,
    pub decode_items: u32,
    pub decode_groups: u32,
    pub merge_items: u32,
    pub merge_groups: u32,
    pub first_group: u32,
    pub first_page: u32,
    pub pages: u32,
}

impl Params {
    /// The same for a dispatch that binds a group of the pool's segments.
    fn for_group(self, groups: &SegmentGroups, group: u32) -> Self {
        let (pages, first) = (groups.pages(group), groups.segments(group).start * groups.layout().segment_pages());
        Self {
            k_rows: self.k_rows.beginning_at(first),
            v_rows: self.v_rows.beginning_at(first),
            k_scales: self.k_scales.beginning_at(first),
            v_scales: self.v_scales.beginning_at(first),
            first_page: pages.start,
            pages: pages.end - pages.start,
            ..self
        }
    }
}

/// What one step's attention consists of: made once per step, used for every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub(crate) params: Params,
    pub(crate) words: Vec<u32>,
    pub(crate) total_q: u32,
    pub(crate) groups: SegmentGroups,
    tiles: Tiles,
    options: AttentionOptions,
    extras: Extras,
    pub(crate) score_pairs: u64,
    workspace_bytes: u64,
    kv_bytes_read: u64,
    chains: Vec<Chains>,
    spans: Vec<Span>,
    slices: Vec<Slice>,
    /// Of each slice, the group of segments that it reads pages of.
    segment_groups: Vec<u32>,
}

/// What plans are made for.
#[derive(Clone, Copy)]
pub(crate) struct Setting<'a> {
    pub pool: &'a SegmentGroups,
    pub options: &'a AttentionOptions,
    pub extras: &'a Extras,
    pub tiles: &'a Tiles,
    /// Bytes of partial states that there may be at the same time.
    pub workspace_max: u64,
}

impl Setting<'_> {
    /// Whether merges name what they fold.
    fn names_sources(&self) -> bool {
        self.extras.shared_prefixes || self.pool.count() > 1
    }
}

/// A reach that has no end, in [`Params`].
const UNLIMITED: u32 = u32::MAX;

impl Plan {
    /// Plans attention of `batch`. `mask` has an entry for every query row and key of its sequence, row by row, or is left
    /// out.
    pub(crate) fn new(
        batch: &Batch<'_>,
        setting: &Setting<'_>,
        prefixes: &[SharedPrefix],
        mask: Option<&[bool]>,
    ) -> Result<Self, PlanError> {
        let Setting { pool, options, extras, tiles, .. } = setting;
        let layout = pool.layout();
        batch.validate(layout.page_size(), layout.page_count())?;
        let levels = Levels::new(batch, layout.page_size(), prefixes)?;
        if let Some(found) = options.softcap_outside() {
            return Err(PlanError::Softcap { found });
        }
        let log2 = |factor: f64| (factor * std::f64::consts::LOG2_E) as f32;
        let (q_factor, softcap_log2) = match options.softcap {
            Some(cap) => ((options.scale / cap) as f32, log2(cap)),
            None => (log2(options.scale), 0.0),
        };
        if !q_factor.is_finite() {
            return Err(PlanError::Scale { found: options.scale });
        }
        let geometry = layout.geometry();
        let mask = mask.map(|mask| Mask::new(mask, batch)).transpose()?;
        let lists = WorkLists::new(&Step { batch, setting: *setting, mask: mask.as_ref() }, &levels)?;
        let kv_heads = geometry.kv_heads();
        let groups = |items: &[Item], what| {
            let needed = items.len() as u64 * u64::from(kv_heads);
            count(what, needed)
        };
        let mut words: Vec<u32> = lists.records.as_flattened().to_vec();
        let sources = words.len() as u64;
        words.extend_from_slice(&lists.sources);
        let owners = words.len() as u64;
        words.extend_from_slice(&lists.owners);
        let masked = mask.is_some();
        let mut list = |items: &[Item], offset: u64| {
            let start = words.len() as u64;
            words.extend(items.iter().flat_map(|item| item.words(offset as u32, masked)));
            start
        };
        // Items of a merge have places in the list of sources where others have keys.
        let starts = [list(&lists.prefill, 0), list(&lists.decode, 0), list(&lists.merge, sources)];
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
            bias_head_stride: match extras.bias {
                Some(bias) if bias.per_head => count("elements of a head's bias", lists.score_pairs)?,
                _ => 0,
            },
            page_ids: page_ids as u32,
            masks: masks as u32,
            runs: runs as u32,
            owners: owners as u32,
            prefill_items,
            prefill_groups: groups(&lists.prefill, "prefill workgroups")?,
            decode_items,
            decode_groups: groups(&lists.decode, "decode workgroups")?,
            merge_items,
            merge_groups: groups(&lists.merge, "merge workgroups")?,
            first_group: 0,
            first_page: 0,
            pages: layout.page_count(),
        };
        let spans = slices::spans(&lists, kv_heads);
        let (slices, segment_groups) = spans.iter().map(Span::slice).unzip();
        Ok(Self {
            slices,
            segment_groups,
            spans,
            params,
            words,
            total_q: batch.total_q(),
            groups: **pool,
            tiles: **tiles,
            options: **options,
            extras: **extras,
            score_pairs: lists.score_pairs,
            workspace_bytes: workspace_bytes(lists.states_max, tiles)?,
            kv_bytes_read: lists.keys
                * u64::from(kv_heads)
                * 16
                * layout.row_vectors().map(u64::from).iter().sum::<u64>(),
            chains: lists.chains,
        })
    }

    /// Bytes of partial states that the plan needs at the same time; 0 where no sequence is split and none shares a prefix.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// Bytes of keys and values that the work items of one layer ask for, padding included: each takes the keys that its
    /// rows see once for all of them. What the subgroups of a workgroup ask for again is not counted.
    pub fn kv_bytes_read(&self) -> u64 {
        self.kv_bytes_read
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

    /// What it was made for.
    pub(crate) fn purpose(&self) -> Purpose {
        let Self { groups, tiles, options, extras, .. } = *self;
        Purpose { groups, tiles, options, extras }
    }

    /// Bytes of the step's device buffer.
    pub fn device_bytes(&self) -> u64 {
        let PlanCapacity { blocks, words, .. } = self.capacity();
        plan_buffer_bytes(blocks, words)
    }
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

/// Keys of the longest step: what a kernel counts up to may lie so far behind the last key.
const STEP_KEYS_MAX: u32 = 16;

/// Checks the lengths of a sequence: a kernel adds to a position a reach to the right of up to all rows and keys.
pub(crate) fn check_lengths(
    seq: usize,
    options: &AttentionOptions,
    (q_len, kv_len): (u32, u32),
) -> Result<(), PlanError> {
    let right = if options.causal { 0 } else { options.window_right.unwrap_or(0) };
    match q_len.checked_add(kv_len).and_then(|sum| sum.checked_add(right.min(sum))?.checked_add(STEP_KEYS_MAX)) {
        Some(_) => Ok(()),
        None => Err(PlanError::TooLong { seq, q_len, kv_len }),
    }
}

/// Words of a record in a plan: of a sequence, or of a shared prefix.
pub(crate) const RECORD_WORDS: usize = 12;

/// Words of a work item; with a mask, two more.
pub(crate) const ITEM_WORDS: usize = 4;

/// A count that the kernels keep in 32 bits.
pub(crate) fn count(what: &'static str, needed: u64) -> Result<u32, PlanError> {
    u32::try_from(needed).map_err(|_| PlanError::TooMany { what, needed, limit: u32::MAX.into() })
}

#[cfg(test)]
mod tests;
