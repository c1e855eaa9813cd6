//! Which page holds which published block.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use super::chain::BlockKey;
use super::pages::{Block, NONE, Pages};
use crate::geometry::PageSize;

/// What became of lookups, counted in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixStats {
    /// Lookups.
    pub lookups: u64,
    /// Blocks that lookups found.
    pub hits: u64,
    /// Full blocks that lookups asked for and did not find.
    pub misses: u64,
    /// Blocks that became findable.
    pub published: u64,
    /// Blocks that a sequence computed while another published the same: their pages were given back.
    pub duplicates: u64,
    /// Published blocks whose page was taken for something else.
    pub evictions: u64,
    /// Published blocks whose only owner went on to write into their page.
    pub withdrawn: u64,
    /// Blocks with the key of a published one and other tokens. Not a hit; anything but 0 means that the hash is broken.
    pub collisions: u64,
}

/// A hash table of the pages that hold published blocks, linked through [`Pages`]. It never grows, so no operation has to move
/// all entries, as a general-purpose map does now and then. Page ids come from the pool that owns this, so they are in range.
#[derive(Debug)]
pub(super) struct PrefixCache {
    /// The tokens of each page's published block, to be compared on a hit.
    tokens: Vec<u32>,
    page_size: PageSize,
    /// First page of each bucket; a power of two of them, and two at least for each page.
    buckets: Vec<u32>,
    /// Keys can be made to fall into one bucket by whoever can compute the bucket. Only speed depends on it.
    secret: RandomState,
    pub stats: PrefixStats,
}

/// Bytes for which there is no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooLarge(pub u64);

impl PrefixCache {
    pub fn new(page_size: PageSize, page_count: u32) -> Result<Self, TooLarge> {
        let tokens = u64::from(page_count) * u64::from(page_size.get());
        Ok(Self {
            tokens: filled(tokens, 0)?,
            page_size,
            buckets: filled((2 * u64::from(page_count.max(1))).next_power_of_two(), NONE)?,
            secret: RandomState::new(),
            stats: PrefixStats::default(),
        })
    }

    /// Forgets everything, as the pages must, too.
    pub fn reset(&mut self) {
        self.buckets.fill(NONE);
        self.stats = PrefixStats::default();
    }

    pub fn bytes(&self) -> u64 {
        4 * (self.tokens.len() + self.buckets.len()) as u64
    }

    /// The page that holds a block. One with other tokens is none.
    pub fn find(&mut self, pages: &Pages, key: BlockKey, tokens: &[u32]) -> Option<u32> {
        let mut page = self.bucket(key);
        while page != NONE {
            let block = pages.block(page);
            if block.key == Some(key) {
                if self.tokens_of(page) == tokens {
                    return Some(page);
                }
                self.stats.collisions += 1;
                return None;
            }
            page = block.next;
        }
        None
    }

    /// Publishes a block; its page must hold none, and no page may hold the key.
    pub fn insert(&mut self, pages: &mut Pages, page: u32, key: BlockKey, tokens: &[u32]) {
        self.tokens_of_mut(page).copy_from_slice(tokens);
        let next = std::mem::replace(self.bucket_mut(key), page);
        if next != NONE {
            pages.block_mut(next).previous = page;
        }
        *pages.block_mut(page) = Block { key: Some(key), previous: NONE, next };
        self.stats.published += 1;
    }

    /// Takes the block off a page, and says whether there was one.
    pub fn remove(&mut self, pages: &mut Pages, page: u32) -> bool {
        let Block { key: Some(key), previous, next } = *pages.block(page) else {
            return false;
        };
        // Nothing but the page itself has to be read: in a large pool a read waits for memory, a write does not.
        if previous == NONE {
            *self.bucket_mut(key) = next;
        } else {
            pages.block_mut(previous).next = next;
        }
        if next != NONE {
            pages.block_mut(next).previous = previous;
        }
        *pages.block_mut(page) = Block::NONE;
        true
    }

    /// Pages of all buckets, and whether each is in the bucket of its key and linked both ways: each that holds a block must
    /// come once.
    pub fn walk<'a>(&'a self, pages: &'a Pages) -> impl Iterator<Item = (u32, bool)> + 'a {
        self.buckets.iter().enumerate().flat_map(move |(bucket, first)| {
            let step =
                move |previous: u32, page: u32| (page < pages.count()).then(|| (previous, page, pages.block(page)));
            let chain = std::iter::successors(step(NONE, *first), move |(_, page, block)| step(*page, block.next));
            // A ring would otherwise never end.
            chain.take(pages.count() as usize).map(move |(previous, page, block)| {
                let in_its_bucket = block.key.is_some_and(|key| self.bucket_of(key) == bucket);
                (page, in_its_bucket && block.previous == previous)
            })
        })
    }

    fn bucket_of(&self, key: BlockKey) -> usize {
        self.secret.hash_one(key.word()) as usize & (self.buckets.len() - 1)
    }

    #[expect(clippy::indexing_slicing, reason = "the number of buckets is a power of two")]
    fn bucket(&self, key: BlockKey) -> u32 {
        self.buckets[self.bucket_of(key)]
    }

    #[expect(clippy::indexing_slicing, reason = "the number of buckets is a power of two")]
    fn bucket_mut(&mut self, key: BlockKey) -> &mut u32 {
        let bucket = self.bucket_of(key);
        &mut self.buckets[bucket]
    }

    #[expect(clippy::indexing_slicing, reason = "ids of the pool's own pages")]
    fn tokens_of(&self, page: u32) -> &[u32] {
        let block_len = self.page_size.get() as usize;
        &self.tokens[page as usize * block_len..][..block_len]
    }

    #[expect(clippy::indexing_slicing, reason = "ids of the pool's own pages")]
    fn tokens_of_mut(&mut self, page: u32) -> &mut [u32] {
        let block_len = self.page_size.get() as usize;
        &mut self.tokens[page as usize * block_len..][..block_len]
    }
}

/// `vec![value; count]`, or how many bytes there is no memory for.
fn filled<T: Copy>(count: u64, value: T) -> Result<Vec<T>, TooLarge> {
    let too_large = || TooLarge(count.saturating_mul(size_of::<T>() as u64));
    let len = usize::try_from(count).map_err(|_| too_large())?;
    let mut items = Vec::new();
    items.try_reserve_exact(len).map_err(|_| too_large())?;
    items.resize(len, value);
    Ok(items)
}
