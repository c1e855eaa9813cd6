//! Partial states that do not fit into a workspace together: work is done in rounds, with the same bits.

use std::num::NonZeroU32;

use paged_attention::kernels::{KernelId, Kernels, SourceEdit};
use paged_attention::{Case, Dtype, KvSource, Output, PlanError, RunError, RunOptions, Runner, wgpu};
use paged_attention_cases::{CaseSpec, Heads, Modifiers, Pool, Seq, SharedSpec, build, shared};

use crate::common::{CONFIGS, Tally, difference, gpu, judge, run_options, say};

/// Prompts of several tiles, a chunk that decodes, single tokens of one split and of several.
const LENGTHS: [(u32, u32); 7] = [(70, 200), (1, 700), (3, 900), (1, 257), (33, 33), (1, 0), (50, 50)];

/// What a run says when it has too little room for a row.
fn refused(result: Result<Output, RunError>) -> Option<(u64, u64)> {
    match result {
        Err(RunError::Plan(PlanError::Workspace { needed, limit, .. })) => Some((needed, limit)),
        _ => None,
    }
}

/// Lower and lower limits, down to what a single row needs: the same bits, within the limit, until it is refused.
fn check(runner: &mut Runner, tally: &mut Tally, what: &str, case: &Case, options: &RunOptions) -> u32 {
    // A submit per slice.
    let options = RunOptions { submit_work_max: Some(u64::MAX), workspace_max: None, ..options.clone() };
    let whole = runner.run(case, &options).unwrap_or_else(|error| panic!("{what}: {error}"));
    match judge(case, &whole) {
        Ok(report) => tally.ratio(report.max_bound_ratio, what),
        Err(why) => tally.fail(what, Some(case), why),
    }
    assert!(whole.workspace_bytes > 0, "{what}");
    let (mut limit, mut submits) = (whole.workspace_bytes, whole.submits);
    for step in 0.. {
        let options = RunOptions { workspace_max: Some(limit), ..options.clone() };
        match runner.run(case, &options) {
            Ok(output) => {
                assert!(output.workspace_bytes <= limit, "{what}: {} of {limit}", output.workspace_bytes);
                assert!((step == 0) == (output.submits == whole.submits), "{what}: {} submits", output.submits);
                submits = submits.max(output.submits);
                tally.same(format!("{limit} bytes, {what}"), case, difference(&output, &whole));
            }
            error => {
                let (mut needed, found) = refused(error).unwrap_or_else(|| panic!("{what}"));
                assert!(found == limit && needed > limit && step > 0, "{what}: {needed} of {limit}");
                // What is said to be needed is enough for that sequence; the next one may need more.
                loop {
                    let result = runner.run(case, &RunOptions { workspace_max: Some(needed), ..options.clone() });
                    match result {
                        Ok(output) => {
                            tally.same(format!("{needed} bytes, {what}"), case, difference(&output, &whole));
                            break;
                        }
                        error => {
                            let (more, found) = refused(error).unwrap_or_else(|| panic!("{what}"));
                            assert!(found == needed && more > needed, "{what}: {more} of {needed}");
                            needed = more;
                        }
                    }
                }
                return submits;
            }
        }
        limit = limit * 3 / 5;
    }
    submits
}

#[test]
fn rounds_change_no_bit() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("rounds");
    let mut runner = gpu.fresh_runner();
    for (dtype, heads) in CONFIGS {
        let spec = CaseSpec::new("rounds", heads, LENGTHS).dtype(dtype).causal(true).paged(Pool::new(16)).seed(101);
        let case = build(&spec).unwrap();
        for variants in gpu.every_variant(case.geometry()) {
            let options = RunOptions { variants: Some(variants), ..run_options(&spec) };
            let submits = check(&mut runner, &mut tally, &format!("{spec}, {variants}"), &case, &options);
            assert!(submits > 8, "{submits} submits");
        }
    }
    tally.finish();
}

/// Who shares a prefix is in one round, or refused.
#[test]
fn rounds_of_shared_prefixes() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("rounds/shared");
    let mut runner = gpu.fresh_runner();
    for name in ["shared/tree-f16", "shared/tree-f32"] {
        for row in shared().into_iter().filter(|row| row.spec.name.starts_with(name)).take(1) {
            let spec = CaseSpec { heads: Heads::new(4, 2, 16), ..row.spec.clone() };
            let row = SharedSpec { spec, prefixes: row.prefixes.clone() };
            let case = row.build().unwrap();
            for variants in gpu.every_variant(case.geometry()) {
                let run = run_options(&row.spec);
                let run = RunOptions { variants: Some(variants), shared_prefixes: row.prefixes.clone(), ..run };
                check(&mut runner, &mut tally, &format!("{}, {variants}", row.spec), &case, &run);
            }
        }
    }
    tally.finish();
}

/// Rows of a prompt whose pages lie in several groups of segments, some of them at a time; and kernels that do not keep to
/// these rows are noticed.
#[test]
fn rounds_of_groups() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("rounds/groups");
    let limits = gpu.fresh_runner().device().limits();
    let mut runner = gpu.limited_runner(wgpu::Limits { max_storage_buffers_per_shader_stage: 6, ..limits });
    let spec = CaseSpec::new("rounds/groups", Heads::new(4, 2, 16), LENGTHS).dtype(Dtype::F16).causal(true);
    let spec = spec.modified(Modifiers { window_left: Some(500), ..Modifiers::NONE }).paged(Pool::new(16)).seed(102);
    let case = build(&spec).unwrap();
    let KvSource::Paged { k_pages, .. } = case.kv() else { panic!("paged") };
    let segment_pages = NonZeroU32::new((k_pages.shape()[0] as u32).div_ceil(4));
    for variants in gpu.every_variant(case.geometry()) {
        let options = RunOptions { variants: Some(variants), segment_pages, ..run_options(&spec) };
        let submits = check(&mut runner, &mut tally, &format!("{spec}, {variants}"), &case, &options);
        assert!(submits > 20, "{submits} submits");
        // Less than a tile has.
        let rounds = RunOptions { workspace_max: Some(3_000), ..options };
        let config = rounds.kernels(&case, variants);
        for (kernel, fault, from, to) in [
            (
                KernelId::Prefill,
                "a row of the round left out",
                "let row_count = seq.rows_end;",
                "let row_count = seq.rows_end - 1u;",
            ),
            (KernelId::Prefill, "states of all rows", "* seq.state_rows + row;", "* seq.q_len * GROUP + row;"),
            (KernelId::Merge, "states of all rows", "* seq.state_rows + row;", "* seq.q_len * GROUP + row;"),
        ] {
            let edits = [SourceEdit { kernel, from, to }];
            runner.insert_kernels(pollster::block_on(Kernels::with_edits(runner.device(), &config, &edits)).unwrap());
            let outcome = runner.run(&case, &rounds).map_err(|error| error.to_string());
            let why = outcome.and_then(|output| judge(&case, &output)).expect_err(fault);
            say(&format!("rounds, {fault}, {}: noticed: {}", kernel.entry_point(), why.lines().next().unwrap_or("")));
        }
        runner.insert_kernels(pollster::block_on(Kernels::new(runner.device(), &config)).unwrap());
    }
    tally.finish();
}

/// More partial states than lavapipe can bind: 142 MB, of rows that see two keys in two splits.
#[test]
fn more_than_128_mib_of_states() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("rounds/large");
    let spec = CaseSpec::new("rounds/large", Heads::new(64, 1, 128), vec![(1, 257); 2_100]).dtype(Dtype::F16);
    let spec = spec.modified(Modifiers { window_left: Some(1), ..Modifiers::NONE }).causal(true).seed(103);
    let spec = spec.paged(Pool { share: true, ..Pool::new(16).times(1) });
    let seqs = spec.seqs.iter().map(|seq| Seq { kv_stream: 0, ..*seq }).collect();
    let spec = spec.seqs(seqs);
    let case = build(&spec).unwrap();
    let needed = 2_100 * 64 * 2 * 528_u64;
    let limit = (128 << 20) - 256;
    assert!(needed > limit);
    let options = RunOptions { workspace_max: Some(limit), ..run_options(&spec) };
    if let Some(output) = tally.check_case(gpu, &spec, &case, &options) {
        assert!(output.workspace_bytes <= limit && output.workspace_bytes > limit / 2, "{}", output.workspace_bytes);
    }
    tally.finish();
}
