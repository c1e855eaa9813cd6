//! The shapes of the case table through criterion: ours, the unfused baseline, and what recording a call takes.
//!
//! `cargo bench --bench attention [-- NAME]` takes two or three minutes on a CPU and compares with the run before;
//! `PAGED_ATTENTION_ADAPTER` names an adapter. Results are judged before they are timed. Where a machine has neighbours,
//! only ratios inside one round mean anything: `paged-attention bench` reports those.

#![allow(missing_docs, reason = "a program, not a library")]
#![allow(clippy::expect_used, reason = "a timing has no way to fail but this")]

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup, Criterion, Throughput};
use paged_attention::wgpu;
use paged_attention_bench_kit::{BenchError, Gpu, Judge, Paged, Paging, Problem, Record, Selection, Unfused};
use paged_attention_cases::speed;

/// Calls per submit at most: a submit that lasts for seconds is given up by some drivers.
const CALLS_MAX: u64 = 64;

fn main() -> Result<(), BenchError> {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    let mut gpu = Gpu::open(std::env::var("PAGED_ATTENTION_ADAPTER").ok().as_deref())?;
    for spec in speed() {
        shape(&mut criterion, &mut gpu, &Problem::new(spec)?)?;
    }
    criterion.final_summary();
    Ok(())
}

fn shape(criterion: &mut Criterion, gpu: &mut Gpu, problem: &Problem) -> Result<(), BenchError> {
    let paged = Paged::new(gpu, problem, Paging::Scattered(16), Selection::Chosen)?;
    paged.accuracy(gpu, &Judge::new(problem)?, "paged")?;
    let parts = problem.groups()?;
    let unfused: Vec<Unfused> = parts.iter().map(|part| Unfused::new(gpu, part)).collect::<Result<_, _>>()?;
    for (baseline, part) in unfused.iter().zip(&parts) {
        gpu.seconds(&|encoder| baseline.encode(encoder), 1)?;
        baseline.accuracy(gpu, &Judge::new(part)?)?;
    }

    let mut group = criterion.benchmark_group(problem.name());
    group.bench_function("record", |bencher| {
        let encoder = || gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let record = |mut encoder: wgpu::CommandEncoder| {
            paged.encode(&mut encoder);
            encoder.finish()
        };
        bencher.iter_batched(encoder, record, BatchSize::SmallInput);
    });
    group.throughput(match problem.decodes() {
        true => Throughput::Bytes(problem.kv_bytes() as u64),
        // Floating-point operations.
        false => Throughput::Elements(problem.flop() as u64),
    });
    time(&mut group, gpu, "paged", &|encoder| paged.encode(encoder));
    time(&mut group, gpu, "unfused", &|encoder| unfused.iter().for_each(|baseline| baseline.encode(encoder)));
    group.finish();
    Ok(())
}

fn time(group: &mut BenchmarkGroup<'_, WallTime>, gpu: &Gpu, name: &str, record: Record<'_>) {
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|calls| {
            let submits = (0..calls.div_ceil(CALLS_MAX)).map(|submit| (calls - submit * CALLS_MAX).min(CALLS_MAX));
            let seconds = submits.map(|calls| gpu.seconds(record, calls as u32).expect("the device failed"));
            Duration::from_secs_f64(seconds.sum())
        });
    });
}
