//! Who holds each page, and in which order the pages that nobody holds are given out.

use std::collections::TryReserveError;

use super::chain::BlockKey;

/// The end of a list.
pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Page {
    owners: u32,
    /// Neighbours in the list of idle pages.
    previous: u32,
    next: u32,
}

/// The published block of a page, if there is one. The prefix cache writes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub key: Option<BlockKey>,
    /// Neighbours in its bucket.
    pub previous: u32,
    pub next: u32,
}

impl Block {
    pub const NONE: Self = Self { key: None, previous: NONE, next: NONE };
}

/// The number of owners of every page, and one list of the pages without owners: free ones first, the last freed in
/// front; then cached ones (with a published block), the least recently used in front. A page is taken from the front.
///
/// Every operation takes a constant number of steps. Page ids come from the pool that owns this, so they are in range.
#[derive(Debug)]
pub(super) struct Pages {
    /// Apart from the blocks, so that the lists of a large pool stay in the CPU's cache: the next page is known only when
    /// the one before has been read, and waiting for memory each time took most of the time.
    pages: Vec<Page>,
    blocks: Vec<Block>,
    first: u32,
    last: u32,
    free: u32,
    cached: u32,
}

/// What is wrong with the list of idle pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadList {
    /// A neighbour does not point back.
    Link { page: u32 },
    /// The list has other lengths than were counted, or a free page lies behind a cached one.
    Lengths { free: u32, cached: u32 },
}

impl Pages {
    pub const PAGE_BYTES: u64 = (size_of::<Page>() + size_of::<Block>()) as u64;

    /// All free; page 0 is the first to be taken.
    pub fn new(count: u32) -> Result<Self, TryReserveError> {
        let (mut pages, mut blocks) = (Vec::new(), Vec::new());
        pages.try_reserve_exact(count as usize)?;
        blocks.try_reserve_exact(count as usize)?;
        let mut all = Self { pages, blocks, first: NONE, last: NONE, free: 0, cached: 0 };
        all.reset(count);
        Ok(all)
    }

    /// Forgets owners and order.
    pub fn reset(&mut self, count: u32) {
        self.pages.clear();
        self.pages.extend((0..count).map(|page| Page {
            owners: 0,
            previous: page.checked_sub(1).unwrap_or(NONE),
            next: if page + 1 < count { page + 1 } else { NONE },
        }));
        self.blocks.clear();
        self.blocks.resize(count as usize, Block::NONE);
        self.first = if count > 0 { 0 } else { NONE };
        self.last = count.checked_sub(1).unwrap_or(NONE);
        self.free = count;
        self.cached = 0;
    }

    pub fn count(&self) -> u32 {
        self.pages.len() as u32
    }

    pub fn free(&self) -> u32 {
        self.free
    }

    pub fn cached(&self) -> u32 {
        self.cached
    }

    pub fn owners(&self, page: u32) -> u32 {
        self.page(page).owners
    }

    #[expect(clippy::indexing_slicing, reason = "ids of this pool's own pages")]
    pub fn block(&self, page: u32) -> &Block {
        &self.blocks[page as usize]
    }

    #[expect(clippy::indexing_slicing, reason = "ids of this pool's own pages")]
    pub fn block_mut(&mut self, page: u32) -> &mut Block {
        &mut self.blocks[page as usize]
    }

    /// Whether a page holds a published block.
    pub fn is_published(&self, page: u32) -> bool {
        self.block(page).key.is_some()
    }

    /// Gives the first idle page an owner. A cached one comes with its block, which the cache must forget.
    pub fn take(&mut self) -> Option<u32> {
        let page = self.first;
        if page == NONE {
            return None;
        }
        self.unlink(page);
        *self.idle_mut(page) -= 1;
        self.page_mut(page).owners = 1;
        Some(page)
    }

    /// One more owner for a page that is held or cached.
    pub fn share(&mut self, page: u32) {
        if self.owners(page) == 0 {
            self.unlink(page);
            self.cached -= 1;
        }
        self.page_mut(page).owners += 1;
    }

    /// One owner less. A page without any is cached, as the most recently used, if it holds a block; else it is free.
    pub fn give_back(&mut self, page: u32) {
        let given = self.page_mut(page);
        given.owners -= 1;
        if given.owners > 0 {
            return;
        }
        if self.is_published(page) {
            self.link(self.last, page, NONE);
        } else {
            self.link(NONE, page, self.first);
        }
        *self.idle_mut(page) += 1;
    }

    /// Walks the whole list.
    pub fn check(&self) -> Result<(), BadList> {
        let (mut free, mut cached, mut previous, mut page) = (0, 0, NONE, self.first);
        while page != NONE {
            let Some(Page { owners: 0, previous: found, next }) = self.pages.get(page as usize).copied() else {
                return Err(BadList::Link { page });
            };
            // A ring would otherwise never end.
            if found != previous || free + cached == self.count() {
                return Err(BadList::Link { page });
            }
            match (self.is_published(page), cached) {
                (true, _) => cached += 1,
                (false, 0) => free += 1,
                (false, _) => return Err(BadList::Lengths { free, cached }),
            }
            (previous, page) = (page, next);
        }
        if previous != self.last {
            return Err(BadList::Link { page: previous });
        }
        if (free, cached) != (self.free, self.cached) {
            return Err(BadList::Lengths { free, cached });
        }
        Ok(())
    }

    /// How many idle pages there are of this one's kind.
    fn idle_mut(&mut self, page: u32) -> &mut u32 {
        if self.is_published(page) { &mut self.cached } else { &mut self.free }
    }

    fn link(&mut self, previous: u32, page: u32, next: u32) {
        let linked = self.page_mut(page);
        (linked.previous, linked.next) = (previous, next);
        *self.next_of(previous) = page;
        *self.previous_of(next) = page;
    }

    fn unlink(&mut self, page: u32) {
        let Page { previous, next, .. } = *self.page(page);
        *self.next_of(previous) = next;
        *self.previous_of(next) = previous;
    }

    fn next_of(&mut self, page: u32) -> &mut u32 {
        if page == NONE { &mut self.first } else { &mut self.page_mut(page).next }
    }

    fn previous_of(&mut self, page: u32) -> &mut u32 {
        if page == NONE { &mut self.last } else { &mut self.page_mut(page).previous }
    }

    #[expect(clippy::indexing_slicing, reason = "ids of this pool's own pages")]
    fn page(&self, page: u32) -> &Page {
        &self.pages[page as usize]
    }

    #[expect(clippy::indexing_slicing, reason = "ids of this pool's own pages")]
    fn page_mut(&mut self, page: u32) -> &mut Page {
        &mut self.pages[page as usize]
    }
}
