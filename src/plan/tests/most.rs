//! What steps may need at most, against plans of steps.

use super::super::{PlanCapacity, Setting, StepMax};
use super::*;
use crate::attention::Bias;

/// The fields of a capacity that do not depend on how a plan was cut.
fn fields(capacity: &PlanCapacity) -> [(&'static str, u64); 4] {
    let PlanCapacity { words, total_q, score_pairs, workspace_bytes, .. } = *capacity;
    [
        ("words", words),
        ("query rows", total_q.into()),
        ("pairs of query row and key", score_pairs),
        ("bytes of partial states", workspace_bytes),
    ]
}

/// A mask with as many stretches as there may be: keys that all rows see, and keys that only some see, in turn.
fn stretches(batch: &Batch<'_>) -> Vec<bool> {
    let lengths = batch.q_indptr.windows(2).map(|ends| ends[1] - ends[0]).zip(batch.kv_len);
    lengths
        .flat_map(|(q_len, kv_len)| (0..q_len).flat_map(move |row| (0..*kv_len).map(move |key| (row, key))))
        .map(|(row, key)| key / 32 % 2 == 0 || (row + key) % 3 == 0)
        .collect()
}

impl Owned {
    /// The smallest maxima that the batch stays within.
    fn maxima(&self) -> StepMax {
        // What the tables have room for, where that is more.
        let tokens = |seq: &(u32, u32, Vec<u32>)| seq.1.max(seq.2.len() as u32 * self.page_size.get());
        let depth = |seq| self.prefixes.iter().filter(|prefix| prefix.seqs.contains(&seq)).count() as u32;
        StepMax {
            sequences: self.seqs.len() as u32,
            q_len: self.seqs.iter().map(|seq| seq.0).max().unwrap_or(0),
            total_q: self.seqs.iter().map(|seq| seq.0).sum(),
            kv_len: self.seqs.iter().map(tokens).max().unwrap_or(0),
            total_kv: self.seqs.iter().map(|seq| u64::from(tokens(seq))).sum(),
            prefixes: self.prefixes.len() as u32,
            prefix_depth: (0..self.seqs.len()).map(depth).max().unwrap_or(0),
        }
    }

    /// What a plan needs, and what the maxima say.
    fn needed_and_most(&self, tiles: &Tiles, extras: &Extras, max: &StepMax) -> [PlanCapacity; 2] {
        let layout = KvLayout::new(self.geometry, Dtype::F16, self.page_size, self.page_count).unwrap();
        let (options, pool) = (&self.options(), &self.pool(&layout));
        let setting = |workspace_max| Setting { pool, options, extras, tiles, workspace_max };
        self.with_batch(|batch| {
            let mask = extras.mask.then(|| stretches(batch));
            // In rounds as small as the batch can be done in, from the limit on.
            let mut limit = self.states_max.saturating_mul(state_bytes(tiles));
            loop {
                let setting = setting(limit);
                match Plan::new(batch, &setting, &self.prefixes, mask.as_deref()) {
                    Ok(plan) => return [plan.capacity(), max.capacity(&setting)],
                    Err(PlanError::Workspace { needed, limit: found, .. }) if needed > found => limit = needed,
                    Err(error) => panic!("{error}"),
                }
            }
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Of every batch, for the tiles of every variant, with windows, masks and shared prefixes: where the maxima are its own,
    /// where they are a little larger, and where some are not stated.
    #[test]
    fn no_plan_needs_more_than_the_maxima_say(
        batch in batch(any::<bool>()), variant in 0_usize..100, split_keys in prop::sample::select(vec![u32::MAX, 40, 128, 1024]),
        masked: bool, bias: bool, more in 0_u32..40, unstated in 0_u32..32,
        states_max in prop_oneof![2 => Just(u64::MAX), 1 => 1_u64..40, 1 => 40_u64..4000],
    ) {
        let batch = Owned { states_max, ..batch };
        let all = Variants::all(&batch.geometry);
        let tiles = Tiles::new(&batch.geometry, &all[variant % all.len()]);
        let tiles = Tiles { prefill: PrefillVariant { split_keys, ..tiles.prefill }, ..tiles };
        let pairs: u64 = batch.seqs.iter().map(|seq| u64::from(seq.0) * u64::from(seq.1)).sum();
        let extras = Extras {
            mask: masked && pairs < 300_000,
            bias: bias.then_some(Bias { dtype: Dtype::F32, per_head: false }),
            shared_prefixes: !batch.prefixes.is_empty() || more % 2 == 0,
            ..Extras::NONE
        };
        let own = batch.maxima();
        let larger = StepMax {
            sequences: own.sequences + more % 3,
            q_len: own.q_len + more,
            total_q: own.total_q + 2 * more,
            kv_len: own.kv_len + 100 * more,
            total_kv: own.total_kv + 300 * u64::from(more),
            prefixes: own.prefixes + more % 2,
            prefix_depth: own.prefix_depth,
        };
        let (stated, none) = (|bit: u32| unstated >> bit & 1 == 0, StepMax::default());
        let some = StepMax {
            sequences: if stated(0) { own.sequences } else { none.sequences },
            q_len: if stated(1) { own.q_len } else { none.q_len },
            total_q: if stated(2) { own.total_q } else { none.total_q },
            kv_len: if stated(3) { own.kv_len } else { none.kv_len },
            total_kv: if stated(4) { own.total_kv } else { none.total_kv },
            ..StepMax { prefix_depth: none.prefix_depth, ..own }
        };
        let mut before = None;
        for max in [own, larger, some] {
            let [needed, most] = batch.needed_and_most(&tiles, &extras, &max);
            prop_assert!(needed.blocks <= most.blocks, "{} blocks, at most {}", needed.blocks, most.blocks);
            let whole = batch.segments.0 >= batch.page_count && most.workspace_bytes < state_bytes(&tiles).saturating_mul(states_max);
            prop_assert!(!whole || most.blocks == 1, "{} blocks", most.blocks);
            for ((what, needed), (_, most)) in fields(&needed).into_iter().zip(fields(&most)) {
                prop_assert!(needed <= most, "{} {what}, at most {} by {max:?}", needed, most);
            }
            // Larger maxima never make room smaller.
            let own = *before.get_or_insert(most);
            prop_assert_eq!(own.or(most), most);
        }
    }
}

/// Steps that applications take: what is said of them, and by how much the bound may pass the largest need that was found.
#[test]
fn the_maxima_are_near_what_steps_need() {
    let gpu = AdapterFacts::PLAIN_GPU.with_subgroups(32);
    let cpu = AdapterFacts::PLAIN_CPU.with_subgroups(8);
    let none = StepMax::default();
    let masked = Extras { mask: true, ..Extras::NONE };
    let shared = Extras { shared_prefixes: true, ..Extras::NONE };
    let server = StepMax { sequences: 64, q_len: 512, total_q: 575, kv_len: 32_768, ..none };
    let desktop = StepMax { sequences: 1, q_len: 4096, kv_len: 8192, ..none };
    for (name, facts, heads, window, extras, max) in [
        ("server", gpu, (32, 8, 128), None, Extras::NONE, server),
        ("server and its pool", gpu, (32, 8, 128), None, Extras::NONE, StepMax { total_kv: 400_000, ..server }),
        ("server with windows", gpu, (32, 8, 128), Some(4095), Extras::NONE, server),
        ("decodes alone", gpu, (32, 8, 128), None, Extras::NONE, StepMax { q_len: 1, total_q: 64, ..server }),
        (
            "whole prompts",
            gpu,
            (16, 16, 64),
            None,
            Extras::NONE,
            StepMax { q_len: 8192, total_q: 8192, kv_len: 8192, ..server },
        ),
        (
            "long context",
            gpu,
            (32, 8, 128),
            None,
            Extras::NONE,
            StepMax { kv_len: 131_072, total_kv: 1 << 20, ..server },
        ),
        ("desktop", cpu, (9, 3, 64), None, Extras::NONE, desktop),
        ("one head of keys", cpu, (32, 1, 128), None, Extras::NONE, desktop),
        (
            "tree of guesses",
            gpu,
            (32, 8, 128),
            None,
            masked,
            StepMax { q_len: 16, total_q: 1024, kv_len: 4096, ..server },
        ),
        ("masked prompt", cpu, (9, 3, 64), None, masked, StepMax { q_len: 512, kv_len: 2048, ..desktop }),
        ("system prompt", gpu, (32, 8, 128), None, shared, StepMax { kv_len: 4096, prefixes: 1, ..server }),
    ] {
        let geometry = HeadGeometry::new(heads.0, heads.1, heads.2).unwrap();
        let tiles = Tiles::new(&geometry, &Variants::candidates(&facts, &geometry)[0]);
        let page_size = PageSize::new(16).unwrap();
        let mut largest = PlanCapacity::default();
        let mut most = largest;
        let decode = (16 / geometry.group()).max(1);
        // As many of the longest sequences as fit, with rows of one kind; then short ones with what rows are left.
        for q_len in [1, decode, decode + 1, tiles.prefill_rows() / geometry.group(), max.q_len] {
            for prefill in [0, max.q_len] {
                let (mut rows, mut tokens) = (max.total_q.min(max.q_len.saturating_mul(max.sequences)), max.total_kv);
                let mut seqs = Vec::new();
                for index in 0..max.sequences {
                    let q_len = if index == 0 && prefill > 0 { prefill } else { q_len };
                    let q_len = q_len.min(max.q_len).min(rows);
                    let kv_len = tokens.min(max.kv_len.into()) as u32;
                    (rows, tokens) = (rows - q_len, tokens - u64::from(kv_len));
                    // All share pages; what is counted does not depend on their ids.
                    seqs.push((q_len, kv_len, vec![0; page_size.pages_for(kv_len) as usize]));
                }
                let mut batch = Owned {
                    geometry,
                    facts,
                    causal: true,
                    window: (window, None),
                    prefill_split_keys: u32::MAX,
                    page_size,
                    page_count: 1,
                    seqs,
                    prefixes: Vec::new(),
                    segments: (u32::MAX, 1),
                    states_max: u64::MAX,
                };
                // A prefix has much of each sequence, or little.
                for tokens in if max.prefixes > 0 { vec![max.kv_len, 16] } else { vec![0] } {
                    batch.prefixes = if tokens > 0 { vec![prefix(0..batch.seqs.len(), tokens)] } else { Vec::new() };
                    let [needed, bound] = batch.needed_and_most(&tiles, &extras, &max);
                    (largest, most) = (largest.or(needed), bound);
                }
            }
        }
        let ratios = fields(&largest).into_iter().zip(fields(&most)).map(|((what, largest), (_, most))| {
            (what, if most == largest { 1.0 } else { most as f64 / largest as f64 })
        });
        let ratios: Vec<_> = ratios.collect();
        for (what, ratio) in ratios {
            assert!((1.0..=2.0).contains(&ratio), "{name}: {what}: {ratio}");
        }
    }
}

/// Maxima that are not stated, and no room for partial states: numbers without end, and none that wraps.
#[test]
fn maxima_without_end() {
    let geometry = HeadGeometry::new(32, 8, 128).unwrap();
    let tiles = Tiles::new(&geometry, &Variants::candidates(&AdapterFacts::PLAIN_GPU, &geometry)[0]);
    let layout = KvLayout::new(geometry, Dtype::F16, PageSize::new(16).unwrap(), 100).unwrap();
    let layout = layout.with_segment_pages(NonZeroU32::new(5).unwrap());
    let options = &AttentionOptions::new(&geometry);
    for (pool, prefixes) in [
        (SegmentGroups::whole(&layout), 0),
        (SegmentGroups::whole(&layout), 4_000_000),
        (SegmentGroups::new(&layout, NonZeroU32::MIN), 0),
    ] {
        let extras = &Extras { shared_prefixes: prefixes > 0, ..Extras::NONE };
        for states in [0, 1, 2, 100_000] {
            let workspace_max = states * state_bytes(&tiles);
            let setting = Setting { pool: &pool, options, extras, tiles: &tiles, workspace_max };
            let PlanCapacity { blocks, words, .. } = StepMax { prefixes, ..StepMax::default() }.capacity(&setting);
            assert!(blocks > 1 << 30 && words > 1 << 60, "{blocks} blocks, {words} words");
        }
    }
}
