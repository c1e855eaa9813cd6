//! The plan against a naive count of what there is to do.

use std::collections::HashMap;

use proptest::prelude::*;

use super::{PARAMS_BYTES, Plan, RECORD_WORDS, SequenceSize, state_bytes};
use crate::batch::Batch;
use crate::case::AttentionOptions;
use crate::geometry::{Dtype, HeadGeometry, PageSize};
use crate::kernels::{AdapterFacts, ItemOrder, PrefillVariant, SPLIT_KEYS, SUBGROUP_SIZES, Tiles, Variants};
use crate::kv::KvLayout;

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
    /// `(q_len, kv_len, page ids)` of each sequence.
    seqs: Vec<(u32, u32, Vec<u32>)>,
}

impl Owned {
    fn tiles(&self) -> Tiles {
        let variants = Variants::candidates(&self.facts, &self.geometry);
        let tiles = Tiles::new(&self.geometry, &variants[0]);
        // Short enough for prompts of a test to be split.
        let split_keys = self.prefill_split_keys.min(tiles.prefill.split_keys);
        Tiles { prefill: PrefillVariant { split_keys, ..tiles.prefill }, ..tiles }
    }

    fn options(&self) -> AttentionOptions {
        AttentionOptions::new(&self.geometry).with_causal(self.causal).with_window(self.window.0, self.window.1)
    }

    fn plan(&self) -> Plan {
        let layout = KvLayout::new(self.geometry, Dtype::F16, self.page_size, self.page_count).unwrap();
        let sums = |length: fn(&(u32, u32, Vec<u32>)) -> u32| {
            let ends = self.seqs.iter().scan(0, |sum, seq| {
                *sum += length(seq);
                Some(*sum)
            });
            std::iter::once(0).chain(ends).collect::<Vec<u32>>()
        };
        let page_ids = self.seqs.iter().flat_map(|(.., pages)| pages.iter().copied()).collect::<Vec<_>>();
        let kv_len = self.seqs.iter().map(|(_, kv_len, _)| *kv_len).collect::<Vec<_>>();
        let batch = Batch {
            q_indptr: &sums(|seq| seq.0),
            page_indptr: &sums(|seq| seq.2.len() as u32),
            page_ids: &page_ids,
            kv_len: &kv_len,
        };
        Plan::new(&batch, &layout, &self.options(), &self.tiles(), None, false).unwrap()
    }
}

/// Sequences around the sizes at which something changes: rows of a tile, keys of a split, the choice of the kernel.
fn batch() -> impl Strategy<Value = Owned> {
    let q_len = prop_oneof![Just(1_u32), Just(0), 2_u32..20, 14_u32..70, 100_u32..300];
    let kv_len = prop_oneof![Just(0_u32), 1_u32..40, 250_u32..260, 500_u32..520, 0_u32..3000];
    let heads = (1_u32..5, prop_oneof![1_u32..5, 5_u32..40], 1_u32..577, 1_u32..513);
    let plain = prop_oneof![Just(AdapterFacts::PLAIN_GPU), Just(AdapterFacts::PLAIN_CPU)];
    let facts = (plain, prop::option::of(prop::sample::select(SUBGROUP_SIZES.to_vec())))
        .prop_map(|(plain, size)| size.map_or(plain, |size| plain.with_subgroups(size)));
    let lengths = prop::collection::vec((q_len, kv_len, 0_u32..3), 0..9);
    let prefill_split_keys = prop_oneof![Just(u32::MAX), Just(128), Just(1024)];
    let reach = || prop::option::of(prop_oneof![0_u32..20, 200_u32..700, Just(u32::MAX)]);
    let others = (any::<bool>(), (reach(), reach()), prefill_split_keys, 1_u32..70, any::<u32>());
    (lengths, heads, facts, others).prop_map(|(lengths, (kv_heads, group, head_dim, v_head_dim), facts, others)| {
        let (causal, window, prefill_split_keys, page_size, seed) = others;
        let geometry = HeadGeometry::with_v_head_dim(kv_heads * group, kv_heads, head_dim, v_head_dim).unwrap();
        let page_size = PageSize::new(page_size).unwrap();
        let page_count = 50;
        let mut page = seed;
        let seqs = lengths
            .into_iter()
            .map(|(q_len, kv_len, surplus)| {
                let pages = (0..page_size.pages_for(kv_len) + surplus).map(|_| {
                    // Any ids will do, shared ones included.
                    page = page.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (page >> 16) % page_count
                });
                (q_len, kv_len, pages.collect())
            })
            .collect();
        Owned { geometry, facts, causal, window, prefill_split_keys, page_size, page_count, seqs }
    })
}

/// Words `[sequence, first row, first key, key end]` of a list of `groups` workgroups.
fn items(plan: &Plan, start: u32, groups: u32) -> Vec<[u32; 4]> {
    let count = groups / plan.params.kv_heads;
    assert_eq!(groups, count * plan.params.kv_heads, "every item once per KV head");
    let words = &plan.words[start as usize..(start + 4 * count) as usize];
    words.chunks_exact(4).map(|item| item.try_into().unwrap()).collect()
}

/// What happens to each row of a plan's sequences: the key ranges that workgroups take it through, and merges.
#[derive(Default)]
struct Row {
    prefill: Vec<(u32, u32)>,
    decode: Vec<(u32, u32)>,
    merges: u32,
}

fn check(batch: &Owned) {
    let (plan, tiles, options) = (batch.plan(), batch.tiles(), batch.options());
    let (params, group) = (&plan.params, batch.geometry.group());
    let lists = [
        (items(&plan, params.prefill_items, params.prefill_groups), tiles.prefill_rows()),
        (items(&plan, params.decode_items, params.decode_groups), tiles.decode_rows),
        (items(&plan, params.merge_items, params.merge_groups), tiles.merge_rows),
    ];
    // The parts follow one another, and nothing is left over.
    let mut end = RECORD_WORDS as u32 * batch.seqs.len() as u32;
    let starts = [params.prefill_items, params.decode_items, params.merge_items, params.page_ids];
    assert_eq!(params.masks, params.page_ids);
    for (i, start) in starts.into_iter().enumerate() {
        assert_eq!(start, end);
        end += lists.get(i).map_or(0, |(items, _)| 4 * items.len() as u32);
    }
    let page_ids: Vec<u32> = batch.seqs.iter().flat_map(|(.., pages)| pages.iter().copied()).collect();
    assert_eq!(plan.words[end as usize..], page_ids);
    assert_eq!(plan.device_bytes(), PARAMS_BYTES + 4 * (plan.words.len().max(1) as u64));
    assert_eq!(plan.total_q(), batch.seqs.iter().map(|seq| seq.0).sum::<u32>());
    let sizes: Vec<u32> = lists[0].0.iter().map(|item| item[3] - item[2]).collect();
    match batch.tiles().prefill.order {
        ItemOrder::LargeFirst => assert!(sizes.is_sorted_by(|a, b| a >= b)),
        // The large half falls at even places, the small half rises between.
        ItemOrder::Alternating => {
            let half = |first: usize| sizes.iter().skip(first).step_by(2);
            assert!(half(0).is_sorted_by(|a, b| a >= b) && half(1).is_sorted());
            assert!(half(0).min() >= half(1).max() || sizes.len() < 2);
        }
    }

    let mut rows: HashMap<(u32, u32), Row> = HashMap::new();
    for (kind, (items, tile_rows)) in lists.iter().enumerate() {
        for &[seq, first_row, key_begin, key_end] in items {
            let (q_len, kv_len, _) = &batch.seqs[seq as usize];
            let row_count = q_len * group;
            assert!(first_row < row_count && key_begin <= key_end && key_end <= *kv_len);
            for row in first_row..(first_row + tile_rows).min(row_count) {
                let row = rows.entry((seq, row)).or_default();
                match kind {
                    0 => row.prefill.push((key_begin, key_end)),
                    1 => row.decode.push((key_begin, key_end)),
                    _ => row.merges += 1,
                }
            }
        }
    }

    let mut counted = SequenceSize { words: page_ids.len() as u64, states: 0 };
    let (mut q_begin, mut page_begin, mut states, mut mask_words, mut pairs) = (0, 0, 0, 0, 0);
    for (seq, (q_len, kv_len, pages)) in (0_u32..).zip(&batch.seqs) {
        let decodes = *q_len == 1 || q_len * group <= 16;
        let split_keys = if decodes { SPLIT_KEYS } else { tiles.prefill.split_keys };
        let visible = |row: u32| options.visible(*q_len, *kv_len, row / group);
        // Splits from the first to the last that holds a key which any row sees.
        let seen: Vec<_> = (0..q_len * group).map(visible).filter(|keys| !keys.is_empty()).collect();
        let begin = seen.iter().map(|keys| keys.start).min().unwrap_or(0);
        let end = seen.iter().map(|keys| keys.end).max().unwrap_or(0);
        let first_split = begin / split_keys;
        let splits = (end.div_ceil(split_keys) - first_split).max(1);
        let record = [q_begin, *q_len, *kv_len, page_begin, states, splits, first_split, mask_words, pairs];
        assert_eq!(plan.words[RECORD_WORDS * seq as usize..][..RECORD_WORDS], record);
        let size = SequenceSize::new(seq as usize, &batch.geometry, &tiles, &options, (*q_len, *kv_len)).unwrap();
        counted = SequenceSize { words: counted.words + size.words, states: counted.states + size.states };
        q_begin += q_len;
        page_begin += pages.len() as u32;
        mask_words += q_len * kv_len.div_ceil(32);
        pairs += q_len * kv_len;
        if splits > 1 {
            states += splits * q_len * group * batch.geometry.kv_heads();
        }
        assert_eq!(plan.chains()[seq as usize], tiles.chains(&batch.geometry, *q_len, *kv_len));
        for row in 0..q_len * group {
            let Row { prefill, decode, merges } = rows.remove(&(seq, row)).expect("a row that nobody works on");
            let (mut found, other) = if decodes { (decode, prefill) } else { (prefill, decode) };
            assert!(other.is_empty());
            found.sort_unstable();
            // Not a key more than any row of the tile sees, and each of them.
            let tile_rows = if decodes { tiles.decode_rows } else { tiles.prefill_rows() };
            let tile = row / tile_rows * tile_rows;
            let (first, last) = (visible(tile), visible((tile + tile_rows).min(q_len * group) - 1));
            let (begin, end) = (first.start, last.end);
            assert!(visible(row).is_empty() || (begin <= visible(row).start && visible(row).end <= end));
            // One range per split, cut from it, without gap or overlap: each visible key once.
            let expected = (first_split..first_split + splits).map(|split| {
                let whole = split * split_keys..(split * split_keys).saturating_add(split_keys);
                let keys = (begin.max(whole.start), end.min(whole.end));
                if keys.0 < keys.1 { keys } else { (whole.start, whole.start) }
            });
            assert_eq!(found, expected.collect::<Vec<_>>());
            assert_eq!(merges, u32::from(splits > 1), "merged once, and only what was split");
        }
    }
    assert!(rows.is_empty(), "work on rows that do not exist");
    assert_eq!(plan.workspace_bytes(), u64::from(states) * state_bytes(&tiles));
    assert_eq!(counted, SequenceSize { words: plan.words.len() as u64, states: states.into() });
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_row_meets_every_visible_key_once(batch in batch()) {
        check(&batch);
    }

    #[test]
    fn the_same_batch_gives_the_same_plan(batch in batch()) {
        prop_assert_eq!(batch.plan(), batch.clone().plan());
    }

    /// Neighbours and their order change nothing for a sequence: the same items, splits and chains.
    #[test]
    fn a_sequence_is_planned_alike_in_every_batch(batch in batch(), turn in 0_usize..9) {
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
                prop_assert_eq!(of_sequence(plan, index), of_sequence(&alone(seq), 0));
            }
        }
    }
}

/// All that a plan says of one sequence, but for where its rows, pages and states lie.
fn of_sequence(plan: &Plan, index: usize) -> (Vec<u32>, [Vec<[u32; 3]>; 3], crate::Chains) {
    let record = &plan.words[RECORD_WORDS * index..][..RECORD_WORDS];
    let (page_begin, params) = (record[3] as usize, &plan.params);
    let pages = params.page_ids as usize + page_begin;
    let first_page = plan.words.get(pages).copied().filter(|_| record[2] > 0);
    let numbers = [record[1], record[2], record[5], record[6]].into_iter().chain(first_page).collect();
    let lists = [
        (params.prefill_items, params.prefill_groups),
        (params.decode_items, params.decode_groups),
        (params.merge_items, params.merge_groups),
    ]
    .map(|(start, groups)| {
        let own = items(plan, start, groups).into_iter().filter(|item| item[0] == index as u32);
        let mut own: Vec<_> = own.map(|[_, first_row, key_begin, key_end]| [first_row, key_begin, key_end]).collect();
        // The place of an item in the grid depends on the others.
        own.sort_unstable();
        own
    });
    (numbers, lists, plan.chains()[index])
}
