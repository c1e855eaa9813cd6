//! Closed forms against counting one by one, and the parts of memory against plans that were made.

use proptest::prelude::*;

use super::*;
use crate::attention::{AttentionConfig, Extras, Workspace};
use crate::batch::Batch;
use crate::case::AttentionOptions;
use crate::geometry::{Dtype, HeadGeometry, PageSize};
use crate::kernels::{AdapterFacts, Variants};
use crate::kv::{AppendPlan, KvLayout, SegmentGroups};
use crate::plan::{Plan, Setting};

fn page(tokens: u32) -> PageSize {
    PageSize::new(tokens).unwrap()
}

/// Equations 2 and 3 for one request after the other.
fn tails(lengths: &[u32], page_size: u32) -> u64 {
    lengths.iter().map(|tokens| u64::from(tokens.div_ceil(page_size)) * u64::from(page_size) - u64::from(*tokens)).sum()
}

#[test]
fn bytes_of_a_common_shape() {
    let bytes = |kv_heads, tokens| KvShape::new(32, kv_heads, 128, 2).unwrap().total_bytes(tokens).unwrap();
    assert_eq!(bytes(8, 1), 131_072);
    assert_eq!(bytes(8, 4096), 1 << 29);
    assert_eq!(bytes(32, 4096), 2 << 30);
}

#[test]
fn uniform_lengths_to_a_multiple_of_the_page() {
    let lengths = Lengths::uniform(1, 512).unwrap();
    let tail = lengths.tail_slots(page(16));
    assert_eq!((tail.total(), tail.count(), tail.value()), (3840, 512, 7.5));
    assert_eq!((lengths.tail_slots_bound(page(16)).value(), expected_tail_slots(page(16))), (15.0, 7.5));
    let reserved = lengths.reserved_waste(512).unwrap();
    assert_eq!((reserved.total(), reserved.value()), (130_816, 255.5));
    assert_eq!(lengths.tokens().value(), 256.5);
}

/// The worked example of docs/budget.md.
#[test]
fn six_requests() {
    let each = [7, 16, 30, 45, 100, 250];
    assert_eq!(each.map(|tokens| tails(&[tokens], 16)), [9, 0, 2, 3, 12, 6]);
    let lengths = Lengths::observed(each).unwrap();
    let totals = [
        lengths.tokens(),
        lengths.pages(page(16)),
        lengths.tail_slots(page(16)),
        lengths.tail_slots_bound(page(16)),
        lengths.reserved_waste(250).unwrap(),
        lengths.reserved_waste(512).unwrap(),
    ];
    assert_eq!(totals.map(Mean::total), [448, 30, 32, 90, 1052, 2624]);
}

#[test]
fn the_bound_is_met_by_one_token_on_a_last_page() {
    let lengths = Lengths::observed([1, 17, 33, 1]).unwrap();
    assert_eq!(lengths.tail_slots(page(16)), lengths.tail_slots_bound(page(16)));
}

/// The largest numbers do not pass 64 bits, and the closed form agrees with one in 128 bits.
#[test]
fn the_largest_lengths() {
    for (first, last) in [(1, u32::MAX), (u32::MAX, u32::MAX), (2, u32::MAX - 1)] {
        let lengths = Lengths::uniform(first, last).unwrap();
        let tokens = |last: u32| u128::from(last) * (u128::from(last) + 1) / 2;
        for page_size in [1, 2, 3, 16, 65_536, u32::MAX - 1, u32::MAX] {
            let size = u128::from(page_size);
            // Full pages of a length, and one more unless the remainder is 0.
            let pages = |last: u32| {
                let (full, rest) = (u128::from(last) / size, u128::from(last) % size);
                let full_pages = size * full * full.saturating_sub(1) / 2 + (rest + u128::from(full > 0)) * full;
                full_pages + (u128::from(last) - full)
            };
            let expected = pages(last) - pages(first - 1);
            assert_eq!(u128::from(lengths.pages(page(page_size)).total()), expected, "{first} {last} {page_size}");
            let expected = expected * size - (tokens(last) - tokens(first - 1));
            assert_eq!(u128::from(lengths.tail_slots(page(page_size)).total()), expected, "{first} {last} {page_size}");
        }
        assert_eq!(lengths.reserved_waste(u32::MAX).unwrap(), lengths.tail_slots(page(u32::MAX)));
    }
}

#[test]
fn refused_lengths() {
    let observed = |lengths: &[u32]| Lengths::observed(lengths.iter().copied());
    assert_eq!(observed(&[]), Err(BudgetError::NoLengths));
    assert_eq!(observed(&[3, 1, 0, 4, 0]), Err(BudgetError::ZeroLength { index: 2 }));
    assert_eq!(Lengths::uniform(0, 4), Err(BudgetError::Zero { name: "the shortest length" }));
    assert_eq!(Lengths::fixed(0), Err(BudgetError::Zero { name: "the shortest length" }));
    assert_eq!(Lengths::uniform(5, 4), Err(BudgetError::Range { first: 5, last: 4 }));
    let lengths = Lengths::uniform(1, 512).unwrap();
    for found in [0, 1, 511] {
        assert_eq!(lengths.reserved_waste(found), Err(BudgetError::Reserved { found, needed: 512 }));
    }
}

#[test]
fn refused_shapes() {
    let names = ["layers", "kv_heads", "head_dim", "element_bytes"];
    for (zero, name) in names.into_iter().enumerate() {
        let [layers, kv_heads, head_dim, element_bytes] = std::array::from_fn(|i| u32::from(i != zero));
        assert_eq!(KvShape::new(layers, kv_heads, head_dim, element_bytes), Err(BudgetError::Zero { name }));
    }
    let shape = KvShape::new(1 << 31, 1 << 31, 1, 1).unwrap();
    assert_eq!(shape.bytes_per_token(), 1 << 63);
    assert!(matches!(shape.total_bytes(2), Err(BudgetError::Overflow { .. })));
    assert!(matches!(KvShape::new(1 << 31, 1 << 31, 2, 1), Err(BudgetError::Overflow { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_token_has_the_product_of_its_factors(factors: [u32; 4], shift in 0_u32..24, tokens: u64) {
        let [layers, kv_heads, head_dim, element_bytes] = factors.map(|factor| (factor >> shift).max(1));
        let product = [layers, kv_heads, head_dim, element_bytes].iter().try_fold(2_u128, |product, factor| {
            product.checked_mul(u128::from(*factor))
        });
        let bytes = product.and_then(|product| u64::try_from(product).ok());
        let shape = KvShape::new(layers, kv_heads, head_dim, element_bytes);
        prop_assert_eq!(shape.as_ref().ok().map(KvShape::bytes_per_token), bytes);
        if let (Ok(shape), Some(bytes)) = (shape, bytes) {
            prop_assert_eq!(shape.total_bytes(tokens).ok(), bytes.checked_mul(tokens));
        }
    }

    #[test]
    fn closed_forms_count_what_there_is(first in 1_u32..700, more in 0_u32..700, page_size in 1_u32..900, spare in 0_u32..99) {
        let last = first + more;
        let each: Vec<u32> = (first..=last).collect();
        let reserved = last + spare;
        let pages: u64 = each.iter().map(|tokens| u64::from(tokens.div_ceil(page_size))).sum();
        let tokens: u64 = each.iter().map(|tokens| u64::from(*tokens)).sum();
        let uniform = Lengths::uniform(first, last).unwrap();
        for lengths in [uniform, Lengths::observed(each.iter().rev().copied()).unwrap()] {
            prop_assert_eq!((lengths.count(), lengths.distinct(), lengths.longest()), (each.len() as u64, each.len() as u64, last));
            prop_assert_eq!(lengths.tokens().total(), tokens);
            prop_assert_eq!(lengths.pages(page(page_size)).total(), pages);
            prop_assert_eq!(lengths.tail_slots(page(page_size)).total(), tails(&each, page_size));
            prop_assert_eq!(lengths.reserved_waste(reserved).unwrap().total(), each.len() as u64 * u64::from(reserved) - tokens);
        }
    }

    #[test]
    fn observed_lengths_and_the_bound(each in prop::collection::vec(1_u32..100, 1..60), page_size in 1_u32..130) {
        let lengths = Lengths::observed(each.iter().copied()).unwrap();
        let (tail, bound) = (lengths.tail_slots(page(page_size)), lengths.tail_slots_bound(page(page_size)));
        prop_assert_eq!(tail.total(), tails(&each, page_size));
        prop_assert_eq!(bound.total(), each.len() as u64 * u64::from(page_size - 1));
        prop_assert!(tail.total() <= bound.total());
        prop_assert_eq!(tail.of_requests(7).unwrap(), (7 * tail.total()).div_ceil(tail.count()));
    }

    /// Equation 3, exactly, where every remainder is equally frequent.
    #[test]
    fn uniform_lengths_over_whole_pages(page_size in 1_u32..300, pages in 1_u32..300, shift in 0_u32..300) {
        let lengths = Lengths::uniform(1 + shift, shift + pages * page_size).unwrap();
        prop_assert_eq!(2 * lengths.tail_slots(page(page_size)).total(), lengths.tail_slots_bound(page(page_size)).total());
        prop_assert_eq!(lengths.tail_slots(page(page_size)).value(), expected_tail_slots(page(page_size)));
    }
}

fn config(geometry: HeadGeometry, page_size: u32, facts: &AdapterFacts) -> MemoryConfig {
    MemoryConfig {
        attention: AttentionConfig {
            q: Dtype::F32,
            out: Dtype::F16,
            layout: KvLayout::new(geometry, Dtype::F16, page(page_size), 1).unwrap(),
            new_rows: Dtype::F16.into(),
            options: AttentionOptions::new(&geometry).with_causal(true),
            extras: Extras::NONE,
        },
        variants: Variants::candidates(facts, &geometry)[0],
        layers: 3,
        prefill_rows: u32::MAX,
        activation_row_bytes: 0,
        weights: 0,
        communication: 0,
        other: 0,
        headroom: 0,
    }
}

fn setting() -> MemoryConfig {
    config(HeadGeometry::new(8, 2, 64).unwrap(), 16, &AdapterFacts::PLAIN_GPU)
}

/// What a step of `(q_len, kv_len)` takes, from the plans and the layout themselves.
fn planned(config: &MemoryConfig, seqs: &[(u32, u32)]) -> Parts {
    let attention = &config.attention;
    let page_size = attention.layout.page_size();
    let ends = |length: &dyn Fn(&(u32, u32)) -> u32| {
        let ends = seqs.iter().scan(0, |sum, seq| {
            *sum += length(seq);
            Some(*sum)
        });
        std::iter::once(0).chain(ends).collect::<Vec<u32>>()
    };
    let page_indptr = ends(&|(_, kv_len)| page_size.pages_for(*kv_len));
    let page_count = page_indptr[seqs.len()];
    let batch = Batch {
        q_indptr: &ends(&|(q_len, _)| *q_len),
        page_indptr: &page_indptr,
        page_ids: &(0..page_count).collect::<Vec<_>>(),
        kv_len: &seqs.iter().map(|(_, kv_len)| *kv_len).collect::<Vec<_>>(),
    };
    let geometry = attention.layout.geometry();
    let layout = attention.layout.with_pages(page_size, page_count).unwrap();
    let tiles = attention.kernels(config.variants).tiles();
    let AttentionConfig { options, extras, .. } = &attention;
    let (pool, workspace_max) = (&SegmentGroups::whole(&layout), u64::MAX);
    let setting = Setting { pool, options, extras, tiles: &tiles, workspace_max };
    let plan = Plan::new(&batch, &setting, &[], None).unwrap();
    let append = AppendPlan::new(&layout, &batch).unwrap();
    assert_eq!(append.tokens(), batch.total_q());
    let rows = attention.buffer_bytes(batch.total_q());
    let new_rows = u64::from(batch.total_q()) * u64::from(geometry.kv_heads());
    let row_bytes = |dim| u64::from(attention.new_rows.dtype.row_words(dim)) * 4;
    let new = new_rows * (row_bytes(geometry.head_dim()) + row_bytes(geometry.v_head_dim()));
    Parts {
        activations: rows.q + rows.out + rows.lse + new + config.activation_row_bytes * u64::from(batch.total_q()),
        workspace: Workspace::buffer_bytes(plan.workspace_bytes()),
        kv: layout.bytes() * u64::from(config.layers),
        metadata: plan.device_bytes() + append.device_bytes(),
        ..Parts::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// All lengths of a trace, each once: no mean is left, every byte is that of the plan.
    #[test]
    fn steady_decode_takes_what_its_plan_takes(
        each in prop::collection::vec(1_u32..1500, 1..12),
        heads in (1_u32..4, 1_u32..20, 1_u32..257, 1_u32..257),
        page_size in 1_u32..70,
        cpu: bool,
        row_bytes in 0_u64..9999,
    ) {
        let (kv_heads, group, head_dim, v_head_dim) = heads;
        let geometry = HeadGeometry::with_v_head_dim(kv_heads * group, kv_heads, head_dim, v_head_dim).unwrap();
        let facts = if cpu { AdapterFacts::PLAIN_CPU.with_subgroups(8) } else { AdapterFacts::PLAIN_GPU };
        let config = MemoryConfig { activation_row_bytes: row_bytes, ..config(geometry, page_size, &facts) };
        let lengths = Lengths::observed(each.iter().copied()).unwrap();
        let budget = MemoryModel::new(&config, &lengths).unwrap().budget(each.len() as u64).unwrap();
        let seqs: Vec<(u32, u32)> = each.iter().map(|tokens| (1, *tokens)).collect();
        prop_assert_eq!(budget.steady_decode, planned(&config, &seqs));
    }

    /// Equal lengths: the peak is a plan, too, or those of two, since few rows at the end of a prompt decode.
    #[test]
    fn the_prefill_peak_takes_what_its_plans_take(
        tokens in 1_u32..1500, requests in 1_u64..9, rows in 1_u32..1600, page_size in 1_u32..70, cpu: bool,
    ) {
        let facts = if cpu { AdapterFacts::PLAIN_CPU.with_subgroups(8) } else { AdapterFacts::PLAIN_GPU };
        let geometry = HeadGeometry::new(9, 3, 64).unwrap();
        let config = MemoryConfig { prefill_rows: rows, ..config(geometry, page_size, &facts) };
        let model = MemoryModel::new(&config, &Lengths::fixed(tokens).unwrap()).unwrap();
        let piece = |rows: u32| {
            let mut seqs = vec![(1, tokens); requests as usize];
            seqs[0].0 = rows.min(tokens);
            planned(&config, &seqs)
        };
        // Of 3 query heads for each KV head, 5 rows decode.
        let (peak, pieces) = (model.budget(requests).unwrap().prefill_peak, piece(rows).max(&piece(rows.min(5))));
        prop_assert_eq!(Parts { metadata: 0, ..peak }, Parts { metadata: 0, ..pieces });
        // The plan of one piece beside the append of the other, which has a word for each row more.
        prop_assert!((pieces.metadata..=pieces.metadata + 4 * u64::from(rows)).contains(&peak.metadata));
    }

    /// No step on the way of requests to their last lengths takes more, whatever window there is and however long the pieces of
    /// a prompt are.
    #[test]
    fn no_step_on_the_way_takes_more(
        last in 1_u32..1500, shorter in prop::collection::vec((0_u32..1500, 1_u32..600), 1..6), rows in 1_u32..600,
        page_size in 1_u32..70, window in prop::option::of(0_u32..700), cpu: bool,
    ) {
        let facts = if cpu { AdapterFacts::PLAIN_CPU.with_subgroups(8) } else { AdapterFacts::PLAIN_GPU };
        let mut config = MemoryConfig { prefill_rows: rows, ..config(HeadGeometry::new(9, 3, 64).unwrap(), page_size, &facts) };
        config.attention.options = config.attention.options.with_window(window, None);
        let needed = MemoryModel::new(&config, &Lengths::fixed(last).unwrap()).unwrap().budget(shorter.len() as u64);
        let needed = needed.unwrap().needed();
        let mut seqs: Vec<(u32, u32)> = shorter.iter().map(|(less, _)| (1, last.saturating_sub(*less).max(1))).collect();
        let decodes = planned(&config, &seqs);
        seqs[0].0 = shorter[0].1.min(rows).min(seqs[0].1);
        for step in [decodes, planned(&config, &seqs)] {
            prop_assert_eq!(step.max(&needed), needed);
        }
    }

    #[test]
    fn as_many_requests_as_fit_and_not_one_more(
        each in prop::collection::vec(1_u32..3000, 1..12), memory in 0_u64..(1 << 27), fixed in 0_u64..(1 << 24), rows in 1_u32..3000,
    ) {
        let lengths = Lengths::observed(each.iter().copied()).unwrap();
        let config = MemoryConfig { weights: fixed, prefill_rows: rows, activation_row_bytes: 4096, ..setting() };
        let model = MemoryModel::new(&config, &lengths).unwrap();
        let needed = |requests| model.budget(requests).unwrap().needed().total();
        // One by one, as a naive user would.
        let most = (1..).take_while(|requests| needed(*requests) <= memory.into()).last().unwrap_or(0);
        prop_assert_eq!(model.requests_in(memory), most);
        // To the byte.
        let exactly = u64::try_from(needed(most + 1)).unwrap();
        prop_assert_eq!((model.requests_in(exactly), model.requests_in(exactly - 1)), (most + 1, most));
    }
}

#[test]
fn the_longest_request_always_has_its_pages() {
    let lengths = Lengths::observed([1, 1, 1, 1, 1, 1, 1, 8000]).unwrap();
    let model = MemoryModel::new(&setting(), &lengths).unwrap();
    let (one, seven) = (model.budget(1).unwrap(), model.budget(7).unwrap());
    // 507 pages for all eight: 63.4 in the mean.
    assert_eq!((one.pages, seven.pages, model.budget(9).unwrap().pages), (500, 500, 571));
    let alone = planned(&setting(), &[(1, 8000)]);
    assert_eq!(one.steady_decode, alone);
    assert!(seven.steady_decode.workspace >= alone.workspace);
    // The last rows of a prompt may be few enough to decode, with 4 query heads for each KV head.
    assert_eq!(one.prefill_peak, planned(&setting(), &[(8000, 8000)]).max(&planned(&setting(), &[(4, 8000)])));
}

#[test]
fn parts_that_the_caller_states() {
    let lengths = Lengths::fixed(100).unwrap();
    let stated = MemoryConfig { weights: 5, communication: 7, other: 11, headroom: 13, ..setting() };
    let (plain, model) =
        (MemoryModel::new(&setting(), &lengths).unwrap(), MemoryModel::new(&stated, &lengths).unwrap());
    let parts = Parts { weights: 5, communication: 7, other: 11, headroom: 13, ..plain.budget(3).unwrap().needed() };
    assert_eq!(model.budget(3).unwrap().needed(), parts);
    assert_eq!(parts.total(), plain.budget(3).unwrap().needed().total() + 36);
    let none = model.budget(0).unwrap();
    assert_eq!((none.needed().total(), none.pages), (36, 0));
    assert_eq!(model.requests_in(35), 0);
    let chunks = MemoryModel::new(&MemoryConfig { prefill_rows: 10, ..stated }, &lengths).unwrap();
    let peak = |model: &MemoryModel| model.budget(3).unwrap().prefill_peak.activations;
    let decode = model.budget(1).unwrap().steady_decode.activations;
    assert_eq!((peak(&model), peak(&chunks)), (102 * decode, 12 * decode));
}

/// Reserving is paging with one page per request.
#[test]
fn reserving_the_maximum() {
    let lengths = Lengths::uniform(1, 512).unwrap();
    let (paged, reserving) =
        (MemoryModel::new(&setting(), &lengths).unwrap(), MemoryModel::reserving(&setting(), &lengths, 512).unwrap());
    let shape = KvShape::new(3, 2, 64, 2).unwrap();
    assert_eq!(reserving.budget(10).unwrap().needed().kv, shape.total_bytes(5120).unwrap());
    // Tokens and tails: 256.5 + 7.5.
    assert_eq!(paged.budget(10).unwrap().needed().kv, shape.total_bytes(2640).unwrap());
    let error = MemoryModel::reserving(&setting(), &lengths, 511);
    assert_eq!(error, Err(BudgetError::Reserved { found: 511, needed: 512 }));
}

#[test]
fn refused_memory() {
    let lengths = Lengths::uniform(1, 512).unwrap();
    for (name, config) in [
        ("layers", MemoryConfig { layers: 0, ..setting() }),
        ("prefill_rows", MemoryConfig { prefill_rows: 0, ..setting() }),
    ] {
        assert_eq!(MemoryModel::new(&config, &lengths), Err(BudgetError::Zero { name }));
    }
    let wide = Lengths::uniform(1, (1 << 24) + 1).unwrap();
    let error = BudgetError::TooManyLengths { found: (1 << 24) + 1, limit: DISTINCT_LENGTHS_MAX };
    assert_eq!(MemoryModel::new(&setting(), &wide), Err(error));
    // Query rows and keys of the longest prompt pass 32 bits; in pieces they do not.
    let long = Lengths::fixed(1 << 31).unwrap();
    assert!(matches!(MemoryModel::new(&setting(), &long), Err(BudgetError::Plan(_))));
    let large = MemoryConfig { activation_row_bytes: u64::MAX, ..setting() };
    assert!(matches!(MemoryModel::new(&large, &lengths), Err(BudgetError::Overflow { .. })));
    let model = MemoryModel::new(&setting(), &lengths).unwrap();
    for requests in [u64::MAX, 1 << 32, 1 << 28] {
        assert!(
            matches!(
                model.budget(requests),
                Err(BudgetError::Plan(_) | BudgetError::Layout(_) | BudgetError::Overflow { .. })
            ),
            "{requests}"
        );
    }
    // No more than a call takes, whatever the memory.
    let most = model.requests_in(u64::MAX);
    assert!(model.budget(most).is_ok() && model.budget(most + 1).is_err());
}
