//! `paged-attention attend`: every input is checked first, then an adapter is opened, then the cases run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use paged_attention::{
    Batch, Case, Computed, Dtype, KvSource, Output, PageSize, RunError, RunOptions, verify, verify_storage,
};

use crate::args::AttendArgs;
use crate::choosing::Choosing;
use crate::device;
use crate::error::InputError;
use crate::report::{self, AdapterName, CaseResult, Judged, Measured, Summary};
use crate::{case_file, inputs, output, pages, table};

/// Cases are kept from the check to the run up to this many bytes of files; the rest is read a second time.
const KEPT_BYTES_MAX: u64 = 1 << 30;

/// Tokens per page where neither flag nor file say.
const PAGE_SIZE_DEFAULT: u32 = 16;

/// A case that passed the checks.
struct Ready {
    /// Its place in the order of the command line.
    index: usize,
    path: PathBuf,
    /// The case, unless it is to be read again.
    case: Option<Case>,
    /// Where its result goes.
    place: Option<PathBuf>,
}

/// Runs the subcommand and returns the exit status.
pub fn run(args: &AttendArgs) -> u8 {
    let several = args.cases.len() > 1 || args.cases.iter().any(|argument| argument.is_dir());
    match prepare(args, several) {
        Err(status) => status,
        Ok((ready, failed, choosing)) => {
            let results = if ready.is_empty() { Ok(failed) } else { run_ready(args, choosing, ready, failed) };
            match results {
                Err(status) => status,
                Ok(mut results) => {
                    results.sort_by_key(|(index, _)| *index);
                    finish(results.into_iter().map(|(_, result)| result).collect(), args.json, several)
                }
            }
        }
    }
}

type Indexed = Vec<(usize, CaseResult)>;

/// All checks of inputs, flags and output places. Nothing here touches a GPU.
fn prepare(args: &AttendArgs, several: bool) -> Result<(Vec<Ready>, Indexed, Choosing), u8> {
    let choosing = Choosing::load(&args.choosing).map_err(|error| {
        complain(&error);
        report::UNUSABLE
    })?;
    let (files, bad) = inputs::collect(&args.cases);
    let mut failed: Indexed = bad.iter().map(|(path, error)| (files.len(), unusable(path, error))).collect();
    let mut ready = Vec::new();
    let mut kept_bytes = 0;
    let progress = bar("checking", files.len());
    for (index, path) in files.iter().enumerate() {
        let loaded = case_file::load(path, &args.settings, &args.paging).and_then(|loaded| {
            run_options(args, &loaded.case)?
                .0
                .validate(&loaded.case)
                .map_err(|error| refusal(args, &loaded.case, error))?;
            Ok(loaded)
        });
        match loaded {
            Ok(loaded) => {
                progress.suspend(|| warn(path, &loaded.unknown));
                kept_bytes += loaded.bytes;
                let case = (kept_bytes <= KEPT_BYTES_MAX).then_some(loaded.case);
                ready.push(Ready { index, path: path.clone(), case, place: None });
            }
            Err(error) => failed.push((index, progress.suspend(|| unusable(path, &error)))),
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    // Where no argument leads to a case, their messages are all there is to say.
    if files.is_empty() && !(several && args.json) {
        return Err(report::UNUSABLE);
    }
    if let Some(out) = args.out.as_ref().filter(|_| !ready.is_empty()) {
        let places = output::plan(out, &files, several).map_err(|error| {
            complain(&error);
            report::UNUSABLE
        })?;
        for case in &mut ready {
            case.place = places.get(case.index).cloned();
        }
    }
    Ok((ready, failed, choosing))
}

/// Opens the adapter and runs what is ready.
fn run_ready(args: &AttendArgs, choosing: Choosing, ready: Vec<Ready>, mut results: Indexed) -> Result<Indexed, u8> {
    let mut device = device::open(args.adapter.as_deref(), choosing).map_err(|(status, error)| {
        complain(&error);
        status
    })?;
    let progress = bar("running", ready.len());
    for case in ready {
        let Ready { index, path, .. } = &case;
        let (index, name) = (*index, path.display().to_string());
        progress.set_message(name.clone());
        let adapter = device.name().clone();
        let ran = run_one(args, adapter, |case, options| device.run(case, options), case);
        results.push((index, progress.suspend(|| result(name, ran))));
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(results)
}

/// The exit status of a case; of one that did not run, also the message.
fn result(name: String, ran: Result<Measured, Failure>) -> CaseResult {
    match ran {
        Ok(measured) => {
            let exit = if measured.passed { report::PASSED } else { report::OUTSIDE };
            CaseResult { case: name, exit, error: None, measured: Some(measured) }
        }
        Err((exit, error)) => {
            complain(&format_args!("{name}: {error}"));
            CaseResult { case: name, exit, error: Some(error), measured: None }
        }
    }
}

/// Exit status and message.
type Failure = (u8, String);

/// Runs, judges and writes one case. A result outside the bound is written as well: it is what a report needs.
fn run_one(
    args: &AttendArgs,
    adapter: AdapterName,
    run: impl FnOnce(&Case, &RunOptions) -> Result<Output, String>,
    ready: Ready,
) -> Result<Measured, Failure> {
    let case = match ready.case {
        Some(case) => case,
        None => {
            case_file::load(&ready.path, &args.settings, &args.paging)
                .map_err(|error| (report::UNUSABLE, error.to_string()))?
                .case
        }
    };
    let (options, page_size) = run_options(args, &case).map_err(|error| (report::UNUSABLE, error.to_string()))?;
    let output = run(&case, &options).map_err(|error| (report::NO_DEVICE, error))?;
    let judged = judge(&case, &output).map_err(|error| (report::NO_DEVICE, error))?;
    if let Some(place) = &ready.place {
        output::write(place, &case, &output).map_err(|error| (report::UNUSABLE, error.to_string()))?;
    }
    let shape = report::Shape::new(&case, page_size, &options);
    let place = ready.place.map(|place| place.display().to_string());
    Ok(Measured::new(adapter, shape, &output, &judged, place))
}

/// How a case is run, and the page size that the flags ask for.
pub fn run_options(args: &AttendArgs, case: &Case) -> Result<(RunOptions, PageSize), InputError> {
    let page_size = match args.paging.page_size {
        Some(page_size) => page_size,
        None => PageSize::new(PAGE_SIZE_DEFAULT).map_err(paged_attention::CaseError::from)?,
    };
    let mut options = RunOptions::new(page_size);
    options.page_ids = args.paging.shuffle_pages.map(|seed| pages::shuffled(case, page_size, seed));
    options.order = args.paging.layout.into();
    options.kv = args.paging.kv_dtype;
    options.out_dtype = Dtype::from(args.out_dtype);
    if let (Some(tokens_min), KvSource::Paged { page_indptr, page_ids, kv_len, .. }) =
        (args.paging.share_prefixes, case.kv())
    {
        let batch = Batch { q_indptr: case.q_indptr(), page_indptr, page_ids, kv_len };
        options.shared_prefixes = batch.shared_prefixes(case.page_size().unwrap_or(page_size), tokens_min);
    }
    Ok((options, page_size))
}

/// What is wrong with a case that no device could run, by the flag or the tensor that asks for it.
fn refusal(args: &AttendArgs, case: &Case, error: RunError) -> InputError {
    match (error, case.kv()) {
        (RunError::Case(error), _) => error.into(),
        (RunError::Layout(error), KvSource::Paged { k_pages, .. }) => {
            InputError::Pool { what: format!("`k_pages` has shape {:?}", k_pages.shape()), error }
        }
        (RunError::Layout(error), KvSource::Contiguous { k, .. }) => {
            let tokens = args.paging.page_size.map_or(PAGE_SIZE_DEFAULT, PageSize::get);
            let scattered = if args.paging.shuffle_pages.is_some() { ", --shuffle-pages" } else { "" };
            InputError::Pool { what: format!("--page-size {tokens}{scattered}, `k` of shape {:?}", k.shape()), error }
        }
        (error, _) => InputError::Run(error),
    }
}

/// Compares a result with the float64 reference: that of the keys and values that the pages hold, and these with the
/// case's own.
pub fn judge(case: &Case, output: &Output) -> Result<Judged, String> {
    let judged = |error: &dyn std::fmt::Display| format!("the result cannot be judged: {error}");
    let Output { out, lse, out_dtype, chains, stored, .. } = output;
    let computed = Computed { out, lse, out_dtype: *out_dtype, chains };
    let Some(stored) = stored else {
        let report = verify(case, &computed).map_err(|error| judged(&error))?;
        return Ok(Judged { report, storage: None });
    };
    let seen = stored.case(case).map_err(|error| judged(&error))?;
    Ok(Judged {
        report: verify(&seen, &computed).map_err(|error| judged(&error))?,
        storage: Some(verify_storage(case, stored).map_err(|error| judged(&error))?),
    })
}

/// Prints the report. Of a single case that did not run, the message on standard error is all there is.
fn finish(mut results: Vec<CaseResult>, json: bool, several: bool) -> u8 {
    if several {
        let summary = Summary::new(results);
        return printed(print(json, &summary, || table::several(&summary)), summary.exit);
    }
    let Some(result) = results.pop() else {
        return report::UNUSABLE;
    };
    if result.measured.is_some() {
        return printed(print(json, &result, || table::single(&result)), result.exit);
    }
    result.exit
}

/// To standard output, as JSON or as text.
pub fn print<T: serde::Serialize>(json: bool, value: &T, text: impl FnOnce() -> String) -> std::io::Result<()> {
    let text = if json { serde_json::to_string_pretty(value)? } else { text() };
    write_out(&text)
}

/// To standard output, with a line's end.
pub fn write_out(text: &str) -> std::io::Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    let end = if text.ends_with('\n') { "" } else { "\n" };
    match out.write_all(text.as_bytes()).and_then(|()| out.write_all(end.as_bytes())).and_then(|()| out.flush()) {
        // A reader that has seen enough (`| head`) is no failure of the run.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// The exit status, which is not 0 where the report got lost.
pub fn printed(written: std::io::Result<()>, exit: u8) -> u8 {
    match written {
        Ok(()) => exit,
        Err(error) => {
            complain(&format_args!("the report cannot be written to standard output: {error}"));
            exit.max(report::UNUSABLE)
        }
    }
}

fn unusable(path: &Path, error: &InputError) -> CaseResult {
    complain(&format_args!("{}: {error}", path.display()));
    CaseResult {
        case: path.display().to_string(),
        exit: report::UNUSABLE,
        error: Some(error.to_string()),
        measured: None,
    }
}

/// One message on standard error.
pub fn complain(error: &impl std::fmt::Display) {
    eprintln!("error: {error}");
}

fn warn(path: &Path, unknown: &[String]) {
    for name in unknown {
        eprintln!("warning: {}: tensor `{name}` is unknown and ignored", path.display());
    }
}

/// Progress on standard error, if that is a terminal; short work is over before it is drawn.
pub fn bar(what: &'static str, count: usize) -> ProgressBar {
    let progress = ProgressBar::new(count as u64);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix} {pos}/{len} {elapsed} {wide_msg}") {
        progress.set_style(style);
    }
    progress.set_prefix(what);
    progress.enable_steady_tick(Duration::from_millis(500));
    progress
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    /// A kernel that is wrong in one element: exit status 1, the result is written, the report names the element.
    #[test]
    fn outside_the_bound() {
        if std::env::var_os("PAGED_ATTENTION_SKIP_GPU").is_some_and(|value| value == "1") {
            println!("SKIPPED: PAGED_ATTENTION_SKIP_GPU=1 is set");
            return;
        }
        let Command::Attend(args) = Cli::parse_from(["paged-attention", "attend", "case"]).command else {
            panic!("another command");
        };
        let mut device = device::open(None, Choosing::BY_RULE)
            .unwrap_or_else(|(_, error)| panic!("this test needs an adapter: {error}"));
        let folder = tempfile::tempdir().unwrap();
        for (found, spoken) in [(0.75, "is 7.5e-1"), (f32::NAN, "is NaN"), (f32::INFINITY, "is inf")] {
            let place = folder.path().join("out.safetensors");
            let case = Some(paged_attention_cases::build(&paged_attention_cases::self_tests()[1].1).unwrap());
            let ready = Ready { index: 0, path: "case".into(), case, place: Some(place.clone()) };
            let wrong = |case: &Case, options: &RunOptions| {
                let mut output = device.run(case, options)?;
                // Row 2, head 3, dimension 5 of [57, 6, 64].
                output.out[(2 * 6 + 3) * 64 + 5] = found;
                Ok(output)
            };
            let name = AdapterName { adapter: "a".into(), backend: "b".into(), driver: "c".into() };
            let ran = result("case".into(), run_one(&args, name, wrong, ready));
            assert_eq!(ran.exit, report::OUTSIDE);
            assert!(std::fs::metadata(&place).unwrap().len() > 57 * 6 * 64 * 4);
            let text = table::single(&ran);
            assert!(
                text.contains("OUTSIDE") && text.contains("out[row 2, head 3, dim 5]") && text.contains(spoken),
                "{text}"
            );
            let json = serde_json::to_value(&ran).unwrap();
            assert_eq!((&json["worst"]["row"], &json["worst"]["dim"]), (&2.into(), &5.into()), "{json}");
            assert!(json["max_bound_ratio"].is_string() || json["max_bound_ratio"].as_f64() > Some(1.0), "{json}");
            let summary = Summary::new(vec![ran]);
            assert_eq!((summary.exit, summary.outside_bound), (report::OUTSIDE, 1));
            assert_eq!(summary.worst_case.as_deref(), Some("case"));
            assert!(table::several(&summary).contains("out[row 2, head 3, dim 5]"));
        }
    }
}
