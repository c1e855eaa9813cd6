//! Ragged batches: query rows and page tables in CSR form, checked before anything is planned.

use thiserror::Error;

use crate::geometry::PageSize;
use crate::kv::BlockTable;

/// An index tensor that cannot be used. The messages name the tensor as the case file does.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BatchError {
    /// An index tensor has the wrong number of entries.
    #[error("`{tensor}` has {found} entries; {needed} are needed ({why})")]
    Length {
        /// Name of the tensor.
        tensor: &'static str,
        /// Entries found.
        found: usize,
        /// Entries needed.
        needed: usize,
        /// What asks for that number.
        why: &'static str,
    },
    /// An indptr does not start at 0.
    #[error("`{tensor}` starts at {found}; 0 is needed")]
    Start {
        /// Name of the tensor.
        tensor: &'static str,
        /// The first entry.
        found: u32,
    },
    /// An indptr decreases.
    #[error("`{tensor}`[{index}] is {found}, less than the entry before it, {previous}")]
    Order {
        /// Name of the tensor.
        tensor: &'static str,
        /// Position of the offending entry.
        index: usize,
        /// The entry.
        found: u32,
        /// The entry before.
        previous: u32,
    },
    /// An indptr does not end at the number of rows it divides.
    #[error("`{tensor}` ends at {found}; the rows it divides are {needed}")]
    End {
        /// Name of the tensor.
        tensor: &'static str,
        /// The last entry.
        found: u32,
        /// Rows there are.
        needed: usize,
    },
    /// A page id names no page of the pool.
    #[error("`page_ids`[{index}] is {found}; the pool has {page_count} pages")]
    PageId {
        /// Position of the offending entry.
        index: usize,
        /// The id.
        found: u32,
        /// Pages in the pool.
        page_count: u32,
    },
    /// More rows are asked for than a table has tokens.
    #[error("{found} query rows are asked for of a table with {tokens} tokens; `BlockPool::extend` comes first")]
    RowsOfTable {
        /// Query rows.
        found: u32,
        /// Tokens of the table.
        tokens: u32,
    },
    /// More rows or page-table entries than an indptr can count.
    #[error("`{tensor}` would end at {needed}; at most 2^32 - 1 can be counted")]
    TooMany {
        /// Name of the tensor.
        tensor: &'static str,
        /// What its last entry would have to be.
        needed: u64,
    },
    /// A sequence is longer than its pages.
    #[error("`kv_len`[{seq}] is {found}; its {pages} pages of {page_size} tokens hold {capacity}")]
    PastPages {
        /// The sequence.
        seq: usize,
        /// Its length in tokens.
        found: u32,
        /// Pages in its table.
        pages: u32,
        /// Tokens per page.
        page_size: u32,
        /// Tokens that the pages hold.
        capacity: u64,
    },
}

/// Checks that `indptr` starts at 0, never decreases and ends at `rows`.
pub(crate) fn check_indptr(tensor: &'static str, indptr: &[u32], rows: usize) -> Result<(), BatchError> {
    let (Some(first), Some(last)) = (indptr.first(), indptr.last()) else {
        return Err(BatchError::Length { tensor, found: 0, needed: 1, why: "one more than there are sequences" });
    };
    if *first != 0 {
        return Err(BatchError::Start { tensor, found: *first });
    }
    for (index, (previous, found)) in indptr.iter().zip(indptr.iter().skip(1)).enumerate() {
        if found < previous {
            return Err(BatchError::Order { tensor, index: index + 1, found: *found, previous: *previous });
        }
    }
    if *last as usize != rows {
        return Err(BatchError::End { tensor, found: *last, needed: rows });
    }
    Ok(())
}

/// The entry of a page table in the place of a page that no row sees any more: one that fell out of the sliding window.
pub const NO_PAGE: u32 = u32::MAX;

/// Which query rows and which pages belong to which sequence.
///
/// | field | shape | meaning |
/// | --- | --- | --- |
/// | `q_indptr` | `[seqs + 1]` | sequence `i` owns query rows `q_indptr[i] .. q_indptr[i + 1]` |
/// | `page_indptr` | `[seqs + 1]` | sequence `i` owns entries `page_indptr[i] .. page_indptr[i + 1]` of `page_ids` |
/// | `page_ids` | `[page_indptr[seqs]]` | its pages, in order of position |
/// | `kv_len` | `[seqs]` | its length in tokens, the new ones included |
///
/// Sequences may share pages, and may have more pages than they need. Sequences without query rows or without
/// keys are legal, and so is [`NO_PAGE`] for pages whose keys no row sees. Query row `i` of a sequence sits at position `kv_len - q_len + i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch<'a> {
    /// First query row of each sequence, and the number of all.
    pub q_indptr: &'a [u32],
    /// First page-table entry of each sequence, and the number of all.
    pub page_indptr: &'a [u32],
    /// Page ids of all sequences.
    pub page_ids: &'a [u32],
    /// Tokens of each sequence.
    pub kv_len: &'a [u32],
}

impl Batch<'_> {
    /// Number of sequences.
    pub fn seqs(&self) -> usize {
        self.kv_len.len()
    }

    /// Number of query rows.
    pub fn total_q(&self) -> u32 {
        self.q_indptr.last().copied().unwrap_or(0)
    }

    /// Checks everything that the kernels rely on, for a pool of `page_count` pages.
    ///
    /// # Errors
    /// [`BatchError`], with the numbers found and needed.
    pub fn validate(&self, page_size: PageSize, page_count: u32) -> Result<(), BatchError> {
        let seqs = self.seqs();
        for (tensor, indptr, rows) in [
            ("q_indptr", self.q_indptr, self.total_q() as usize),
            ("page_indptr", self.page_indptr, self.page_ids.len()),
        ] {
            if indptr.len() != seqs + 1 {
                return Err(BatchError::Length {
                    tensor,
                    found: indptr.len(),
                    needed: seqs + 1,
                    why: "one more than there are sequences in `kv_len`",
                });
            }
            check_indptr(tensor, indptr, rows)?;
        }
        for (index, found) in self.page_ids.iter().copied().enumerate() {
            if found >= page_count && found != NO_PAGE {
                return Err(BatchError::PageId { index, found, page_count });
            }
        }
        for (seq, (found, (start, end))) in
            self.kv_len.iter().zip(self.page_indptr.iter().zip(self.page_indptr.iter().skip(1))).enumerate()
        {
            let pages = end - start;
            let capacity = u64::from(pages) * u64::from(page_size.get());
            if u64::from(*found) > capacity {
                return Err(BatchError::PastPages { seq, found: *found, pages, page_size: page_size.get(), capacity });
            }
        }
        Ok(())
    }
}

/// A step's [`Batch`], put together from block tables in memory that is kept from step to step.
///
/// ```
/// # use paged_attention::{BatchBuilder, BlockPool, PageSize, PoolConfig};
/// # let config = PoolConfig { page_size: PageSize::new(16)?, page_count: 8, host_slot_count: 0 };
/// # let mut pool = BlockPool::new(&config)?;
/// # let mut copies = Vec::new();
/// let mut table = pool.new_table()?;
/// pool.extend(&mut table, 20, &mut copies)?;
/// let mut step = BatchBuilder::default();
/// step.push(&table, 20)?;
/// assert_eq!(step.batch().page_indptr, [0, 2]);
/// assert_eq!(step.positions().last(), Some(&19));
/// // A batch of one sequence needs no builder: its table is the page table.
/// assert_eq!(step.batch().page_ids, table.pages());
/// # pool.release(table)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct BatchBuilder {
    q_indptr: Vec<u32>,
    page_indptr: Vec<u32>,
    page_ids: Vec<u32>,
    kv_len: Vec<u32>,
    positions: Vec<u32>,
}

impl Default for BatchBuilder {
    fn default() -> Self {
        let (page_ids, kv_len, positions) = (Vec::new(), Vec::new(), Vec::new());
        Self { q_indptr: vec![0], page_indptr: vec![0], page_ids, kv_len, positions }
    }
}

impl BatchBuilder {
    /// Starts the next step.
    pub fn clear(&mut self) {
        self.q_indptr.truncate(1);
        self.page_indptr.truncate(1);
        self.page_ids.clear();
        self.kv_len.clear();
        self.positions.clear();
    }

    /// Adds a sequence whose last `q_len` tokens are the step's query rows; `table` counts them. Positions that
    /// [`crate::BlockPool::release_before`] gave back are left out, so the sequence starts at its first page.
    ///
    /// # Errors
    /// [`BatchError::RowsOfTable`], [`BatchError::TooMany`]; nothing was added.
    pub fn push(&mut self, table: &BlockTable, q_len: u32) -> Result<(), BatchError> {
        let next = |tensor, indptr: &[u32], more: usize| {
            let needed = u64::from(indptr.last().copied().unwrap_or(0)) + more as u64;
            u32::try_from(needed).map_err(|_| BatchError::TooMany { tensor, needed })
        };
        if q_len > table.len() {
            return Err(BatchError::RowsOfTable { found: q_len, tokens: table.len() });
        }
        let q_end = next("q_indptr", &self.q_indptr, q_len as usize)?;
        let page_end = next("page_indptr", &self.page_indptr, table.pages().len())?;
        self.q_indptr.push(q_end);
        self.page_indptr.push(page_end);
        self.page_ids.extend_from_slice(table.pages());
        self.kv_len.push(table.kv_len());
        self.positions.extend(table.len() - q_len..table.len());
        Ok(())
    }

    /// The step so far.
    pub fn batch(&self) -> Batch<'_> {
        let Self { q_indptr, page_indptr, page_ids, kv_len, .. } = self;
        Batch { q_indptr, page_indptr, page_ids, kv_len }
    }

    /// The position of every query row in its sequence, `[total_q]`, those counted that were given back: what a rotation of
    /// new keys needs ([`crate::Rotation::positions`]), and of queries.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }
}
