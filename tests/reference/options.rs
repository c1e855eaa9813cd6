//! Window, soft cap, ALiBi, sinks, masks and bias: by hand, against the recurrence, and the bound with all of them.

use std::ops::Range;

use paged_attention_cases::{
    Alibi, Bias, BiasValues, CaseSpec, Heads, Mask, Modifiers, Pool, Sinks, Values, build, crossed, crossed_kernels,
};

use super::*;
use paged_attention::NO_PAGE;

/// One head of dimension 1: `q` and `k` are their scores' factors.
fn tiny(options: AttentionOptions, extras: CaseExtras, q: &[f32], k: &[f32], v: &[f32]) -> Case {
    let heads = HeadGeometry::new(1, 1, 1).unwrap();
    single(heads, options, q, k, v).unwrap().with_extras(extras).unwrap()
}

fn plain() -> AttentionOptions {
    AttentionOptions::new(&HeadGeometry::new(1, 1, 1).unwrap())
}

fn extras(change: impl FnOnce(&mut CaseExtras)) -> CaseExtras {
    let mut extras = CaseExtras::default();
    change(&mut extras);
    extras
}

// ---- By hand.

#[test]
fn windows_are_around_the_rows_own_position() {
    // Three rows at positions 2, 3, 4 of five keys; a mean of powers of two says which were seen.
    let means = |options: AttentionOptions| {
        dense(&tiny(options, CaseExtras::default(), &[0.0; 3], &[0.0; 5], &[1.0, 2.0, 4.0, 8.0, 16.0])).out
    };
    let window = |left, right| plain().with_window(left, right);
    close(&means(window(Some(1), None)), &[7.5, 28.0 / 3.0, 12.0], 1e-15);
    close(&means(window(Some(1), Some(0))), &[3.0, 6.0, 12.0], 0.0);
    close(&means(window(None, Some(1))), &[3.75, 6.2, 6.2], 1e-15);
    close(&means(window(Some(0), Some(0))), &[4.0, 8.0, 16.0], 0.0);
    // The causal mask and the window both hold.
    close(&means(window(Some(1), Some(3)).with_causal(true)), &[3.0, 6.0, 12.0], 0.0);
    close(&means(window(Some(u32::MAX), Some(u32::MAX))), &means(plain()), 0.0);
    // Four rows at positions -2 .. 1 of two keys.
    let case = tiny(window(Some(0), Some(1)), CaseExtras::default(), &[0.0; 4], &[0.0; 2], &[1.0, 3.0]);
    for result in [dense(&case), online(&case, NonZeroUsize::MIN)] {
        close(&result.out, &[0.0, 1.0, 2.0, 3.0], 0.0);
        close(&result.lse, &[f64::NEG_INFINITY, 0.0, 2.0_f64.ln(), 0.0], 0.0);
    }
}

#[test]
fn visible_keys_are_a_range() {
    let sides = [None, Some(0), Some(1), Some(2), Some(4), Some(9), Some(u32::MAX)];
    for (q_len, kv_len) in (1..7_u32).flat_map(|q_len| (0..7_u32).map(move |kv_len| (q_len, kv_len))) {
        for (left, right, causal) in
            sides.iter().flat_map(|l| sides.iter().flat_map(move |r| [(*l, *r, false), (*l, *r, true)]))
        {
            let options = plain().with_window(left, right).with_causal(causal);
            for row in 0..q_len {
                let position = i64::from(kv_len) - i64::from(q_len) + i64::from(row);
                let sees = |key: &u32| {
                    let key = i64::from(*key);
                    (!causal || key <= position)
                        && left.is_none_or(|left| key >= position - i64::from(left))
                        && right.is_none_or(|right| key <= position + i64::from(right))
                };
                let Range { start, end } = options.visible(q_len, kv_len, row);
                assert!(start <= end && end <= kv_len);
                let expected: Vec<u32> = (0..kv_len).filter(sees).collect();
                assert_eq!((start..end).collect::<Vec<_>>(), expected, "{options:?}, {q_len} on {kv_len}, row {row}");
            }
        }
    }
    // Nothing wraps at the ends of 32 bits.
    let options = plain().with_window(Some(u32::MAX), Some(u32::MAX));
    assert_eq!(options.visible(1, u32::MAX, 0), 0..u32::MAX);
    assert_eq!(options.visible(u32::MAX, 1, 0), 0..1);
    assert_eq!(plain().with_window(Some(1), Some(u32::MAX)).visible(1, u32::MAX, 0), u32::MAX - 2..u32::MAX);
}

#[test]
fn scores_by_hand() {
    // Scores 3, -1 and 0.5, with a cap of 2.
    let (scores, values) = ([3.0_f32, -1.0, 0.5], [1.0_f32, 10.0, -4.0]);
    let expected = |scores: [f64; 3]| {
        let weights = scores.map(f64::exp);
        let total: f64 = weights.iter().sum();
        let out: f64 = weights.iter().zip(values).map(|(weight, v)| weight * f64::from(v)).sum();
        (out / total, total.ln())
    };
    let check = |options: AttentionOptions, change: fn(&mut CaseExtras), scores_expected: [f64; 3]| {
        let case = tiny(options, extras(change), &[1.0], &scores, &values);
        let (out, lse) = expected(scores_expected);
        for result in [dense(&case), online(&case, NonZeroUsize::new(2).unwrap())] {
            close(&result.out, &[out], 1e-14);
            close(&result.lse, &[lse], 1e-15);
        }
    };
    let cap = |s: f64| 2.0 * (s / 2.0).tanh();
    let none = |_: &mut CaseExtras| {};
    check(plain().with_softcap(Some(2.0)), none, [cap(3.0), cap(-1.0), cap(0.5)]);
    // The scale comes before the cap.
    check(plain().with_softcap(Some(2.0)).with_scale(-0.5), none, [cap(-1.5), cap(0.5), cap(-0.25)]);
    // The row is at position 2.
    check(plain(), |e| e.alibi_slopes = Some(vec![0.25]), [3.0 - 0.5, -1.0 - 0.25, 0.5]);
    let bias = |e: &mut CaseExtras| e.bias = Some(tensor(&[1, 3], &[0.5, 4.0, -1.0]));
    check(plain(), bias, [3.5, 3.0, -0.5]);
    // ALiBi and bias come after the cap.
    check(
        plain().with_softcap(Some(2.0)),
        |e| {
            e.alibi_slopes = Some(vec![-1.0]);
            e.bias = Some(Tensor::from_f32(Dtype::F16, &[1, 3], &[0.5, 4.0, -1.0]).unwrap());
        },
        [cap(3.0) + 2.0 + 0.5, cap(-1.0) + 1.0 + 4.0, cap(0.5) - 1.0],
    );
}

#[test]
fn sinks_take_a_share_and_have_no_value() {
    let ln2 = 2.0_f32.ln();
    let sink = |logit: f32| extras(|e| e.sinks = Some(vec![logit]));
    let case = tiny(plain(), sink(ln2), &[1.0], &[0.0, 0.0], &[1.0, 3.0]);
    for result in [dense(&case), online(&case, NonZeroUsize::MIN)] {
        close(&result.out, &[1.0], 1e-7);
        close(&result.lse, &[4.0_f64.ln()], 1e-7);
    }
    // Above all keys, and below: all of the weight, and none.
    for (logit, out, lse) in [(1e4, 0.0, 1e4), (-1e4, 2.0, 2.0_f64.ln())] {
        let case = tiny(plain(), sink(logit), &[1.0], &[0.0, 0.0], &[1.0, 3.0]);
        for result in [dense(&case), online(&case, NonZeroUsize::MIN)] {
            close(&result.out, &[out], 0.0);
            close(&result.lse, &[lse], 0.0);
        }
    }
    // A row without keys has the sink's log-sum-exp and an output of exactly 0.
    let case = tiny(plain().with_causal(true), sink(1.5), &[1.0; 3], &[0.0], &[7.0]);
    let (one_key, none) = ((1.5_f64.exp() + 1.0).ln(), 1.5);
    for result in [dense(&case), online(&case, NonZeroUsize::MIN)] {
        close(&result.out, &[0.0, 0.0, 7.0 / (1.5_f64.exp() + 1.0)], 1e-15);
        close(&result.lse, &[none, none, one_key], 1e-15);
    }
    let good = PLAIN.run(&case);
    assert!(good.verify(&case).passed() && good.out[0].to_bits() == 0);
    for (change, passes) in [
        ((|run| run.lse[0] = 1.5 * (1.0 + f32::EPSILON)) as fn(&mut emulated::Run), true),
        (|run| run.lse[0] = 1.5001, false),
        (|run| run.lse[1] = f32::NEG_INFINITY, false),
        (|run| run.out[1] = f32::MIN_POSITIVE, false),
    ] {
        let mut run = good.clone();
        change(&mut run);
        assert_eq!(run.verify(&case).passed(), passes, "{}", run.verify(&case));
    }
}

/// The same rule said in different ways gives the same numbers, to the last bit.
#[test]
fn ways_to_hide_a_key_agree() {
    let heads = Heads::new(4, 2, 8);
    let spec = CaseSpec::new("hidden", heads, [(5, 9), (7, 3), (0, 4), (2, 0), (1, 12)]).seed(1);
    let with = |modifiers| build(&spec.clone().modified(modifiers)).unwrap();
    let bias =
        |per_head, values| Modifiers { bias: Some(Bias { per_head, dtype: Dtype::F32, values }), ..Modifiers::NONE };
    let mask = |mask| Modifiers { mask: Some(mask), ..Modifiers::NONE };
    let causal = dense(&build(&spec.clone().causal(true)).unwrap());
    assert_eq!(dense(&with(mask(Mask::Causal))), causal);
    assert_eq!(dense(&with(Modifiers { window_right: Some(0), ..Modifiers::NONE })), causal);
    assert_eq!(dense(&with(bias(false, BiasValues::Causal))), causal);
    assert_eq!(dense(&with(bias(true, BiasValues::Causal))), causal);
    // All rules hold at once.
    let both = Modifiers { mask: Some(Mask::Everything), ..bias(true, BiasValues::Causal) };
    assert_eq!(dense(&with(both)), causal);
    let all = dense(&build(&spec).unwrap());
    assert_ne!(all, causal);
    assert_eq!(dense(&with(mask(Mask::Everything))), all);
    assert_eq!(dense(&with(bias(true, BiasValues::Normal(0.0)))), all);
    let nothing = dense(&with(mask(Mask::Nothing)));
    assert!(nothing.out.iter().all(|x| *x == 0.0) && nothing.lse.iter().all(|x| *x == f64::NEG_INFINITY));
    assert_eq!(dense(&with(bias(true, BiasValues::Hiding(100)))), nothing);
}

/// A page may be missing where no row can see it, and nowhere else.
#[test]
fn missing_pages_are_legal_where_nobody_looks() {
    let spec = CaseSpec::new("missing", Heads::new(2, 1, 8), [(3, 40), (0, 9), (12, 6)]).causal(true);
    let spec = spec.modified(Modifiers { window_left: Some(5), ..Modifiers::NONE });
    let [whole, part] = [Pool::new(4), Pool::new(4).withheld()].map(|pool| build(&spec.clone().paged(pool)).unwrap());
    assert_ne!(whole.kv(), part.kv());
    assert_eq!(dense(&whole), dense(&part));
    let run = PLAIN.run(&part);
    assert!(run.verify(&part).passed() && run.verify(&whole).passed());
    let KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len } = whole.kv() else { panic!("not paged") };
    // Row 0 is at position 37 and sees keys from 32 on: entry 8.
    for entry in 0..page_ids.len() {
        let mut page_ids = page_ids.clone();
        page_ids[entry] = NO_PAGE;
        let (k_pages, v_pages) = (k_pages.clone(), v_pages.clone());
        let (page_indptr, kv_len) = (page_indptr.clone(), kv_len.clone());
        let kv = KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len };
        let case = Case::new(*whole.geometry(), *whole.options(), whole.q().clone(), whole.q_indptr().to_vec(), kv);
        match case {
            Ok(case) => assert!(entry < 8 || (10..13).contains(&entry), "{entry}: {:?}", case.lengths()),
            Err(CaseError::Batch(BatchError::PageId { index, found: NO_PAGE, .. })) => {
                assert!(index == entry && (8..10).contains(&entry) || entry >= 13, "{entry}");
            }
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn each_head_has_its_own_slope_sink_and_bias() {
    let heads = HeadGeometry::new(4, 2, 1).unwrap();
    let case = |options: AttentionOptions, change: fn(&mut CaseExtras)| {
        let case = single(heads, options, &[0.0; 4], &[0.0; 4], &[1.0, 10.0, 3.0, 30.0]).unwrap();
        dense(&case.with_extras(extras(change)).unwrap())
    };
    let options = AttentionOptions::new(&heads);
    // Of two keys the left one is hidden, halved, untouched, and alone.
    let slopes = |e: &mut CaseExtras| e.alibi_slopes = Some(vec![1e4, 2.0_f32.ln(), 0.0, -1e4]);
    close(&case(options, slopes).out, &[3.0, 7.0 / 3.0, 20.0, 10.0], 1e-6);
    let bias = |e: &mut CaseExtras| {
        let values = [f32::NEG_INFINITY, 0.0, -(2.0_f32.ln()), 0.0, 5.0, 5.0, 0.0, f32::NEG_INFINITY];
        e.bias = Some(tensor(&[4, 2], &values));
    };
    close(&case(options, bias).out, &[3.0, 7.0 / 3.0, 20.0, 10.0], 1e-6);
    let sinks = |e: &mut CaseExtras| e.sinks = Some(vec![-1e4, 2.0_f32.ln(), 0.0, 1e4]);
    close(&case(options, sinks).out, &[2.0, 1.0, 40.0 / 3.0, 0.0], 1e-6);
}

// ---- Against the recurrence, and the bound.

/// Cases that are quickly done.
fn drawn(seeds: Range<u64>) -> impl Iterator<Item = (CaseSpec, Case)> {
    let kernels = crossed_kernels();
    let drawn = seeds.map(move |seed| crossed(&kernels[seed as usize % kernels.len()], seed));
    drawn.filter(|drawn| drawn.spec.flops() < 3e7).map(|drawn| {
        let case = drawn.build().unwrap();
        (drawn.spec, case)
    })
}

#[test]
fn recurrence_equals_definition_with_options() {
    let mut rows = 0;
    for (spec, case) in drawn(0..150) {
        let (expected, keys) = (dense(&case), spec.seqs.iter().map(|s| s.kv_len).max().unwrap_or(1).max(2));
        let values: Vec<f32> = (0..case.seqs())
            .flat_map(|seq| {
                let kv = case.sequence_kv(seq).unwrap();
                (0..case.geometry().kv_heads() as usize).flat_map(|head| kv.v(head).to_vec()).collect::<Vec<_>>()
            })
            .collect();
        for block in [1, 7, 64] {
            let found = online(&case, NonZeroUsize::new(block).unwrap());
            close(&found.out, &expected.out, recurrence_tolerance(keys as usize, &values));
            for (found, expected) in found.lse.iter().zip(&expected.lse) {
                let near = (found - expected).abs() <= 1e-15 * (20.0 + expected.abs());
                assert!(found == expected || near, "{spec}, block {block}: {found} is not {expected}");
            }
        }
        rows += expected.lse.len();
    }
    assert!(rows > 5000, "{rows}");
}

/// The kernels of the bound, on devices that compute well and on those that compute as badly as they may.
#[test]
fn bound_holds_for_all_options_together() {
    let (mut largest, mut count) = ((0.0_f64, String::new()), 0);
    for (seed, (spec, case)) in drawn(200..320).enumerate() {
        for kernel in [
            PLAIN,
            Kernel { step_keys: 1, ..PLAIN },
            Kernel { step_keys: 2, split_keys: Some(32), ..PLAIN },
            Kernel { step_keys: 64, split_keys: Some(256), ..PLAIN },
        ] {
            for report in [kernel.run(&case).verify(&case), kernel.run_on_poor_device(&case, seed as u64).verify(&case)]
            {
                assert!(report.passed(), "{spec}, {kernel:?}\n{report}");
                if report.max_bound_ratio > largest.0 {
                    largest = (report.max_bound_ratio, spec.to_string());
                }
                count += 1;
            }
        }
    }
    println!("{count} runs; largest ratio {:.3} for {}", largest.0, largest.1);
    assert!(count > 600, "{count}");
}

/// 24 rows of 2 heads on 150 keys, the rows' positions in the middle of them.
fn with(modifiers: Modifiers, values: Values) -> Case {
    let spec = CaseSpec::new("options", Heads::new(2, 1, 64), [(24, 150)]).modified(modifiers).values(values).seed(5);
    build(&spec).unwrap()
}

const NONE: Modifiers = Modifiers::NONE;
const CAP: Modifiers = Modifiers { softcap: Some(3.0), ..NONE };
const ALIBI: Modifiers = Modifiers { alibi: Some(Alibi::Customary), ..NONE };
const BIAS: Modifiers =
    Modifiers { bias: Some(Bias { per_head: true, dtype: Dtype::F32, values: BiasValues::Normal(1.0) }), ..NONE };
const SINKS: Modifiers = Modifiers { sinks: Some(Sinks::Within(6.0)), ..NONE };
const WINDOW: Modifiers = Modifiers { window_left: Some(20), window_right: Some(9), ..NONE };
const MASK: Modifiers = Modifiers { mask: Some(Mask::Random(50)), ..NONE };

/// Each option alone: the bound holds, and is near enough to what a good kernel does to notice one that is not.
#[test]
fn bound_of_each_option_is_neither_broken_nor_idle() {
    for (name, modifiers, values) in [
        ("none", NONE, Values::Normal),
        ("cap", CAP, Values::Normal),
        ("cap, reached", CAP, Values::Spread { score: 30.0 }),
        // Hardly felt: what is left is the error of its tanh, which is in proportion to it.
        ("cap, far off", Modifiers { softcap: Some(1e4), ..NONE }, Values::Normal),
        ("alibi", ALIBI, Values::Normal),
        ("bias", BIAS, Values::Normal),
        ("sinks", SINKS, Values::Normal),
        ("window", WINDOW, Values::Normal),
        ("mask", MASK, Values::Normal),
    ] {
        let case = with(modifiers, values);
        for kernel in [PLAIN, Kernel { step_keys: 8, split_keys: Some(32), ..PLAIN }] {
            let (plain, poor) = (kernel.run(&case).verify(&case), kernel.run_on_poor_device(&case, 1).verify(&case));
            let ratios = |report: &paged_attention::Report| {
                format!("out {:.4}, lse {:.4}", report.max_bound_ratio_out, report.max_bound_ratio_lse)
            };
            println!("{name}: {}; on a poor device {}", ratios(&plain), ratios(&poor));
            for report in [plain, poor] {
                assert!((0.001..=1.0).contains(&report.max_bound_ratio_out), "{name}\n{report}");
                assert!((0.001..=1.0).contains(&report.max_bound_ratio_lse), "{name}\n{report}");
            }
        }
    }
}

#[test]
fn faults_in_options_are_outside_the_bound() {
    let kernel = Kernel { step_keys: 8, split_keys: Some(32), ..PLAIN };
    let everything =
        Modifiers { softcap: CAP.softcap, alibi: ALIBI.alibi, bias: BIAS.bias, sinks: SINKS.sinks, ..NONE };
    for (fault, modifiers) in [
        (Fault::CapInF16, CAP),
        (Fault::CapBase, CAP),
        (Fault::CapUnits, CAP),
        (Fault::CapLast, Modifiers { alibi: ALIBI.alibi, ..CAP }),
        (Fault::CapLast, Modifiers { bias: BIAS.bias, ..CAP }),
        (Fault::AlibiOffByOne, ALIBI),
        (Fault::AlibiUnits, ALIBI),
        (Fault::AlibiTopLeft, ALIBI),
        (Fault::AlibiHead, ALIBI),
        (Fault::BiasUnits, BIAS),
        (Fault::BiasHead, BIAS),
        (Fault::SinkUnits, SINKS),
        (Fault::SinkPerSplit, SINKS),
        (Fault::SinkNotInLse, SINKS),
        (Fault::SinkWithoutRescale, Modifiers { sinks: Some(Sinks::At(8.0)), ..NONE }),
        (Fault::WindowLeftLonger, WINDOW),
        (Fault::WindowLeftShorter, WINDOW),
        (Fault::WindowRightLonger, WINDOW),
        (Fault::MaskRow, MASK),
        (Fault::MaskByAddition, MASK),
        (Fault::MaskByAddition, WINDOW),
    ] {
        // Alone, and among the others.
        let Modifiers { window_left, window_right, mask, sinks, .. } = modifiers;
        let among = Modifiers { window_left, window_right, mask, sinks: sinks.or(SINKS.sinks), ..everything };
        for (modifiers, alone) in [(modifiers, true), (among, false)] {
            let case = with(modifiers, Values::Normal);
            assert!(kernel.run(&case).verify(&case).passed());
            let report = Kernel { fault, ..kernel }.run(&case).verify(&case);
            println!(
                "{fault:?}{}: out {:.2e}, lse {:.2e}",
                if alone { "" } else { " among others" },
                report.max_bound_ratio_out,
                report.max_bound_ratio_lse
            );
            assert!(!report.passed(), "{fault:?}\n{report}");
        }
    }
}
