//! What there is to do: from sequences and prefixes to records, work items and rounds.

use std::collections::BTreeMap;
use std::ops::Range;

use super::mask::{Mask, Run};
use super::shared::Levels;
use super::{
    ITEM_WORDS, PlanError, RECORD_WORDS, Setting, check_lengths, check_rows, count, state_bytes, workspace_bytes,
};
use crate::batch::{Batch, NO_PAGE};
use crate::case::AttentionOptions;
use crate::chains::Chains;
use crate::geometry::PageSize;
use crate::kernels::{ItemOrder, Pass};

/// What records are of.
const RECORDS: &str = "sequences, shared prefixes, groups of their pages and rounds of their rows";

/// Rows of a record, and the keys that one workgroup per KV head takes them through; of a merge, its sources.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub record: u32,
    pub first_row: u32,
    pub begin: u32,
    pub end: u32,
    /// With a mask: its first run, and how many there are.
    pub first_run: u32,
    pub runs: u32,
    /// The round, and the group of segments that has the pages.
    pub round: u32,
    pub group: u32,
}

impl Item {
    /// What is dispatched together.
    pub fn span(&self) -> (u32, u32) {
        (self.round, self.group)
    }

    /// With its range moved by `offset`. Should that pass 32 bits, so do the plan's words, which are counted.
    pub fn words(&self, offset: u32, masked: bool) -> impl Iterator<Item = u32> {
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
pub(super) struct Step<'a> {
    pub batch: &'a Batch<'a>,
    pub setting: Setting<'a>,
    pub mask: Option<&'a Mask>,
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
            let own = |keys: &Range<u32>| part.trimmed(seen(self.batch, self.setting.options, &tile, keys), page_size);
            let mut keys = own(&whole);
            if part.entries.is_some() {
                // Rows of several sequences may see keys apart from each other, and the group's first or last lie between.
                let mut wider = whole.clone();
                while keys != wider {
                    wider = keys;
                    keys = own(&wider);
                }
            }
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
pub(super) struct WorkLists {
    /// Of the sequences, then of the shared prefixes, then of what lies in further groups of segments.
    pub records: Vec<[u32; RECORD_WORDS]>,
    pub prefill: Vec<Item>,
    pub decode: Vec<Item>,
    pub merge: Vec<Item>,
    pub runs: Vec<Run>,
    /// Where there are shared prefixes or groups of segments: of every merged sequence the records whose states are folded, in
    /// order. Where prefixes may be shared: of every packed query row its sequence.
    pub sources: Vec<u32>,
    pub owners: Vec<u32>,
    /// The round that is being filled, its partial states, and those of the fullest.
    pub round: u32,
    pub states: u64,
    pub states_max: u64,
    pub mask_words: u64,
    /// Pairs of a query row and a key of its sequence.
    pub score_pairs: u64,
    /// Keys of all work items, of one KV head.
    pub keys: u64,
    pub chains: Vec<Chains>,
}

impl WorkLists {
    /// Checks the lengths, and that the pages are there.
    pub fn new(step: &Step<'_>, levels: &Levels) -> Result<Self, PlanError> {
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
pub(super) fn common(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    a.start.max(b.start)..a.end.min(b.end)
}
