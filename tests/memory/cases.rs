//! Cases 20 to 25 of the project's list, and rollback and swapping, in the way of `faults.rs`. (Case 26 is `events.rs` and
//! `exhaustive.rs`.)

use paged_attention::{BatchBuilder, BatchError, BlockPool, PageSize, PoolConfig, PoolError};

use crate::faults::{config, run, shows};
use crate::history::{History, Name};
use crate::naive::{Fault, Field};
use crate::world::{World, ensure};

fn prompt(page_size: u32, tokens: impl IntoIterator<Item = u32>) -> History {
    History::of(&Name::default(), page_size, &tokens.into_iter().collect::<Vec<_>>())
}

fn counts(world: &World) -> [u32; 3] {
    let counts = world.subject.view().counts;
    [counts.held, counts.cached, counts.free]
}

#[test]
fn case_20_a_second_prompt_shares_three_blocks_and_takes_one() {
    for first_to_go in [0, 1] {
        let faults = [Fault::NoSharing, Fault::FreedWhileShared, Fault::FreedTwiceInOneRelease];
        shows(config(16, 8), &faults, |world| {
            let hit = run(world, 0, prompt(16, 0..55))?;
            ensure!(hit == 0 && counts(world) == [4, 0, 4], "{hit} found, {:?}", counts(world));
            let hit = run(world, 1, prompt(16, (0..48).chain(100..105)))?;
            ensure!(hit == 48 && counts(world) == [5, 0, 3], "{hit} found, {:?}", counts(world));
            let (ours, theirs) = (world.seq(0).pages, world.seq(1).pages);
            ensure!(ours[..3] == theirs[..3] && ours[3] != theirs[3], "{ours:?} and {theirs:?}");
            // Either may go; the other stays whole.
            world.release(first_to_go)?;
            ensure!(counts(world) == [4, 0, 4], "{:?}", counts(world));
            world.release(1 - first_to_go)?;
            ensure!(counts(world) == [0, 3, 5], "{:?}", counts(world));
            // What is free is usable: eight pages for one.
            run(world, 2, prompt(16, 200..328))?;
            Ok(())
        });
    }
}

#[test]
fn case_21_cached_blocks_revive_and_a_reused_block_loses_its_key() {
    shows(config(4, 4), &[Fault::ReleaseForgets, Fault::EvictedStaysFindable], |world| {
        run(world, 0, prompt(4, 0..9))?;
        world.release(0)?;
        ensure!(counts(world) == [0, 2, 2], "{:?}", counts(world));
        let hit = run(world, 0, prompt(4, 0..9))?;
        ensure!(hit == 8 && counts(world) == [3, 0, 1], "{hit} found, {:?}", counts(world));
        world.release(0)?;
        run(world, 1, prompt(4, 50..66))?;
        world.release(1)?;
        let hit = world.start(0, prompt(4, 0..9))?;
        ensure!(hit == 0 && world.subject.view().stats.evictions == 2, "{hit} found");
        Ok(())
    });
}

#[test]
fn case_21_the_least_recently_used_goes_first_and_tails_before_heads() {
    let faults = [Fault::EvictsHeadsFirst, Fault::EvictsMostRecent];
    shows(config(4, 8), &faults, |world| {
        // Three prompts of two blocks and a token; the first is used again last.
        for id in 0..3 {
            run(world, id, prompt(4, 100 * id as u32..100 * id as u32 + 9))?;
            world.release(id)?;
        }
        run(world, 0, prompt(4, 0..9))?;
        world.release(0)?;
        ensure!(counts(world) == [0, 6, 2], "{:?}", counts(world));
        // Three pages: two are free, one is taken from the second prompt's end.
        run(world, 9, prompt(4, 900..912))?;
        for (id, needed) in [(0, 8), (1, 4), (2, 8)] {
            let hit = world.start(id, prompt(4, 100 * id as u32..100 * id as u32 + 9))?;
            ensure!(hit == needed, "{hit} tokens of prompt {id} are left, not {needed}");
        }
        Ok(())
    });
}

#[test]
fn case_21_a_request_never_evicts_what_it_hits() {
    shows(config(4, 4), &[Fault::HitStaysEvictable], |world| {
        run(world, 0, prompt(4, 0..8))?;
        world.release(0)?;
        let hit = world.start(0, prompt(4, 0..17))?;
        ensure!(hit == 8, "{hit} of 8 cached tokens were found");
        // Five pages in a pool of four.
        let refused = world.grow(0, 9)?;
        let needed = PoolError::Exhausted { needed: 3, available: 2, page_count: 4 };
        ensure!(refused == Err(needed), "{refused:?}");
        world.grow(0, 8)?.unwrap();
        ensure!(counts(world) == [4, 0, 0], "{:?}", counts(world));
        Ok(())
    });
}

#[test]
fn case_22_a_full_hit_recomputes_one_token() {
    shows(config(4, 8), &[Fault::FullHit], |world| {
        run(world, 0, prompt(4, 0..8))?;
        // The other holds the last block, too: the one token goes into a copy.
        let hit = world.start(1, prompt(4, 0..8))?;
        ensure!(hit == 7 && world.seq(1).pages == world.seq(0).pages, "{hit} found");
        let copies = world.grow(1, 1)?.unwrap();
        ensure!(copies == 1 && counts(world) == [3, 0, 5], "{copies} copies, {:?}", counts(world));
        world.publish(1)?;
        ensure!(counts(world) == [2, 0, 6], "the same block twice: {:?}", counts(world));
        world.release(0)?;
        world.release(1)?;
        // Nobody else: the one token goes where it was, and the block is published again.
        let hit = world.start(1, prompt(4, 0..8))?;
        let copies = world.grow(1, 1)?.unwrap();
        ensure!(hit == 7 && copies == 0 && counts(world) == [2, 0, 6], "{hit} found, {copies} copies");
        world.publish(1)?;
        let hit = world.start(0, prompt(4, 0..9))?;
        ensure!(hit == 8, "{hit} found");
        Ok(())
    });
}

/// A prompt that takes the whole pool can be served again, though nothing is left for a copy.
#[test]
fn case_22_a_full_hit_of_the_whole_pool_is_served() {
    shows(config(4, 2), &[Fault::FullHit, Fault::NoSharing], |world| {
        for needed in [0, 7] {
            let hit = run(world, 0, prompt(4, 0..8))?;
            ensure!(hit == needed, "{hit} found, not {needed}");
            world.release(0)?;
        }
        Ok(())
    });
}

#[test]
fn case_22_equal_blocks_with_different_parents_are_different() {
    shows(config(4, 8), &[Fault::KeyWithout(Field::Parent)], |world| {
        run(world, 0, prompt(4, [1, 2, 3, 4, 1, 2, 3, 4]))?;
        let pages = world.seq(0).pages;
        ensure!(pages[0] != pages[1], "{pages:?}");
        ensure!(world.subject.view().stats.published == 2, "{:?}", world.subject.view().stats);
        Ok(())
    });
}

// Case 23 is tested with the faults 29 and 30.

#[test]
fn case_24_what_is_refused_changes_nothing() {
    shows(config(4, 4), &[Fault::RefusedKeepsPages], |world| {
        run(world, 0, prompt(4, 0..8))?;
        world.start(1, prompt(4, 50..70))?;
        let before = world.subject.view();
        let refused = world.grow(1, 12)?;
        ensure!(refused == Err(PoolError::Exhausted { needed: 3, available: 2, page_count: 4 }), "{refused:?}");
        ensure!(world.subject.view() == before, "{:?} before, {:?} after", before, world.subject.view());
        // Exhaust, free one, allocate.
        world.grow(1, 8)?.unwrap();
        let refused = world.grow(1, 1)?;
        ensure!(refused == Err(PoolError::Exhausted { needed: 1, available: 0, page_count: 4 }), "{refused:?}");
        world.truncate(0, 4)?.unwrap();
        world.grow(1, 1)?.unwrap();
        // There is room in the shared tail, and no page for its copy.
        world.fork(1, 2)?;
        let before = world.subject.view();
        let refused = world.grow(2, 1)?;
        ensure!(refused == Err(PoolError::Exhausted { needed: 1, available: 0, page_count: 4 }), "{refused:?}");
        ensure!(world.subject.view() == before, "{:?} before, {:?} after", before, world.subject.view());
        Ok(())
    });
}

#[test]
fn case_25_a_shared_tail_is_copied_if_it_is_partial() {
    for len in [1_u32, 16, 129] {
        let partial = len % 16 != 0;
        let faults: &[Fault] = if partial { &[Fault::NoCopy, Fault::CopyForAll] } else { &[Fault::NeedlessCopy] };
        for first in [0, 1] {
            shows(config(16, 32), faults, |world| {
                run(world, 0, prompt(16, 0..len))?;
                world.fork(0, 1)?;
                let before = world.seq(1 - first);
                for (id, needed) in [(first, usize::from(partial)), (1 - first, 0)] {
                    world.histories.get_mut(&id).unwrap().push(&[1000 + id as u32], None);
                    let copies = world.grow(id, 1)?.unwrap();
                    ensure!(copies == needed, "{copies} copies for sequence {id}, not {needed}");
                    if id == first {
                        ensure!(world.seq(1 - first) == before, "the other's table became {:?}", world.seq(1 - first));
                    }
                }
                let full = (len / 16) as usize;
                let common = world.common_pages(&[0, 1])?;
                ensure!(common == full, "{common} common pages, not {full}");
                Ok(())
            });
        }
    }
}

#[test]
fn rollback_gives_back_what_it_took() {
    shows(config(4, 8), &[Fault::TruncateKeepsPages], |world| {
        run(world, 0, prompt(4, 0..6))?;
        for _ in 0..3 {
            // Seven speculated tokens, of which one is accepted and then taken back, too.
            world.histories.get_mut(&0).unwrap().push(&[7; 7], None);
            world.grow(0, 7)?.unwrap();
            ensure!(counts(world) == [4, 0, 4], "{:?}", counts(world));
            world.truncate(0, 7)?.unwrap();
            ensure!(counts(world) == [2, 0, 6], "{:?}", counts(world));
            world.truncate(0, 6)?.unwrap();
        }
        let past = world.truncate(0, 7)?;
        ensure!(past == Err(PoolError::Position { found: 7, first: 0, len: 6 }), "{past:?}");
        Ok(())
    });
}

#[test]
fn a_swapped_sequence_comes_back_whole() {
    shows(config(4, 4), &[Fault::SlotsFreedAtOnce, Fault::SlotsReversed], |world| {
        run(world, 0, prompt(4, 0..14))?;
        world.swap_out(0)?.unwrap();
        ensure!(counts(world)[0] == 0, "{:?}", counts(world));
        run(world, 1, prompt(4, 50..64))?;
        let refused = world.swap_in(0)?;
        ensure!(refused == Err(PoolError::Exhausted { needed: 4, available: 0, page_count: 4 }), "{refused:?}");
        world.swap_out(1)?.unwrap();
        run(world, 2, prompt(4, 80..82))?;
        let refused = world.swap_out(2)?;
        ensure!(refused == Err(PoolError::HostExhausted { needed: 1, available: 0, slot_count: 8 }), "{refused:?}");
        world.release(2)?;
        world.swap_in(0)?.unwrap();
        world.histories.get_mut(&0).unwrap().push(&[14, 15], None);
        world.grow(0, 2)?.unwrap();
        world.release(0)?;
        world.swap_in(1)?.unwrap();
        Ok(())
    });
}

#[test]
fn a_dropped_sequence_recomputes_what_is_gone() {
    shows(config(4, 4), &[Fault::ReleaseForgets, Fault::EvictsHeadsFirst], |world| {
        run(world, 0, prompt(4, 0..14))?;
        let history = world.histories[&0].clone();
        world.release(0)?;
        run(world, 1, prompt(4, 50..56))?;
        world.release(1)?;
        // Its unpublished tail was taken, and one cached block, its last.
        let hit = run(world, 0, history)?;
        ensure!(hit == 8, "{hit} of 8 tokens were left");
        Ok(())
    });
}

/// A sequence that gave pages back has fewer keys in a batch than tokens: its new tokens keep their positions.
#[test]
fn positions_count_pages_that_were_given_back() {
    let config = PoolConfig { page_size: PageSize::new(16).unwrap(), page_count: 8, host_slot_count: 0 };
    let mut pool = BlockPool::new(&config).unwrap();
    let mut tables = [(); 2].map(|()| pool.new_table().unwrap());
    for (table, tokens) in tables.iter_mut().zip([40, 3]) {
        pool.extend(table, tokens, &mut Vec::new()).unwrap();
    }
    pool.release_before(&mut tables[0], 32).unwrap();
    pool.extend(&mut tables[0], 2, &mut Vec::new()).unwrap();
    let mut step = BatchBuilder::default();
    for (table, q_len) in tables.iter().zip([2, 3]) {
        step.push(table, q_len).unwrap();
    }
    assert_eq!(step.batch().kv_len, [10, 3]);
    assert_eq!(step.positions(), [40, 41, 0, 1, 2]);
    // Rows of tokens that are not there, and nothing is added.
    let empty = pool.new_table().unwrap();
    assert_eq!(step.push(&empty, 1), Err(BatchError::RowsOfTable { found: 1, tokens: 0 }));
    assert_eq!((step.batch().kv_len.len(), step.positions().len()), (2, 5));
    step.clear();
    assert!(step.positions().is_empty());
}
