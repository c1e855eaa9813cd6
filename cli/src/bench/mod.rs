//! `paged-attention bench`: checked first, then timed in rounds together with the adapter's limits and a baseline.

mod args;
mod plot;
mod report;
mod shape;

use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use paged_attention_bench_kit::{BenchError, Gpu, Options, Problem, Session};

pub use args::BenchArgs;

use crate::attend::{complain, print, printed};
use crate::choosing::Choosing;
use crate::device::guard;
use crate::report as exit;
use report::Report;

/// Runs the subcommand and returns the exit status.
pub fn run(args: &BenchArgs) -> u8 {
    match measured(args) {
        Ok(report) => printed(print(args.json, &report, || report.text()), exit::PASSED),
        Err((status, message)) => {
            complain(&message);
            status
        }
    }
}

fn measured(args: &BenchArgs) -> Result<Report, (u8, String)> {
    let unusable = |message: String| (exit::UNUSABLE, message);
    if let Some(place) = &args.plot {
        check_place(place).map_err(unusable)?;
    }
    let choosing = Choosing::load(&args.choosing).map_err(|error| unusable(error.to_string()))?;
    let problems: Vec<Problem> =
        args.shapes().map(|shape| shape.problem(args.dtype)).collect::<Result<_, _>>().map_err(failure)?;
    let options = args.options();

    let progress = ProgressBar::new(Session::steps(problems.len(), &options) as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}") {
        progress.set_style(style);
    }
    progress.enable_steady_tick(Duration::from_millis(500));
    let report = guard(|| Ok(rounds(args, &choosing, problems, options, &progress)))
        .unwrap_or_else(|message| Err((exit::NO_DEVICE, message)));
    progress.finish_and_clear();
    let report = report?;
    if let Some(place) = &args.plot {
        let write = plot::svg(&report).and_then(|svg| std::fs::write(place, svg).map_err(|error| error.to_string()));
        write.map_err(|error| unusable(format!("{}: {error}", place.display())))?;
    }
    Ok(report)
}

fn rounds(
    args: &BenchArgs,
    choosing: &Choosing,
    problems: Vec<Problem>,
    options: Options,
    progress: &ProgressBar,
) -> Result<Report, (u8, String)> {
    // A step is done when the next begins.
    let mut begun = false;
    let mut step = |what: &str| {
        progress.inc(begun.into());
        begun = true;
        progress.set_message(what.to_owned());
    };
    let mut gpu = Gpu::open(args.adapter.as_deref()).map_err(failure)?;
    choosing.apply(&mut gpu.runner).map_err(|error| (exit::UNUSABLE, error.to_string()))?;
    let session = Session::new(&mut gpu, problems, options, &mut step).map_err(failure)?;
    let (limits, shapes) = session.run(&gpu, &mut step).map_err(failure)?;
    Ok(Report::new(gpu.runner.adapter_info(), args, &options, &limits, &shapes))
}

/// Exit status and message.
fn failure(error: BenchError) -> (u8, String) {
    let status = match &error {
        BenchError::Shape { .. } => exit::UNUSABLE,
        BenchError::Wrong { .. } => exit::OUTSIDE,
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
    if place.is_dir() {
        Err(format!("{} is a folder; a file is needed", place.display()))
    } else if !folder.is_dir() {
        Err(format!("{}: there is no folder {}", place.display(), folder.display()))
    } else {
        Ok(())
    }
}
