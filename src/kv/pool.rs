//! The pages of a KV cache, shared out among sequences.

use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

use super::chain::TokenChain;
use super::pages::Pages;
use super::prefix::{PrefixCache, PrefixStats, TooLarge};
use super::table::{BlockTable, PageCopy, SwappedTable};
use crate::geometry::PageSize;

/// What a pool refuses. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Not enough pages are free or cached. Where `needed` passes `page_count`, waiting will not help.
    #[error("{needed} pages are needed; {available} of {page_count} are free or cached")]
    Exhausted {
        /// Pages needed.
        needed: u32,
        /// Pages without owners.
        available: u32,
        /// Pages in the pool.
        page_count: u32,
    },
    /// Not enough host slots are free.
    #[error("{needed} host slots are needed; {available} of {slot_count} are free")]
    HostExhausted {
        /// Slots needed.
        needed: u32,
        /// Free slots.
        available: u32,
        /// All slots.
        slot_count: u32,
    },
    /// The table belongs to another pool.
    #[error("the table is of pool {found}; this is pool {needed}")]
    Foreign {
        /// Pool of the table.
        found: u64,
        /// This pool.
        needed: u64,
    },
    /// The chain's blocks have another size than the pool's pages.
    #[error("the chain has blocks of {found} tokens; pages hold {needed}")]
    BlockSize {
        /// Tokens per block of the chain.
        found: u32,
        /// Tokens per page.
        needed: u32,
    },
    /// A block of the table is published under another key: the chain has other tokens or another namespace.
    #[error("block {block} of the table is published with other tokens than the chain's or in another namespace")]
    OtherChain {
        /// The block, counted from the sequence's start.
        block: u32,
    },
    /// A position lies outside of the part of the sequence that the table holds.
    #[error("position {found} is outside of {first} to {len}, the part of the sequence in the table")]
    Position {
        /// The position.
        found: u32,
        /// The first position that is possible.
        first: u32,
        /// The last: the sequence's length.
        len: u32,
    },
    /// A sequence would have 2^32 tokens.
    #[error("{len} tokens and {tokens} more pass 2^32 - 1, the most a sequence may have")]
    TooLong {
        /// Tokens of the sequence.
        len: u32,
        /// Tokens to be added.
        tokens: u32,
    },
    /// There are 2^32 - 1 tables.
    #[error("there are {tables} tables already")]
    TooManyTables {
        /// Tables.
        tables: u32,
    },
    /// The pool cannot be reset while sequences hold pages.
    #[error("{tables} tables are in use, with {held} pages and {slots} host slots")]
    InUse {
        /// Tables that were not released, swapped ones included.
        tables: u32,
        /// Pages they hold.
        held: u32,
        /// Host slots they hold.
        slots: u32,
    },
    /// The host has no memory for the bookkeeping.
    #[error("there is no memory for {bytes} bytes of bookkeeping")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
    },
}

/// A refusal that hands back the table.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct Refused<T> {
    /// Why.
    pub error: PoolError,
    /// What was handed in, unchanged.
    pub table: T,
}

/// The size of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Tokens per page.
    pub page_size: PageSize,
    /// Pages on the device.
    pub page_count: u32,
    /// Pages for which there is room in host memory, for swapping; 0 for none.
    pub host_slot_count: u32,
}

/// How many pages are in which state. The three add up to the pool's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// In at least one table.
    pub held: u32,
    /// In no table, and found by lookups.
    pub cached: u32,
    /// Neither.
    pub free: u32,
}

impl PageCounts {
    /// Pages that may be taken: free ones, and then cached ones.
    pub fn available(&self) -> u32 {
        self.cached + self.free
    }
}

/// Fixed number of pages, shared out among sequences as [`BlockTable`]s, with a cache of published prefixes.
///
/// This is bookkeeping on the host: no device, no clock, and the same calls give the same pages. A page has as many owners
/// as there are tables that name it. Pages whose block is published stay findable when their last owner is gone, until
/// they are needed: the least recently used goes first, and of a released sequence the last block first.
///
/// No operation takes longer in a larger pool, except [`BlockPool::new`], [`BlockPool::reset`] and
/// [`BlockPool::check_invariants`]. `docs/memory.md` says what the caller has to keep so that a page is safe with its next
/// owner.
///
/// ```
/// use paged_attention::{BlockPool, Dtype, HeadGeometry, KvLayout, Namespace, PageSize, PoolConfig, TokenChain};
///
/// let page_size = PageSize::new(4)?;
/// let mut pool = BlockPool::new(&PoolConfig { page_size, page_count: 8, host_slot_count: 0 })?;
/// let layout = KvLayout::new(HeadGeometry::new(8, 2, 64)?, Dtype::F16, page_size, 8)?;
/// let namespace =
///     Namespace { model: "m", version: "1", adapter: "", positions: "rope 1e4", layout: &layout, salt: b"alice" };
/// let mut prompt = TokenChain::new(&namespace);
/// prompt.push(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
///
/// // The copies that the device has to make before the next append: none so far.
/// let mut copies = Vec::new();
/// let mut first = pool.lookup(&prompt)?;
/// assert_eq!(first.len(), 0);
/// pool.extend(&mut first, 9, &mut copies)?;
/// // ... once the nine keys and values are recorded to be written:
/// pool.publish(&mut first, &prompt)?;
///
/// let mut second = pool.lookup(&prompt)?;
/// assert_eq!((second.len(), second.pages()), (8, &first.pages()[..2]));
/// pool.extend(&mut second, 1, &mut copies)?;
/// pool.release(first)?;
/// assert_eq!((pool.counts().held, pool.counts().cached, pool.counts().free), (3, 0, 5));
/// pool.release(second)?;
/// assert_eq!((pool.counts().held, pool.counts().cached, pool.counts().free), (0, 2, 6));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct BlockPool {
    pub(super) id: u64,
    pub(super) page_size: PageSize,
    pub(super) pages: Pages,
    pub(super) cache: PrefixCache,
    pub(super) slot_count: u32,
    /// Free host slots, the next one last.
    pub(super) free_slots: Vec<u32>,
    /// Tables that were not released, swapped ones included: no page can have more owners.
    pub(super) tables: u32,
}

/// Tells pools apart.
static NEXT_POOL: AtomicU64 = AtomicU64::new(0);

impl BlockPool {
    /// A pool with all pages free.
    ///
    /// # Errors
    /// [`PoolError::Memory`].
    pub fn new(config: &PoolConfig) -> Result<Self, PoolError> {
        let PoolConfig { page_size, page_count, host_slot_count } = *config;
        let no_memory = |bytes| PoolError::Memory { bytes };
        let mut free_slots = Vec::new();
        free_slots
            .try_reserve_exact(host_slot_count as usize)
            .map_err(|_| no_memory(4 * u64::from(host_slot_count)))?;
        free_slots.extend((0..host_slot_count).rev());
        Ok(Self {
            id: NEXT_POOL.fetch_add(1, Ordering::Relaxed),
            page_size,
            pages: Pages::new(page_count).map_err(|_| no_memory(Pages::PAGE_BYTES * u64::from(page_count)))?,
            cache: PrefixCache::new(page_size, page_count).map_err(|TooLarge(bytes)| no_memory(bytes))?,
            slot_count: host_slot_count,
            free_slots,
            tables: 0,
        })
    }

    /// Tokens per page.
    pub fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Pages in the pool.
    pub fn page_count(&self) -> u32 {
        self.pages.count()
    }

    /// Pages in each state.
    pub fn counts(&self) -> PageCounts {
        let (free, cached) = (self.pages.free(), self.pages.cached());
        PageCounts { held: self.page_count() - free - cached, cached, free }
    }

    /// Free host slots.
    pub fn free_host_slots(&self) -> u32 {
        self.free_slots.len() as u32
    }

    /// Tables that were not released, swapped ones included.
    pub fn tables(&self) -> u32 {
        self.tables
    }

    /// What became of lookups.
    pub fn prefix_stats(&self) -> PrefixStats {
        self.cache.stats
    }

    /// Bytes of bookkeeping, tables aside. They do not change.
    pub fn metadata_bytes(&self) -> u64 {
        Pages::PAGE_BYTES * u64::from(self.page_count()) + self.cache.bytes() + 4 * u64::from(self.slot_count)
    }

    /// A table without tokens, for a sequence that shares nothing.
    ///
    /// # Errors
    /// [`PoolError::TooManyTables`].
    pub fn new_table(&mut self) -> Result<BlockTable, PoolError> {
        let tables = self.tables;
        self.tables = tables.checked_add(1).ok_or(PoolError::TooManyTables { tables })?;
        let (pool, page_size) = (self.id, self.page_size);
        Ok(BlockTable { pool, page_size, pages: Vec::new(), first_token: 0, len: 0, published: 0 })
    }

    /// A table with the longest cached prefix of `chain`: its length says how many tokens need not be computed. At least
    /// one token of a chain is left to compute, since somebody wants its output.
    ///
    /// The table holds what was found, so nothing can be evicted between the lookup and the use.
    ///
    /// # Errors
    /// [`PoolError::BlockSize`], [`PoolError::TooManyTables`], [`PoolError::Memory`].
    pub fn lookup(&mut self, chain: &TokenChain) -> Result<BlockTable, PoolError> {
        self.check_block_size(chain)?;
        let len_max = u32::try_from(chain.len().saturating_sub(1)).unwrap_or(u32::MAX);
        let pages_max = self.page_size.pages_for(len_max);
        let mut pages = Vec::new();
        reserve(&mut pages, pages_max)?;
        let table = self.new_table()?;
        let blocks = chain.blocks(0);
        let asked = blocks.len() as u64;
        for (key, tokens) in blocks.take(pages_max as usize) {
            let Some(page) = self.cache.find(&self.pages, key, tokens) else {
                break;
            };
            self.pages.share(page);
            pages.push(page);
        }
        let hits = pages.len() as u64;
        let len = u64::from(len_max).min(hits * u64::from(self.page_size.get())) as u32;
        self.cache.stats.lookups += 1;
        self.cache.stats.hits += hits;
        self.cache.stats.misses += asked - hits;
        Ok(BlockTable { pages, len, published: len / self.page_size.get(), ..table })
    }

    /// Makes room for `tokens` more tokens, all or nothing. Where the table's partly filled last page has other owners, the
    /// sequence gets a copy of its own: a [`PageCopy`] is put into `copies`, to be made before the next append.
    ///
    /// Cached pages are taken where no free ones are left.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`], [`PoolError::TooLong`], [`PoolError::Foreign`], [`PoolError::Memory`].
    pub fn extend(&mut self, table: &mut BlockTable, tokens: u32, copies: &mut Vec<PageCopy>) -> Result<(), PoolError> {
        self.check_owner(table.pool)?;
        let Some(len) = table.len.checked_add(tokens) else {
            return Err(PoolError::TooLong { len: table.len, tokens });
        };
        let new = self.page_size.pages_for(len) - self.page_size.pages_for(table.len);
        // The page that the first of the new tokens goes into, where that is not a new one.
        let tail = table.pages.last().copied().filter(|_| tokens > 0 && table.tail_slots() > 0);
        let shared = tail.filter(|page| self.pages.owners(*page) > 1);
        let needed = new + u32::from(shared.is_some());
        self.check_available(needed)?;
        reserve(&mut table.pages, new)?;
        reserve(copies, 1)?;
        if let (Some(from), Some(last)) = (shared, table.pages.last_mut()) {
            if let Some(to) = take_page(&mut self.pages, &mut self.cache) {
                *last = to;
                copies.push(PageCopy::OnDevice { from, to });
                self.pages.give_back(from);
            }
        } else if let Some(page) = tail {
            // What is published is never written: the only owner writes, so the block is no longer to be found.
            self.cache.stats.withdrawn += u64::from(self.cache.remove(&mut self.pages, page));
        }
        table.pages.extend((0..new).map_while(|_| take_page(&mut self.pages, &mut self.cache)));
        table.len = len;
        Ok(())
    }

    /// A second table for the same sequence, for parallel samples and beams: all pages are shared.
    ///
    /// # Errors
    /// [`PoolError::Foreign`], [`PoolError::TooManyTables`], [`PoolError::Memory`].
    pub fn fork(&mut self, table: &BlockTable) -> Result<BlockTable, PoolError> {
        self.check_owner(table.pool)?;
        let mut pages = Vec::new();
        reserve(&mut pages, table.pages.len() as u32)?;
        let fork = self.new_table()?;
        for page in &table.pages {
            self.pages.share(*page);
        }
        pages.extend_from_slice(&table.pages);
        let BlockTable { first_token, len, published, .. } = *table;
        Ok(BlockTable { pages, first_token, len, published, ..fork })
    }

    /// Shortens a sequence to `len` tokens and gives back the pages past them: the rollback of speculated tokens.
    ///
    /// # Errors
    /// [`PoolError::Position`] where `len` is more than the sequence has, or less than what
    /// [`BlockPool::release_before`] left; [`PoolError::Foreign`].
    pub fn truncate(&mut self, table: &mut BlockTable, len: u32) -> Result<(), PoolError> {
        self.check_owner(table.pool)?;
        check_position(table, len, table.first_token)?;
        let keep = (self.page_size.pages_for(len) - table.first_block()) as usize;
        while table.pages.len() > keep {
            if let Some(page) = table.pages.pop() {
                self.pages.give_back(page);
            }
        }
        table.len = len;
        table.published = table.published.min(len / self.page_size.get());
        Ok(())
    }

    /// Gives back the pages that lie wholly before `position`: those that fell out of a sliding window. The table no longer
    /// names them, and [`BlockTable::first_token`] says where it begins.
    ///
    /// # Errors
    /// [`PoolError::Position`] where `position` is more than the sequence's length; [`PoolError::Foreign`].
    pub fn release_before(&mut self, table: &mut BlockTable, position: u32) -> Result<(), PoolError> {
        self.check_owner(table.pool)?;
        check_position(table, position, 0)?;
        let first_block = (position / self.page_size.get()).max(table.first_block());
        let gone = (first_block - table.first_block()) as usize;
        for page in table.pages.drain(..gone.min(table.pages.len())) {
            self.pages.give_back(page);
        }
        table.first_token = first_block * self.page_size.get();
        Ok(())
    }

    /// Lets lookups find the blocks that are full in both `table` and `chain`. Their keys and values must be recorded to be
    /// written; `chain` must be what the table's sequence consists of.
    ///
    /// Where another sequence published the same block before, the table takes over its page and gives its own back. A
    /// table whose window left blocks behind unpublished publishes nothing more: nobody could find the rest.
    ///
    /// # Errors
    /// [`PoolError::OtherChain`], [`PoolError::BlockSize`], [`PoolError::Foreign`].
    pub fn publish(&mut self, table: &mut BlockTable, chain: &TokenChain) -> Result<(), PoolError> {
        self.check_owner(table.pool)?;
        self.check_block_size(chain)?;
        let first_block = table.first_block();
        if table.published < first_block {
            return Ok(());
        }
        // A chain that differs anywhere differs in every later key: the last published block speaks for all.
        let known = table.published.saturating_sub(1).max(first_block);
        let full = table.full_pages();
        let blocks = |first: u32| {
            let at = (first - first_block) as usize;
            (first..).zip(at..full).zip(chain.blocks(first as usize))
        };
        for ((block, at), (key, _)) in blocks(known) {
            let found = table.pages.get(at).and_then(|page| self.pages.block(*page).key);
            if found.is_some_and(|found| found != key) {
                return Err(PoolError::OtherChain { block });
            }
        }
        for ((block, at), (key, tokens)) in blocks(table.published) {
            let Some(page) = table.pages.get_mut(at) else {
                break;
            };
            if !self.pages.is_published(*page) {
                let collisions = self.cache.stats.collisions;
                if let Some(other) = self.cache.find(&self.pages, key, tokens) {
                    self.pages.share(other);
                    self.pages.give_back(*page);
                    *page = other;
                    self.cache.stats.duplicates += 1;
                } else if self.cache.stats.collisions > collisions {
                    break;
                } else {
                    self.cache.insert(&mut self.pages, *page, key, tokens);
                }
            }
            table.published = block + 1;
        }
        Ok(())
    }

    /// Takes a table back, its last page first: published blocks stay cached, the others' pages are free.
    ///
    /// # Errors
    /// [`PoolError::Foreign`], with the table.
    pub fn release(&mut self, table: BlockTable) -> Result<(), Refused<BlockTable>> {
        if let Err(error) = self.check_owner(table.pool) {
            return Err(Refused { error, table });
        }
        for page in table.pages.into_iter().rev() {
            self.pages.give_back(page);
        }
        self.tables -= 1;
        Ok(())
    }

    /// Moves a sequence to host memory, all or nothing: the copies to make are put into `copies`, its pages are given back
    /// as in [`BlockPool::release`]. Pages shared with other tables are copied, too.
    ///
    /// # Errors
    /// [`PoolError::HostExhausted`], [`PoolError::Foreign`], [`PoolError::Memory`], with the table.
    pub fn swap_out(
        &mut self,
        table: BlockTable,
        copies: &mut Vec<PageCopy>,
    ) -> Result<SwappedTable, Refused<BlockTable>> {
        let mut slots = Vec::new();
        let needed = table.pages.len() as u32;
        let ready = self.check_owner(table.pool).and_then(|()| {
            let available = self.free_host_slots();
            if needed > available {
                return Err(PoolError::HostExhausted { needed, available, slot_count: self.slot_count });
            }
            reserve(&mut slots, needed)?;
            reserve(copies, needed)
        });
        if let Err(error) = ready {
            return Err(Refused { error, table });
        }
        slots.extend((0..needed).map_while(|_| self.free_slots.pop()));
        copies.extend(table.pages.iter().zip(&slots).map(|(page, slot)| PageCopy::ToHost { page: *page, slot: *slot }));
        for page in table.pages.iter().rev() {
            self.pages.give_back(*page);
        }
        let BlockTable { pool, first_token, len, .. } = table;
        Ok(SwappedTable { pool, slots, first_token, len })
    }

    /// Brings a sequence back from host memory, all or nothing: the copies to make are put into `copies`. Its blocks are
    /// unpublished; [`BlockPool::publish`] joins them with what is still cached.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`], [`PoolError::Foreign`], [`PoolError::Memory`], with the swapped table.
    pub fn swap_in(
        &mut self,
        swapped: SwappedTable,
        copies: &mut Vec<PageCopy>,
    ) -> Result<BlockTable, Refused<SwappedTable>> {
        let mut pages = Vec::new();
        let needed = swapped.slots.len() as u32;
        let ready = self
            .check_owner(swapped.pool)
            .and_then(|()| self.check_available(needed))
            .and_then(|()| reserve(&mut pages, needed))
            .and_then(|()| reserve(copies, needed));
        if let Err(error) = ready {
            return Err(Refused { error, table: swapped });
        }
        pages.extend((0..needed).map_while(|_| take_page(&mut self.pages, &mut self.cache)));
        copies.extend(
            swapped.slots.iter().zip(&pages).map(|(slot, page)| PageCopy::ToDevice { slot: *slot, page: *page }),
        );
        self.free_slots.extend(swapped.slots.iter().rev());
        let SwappedTable { pool, first_token, len, .. } = swapped;
        Ok(BlockTable { pool, page_size: self.page_size, pages, first_token, len, published: 0 })
    }

    /// Takes a swapped table back: its host slots are free.
    ///
    /// # Errors
    /// [`PoolError::Foreign`], with the swapped table.
    pub fn discard(&mut self, swapped: SwappedTable) -> Result<(), Refused<SwappedTable>> {
        if let Err(error) = self.check_owner(swapped.pool) {
            return Err(Refused { error, table: swapped });
        }
        self.free_slots.extend(swapped.slots.iter().rev());
        self.tables -= 1;
        Ok(())
    }

    /// Forgets all published blocks and all statistics.
    ///
    /// # Errors
    /// [`PoolError::InUse`] while there are tables.
    pub fn reset(&mut self) -> Result<(), PoolError> {
        if self.tables > 0 {
            let slots = self.slot_count - self.free_host_slots();
            return Err(PoolError::InUse { tables: self.tables, held: self.counts().held, slots });
        }
        self.pages.reset(self.page_count());
        self.cache.reset();
        self.free_slots.clear();
        self.free_slots.extend((0..self.slot_count).rev());
        Ok(())
    }

    fn check_owner(&self, found: u64) -> Result<(), PoolError> {
        if found == self.id { Ok(()) } else { Err(PoolError::Foreign { found, needed: self.id }) }
    }

    fn check_block_size(&self, chain: &TokenChain) -> Result<(), PoolError> {
        let (found, needed) = (chain.page_size().get(), self.page_size.get());
        if found == needed { Ok(()) } else { Err(PoolError::BlockSize { found, needed }) }
    }

    fn check_available(&self, needed: u32) -> Result<(), PoolError> {
        let available = self.counts().available();
        if needed > available {
            return Err(PoolError::Exhausted { needed, available, page_count: self.page_count() });
        }
        Ok(())
    }
}

/// A page for a new owner; a cached one is evicted.
fn take_page(pages: &mut Pages, cache: &mut PrefixCache) -> Option<u32> {
    let page = pages.take()?;
    cache.stats.evictions += u64::from(cache.remove(pages, page));
    Some(page)
}

fn check_position(table: &BlockTable, found: u32, first: u32) -> Result<(), PoolError> {
    let len = table.len;
    if (first..=len).contains(&found) { Ok(()) } else { Err(PoolError::Position { found, first, len }) }
}

fn reserve<T>(items: &mut Vec<T>, more: u32) -> Result<(), PoolError> {
    let bytes = (items.len() as u64 + u64::from(more)) * size_of::<T>() as u64;
    items.try_reserve(more as usize).map_err(|_| PoolError::Memory { bytes })
}
