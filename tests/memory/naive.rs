//! A pool as one would write it without a thought for speed: owners are counted by looking at all tables, blocks are found by
//! comparing whole histories, idle pages lie in two vectors. It can be given faults that allocators elsewhere have had.

use std::collections::BTreeMap;

use paged_attention::{PageCopy, PageCounts, PoolConfig, PoolError, PrefixStats};

use crate::history::{History, Name, Tok};
use crate::subject::{Id, SeqView, Subject, View};

/// What a block's key must not leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    Model,
    Version,
    Adapter,
    Positions,
    Heads,
    Dtype,
    Salt,
    Content,
    /// All blocks before it.
    Parent,
}

/// A fault, in the words of the report that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An evicted block stays in the lookup map.
    EvictedStaysFindable,
    /// A page that its owner writes anew is still taken for computed.
    WrittenStaysFindable,
    /// The hit of an earlier lookup is used again without a look at the cache.
    StaleHit,
    /// The same block twice in one free.
    FreedTwiceInOneRelease,
    /// A free does not look whether others hold the page.
    FreedWhileShared,
    /// A block that was hit stays on the list of evictable ones.
    HitStaysEvictable,
    /// Shared pages count as evictable, too.
    SharedCountsAsEvictable,
    KeyWithout(Field),
    /// Fields are put one after the other with nothing between them.
    UntaggedFields,
    /// A hash that can be met by other tokens, which are not compared.
    PredictableHash,
    /// The common prefix is what has more than one owner.
    CommonByOwners,
    /// Pages that left the window are freed and stay in the table.
    WindowKeepsEntries,
    /// Prefixes are never shared.
    NoSharing,
    /// Released blocks are forgotten at once.
    ReleaseForgets,
    EvictsHeadsFirst,
    EvictsMostRecent,
    /// A full hit leaves nothing to compute.
    FullHit,
    /// What a refused extension had taken is not given back.
    RefusedKeepsPages,
    /// A shared tail is written.
    NoCopy,
    /// A tail is copied though it is full, or nobody else's.
    NeedlessCopy,
    /// Copy-on-write puts the copy into all tables.
    CopyForAll,
    /// Pages past a rollback stay in the table.
    TruncateKeepsPages,
    /// Host slots are free as soon as they are written.
    SlotsFreedAtOnce,
    /// Slots come back in another order.
    SlotsReversed,
}

/// What a page's block is known by.
#[derive(Clone, Debug)]
struct Key {
    name: Name,
    tokens: Vec<Tok>,
}

#[derive(Clone, Debug, Default)]
struct Seq {
    pages: Vec<u32>,
    first_token: u32,
    len: u32,
    published: usize,
    slots: Option<Vec<u32>>,
}

#[derive(Clone)]
pub struct Naive {
    config: PoolConfig,
    fault: Option<Fault>,
    seqs: BTreeMap<Id, Seq>,
    /// The next one last.
    free: Vec<u32>,
    /// The next one first.
    cached: Vec<u32>,
    keys: Vec<Option<Key>>,
    /// The next one last.
    free_slots: Vec<u32>,
    stats: PrefixStats,
    /// Earlier lookups and their pages, for [`Fault::StaleHit`].
    hits: Vec<(Key, Vec<u32>)>,
}

impl Naive {
    pub fn new(config: &PoolConfig, fault: Option<Fault>) -> Self {
        Self {
            config: *config,
            fault,
            seqs: BTreeMap::new(),
            free: (0..config.page_count).rev().collect(),
            cached: Vec::new(),
            keys: vec![None; config.page_count as usize],
            free_slots: (0..config.host_slot_count).rev().collect(),
            stats: PrefixStats::default(),
            hits: Vec::new(),
        }
    }

    /// The state, up to the names of pages and slots: for a search over distinct states.
    pub fn state(&self) -> Vec<u32> {
        let mut state = Vec::new();
        let mut pages: Vec<u32> = Vec::new();
        let mut name = |page: u32| {
            let at = pages.iter().position(|known| *known == page).unwrap_or_else(|| {
                pages.push(page);
                pages.len() - 1
            });
            at as u32
        };
        for (id, seq) in &self.seqs {
            let Seq { pages, first_token, len, published, slots } = seq;
            state.extend([*id as u32, *first_token, *len, *published as u32, pages.len() as u32]);
            state.extend(pages.iter().map(|page| name(*page)));
            state.push(slots.as_ref().map_or(u32::MAX, |slots| slots.len() as u32));
        }
        state.push(u32::MAX);
        state.extend(self.cached.iter().map(|page| name(*page)));
        state.push(u32::MAX);
        for page in pages {
            if let Some(key) = &self.keys[page as usize] {
                state.push(key.tokens.len() as u32);
                state.extend(key.tokens.iter().map(|token| token.token));
            } else {
                state.push(u32::MAX);
            }
        }
        state
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    fn page_size(&self) -> usize {
        self.config.page_size.get() as usize
    }

    fn pages_for(&self, tokens: u32) -> usize {
        (tokens as usize).div_ceil(self.page_size())
    }

    fn owners(&self, page: u32) -> usize {
        self.seqs.values().flat_map(|seq| &seq.pages).filter(|other| **other == page).count()
    }

    fn key(history: &History, len: usize) -> Key {
        Key { name: history.name.clone(), tokens: history.tokens[..len].to_vec() }
    }

    fn same(&self, key: &Key, history: &History, len: usize) -> bool {
        let tokens = &history.tokens[..len];
        if self.fault.is_none() {
            return key.name == history.name && key.tokens == tokens;
        }
        let mut names = [key.name.clone(), history.name.clone()];
        match self.fault {
            Some(Fault::PredictableHash) => {
                let sum = |tokens: &[Tok]| tokens.iter().map(|token| token.token).sum::<u32>();
                return key.name == history.name && key.tokens.len() == len && sum(&key.tokens) == sum(tokens);
            }
            Some(Fault::UntaggedFields) => {
                let [ours, theirs] =
                    names.map(|name| [name.model, name.version, name.adapter, name.positions, name.salt].concat());
                return ours == theirs && key.tokens == tokens;
            }
            Some(Fault::KeyWithout(Field::Content)) => {
                let words = |tokens: &[Tok]| tokens.iter().map(|token| token.token).collect::<Vec<_>>();
                return key.name == history.name && words(&key.tokens) == words(tokens);
            }
            Some(Fault::KeyWithout(Field::Parent)) => {
                let block = |tokens: &[Tok]| tokens[tokens.len() - self.page_size()..].to_vec();
                return key.name == history.name && block(&key.tokens) == block(tokens);
            }
            Some(Fault::KeyWithout(field)) => {
                for name in &mut names {
                    match field {
                        Field::Model => name.model.clear(),
                        Field::Version => name.version.clear(),
                        Field::Adapter => name.adapter.clear(),
                        Field::Positions => name.positions.clear(),
                        Field::Heads => name.kv_heads = 0,
                        Field::Dtype => name.dtype = paged_attention::Dtype::F32,
                        Field::Salt => name.salt.clear(),
                        Field::Content | Field::Parent => {}
                    }
                }
            }
            _ => {}
        }
        names[0] == names[1] && key.tokens == tokens
    }

    fn find(&self, history: &History, len: usize) -> Option<u32> {
        let holds = |key: &Option<Key>| key.as_ref().is_some_and(|key| self.same(key, history, len));
        self.keys.iter().position(holds).map(|page| page as u32)
    }

    fn available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    fn exhausted(&self, needed: usize) -> PoolError {
        let available = self.available() as u32;
        PoolError::Exhausted { needed: needed as u32, available, page_count: self.config.page_count }
    }

    fn take(&mut self) -> u32 {
        if let Some(page) = self.free.pop() {
            return page;
        }
        let at = if self.has(Fault::EvictsMostRecent) { self.cached.len() - 1 } else { 0 };
        let page = self.cached.remove(at);
        if !self.has(Fault::EvictedStaysFindable) {
            self.keys[page as usize] = None;
        }
        self.stats.evictions += 1;
        page
    }

    fn share(&mut self, page: u32) {
        if !self.has(Fault::HitStaysEvictable) {
            self.cached.retain(|other| *other != page);
        }
    }

    /// For a page that was just taken out of a table.
    fn dropped(&mut self, page: u32) {
        if self.owners(page) > 0 && !self.has(Fault::FreedWhileShared) {
            return;
        }
        if self.has(Fault::ReleaseForgets) {
            self.keys[page as usize] = None;
        }
        if self.keys[page as usize].is_some() {
            self.cached.push(page);
        } else {
            self.free.push(page);
        }
    }

    fn seq(&mut self, id: Id) -> &mut Seq {
        self.seqs.get_mut(&id).unwrap()
    }

    fn give_up(&mut self, id: Id) -> Seq {
        let mut seq = self.seqs.remove(&id).unwrap();
        let pages = std::mem::take(&mut seq.pages);
        let twice = pages.last().copied().filter(|_| self.has(Fault::FreedTwiceInOneRelease));
        let mut order: Vec<u32> = pages.iter().rev().copied().chain(twice).collect();
        if self.has(Fault::EvictsHeadsFirst) {
            order.reverse();
        }
        // Not while the pages are still in a table.
        self.seqs.insert(id, seq);
        order.into_iter().for_each(|page| self.dropped(page));
        self.seqs.remove(&id).unwrap()
    }

    fn discard_slots(&mut self, slots: &[u32]) {
        if !self.has(Fault::SlotsFreedAtOnce) {
            self.free_slots.extend(slots.iter().rev());
        }
    }
}

impl Subject for Naive {
    fn lookup(&mut self, id: Id, history: &History) {
        let page_size = self.page_size();
        let len_max = history.len().saturating_sub(usize::from(!self.has(Fault::FullHit)));
        let full = history.len() / page_size;
        let mut pages = Vec::new();
        if !self.has(Fault::NoSharing) {
            while pages.len() < full.min(len_max.div_ceil(page_size)) {
                let Some(page) = self.find(history, (pages.len() + 1) * page_size) else {
                    break;
                };
                pages.push(page);
            }
        }
        if self.has(Fault::StaleHit) {
            let earlier = self.hits.iter().find(|(key, _)| self.same(key, history, history.len()));
            match earlier {
                Some((_, earlier)) => pages = earlier.clone(),
                None => self.hits.push((Self::key(history, history.len()), pages.clone())),
            }
        }
        for page in &pages {
            self.share(*page);
        }
        self.stats.lookups += 1;
        self.stats.hits += pages.len() as u64;
        self.stats.misses += (full - pages.len()) as u64;
        let len = len_max.min(pages.len() * page_size);
        let published = len / page_size;
        self.seqs.insert(id, Seq { pages, first_token: 0, len: len as u32, published, slots: None });
    }

    fn extend(&mut self, id: Id, tokens: u32) -> Result<Vec<PageCopy>, PoolError> {
        let Seq { pages, len, .. } = self.seq(id).clone();
        let new = self.pages_for(len + tokens) - self.pages_for(len);
        let tail = pages.last().copied().filter(|_| tokens > 0 && !(len as usize).is_multiple_of(self.page_size()));
        let needless = self.has(Fault::NeedlessCopy);
        let copied = if needless { pages.last().copied() } else { tail }
            .filter(|page| needless || self.owners(*page) > 1 && !self.has(Fault::NoCopy));
        let needed = new + usize::from(copied.is_some());
        if needed > self.available() {
            let error = self.exhausted(needed);
            if self.has(Fault::RefusedKeepsPages) {
                while self.available() > 0 {
                    let page = self.take();
                    self.seq(id).pages.push(page);
                }
            }
            return Err(error);
        }
        let mut copies = Vec::new();
        if let Some(from) = copied {
            let to = self.take();
            copies.push(PageCopy::OnDevice { from, to });
            if self.has(Fault::CopyForAll) {
                for seq in self.seqs.values_mut() {
                    seq.pages.iter_mut().filter(|page| **page == from).for_each(|page| *page = to);
                }
            } else {
                *self.seq(id).pages.last_mut().unwrap() = to;
            }
            self.dropped(from);
        } else if let Some(page) = tail
            && !self.has(Fault::WrittenStaysFindable)
            && self.keys[page as usize].take().is_some()
        {
            self.stats.withdrawn += 1;
        }
        for _ in 0..new {
            let page = self.take();
            self.seq(id).pages.push(page);
        }
        self.seq(id).len += tokens;
        Ok(copies)
    }

    fn fork(&mut self, id: Id, fork: Id) {
        let seq = self.seqs[&id].clone();
        self.seqs.insert(fork, seq);
    }

    fn truncate(&mut self, id: Id, len: u32) -> Result<(), PoolError> {
        let page_size = self.page_size();
        let Seq { first_token, len: old, .. } = self.seqs[&id];
        if len > old || len < first_token {
            return Err(PoolError::Position { found: len, first: first_token, len: old });
        }
        let keep = self.pages_for(len) - first_token as usize / page_size;
        while self.seqs[&id].pages.len() > keep && !self.has(Fault::TruncateKeepsPages) {
            let page = self.seq(id).pages.pop().unwrap();
            self.dropped(page);
        }
        let seq = self.seq(id);
        seq.len = len;
        seq.published = seq.published.min(len as usize / page_size);
        Ok(())
    }

    fn release_before(&mut self, id: Id, position: u32) -> Result<(), PoolError> {
        let page_size = self.config.page_size.get();
        let Seq { first_token, len, .. } = self.seqs[&id];
        if position > len {
            return Err(PoolError::Position { found: position, first: 0, len });
        }
        for block in first_token / page_size..position / page_size {
            if self.has(Fault::WindowKeepsEntries) {
                let page = self.seqs[&id].pages[block as usize];
                self.free.push(page);
            } else {
                let page = self.seq(id).pages.remove(0);
                self.dropped(page);
                self.seq(id).first_token += page_size;
            }
        }
        Ok(())
    }

    fn publish(&mut self, id: Id, history: &History) -> Result<(), PoolError> {
        let page_size = self.page_size();
        let Seq { first_token, len, published, .. } = self.seqs[&id];
        let first_block = first_token as usize / page_size;
        if published < first_block {
            return Ok(());
        }
        for block in published..(len as usize / page_size).min(history.len() / page_size) {
            let page = self.seqs[&id].pages[block - first_block];
            if self.keys[page as usize].is_none() {
                let end = (block + 1) * page_size;
                if let Some(other) = self.find(history, end) {
                    self.share(other);
                    self.seq(id).pages[block - first_block] = other;
                    self.dropped(page);
                    self.stats.duplicates += 1;
                } else {
                    self.keys[page as usize] = Some(Self::key(history, end));
                    self.stats.published += 1;
                }
            }
            self.seq(id).published = block + 1;
        }
        Ok(())
    }

    fn release(&mut self, id: Id) {
        self.give_up(id);
    }

    fn swap_out(&mut self, id: Id) -> Result<Vec<PageCopy>, PoolError> {
        let pages = self.seqs[&id].pages.clone();
        let (needed, available) = (pages.len() as u32, self.free_slots.len() as u32);
        if needed > available {
            return Err(PoolError::HostExhausted { needed, available, slot_count: self.config.host_slot_count });
        }
        let slots: Vec<u32> = pages.iter().map(|_| self.free_slots.pop().unwrap()).collect();
        let copies =
            pages.iter().zip(&slots).map(|(page, slot)| PageCopy::ToHost { page: *page, slot: *slot }).collect();
        if self.has(Fault::SlotsFreedAtOnce) {
            self.free_slots.extend(&slots);
        }
        let seq = self.give_up(id);
        self.seqs.insert(id, Seq { slots: Some(slots), published: 0, ..seq });
        Ok(copies)
    }

    fn swap_in(&mut self, id: Id) -> Result<Vec<PageCopy>, PoolError> {
        let mut slots = self.seqs[&id].slots.clone().unwrap();
        if slots.len() > self.available() {
            return Err(self.exhausted(slots.len()));
        }
        if self.has(Fault::SlotsReversed) {
            slots.reverse();
        }
        let pages: Vec<u32> = slots.iter().map(|_| self.take()).collect();
        let copies =
            slots.iter().zip(&pages).map(|(slot, page)| PageCopy::ToDevice { slot: *slot, page: *page }).collect();
        self.discard_slots(&slots);
        let seq = self.seq(id);
        (seq.pages, seq.slots) = (pages, None);
        Ok(copies)
    }

    fn discard(&mut self, id: Id) {
        let slots = self.seqs.remove(&id).unwrap().slots.unwrap();
        self.discard_slots(&slots);
    }

    fn common_pages(&self, ids: &[Id]) -> usize {
        let seqs: Vec<&Seq> = ids.iter().map(|id| &self.seqs[id]).collect();
        let shortest =
            seqs.iter().map(|seq| (seq.len - seq.first_token) as usize / self.page_size()).min().unwrap_or(0);
        let common = |at: &usize| {
            let page = seqs[0].pages.get(*at);
            if self.has(Fault::CommonByOwners) {
                return page.is_some_and(|page| self.owners(*page) >= seqs.len());
            }
            seqs.iter().all(|seq| seq.first_token == seqs[0].first_token && seq.pages.get(*at) == page)
        };
        (0..shortest).take_while(common).count()
    }

    fn view(&self) -> View {
        let seq = |seq: &Seq| SeqView {
            pages: seq.pages.clone(),
            first_token: seq.first_token,
            len: seq.len,
            slots: seq.slots.clone(),
        };
        let owners = (0..self.config.page_count).map(|page| self.owners(page));
        let (held, shared) = owners
            .fold((0, 0), |(held, shared), owners| (held + u32::from(owners > 0), shared + u32::from(owners > 1)));
        let mut cached = self.cached.len() as u32;
        if self.has(Fault::SharedCountsAsEvictable) {
            cached += shared;
        }
        View {
            seqs: self.seqs.iter().map(|(id, held)| (*id, seq(held))).collect(),
            counts: PageCounts { held, cached, free: self.free.len() as u32 },
            free_slots: self.free_slots.len() as u32,
            stats: self.stats,
        }
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}
