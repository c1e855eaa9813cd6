//! Ours against the unfused baseline, paired in one run; and both against what the adapter can do at most.
//!
//! `cargo bench --bench attention [-- NAME...]` measures the named shapes, or all; `PAGED_ATTENTION_ADAPTER` names an
//! adapter. It is the quick form of `paged-attention bench` and shares its code, [`paged_attention_bench_kit`]: every
//! result is checked against f64 first; a round times everything once, in alternating order, the adapter's
//! multiply-add rate beside it; a ratio is the median over rounds of the ratio inside one round, so that a slow spell
//! of the machine hits both sides. It does not hit them alike where shaders run on the CPU: kernels scale differently
//! over cores, so quote ratios only from a run whose multiply-add rate is that of the idle machine.
//!
//! Without `--bench` (as `cargo test --benches` does) only the checks run, on small shapes.

#![allow(missing_docs, reason = "a program, not a library")]
#![allow(clippy::print_stdout, reason = "its purpose")]

use paged_attention::{Dtype, adapter};
use paged_attention_bench_kit::{
    BenchError, ERROR_MAX, Gpu, NAMES, Options, Paged, Paging, Problem, Selection, Session, Unfused, median,
    small_shapes,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let names: Vec<&str> = arguments.iter().map(String::as_str).filter(|word| !word.starts_with('-')).collect();
    let mut gpu = Gpu::open(std::env::var("PAGED_ATTENTION_ADAPTER").ok().as_deref())?;
    println!("{}", adapter::describe(gpu.runner.adapter_info()));
    check_small_shapes(&mut gpu)?;
    if !arguments.iter().any(|argument| argument == "--bench") {
        return Ok(());
    }

    let options = Options { rounds: 9, ..Options::FULL };
    for name in NAMES.iter().filter(|name| names.is_empty() || names.contains(name)) {
        measure(&mut gpu, Problem::named(name, Dtype::F32)?, options)?;
    }
    Ok(())
}

/// Both contenders, on batches that reach every branch.
fn check_small_shapes(gpu: &mut Gpu) -> Result<(), BenchError> {
    for problem in small_shapes()? {
        let reference = problem.reference();
        let unfused = Unfused::new(gpu, &problem)?;
        gpu.seconds(&|encoder| unfused.encode(encoder), 1)?;
        let paged = Paged::new(gpu, &problem, Paging::Scattered(16), Selection::Chosen)?;
        for (contender, out) in [("paged", &paged.out), ("unfused", &unfused.out)] {
            let error = reference.largest_error(&gpu.read(out)?);
            if error > ERROR_MAX {
                return Err(BenchError::Wrong { name: problem.name, contender, error, allowed: ERROR_MAX });
            }
        }
    }
    Ok(())
}

fn measure(gpu: &mut Gpu, problem: Problem, options: Options) -> Result<(), BenchError> {
    let unfused = Unfused::new(gpu, &problem)?;
    let session = Session::new(gpu, vec![problem], options, &mut |_| {})?;
    let (limits, shapes) = session.run(gpu, &mut |_| {})?;
    for shape in &shapes {
        let (gflop, kv_mb) = (1e-9 * shape.problem.flop(), 1e-6 * shape.problem.kv_bytes());
        println!("\n{}  {gflop:.3} GFLOP, {kv_mb:.1} MB of K and V; {}", shape.problem.name, shape.kernel);
        println!(
            "  limits     {:.1} GFLOP/s, {:.2} GB/s at this size, {:.0} us per dispatch",
            limits.fma_best(),
            shape.read_gbps(),
            median(&limits.dispatch_us)
        );
        for (contender, error) in &shape.errors {
            let seconds = match *contender {
                "paged" => median(&shape.series.paged),
                "contiguous" => median(&shape.series.contiguous),
                _ => median(&shape.series.unfused),
            };
            println!(
                "  {contender:10} {:9.3} ms  {:7.2} GFLOP/s  {:6.2} GB/s of K and V  largest error {error:.1e}",
                1e3 * seconds,
                gflop / seconds,
                1e-3 * kv_mb / seconds,
            );
        }
        println!(
            "  share of the limit {:.3}; paged / contiguous {:.3}; unfused / paged {:.2} (medians of {} rounds)",
            shape.share(&limits),
            shape.paged_over_contiguous(),
            shape.unfused_over_this().unwrap_or(f64::NAN),
            options.rounds
        );
        let mut steps_ms = Vec::new();
        for step in 0..3 {
            let mut times = Vec::new();
            for _ in 0..5 {
                times.push(gpu.seconds(&|encoder| unfused.encode_step(encoder, step), 1)?);
            }
            steps_ms.push(format!("{:.2}", 1e3 * median(&times)));
        }
        println!(
            "  unfused: {:.1} MB of scores; scores, softmax, values take {} ms",
            1e-6 * unfused.score_bytes as f64,
            steps_ms.join(", ")
        );
    }
    Ok(())
}
