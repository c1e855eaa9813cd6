//! Every order in which three threads can take the pool's lock.

use std::sync::Arc as StdArc;
use std::sync::atomic::{AtomicUsize, Ordering};

use loom::sync::{Arc, Mutex};
use paged_attention::{BlockPool, BlockTable, PoolError};

use crate::faults::config;
use crate::history::{History, Name};

/// One thread plans steps of a request, one cancels that request, one admits another that needs its pages.
#[test]
fn cancel_while_planning_in_every_order() {
    let orders = StdArc::new(AtomicUsize::new(0));
    let outcomes = StdArc::new([const { AtomicUsize::new(0) }; 2]);
    let (counted, seen) = (orders.clone(), outcomes.clone());
    loom::model(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        let prompt = History::of(&Name::default(), 2, &[1, 2, 3, 4]).chain;
        let mut pool = BlockPool::new(&config(2, 3)).unwrap();
        let mut table = pool.lookup(&prompt).unwrap();
        pool.extend(&mut table, 4, &mut Vec::new()).unwrap();
        pool.publish(&mut table, &prompt).unwrap();
        let pool = Arc::new(Mutex::new(pool));
        let request: Arc<Mutex<Option<BlockTable>>> = Arc::new(Mutex::new(Some(table)));

        let planner = {
            let (pool, request) = (pool.clone(), request.clone());
            loom::thread::spawn(move || {
                for _ in 0..2 {
                    // The request's lock is held over the pool's, so that the table is not released in between.
                    let mut request = request.lock().unwrap();
                    if let Some(table) = request.as_mut() {
                        let result = pool.lock().unwrap().extend(table, 1, &mut Vec::new());
                        assert!(matches!(result, Ok(()) | Err(PoolError::Exhausted { .. })), "{result:?}");
                    }
                }
            })
        };
        let canceller = {
            let (pool, request) = (pool.clone(), request.clone());
            loom::thread::spawn(move || {
                let table = request.lock().unwrap().take();
                if let Some(table) = table {
                    pool.lock().unwrap().release(table).unwrap();
                }
            })
        };
        let other = History::of(&Name::default(), 2, &[1, 2, 5]).chain;
        let mut guard = pool.lock().unwrap();
        let mut table = guard.lookup(&other).unwrap();
        drop(guard);
        // Whatever happens here, what was found is held.
        let mut guard = pool.lock().unwrap();
        assert_eq!(table.len(), 2);
        let left = 3 - table.len();
        let admitted = guard.extend(&mut table, left, &mut Vec::new()).is_ok();
        seen[usize::from(admitted)].fetch_add(1, Ordering::Relaxed);
        guard.release(table).unwrap();
        drop(guard);
        planner.join().unwrap();
        canceller.join().unwrap();

        let pool = pool.lock().unwrap();
        pool.check_invariants(&[], &[]).unwrap();
        assert_eq!((pool.counts().held, pool.tables()), (0, 0));
    });
    let [refused, admitted] = [0, 1].map(|at: usize| outcomes[at].load(Ordering::Relaxed));
    println!("{} orders: {admitted} times admitted, {refused} times refused", orders.load(Ordering::Relaxed));
    // Both came about.
    assert!(refused > 0 && admitted > 0, "{admitted} times admitted, {refused} times refused");
}
