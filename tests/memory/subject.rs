//! What is tested: the library's pool, or a model of it, behind the same operations.

use std::collections::BTreeMap;

use paged_attention::{
    BatchBuilder, BlockPool, BlockTable, PageCopy, PageCounts, PoolConfig, PoolError, PrefixStats, Refused,
    SwappedTable,
};

use crate::history::History;

/// Which sequence. The caller chooses numbers.
pub type Id = usize;

/// A sequence as everybody may see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeqView {
    pub pages: Vec<u32>,
    pub first_token: u32,
    pub len: u32,
    /// Host slots, where the sequence is swapped out.
    pub slots: Option<Vec<u32>>,
}

/// Everything that can be seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    pub seqs: BTreeMap<Id, SeqView>,
    pub counts: PageCounts,
    pub free_slots: u32,
    pub stats: PrefixStats,
}

pub trait Subject {
    fn lookup(&mut self, id: Id, history: &History);
    fn extend(&mut self, id: Id, tokens: u32) -> Result<Vec<PageCopy>, PoolError>;
    fn fork(&mut self, id: Id, fork: Id);
    fn truncate(&mut self, id: Id, len: u32) -> Result<(), PoolError>;
    fn release_before(&mut self, id: Id, position: u32) -> Result<(), PoolError>;
    fn publish(&mut self, id: Id, history: &History) -> Result<(), PoolError>;
    fn release(&mut self, id: Id);
    fn swap_out(&mut self, id: Id) -> Result<Vec<PageCopy>, PoolError>;
    fn swap_in(&mut self, id: Id) -> Result<Vec<PageCopy>, PoolError>;
    fn discard(&mut self, id: Id);
    fn common_pages(&self, ids: &[Id]) -> usize;
    fn view(&self) -> View;
    /// The subject's own opinion of its books.
    fn check(&self) -> Result<(), String>;
}

enum Held {
    Table(BlockTable),
    Swapped(SwappedTable),
}

/// The library's pool and its tables.
pub struct Real {
    pool: BlockPool,
    seqs: BTreeMap<Id, Held>,
}

impl Real {
    pub fn new(config: &PoolConfig) -> Self {
        Self { pool: BlockPool::new(config).unwrap(), seqs: BTreeMap::new() }
    }

    fn with<T>(&mut self, id: Id, act: impl FnOnce(&mut BlockPool, &mut BlockTable) -> T) -> T {
        match self.seqs.get_mut(&id) {
            Some(Held::Table(table)) => act(&mut self.pool, table),
            _ => panic!("sequence {id} has no table"),
        }
    }

    fn take_table(&mut self, id: Id) -> BlockTable {
        match self.seqs.remove(&id) {
            Some(Held::Table(table)) => table,
            _ => panic!("sequence {id} has no table"),
        }
    }

    fn take_swapped(&mut self, id: Id) -> SwappedTable {
        match self.seqs.remove(&id) {
            Some(Held::Swapped(swapped)) => swapped,
            _ => panic!("sequence {id} is not swapped out"),
        }
    }
}

impl Subject for Real {
    fn lookup(&mut self, id: Id, history: &History) {
        let table = self.pool.lookup(&history.chain).unwrap();
        self.seqs.insert(id, Held::Table(table));
    }

    fn extend(&mut self, id: Id, tokens: u32) -> Result<Vec<PageCopy>, PoolError> {
        let mut copies = Vec::new();
        self.with(id, |pool, table| pool.extend(table, tokens, &mut copies)).map(|()| copies)
    }

    fn fork(&mut self, id: Id, fork: Id) {
        let table = self.with(id, |pool, table| pool.fork(table)).unwrap();
        self.seqs.insert(fork, Held::Table(table));
    }

    fn truncate(&mut self, id: Id, len: u32) -> Result<(), PoolError> {
        self.with(id, |pool, table| pool.truncate(table, len))
    }

    fn release_before(&mut self, id: Id, position: u32) -> Result<(), PoolError> {
        self.with(id, |pool, table| pool.release_before(table, position))
    }

    fn publish(&mut self, id: Id, history: &History) -> Result<(), PoolError> {
        self.with(id, |pool, table| pool.publish(table, &history.chain))
    }

    fn release(&mut self, id: Id) {
        let table = self.take_table(id);
        self.pool.release(table).unwrap();
    }

    fn swap_out(&mut self, id: Id) -> Result<Vec<PageCopy>, PoolError> {
        let mut copies = Vec::new();
        let table = self.take_table(id);
        let (held, result) = match self.pool.swap_out(table, &mut copies) {
            Ok(swapped) => (Held::Swapped(swapped), Ok(copies)),
            Err(Refused { error, table }) => (Held::Table(table), Err(error)),
        };
        self.seqs.insert(id, held);
        result
    }

    fn swap_in(&mut self, id: Id) -> Result<Vec<PageCopy>, PoolError> {
        let mut copies = Vec::new();
        let swapped = self.take_swapped(id);
        let (held, result) = match self.pool.swap_in(swapped, &mut copies) {
            Ok(table) => (Held::Table(table), Ok(copies)),
            Err(Refused { error, table }) => (Held::Swapped(table), Err(error)),
        };
        self.seqs.insert(id, held);
        result
    }

    fn discard(&mut self, id: Id) {
        let swapped = self.take_swapped(id);
        self.pool.discard(swapped).unwrap();
    }

    fn common_pages(&self, ids: &[Id]) -> usize {
        let mut step = BatchBuilder::default();
        // A sequence alone shares all with itself.
        for id in ids.iter().chain(&ids[..1]) {
            match &self.seqs[id] {
                Held::Table(table) => step.push(table, 0).unwrap(),
                Held::Swapped(_) => panic!("sequence {id} is swapped out"),
            }
        }
        let page_size = self.pool.page_size();
        let prefixes = step.batch().shared_prefixes(page_size, 1);
        let all = prefixes.iter().find(|prefix| prefix.seqs == (0..ids.len() + 1));
        all.map_or(0, |prefix| prefix.tokens / page_size.get()) as usize
    }

    fn view(&self) -> View {
        let seq = |held: &Held| match held {
            Held::Table(table) => SeqView {
                pages: table.pages().to_vec(),
                first_token: table.first_token(),
                len: table.len(),
                slots: None,
            },
            Held::Swapped(swapped) => SeqView {
                pages: Vec::new(),
                first_token: swapped.first_token(),
                len: swapped.len(),
                slots: Some(swapped.slots().to_vec()),
            },
        };
        View {
            seqs: self.seqs.iter().map(|(id, held)| (*id, seq(held))).collect(),
            counts: self.pool.counts(),
            free_slots: self.pool.free_host_slots(),
            stats: self.pool.prefix_stats(),
        }
    }

    fn check(&self) -> Result<(), String> {
        let (mut tables, mut swapped) = (Vec::new(), Vec::new());
        for held in self.seqs.values() {
            match held {
                Held::Table(table) => tables.push(table),
                Held::Swapped(held) => swapped.push(held),
            }
        }
        self.pool.check_invariants(&tables, &swapped).map_err(|error| error.to_string())
    }
}
