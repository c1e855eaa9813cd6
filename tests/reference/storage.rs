//! What storing keys and values in other types does: the bounds on elements and on results, judged by quantisers of the
//! test's own.

use half::{bf16, f16};
use paged_attention::reference::storage::rotate;
use paged_attention::{
    FP8_MAX, INT8_MAX, KvDtype, KvDtypes, Pairing, Rotary, StorageReport, StoredKv, fp8_to_f32, verify_storage,
};

use super::*;

const PAIRS: [(KvDtype, KvDtype); 6] = [
    (KvDtype::Int8, KvDtype::Int8),
    (KvDtype::Fp8, KvDtype::Fp8),
    (KvDtype::F16, KvDtype::Int8),
    (KvDtype::Int8, KvDtype::Bf16),
    (KvDtype::F32, KvDtype::Fp8),
    (KvDtype::Bf16, KvDtype::F16),
];

/// The fp8 number that is nearest to `x`, by looking at all of them.
fn nearest_fp8(x: f32) -> f32 {
    let all = (0..=u8::MAX).map(fp8_to_f32).filter(|x| !x.is_nan());
    all.min_by(|a, b| (a - x).abs().total_cmp(&(b - x).abs())).unwrap()
}

/// A row as pages hold it, every operation of a device being off by as much as WGSL allows and `off`, from -1 to 1, says.
fn stored_row(dtype: KvDtype, head_scale: f32, off: f32, row: &[f32]) -> Vec<f32> {
    let moved = |x: f32, units: f32| x * (1.0 + units * off * f32::EPSILON);
    let largest = row.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    match dtype {
        KvDtype::F32 => row.to_vec(),
        KvDtype::F16 => row.iter().map(|x| f16::from_f32(*x).to_f32()).collect(),
        KvDtype::Bf16 => row.iter().map(|x| bf16::from_f32(*x).to_f32()).collect(),
        KvDtype::Int8 if largest < 2.0_f32.powi(-100) => vec![0.0; row.len()],
        KvDtype::Int8 => {
            let (scale, inverse) = (moved(largest / INT8_MAX, 2.5), moved(INT8_MAX / largest, -2.5));
            let codes = row.iter().map(|x| moved(x * inverse, -1.0).clamp(-INT8_MAX, INT8_MAX).round_ties_even());
            codes.map(|code| code * scale).collect()
        }
        KvDtype::Fp8 => {
            let inverse = moved(1.0 / head_scale, 2.5);
            row.iter().map(|x| nearest_fp8(moved(x * inverse, 1.0).clamp(-FP8_MAX, FP8_MAX)) * head_scale).collect()
        }
    }
}

struct Setup {
    case: Case,
    stored: StoredKv,
}

/// Random heads and lengths, and what a device as far off as `off` says makes of their keys and values.
fn setup(seed: u64, (k, v): (KvDtype, KvDtype), rotary: Option<&Rotary>, off: f32) -> Setup {
    let rng = &mut StdRng::seed_from_u64(seed);
    let (kv_heads, dim, v_dim) = (rng.random_range(1..3), rng.random_range(6..40), rng.random_range(1..40));
    let geometry = HeadGeometry::with_v_head_dim(2 * kv_heads, kv_heads, dim, v_dim).unwrap();
    let (q_len, kv_len) = (rng.random_range(1..6), rng.random_range(1..40));
    let size = 10_f32.powf(rng.random_range(-3.0..1.5));
    let mut rows = |count: u32, dim: u32| -> Vec<f32> {
        let mut values = normal(rng, (count * dim) as usize);
        for row in values.chunks_exact_mut(dim as usize) {
            // Rows of unlike size, some with a channel far out, some of zeros.
            let factor = [size, 1.0, 0.0, 20.0][rng.random_range(0..4)];
            row.iter_mut().for_each(|x| *x *= factor);
            if rng.random_bool(0.3) {
                row[0] *= 30.0;
            }
        }
        values
    };
    let q = rows(q_len * 2 * kv_heads, dim);
    let (keys, values) = (rows(kv_len * kv_heads, dim), rows(kv_len * kv_heads, v_dim));
    let options = AttentionOptions::new(&geometry).with_causal(seed.is_multiple_of(2));
    let options = if seed.is_multiple_of(3) { options.with_softcap(Some(5.0)) } else { options };
    let case = single(geometry, options, &q, &keys, &values).unwrap();

    let mut rotated = keys.clone();
    if let Some(rotary) = rotary {
        for (index, row) in rotated.chunks_exact_mut(dim as usize).enumerate() {
            rotate(rotary, index as u32 / kv_heads, row);
        }
    }
    let head_scales: Vec<[f32; 2]> = (0..kv_heads as usize)
        .map(|head| {
            let largest = |rows: &[f32], dim: u32| {
                let own = rows.chunks_exact(dim as usize).skip(head).step_by(kv_heads as usize).flatten();
                own.fold(0.0_f32, |max, x| max.max(x.abs()))
            };
            [largest(&rotated, dim), largest(&values, v_dim)].map(|largest| (largest / FP8_MAX).max(1e-30))
        })
        .collect();
    let store = |dtype, rows: &[f32], dim: u32, which: usize| -> Vec<f32> {
        let heads = (0..kv_heads as usize).cycle();
        let stored = rows.chunks_exact(dim as usize).zip(heads);
        stored.flat_map(|(row, head)| stored_row(dtype, head_scales[head][which], off, row)).collect()
    };
    let shape = |dim: u32| [kv_len as usize, kv_heads as usize, dim as usize];
    let kv = KvSource::Contiguous {
        k: tensor(&shape(dim), &store(k, &rotated, dim, 0)),
        v: tensor(&shape(v_dim), &store(v, &values, v_dim, 1)),
        kv_indptr: vec![0, kv_len],
    };
    Setup { case, stored: StoredKv { dtypes: KvDtypes { k, v }, head_scales, rotary: rotary.cloned(), kv } }
}

fn judged(Setup { case, stored }: &Setup) -> StorageReport {
    verify_storage(case, stored).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a device's arithmetic makes of rounding within what WGSL allows, elements and results are inside the bound.
    #[test]
    fn storing_is_inside_the_bound(
        seed in any::<u64>(), pair in proptest::sample::select(&PAIRS[..]), off in -1.0_f32..1.0, turned in any::<bool>(),
    ) {
        let rotary = Rotary::new(Pairing::HalfSplit, 4, 100.0).unwrap().from_element(1);
        let report = judged(&setup(seed, pair, turned.then_some(&rotary), off));
        prop_assert!(report.passed(), "{report}\n{:?}", report.worst);
    }
}

/// The bounds are near: half a step is what some element of many is off by, and results come to a good part of theirs.
#[test]
fn bounds_of_storage_are_not_idle() {
    for pair in PAIRS {
        let reports: Vec<StorageReport> = (0..60).map(|seed| judged(&setup(seed, pair, None, 0.0))).collect();
        let largest = |of: fn(&StorageReport) -> f64| reports.iter().map(of).fold(0.0, f64::max);
        let [k, v] = [largest(|r| r.max_bound_ratio_k), largest(|r| r.max_bound_ratio_v)];
        let [out, lse] = [largest(|r| r.max_bound_ratio_out), largest(|r| r.max_bound_ratio_lse)];
        println!("{pair:?}: keys {k:.3}, values {v:.3}, out {out:.3}, lse {lse:.3}");
        // Keys and values that are stored as they came are off by nothing.
        let expected = |dtype: KvDtype| if dtype == KvDtype::F32 { 0.0..=0.0 } else { 0.9..=1.0 };
        assert!(expected(pair.0).contains(&k) && expected(pair.1).contains(&v), "{pair:?}: {k} {v}");
        assert!((0.05..=1.0).contains(&out), "{pair:?}: {out}");
        // Without an error of the keys there is none of the sum.
        assert!((if pair.0 == KvDtype::F32 { 0.0..=0.0 } else { 0.02..=1.0 }).contains(&lse), "{pair:?}: {lse}");
    }
}

/// One element that is a step off is outside, as are exchanged scales, a key that was not rotated and one that was
/// rotated by its neighbour's angle.
#[test]
fn wrong_storage_is_noticed() {
    let moved = |setup: &Setup, change: &dyn Fn(&mut [f32], &mut [f32])| {
        let KvSource::Contiguous { k, v, kv_indptr } = &setup.stored.kv else { panic!("contiguous") };
        let (mut keys, mut values) = (k.to_f32(), v.to_f32());
        change(&mut keys, &mut values);
        let kv = KvSource::Contiguous {
            k: tensor(k.shape(), &keys),
            v: tensor(v.shape(), &values),
            kv_indptr: kv_indptr.clone(),
        };
        let report = verify_storage(&setup.case, &StoredKv { kv, ..setup.stored.clone() }).unwrap();
        !report.passed()
    };
    let rotary = Rotary::new(Pairing::Interleaved, 6, 100.0).unwrap();
    for pair in PAIRS {
        let mut noticed = [0; 3];
        for seed in 0..40 {
            let setup = setup(seed, pair, Some(&rotary), 0.0);
            assert!(!moved(&setup, &|_, _| {}));
            let grown = |rows: &mut [f32]| {
                if let Some(x) = rows.iter_mut().max_by(|a, b| a.abs().total_cmp(&b.abs())) {
                    *x *= 1.13;
                }
            };
            noticed[0] += usize::from(moved(&setup, &|keys, _| grown(keys)));
            noticed[1] += usize::from(moved(&setup, &|_, values| grown(values)));
            let dim = setup.case.geometry().head_dim() as usize;
            noticed[2] += usize::from(moved(&setup, &|keys, _| {
                // Every rotation undone by a step.
                let heads = setup.case.geometry().kv_heads() as usize;
                for row in keys.chunks_exact_mut(dim).skip(heads) {
                    rotate(&rotary, 1, row);
                }
            }));
        }
        // Some cases hold nothing but zeros, or one token.
        assert!(noticed.iter().all(|noticed| *noticed > 30), "{pair:?}: {noticed:?}");
    }
}

/// The product of two rotated rows depends on the distance of their positions alone; lengths stay.
#[test]
fn rotations_keep_lengths_and_distances() {
    let rng = &mut StdRng::seed_from_u64(5);
    for pairing in [Pairing::Interleaved, Pairing::HalfSplit] {
        let rotary = Rotary::new(pairing, 8, 10_000.0).unwrap().from_element(2);
        let (q, k) = (normal(rng, 12), normal(rng, 12));
        let turned = |row: &[f32], position| {
            let mut row = row.to_vec();
            rotate(&rotary, position, &mut row);
            row
        };
        let dot = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
        let near = |a: f64, b: f64| (a - b).abs() < 1e-5;
        assert!(turned(&q, 0).iter().zip(&q).all(|(a, b)| (a - b).abs() < 1e-6));
        for (at, distance) in [(0, 3), (17, 3), (1000, 3), (100_000, 3)] {
            assert!(near(dot(&turned(&q, at + distance), &turned(&k, at)), dot(&turned(&q, distance), &k)));
            assert!(near(dot(&turned(&q, at), &turned(&q, at)), dot(&q, &q)));
        }
        assert!(!near(dot(&turned(&q, 4), &k), dot(&turned(&q, 3), &k)));
        // What is not to be rotated stays as it is.
        let row = turned(&q, 9);
        assert!([0, 1, 10, 11].iter().all(|i| row[*i].to_bits() == q[*i].to_bits()));
        assert!((2..10).all(|i| row[i] != q[i]));
    }
}
