//! The store's copies of pages, byte for byte: on the device, to the host and back.

use std::num::NonZeroU32;

use paged_attention::{
    CopyError, HeadGeometry, KvDtype, KvDtypes, KvLayout, KvStore, PageCopies, PageCopy, PageSize, RowOrder, Status,
    StatusError, ToHost, Workspace, wgpu,
};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use super::host::{Host, host};
use crate::common::gpu;

const PAGES: u32 = 13;
const SLOTS: u32 = 5;
const LAYERS: u32 = 3;

fn on_device((from, to): (u32, u32)) -> PageCopy {
    PageCopy::OnDevice { from, to }
}

fn to_host((page, slot): (u32, u32)) -> PageCopy {
    PageCopy::ToHost { page, slot }
}

fn to_device((slot, page): (u32, u32)) -> PageCopy {
    PageCopy::ToDevice { slot, page }
}

fn layout(dtypes: impl Into<KvDtypes>, page_size: u32) -> KvLayout {
    let geometry = HeadGeometry::with_v_head_dim(4, 2, 20, 59).unwrap();
    KvLayout::new(geometry, dtypes, PageSize::new(page_size).unwrap(), PAGES).unwrap()
}

/// In one segment, in three (of 5, 5 and 3 pages), or in five.
fn in_segments(number: usize, layout: KvLayout) -> KvLayout {
    layout.with_segment_pages(NonZeroU32::new([PAGES, 5, 3][number % 3]).unwrap())
}

/// A store, and what its pages and slots must hold: `[layer][page]` and `[slot][layer]` of bytes.
struct Memory<'h> {
    host: &'h Host,
    store: KvStore,
    workspace: Workspace,
    dispatched: u32,
    pages: Vec<Vec<Vec<u8>>>,
    slots: Vec<Vec<Vec<u8>>>,
}

impl<'h> Memory<'h> {
    fn new(host: &'h Host, layout: &KvLayout, edits: &[(&str, &str)]) -> Self {
        let store = KvStore::with_edits(&host.device, layout, LAYERS, SLOTS, edits);
        let page = vec![0; layout.page_bytes() as usize];
        let mut memory = Self {
            host,
            store: pollster::block_on(store).unwrap(),
            workspace: Workspace::new(&host.device, 0).unwrap(),
            dispatched: 0,
            pages: vec![vec![page.clone(); PAGES as usize]; LAYERS as usize],
            slots: vec![vec![page; LAYERS as usize]; SLOTS as usize],
        };
        memory.check("a new store").unwrap();
        memory.fill(1);
        memory
    }

    /// Other bytes in all pages; every bit pattern may occur, NaN too.
    fn fill(&mut self, seed: u64) {
        let mut random = StdRng::seed_from_u64(seed);
        for (layer, pages) in (0..).zip(&mut self.pages) {
            pages.iter_mut().for_each(|page| random.fill_bytes(page));
            let contents = pages.concat();
            let mut rest = &contents[..];
            for segment in self.store.pages(layer).unwrap() {
                let (part, others) = rest.split_at(segment.buffer.size() as usize);
                self.host.queue.write_buffer(segment.buffer, 0, part);
                rest = others;
            }
        }
    }

    /// Makes copies one after the other, and expects the same of the store.
    fn copy(&mut self, copies: &[PageCopy]) -> Option<ToHost> {
        for copy in copies {
            for (layer, pages) in self.pages.iter_mut().enumerate() {
                match *copy {
                    PageCopy::OnDevice { from, to } => pages[to as usize] = pages[from as usize].clone(),
                    PageCopy::ToHost { page, slot } => self.slots[slot as usize][layer] = pages[page as usize].clone(),
                    PageCopy::ToDevice { slot, page } => {
                        pages[page as usize] = self.slots[slot as usize][layer].clone();
                    }
                }
            }
        }
        let copies = self.prepared(copies).unwrap();
        self.dispatched += copies.workgroups();
        let mut encoder = self.host.encoder();
        let to_host = copies.encode(&mut encoder);
        self.host.queue.submit([encoder.finish()]);
        to_host
    }

    fn prepared(&mut self, copies: &[PageCopy]) -> Result<PageCopies, CopyError> {
        self.store.copies(&self.host.device, copies, &self.workspace)
    }

    fn arrive(&mut self, to_host: &ToHost) -> u32 {
        to_host.buffer().map_async(wgpu::MapMode::Read, .., |mapped| mapped.unwrap());
        self.host.device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
        self.store.receive(to_host).unwrap()
    }

    fn check(&self, what: &str) -> Result<(), String> {
        for (layer, expected) in (0..).zip(&self.pages) {
            let segments = self.store.pages(layer).unwrap();
            let found = segments.iter().map(|segment| self.host.read(segment.buffer)).collect::<Vec<_>>().concat();
            let page_bytes = self.store.layout().page_bytes() as usize;
            for (page, (found, expected)) in found.chunks(page_bytes).zip(expected).enumerate() {
                if found != expected {
                    let byte = found.iter().zip(expected).position(|(a, b)| a != b);
                    return Err(format!("{what}: page {page} of layer {layer} differs from byte {byte:?} on"));
                }
            }
        }
        self.host.status(&self.workspace).check(self.dispatched).map_err(|error| format!("{what}: {error}"))
    }
}

/// One run, and one of several: what was read before is overwritten, what was written is read and written again.
const LISTS: [&[(u32, u32)]; 3] = [
    &[(0, 1)],
    &[(3, 4), (3, 12), (0, 5), (7, 1)],
    &[(0, 1), (1, 2), (3, 0), (4, 1), (9, 10), (10, 11), (11, 9), (2, 12)],
];

#[test]
fn pages_are_copied_whole_whatever_they_hold() {
    let (Some(gpu), Some(shared)) = (gpu(), host()) else { return };
    // Few workgroups on an axis: each list is folded into three axes.
    let limits = wgpu::Limits { max_compute_workgroups_per_dimension: 11, ..wgpu::Limits::default() };
    let limited = Host::open(gpu, limits);
    let dtypes = KvDtype::ALL.iter().flat_map(|k| KvDtype::ALL.map(|v| KvDtypes { k: *k, v }));
    for (number, dtypes) in (0..).zip(dtypes) {
        // A page of 256 slots in f32 takes 176 workgroups; one of a single slot is less than one.
        let page_size = [1, 3, 16, 256][number % 4];
        let order = [RowOrder::HeadSlot, RowOrder::SlotHead][number / 2 % 2];
        let layout = in_segments(number, layout(dtypes, page_size).with_order(order));
        let mut memory = Memory::new(if number % 3 == 0 { &limited } else { shared }, &layout, &[]);
        for list in LISTS {
            let list: Vec<PageCopy> = list.iter().copied().map(on_device).collect();
            assert!(memory.copy(&list).is_none());
            memory.check(&format!("{dtypes}, {order:?}, {list:?}")).unwrap();
        }
    }
}

/// Random lists of all kinds, over steps of which some are on their way at the same time.
#[test]
fn random_lists_and_swaps() {
    let Some(host) = host() else { return };
    for seed in 0..6 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut memory =
            Memory::new(host, &in_segments(seed as usize, layout(KvDtype::ALL[seed as usize % 5], 4)), &[]);
        let mut readable: Vec<u32> = Vec::new();
        let mut on_the_way: Vec<ToHost> = Vec::new();
        for step in 0..40 {
            let mut list = Vec::new();
            let mut written: Vec<u32> = Vec::new();
            for _ in 0..random.random_range(0..8) {
                let page = random.random_range(0..PAGES);
                let slot = random.random_range(0..SLOTS);
                match random.random_range(0..3) {
                    0 => list.push(on_device((page, (page + random.random_range(1..PAGES)) % PAGES))),
                    1 => {
                        list.push(to_host((page, slot)));
                        readable.retain(|other| *other != slot);
                        written.push(slot);
                    }
                    _ if readable.contains(&slot) => list.push(to_device((slot, page))),
                    _ => {}
                }
            }
            on_the_way.extend(memory.copy(&list));
            if random.random_range(0..3) == 0 {
                for to_host in std::mem::take(&mut on_the_way) {
                    memory.arrive(&to_host);
                }
                // What was on its way is there, the latest contents of each.
                readable = (0..SLOTS).filter(|slot| memory.prepared(&[to_device((*slot, 0))]).is_ok()).collect();
                assert!(written.iter().all(|slot| readable.contains(slot)), "seed {seed}, step {step}");
            }
            if step % 8 == 0 {
                memory.check(&format!("seed {seed}, step {step}")).unwrap();
            }
        }
        memory.check(&format!("seed {seed}")).unwrap();
    }
}

/// What a slot holds can be read when it has arrived, and not before; the last write counts.
#[test]
fn slots_wait_for_what_is_on_its_way() {
    let Some(host) = host() else { return };
    let mut memory = Memory::new(host, &layout(KvDtype::F16, 4), &[]);
    let empty = |slot, awaited| Some(CopyError::Empty { slot, awaited });
    let refused = |memory: &mut Memory<'_>, list: &[PageCopy]| memory.prepared(list).err();
    assert_eq!(refused(&mut memory, &[to_device((2, 0))]), empty(2, false));
    assert_eq!(refused(&mut memory, &[to_host((1, 2)), to_device((2, 0))]), empty(2, true));
    // The refused list has not touched the slot.
    assert_eq!(refused(&mut memory, &[to_device((2, 0))]), empty(2, false));

    let first = memory.copy(&[to_host((1, 2)), to_host((4, 0))]).unwrap();
    assert_eq!(refused(&mut memory, &[to_device((2, 0))]), empty(2, true));
    assert!(matches!(memory.store.receive(&first), Err(CopyError::NotMapped { .. })));
    // The slot is written again before its first contents arrive: it waits for the second.
    let second = memory.copy(&[on_device((5, 1)), to_host((1, 2))]).unwrap();
    assert_eq!(memory.arrive(&first), 1);
    assert_eq!(refused(&mut memory, &[to_device((2, 0))]), empty(2, true));
    assert_eq!(memory.arrive(&second), 1);
    assert_eq!(memory.store.receive(&second), Ok(0), "nothing waits for it any more");
    assert!(memory.copy(&[to_device((2, 0)), to_device((0, 6)), to_device((2, 12))]).is_none());
    memory.check("swapped in").unwrap();

    // Written twice in one list: the later contents count.
    let twice = memory.copy(&[to_host((3, 4)), to_host((8, 4))]).unwrap();
    assert_eq!(memory.arrive(&twice), 1);
    memory.copy(&[to_device((4, 9))]);
    memory.check("written twice").unwrap();

    // Read, and written in the same list: what was there is what is read.
    let third = memory.copy(&[to_device((0, 7)), to_host((3, 0))]).unwrap();
    memory.check("read and written").unwrap();
    let mut other = Memory::new(host, &layout(KvDtype::F16, 4), &[]);
    assert_eq!(other.store.receive(&third), Err(CopyError::OtherStore));
    // Dropped, as after a submit that failed: the slot stays empty.
    drop(third);
    assert_eq!(refused(&mut memory, &[to_device((0, 1))]), empty(0, true));
}

/// Faults of the kernel, each noticed by the bytes or by the status.
#[test]
fn faults_of_the_copy_are_noticed() {
    let Some(host) = host() else { return };
    for (fault, from, to) in [
        ("the last vector is left out", "vector < params.page_vectors", "vector + 1u < params.page_vectors"),
        ("past the page's end", "vector < params.page_vectors", "vector < params.page_vectors + 1u"),
        ("from and to", "load_pages(pages.x * params.page_vectors + vector)", "load_pages(vector)"),
        ("one copy for all", "copies[group / params.page_groups]", "copies[0]"),
        ("a workgroup that does not end", "let pages = copies", "if group == 1u { return; }\n    let pages = copies"),
    ] {
        // 132 vectors, in three workgroups.
        let mut memory = Memory::new(host, &layout(KvDtype::F32, 3), &[(from, to)]);
        let list: Vec<PageCopy> = LISTS[1].iter().copied().map(on_device).collect();
        memory.copy(&list);
        let noticed = memory.check(fault);
        assert!(noticed.is_err(), "{fault} was not noticed");
    }
    // Ids that the host has let through are not followed.
    let from = "let pages = copies[group / params.page_groups];";
    let to = "let pages = copies[group / params.page_groups] + vec2<u32>(0u, 13u);";
    let mut memory = Memory::new(host, &layout(KvDtype::F32, 16), &[(from, to)]);
    let before = memory.pages.clone();
    memory.copy(&[on_device((0, 1))]);
    memory.pages = before;
    assert_eq!(memory.host.status(&memory.workspace).check(memory.dispatched), Err(StatusError::PageId { bits: 1 }));
    assert!(memory.check("pages").unwrap_err().contains("outside the pool"));
}

/// What a list takes is made when it is prepared, and nothing when it is recorded.
#[test]
fn recording_copies_creates_nothing() {
    let (Some(gpu), Some(shared)) = (gpu(), host()) else { return };
    // Other tests make things on the shared device at the same time.
    let host = &Host::open(gpu, shared.device.limits());
    let mut memory = Memory::new(host, &layout(KvDtype::F16, 4), &[]);
    let first = memory.copy(&[to_host((1, 2))]).unwrap();
    memory.arrive(&first);
    drop(first);
    let made = || {
        let counters = host.device.get_internal_counters().hal;
        [counters.buffers.read(), counters.bind_groups.read(), counters.compute_pipelines.read()]
    };
    let list = [on_device((0, 1)), on_device((3, 4)), on_device((1, 5)), to_host((6, 0)), to_device((2, 7))];
    let before = made();
    let copies = memory.prepared(&list).unwrap();
    let prepared = made();
    // Two runs: a buffer each, one through which wgpu fills it, and bindings for each layer; and a buffer for each direction.
    assert_eq!([0, 1, 2].map(|i| prepared[i] - before[i]), [6, 2 * LAYERS as isize, 0]);
    let mut encoder = host.encoder();
    let to_host = copies.encode(&mut encoder);
    assert_eq!(made(), prepared);
    assert_eq!(memory.host.status(&memory.workspace), Status::default());
    drop(to_host);
}
