//! Random events against the naive model, everything compared after every event, failures shrunk.

use std::fmt;

use paged_attention::{PageSize, PoolConfig};
use rand::{Rng, RngExt, SeedableRng};

use crate::faults::{EVERY_FAULT, outside_of_random_events};
use crate::history::{History, Name};
use crate::naive::{Fault, Naive};
use crate::subject::{Id, Real, Subject};
use crate::world::{Checked, World};

/// Sequences at a time.
const SEQS: usize = 8;
/// Tokens of a history.
const LEN_MAX: usize = 40;

/// What happens. `which` names a sequence, or the next that will do; numbers are taken modulo what there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A prompt made from `seed`, of which few are different.
    Start {
        which: u8,
        seed: u8,
        len: u8,
    },
    /// A sequence starts again from its history: dropped, and to be recomputed.
    Recompute {
        which: u8,
    },
    /// More tokens of the history, or new ones made from `seed`, some of them an image.
    Grow {
        which: u8,
        tokens: u8,
        seed: u8,
    },
    Abandon {
        which: u8,
        tokens: u8,
    },
    Fork {
        which: u8,
        fork: u8,
    },
    Truncate {
        which: u8,
        back: u8,
    },
    /// Refused if it is past the end.
    Window {
        which: u8,
        position: u8,
    },
    Publish {
        which: u8,
    },
    Release {
        which: u8,
    },
    SwapOut {
        which: u8,
    },
    SwapIn {
        which: u8,
    },
    Discard {
        which: u8,
    },
    Common {
        which: u8,
        other: u8,
    },
}

const KINDS: usize = 13;

impl Event {
    fn new(kind: usize, [which, a, b]: [u8; 3]) -> Self {
        match kind {
            0 => Self::Start { which, seed: a, len: b },
            1 => Self::Recompute { which },
            2 => Self::Grow { which, tokens: a, seed: b },
            3 => Self::Abandon { which, tokens: a },
            4 => Self::Fork { which, fork: a },
            5 => Self::Truncate { which, back: a },
            6 => Self::Window { which, position: a },
            7 => Self::Publish { which },
            8 => Self::Release { which },
            9 => Self::SwapOut { which },
            10 => Self::SwapIn { which },
            11 => Self::Discard { which },
            _ => Self::Common { which, other: a },
        }
    }
}

/// A pool and what happens to it: kinds of events, and their numbers.
#[derive(Clone)]
pub struct Trace {
    page_size: u32,
    page_count: u32,
    host_slot_count: u32,
    raw: Vec<(usize, [u8; 3])>,
}

impl Trace {
    /// Every kind of event is possible; how often each comes differs from trace to trace.
    fn random(random: &mut impl Rng, len: usize) -> Self {
        let weights: [u32; KINDS] = std::array::from_fn(|_| random.random_range(1..256));
        let total = weights.iter().sum();
        let kind = |random: &mut _| {
            let mut left = RngExt::random_range(random, 0..total);
            let here = weights.iter().position(|weight| {
                let here = left < *weight;
                left = left.saturating_sub(*weight);
                here
            });
            here.unwrap_or_default()
        };
        Self {
            page_size: random.random_range(1..6),
            page_count: random.random_range(1..20),
            host_slot_count: random.random_range(0..8),
            raw: (0..len).map(|_| (kind(random), random.random())).collect(),
        }
    }

    fn events(&self) -> impl Iterator<Item = Event> {
        self.raw.iter().map(|(kind, numbers)| Event::new(*kind, *numbers))
    }

    pub fn config(&self) -> PoolConfig {
        let page_size = PageSize::new(self.page_size).unwrap();
        PoolConfig { page_size, page_count: self.page_count, host_slot_count: self.host_slot_count }
    }

    /// A trace that still fails, from which no event can be left out and of which no number can be less.
    fn shrink(mut self, fails: impl Fn(&Self) -> bool) -> Self {
        loop {
            let before = (self.raw.clone(), self.config());
            let mut chunk = self.raw.len().next_power_of_two();
            while chunk > 0 {
                let mut at = 0;
                while at < self.raw.len() {
                    let mut less = self.clone();
                    less.raw.drain(at..(at + chunk).min(self.raw.len()));
                    if fails(&less) {
                        self = less;
                    } else {
                        at += chunk;
                    }
                }
                chunk /= 2;
            }
            for at in 0..self.raw.len() * 3 {
                let number = self.raw[at / 3].1[at % 3];
                for smaller in [0, number / 2, number.saturating_sub(1)] {
                    let mut less = self.clone();
                    less.raw[at / 3].1[at % 3] = smaller;
                    if smaller < self.raw[at / 3].1[at % 3] && fails(&less) {
                        self = less;
                    }
                }
            }
            for change in [
                (|trace| trace.page_count -= 1) as fn(&mut Self),
                |trace| trace.page_size -= 1,
                |trace| trace.host_slot_count = trace.host_slot_count.saturating_sub(1),
            ] {
                let mut less = self.clone();
                change(&mut less);
                if less.page_count > 0 && less.page_size > 0 && fails(&less) {
                    self = less;
                }
            }
            if before == (self.raw.clone(), self.config()) {
                return self;
            }
        }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}", self.config())?;
        self.events().try_for_each(|event| writeln!(f, "  {event:?}"))
    }
}

/// The first from `which` on, and then from 0 on, that will do.
fn next(which: u8, will_do: impl Fn(&Id) -> bool) -> Option<Id> {
    (0..SEQS).map(|at| (which as usize + at) % SEQS).find(will_do)
}

fn choose(world: &World, which: u8, swapped: bool) -> Option<Id> {
    let seqs = world.subject.view().seqs;
    next(which, |id| seqs.get(id).is_some_and(|seq| seq.slots.is_some() == swapped))
}

fn vacant(world: &World, which: u8) -> Option<Id> {
    next(which, |id| !world.histories.contains_key(id))
}

/// Few different tokens, so that histories meet again.
fn token(seed: u8, at: usize) -> u32 {
    u32::from(seed >> (at % 3)) & 1
}

/// Does it, and says whether there was anything to do.
fn apply(world: &mut World, event: Event, page_size: PageSize) -> Checked<bool> {
    match event {
        Event::Start { which, seed, len } => {
            let Some(id) = vacant(world, which) else {
                return Ok(false);
            };
            let name = Name::salted(if seed & 8 == 0 { "a" } else { "b" });
            let mut history = History::new(name, page_size);
            let tokens: Vec<u32> = (0..len as usize % 24).map(|at| token(seed & 7, at)).collect();
            let image = (seed as usize >> 4).min(tokens.len());
            history.push(&tokens[..tokens.len() - image], None);
            history.push(&tokens[tokens.len() - image..], Some(u32::from(seed & 1)));
            world.start(id, history)?;
        }
        Event::Recompute { which } => {
            let Some(id) = choose(world, which, false) else {
                return Ok(false);
            };
            let history = world.histories[&id].clone();
            world.release(id)?;
            world.start(id, history)?;
        }
        Event::Grow { which, tokens, seed } => {
            let Some(id) = choose(world, which, false) else {
                return Ok(false);
            };
            let (len, tokens) = (world.seq(id).len, u32::from(tokens) % 12);
            if len as usize + tokens as usize > LEN_MAX {
                return Ok(false);
            }
            let history = world.histories.get_mut(&id).ok_or("no history")?;
            let before = history.len();
            let new = (len + tokens).saturating_sub(before as u32) as usize;
            let new: Vec<u32> = (0..new).map(|at| token(seed, before + at)).collect();
            history.push(&new, (seed & 0xf0 == 0).then_some(1));
            if world.grow(id, tokens)?.is_err()
                && let Some(history) = world.histories.get_mut(&id)
            {
                history.truncate(before);
            }
        }
        Event::Abandon { which, tokens } => {
            let Some(id) = choose(world, which, false) else {
                return Ok(false);
            };
            world.abandon(id, u32::from(tokens) % 12)?;
        }
        Event::Fork { which, fork } => {
            let (Some(id), Some(fork)) = (choose(world, which, false), vacant(world, fork)) else {
                return Ok(false);
            };
            world.fork(id, fork)?;
        }
        Event::Truncate { which, back } => {
            let Some(id) = choose(world, which, false) else {
                return Ok(false);
            };
            // One in sixteen is longer than the sequence.
            let len = (world.seq(id).len + u32::from(back < 16)).saturating_sub(u32::from(back) % 16);
            let _refused = world.truncate(id, len)?;
        }
        Event::Window { which, position } => {
            let Some(id) = choose(world, which, false) else {
                return Ok(false);
            };
            let _refused = world.release_before(id, u32::from(position) % (world.seq(id).len + 2))?;
        }
        Event::Publish { which } => {
            let Some(id) = choose(world, which, false) else {
                return Ok(false);
            };
            world.publish(id)?;
        }
        Event::Release { which } => {
            let Some(id) = choose(world, which, false) else {
                return Ok(false);
            };
            world.release(id)?;
        }
        Event::SwapOut { which } => {
            let Some(id) = choose(world, which, false) else {
                return Ok(false);
            };
            let _refused = world.swap_out(id)?;
        }
        Event::SwapIn { which } => {
            let Some(id) = choose(world, which, true) else {
                return Ok(false);
            };
            let _refused = world.swap_in(id)?;
        }
        Event::Discard { which } => {
            let Some(id) = choose(world, which, true) else {
                return Ok(false);
            };
            world.discard(id)?;
        }
        Event::Common { which, other } => {
            let (Some(id), Some(other)) = (choose(world, which, false), choose(world, other, false)) else {
                return Ok(false);
            };
            world.common_pages(&[id, other])?;
        }
    }
    Ok(true)
}

/// Lets it all happen, and says how many events found something to do.
fn play(trace: &Trace, subject: Box<dyn Subject>) -> Checked<u64> {
    let config = trace.config();
    let mut world = World::new(&config, subject).beside_model();
    let mut happened = 0;
    for event in trace.events() {
        happened += u64::from(apply(&mut world, event, config.page_size)?);
    }
    // At the end everything is empty.
    for id in 0..SEQS {
        match world.subject.view().seqs.get(&id) {
            Some(seq) if seq.slots.is_some() => world.discard(id)?,
            Some(_) => world.release(id)?,
            None => {}
        }
    }
    let counts = world.subject.view().counts;
    if counts.held > 0 { Err(format!("{counts:?} with no sequence left")) } else { Ok(happened) }
}

/// Plays random traces of `len` events until at least `events` have happened.
fn random(seed: u64, events: u64, len: usize) {
    let mut random = rand::rngs::StdRng::seed_from_u64(seed);
    let mut happened = 0;
    while happened < events {
        let trace = Trace::random(&mut random, len);
        let play = |trace: &Trace| play(trace, Box::new(Real::new(&trace.config())));
        match play(&trace) {
            Ok(more) => happened += more,
            Err(_) => {
                let smallest = trace.shrink(|trace| play(trace).is_err());
                panic!("seed {seed}: {:?}\n{smallest:?}", play(&smallest));
            }
        }
    }
    println!("seed {seed}: {happened} events");
}

#[test]
fn two_hundred_thousand_random_events() {
    for seed in 1..=4 {
        random(seed, 50_000, 400);
    }
}

/// Minutes; `ci/lanes pool`. `POOL_SEED` sets the first of the ten seeds.
#[test]
#[ignore = "minutes long: ci/lanes pool"]
fn five_million_random_events() {
    let first = std::env::var("POOL_SEED").map_or(1000, |seed| seed.parse().unwrap());
    let seeds: Vec<u64> = (first..first + 10).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for seeds in seeds.chunks(seeds.len().div_ceil(threads)) {
            scope.spawn(move || seeds.iter().for_each(|seed| random(*seed, 500_000, 2000)));
        }
    });
}

/// The smallest trace that shows a fault of the model, if one of `traces` does.
fn shown(fault: Fault, traces: u32) -> Option<Trace> {
    let fails = |trace: &Trace| play(trace, Box::new(Naive::new(&trace.config(), Some(fault)))).is_err();
    let mut random = rand::rngs::StdRng::seed_from_u64(7);
    let trace = (0..traces).map(|_| Trace::random(&mut random, 400)).find(fails)?;
    Some(trace.shrink(fails))
}

/// Every fault of the model that events can bring about is found, and shrunk to a few events.
#[test]
fn random_events_find_every_fault() {
    for fault in EVERY_FAULT {
        let outside = outside_of_random_events(fault);
        match shown(fault, if outside { 20 } else { 500 }) {
            Some(trace) => {
                println!("{fault:?}: {trace:?}");
                assert!(
                    !outside && trace.raw.len() <= 10,
                    "{fault:?} is shown by {} events: {trace:?}",
                    trace.raw.len()
                );
            }
            None => assert!(outside, "{fault:?} was not found"),
        }
    }
}
