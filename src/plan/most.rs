//! What a step may need at most, from the little that an application knows beforehand: the one place that says so, for
//! buffers that are made once and for budgets.
//!
//! What a sequence needs does not rise with its lengths: few query rows decode, and split their keys; a window may lie across
//! one split more or less. So nothing here is a plan of the largest batch. Each way that rows may go (`Tiles::pass`) is
//! bounded for itself, and a sum of products, such as splits times rows, by the largest of one times the sum of the other.

use std::ops::RangeInclusive;

use super::{ITEM_WORDS, PlanCapacity, RECORD_WORDS, Setting, state_bytes};
use crate::kernels::{DECODE_ROWS_MAX, SHARED_ROWS_SPLIT_MAX, SPLIT_KEYS};

/// The largest step that an application takes, by what it knows of it: all steps within these numbers have room in
/// [`Attention::capacity`](crate::Attention::capacity), whatever their masks and pages. What is not stated has no limit of its own, but prefixes:
/// without a number there are none. Room that a device can have needs all three: `sequences`, `q_len` or `total_q`, and
/// `kv_len` or `total_kv`.
///
/// ```
/// # use paged_attention::StepMax;
/// // 64 requests of up to 32,768 tokens in a pool of 20,000 pages of 16; prompts in pieces of 512 rows, one at a time.
/// let max = StepMax {
///     sequences: 64,
///     q_len: 512,
///     total_q: 512 + 63,
///     kv_len: 32_768,
///     total_kv: 20_000 * 16,
///     ..StepMax::default()
/// };
/// # assert_eq!(max.prefixes, 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepMax {
    /// Sequences.
    pub sequences: u32,
    /// Query rows of a sequence: its new tokens.
    pub q_len: u32,
    /// Query rows of all sequences.
    pub total_q: u32,
    /// Tokens of a sequence, new ones and those that fell out of its window included. Where page tables have more entries than they
    /// need, the tokens that they have room for.
    pub kv_len: u32,
    /// Tokens of all sequences, counted as in `kv_len`. Where no page is in two tables and none was given back, this is
    /// what the pool holds; a page that several have counts for each.
    pub total_kv: u64,
    /// Shared prefixes that a plan names ([`Attention::plan_shared`](crate::Attention::plan_shared)). [`crate::Batch::shared_prefixes`] finds fewer than
    /// there are sequences.
    pub prefixes: u32,
    /// Shared prefixes around one sequence: 1 unless they nest. [`crate::Batch::shared_prefixes`] nests no deeper than
    /// `kv_len / tokens_min`.
    pub prefix_depth: u32,
}

impl Default for StepMax {
    fn default() -> Self {
        Self {
            sequences: u32::MAX,
            q_len: u32::MAX,
            total_q: u32::MAX,
            kv_len: u32::MAX,
            total_kv: u64::MAX,
            prefixes: 0,
            prefix_depth: u32::MAX,
        }
    }
}

/// What a plan takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    /// Words, page ids included.
    pub words: u64,
    /// Partial states, whether there may be as many at the same time or not.
    pub states: u64,
    /// Rounds that these take.
    rounds: u64,
}

/// Rows that go through keys: sequences, or shared prefixes.
#[derive(Clone, Copy)]
struct Parts {
    count: u64,
    rows: Largest,
    keys: Largest,
    shared: bool,
}

/// A number that each of several parts has: its largest value, and its sum.
#[derive(Clone, Copy)]
struct Largest {
    one: u64,
    all: u64,
}

impl Largest {
    fn new(one: u64, count: u64, all: u64) -> Self {
        Self { one: one.min(all), all: all.min(one.saturating_mul(count)) }
    }

    /// The number divided and rounded up.
    fn div_ceil(self, count: u64, divisor: u64) -> Self {
        Self::new(self.one.div_ceil(divisor), count, (self.all / divisor).saturating_add(count))
    }

    /// The sum of products of both.
    fn times(self, other: Self) -> u64 {
        self.all.saturating_mul(other.one).min(self.one.saturating_mul(other.all))
    }
}

/// Work items and what belongs to them.
#[derive(Clone, Copy, Default)]
struct Work {
    items: u64,
    runs: u64,
    states: u64,
}

impl Work {
    fn each(self, other: Self, of: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            items: of(self.items, other.items),
            runs: of(self.runs, other.runs),
            states: of(self.states, other.states),
        }
    }
}

impl StepMax {
    /// Room for the plans of all such steps.
    pub(crate) fn capacity(&self, setting: &Setting<'_>) -> PlanCapacity {
        let (Need { words, states, rounds }, [_, rows, keys]) = (self.need(setting), self.numbers());
        // Two kernels read pages, and one merges.
        let slices = match (rounds, u64::from(setting.pool.count())) {
            (1, 1) => 0,
            (_, groups) => rounds.saturating_mul(2 * groups + 1),
        };
        PlanCapacity {
            words,
            blocks: u32::try_from(slices.saturating_add(1)).unwrap_or(u32::MAX),
            total_q: u32::try_from(rows.all).unwrap_or(u32::MAX),
            score_pairs: rows.times(keys),
            workspace_bytes: states.saturating_mul(state_bytes(setting.tiles)).min(setting.workspace_max),
        }
    }

    /// Sequences, their rows, their keys.
    fn numbers(&self) -> [Largest; 3] {
        let sequences = u64::from(self.sequences);
        [
            Largest { one: 1, all: sequences },
            Largest::new(self.q_len.into(), sequences, self.total_q.into()),
            Largest::new(self.kv_len.into(), sequences, self.total_kv),
        ]
    }

    /// What the plans of all such steps take at most.
    pub(crate) fn need(&self, setting: &Setting<'_>) -> Need {
        let Setting { pool, extras, .. } = setting;
        let [Largest { all: sequences, .. }, rows, keys] = self.numbers();
        let prefixes = if extras.shared_prefixes { u64::from(self.prefixes) } else { 0 };
        let depth = prefixes.min(self.prefix_depth.into());

        let groups = u64::from(pool.count());
        let sharing = prefixes > 0;
        let own = Parts { count: sequences, rows, keys, shared: false };
        let single = |largest: Largest| Largest { all: largest.one, ..largest };
        let one = Parts { count: 1, rows: single(rows), keys: single(keys), shared: false };
        let largest = setting.ways(&one).map(|way| setting.work(&one, way, sharing)).reduce(|a, b| a.each(b, u64::max));
        let largest = largest.unwrap_or_default();
        let sums = |parts: &Parts| {
            setting
                .ways(parts)
                .fold(Work::default(), |sum, way| sum.each(setting.work(parts, way, sharing), u64::saturating_add))
        };
        // No more than all rows take, and no more than every sequence at its largest.
        let own = sums(&own).each(largest, |all, one| all.min(one.saturating_mul(sequences)));
        let shared = Parts {
            count: prefixes,
            rows: Largest::new(rows.all, prefixes, rows.all.saturating_mul(depth)),
            keys: Largest::new(keys.one, prefixes, u64::MAX),
            shared: true,
        };
        let mut work = own.each(sums(&shared), u64::saturating_add);
        // Any two rounds that follow each other would not fit into one. Rows that are taken by themselves, since those of their
        // sequence would not fit, fill at least half of what there may be.
        let filled =
            |by: u64| by.saturating_mul(work.states) / (setting.workspace_max / state_bytes(setting.tiles)).max(1);
        let (mut rounds, mut cuts) = (1, 0);
        if filled(1) > 0 {
            rounds = filled(2).saturating_add(1);
            cuts = if largest.states.saturating_mul(state_bytes(setting.tiles)) > setting.workspace_max {
                filled(3)
            } else {
                0
            };
        }
        let splits = keys.one.div_ceil(SPLIT_KEYS.min(setting.tiles.prefill.split_keys).into()).saturating_add(1);
        let cut_items = cuts.saturating_mul(groups).saturating_mul(splits);
        work.items = work.items.saturating_add(cut_items).saturating_add(cuts);
        if extras.mask {
            let words = cuts.saturating_mul(groups).saturating_mul(keys.one.div_ceil(32));
            work.runs = work.runs.saturating_add(cut_items).saturating_add(words);
        }
        let Work { items, runs, states } = work;

        let (item_words, masks) = if extras.mask {
            (ITEM_WORDS as u64 + 2, rows.times(keys.div_ceil(sequences, 32)))
        } else {
            (ITEM_WORDS as u64, 0)
        };
        let owners = if extras.shared_prefixes { rows.all } else { 0 };
        let merged = sequences.saturating_add(cuts);
        let sources = if setting.names_sources() { merged.saturating_mul(1 + depth).saturating_mul(groups) } else { 0 };
        let page_ids = keys.div_ceil(sequences, pool.layout().page_size().get().into()).all;
        let words = [
            (RECORD_WORDS as u64 * groups).saturating_mul(merged.saturating_add(prefixes)),
            owners,
            sources,
            items.saturating_mul(item_words),
            masks,
            runs.saturating_mul(3),
            page_ids,
        ];
        Need { words: words.into_iter().fold(0, u64::saturating_add), states, rounds }
    }
}

impl Setting<'_> {
    /// Stretches of query rows that a part may have, from 1 on, within which they go the same way.
    fn ways(&self, parts: &Parts) -> impl Iterator<Item = RangeInclusive<u32>> + use<> {
        let group = self.pool.layout().geometry().group();
        let decode = (DECODE_ROWS_MAX / group).max(1);
        let few = if parts.shared { (SHARED_ROWS_SPLIT_MAX / group).max(decode) } else { decode };
        let most = u32::try_from(parts.rows.one).unwrap_or(u32::MAX);
        [1..=decode, decode + 1..=few, few + 1..=u32::MAX]
            .into_iter()
            .map(move |way| *way.start()..=most.min(*way.end()))
            .filter(|way| !way.is_empty())
    }

    /// What parts whose rows go one way take; of each, as much again for every group of segments. `sharing` says whether
    /// sequences may be merged that are not split.
    fn work(&self, parts: &Parts, way: RangeInclusive<u32>, sharing: bool) -> Work {
        let (geometry, group) = (self.pool.layout().geometry(), u64::from(self.pool.layout().geometry().group()));
        let keys = u32::try_from(parts.keys.one).unwrap_or(u32::MAX);
        let pass = self.tiles.pass(geometry, *way.end(), 0..keys, 0..keys, parts.shared);
        let count = parts.count.min(parts.rows.all / u64::from(*way.start()));
        let rows = Largest::new((*way.end()).into(), count, parts.rows.all);
        // Keys that a sequence's rows see lie side by side; those of a prefix's rows, anywhere.
        let left = self.options.window_left.filter(|_| !parts.shared);
        let span = left.map_or(u64::MAX, |left| u64::from(left) + rows.one);
        let pieces = |length: u64| {
            let all = parts.keys.div_ceil(count, length);
            // Rows that see nothing have an item too.
            let one = all.one.max(1).min(span.saturating_sub(1).div_ceil(length).saturating_add(1));
            Largest::new(one, count, all.all.max(count))
        };
        let split_keys = u64::from(pass.split_keys);
        let splits = pieces(split_keys);
        let tiles = |tile_rows: u32| {
            let tile_rows = u64::from(tile_rows);
            let one = (rows.one * group).div_ceil(tile_rows);
            let all = rows.all.saturating_mul(group).saturating_add(count * (tile_rows - 1)) / tile_rows;
            Largest::new(one, count, all)
        };
        let row_tiles = tiles(pass.tile_rows);
        let groups = u64::from(self.pool.count());
        let merged = splits.one > 1 || sharing || groups > 1;
        let merges = if merged && !parts.shared { tiles(self.tiles.merge_rows).all } else { 0 };
        let runs = if self.extras.mask {
            let words = pieces(32);
            // A word on both sides of a split is in two runs.
            let cut = if split_keys.is_multiple_of(32) { Largest { one: 0, all: 0 } } else { splits };
            row_tiles.times(words).saturating_add(row_tiles.times(cut))
        } else {
            0
        };
        let states = if merged { rows.times(splits).saturating_mul(geometry.q_heads().into()) } else { 0 };
        let items = row_tiles.times(splits).saturating_mul(groups).saturating_add(merges);
        Work { items, runs: runs.saturating_mul(groups), states: states.saturating_mul(groups) }
    }
}
