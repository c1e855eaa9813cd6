//! Which pages a sequence holds, and the copies of pages that follow from sharing and swapping them.

use std::collections::HashSet;

use crate::geometry::PageSize;

/// The pages of one sequence, in order of position.
///
/// Only a [`crate::BlockPool`] makes, changes and takes back tables. Dropping a table does not give its pages back:
/// [`crate::BlockPool::release`] does, on the way of an error too. There is no way to copy a table, so nothing can be released
/// twice:
///
/// ```compile_fail,E0382
/// # use paged_attention::{BlockPool, BlockTable};
/// fn twice(pool: &mut BlockPool, table: BlockTable) {
///     pool.release(table).unwrap();
///     pool.release(table).unwrap(); // use of moved value: `table`
/// }
/// ```
///
/// ```compile_fail,E0599
/// # use paged_attention::BlockTable;
/// fn second(table: &BlockTable) -> BlockTable {
///     table.clone() // no method named `clone`
/// }
/// ```
#[derive(Debug)]
#[must_use = "the pages of a table that is dropped stay held: release it"]
pub struct BlockTable {
    pub(super) pool: u64,
    pub(super) page_size: PageSize,
    pub(super) pages: Vec<u32>,
    pub(super) first_token: u32,
    pub(super) len: u32,
    /// Blocks from the sequence's start that lie in pages of the prefix cache.
    pub(super) published: u32,
}

impl BlockTable {
    /// Length of the sequence in tokens, those of released pages included.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the sequence has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Position of the first token in [`BlockTable::pages`]: 0 until [`crate::BlockPool::release_before`] moves it, always
    /// a multiple of the page size.
    pub fn first_token(&self) -> u32 {
        self.first_token
    }

    /// Ids of the pages held: entry `i` has the tokens from position `first_token + i * page_size` on. This is a sequence's
    /// part of [`crate::Batch::page_ids`], for a `kv_len` of [`BlockTable::kv_len`].
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Tokens in the pages held.
    pub fn kv_len(&self) -> u32 {
        self.len - self.first_token
    }

    /// Slots of the last page that hold no token yet.
    pub fn tail_slots(&self) -> u32 {
        let used = self.kv_len() % self.page_size.get();
        if used == 0 { 0 } else { self.page_size.get() - used }
    }

    pub(super) fn full_pages(&self) -> usize {
        (self.kv_len() / self.page_size.get()) as usize
    }

    pub(super) fn first_block(&self) -> u32 {
        self.first_token / self.page_size.get()
    }
}

/// A sequence whose pages are in host memory. Like a table, it cannot be copied.
#[derive(Debug)]
#[must_use = "the host slots of a swapped table that is dropped stay held: swap it in or discard it"]
pub struct SwappedTable {
    pub(super) pool: u64,
    pub(super) slots: Vec<u32>,
    pub(super) first_token: u32,
    pub(super) len: u32,
}

impl SwappedTable {
    /// Length of the sequence in tokens.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the sequence has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Position of the first token in the host slots.
    pub fn first_token(&self) -> u32 {
        self.first_token
    }

    /// Ids of the host slots held, one per page, in order of position.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }
}

/// One page to be copied, with all its layers, KV heads and slots.
///
/// The pool decides, the caller copies: in the order in which the pool put the copies into its list, and before anything
/// is appended. A later copy may overwrite what an earlier one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "the pool counts on this copy"]
pub enum PageCopy {
    /// Copy-on-write: from one page to another.
    OnDevice {
        /// The page to read.
        from: u32,
        /// The page to write.
        to: u32,
    },
    /// Swap out: from a page to a slot of host memory.
    ToHost {
        /// The page to read.
        page: u32,
        /// The slot to write.
        slot: u32,
    },
    /// Swap in: from a slot of host memory to a page.
    ToDevice {
        /// The slot to read.
        slot: u32,
        /// The page to write.
        page: u32,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    Page(u32),
    Slot(u32),
}

impl PageCopy {
    fn places(self) -> (Place, Place) {
        match self {
            Self::OnDevice { from, to } => (Place::Page(from), Place::Page(to)),
            Self::ToHost { page, slot } => (Place::Page(page), Place::Slot(slot)),
            Self::ToDevice { slot, page } => (Place::Slot(slot), Place::Page(page)),
        }
    }

    /// Cuts a list into runs, in order: the copies of a run touch no place that another of the run writes, so they may go
    /// in any order or at once.
    pub fn runs(copies: &[Self]) -> impl Iterator<Item = &[Self]> {
        let mut rest = copies;
        std::iter::from_fn(move || {
            let (mut read, mut written) = (HashSet::new(), HashSet::new());
            let fits = |copy: &&Self| {
                let (from, to) = copy.places();
                read.insert(from);
                !written.contains(&from) && !read.contains(&to) && written.insert(to)
            };
            let (run, next) = rest.split_at(rest.iter().take_while(fits).count().max(1).min(rest.len()));
            rest = next;
            (!run.is_empty()).then_some(run)
        })
    }
}
