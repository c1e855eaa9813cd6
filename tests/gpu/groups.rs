//! Pools in more segments than a dispatch has bindings for: work is done group by group of segments, and merged.

use std::num::NonZeroU32;
use std::ops::Range;

use paged_attention::kernels::{AdapterFacts, KernelId, Kernels, SourceEdit, Variants};
use paged_attention::{
    Append, AppendPlan, AppendSource, AttentionConfig, AttentionIo, Batch, Case, DevicePlan, Dtype, Extras, KvDtype,
    KvDtypes, KvLayout, KvSource, KvStore, Output, PageCopy, PageSize, Pairing, PlanError, Rotary, RunError,
    RunOptions, Runner, SharedPrefix, Workspace, wgpu,
};
use paged_attention_cases::{
    CaseSpec, Crossed, Heads, Mask, Modifiers, PageOrder, Pool, SharedSpec, Sinks, build, crossed, crossed_kernels,
    shared,
};

use crate::api::Host;
use crate::api::host::{Guarded, owned, padded_rows};
use crate::common::{EVERY_MODIFIER, Gpu, HIDING_BIAS, Tally, bits, difference, gpu, judge, rows_of, run_options, say};

/// Prompts, a short chunk, decodes of one split and of several.
const MIXED: [(u32, u32); 7] = [(40, 70), (1, 600), (33, 33), (3, 90), (1, 1), (1, 45), (0, 20)];

/// Small heads: each set of options is a compilation of its own.
const HEADS: Heads = Heads::new(4, 2, 16);

/// A device with bindings for so many segments beside those of a call without slopes, sinks, scales of heads and bias.
fn device(gpu: &Gpu, segments: u32) -> Runner {
    gpu.limited_runner(wgpu::Limits {
        max_storage_buffers_per_shader_stage: 5 + segments,
        ..gpu.fresh_runner().device().limits()
    })
}

/// Pages that a run has.
fn pages(case: &Case, options: &RunOptions) -> u32 {
    match case.kv() {
        KvSource::Paged { k_pages, .. } => k_pages.shape()[0] as u32,
        KvSource::Contiguous { .. } => options.page_ids.as_ref().unwrap().iter().max().unwrap() + 1,
    }
}

/// Options that put the pool of a case into about so many segments.
fn in_segments(options: &RunOptions, case: &Case, segments: u32) -> RunOptions {
    let segment_pages = NonZeroU32::new(pages(case, options).div_ceil(segments));
    RunOptions { segment_pages, ..options.clone() }
}

/// The case on that device, inside the bound.
fn check(runner: &mut Runner, tally: &mut Tally, what: &str, case: &Case, options: &RunOptions) -> Option<Output> {
    match runner.run(case, options).map_err(|error| error.to_string()) {
        Ok(output) => match judge(case, &output) {
            Ok(report) => {
                tally.ratio(report.max_bound_ratio, what);
                return Some(output);
            }
            Err(why) => tally.fail(what, Some(case), why),
        },
        Err(why) => tally.fail(what, Some(case), why),
    }
    None
}

fn in_every_variant(gpu: &Gpu, case: &Case, options: &RunOptions) -> Vec<RunOptions> {
    let variants = gpu.every_variant(case.geometry()).into_iter();
    variants.map(|variants| RunOptions { variants: Some(variants), ..options.clone() }).collect()
}

/// Pages at random places, written by the host or appended, in pages of 1, 7 and 16, in two groups and in many; the last group
/// has segments of the one before, or the last segment alone.
#[test]
fn every_variant_in_any_number_of_groups() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("groups");
    for (bound, counts) in [(1, &[2, 9][..]), (3, &[4, 6, 11])] {
        let mut runner = device(gpu, bound);
        for (page_size, dtype) in [(16, Dtype::F16), (1, Dtype::F32), (7, Dtype::F16)] {
            let spec = CaseSpec::new("groups", HEADS, MIXED).dtype(dtype).causal(true).seed(91);
            for spec in [spec.clone().paged(Pool::new(page_size)), spec.contiguous(Pool::new(page_size))] {
                let case = build(&spec).unwrap();
                for options in in_every_variant(gpu, &case, &run_options(&spec)) {
                    for count in counts {
                        let options = in_segments(&options, &case, *count);
                        let what = format!("{count} segments, {bound} at once, {spec}, {}", options.variants.unwrap());
                        let Some(output) = check(&mut runner, &mut tally, &what, &case, &options) else { continue };
                        assert!(output.kernels.iter().any(|used| used.kernel == "merge"), "nothing was merged");
                    }
                }
            }
        }
    }
    tally.finish();
}

/// What hides keys or changes scores, alone and together.
#[test]
fn every_option() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("groups/options");
    const NONE: Modifiers = Modifiers::NONE;
    // Room for slopes and bias beside two segments.
    let mut runner = device(gpu, 4);
    for (causal, modifiers, page_size) in [
        (false, NONE, 16),
        (true, Modifiers { window_left: Some(40), ..NONE }, 16),
        (false, Modifiers { window_left: Some(250), window_right: Some(3), ..NONE }, 1),
        (true, Modifiers { sinks: Some(Sinks::Within(10.0)), ..NONE }, 16),
        (true, Modifiers { mask: Some(Mask::Random(50)), ..NONE }, 1),
        (false, Modifiers { mask: Some(Mask::Blocks(16)), ..NONE }, 16),
        (true, Modifiers { mask: Some(Mask::Nothing), ..NONE }, 16),
        (false, Modifiers { bias: Some(HIDING_BIAS), ..NONE }, 16),
        (true, EVERY_MODIFIER, 1),
        (true, EVERY_MODIFIER, 16),
    ] {
        let spec = CaseSpec::new("groups/options", HEADS, MIXED).dtype(Dtype::F16).causal(causal).modified(modifiers);
        let spec = spec.paged(Pool::new(page_size)).seed(92);
        let case = build(&spec).unwrap();
        for options in in_every_variant(gpu, &case, &run_options(&spec)) {
            let what = format!("{spec}, {}", options.variants.unwrap());
            check(&mut runner, &mut tally, &what, &case, &in_segments(&options, &case, 9));
        }
    }
    tally.finish();
}

/// Prefixes and what lies behind them are in several groups each.
#[test]
fn shared_prefixes() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("groups/shared");
    let mut runner = device(gpu, 2);
    let all = Modifiers { window_left: Some(200), mask: Some(Mask::Random(70)), ..Modifiers::NONE };
    let rows = shared().into_iter().filter(|row| row.spec.name.starts_with("shared/tree-f16"));
    for row in rows.take(1) {
        for (modifiers, count) in [(Modifiers::NONE, 3), (Modifiers::NONE, 12), (all, 7)] {
            let spec = CaseSpec { heads: HEADS, ..row.spec.clone().modified(modifiers) };
            let row = SharedSpec { spec, prefixes: row.prefixes.clone() };
            let case = row.build().unwrap();
            let options = RunOptions { shared_prefixes: row.prefixes.clone(), ..run_options(&row.spec) };
            for options in in_every_variant(gpu, &case, &options) {
                let what = format!("{count} segments, {}, {}", row.spec, options.variants.unwrap());
                check(&mut runner, &mut tally, &what, &case, &in_segments(&options, &case, count));
            }
        }
    }
    // A prefix of each sequence alone, which ends inside a page.
    let spec = CaseSpec::new("groups/alone", HEADS, MIXED).dtype(Dtype::F16).causal(true).paged(Pool::new(16)).seed(93);
    let case = build(&spec).unwrap();
    let prefix = |(seq, tokens): (usize, u32)| SharedPrefix { seqs: seq..seq + 1, tokens };
    let shared_prefixes = [(0, 33), (1, 300), (3, 90), (5, 7)].map(prefix).to_vec();
    for options in in_every_variant(gpu, &case, &RunOptions { shared_prefixes, ..run_options(&spec) }) {
        let what = format!("{spec}, {}", options.variants.unwrap());
        check(&mut runner, &mut tally, &what, &case, &in_segments(&options, &case, 9));
    }
    tally.finish();
}

/// Appends that convert write words; scales of rows lie in their page.
#[test]
fn converted_rows() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("groups/converted");
    let of = |k, v| KvDtypes { k, v };
    let rotary = Rotary::new(Pairing::HalfSplit, 16, 10_000.0).unwrap();
    let spec = CaseSpec::new("groups/converted", Heads::new(4, 2, 24), MIXED).causal(true).contiguous(Pool::new(5));
    let case = build(&spec).unwrap();
    for (kv, rotary, bound) in [
        (of(KvDtype::Int8, KvDtype::Int8), None, 1),
        (of(KvDtype::Fp8, KvDtype::F16), None, 3),
        (of(KvDtype::Int8, KvDtype::Bf16), Some(rotary), 3),
    ] {
        let mut runner = device(gpu, bound);
        let options = RunOptions { kv: Some(kv), rotary, ..run_options(&spec) };
        let whole = gpu.run(&case, &options).unwrap();
        for options in in_every_variant(gpu, &case, &options) {
            let what = format!("{kv}, {bound} at once, {}", options.variants.unwrap());
            let options = in_segments(&options, &case, 11);
            let Some(output) = check(&mut runner, &mut tally, &what, &case, &options) else { continue };
            // What the pages hold depends on no group.
            tally.same(what, &case, (output.stored != whole.stored).then(|| "stored rows".into()));
        }
    }
    tally.finish();
}

/// Sequences whose pages lie in one group have the bits of a pool in one segment, and the runner tests its kernels.
#[test]
fn sequences_in_one_group_keep_their_bits() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("groups/one");
    let spec = CaseSpec::new("groups/one", HEADS, [(40, 70), (1, 600), (33, 33), (3, 90), (1, 900), (1, 45)]);
    let pool = Pool { order: PageOrder::InOrder, ..Pool::new(16).times(1) };
    let spec = spec.dtype(Dtype::F16).causal(true).paged(pool).seed(94);
    let case = build(&spec).unwrap();
    let KvSource::Paged { page_indptr, page_ids, .. } = case.kv() else { panic!("paged") };
    let mut runner = device(gpu, 2);
    let whole = gpu.fresh_runner().run(&case, &run_options(&spec)).unwrap();
    let mut seen = [0; 2];
    for count in [3, 4, 8] {
        let options = in_segments(&run_options(&spec), &case, count);
        let what = format!("{count} segments");
        let Some(output) = check(&mut runner, &mut tally, &what, &case, &options) else { continue };
        let choice =
            |output: &Output| output.choice.as_ref().map(|choice| (choice.variants, choice.stepped_down.len()));
        assert_eq!(choice(&output), choice(&whole));
        let group_pages = 2 * options.segment_pages.unwrap().get();
        for (seq, (q_len, _)) in case.lengths().into_iter().enumerate() {
            let ids: Range<usize> = page_indptr[seq] as usize..page_indptr[seq + 1] as usize;
            let mut groups: Vec<u32> = page_ids[ids].iter().map(|page| page / group_pages).collect();
            groups.sort_unstable();
            groups.dedup();
            seen[usize::from(groups.len() > 1)] += 1;
            if groups.len() == 1 {
                let [a, b] = [&output, &whole].map(|output| rows_of(&case, output, seq, 0, q_len));
                let differ = bits("out", &a.out, &b.out).or_else(|| bits("lse", &a.lse, &b.lse));
                tally.same(format!("{what}, sequence {seq}"), &case, differ);
            }
        }
    }
    assert!(seen.iter().all(|count| *count > 2), "{seen:?}");
    tally.finish();
}

/// The real kernels are right in several groups; those with a fault of groups are noticed, in every variant.
#[test]
fn faults_of_groups_are_noticed() {
    let Some(gpu) = gpu() else { return };
    let mut runner = device(gpu, 2);
    let prefill = CaseSpec::new("groups/faults", HEADS, [(40, 170), (33, 33)]).causal(true).seed(95);
    let decode = CaseSpec::new("groups/faults", HEADS, [(1, 600), (1, 90), (2, 45)]).causal(true).seed(96);
    let here = "return id - params.first_page < params.pages;";
    let base = "rows.base + page * rows.page_stride";
    for (kernel, spec, fault, from, to) in [
        (KernelId::Prefill, &prefill, "keys of other groups are not hidden", here, "return true;"),
        (KernelId::Decode, &decode, "keys of other groups are not hidden", here, "return true;"),
        (KernelId::Decode, &decode, "one page more", here, "return id - params.first_page <= params.pages;"),
        (KernelId::Prefill, &prefill, "one page less", here, "return id - params.first_page + 1u < params.pages;"),
        (KernelId::Decode, &decode, "rows of the first group", base, "page % (2u * params.pages) * rows.page_stride"),
        (KernelId::Merge, &decode, "a group is forgotten", "var at = item.key_begin;", "var at = item.key_begin + 1u;"),
        (
            KernelId::Append,
            &prefill,
            "rows of other groups are written",
            "if index < size {\n        kv_pages_0[index] = unit;",
            "if index < size || index >= 2u * size {\n        kv_pages_0[index % size] = unit;",
        ),
    ] {
        let contiguous = kernel == KernelId::Append;
        let spec = match contiguous {
            true => spec.clone().contiguous(Pool::new(4).times(1)),
            false => spec.clone().dtype(Dtype::F16).paged(Pool::new(4).times(1)),
        };
        let case = build(&spec).unwrap();
        for options in in_every_variant(gpu, &case, &in_segments(&run_options(&spec), &case, 5)) {
            let config = options.kernels(&case, options.variants.unwrap());
            let run = |runner: &mut Runner, edits: &[SourceEdit]| -> Result<(), String> {
                let kernels = pollster::block_on(Kernels::with_edits(runner.device(), &config, edits)).unwrap();
                runner.insert_kernels(kernels);
                let output = runner.run(&case, &options).map_err(|error| error.to_string())?;
                judge(&case, &output).map(|_| ())
            };
            run(&mut runner, &[]).unwrap_or_else(|why| panic!("{fault}: the real kernels: {why}"));
            let why = run(&mut runner, &[SourceEdit { kernel, from, to }]);
            let why = why.expect_err(&format!("{fault}: not noticed in {}", config.variants));
            say(&format!("groups, {fault}, {}: noticed: {}", kernel.entry_point(), why.lines().next().unwrap_or("")));
        }
    }
}

/// A page id outside the pool is no page of another group: the kernel says so.
#[test]
fn a_page_outside_the_pool_is_reported() {
    let Some(gpu) = gpu() else { return };
    let mut runner = device(gpu, 1);
    let spec =
        CaseSpec::new("groups/page", HEADS, [(40, 170), (1, 600)]).dtype(Dtype::F16).paged(Pool::new(4)).seed(97);
    let case = build(&spec).unwrap();
    let variants = Variants::base(&AdapterFacts::PLAIN_CPU, case.geometry());
    let options = in_segments(&RunOptions { variants: Some(variants), ..run_options(&spec) }, &case, 3);
    for kernel in [KernelId::Prefill, KernelId::Decode] {
        let from = "return Page(id, id < params.page_count);";
        let to = "return Page(id + 9999u, id + 9999u < params.page_count);";
        let edits = [SourceEdit { kernel, from, to }];
        let config = options.kernels(&case, variants);
        runner.insert_kernels(pollster::block_on(Kernels::with_edits(runner.device(), &config, &edits)).unwrap());
        let error = runner.run(&case, &options).unwrap_err();
        assert!(error.to_string().contains("page"), "{error}");
    }
}

/// An application with a store in four groups of one segment: an append and a plan that are written into room for them, copies
/// of pages inside of segments and between them, and a swap to the host and back.
#[test]
fn an_application_in_groups() {
    let (Some(gpu), Some(_)) = (gpu(), crate::api::host()) else { return };
    let limits = wgpu::Limits { max_storage_buffers_per_shader_stage: 6, ..wgpu::Limits::default() };
    let host = Host::open(gpu, limits.clone());
    let device = &host.device;
    let lengths = [(10, 30), (1, 17), (3, 3)];
    let spec = CaseSpec::new("groups/application", HEADS, lengths).dtype(Dtype::F16).causal(true);
    let spec = spec.contiguous(Pool::new(4)).seed(98);
    let case = build(&spec).unwrap();
    let KvSource::Contiguous { k, v, .. } = case.kv() else { panic!("contiguous") };
    let segment_pages = NonZeroU32::new(5).unwrap();
    let layout = KvLayout::new(*case.geometry(), Dtype::F16, PageSize::new(4).unwrap(), 20).unwrap();
    let layout = layout.with_segment_pages(segment_pages);
    let new_rows = Dtype::F16.into();
    let (options, extras) = (*case.options(), Extras::NONE);
    let attention =
        host.attention(&AttentionConfig { q: Dtype::F16, out: Dtype::F32, layout, new_rows, options, extras });
    let mut store = pollster::block_on(KvStore::new(device, &layout, 1, 2)).unwrap();
    let workspace = Workspace::new(device, 1 << 20).unwrap();

    // All tokens are new, and come where the first eight pages of the first sequence are not to stay.
    let page_indptr = [0, 8, 13, 14];
    let kv_len = lengths.map(|(_, kv_len)| kv_len);
    let before = [0, 7, 12, 19, 3, 6, 15, 8, 1, 16, 11, 5, 18, 13];
    let after = [2, 9, 4, 19, 3, 10, 15, 14, 1, 16, 11, 5, 17, 13];
    let append = Append::with_capacity(device, &layout, &new_rows, 50).unwrap();
    let tokens = Batch { q_indptr: &[0, 30, 47, 50], page_indptr: &page_indptr, page_ids: &before, kv_len: &kv_len };
    let [q, k, v] = [case.q(), k, v].map(|tensor| Guarded::new(&host, &padded_rows(tensor, 16)));
    let (k, v) = (k.binding(), v.binding());
    let source = AppendSource { k, v, kv: store.pages(0).unwrap(), head_scales: None };
    let append_call = append.bind(device, attention.kernels(), source, &workspace).unwrap();
    let mut belt = wgpu::util::StagingBelt::new(device.clone(), 1 << 16);
    let mut encoder = host.encoder();
    append.write(&mut belt, &mut encoder, &AppendPlan::new(&layout, &tokens).unwrap()).unwrap();
    append_call.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    belt.finish();
    host.queue.submit([encoder.finish()]);

    // 0 to 2 and 7 to 9 stay in their segments, 12 and the others go to another; 18 goes to 17 by way of the host.
    let mut workgroups = append_call.workgroups();
    let on_device = [(0, 2), (7, 9), (12, 4), (6, 10), (8, 14)].map(|(from, to)| PageCopy::OnDevice { from, to });
    let list = [&on_device[..], &[PageCopy::ToHost { page: 18, slot: 1 }]].concat();
    for list in [&list[..], &[PageCopy::ToDevice { slot: 1, page: 17 }]] {
        let copies = store.copies(device, list, &workspace).unwrap();
        workgroups += copies.workgroups();
        let mut encoder = host.encoder();
        let to_host = copies.encode(&mut encoder);
        host.queue.submit([encoder.finish()]);
        if let Some(to_host) = to_host {
            to_host.buffer().map_async(wgpu::MapMode::Read, .., |mapped| mapped.unwrap());
            device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
            assert_eq!(store.receive(&to_host).unwrap(), 1);
        }
    }

    let batch = Batch { q_indptr: case.q_indptr(), page_indptr: &page_indptr, page_ids: &after, kv_len: &kv_len };
    let plan = attention.plan(&batch).unwrap();
    // What the sequences need one by one is enough for all of them.
    let alone = |seq: usize| {
        let pages = page_indptr[seq] as usize..page_indptr[seq + 1] as usize;
        let (q_indptr, page_indptr) = ([0, lengths[seq].0], [0, pages.len() as u32]);
        let page_ids = &after[pages];
        let batch = Batch { q_indptr: &q_indptr, page_indptr: &page_indptr, page_ids, kv_len: &kv_len[seq..=seq] };
        attention.plan(&batch).unwrap().capacity()
    };
    let capacity = alone(0).and(alone(1)).and(alone(2));
    let device_plan = DevicePlan::with_capacity(device, &attention, &capacity).unwrap();
    let bytes = attention.config().buffer_bytes(capacity.total_q);
    let [out, lse] = [bytes.out, bytes.lse].map(|bytes| Guarded::unwritten(&host, bytes));
    let kv = store.pages(0).unwrap();
    let io = AttentionIo { q: q.binding(), kv, out: out.binding(), lse: lse.binding(), heads: None, bias: None };
    let call = attention.bind(device, &device_plan, io, &workspace).unwrap();
    belt.recall();
    let mut encoder = host.encoder();
    device_plan.write(&mut belt, &mut encoder, &plan).unwrap();
    call.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    belt.finish();
    host.queue.submit([encoder.finish()]);
    // Prefill and decode in several groups each, and a merge.
    assert!(call.slices() > 4, "{} slices", call.slices());
    host.status(&workspace).check(workgroups + call.workgroups()).unwrap();

    // The same pages by the runner.
    let mut runner = gpu.limited_runner(limits.or_worse_values_from(&gpu.adapter().limits()));
    let variants = Some(attention.kernels().config().variants);
    let page_ids = Some(after.to_vec());
    let run = RunOptions { variants, page_ids, segment_pages: Some(segment_pages), ..run_options(&spec) };
    let expected = runner.run(&case, &run).unwrap();
    judge(&case, &expected).unwrap();
    let found = [owned(Dtype::F32, &out.read(&host, "out"), 16), owned(Dtype::F32, &lse.read(&host, "lse"), 1)];
    assert_eq!(bits("out", &found[0], &expected.out).or(bits("lse", &found[1], &expected.lse)), None);
}

/// Options, shapes, types, page sizes and orders at random, shared prefixes among them, and partial states in rounds.
/// `PAGED_ATTENTION_CROSSED_SEED` repeats a run.
#[test]
fn random_combinations_in_groups() {
    let Some(gpu) = gpu() else { return };
    let seed = std::env::var("PAGED_ATTENTION_CROSSED_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(rand::random::<u64>);
    say(&format!("groups/crossed: PAGED_ATTENTION_CROSSED_SEED={seed}"));
    let mut tally = Tally::new("groups/crossed");
    // WebGPU's eight: one to three segments at once.
    let mut runner = device(gpu, 3);
    // Compiling takes most of the time.
    for (place, kernel) in crossed_kernels().iter().enumerate().step_by(2) {
        for number in 0..6 {
            let drawn = crossed(kernel, seed.wrapping_add(100 * place as u64 + number));
            let case = drawn.build().unwrap_or_else(|error| panic!("{drawn:?}: {error}"));
            let all = gpu.every_variant(case.geometry());
            let Crossed { spec, prefixes, stored, order } = &drawn;
            let options = RunOptions {
                kv: Some(*stored),
                order: *order,
                shared_prefixes: prefixes.clone(),
                variants: Some(all[place / 2 % all.len()]),
                ..run_options(spec)
            };
            let options = in_segments(&options, &case, 5 + number as u32);
            let what = format!("{drawn:?}");
            let Some(whole) = check(&mut runner, &mut tally, &what, &case, &options) else { continue };
            let half = RunOptions { workspace_max: Some(whole.workspace_bytes / 2), ..options };
            match runner.run(&case, &half) {
                Ok(output) => tally.same(what, &case, difference(&output, &whole)),
                Err(RunError::Plan(PlanError::Workspace { .. })) => {}
                Err(error) => tally.fail(what, Some(&case), error),
            }
        }
    }
    tally.finish();
}
