//! This crate and cubek-attention on one adapter in one run, in paired rounds.
//!
//! The results of both are compared with float64 before anything is timed. A round times both sides of every shape, one
//! after the other; the ratio is the median of the rounds' ratios, so that a slow spell of the machine hits both.
//! Both are timed alike: the wall time of one call from its recording to the end of its execution, repeated until a
//! timing lasts some 50 ms. Uploads, plans and compiling come before.

mod cubek;
mod report;

use std::process::ExitCode;

use clap::Parser;
use paged_attention::wgpu::{Instance, InstanceDescriptor};
use paged_attention::{Runner, adapter};
use paged_attention_bench_kit::limits::FmaRate;
use paged_attention_bench_kit::{Accuracy, BenchError, Gpu, Judge, Paged, Paging, Problem, Selection};
use paged_attention_cases::{CaseSpec, speed};

use cubek::{Cubek, CubekCall};
use report::{Report, ShapeFigures};

/// Seconds that one timing takes at least, by repeating the call.
const TARGET_S: f64 = 0.05;

/// Tokens per page on our side.
const PAGE_SIZE: u32 = 16;

/// Times this crate's kernels and cubek-attention's on one adapter, after checking the results of both.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// What to measure, of the shapes of `paged-attention bench`; may be repeated [default: all]
    #[arg(long, value_parser = named)]
    shape: Vec<CaseSpec>,

    /// Rounds
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(7..))]
    rounds: u16,

    /// Use this adapter: a part of its name, backend or driver, or its place in the list of `paged-attention doctor`
    #[arg(long, value_name = "NAME|INDEX")]
    adapter: Option<String>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

fn named(text: &str) -> Result<CaseSpec, String> {
    let names = || speed().into_iter().map(|spec| spec.name).collect::<Vec<_>>().join(", ");
    let found = speed().into_iter().find(|spec| spec.name.eq_ignore_ascii_case(text));
    found.ok_or_else(|| format!("one of {} is needed", names()))
}

fn main() -> ExitCode {
    let args = Args::parse();
    let report = match measured(&args) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    if args.json {
        match serde_json::to_string_pretty(&report) {
            Ok(json) => println!("{json}"),
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        }
    } else {
        print!("{}", report.text());
    }
    ExitCode::SUCCESS
}

fn measured(args: &Args) -> Result<Report, BenchError> {
    let instance = Instance::new(InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = cubecl::future::block_on(adapter::find(&instance, args.adapter.as_deref()))?;
    let runner = Runner::new(&adapter)
        .map_err(|error| BenchError::Run { name: adapter::describe(&adapter.get_info()), error })?;
    let mut sides = Sides { gpu: Gpu { runner }, cubek: Cubek::open(&instance, &adapter)? };

    let specs = if args.shape.is_empty() { speed() } else { args.shape.clone() };
    let mut pairs = Vec::new();
    let mut refused = Vec::new();
    for spec in specs {
        eprintln!("{}: checking", spec.name);
        match Pair::new(&mut sides, Problem::new(spec)?) {
            Ok(pair) => pairs.push(pair),
            Err(error @ BenchError::Shape { .. }) => refused.push(error.to_string()),
            Err(error) => return Err(error),
        }
    }

    let fma = FmaRate::new(&sides.gpu, TARGET_S)?;
    let mut fma_gflops = Vec::new();
    for round in 0..args.rounds {
        eprintln!("round {} of {}", round + 1, args.rounds);
        fma_gflops.push(fma.gflops(&sides.gpu)?);
        // Every other round runs backwards.
        let backwards = round % 2 == 1;
        let mut order: Vec<&mut Pair> = pairs.iter_mut().collect();
        if backwards {
            order.reverse();
        }
        for pair in order {
            pair.round(&sides, backwards)?;
        }
    }
    let shapes = pairs.into_iter().map(|pair| pair.finish(&sides)).collect::<Result<_, _>>()?;
    Ok(Report::new(sides.gpu.runner.adapter_info(), sides.cubek.runtime(), &fma_gflops, shapes, refused))
}

/// A device for each side, on one adapter.
struct Sides {
    gpu: Gpu,
    cubek: Cubek,
}

/// One shape on both sides.
struct Pair {
    problem: Problem,
    this: Paged,
    cubek: CubekCall,
    /// How near the results are to float64: ours, cubek's.
    accuracy: [Accuracy; 2],
    /// Seconds of one call, per round: ours, cubek's.
    seconds: [Vec<f64>; 2],
    /// Calls per timing: ours, cubek's.
    calls: [u32; 2],
    /// Outputs that were checked: ours, cubek's.
    checked: [Vec<f32>; 2],
}

impl Pair {
    /// Runs the shape on both sides and compares the results with float64.
    fn new(sides: &mut Sides, problem: Problem) -> Result<Self, BenchError> {
        let this = Paged::new(&mut sides.gpu, &problem, Paging::Scattered(PAGE_SIZE), Selection::Chosen)?;
        let cubek = CubekCall::new(&sides.cubek, &problem)?;
        cubek.seconds(&sides.cubek)?;
        let checked = [sides.gpu.read(&this.out)?, cubek.read(&sides.cubek)?];
        let judge = Judge::new(&problem)?;
        let accuracy = [
            this.accuracy(&sides.gpu, &judge, CONTENDERS[0])?,
            judge.accuracy(CONTENDERS[1], &checked[1], None, &problem.longest_chains())?,
        ];
        let mut pair = Self { problem, this, cubek, accuracy, seconds: Default::default(), calls: [1; 2], checked };
        // The first call may still allocate.
        for _ in 0..2 {
            let seconds = [pair.this_seconds(sides)?, pair.cubek_seconds(sides)?];
            pair.calls = seconds.map(|seconds| (TARGET_S / seconds).ceil().clamp(1.0, 1000.0) as u32);
        }
        // The timed calls have to write all of it again.
        pair.cubek.clear(&sides.cubek);
        let nan = vec![f32::NAN; pair.checked[0].len()];
        sides.gpu.runner.queue().write_buffer(&pair.this.out, 0, bytemuck::cast_slice(&nan));
        Ok(pair)
    }

    fn this_seconds(&self, sides: &Sides) -> Result<f64, BenchError> {
        mean(self.calls[0], || sides.gpu.seconds(&|encoder| self.this.encode(encoder), 1))
    }

    fn cubek_seconds(&self, sides: &Sides) -> Result<f64, BenchError> {
        mean(self.calls[1], || self.cubek.seconds(&sides.cubek))
    }

    fn round(&mut self, sides: &Sides, backwards: bool) -> Result<(), BenchError> {
        if backwards {
            self.seconds[1].push(self.cubek_seconds(sides)?);
        }
        self.seconds[0].push(self.this_seconds(sides)?);
        if !backwards {
            self.seconds[1].push(self.cubek_seconds(sides)?);
        }
        Ok(())
    }

    /// The figures, if the timed calls wrote what was checked.
    fn finish(self, sides: &Sides) -> Result<ShapeFigures, BenchError> {
        let found = [sides.gpu.read(&self.this.out)?, self.cubek.read(&sides.cubek)?];
        for ((found, checked), contender) in found.iter().zip(&self.checked).zip(CONTENDERS) {
            if !found.iter().zip(checked).all(|(a, b)| a.to_bits() == b.to_bits()) {
                let name = self.problem.name();
                return Err(BenchError::Device(format!(
                    "{name}: the output of {contender} is not the one that was checked"
                )));
            }
        }
        Ok(ShapeFigures::new(&self.problem, self.this.kernel, self.accuracy, self.seconds))
    }
}

/// Who computes, in the order of every pair here.
const CONTENDERS: [&str; 2] = ["this crate", "cubek"];

/// The mean of `calls` timings, each of one call.
fn mean(calls: u32, one: impl Fn() -> Result<f64, BenchError>) -> Result<f64, BenchError> {
    let sum = (0..calls).map(|_| one()).sum::<Result<f64, _>>()?;
    Ok(sum / f64::from(calls))
}
