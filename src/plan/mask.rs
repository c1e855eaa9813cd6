//! Masks of a plan: their bits, and which keys of a tile need them.

use std::ops::Range;

use super::PlanError;
use crate::batch::Batch;

/// Keys of a mask's word: the granularity at which tiles skip keys, or the test.
const WORD_KEYS: u32 = 32;

/// A mask as the kernels read it: 32 keys a word, every row beginning one, sequence after sequence.
pub(super) struct Mask {
    pub words: Vec<u32>,
    /// Of each packed query row, where its words begin.
    rows: Vec<usize>,
}

/// Keys of a tile that lie one after the other and are all to be tested against the mask, or all visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub begin: u32,
    pub end: u32,
    pub tested: bool,
}

impl Run {
    pub fn words(&self) -> [u32; 3] {
        [self.begin, self.end, self.tested.into()]
    }
}

impl Mask {
    /// `mask` has an entry for every query row and key of its sequence. `batch` has been validated.
    pub fn new(mask: &[bool], batch: &Batch<'_>) -> Result<Self, PlanError> {
        let rows = batch.q_indptr.iter().zip(batch.q_indptr.iter().skip(1)).map(|(begin, end)| end - begin);
        let lengths = rows.zip(batch.kv_len.iter().copied());
        let needed = lengths.clone().map(|(q_len, kv_len)| u128::from(q_len) * u128::from(kv_len)).sum::<u128>();
        if mask.len() as u128 != needed {
            return Err(PlanError::Mask { found: mask.len(), needed: u64::try_from(needed).unwrap_or(u64::MAX) });
        }
        let (mut words, mut row_begins, mut rest) = (Vec::new(), Vec::new(), mask);
        for (q_len, kv_len) in lengths {
            let (own, others) = rest.split_at(q_len as usize * kv_len as usize);
            rest = others;
            let row_words = kv_len.div_ceil(WORD_KEYS) as usize;
            row_begins.extend((0..q_len as usize).map(|row| words.len() + row * row_words));
            let rows = own.chunks(kv_len.max(1) as usize);
            words.extend(rows.flat_map(|row| row.chunks(WORD_KEYS as usize)).map(|keys| {
                keys.iter().enumerate().fold(0_u32, |word, (bit, visible)| word | (u32::from(*visible) << bit))
            }));
        }
        Ok(Self { words, rows: row_begins })
    }

    /// Adds to `runs` the keys among `keys` that any of some packed query rows may see, in order. The sequences of all these
    /// rows have the keys.
    pub fn runs(&self, rows: Range<u32>, keys: Range<u32>, runs: &mut Vec<Run>) {
        let rows = self.rows.get(rows.start as usize..rows.end as usize).unwrap_or_default();
        let first_run = runs.len();
        let mut begin = keys.start;
        while begin < keys.end {
            let word = begin / WORD_KEYS;
            let end = keys.end.min((word + 1) * WORD_KEYS);
            let (shift, count) = (begin % WORD_KEYS, end - begin);
            let all = (u32::MAX >> (WORD_KEYS - count)) << shift;
            let (mut any, mut every) = (0, u32::MAX);
            for row in rows {
                let bits = self.words.get(row + word as usize).copied().unwrap_or(0);
                any |= bits;
                every &= bits;
            }
            if any & all != 0 {
                let tested = every & all != all;
                match runs.get_mut(first_run..).and_then(|own| own.last_mut()) {
                    Some(run) if run.end == begin && run.tested == tested => run.end = end,
                    _ => runs.push(Run { begin, end, tested }),
                }
            }
            begin = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Every key that a token of the tile sees is in one run, in order; untested runs are seen by all of them, and every
        /// word of a run by some.
        #[test]
        fn runs_have_every_visible_key_once(
            rows in prop::collection::vec(prop::collection::vec(0_u8..8, 1..7), 1..6),
            kv_len in 1_u32..200,
            ends in (0_u32..200, 0_u32..200),
        ) {
            // Stretches of 32 keys that are hidden, visible or mixed.
            let sees = |token: usize, key: u32| {
                let row = &rows[token];
                match row[(key / 32) as usize % row.len()] {
                    0..=2 => false,
                    3..=5 => true,
                    kind => (key + u32::from(kind)).is_multiple_of(3),
                }
            };
            let tokens = rows.len();
            let mask: Vec<bool> = (0..tokens).flat_map(|token| (0..kv_len).map(move |key| (token, key)))
                .map(|(token, key)| sees(token, key)).collect();
            let batch = Batch {
                q_indptr: &[0, tokens as u32], page_indptr: &[0, 0], page_ids: &[], kv_len: &[kv_len],
            };
            let packed = Mask::new(&mask, &batch).unwrap();
            let keys = ends.0.min(kv_len)..ends.1.min(kv_len);
            let mut runs = vec![Run { begin: 0, end: keys.start, tested: false }];
            packed.runs(0..tokens as u32, keys.clone(), &mut runs);
            let runs = &runs[1..];
            prop_assert!(runs.iter().all(|run| run.begin < run.end));
            prop_assert!(runs.is_sorted_by(|a, b| a.end <= b.begin && (a.end < b.begin || a.tested != b.tested)));
            for key in 0..kv_len {
                let any = (0..tokens).any(|token| sees(token, key));
                let every = (0..tokens).all(|token| sees(token, key));
                let run = runs.iter().find(|run| (run.begin..run.end).contains(&key));
                prop_assert!(run.is_some() || !any || !keys.contains(&key), "key {key} is lost");
                prop_assert!(run.is_none_or(|run| keys.contains(&key) && (run.tested || every)), "key {key}");
            }
            for run in runs {
                prop_assert!((run.begin..run.end).any(|key| (0..tokens).any(|token| sees(token, key))));
            }
        }
    }
}
