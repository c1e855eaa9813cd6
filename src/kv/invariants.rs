//! What must hold of a pool and its tables after every operation, counted anew from all pages.

use std::collections::HashSet;

use thiserror::Error;

use super::pages::BadList;
use super::pool::{BlockPool, PageCounts};
use super::table::{BlockTable, SwappedTable};

/// An invariant of a pool that does not hold: a fault of this crate, or a table that was not named or was dropped.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvariantError {
    /// Tables are missing, or were dropped without release.
    #[error("{found} tables were named; {needed} are in use")]
    Tables {
        /// Tables named.
        found: u32,
        /// Tables in use.
        needed: u32,
    },
    /// A table of another pool.
    #[error("a table is of pool {found}; this is pool {needed}")]
    Foreign {
        /// Pool of the table.
        found: u64,
        /// This pool.
        needed: u64,
    },
    /// A table has another number of pages than its tokens take.
    #[error("a table of {kv_len} tokens has {found} pages; {needed} are needed")]
    TablePages {
        /// Tokens in the table's pages.
        kv_len: u32,
        /// Pages in it.
        found: usize,
        /// Pages they take.
        needed: u32,
    },
    /// A page has another number of owners than there are tables that name it.
    #[error("page {page} has {found} owners; {needed} tables name it")]
    Owners {
        /// The page.
        page: u32,
        /// Owners counted by the pool.
        found: u32,
        /// Tables that name it.
        needed: u32,
    },
    /// The list of idle pages is broken.
    #[error("the list of idle pages is broken at page {page}")]
    IdleList {
        /// The page whose neighbours do not fit.
        page: u32,
    },
    /// Holding, cached and free pages do not add up to all.
    #[error("counted {found:?} of {page_count} pages; the pool says {stated:?}")]
    Counts {
        /// Pages in each state, counted one by one.
        found: PageCounts,
        /// Pages in each state, as the pool says.
        stated: PageCounts,
        /// Pages in the pool.
        page_count: u32,
    },
    /// A published block is not where lookups search for it, or is there twice.
    #[error("the published block in page {page} is missing from its bucket, or in it twice")]
    Bucket {
        /// The page.
        page: u32,
    },
    /// Two pages hold the same published block.
    #[error("page {page} holds the same published block as another")]
    SameBlock {
        /// The page.
        page: u32,
    },
    /// A block that its table takes for published is not.
    #[error("page {page} is of a published block of its table, and holds none")]
    Unpublished {
        /// The page.
        page: u32,
    },
    /// Published blocks that were not taken back, by the statistics, are not those there are.
    #[error("{found} blocks are published; the statistics say {needed}")]
    Published {
        /// Blocks published.
        found: u64,
        /// Published, less evicted, less withdrawn.
        needed: u64,
    },
    /// A host slot is held twice, or neither held nor free.
    #[error("host slot {slot} is in {found} places; 1 is needed")]
    HostSlot {
        /// The slot.
        slot: u32,
        /// Swapped tables that name it, and 1 if it is free.
        found: u32,
    },
}

impl BlockPool {
    /// Checks that the pool's books are in order, given all tables that were not released. Needs no device, and takes time
    /// in proportion to the pool: for tests and for a suspicious caller.
    ///
    /// # Errors
    /// [`InvariantError`]: the first that does not hold.
    pub fn check_invariants(&self, tables: &[&BlockTable], swapped: &[&SwappedTable]) -> Result<(), InvariantError> {
        let found = (tables.len() + swapped.len()) as u32;
        if found != self.tables {
            return Err(InvariantError::Tables { found, needed: self.tables });
        }
        let pools = tables.iter().map(|table| table.pool).chain(swapped.iter().map(|swapped| swapped.pool));
        for found in pools {
            if found != self.id {
                return Err(InvariantError::Foreign { found, needed: self.id });
            }
        }
        self.check_owners(tables)?;
        self.check_states()?;
        self.check_published(tables)?;
        self.check_host(swapped)
    }

    fn check_owners(&self, tables: &[&BlockTable]) -> Result<(), InvariantError> {
        let mut owners = vec![0; self.page_count() as usize];
        for table in tables {
            let (kv_len, found) = (table.kv_len(), table.pages.len());
            let needed = self.page_size.pages_for(kv_len);
            if found != needed as usize {
                return Err(InvariantError::TablePages { kv_len, found, needed });
            }
            for page in &table.pages {
                if let Some(owners) = owners.get_mut(*page as usize) {
                    *owners += 1;
                }
            }
        }
        for (page, needed) in (0..).zip(owners) {
            let found = self.pages.owners(page);
            if found != needed {
                return Err(InvariantError::Owners { page, found, needed });
            }
        }
        Ok(())
    }

    /// Every page is in exactly one state, and the list of idle pages has exactly those without owners.
    fn check_states(&self) -> Result<(), InvariantError> {
        let mut found = PageCounts::default();
        for page in 0..self.page_count() {
            *match (self.pages.owners(page), self.pages.is_published(page)) {
                (0, false) => &mut found.free,
                (0, true) => &mut found.cached,
                _ => &mut found.held,
            } += 1;
        }
        let stated = self.counts();
        let page_count = self.page_count();
        if found != stated {
            return Err(InvariantError::Counts { found, stated, page_count });
        }
        self.pages.check().map_err(|bad| match bad {
            BadList::Link { page } => InvariantError::IdleList { page },
            BadList::Lengths { free, cached } => {
                InvariantError::Counts { found: PageCounts { free, cached, ..stated }, stated, page_count }
            }
        })
    }

    fn check_published(&self, tables: &[&BlockTable]) -> Result<(), InvariantError> {
        let mut reached = HashSet::new();
        for (page, in_its_bucket) in self.cache.walk(&self.pages) {
            if !in_its_bucket || !reached.insert(page) {
                return Err(InvariantError::Bucket { page });
            }
        }
        let mut keys = HashSet::new();
        for page in 0..self.page_count() {
            let Some(key) = self.pages.block(page).key else {
                continue;
            };
            if !reached.contains(&page) {
                return Err(InvariantError::Bucket { page });
            }
            if !keys.insert(key) {
                return Err(InvariantError::SameBlock { page });
            }
        }
        let stats = self.prefix_stats();
        let (found, needed) = (keys.len() as u64, stats.published - stats.evictions - stats.withdrawn);
        if found != needed {
            return Err(InvariantError::Published { found, needed });
        }
        for table in tables {
            let published = table.published.saturating_sub(table.first_block()) as usize;
            for page in table.pages.iter().take(published) {
                if !self.pages.is_published(*page) {
                    return Err(InvariantError::Unpublished { page: *page });
                }
            }
        }
        Ok(())
    }

    fn check_host(&self, swapped: &[&SwappedTable]) -> Result<(), InvariantError> {
        let mut places = vec![0; self.slot_count as usize];
        let held = swapped.iter().flat_map(|swapped| &swapped.slots);
        for slot in held.chain(&self.free_slots) {
            if let Some(places) = places.get_mut(*slot as usize) {
                *places += 1;
            }
        }
        let wrong = (0..).zip(places).find(|(_, found)| *found != 1);
        wrong.map_or(Ok(()), |(slot, found)| Err(InvariantError::HostSlot { slot, found }))
    }
}
