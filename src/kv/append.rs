//! Appending new keys and values to the pages.

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

use super::layout::{KvLayout, RowLayout, VECTOR_BYTES};
use crate::attention::{BindError, Dispatch, STATUS_ROOM, Workspace, bind_group, dispatch, storage_bindings};
use crate::batch::{Batch, BatchError, NO_PAGE};
use crate::kernels::{KernelId, Kernels, LANES};
use crate::plan::{PARAMS_BYTES, UploadError, plan_buffer, plan_buffer_bytes};

/// Rows that cannot be appended. Nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AppendError {
    /// An index tensor is unusable.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// A sequence is to receive more tokens than it has.
    #[error("sequence {seq} is to receive {new} tokens and has {kv_len} with them")]
    TooMany {
        /// The sequence.
        seq: usize,
        /// Tokens to be appended.
        new: u32,
        /// Its length after the append.
        kv_len: u32,
    },
    /// Two tokens are to be written into the same slot: a page with two writers.
    #[error("two tokens are to be written into slot {slot} of page {page}; a shared page must be copied first")]
    SameSlot {
        /// The page.
        page: u32,
        /// The slot in it.
        slot: u32,
    },
    /// More rows than the kernel can count.
    #[error("the append needs {needed} vectors of 16 bytes; at most {limit} are possible in one call")]
    TooLarge {
        /// Vectors needed.
        needed: u64,
        /// The largest number.
        limit: u64,
    },
}

/// Parameters of the append kernel. The shader's `AppendParams` has the same fields in the same order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub(crate) struct AppendParams {
    pub k_rows: RowLayout,
    pub v_rows: RowLayout,
    pub tokens: u32,
    pub kv_heads: u32,
    pub page_size: u32,
    pub page_count: u32,
    pub groups: u32,
    pub k_row_vectors: u32,
    pub v_row_vectors: u32,
    // Uniform buffers are sized in multiples of 16 bytes.
    pub padding: u32,
}

/// Where each new token goes: made once per step, used for every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AppendPlan {
    layout: KvLayout,
    params: AppendParams,
    source: SourceVectors,
    slots: Vec<u32>,
}

impl AppendPlan {
    /// Plans the append of the last `q_len` tokens of every sequence of `batch`: row `i` of a sequence goes to position
    /// `kv_len - q_len + i`. `batch.kv_len` counts the new tokens.
    ///
    /// # Errors
    /// [`AppendError`]; a destination outside the sequence's pages is [`BatchError::PastPages`].
    pub fn new(layout: &KvLayout, batch: &Batch<'_>) -> Result<Self, AppendError> {
        batch.validate(layout.page_size(), layout.page_count())?;
        let page_size = layout.page_size().get();
        let mut slots = Vec::with_capacity(batch.total_q() as usize);
        let spans = batch.q_indptr.iter().zip(batch.q_indptr.iter().skip(1));
        for (seq, ((begin, end), (page_begin, kv_len))) in
            spans.zip(batch.page_indptr.iter().zip(batch.kv_len)).enumerate()
        {
            let new = end - begin;
            let Some(first) = kv_len.checked_sub(new) else {
                return Err(AppendError::TooMany { seq, new, kv_len: *kv_len });
            };
            let pages = batch.page_ids.get(*page_begin as usize..).unwrap_or_default();
            let written = first / page_size..if new > 0 { kv_len.div_ceil(page_size) } else { 0 };
            if let Some(entry) = written.into_iter().find(|entry| pages.get(*entry as usize) == Some(&NO_PAGE)) {
                let index = *page_begin as usize + entry as usize;
                return Err(BatchError::PageId { index, found: NO_PAGE, page_count: layout.page_count() }.into());
            }
            // The layout keeps page_count * page_size below 2^32.
            slots.extend((first..*kv_len).filter_map(|position| {
                pages.get((position / page_size) as usize).map(|page| page * page_size + position % page_size)
            }));
        }
        let mut sorted = slots.clone();
        sorted.sort_unstable();
        if let Some((slot, _)) = sorted.iter().zip(sorted.iter().skip(1)).find(|(slot, next)| slot == next) {
            return Err(AppendError::SameSlot { page: slot / page_size, slot: slot % page_size });
        }
        let source = SourceVectors::new(layout, slots.len() as u32)?;
        let [k_row_vectors, v_row_vectors] = layout.row_vectors();
        let params = AppendParams {
            k_rows: *layout.k_rows(),
            v_rows: *layout.v_rows(),
            tokens: slots.len() as u32,
            kv_heads: layout.geometry().kv_heads(),
            page_size,
            page_count: layout.page_count(),
            groups: (source.k + source.v).div_ceil(LANES),
            k_row_vectors,
            v_row_vectors,
            padding: 0,
        };
        Ok(Self { layout: *layout, params, source, slots })
    }

    /// Tokens to be written.
    pub fn tokens(&self) -> u32 {
        self.params.tokens
    }

    /// Bytes of the append's device buffer.
    pub fn device_bytes(&self) -> u64 {
        append_buffer_bytes(self.params.tokens)
    }
}

/// Bytes of the device buffer of an append of `tokens` tokens: a slot is a word.
pub(crate) fn append_buffer_bytes(tokens: u32) -> u64 {
    plan_buffer_bytes(tokens.into())
}

/// Vectors of 16 bytes of new key rows and of new value rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SourceVectors {
    k: u32,
    v: u32,
}

impl SourceVectors {
    /// Of `tokens` new tokens.
    ///
    /// # Errors
    /// [`AppendError::TooLarge`].
    pub fn new(layout: &KvLayout, tokens: u32) -> Result<Self, AppendError> {
        let limit = u32::MAX - LANES;
        let rows = u64::from(tokens) * u64::from(layout.geometry().kv_heads());
        let [k, v] = layout.row_vectors().map(|vectors| rows.saturating_mul(vectors.into()));
        let needed = k.saturating_add(v);
        if needed > limit.into() {
            return Err(AppendError::TooLarge { needed, limit: limit.into() });
        }
        Ok(Self { k: k as u32, v: v as u32 })
    }

    /// Bytes of either, at least one vector: an empty binding is not allowed.
    pub fn bytes(self) -> [u64; 2] {
        [self.k, self.v].map(|vectors| u64::from(vectors.max(1)) * u64::from(VECTOR_BYTES))
    }
}

/// New rows and their pages.
#[derive(Clone, Debug)]
pub struct AppendSource<'a> {
    /// Key rows `[tokens, kv_heads, head_dim]` in the pool's type, padded to multiples of [`crate::ROW_ALIGN`] elements.
    pub k: wgpu::BufferBinding<'a>,
    /// Value rows `[tokens, kv_heads, v_head_dim]`, alike; any buffer where values are part of the keys.
    pub v: wgpu::BufferBinding<'a>,
    /// The layer's pages.
    pub kv: wgpu::BufferBinding<'a>,
}

/// An append with its bindings: recording it creates nothing.
#[derive(Clone, Debug)]
pub struct AppendCall {
    pipeline: wgpu::ComputePipeline,
    bindings: wgpu::BindGroup,
    dispatch: Option<Dispatch>,
    workgroups: u32,
}

/// An append plan on the device.
#[derive(Clone, Debug)]
pub struct Append {
    buffer: wgpu::Buffer,
    params: AppendParams,
    source: SourceVectors,
    layout: KvLayout,
}

impl Append {
    /// Creates one small buffer that holds the plan.
    ///
    /// # Errors
    /// [`UploadError`] where the device allows no buffer of that size, has no memory, or is lost.
    pub fn upload(device: &wgpu::Device, plan: &AppendPlan) -> Result<Self, UploadError> {
        let words = bytemuck::cast_slice(&plan.slots);
        let buffer = plan_buffer(device, "append plan", bytemuck::bytes_of(&plan.params), words)?;
        Ok(Self { buffer, params: plan.params, source: plan.source, layout: plan.layout })
    }

    /// Binds the plan to one layer's buffers.
    ///
    /// # Errors
    /// [`BindError`]; nothing was recorded.
    pub fn bind(
        &self,
        device: &wgpu::Device,
        kernels: &Kernels,
        source: AppendSource<'_>,
        workspace: &Workspace,
    ) -> Result<AppendCall, BindError> {
        let AppendParams { tokens, groups, .. } = self.params;
        let [k_bytes, v_bytes] = self.source.bytes();
        let limits = device.limits();
        let slots = wgpu::BufferBinding { buffer: &self.buffer, offset: PARAMS_BYTES, size: None };
        let entries = [
            ("append plan", slots, 4 * u64::from(tokens).max(1)),
            ("k", source.k, k_bytes),
            ("v", source.v, v_bytes),
            ("kv", source.kv, self.layout.bytes().max(16)),
            ("workspace", workspace.status_binding(), STATUS_ROOM),
        ];
        let bindings = storage_bindings(&limits, &entries, &["kv", "workspace"])?;
        let dispatch = if groups > 0 { Some(dispatch(&limits, KernelId::Append, groups)?) } else { None };
        let params = wgpu::BufferBinding { buffer: &self.buffer, offset: 0, size: wgpu::BufferSize::new(PARAMS_BYTES) };
        let resources = std::iter::once(params).chain(bindings);
        Ok(AppendCall {
            pipeline: kernels.pipeline(KernelId::Append).clone(),
            bindings: bind_group(device, kernels.append_layout(), resources),
            dispatch,
            workgroups: groups,
        })
    }
}

impl AppendCall {
    /// Records the append; attention recorded after it in the same pass sees the new rows.
    pub fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        if let Some(Dispatch { grid: [x, y, z], .. }) = self.dispatch {
            pass.set_pipeline(&self.pipeline);
            pass.set_bind_group(0, &self.bindings, &[]);
            pass.dispatch_workgroups(x, y, z);
        }
    }

    /// See `Call::of_one_workgroup`.
    pub(crate) fn of_one_workgroup(mut self) -> Self {
        self.dispatch = Some(Dispatch { kernel: KernelId::Append, grid: [1, 1, 1] });
        self
    }

    /// Workgroups that report their end, for [`crate::Status::check`].
    pub fn workgroups(&self) -> u32 {
        self.workgroups
    }
}
