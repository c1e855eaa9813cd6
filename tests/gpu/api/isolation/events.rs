//! What happens to sequences between two steps, and what a step begins with: all of it on the host.

use super::*;

impl Server<'_> {
    /// A sequence on the device, or in host memory.
    pub fn pick(&mut self, on_device: bool) -> Option<u64> {
        let which = |live: &&u64| matches!(self.live[live].place, Place::Device(_)) == on_device;
        let ids: Vec<u64> = self.live.keys().filter(which).copied().collect();
        if ids.is_empty() { None } else { Some(ids[self.random.random_range(0..ids.len())]) }
    }

    pub fn on_device(&self) -> usize {
        self.live.values().filter(|live| !matches!(live.place, Place::Host(_))).count()
    }

    pub fn insert(&mut self, live: Live) -> u64 {
        self.next_id += 1;
        self.live.insert(self.next_id, live);
        self.next_id
    }

    /// Prompts begin alike, with a few beginnings for each of two tenants.
    pub fn start(&mut self) {
        let tenant = self.random.random_range(0..2);
        let salt: &[u8] = if tenant == 0 || self.is(Fault::NoSalt) { b"a" } else { b"b" };
        let layout = *self.store.layout();
        let namespace = Namespace { model: "m", version: "1", adapter: "", positions: "none", layout: &layout, salt };
        let beginning = self.random.random_range(0..3);
        let common = self.random.random_range(0..4) * PAGE_SIZE;
        let mut tokens: Vec<u32> = (0..common).map(|at| beginning * 100 + at).collect();
        tokens.extend((0..self.random.random_range(1..7)).map(|_| self.random.random_range(0..1000)));
        let mut history = History { tenant, chain: TokenChain::new(&namespace), prints: Vec::new() };
        history.push(&tokens);
        // What is not cached is left for the next step to compute.
        let place = Place::Device(self.pool.lookup(&history.chain).unwrap());
        self.insert(Live { history, place });
    }

    pub fn cancel(&mut self, id: u64) {
        match self.live.remove(&id).map(|live| live.place) {
            Some(Place::Device(table)) => self.pool.release(table).unwrap(),
            Some(Place::Host(swapped)) => self.pool.discard(swapped).unwrap(),
            Some(Place::Stale(..)) | None => {}
        }
        self.counts.cancelled += 1;
    }

    /// Something that happens between two steps.
    pub fn event(&mut self, copies: &mut Vec<PageCopy>) -> Result<(), Noticed> {
        let kind = self.random.random_range(0..7);
        // What is swapped in, the pool may have more of than the device.
        let Some(id) = self.pick(kind != 5) else { return Ok(()) };
        let Some(Live { mut history, place }) = self.live.remove(&id) else { return Ok(()) };
        let keep = self.on_device() >= LIVE_MIN;
        let place = match (kind, place) {
            (0, Place::Device(table)) if self.live.len() < LIVE_MAX - 1 => {
                self.counts.forks += 1;
                let place = Place::Device(self.pool.fork(&table).map_err(refused)?);
                self.insert(Live { history: history.clone(), place });
                Place::Device(table)
            }
            (1, place @ Place::Device(_)) if keep => {
                self.live.insert(id, Live { history, place });
                self.cancel(id);
                return Ok(());
            }
            (2, Place::Device(table)) => {
                // Preempted, its pages given back, and to be computed again.
                self.counts.recomputed += 1;
                self.pool.release(table).map_err(refused)?;
                Place::Device(self.pool.lookup(&history.chain).map_err(refused)?)
            }
            (3, Place::Device(mut table)) if table.len() > 3 => {
                self.counts.rolled_back += 1;
                let len = table.len() - self.random.random_range(1..4);
                self.pool.truncate(&mut table, len).map_err(refused)?;
                history.truncate(len as usize);
                Place::Device(table)
            }
            (4, Place::Device(table)) if keep => match self.pool.swap_out(table, copies) {
                Ok(swapped) => {
                    self.counts.swapped_out += 1;
                    Place::Host(swapped)
                }
                Err(refused) => Place::Device(refused.table),
            },
            (5, Place::Host(swapped)) => {
                self.arrive(copies)?;
                match self.pool.swap_in(swapped, copies) {
                    Ok(table) => {
                        self.counts.swapped_in += 1;
                        Place::Device(table)
                    }
                    Err(refused) => Place::Host(refused.table),
                }
            }
            (_, place) => place,
        };
        self.live.insert(id, Live { history, place });
        Ok(())
    }

    /// What is on its way to the host arrives, the copies that are not yet recorded first.
    pub fn arrive(&mut self, copies: &mut Vec<PageCopy>) -> Result<(), Noticed> {
        let mut encoder = self.host.encoder();
        self.record_copies(&mut encoder, &take(copies))?;
        self.host.queue.submit([encoder.finish()]);
        for to_host in take(&mut self.to_host) {
            to_host.buffer().map_async(wgpu::MapMode::Read, .., |mapped| mapped.unwrap());
            self.host.device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
            self.store.receive(&to_host).map_err(refused)?;
        }
        Ok(())
    }

    /// Room for the tokens that each sequence on the device is to get.
    pub fn grow(&mut self, copies: &mut Vec<PageCopy>) -> Result<Vec<Part>, Noticed> {
        let mut parts = Vec::new();
        for id in self.live.keys().copied().collect::<Vec<_>>() {
            let Some(mut live) = self.live.remove(&id) else { continue };
            let mut table = match live.place {
                Place::Device(table) => table,
                Place::Stale(ref pages, kv_len) => {
                    let (pages, prints) = (pages.clone(), live.history.prints.clone());
                    let own = pages.clone();
                    parts.push(Part { id, new: 0, q_len: 1, kv_len, pages, own, prints });
                    self.live.insert(id, live);
                    continue;
                }
                Place::Host(_) => {
                    self.live.insert(id, live);
                    continue;
                }
            };
            let before = table.pages().to_vec();
            let mut new = live.history.prints.len() as u32 - table.len();
            let may_grow = live.history.prints.len() < LEN_MAX && self.pool.counts().available() > PAGES_KEPT;
            let grows = new == 0 && may_grow && !self.one_in(3);
            if grows {
                // Few different tokens, so that forks may meet again.
                live.history.push(&[self.random.random_range(0..3)]);
                new = 1;
            }
            match self.pool.extend(&mut table, new, copies) {
                Ok(()) => {}
                Err(PoolError::Exhausted { .. }) if grows => {
                    live.history.truncate(table.len() as usize);
                    new = 0;
                }
                Err(PoolError::Exhausted { .. }) => {
                    live.place = Place::Device(table);
                    self.live.insert(id, live);
                    self.cancel(id);
                    continue;
                }
                Err(error) => return Err(refused(error)),
            }
            let own = table.pages().to_vec();
            let mut pages = own.clone();
            if self.is(Fault::StaleTable) {
                pages[..before.len()].copy_from_slice(&before);
            }
            let (kv_len, prints) = (table.kv_len(), live.history.prints.clone());
            parts.push(Part { id, new, q_len: new.max(1), kv_len, pages, own, prints });
            live.place = Place::Device(table);
            self.live.insert(id, live);
        }
        Ok(parts)
    }

    /// Faults that are of the batch.
    pub fn spoil(&mut self, parts: &mut Vec<Part>, copies: &mut Vec<PageCopy>) -> Result<(), Noticed> {
        match self.fault {
            Some(Fault::FreedWhileUsed) if self.steps.len() == 2 => {
                let Some(id) = self.pick(true) else { return Ok(()) };
                let Some(live) = self.live.get_mut(&id) else { return Ok(()) };
                let stale = Place::Stale(Vec::new(), 0);
                if let Place::Device(table) = std::mem::replace(&mut live.place, stale) {
                    live.place = Place::Stale(table.pages().to_vec(), table.kv_len());
                    self.pool.release(table).map_err(refused)?;
                }
            }
            Some(Fault::CancelledInBatch) => {
                // Its last page is new, and goes to the next owner at once.
                let Some(at) = parts.iter().position(|part| part.new > 0 && part.kv_len % PAGE_SIZE == 1) else {
                    return Ok(());
                };
                self.cancel(parts[at].id);
                self.start();
                let id = self.next_id;
                let mut grown = self.grow_one(id, copies)?;
                parts.append(&mut grown);
            }
            Some(Fault::EqualPageOfAnother) => {
                let full = |part: &Part| {
                    let blocks = (part.kv_len / PAGE_SIZE) as usize;
                    (0..blocks).map(|block| (part.pages[block], part.prints[(block + 1) * 4 - 1])).collect::<Vec<_>>()
                };
                let blocks: Vec<(u32, u64)> = parts.iter().filter(|part| part.new == 0).flat_map(full).collect();
                for part in parts {
                    for (block, (page, print)) in full(part).into_iter().enumerate() {
                        let equal = blocks.iter().find(|(other, of)| *of == print && *other != page);
                        if let Some((other, _)) = equal.filter(|_| part.new == 0) {
                            part.pages[block] = *other;
                        }
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    pub fn grow_one(&mut self, id: u64, copies: &mut Vec<PageCopy>) -> Result<Vec<Part>, Noticed> {
        let others = take(&mut self.live);
        let (mut others, one): (BTreeMap<_, _>, BTreeMap<_, _>) =
            others.into_iter().partition(|(other, _)| *other != id);
        self.live = one;
        let parts = self.grow(copies);
        self.live.append(&mut others);
        parts
    }
}
