//! The command as its users meet it: through its arguments, streams, files and exit status.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a failed expectation is a test's way to speak, in its helpers too"
)]

mod accepted;
mod bench;
mod budget;
mod gpu;
mod places;
mod refused_files;
mod refused_tensors;
mod support;
mod tuning;
