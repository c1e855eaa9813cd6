//! `paged-attention doctor`: which adapter would be used, why, and whether its kernels work.

use crate::args::DoctorArgs;

/// Runs the subcommand and returns the exit status.
pub fn run(args: &DoctorArgs) -> u8 {
    let _ = args;
    crate::report::NO_DEVICE
}
