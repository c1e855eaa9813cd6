//! Host tensors in the order and padding of the device, and back.

use super::{RunError, RunOptions};
use crate::batch::{Batch, BatchError};
use crate::case::{Case, KvSource};
use crate::geometry::{Dtype, HeadGeometry, PageSize, padded_dim};
use crate::kv::{FP8_MAX, HEAD_SCALE_MAX, HEAD_SCALE_MIN, KvLayout, PoolView, Rotary};
use crate::plan::PlanError;
use crate::tensor::{Tensor, TensorError};

/// What row padding is filled with: NaN in every type. Padding is unowned and never matters; filling it so keeps
/// that promise honest in every run. So are pages that hold converted rows, before these are written.
pub(super) const PADDING: u8 = 0xff;

/// The page table of a case: its own, or one made for contiguous keys and values.
pub(super) struct PageTable {
    pub(super) page_size: PageSize,
    pub(super) page_count: u32,
    pub(super) page_indptr: Vec<u32>,
    pub(super) page_ids: Vec<u32>,
    pub(super) kv_len: Vec<u32>,
}

impl PageTable {
    pub(super) fn new(case: &Case, options: &RunOptions) -> Result<Self, RunError> {
        let kv_len: Vec<u32> = case.lengths().into_iter().map(|(_, kv_len)| kv_len).collect();
        if let KvSource::Paged { k_pages, page_indptr, page_ids, .. } = case.kv() {
            return Ok(Self {
                page_size: case.page_size().unwrap_or(options.page_size),
                page_count: k_pages.shape().first().map_or(0, |pages| *pages as u32),
                page_indptr: page_indptr.clone(),
                page_ids: page_ids.clone(),
                kv_len,
            });
        }
        let page_size = options.page_size;
        let mut page_indptr = Vec::with_capacity(kv_len.len() + 1);
        let mut needed = 0_u32;
        page_indptr.push(needed);
        for tokens in &kv_len {
            // Pages are at most as many as tokens, and the tokens of all sequences fit into 32 bits.
            needed = needed.saturating_add(page_size.pages_for(*tokens));
            page_indptr.push(needed);
        }
        let page_ids = options.page_ids.clone().unwrap_or_else(|| (0..needed).collect());
        let mut distinct = page_ids.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if page_ids.len() != needed as usize || distinct.len() != page_ids.len() {
            return Err(RunError::PageIds {
                found: distinct.len(),
                needed: needed as usize,
                tokens: kv_len.iter().map(|tokens| u64::from(*tokens)).sum(),
                page_size: page_size.get(),
            });
        }
        let page_count = match distinct.last() {
            Some(last) => last.checked_add(1).ok_or(PlanError::Batch(BatchError::PageId {
                index: 0,
                found: *last,
                page_count: u32::MAX,
            }))?,
            None => 0,
        };
        Ok(Self { page_size, page_count, page_indptr, page_ids, kv_len })
    }

    /// Page and slot of every token, sequence after sequence.
    fn slots(&self) -> impl Iterator<Item = (u32, u32)> {
        let page_size = self.page_size.get();
        self.page_indptr.iter().zip(&self.kv_len).flat_map(move |(begin, kv_len)| {
            let pages = self.page_ids.get(*begin as usize..).unwrap_or_default();
            (0..*kv_len).filter_map(move |position| {
                pages.get((position / page_size) as usize).map(|page| (*page, position % page_size))
            })
        })
    }

    pub(super) fn batch<'a>(&'a self, case: &'a Case) -> Batch<'a> {
        Batch {
            q_indptr: case.q_indptr(),
            page_indptr: &self.page_indptr,
            page_ids: &self.page_ids,
            kv_len: &self.kv_len,
        }
    }
}

/// What an append is given for a case: every token once, though sequences share pages.
pub(super) struct NewTokens {
    q_indptr: Vec<u32>,
    page_indptr: Vec<u32>,
    page_ids: Vec<u32>,
    kv_len: Vec<u32>,
    /// Key rows, padded as the device wants them.
    pub(super) k: Vec<u8>,
    /// Value rows, alike.
    pub(super) v: Vec<u8>,
}

impl NewTokens {
    pub(super) fn new(case: &Case, table: &PageTable) -> Self {
        let (geometry, kv) = (case.geometry(), case.kv());
        let dims = [geometry.head_dim(), geometry.v_head_dim()];
        match kv {
            KvSource::Contiguous { k, v, kv_indptr } => Self {
                q_indptr: kv_indptr.clone(),
                page_indptr: table.page_indptr.clone(),
                page_ids: table.page_ids.clone(),
                kv_len: table.kv_len.clone(),
                k: padded(k, dims[0]),
                v: padded(v, dims[1]),
            },
            // A page with owned slots takes the place of a sequence.
            KvSource::Paged { k_pages, v_pages, .. } => {
                let owned = case.owned_slots();
                let pages = || owned.iter().enumerate().filter(|(_, slots)| **slots > 0);
                let ends = pages().scan(0, |end, (_, slots)| {
                    *end += slots;
                    Some(*end)
                });
                let page_size = table.page_size.get() as usize;
                let [k, v] = [(k_pages, dims[0]), (v_pages, dims[1])].map(|(tensor, dim)| {
                    let rows = padded(tensor, dim);
                    let page_bytes = rows.len() / owned.len().max(1);
                    let pages = owned.iter().zip(rows.chunks_exact(page_bytes.max(1)));
                    pages
                        .flat_map(|(slots, page)| page.iter().take(page_bytes / page_size * *slots as usize))
                        .copied()
                        .collect()
                });
                Self {
                    q_indptr: std::iter::once(0).chain(ends).collect(),
                    page_indptr: (0..=pages().count() as u32).collect(),
                    page_ids: pages().map(|(page, _)| page as u32).collect(),
                    kv_len: pages().map(|(_, slots)| *slots).collect(),
                    k,
                    v,
                }
            }
        }
    }

    pub(super) fn batch(&self) -> Batch<'_> {
        Batch {
            q_indptr: &self.q_indptr,
            page_indptr: &self.page_indptr,
            page_ids: &self.page_ids,
            kv_len: &self.kv_len,
        }
    }
}

/// Scales of keys and values of each KV head: as small as they can be for the largest magnitude that is stored.
pub(super) fn head_scales(case: &Case, layout: &KvLayout, rotary: Option<&Rotary>) -> Vec<[f32; 2]> {
    // No rotated element is longer than its pair.
    let rotated = rotary.map_or(1.0, |rotary| std::f64::consts::SQRT_2 * rotary.magnitude());
    let mut largest = vec![[0.0_f64; 2]; layout.geometry().kv_heads() as usize];
    for kv in (0..case.seqs()).filter_map(|seq| case.sequence_kv(seq)) {
        for (head, [k_max, v_max]) in largest.iter_mut().enumerate() {
            let max = |rows: &[f32]| f64::from(rows.iter().fold(0.0_f32, |max, x| max.max(x.abs())));
            *k_max = k_max.max(max(kv.k(head)) * rotated);
            *v_max = v_max.max(max(kv.v(head)));
        }
    }
    let scale =
        |largest: f64| (largest / f64::from(FP8_MAX)).clamp(HEAD_SCALE_MIN.into(), HEAD_SCALE_MAX.into()) as f32;
    largest.into_iter().map(|largest| largest.map(scale)).collect()
}

/// The stored row at a page, KV head and slot.
type RowOf<'a> = &'a dyn Fn(u32, u32, u32) -> Option<Vec<f32>>;

/// Keys and values of the pages, in f32 and in the order of the case.
pub(super) fn stored_rows(case: &Case, table: &PageTable, pool: &PoolView<'_>) -> Result<KvSource, TensorError> {
    let kv_heads = case.geometry().kv_heads();
    let page_size = table.page_size.get();
    let rows = |shape: &[usize], row: RowOf<'_>| {
        let tokens: Vec<(u32, u32)> = match case.kv() {
            KvSource::Contiguous { .. } => table.slots().collect(),
            KvSource::Paged { .. } => {
                (0..table.page_count).flat_map(|page| (0..page_size).map(move |slot| (page, slot))).collect()
            }
        };
        let rows = tokens.iter().flat_map(|(page, slot)| (0..kv_heads).map(move |head| (page, head, slot)));
        // Every place is one of the pool's.
        let values: Vec<f32> =
            rows.flat_map(|(page, head, slot)| row(*page, head, *slot).unwrap_or_default()).collect();
        Tensor::from_f32(Dtype::F32, shape, &values)
    };
    let key: RowOf<'_> = &|page, head, slot| pool.key(page, head, slot);
    let value: RowOf<'_> = &|page, head, slot| pool.value(page, head, slot);
    Ok(match case.kv().clone() {
        KvSource::Contiguous { k, v, kv_indptr } => {
            KvSource::Contiguous { k: rows(k.shape(), key)?, v: rows(v.shape(), value)?, kv_indptr }
        }
        KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len } => KvSource::Paged {
            k_pages: rows(k_pages.shape(), key)?,
            v_pages: rows(v_pages.shape(), value)?,
            page_indptr,
            page_ids,
            kv_len,
        },
    })
}

/// The rows of a tensor, each padded as the device wants it.
pub(super) fn padded(tensor: &Tensor, dim: u32) -> Vec<u8> {
    let row = (dim * tensor.dtype().bytes()) as usize;
    let padded_row = (padded_dim(dim) * tensor.dtype().bytes()) as usize;
    if row == padded_row {
        return tensor.bytes().to_vec();
    }
    let mut bytes = Vec::with_capacity(tensor.bytes().len() / row * padded_row);
    for bytes_of_row in tensor.bytes().chunks_exact(row) {
        bytes.extend_from_slice(bytes_of_row);
        bytes.resize(bytes.len() + padded_row - row, PADDING);
    }
    bytes
}

/// `[page, slot, head, dim]` keys and values of a file, in the order of the pool.
pub(super) fn paged_bytes(layout: &KvLayout, k_pages: &Tensor, v_pages: &Tensor) -> Vec<u8> {
    let mut pool = vec![PADDING; layout.bytes() as usize];
    let geometry: &HeadGeometry = layout.geometry();
    let (kv_heads, page_size) = (geometry.kv_heads() as usize, layout.page_size().get() as usize);
    for (tensor, rows, dim) in
        [(k_pages, layout.k_rows(), geometry.head_dim()), (v_pages, layout.v_rows(), geometry.v_head_dim())]
    {
        let row_bytes = (dim * tensor.dtype().bytes()) as usize;
        for (row, bytes) in tensor.bytes().chunks_exact(row_bytes).enumerate() {
            let (token, kv_head) = (row / kv_heads, row % kv_heads);
            let (page, slot) = (token / page_size, token % page_size);
            let start = rows.offset(page as u32, kv_head as u32, slot as u32) as usize * 16;
            if let Some(place) = pool.get_mut(start..start + row_bytes) {
                place.copy_from_slice(bytes);
            }
        }
    }
    pool
}

/// Rows of `dim` elements as they come from the device, each in the place of `place_dim`, in f32.
pub(super) fn unpadded(bytes: &[u8], dtype: Dtype, dim: u32, place_dim: u32) -> Vec<f32> {
    let [row, place] = [dim, place_dim].map(|dim| (dim * dtype.bytes()) as usize);
    let packed: Vec<u8> =
        bytes.chunks_exact(place).flat_map(|bytes| bytes.get(..row).unwrap_or_default()).copied().collect();
    Tensor::from_bytes(dtype, &[packed.len() / dtype.bytes() as usize], packed)
        .map(|tensor| tensor.to_f32())
        .unwrap_or_default()
}
