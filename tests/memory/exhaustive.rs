//! All sequences of operations on a small pool, breadth-first over distinct states.

use std::collections::HashSet;

use crate::faults::config;
use crate::history::{History, Name};
use crate::subject::Id;
use crate::world::{Checked, World};

#[derive(Clone, Copy, Debug)]
enum Op {
    /// One of few prompts.
    Start(usize),
    /// Tokens of the history, or new ones.
    Grow(Id, u32, u32),
    Fork(Id),
    /// By one token.
    Truncate(Id),
    /// All full pages but the last.
    Window(Id),
    Publish(Id),
    Release(Id),
    SwapOut(Id),
    SwapIn(Id),
    Discard(Id),
}

const PROMPTS: [&[u32]; 3] = [&[], &[0, 0, 0, 0], &[0, 0, 1]];

/// What may be done in this state, with at most `seqs_max` sequences.
fn possible(world: &World, seqs_max: usize) -> Vec<Op> {
    let view = world.subject.view();
    let mut ops = Vec::new();
    let room = view.seqs.len() < seqs_max;
    if room {
        ops.extend((0..PROMPTS.len()).map(Op::Start));
    }
    for (id, seq) in &view.seqs {
        let id = *id;
        if seq.slots.is_some() {
            ops.extend([Op::SwapIn(id), Op::Discard(id)]);
            continue;
        }
        if room {
            ops.push(Op::Fork(id));
        }
        ops.extend([Op::Grow(id, 1, 0), Op::Grow(id, 3, 0), Op::Publish(id), Op::Release(id), Op::SwapOut(id)]);
        if seq.len as usize == world.histories[&id].len() {
            ops.push(Op::Grow(id, 1, 1));
        }
        if seq.len > seq.first_token {
            ops.push(Op::Truncate(id));
        }
        if seq.pages.len() > 1 {
            ops.push(Op::Window(id));
        }
    }
    ops
}

fn apply(world: &mut World, op: Op) -> Checked<()> {
    match op {
        Op::Start(prompt) => {
            let id = (0..).find(|id| !world.histories.contains_key(id)).unwrap_or_default();
            world.start(id, History::of(&Name::default(), 2, PROMPTS[prompt])).map(|_| ())
        }
        Op::Grow(id, tokens, token) => {
            let len = world.seq(id).len + tokens;
            let history = world.histories.get_mut(&id).ok_or("no history")?;
            let before = history.len();
            let new = (len as usize).saturating_sub(before);
            history.push(&vec![token; new], None);
            if world.grow(id, tokens)?.is_err() {
                world.histories.get_mut(&id).ok_or("no history")?.truncate(before);
            }
            Ok(())
        }
        Op::Fork(id) => {
            let fork = (0..).find(|id| !world.histories.contains_key(id)).unwrap_or_default();
            world.fork(id, fork)
        }
        Op::Truncate(id) => world.truncate(id, world.seq(id).len - 1)?.map_err(|error| error.to_string()),
        Op::Window(id) => {
            let (first, pages) = (world.seq(id).first_token, world.seq(id).pages.len() as u32);
            world.release_before(id, first + 2 * (pages - 1))?.map_err(|error| error.to_string())
        }
        Op::Publish(id) => world.publish(id),
        Op::Release(id) => world.release(id),
        Op::SwapOut(id) => world.swap_out(id).map(|_| ()),
        Op::SwapIn(id) => world.swap_in(id).map(|_| ()),
        Op::Discard(id) => world.discard(id),
    }
}

/// Tries every sequence of up to `depth` operations, one for each distinct state; says how many states and steps there were.
fn search(depth: usize, seqs_max: usize) -> (usize, u64) {
    // A pool cannot be copied, so each step begins with the operations that led to its state.
    let reach = |path: &[Op]| {
        let mut world = World::real(&config(2, 4));
        for op in path {
            if let Err(wrong) = apply(&mut world, *op) {
                panic!("{path:?}: {wrong}");
            }
        }
        world
    };
    let mut known = HashSet::from([reach(&[]).state()]);
    let mut frontier: Vec<Vec<Op>> = vec![Vec::new()];
    let mut steps = 0;
    for _ in 0..depth {
        let mut next = Vec::new();
        for path in frontier {
            for op in possible(&reach(&path), seqs_max) {
                let path: Vec<Op> = path.iter().copied().chain([op]).collect();
                steps += 1;
                if known.insert(reach(&path).state()) {
                    next.push(path);
                }
            }
        }
        frontier = next;
    }
    (known.len(), steps)
}

#[test]
fn every_sequence_of_five_operations() {
    let (states, steps) = search(5, 3);
    println!("{states} states, {steps} steps");
    // The search reaches what it is meant to reach.
    assert!(states > 5000, "{states}");
}

#[test]
#[ignore = "minutes long: ci/lanes pool"]
fn every_sequence_of_eight_operations() {
    let (states, steps) = search(8, 3);
    println!("{states} states, {steps} steps");
    assert!(states > 100_000, "{states}");
}
