//! The command `paged-attention`: exact paged attention on anybody's tensors.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command speaks to its user")]

mod args;
mod attend;
mod bench;
mod budget;
mod case_file;
mod choosing;
mod device;
mod doctor;
mod error;
#[cfg(test)]
mod fuzz;
mod header;
mod index;
mod inputs;
mod output;
mod pages;
mod report;
mod selftest;
mod settings;
mod table;
mod tune;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    // Unusable arguments end here with exit status 2, and --help with 0.
    let cli = args::Cli::parse();
    ExitCode::from(match &cli.command {
        args::Command::Attend(args) => attend::run(args),
        args::Command::Doctor(args) => doctor::run(args),
        args::Command::Bench(args) => bench::run(args),
        args::Command::Budget(args) => budget::run(args),
        args::Command::Tune(args) => tune::run(args),
    })
}
