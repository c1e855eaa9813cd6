//! The reference, its bound and the verifier, judged by means of their own: hand computation, emulated kernels,
//! mutants.

#![allow(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "clippy.toml frees test functions only; these are their helpers"
)]

mod emulated;
mod options;
mod refusals;
mod storage;

use emulated::{Fault, Kernel, Scores, Weights};
use paged_attention::reference::bound::{BoundError, Bounds, bounds};
use paged_attention::reference::{Reference, dense, online, online_row};
use paged_attention::{
    AttentionOptions, BatchError, CASE_BYTES_MAX, Case, CaseError, CaseExtras, Chains, Computed, Dtype, GeometryError,
    HeadGeometry, KvSource, Quantity, SCORE_LOG2_MAX, SEQUENCE_BYTES_MAX, Tensor, VerifyError, verify,
};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use std::num::NonZeroUsize;

const PLAIN: Kernel =
    Kernel { step_keys: 16, split_keys: None, scores: Scores::F32, weights: Weights::F32, fault: Fault::None };

fn normal(rng: &mut StdRng, count: usize) -> Vec<f32> {
    StandardNormal.sample_iter(rng).take(count).collect()
}

fn tensor(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_f32(Dtype::F32, shape, values).unwrap()
}

/// One sequence, contiguous, f32.
fn single(heads: HeadGeometry, options: AttentionOptions, q: &[f32], k: &[f32], v: &[f32]) -> Result<Case, CaseError> {
    let (q_heads, kv_heads) = (heads.q_heads() as usize, heads.kv_heads() as usize);
    let (dim, v_dim) = (heads.head_dim() as usize, heads.v_head_dim() as usize);
    let (q_len, kv_len) = (q.len() / q_heads / dim, k.len() / kv_heads / dim);
    Case::new(
        heads,
        options,
        tensor(&[q_len, q_heads, dim], q),
        vec![0, q_len as u32],
        KvSource::Contiguous {
            k: tensor(&[kv_len, kv_heads, dim], k),
            v: tensor(&[kv_len, kv_heads, v_dim], v),
            kv_indptr: vec![0, kv_len as u32],
        },
    )
}

/// Head dimension 1, query 1, scale 1: the keys are the scores.
fn from_scores(scores: &[f32], values: &[f32]) -> Case {
    let heads = HeadGeometry::with_v_head_dim(1, 1, 1, (values.len() / scores.len()) as u32).unwrap();
    single(heads, AttentionOptions::new(&heads), &[1.0], scores, values).unwrap()
}

fn close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(found == expected || (found - expected).abs() <= tolerance, "{found} is not {expected}");
    }
}

// ---- The definition, by hand.

#[test]
fn two_keys_by_hand() {
    // Scores ln 3 and 0: weights 3/4 and 1/4, up to the rounding of ln 3 to f32.
    let ln3 = 3.0_f32.ln();
    let (a, b) = (f64::from(ln3).exp(), 1.0);
    let result = dense(&from_scores(&[ln3, 0.0], &[1.0, 10.0, -4.0, 2.0]));
    close(&result.out, &[(a - 4.0 * b) / (a + b), (10.0 * a + 2.0 * b) / (a + b)], 2e-15);
    close(&result.out, &[-0.25, 8.0], 1e-6);
    close(&result.lse, &[4.0_f64.ln()], 1e-7);
}

#[test]
fn level_does_not_matter() {
    for level in [0.0, -1e4, -5e4, -6e4, -1e5, -2.45e5, 6e4, -3e37] {
        let result = dense(&from_scores(&[level; 4], &[1.0, 2.0, 3.0, 6.0]));
        close(&result.out, &[3.0], 0.0);
        close(&result.lse, &[f64::from(level) + 4.0_f64.ln()], 0.0);
    }
}

#[test]
fn grouped_heads_read_their_kv_head() {
    let heads = HeadGeometry::new(4, 2, 1).unwrap();
    let options = AttentionOptions::new(&heads);
    let case = single(heads, options, &[0.0; 4], &[0.0; 4], &[1.0, 10.0, 3.0, 30.0]).unwrap();
    close(&dense(&case).out, &[2.0, 2.0, 20.0, 20.0], 0.0);
    // The scale is applied, sign included.
    let case =
        single(heads, options.with_scale(-1e3), &[1.0; 4], &[0.0, 0.0, 1.0, 1.0], &[1.0, 10.0, 3.0, 30.0]).unwrap();
    close(&dense(&case).out, &[1.0, 1.0, 10.0, 10.0], 0.0);
}

#[test]
fn causal_rows_align_at_the_bottom_right() {
    let heads = HeadGeometry::new(1, 1, 1).unwrap();
    let options = AttentionOptions::new(&heads).with_causal(true);
    // q2/kv5: keys 0..=3 and 0..=4.
    let case = single(heads, options, &[0.0; 2], &[0.0; 5], &[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
    close(&dense(&case).out, &[2.5, 3.0], 0.0);
    // q5/kv2: three rows see nothing.
    let case = single(heads, options, &[0.0; 5], &[0.0; 2], &[1.0, 3.0]).unwrap();
    for result in [dense(&case), online(&case, NonZeroUsize::MIN)] {
        close(&result.out, &[0.0, 0.0, 0.0, 1.0, 2.0], 0.0);
        let none = f64::NEG_INFINITY;
        close(&result.lse, &[none, none, none, 0.0, 2.0_f64.ln()], 0.0);
    }
    // Future keys with far larger scores have no effect.
    let case = single(heads, options, &[1.0; 2], &[0.0, 1e30], &[1.0, 3.0]).unwrap();
    close(&dense(&case).out, &[1.0, 3.0], 0.0);
}

#[test]
fn ragged_pages_equal_packed_rows() {
    let heads = HeadGeometry::with_v_head_dim(2, 1, 3, 2).unwrap();
    let options = AttentionOptions::new(&heads).with_causal(true);
    let rng = &mut StdRng::seed_from_u64(7);
    let (q, k, v) = (normal(rng, 6 * 6), normal(rng, 7 * 3), normal(rng, 7 * 2));
    // Lengths (2, 4), (0, 2), (3, 0), (1, 1).
    let (q, q_indptr) = (tensor(&[6, 2, 3], &q), vec![0, 2, 2, 5, 6]);
    let packed =
        KvSource::Contiguous { k: tensor(&[7, 1, 3], &k), v: tensor(&[7, 1, 2], &v), kv_indptr: vec![0, 4, 6, 6, 7] };
    // Pages of two; everything that is not owned is NaN. A spare page in front, an unused one in the second table.
    let (page_ids, owners) = (vec![4, 1, 3, 0, 2], [(4, 0), (1, 2), (3, 4), (2, 6)]);
    let mut pages = (vec![f32::NAN; 6 * 2 * 3], vec![f32::NAN; 6 * 2 * 2]);
    for (page, token) in owners {
        let tokens = 2.min(7 - token);
        pages.0[page * 6..][..tokens * 3].copy_from_slice(&k[token * 3..][..tokens * 3]);
        pages.1[page * 4..][..tokens * 2].copy_from_slice(&v[token * 2..][..tokens * 2]);
    }
    let paged = KvSource::Paged {
        k_pages: tensor(&[6, 2, 1, 3], &pages.0),
        v_pages: tensor(&[6, 2, 1, 2], &pages.1),
        page_indptr: vec![0, 2, 4, 4, 5],
        page_ids,
        kv_len: vec![4, 2, 0, 1],
    };
    let packed = Case::new(heads, options, q.clone(), q_indptr.clone(), packed).unwrap();
    let paged = Case::new(heads, options, q, q_indptr, paged).unwrap();
    assert_eq!(packed.lengths(), paged.lengths());
    for seq in 0..4 {
        assert_eq!(packed.sequence_kv(seq), paged.sequence_kv(seq));
    }
    assert_eq!(packed.sequence_kv(4), None);
    assert_eq!(dense(&packed), dense(&paged));
    let result = dense(&packed);
    assert!(result.out.iter().all(|x| x.is_finite()));
    assert_eq!(result.lse.iter().filter(|x| **x == f64::NEG_INFINITY).count(), 3 * 2);
    let run = PLAIN.run(&paged);
    assert!(run.verify(&paged).passed());
}

#[test]
fn nothing_at_all_is_legal() {
    let heads = HeadGeometry::new(2, 1, 4).unwrap();
    let empty = |q_indptr: Vec<u32>, kv_indptr: Vec<u32>| {
        let kv = KvSource::Contiguous { k: tensor(&[0, 1, 4], &[]), v: tensor(&[0, 1, 4], &[]), kv_indptr };
        Case::new(heads, AttentionOptions::new(&heads), tensor(&[0, 2, 4], &[]), q_indptr, kv).unwrap()
    };
    for case in [empty(vec![0], vec![0]), empty(vec![0, 0], vec![0, 0])] {
        let chains =
            vec![Chains { dot: 4, step_keys: 1, accumulate: 1, scaled: false, order: Vec::new() }; case.seqs()];
        let report = verify(&case, &Computed { out: &[], lse: &[], out_dtype: Dtype::F32, chains: &chains }).unwrap();
        assert!(report.passed());
        assert_eq!((report.elements, report.max_bound_ratio, report.nmse), (0, 0.0, 0.0));
        assert_eq!(report.worst, None);
    }
    // A pool without pages, and sequences without tables.
    let kv = KvSource::Paged {
        k_pages: tensor(&[0, 16, 1, 4], &[]),
        v_pages: tensor(&[0, 16, 1, 4], &[]),
        page_indptr: vec![0, 0],
        page_ids: vec![],
        kv_len: vec![0],
    };
    let case = Case::new(heads, AttentionOptions::new(&heads), tensor(&[1, 2, 4], &[1.0; 8]), vec![0, 1], kv).unwrap();
    assert_eq!(dense(&case).out, vec![0.0; 8]);
}

/// Sequences that share one large page.
fn on_one_page(
    heads: HeadGeometry,
    tokens: usize,
    q_indptr: Vec<u32>,
    tables: &[u32],
    kv_len: Vec<u32>,
) -> Result<Case, CaseError> {
    let zeros = |shape: &[usize]| {
        let bytes = vec![0; shape.iter().product::<usize>() * 2];
        Tensor::from_bytes(Dtype::F16, shape, bytes).unwrap()
    };
    let (q_heads, kv_heads) = (heads.q_heads() as usize, heads.kv_heads() as usize);
    let (dim, v_dim) = (heads.head_dim() as usize, heads.v_head_dim() as usize);
    let page_indptr = std::iter::once(0).chain(tables.iter().scan(0, |end, pages| {
        *end += pages;
        Some(*end)
    }));
    let q = zeros(&[*q_indptr.last().unwrap() as usize, q_heads, dim]);
    let kv = KvSource::Paged {
        k_pages: zeros(&[1, tokens, kv_heads, dim]),
        v_pages: zeros(&[1, tokens, kv_heads, v_dim]),
        page_indptr: page_indptr.collect(),
        page_ids: vec![0; tables.iter().sum::<u32>() as usize],
        kv_len,
    };
    Case::new(heads, AttentionOptions::new(&heads), q, q_indptr, kv)
}

/// Cases of a few hundred kilobytes whose keys, written out per sequence, are terabytes. Were they written out, this
/// test would not come to its end.
#[test]
fn shared_pages_cost_what_they_are_used_for() {
    let heads = HeadGeometry::new(1, 1, 1).unwrap();
    // 2.6e9 keys on one page of 65,536: nobody looks at them.
    let case = on_one_page(heads, 1 << 16, vec![0, 0], &[40_000], vec![2_600_000_000]).unwrap();
    assert_eq!(dense(&case).out, [0.0; 0]);
    // A row that does is refused.
    let error = on_one_page(heads, 1 << 16, vec![0, 1], &[40_000], vec![2_600_000_000]).unwrap_err();
    assert!(matches!(error, CaseError::TooLarge { seq: Some(0), limit: SEQUENCE_BYTES_MAX, .. }), "{error}");
    assert!(error.to_string().starts_with("sequence 0 of the case has 395200000016 bytes"), "{error}");
    // 20,000 sequences without rows.
    let case = on_one_page(heads, 1 << 16, vec![0; 20_001], &[1; 20_000], vec![1 << 16; 20_000]).unwrap();
    assert_eq!(dense(&case).lse, [0.0; 0]);
    // Many short ones with a row, and one with many rows.
    let many = 1 << 18;
    let error =
        on_one_page(heads, 1 << 16, (0..=many).collect(), &vec![1; 1 << 18], vec![1 << 16; 1 << 18]).unwrap_err();
    assert!(matches!(error, CaseError::TooLarge { seq: None, limit: CASE_BYTES_MAX, .. }), "{error}");
    let error = on_one_page(heads, 1 << 16, vec![0, 1 << 20], &[20], vec![(1 << 20) + 1]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the case has 1099512676352 scores (query rows times keys times query heads, over all sequences); at most 1099511627776 are supported"
    );
    // Heads in plenty, and sequences without anything.
    let heads = HeadGeometry::new(1 << 16, 1 << 16, 256).unwrap();
    let kv = KvSource::Contiguous {
        k: tensor(&[0, 1 << 16, 256], &[]),
        v: tensor(&[0, 1 << 16, 256], &[]),
        kv_indptr: vec![0; 50_001],
    };
    let case =
        Case::new(heads, AttentionOptions::new(&heads), tensor(&[0, 1 << 16, 256], &[]), vec![0; 50_001], kv).unwrap();
    let chains = vec![Chains { dot: 4, step_keys: 1, accumulate: 1, scaled: false, order: Vec::new() }; case.seqs()];
    assert!(verify(&case, &Computed { out: &[], lse: &[], out_dtype: Dtype::F32, chains: &chains }).unwrap().passed());
}

/// The reference takes the sequences a few at a time where all together would be large; that does not show.
#[test]
fn results_do_not_depend_on_parts() {
    let heads = HeadGeometry::new(2, 1, 64).unwrap();
    let tokens = 1 << 16;
    let rng = &mut StdRng::seed_from_u64(3);
    let pool: Vec<f32> = normal(rng, 1 << 12).into_iter().cycle().take(tokens * 64).collect();
    // 33 MB each.
    let (kv_len, q_indptr) = (
        vec![65_536, 65_536, 0, 65_530, 65_536, 7, 65_536, 65_536, 65_536, 65_536, 65_536, 9],
        vec![0, 1, 2, 3, 5, 5, 6, 7, 8, 9, 10, 11, 12],
    );
    let q = normal(rng, 12 * 2 * 64);
    let case = |q: &[f32], q_indptr: Vec<u32>, kv_len: Vec<u32>| {
        let seqs = kv_len.len();
        let kv = KvSource::Paged {
            k_pages: tensor(&[1, tokens, 1, 64], &pool),
            v_pages: tensor(&[1, tokens, 1, 64], &pool),
            page_indptr: (0..=seqs as u32).collect(),
            page_ids: vec![0; seqs],
            kv_len,
        };
        Case::new(
            heads,
            AttentionOptions::new(&heads).with_causal(true),
            tensor(&[q.len() / 128, 2, 64], q),
            q_indptr,
            kv,
        )
        .unwrap()
    };
    let whole = case(&q, q_indptr.clone(), kv_len.clone());
    let chains =
        vec![Chains { dot: 64, step_keys: 1, accumulate: 70_000, scaled: false, order: Vec::new() }; whole.seqs()];
    let (reference, stated) = (dense(&whole), bounds(&whole, &chains, Dtype::F32).unwrap());
    let mut joined = Reference { out: Vec::new(), lse: Vec::new() };
    let mut joined_bounds = Bounds { out: Vec::new(), lse: Vec::new() };
    for (rows, kv_len) in q_indptr.windows(2).zip(kv_len) {
        let rows = rows[0]..rows[1];
        let part =
            case(&q[rows.start as usize * 128..rows.end as usize * 128], vec![0, rows.len() as u32], vec![kv_len]);
        let (reference, stated) = (dense(&part), bounds(&part, &chains[..1], Dtype::F32).unwrap());
        joined.out.extend(reference.out);
        joined.lse.extend(reference.lse);
        joined_bounds.out.extend(stated.out);
        joined_bounds.lse.extend(stated.lse);
    }
    assert!(reference == joined && stated == joined_bounds);
    let narrow = |values: &[f64]| -> Vec<f32> { values.iter().map(|x| *x as f32).collect() };
    let (out, lse) = (narrow(&reference.out), narrow(&reference.lse));
    let report = verify(&whole, &Computed { out: &out, lse: &lse, out_dtype: Dtype::F32, chains: &chains }).unwrap();
    assert!(report.passed() && report.elements == 12 * 2 * 65, "{report}");
}

// ---- The recurrence against the definition.

/// Scores and values of up to 8 keys, `|V| <= 1`.
const SHORT: [(&[f32], &[f32]); 8] = [
    (&[0.3], &[-0.7]),
    (&[0.0, 0.0], &[1.0, -1.0]),
    (&[1.5, -2.25, 0.75], &[0.5, -1.0, 0.3]),
    (&[-4.0, -3.0, -2.0, -1.0], &[0.9, -0.8, 0.7, -0.6]),
    (&[5.0, 4.0, 3.0, 2.0, 1.0], &[-0.11, 0.22, -0.33, 0.44, -0.55]),
    (&[0.1, 30.0, -30.0, 29.5, 0.2, 28.0], &[0.25, 0.125, 1.0, -0.5, 0.75, 1.0]),
    (&[-6e4, -6e4, -59_999.0, -6e4, -60_001.0, -6e4, -6e4], &[1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]),
    (&[0.5, -0.25, 2.0, 1.0, -1.5, 0.0, 3.0, 2.5], &[-1.0, 1.0, -0.5, 0.5, 0.25, -0.25, 0.125, 1.0]),
];

#[test]
fn recurrence_equals_definition_on_short_rows() {
    let mut largest = 0.0_f64;
    for (number, (scores, values)) in SHORT.iter().enumerate() {
        let case = from_scores(scores, values);
        let expected = dense(&case);
        for block in [1, 2, 3, 5, 8] {
            let found = online(&case, NonZeroUsize::new(block).unwrap());
            let error = (found.out[0] - expected.out[0]).abs();
            let error_lse = (found.lse[0] - expected.lse[0]).abs();
            println!(
                "case {number}, block {block}: out {:+.17} off by {error:.2e}, lse by {error_lse:.2e}",
                found.out[0]
            );
            assert!(error <= 2.3e-16, "case {number}, block {block}: {error:e}");
            assert!(
                error_lse <= 4.5e-16 * expected.lse[0].abs().max(1.0),
                "case {number}, block {block}: {error_lse:e}"
            );
            largest = largest.max(error);
        }
    }
    println!("largest difference {largest:.2e}");
}

/// `8 * 2^-53 * (1 + log2 n)`, times the largest value.
fn recurrence_tolerance(n: usize, values: &[f32]) -> f64 {
    let max = values.iter().fold(0.0, |max: f32, v| max.max(v.abs()));
    8.0 * 2.0_f64.powi(-53) * (1.0 + (n as f64).log2()) * f64::from(max)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every row is drawn from its seed, which a failure prints.
    #[test]
    fn recurrence_equals_definition(
        seed in any::<u64>(), n in 1_usize..3000, dims in 1_usize..6, block in 1_usize..300,
        spread in prop::sample::select(vec![0.0, 1e-4, 0.1, 1.0, 10.0, 1e3, 1e18]),
        level in prop::sample::select(vec![0.0_f32, -1e4, 6e4]),
        rising in any::<bool>(), mean in prop::sample::select(vec![0.0_f32, 1.0]),
    ) {
        let rng = &mut StdRng::seed_from_u64(seed);
        let mut scores: Vec<f32> = normal(rng, n).iter().map(|x| x * spread + level).collect();
        if rising {
            scores.sort_by(f32::total_cmp);
        }
        let values: Vec<f32> = normal(rng, n * dims).iter().map(|x| x + mean).collect();
        let expected = dense(&from_scores(&scores, &values));
        let scores: Vec<f64> = scores.iter().map(|x| f64::from(*x)).collect();
        let found = online_row(&scores, &values, dims, NonZeroUsize::new(block).unwrap(), None);
        for (found, expected) in found.out.iter().zip(&expected.out) {
            let error = (found - expected).abs();
            prop_assert!(error <= recurrence_tolerance(n, &values), "off by {error:e}");
        }
        prop_assert!((found.lse - expected.lse[0]).abs() <= 1e-15 * (20.0 + expected.lse[0].abs()));
    }
}

/// The worst for a recurrence: the maximum creeps up by the same small step at every key.
#[test]
fn recurrence_holds_where_the_maximum_always_moves() {
    for (n, step) in [(8192, 2.0_f32.powi(-13)), (8192, 1e-3), (20_000, 3e-5), (4096, 0.4), (4096, 0.51)] {
        let scores: Vec<f32> = (0..n).map(|j| j as f32 * step).collect();
        let values: Vec<f32> = (0..n).map(|j| if j < n / 2 { 1.0 } else { -1.0 }).collect();
        let expected = dense(&from_scores(&scores, &values)).out[0];
        let scores: Vec<f64> = scores.iter().map(|x| f64::from(*x)).collect();
        for block in [1, 7, 64] {
            let found = online_row(&scores, &values, 1, NonZeroUsize::new(block).unwrap(), None).out[0];
            let error = (found - expected).abs();
            assert!(error <= recurrence_tolerance(n, &values), "{n} keys, step {step}, block {block}: {error:e}");
        }
    }
}

// ---- The bound: a correct f32 kernel is inside, and mutants are outside.

/// 16 query rows of 2 heads, 64 keys, d 64: 2048 elements of N(0, 1).
fn gaussian(seed: u64) -> Case {
    let heads = HeadGeometry::new(2, 1, 64).unwrap();
    let rng = &mut StdRng::seed_from_u64(seed);
    let (q, k, v) = (normal(rng, 16 * 128), normal(rng, 64 * 64), normal(rng, 64 * 64));
    single(heads, AttentionOptions::new(&heads), &q, &k, &v).unwrap()
}

fn in_order(step_keys: u32, order: &[std::ops::Range<u32>]) -> Chains {
    Chains { dot: 64, step_keys, accumulate: 140, scaled: false, order: order.to_vec() }
}

/// Keys that are gone through in an order of their own have the bound of keys that lie in it; and a kernel that does so is
/// inside.
#[test]
fn keys_in_another_order() {
    let heads = HeadGeometry::new(2, 1, 64).unwrap();
    let order = [40..48, 0..4, 56..60, 4..40, 60..64, 48..56];
    for seed in 1..=8 {
        let rng = &mut StdRng::seed_from_u64(seed);
        let (q, k, v) = (normal(rng, 16 * 128), normal(rng, 64 * 64), normal(rng, 64 * 64));
        let moved = |rows: &[f32]| -> Vec<f32> {
            order.iter().cloned().flat_map(|keys| rows[64 * keys.start..64 * keys.end].to_vec()).collect()
        };
        let options = AttentionOptions::new(&heads);
        let case = single(heads, options, &q, &k, &v).unwrap();
        let permuted = single(heads, options, &q, &moved(&k), &moved(&v)).unwrap();
        let chains = in_order(4, &order.clone().map(|keys| keys.start as u32..keys.end as u32));
        let plain = Chains { order: Vec::new(), ..chains.clone() };
        let stated = |case: &Case, chains: &Chains| bounds(case, std::slice::from_ref(chains), Dtype::F32).unwrap();
        let (found, expected) = (stated(&case, &chains), stated(&permuted, &plain));
        let near = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-9 * b);
        assert!(near(&found.out, &expected.out) && near(&found.lse, &expected.lse), "seed {seed}");
        // The order matters.
        let by_position = stated(&case, &plain);
        assert!(!near(&found.lse, &by_position.lse), "seed {seed}");
        let kernel = Kernel { step_keys: 4, split_keys: Some(8), ..PLAIN };
        let run = kernel.run_on_poor_device(&permuted, seed);
        let computed = Computed { out: &run.out, lse: &run.lse, out_dtype: Dtype::F32, chains: &[chains] };
        let report = verify(&case, &computed).unwrap();
        assert!(report.passed(), "{report}");
    }
}

#[test]
fn bound_separates_f32_from_mutants() {
    for seed in 1..=4 {
        let case = gaussian(seed);
        let plain = PLAIN.run(&case).verify(&case);
        let split = Kernel { split_keys: Some(32), step_keys: 8, ..PLAIN }.run(&case).verify(&case);
        let half_scores = Kernel { scores: Scores::F16, ..PLAIN }.run(&case).verify(&case);
        let half_weights = Kernel { weights: Weights::F16, ..PLAIN }.run(&case).verify(&case);
        let bf16_weights = Kernel { weights: Weights::Bf16, ..PLAIN }.run(&case).verify(&case);
        for (name, report) in [
            ("plain", &plain),
            ("split", &split),
            ("f16 scores", &half_scores),
            ("f16 weights", &half_weights),
            ("bf16 weights", &bf16_weights),
        ] {
            let (out, lse) = (report.max_bound_ratio_out, report.max_bound_ratio_lse);
            println!("seed {seed}, {name}: out {out:.4}, lse {lse:.4}");
        }
        for report in [plain, split] {
            assert!((0.003..=1.0).contains(&report.max_bound_ratio_out), "{report}");
            assert!((0.003..=1.0).contains(&report.max_bound_ratio_lse), "{report}");
        }
        assert!(half_scores.max_bound_ratio_out > 1.0 && half_scores.max_bound_ratio_lse > 1.0, "{half_scores}");
        assert!(half_weights.max_bound_ratio_out > 1.0, "{half_weights}");
        assert!(bf16_weights.max_bound_ratio_out > 1.0 && bf16_weights.max_bound_ratio_lse > 1.0, "{bf16_weights}");
    }
}

/// The kernel's errors at their worst: each score is moved by as much as its sum may be off, in the direction that
/// moves dimension 0 of the output up. The bound must hold, and be close.
#[test]
fn bound_is_nearly_attained() {
    let case = gaussian(5);
    let exact = dense(&case);
    let chains = [Chains { dot: 64, step_keys: 64, accumulate: 0, scaled: false, order: Vec::new() }];
    let bounds = bounds(&case, &chains, Dtype::F32).unwrap();
    let kv = case.sequence_kv(0).unwrap();
    let q = case.q().to_f32();
    let unit = 67.0 * 2.0_f64.powi(-23);
    let (mut least, mut most) = (f64::INFINITY, 0.0_f64);
    for (at, q) in q.chunks_exact(64).enumerate() {
        let (out, bound) = (exact.out[at * 64], bounds.out[at * 64]);
        let (mut sum, mut acc) = (0.0, 0.0);
        for (k, v) in kv.k(0).chunks_exact(64).zip(kv.v(0).chunks_exact(64)) {
            let products: Vec<f64> = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k) / 8.0).collect();
            let error = unit * products.iter().map(|x| x.abs()).sum::<f64>();
            let v = f64::from(v[0]);
            let weight = (products.iter().sum::<f64>() + error.copysign(v - out)).exp();
            (sum, acc) = (sum + weight, acc + weight * v);
        }
        let ratio = (acc / sum - out).abs() / bound;
        (least, most) = (least.min(ratio), most.max(ratio));
    }
    println!("worst-case scores reach {least:.3} to {most:.3} of the bound");
    assert!(least > 0.8 && most <= 1.0, "{least} {most}");
}

#[test]
fn bound_holds_for_inputs_of_every_kind() {
    let heads = HeadGeometry::new(1, 1, 64).unwrap();
    let options = AttentionOptions::new(&heads);
    let rng = &mut StdRng::seed_from_u64(11);
    let kernels = [
        PLAIN,
        Kernel { step_keys: 1, ..PLAIN },
        Kernel { step_keys: 64, split_keys: Some(256), ..PLAIN },
        Kernel { step_keys: 8, split_keys: Some(24), ..PLAIN },
    ];
    let judge = |name: &str, case: Case| {
        for kernel in kernels {
            let report = kernel.run(&case).verify(&case);
            let (out, lse) = (report.max_bound_ratio_out, report.max_bound_ratio_lse);
            println!("{name}, step {}, split {:?}: out {out:.2e}, lse {lse:.2e}", kernel.step_keys, kernel.split_keys);
            assert!(report.passed(), "{name}, {kernel:?}\n{report}");
        }
    };
    let (q, k, v) = (normal(rng, 4 * 64), normal(rng, 8192 * 64), normal(rng, 8192 * 64));
    judge("8192 keys", single(heads, options, &q, &k, &v).unwrap());

    let (k, v) = (&k[..512 * 64], &v[..512 * 64]);
    let times = |x: &[f32], factor: f32| -> Vec<f32> { x.iter().map(|x| x * factor).collect() };
    let case = |q: &[f32], k: &[f32], v: &[f32]| single(heads, options, q, k, v).unwrap();
    judge("peaky", case(&times(&q, 8.0), k, v));
    judge("very peaky", case(&times(&q, 100.0), k, v));
    judge("scores 1e18", case(&times(&q, 1e9), &times(k, 1e9), v));
    judge("tiny scores", case(&times(&q, 1e-20), &times(k, 1e-20), v));
    judge("tiny values", case(&q, k, &times(v, 1e-37)));
    judge("subnormal values", case(&q, k, &times(v, 1e-41)));
    judge("large values", case(&q, k, &times(v, 1e34)));
    judge("subnormal scale", single(heads, options.with_scale(1e-39), &times(&q, 1e15), &times(k, 1e15), v).unwrap());
    let outliers = |x: &[f32]| -> Vec<f32> {
        x.iter().enumerate().map(|(i, x)| if i % 64 == 3 { 60.0 * x } else { *x }).collect()
    };
    judge("outlier channels", case(&outliers(&q), &outliers(k), &outliers(v)));
    let mut last = v.to_vec();
    last[511 * 64..].fill(1e6);
    judge("outlier value", case(&q, k, &last));
}

#[test]
fn bound_holds_at_every_level() {
    let heads = HeadGeometry::new(1, 1, 32).unwrap();
    let options = AttentionOptions::new(&heads).with_scale(1.0);
    let rng = &mut StdRng::seed_from_u64(12);
    for level in [1e4, -1e4, 6e4, -6e4, 2.45e5, -2.45e5, -3e37_f64] {
        let factor = level.abs().sqrt() as f32;
        for spread in [0.0, 1e-3, 1.0] {
            let mut q = normal(rng, 32);
            let mut k: Vec<f32> = normal(rng, 64 * 32).iter().map(|x| x * spread).collect();
            let v = normal(rng, 64 * 32);
            // The first channel makes the level, the others some spread.
            q[0] = factor;
            k.iter_mut().step_by(32).for_each(|k| *k = factor.copysign(level as f32));
            let case = single(heads, options, &q, &k, &v).unwrap();
            let report = PLAIN.run(&case).verify(&case);
            assert!(report.passed(), "level {level}, spread {spread}\n{report}");
            // One key above all others takes all, to rounding.
            if level.abs() < 1e6 {
                let lift = 1024.0 / factor;
                k[7 * 32] += lift;
                let case = single(heads, options, &q, &k, &v).unwrap();
                let run = PLAIN.run(&case);
                assert_eq!(run.out, &v[7 * 32..8 * 32]);
                assert!(run.verify(&case).passed());
            }
        }
    }
}

/// A device whose exponential, division and logarithm use up what WGSL allows them, with errors that follow no pattern.
#[test]
fn bound_covers_what_wgsl_allows() {
    for seed in 20..24 {
        let case = gaussian(seed);
        for kernel in [PLAIN, Kernel { step_keys: 4, split_keys: Some(16), ..PLAIN }] {
            let report = kernel.run_on_poor_device(&case, seed).verify(&case);
            println!("poor device: out {:.4}, lse {:.4}", report.max_bound_ratio_out, report.max_bound_ratio_lse);
            assert!(report.passed(), "{report}");
        }
    }
    // Weights that move at every step, and values that differ: exponentials are all that counts.
    for n in [16_u32, 256, 2048] {
        let scores: Vec<f32> = (0..n).map(|j| j as f32 / n as f32).collect();
        let values: Vec<f32> = (0..n).map(|j| if j < n / 2 { 1.0 } else { -1.0 }).collect();
        let case = from_scores(&scores, &values);
        let kernel = Kernel { step_keys: 1, ..PLAIN };
        let report = kernel.run_on_poor_device(&case, 1).verify(&case);
        println!("creeping maximum, {n} keys: {:.4} {:.4}", report.max_bound_ratio_out, report.max_bound_ratio_lse);
        assert!(report.passed(), "{report}");
    }
}

#[test]
fn rounding_of_the_output_type_is_covered() {
    let case = gaussian(30);
    for (dtype, unit) in [(Dtype::F16, 1.0 / 1024.0), (Dtype::Bf16, 1.0 / 128.0)] {
        let mut run = PLAIN.run(&case);
        run.out_dtype = dtype;
        run.out = Tensor::from_f32(dtype, &[run.out.len()], &run.out).unwrap().to_f32();
        let report = run.verify(&case);
        println!("{dtype}: {:.4}", report.max_bound_ratio_out);
        assert!(report.passed() && report.max_bound_ratio_out > 0.3, "{report}");
        run.out_dtype = Dtype::F32;
        assert!(!run.verify(&case).passed());
        // A whole unit off is too much.
        run.out_dtype = dtype;
        run.out.iter_mut().for_each(|x| *x *= 1.0 + 2.1 * unit);
        assert!(!run.verify(&case).passed());
    }
    // A subnormal f16 may be flushed, a normal one may not.
    for (value, passes) in [(5e-5, true), (7e-5, false)] {
        let case = from_scores(&[0.0], &[value]);
        let mut run = PLAIN.run(&case);
        (run.out, run.out_dtype) = (vec![0.0], Dtype::F16);
        assert_eq!(run.verify(&case).passed(), passes);
    }
    // What f16 cannot hold is an error of the kernel's choice of type, and shows.
    let case = from_scores(&[0.0], &[1e5]);
    let mut run = PLAIN.run(&case);
    (run.out, run.out_dtype) = (vec![f32::INFINITY], Dtype::F16);
    assert_eq!(run.verify(&case).max_bound_ratio, f64::INFINITY);
}

#[test]
fn long_rows_keep_a_useful_bound() {
    // 131,072 keys in splits: a bound in the number of keys, or of steps, would be far above 1e-3.
    let n = 131_072;
    let heads = HeadGeometry::new(1, 1, 64).unwrap();
    let rng = &mut StdRng::seed_from_u64(40);
    let (q, k, v) = (normal(rng, 64), normal(rng, n * 64), normal(rng, n * 64));
    let case = single(heads, AttentionOptions::new(&heads), &q, &k, &v).unwrap();
    let start = std::time::Instant::now();
    let chains = [Chains { dot: 20, step_keys: 64, accumulate: 300, scaled: false, order: Vec::new() }];
    let bounds = bounds(&case, &chains, Dtype::F32).unwrap();
    let largest = bounds.out.iter().copied().fold(0.0, f64::max);
    println!("131072 keys: out {largest:.2e}, lse {:.2e}, in {:?}", bounds.lse[0], start.elapsed());
    assert!(largest < 1e-4 && bounds.lse[0] < 1e-4);
}

#[test]
fn a_prompt_is_judged_quickly() {
    // 600 causal rows of 9 query heads over 3: 1.6 million scores. The tests do this often.
    let heads = HeadGeometry::new(9, 3, 64).unwrap();
    let rng = &mut StdRng::seed_from_u64(41);
    let (q, k, v) = (normal(rng, 600 * 9 * 64), normal(rng, 600 * 3 * 64), normal(rng, 600 * 3 * 64));
    let case = single(heads, AttentionOptions::new(&heads).with_causal(true), &q, &k, &v).unwrap();
    let run = PLAIN.run(&case);
    let start = std::time::Instant::now();
    let report = run.verify(&case);
    println!(
        "600 tokens: {:?}, out {:.4}, lse {:.4}",
        start.elapsed(),
        report.max_bound_ratio_out,
        report.max_bound_ratio_lse
    );
    assert!(report.passed());
}

// ---- The verifier.

#[test]
fn one_wrong_element_is_found() {
    let case = gaussian(50);
    let good = PLAIN.run(&case);
    assert!(good.verify(&case).passed());
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, 1e30] {
        let mut run = good.clone();
        run.out[3 * 128 + 64 + 5] = wrong;
        let report = run.verify(&case);
        let worst = report.worst.unwrap();
        assert!(!report.passed());
        assert_eq!((worst.what, worst.row, worst.head, worst.dim), (Quantity::Out, 3, 1, Some(5)));
        assert_eq!(wrong.is_finite(), report.max_bound_ratio.is_finite());
        assert!(!report.nmse.is_nan() && report.max_bound_ratio == report.max_bound_ratio_out, "{report}");

        let mut run = good.clone();
        run.lse[7] = wrong;
        let report = run.verify(&case);
        let worst = report.worst.unwrap();
        assert!(!report.passed() && report.max_bound_ratio_out <= 1.0);
        assert_eq!((worst.what, worst.row, worst.head, worst.dim), (Quantity::Lse, 3, 1, None));
        assert!(report.to_string().contains("lse[3, 1] = "), "{report}");
    }
}

#[test]
fn empty_rows_must_be_exact() {
    let heads = HeadGeometry::new(1, 1, 2).unwrap();
    let options = AttentionOptions::new(&heads).with_causal(true);
    let case = single(heads, options, &[1.0; 10], &[1.0; 4], &[1.0; 4]).unwrap();
    let good = PLAIN.run(&case);
    assert!(good.verify(&case).passed());
    let change = |change: fn(&mut emulated::Run)| {
        let mut run = good.clone();
        change(&mut run);
        run.verify(&case)
    };
    assert!(change(|run| run.out[0] = -0.0).passed());
    for wrong in [
        change(|run| run.out[5] = f32::MIN_POSITIVE),
        change(|run| run.out[0] = f32::NAN),
        change(|run| run.lse[2] = f32::MIN),
        change(|run| run.lse[2] = f32::INFINITY),
        change(|run| run.lse[2] = f32::NAN),
        change(|run| run.lse[0] = 0.0),
        change(|run| run.lse[3] = f32::NEG_INFINITY),
    ] {
        assert_eq!(wrong.max_bound_ratio, f64::INFINITY, "{wrong}");
    }
}

#[test]
fn unusable_results_are_typed() {
    let case = gaussian(51);
    let run = PLAIN.run(&case);
    let whole = Computed { out: &run.out, lse: &run.lse, out_dtype: Dtype::F32, chains: &run.chains };
    assert_eq!(
        verify(&case, &Computed { out: &run.out[1..], ..whole }),
        Err(VerifyError::Length { what: Quantity::Out, found: 2047, needed: 2048 })
    );
    assert_eq!(
        verify(&case, &Computed { lse: &[], ..whole }),
        Err(VerifyError::Length { what: Quantity::Lse, found: 0, needed: 32 })
    );
    let count = VerifyError::Bound(BoundError::Count { found: 0, needed: 1 });
    assert_eq!(verify(&case, &Computed { chains: &[], ..whole }), Err(count));
    for found in [
        Chains { dot: 64, step_keys: 0, accumulate: 64, scaled: false, order: Vec::new() },
        Chains { dot: u32::MAX, step_keys: 1, accumulate: 64, scaled: false, order: Vec::new() },
        Chains { dot: 64, step_keys: 1, accumulate: u32::MAX, scaled: false, order: Vec::new() },
        // A key too few, one that is none, one twice, and a range that begins inside a step.
        in_order(4, &[32..64, 0..28]),
        in_order(4, &[32..68, 0..32]),
        in_order(4, &[32..64, 0..36]),
        in_order(4, &[30..64, 0..30]),
    ] {
        let error = VerifyError::Bound(BoundError::Chains { seq: 0, found: found.clone() });
        assert_eq!(verify(&case, &Computed { chains: &[found], ..whole }), Err(error));
    }
}

#[test]
fn a_result_from_other_values_is_refused() {
    // A mean of V, values of the neighbouring head, and a key missed: none is inside the bound.
    let case = gaussian(52);
    let good = PLAIN.run(&case);
    let kv = case.sequence_kv(0).unwrap();
    let mut run = good.clone();
    for (dim, out) in run.out[..64].iter_mut().enumerate() {
        *out = kv.v(0).iter().skip(dim).step_by(64).sum::<f32>() / 64.0;
    }
    assert!(!run.verify(&case).passed());
    let mut run = good.clone();
    run.out.rotate_left(64);
    assert!(!run.verify(&case).passed());
    let fewer = single(*case.geometry(), *case.options(), &case.q().to_f32(), &kv.k(0)[..63 * 64], &kv.v(0)[..63 * 64]);
    assert!(!PLAIN.run(&fewer.unwrap()).verify(&case).passed());
}

/// A sum of random effort: seeds that made trouble once can be added here.
#[test]
fn random_shapes_pass() {
    for seed in 60..72 {
        let rng = &mut StdRng::seed_from_u64(seed);
        let (kv_heads, group) = (rng.random_range(1..3_u32), rng.random_range(1..4_u32));
        let heads =
            HeadGeometry::with_v_head_dim(kv_heads * group, kv_heads, rng.random_range(1..70), rng.random_range(1..70))
                .unwrap();
        let (q_len, kv_len) = (rng.random_range(1..20_usize), rng.random_range(1..200_usize));
        let options = AttentionOptions::new(&heads).with_causal(rng.random());
        let (dim, v_dim) = (heads.head_dim() as usize, heads.v_head_dim() as usize);
        let q = normal(rng, q_len * heads.q_heads() as usize * dim);
        let k = normal(rng, kv_len * kv_heads as usize * dim);
        let v = normal(rng, kv_len * kv_heads as usize * v_dim);
        let case = single(heads, options, &q, &k, &v).unwrap();
        let step_keys = rng.random_range(1..40);
        let split_keys = rng.random::<bool>().then(|| step_keys * rng.random_range(1..6_usize));
        let kernel = Kernel { step_keys, split_keys, ..PLAIN };
        let report = kernel.run(&case).verify(&case);
        assert!(report.passed(), "seed {seed}, {heads:?}, q {q_len}, kv {kv_len}, {kernel:?}\n{report}");
    }
}
