//! Appending new keys and values to the pages.

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

use super::layout::{KvLayout, RowLayout, VECTOR_BYTES};
use crate::attention::{BindError, Dispatch, Workspace, bind_group, dispatch, storage_bindings};
use crate::batch::{Batch, BatchError};
use crate::kernels::{KernelId, Kernels, LANES};
use crate::plan::{PARAMS_BYTES, UploadError, plan_buffer};
use crate::status::STATUS_BYTES;

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
        let geometry = layout.geometry();
        let (k_row_vectors, v_row_vectors) = (layout.k_rows().slot_stride, layout.v_rows().slot_stride);
        let needed = slots.len() as u64 * u64::from(geometry.kv_heads()) * u64::from(k_row_vectors + v_row_vectors);
        let limit = u64::from(u32::MAX - LANES);
        if needed > limit {
            return Err(AppendError::TooLarge { needed, limit });
        }
        let params = AppendParams {
            k_rows: *layout.k_rows(),
            v_rows: *layout.v_rows(),
            tokens: slots.len() as u32,
            kv_heads: geometry.kv_heads(),
            page_size,
            page_count: layout.page_count(),
            groups: (needed as u32).div_ceil(LANES),
            k_row_vectors,
            v_row_vectors,
            padding: 0,
        };
        Ok(Self { layout: *layout, params, slots })
    }

    /// Tokens to be written.
    pub fn tokens(&self) -> u32 {
        self.params.tokens
    }
}

/// New rows and their pages.
#[derive(Clone, Debug)]
pub struct AppendSource<'a> {
    /// Key rows `[tokens, kv_heads, head_dim]` in the pool's type, padded to multiples of [`crate::ROW_ALIGN`] elements.
    pub k: wgpu::BufferBinding<'a>,
    /// Value rows `[tokens, kv_heads, v_head_dim]`, alike.
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
        Ok(Self { buffer, params: plan.params, layout: plan.layout })
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
        let AppendParams { tokens, kv_heads, groups, k_row_vectors, v_row_vectors, .. } = self.params;
        let rows = |vectors: u32| {
            (u64::from(tokens) * u64::from(kv_heads) * u64::from(vectors)).max(1) * u64::from(VECTOR_BYTES)
        };
        let limits = device.limits();
        let slots = wgpu::BufferBinding { buffer: &self.buffer, offset: PARAMS_BYTES, size: None };
        let entries = [
            ("append plan", slots, 4 * u64::from(tokens).max(1)),
            ("k", source.k, rows(k_row_vectors)),
            ("v", source.v, rows(v_row_vectors)),
            ("kv", source.kv, self.layout.bytes().max(16)),
            ("status", workspace.status().as_entire_buffer_binding(), STATUS_BYTES),
        ];
        let bindings = storage_bindings(&limits, entries)?;
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
