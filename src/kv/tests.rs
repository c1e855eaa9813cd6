//! What cannot be brought about from outside: a broken hash, and a pool whose books are wrong.

use super::chain::{Namespace, TokenChain};
use super::invariants::InvariantError;
use super::layout::KvLayout;
use super::pages::Pages;
use super::pool::{BlockPool, PageCounts, PoolConfig, PoolError};
use super::table::BlockTable;
use crate::geometry::{Dtype, HeadGeometry, PageSize};

fn pool(page_count: u32) -> BlockPool {
    BlockPool::new(&PoolConfig { page_size: PageSize::new(2).unwrap(), page_count, host_slot_count: 2 }).unwrap()
}

fn chain(tokens: &[u32]) -> TokenChain {
    let layout = KvLayout::new(HeadGeometry::new(1, 1, 8).unwrap(), Dtype::F32, PageSize::new(2).unwrap(), 1).unwrap();
    let namespace = Namespace { model: "", version: "", adapter: "", positions: "", layout: &layout, salt: b"" };
    let mut chain = TokenChain::new(&namespace);
    chain.push(tokens);
    chain
}

fn filled(pool: &mut BlockPool, chain: &TokenChain) -> BlockTable {
    let mut table = pool.lookup(chain).unwrap();
    let more = chain.len() as u32 - table.len();
    pool.extend(&mut table, more, &mut Vec::new()).unwrap();
    pool.publish(&mut table, chain).unwrap();
    table
}

#[test]
fn with_a_broken_hash_other_tokens_are_no_hit() {
    let mut pool = pool(8);
    let ours = chain(&[1, 2, 3, 4]).with_broken_hash();
    let theirs = chain(&[1, 2, 5, 6, 7]).with_broken_hash();
    let first = filled(&mut pool, &ours);
    // The first block is the same, the second has the same key and other tokens.
    let second = filled(&mut pool, &theirs);
    assert_eq!(second.pages()[0], first.pages()[0]);
    assert_ne!(second.pages()[1], first.pages()[1]);
    assert_eq!(pool.prefix_stats().hits, 1);
    // Once by the lookup, once by the attempt to publish.
    assert_eq!(pool.prefix_stats().collisions, 2);
    pool.check_invariants(&[&first, &second], &[]).unwrap();
    // What was there first is still found.
    let third = pool.lookup(&ours).unwrap();
    assert_eq!(third.pages(), first.pages());
}

/// Each invariant is noticed when it is broken.
#[test]
fn wrong_books_are_noticed() {
    type Break = fn(&mut BlockPool, &mut BlockTable);
    let cases: [(Break, InvariantError); 12] = [
        (|pool, _| pool.tables += 1, InvariantError::Tables { found: 1, needed: 2 }),
        (|pool, table| table.pool = pool.id + 1, InvariantError::Foreign { found: 0, needed: 0 }),
        (|_, table| table.len += 2, InvariantError::TablePages { kv_len: 7, found: 3, needed: 4 }),
        (|_, table| table.pages[2] = 0, InvariantError::Owners { page: 0, found: 1, needed: 2 }),
        (|pool, _| pool.pages.share(2), InvariantError::Owners { page: 2, found: 2, needed: 1 }),
        (|pool, _| pool.cache.stats.evictions += 1, InvariantError::Published { found: 2, needed: 1 }),
        (|pool, _| assert!(pool.cache.remove(&mut pool.pages, 0)), InvariantError::Published { found: 1, needed: 2 }),
        (|pool, _| pool.cache.stats.published += 1, InvariantError::Published { found: 2, needed: 3 }),
        (|_, table| table.published = 3, InvariantError::Unpublished { page: 2 }),
        (|pool, _| pool.free_slots.truncate(1), InvariantError::HostSlot { slot: 0, found: 0 }),
        (|pool, _| pool.free_slots.push(1), InvariantError::HostSlot { slot: 1, found: 2 }),
        (|pool, _| pool.pages = Pages::new(6).unwrap(), InvariantError::Owners { page: 0, found: 0, needed: 1 }),
    ];
    for (at, (break_it, needed)) in cases.into_iter().enumerate() {
        let mut pool = pool(6);
        let tokens = chain(&[1, 2, 3, 4, 5]);
        let mut table = filled(&mut pool, &tokens);
        assert_eq!(table.pages(), [0, 1, 2]);
        pool.check_invariants(&[&table], &[]).unwrap();
        break_it(&mut pool, &mut table);
        let found = pool.check_invariants(&[&table], &[]).unwrap_err();
        let same = std::mem::discriminant(&found) == std::mem::discriminant(&needed);
        // Which numbers pools have depends on the tests that ran before.
        assert!(
            if matches!(needed, InvariantError::Foreign { .. }) { same } else { found == needed },
            "break {at}: {found}, not {needed}"
        );
    }
}

#[test]
fn idle_pages_in_two_states_are_noticed() {
    let mut pool = pool(4);
    let tokens = chain(&[1, 2, 3, 4]);
    let table = filled(&mut pool, &tokens);
    pool.release(table).unwrap();
    pool.check_invariants(&[], &[]).unwrap();
    assert_eq!(pool.counts(), PageCounts { held: 0, cached: 2, free: 2 });
    // The block is forgotten while its page stays among the cached ones.
    assert!(pool.cache.remove(&mut pool.pages, 0));
    pool.cache.stats.withdrawn += 1;
    let found = pool.check_invariants(&[], &[]).unwrap_err();
    assert!(
        matches!(found, InvariantError::Counts { found: PageCounts { held: 0, cached: 1, free: 3 }, .. }),
        "{found}"
    );
}

#[test]
fn tables_are_counted_up_to_the_end() {
    let mut pool = pool(1);
    pool.tables = u32::MAX;
    assert_eq!(pool.new_table().unwrap_err(), PoolError::TooManyTables { tables: u32::MAX });
    assert_eq!(pool.lookup(&chain(&[])).unwrap_err(), PoolError::TooManyTables { tables: u32::MAX });
}
