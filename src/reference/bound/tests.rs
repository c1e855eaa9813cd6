//! Parts of the bound, by their definitions.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

fn numbers(rng: &mut StdRng, count: usize, range: f64) -> Vec<f64> {
    (0..count).map(|_| rng.random_range(0.0..range)).collect()
}

/// By the definition: for a key of step `u`, the later steps whose upper end is above all lower ends from `u` on.
fn rescales_slowly(scores: &[f64], errors: &[f64], step_keys: usize) -> Vec<u32> {
    let ends = |sign: f64| -> Vec<f64> {
        let steps = scores.chunks(step_keys).zip(errors.chunks(step_keys));
        let values = steps.map(|(s, e)| s.iter().zip(e).map(|(s, e)| s + sign * e).fold(f64::NEG_INFINITY, f64::max));
        values.collect()
    };
    let (upper, lower) = (ends(1.0), ends(-1.0));
    let can_move = |u: usize, t: usize| lower[u..t].iter().all(|lower| upper[t] > *lower);
    (0..upper.len()).map(|u| (u + 1..upper.len()).filter(|t| can_move(u, *t)).count() as u32).collect()
}

/// Ends of steps of `step_keys` among `n` scores.
fn step_ends(n: usize, step_keys: usize) -> Vec<usize> {
    (0..n).step_by(step_keys).map(|start| n.min(start + step_keys)).collect()
}

#[test]
fn rescales_are_counted_as_defined() {
    let mut rescales = Rescales::default();
    for seed in 0..300 {
        let rng = &mut StdRng::seed_from_u64(seed);
        let (n, step_keys) = (rng.random_range(1..80), rng.random_range(1..9));
        let mut scores = numbers(rng, n, 1.0);
        match seed % 4 {
            0 => scores.sort_by(f64::total_cmp),
            1 => scores.sort_by(|a, b| b.total_cmp(a)),
            2 => scores.iter_mut().for_each(|s| *s = (*s * 4.0).round()),
            _ => {}
        }
        let range = [1e-9, 0.01, 0.3][seed as usize % 3];
        let errors = numbers(rng, n, range);
        rescales.count(&scores, &errors, &step_ends(n, step_keys));
        assert_eq!(rescales.per_step, rescales_slowly(&scores, &errors, step_keys), "seed {seed}");
    }
}

#[test]
fn rescales_grow_like_a_logarithm() {
    let rng = &mut StdRng::seed_from_u64(1);
    let (n, mut rescales) = (131_072, Rescales::default());
    rescales.count(&numbers(rng, n, 1.0), &vec![1e-7; n], &step_ends(n, 1));
    let most = rescales.per_step.iter().copied().max();
    assert!(most < Some(40), "{most:?}");
    // What can be equal can move: nothing but the number of steps is known then.
    rescales.count(&vec![1.0; n], &vec![1e-7; n], &step_ends(n, 1024));
    assert_eq!(rescales.per_step.first(), Some(&127));
}

/// A task of a row at `position`; head dimension 1, and as many keys as `k` has.
fn task<'a>(q: &'a [f32], k: &'a [f32], keys: &[u32], position: i64) -> RowTask<'a> {
    RowTask {
        seq: 0,
        q,
        keys: keys.to_vec(),
        k,
        v: k,
        head_dim: 1,
        v_head_dim: 1,
        scale: 1.0,
        softcap: None,
        slope: None,
        position,
        bias: None,
        sink: None,
        k_sum_max: k.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max),
        v_max: &[],
    }
}

#[test]
fn steps_are_counted_from_position_0() {
    let (k, keys) = ([0.0; 20], [0, 3, 4, 5, 9, 16]);
    let mut bound = RowBound::default();
    let mut ends = |task: RowTask<'_>, order: &[Range<u32>]| {
        let chains = Chains { dot: 1, step_keys: 4, accumulate: 1, scaled: false, order: order.to_vec() };
        bound.fill_places(&task, &chains);
        bound.fill_step_ends(&task, 4);
        (bound.places.clone(), bound.step_ends.clone())
    };
    let seen = |keys: &[u32]| task(&[0.0], &k, keys, 19);
    assert_eq!(ends(seen(&keys), &[]).1, [2, 4, 5, 6]);
    assert_eq!(ends(RowTask { sink: Some(0.0), ..seen(&keys) }, &[]), (vec![0, 1, 2, 3, 4, 5, 6], vec![2, 4, 5, 6, 7]));
    assert_eq!(ends(RowTask { sink: Some(0.0), ..seen(&[]) }, &[]).1, [1]);
    assert_eq!(ends(seen(&[]), &[]).1, [0_usize; 0]);
    // In an order of their own.
    let sunk = RowTask { sink: Some(0.0), ..seen(&keys) };
    assert_eq!(ends(sunk, &[4..12, 16..20, 0..4, 12..16]), (vec![2, 3, 4, 5, 0, 1, 6], vec![2, 3, 4, 6, 7]));
}

/// Every rounding of the soft cap at either of its ends, all combinations: none is outside, and the worst is near.
#[test]
fn no_capped_score_leaves_its_range() {
    let (mut least, mut most) = (f64::INFINITY, 0.0_f64);
    for x in [0.0, 1e-9, 1e-4, 0.01, 0.1, 0.3, 0.55, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 15.0, 40.0, 1e4] {
        for error in [0.0, 1e-7, 1e-5, 1e-2, 1.0, 50.0] {
            let mut largest = 0.0_f64;
            for corner in 0..1_u32 << 7 {
                let sign = |at: u32| if corner >> at & 1 == 1 { 1.0 } else { -1.0 };
                let moved: f64 = x + sign(0) * error;
                let y = moved.abs() * 2.0 * LOG2_E * (1.0 + sign(1) * 2.0 * EPS);
                let e = (-y).exp2() * (1.0 + sign(2) * (3.0 + 2.0 * y) * EPS);
                let (above, below) = ((1.0 - e) * (1.0 + sign(3) * EPS), (1.0 + e) * (1.0 + sign(4) * EPS));
                let t = above / below * (1.0 + sign(5) * 2.5 * EPS) * (1.0 + sign(6) * 2.0 * EPS);
                largest = largest.max((t.copysign(moved) * t.signum() - x.tanh()).abs());
            }
            let ratio = largest / (tanh_error(x, error) * SECOND_ORDER);
            assert!(ratio <= 1.0, "x {x}, error {error}: {ratio}");
            (least, most) = (least.min(ratio), most.max(ratio));
            // A half is what the largest slope costs where the argument may be anywhere; the rest is sharp.
            assert!(error > 1e-2 || ratio > 0.6, "x {x}, error {error}: {ratio}");
        }
    }
    assert!(most > 0.95, "{least} to {most}");
}

/// Far keys, whose distance is rounded, and near ones, in f32: with a product and a sum.
#[test]
fn alibi_and_bias_are_covered() {
    let (k, mut dense, mut bound) = ([0.75, -0.5, 1.25, 3.0], DenseRow::default(), RowBound::default());
    let mut largest = 0.0_f64;
    for position in [3, 1000, (1 << 24) + 2, (1 << 30) + 77, i64::from(u32::MAX) - 1, -5, -(1 << 28) - 33] {
        for slope in [0.3_f32, -7e-5, 1e-40, 1e20] {
            let bias = vec![0.1_f32, -3e4, 1e-41, 17.3];
            let task = RowTask {
                slope: Some(slope.into()),
                bias: Some(bias.clone()),
                ..task(&[1.0], &k, &[0, 1, 2, 3], position)
            };
            dense.attend(&task);
            bound.fill_score_errors(
                &task,
                &dense,
                &Chains { dot: 1, step_keys: 1, accumulate: 1, scaled: false, order: Vec::new() },
            );
            for (key, (k, bias)) in k.iter().zip(&bias).enumerate() {
                let distance = (key as i64 - position) as f32;
                let score = k * LOG2_E as f32 + (f64::from(slope) * LOG2_E) as f32 * distance;
                let score = (score + bias * LOG2_E as f32) as f64 / LOG2_E;
                let (error, allowed) = ((score - dense.score[key]).abs(), bound.score[key]);
                assert!(error <= allowed, "position {position}, slope {slope}, key {key}: {error:e} of {allowed:e}");
                largest = largest.max(error / allowed);
            }
        }
    }
    assert!(largest > 0.1, "{largest}");
}

/// A row with the given scores.
fn row(score: Vec<f64>) -> DenseRow {
    let lse = log_sum_exp_shifted(&score);
    let max = score.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weight: Vec<f64> = score.iter().map(|s| (s - max).exp()).collect();
    let mut row = DenseRow::default();
    (row.weight_sum, row.weight, row.lse, row.score) = (weight.iter().sum(), weight, lse, score);
    row
}

#[test]
fn no_weight_leaves_its_extremes() {
    for seed in 0..200 {
        let rng = &mut StdRng::seed_from_u64(seed);
        let n = rng.random_range(1..7);
        let (spread, range) = ([0.1, 3.0, 50.0][seed as usize % 3], [0.01, 1.0, 30.0][seed as usize / 3 % 3]);
        let dense = row(numbers(rng, n, spread));
        let delta = numbers(rng, n, range);
        let share: Vec<f64> = dense.score.iter().map(|s| (s - dense.lse).exp()).collect();
        let mut extremes = Extremes::default();
        extremes.fill(&dense, &share, &delta);
        // The extremes are at corners: each key up or down.
        let mut largest = vec![0.0_f64; n];
        for corner in 0..1_u32 << n {
            let moved = dense.score.iter().zip(&delta).enumerate();
            let moved: Vec<f64> =
                moved.map(|(j, (s, delta))| s + if corner >> j & 1 == 1 { *delta } else { -*delta }).collect();
            let total = log_sum_exp_shifted(&moved);
            for ((largest, moved), p) in largest.iter_mut().zip(&moved).zip(&share) {
                *largest = largest.max(((moved - total).exp() - p).abs());
            }
        }
        for (coefficient, largest) in extremes.coefficient.iter().zip(&largest) {
            let error = (coefficient - largest).abs();
            assert!(error <= 1e-12 * largest + 1e-14, "seed {seed}: {coefficient:e} is not {largest:e}");
        }
    }
}

#[test]
fn extremes_survive_scores_of_any_size() {
    let dense = row(vec![1e18, -1e18, 1e18 - 1e15, -3e37]);
    let share: Vec<f64> = dense.score.iter().map(|s| (s - dense.lse).exp()).collect();
    let mut extremes = Extremes::default();
    extremes.fill(&dense, &share, &[1e13, 1e13, 1e13, 1e30]);
    assert_eq!(extremes.coefficient, [0.0; 4]);
    extremes.fill(&dense, &share, &[1e15, 1e13, 1e15, 1e38]);
    assert_eq!(extremes.coefficient, [1.0, 0.0, 1.0, 1.0]);
}

#[test]
fn storing_covers_flushed_subnormals() {
    assert_eq!(stored(1.0, 0.0, Dtype::F32), 0.0);
    assert_eq!(stored(1.0, 0.0, Dtype::F16), 1.0 / 1024.0);
    assert_eq!(stored(3e-5, 0.0, Dtype::F16), 3e-5);
    // Just above the smallest normal number, and just below for all that is known.
    assert_eq!(stored(6.2e-5, 1e-5, Dtype::F16), 1.0 / 16_384.0);
    assert!(stored(6.2e-5, 0.0, Dtype::F16) < 1e-7);
    assert_eq!(stored(0.0, 0.0, Dtype::Bf16), 0.0);
}
