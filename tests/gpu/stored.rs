//! Keys and values that pages hold in another form than they came in: rotated, rounded, quantised.

use paged_attention::{
    AttentionOptions, Case, CaseExtras, Dtype, HeadGeometry, KvDtype, KvDtypes, KvSource, Pairing, Rotary, RowOrder,
    RunOptions, Tensor,
};
use paged_attention_cases::{CaseSpec, Heads, PageOrder, Pool, Sequence, Values, assemble, build, generate};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::common::{Tally, bits, gpu, plain_options, rows_of, run_options};

/// Prompts, a short chunk, decodes of one split and of several.
const MIXED: [(u32, u32); 7] = [(40, 70), (1, 600), (33, 33), (3, 90), (1, 1), (1, 45), (0, 20)];

const INT8: KvDtypes = KvDtypes { k: KvDtype::Int8, v: KvDtype::Int8 };
const FP8: KvDtypes = KvDtypes { k: KvDtype::Fp8, v: KvDtype::Fp8 };

/// Types that differ, and the type that new rows have.
const PAIRS: [(KvDtypes, Dtype); 6] = [
    (INT8, Dtype::F32),
    (FP8, Dtype::F16),
    (KvDtypes { k: KvDtype::Int8, v: KvDtype::F16 }, Dtype::F16),
    (KvDtypes { k: KvDtype::Bf16, v: KvDtype::Int8 }, Dtype::F32),
    (KvDtypes { k: KvDtype::Fp8, v: KvDtype::Int8 }, Dtype::Bf16),
    (KvDtypes { k: KvDtype::F16, v: KvDtype::F32 }, Dtype::Bf16),
];

#[test]
fn every_type_in_every_variant() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("stored");
    // Every pair of types, and rows that end inside a word.
    let ragged = Heads::new(3, 3, 21).with_v(59);
    let whole = PAIRS.map(|pair| (Heads::new(4, 2, 64), pair));
    for (heads, (kv, new)) in whole.into_iter().chain([(ragged, PAIRS[0]), (ragged, PAIRS[1])]) {
        for values in [Values::Normal, Values::OutlierChannels] {
            let spec = CaseSpec::new(format!("stored/{kv}"), heads, MIXED)
                .dtypes(Dtype::F32, new)
                .causal(true)
                .values(values)
                .seed(71);
            for (spec, order) in [
                (spec.clone().contiguous(Pool::new(16)), RowOrder::HeadSlot),
                (spec.clone().paged(Pool::new(5)), RowOrder::SlotHead),
            ] {
                let options = RunOptions { kv: Some(kv), order, ..run_options(&spec) };
                tally.check_every_variant(gpu, format!("{spec}, {order:?}"), &build(&spec).unwrap(), &options);
            }
        }
    }
    tally.finish();
}

/// Soft cap, window, slopes, sinks, mask and bias together: scales come before all of them, and those of heads lie with
/// the slopes and sinks.
#[test]
fn with_every_other_option() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("stored-options");
    let spec = CaseSpec::new("stored/options", Heads::new(4, 2, 24), MIXED).causal(true).contiguous(Pool::new(7));
    let plain = build(&spec).unwrap();
    let pairs = *plain.score_indptr().last().unwrap() as usize;
    let rng = &mut StdRng::seed_from_u64(72);
    let mut extras = CaseExtras::default();
    extras.alibi_slopes = Some(vec![0.5, 0.25, 0.125, 0.0625]);
    extras.sinks = Some(vec![1.0, -3.0, 8.0, 0.0]);
    extras.mask = Some((0..pairs).map(|_| rng.random_bool(0.8)).collect());
    let bias: Vec<f32> = (0..pairs).map(|_| rng.random_range(-1.0..1.0)).collect();
    extras.bias = Some(Tensor::from_f32(Dtype::F32, &[1, pairs], &bias).unwrap());
    let options = AttentionOptions::new(plain.geometry());
    let options = options.with_causal(true).with_softcap(Some(4.0)).with_window(Some(90), None);
    let (q, q_indptr, kv) = (plain.q().clone(), plain.q_indptr().to_vec(), plain.kv().clone());
    let case = Case::new(*plain.geometry(), options, q, q_indptr, kv).unwrap().with_extras(extras).unwrap();
    for kv in [INT8, FP8] {
        tally.check_every_variant(gpu, kv, &case, &RunOptions { kv: Some(kv), ..run_options(&spec) });
    }
    tally.finish();
}

/// Values that are part of the keys have the keys' scales.
#[test]
fn latent_values() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("stored-latent");
    let spec = CaseSpec::new("stored/latent", Heads::new(3, 1, 40), [(20, 40), (1, 300)])
        .causal(true)
        .contiguous(Pool::new(16));
    let plain = build(&spec).unwrap();
    let KvSource::Contiguous { k, kv_indptr, .. } = plain.kv().clone() else { panic!("contiguous") };
    let kv = KvSource::Contiguous { v: k.first_of_rows(24), k, kv_indptr };
    let latent = HeadGeometry::latent(3, 40, 24).unwrap();
    let case = Case::new(latent, *plain.options(), plain.q().clone(), plain.q_indptr().to_vec(), kv).unwrap();
    // As models do it: the elements that are no value are rotated.
    let rotary = Rotary::new(Pairing::Interleaved, 16, 10_000.0).unwrap().from_element(24);
    for (kv, rotary) in [(INT8, None), (FP8, None), (INT8, Some(rotary.clone())), (KvDtype::F16.into(), Some(rotary))] {
        let what = format!("{kv}, rotary {}", rotary.is_some());
        tally.check_every_variant(gpu, &what, &case, &RunOptions { kv: Some(kv), rotary, ..run_options(&spec) });
    }
    tally.finish();
}

/// Both pairings, some or all elements, scaled frequencies; into every type.
#[test]
fn rotated_keys() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("stored-rotated");
    let spec = CaseSpec::new("stored/rotated", Heads::new(4, 2, 24), MIXED).causal(true).contiguous(Pool::new(16));
    let case = build(&spec).unwrap();
    for pairing in [Pairing::Interleaved, Pairing::HalfSplit] {
        let whole = Rotary::new(pairing, 24, 10_000.0).unwrap();
        let factors: Vec<f64> = (1..=5).map(f64::from).collect();
        let part = Rotary::new(pairing, 10, 500_000.0).unwrap().from_element(7);
        let part = part.with_linear_scaling(4.0).unwrap().with_frequency_factors(&factors).unwrap();
        let part = part.with_magnitude(1.25).unwrap();
        for (rotary, kv) in [
            (&whole, KvDtype::F32.into()),
            (&whole, INT8),
            (&part, KvDtype::F16.into()),
            (&part, FP8),
            (&part, KvDtypes { k: KvDtype::Bf16, v: KvDtype::F32 }),
        ] {
            let what = format!("{kv}, {:?}", rotary.shape());
            let options = RunOptions { kv: Some(kv), rotary: Some(rotary.clone()), ..run_options(&spec) };
            tally.check_every_variant(gpu, &what, &case, &options);
        }
    }
    tally.finish();
}

/// Rows of zeros, rows below the smallest scale, huge ones, rows with one large element, and all of them on one page.
#[test]
fn rows_of_any_size() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("stored-sizes");
    let heads = Heads::new(2, 2, 24);
    let spec = CaseSpec::new("stored/sizes", heads, [(20, 60), (1, 300)]).causal(true).scale(1e-3).seed(73);
    let sizes = [0.0, 1e-38, 1e-33, 1e-29, 1e-6, 1.0, 300.0, 1e4];
    let sequences: Vec<Sequence> = generate(&spec)
        .unwrap()
        .into_iter()
        .map(|mut sequence| {
            for rows in [&mut sequence.k, &mut sequence.v] {
                for (index, row) in rows.chunks_exact_mut(24).enumerate() {
                    row.iter_mut().for_each(|x| *x *= sizes[index % sizes.len()]);
                    if index % 5 == 0 {
                        row[index % 24] *= 100.0;
                    }
                }
            }
            sequence
        })
        .collect();
    let case = assemble(&spec, &sequences).unwrap();
    // 1e4 * 100 is past f16.
    for kv in [INT8, FP8, KvDtype::Bf16.into()] {
        tally.check_every_variant(gpu, kv, &case, &RunOptions { kv: Some(kv), ..plain_options(16) });
    }
    tally.finish();
}

/// Page size, places, order and neighbours change no bit, with scales in the pages as without; nor does what lies in slots
/// that nobody owns, which is NaN before each run, scales included.
#[test]
fn the_same_bits_wherever_rows_lie() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("stored-bits");
    for kv in [INT8, FP8] {
        let spec = CaseSpec::new("stored/bits", Heads::new(4, 2, 24), MIXED).causal(true).seed(74);
        let first = spec.clone().contiguous(Pool::new(16).times(1).order(PageOrder::InOrder));
        let case = build(&first).unwrap();
        for variants in gpu.every_variant(case.geometry()) {
            let options = |spec: &CaseSpec, order| RunOptions {
                kv: Some(kv),
                order,
                variants: Some(variants),
                ..run_options(spec)
            };
            let what = format!("{kv}, {variants}");
            let Some(expected) = tally.check_case(gpu, &what, &case, &options(&first, RowOrder::HeadSlot)) else {
                continue;
            };
            let mut same = |what: String, other: &CaseSpec, order| {
                let other_case = build(other).unwrap();
                match gpu.run(&other_case, &options(other, order)) {
                    Ok(output) => tally.same(what, &other_case, crate::common::difference(&output, &expected)),
                    Err(why) => tally.fail(what, None, why),
                }
            };
            for pool in [Pool::new(16).times(3), Pool::new(1), Pool::new(7).order(PageOrder::Reversed), Pool::new(100)]
            {
                for order in [RowOrder::HeadSlot, RowOrder::SlotHead] {
                    same(format!("{what}, {pool:?}, {order:?}"), &spec.clone().contiguous(pool), order);
                    same(format!("{what}, {pool:?}, {order:?}, paged"), &spec.clone().paged(pool), order);
                }
            }
            // Each sequence alone. Scales of heads are made from all sequences, so that these would change.
            if kv == INT8 {
                for (seq, length) in MIXED.into_iter().enumerate() {
                    let alone = generate(&spec).unwrap().swap_remove(seq);
                    let spec = CaseSpec::new("alone", spec.heads, [length]).causal(true);
                    let alone = assemble(&spec, &[alone]).unwrap();
                    let output = gpu.run(&alone, &options(&spec, RowOrder::HeadSlot)).unwrap();
                    let rows = rows_of(&case, &expected, seq, 0, length.0);
                    tally.same(format!("{what}, sequence {seq}"), &alone, bits("out", &output.out, &rows.out));
                    tally.same(format!("{what}, sequence {seq}"), &alone, bits("lse", &output.lse, &rows.lse));
                }
            }
        }
    }
    tally.finish();
}

/// Shapes, pools, types and values at random.
#[test]
fn at_random() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("stored-random");
    let seed = match std::env::var("PAGED_ATTENTION_SEED") {
        Ok(digits) => u64::from_str_radix(&digits[..16], 16).expect("PAGED_ATTENTION_SEED is not hexadecimal"),
        Err(_) => rand::random(),
    };
    crate::common::say(&format!("stored: PAGED_ATTENTION_SEED={seed:016x}"));
    let rng = &mut StdRng::seed_from_u64(seed);
    for round in 0..60 {
        // The pipelines of the test above.
        let (kv, new) = PAIRS[rng.random_range(0..PAIRS.len())];
        let lengths: Vec<(u32, u32)> = (0..rng.random_range(0..5))
            .map(|_| {
                let q_len = if rng.random_bool(0.4) { 1 } else { rng.random_range(0..60) };
                let kv_max = if rng.random_bool(0.2) { 700 } else { 80 };
                (q_len, rng.random_range(0..kv_max))
            })
            .collect();
        let values = [
            Values::Normal,
            Values::Peaky,
            Values::OutlierChannels,
            Values::Offset,
            Values::LoudFuture,
            Values::Spread { score: 30.0 },
        ];
        let pool = Pool::new(rng.random_range(1..40)).surplus(rng.random_range(0..3));
        let spec = CaseSpec::new(format!("stored/random-{round}"), Heads::new(4, 2, 64), lengths)
            .dtypes(Dtype::F32, new)
            .causal(rng.random())
            .values(values[rng.random_range(0..values.len())])
            .seed(rng.random_range(0..1000));
        let spec = if rng.random() { spec.contiguous(pool) } else { spec.paged(pool) };
        let case = build(&spec).unwrap();
        let order = if rng.random() { RowOrder::HeadSlot } else { RowOrder::SlotHead };
        let all = gpu.every_variant(case.geometry());
        let variants = Some(all[rng.random_range(0..all.len())]);
        let options = RunOptions { kv: Some(kv), order, variants, ..run_options(&spec) };
        tally.check_case(gpu, format!("{spec}, {options:?}"), &case, &options);
    }
    tally.finish();
}
