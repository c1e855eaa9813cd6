//! What a pool refuses, with numbers, and that nothing is changed by it. (What does not compile is in the documentation of
//! `BlockTable`.)

use paged_attention::{
    AppendError, AppendPlan, BatchBuilder, BatchError, BlockPool, BlockTable, Dtype, HeadGeometry, InvariantError,
    KvLayout, PageCopy, PageSize, PoolConfig, PoolError, SwappedTable, TokenChain,
};

use crate::faults::config;
use crate::history::{History, Name};

fn chain(page_size: u32, tokens: &[u32]) -> TokenChain {
    History::of(&Name::default(), page_size, tokens).chain
}

fn pool() -> BlockPool {
    BlockPool::new(&config(4, 4)).unwrap()
}

fn filled(pool: &mut BlockPool, tokens: u32) -> BlockTable {
    let mut table = pool.new_table().unwrap();
    pool.extend(&mut table, tokens, &mut Vec::new()).unwrap();
    table
}

#[test]
fn tables_of_another_pool_are_handed_back() {
    let (mut ours, mut theirs) = (pool(), pool());
    let mut table = filled(&mut theirs, 6);
    let mut copies = Vec::new();
    let errors = [
        ours.extend(&mut table, 1, &mut copies).unwrap_err(),
        ours.truncate(&mut table, 1).unwrap_err(),
        ours.release_before(&mut table, 1).unwrap_err(),
        ours.publish(&mut table, &chain(4, &[1, 2, 3, 4])).unwrap_err(),
        ours.fork(&table).unwrap_err(),
    ];
    let refused = ours.release(table).unwrap_err();
    let refused_swap = ours.swap_out(refused.table, &mut copies).unwrap_err();
    assert_eq!((refused_swap.table.len(), refused_swap.table.pages().len()), (6, 2));
    let swapped = theirs.swap_out(refused_swap.table, &mut copies).unwrap();
    let (before, mut none) = (copies.clone(), Vec::new());
    let refused_in = ours.swap_in(swapped, &mut none).unwrap_err();
    let refused_discard = ours.discard(refused_in.table).unwrap_err();
    let later = [refused.error, refused_swap.error, refused_in.error, refused_discard.error];
    for error in errors.into_iter().chain(later) {
        assert!(matches!(error, PoolError::Foreign { found, needed } if found == needed + 1), "{error}");
    }
    assert_eq!((copies, none), (before, Vec::new()));
    assert_eq!((ours.tables(), ours.counts().free, ours.free_host_slots()), (0, 4, 8));
    theirs.discard(refused_discard.table).unwrap();
    assert_eq!((theirs.tables(), theirs.counts().free, theirs.free_host_slots()), (0, 4, 8));
}

#[test]
fn a_pool_in_use_is_not_reset() {
    let mut pool = pool();
    let table = filled(&mut pool, 6);
    assert_eq!(pool.reset(), Err(PoolError::InUse { tables: 1, held: 2, slots: 0 }));
    let swapped = pool.swap_out(table, &mut Vec::new()).unwrap();
    assert_eq!(pool.reset(), Err(PoolError::InUse { tables: 1, held: 0, slots: 2 }));
    pool.discard(swapped).unwrap();
    let tokens = chain(4, &[1, 2, 3, 4, 5]);
    let mut table = filled(&mut pool, 5);
    pool.publish(&mut table, &tokens).unwrap();
    pool.release(table).unwrap();
    assert_eq!((pool.counts().cached, pool.prefix_stats().published), (1, 1));
    pool.reset().unwrap();
    assert_eq!((pool.counts().free, pool.prefix_stats().published), (4, 0));
    pool.check_invariants(&[], &[]).unwrap();
    let found = pool.lookup(&tokens).unwrap();
    assert_eq!(found.len(), 0);
}

#[test]
fn a_table_that_was_dropped_is_missed() {
    let mut pool = pool();
    drop(filled(&mut pool, 6));
    assert_eq!(pool.check_invariants(&[], &[]), Err(InvariantError::Tables { found: 0, needed: 1 }));
    assert_eq!(pool.reset(), Err(PoolError::InUse { tables: 1, held: 2, slots: 0 }));
}

#[test]
fn positions_outside_of_the_table_are_refused() {
    let mut pool = pool();
    let mut table = filled(&mut pool, 10);
    assert_eq!(pool.truncate(&mut table, 11), Err(PoolError::Position { found: 11, first: 0, len: 10 }));
    assert_eq!(pool.release_before(&mut table, 11), Err(PoolError::Position { found: 11, first: 0, len: 10 }));
    pool.release_before(&mut table, 9).unwrap();
    assert_eq!((table.first_token(), table.pages().len(), table.kv_len()), (8, 1, 2));
    // Going back is no mistake, but brings nothing back.
    pool.release_before(&mut table, 3).unwrap();
    assert_eq!(table.first_token(), 8);
    assert_eq!(pool.truncate(&mut table, 7), Err(PoolError::Position { found: 7, first: 8, len: 10 }));
    pool.truncate(&mut table, 8).unwrap();
    assert_eq!((table.pages(), table.kv_len()), (&[][..], 0));
    pool.check_invariants(&[&table], &[]).unwrap();
}

#[test]
fn lengths_stay_below_two_to_the_32() {
    let page_size = PageSize::new(u32::MAX).unwrap();
    // Such a page has tokens of 16 GiB to compare, so there is none.
    let mut pool = BlockPool::new(&PoolConfig { page_size, page_count: 0, host_slot_count: 0 }).unwrap();
    let mut table = pool.new_table().unwrap();
    let error = pool.extend(&mut table, u32::MAX, &mut Vec::new()).unwrap_err();
    assert_eq!(error, PoolError::Exhausted { needed: 1, available: 0, page_count: 0 });
    let mut pool = self::pool();
    let mut table = filled(&mut pool, 3);
    let error = pool.extend(&mut table, u32::MAX, &mut Vec::new()).unwrap_err();
    assert_eq!(error, PoolError::TooLong { len: 3, tokens: u32::MAX });
    let error = pool.extend(&mut table, u32::MAX - 3, &mut Vec::new()).unwrap_err();
    assert_eq!(error, PoolError::Exhausted { needed: (1 << 30) - 1, available: 3, page_count: 4 });
}

#[test]
fn a_chain_of_something_else_is_refused() {
    let mut pool = pool();
    let other_size = chain(8, &[1; 8]);
    assert_eq!(pool.lookup(&other_size).unwrap_err(), PoolError::BlockSize { found: 8, needed: 4 });
    let ours = chain(4, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let mut table = filled(&mut pool, 8);
    assert_eq!(pool.publish(&mut table, &other_size), Err(PoolError::BlockSize { found: 8, needed: 4 }));
    // The first block is published, and then other tokens are said to be in it.
    let mut short = ours.clone();
    short.truncate(4);
    pool.publish(&mut table, &short).unwrap();
    for other in [&[9, 2, 3, 4, 5, 6, 7, 8][..], &[9, 2, 3, 4]] {
        assert_eq!(pool.publish(&mut table, &chain(4, other)), Err(PoolError::OtherChain { block: 0 }));
    }
    assert_eq!(pool.prefix_stats().published, 1);
    pool.publish(&mut table, &ours).unwrap();
    assert_eq!(pool.prefix_stats().published, 2);
    // A fork that did not publish itself, and says that it has other tokens.
    let mut young = pool.new_table().unwrap();
    pool.extend(&mut young, 4, &mut Vec::new()).unwrap();
    let mut fork = pool.fork(&young).unwrap();
    pool.publish(&mut young, &chain(4, &[5, 5, 5, 5])).unwrap();
    assert_eq!(pool.publish(&mut fork, &chain(4, &[6, 6, 6, 6])), Err(PoolError::OtherChain { block: 0 }));
    pool.check_invariants(&[&table, &young, &fork], &[]).unwrap();
}

#[test]
fn a_pool_without_memory_is_refused() {
    // Room for 2^52 tokens to compare.
    let page_size = PageSize::new(u32::MAX).unwrap();
    let error = BlockPool::new(&PoolConfig { page_size, page_count: 1 << 20, host_slot_count: 0 }).unwrap_err();
    assert_eq!(error, PoolError::Memory { bytes: (4 << 20) * u64::from(u32::MAX) });
}

/// Copies of a run may go in any order: those of a run touch nothing that another writes.
#[test]
fn runs_end_where_a_copy_needs_an_earlier_one() {
    let copy = |from, to| PageCopy::OnDevice { from, to };
    let out = |page, slot| PageCopy::ToHost { page, slot };
    let back = |slot, page| PageCopy::ToDevice { slot, page };
    let lens = |copies: &[PageCopy]| PageCopy::runs(copies).map(<[_]>::len).collect::<Vec<_>>();
    // No copy is lost, not even one that makes no sense.
    let to_itself = [PageCopy::OnDevice { from: 1, to: 1 }, PageCopy::OnDevice { from: 2, to: 3 }];
    assert_eq!(lens(&to_itself), [1, 1]);
    assert_eq!(lens(&[]), [0; 0]);
    assert_eq!(lens(&[copy(0, 1), copy(0, 2), copy(3, 4)]), [3], "a page may be read twice");
    assert_eq!(lens(&[copy(0, 1), copy(1, 2)]), [1, 1], "read after it was written");
    assert_eq!(lens(&[copy(0, 1), copy(2, 0)]), [1, 1], "written after it was read");
    assert_eq!(lens(&[copy(0, 1), copy(2, 1)]), [1, 1], "written twice");
    assert_eq!(lens(&[copy(0, 1), copy(2, 3), copy(3, 0), copy(5, 6)]), [2, 2]);
    assert_eq!(lens(&[out(0, 0), back(1, 0)]), [1, 1]);
    assert_eq!(lens(&[out(0, 0), back(0, 3)]), [1, 1]);
    assert_eq!(lens(&[out(0, 1), copy(2, 3), back(0, 1)]), [3], "page 1 is not slot 1");
}

/// Tables go into a batch, and what may be written is never shared.
#[test]
fn tables_make_a_batch() {
    let layout = KvLayout::new(HeadGeometry::new(2, 1, 8).unwrap(), Dtype::F16, PageSize::new(4).unwrap(), 4).unwrap();
    let mut pool = pool();
    let mut copies = Vec::new();
    let mut first = filled(&mut pool, 3);
    let mut second = pool.fork(&first).unwrap();
    let mut step = BatchBuilder::default();
    for round in 0..2 {
        for table in [&mut first, &mut second] {
            pool.extend(table, 2, &mut copies).unwrap();
        }
        step.clear();
        step.push(&first, 2).unwrap();
        step.push(&second, 2).unwrap();
        let batch = step.batch();
        batch.validate(layout.page_size(), layout.page_count()).unwrap();
        assert_eq!(batch.q_indptr, [0, 2, 4]);
        assert_eq!(batch.page_ids, [first.pages(), second.pages()].concat());
        assert_eq!(batch.kv_len, [5 + 2 * round; 2]);
        assert_eq!(AppendPlan::new(&layout, &batch).unwrap().tokens(), 4);
    }
    assert_eq!(copies, [PageCopy::OnDevice { from: 0, to: 1 }]);
    // Without the copy, two would write into the same slot.
    let shared = pool.fork(&first).unwrap();
    step.clear();
    step.push(&first, 1).unwrap();
    step.push(&shared, 1).unwrap();
    let error = AppendPlan::new(&layout, &step.batch()).unwrap_err();
    assert!(matches!(error, AppendError::SameSlot { .. }), "{error}");
    // Pages that left a window are not in the batch, and neither are their tokens.
    pool.release_before(&mut first, 5).unwrap();
    step.clear();
    step.push(&first, 1).unwrap();
    assert_eq!((step.batch().kv_len, step.batch().page_ids), (&[3][..], first.pages()));
    let mut full = BatchBuilder::default();
    full.push(&first, first.len()).unwrap();
    let error = full.push(&first, u32::MAX).unwrap_err();
    assert_eq!(error, BatchError::RowsOfTable { found: u32::MAX, tokens: first.len() });
    assert_eq!(full.batch().seqs(), 1);
}

/// A pool may be moved to another thread and looked at from several.
#[test]
fn everything_may_go_to_another_thread() {
    fn check<T: Send + Sync>() {}
    check::<BlockPool>();
    check::<BlockTable>();
    check::<SwappedTable>();
    check::<TokenChain>();
    check::<PoolError>();
}
