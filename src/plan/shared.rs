//! Prefixes that sequences of a batch share: declared by the caller, or found by their pages.

use std::cmp::Reverse;
use std::ops::Range;

use thiserror::Error;

use crate::batch::Batch;
use crate::geometry::PageSize;

/// The first tokens of neighbouring sequences of a batch, which lie in the same pages.
///
/// Prefixes may nest, to any depth: each lies behind those before it in its list, or inside one of them with more tokens,
/// and the outer one comes first. What the inner one adds is read once for the sequences inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedPrefix {
    /// The sequences, by their place in the batch; at least one.
    pub seqs: Range<usize>,
    /// Tokens from position 0 on; need not fill whole pages.
    pub tokens: u32,
}

/// Shared prefixes that a batch does not have. The messages count prefixes by their place in the list.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SharedPrefixError {
    /// A prefix of no sequences, or of some that the batch has not.
    #[error("shared prefix {prefix} is of sequences {} to {}, end excluded; the batch has {seqs}", found.start, found.end)]
    Seqs {
        /// The prefix.
        prefix: usize,
        /// Its sequences.
        found: Range<usize>,
        /// Sequences of the batch.
        seqs: usize,
    },
    /// A prefix that neither lies behind the prefixes before it nor, with more tokens, inside one of them.
    #[error(
        "shared prefix {prefix} is of {tokens} tokens and of sequences {} to {}, end excluded; from sequence {behind} on, \
         or inside the prefix before it with more than its {more_than} tokens, is needed",
        found.start, found.end
    )]
    Nesting {
        /// The prefix.
        prefix: usize,
        /// Its sequences.
        found: Range<usize>,
        /// Its tokens.
        tokens: u32,
        /// Where the prefix ends that comes before it and does not lie before its sequences; 0 where there is none.
        behind: usize,
        /// Tokens of that prefix.
        more_than: u32,
    },
    /// A sequence is shorter than its prefix.
    #[error("shared prefix {prefix} is of {found} tokens; sequence {seq} has {kv_len}")]
    Tokens {
        /// The prefix.
        prefix: usize,
        /// The sequence.
        seq: usize,
        /// Tokens of the prefix.
        found: u32,
        /// Tokens of the sequence.
        kv_len: u32,
    },
    /// A sequence has its prefix in another page than the first of those that share it.
    #[error(
        "shared prefix {prefix}: entry {entry} of the page table of sequence {seq} is {found}; {needed}, as in sequence \
         {first}, is needed"
    )]
    Pages {
        /// The prefix.
        prefix: usize,
        /// The sequence.
        seq: usize,
        /// The entry, counted from the sequence's first.
        entry: u32,
        /// The page there.
        found: u32,
        /// The page of the first sequence.
        needed: u32,
        /// The first sequence of the prefix.
        first: usize,
    },
}

/// A prefix without what the one around it has already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Level {
    pub seqs: Range<usize>,
    pub keys: Range<u32>,
    /// The level around it.
    outer: Option<usize>,
}

/// Checked prefixes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Levels {
    /// Outer ones before inner ones.
    pub levels: Vec<Level>,
    /// The innermost level of each sequence.
    innermost: Vec<Option<usize>>,
}

impl Levels {
    /// Checks that `batch`, which has passed its own checks, shares `prefixes`.
    pub fn new(batch: &Batch<'_>, page_size: PageSize, prefixes: &[SharedPrefix]) -> Result<Self, SharedPrefixError> {
        let mut levels: Vec<Level> = Vec::with_capacity(prefixes.len());
        let mut innermost = vec![None; batch.seqs()];
        // Levels around the last one, and itself.
        let mut open: Vec<usize> = Vec::new();
        for (prefix, SharedPrefix { seqs, tokens }) in prefixes.iter().enumerate() {
            let (found, tokens) = (seqs.clone(), *tokens);
            if seqs.is_empty() || seqs.end > batch.seqs() {
                return Err(SharedPrefixError::Seqs { prefix, found, seqs: batch.seqs() });
            }
            while open.pop_if(|index| levels.get(*index).is_none_or(|level| level.seqs.end <= seqs.start)).is_some() {}
            let around = open.last().and_then(|index| levels.get(*index));
            let inside = around.is_none_or(|level| level.seqs.start <= seqs.start && seqs.end <= level.seqs.end);
            let more_than = around.map_or(0, |level| level.keys.end);
            if !inside || tokens <= more_than {
                let behind = around.map_or(0, |level| level.seqs.end);
                return Err(SharedPrefixError::Nesting { prefix, found, tokens, behind, more_than });
            }
            let level = Level { seqs: seqs.clone(), keys: more_than..tokens, outer: open.last().copied() };
            check_members(batch, page_size, prefix, &level)?;
            for innermost in innermost.iter_mut().take(seqs.end).skip(seqs.start) {
                *innermost = Some(prefix);
            }
            open.push(prefix);
            levels.push(level);
        }
        Ok(Self { levels, innermost })
    }

    /// The levels around a sequence, from the outside in.
    pub fn around(&self, seq: usize) -> Vec<usize> {
        let mut chain = Vec::new();
        let mut next = self.innermost.get(seq).copied().flatten();
        while let Some(level) = next {
            chain.push(level);
            next = self.levels.get(level).and_then(|level| level.outer);
        }
        chain.reverse();
        chain
    }

    /// The sequences that share prefixes with sequence `seq`, the first of them, to whatever depth; or it alone.
    pub fn unit(&self, seq: usize) -> Range<usize> {
        let outermost = self.around(seq).into_iter().next();
        let end = outermost.and_then(|level| self.levels.get(level)).map_or(seq + 1, |level| level.seqs.end);
        seq..end.max(seq + 1)
    }

    /// The first key of a sequence that lies in none of its prefixes.
    pub fn own_begin(&self, seq: usize) -> u32 {
        let innermost = self.innermost.get(seq).copied().flatten();
        innermost.and_then(|level| self.levels.get(level)).map_or(0, |level| level.keys.end)
    }
}

/// Checks that the sequences of a level have its tokens, and have them in the same pages.
fn check_members(
    batch: &Batch<'_>,
    page_size: PageSize,
    prefix: usize,
    level: &Level,
) -> Result<(), SharedPrefixError> {
    let (first, keys) = (level.seqs.start, &level.keys);
    let entries = keys.start / page_size.get()..page_size.pages_for(keys.end);
    let pages = |seq| table(batch, seq).get(entries.start as usize..entries.end as usize).unwrap_or_default();
    for seq in level.seqs.clone() {
        let kv_len = batch.kv_len.get(seq).copied().unwrap_or(0);
        if kv_len < keys.end {
            return Err(SharedPrefixError::Tokens { prefix, seq, found: keys.end, kv_len });
        }
        let differing = entries.clone().zip(pages(seq).iter().zip(pages(first))).find(|(_, (a, b))| a != b);
        if let Some((entry, (found, needed))) = differing {
            return Err(SharedPrefixError::Pages { prefix, seq, entry, found: *found, needed: *needed, first });
        }
    }
    Ok(())
}

/// The page ids of a sequence; none where it does not exist.
fn table<'a>(batch: &Batch<'a>, seq: usize) -> &'a [u32] {
    match (batch.page_indptr.get(seq), batch.page_indptr.get(seq + 1)) {
        (Some(begin), Some(end)) => batch.page_ids.get(*begin as usize..*end as usize).unwrap_or_default(),
        _ => &[],
    }
}

impl Batch<'_> {
    /// The prefixes that neighbouring sequences share, judged by their page ids alone, as [`SharedPrefix`] wants them: of two
    /// or more sequences, and each of at least `tokens_min` tokens more than the one around it.
    ///
    /// Only neighbours are compared: put sequences that share side by side.
    pub fn shared_prefixes(&self, page_size: PageSize, tokens_min: u32) -> Vec<SharedPrefix> {
        // Tokens that a sequence has in common with the next.
        let common = |seq: usize| {
            let equal = table(self, seq).iter().zip(table(self, seq + 1)).take_while(|(a, b)| a == b).count();
            let lengths = [seq, seq + 1].map(|seq| self.kv_len.get(seq).copied().unwrap_or(0));
            let tokens = equal as u64 * u64::from(page_size.get());
            lengths.into_iter().fold(tokens, |tokens, kv_len| tokens.min(kv_len.into())) as u32
        };
        let mut all: Vec<SharedPrefix> = Vec::new();
        // Prefixes that go on: their first sequence, and their tokens, which rise.
        let mut open: Vec<(usize, u32)> = Vec::new();
        for seq in 0..self.seqs() {
            let tokens = common(seq);
            let mut start = seq;
            while let Some((first, longer)) = open.pop_if(|(_, longer)| *longer > tokens) {
                all.push(SharedPrefix { seqs: first..seq + 1, tokens: longer });
                start = first;
            }
            if open.last().map_or(0, |(_, shorter)| *shorter) < tokens {
                open.push((start, tokens));
            }
        }
        all.sort_by_key(|prefix| (prefix.seqs.start, Reverse(prefix.seqs.end)));
        let mut around: Vec<SharedPrefix> = Vec::new();
        all.retain(|prefix| {
            while around.pop_if(|outer| outer.seqs.end <= prefix.seqs.start).is_some() {}
            let kept = around.last().map_or(0, |outer| outer.tokens).saturating_add(tokens_min.max(1)) <= prefix.tokens;
            if kept {
                around.push(prefix.clone());
            }
            kept
        });
        all
    }
}
