//! What changes scores: windows, soft caps, ALiBi, sinks, masks and biases, in every kernel variant.

use paged_attention::{Case, CaseError, CaseExtras, Dtype, HeadGeometry, KvSource, RunOptions, Tensor};
use paged_attention_cases::{CaseSpec, Heads, Mask, Modifiers, Pool, assemble, build, generate};

use crate::common::{Gpu, Tally, difference, gpu, judge, rows_of, run_options};

/// Prompts with ragged tiles, chunks, and single tokens with one split and several.
const LENGTHS: [(u32, u32); 6] = [(37, 71), (1, 45), (1, 600), (5, 300), (20, 9), (1, 1)];

fn spec(name: &str) -> CaseSpec {
    CaseSpec::new(name, Heads::new(4, 2, 16), LENGTHS).causal(true).paged(Pool::new(7))
}

/// A number between 0 and 1 from a counter.
fn noise(index: usize) -> f32 {
    let mixed = (index as u32).wrapping_mul(0x9e37_79b9) ^ 0x5bd1_e995;
    (mixed.wrapping_mul(0x85eb_ca6b) >> 8) as f32 / 16_777_216.0
}

fn check(gpu: &Gpu, name: &str, case: &Case, spec: &CaseSpec) {
    for variants in gpu.every_variant(case.geometry()) {
        let options = RunOptions { variants: Some(variants), ..run_options(spec) };
        let output = gpu.run(case, &options).unwrap_or_else(|error| panic!("{name}: {error}"));
        if let Err(why) = judge(case, &output) {
            panic!("{name}, {} {}: {why}", variants.prefill, variants.decode);
        }
    }
}

/// Stretches of keys that are hidden from, visible to, or mixed for several rows at a time.
fn stretches(case: &Case) -> Vec<bool> {
    let pairs = case
        .lengths()
        .into_iter()
        .flat_map(|(q_len, kv_len)| (0..q_len).flat_map(move |row| (0..kv_len).map(move |key| (row, key))));
    pairs
        .map(|(row, key)| match (row / 24 + key / 32) % 4 {
            0 => false,
            1 => (row + key) % 3 > 0,
            _ => true,
        })
        .collect()
}

#[test]
fn each_option_and_all_together() {
    let Some(gpu) = gpu() else { return };
    let plain = build(&spec("options")).unwrap();
    let pairs = *plain.score_indptr().last().unwrap() as usize;
    let bias = |dtype, heads: usize| {
        let values: Vec<f32> = (0..heads * pairs)
            .map(|at| if noise(at) < 0.1 { f32::NEG_INFINITY } else { 4.0 * noise(at + 99) - 2.0 })
            .collect();
        Tensor::from_f32(dtype, &[heads, pairs], &values).unwrap()
    };
    let slopes = Some(vec![0.5, 0.25, 0.125, 0.0625]);
    let sinks = Some(vec![1.0, -3.0, 8.0, 0.0]);
    let mask: Option<Vec<bool>> = Some((0..pairs).map(|at| noise(at) < 0.7).collect());
    let options = *plain.options();
    let none = CaseExtras::default();
    let extras = |set: &dyn Fn(&mut CaseExtras)| {
        let mut extras = CaseExtras::default();
        set(&mut extras);
        extras
    };
    let all = extras(&|extras| {
        extras.alibi_slopes = slopes.clone();
        extras.sinks = sinks.clone();
        extras.mask = mask.clone();
        extras.bias = Some(bias(Dtype::F16, 4));
    });
    for (name, options, extras) in [
        ("window left", options.with_window(Some(13), None), none.clone()),
        ("window left 0", options.with_window(Some(0), None), none.clone()),
        ("window both", options.with_causal(false).with_window(Some(43), Some(3)), none.clone()),
        ("window right", options.with_causal(false).with_window(None, Some(9)), none.clone()),
        ("softcap", options.with_softcap(Some(3.0)), none.clone()),
        ("alibi", options, extras(&|extras| extras.alibi_slopes = slopes.clone())),
        ("sinks", options, extras(&|extras| extras.sinks = sinks.clone())),
        ("mask", options, extras(&|extras| extras.mask = mask.clone())),
        ("mask by stretches", options, extras(&|extras| extras.mask = Some(stretches(&plain)))),
        (
            "mask by stretches in a window",
            options.with_causal(false).with_window(Some(77), Some(5)),
            extras(&|extras| extras.mask = Some(stretches(&plain))),
        ),
        ("bias f32", options, extras(&|extras| extras.bias = Some(bias(Dtype::F32, 1)))),
        ("bias f16 per head", options, extras(&|extras| extras.bias = Some(bias(Dtype::F16, 4)))),
        ("all", options.with_window(Some(100), None).with_softcap(Some(5.0)), all),
    ] {
        let case =
            Case::new(*plain.geometry(), options, plain.q().clone(), plain.q_indptr().to_vec(), plain.kv().clone());
        check(gpu, name, &case.unwrap().with_extras(extras).unwrap(), &spec(name));
    }
}

/// Values that are part of the keys lie once in the pool, and are read as if they lay twice.
#[test]
fn latent_values() {
    let Some(gpu) = gpu() else { return };
    for (dim, v_dim, group) in [(576, 512, 4), (24, 17, 3)] {
        let spec = CaseSpec::new("latent", Heads::new(group, 1, dim).with_v(v_dim), [(20, 40), (1, 300)])
            .causal(true)
            .contiguous(Pool::new(7));
        let plain = build(&spec).unwrap();
        let KvSource::Contiguous { k, kv_indptr, .. } = plain.kv().clone() else { panic!("contiguous") };
        let v = k.first_of_rows(v_dim as usize);
        let case = |geometry: HeadGeometry, v: Tensor| {
            let kv = KvSource::Contiguous { k: k.clone(), v, kv_indptr: kv_indptr.clone() };
            Case::new(geometry, *plain.options(), plain.q().clone(), plain.q_indptr().to_vec(), kv)
        };
        let latent = HeadGeometry::latent(group, dim, v_dim).unwrap();
        let shared = case(latent, v.clone()).unwrap();
        check(gpu, "latent", &shared, &spec);
        let twice = case(HeadGeometry::with_v_head_dim(group, 1, dim, v_dim).unwrap(), v.clone()).unwrap();
        let options = run_options(&spec);
        let outputs = [&shared, &twice].map(|case| gpu.run(case, &options).unwrap());
        assert_eq!(difference(&outputs[0], &outputs[1]), None);
        let mut other = v.to_f32();
        other[3] += 1.0;
        let other = Tensor::from_f32(v.dtype(), v.shape(), &other).unwrap();
        assert!(matches!(case(latent, other), Err(CaseError::LatentValues { v: "v", .. })));
    }
}

/// A token that is decoded sees what it sees as the last row of its prompt, with a window that begins anywhere.
#[test]
fn a_windowed_decode_is_the_last_row_of_the_prompt() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("options/window-decode");
    let heads = Heads::new(4, 2, 16);
    for left in [3, 13, 43] {
        for kv_len in [1, 19, 99, 1999] {
            let window = Modifiers { window_left: Some(left), ..Modifiers::NONE };
            let spec = |lengths| {
                let spec = CaseSpec::new("options/window-decode", heads, [lengths]).causal(true).modified(window);
                spec.paged(Pool::new(16).times(2).withheld()).seed(61)
            };
            let prompt = spec((kv_len, kv_len));
            let whole = generate(&prompt).unwrap().remove(0);
            let last = assemble(&spec((1, kv_len)), &[whole.chunk(&heads, kv_len - 1, kv_len, kv_len)]).unwrap();
            let options = run_options(&prompt);
            let Some((case, expected)) = tally.check(gpu, &prompt) else { continue };
            let Some(output) = tally.check_case(gpu, format!("decode of {prompt}"), &last, &options) else { continue };
            let row = rows_of(&case, &expected, 0, kv_len - 1, kv_len);
            let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 2e-5 * (1.0 + b.abs()));
            let why = "the decode is not the last row of the prompt".to_owned();
            let same = near(&output.out, &row.out) && near(&output.lse, &row.lse);
            tally.same(&prompt, &last, (!same).then_some(why));
        }
    }
    tally.finish();
}

/// A lower-triangular mask is the causal mask, bit by bit: what is hidden is hidden alike.
#[test]
fn a_triangular_mask_is_the_causal_mask() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("options/triangular");
    let causal = spec("options/triangular");
    let masked = causal.clone().causal(false).modified(Modifiers { mask: Some(Mask::Causal), ..Modifiers::NONE });
    let cases = [&causal, &masked].map(|spec| build(spec).unwrap());
    for variants in gpu.every_variant(cases[0].geometry()) {
        let options = RunOptions { variants: Some(variants), ..run_options(&causal) };
        let [a, b] = cases.each_ref().map(|case| tally.check_case(gpu, variants, case, &options));
        let (Some(a), Some(b)) = (a, b) else { continue };
        tally.same(variants, &cases[1], difference(&a, &b));
    }
    tally.finish();
}
