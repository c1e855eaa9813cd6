//! A pool behind a lock: many threads admit and cancel at once.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use paged_attention::{BatchBuilder, BlockPool, BlockTable, PoolError};
use rand::{RngExt, SeedableRng};

use crate::faults::config;
use crate::history::{History, Name};

/// Requests that any thread may cancel.
type Running = Mutex<Vec<BlockTable>>;

/// A client: it admits requests, each with a prefix that others have, too.
fn admit(pool: &Mutex<BlockPool>, running: &Running, seed: u64, rounds: u64) -> (u64, u64) {
    let mut random = rand::rngs::StdRng::seed_from_u64(seed);
    let (mut admitted, mut refused) = (0, 0);
    for _ in 0..rounds {
        // Hashing needs no lock.
        let prefix = random.random_range(0..4_u32);
        let len = random.random_range(1..40_usize);
        let tokens: Vec<u32> =
            (0..len as u32).map(|at| if at < 12 { prefix } else { random.random_range(0..50) }).collect();
        let chain = History::of(&Name::default(), 4, &tokens).chain;
        let mut copies = Vec::new();
        let mut guard = pool.lock().unwrap();
        let mut table = guard.lookup(&chain).unwrap();
        let left = len as u32 - table.len();
        match guard.extend(&mut table, left, &mut copies) {
            Ok(()) => {
                guard.publish(&mut table, &chain).unwrap();
                drop(guard);
                running.lock().unwrap().push(table);
                admitted += 1;
            }
            Err(PoolError::Exhausted { needed, available, .. }) => {
                assert!(needed > available);
                guard.release(table).unwrap();
                drop(guard);
                refused += 1;
                std::thread::yield_now();
            }
            Err(error) => panic!("{error}"),
        }
    }
    (admitted, refused)
}

/// A client that thinks better of it, as long as there are `clients`.
fn cancel(pool: &Mutex<BlockPool>, running: &Running, seed: u64, clients: &AtomicU64) -> u64 {
    let mut random = rand::rngs::StdRng::seed_from_u64(seed);
    let mut cancelled = 0;
    while clients.load(Ordering::Relaxed) > 0 {
        let mut tables = running.lock().unwrap();
        // Some go on, so that there is something to plan.
        if tables.len() < 4 {
            drop(tables);
            std::thread::yield_now();
            continue;
        }
        let at = random.random_range(0..tables.len());
        let table = tables.swap_remove(at);
        drop(tables);
        pool.lock().unwrap().release(table).unwrap();
        cancelled += 1;
    }
    cancelled
}

/// The planner: what it puts into a batch is held while it does so, and no page is in two states.
fn plan(pool: &Mutex<BlockPool>, running: &Running, clients: &AtomicU64) -> u64 {
    let mut step = BatchBuilder::default();
    let mut planned = 0;
    while clients.load(Ordering::Relaxed) > 0 {
        let tables = running.lock().unwrap();
        step.clear();
        for table in tables.iter() {
            step.push(table, 1).unwrap();
        }
        let guard = pool.lock().unwrap();
        let mut pages = step.batch().page_ids.to_vec();
        pages.sort_unstable();
        pages.dedup();
        let counts = guard.counts();
        assert_eq!(counts.held + counts.available(), guard.page_count());
        // Others hold tables that they have not handed in, so there may be more.
        assert!(pages.len() <= counts.held as usize, "{} pages in a batch, {counts:?}", pages.len());
        planned += step.batch().seqs() as u64;
        drop((tables, guard));
        std::thread::yield_now();
    }
    planned
}

#[test]
fn many_threads_admit_cancel_and_plan() {
    let pool = Mutex::new(BlockPool::new(&config(4, 64)).unwrap());
    let running = Running::default();
    let clients = AtomicU64::new(4);
    let [admitted, refused, cancelled, planned] = [const { AtomicU64::new(0) }; 4];
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (pool, running, clients, admitted, refused) = (&pool, &running, &clients, &admitted, &refused);
            scope.spawn(move || {
                let (more, less) = admit(pool, running, seed, 3000);
                admitted.fetch_add(more, Ordering::Relaxed);
                refused.fetch_add(less, Ordering::Relaxed);
                clients.fetch_sub(1, Ordering::Relaxed);
            });
        }
        for seed in 10..14 {
            let (pool, running, clients, cancelled) = (&pool, &running, &clients, &cancelled);
            scope.spawn(move || cancelled.fetch_add(cancel(pool, running, seed, clients), Ordering::Relaxed));
        }
        let (pool, running, clients, planned) = (&pool, &running, &clients, &planned);
        scope.spawn(move || planned.fetch_add(plan(pool, running, clients), Ordering::Relaxed));
    });
    let (mut pool, mut running) = (pool.into_inner().unwrap(), running.into_inner().unwrap());
    pool.check_invariants(&running.iter().collect::<Vec<_>>(), &[]).unwrap();
    let [admitted, refused, cancelled, planned] = [admitted, refused, cancelled, planned].map(AtomicU64::into_inner);
    println!("{admitted} admitted, {refused} refused, {cancelled} cancelled, {planned} planned");
    assert_eq!(admitted - cancelled, running.len() as u64);
    assert!(admitted > 1000 && cancelled > 1000 && planned > 0);
    for table in running.drain(..) {
        pool.release(table).unwrap();
    }
    assert_eq!((pool.counts().held, pool.tables()), (0, 0));
    pool.check_invariants(&[], &[]).unwrap();
}
