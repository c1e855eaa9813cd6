//! Where each key and value row lies: one addressing function with strides.

use std::fmt;
use std::num::NonZeroU32;

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

use super::dtypes::{KvDtype, KvDtypes};
use crate::buffers::{self, OutOfMemory, binding_bytes};
use crate::geometry::{HeadGeometry, PageSize};

/// Bytes of a vector, the unit of all device offsets.
pub const VECTOR_BYTES: u32 = 16;

/// A pool that cannot be addressed or bound.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Row offsets would not fit into 32 bits.
    #[error("{page_count} pages of {page_bytes} bytes need {needed} bytes; at most {limit} can be addressed")]
    TooLarge {
        /// Pages asked for.
        page_count: u32,
        /// Bytes of a page.
        page_bytes: u64,
        /// Bytes of all.
        needed: u128,
        /// The largest pool, in bytes.
        limit: u64,
    },
    /// The pool, or a segment of it, does not fit into one binding of the device; or not even a page does.
    #[error(
        "the pages need a binding of {needed} bytes; the device allows {found} (`KvLayout::within` makes segments that fit)"
    )]
    Binding {
        /// Bytes of the pool, of a segment or of a page.
        needed: u64,
        /// The device's `max_storage_buffer_binding_size`, or its `max_buffer_size` where that is less.
        found: u64,
    },
    /// The device has no memory.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
}

/// Strides of one kind of row (keys or values) inside the pool in vectors of 16 bytes, or of their scales in words.
///
/// The shader's `RowLayout` has the same fields in the same order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RowLayout {
    /// Where the first row of page 0 starts.
    pub base: u32,
    /// From a page to the next.
    pub page_stride: u32,
    /// From a KV head to the next.
    pub head_stride: u32,
    /// From a slot to the next.
    pub slot_stride: u32,
}

impl RowLayout {
    /// The same rows in a binding that begins with another page than the first. Offsets of the pages before it wrap, so that
    /// they lie past the binding's end: those of all pages together do not.
    pub(crate) fn beginning_at(self, page: u32) -> Self {
        Self { base: self.base.wrapping_sub(page.wrapping_mul(self.page_stride)), ..self }
    }

    /// Where a row or a scale starts, in that unit. [`KvLayout::new`] has checked that no row of its pool overflows.
    pub fn offset(&self, page: u32, kv_head: u32, slot: u32) -> u32 {
        self.base + page * self.page_stride + kv_head * self.head_stride + slot * self.slot_stride
    }
}

/// What comes first inside the keys (and inside the values) of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RowOrder {
    /// `[kv_head, slot, dim]`: the keys of a head lie one after the other.
    #[default]
    HeadSlot,
    /// `[slot, kv_head, dim]`: the heads of a token lie one after the other.
    SlotHead,
}

/// The layout of a pool of pages: `[page, (keys then values), kv_head, slot, dim]`, or with slot and head in the other
/// order; then, where rows have scales of their own ([`crate::KvDtype::Int8`]), those of the keys and those of the values, in f32
/// and in the order of the rows.
///
/// Whatever belongs to a page lies together, so that a pool takes one binding and a page is copied as one range. A pool that
/// is larger than a binding lies in several *segments* ([`KvLayout::within`]), one binding each, with the same number of whole
/// pages each, the last one with those that are left. The ids of pages count through all of them.
///
/// A dispatch binds as many segments as the device has bindings for. Where the pool has more, they come in *groups* of so
/// many, with a dispatch for each: the keys of a row are gone through group by group, and the partial results merged. So
/// results of a sequence whose pages lie in several groups depend on which page is in which: for other places of pages they
/// are the same within the error bound, not bit for bit. (Within a group, places change no bit.)
///
/// Rows are
/// padded to multiples of [`crate::ROW_ALIGN`] elements and of 16 bytes; what lies in the padding, in slots past a
/// sequence's end and in pages without an owner never matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    geometry: HeadGeometry,
    dtypes: KvDtypes,
    order: RowOrder,
    page_size: PageSize,
    page_count: u32,
    /// Pages of every segment but the last; all of them where there is one.
    segment_pages: u32,
    k_rows: RowLayout,
    v_rows: RowLayout,
    k_scales: RowLayout,
    v_scales: RowLayout,
    bytes: u64,
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { geometry, dtypes, order, page_size, page_count, .. } = self;
        let [heads, d, v] = [geometry.kv_heads(), geometry.head_dim(), geometry.v_head_dim()];
        write!(f, "{page_count} pages of {} in {} segments, {heads} KV heads, ", page_size.get(), self.segments())?;
        if geometry.is_latent() {
            write!(f, "keys of {d} with values of {v} in them, ")?;
        } else {
            write!(f, "keys of {d}, values of {v}, ")?;
        }
        write!(f, "{dtypes}")?;
        if *order == RowOrder::SlotHead { write!(f, ", by slot") } else { Ok(()) }
    }
}

impl KvLayout {
    /// A pool of keys and values of one type, or of two, in the order [`RowOrder::HeadSlot`].
    ///
    /// # Errors
    /// [`LayoutError::TooLarge`] if an offset could pass 32 bits.
    pub fn new(
        geometry: HeadGeometry,
        dtypes: impl Into<KvDtypes>,
        page_size: PageSize,
        page_count: u32,
    ) -> Result<Self, LayoutError> {
        let dtypes = dtypes.into().of(&geometry);
        let [k_row, v_row] = row_vectors(&geometry, dtypes);
        // Below 2^96, so that the product with a page count stays below 2^128.
        let slots = u128::from(geometry.kv_heads()) * u128::from(page_size.get());
        let rows = slots * u128::from(k_row + v_row);
        let scales = |is_there: bool| if is_there { slots.div_ceil(4) } else { 0 };
        let k_scales = scales(dtypes.k.has_row_scales());
        let v_scales = scales(dtypes.v.has_row_scales() && !geometry.is_latent());
        let page_vectors = rows + k_scales + v_scales;
        let total = page_vectors * u128::from(page_count);
        // Rows are addressed in vectors, scales in words.
        let unit = if dtypes.has_row_scales() { 4 } else { VECTOR_BYTES };
        let too_large = || LayoutError::TooLarge {
            page_count,
            page_bytes: u64::try_from(page_vectors * u128::from(VECTOR_BYTES)).unwrap_or(u64::MAX),
            needed: total * u128::from(VECTOR_BYTES),
            limit: u64::from(u32::MAX) * u64::from(unit),
        };
        // Strides are below the page's size; a pool without pages still needs them to be representable.
        let units = |vectors: u128| u32::try_from(vectors * u128::from(VECTOR_BYTES / unit));
        let (Ok(page_units), Ok(_)) = (units(page_vectors), units(total)) else {
            return Err(too_large());
        };
        // Strides inside a page come with the order.
        let part =
            |base: u128, page_stride: u32| RowLayout { base: base as u32, page_stride, head_stride: 0, slot_stride: 0 };
        let rows_at = |base| part(base, page_vectors as u32);
        let scales_at =
            |dtype: KvDtype, base| if dtype.has_row_scales() { part(4 * base, page_units) } else { part(0, 0) };
        let latent = geometry.is_latent();
        let layout = Self {
            geometry,
            dtypes,
            order: RowOrder::HeadSlot,
            page_size,
            page_count,
            segment_pages: page_count,
            k_rows: rows_at(0),
            v_rows: rows_at(if latent { 0 } else { slots * u128::from(k_row) }),
            k_scales: scales_at(dtypes.k, rows),
            v_scales: scales_at(dtypes.v, if latent { rows } else { rows + k_scales }),
            bytes: (total * u128::from(VECTOR_BYTES)) as u64,
        };
        Ok(layout.with_order(RowOrder::HeadSlot))
    }

    /// The same pool with its rows in another order.
    #[must_use]
    pub fn with_order(mut self, order: RowOrder) -> Self {
        let [k_row, v_row] = self.row_vectors();
        let v_row = if self.geometry.is_latent() { k_row } else { v_row };
        for (rows, row) in
            [(&mut self.k_rows, k_row), (&mut self.v_rows, v_row), (&mut self.k_scales, 1), (&mut self.v_scales, 1)]
        {
            (rows.head_stride, rows.slot_stride) = match order {
                RowOrder::HeadSlot => (self.page_size.get() * row, row),
                RowOrder::SlotHead => (row, self.geometry.kv_heads() * row),
            };
        }
        Self { order, ..self }
    }

    /// The same pool in segments of so many pages each.
    #[must_use]
    pub fn with_segment_pages(self, pages: NonZeroU32) -> Self {
        Self { segment_pages: pages.get().min(self.page_count), ..self }
    }

    /// The same pool in segments that a device with these limits can bind, each as large as may be; in one segment if that
    /// is enough.
    ///
    /// # Errors
    /// [`LayoutError::Binding`] if not even a page fits.
    pub fn within(self, limits: &wgpu::Limits) -> Result<Self, LayoutError> {
        let (needed, found) = (self.page_bytes(), binding_bytes(limits));
        if self.bytes <= found {
            return Ok(Self { segment_pages: self.page_count, ..self });
        }
        // Fewer than all pages fit, of which there are less than 2^32.
        match NonZeroU32::new(found.checked_div(needed).unwrap_or(0) as u32) {
            Some(pages) => Ok(self.with_segment_pages(pages)),
            None => Err(LayoutError::Binding { needed, found }),
        }
    }

    /// The same kind of pool with other pages, in one segment.
    ///
    /// # Errors
    /// As [`KvLayout::new`].
    pub fn with_pages(&self, page_size: PageSize, page_count: u32) -> Result<Self, LayoutError> {
        Ok(Self::new(self.geometry, self.dtypes, page_size, page_count)?.with_order(self.order))
    }

    /// Heads and dimensions.
    pub fn geometry(&self) -> &HeadGeometry {
        &self.geometry
    }

    /// Types of the keys and values.
    pub fn dtypes(&self) -> KvDtypes {
        self.dtypes
    }

    /// Order of the rows inside a page.
    pub fn order(&self) -> RowOrder {
        self.order
    }

    /// Tokens per page.
    pub fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Pages in the pool.
    pub fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Segments that the pool lies in.
    pub fn segments(&self) -> NonZeroU32 {
        let segments = self.page_count.checked_div(self.segment_pages).unwrap_or(0);
        let rest = u32::from(segments * self.segment_pages < self.page_count);
        NonZeroU32::new(segments + rest).unwrap_or(NonZeroU32::MIN)
    }

    /// Pages of a segment; of the last one, at most so many.
    pub fn segment_pages(&self) -> u32 {
        self.segment_pages
    }

    /// Bytes of each segment. One after the other they are the pool.
    pub fn segment_bytes(&self) -> impl Iterator<Item = u64> + use<> {
        let (page_bytes, pages, count) = (self.page_bytes(), self.segment_pages, self.page_count);
        (0..self.segments().get()).map(move |segment| u64::from(pages.min(count - segment * pages)) * page_bytes)
    }

    /// The segment of a page, and the byte in it where the page begins.
    pub fn place_of(&self, page: u32) -> (usize, u64) {
        let pages = self.segment_pages.max(1);
        ((page / pages) as usize, u64::from(page % pages) * self.page_bytes())
    }

    /// Strides of the key rows.
    pub fn k_rows(&self) -> &RowLayout {
        &self.k_rows
    }

    /// Strides of the value rows.
    pub fn v_rows(&self) -> &RowLayout {
        &self.v_rows
    }

    /// Strides of the keys' scales, in words of 4 bytes; `None` where rows have none.
    pub fn k_scales(&self) -> Option<&RowLayout> {
        self.dtypes.k.has_row_scales().then_some(&self.k_scales)
    }

    /// Strides of the values' scales, alike. Where values are part of the keys, so are their scales.
    pub fn v_scales(&self) -> Option<&RowLayout> {
        self.dtypes.v.has_row_scales().then_some(&self.v_scales)
    }

    /// All strides, for a shader: of key rows, value rows, their scales.
    pub(crate) fn strides(&self) -> [RowLayout; 4] {
        [self.k_rows, self.v_rows, self.k_scales, self.v_scales]
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> u64 {
        u64::from(self.page_vectors()) * u64::from(VECTOR_BYTES)
    }

    /// Vectors of 16 bytes of a page.
    pub(super) fn page_vectors(&self) -> u32 {
        self.k_rows.page_stride
    }

    /// Bytes of the pool.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Vectors of 16 bytes that a token's key row and value row take; no value row where it is part of the key row.
    pub(crate) fn row_vectors(&self) -> [u32; 2] {
        row_vectors(&self.geometry, self.dtypes)
    }

    /// Creates a buffer for the whole pool (`STORAGE | COPY_DST | COPY_SRC`, zeroed by the device).
    ///
    /// # Errors
    /// [`LayoutError::Binding`] if the device cannot bind so much at once; [`LayoutError::OutOfMemory`].
    pub fn create_buffer(&self, device: &wgpu::Device) -> Result<wgpu::Buffer, LayoutError> {
        create_buffer(device, self.bytes)
    }

    /// Creates a buffer for each segment, alike.
    ///
    /// # Errors
    /// [`LayoutError::Binding`] if the device cannot bind a segment at once; [`LayoutError::OutOfMemory`].
    pub fn create_segments(&self, device: &wgpu::Device) -> Result<Vec<wgpu::Buffer>, LayoutError> {
        self.segment_bytes().map(|bytes| create_buffer(device, bytes)).collect()
    }

    /// Refuses a pool of which a device with these limits cannot bind a segment at once.
    pub(super) fn check_binding(&self, limits: &wgpu::Limits) -> Result<(), LayoutError> {
        let (needed, found) = (self.segment_bytes().next().unwrap_or(0), binding_bytes(limits));
        if needed > found { Err(LayoutError::Binding { needed, found }) } else { Ok(()) }
    }
}

fn create_buffer(device: &wgpu::Device, needed: u64) -> Result<wgpu::Buffer, LayoutError> {
    let found = binding_bytes(&device.limits());
    if needed > found {
        return Err(LayoutError::Binding { needed, found });
    }
    let descriptor = wgpu::BufferDescriptor {
        label: Some("kv pages"),
        size: needed.max(VECTOR_BYTES.into()),
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    };
    Ok(buffers::create(device, &descriptor)?)
}

/// Vectors of 16 bytes of a key row and of a value row that is not part of it.
fn row_vectors(geometry: &HeadGeometry, dtypes: KvDtypes) -> [u32; 2] {
    let v_row = dtypes.v.row_vectors(geometry.v_head_dim());
    [dtypes.k.row_vectors(geometry.head_dim()), if geometry.is_latent() { 0 } else { v_row }]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::geometry::Dtype;

    fn geometry() -> impl Strategy<Value = HeadGeometry> {
        let heads = (1..4_u32, 1..4_u32, 1..80_u32, 1..80_u32, any::<bool>());
        heads.prop_map(|(group, kv_heads, dim, v_dim, latent)| {
            if latent {
                HeadGeometry::latent(group, dim.max(v_dim), dim.min(v_dim)).unwrap()
            } else {
                HeadGeometry::with_v_head_dim(group * kv_heads, kv_heads, dim, v_dim).unwrap()
            }
        })
    }

    fn dtypes() -> impl Strategy<Value = KvDtypes> {
        let one = || proptest::sample::select(&KvDtype::ALL[..]);
        (one(), one()).prop_map(|(k, v)| KvDtypes { k, v })
    }

    proptest! {
        /// No two rows or scales of a pool share a byte, rows start at multiples of 16 bytes, and what belongs to a page
        /// lies in its one range.
        #[test]
        fn every_row_and_scale_has_bytes_of_its_own(
            geometry in geometry(), dtypes in dtypes(), page_size in 1..9_u32, pages in 1..4_u32, by_slot in any::<bool>(),
        ) {
            let order = if by_slot { RowOrder::SlotHead } else { RowOrder::HeadSlot };
            let page_size = PageSize::new(page_size).unwrap();
            let layout = KvLayout::new(geometry, dtypes, page_size, pages).unwrap().with_order(order);
            prop_assert_eq!(layout.bytes(), layout.page_bytes() * u64::from(pages));
            let mut owner = vec![false; layout.bytes() as usize];
            let mut own = |page: u32, start: usize, len: usize| {
                let in_page = start as u64 / layout.page_bytes() == u64::from(page)
                    && (start + len - 1) as u64 / layout.page_bytes() == u64::from(page);
                let free = owner[start..start + len].iter().all(|owned| !owned);
                owner[start..start + len].fill(true);
                in_page && free
            };
            let (stored, latent) = (layout.dtypes(), geometry.is_latent());
            let row = |dtype: KvDtype, dim: u32| 16 * dtype.row_vectors(dim) as usize;
            for page in 0..pages {
                for (head, slot) in (0..geometry.kv_heads()).flat_map(|h| (0..page_size.get()).map(move |s| (h, s))) {
                    let at = |rows: &RowLayout, unit: usize| rows.offset(page, head, slot) as usize * unit;
                    prop_assert!(own(page, at(layout.k_rows(), 16), row(stored.k, geometry.head_dim())));
                    if latent {
                        prop_assert_eq!(layout.v_rows(), layout.k_rows());
                        prop_assert_eq!(layout.v_scales(), layout.k_scales());
                    } else {
                        prop_assert!(own(page, at(layout.v_rows(), 16), row(stored.v, geometry.v_head_dim())));
                    }
                    for scales in [layout.k_scales(), layout.v_scales().filter(|_| !latent)].into_iter().flatten() {
                        prop_assert!(own(page, at(scales, 4), 4));
                    }
                }
            }
            // What is left over fills the scales up to whole vectors.
            let slots = u64::from(geometry.kv_heads() * page_size.get());
            let blocks = [layout.k_scales(), layout.v_scales().filter(|_| !latent)].into_iter().flatten().count() as u64;
            let unowned = owner.iter().filter(|owned| !**owned).count() as u64;
            prop_assert_eq!(unowned, u64::from(pages) * blocks * (slots.next_multiple_of(4) - slots) * 4);
            prop_assert_eq!(layout.with_pages(page_size, pages), Ok(layout));
        }
    }

    #[test]
    fn segments() {
        let geometry = HeadGeometry::new(1, 1, 16).unwrap();
        let layout = |pages| KvLayout::new(geometry, Dtype::F32, PageSize::new(4).unwrap(), pages).unwrap();
        let page_bytes = layout(1).page_bytes();
        assert_eq!(page_bytes, 4 * 2 * 64);
        let limits = |max_storage_buffer_binding_size, max_buffer_size| wgpu::Limits {
            max_storage_buffer_binding_size,
            max_buffer_size,
            ..wgpu::Limits::default()
        };
        for pages in 0..20_u32 {
            let whole = layout(pages);
            assert_eq!((whole.segments().get(), whole.segment_bytes().collect()), (1, vec![whole.bytes()]));
            for size in 1..25 {
                let parts = whole.with_segment_pages(NonZeroU32::new(size).unwrap());
                let sizes: Vec<u64> = parts.segment_bytes().collect();
                assert_eq!(parts.segments().get(), pages.div_ceil(size).max(1));
                assert_eq!((sizes.len() as u32, sizes.iter().sum()), (parts.segments().get(), whole.bytes()));
                let (last, others) = sizes.split_last().unwrap();
                assert!(
                    others.iter().all(|bytes| *bytes == u64::from(size) * page_bytes)
                        && *last <= u64::from(size) * page_bytes
                );
                assert!(pages == 0 || *last > 0);
                // The most that fits, by either limit.
                let bytes = u64::from(size) * page_bytes;
                for limits in [limits(bytes, u64::MAX), limits(u64::MAX, bytes + 15)] {
                    assert_eq!(whole.within(&limits), Ok(parts));
                    assert_eq!(parts.within(&limits), Ok(parts));
                }
            }
            // One segment where it is enough, whatever there was before.
            let single = whole.with_segment_pages(NonZeroU32::MIN);
            assert_eq!(single.within(&limits(whole.bytes(), u64::MAX)), Ok(whole));
        }
        let short = page_bytes - 1;
        let error = LayoutError::Binding { needed: page_bytes, found: short };
        assert_eq!(layout(1).within(&limits(short, u64::MAX)), Err(error.clone()));
        assert_eq!(layout(1).within(&limits(u64::MAX, short)), Err(error));
        assert_eq!(layout(0).within(&limits(0, 0)), Ok(layout(0)));
    }

    /// The last rows of the largest pools: the sum in 32 bits is the sum.
    #[test]
    fn offsets_near_the_end_of_32_bits() {
        for (dtype, dim, page_size) in [
            (KvDtype::F16, 8, 1),
            (KvDtype::F16, 128, 16),
            (KvDtype::F32, 59, 33),
            (KvDtype::Int8, 128, 16),
            (KvDtype::Fp8, 512, 7),
        ] {
            let geometry = HeadGeometry::new(6, 3, dim).unwrap();
            let page_size = PageSize::new(page_size).unwrap();
            let layout = |pages| KvLayout::new(geometry, dtype, page_size, pages);
            let page_bytes = layout(1).unwrap().page_bytes();
            let unit = if dtype == KvDtype::Int8 { 4 } else { 16 };
            let most = (u64::from(u32::MAX) * unit / page_bytes) as u32;
            let largest = layout(most).unwrap();
            for rows in
                [largest.k_rows(), largest.v_rows()].into_iter().chain(largest.k_scales()).chain(largest.v_scales())
            {
                for (page, head, slot) in [(most - 1, 2, page_size.get() - 1), (most / 2, 1, 0)] {
                    let wide = |of: fn(&RowLayout) -> u32, times: u32| u64::from(of(rows)) * u64::from(times);
                    let offset = wide(|rows| rows.base, 1)
                        + wide(|rows| rows.page_stride, page)
                        + wide(|rows| rows.head_stride, head)
                        + wide(|rows| rows.slot_stride, slot);
                    assert_eq!(u64::from(rows.offset(page, head, slot)), offset, "{dtype}");
                }
            }
            let refused = layout(most + 1);
            assert!(
                matches!(refused, Err(LayoutError::TooLarge { page_count, .. }) if page_count == most + 1),
                "{dtype}"
            );
            // In segments as well.
            let limits = wgpu::Limits::default();
            let segments = largest.within(&limits).unwrap();
            assert_eq!(segments.segment_bytes().sum::<u64>(), largest.bytes());
            assert!(segments.segment_bytes().all(|bytes| bytes <= limits.max_storage_buffer_binding_size));
        }
    }

    #[test]
    fn pools_past_32_bits_are_refused() {
        let (geometry, page_size) = (HeadGeometry::new(1, 1, 16).unwrap(), PageSize::new(4).unwrap());
        // 2 rows of 16 bytes and 2 scales for each of 4 slots.
        let page_bytes = 4 * (16 + 16 + 4 + 4);
        let most = u32::MAX / (page_bytes / 4);
        assert!(KvLayout::new(geometry, KvDtype::Int8, page_size, most).is_ok());
        let refused = KvLayout::new(geometry, KvDtype::Int8, page_size, most + 1);
        assert_eq!(
            refused,
            Err(LayoutError::TooLarge {
                page_count: most + 1,
                page_bytes: page_bytes.into(),
                needed: u128::from(most + 1) * u128::from(page_bytes),
                limit: u64::from(u32::MAX) * 4,
            })
        );
        // Without scales, offsets are in vectors.
        assert!(KvLayout::new(geometry, KvDtype::Fp8, page_size, most + 1).is_ok());
    }
}
