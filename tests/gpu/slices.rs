//! Work that is cut into slices and spread over submits: no cut changes a bit, and none is longer than it should be.

use std::time::Duration;

use paged_attention::kernels::{KernelId, Kernels, SourceEdit};
use paged_attention::{BindError, Case, Dtype, Output, PlanError, RunError, RunOptions, Workspace, wgpu};
use paged_attention_cases::{CaseSpec, Heads, Modifiers, Pool, build, options, shared};

use crate::api::{Host, Layer, batch, host};
use crate::common::{CONFIGS, Tally, bits, difference, gpu, judge, run_options, say};

/// Prompts of several tiles, chunks, single tokens of one split and several, rows without keys.
const LENGTHS: [(u32, u32); 8] = [(70, 200), (1, 700), (33, 33), (3, 90), (1, 257), (20, 9), (1, 0), (50, 50)];

fn workgroups(output: &Output) -> u32 {
    output.kernels.iter().filter(|used| used.kernel != "append").map(|used| used.workgroups).sum()
}

/// Runs a case whole, and with its work cut to the largest part, to about half, to a seventh, and to single workgroups.
fn check(tally: &mut Tally, what: &str, case: &Case, run: &RunOptions) {
    let gpu = gpu().unwrap();
    for variants in gpu.every_variant(case.geometry()) {
        let cut = |work_max| RunOptions { variants: Some(variants), submit_work_max: Some(work_max), ..run.clone() };
        let whole = match gpu.run(case, &cut(u64::MAX)) {
            Ok(whole) => whole,
            Err(error) => {
                tally.fail(what, Some(case), error);
                continue;
            }
        };
        // One slice for each kernel.
        let kernels = whole.kernels.iter().filter(|used| used.kernel != "append").count();
        assert_eq!(whole.submits as usize, kernels, "{what}");
        let groups = workgroups(&whole);
        // A seventh of the largest kernel's work, about.
        let work = case.lengths().iter().map(|(q_len, kv_len)| u64::from(q_len.max(&64) * kv_len)).sum::<u64>();
        let geometry = case.geometry();
        let dims = u64::from(geometry.head_dim() + geometry.v_head_dim());
        let work = work * u64::from(geometry.q_heads()) * dims;
        for (cuts, work_max) in [(2, work / 2), (7, work / 7), (50, work / 50), (0, 1)] {
            let output = gpu.run(case, &cut(work_max)).unwrap();
            tally.same(format!("{cuts} cuts of {what} in {variants}"), case, difference(&output, &whole));
            match work_max {
                1 => assert_eq!(output.submits, groups, "{what}: a workgroup per submit"),
                _ => assert!(output.submits >= whole.submits && output.submits <= groups, "{what}"),
            }
            if cuts == 50 {
                assert!(output.submits > whole.submits, "{what}: {} submits", output.submits);
            }
        }
    }
}

#[test]
fn cuts_change_no_bit() {
    let Some(_) = gpu() else { return };
    let mut tally = Tally::new("slices/bits");
    for (dtype, heads) in CONFIGS {
        let spec = CaseSpec::new("slices", heads, LENGTHS).dtype(dtype).causal(true).paged(Pool::new(16)).seed(71);
        check(&mut tally, &spec.to_string(), &build(&spec).unwrap(), &run_options(&spec));
    }
    // Work items with a mask have other words, and so have merges of shared prefixes.
    let mut masked = options().into_iter().filter(|spec| spec.modifiers.mask.is_some());
    let spec = masked.next().unwrap();
    assert_ne!(spec.modifiers, Modifiers::NONE);
    check(&mut tally, &spec.to_string(), &build(&spec).unwrap(), &run_options(&spec));
    let row = shared().into_iter().next().unwrap();
    let run = RunOptions { shared_prefixes: row.prefixes.clone(), ..run_options(&row.spec) };
    check(&mut tally, &row.spec.to_string(), &row.build().unwrap(), &run);
    tally.finish();
}

/// The caller cuts and submits by itself, the parts in any order, the merges last.
#[test]
fn the_caller_spreads_slices_over_submits() {
    let (Some(gpu), Some(host)) = (gpu(), host()) else { return };
    let (dtype, heads) = CONFIGS[1];
    let spec = CaseSpec::new("slices/caller", heads, LENGTHS).dtype(dtype).causal(true).paged(Pool::new(16)).seed(72);
    let (case, expected) = gpu.run_spec(&spec).unwrap();
    let layer = |host: &Host| Layer::new(host, &case, Dtype::F32).config;
    let attention = host.attention(&layer(host));
    let whole = attention.plan(&batch(&case)).unwrap();
    let total: u64 = whole.slices().iter().map(|slice| whole.work(slice)).sum();
    for parts in [2, 7, u64::MAX] {
        let mut plan = whole.clone();
        plan.cut(|_| total / parts);
        // Every workgroup once, kernel by kernel, merges last.
        let mut next: Vec<(KernelId, u32)> = Vec::new();
        for slice in plan.slices() {
            assert!(!slice.workgroups.is_empty());
            match next.last_mut() {
                Some((kernel, end)) if *kernel == slice.kernel => {
                    assert_eq!(slice.workgroups.start, *end);
                    *end = slice.workgroups.end;
                }
                _ => {
                    assert_eq!(slice.workgroups.start, 0);
                    next.push((slice.kernel, slice.workgroups.end));
                }
            }
            assert!(plan.work(slice) <= total / parts || slice.workgroups.len() == 1);
        }
        assert_eq!(next, whole.workgroups());
        assert_eq!(plan.slices().iter().map(|slice| plan.work(slice)).sum::<u64>(), total);
        assert!(parts > 7 || plan.slices().len() < whole.workgroups().iter().map(|(_, n)| *n as usize).sum());

        let first_merge = plan.slices().iter().position(|slice| slice.kernel == KernelId::Merge).unwrap();
        let in_order = (0..plan.slices().len()).collect::<Vec<usize>>();
        let backwards = (0..first_merge).rev().chain((first_merge..in_order.len()).rev()).collect();
        let merges_first = (first_merge..in_order.len()).chain(0..first_merge).collect();
        for (order, is_right) in [(in_order, true), (backwards, true), (merges_first, false)] {
            let layer = Layer::new(host, &case, Dtype::F32);
            let workspace = Workspace::new(&host.device, plan.workspace_bytes()).unwrap();
            let device_plan = paged_attention::DevicePlan::upload(&host.device, &plan).unwrap();
            let call = attention.bind(&host.device, &device_plan, layer.io(), &workspace).unwrap();
            assert_eq!(call.slices(), order.len());
            for slice in order {
                host.submit(|pass| call.encode_slices(pass, slice..slice + 1));
            }
            host.status(&workspace).check(call.workgroups()).unwrap();
            let [out, lse] = layer.results(host);
            let same = bits("out", &out, &expected.out).or(bits("lse", &lse, &expected.lse));
            // What is merged before it is there is nothing.
            assert_eq!(same.is_none(), is_right, "{same:?}");
        }
        // In one pass, with one call.
        let layer = Layer::new(host, &case, Dtype::F32);
        let workspace = Workspace::new(&host.device, plan.workspace_bytes()).unwrap();
        let device_plan = paged_attention::DevicePlan::upload(&host.device, &plan).unwrap();
        let call = attention.bind(&host.device, &device_plan, layer.io(), &workspace).unwrap();
        host.submit(|pass| call.encode(pass));
        let [out, lse] = layer.results(host);
        assert_eq!(bits("out", &out, &expected.out).or(bits("lse", &lse, &expected.lse)), None);
    }
}

/// Fault 14: one dispatch over a long context runs into the watchdog. By its measured rate, the runner cuts it.
#[test]
fn a_long_call_is_spread_over_submits() {
    let Some(gpu) = gpu() else { return };
    let (dtype, heads) = CONFIGS[0];
    let spec = CaseSpec::new("slices/long", heads, [(1024, 1500), (1, 9000)]).dtype(dtype).causal(true).seed(73);
    let case = build(&spec).unwrap();
    let run = run_options(&spec);
    let whole = gpu.run(&case, &RunOptions { submit_work_max: Some(u64::MAX), ..run.clone() }).unwrap();
    assert_eq!(whole.submits, 3);
    let mut runner = gpu.fresh_runner();
    let variants = gpu.variants(|base| run.kernels(&case, base), case.geometry()).unwrap();
    let run = RunOptions { variants: Some(variants), ..run };
    let mut submits = Vec::new();
    for milliseconds in [250, 20, 20, 4, 100_000] {
        runner.bound_submits(Duration::from_millis(milliseconds));
        let output = runner.run(&case, &run).unwrap();
        assert_eq!(difference(&output, &whole), None);
        submits.push(output.submits);
    }
    say(&format!("slices: submits for a bound of 250, 20, 20, 4 and 100,000 ms: {submits:?}"));
    // 330 million multiply-adds at first; then not fewer where less is allowed; then all at once.
    assert!(submits[0] > 1 && submits[3] >= submits[2], "{submits:?}");
    assert_eq!(submits[4], 1);
}

/// Kernels that take a slice for the beginning, or a whole kernel's workgroups for those of a slice.
#[test]
fn fault_14_slices_that_are_mixed_up() {
    let Some(gpu) = gpu() else { return };
    let (dtype, heads) = CONFIGS[1];
    let spec = CaseSpec::new("slices/14", heads, LENGTHS).dtype(dtype).causal(true).paged(Pool::new(16)).seed(77);
    let case = build(&spec).unwrap();
    let run = run_options(&spec);
    let variants = gpu.variants(|base| run.kernels(&case, base), case.geometry()).unwrap();
    let run = RunOptions { variants: Some(variants), submit_work_max: Some(1 << 17), ..run };
    let expected = gpu.run(&case, &run).unwrap();
    assert!(expected.submits > 6);
    let from = "let place = params.first_group + group;";
    for kernel in [KernelId::Prefill, KernelId::Decode, KernelId::Merge] {
        // All merges of this batch would fit into one slice of that size.
        let work_max = if kernel == KernelId::Merge { 1 } else { 1 << 17 };
        for to in ["let place = group;", "let place = 2u * params.first_group + group;"] {
            let edit = SourceEdit { kernel, from, to };
            let mut runner = gpu.fresh_runner();
            let run = RunOptions { submit_work_max: Some(work_max), ..run.clone() };
            assert_eq!(difference(&runner.run(&case, &run).unwrap(), &expected), None);
            let config = run.kernels(&case, variants);
            let mutant = pollster::block_on(Kernels::with_edits(runner.device(), &config, &[edit])).unwrap();
            runner.insert_kernels(mutant);
            let noticed = match runner.run(&case, &run) {
                Ok(output) => difference(&output, &expected).is_some() && judge(&case, &output).is_err(),
                Err(RunError::Status(_)) => true,
                Err(error) => panic!("{error}"),
            };
            assert!(noticed, "{kernel:?}, {to}");
        }
    }
}

/// No work item is longer than a split, on a GPU either: prompts over more keys than that are merged.
#[test]
fn prompts_over_long_contexts_are_split() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("slices/split");
    let spec = CaseSpec::new("slices/split", Heads::new(1, 1, 8), [(17, 32_768), (17, 32_769), (20, 66_000)]);
    let spec = spec.causal(true).paged(Pool::new(64)).seed(74);
    let case = build(&spec).unwrap();
    for variants in gpu.every_variant(case.geometry()) {
        assert_eq!(variants.prefill.split_keys, 32_768);
        let run = RunOptions { variants: Some(variants), ..run_options(&spec) };
        let Some(output) = tally.check_case(gpu, format!("{spec}, {variants}"), &case, &run) else { continue };
        assert!(output.kernels.iter().any(|used| used.kernel == "merge"));
        let cut = gpu.run(&case, &RunOptions { submit_work_max: Some(1), ..run }).unwrap();
        assert_eq!(cut.submits, workgroups(&output));
        tally.same(format!("cut, {spec}, {variants}"), &case, difference(&cut, &output));
    }
    tally.finish();
}

/// Fault 12 once more: a device that takes a single workgroup on an axis takes slices of one.
#[test]
fn one_workgroup_on_an_axis() {
    let Some(gpu) = gpu() else { return };
    let (dtype, heads) = CONFIGS[0];
    let spec = CaseSpec::new("slices/axis", heads, LENGTHS).dtype(dtype).causal(true).paged(Pool::new(16)).seed(75);
    let case = build(&spec).unwrap();
    let run = run_options(&spec);
    let variants = gpu.variants(|base| run.kernels(&case, base), case.geometry()).unwrap();
    let run = RunOptions { variants: Some(variants), ..run };
    let expected = gpu.run(&case, &run).unwrap();
    let limits = wgpu::Limits { max_compute_workgroups_per_dimension: 1, ..wgpu::Limits::default() };
    let mut limited = gpu.limited_runner(limits.or_worse_values_from(&gpu.adapter().limits()));
    let refused = limited.run(&case, &RunOptions { submit_work_max: Some(u64::MAX), ..run.clone() });
    assert!(
        matches!(refused, Err(RunError::Bind(BindError::TooManyWorkgroups { axis_max: 1, needed: 2.., .. }))),
        "{refused:?}"
    );
    let output = limited.run(&case, &RunOptions { submit_work_max: Some(1), ..run }).unwrap();
    assert_eq!(difference(&output, &expected), None);
}

/// Fault 15: partial states that need more than a binding are made in rounds, with the same bits; what does not fit alone is
/// refused, with both numbers, and the runner goes on.
#[test]
fn partial_states_larger_than_a_binding() {
    let Some(gpu) = gpu() else { return };
    let heads = Heads::new(8, 1, 8);
    // All over the same pages.
    let spec = CaseSpec::new("slices/scratch", heads, vec![(1, 600); 40]).dtypes(Dtype::F32, Dtype::F16).causal(true);
    let spec = spec.paged(Pool { share: true, ..Pool::new(16).times(1) }).seed(76);
    let shared = spec.seqs.iter().map(|seq| paged_attention_cases::Seq { kv_stream: 0, ..*seq }).collect();
    let spec = spec.seqs(shared);
    let case = build(&spec).unwrap();
    let run = run_options(&spec);
    let variants = gpu.variants(|base| run.kernels(&case, base), case.geometry()).unwrap();
    let run = RunOptions { variants: Some(variants), submit_work_max: Some(u64::MAX), ..run };
    let expected = gpu.run(&case, &run).unwrap();
    // 40 sequences, 3 splits, 8 rows, a state of 3 vectors; and the status words before them.
    let needed = 40 * 3 * 8 * 3 * 16 + 256;
    assert_eq!(expected.workspace_bytes + 256, needed);
    let found = needed - 4;
    let host = Host::open(gpu, wgpu::Limits { max_storage_buffer_binding_size: found, ..wgpu::Limits::default() });
    let error = BindError::TooLarge { buffer: "workspace", found, needed };
    assert_eq!(Workspace::new(&host.device, expected.workspace_bytes).map(|_| ()), Err(error));
    Workspace::new(&host.device, expected.workspace_bytes - 16).unwrap();
    let mut limited = gpu.limited_runner(host.device.limits());
    let output = limited.run(&case, &run).unwrap();
    assert_eq!(output.workspace_bytes, 39 * 3 * 8 * 3 * 16);
    assert_eq!(difference(&output, &expected), None);
    // A row alone has a state for each of 3 splits.
    let refused = limited.run(&case, &RunOptions { workspace_max: Some(3 * 3 * 16 - 1), ..run.clone() });
    let error = PlanError::Workspace { seq: 0, needed: 3 * 3 * 16, limit: 3 * 3 * 16 - 1 };
    assert_eq!(refused, Err(RunError::Plan(error)));
    let small = CaseSpec::new("slices/scratch-small", heads, [(1, 40)]).paged(Pool::new(16)).seed(76);
    let small_case = build(&small).unwrap();
    let run = RunOptions { variants: Some(variants), ..run_options(&small) };
    judge(&small_case, &limited.run(&small_case, &run).unwrap()).unwrap();
}
