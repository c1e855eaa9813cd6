//! Pools that lie in several bindings.

use std::num::NonZeroU32;

use paged_attention::kernels::{AdapterFacts, Variants};
use paged_attention::{
    Case, Dtype, HeadGeometry, KvDtype, KvDtypes, KvSource, Pairing, Rotary, RunError, RunOptions, wgpu,
};
use paged_attention_cases::{CaseSpec, Heads, Pool, append_page_ids, build};

use crate::common::{CONFIGS, Gpu, Tally, difference, gpu, judge, run_options};

/// Prompts, a short chunk, decodes of one split and of several.
const MIXED: [(u32, u32); 7] = [(40, 70), (1, 600), (33, 33), (3, 90), (1, 1), (1, 45), (0, 20)];

const COUNTS: [u32; 4] = [2, 3, 5, 8];

/// Options that put the pool of a case into so many segments, the last of them shorter where the pages do not go into
/// them evenly.
fn in_segments(options: &RunOptions, case: &Case, segments: u32) -> RunOptions {
    let pages = match case.kv() {
        KvSource::Paged { k_pages, .. } => k_pages.shape()[0] as u32,
        KvSource::Contiguous { .. } => options.page_ids.as_ref().unwrap().iter().max().unwrap() + 1,
    };
    let segment_pages = NonZeroU32::new(pages.div_ceil(segments));
    let options = RunOptions { segment_pages, ..options.clone() };
    let variants = Variants::base(&AdapterFacts::PLAIN_GPU, case.geometry());
    assert_eq!(options.kernels(case, variants).segments.get(), segments);
    options
}

/// Of these numbers of segments, those that the adapter has bindings for, beside seven other buffers.
fn possible(gpu: &Gpu, counts: &[u32]) -> Vec<u32> {
    let most = gpu.adapter().limits().max_storage_buffers_per_shader_stage - 7;
    let counts: Vec<u32> = counts.iter().copied().filter(|segments| *segments <= most).collect();
    if counts.is_empty() { vec![1] } else { counts }
}

/// The same case in any number of segments, in every variant: bit for bit, and inside the bound.
fn check(gpu: &Gpu, tally: &mut Tally, counts: &[u32], what: &str, (case, options): (&Case, &RunOptions)) {
    for variants in gpu.every_variant(case.geometry()) {
        let options = RunOptions { variants: Some(variants), ..options.clone() };
        let what = format!("{what}, {variants}");
        let Some(expected) = tally.check_case(gpu, &what, case, &in_segments(&options, case, 1)) else { continue };
        for segments in possible(gpu, counts) {
            match gpu.run(case, &in_segments(&options, case, segments)) {
                Ok(output) => {
                    let differ = difference(&output, &expected);
                    let differ = differ.or_else(|| (output.stored != expected.stored).then(|| "stored rows".into()));
                    tally.same(format!("{segments} segments, {what}"), case, differ);
                }
                Err(error) => tally.fail(format!("{segments} segments, {what}"), Some(case), error),
            }
        }
    }
}

#[test]
fn any_number_of_segments_gives_the_same_bits() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("segments");
    for (number, (dtype, heads)) in CONFIGS.into_iter().enumerate() {
        // Each number is another set of kernels to compile.
        let counts: &[u32] = if number == 0 { &COUNTS } else { &[3] };
        let spec = CaseSpec::new("segments", heads, MIXED).dtype(dtype).causal(true).seed(81);
        for spec in [spec.clone().paged(Pool::new(16)), spec.contiguous(Pool::new(7))] {
            check(gpu, &mut tally, counts, &spec.to_string(), (&build(&spec).unwrap(), &run_options(&spec)));
        }
    }
    tally.finish();
}

/// Appends that convert write words; scales of rows lie in their page.
#[test]
fn converted_rows_in_segments() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("segments-converted");
    let of = |k, v| KvDtypes { k, v };
    let rotary = Rotary::new(Pairing::HalfSplit, 16, 10_000.0).unwrap();
    let spec = CaseSpec::new("segments/converted", Heads::new(4, 2, 24), MIXED).causal(true).contiguous(Pool::new(5));
    let case = build(&spec).unwrap();
    for (kv, rotary) in [
        (of(KvDtype::Int8, KvDtype::Int8), None),
        (of(KvDtype::Fp8, KvDtype::F16), None),
        (of(KvDtype::Int8, KvDtype::Bf16), Some(rotary)),
    ] {
        let what = format!("{kv}, rotary {}", rotary.is_some());
        let options = RunOptions { kv: Some(kv), rotary, ..run_options(&spec) };
        check(gpu, &mut tally, &[3], &what, (&case, &options));
    }
    // Values that are part of the keys.
    let spec = CaseSpec::new("segments/latent", Heads::new(3, 1, 40), [(20, 40), (1, 300)]).contiguous(Pool::new(16));
    let plain = build(&spec).unwrap();
    let KvSource::Contiguous { k, kv_indptr, .. } = plain.kv().clone() else { panic!("contiguous") };
    let kv = KvSource::Contiguous { v: k.first_of_rows(24), k, kv_indptr };
    let latent = HeadGeometry::latent(3, 40, 24).unwrap();
    let case = Case::new(latent, *plain.options(), plain.q().clone(), plain.q_indptr().to_vec(), kv).unwrap();
    check(gpu, &mut tally, &[3], "latent", (&case, &run_options(&spec)));
    tally.finish();
}

/// The runner's own kernels, self-test and all, where the device's binding holds a few pages.
#[test]
fn the_runner_takes_as_many_segments_as_it_needs() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("segments-limit");
    let (dtype, heads) = CONFIGS[1];
    let spec = CaseSpec::new("segments/limit", heads, MIXED).dtype(dtype).causal(true).seed(82).paged(Pool::new(16));
    let case = build(&spec).unwrap();
    let KvSource::Paged { k_pages, .. } = case.kv() else { panic!("paged") };
    let page_bytes = k_pages.bytes().len() as u64 * 2 / k_pages.shape()[0] as u64;
    let pages = k_pages.shape()[0] as u64;
    let plain = gpu.fresh_runner().run(&case, &run_options(&spec)).unwrap();
    let most = gpu.fresh_runner().device().limits();
    for segments in possible(gpu, &COUNTS) {
        // Nearly one page more than fits is of no use.
        let max_storage_buffer_binding_size = pages.div_ceil(segments.into()) * page_bytes + page_bytes - 16;
        let limits = wgpu::Limits { max_storage_buffer_binding_size, ..most.clone() };
        let mut runner = gpu.limited_runner(limits);
        let output = runner.run(&case, &run_options(&spec)).unwrap();
        let choice = output.choice.as_ref().unwrap();
        assert_eq!((choice.variants, &choice.stepped_down), (plain.choice.as_ref().unwrap().variants, &vec![]));
        tally.same(format!("{segments} segments"), &case, difference(&output, &plain));
    }
    tally.finish();
}

/// A pool of 200 MiB, which no binding of lavapipe holds, with pages in use on both sides of the border: written on the
/// host, and by an append.
#[test]
fn more_than_128_mib() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("segments-large");
    let heads = Heads::new(8, 4, 128);
    let lengths = [(1, 5000), (40, 900), (1, 3000), (1, 12)];
    let spec = CaseSpec::new("segments/large", heads, lengths).dtype(Dtype::F16).causal(true).seed(83);
    // 32 KiB per page of 16 tokens.
    let page_bytes = 16 * 4 * 128 * 2 * 2;
    for spec in [spec.clone().paged(Pool::new(16).times(12)), spec.contiguous(Pool::new(16).times(12))] {
        let case = build(&spec).unwrap();
        let ids = match case.kv() {
            KvSource::Paged { page_ids, .. } => page_ids.clone(),
            KvSource::Contiguous { .. } => append_page_ids(&spec).unwrap(),
        };
        let last = u64::from(*ids.iter().max().unwrap());
        assert!(last * page_bytes > 200 << 20, "{last} pages");
        let border = gpu.fresh_runner().device().limits().max_storage_buffer_binding_size / page_bytes;
        // An adapter with larger bindings has it in one segment.
        if border < last {
            let behind = ids.iter().filter(|id| u64::from(**id) >= border).count();
            assert!(behind > 50 && ids.len() - behind > 50, "{behind} of {} pages", ids.len());
        }
        tally.check_case(gpu, &spec, &case, &run_options(&spec));
    }
    tally.finish();
}

/// What has no binding left for a single segment is an error with the numbers, before anything is made.
#[test]
fn no_binding_for_a_segment() {
    let Some(gpu) = gpu() else { return };
    let (dtype, heads) = CONFIGS[0];
    let spec = CaseSpec::new("segments/refused", heads, [(1, 100)]).dtype(dtype).paged(Pool::new(4));
    let case = build(&spec).unwrap();
    let run = |bindings: u32, segments: u32| {
        let limits = gpu.fresh_runner().device().limits();
        let limits = wgpu::Limits { max_storage_buffers_per_shader_stage: bindings, ..limits };
        gpu.limited_runner(limits).run(&case, &in_segments(&run_options(&spec), &case, segments))
    };
    // Five other buffers.
    for segments in [3, 5] {
        judge(&case, &run(8, segments).unwrap()).unwrap();
    }
    let error = run(5, 5).unwrap_err();
    assert!(matches!(error, RunError::Build(_)), "{error:?}");
    assert_eq!(
        error.to_string(),
        "kernel `prefill` needs max_storage_buffers_per_shader_stage of 6; the device allows 5"
    );
}
