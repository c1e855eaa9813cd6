//! Every test that needs an adapter, in one binary, so that each pipeline is made once.
//!
//! Without an adapter they fail and say what to install. `PAGED_ATTENTION_SKIP_GPU=1` leaves them out, and says so;
//! `PAGED_ATTENTION_ADAPTER` picks an adapter by index or name. Slow ones are ignored by default.
// The short forms are allowed in test functions only; here the helpers belong to them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod api;
mod attention;
mod bound;
mod common;
mod crossed;
mod exact_bits;
mod extreme;
mod failures;
mod faults;
mod groups;
mod options;
mod random;
mod real;
mod rounds;
mod segments;
mod shared;
mod slices;
mod stored;
mod tuning;
mod windows;
