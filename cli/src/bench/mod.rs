//! `paged-attention bench`: checked first, then timed in rounds together with the adapter's limits and a baseline.

mod args;
mod growth;
mod plot;
mod report;
mod shape;

use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use paged_attention_bench_kit::{BenchError, Gpu, Growth, Options, Problem, Session};

pub use args::BenchArgs;

use crate::attend::{complain, print, printed};
use crate::choosing::Choosing;
use crate::device::guard;
use crate::report as exit;
use growth::GrowthReport;
use report::Report;

/// Runs the subcommand and returns the exit status.
pub fn run(args: &BenchArgs) -> u8 {
    let ran = if args.growth {
        measured(args, Growth::steps(points(args), &args.options()), curves, plot::curves)
            .map(|report| printed(print(args.json, &report, || report.text()), exit::PASSED))
    } else {
        // Shapes that cannot be measured are refused before an adapter is looked for.
        let problems: Result<Vec<Problem>, _> = args.shapes().into_iter().map(Problem::new).collect();
        problems.map_err(failure).and_then(|problems| {
            let steps = Session::steps(problems.len(), &args.options());
            measured(args, steps, |args, gpu, options, step| rounds(args, problems, gpu, options, step), plot::shares)
                .map(|report| printed(print(args.json, &report, || report.text()), exit::PASSED))
        })
    };
    ran.unwrap_or_else(|(status, message)| {
        complain(&message);
        status
    })
}

fn points(args: &BenchArgs) -> usize {
    args.growth_shapes().iter().map(Vec::len).sum()
}

/// Measures with a progress bar of so many steps, and draws.
fn measured<R>(
    args: &BenchArgs,
    steps: usize,
    measure: impl FnOnce(&BenchArgs, &mut Gpu, Options, &mut dyn FnMut(&str)) -> Result<R, BenchError>,
    draw: impl FnOnce(&R) -> Result<String, String>,
) -> Result<R, (u8, String)> {
    let unusable = |message: String| (exit::UNUSABLE, message);
    if let Some(place) = &args.plot {
        check_place(place).map_err(unusable)?;
    }
    let choosing = Choosing::load(&args.choosing).map_err(|error| unusable(error.to_string()))?;
    let progress = ProgressBar::new(steps as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}") {
        progress.set_style(style);
    }
    progress.enable_steady_tick(Duration::from_millis(500));
    // A step is done when the next begins.
    let mut begun = false;
    let mut step = |what: &str| {
        progress.inc(begun.into());
        begun = true;
        progress.set_message(what.to_owned());
    };
    let report = guard(|| {
        Ok(Gpu::open(args.adapter.as_deref()).map_err(failure).and_then(|mut gpu| {
            choosing.apply(&mut gpu.runner).map_err(|error| unusable(error.to_string()))?;
            measure(args, &mut gpu, args.options(), &mut step).map_err(failure)
        }))
    })
    .unwrap_or_else(|message| Err((exit::NO_DEVICE, message)));
    progress.finish_and_clear();
    let report = report?;
    if let Some(place) = &args.plot {
        let write = draw(&report).and_then(|svg| std::fs::write(place, svg).map_err(|error| error.to_string()));
        write.map_err(|error| unusable(format!("{}: {error}", place.display())))?;
    }
    Ok(report)
}

fn rounds(
    args: &BenchArgs,
    problems: Vec<Problem>,
    gpu: &mut Gpu,
    options: Options,
    step: &mut dyn FnMut(&str),
) -> Result<Report, BenchError> {
    let session = Session::new(gpu, problems, options, step)?;
    let (limits, shapes) = session.run(gpu, step)?;
    Ok(Report::new(gpu.runner.adapter_info(), args, &options, &limits, &shapes))
}

fn curves(
    args: &BenchArgs,
    gpu: &mut Gpu,
    options: Options,
    step: &mut dyn FnMut(&str),
) -> Result<GrowthReport, BenchError> {
    let growth = Growth::measure(gpu, args.growth_shapes(), &options, step)?;
    Ok(GrowthReport::new(gpu.runner.adapter_info(), args, &options, &growth))
}

/// Exit status and message.
fn failure(error: BenchError) -> (u8, String) {
    let status = match &error {
        BenchError::Shape { .. } => exit::UNUSABLE,
        BenchError::Wrong { .. } | BenchError::Differs { .. } => exit::OUTSIDE,
        BenchError::Run { error, .. } if refuses(error) => exit::UNUSABLE,
        BenchError::Adapter(_) | BenchError::Run { .. } | BenchError::Device(_) => exit::NO_DEVICE,
    };
    (status, error.to_string())
}

/// Whether the crate found the shape too large or not allowed, as opposed to a device that failed.
fn refuses(error: &paged_attention::RunError) -> bool {
    use paged_attention::RunError::{Append, Bind, Case, Layout, Plan, TooLarge};
    matches!(error, TooLarge { .. } | Case(_) | Layout(_) | Plan(_) | Append(_) | Bind(_))
}

/// Better now than after a minute of measuring.
fn check_place(place: &Path) -> Result<(), String> {
    let folder = place.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let is_svg = place.extension().is_none_or(|extension| extension.eq_ignore_ascii_case("svg"));
    if place.is_dir() {
        Err(format!("{} is a folder; a file is needed", place.display()))
    } else if !folder.is_dir() {
        Err(format!("{}: there is no folder {}", place.display(), folder.display()))
    } else if !is_svg {
        Err(format!("--plot {}: the plot is SVG; a name that ends in .svg is needed", place.display()))
    } else {
        Ok(())
    }
}
