//! Whether a plan leads its kernels anywhere outside of what it was made for. Counted anew, word by word as the kernels read
//! them, for tests with plans of any origin.

use std::ops::Range;

use super::{ITEM_WORDS, Plan, RECORD_WORDS, state_bytes};

/// A record as the kernels read it, and where in the plan its mask and bias lie.
struct Record {
    q: Range<u64>,
    kv_len: u64,
    page_begin: u64,
    /// Wraps.
    partial_begin: u32,
    splits: u64,
    first_split: u64,
    split_keys: u64,
    rows_end: u64,
    state_rows: u64,
    mask_begin: u64,
    bias_begin: u64,
}

/// Fails with a message unless a condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(format!($($message)*));
        }
    };
}

impl Plan {
    /// The first thing that is out of range: a row, a key, a page, a state, a word of a mask, an element of a bias, or a part of
    /// the plan itself.
    #[doc(hidden)]
    pub fn out_of_range(&self) -> Option<String> {
        self.check_ranges().err()
    }

    fn check_ranges(&self) -> Result<(), String> {
        let params = &self.params;
        let item_words = if self.masked() { ITEM_WORDS + 2 } else { ITEM_WORDS } as u64;
        // Each part ends where the next begins.
        let ends = [params.decode_items, params.merge_items, params.masks];
        let lists = [
            ("prefill", params.prefill_items, params.prefill_groups),
            ("decode", params.decode_items, params.decode_groups),
            ("merge", params.merge_items, params.merge_groups),
        ];
        let owners = if self.extras.shared_prefixes { u64::from(self.total_q) } else { 0 };
        ensure!(u64::from(params.owners) + owners == u64::from(params.prefill_items), "owners of rows");
        for ((kernel, begin, groups), end) in lists.into_iter().zip(ends) {
            let (kv_heads, words) = (params.kv_heads.max(1), u64::from(end.saturating_sub(begin)));
            ensure!(
                begin <= end && groups.is_multiple_of(kv_heads),
                "{kernel}: words {begin} to {end}, {groups} groups"
            );
            let items = u64::from(groups / kv_heads);
            ensure!(items * item_words == words, "{kernel}: {items} items in {words} words");
        }
        let [masks, runs, pages] = [params.masks, params.runs, params.page_ids].map(u64::from);
        ensure!(masks <= runs && runs <= pages && pages <= self.words.len() as u64, "masks, runs and page ids");
        for ((kernel, begin, groups), _) in lists.into_iter().zip(ends) {
            for item in 0..u64::from(groups / params.kv_heads.max(1)) {
                let place = u64::from(begin) + item * item_words;
                let outcome = if kernel == "merge" {
                    self.check_merge(place)
                } else {
                    self.check_item(kernel == "decode", place)
                };
                outcome.map_err(|why| format!("{kernel} item {item}: {why}"))?;
            }
        }
        Ok(())
    }

    fn masked(&self) -> bool {
        self.extras.mask
    }

    fn word(&self, place: u64) -> Result<u64, String> {
        let word = usize::try_from(place).ok().and_then(|place| self.words.get(place));
        word.map(|word| u64::from(*word)).ok_or_else(|| format!("word {place} of {}", self.words.len()))
    }

    fn record(&self, index: u64) -> Result<Record, String> {
        let first = index * RECORD_WORDS as u64;
        ensure!(first + RECORD_WORDS as u64 <= self.params.owners.into(), "record {index}");
        let word = |at: u64| self.word(first + at);
        let record = Record {
            q: word(0)?..word(0)? + word(1)?,
            kv_len: word(2)?,
            page_begin: word(3)?,
            partial_begin: word(4)? as u32,
            splits: word(5)?,
            first_split: word(6)?,
            split_keys: word(7)?,
            rows_end: word(8)?,
            state_rows: word(9)?,
            mask_begin: word(10)?,
            bias_begin: word(11)?,
        };
        ensure!(record.q.end <= self.total_q.into(), "rows {:?} of {}", record.q, self.total_q);
        let rows = self.rows(&record);
        ensure!(
            record.state_rows <= record.rows_end && record.rows_end <= rows,
            "rows to {} of {rows}",
            record.rows_end
        );
        Ok(record)
    }

    /// Tile rows of a record.
    fn rows(&self, record: &Record) -> u64 {
        (record.q.end - record.q.start) * u64::from(self.groups.layout().geometry().group())
    }

    /// The last partial state that a row of a record has in `split`, counted from the first.
    fn check_state(&self, record: &Record, split: u64) -> Result<(), String> {
        let kv_heads = u64::from(self.params.kv_heads);
        let first_row = (record.rows_end - record.state_rows) as u32;
        let begin = u64::from(record.partial_begin.wrapping_add(first_row));
        let end = begin + (split + 1) * kv_heads * record.state_rows;
        let states = self.workspace_bytes / state_bytes(&self.tiles);
        ensure!(split < record.splits && end <= states, "split {split} of {}, state {end} of {states}", record.splits);
        Ok(())
    }

    fn check_item(&self, decodes: bool, place: u64) -> Result<(), String> {
        let record = self.record(self.word(place)?)?;
        let [first_row, begin, end] = [self.word(place + 1)?, self.word(place + 2)?, self.word(place + 3)?];
        ensure!(first_row < record.rows_end, "row {first_row} of {}", record.rows_end);
        ensure!(record.split_keys > 0 && begin <= end, "keys {begin} to {end}");
        ensure!(end <= record.kv_len || begin == end, "keys {begin} to {end} of {}", record.kv_len);
        let split = begin / record.split_keys;
        // A decode has the keys of one split in its workgroup's memory.
        ensure!(!decodes || end <= (split + 1) * record.split_keys, "keys {begin} to {end} of split {split}");
        ensure!(split >= record.first_split, "split {split}, the first is {}", record.first_split);
        if record.state_rows > 0 {
            let first = record.rows_end - record.state_rows;
            ensure!(first_row >= first, "row {first_row}, the first is {first}");
            self.check_state(&record, split - record.first_split)?;
        }
        let mut stretches: Vec<Range<u64>> = Vec::new();
        if self.masked() {
            let [first, count] = [self.word(place + 4)?, self.word(place + 5)?];
            let runs = u64::from(self.params.runs);
            ensure!(runs + 3 * (first + count) <= self.params.page_ids.into(), "runs {first} and {count} more");
            for run in first..first + count {
                let stretch = self.word(runs + 3 * run)?..self.word(runs + 3 * run + 1)?;
                ensure!(begin <= stretch.start && stretch.end <= end, "run {stretch:?} of keys {begin} to {end}");
                stretches.push(stretch);
            }
        } else {
            stretches.push(begin..end);
        }
        let page_size = u64::from(self.params.page_size.max(1));
        for keys in stretches.into_iter().filter(|keys| !keys.is_empty()) {
            for entry in keys.start / page_size..keys.end.div_ceil(page_size) {
                let page = self.word(u64::from(self.params.page_ids) + record.page_begin + entry)?;
                ensure!(page < self.params.page_count.into(), "entry {entry} is page {page}");
            }
        }
        self.check_scores(&record)
    }

    /// Masks and biases of a record's rows: those of their own sequences.
    fn check_scores(&self, record: &Record) -> Result<(), String> {
        let mut owners = record.q.clone();
        if !self.extras.shared_prefixes {
            owners.end = owners.end.min(owners.start + 1);
        }
        for row in owners {
            let found = if self.extras.shared_prefixes {
                Some(self.record(self.word(u64::from(self.params.owners) + row)?)?)
            } else {
                None
            };
            let own = found.as_ref().unwrap_or(record);
            ensure!(own.q.contains(&row), "row {row} belongs to rows {:?}", own.q);
            let q_len = own.q.end - own.q.start;
            let mask_end = own.mask_begin + q_len * own.kv_len.div_ceil(32);
            let mask_words = u64::from(self.params.runs - self.params.masks);
            ensure!(!self.masked() || mask_end <= mask_words, "mask word {mask_end} of {mask_words}");
            let bias_end = own.bias_begin + q_len * own.kv_len;
            ensure!(bias_end <= self.score_pairs, "bias {bias_end} of {}", self.score_pairs);
        }
        Ok(())
    }

    fn check_merge(&self, place: u64) -> Result<(), String> {
        let own = self.word(place)?;
        let record = self.record(own)?;
        let [first_row, begin, end] = [self.word(place + 1)?, self.word(place + 2)?, self.word(place + 3)?];
        ensure!(first_row < record.rows_end, "row {first_row} of {}", record.rows_end);
        let mut sources = vec![own];
        if self.names_sources() {
            ensure!(begin < end && end <= self.params.owners.into(), "sources {begin} to {end}");
            sources = (begin..end).map(|at| self.word(at)).collect::<Result<_, _>>()?;
        }
        for index in sources {
            let source = self.record(index)?;
            let inside = source.q.start <= record.q.start && record.q.end <= source.q.end;
            ensure!(inside, "rows {:?} of source {index}, which has {:?}", record.q, source.q);
            ensure!(source.state_rows > 0, "source {index} has no states");
            ensure!(source.splits > 0, "source {index} has no splits");
            self.check_state(&source, source.splits - 1)?;
        }
        Ok(())
    }
}
