//! Appending new keys and values to the pages.

use std::fmt;

use bytemuck::{Pod, Zeroable};
use thiserror::Error;

use super::dtypes::KvDtypes;
use super::groups::SegmentGroups;
use super::layout::{KvLayout, RowLayout, VECTOR_BYTES};
use super::rotary::{Rotary, RotaryError, RotaryShape};
use crate::attention::{
    BindError, STATUS_ROOM, Workspace, bind_groups, check_devices, check_grids, page_entries, storage_bindings,
};
use crate::batch::{Batch, BatchError, NO_PAGE};
use crate::geometry::{Dtype, HeadGeometry};
use crate::kernels::{KernelConfig, KernelId, Kernels, LANES, append_row_lanes, fold_grid};
use crate::plan::{Dispatch, PARAMS_BYTES, PlanBuffer, UploadError, WriteError, Written, blocks_of, plan_buffer_bytes};

/// Rows that cannot be appended. Nothing was written.
#[derive(Clone, Debug, PartialEq, Error)]
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
    /// The pages hold no rows of one type of float, which could be copied there.
    #[error("the pages are {dtypes}: new rows are converted, and their type must be said")]
    NotCopied {
        /// The pages' types.
        dtypes: KvDtypes,
    },
    /// The keys cannot be rotated so.
    #[error(transparent)]
    Rotary(#[from] RotaryError),
    /// More rows than the kernel can count.
    #[error("the append needs {needed} {what}; at most {limit} are possible in one call")]
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// How many are needed.
        needed: u64,
        /// The largest number.
        limit: u64,
    },
    /// There is no buffer for the plans of a step.
    #[error(transparent)]
    Upload(#[from] UploadError),
}

/// New rows as an append finds them, and what it does to them: what its kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NewRows {
    /// Their type. Where it is the pages' own, rows are copied bit for bit.
    pub dtype: Dtype,
    /// How keys are rotated; `None` leaves them as they are.
    pub rotary: Option<RotaryShape>,
}

impl fmt::Display for NewRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rotary {
            None => write!(f, "{}, not rotated", self.dtype),
            Some(RotaryShape { pairing, first, dims }) => {
                write!(f, "{}, rotated in {dims} dimensions from {first} on ({pairing:?})", self.dtype)
            }
        }
    }
}

impl NewRows {
    /// Whether the rows go into pages of `stored` as they are.
    pub(crate) fn copied(&self, stored: KvDtypes) -> bool {
        stored.hold(self.dtype) && self.rotary.is_none()
    }

    /// Vectors of 16 bytes of a new key row and of a new value row that is not part of it.
    fn row_vectors(&self, geometry: &HeadGeometry) -> [u32; 2] {
        let vectors = |dim| self.dtype.row_words(dim) / 4;
        [vectors(geometry.head_dim()), if geometry.is_latent() { 0 } else { vectors(geometry.v_head_dim()) }]
    }
}

impl From<Dtype> for NewRows {
    /// Rows of a type that are not rotated.
    fn from(dtype: Dtype) -> Self {
        Self { dtype, rotary: None }
    }
}

/// A rotation of the new keys of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotation<'a> {
    /// The embedding.
    pub rotary: &'a Rotary,
    /// The position of each new token, `[total_q]`; `None` where it is the token's place among the keys of the batch. A
    /// sequence that gave pages back ([`crate::BlockPool::release_before`]) has fewer there than tokens:
    /// [`crate::BatchBuilder::positions`] counts them all.
    pub positions: Option<&'a [u32]>,
}

/// Parameters of the append kernels. The shaders' `AppendParams` has the same fields in the same order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub(crate) struct AppendParams {
    pub k_rows: RowLayout,
    pub v_rows: RowLayout,
    pub k_scales: RowLayout,
    pub v_scales: RowLayout,
    pub tokens: u32,
    pub kv_heads: u32,
    pub page_size: u32,
    pub page_count: u32,
    pub groups: u32,
    pub k_row_vectors: u32,
    pub v_row_vectors: u32,
    pub turns: u32,
}

/// Where each new token goes: made once per step, used for every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AppendPlan {
    layout: KvLayout,
    rows: NewRows,
    params: AppendParams,
    source: SourceVectors,
    /// Slots, then cosines and sines.
    words: Vec<u32>,
}

impl AppendPlan {
    /// Plans the append of the last `q_len` tokens of every sequence of `batch`: row `i` of a sequence goes to position
    /// `kv_len - q_len + i`. `batch.kv_len` counts the new tokens. Rows are in the type of the pages and are copied.
    ///
    /// # Errors
    /// [`AppendError`]; a destination outside the sequence's pages is [`BatchError::PastPages`].
    pub fn new(layout: &KvLayout, batch: &Batch<'_>) -> Result<Self, AppendError> {
        match layout.dtypes().float() {
            Some(dtype) => Self::converting(layout, batch, dtype, None),
            None => Err(AppendError::NotCopied { dtypes: layout.dtypes() }),
        }
    }

    /// The same for rows of type `dtype`, which are converted to the type of the pages, and for keys that are rotated
    /// before.
    ///
    /// # Errors
    /// [`AppendError`].
    pub fn converting(
        layout: &KvLayout,
        batch: &Batch<'_>,
        dtype: Dtype,
        rotation: Option<Rotation<'_>>,
    ) -> Result<Self, AppendError> {
        batch.validate(layout.page_size(), layout.page_count())?;
        let geometry = layout.geometry();
        let page_size = layout.page_size().get();
        let mut words = Vec::with_capacity(batch.total_q() as usize);
        let mut positions = Vec::new();
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
            words.extend((first..*kv_len).filter_map(|position| {
                pages.get((position / page_size) as usize).map(|page| page * page_size + position % page_size)
            }));
            if rotation.is_some() {
                positions.extend(first..*kv_len);
            }
        }
        let mut sorted = words.clone();
        sorted.sort_unstable();
        if let Some((slot, _)) = sorted.iter().zip(sorted.iter().skip(1)).find(|(slot, next)| slot == next) {
            return Err(AppendError::SameSlot { page: slot / page_size, slot: slot % page_size });
        }
        let tokens = words.len() as u32;
        let rows = NewRows { dtype, rotary: rotation.map(|rotation| rotation.rotary.shape()) };
        let source = SourceVectors::new(layout, &rows, tokens)?;
        // A conversion addresses words.
        let (needed, limit) = (layout.bytes() / 4, u32::MAX.into());
        if !rows.copied(layout.dtypes()) && needed > limit {
            return Err(AppendError::TooLarge { what: "words of pages that it converts to", needed, limit });
        }
        if let Some(Rotation { rotary, positions: given }) = rotation {
            rotary.shape().check(geometry.head_dim())?;
            let positions = given.unwrap_or(&positions);
            if positions.len() != tokens as usize {
                return Err(RotaryError::Positions { found: positions.len(), needed: tokens as usize }.into());
            }
            let turns = positions.iter().flat_map(|position| rotary.turns(*position)).flatten();
            words.extend(turns.map(|number| (number as f32).to_bits()));
        }
        let [k_row_vectors, v_row_vectors] = rows.row_vectors(geometry);
        let [k_rows, v_rows, k_scales, v_scales] = layout.strides();
        let params = AppendParams {
            k_rows,
            v_rows,
            k_scales,
            v_scales,
            tokens,
            kv_heads: geometry.kv_heads(),
            page_size,
            page_count: layout.page_count(),
            groups: source.lanes.div_ceil(LANES),
            k_row_vectors,
            v_row_vectors,
            turns: tokens,
        };
        Ok(Self { layout: *layout, rows, params, source, words })
    }

    /// Tokens to be written.
    pub fn tokens(&self) -> u32 {
        self.params.tokens
    }

    /// What kernels must be built for to carry the plan out.
    pub fn new_rows(&self) -> &NewRows {
        &self.rows
    }

    /// What is recorded.
    fn dispatches(&self) -> Vec<Dispatch> {
        let dispatch = Dispatch { kernel: KernelId::Append, groups: self.params.groups, block: 0, segment_group: 0 };
        if dispatch.groups > 0 { vec![dispatch] } else { Vec::new() }
    }

    /// Bytes of the append's device buffer.
    pub fn device_bytes(&self) -> u64 {
        plan_buffer_bytes(self.layout.segments().get(), append_words(&self.rows, self.params.tokens))
    }

    /// Parameters for each segment that a dispatch may bind first.
    fn blocks(&self) -> Vec<u8> {
        let params = |segment: u32| {
            let [k_rows, v_rows, k_scales, v_scales] =
                self.layout.strides().map(|rows| rows.beginning_at(segment * self.layout.segment_pages()));
            AppendParams { k_rows, v_rows, k_scales, v_scales, ..self.params }
        };
        blocks_of((0..self.layout.segments().get()).map(params))
    }
}

/// Bytes of the device buffer for appends of up to `tokens` tokens to a pool in one segment ([`Append::with_capacity`]).
pub(crate) fn append_buffer_bytes(rows: &NewRows, tokens: u32) -> u64 {
    plan_buffer_bytes(1, append_words(rows, tokens))
}

/// Words of its plan: one for the slot of each token, and two for every pair of elements that is rotated.
fn append_words(rows: &NewRows, tokens: u32) -> u64 {
    u64::from(tokens) * (1 + rows.rotary.map_or(0, |rotary| u64::from(rotary.dims)))
}

/// Vectors of 16 bytes of new key rows and of new value rows, and the lanes that take them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SourceVectors {
    k: u32,
    v: u32,
    lanes: u32,
}

impl SourceVectors {
    /// Of `tokens` new tokens.
    ///
    /// # Errors
    /// [`AppendError::TooLarge`].
    pub fn new(layout: &KvLayout, rows: &NewRows, tokens: u32) -> Result<Self, AppendError> {
        let geometry = layout.geometry();
        let row_count = u64::from(tokens) * u64::from(geometry.kv_heads());
        let row_vectors = rows.row_vectors(geometry);
        let [k, v] = row_vectors.map(|vectors| row_count.saturating_mul(vectors.into()));
        let lanes = if rows.copied(layout.dtypes()) {
            k.saturating_add(v)
        } else {
            let kinds = row_vectors.iter().filter(|vectors| **vectors > 0).count() as u64;
            row_count.saturating_mul(kinds * u64::from(append_row_lanes(geometry)))
        };
        let limit = u64::from(u32::MAX - LANES);
        for (what, needed) in [
            ("vectors of 16 bytes", k.saturating_add(v)),
            ("lanes", lanes),
            ("words of its plan", append_words(rows, tokens)),
        ] {
            if needed > limit {
                return Err(AppendError::TooLarge { what, needed, limit });
            }
        }
        Ok(Self { k: k as u32, v: v as u32, lanes: lanes as u32 })
    }

    /// Bytes of either, at least one vector: an empty binding is not allowed.
    pub fn bytes(self) -> [u64; 2] {
        [self.k, self.v].map(|vectors| u64::from(vectors.max(1)) * u64::from(VECTOR_BYTES))
    }
}

/// New rows and their pages.
#[derive(Clone, Debug)]
pub struct AppendSource<'a> {
    /// Key rows `[tokens, kv_heads, head_dim]` in the type that the plan was made for, padded to multiples of [`crate::ROW_ALIGN`] elements.
    pub k: wgpu::BufferBinding<'a>,
    /// Value rows `[tokens, kv_heads, v_head_dim]`, alike; any buffer where values are part of the keys.
    pub v: wgpu::BufferBinding<'a>,
    /// The layer's pages, a binding for each segment of the pool ([`KvLayout`]).
    pub kv: Vec<wgpu::BufferBinding<'a>>,
    /// Where keys or values are fp8: pairs `(k_scale, v_scale)` in f32, `[kv_heads, 2]`, each from 2^-100 to 2^100. What
    /// has no scale may hold anything.
    pub head_scales: Option<wgpu::BufferBinding<'a>>,
}

/// An append with its bindings: recording it creates nothing. It follows its [`Append`], which may be written anew.
#[derive(Clone, Debug)]
pub struct AppendCall {
    pipeline: wgpu::ComputePipeline,
    /// For each group of segments, and the offset of its parameters.
    bindings: Vec<(wgpu::BindGroup, u32)>,
    written: Written,
    axis_max: u32,
}

/// Room for append plans on the device, and the plan that was written last. Clones are the same plan.
#[derive(Clone, Debug)]
pub struct Append {
    buffer: PlanBuffer,
    /// Tokens for which there is room, and their rows.
    tokens: u32,
    source: SourceVectors,
    rows: NewRows,
    layout: KvLayout,
    written: Written,
}

impl Append {
    /// Creates one small buffer that holds the plan.
    ///
    /// # Errors
    /// [`UploadError`] where the device allows no buffer of that size, has no memory, or is lost.
    pub fn upload(device: &wgpu::Device, plan: &AppendPlan) -> Result<Self, UploadError> {
        let words = bytemuck::cast_slice(&plan.words);
        let buffer = PlanBuffer::filled(device, "append plan", &plan.blocks(), words)?;
        let AppendPlan { source, rows, layout, .. } = *plan;
        let written = Written::new(plan.dispatches());
        Ok(Self { buffer, tokens: plan.params.tokens, source, rows, layout, written })
    }

    /// Creates the buffer for appends of up to `tokens` new tokens. It is never made larger: where a step has more, make
    /// another one and bind it.
    ///
    /// Until a plan is written, its calls record nothing.
    ///
    /// # Errors
    /// [`AppendError::TooLarge`], [`AppendError::Upload`].
    pub fn with_capacity(
        device: &wgpu::Device,
        layout: &KvLayout,
        rows: &NewRows,
        tokens: u32,
    ) -> Result<Self, AppendError> {
        let source = SourceVectors::new(layout, rows, tokens)?;
        let buffer = PlanBuffer::new(device, "append plan", layout.segments().get(), append_words(rows, tokens))?;
        Ok(Self { buffer, tokens, source, rows: *rows, layout: *layout, written: Written::default() })
    }

    /// Records that `plan` takes the place of the one before, in the order of `encoder`, as
    /// [`crate::DevicePlan::write`] does.
    ///
    /// # Errors
    /// [`WriteError`]; nothing was recorded.
    pub fn write(
        &self,
        belt: &mut wgpu::util::StagingBelt,
        encoder: &mut wgpu::CommandEncoder,
        plan: &AppendPlan,
    ) -> Result<(), WriteError> {
        if plan.layout != self.layout {
            let [found, needed] = [plan.layout, self.layout].map(Box::new);
            return Err(BindError::OtherLayout { found, needed }.into());
        }
        if plan.rows != self.rows {
            return Err(BindError::OtherRows { found: self.rows, needed: plan.rows }.into());
        }
        let (found, needed) = (self.tokens.into(), plan.params.tokens.into());
        if found < needed {
            return Err(WriteError::Capacity { what: "new tokens", found, needed });
        }
        let words = bytemuck::cast_slice(&plan.words);
        *self.written.dispatches() = self.buffer.write(belt, encoder, &plan.blocks(), words, plan.dispatches())?;
        Ok(())
    }

    /// Bytes that [`AppendSource::k`] and [`AppendSource::v`] must hold for as many new tokens as there is room for.
    pub fn source_bytes(&self) -> [u64; 2] {
        self.source.bytes()
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
        check_devices(
            device,
            &[("plan", self.buffer.device()), ("kernels", kernels.device()), ("workspace", workspace.device())],
        )?;
        self.check_kernels(kernels.config())?;
        let [k_bytes, v_bytes] = self.source_bytes();
        let limits = device.limits();
        let (words, words_bytes) = self.buffer.words();
        let mut entries = vec![
            ("append plan", words, words_bytes),
            ("k", source.k, k_bytes),
            ("v", source.v, v_bytes),
            ("workspace", workspace.status_binding(), STATUS_ROOM),
        ];
        let buffer = "head scales";
        match (source.head_scales, self.layout.dtypes().has_head_scales()) {
            (Some(given), true) => entries.push((buffer, given, 8 * u64::from(self.layout.geometry().kv_heads()))),
            (None, false) => {}
            (given, _) => return Err(BindError::Extra { buffer, given: given.is_some() }),
        }
        entries.extend(page_entries(&self.layout, source.kv)?);
        let bindings = storage_bindings(&limits, &entries, &["kv", "workspace"])?;
        check_grids(&self.buffer, &self.written)?;
        let groups = SegmentGroups::new(&self.layout, kernels.config().segments);
        let bound = bind_groups(device, kernels.append_layout(), self.buffer.params(), &bindings, &groups);
        let firsts = (0..groups.count()).map(|group| groups.segments(group).start);
        Ok(AppendCall {
            pipeline: kernels.pipeline(KernelId::Append).clone(),
            bindings: bound.into_iter().zip(firsts).collect(),
            written: self.written.clone(),
            axis_max: limits.max_compute_workgroups_per_dimension,
        })
    }

    /// Kernels that copy serve every plan of copies; those that convert, the types, dimensions and rotation that they
    /// were built for.
    fn check_kernels(&self, config: &KernelConfig) -> Result<(), BindError> {
        let KernelConfig { geometry, kv, new_rows, .. } = config;
        let copies = self.rows.copied(self.layout.dtypes());
        let other_pages = || BindError::OtherPages { found: Box::new(*config), needed: Box::new(self.layout) };
        if !config.serves(self.layout.segments()) {
            return Err(other_pages());
        }
        if copies && config.append_copies() {
            return Ok(());
        }
        if self.rows != *new_rows {
            return Err(BindError::OtherRows { found: *new_rows, needed: self.rows });
        }
        let dims = |geometry: &HeadGeometry| (geometry.head_dim(), geometry.v_head_dim(), geometry.is_latent());
        if *kv != self.layout.dtypes() || dims(geometry) != dims(self.layout.geometry()) {
            return Err(other_pages());
        }
        Ok(())
    }
}

impl AppendCall {
    /// Records the append; attention recorded after it in the same pass sees the new rows.
    pub fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        for Dispatch { groups, block, .. } in self.written.dispatches().iter() {
            // What was written or bound has passed `check_grid`.
            if let Some([x, y, z]) = fold_grid(*groups, self.axis_max) {
                pass.set_pipeline(&self.pipeline);
                // Each takes all rows, and leaves those alone whose pages it does not bind.
                for (bindings, first) in &self.bindings {
                    pass.set_bind_group(0, bindings, &[(block + first) * PARAMS_BYTES as u32]);
                    pass.dispatch_workgroups(x, y, z);
                }
            }
        }
    }

    /// See `Call::of_one_workgroup`.
    pub(crate) fn of_one_workgroup(mut self) -> Self {
        self.written = Written::new(vec![Dispatch { kernel: KernelId::Append, groups: 1, block: 0, segment_group: 0 }]);
        self
    }

    /// Workgroups that report their end, for [`crate::Status::check`]: those of the plan that was written last.
    pub fn workgroups(&self) -> u32 {
        let once = self.written.dispatches().iter().fold(0_u32, |sum, dispatch| sum.wrapping_add(dispatch.groups));
        once.wrapping_mul(self.bindings.len() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::PageSize;
    use crate::kv::{KvDtype, Pairing};

    const BATCH: Batch<'_> =
        Batch { q_indptr: &[0, 2, 3], page_indptr: &[0, 2, 3], page_ids: &[4, 1, 0], kv_len: &[5, 2] };

    fn layout(dtypes: impl Into<KvDtypes>) -> KvLayout {
        let geometry = HeadGeometry::with_v_head_dim(4, 2, 20, 300).unwrap();
        KvLayout::new(geometry, dtypes, PageSize::new(4).unwrap(), 5).unwrap()
    }

    #[test]
    fn a_plan_has_slots_and_turns() {
        let rotary = Rotary::new(Pairing::HalfSplit, 4, 100.0).unwrap().with_magnitude(0.5).unwrap();
        // Tokens 3 and 4 of one sequence, token 1 of the other.
        let slots = [4 * 4 + 3, 4, 1];
        for (given, positions) in [(None, [3_u32, 4, 1]), (Some(&[7_u32, 0, 1 << 30][..]), [7, 0, 1 << 30])] {
            let rotation = Rotation { rotary: &rotary, positions: given };
            let plan = AppendPlan::converting(&layout(Dtype::F16), &BATCH, Dtype::F32, Some(rotation)).unwrap();
            let turns = positions.into_iter().flat_map(|position| {
                [1.0, 0.1].into_iter().flat_map(move |frequency: f64| {
                    let angle = f64::from(position) * frequency;
                    [0.5 * angle.cos(), 0.5 * angle.sin()].map(|x| (x as f32).to_bits())
                })
            });
            assert_eq!(plan.words, slots.into_iter().chain(turns).collect::<Vec<u32>>());
            assert_eq!((plan.params.turns, plan.device_bytes()), (3, 8 * PARAMS_BYTES + 15 * 4));
            assert_eq!(plan.new_rows(), &NewRows { dtype: Dtype::F32, rotary: Some(rotary.shape()) });
        }
        let few = Rotation { rotary: &rotary, positions: Some(&[1, 2]) };
        assert_eq!(
            AppendPlan::converting(&layout(Dtype::F16), &BATCH, Dtype::F16, Some(few)),
            Err(AppendError::Rotary(RotaryError::Positions { found: 2, needed: 3 }))
        );
        let wide = Rotary::new(Pairing::HalfSplit, 22, 100.0).unwrap();
        let wide = Rotation { rotary: &wide, positions: None };
        assert_eq!(
            AppendPlan::converting(&layout(Dtype::F16), &BATCH, Dtype::F16, Some(wide)),
            Err(AppendError::Rotary(RotaryError::Dims { first: 0, dims: 22, head_dim: 20 }))
        );
    }

    /// Every row has its lanes, whether keys and values are read or values are part of the keys.
    #[test]
    fn workgroups_of_a_conversion() {
        // 300 dimensions are 38 chunks: 64 lanes for each of 3 tokens, 2 heads, keys and values.
        let plan = AppendPlan::converting(&layout(KvDtype::Int8), &BATCH, Dtype::Bf16, None).unwrap();
        assert_eq!(plan.params.groups, 3 * 2 * 2);
        let geometry = HeadGeometry::latent(4, 20, 8).unwrap();
        let latent = KvLayout::new(geometry, KvDtype::Int8, PageSize::new(4).unwrap(), 5).unwrap();
        // 3 chunks: 4 lanes for each of 3 keys.
        let plan = AppendPlan::converting(&latent, &BATCH, Dtype::Bf16, None).unwrap();
        assert_eq!(plan.params.groups, 1);
        assert_eq!(plan.source.bytes(), [3 * 3 * 16, 16]);
    }

    /// A conversion addresses words: what a copy could still write is refused.
    #[test]
    fn pools_past_words_of_32_bits() {
        let geometry = HeadGeometry::new(2, 2, 128).unwrap();
        let layout = |pages| KvLayout::new(geometry, Dtype::F16, PageSize::new(16).unwrap(), pages).unwrap();
        let most = (u64::from(u32::MAX) * 4 / layout(1).page_bytes()) as u32;
        let batch = Batch { q_indptr: &[0, 1], page_indptr: &[0, 1], page_ids: &[most - 1], kv_len: &[1] };
        assert!(AppendPlan::converting(&layout(most), &batch, Dtype::F32, None).is_ok());
        assert!(AppendPlan::new(&layout(most + 1), &batch).is_ok());
        let refused = AppendPlan::converting(&layout(most + 1), &batch, Dtype::F32, None);
        let (needed, limit) = (layout(most + 1).bytes() / 4, u64::from(u32::MAX));
        assert!(needed > limit);
        let what = "words of pages that it converts to";
        assert_eq!(refused, Err(AppendError::TooLarge { what, needed, limit }));
    }

    #[test]
    fn pages_without_a_type_for_new_rows() {
        let (int8, f16) = (KvDtype::Int8, KvDtype::F16);
        for dtypes in
            [KvDtypes { k: int8, v: int8 }, KvDtypes { k: f16, v: int8 }, KvDtypes { k: f16, v: KvDtype::Bf16 }]
        {
            assert_eq!(AppendPlan::new(&layout(dtypes), &BATCH), Err(AppendError::NotCopied { dtypes }));
            assert!(AppendPlan::converting(&layout(dtypes), &BATCH, Dtype::F16, None).is_ok());
        }
    }
}
