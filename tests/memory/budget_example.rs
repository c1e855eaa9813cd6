//! The worked example of `docs/budget.md` and `docs/memory.md`, with a pool that hands out the pages.

use paged_attention::{BlockPool, PageSize, PoolConfig};

#[test]
fn six_requests_leave_32_slots() {
    let page_size = PageSize::new(16).unwrap();
    let requests = [(7, 1, 9), (16, 1, 0), (30, 2, 2), (45, 3, 3), (100, 7, 12), (250, 16, 6)];
    let config = PoolConfig { page_size, page_count: 30, host_slot_count: 0 };
    let mut pool = BlockPool::new(&config).unwrap();
    let mut tables = Vec::new();
    for (tokens, pages, tail_slots) in requests {
        let mut table = pool.new_table().unwrap();
        // Token by token, as in generation: what is held depends on the length alone.
        for _ in 0..tokens {
            pool.extend(&mut table, 1, &mut Vec::new()).unwrap();
        }
        assert_eq!((table.pages().len(), table.tail_slots()), (pages, tail_slots), "{tokens} tokens");
        tables.push(table);
    }
    let tokens: u32 = requests.iter().map(|(tokens, ..)| tokens).sum();
    let tail_slots: u32 = tables.iter().map(|table| table.tail_slots()).sum();
    assert_eq!((tokens, pool.counts().held, tail_slots), (448, 30, 32));
    // Equation 2: every slot of a held page has a token or is of a tail, and a tail is shorter than a page.
    assert_eq!(pool.counts().held * page_size.get() - tokens, tail_slots);
    assert!(tail_slots <= 6 * (page_size.get() - 1));
    assert_eq!(pool.counts().free, 0);
    let refs: Vec<_> = tables.iter().collect();
    pool.check_invariants(&refs, &[]).unwrap();
}
