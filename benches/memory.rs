//! What the pool's operations take, in a small pool and in one of a million blocks.
//!
//! `cargo bench --bench memory`. Each figure is the median over rounds of one round's time per unit, with the lists of idle
//! pages in random order, as after a long run. What differs between the two pools is how much of the books is in the
//! caches of the CPU: no operation takes more steps in a larger pool. The work per round is the same.
//!
//! Without `--bench` (as `cargo test --benches` does) the pools are small and the figures mean nothing.

#![allow(missing_docs, reason = "a program, not a library")]
#![allow(clippy::print_stdout, reason = "its purpose")]

use std::time::Instant;

use paged_attention::{
    BlockPool, BlockTable, Dtype, HeadGeometry, KvLayout, Namespace, PageSize, PoolConfig, TokenChain,
};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

const PAGE_SIZE: u32 = 16;
/// Blocks of a sequence.
const BLOCKS: u32 = 64;

/// What is measured, per what, and what it may take at most, in nanoseconds.
const FIGURES: [(&str, &str, u64); 9] = [
    ("extend to a new page, free", "page", 200),
    ("extend to a new page, by eviction", "page", 200),
    ("extend inside a page", "call", 200),
    ("release", "page", 200),
    ("fork and release", "page", 200),
    ("extend, publish, release one page", "sequence", 1000),
    ("hash (outside of the pool)", "block", 1000),
    ("lookup, a hit", "block", 1000),
    ("publish", "block", 1000),
];

fn main() -> Fallible<()> {
    let full = std::env::args().any(|argument| argument == "--bench");
    let (small, large, rounds) = if full { (4096, 1_000_000, 15) } else { (256, 512, 1) };
    let pool = new_pool(large)?;
    let bytes = pool.metadata_bytes();
    println!(
        "{:.1} bytes of bookkeeping per block of {PAGE_SIZE} tokens ({bytes} for {large})",
        bytes as f64 / f64::from(large)
    );
    println!("ns per unit, in a pool of      {small:>9} {large:>9}   at most");
    let [small, large] = [measure(small, rounds)?, measure(large, rounds)?];
    for ((name, unit, allowed), (small, large)) in FIGURES.iter().zip(small.iter().zip(&large)) {
        println!("{:<30} {small:>9.1} {large:>9.1} {allowed:>9}", format!("{name}, per {unit}"));
    }
    Ok(())
}

fn new_pool(page_count: u32) -> Fallible<BlockPool> {
    let page_size = PageSize::new(PAGE_SIZE)?;
    Ok(BlockPool::new(&PoolConfig { page_size, page_count, host_slot_count: 0 })?)
}

/// The median over rounds of each figure.
fn measure(page_count: u32, rounds: usize) -> Fallible<Vec<f64>> {
    let mut bench = Bench::new(page_count)?;
    let mut samples = vec![Vec::new(); FIGURES.len()];
    for _ in 0..rounds {
        for (samples, sample) in samples.iter_mut().zip(bench.round()?) {
            samples.push(sample);
        }
    }
    let median = |mut samples: Vec<f64>| {
        samples.sort_by(f64::total_cmp);
        samples.get(samples.len() / 2).copied().unwrap_or(f64::NAN)
    };
    Ok(samples.into_iter().map(median).collect())
}

struct Bench {
    pool: BlockPool,
    random: StdRng,
    /// Sequences of a round: a quarter of the small pool, so that every round does the same work in both.
    seqs: usize,
    /// The first token of the next sequence: no two are alike.
    next: u32,
}

impl Bench {
    /// A pool whose idle pages are in random order, and all cached, as after a long run.
    fn new(page_count: u32) -> Fallible<Self> {
        let mut bench = Self { pool: new_pool(page_count)?, random: StdRng::seed_from_u64(1), seqs: 0, next: 0 };
        bench.seqs = (page_count.min(4096) / 4 / BLOCKS).max(1) as usize;
        bench.cache_all()?;
        Ok(bench)
    }

    /// Publishes sequences until no page is free; their pages come in random order.
    fn cache_all(&mut self) -> Fallible<()> {
        self.pool.reset()?;
        let page_count = self.pool.page_count();
        let mut singles = (0..page_count).map(|_| self.table(PAGE_SIZE)).collect::<Fallible<Vec<_>>>()?;
        singles.shuffle(&mut self.random);
        for table in singles {
            self.pool.release(table)?;
        }
        for _ in 0..page_count / BLOCKS {
            let chain = self.chain()?;
            self.run(&chain)?;
        }
        Ok(())
    }

    fn table(&mut self, tokens: u32) -> Fallible<BlockTable> {
        let mut table = self.pool.new_table()?;
        self.pool.extend(&mut table, tokens, &mut Vec::new())?;
        Ok(table)
    }

    /// A sequence that nobody had before.
    fn chain(&mut self) -> Fallible<TokenChain> {
        self.next += 1;
        chain_of(self.next)
    }

    /// Sequences that are cached, from all over the pool: of the later half, in random order.
    fn cached(&mut self) -> Fallible<Vec<TokenChain>> {
        let half = self.pool.page_count() / BLOCKS / 2;
        let mut ids: Vec<u32> = (self.next - half..self.next).map(|id| id + 1).collect();
        ids.shuffle(&mut self.random);
        ids.into_iter().take(self.seqs).map(chain_of).collect()
    }

    /// Computed, published, released.
    fn run(&mut self, chain: &TokenChain) -> Fallible<()> {
        let mut table = self.pool.lookup(chain)?;
        let left = BLOCKS * PAGE_SIZE - table.len();
        self.pool.extend(&mut table, left, &mut Vec::new())?;
        self.pool.publish(&mut table, chain)?;
        Ok(self.pool.release(table)?)
    }

    /// One sample of each figure.
    fn round(&mut self) -> Fallible<[f64; FIGURES.len()]> {
        let blocks = self.seqs as u64 * u64::from(BLOCKS);
        let mut copies = Vec::new();
        let cached = self.cached()?;
        let start = Instant::now();
        let mut found = 0;
        let mut tables = Vec::with_capacity(cached.len());
        for chain in &cached {
            let table = self.pool.lookup(chain)?;
            found += table.pages().len() as u64;
            tables.push(table);
        }
        let lookup = per(start, blocks);
        if found != blocks {
            return Err(format!("{found} of {blocks} blocks were found").into());
        }

        let start = Instant::now();
        for table in &tables {
            let fork = self.pool.fork(table)?;
            self.pool.release(fork)?;
        }
        let fork = per(start, blocks);
        self.release_all(tables)?;

        let chains = (0..self.seqs).map(|_| self.chain()).collect::<Fallible<Vec<_>>>()?;

        let start = Instant::now();
        for chain in &chains {
            std::hint::black_box(pushed(chain.tokens())?);
        }
        let hash = per(start, blocks);

        // All pages are cached: every page is taken by eviction.
        let evictions = self.pool.prefix_stats().evictions;
        let mut tables = self.empty_tables()?;
        let start = Instant::now();
        for table in &mut tables {
            for _ in 0..BLOCKS {
                self.pool.extend(table, PAGE_SIZE, &mut copies)?;
            }
        }
        let evict = per(start, blocks);
        // What earlier rounds left free is used up first.
        if self.pool.prefix_stats().evictions == evictions {
            return Err("nothing was evicted".into());
        }

        let start = Instant::now();
        for (table, chain) in tables.iter_mut().zip(&chains) {
            self.pool.publish(table, chain)?;
        }
        let publish = per(start, blocks);
        self.release_all(tables)?;

        // Unpublished: their pages are free afterwards, in random order.
        let mut singles = (0..blocks).map(|_| self.table(PAGE_SIZE)).collect::<Fallible<Vec<_>>>()?;
        singles.shuffle(&mut self.random);
        self.release_all(singles)?;
        let mut tables = self.empty_tables()?;
        let start = Instant::now();
        for table in &mut tables {
            for _ in 0..BLOCKS {
                self.pool.extend(table, PAGE_SIZE, &mut copies)?;
            }
        }
        let extend = per(start, blocks);

        let start = Instant::now();
        self.release_all(tables)?;
        let release = per(start, blocks);

        let mut table = self.table(1)?;
        let calls = u64::from(PAGE_SIZE - 1);
        let start = Instant::now();
        for _ in 0..64 {
            for _ in 0..calls {
                self.pool.extend(&mut table, 1, &mut copies)?;
            }
            self.pool.truncate(&mut table, 1)?;
        }
        let inside = per(start, 64 * calls);
        self.pool.release(table)?;

        let short = pushed(&[self.random.random(); PAGE_SIZE as usize])?;
        let start = Instant::now();
        for _ in 0..1024 {
            let mut table = self.pool.lookup(&short)?;
            let left = PAGE_SIZE - table.len();
            self.pool.extend(&mut table, left, &mut copies)?;
            self.pool.publish(&mut table, &short)?;
            self.pool.release(table)?;
        }
        let sequence = per(start, 1024);
        if !copies.is_empty() {
            return Err("nothing was to be copied".into());
        }
        // The next round evicts again.
        while self.pool.counts().free >= BLOCKS {
            let chain = self.chain()?;
            self.run(&chain)?;
        }
        Ok([extend, evict, inside, release, fork, sequence, hash, lookup, publish])
    }

    fn empty_tables(&mut self) -> Fallible<Vec<BlockTable>> {
        (0..self.seqs).map(|_| Ok(self.pool.new_table()?)).collect()
    }

    fn release_all(&mut self, tables: Vec<BlockTable>) -> Fallible<()> {
        for table in tables {
            self.pool.release(table)?;
        }
        Ok(())
    }
}

/// A sequence of [`BLOCKS`] blocks, like no other from its first token on.
fn chain_of(id: u32) -> Fallible<TokenChain> {
    pushed(&(0..BLOCKS * PAGE_SIZE).map(|at| if at == 0 { id } else { at }).collect::<Vec<_>>())
}

/// A chain of these tokens. Geometry and names do not matter here.
fn pushed(tokens: &[u32]) -> Fallible<TokenChain> {
    let layout = KvLayout::new(HeadGeometry::new(1, 1, 8)?, Dtype::F16, PageSize::new(PAGE_SIZE)?, 1)?;
    let [model, version, adapter, positions] = ["model", "1", "", "rope"];
    let namespace = Namespace { model, version, adapter, positions, layout: &layout, salt: b"salt" };
    let mut chain = TokenChain::new(&namespace);
    chain.push(tokens);
    Ok(chain)
}

/// Nanoseconds per unit since `start`.
fn per(start: Instant, units: u64) -> f64 {
    start.elapsed().as_secs_f64() * 1e9 / units as f64
}
