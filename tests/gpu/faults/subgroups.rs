//! Fault 9: subgroups that are not what a kernel was built for, or that do not do what they promise.

use paged_attention::kernels::SUBGROUP_SIZES;
use paged_attention::{Modifiers, SelfTestError};

use super::*;

/// As many chunks in a row as the subgroup has lanes: a step of two keys asks more lanes than exist.
fn wide(subgroup: u32) -> Heads {
    Heads::new(4, 2, (8 * subgroup).min(256))
}

/// The adapter's subgroup sizes.
fn subgroup_sizes(gpu: &Gpu) -> Option<(u32, u32)> {
    let sizes = gpu.facts().subgroup_sizes;
    if sizes.is_none() {
        say("the adapter has no subgroups: fault 9 cannot occur");
    }
    sizes
}

fn both_lengths(heads: Heads) -> [CaseSpec; 2] {
    [(40, 75), (1, 2 * SPLIT_KEYS + 37)].map(|lengths| CaseSpec::new("faults/09", heads, [lengths]).paged(Pool::new(4)))
}

/// Variants for subgroups of `size`, as a CPU and as a GPU gets them.
fn built_for(size: u32, heads: Heads) -> [Variants; 2] {
    [AdapterFacts::PLAIN_CPU, AdapterFacts::PLAIN_GPU]
        .map(|facts| Variants::candidates(&facts.with_subgroups(size), &heads.geometry().unwrap())[0])
}

#[test]
fn fault_09_subgroups_of_another_size() {
    let Some(gpu) = gpu() else { return };
    let Some((min, max)) = subgroup_sizes(gpu) else { return };
    let smaller = SUBGROUP_SIZES.into_iter().rev().find(|size| *size < min);
    let larger = SUBGROUP_SIZES.into_iter().find(|size| *size > max);
    for (size, spec) in
        [smaller, larger].into_iter().flatten().flat_map(|size| both_lengths(HEADS).map(|spec| (size, spec)))
    {
        let case = build(&spec).unwrap();
        for variants in built_for(size, HEADS) {
            let error = gpu.run(&case, &with_variants(&spec, variants)).unwrap_err();
            assert!(matches!(error, RunError::Status(StatusError::Subgroup { .. })), "{size} of {min}-{max}: {error}");
        }
    }
    // Without the check, lanes that do not exist are asked for their part.
    let Some(size) = larger else { return };
    for spec in both_lengths(wide(max)) {
        let case = build(&spec).unwrap();
        for variants in built_for(size, wide(max)) {
            let options = with_variants(&spec, variants);
            let edits =
                [KernelId::Prefill, KernelId::Decode].map(|kernel| edit(kernel, "report_error(ERROR_SUBGROUP);", ""));
            let why = match run_edited(&mut gpu.fresh_runner(), &case, &options, &edits) {
                Err(RunError::Build(error)) => panic!("{error}"),
                Err(error) => error.to_string(),
                Ok(output) => match judge(&case, &output) {
                    Err(why) => why,
                    Ok(_) => panic!("{} {} computes right with subgroups of {max}", variants.prefill, variants.decode),
                },
            };
            say(&format!("09 unchecked, {} {}: noticed: {}", variants.prefill, variants.decode, shortened(&why)));
        }
    }
}

/// What is wrong with a variant.
type WrongKernel = fn(&Variants) -> SourceEdit;

/// The preferred variants are wrong, in several ways: the runner says how, and takes one that is right.
#[test]
fn fault_09_subgroups_that_lie_are_stepped_down_from() {
    let Some(gpu) = gpu() else { return };
    if subgroup_sizes(gpu).is_none() {
        return;
    }
    let geometry = HEADS.geometry().unwrap();
    let candidates = Variants::candidates(&gpu.facts(), &geometry);
    let (base, preferred) = candidates.split_last().unwrap();
    let config = |variants| KernelConfig {
        geometry,
        q: Dtype::F32,
        kv: Dtype::F32.into(),
        new_rows: Dtype::F32.into(),
        out: Dtype::F32,
        modifiers: Modifiers::NONE,
        segments: std::num::NonZeroU32::MIN,
        variants,
    };
    let wrong_decode = |variants: &Variants| match variants.decode {
        DecodeVariant::Workgroup => panic!("{variants:?} has no subgroups"),
        DecodeVariant::Streams { .. } => {
            edit(KernelId::Decode, "subgroupBroadcast(v_row, ", "subgroupBroadcast(v_row, 0u * ")
        }
        DecodeVariant::Exchange { .. } => {
            edit(KernelId::Decode, "turn + lane / LANES_PER_KEY;", "turn + lane / LANES_PER_KEY / 2u;")
        }
    };
    let wrong_prefill = |_: &Variants| {
        edit(KernelId::Prefill, "subgroupBroadcast(values_0.hi, ", "subgroupBroadcast(values_0.hi, 0u * ")
    };
    let other_size = |_: &Variants| {
        edit(KernelId::Prefill, "subgroup_size != PREFILL_SUBGROUP", "subgroup_size == PREFILL_SUBGROUP")
    };
    let faults: [(&str, &str, WrongKernel); 3] = [
        ("decode", "the self-test's error is", wrong_decode),
        ("prefill", "the self-test's error is", wrong_prefill),
        ("size", "subgroups of another size", other_size),
    ];
    for (what, reason, fault) in faults {
        let mut runner = gpu.fresh_runner();
        for variants in preferred {
            let edits = [fault(variants)];
            let kernels = pollster::block_on(Kernels::with_edits(runner.device(), &config(*variants), &edits)).unwrap();
            runner.insert_kernels(kernels);
        }
        let choice = runner.choose(&config(*base)).unwrap();
        assert_eq!(choice.variants, *base, "09 {what}");
        let stepped_down: Vec<Variants> = choice.stepped_down.iter().map(|(variants, _)| *variants).collect();
        assert_eq!(stepped_down, preferred, "09 {what}");
        for (variants, why) in &choice.stepped_down {
            say(&format!("09 {what}: stepped down from {} {}: {why}", variants.prefill, variants.decode));
            // A size that the driver does not choose may be among several.
            assert!(why.contains(reason) || why.contains("subgroups of another size"), "09 {what}: {why}");
        }
        for spec in both_lengths(HEADS) {
            let case = build(&spec).unwrap();
            let output = runner.run(&case, &run_options(&spec)).unwrap();
            judge(&case, &output).unwrap();
            let chosen = [base.prefill.to_string(), base.decode.to_string(), "merge".into()];
            assert!(output.kernels.iter().all(|ran| chosen.contains(&ran.kernel)), "{:?}", output.kernels);
        }
    }
    // Where the last one is wrong too, there is no result, and the error says why.
    let mut runner = gpu.fresh_runner();
    for variants in &candidates {
        let edits = shared("const LN_2 = 0.6931471805599453;", "const LN_2 = 1.0;");
        let kernels = pollster::block_on(Kernels::with_edits(runner.device(), &config(*variants), &edits)).unwrap();
        runner.insert_kernels(kernels);
    }
    let spec = prefill("09");
    let error = runner.run(&build(&spec).unwrap(), &run_options(&spec)).unwrap_err();
    assert!(matches!(error, RunError::SelfTest(SelfTestError::Outside { .. })), "{error}");
}
