//! What the pool's ids stand for: pages on the device, a buffer per layer and segment, and slots of host memory.

use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

use super::copies::{CopyError, HostSlots, ToHost};
use super::layout::{KvLayout, LayoutError};
use super::pool::PoolConfig;
use crate::kernels::{BuildError, CopyKernel};

/// Pages that cannot be kept.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A segment of a layer's pages does not fit into one binding of the device, or the device has no memory for it.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The kernel that copies pages could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The host has no memory for the slots.
    #[error("there is no memory for {needed} bytes of host slots")]
    HostMemory {
        /// Bytes of all slots.
        needed: u128,
    },
    /// There is no such layer.
    #[error("layer {found} was asked for; there are {layers}")]
    Layer {
        /// The layer asked for.
        found: u32,
        /// Layers.
        layers: u32,
    },
}

/// The pages of all layers, and the slots of host memory that they are swapped to: what the ids of a
/// [`crate::BlockPool`] stand for.
///
/// A page id means the same page in every layer, whose pages lie in a buffer per segment, laid out as [`KvLayout`] says. Appends and
/// attention bind [`KvStore::pages`]; [`KvStore::copies`] makes the copies that the pool asks for. The store knows nothing
/// of owners, so what `docs/memory.md` says of the order of work is the caller's to keep.
///
/// At first every page and slot holds zeros. Nothing is cleared later: a page that is given back holds what it held, until
/// its next owner writes to it.
#[derive(Debug)]
pub struct KvStore {
    pub(super) id: u64,
    pub(super) device: wgpu::Device,
    pub(super) layout: KvLayout,
    /// Of each layer, its segments.
    pub(super) layers: Vec<Vec<wgpu::Buffer>>,
    pub(super) host: HostSlots,
    pub(super) kernel: CopyKernel,
}

/// Tells stores apart.
static NEXT_STORE: AtomicU64 = AtomicU64::new(0);

impl KvStore {
    /// Pages of `layers` layers, each of `layout`, and room on the host for `host_slot_count` of them
    /// ([`crate::PoolConfig`] has the same number).
    ///
    /// Uses error scopes of the calling thread; waits for the device to answer them.
    ///
    /// # Errors
    /// [`StoreError::Layout`] if the device cannot bind a segment of the pages at once ([`KvLayout::within`] makes such that it
    /// can), or has no memory for it; [`StoreError::HostMemory`]; [`StoreError::Build`].
    pub async fn new(
        device: &wgpu::Device,
        layout: &KvLayout,
        layers: u32,
        host_slot_count: u32,
    ) -> Result<Self, StoreError> {
        Self::with_edits(device, layout, layers, host_slot_count, &[]).await
    }

    #[doc(hidden)]
    pub async fn with_edits(
        device: &wgpu::Device,
        layout: &KvLayout,
        layers: u32,
        host_slot_count: u32,
        edits: &[(&str, &str)],
    ) -> Result<Self, StoreError> {
        layout.check_binding(&device.limits())?;
        let kernel = CopyKernel::new(device, edits).await?;
        let host = HostSlots::new(layout.page_bytes(), layers, host_slot_count)
            .map_err(|needed| StoreError::HostMemory { needed })?;
        let layers: Result<_, _> = (0..layers).map(|_| layout.create_segments(device)).collect();
        let (id, device) = (NEXT_STORE.fetch_add(1, Ordering::Relaxed), device.clone());
        Ok(Self { id, device, layout: *layout, layers: layers?, host, kernel })
    }

    /// The layout of each layer's pages.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Layers.
    pub fn layers(&self) -> u32 {
        self.layers.len() as u32
    }

    /// The size of the pool whose ids the store can have: `BlockPool::new(store.pool_config())`.
    pub fn pool_config(&self) -> PoolConfig {
        let (page_size, page_count) = (self.layout.page_size(), self.layout.page_count());
        PoolConfig { page_size, page_count, host_slot_count: self.host.count() }
    }

    /// A layer's pages, segment by segment: [`crate::AppendSource::kv`] and [`crate::AttentionIo::kv`].
    ///
    /// # Errors
    /// [`StoreError::Layer`].
    pub fn pages(&self, layer: u32) -> Result<Vec<wgpu::BufferBinding<'_>>, StoreError> {
        let segments =
            self.layers.get(layer as usize).ok_or(StoreError::Layer { found: layer, layers: self.layers() })?;
        Ok(segments.iter().map(wgpu::Buffer::as_entire_buffer_binding).collect())
    }

    /// Bytes of device memory: the pages of all layers.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().flatten().map(wgpu::Buffer::size).sum()
    }

    /// Bytes of host memory: all slots, whether they are in use or not.
    pub fn host_bytes(&self) -> u64 {
        self.host.bytes()
    }

    /// Takes over pages that have arrived from the device, once [`ToHost::buffer`] is mapped: the slots may be swapped in
    /// from now on. Says how many slots these are; one that was swapped out to again meanwhile is not among them, and
    /// waits for its later contents.
    ///
    /// # Errors
    /// [`CopyError::OtherStore`], [`CopyError::NotMapped`].
    pub fn receive(&mut self, arrived: &ToHost) -> Result<u32, CopyError> {
        if arrived.store != self.id {
            return Err(CopyError::OtherStore);
        }
        let mapped = arrived.buffer.slice(..).get_mapped_range();
        let mapped = mapped.map_err(|error| CopyError::NotMapped { message: error.to_string() })?;
        Ok(self.host.receive(arrived.ticket, &arrived.slots, &mapped))
    }
}
