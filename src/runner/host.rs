//! Host tensors in the order and padding of the device, and back.

use super::{RunError, RunOptions};
use crate::batch::{Batch, BatchError};
use crate::case::{Case, KvSource};
use crate::geometry::{Dtype, HeadGeometry, PageSize, padded_dim};
use crate::kv::KvLayout;
use crate::plan::PlanError;
use crate::tensor::Tensor;

/// What row padding is filled with: NaN in every type. Padding is unowned and never matters; filling it so keeps
/// that promise honest in every run.
const PADDING: u8 = 0xff;

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

    pub(super) fn batch<'a>(&'a self, case: &'a Case) -> Batch<'a> {
        Batch {
            q_indptr: case.q_indptr(),
            page_indptr: &self.page_indptr,
            page_ids: &self.page_ids,
            kv_len: &self.kv_len,
        }
    }
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
