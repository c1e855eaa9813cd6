//! Faults that allocators and prefix caches have had elsewhere (numbers as in the project's list of them). Each scenario is
//! run against the library's pool and the naive model, which pass, and against the model with that fault, which must not.

use paged_attention::{Dtype, PageSize, PoolConfig, PoolError};

use crate::history::{History, Name};
use crate::naive::{Fault, Field, Naive};
use crate::world::{Checked, World, ensure};

pub const EVERY_FAULT: [Fault; 32] = [
    Fault::EvictedStaysFindable,
    Fault::WrittenStaysFindable,
    Fault::StaleHit,
    Fault::FreedTwiceInOneRelease,
    Fault::FreedWhileShared,
    Fault::HitStaysEvictable,
    Fault::SharedCountsAsEvictable,
    Fault::KeyWithout(Field::Model),
    Fault::KeyWithout(Field::Version),
    Fault::KeyWithout(Field::Adapter),
    Fault::KeyWithout(Field::Positions),
    Fault::KeyWithout(Field::Heads),
    Fault::KeyWithout(Field::Dtype),
    Fault::KeyWithout(Field::Salt),
    Fault::KeyWithout(Field::Content),
    Fault::KeyWithout(Field::Parent),
    Fault::UntaggedFields,
    Fault::PredictableHash,
    Fault::CommonByOwners,
    Fault::WindowKeepsEntries,
    Fault::NoSharing,
    Fault::ReleaseForgets,
    Fault::EvictsHeadsFirst,
    Fault::EvictsMostRecent,
    Fault::FullHit,
    Fault::RefusedKeepsPages,
    Fault::NoCopy,
    Fault::NeedlessCopy,
    Fault::CopyForAll,
    Fault::TruncateKeepsPages,
    Fault::SlotsFreedAtOnce,
    Fault::SlotsReversed,
];

/// Random events differ in no other field of the namespace than the salt.
pub fn outside_of_random_events(fault: Fault) -> bool {
    use Field::{Adapter, Dtype, Heads, Model, Positions, Version};
    matches!(fault, Fault::UntaggedFields | Fault::KeyWithout(Model | Version | Adapter | Positions | Heads | Dtype))
}

pub fn config(page_size: u32, page_count: u32) -> PoolConfig {
    PoolConfig { page_size: PageSize::new(page_size).unwrap(), page_count, host_slot_count: 8 }
}

/// The scenario passes with the pool and with the model, and fails with each of the faults.
#[track_caller]
pub fn shows(config: PoolConfig, faults: &[Fault], scenario: impl Fn(&mut World) -> Checked<()>) {
    scenario(&mut World::real(&config)).unwrap();
    scenario(&mut World::new(&config, Box::new(Naive::new(&config, None)))).unwrap();
    for fault in faults {
        let result = scenario(&mut World::new(&config, Box::new(Naive::new(&config, Some(*fault)))));
        match result {
            Ok(()) => panic!("{fault:?} was not noticed"),
            Err(why) => println!("{fault:?}: {why}"),
        }
    }
}

/// A prompt in pages of 4.
fn prompt(tokens: &[u32]) -> History {
    History::of(&Name::default(), 4, tokens)
}

/// Starts a sequence, computes all of it, publishes it, and says what was found in the cache.
pub fn run(world: &mut World, id: usize, history: History) -> Checked<u32> {
    let hit = world.start(id, history)?;
    world.prefill(id)?.map_err(|error| error.to_string())?;
    Ok(hit)
}

/// Pages 0 to `pages`, all with tokens of nobody else.
fn fill(world: &mut World, id: usize, pages: u32) -> Checked<()> {
    let tokens: Vec<u32> = (1000..1000 + 4 * pages).collect();
    run(world, id, prompt(&tokens)).map(|_| ())
}

#[test]
fn fault_25_an_evicted_block_is_found_no_more() {
    shows(config(4, 4), &[Fault::EvictedStaysFindable], |world| {
        run(world, 0, prompt(&[1, 2, 3, 4, 5]))?;
        world.release(0)?;
        fill(world, 1, 4)?;
        world.release(1)?;
        let hit = world.start(2, prompt(&[1, 2, 3, 4, 5]))?;
        ensure!(hit == 0, "{hit} tokens of an evicted block were found");
        Ok(())
    });
}

#[test]
fn fault_25_a_page_that_is_written_anew_does_not_count_as_computed() {
    shows(config(4, 4), &[Fault::WrittenStaysFindable], |world| {
        // Speculated tokens are published, rolled back, and others take their place.
        run(world, 0, prompt(&[1, 2, 3, 4]))?;
        world.truncate(0, 2)?.unwrap();
        world.histories.get_mut(&0).unwrap().push(&[8, 9], None);
        world.grow(0, 2)?.unwrap();
        let hit = world.start(1, prompt(&[1, 2, 3, 4, 5]))?;
        ensure!(hit == 0, "{hit} tokens were found where others are now");
        world.publish(0)?;
        let hit = world.start(2, prompt(&[1, 2, 8, 9, 5]))?;
        ensure!(hit == 4, "{hit} of the 4 published tokens were found");
        Ok(())
    });
}

#[test]
fn fault_26_a_hit_is_not_kept_beyond_a_failed_admission() {
    shows(config(4, 6), &[Fault::StaleHit], |world| {
        run(world, 0, prompt(&[1, 2, 3, 4, 5, 6, 7, 8]))?;
        world.release(0)?;
        fill(world, 1, 4)?;
        // Found: two blocks; but three more pages are needed, and there are none.
        let waiting = prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]);
        let hit = world.start(2, waiting.clone())?;
        ensure!(hit == 8, "{hit} of 8 cached tokens were found");
        let refused = world.grow(2, 9)?;
        let needed = PoolError::Exhausted { needed: 3, available: 0, page_count: 6 };
        ensure!(refused == Err(needed), "{refused:?}");
        world.release(2)?;
        // While it waits, another takes the cached pages; then all go.
        world.histories.get_mut(&1).unwrap().push(&[1; 8], None);
        world.grow(1, 8)?.unwrap();
        world.release(1)?;
        let hit = run(world, 2, waiting)?;
        ensure!(hit == 0, "{hit} tokens were found that had been evicted");
        Ok(())
    });
}

#[test]
fn fault_27_no_page_is_freed_twice() {
    let faults = [Fault::FreedTwiceInOneRelease, Fault::FreedWhileShared];
    shows(config(4, 4), &faults, |world| {
        run(world, 0, prompt(&[1, 2, 3]))?;
        world.fork(0, 1)?;
        world.release(0)?;
        world.release(1)?;
        // Four sequences, four different pages.
        for id in 0..4 {
            run(world, id, prompt(&[id as u32]))?;
        }
        Ok(())
    });
}

#[test]
fn fault_27_eviction_spares_what_is_in_use() {
    shows(config(4, 3), &[Fault::HitStaysEvictable], |world| {
        run(world, 0, prompt(&[1, 2, 3, 4, 5]))?;
        world.release(0)?;
        let hit = run(world, 1, prompt(&[1, 2, 3, 4, 6]))?;
        ensure!(hit == 4, "{hit} of 4 cached tokens were found");
        world.start(2, prompt(&[7, 8, 9, 10, 11]))?;
        let refused = world.grow(2, 5)?;
        let needed = PoolError::Exhausted { needed: 2, available: 1, page_count: 3 };
        ensure!(refused == Err(needed), "{refused:?}");
        world.grow(2, 4)?.unwrap();
        Ok(())
    });
}

#[test]
fn fault_28_shared_pages_count_once() {
    shows(config(4, 8), &[Fault::SharedCountsAsEvictable, Fault::FreedWhileShared], |world| {
        run(world, 0, prompt(&[1, 2, 3, 4, 5, 6, 7, 8]))?;
        for id in 1..5 {
            world.fork(0, id)?;
        }
        for (id, [held, cached, free]) in
            [[2, 0, 6], [2, 0, 6], [2, 0, 6], [2, 0, 6], [0, 2, 6]].into_iter().enumerate()
        {
            world.release(id)?;
            let counts = world.subject.view().counts;
            let [found_held, found_cached, found_free] = [counts.held, counts.cached, counts.free];
            ensure!([found_held, found_cached, found_free] == [held, cached, free], "after {id}: {counts:?}");
        }
        Ok(())
    });
}

/// Both prompts are computed; the second must not find anything of the first.
fn apart(world: &mut World, ours: History, theirs: History) -> Checked<()> {
    run(world, 0, ours)?;
    let hit = run(world, 1, theirs)?;
    ensure!(hit == 0, "{hit} tokens of another namespace were found");
    let stats = world.subject.view().stats;
    ensure!(stats.hits == 0 && stats.duplicates == 0, "{stats:?}");
    Ok(())
}

#[test]
fn fault_29_keys_leave_out_nothing_that_changes_the_state() {
    let base = Name::default();
    let others: [(Field, Name); 7] = [
        (Field::Model, Name { model: "mistral".into(), ..base.clone() }),
        (Field::Version, Name { version: "2".into(), ..base.clone() }),
        (Field::Adapter, Name { adapter: "lora".into(), ..base.clone() }),
        (Field::Positions, Name { positions: "rope 5e5".into(), ..base.clone() }),
        (Field::Heads, Name { kv_heads: 4, ..base.clone() }),
        (Field::Dtype, Name { dtype: Dtype::Bf16, ..base.clone() }),
        (Field::Salt, Name { salt: "other".into(), ..base }),
    ];
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    for (field, other) in others {
        shows(config(4, 16), &[Fault::KeyWithout(field)], |world| {
            apart(world, prompt(&tokens), History::of(&other, 4, &tokens))
        });
    }
}

#[test]
fn fault_29_an_image_enters_the_keys_of_the_blocks_it_overlaps() {
    shows(config(4, 16), &[Fault::KeyWithout(Field::Content)], |world| {
        // Placeholders in positions 6 to 9: of blocks 1 and 2, not of block 0.
        let with_image = |image: u32| {
            let mut history = prompt(&[1, 2, 3, 4, 5, 6]);
            history.push(&[0, 0, 0, 0], Some(image));
            history.push(&[7, 8, 9], None);
            history
        };
        run(world, 0, with_image(1))?;
        let hit = run(world, 1, with_image(2))?;
        ensure!(hit == 4, "{hit} tokens are found with another image, not 4");
        let hit = run(world, 2, with_image(1))?;
        ensure!(hit == 12, "{hit} tokens are found with the same image, not 12");
        // Without an image, and with the image's first rows where its last were.
        let hit = run(world, 3, prompt(&[1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 7, 8, 9]))?;
        ensure!(hit == 4, "{hit} tokens are found without an image, not 4");
        let mut cut = prompt(&[1, 2, 3, 4, 5, 6]);
        cut.push(&[0, 0], Some(1));
        cut.push(&[0, 0], Some(1));
        cut.push(&[7, 8, 9], None);
        let hit = run(world, 4, cut)?;
        ensure!(hit == 8, "{hit} tokens are found with the image cut in two, not 8");
        Ok(())
    });
}

#[test]
fn fault_29_fields_with_the_same_text_do_not_collide() {
    let name = |model: &str, version: &str, adapter: &str| Name {
        model: model.into(),
        version: version.into(),
        adapter: adapter.into(),
        ..Name::default()
    };
    let pairs = [
        (name("a", "", ""), name("", "a", "")),
        (name("ab", "c", ""), name("a", "bc", "")),
        (name("", "x", "y"), name("", "xy", "")),
    ];
    for (ours, theirs) in pairs {
        shows(config(4, 16), &[Fault::UntaggedFields], |world| {
            let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
            apart(world, History::of(&ours, 4, &tokens), History::of(&theirs, 4, &tokens))
        });
    }
}

/// With keys that do collide, see `with_a_broken_hash_other_tokens_are_no_hit` beside the pool.
#[test]
fn fault_29_other_tokens_are_no_hit() {
    shows(config(4, 16), &[Fault::PredictableHash], |world| {
        apart(world, prompt(&[1, 2, 3, 4, 9]), prompt(&[4, 3, 2, 1, 9]))
    });
}

#[test]
fn fault_30_users_with_different_salts_cannot_probe_each_other() {
    shows(config(4, 16), &[Fault::KeyWithout(Field::Salt)], |world| {
        let secret = [5, 6, 7, 8, 9, 10, 11, 12, 13];
        run(world, 0, History::of(&Name::salted("alice"), 4, &secret))?;
        // Every guess, right or wrong, costs the same: nothing is found.
        for guess in [&secret[..], &[1; 9]] {
            let hit = world.start(1, History::of(&Name::salted("bob"), 4, guess))?;
            ensure!(hit == 0, "a guess found {hit} tokens");
            world.release(1)?;
        }
        let hit = world.start(1, History::of(&Name::salted("alice"), 4, &secret))?;
        ensure!(hit == 8, "{hit} of the 8 own tokens were found");
        Ok(())
    });
}

#[test]
fn fault_31_a_common_prefix_is_one_of_equal_pages() {
    shows(config(4, 16), &[Fault::CommonByOwners], |world| {
        for (id, first) in [(0, 1), (2, 50)] {
            let tokens: Vec<u32> = (first..first + 9).collect();
            run(world, id, prompt(&tokens))?;
            world.fork(id, id + 1)?;
        }
        // Every page has two owners. 0 and 1 have two full pages in common, 0 and 2 none.
        for (ids, needed) in [(&[0, 1][..], 2), (&[0, 2], 0), (&[0, 1, 2, 3], 0), (&[2], 2)] {
            let common = world.common_pages(ids)?;
            ensure!(common == needed, "{common} common pages of {ids:?}, not {needed}");
        }
        Ok(())
    });
}

#[test]
fn fault_32_pages_that_left_the_window_are_in_no_table() {
    shows(config(4, 4), &[Fault::WindowKeepsEntries], |world| {
        // A window of 6 over 14 tokens: positions from 8 on are seen, two pages are given back.
        world.start(0, prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]))?;
        world.grow(0, 14)?.unwrap();
        world.release_before(0, 14 - 6)?.unwrap();
        let counts = world.subject.view().counts;
        ensure!(counts.held == 2 && counts.free == 2, "{counts:?}");
        // Another uses them at once; the first goes on.
        run(world, 1, prompt(&[21, 22, 23, 24, 25, 26, 27, 28]))?;
        world.histories.get_mut(&0).unwrap().push(&[15, 16], None);
        world.grow(0, 2)?.unwrap();
        let (ours, theirs) = (world.seq(0), world.seq(1));
        ensure!(ours.first_token == 8 && ours.len == 16, "{ours:?}");
        ensure!(!ours.pages.iter().any(|page| theirs.pages.contains(page)), "{ours:?} and {theirs:?}");
        Ok(())
    });
}
