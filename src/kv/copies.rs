//! Copies of pages: one to another, to the host and back.

use std::collections::{BTreeMap, HashSet};

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

use super::layout::KvLayout;
use super::store::KvStore;
use super::table::PageCopy;
use crate::attention::{BindError, STATUS_ROOM, Workspace, bind_group, check_devices, storage_bindings};
use crate::buffers;
use crate::kernels::{LANES, fold_grid};
use crate::plan::{PlanBuffer, UploadError};

/// Copies that cannot be made. Nothing was recorded, and no slot has changed.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CopyError {
    /// A page id lies outside of the store.
    #[error("page {found} is to be copied; there are {page_count}")]
    Page {
        /// The id.
        found: u32,
        /// Pages in the store.
        page_count: u32,
    },
    /// A page is to be copied to itself.
    #[error("page {page} is to be copied to itself")]
    ToItself {
        /// The page.
        page: u32,
    },
    /// A host slot lies outside of the store.
    #[error("host slot {found} is to be copied; there are {slot_count}")]
    Slot {
        /// The slot.
        found: u32,
        /// Host slots of the store.
        slot_count: u32,
    },
    /// A host slot is to be read, and nothing was ever written to it, or what was has not arrived.
    #[error("host slot {slot} is to be read, and {} it", if *.awaited { "what is copied has not reached" } else { "nothing was copied to" })]
    Empty {
        /// The slot.
        slot: u32,
        /// Whether there is something on its way: recorded, or in the same list, and not yet [`KvStore::receive`]d.
        awaited: bool,
    },
    /// More pages at once than a buffer holds. A list may be cut anywhere into several that are recorded one after the
    /// other.
    #[error("{pages} pages {direction} need a buffer of {needed} bytes; the device allows {found}")]
    TooLarge {
        /// To the host, or from it.
        direction: &'static str,
        /// Pages in that direction.
        pages: usize,
        /// Bytes of these pages, of all layers.
        needed: u128,
        /// The device's `max_buffer_size`.
        found: u64,
    },
    /// A list or pages did not reach the device.
    #[error(transparent)]
    Upload(#[from] UploadError),
    /// The kernel cannot be bound, or dispatched for so many pages.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The buffer with pages from the device is not mapped.
    #[error("the pages cannot be read: {message}")]
    NotMapped {
        /// wgpu's message.
        message: String,
    },
    /// The pages were copied from another store.
    #[error("the pages were copied from another store")]
    OtherStore,
}

/// Parameters of the kernel. The shader's `CopyParams` has the same fields in the same order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub(crate) struct CopyParams {
    pub page_vectors: u32,
    pub page_count: u32,
    pub page_groups: u32,
    pub groups: u32,
}

/// What a host slot holds.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Slot {
    Nothing,
    /// Nothing yet: the pages with this ticket are on their way.
    Awaited(u64),
    Contents,
}

/// Host memory for pages of all layers, slot after slot.
#[derive(Debug)]
pub(super) struct HostSlots {
    slots: Vec<Slot>,
    contents: Vec<u8>,
    slot_bytes: usize,
    next_ticket: u64,
}

impl HostSlots {
    /// Or the bytes that there is no memory for.
    pub fn new(page_bytes: u64, layers: u32, count: u32) -> Result<Self, u128> {
        let slot_bytes = u128::from(page_bytes) * u128::from(layers);
        let needed = slot_bytes * u128::from(count);
        let (mut slots, mut contents) = (Vec::new(), Vec::new());
        let reserved = usize::try_from(needed).is_ok_and(|bytes| {
            contents.try_reserve_exact(bytes).is_ok() && slots.try_reserve_exact(count as usize).is_ok()
        });
        if !reserved {
            return Err(needed);
        }
        slots.resize(count as usize, Slot::Nothing);
        contents.resize(needed as usize, 0);
        // Without slots the size of one is of no use.
        Ok(Self { slots, contents, slot_bytes: usize::try_from(slot_bytes).unwrap_or_default(), next_ticket: 0 })
    }

    pub fn bytes(&self) -> u64 {
        self.contents.len() as u64
    }

    pub fn count(&self) -> u32 {
        self.slots.len() as u32
    }

    fn contents(&self, slot: u32) -> Option<&[u8]> {
        self.contents.get(slot as usize * self.slot_bytes..)?.get(..self.slot_bytes)
    }

    /// Checks the slots of a list, in order.
    fn check(&self, copies: &[PageCopy]) -> Result<(), CopyError> {
        let slot_count = self.slots.len() as u32;
        let state = |slot: u32| self.slots.get(slot as usize).ok_or(CopyError::Slot { found: slot, slot_count });
        let mut written = HashSet::new();
        for copy in copies {
            match *copy {
                PageCopy::OnDevice { .. } => {}
                PageCopy::ToHost { slot, .. } => {
                    state(slot)?;
                    written.insert(slot);
                }
                PageCopy::ToDevice { slot, .. } => {
                    let state = state(slot)?;
                    let awaited = written.contains(&slot) || matches!(state, Slot::Awaited(_));
                    if awaited || *state == Slot::Nothing {
                        return Err(CopyError::Empty { slot, awaited });
                    }
                }
            }
        }
        Ok(())
    }

    /// What the slots hold is given up for what is on its way with the ticket that comes back.
    fn await_pages(&mut self, slots: &[u32]) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        for slot in slots {
            if let Some(slot) = self.slots.get_mut(*slot as usize) {
                *slot = Slot::Awaited(ticket);
            }
        }
        ticket
    }

    /// Puts pages into their slots, as far as these wait for this ticket.
    pub fn receive(&mut self, ticket: u64, slots: &[u32], pages: &[u8]) -> u32 {
        let mut received = 0;
        // The last first: where a list writes a slot twice, its later contents count.
        for (slot, pages) in slots.iter().zip(pages.chunks_exact(self.slot_bytes.max(1))).rev() {
            let start = *slot as usize * self.slot_bytes;
            if let (Some(state), Some(contents)) =
                (self.slots.get_mut(*slot as usize), self.contents.get_mut(start..start + self.slot_bytes))
                && *state == Slot::Awaited(ticket)
            {
                contents.copy_from_slice(pages);
                *state = Slot::Contents;
                received += 1;
            }
        }
        received
    }
}

/// Copies that touch no place that another of them writes: they may go at once.
#[derive(Debug)]
struct Run {
    /// Inside of segments, by the kernel.
    inside: Vec<Inside>,
    /// From a page in one segment to one in another.
    between: Vec<[u32; 2]>,
    /// Pages, and where they lie in the buffer of that direction, in pages of all layers.
    to_host: Vec<(u32, u64)>,
    to_device: Vec<(u32, u64)>,
}

/// Copies inside of one segment: a dispatch per layer.
#[derive(Debug)]
struct Inside {
    bindings: Vec<wgpu::BindGroup>,
    grid: [u32; 3],
    groups: u32,
}

/// A list of copies with its bindings: recording it creates nothing.
///
/// Copies inside of a segment are made by a kernel (WebGPU itself copies nothing from a buffer to the same), one dispatch for
/// each layer, each segment and each run of copies that may go at once ([`PageCopy::runs`]; lists of several runs are rare);
/// those from one segment to another are copies of WebGPU. Pages to the host and from it go through a buffer each.
#[derive(Debug)]
#[must_use = "the pool counts on these copies"]
pub struct PageCopies {
    layers: Vec<Vec<wgpu::Buffer>>,
    pipeline: wgpu::ComputePipeline,
    layout: KvLayout,
    runs: Vec<Run>,
    to_host: Option<ToHost>,
    from_host: Option<wgpu::Buffer>,
}

/// Pages on their way to host memory.
///
/// When the commands have been submitted, map [`ToHost::buffer`] for reading, and once it is mapped hand this to
/// [`KvStore::receive`]. If the submit failed, drop it: its slots stay empty.
#[derive(Debug)]
#[must_use = "what does not arrive cannot be swapped in"]
pub struct ToHost {
    pub(super) store: u64,
    pub(super) ticket: u64,
    pub(super) slots: Vec<u32>,
    pub(super) buffer: wgpu::Buffer,
}

impl ToHost {
    /// The buffer to be mapped.
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }
}

impl KvStore {
    /// Prepares a list of copies, as the pool has made it, for all layers. Creates the buffers that the list takes: a small
    /// one per run and segment, and one each for pages to the host and from it. What is swapped in is read from its slots now; what is
    /// swapped out gives up what its slots held.
    ///
    /// # Errors
    /// [`CopyError`], and nothing is changed.
    pub fn copies(
        &mut self,
        device: &wgpu::Device,
        copies: &[PageCopy],
        workspace: &Workspace,
    ) -> Result<PageCopies, CopyError> {
        check_devices(device, &[("store", &self.device), ("workspace", workspace.device())])?;
        check_pages(&self.layout, copies)?;
        self.host.check(copies)?;
        let slots = |slot: fn(&PageCopy) -> Option<u32>| -> Vec<u32> { copies.iter().filter_map(slot).collect() };
        let to_host = slots(|copy| if let PageCopy::ToHost { slot, .. } = copy { Some(*slot) } else { None });
        let from_host = slots(|copy| if let PageCopy::ToDevice { slot, .. } = copy { Some(*slot) } else { None });
        let runs = self.runs(device, copies, workspace)?;
        let from_host = self.upload_slots(device, &from_host)?;
        let readback = self.staging(device, "to the host", to_host.len(), wgpu::BufferUsages::MAP_READ)?;
        let to_host = readback.map(|buffer| {
            let ticket = self.host.await_pages(&to_host);
            ToHost { store: self.id, ticket, slots: to_host, buffer }
        });
        let (layers, pipeline) = (self.layers.clone(), self.kernel.pipeline.clone());
        Ok(PageCopies { layers, pipeline, layout: self.layout, runs, to_host, from_host })
    }

    fn runs(&self, device: &wgpu::Device, copies: &[PageCopy], workspace: &Workspace) -> Result<Vec<Run>, CopyError> {
        let (mut to_host_next, mut to_device_next) = (0, 0);
        let numbered = |page: u32, next: &mut u64| {
            *next += 1;
            (page, *next - 1)
        };
        let mut runs = Vec::new();
        for copies in PageCopy::runs(copies) {
            let mut inside: BTreeMap<usize, Vec<[u32; 2]>> = BTreeMap::new();
            let mut between = Vec::new();
            let (mut to_host, mut to_device) = (Vec::new(), Vec::new());
            for copy in copies {
                match *copy {
                    PageCopy::OnDevice { from, to } => {
                        let (segment, others) = (self.layout.place_of(from).0, self.layout.place_of(to).0);
                        if segment == others {
                            let in_segment = |page: u32| page - segment as u32 * self.layout.segment_pages();
                            inside.entry(segment).or_default().push([in_segment(from), in_segment(to)]);
                        } else {
                            between.push([from, to]);
                        }
                    }
                    PageCopy::ToHost { page, .. } => to_host.push(numbered(page, &mut to_host_next)),
                    PageCopy::ToDevice { page, .. } => to_device.push(numbered(page, &mut to_device_next)),
                }
            }
            let inside = inside.iter().map(|(segment, pairs)| self.bind(device, *segment, pairs, workspace));
            let inside = inside.collect::<Result<_, _>>()?;
            runs.push(Run { inside, between, to_host, to_device });
        }
        Ok(runs)
    }

    /// Bindings of the kernel for copies `(from, to)` inside of a segment, whose pages are counted from its first.
    fn bind(
        &self,
        device: &wgpu::Device,
        segment: usize,
        pairs: &[[u32; 2]],
        workspace: &Workspace,
    ) -> Result<Inside, CopyError> {
        let limits = device.limits();
        let page_vectors = self.layout.page_vectors();
        // A run writes fewer pages than there are, and the layout keeps the vectors of all pages below 2^32.
        let page_groups = page_vectors.div_ceil(LANES);
        let groups = page_groups * pairs.len() as u32;
        let axis_max = limits.max_compute_workgroups_per_dimension;
        let grid = fold_grid(groups, axis_max).ok_or(BindError::TooManyWorkgroups {
            kernel: "copy_pages",
            needed: groups,
            axis_max,
        })?;
        let bytes = self.layout.segment_bytes().nth(segment).unwrap_or(0);
        let page_count = (bytes / self.layout.page_bytes().max(1)) as u32;
        let params = CopyParams { page_vectors, page_count, page_groups, groups };
        let list = PlanBuffer::filled(device, "page copies", bytemuck::bytes_of(&params), bytemuck::cast_slice(pairs))?;
        let (words, words_bytes) = list.words();
        let layers = self.layers.iter().filter_map(|segments| segments.get(segment));
        let bindings = layers.map(|pages| {
            let entries = [
                ("page copies", words.clone(), words_bytes),
                ("workspace", workspace.status_binding(), STATUS_ROOM),
                ("kv", pages.as_entire_buffer_binding(), bytes),
            ];
            let bindings = storage_bindings(&limits, &entries, &["kv", "workspace"])?;
            Ok(bind_group(device, &self.kernel.layout, std::iter::once(list.params()).chain(bindings)))
        });
        Ok(Inside { bindings: bindings.collect::<Result<_, BindError>>()?, grid, groups })
    }

    /// A buffer with what slots hold, one after the other; none for no slot.
    fn upload_slots(&self, device: &wgpu::Device, slots: &[u32]) -> Result<Option<wgpu::Buffer>, CopyError> {
        let buffer = self.staging(device, "from the host", slots.len(), wgpu::BufferUsages::MAP_WRITE)?;
        if let Some(buffer) = &buffer {
            let bytes = buffer.size();
            let mut start = 0;
            for contents in slots.iter().filter_map(|slot| self.host.contents(*slot)) {
                let end = start + contents.len() as u64;
                let mapped = buffer.slice(start..end).get_mapped_range_mut();
                mapped.map_err(|error| UploadError { bytes, message: error.to_string() })?.copy_from_slice(contents);
                start = end;
            }
            buffer.unmap();
        }
        Ok(buffer)
    }

    /// A buffer for some pages of all layers; none for no page.
    fn staging(
        &self,
        device: &wgpu::Device,
        direction: &'static str,
        pages: usize,
        usage: wgpu::BufferUsages,
    ) -> Result<Option<wgpu::Buffer>, CopyError> {
        let found = device.limits().max_buffer_size;
        let needed = u128::from(self.layout.page_bytes()) * u128::from(self.layers()) * pages as u128;
        if needed == 0 {
            return Ok(None);
        }
        let size = u64::try_from(needed).ok().filter(|size| *size <= found);
        let size = size.ok_or(CopyError::TooLarge { direction, pages, needed, found })?;
        let to_device = usage.contains(wgpu::BufferUsages::MAP_WRITE);
        let copied = if to_device { wgpu::BufferUsages::COPY_SRC } else { wgpu::BufferUsages::COPY_DST };
        let descriptor = wgpu::BufferDescriptor {
            label: Some(direction),
            size,
            usage: usage | copied,
            mapped_at_creation: to_device,
        };
        Ok(Some(buffers::create(device, &descriptor).map_err(BindError::from)?))
    }
}

impl PageCopies {
    /// Records the copies: before the appends of the same step, and after all that was recorded when the pool made
    /// the list. What goes to the host comes back, to be received.
    pub fn encode(self, encoder: &mut wgpu::CommandEncoder) -> Option<ToHost> {
        let page_bytes = self.layout.page_bytes();
        let slot_bytes = page_bytes * self.layers.len() as u64;
        for run in &self.runs {
            if !run.inside.is_empty() {
                let descriptor = wgpu::ComputePassDescriptor { label: Some("page copies"), timestamp_writes: None };
                let mut pass = encoder.begin_compute_pass(&descriptor);
                pass.set_pipeline(&self.pipeline);
                for Inside { bindings, grid: [x, y, z], .. } in &run.inside {
                    for bindings in bindings {
                        pass.set_bind_group(0, bindings, &[]);
                        pass.dispatch_workgroups(*x, *y, *z);
                    }
                }
            }
            for (layer, segments) in (0..).zip(&self.layers) {
                let in_pages = |page: u32| {
                    let (segment, byte) = self.layout.place_of(page);
                    segments.get(segment).map(|pages| (pages, byte))
                };
                for [from, to] in &run.between {
                    if let (Some((source, from)), Some((target, to))) = (in_pages(*from), in_pages(*to)) {
                        encoder.copy_buffer_to_buffer(source, from, target, to, page_bytes);
                    }
                }
                let in_staging = |number: u64| number * slot_bytes + layer * page_bytes;
                if let Some(ToHost { buffer, .. }) = &self.to_host {
                    for (page, number) in &run.to_host {
                        if let Some((pages, from)) = in_pages(*page) {
                            encoder.copy_buffer_to_buffer(pages, from, buffer, in_staging(*number), page_bytes);
                        }
                    }
                }
                if let Some(buffer) = &self.from_host {
                    for (page, number) in &run.to_device {
                        if let Some((pages, to)) = in_pages(*page) {
                            encoder.copy_buffer_to_buffer(buffer, in_staging(*number), pages, to, page_bytes);
                        }
                    }
                }
            }
        }
        self.to_host
    }

    /// Workgroups that report their end, for [`crate::Status::check`].
    pub fn workgroups(&self) -> u32 {
        let of_segment = |inside: &Inside| inside.groups.wrapping_mul(inside.bindings.len() as u32);
        self.runs.iter().flat_map(|run| &run.inside).map(of_segment).fold(0, u32::wrapping_add)
    }
}

/// Checks the pages of a list.
fn check_pages(layout: &KvLayout, copies: &[PageCopy]) -> Result<(), CopyError> {
    let page_count = layout.page_count();
    for copy in copies {
        let pages = match *copy {
            PageCopy::OnDevice { from, to } if from == to => return Err(CopyError::ToItself { page: from }),
            PageCopy::OnDevice { from, to } => [from, to],
            PageCopy::ToHost { page, .. } | PageCopy::ToDevice { page, .. } => [page, page],
        };
        if let Some(found) = pages.into_iter().find(|page| *page >= page_count) {
            return Err(CopyError::Page { found, page_count });
        }
    }
    Ok(())
}
