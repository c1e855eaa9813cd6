//! Ours against the unfused baseline, paired in one run; and both against what the adapter can do at most.
//!
//! `cargo bench --bench attention [-- NAME...]` measures the named shapes, or all. Every result is checked against
//! f64 first. A round times every contender once, in alternating order, and the adapter's multiply-add rate beside
//! them; a figure is the median over rounds of a ratio inside one round, so that a slow spell of the machine hits
//! both sides. It does not hit them alike where shaders run on the CPU: kernels scale differently over cores, so quote
//! ratios only from a run whose multiply-add rate is that of the idle machine.
//!
//! Without `--bench` (as `cargo test --benches` does) only the checks run, on small shapes.

#![allow(missing_docs, reason = "a program, not a library")]
#![allow(clippy::print_stdout, reason = "its purpose")]
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "it stops at the first failure"
)]

mod gpu;
mod limits;
mod paged;
mod problem;
mod unfused;

use gpu::{Gpu, median};
use limits::FmaRate;
use paged::Paged;
use problem::{Problem, largest_error};
use unfused::Unfused;

/// Rounds of a pairing: an odd number, so that the median is one of them.
const ROUNDS: usize = 9;

/// The f32 kernels stay well below this on normally distributed tensors, whose outputs are of order 1.
const ERROR_MAX: f64 = 2e-5;

/// One way to compute a problem: what is timed and where its result lies.
struct Contender<'a> {
    name: &'static str,
    record: Box<dyn Fn(&mut wgpu::CommandEncoder) + 'a>,
    out: &'a wgpu::Buffer,
}

impl Contender<'_> {
    /// Runs once and compares with the reference.
    fn check(&self, gpu: &Gpu, reference: &[f64]) -> f64 {
        gpu.seconds(&*self.record, 1);
        let error = largest_error(&gpu.read(self.out), reference);
        assert!(error < ERROR_MAX, "{} is off by {error:.2e}", self.name);
        error
    }
}

fn contenders<'a>(paged: &'a Paged, unfused: &'a Unfused) -> [Contender<'a>; 2] {
    [
        Contender { name: "ours", record: Box::new(|encoder| paged.encode(encoder)), out: &paged.out },
        Contender { name: "unfused", record: Box::new(|encoder| unfused.encode(encoder)), out: &unfused.out },
    ]
}

fn shapes() -> Vec<Problem> {
    let square = |name, heads, dim, n| Problem::new(name, heads, (dim, dim), true, &[(n, n)]);
    let decode = |name, heads, dim, seqs, n| Problem::new(name, heads, (dim, dim), true, &vec![(1, n); seqs]);
    vec![
        square("P1", (8, 8), 64, 1024),
        square("P2", (9, 3), 64, 512),
        square("P3", (8, 2), 128, 1024),
        decode("D1", (32, 8), 128, 1, 4096),
        decode("D2", (9, 3), 64, 8, 1024),
        decode("D3", (8, 8), 128, 1, 16384),
    ]
}

/// Small ragged batches that reach every branch of both.
fn small_shapes() -> Vec<Problem> {
    vec![
        Problem::new("ragged causal", (6, 2), (80, 72), true, &[(70, 131), (1, 5), (0, 9), (3, 0), (129, 129), (5, 3)]),
        Problem::new("ragged bidirectional", (2, 2), (8, 8), false, &[(65, 17), (2, 200)]),
        Problem::new("ragged decode", (8, 2), (96, 128), true, &[(1, 1), (1, 77), (1, 0), (1, 16)]),
    ]
}

fn measure(gpu: &Gpu, fma: &FmaRate, problem: &Problem) {
    let reference = problem.reference();
    let unfused = Unfused::new(gpu, problem);
    let paged = Paged::new(gpu, problem);
    let contenders = contenders(&paged, &unfused);

    println!("\n{}  {:.3} GFLOP, {:.1} MB of K and V", problem.name, 1e-9 * problem.flop(), 1e-6 * problem.kv_bytes());
    let mut repeats = Vec::new();
    for contender in &contenders {
        let error = contender.check(gpu, &reference);
        // Some 50 ms at a time: the submit's own cost then weighs little.
        let once = gpu.seconds(&*contender.record, 1);
        repeats.push(((0.05 / once) as u32).clamp(1, 1000));
        println!("  {:8} largest error {error:.1e}", contender.name);
    }

    let mut seconds = vec![Vec::new(); contenders.len()];
    let mut fma_gflops = Vec::new();
    for round in 0..ROUNDS {
        fma_gflops.push(fma.gflops(gpu));
        let mut order: Vec<usize> = (0..contenders.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for i in order {
            seconds[i].push(gpu.seconds(&*contenders[i].record, repeats[i]) / f64::from(repeats[i]));
        }
    }
    for (contender, seconds) in contenders.iter().zip(&seconds) {
        let shares: Vec<_> = seconds.iter().zip(&fma_gflops).map(|(s, fma)| 1e-9 * problem.flop() / s / fma).collect();
        let middle = median(seconds);
        println!(
            "  {:8} {:9.3} ms  {:7.2} GFLOP/s  {:6.2} GB/s of K and V  {:.4} of the multiply-add rate",
            contender.name,
            1e3 * middle,
            1e-9 * problem.flop() / middle,
            1e-9 * problem.kv_bytes() / middle,
            median(&shares),
        );
    }
    let [ours, baseline] = seconds.as_slice() else { unreachable!("two contenders") };
    let mut ratios: Vec<_> = ours.iter().zip(baseline).map(|(ours, unfused)| unfused / ours).collect();
    ratios.sort_by(f64::total_cmp);
    println!(
        "  unfused / ours: {:.2} (median of {ROUNDS} rounds; {:.2} to {:.2})",
        median(&ratios),
        ratios[0],
        ratios[ROUNDS - 1]
    );
    let steps_ms: Vec<_> = (0..3)
        .map(|step| {
            let times: Vec<_> = (0..5).map(|_| gpu.seconds(&|encoder| unfused.encode_step(encoder, step), 1)).collect();
            format!("{:.2}", 1e3 * median(&times))
        })
        .collect();
    println!(
        "  unfused: {:.1} MB of scores; scores, softmax, values take {} ms",
        1e-6 * unfused.score_bytes as f64,
        steps_ms.join(", ")
    );
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let names: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let gpu = Gpu::open();
    println!("{}", paged_attention::adapter::describe(&gpu.adapter.get_info()));

    for problem in small_shapes() {
        let (paged, unfused) = (Paged::new(&gpu, &problem), Unfused::new(&gpu, &problem));
        let reference = problem.reference();
        for contender in contenders(&paged, &unfused) {
            contender.check(&gpu, &reference);
        }
    }
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }

    let fma = FmaRate::new(&gpu);
    let rates: Vec<_> = (0..ROUNDS).map(|_| fma.gflops(&gpu)).collect();
    println!("multiply-adds in registers: {:.1} GFLOP/s", median(&rates));
    for (name, rate) in limits::read_rates(&gpu, ROUNDS) {
        println!("reading, {name}: {rate:.2} GB/s");
    }
    let (alone, among) = limits::dispatch_us(&gpu);
    println!("dispatch: {alone:.0} us with submit and wait, {among:.1} us as one of 100 in a submit");

    for problem in shapes() {
        if names.is_empty() || names.iter().any(|name| *name == problem.name) {
            measure(&gpu, &fma, &problem);
        }
    }
}
