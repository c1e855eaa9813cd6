//! Options crossed with each other, shapes, storage types, page sizes and orders, shared prefixes and kernel variants.

use std::collections::HashSet;

use paged_attention::RunOptions;
use paged_attention::kernels::KernelId;
use paged_attention_cases::{Crossed, crossed, crossed_kernels};

use crate::common::{Tally, gpu, run_options, say};

/// Compiling takes most of the time.
const PIPELINES_MAX: usize = 40;

/// `PAGED_ATTENTION_CROSSED_SEED` repeats a run.
fn combinations(test: &'static str, count: u64) {
    let Some(gpu) = gpu() else { return };
    let seed = std::env::var("PAGED_ATTENTION_CROSSED_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(rand::random::<u64>);
    say(&format!("{test}: PAGED_ATTENTION_CROSSED_SEED={seed}"));
    let mut tally = Tally::new(test);
    let kernels = crossed_kernels();
    let (mut pipelines, mut drawn_before) = (HashSet::new(), HashSet::new());
    for number in 0..count {
        let place = (number % kernels.len() as u64) as usize;
        let drawn = crossed(&kernels[place], seed.wrapping_add(number));
        let case = drawn.build().unwrap_or_else(|error| panic!("{drawn:?}: {error}"));
        // A variant per kernel: each meets every option on and off.
        let all = gpu.every_variant(case.geometry());
        let variants = all[place % all.len()];
        let Crossed { spec, prefixes, stored, order } = &drawn;
        let options = RunOptions {
            kv: Some(*stored),
            order: *order,
            shared_prefixes: prefixes.clone(),
            variants: Some(variants),
            ..run_options(spec)
        };
        let config = options.kernels(&case, variants);
        pipelines.extend(KernelId::ALL.map(|kernel| (kernel, kernel.wgsl(&config).unwrap())));
        let what = format!("{drawn:?}, {variants}");
        tally.check_case(gpu, &what, &case, &options);
        drawn_before.insert(what);
    }
    say(&format!("{test}: {} combinations over {} pipelines", drawn_before.len(), pipelines.len()));
    assert!(drawn_before.len() as u64 == count && pipelines.len() <= PIPELINES_MAX);
    tally.finish();
}

#[test]
fn random_combinations() {
    combinations("crossed", 200);
}

#[test]
#[ignore = "minutes on a software adapter: `ci/lanes crossed`"]
fn many_random_combinations() {
    combinations("crossed/full", 2_500);
}
