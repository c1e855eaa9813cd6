//! Scores far from zero, where a mask of -10,000, a sum in f16 or a wrong difference shows.
//!
//! Where all scores are equal an error bound says little, since any of them may be the largest by rounding. So
//! the consequences themselves are tested.

use paged_attention::{AttentionOptions, Case, CaseError, Dtype, KvSource, Output, RunError, Tensor};
use paged_attention_cases::{CaseSpec, Heads, Pool, Sequence, SpecError, Values, assemble, build, generate, loud_key};

use crate::common::{
    CONFIGS, Gpu, Tally, bits, gpu, is_decode, judge, plain_options, rows_of, run_options, say, shortened,
};

/// What issue reports name, and the least that the stated range allows.
const LEVELS: [f64; 11] = [0.0, 1e4, -1e4, -5e4, 6e4, -6e4, -1e5, 2.45e5, -2.45e5, -3e37, 3e37];

/// Which levels a type can hold.
fn fits(dtype: Dtype, level: f64) -> bool {
    dtype != Dtype::F16 || level.abs() < 1e9
}

/// Both kernels, one tile and several, one split and several.
const SHAPES: [(u32, u32); 6] = [(1, 64), (1, 1000), (20, 20), (20, 64), (40, 300), (2, 600)];

/// Every level, type and mask over all shapes.
fn levels(name: &str) -> Vec<(f64, CaseSpec)> {
    let mut specs = Vec::new();
    for (dtype, heads) in CONFIGS {
        for level in LEVELS {
            if fits(dtype, level) {
                for causal in [false, true] {
                    let spec = CaseSpec::new(format!("extreme/{name}-{level:e}"), heads, SHAPES)
                        .dtype(dtype)
                        .causal(causal)
                        .values(Values::EqualScores { level })
                        .seed(51);
                    specs.push((level, spec));
                }
            }
        }
    }
    specs
}

/// Calls `check` with every row of every sequence: its sequence, how many keys it sees, its head, and its output.
fn each_row(case: &Case, output: &Output, mut check: impl FnMut(usize, u32, u32, &[f32])) {
    let (heads, dim) = (case.geometry().q_heads(), case.geometry().v_head_dim() as usize);
    for (seq, (q_len, kv_len)) in case.lengths().into_iter().enumerate() {
        for row in 0..q_len {
            let rows = rows_of(case, output, seq, row, row + 1);
            for (head, out) in (0..heads).zip(rows.out.chunks(dim)) {
                check(seq, case.options().visible(q_len, kv_len, row).end, head, out);
            }
        }
    }
}

fn rounded(dtype: Dtype, values: &[f32]) -> Vec<f32> {
    Tensor::from_f32(dtype, &[values.len()], values).unwrap().to_f32()
}

/// Replaces the values of a description's sequences, and runs what comes out.
fn with_values(
    tally: &mut Tally,
    gpu: &Gpu,
    spec: &CaseSpec,
    value: impl Fn(u32, u32, u32, u32) -> f32,
) -> Option<(Case, Output)> {
    let Heads { kv_heads, v_head_dim, .. } = spec.heads;
    let mut sequences = generate(spec).unwrap();
    for s in &mut sequences {
        let kv_len = s.kv_len;
        s.v = (0..kv_len)
            .flat_map(|key| (0..kv_heads).flat_map(move |head| (0..v_head_dim).map(move |c| (key, head, c))))
            .map(|(key, head, c)| value(kv_len, key, head, c))
            .collect();
    }
    let case = assemble(spec, &sequences).unwrap();
    let output = tally.check_case(gpu, spec, &case, &run_options(spec))?;
    Some((case, output))
}

/// The output is the mean of the visible values, to 1e-5 of the largest.
#[test]
fn equal_scores_give_the_mean() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("mean");
    for (_, spec) in levels("mean") {
        let Some((case, output)) = tally.check(gpu, &spec) else { continue };
        let values: Vec<Vec<f32>> = generate(&spec).unwrap().iter().map(|s| rounded(spec.kv, &s.v)).collect();
        let (dim, group) = (spec.heads.v_head_dim as usize, spec.heads.q_heads / spec.heads.kv_heads);
        let mut wrong = None;
        each_row(&case, &output, |seq, seen, head, out| {
            let rows: Vec<&[f32]> = values[seq]
                .chunks(dim)
                .skip((head / group) as usize)
                .step_by(spec.heads.kv_heads as usize)
                .take(seen as usize)
                .collect();
            let largest = rows.iter().flat_map(|row| row.iter()).fold(0_f64, |m, x| m.max(f64::from(x.abs())));
            for (c, found) in out.iter().enumerate() {
                let mean = rows.iter().map(|row| f64::from(row[c])).sum::<f64>() / f64::from(seen);
                let error = (f64::from(*found) - mean).abs();
                if error > 1e-5 * largest && wrong.is_none() {
                    wrong = Some(format!("sequence {seq}, {seen} keys, head {head}, {c}: {found} instead of {mean}"));
                }
            }
        });
        tally.same(&spec, &case, wrong);
    }
    tally.finish();
}

/// With one-hot values the outputs are the weights themselves: equal keys get the same bits, and the others none.
#[test]
fn equal_keys_get_equal_weights() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("weights");
    for (_, spec) in levels("weights") {
        let dim = spec.heads.v_head_dim;
        // Long sequences have more keys than channels: those that show lie as far apart as they fit.
        let shown = |kv_len: u32, key: u32| {
            let step = kv_len.div_ceil(dim).max(1);
            key.is_multiple_of(step).then_some(key / step)
        };
        let one_hot = |kv_len: u32, key: u32, _head: u32, c: u32| if shown(kv_len, key) == Some(c) { 1.0 } else { 0.0 };
        let Some((case, output)) = with_values(&mut tally, gpu, &spec, one_hot) else { continue };
        let mut wrong = None;
        each_row(&case, &output, |seq, seen, head, out| {
            let kv_len = spec.seqs[seq].kv_len;
            let expected: Vec<f32> = (0..dim)
                .map(|c| {
                    let visible = (0..seen).any(|key| shown(kv_len, key) == Some(c));
                    if visible { out[0] } else { 0.0 }
                })
                .collect();
            let near = (out[0] * seen as f32 - 1.0).abs() < 1e-5;
            if wrong.is_none() {
                wrong = bits("weights", out, &expected)
                    .or_else(|| (!near).then(|| format!("weight {} for {seen} keys", out[0])))
                    .map(|why| format!("sequence {seq}, {seen} keys, head {head}: {why}"));
            }
        });
        tally.same(&spec, &case, wrong);
    }
    tally.finish();
}

/// One key higher by 1024 takes all: exactly its value comes out, wherever the others lie.
#[test]
fn one_key_above_takes_all() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("one-above");
    for (dtype, heads) in CONFIGS {
        for level in LEVELS {
            // Beyond that, f32 does not tell a lead of 1024 from rounding.
            if level.abs() > 1e6 {
                continue;
            }
            for causal in [false, true] {
                let spec = CaseSpec::new(format!("extreme/above-{level:e}"), heads, SHAPES)
                    .dtype(dtype)
                    .causal(causal)
                    .values(Values::OneAbove { level, lead: 1024.0 })
                    .seed(52);
                let Some((case, output)) = tally.check(gpu, &spec) else { continue };
                let values: Vec<Vec<f32>> = generate(&spec).unwrap().iter().map(|s| rounded(dtype, &s.v)).collect();
                let dim = heads.v_head_dim as usize;
                let mut wrong = None;
                each_row(&case, &output, |seq, seen, head, out| {
                    let loud = loud_key(spec.seqs[seq].kv_len);
                    if loud < seen && wrong.is_none() {
                        let kv_head = head / (heads.q_heads / heads.kv_heads);
                        let start = (loud * heads.kv_heads + kv_head) as usize * dim;
                        wrong = bits("value", out, &values[seq][start..start + dim])
                            .map(|why| format!("sequence {seq}, {seen} keys, head {head}: {why}"));
                    }
                });
                tally.same(&spec, &case, wrong);
            }
        }
    }
    tally.finish();
}

/// Rows whose future keys are 10,000 times larger come out as if those keys were ordinary.
#[test]
fn future_keys_have_no_effect() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("future");
    let shapes = [(32, 32), (16, 16), (4, 300), (60, 100), (150, 150), (33, 500)];
    for (dtype, heads) in CONFIGS {
        let spec = CaseSpec::new("extreme/future", heads, shapes).dtype(dtype).causal(true).seed(53);
        let Some((quiet, expected)) = tally.check(gpu, &spec) else { continue };
        let Some((case, output)) = tally.check(gpu, &spec.clone().values(Values::LoudFuture)) else { continue };
        for (seq, s) in spec.seqs.iter().enumerate() {
            let unaffected = s.q_len - s.q_len / 2;
            let a = rows_of(&case, &output, seq, 0, unaffected);
            let b = rows_of(&quiet, &expected, seq, 0, unaffected);
            let differ = bits("out", &a.out, &b.out).or_else(|| bits("lse", &a.lse, &b.lse));
            tally.same(format!("sequence {seq} of {spec}"), &case, differ);
        }
    }
    tally.finish();
}

/// Single sequence of one KV head from literal rows.
fn literal(heads: Heads, q: Vec<f32>, k: Vec<f32>, v: Vec<f32>) -> Sequence {
    Sequence {
        q_len: q.len() as u32 / (heads.q_heads * heads.head_dim),
        kv_len: k.len() as u32 / (heads.kv_heads * heads.head_dim),
        kv_stream: 0,
        q,
        k,
        v,
        mask: None,
        bias: None,
    }
}

/// A visible key at -20,000 and a hidden one at 0.
#[test]
fn a_score_below_the_customary_mask() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("below-mask");
    let heads = Heads::new(1, 1, 1);
    // Two rows, so that the causal mask hides the second key from the first; and 17 for the other kernel.
    for rows in [2_usize, 17] {
        let mut k = vec![0.0; rows];
        k[0] = 1.0;
        let mut v = vec![100.0; rows];
        v[0] = 1.0;
        let sequence = literal(heads, vec![-20_000.0; rows], k, v);
        assert_eq!(is_decode(&heads, sequence.q_len), rows == 2);
        let spec = CaseSpec::new(format!("extreme/below-mask-{rows}"), heads, []).causal(true).scale(1.0);
        let case = assemble(&spec, &[sequence]).unwrap();
        let Some(output) = tally.check_case(gpu, &spec, &case, &plain_options(16)) else { continue };
        let wrong = (output.out[0] != 1.0 || output.lse[0] != -20_000.0)
            .then(|| format!("{} with the sum {}", output.out[0], output.lse[0]));
        tally.same(&spec, &case, wrong);
    }
    tally.finish();
}

/// Two keys in pages 15 and 16 of 17, both at -46,341.
#[test]
fn two_keys_at_the_end_of_a_pool() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("pool-end");
    let geometry = Heads::new(1, 1, 128).geometry().unwrap();
    for rows in [1_usize, 17] {
        for dtype in [Dtype::F32, Dtype::F16] {
            let mut k = vec![f32::NAN; 17 * 128];
            k[15 * 128..].fill(-64.0);
            let mut v = vec![f32::NAN; 17 * 128];
            v[15 * 128..].fill(1.0);
            let pages = |data: &[f32]| Tensor::from_f32(dtype, &[17, 1, 1, 128], data).unwrap();
            let case = Case::new(
                geometry,
                AttentionOptions::new(&geometry),
                Tensor::from_f32(dtype, &[rows, 1, 128], &vec![64.0; rows * 128]).unwrap(),
                vec![0, rows as u32],
                KvSource::Paged {
                    k_pages: pages(&k),
                    v_pages: pages(&v),
                    page_indptr: vec![0, 2],
                    page_ids: vec![15, 16],
                    kv_len: vec![2],
                },
            )
            .unwrap();
            let what = format!("{rows} rows of {dtype}");
            let Some(output) = tally.check_case(gpu, &what, &case, &plain_options(1)) else { continue };
            tally.same(&what, &case, bits("out", &output.out, &vec![1.0; rows * 128]));
        }
    }
    tally.finish();
}

/// Whether a case was refused for the size of its scores, or of what leads to them.
fn is_range(error: &CaseError) -> bool {
    matches!(
        error,
        CaseError::ScoreRange { .. }
            | CaseError::DotRange { .. }
            | CaseError::ScaledQueryRange { .. }
            | CaseError::ScaleRange { .. }
    )
}

/// Scores that leave the stated range are refused, also where they would cancel; those at its end are not.
#[test]
fn scores_out_of_range_are_refused() {
    let heads = Heads::new(1, 1, 2);
    let spec = CaseSpec::new("extreme/range", heads, []).scale(1.0);
    let refused = |q: [f32; 2], k: [f32; 2]| {
        let case = assemble(&spec, &[literal(heads, q.to_vec(), k.to_vec(), vec![1.0, 2.0])]);
        match case {
            Ok(_) => false,
            Err(SpecError::Case(error)) if is_range(&error) => true,
            Err(error) => panic!("{error}"),
        }
    };
    // 2^126 / log2(e) is 5.897e37.
    assert!(!refused([1e19, 0.0], [5.8e18, 0.0]));
    assert!(refused([1e19, 0.0], [6.0e18, 0.0]));
    assert!(refused([-1e19, 0.0], [6.0e18, 0.0]));
    assert!(refused([1e19, 1e19], [3.0e18, 3.0e18]));
    assert!(refused([1e19, 1e19], [3.0e18, -3.0e18]));
    assert!(refused([3e38, 0.0], [3e38, 0.0]));
    // The scale counts.
    let spec = CaseSpec::new("extreme/range", Heads::new(1, 1, 1), []).scale(1e30);
    let sequence = literal(Heads::new(1, 1, 1), vec![1e4], vec![1e4], vec![1.0]);
    assert!(matches!(assemble(&spec, &[sequence]), Err(SpecError::Case(error)) if is_range(&error)));
}

/// Just inside the range, in both kernels.
#[test]
fn scores_at_the_end_of_the_range() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("range-end");
    for (dtype, heads) in CONFIGS {
        if fits(dtype, 3e37) {
            for level in [5.7e37, -5.7e37] {
                let spec = CaseSpec::new(format!("extreme/range-end-{level:e}"), heads, SHAPES)
                    .dtype(dtype)
                    // The customary scale would ask for a dot product beyond f32.
                    .scale(1.0)
                    .values(Values::EqualScores { level })
                    .seed(54);
                tally.check(gpu, &spec);
            }
        }
    }
    tally.finish();
}

/// Scales that are not near 1/8: none at all, negative, and so large or small that an intermediate could leave f32.
#[test]
fn scales_far_from_the_customary() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("scales");
    let heads = Heads::new(2, 2, 64);
    let shapes = [(1, 300), (33, 70)];
    // Scale, and the factor on queries and on keys.
    for (scale, q, k) in [
        (0.0, 1.0, 1.0),
        (-0.125, 1.0, 1.0),
        (1.0, 1.0, 1.0),
        (1e-6, 1e3, 1e3),
        (1e6, 1e-3, 1e-3),
        (1e-20, 1e10, 1e10),
        (1e20, 1e-10, 1e-10),
        (1e-20, 1e18, 1e2),
        (1e-20, 1e2, 1e18),
    ] {
        let spec = CaseSpec::new(format!("extreme/scale-{scale:e}-{q:e}-{k:e}"), heads, shapes).scale(scale).seed(55);
        let mut sequences = generate(&spec).unwrap();
        for s in &mut sequences {
            s.q.iter_mut().for_each(|x| *x *= q);
            s.k.iter_mut().for_each(|x| *x *= k);
        }
        let case = assemble(&spec, &sequences).unwrap();
        tally.check_case(gpu, &spec, &case, &run_options(&spec));
    }
    tally.finish();
}

/// Channels and keys that stick out, in longer sequences than the table's.
#[test]
fn values_that_stick_out() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("sticking-out");
    for (dtype, heads) in CONFIGS {
        for values in [Values::Peaky, Values::OutlierChannels, Values::LoudFuture] {
            let spec = CaseSpec::new("extreme/sticking-out", heads, [(100, 1000), (1, 5000)])
                .dtype(dtype)
                .causal(true)
                .values(values)
                .paged(Pool::new(16))
                .seed(56);
            tally.check(gpu, &spec);
        }
    }
    tally.finish();
}

/// Values whose weighted sum could leave f32 before it is divided, and outputs beyond f16: right, or refused, but
/// never wrong without a word.
#[test]
fn huge_values_are_right_or_refused() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("huge-values");
    let heads = Heads::new(4, 2, 64);
    let shapes = [(1, 300), (33, 70)];
    for (what, q, kv, out, value) in
        [("f32", Dtype::F32, Dtype::F32, Dtype::F32, 1e37), ("f32 to f16", Dtype::F16, Dtype::F32, Dtype::F16, 1e5)]
    {
        // Equal scores: the weights are 1 until the division, and the output is the value.
        let spec = CaseSpec::new(format!("extreme/huge-{what}"), heads, shapes)
            .dtypes(q, kv)
            .out(out)
            .values(Values::EqualScores { level: 0.0 })
            .seed(57);
        let mut sequences = generate(&spec).unwrap();
        for s in &mut sequences {
            s.v.fill(value);
        }
        let case = match assemble(&spec, &sequences) {
            Ok(case) => case,
            Err(error) => {
                say(&format!("{spec} is refused: {error}"));
                tally.held();
                continue;
            }
        };
        match gpu.run(&case, &run_options(&spec)) {
            Err(RunError::Device(why) | RunError::Failed(why)) => tally.fail(&spec, Some(&case), why),
            Err(error) => {
                say(&format!("{spec} is refused: {error}"));
                tally.held();
            }
            Ok(output) => match judge(&case, &output) {
                Ok(report) => tally.ratio(report.max_bound_ratio, &spec),
                Err(why) => tally.fail(&spec, Some(&case), shortened(&why)),
            },
        }
    }
    tally.finish();
}

/// A description is refused, not run, where its scores would not fit.
#[test]
fn a_level_out_of_range_makes_no_case() {
    for level in [1e38, -1e38] {
        let spec = CaseSpec::new("extreme/out", Heads::new(2, 2, 64), [(1, 4)]).values(Values::EqualScores { level });
        assert!(matches!(build(&spec), Err(SpecError::Case(error)) if is_range(&error)), "{spec}");
    }
}
