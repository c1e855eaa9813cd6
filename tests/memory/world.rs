//! A subject in use: histories, the memory that its pages stand for, and a look at everything after every step.

use std::collections::{BTreeMap, BTreeSet};

use paged_attention::{PageCopy, PoolConfig, PoolError};

use crate::history::History;
use crate::naive::Naive;
use crate::subject::{Id, Real, SeqView, Subject};

/// What was wrong, in words.
pub type Checked<T> = Result<T, String>;

/// Leaves a function that returns [`Checked`] unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}
pub(crate) use ensure;

pub struct World {
    pub subject: Box<dyn Subject>,
    /// Goes along, and must look the same.
    oracle: Option<Naive>,
    config: PoolConfig,
    /// What each slot of each page holds.
    device: Vec<u64>,
    host: Vec<u64>,
    pub histories: BTreeMap<Id, History>,
}

impl World {
    pub fn new(config: &PoolConfig, subject: Box<dyn Subject>) -> Self {
        let slots = |pages: u32| vec![0; (pages * config.page_size.get()) as usize];
        Self {
            subject,
            oracle: None,
            config: *config,
            device: slots(config.page_count),
            host: slots(config.host_slot_count),
            histories: BTreeMap::new(),
        }
    }

    /// The library's pool beside the naive model.
    pub fn real(config: &PoolConfig) -> Self {
        Self::new(config, Box::new(Real::new(config))).beside_model()
    }

    pub fn beside_model(mut self) -> Self {
        self.oracle = Some(Naive::new(&self.config, None));
        self
    }

    /// State of the naive model that goes along, up to the names of pages and slots, and the histories.
    pub fn state(&self) -> Vec<u32> {
        let mut state = self.oracle.as_ref().map(Naive::state).unwrap_or_default();
        for history in self.histories.values() {
            state.push(u32::MAX);
            state.extend(history.tokens.iter().map(|token| token.token));
        }
        state
    }

    pub fn seq(&self, id: Id) -> SeqView {
        self.subject.view().seqs.remove(&id).unwrap_or_default()
    }

    /// Starts a sequence with a prompt, and says how many tokens of it were found in the cache.
    pub fn start(&mut self, id: Id, history: History) -> Checked<u32> {
        self.subject.lookup(id, &history);
        if let Some(oracle) = &mut self.oracle {
            oracle.lookup(id, &history);
        }
        let (hit, len) = (self.seq(id).len, history.len());
        self.histories.insert(id, history);
        ensure!(len == 0 || (hit as usize) < len, "a hit of {hit} leaves nothing of {len} tokens to compute");
        self.verify()?;
        Ok(hit)
    }

    /// Extends by `tokens` of the history, makes the copies, and writes what the device would append. Says how many copies
    /// there were.
    pub fn grow(&mut self, id: Id, tokens: u32) -> Checked<Result<usize, PoolError>> {
        let result = self.extend(id, tokens)?;
        if result.is_ok() {
            let seq = self.seq(id);
            for position in seq.len - tokens..seq.len {
                let slot = self.slot(&seq.pages, position - seq.first_token)?;
                self.device[slot] = self.histories[&id].print(position);
            }
        }
        self.verify()?;
        Ok(result)
    }

    /// A step that is given up before anything is appended.
    pub fn abandon(&mut self, id: Id, tokens: u32) -> Checked<()> {
        let before = self.seq(id);
        if self.extend(id, tokens)?.is_ok() {
            self.truncate_table(id, before.len)?.map_err(|error| error.to_string())?;
        }
        self.verify()
    }

    /// All of the prompt that is left, then published.
    pub fn prefill(&mut self, id: Id) -> Checked<Result<(), PoolError>> {
        let left = self.histories[&id].len() as u32 - self.seq(id).len;
        if let Err(error) = self.grow(id, left)? {
            return Ok(Err(error));
        }
        self.publish(id)?;
        Ok(Ok(()))
    }

    fn extend(&mut self, id: Id, tokens: u32) -> Checked<Result<usize, PoolError>> {
        let result = self.subject.extend(id, tokens);
        if let Some(oracle) = &mut self.oracle {
            let expected = oracle.extend(id, tokens);
            ensure!(result == expected, "extend: {result:?}, the model {expected:?}");
        }
        match result {
            Ok(copies) => self.copy(&copies).map(|()| Ok(copies.len())),
            Err(error) => Ok(Err(error)),
        }
    }

    pub fn fork(&mut self, id: Id, fork: Id) -> Checked<()> {
        self.subject.fork(id, fork);
        if let Some(oracle) = &mut self.oracle {
            oracle.fork(id, fork);
        }
        self.histories.insert(fork, self.histories[&id].clone());
        self.verify()
    }

    fn truncate_table(&mut self, id: Id, len: u32) -> Checked<Result<(), PoolError>> {
        let result = self.subject.truncate(id, len);
        if let Some(oracle) = &mut self.oracle {
            let expected = oracle.truncate(id, len);
            ensure!(result == expected, "truncate: {result:?}, the model {expected:?}");
        }
        Ok(result)
    }

    /// Rolls a sequence back, its history included.
    pub fn truncate(&mut self, id: Id, len: u32) -> Checked<Result<(), PoolError>> {
        let result = self.truncate_table(id, len)?;
        if result.is_ok()
            && let Some(history) = self.histories.get_mut(&id)
        {
            history.truncate(len as usize);
        }
        self.verify()?;
        Ok(result)
    }

    pub fn release_before(&mut self, id: Id, position: u32) -> Checked<Result<(), PoolError>> {
        let result = self.subject.release_before(id, position);
        if let Some(oracle) = &mut self.oracle {
            let expected = oracle.release_before(id, position);
            ensure!(result == expected, "release_before: {result:?}, the model {expected:?}");
        }
        self.verify()?;
        Ok(result)
    }

    pub fn publish(&mut self, id: Id) -> Checked<()> {
        let result = self.subject.publish(id, &self.histories[&id]);
        ensure!(result.is_ok(), "publish: {result:?}");
        if let Some(oracle) = &mut self.oracle {
            oracle.publish(id, &self.histories[&id]).map_err(|error| error.to_string())?;
        }
        self.verify()
    }

    pub fn release(&mut self, id: Id) -> Checked<()> {
        self.subject.release(id);
        if let Some(oracle) = &mut self.oracle {
            oracle.release(id);
        }
        self.histories.remove(&id);
        self.verify()
    }

    pub fn swap_out(&mut self, id: Id) -> Checked<Result<(), PoolError>> {
        self.swap(id, |subject| subject.swap_out(id))
    }

    pub fn swap_in(&mut self, id: Id) -> Checked<Result<(), PoolError>> {
        self.swap(id, |subject| subject.swap_in(id))
    }

    fn swap(
        &mut self,
        id: Id,
        act: impl Fn(&mut dyn Subject) -> Result<Vec<PageCopy>, PoolError>,
    ) -> Checked<Result<(), PoolError>> {
        let result = act(&mut *self.subject);
        if let Some(oracle) = &mut self.oracle {
            let expected = act(oracle);
            ensure!(result == expected, "swap of {id}: {result:?}, the model {expected:?}");
        }
        let result = match result {
            Ok(copies) => Ok(self.copy(&copies)?),
            Err(error) => Err(error),
        };
        self.verify()?;
        Ok(result)
    }

    pub fn discard(&mut self, id: Id) -> Checked<()> {
        self.subject.discard(id);
        if let Some(oracle) = &mut self.oracle {
            oracle.discard(id);
        }
        self.histories.remove(&id);
        self.verify()
    }

    pub fn common_pages(&self, ids: &[Id]) -> Checked<usize> {
        let common = self.subject.common_pages(ids);
        if let Some(oracle) = &self.oracle {
            let expected = oracle.common_pages(ids);
            ensure!(common == expected, "{common} common pages of {ids:?}, the model {expected}");
        }
        Ok(common)
    }

    /// The copies of a run are made at once: all are read before any is written.
    fn copy(&mut self, copies: &[PageCopy]) -> Checked<()> {
        let page_size = self.config.page_size.get() as usize;
        let mut made = 0;
        for run in PageCopy::runs(copies) {
            let read: Vec<Vec<u64>> = run
                .iter()
                .map(|copy| match *copy {
                    PageCopy::OnDevice { from: page, .. } | PageCopy::ToHost { page, .. } => {
                        self.device[page as usize * page_size..][..page_size].to_vec()
                    }
                    PageCopy::ToDevice { slot, .. } => self.host[slot as usize * page_size..][..page_size].to_vec(),
                })
                .collect();
            for (copy, read) in run.iter().zip(read) {
                match *copy {
                    PageCopy::OnDevice { to: page, .. } | PageCopy::ToDevice { page, .. } => {
                        self.device[page as usize * page_size..][..page_size].copy_from_slice(&read);
                    }
                    PageCopy::ToHost { slot, .. } => {
                        self.host[slot as usize * page_size..][..page_size].copy_from_slice(&read);
                    }
                }
            }
            made += run.len();
        }
        ensure!(made == copies.len(), "{made} of {} copies are in a run", copies.len());
        Ok(())
    }

    /// Where a position of a table lies, counted from the table's first token.
    fn slot(&self, pages: &[u32], position: u32) -> Checked<usize> {
        let page_size = self.config.page_size.get();
        let page = pages.get((position / page_size) as usize);
        page.map(|page| (page * page_size + position % page_size) as usize)
            .ok_or_else(|| format!("position {position} is past {} pages", pages.len()))
    }

    /// Everything that must hold at any time.
    pub fn verify(&self) -> Checked<()> {
        let view = self.subject.view();
        let page_size = self.config.page_size;
        let counts = view.counts;
        ensure!(
            counts.held + counts.cached + counts.free == self.config.page_count,
            "{counts:?} do not add up to {}",
            self.config.page_count
        );
        let mut held: BTreeSet<&u32> = BTreeSet::new();
        let mut slots = 0;
        for (id, seq) in &view.seqs {
            let tokens = seq.len.checked_sub(seq.first_token).ok_or_else(|| format!("sequence {id} ends early"))?;
            let (places, memory) = match &seq.slots {
                None => (&seq.pages, &self.device),
                Some(slots) => (slots, &self.host),
            };
            slots += seq.slots.as_ref().map_or(0, Vec::len);
            let needed = page_size.pages_for(tokens) as usize;
            ensure!(places.len() == needed, "sequence {id} of {tokens} tokens is in {places:?}, not {needed} pages");
            let distinct = places.iter().collect::<BTreeSet<_>>().len();
            ensure!(distinct == needed, "sequence {id} has a page twice: {places:?}");
            held.extend(&seq.pages);
            for position in seq.first_token..seq.len {
                let slot = self.slot(places, position - seq.first_token)?;
                ensure!(
                    memory[slot] == self.histories[id].print(position),
                    "position {position} of sequence {id} in {places:?} holds something else than its token"
                );
            }
        }
        ensure!(held.len() == counts.held as usize, "{} pages are in tables, {counts:?}", held.len());
        ensure!(
            slots + view.free_slots as usize == self.config.host_slot_count as usize,
            "{slots} host slots are held, {} are free",
            view.free_slots
        );
        self.subject.check()?;
        if let Some(oracle) = &self.oracle {
            let expected = oracle.view();
            ensure!(view == expected, "{view:?}, the model {expected:?}");
        }
        Ok(())
    }
}
