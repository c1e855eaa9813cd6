//! The plan against a naive count of what there is to do.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::ops::Range;

use proptest::prelude::*;

use super::SharedPrefixError;
use super::work::common;
use super::{PARAMS_BYTES, Params, Plan, PlanCapacity, PlanError, RECORD_WORDS, Setting, SharedPrefix, state_bytes};
use crate::attention::Extras;
use crate::batch::{Batch, NO_PAGE};
use crate::case::{AttentionOptions, SOFTCAP_MAX, SOFTCAP_MIN};
use crate::geometry::{Dtype, HeadGeometry, PageSize};
use crate::kernels::{
    AdapterFacts, ItemOrder, KernelConfig, KernelId, Modifiers, PrefillVariant, SPLIT_KEYS, SUBGROUP_SIZES, Tiles,
    Variants,
};
use crate::kv::{KvLayout, SegmentGroups};

mod most;

/// A batch that owns its tensors.
#[derive(Clone, Debug)]
struct Owned {
    geometry: HeadGeometry,
    facts: AdapterFacts,
    causal: bool,
    window: (Option<u32>, Option<u32>),
    prefill_split_keys: u32,
    page_size: PageSize,
    page_count: u32,
    /// Pages of a segment, and segments that a dispatch binds.
    segments: (u32, u32),
    /// Partial states at the same time.
    states_max: u64,
    /// `(q_len, kv_len, page ids)` of each sequence.
    seqs: Vec<(u32, u32, Vec<u32>)>,
    prefixes: Vec<SharedPrefix>,
}

impl Owned {
    fn tiles(&self) -> Tiles {
        let config = KernelConfig {
            geometry: self.geometry,
            q: Dtype::F16,
            kv: Dtype::F16.into(),
            new_rows: Dtype::F16.into(),
            out: Dtype::F32,
            modifiers: Modifiers { shared_prefixes: !self.prefixes.is_empty(), ..Modifiers::NONE },
            segments: NonZeroU32::MIN,
            variants: Variants::base(&self.facts, &self.geometry),
        };
        let tiles = Tiles::new(&self.geometry, &config.candidates(&self.facts)[0]);
        // Short enough for prompts of a test to be split.
        let split_keys = self.prefill_split_keys.min(tiles.prefill.split_keys);
        Tiles { prefill: PrefillVariant { split_keys, ..tiles.prefill }, ..tiles }
    }

    fn options(&self) -> AttentionOptions {
        AttentionOptions::new(&self.geometry).with_causal(self.causal).with_window(self.window.0, self.window.1)
    }

    fn plan(&self) -> Plan {
        self.try_plan().unwrap()
    }

    fn try_plan(&self) -> Result<Plan, PlanError> {
        let layout = KvLayout::new(self.geometry, Dtype::F16, self.page_size, self.page_count).unwrap();
        let pool = self.pool(&layout);
        let workspace_max = self.states_max.saturating_mul(state_bytes(&self.tiles()));
        let extras = Extras { shared_prefixes: !self.prefixes.is_empty(), ..Extras::NONE };
        self.with_batch(|batch| {
            let (options, tiles) = (&self.options(), &self.tiles());
            let setting = Setting { pool: &pool, options, extras: &extras, tiles, workspace_max };
            Plan::new(batch, &setting, &self.prefixes, None)
        })
    }

    fn pool(&self, layout: &KvLayout) -> SegmentGroups {
        let [pages, bound] = [self.segments.0, self.segments.1].map(|count| NonZeroU32::new(count).unwrap());
        SegmentGroups::new(&layout.with_segment_pages(pages), bound)
    }

    /// The group of segments of each key of a record.
    fn group_of(&self, plan: &Plan, record: u32, key: u32) -> u32 {
        let table = plan.words[RECORD_WORDS * record as usize + 3];
        let entry = plan.params.page_ids + table + key / self.page_size.get();
        plan.groups.of_page(plan.words[entry as usize])
    }

    fn with_batch<T>(&self, work: impl FnOnce(&Batch<'_>) -> T) -> T {
        let sums = |length: fn(&(u32, u32, Vec<u32>)) -> u32| {
            let ends = self.seqs.iter().scan(0, |sum, seq| {
                *sum += length(seq);
                Some(*sum)
            });
            std::iter::once(0).chain(ends).collect::<Vec<u32>>()
        };
        work(&Batch {
            q_indptr: &sums(|seq| seq.0),
            page_indptr: &sums(|seq| seq.2.len() as u32),
            page_ids: &self.page_ids(),
            kv_len: &self.seqs.iter().map(|(_, kv_len, _)| *kv_len).collect::<Vec<_>>(),
        })
    }

    fn page_ids(&self) -> Vec<u32> {
        self.seqs.iter().flat_map(|(.., pages)| pages.iter().copied()).collect()
    }

    /// Keys that a packed query row sees.
    fn visible(&self, packed_row: u32) -> Range<u32> {
        let mut begin = 0;
        for (q_len, kv_len, _) in &self.seqs {
            if packed_row < begin + q_len {
                return self.options().visible(*q_len, *kv_len, packed_row - begin);
            }
            begin += q_len;
        }
        panic!("there is no row {packed_row}");
    }

    /// Declares prefixes drawn by `number`, and makes their members share the pages.
    fn share(&mut self, number: &mut impl FnMut(u32) -> u32) {
        let mut prefixes = Vec::new();
        self.draw(0..self.seqs.len(), 0, number, &mut prefixes);
        for SharedPrefix { seqs, tokens } in &prefixes {
            let pages = self.page_size.pages_for(*tokens) as usize;
            let shared = self.seqs[seqs.start].2[..pages].to_vec();
            for (.., own) in &mut self.seqs[seqs.clone()] {
                own[..pages].copy_from_slice(&shared);
            }
        }
        self.prefixes = prefixes;
    }

    /// Prefixes of more than `tokens` tokens inside `seqs`, outer ones first.
    fn draw(
        &self,
        seqs: Range<usize>,
        tokens: u32,
        number: &mut impl FnMut(u32) -> u32,
        prefixes: &mut Vec<SharedPrefix>,
    ) {
        let mut start = seqs.start;
        while start < seqs.end {
            let end = start + 1 + number((seqs.end - start) as u32) as usize;
            let shortest = self.seqs[start..end].iter().map(|(_, kv_len, _)| *kv_len).min().unwrap();
            if shortest > tokens && number(4) > 0 {
                let longer = match number(3) {
                    0 => shortest,
                    1 => (tokens / 256 * 256 + 256).min(shortest),
                    _ => tokens + 1 + number(shortest - tokens),
                };
                prefixes.push(SharedPrefix { seqs: start..end, tokens: longer });
                self.draw(start..end, longer, number, prefixes);
            }
            start = end;
        }
    }
}

/// Sequences around the sizes at which something changes: rows of a tile, keys of a split, the choice of the kernel.
fn batch(shares: impl Strategy<Value = bool>) -> impl Strategy<Value = Owned> {
    let q_len = prop_oneof![Just(1_u32), Just(0), 2_u32..20, 14_u32..70, 100_u32..300];
    let kv_len = prop_oneof![Just(0_u32), 1_u32..40, 250_u32..260, 500_u32..520, 0_u32..3000];
    let heads = (1_u32..5, prop_oneof![1_u32..5, 5_u32..40], 1_u32..577, 1_u32..513);
    let plain = prop_oneof![Just(AdapterFacts::PLAIN_GPU), Just(AdapterFacts::PLAIN_CPU)];
    let facts = (plain, prop::option::of(prop::sample::select(SUBGROUP_SIZES.to_vec())))
        .prop_map(|(plain, size)| size.map_or(plain, |size| plain.with_subgroups(size)));
    let lengths = prop::collection::vec((q_len, kv_len, 0_u32..3), 0..9);
    let prefill_split_keys = prop_oneof![Just(u32::MAX), Just(128), Just(1024)];
    let reach = || prop::option::of(prop_oneof![0_u32..20, 200_u32..700, Just(u32::MAX)]);
    let groups = prop_oneof![3 => Just((50, 1)), 2 => (1_u32..30, 1_u32..6)];
    let others = (any::<bool>(), (reach(), reach()), prefill_split_keys, (1_u32..70, groups), any::<u32>(), shares);
    (lengths, heads, facts, others).prop_map(|(lengths, (kv_heads, group, head_dim, v_head_dim), facts, others)| {
        let (causal, window, prefill_split_keys, (page_size, segments), seed, shares) = others;
        let geometry = HeadGeometry::with_v_head_dim(kv_heads * group, kv_heads, head_dim, v_head_dim).unwrap();
        let page_size = PageSize::new(page_size).unwrap();
        let page_count = 50;
        let mut state = seed;
        let mut number = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        let seqs = lengths
            .into_iter()
            .map(|(q_len, kv_len, surplus)| {
                // Any ids will do, shared ones included.
                let pages = (0..page_size.pages_for(kv_len) + surplus).map(|_| number(page_count));
                (q_len, kv_len, pages.collect())
            })
            .collect();
        let prefixes = Vec::new();
        let mut batch = Owned {
            geometry,
            facts,
            causal,
            window,
            prefill_split_keys,
            page_size,
            page_count,
            segments,
            states_max: u64::MAX,
            seqs,
            prefixes,
        };
        if shares {
            batch.share(&mut number);
        }
        batch
    })
}

/// Words `[sequence, first row, first key, key end]` of a list of `groups` workgroups.
fn items(plan: &Plan, start: u32, groups: u32) -> Vec<[u32; 4]> {
    let count = groups / plan.params.kv_heads;
    assert_eq!(groups, count * plan.params.kv_heads, "every item once per KV head");
    let words = &plan.words[start as usize..(start + 4 * count) as usize];
    words.chunks_exact(4).map(|item| item.try_into().unwrap()).collect()
}

/// A record of a plan.
#[derive(Clone, Copy, Debug)]
struct Record {
    q_begin: u32,
    q_len: u32,
    partial_begin: u32,
    splits: u32,
    first_split: u32,
    split_keys: u32,
    rows_end: u32,
    state_rows: u32,
}

fn record(plan: &Plan, index: u32) -> Record {
    let [q_begin, q_len, _, _, partial_begin, splits, first_split, split_keys, rows_end, state_rows, ..] =
        plan.words[RECORD_WORDS * index as usize..][..RECORD_WORDS]
    else {
        unreachable!()
    };
    Record { q_begin, q_len, partial_begin, splits, first_split, split_keys, rows_end, state_rows }
}

impl Record {
    /// Index of a state of KV head 0.
    fn state(&self, split: u32, row: u32, kv_heads: u32) -> u32 {
        self.partial_begin.wrapping_add(split * kv_heads * self.state_rows + row)
    }
}

/// Folds the states of the rows of a merge.
fn check_merge(
    batch: &Owned,
    plan: &Plan,
    [index, first_row, begin, end]: [u32; 4],
    states: &mut HashMap<u32, Vec<Range<u32>>>,
    results: &mut HashMap<u32, Vec<Range<u32>>>,
) {
    let (group, kv_heads, own) = (batch.geometry.group(), batch.geometry.kv_heads(), record(plan, index));
    let sources = match plan.names_sources() {
        false => vec![index],
        true => plan.words[begin as usize..end as usize].to_vec(),
    };
    // A record of some rows of a sequence says which sequence that is.
    let seqs = (0..batch.seqs.len() as u32).map(|seq| record(plan, seq));
    let seq = seqs.clone().position(|seq| (seq.q_begin, seq.q_len) == (own.q_begin, own.q_len)).unwrap();
    let chains = &plan.chains()[seq];
    assert!(end <= plan.params.owners && first_row < own.rows_end);
    for row in first_row..(first_row + batch.tiles().merge_rows).min(own.rows_end) {
        let parts = sources.iter().flat_map(|source| {
            let source = record(plan, *source);
            let row = (own.q_begin - source.q_begin) * group + row;
            (0..source.splits).map(move |split| source.state(split, row, kv_heads))
        });
        // A state is of one row, and is folded once.
        let parts: Vec<_> = parts.map(|state| states.remove(&state).unwrap()).collect();
        assert!(parts.len() == 1 || chains.accumulate as usize > 2 * parts.len());
        let parts = parts.concat();
        // In the order that the bound goes by: what is gone through later lies later in it.
        let place =
            |key: u32| chains.order.iter().position(|keys| keys.contains(&key)).map_or((0, key), |at| (at, key));
        assert!(parts.iter().map(|keys| place(keys.start)).is_sorted(), "{parts:?}, {:?}", chains.order);
        assert!(chains.order.iter().all(|keys| keys.start.is_multiple_of(chains.step_keys)));
        assert!(results.insert(own.q_begin * group + row, parts).is_none(), "row {row} is merged twice");
    }
}

/// Does what the kernels do, with ranges of keys in the place of arithmetic. Of each tile row, what it meets in the order in
/// which it does.
fn check(batch: &Owned) -> HashMap<u32, Vec<Range<u32>>> {
    let (plan, tiles) = (batch.plan(), batch.tiles());
    assert_eq!(plan.out_of_range(), None);
    let (params, group, kv_heads) = (&plan.params, batch.geometry.group(), batch.geometry.kv_heads());
    let [prefill, decode, merge] = [
        (params.prefill_items, params.prefill_groups),
        (params.decode_items, params.decode_groups),
        (params.merge_items, params.merge_groups),
    ]
    .map(|(start, groups)| items(&plan, start, groups));
    // The parts follow one another, and nothing is left over.
    let total_q = batch.seqs.iter().map(|seq| seq.0).sum::<u32>();
    assert_eq!(plan.total_q(), total_q);
    let owners = if batch.prefixes.is_empty() { 0 } else { total_q };
    assert_eq!(params.prefill_items, params.owners + owners);
    assert_eq!(params.decode_items, params.prefill_items + 4 * prefill.len() as u32);
    assert_eq!(params.merge_items, params.decode_items + 4 * decode.len() as u32);
    assert_eq!(params.masks, params.merge_items + 4 * merge.len() as u32);
    assert_eq!(params.masks, params.page_ids);
    assert_eq!(plan.words[params.page_ids as usize..], batch.page_ids());
    let grouped = plan.groups.count() > 1;
    // The slices of a kernel follow one another; of each group of segments there is one, for its own pages.
    let mut groups = HashMap::new();
    let mut own_blocks = 0;
    let blocks = plan.blocks();
    for (slice, dispatch) in plan.slices().iter().zip(plan.dispatches()) {
        let Range { start, end } = slice.workgroups;
        let block = blocks[PARAMS_BYTES as usize * dispatch.block as usize..][..size_of::<Params>()].to_vec();
        let block: Params = bytemuck::pod_read_unaligned(&block);
        own_blocks += u64::from(dispatch.block > 0);
        assert!(dispatch.block == 0 || u64::from(dispatch.block) == own_blocks);
        let all = plan.workgroups().contains(&(slice.kernel, end)) && start == 0;
        let is_part = !all || grouped && slice.kernel != KernelId::Merge;
        assert_eq!((dispatch.block > 0, start), (is_part, block.first_group));
        if slice.kernel != KernelId::Merge {
            let pages = plan.groups.pages(dispatch.segment_group);
            assert_eq!((block.first_page, block.pages), (pages.start, pages.end - pages.start));
            let first = plan.groups.segments(dispatch.segment_group).start * plan.groups.layout().segment_pages();
            let rows = block.k_rows;
            assert_eq!(
                rows.base.wrapping_add(first.wrapping_mul(rows.page_stride)),
                plan.groups.layout().k_rows().base
            );
        }
        for item in start / kv_heads..end / kv_heads {
            assert!(groups.insert((slice.kernel, item), dispatch.segment_group).is_none());
        }
    }
    assert_eq!(groups.len(), prefill.len() + decode.len() + merge.len());
    assert_eq!(plan.device_bytes(), 8 * PARAMS_BYTES * (1 + own_blocks) + 4 * (plan.words.len().max(1) as u64));
    for slice in plan.slices().iter().filter(|slice| slice.kernel == KernelId::Prefill) {
        let of_slice =
            &prefill[(slice.workgroups.start / kv_heads) as usize..(slice.workgroups.end / kv_heads) as usize];
        let sizes: Vec<u32> = of_slice.iter().map(|item| item[3] - item[2]).collect();
        match tiles.prefill.order {
            ItemOrder::LargeFirst => assert!(sizes.is_sorted_by(|a, b| a >= b)),
            // The large half falls at even places, the small half rises between.
            ItemOrder::Alternating => {
                let half = |first: usize| sizes.iter().skip(first).step_by(2);
                assert!(half(0).is_sorted_by(|a, b| a >= b) && half(1).is_sorted());
                assert!(half(0).min() >= half(1).max() || sizes.len() < 2);
            }
        }
    }

    // By tile row of the whole call, and by index of KV head 0's state: the keys taken in.
    let mut results: HashMap<u32, Vec<Range<u32>>> = HashMap::new();
    let mut states: HashMap<u32, Vec<Range<u32>>> = HashMap::new();
    let mut peak = 0;
    for slice in plan.slices() {
        let numbers = (slice.workgroups.start / kv_heads) as usize..(slice.workgroups.end / kv_heads) as usize;
        let (items, tile_rows) = match slice.kernel {
            KernelId::Prefill => (&prefill, tiles.prefill_rows()),
            KernelId::Decode => (&decode, tiles.decode_rows),
            _ => {
                peak = peak.max(states.len() as u64);
                merge[numbers].iter().for_each(|item| check_merge(batch, &plan, *item, &mut states, &mut results));
                continue;
            }
        };
        for (number, &[index, first_row, begin, end]) in (0..).zip(items).skip(numbers.start).take(numbers.len()) {
            let group_of_item = groups[&(slice.kernel, number)];
            let here = |key: u32| !grouped || batch.group_of(&plan, index, key) == group_of_item;
            let record = record(&plan, index);
            assert!(record.rows_end <= record.q_len * group);
            let row_count = record.rows_end;
            let split = (begin / record.split_keys).checked_sub(record.first_split).unwrap();
            assert!(first_row < row_count && begin <= end && split < record.splits);
            assert!(end <= begin / record.split_keys * record.split_keys + record.split_keys || end == begin);
            let rows = first_row..(first_row + tile_rows).min(row_count);
            let seen = rows.clone().map(|row| common(&batch.visible(record.q_begin + row / group), &(begin..end)));
            let seen: Vec<_> = seen.collect();
            // Not a key at the ends that no row of the tile sees, or that is of another group.
            let hull = seen.iter().filter(|keys| !keys.is_empty());
            let hull = hull.cloned().reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
            assert!(begin == end || hull == Some(begin..end), "{hull:?} of {begin}..{end}");
            assert!(begin == end || here(begin) && here(end - 1), "{begin}..{end}");
            for (row, keys) in rows.zip(seen) {
                let mut own: Vec<Range<u32>> = Vec::new();
                let mut from = keys.start;
                while from < keys.end {
                    let next = keys.end.min((from / batch.page_size.get() + 1) * batch.page_size.get());
                    if here(from) {
                        match own.last_mut() {
                            Some(last) if last.end == from => last.end = next,
                            _ => own.push(from..next),
                        }
                    }
                    from = next;
                }
                let keys = own;
                let before = if record.state_rows == 0 {
                    results.insert(record.q_begin * group + row, keys).is_some()
                } else {
                    states.insert(record.state(split, row, kv_heads), keys).is_some()
                };
                assert!(!before, "row {row} of record {index} is written twice");
            }
        }
    }
    let all_states = peak * u64::from(kv_heads);
    assert_eq!(plan.workspace_bytes(), all_states * state_bytes(&tiles));
    assert!(all_states <= batch.states_max);
    assert!(states.is_empty(), "states that nobody folds: {states:?}");
    // Every row has met each key that it sees once, in order, and no other.
    for row in 0..total_q * group {
        let mut met = results.get(&row).expect("a row without a result").clone();
        if grouped {
            met.sort_unstable_by_key(|keys| keys.start);
        }
        let visible = batch.visible(row / group);
        let end = met.iter().filter(|keys| !keys.is_empty()).fold(visible.start, |end, keys| {
            assert_eq!(keys.start, end, "row {row} meets {met:?}, and sees {visible:?}");
            keys.end
        });
        assert_eq!(end, if visible.is_empty() { visible.start } else { visible.end });
    }
    assert!(results.len() as u32 == total_q * group, "results of rows that do not exist");

    let (mut q_begin, mut page_begin, mut mask_words, mut pairs) = (0, 0, 0, 0);
    for (seq, (q_len, kv_len, pages)) in (0_u32..).zip(&batch.seqs) {
        let words = &plan.words[RECORD_WORDS * seq as usize..][..RECORD_WORDS];
        assert_eq!(words[..4], [q_begin, *q_len, *kv_len, page_begin]);
        assert_eq!(words[10..], [mask_words, pairs]);
        assert!((q_begin..q_begin + q_len).all(|row| owners == 0 || plan.words[(params.owners + row) as usize] == seq));
        let decodes = *q_len == 1 || q_len * group <= 16;
        assert_eq!(words[7], if decodes { SPLIT_KEYS } else { tiles.prefill.split_keys });
        let own = if decodes { &prefill } else { &decode };
        assert!(own.iter().all(|item| item[0] != seq), "the other kernel takes it");
        q_begin += q_len;
        page_begin += pages.len() as u32;
        mask_words += q_len * kv_len.div_ceil(32);
        pairs += q_len * kv_len;
        // A step of the bound is a part of every kernel's step, and none lies on both sides of a prefix's end.
        let chains = &plan.chains()[seq as usize];
        let around = batch.prefixes.iter().filter(|prefix| prefix.seqs.contains(&(seq as usize)));
        let step = if decodes { SPLIT_KEYS } else { tiles.prefill.step_keys };
        assert!(step.is_multiple_of(chains.step_keys));
        let seen = (0..*q_len).map(|row| batch.options().visible(*q_len, *kv_len, row)).filter(|keys| !keys.is_empty());
        let end = seen.map(|keys| keys.end).max().unwrap_or(0);
        let mut ends = around.map(|prefix| prefix.tokens).filter(|tokens| *tokens < end);
        assert!(batch.window.0.is_some() || ends.all(|tokens| tokens.is_multiple_of(chains.step_keys)));
    }
    assert_eq!(plan.score_pairs, u64::from(pairs));
    results
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_row_meets_every_visible_key_once(batch in batch(any::<bool>())) {
        check(&batch);
    }

    /// Rounds change nothing for a row, whatever a workspace may have.
    #[test]
    fn rounds_change_nothing(batch in batch(any::<bool>()), states_max in prop_oneof![0_u64..40, 40_u64..4000]) {
        let limited = Owned { states_max, ..batch.clone() };
        match limited.try_plan() {
            Ok(_) => prop_assert_eq!(check(&limited), check(&batch)),
            Err(PlanError::Workspace { needed, limit, .. }) => {
                prop_assert_eq!(limit, states_max * state_bytes(&batch.tiles()));
                prop_assert!(needed > limit && batch.plan().workspace_bytes() >= needed);
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
    }

    #[test]
    fn the_same_batch_gives_the_same_plan(batch in batch(any::<bool>())) {
        prop_assert_eq!(batch.plan(), batch.clone().plan());
    }

    /// Neighbours and their order change nothing for a sequence: the same items, splits and chains.
    #[test]
    fn a_sequence_is_planned_alike_in_every_batch(batch in batch(Just(false)), turn in 0_usize..9) {
        let mut turned = batch.clone();
        if !turned.seqs.is_empty() {
            let turn = turn % turned.seqs.len();
            turned.seqs.rotate_left(turn);
        }
        turned.seqs.reverse();
        let (plan, other) = (batch.plan(), turned.plan());
        prop_assert_eq!(plan.workspace_bytes(), other.workspace_bytes());
        let alone = |seq: &(u32, u32, Vec<u32>)| Owned { seqs: vec![seq.clone()], ..batch.clone() }.plan();
        for (batch, plan) in [(&batch, &plan), (&turned, &other)] {
            for (index, seq) in batch.seqs.iter().enumerate() {
                let alone = alone(seq);
                prop_assert_eq!(of_record(plan, index), of_record(&alone, 0));
                prop_assert_eq!(&plan.chains()[index..=index], alone.chains());
            }
        }
    }

    /// Nor do they for sequences that share prefixes, and for these.
    #[test]
    fn shared_prefixes_are_planned_alike_beside_others(batch in batch(Just(true))) {
        // Records of further groups come last.
        let batch = Owned { segments: (50, 1), ..batch };
        let (mut beside, seqs) = (batch.clone(), batch.seqs.len());
        beside.seqs.insert(0, (5, 300, vec![0; 300]));
        beside.seqs.push((70, 20, vec![1; 20]));
        for SharedPrefix { seqs, .. } in &mut beside.prefixes {
            *seqs = seqs.start + 1..seqs.end + 1;
        }
        let (plan, other) = (batch.plan(), beside.plan());
        for index in 0..seqs {
            prop_assert_eq!(of_record(&plan, index), of_record(&other, index + 1));
        }
        prop_assert_eq!(plan.chains(), &other.chains()[1..=seqs]);
        let records = |plan: &Plan, merges: u32| {
            let items = items(plan, plan.params.merge_items, merges);
            items.iter().map(|item| item[2]).min().unwrap_or(plan.params.owners) as usize / RECORD_WORDS
        };
        if !batch.prefixes.is_empty() {
            let prefixes = records(&plan, plan.params.merge_groups) - seqs;
            prop_assert_eq!(prefixes, records(&other, other.params.merge_groups) - seqs - 2);
            for index in 0..prefixes {
                prop_assert_eq!(of_record(&plan, seqs + index), of_record(&other, seqs + 2 + index));
            }
        }
    }

    /// What is found is what pages in common say, and can be declared.
    #[test]
    fn prefixes_are_found_by_their_pages(batch in batch(Just(true)), tokens_min in 0_u32..300) {
        let page = batch.page_size.get();
        let [all, long] = [0, tokens_min].map(|min| batch.with_batch(|b| b.shared_prefixes(batch.page_size, min)));
        let in_common = |i: usize| {
            let [(_, a_len, a), (_, b_len, b)] = [&batch.seqs[i], &batch.seqs[i + 1]];
            (0..*a_len.min(b_len)).take_while(|token| a[(token / page) as usize] == b[(token / page) as usize]).count()
        };
        for i in 1..batch.seqs.len() {
            let both = all.iter().filter(|prefix| prefix.seqs.contains(&(i - 1)) && prefix.seqs.contains(&i));
            prop_assert_eq!(both.map(|prefix| prefix.tokens as usize).max().unwrap_or(0), in_common(i - 1));
        }
        prop_assert!(all.iter().all(|prefix| prefix.seqs.len() > 1));
        for (index, prefix) in long.iter().enumerate() {
            prop_assert!(all.contains(prefix));
            let around = long[..index].iter().filter(|outer| outer.seqs.end >= prefix.seqs.end).map(|outer| outer.tokens);
            prop_assert!(prefix.tokens >= around.max().unwrap_or(0) + tokens_min);
        }
        for prefixes in [all, long] {
            check(&Owned { prefixes, ..batch.clone() });
        }
    }
}

/// All that a plan says of one record, but for where its rows, pages and states lie, and of which records it is merged.
fn of_record(plan: &Plan, index: usize) -> (Vec<u32>, [Vec<[u32; 3]>; 3]) {
    let record = &plan.words[RECORD_WORDS * index..][..RECORD_WORDS];
    let (page_begin, params) = (record[3] as usize, &plan.params);
    let pages = params.page_ids as usize + page_begin;
    let first_page = plan.words.get(pages).copied().filter(|_| record[2] > 0);
    let direct = u32::from(record[9] == 0);
    let numbers =
        [record[1], record[2], direct, record[5], record[6], record[7]].into_iter().chain(first_page).collect();
    let lists =
        [
            (params.prefill_items, params.prefill_groups),
            (params.decode_items, params.decode_groups),
            (params.merge_items, params.merge_groups),
        ]
        .map(|(start, groups)| {
            let own = items(plan, start, groups).into_iter().filter(|item| item[0] == index as u32);
            let mut own: Vec<_> =
                own.map(|[_, first_row, begin, end]| {
                    if start == params.merge_items { [first_row, 0, end - begin] } else { [first_row, begin, end] }
                })
                .collect();
            // The place of an item in the grid depends on the others.
            own.sort_unstable();
            own
        });
    (numbers, lists)
}

/// 16 requests share 4,096 tokens and have 64 of their own: by count, one pass over the prefix, where the rows of a KV head
/// are one tile.
#[test]
fn a_prefix_is_read_once() {
    // A real GPU, and lavapipe.
    read_once(AdapterFacts::PLAIN_GPU.with_subgroups(32));
    read_once(AdapterFacts::PLAIN_CPU.with_subgroups(8));
}

fn read_once(facts: AdapterFacts) {
    let geometry = HeadGeometry::new(8, 2, 128).unwrap();
    let table = |seq: u32| (0..256).chain(256 + 4 * seq..260 + 4 * seq).collect();
    let mut batch = Owned {
        geometry,
        facts,
        causal: true,
        window: (None, None),
        prefill_split_keys: u32::MAX,
        page_size: PageSize::new(16).unwrap(),
        page_count: 320,
        segments: (u32::MAX, 1),
        states_max: u64::MAX,
        seqs: (0..16).map(|seq| (1, 4160, table(seq))).collect(),
        prefixes: Vec::new(),
    };
    // K and V in f16.
    let token_bytes = 2 * 2 * 128 * 2;
    assert_eq!(batch.plan().kv_bytes_read(), 16 * 4160 * token_bytes);
    batch.prefixes = batch.with_batch(|batch| batch.shared_prefixes(PageSize::new(16).unwrap(), 1));
    assert_eq!(batch.prefixes, [prefix(0..16, 4096)]);
    assert_eq!(batch.plan().kv_bytes_read(), (4096 + 16 * 64) * token_bytes);
    let [(_, prefill), (_, decode), (_, merge)] = batch.plan().workgroups();
    // Splits of 512 keys and one of each request's own, times KV heads.
    assert_eq!((prefill, decode), (8 * 2, 16 * 2));
    assert!(merge > 0);
    check(&batch);
    // Whoever joins or leaves, the others' work and chains stay, as long as the same kernel takes the prefix.
    let mut fewer = batch.clone();
    fewer.seqs.truncate(5);
    fewer.prefixes = vec![prefix(0..5, 4096)];
    let (plan, other) = (batch.plan(), fewer.plan());
    for seq in 0..5 {
        assert_eq!(of_record(&plan, seq), of_record(&other, seq));
        assert_eq!(plan.chains()[seq], other.chains()[seq]);
    }
    assert_eq!(record(&plan, 16).split_keys, record(&other, 5).split_keys);
}

/// Pages that fell out of every row's window need not be there, shared or not.
#[test]
fn a_prefix_that_nobody_sees_is_not_read() {
    let mut batch = four();
    batch.window = (Some(7), None);
    for (.., pages) in &mut batch.seqs {
        pages[..2].fill(NO_PAGE);
    }
    for prefixes in [vec![prefix(0..4, 16)], vec![prefix(0..4, 16), prefix(0..2, 32)]] {
        batch.prefixes = prefixes;
        check(&batch);
        // Each row sees 8 keys, in f16.
        assert_eq!(batch.plan().kv_bytes_read(), 4 * 8 * 2 * 2 * 8 * 2);
    }
    batch.window = (Some(30), None);
    assert_eq!(batch.try_plan(), Err(PlanError::NoPage { seq: 0, entry: 1 }));
}

/// Four sequences of 40 tokens in pages of 8: all share two pages, the first two another two.
fn four() -> Owned {
    let geometry = HeadGeometry::new(4, 2, 8).unwrap();
    let table = |own: u32| [0, 1, if own < 2 { 2 } else { 4 + own }, if own < 2 { 3 } else { 10 + own }, 20 + own];
    Owned {
        geometry,
        facts: AdapterFacts::PLAIN_GPU,
        causal: true,
        window: (None, None),
        prefill_split_keys: u32::MAX,
        page_size: PageSize::new(8).unwrap(),
        page_count: 50,
        segments: (u32::MAX, 1),
        states_max: u64::MAX,
        seqs: (0..4).map(|seq| (1, 40, table(seq).to_vec())).collect(),
        prefixes: Vec::new(),
    }
}

fn prefix(seqs: Range<usize>, tokens: u32) -> SharedPrefix {
    SharedPrefix { seqs, tokens }
}

#[test]
fn prefixes_that_a_batch_has() {
    let batch = four();
    let found = |min| batch.with_batch(|batch| batch.shared_prefixes(PageSize::new(8).unwrap(), min));
    assert_eq!(found(1), [prefix(0..4, 16), prefix(0..2, 32)]);
    assert_eq!(found(16), found(1));
    assert_eq!(found(17), [prefix(0..2, 32)]);
    assert_eq!(found(33), []);
    for prefixes in [
        vec![prefix(0..1, 40)],
        vec![prefix(0..4, 3), prefix(0..4, 4), prefix(0..2, 25), prefix(1..2, 40), prefix(3..4, 17)],
        vec![prefix(1..3, 16), prefix(3..4, 40)],
    ] {
        check(&Owned { prefixes, ..batch.clone() });
    }
}

#[test]
fn prefixes_that_a_batch_has_not() {
    let batch = four();
    let refused = |prefixes: &[SharedPrefix]| match (Owned { prefixes: prefixes.to_vec(), ..batch.clone() }).try_plan()
    {
        Err(PlanError::SharedPrefix(error)) => error,
        other => panic!("{prefixes:?}: {other:?}"),
    };
    let (two, four) = (prefix(0..2, 32), prefix(0..4, 16));
    for found in [2..2, 3..5, 4..5] {
        let error = SharedPrefixError::Seqs { prefix: 1, found: found.clone(), seqs: 4 };
        assert_eq!(refused(&[four.clone(), prefix(found, 20)]), error);
    }
    for (prefixes, behind, more_than) in [
        (vec![prefix(0..4, 0)], 0, 0),
        (vec![four.clone(), prefix(1..3, 16)], 4, 16),
        // An inner one first, one across two, and one before another.
        (vec![two.clone(), four.clone()], 2, 32),
        (vec![two.clone(), prefix(1..3, 16)], 2, 32),
        (vec![prefix(2..4, 16), prefix(0..2, 16)], 4, 16),
    ] {
        let (index, SharedPrefix { seqs, tokens }) = (prefixes.len() - 1, prefixes.last().unwrap().clone());
        let error = SharedPrefixError::Nesting { prefix: index, found: seqs, tokens, behind, more_than };
        assert_eq!(refused(&prefixes), error);
    }
    let error = SharedPrefixError::Tokens { prefix: 0, seq: 2, found: 41, kv_len: 40 };
    assert_eq!(refused(&[prefix(2..3, 41)]), error);
}

/// A common prefix is inferred from equal page ids, not from how many sequences hold a page.
#[test]
fn fault_31_pages_that_others_hold_are_no_common_prefix() {
    let batch = four();
    let error = SharedPrefixError::Pages { prefix: 0, seq: 2, entry: 2, found: 6, needed: 3, first: 1 };
    let mut moved = batch.clone();
    moved.seqs[1].2[2] = 3;
    let found = moved.with_batch(|batch| batch.shared_prefixes(PageSize::new(8).unwrap(), 1));
    assert_eq!(found, [prefix(0..4, 16)]);
    moved.prefixes = vec![prefix(1..3, 17)];
    assert_eq!(moved.try_plan(), Err(error.into()));
    assert_eq!(moved.prefixes[0].tokens, 17);
    moved.prefixes[0].tokens = 16;
    check(&moved);
}

/// Ranges are noticed that a plan must not have: a word of each kind, moved out.
#[test]
fn words_out_of_range_are_noticed() {
    let mut batch = four();
    batch.seqs.push((90, 40, (30..35).collect()));
    batch.seqs.push((1, 39 * 8, (0..39).collect()));
    let shared = Owned { prefixes: vec![prefix(0..4, 16), prefix(0..2, 32)], ..batch.clone() };
    for batch in [batch, shared] {
        let plan = batch.plan();
        assert_eq!(plan.out_of_range(), None);
        let params = plan.params;
        let noticed = |what: &str, place: u32, word: u32| {
            let mut plan = plan.clone();
            assert_ne!(plan.words[place as usize], word, "{what}");
            plan.words[place as usize] = word;
            assert!(plan.out_of_range().is_some(), "{what}: nobody notices");
        };
        for (list, groups) in
            [(params.prefill_items, params.prefill_groups), (params.decode_items, params.decode_groups)]
        {
            assert!(groups > 0);
            noticed("record", list, params.owners);
            noticed("first row", list + 1, 9_999);
            noticed("key begin", list + 2, 9_999);
            noticed("key end", list + 3, 9_999);
        }
        noticed("page id", params.page_ids, 50);
        noticed("page id that is read last", params.page_ids + batch.page_ids().len() as u32 - 1, NO_PAGE);
        for (what, at, word) in [
            ("q_begin", 0, 999),
            ("q_len", 1, 999),
            ("kv_len", 2, 7),
            ("page_begin", 3, 9_999),
            ("split keys", 7, 0),
            ("rows end", 8, 9_999),
            ("rows with states", 9, 9_999),
            ("bias", 11, 99_999),
        ] {
            noticed(what, RECORD_WORDS as u32 * 5 + at, word);
        }
        let split = plan.words[RECORD_WORDS * 5 + 4];
        noticed("state", RECORD_WORDS as u32 * 5 + 4, split + 1_000);
        let mut short = plan.clone();
        short.workspace_bytes -= state_bytes(&batch.tiles());
        assert!(short.out_of_range().is_some(), "workspace: nobody notices");
        for change in [
            |plan: &mut Plan| plan.params.merge_groups += 2,
            |plan: &mut Plan| plan.params.decode_groups -= 2,
            |plan: &mut Plan| plan.params.prefill_items += 1,
            |plan: &mut Plan| plan.params.page_ids += 1_000,
            |plan: &mut Plan| plan.total_q -= 1,
        ] {
            let mut plan = plan.clone();
            change(&mut plan);
            assert!(plan.out_of_range().is_some(), "{:?}", plan.params);
        }
    }
}

/// Room for several batches is what they need together, wherever the sum begins.
#[test]
fn capacities_add_up_from_none() {
    let parts = [3, 1, 2].map(|blocks| PlanCapacity { words: 10, blocks, ..PlanCapacity::default() });
    let sum = parts.into_iter().fold(PlanCapacity::default(), PlanCapacity::and);
    assert_eq!((sum.words, sum.blocks), (30, 1 + 2 + 1));
}

/// A plan takes the softcaps that a case takes.
#[test]
fn softcaps_out_of_range() {
    let geometry = HeadGeometry::new(2, 1, 8).unwrap();
    let layout = KvLayout::new(geometry, Dtype::F16, PageSize::ONE, 1).unwrap();
    let tiles = Tiles::new(&geometry, &Variants::base(&AdapterFacts::PLAIN_GPU, &geometry));
    let batch = Batch { q_indptr: &[0, 1], page_indptr: &[0, 1], page_ids: &[0], kv_len: &[1] };
    let plan = |cap| {
        let options = AttentionOptions::new(&geometry).with_softcap(Some(cap));
        let (pool, options, extras) = (&SegmentGroups::whole(&layout), &options, &Extras::NONE);
        let setting = Setting { pool, options, extras, tiles: &tiles, workspace_max: u64::MAX };
        Plan::new(&batch, &setting, &[], None).map(|_| ())
    };
    for cap in [0.0, -1.0, 1e-37, 1e38, f64::NAN, f64::INFINITY] {
        let error = plan(cap).unwrap_err();
        assert!(matches!(error, PlanError::Softcap { .. }), "{error}");
    }
    for cap in [SOFTCAP_MIN, 30.0, SOFTCAP_MAX] {
        plan(cap).unwrap();
    }
}
