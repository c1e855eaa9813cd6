//! Rows are independent: they are shared out over the processors.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::Problem;

/// `work(scratch, row, head)` for every query row and head; results in the order `[total_q, q_heads]`.
///
/// Each thread has a scratch of its own. What a row yields does not depend on the thread, nor does the order.
pub(crate) fn map_rows<S, R: Send>(
    problem: &Problem,
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize, usize) -> R + Sync,
) -> Vec<R> {
    let (count, heads) = (problem.total_q() * problem.q_heads(), problem.q_heads());
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut scratch = scratch();
        let mut done = Vec::new();
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= count {
                return done;
            }
            done.push((item, work(&mut scratch, item / heads, item % heads)));
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(count);
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
