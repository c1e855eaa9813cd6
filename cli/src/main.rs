//! The command `paged-attention`: exact paged attention on anybody's tensors.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command speaks to its user")]

mod args;
mod attend;
mod bench;
mod case_file;
mod device;
mod doctor;
mod error;
mod header;
mod index;
mod inputs;
mod output;
mod pages;
mod report;
mod selftest;
mod settings;
mod table;

use std::process::ExitCode;

use clap::Parser;

/// Mesa's Vulkan layer looks for a Wayland display and prints "error: XDG_RUNTIME_DIR is invalid or not set" where there
/// is no session, as in containers and over SSH. The variable cannot be set in a running program without unsafe code, so
/// the command starts itself over with one that leads nowhere. If that fails, the message is all that is amiss.
#[cfg(target_os = "linux")]
fn quieten_layers() {
    use std::os::unix::process::CommandExt;
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        let mut args = std::env::args_os();
        let name = args.next().unwrap_or_else(|| "paged-attention".into());
        let mut again = std::process::Command::new("/proc/self/exe");
        let _ = again.arg0(name).args(args).env("XDG_RUNTIME_DIR", "/nonexistent").exec();
    }
}

fn main() -> ExitCode {
    #[cfg(target_os = "linux")]
    quieten_layers();
    // Unusable arguments end here with exit status 2, and --help with 0.
    let cli = args::Cli::parse();
    ExitCode::from(match &cli.command {
        args::Command::Attend(args) => attend::run(args),
        args::Command::Doctor(args) => doctor::run(args),
        args::Command::Bench(args) => bench::run(args),
    })
}
