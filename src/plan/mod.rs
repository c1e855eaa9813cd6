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

use std::collections::BTreeMap;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

pub use self::device::{DevicePlan, PlanCapacity, UploadError, WriteError};
pub(crate) use self::device::{PARAMS_BYTES, PlanBuffer, Written, blocks_of, plan_buffer_bytes, written_buffer_bytes};
use self::mask::{Mask, Run};
pub(crate) use self::most::Need;
pub use self::most::StepMax;
use self::shared::Levels;
pub use self::shared::{SharedPrefix, SharedPrefixError};
pub(crate) use self::slices::Dispatch;
pub use self::slices::Slice;
use self::slices::Span;
use crate::attention::Extras;
use crate::batch::{Batch, BatchError, NO_PAGE};
use crate::case::AttentionOptions;
use crate::chains::Chains;
use crate::geometry::{HeadGeometry, PageSize};
use crate::kernels::{ItemOrder, KernelId, Pass, Tiles};
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
        Ok(Self {
            slices: spans.iter().map(Span::slice).collect(),
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

/// The keys that causal mask and window leave to some rows of a sequence. Both ends rise from row to row.
fn visible(options: &AttentionOptions, (q_len, kv_len): (u32, u32), rows: Range<u32>) -> Range<u32> {
    if rows.is_empty() {
        return 0..0;
    }
    let [first, last] = [rows.start, rows.end - 1].map(|row| options.visible(q_len, kv_len, row));
    first.start..last.end.max(first.start)
}

/// What they leave of `keys` to some packed rows, of one sequence or of several.
fn seen(batch: &Batch<'_>, options: &AttentionOptions, rows: &Range<u32>, keys: &Range<u32>) -> Range<u32> {
    let first = batch.q_indptr.partition_point(|begin| *begin <= rows.start).saturating_sub(1);
    let spans = batch.q_indptr.iter().zip(batch.q_indptr.iter().skip(1)).zip(batch.kv_len).skip(first);
    let seen = spans.take_while(|((begin, _), _)| **begin < rows.end).map(|((begin, end), kv_len)| {
        let own = rows.start.max(*begin) - begin..rows.end.min(*end) - begin;
        common(&visible(options, (end - begin, *kv_len), own), keys)
    });
    seen.filter(|keys| !keys.is_empty()).reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
}

/// What two ranges have in common: empty ranges may lie anywhere.
fn common(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Words of a record in a plan: of a sequence, or of a shared prefix.
pub(crate) const RECORD_WORDS: usize = 12;

/// What records are of.
const RECORDS: &str = "sequences, shared prefixes, groups of their pages and rounds of their rows";

/// Words of a work item; with a mask, two more.
pub(crate) const ITEM_WORDS: usize = 4;

/// Rows of a record, and the keys that one workgroup per KV head takes them through; of a merge, its sources.
#[derive(Clone, Copy, Debug)]
struct Item {
    record: u32,
    first_row: u32,
    begin: u32,
    end: u32,
    /// With a mask: its first run, and how many there are.
    first_run: u32,
    runs: u32,
    /// The round, and the group of segments that has the pages.
    round: u32,
    group: u32,
}

impl Item {
    /// What is dispatched together.
    fn span(&self) -> (u32, u32) {
        (self.round, self.group)
    }

    /// With its range moved by `offset`. Should that pass 32 bits, so do the plan's words, which are counted.
    fn words(&self, offset: u32, masked: bool) -> impl Iterator<Item = u32> {
        let [begin, end] = [self.begin, self.end].map(|place| place.wrapping_add(offset));
        let Self { record, first_row, first_run, runs, .. } = *self;
        let words = [record, first_row, begin, end, first_run, runs];
        words.into_iter().take(if masked { ITEM_WORDS + 2 } else { ITEM_WORDS })
    }
}

/// Rows that go through the same keys: those of a sequence through its own, or those of several through a prefix; as far as
/// their pages are of one group of segments.
struct Part {
    record: u32,
    /// Packed query rows.
    rows: Range<u32>,
    /// Whose pages are read.
    seq: usize,
    /// Whether a row sees a key of it.
    seen: bool,
    pass: Pass,
    group: u32,
    /// Where other groups have pages of the keys that are seen: the entries of the page table that this one has, in order.
    entries: Option<Vec<u32>>,
}

impl Part {
    /// Those of `entries` that have some of `keys`.
    fn entries_of(&self, keys: &Range<u32>, page_size: PageSize) -> Option<&[u32]> {
        let entries = self.entries.as_ref()?;
        let (first, end) = (keys.start / page_size.get(), page_size.pages_for(keys.end));
        let [first, end] = [first, end].map(|place| entries.partition_point(|entry| *entry < place));
        Some(entries.get(first..end).unwrap_or_default())
    }

    /// The keys from the first to the last among `keys` that are of its group.
    fn trimmed(&self, keys: Range<u32>, page_size: PageSize) -> Range<u32> {
        match self.entries_of(&keys, page_size) {
            None => keys,
            Some([]) => keys.start..keys.start,
            Some([first, .., last] | [first @ last]) => {
                common(&(page_keys(*first, page_size).start..page_keys(*last, page_size).end), &keys)
            }
        }
    }

    /// How many of `keys` are of its group.
    fn count(&self, keys: &Range<u32>, page_size: PageSize) -> u64 {
        let keys_of = |keys: Range<u32>| u64::from(keys.end.saturating_sub(keys.start));
        match self.entries_of(keys, page_size) {
            None => keys_of(keys.clone()),
            Some(entries) => entries.iter().map(|entry| keys_of(common(&page_keys(*entry, page_size), keys))).sum(),
        }
    }
}

/// The keys of an entry of a page table.
fn page_keys(entry: u32, page_size: PageSize) -> Range<u32> {
    let begin = entry.saturating_mul(page_size.get());
    begin..begin.saturating_add(page_size.get())
}

/// The keys that are gone through in `parts`, which are of the same rows and keys, in that order.
fn in_order(parts: &[Part], page_size: PageSize, order: &mut Vec<Range<u32>>) {
    let Some(keys) = parts.first().map(|part| part.pass.keys.clone()) else { return };
    let mut stretches: Vec<Range<u32>> = Vec::new();
    for entries in parts.iter().filter_map(|part| part.entries.as_deref()) {
        let neighbours = entries.chunk_by(|a, b| *a + 1 == *b);
        stretches.extend(neighbours.filter_map(|entries| {
            let (first, last) = (entries.first()?, entries.last()?);
            Some(common(&(page_keys(*first, page_size).start..page_keys(*last, page_size).end), &keys))
        }));
    }
    // Nobody sees what lies before and behind them.
    let begin = stretches.iter().map(|keys| keys.start).min().unwrap_or(keys.end);
    let end = stretches.iter().map(|keys| keys.end).max().unwrap_or(keys.end);
    let before = std::iter::once(keys.start..begin);
    let behind = std::iter::once(end..keys.end);
    order.extend(before.chain(stretches).chain(behind).filter(|keys| !keys.is_empty()));
}

/// What work items are made of.
struct Step<'a> {
    batch: &'a Batch<'a>,
    setting: Setting<'a>,
    mask: Option<&'a Mask>,
}

/// A sequence, and what becomes of its rows.
struct Planned<'a> {
    parts: Vec<Part>,
    /// The prefixes around it, from the outside in.
    around: Vec<&'a [Part]>,
    fate: Fate,
}

impl Planned<'_> {
    /// Partial states that it leaves.
    fn states(&self, step: &Step<'_>) -> u64 {
        if self.fate == Fate::States { states_of(step, &self.parts) } else { 0 }
    }
}

/// Partial states of parts.
fn states_of<'a>(step: &Step<'_>, parts: impl IntoIterator<Item = &'a Part>) -> u64 {
    let kv_heads = u64::from(step.setting.pool.layout().geometry().kv_heads());
    let states = |part: &Part| part.pass.splits.len() as u64 * kv_heads * u64::from(step.rows(part));
    parts.into_iter().map(states).fold(0, u64::saturating_add)
}

impl Step<'_> {
    /// The rows of `seqs` and some of their keys: a part for each group of segments that has pages of keys that are seen, one
    /// at least. Record `own` is the first one's, those from `next` on the others'.
    fn parts(
        &self,
        own: Option<usize>,
        next: &mut usize,
        seqs: Range<usize>,
        keys: Range<u32>,
        shared: bool,
    ) -> Result<Vec<Part>, PlanError> {
        let (layout, page_size) = (self.setting.pool.layout(), self.setting.pool.layout().page_size());
        let rows = entry(self.batch.q_indptr, seqs.start)..entry(self.batch.q_indptr, seqs.end);
        let seen = seen(self.batch, self.setting.options, &rows, &keys);
        check_pages(self.batch, page_size, seqs.start, &seen)?;
        // Whose pages are all of one group is no concern of the others.
        let mut by_group: BTreeMap<u32, Option<Vec<u32>>> = BTreeMap::new();
        if self.setting.pool.count() > 1 && !seen.is_empty() {
            let table = entry(self.batch.page_indptr, seqs.start);
            for place in seen.start / page_size.get()..page_size.pages_for(seen.end) {
                let group = self.setting.pool.of_page(entry(self.batch.page_ids, (table + place) as usize));
                by_group.entry(group).or_default().get_or_insert_default().push(place);
            }
        }
        if let [entries] = by_group.values_mut().collect::<Vec<_>>().as_mut_slice() {
            **entries = None;
        }
        if by_group.is_empty() {
            by_group.insert(0, None);
        }
        let mut own = own;
        let mut part = |(group, entries): (u32, Option<Vec<u32>>)| {
            let record = own.take().unwrap_or_else(|| {
                *next += 1;
                *next - 1
            });
            let mut part = Part {
                record: count(RECORDS, record as u64)?,
                rows: rows.clone(),
                seq: seqs.start,
                seen: !seen.is_empty(),
                pass: self.setting.tiles.pass(layout.geometry(), rows.end - rows.start, keys.clone(), 0..0, shared),
                group,
                entries,
            };
            let seen = part.trimmed(seen.clone(), page_size);
            part.pass = self.setting.tiles.pass(layout.geometry(), rows.end - rows.start, keys.clone(), seen, shared);
            Ok(part)
        };
        by_group.into_iter().map(&mut part).collect()
    }

    /// Partial states that there may be at the same time.
    fn states_max(&self) -> u64 {
        self.setting.workspace_max / state_bytes(self.setting.tiles)
    }

    /// Tile rows of a part.
    fn rows(&self, part: &Part) -> u32 {
        (part.rows.end - part.rows.start) * self.setting.pool.layout().geometry().group()
    }

    /// A sequence with its parts.
    fn planned<'p>(
        &self,
        seq: usize,
        next: &mut usize,
        levels: &Levels,
        prefixes: &'p [Vec<Part>],
    ) -> Result<Planned<'p>, PlanError> {
        let kv_len = entry(self.batch.kv_len, seq);
        let parts = self.parts(Some(seq), next, seq..seq + 1, levels.own_begin(seq)..kv_len, false)?;
        let around: Vec<&[Part]> =
            levels.around(seq).into_iter().filter_map(|level| prefixes.get(level)).map(Vec::as_slice).collect();
        let shares_none = around.iter().copied().flatten().all(|part| !part.seen);
        let fate = match (shares_none, parts.as_slice()) {
            // Rows that see nothing have a result too.
            (true, [own]) if own.pass.splits.len() == 1 => Fate::Results,
            (false, [own]) if !own.seen => Fate::Nothing,
            _ => Fate::States,
        };
        Ok(Planned { parts, around, fate })
    }

    /// The items of a split, one per tile of `rows`, and the runs of a mask.
    fn items(&self, part: &Part, split: u32, tile_rows: Range<u32>, runs: &mut Vec<Run>) -> Vec<Item> {
        let (layout, Part { record, rows, pass, .. }) = (self.setting.pool.layout(), part);
        let (group, page_size) = (layout.geometry().group(), layout.page_size());
        let split_begin = split * pass.split_keys;
        let whole = common(&pass.keys, &(split_begin..split_begin.saturating_add(pass.split_keys)));
        let item = |first_row: u32| {
            let last_row = first_row.saturating_add(pass.tile_rows - 1).min(tile_rows.end - 1);
            let tile = rows.start + first_row / group..rows.start + last_row / group + 1;
            let mut keys = part.trimmed(seen(self.batch, self.setting.options, &tile, &whole), page_size);
            let first_run = runs.len();
            if let Some(mask) = self.mask {
                mask.runs(tile, keys, runs);
                let own = runs.get(first_run..).unwrap_or_default();
                keys = own.first().map_or(0, |run| run.begin)..own.last().map_or(0, |run| run.end);
            }
            // Without keys an item still belongs to its split.
            let keys = if keys.is_empty() { split_begin..split_begin } else { keys };
            let (first_run, runs) = (first_run as u32, (runs.len() - first_run) as u32);
            Item {
                record: *record,
                first_row,
                begin: keys.start,
                end: keys.end,
                first_run,
                runs,
                round: 0,
                group: part.group,
            }
        };
        tile_rows.clone().step_by(pass.tile_rows as usize).map(item).collect()
    }
}

fn entry(indptr: &[u32], index: usize) -> u32 {
    indptr.get(index).copied().unwrap_or(0)
}

/// What becomes of the rows of a part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Each work item makes its rows' results.
    Results,
    /// Work items leave partial states, which are merged.
    States,
    /// There is nothing to do: all that the rows see is in their prefixes.
    Nothing,
}

#[derive(Default)]
struct WorkLists {
    /// Of the sequences, then of the shared prefixes, then of what lies in further groups of segments.
    records: Vec<[u32; RECORD_WORDS]>,
    prefill: Vec<Item>,
    decode: Vec<Item>,
    merge: Vec<Item>,
    runs: Vec<Run>,
    /// Where there are shared prefixes or groups of segments: of every merged sequence the records whose states are folded, in
    /// order. Where prefixes may be shared: of every packed query row its sequence.
    sources: Vec<u32>,
    owners: Vec<u32>,
    /// The round that is being filled, its partial states, and those of the fullest.
    round: u32,
    states: u64,
    states_max: u64,
    mask_words: u64,
    /// Pairs of a query row and a key of its sequence.
    score_pairs: u64,
    /// Keys of all work items, of one KV head.
    keys: u64,
    chains: Vec<Chains>,
}

impl WorkLists {
    fn new(step: &Step<'_>, levels: &Levels) -> Result<Self, PlanError> {
        let Step { batch, setting: Setting { pool, options, extras, tiles, .. }, .. } = step;
        let layout = pool.layout();
        check_rows(batch.total_q(), layout.geometry(), tiles)?;
        for (seq, kv_len) in batch.kv_len.iter().copied().enumerate() {
            let q_len = entry(batch.q_indptr, seq + 1) - entry(batch.q_indptr, seq);
            check_lengths(seq, options, (q_len, kv_len))?;
            // Slopes are multiplied by distances with a sign.
            if extras.alibi_slopes && q_len + kv_len > i32::MAX as u32 {
                return Err(PlanError::TooLong { seq, q_len, kv_len });
            }
        }
        // Prefixes of which somebody sees something.
        let mut prefixes: Vec<Vec<Part>> = Vec::with_capacity(levels.levels.len());
        let mut next = batch.seqs();
        for level in &levels.levels {
            let parts = step.parts(None, &mut next, level.seqs.clone(), level.keys.clone(), true)?;
            // A prefix of which nobody sees anything has one part, the last so far.
            next -= parts.iter().filter(|part| !part.seen).count();
            prefixes.push(parts);
        }
        let mut lists = Self::default();
        let (mut of_prefixes, mut others) = (Vec::new(), Vec::new());
        let mut begin = 0;
        while begin < batch.seqs() {
            let unit = levels.unit(begin);
            begin = unit.end;
            let planned: Vec<Planned<'_>> =
                unit.clone().map(|seq| step.planned(seq, &mut next, levels, &prefixes)).collect::<Result<_, _>>()?;
            let inside = levels.levels.iter().zip(&prefixes).filter(|(level, _)| unit.contains(&level.seqs.start));
            let shared: Vec<&Part> = inside.flat_map(|(_, parts)| parts).filter(|part| part.seen).collect();
            let all =
                planned.iter().map(|sequence| sequence.states(step)).chain([states_of(step, shared.iter().copied())]);
            let row_step = lists.reserve(step, unit.start, all.sum(), planned.as_slice(), shared.is_empty())?;
            for sequence in &planned {
                lists.sequence(step, sequence, row_step, &mut next, &mut others)?;
            }
            for part in shared {
                let rows = 0..step.rows(part);
                of_prefixes.push(lists.push(step, part, part.record, rows, part.pass.keys.end, Fate::States)?);
            }
        }
        // Records hold in 32 bits what lies before their own.
        if extras.mask {
            count("words of masks", lists.mask_words)?;
        }
        if let Some(bias) = extras.bias {
            let heads = bias.heads(layout.geometry());
            count("elements of the bias", lists.score_pairs.saturating_mul(heads.into()))?;
        }
        lists.records.append(&mut of_prefixes);
        lists.records.append(&mut others);
        count("words of runs", lists.runs.len() as u64 * 3)?;
        // The sort is stable, so the order is the same on every machine.
        lists.prefill.sort_by_key(|item| (item.span(), std::cmp::Reverse(item.end - item.begin)));
        lists.decode.sort_by_key(Item::span);
        if tiles.prefill.order == ItemOrder::Alternating {
            let spans = lists.prefill.chunk_by(|a, b| a.span() == b.span());
            lists.prefill = spans.flat_map(alternating).collect();
        }
        Ok(lists)
    }

    /// Makes room for the partial states of the sequences from `seq` on that go together, in this round or the next one. Says
    /// how many tile rows of them may have states at the same time: all, unless it is a single sequence that shares no prefix.
    fn reserve(
        &mut self,
        step: &Step<'_>,
        seq: usize,
        states: u64,
        planned: &[Planned<'_>],
        shares_none: bool,
    ) -> Result<u32, PlanError> {
        if states <= step.states_max() {
            self.next_round(step, states);
            return Ok(u32::MAX);
        }
        let too_large = |states: u64| {
            let needed = states.saturating_mul(state_bytes(step.setting.tiles));
            Err(PlanError::Workspace { seq, needed, limit: step.setting.workspace_max })
        };
        match planned {
            [Planned { parts, .. }] if shares_none => {
                let of_row = states_of(step, parts) / u64::from(parts.first().map_or(1, |part| step.rows(part)).max(1));
                let fit = u32::try_from(step.states_max() / of_row.max(1)).unwrap_or(u32::MAX);
                let tile_rows = parts.first().map_or(1, |part| part.pass.tile_rows);
                match fit {
                    0 => too_large(of_row),
                    // Whole tiles, so that no key is read more often than need be.
                    _ if fit > tile_rows => Ok(fit / tile_rows * tile_rows),
                    _ => Ok(fit),
                }
            }
            _ => too_large(states),
        }
    }

    /// Goes to the next round where this one has no room for so many partial states: there they take the place of all before.
    fn next_round(&mut self, step: &Step<'_>, states: u64) {
        if self.states > 0 && self.states.saturating_add(states) > step.states_max() {
            self.round += 1;
            self.states = 0;
        }
    }

    /// Adds a sequence, up to `row_step` tile rows at a time. Records of further groups and rows go to `others`.
    fn sequence(
        &mut self,
        step: &Step<'_>,
        Planned { parts, around, fate }: &Planned<'_>,
        row_step: u32,
        next: &mut usize,
        others: &mut Vec<[u32; RECORD_WORDS]>,
    ) -> Result<(), PlanError> {
        let (layout, page_size) = (step.setting.pool.layout(), step.setting.pool.layout().page_size());
        let Some(own) = parts.first() else { return Ok(()) };
        let kv_len = own.pass.keys.end;
        let mut sources: Vec<&Part> = around.iter().copied().flatten().filter(|part| part.seen).collect();
        let of_prefixes = sources.len();
        if *fate != Fate::Nothing {
            sources.extend(parts);
        }
        let mut order = Vec::new();
        if sources.iter().any(|part| part.entries.is_some()) {
            let all = around.iter().copied().chain([parts.as_slice()]);
            all.for_each(|parts| in_order(parts, page_size, &mut order));
        }
        let chains = step.setting.tiles.chains(sources.iter().map(|part| &part.pass)).in_order(order);
        self.chains.push(chains.scaled(layout.dtypes().has_scales()));
        if step.setting.extras.shared_prefixes {
            self.owners.extend(own.rows.clone().map(|_| own.record));
        }
        let row_count = step.rows(own);
        for first_row in (0..row_count.max(1)).step_by(row_step as usize) {
            let rows = first_row..first_row.saturating_add(row_step).min(row_count);
            let mut records: Vec<u32> = parts.iter().map(|part| part.record).collect();
            if first_row > 0 {
                for record in &mut records {
                    *record = count(RECORDS, *next as u64)?;
                    *next += 1;
                }
            }
            if *fate == Fate::States {
                self.next_round(step, states_of(step, parts) / u64::from(row_count.max(1)) * rows.len() as u64);
            }
            if *fate != Fate::Results {
                let begin = self.sources.len() as u32;
                if step.setting.names_sources() {
                    self.sources.extend(sources.iter().take(of_prefixes).map(|part| part.record));
                    self.sources.extend(records.iter().take(sources.len() - of_prefixes));
                }
                let end = self.sources.len() as u32;
                let record = records.first().copied().unwrap_or(own.record);
                let item = Item { record, first_row, begin, end, first_run: 0, runs: 0, round: self.round, group: 0 };
                let starts = rows.clone().step_by(step.setting.tiles.merge_rows as usize);
                self.merge.extend(starts.map(|first_row| Item { first_row, ..item }));
            }
            for (place, (part, record)) in parts.iter().zip(records).enumerate() {
                let made = self.push(step, part, record, rows.clone(), kv_len, *fate)?;
                if first_row == 0 && place == 0 { self.records.push(made) } else { others.push(made) }
            }
        }
        let q_len = u64::from(own.rows.end - own.rows.start);
        self.mask_words += q_len * u64::from(kv_len.div_ceil(32));
        self.score_pairs += q_len * u64::from(kv_len);
        Ok(())
    }

    /// Adds the work items of some tile rows of a part, and makes their record, number `record`.
    fn push(
        &mut self,
        step: &Step<'_>,
        part: &Part,
        record: u32,
        rows: Range<u32>,
        kv_len: u32,
        fate: Fate,
    ) -> Result<[u32; RECORD_WORDS], PlanError> {
        let layout = step.setting.pool.layout();
        let splits = if fate == Fate::Nothing { 0..0 } else { part.pass.splits.clone() };
        let has_states = fate == Fate::States;
        let made = [
            part.rows.start,
            part.rows.end - part.rows.start,
            kv_len,
            entry(step.batch.page_indptr, part.seq),
            if has_states { (self.states as u32).wrapping_sub(rows.start) } else { 0 },
            splits.len() as u32,
            splits.start,
            part.pass.split_keys,
            rows.end,
            if has_states { rows.end - rows.start } else { 0 },
            self.mask_words as u32,
            self.score_pairs as u32,
        ];
        if has_states {
            let kv_heads = u64::from(layout.geometry().kv_heads());
            self.states += splits.len() as u64 * kv_heads * rows.len() as u64;
        }
        self.states_max = self.states_max.max(self.states);
        workspace_bytes(self.states, step.setting.tiles)?;
        let list = if part.pass.decodes { &mut self.decode } else { &mut self.prefill };
        for item in splits.flat_map(|split| step.items(part, split, rows.clone(), &mut self.runs)) {
            self.keys += part.count(&(item.begin..item.end), layout.page_size());
            list.push(Item { record, round: self.round, ..item });
        }
        Ok(made)
    }
}

/// The larger half of items that fall in size, and between them the smaller half, which rises.
fn alternating(items: &[Item]) -> Vec<Item> {
    let (large, small) = items.split_at(items.len().div_ceil(2));
    let mut small = small.iter().rev();
    large.iter().flat_map(|item| [Some(item), small.next()]).flatten().copied().collect()
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
