//! Rows are independent: they are shared out over the processors.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::Problem;
use crate::case::{Case, SCRATCH_BYTES_PER_KEY};

/// Rows whose results are kept at a time.
const BLOCK: usize = 1 << 16;

/// What all threads together may keep beside their rows, unless one needs more.
const SCRATCH_BYTES_MAX: u64 = 1 << 32;

/// `each(work(problem, scratch, row, head))` for every query row and head of `case`, in the order
/// `[total_q, q_heads]`.
///
/// Each thread has a scratch of its own. What a row yields does not depend on the thread, nor does the order.
pub(crate) fn for_rows<S, R: Send>(
    case: &Case,
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&Problem<'_>, &mut S, usize, usize) -> R + Sync,
    mut each: impl FnMut(R),
) {
    Problem::for_parts(case, |problem| {
        let heads = problem.q_heads();
        let rows = problem.rows();
        let items = rows.start * heads..rows.end * heads;
        for start in items.clone().step_by(BLOCK) {
            let block = start..items.end.min(start.saturating_add(BLOCK));
            map_block(problem, block, &scratch, &work).into_iter().for_each(&mut each);
        }
    });
}

fn map_block<S, R: Send>(
    problem: &Problem<'_>,
    items: std::ops::Range<usize>,
    scratch: &(impl Fn() -> S + Sync),
    work: &(impl Fn(&Problem<'_>, &mut S, usize, usize) -> R + Sync),
) -> Vec<R> {
    let heads = problem.q_heads();
    let next = AtomicUsize::new(items.start);
    let worker = || {
        let mut scratch = scratch();
        let mut done = Vec::new();
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items.end {
                return done;
            }
            done.push((item, work(problem, &mut scratch, item / heads, item % heads)));
        }
    };
    let affordable = SCRATCH_BYTES_MAX / (SCRATCH_BYTES_PER_KEY * (problem.keys_max() as u64).max(1));
    let threads = thread::available_parallelism().map_or(1, usize::from).min(items.len()).min(affordable as usize);
    let mut results = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(worker)).collect();
        let mut results = worker();
        for other in others {
            match other.join() {
                Ok(done) => results.extend(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    });
    results.sort_unstable_by_key(|(item, _)| *item);
    results.into_iter().map(|(_, result)| result).collect()
}
