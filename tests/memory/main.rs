//! Paged KV memory without a device: the pool, its tables, sharing, the prefix cache, swapping.
//!
//! Three judges look at every step: a naive model of the whole pool (`naive.rs`: no owner counts, no lists, no hash), a
//! simulated memory in which every slot says of which history it is (`world.rs`), and the pool's own `check_invariants`.
//! The naive model has switches for faults that other allocators have had. A test of a fault is one function that the pool
//! and the model pass and the faulty model must not.

#![allow(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "clippy.toml frees test functions only; these are their helpers"
)]

mod budget_example;
mod cases;
mod events;
mod exhaustive;
mod faults;
mod history;
mod interleavings;
mod naive;
mod refusals;
mod subject;
mod threads;
mod world;
