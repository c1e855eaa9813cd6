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

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

pub use self::device::{DevicePlan, PlanCapacity, UploadError, WriteError};
pub(crate) use self::device::{PARAMS_BYTES, PlanBuffer, Written, plan_buffer_bytes, written_buffer_bytes};
use self::mask::{Mask, Run};
pub use self::most::StepMax;
pub(crate) use self::most::{Need, Setting};
use self::shared::Levels;
pub use self::shared::{SharedPrefix, SharedPrefixError};
pub(crate) use self::slices::Dispatch;
pub use self::slices::Slice;
use crate::attention::Extras;
use crate::batch::{Batch, BatchError, NO_PAGE};
use crate::case::AttentionOptions;
use crate::chains::Chains;
use crate::geometry::{HeadGeometry, PageSize};
use crate::kernels::{ItemOrder, KernelId, Pass, Tiles};
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
}

/// What one step's attention consists of: made once per step, used for every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub(crate) params: Params,
    pub(crate) words: Vec<u32>,
    pub(crate) total_q: u32,
    pub(crate) layout: KvLayout,
    tiles: Tiles,
    options: AttentionOptions,
    extras: Extras,
    pub(crate) score_pairs: u64,
    workspace_bytes: u64,
    kv_bytes_read: u64,
    chains: Vec<Chains>,
    slices: Vec<Slice>,
}

/// A reach that has no end, in [`Params`].
const UNLIMITED: u32 = u32::MAX;

impl Plan {
    /// Plans attention of `batch` over a pool of `layout`. `mask` has an entry for every query row and key of its
    /// sequence, row by row, or is left out.
    pub(crate) fn new(
        batch: &Batch<'_>,
        layout: &KvLayout,
        options: &AttentionOptions,
        extras: &Extras,
        tiles: &Tiles,
        prefixes: &[SharedPrefix],
        mask: Option<&[bool]>,
    ) -> Result<Self, PlanError> {
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
        let lists = WorkLists::new(&Step { batch, layout, options, extras, tiles, mask: mask.as_ref() }, &levels)?;
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
        };
        Ok(Self {
            slices: slices::whole(&params),
            params,
            words,
            total_q: batch.total_q(),
            layout: *layout,
            tiles: *tiles,
            options: *options,
            extras: *extras,
            score_pairs: lists.score_pairs,
            workspace_bytes: workspace_bytes(lists.states, tiles)?,
            kv_bytes_read: lists.keys()
                * u64::from(kv_heads)
                * 16
                * layout.row_vectors().map(u64::from).iter().sum::<u64>(),
            chains: lists.chains,
        })
    }

    /// Bytes of partial states that the plan needs; 0 where no sequence is split and none shares a prefix.
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
pub(crate) const RECORD_WORDS: usize = 10;

/// Words of a work item; with a mask, two more.
pub(crate) const ITEM_WORDS: usize = 4;

/// In a record in place of the first partial state, where a work item makes the whole result of its rows.
const NO_STATES: u32 = u32::MAX;

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
}

impl Item {
    /// With its range moved by `offset`. Should that pass 32 bits, so do the plan's words, which are counted.
    fn words(&self, offset: u32, masked: bool) -> impl Iterator<Item = u32> {
        let [begin, end] = [self.begin, self.end].map(|place| place.wrapping_add(offset));
        let words = [self.record, self.first_row, begin, end, self.first_run, self.runs];
        words.into_iter().take(if masked { ITEM_WORDS + 2 } else { ITEM_WORDS })
    }
}

/// Rows that go through the same keys: those of a sequence through its own, or those of several through a prefix.
struct Part {
    record: u32,
    /// Packed query rows.
    rows: Range<u32>,
    /// Whose pages are read.
    seq: usize,
    /// Whether a row sees a key of it.
    seen: bool,
    pass: Pass,
}

/// What work items are made of.
struct Step<'a> {
    batch: &'a Batch<'a>,
    layout: &'a KvLayout,
    options: &'a AttentionOptions,
    extras: &'a Extras,
    tiles: &'a Tiles,
    mask: Option<&'a Mask>,
}

impl Step<'_> {
    /// What record number `record` stands for.
    fn part(&self, record: usize, seqs: Range<usize>, keys: Range<u32>, shared: bool) -> Result<Part, PlanError> {
        let rows = entry(self.batch.q_indptr, seqs.start)..entry(self.batch.q_indptr, seqs.end);
        let seen = seen(self.batch, self.options, &rows, &keys);
        check_pages(self.batch, self.layout.page_size(), seqs.start, &seen)?;
        Ok(Part {
            record: count("sequences and shared prefixes", record as u64)?,
            seq: seqs.start,
            seen: !seen.is_empty(),
            pass: self.tiles.pass(self.layout.geometry(), rows.end - rows.start, keys, seen, shared),
            rows,
        })
    }

    /// The items of a split, one per tile of rows, and the runs of a mask.
    fn items(&self, part: &Part, split: u32, runs: &mut Vec<Run>) -> Vec<Item> {
        let (Part { record, rows, pass, .. }, group) = (part, self.layout.geometry().group());
        let row_count = (rows.end - rows.start) * group;
        let split_begin = split * pass.split_keys;
        let whole = common(&pass.keys, &(split_begin..split_begin.saturating_add(pass.split_keys)));
        let item = |first_row: u32| {
            let last_row = first_row.saturating_add(pass.tile_rows - 1).min(row_count - 1);
            let tile = rows.start + first_row / group..rows.start + last_row / group + 1;
            let mut keys = seen(self.batch, self.options, &tile, &whole);
            let first_run = runs.len();
            if let Some(mask) = self.mask {
                mask.runs(tile, keys, runs);
                let own = runs.get(first_run..).unwrap_or_default();
                keys = own.first().map_or(0, |run| run.begin)..own.last().map_or(0, |run| run.end);
            }
            // Without keys an item still belongs to its split.
            let keys = if keys.is_empty() { split_begin..split_begin } else { keys };
            let (first_run, runs) = (first_run as u32, (runs.len() - first_run) as u32);
            Item { record: *record, first_row, begin: keys.start, end: keys.end, first_run, runs }
        };
        (0..row_count).step_by(pass.tile_rows as usize).map(item).collect()
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
    /// Of the sequences, then of the shared prefixes.
    records: Vec<[u32; RECORD_WORDS]>,
    prefill: Vec<Item>,
    decode: Vec<Item>,
    merge: Vec<Item>,
    runs: Vec<Run>,
    /// Where prefixes may be shared: of every merged sequence the records whose states are folded, in order; and of
    /// every packed query row its sequence.
    sources: Vec<u32>,
    owners: Vec<u32>,
    states: u64,
    mask_words: u64,
    /// Pairs of a query row and a key of its sequence.
    score_pairs: u64,
    chains: Vec<Chains>,
}

impl WorkLists {
    fn new(step: &Step<'_>, levels: &Levels) -> Result<Self, PlanError> {
        let Step { batch, layout, options, extras, tiles, .. } = step;
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
        let mut prefixes: Vec<Option<Part>> = Vec::with_capacity(levels.levels.len());
        let mut record = batch.seqs();
        for level in &levels.levels {
            let part = step.part(record, level.seqs.clone(), level.keys.clone(), true)?;
            record += usize::from(part.seen);
            prefixes.push(part.seen.then_some(part));
        }
        let mut lists = Self::default();
        for (seq, kv_len) in batch.kv_len.iter().copied().enumerate() {
            let own = step.part(seq, seq..seq + 1, levels.own_begin(seq)..kv_len, false)?;
            let around = levels.around(seq).into_iter().filter_map(|level| prefixes.get(level)?.as_ref());
            let mut sources: Vec<&Part> = around.collect();
            let fate = match (sources.is_empty(), own.seen) {
                // Rows that see nothing have a result too.
                (true, _) if own.pass.splits.len() == 1 => Fate::Results,
                (false, false) => Fate::Nothing,
                _ => Fate::States,
            };
            if fate != Fate::Nothing {
                sources.push(&own);
            }
            let chains = tiles.chains(sources.iter().map(|part| &part.pass));
            lists.chains.push(chains.scaled(layout.dtypes().has_scales()));
            if extras.shared_prefixes {
                lists.owners.extend(own.rows.clone().map(|_| own.record));
            }
            if fate != Fate::Results {
                let begin = lists.sources.len() as u32;
                if extras.shared_prefixes {
                    lists.sources.extend(sources.iter().map(|part| part.record));
                }
                let end = lists.sources.len() as u32;
                let rows = (own.rows.end - own.rows.start) * layout.geometry().group();
                let starts = (0..rows).step_by(tiles.merge_rows as usize);
                let item = Item { record: own.record, first_row: 0, begin, end, first_run: 0, runs: 0 };
                lists.merge.extend(starts.map(|first_row| Item { first_row, ..item }));
            }
            lists.push(step, &own, kv_len, fate)?;
            let q_len = u64::from(own.rows.end - own.rows.start);
            lists.mask_words += q_len * u64::from(kv_len.div_ceil(32));
            lists.score_pairs += q_len * u64::from(kv_len);
        }
        // Records hold in 32 bits what lies before their own.
        if extras.mask {
            count("words of masks", lists.mask_words)?;
        }
        if let Some(bias) = extras.bias {
            let heads = bias.heads(layout.geometry());
            count("elements of the bias", lists.score_pairs.saturating_mul(heads.into()))?;
        }
        for part in prefixes.iter().flatten() {
            lists.push(step, part, part.pass.keys.end, Fate::States)?;
        }
        count("words of runs", lists.runs.len() as u64 * 3)?;
        // The sort is stable, so the order is the same on every machine.
        lists.prefill.sort_by_key(|item| std::cmp::Reverse(item.end - item.begin));
        if tiles.prefill.order == ItemOrder::Alternating {
            let large = lists.prefill.len().div_ceil(2);
            let small = lists.prefill.split_off(large);
            let mut small = small.into_iter().rev();
            lists.prefill = lists.prefill.into_iter().flat_map(|item| [Some(item), small.next()]).flatten().collect();
        }
        Ok(lists)
    }

    /// Keys of all work items, of one KV head.
    fn keys(&self) -> u64 {
        self.prefill.iter().chain(&self.decode).map(|item| u64::from(item.end - item.begin)).sum()
    }

    /// Adds the record and the work items of a part.
    fn push(&mut self, step: &Step<'_>, part: &Part, kv_len: u32, fate: Fate) -> Result<(), PlanError> {
        let (geometry, q_len) = (step.layout.geometry(), part.rows.end - part.rows.start);
        let splits = if fate == Fate::Nothing { 0..0 } else { part.pass.splits.clone() };
        self.records.push([
            part.rows.start,
            q_len,
            kv_len,
            entry(step.batch.page_indptr, part.seq),
            if fate == Fate::States { self.states as u32 } else { NO_STATES },
            splits.len() as u32,
            splits.start,
            part.pass.split_keys,
            self.mask_words as u32,
            self.score_pairs as u32,
        ]);
        if fate == Fate::States {
            let rows = u64::from(q_len) * u64::from(geometry.q_heads());
            self.states += splits.len() as u64 * rows;
        }
        workspace_bytes(self.states, step.tiles)?;
        let list = if part.pass.decodes { &mut self.decode } else { &mut self.prefill };
        list.extend(splits.flat_map(|split| step.items(part, split, &mut self.runs)));
        Ok(())
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
