//! `plan` → `upload` → `bind` → `encode`: attention recorded into the caller's own pass.

use std::ops::Range;

use thiserror::Error;

use crate::batch::Batch;
use crate::buffers::{self, OutOfMemory};
use crate::case::AttentionOptions;
use crate::geometry::{Dtype, HeadGeometry};
use crate::kernels::{
    AdapterFacts, BuildError, KernelConfig, KernelId, Kernels, Modifiers, Tiles, Variants, fold_grid,
};
use crate::kv::{KvLayout, NewRows, SegmentGroups};
use crate::plan::{
    DevicePlan, Dispatch, PARAMS_BYTES, Plan, PlanBuffer, PlanCapacity, PlanError, Setting, SharedPrefix, StepMax,
    Written,
};
use crate::status::STATUS_WORDS;

/// Attention over one pool: types, layout, scale and mask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Type of the query rows.
    pub q: Dtype,
    /// Type of the output rows: [`Dtype::F32`] or [`Dtype::F16`].
    pub out: Dtype,
    /// The pool of pages, with the head geometry and the type of keys and values.
    pub layout: KvLayout,
    /// New rows, as an append finds them: the pages' own type, unless they are to be converted.
    pub new_rows: NewRows,
    /// Scale, causal mask, window and softcap.
    pub options: AttentionOptions,
    /// What else a call brings.
    pub extras: Extras,
}

/// Tensors that change scores, as far as a call brings them, and what else plans may name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extras {
    /// ALiBi slopes, in [`AttentionIo::heads`].
    pub alibi_slopes: bool,
    /// Attention sinks, in [`AttentionIo::heads`].
    pub sinks: bool,
    /// A mask, handed to [`Attention::plan_masked`].
    pub mask: bool,
    /// A bias, in [`AttentionIo::bias`].
    pub bias: Option<Bias>,
    /// Whether plans may name prefixes that sequences share ([`Attention::plan_shared`]).
    pub shared_prefixes: bool,
}

impl Extras {
    /// None of them.
    pub const NONE: Self = Self { alibi_slopes: false, sinks: false, mask: false, bias: None, shared_prefixes: false };
}

/// A tensor that is added to the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bias {
    /// [`Dtype::F32`] or [`Dtype::F16`].
    pub dtype: Dtype,
    /// Whether every query head has its own, or all share one.
    pub per_head: bool,
}

impl Bias {
    /// How many heads have elements of their own.
    pub(crate) fn heads(&self, geometry: &HeadGeometry) -> u32 {
        if self.per_head { geometry.q_heads() } else { 1 }
    }
}

/// What happens to scores, as far as kernels are built for it.
pub(crate) fn modifiers(options: &AttentionOptions, extras: &Extras) -> Modifiers {
    Modifiers {
        window_left: options.window_left.is_some(),
        softcap: options.softcap.is_some(),
        alibi: extras.alibi_slopes,
        sinks: extras.sinks,
        mask: extras.mask,
        bias: extras.bias.map(|bias| bias.dtype),
        shared_prefixes: extras.shared_prefixes,
        // Of a pool and a device together (`KernelConfig::within`).
        grouped: false,
    }
}

impl AttentionConfig {
    /// What the kernels for this configuration are specialised for, built in the given way, on a device that has bindings for
    /// all segments of the pool; [`KernelConfig::within`] says what becomes of it on others.
    pub fn kernels(&self, variants: Variants) -> KernelConfig {
        KernelConfig {
            geometry: *self.layout.geometry(),
            q: self.q,
            kv: self.layout.dtypes(),
            new_rows: self.new_rows,
            out: self.out,
            modifiers: modifiers(&self.options, &self.extras),
            segments: self.layout.segments(),
            variants,
        }
    }

    /// What the buffers of a call with `total_q` query rows hold, at least one vector of 16 bytes or one word each: an
    /// empty binding is not allowed.
    pub fn buffer_bytes(&self, total_q: u32) -> BufferBytes {
        let geometry = self.layout.geometry();
        let rows = u64::from(total_q) * u64::from(geometry.q_heads());
        let row_bytes = |dtype: Dtype, dim| rows.saturating_mul(u64::from(dtype.row_words(dim)) * 4).max(16);
        BufferBytes {
            q: row_bytes(self.q, geometry.head_dim()),
            out: row_bytes(self.out, geometry.v_head_dim()),
            lse: rows.saturating_mul(4).max(4),
        }
    }

    /// What [`AttentionIo::heads`] holds, where there is such a buffer.
    pub fn heads_bytes(&self) -> Option<u64> {
        let Extras { alibi_slopes, sinks, .. } = self.extras;
        let (geometry, dtypes) = (self.layout.geometry(), self.layout.dtypes());
        let pairs = |there: bool, heads: u32| if there { u64::from(heads) } else { 0 };
        let pairs =
            pairs(alibi_slopes || sinks, geometry.q_heads()) + pairs(dtypes.has_head_scales(), geometry.kv_heads());
        (pairs > 0).then_some(8 * pairs)
    }

    /// What [`AttentionIo::bias`] holds for so many pairs of a query row and a key ([`PlanCapacity::score_pairs`]), where there is
    /// such a buffer.
    pub fn bias_bytes(&self, score_pairs: u64) -> Option<u64> {
        self.extras.bias.map(|bias| {
            let elements = score_pairs.saturating_mul(bias.heads(self.layout.geometry()).into());
            elements.saturating_mul(bias.dtype.bytes().into()).checked_next_multiple_of(4).unwrap_or(u64::MAX).max(4)
        })
    }
}

/// Bytes of the row tensors of one call, padding included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferBytes {
    /// Query rows `[total_q, q_heads, head_dim]`.
    pub q: u64,
    /// Output rows `[total_q, q_heads, v_head_dim]`.
    pub out: u64,
    /// Log-sum-exp `[total_q, q_heads]`.
    pub lse: u64,
}

/// A call that cannot be bound. Nothing was recorded.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum BindError {
    /// A buffer is too small.
    #[error("`{buffer}` has {found} bytes; {needed} are needed")]
    TooSmall {
        /// Which buffer.
        buffer: &'static str,
        /// Bytes found: of the binding, or of the rest of the buffer where that is less.
        found: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// The shape needs a larger binding than the device allows.
    #[error("`{buffer}` needs a binding of {needed} bytes; the device allows {found}")]
    TooLarge {
        /// Which buffer.
        buffer: &'static str,
        /// The device's `max_storage_buffer_binding_size`.
        found: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// The device has no memory.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// A buffer was not made for this use.
    #[error("`{buffer}` has usage {found:?}; {needed:?} is needed")]
    Usage {
        /// Which buffer.
        buffer: &'static str,
        /// Its usages.
        found: wgpu::BufferUsages,
        /// The usage needed.
        needed: wgpu::BufferUsages,
    },
    /// A tensor that is written lies in the same buffer as one that is only read, wherever. WebGPU uses a buffer in one way
    /// at a time.
    #[error(
        "`{written}`, which is written, lies in the same buffer as `{read}`, which is read; they need buffers of their own"
    )]
    ReadAndWritten {
        /// The tensor that is written.
        written: &'static str,
        /// The tensor that is read.
        read: &'static str,
    },
    /// Two tensors that are written share bytes.
    #[error("`{written}`, which is written, overlaps `{other}`")]
    Overlap {
        /// The tensor that is written.
        written: &'static str,
        /// The other one.
        other: &'static str,
    },
    /// A binding starts where the device does not allow it.
    #[error("`{buffer}` starts at byte {found}; the device needs a multiple of {needed}")]
    Unaligned {
        /// Which buffer.
        buffer: &'static str,
        /// The offset found.
        found: u64,
        /// The device's `min_storage_buffer_offset_alignment`.
        needed: u64,
    },
    /// The pool lies in another number of segments.
    #[error("the pages were given in {found} bindings; {needed} are needed, one for each segment of the pool")]
    Segments {
        /// Bindings given.
        found: usize,
        /// Segments of the pool.
        needed: usize,
    },
    /// A tensor that the configuration names was left out, or one was given that it does not name.
    #[error("`{buffer}` is {}; the configuration says otherwise", if *.given { "given" } else { "left out" })]
    Extra {
        /// Which buffer.
        buffer: &'static str,
        /// Whether it was given.
        given: bool,
    },
    /// A part was made on another device. Of the caller's own buffers nobody can tell.
    #[error("the {part} was made on another device")]
    OtherDevice {
        /// The part.
        part: &'static str,
    },
    /// The plan was made for another pool.
    #[error("the plan was made for a pool of {found}; {needed} is needed")]
    OtherLayout {
        /// The plan's pool.
        found: Box<KvLayout>,
        /// The pool needed.
        needed: Box<KvLayout>,
    },
    /// The append kernel was built for other pages than the plan's.
    #[error("the append kernel was built for {found}; the plan's pool is of {needed}")]
    OtherPages {
        /// What it was built for.
        found: Box<KernelConfig>,
        /// The plan's pool.
        needed: Box<KvLayout>,
    },
    /// The plan was made for kernels of other tile sizes than this attention's.
    #[error("the plan was made for kernels with other tile sizes")]
    OtherKernels,
    /// The plan was made for other scores: for another scale, mask, window or softcap, or a call that brings other tensors.
    #[error("the plan was made for other scores: {}", differences(.found, .needed))]
    OtherScores {
        /// The plan's.
        found: Box<(AttentionOptions, Extras)>,
        /// Those needed.
        needed: Box<(AttentionOptions, Extras)>,
    },
    /// The append kernel was built for other rows than the plan's.
    #[error(
        "the append kernel was built for new rows of {found}; the plan has {needed} (`AppendPlan::new` is for rows in the \
         pages' type, `AppendPlan::converting` for others)"
    )]
    OtherRows {
        /// What it was built for.
        found: NewRows,
        /// The plan's.
        needed: NewRows,
    },
    /// More workgroups are needed than the device can dispatch at once. [`Plan::cut`] makes several dispatches of them.
    #[error("kernel `{kernel}` needs {needed} workgroups; the device allows {axis_max} on each of three axes")]
    TooManyWorkgroups {
        /// Which kernel.
        kernel: &'static str,
        /// Workgroups needed.
        needed: u32,
        /// The device's `max_compute_workgroups_per_dimension`.
        axis_max: u32,
    },
}

/// Buffers of one layer's attention, all with usage `STORAGE`. Each binding's size, or the rest of its buffer, must hold what the shape needs; it
/// may hold more, and no more than what is needed is bound.
///
/// `out` and `lse` may be parts of one buffer, and so may `q` and `kv`. WebGPU allows no buffer to be read and written
/// by the same dispatch, not even in different parts of it.
#[derive(Clone, Debug)]
pub struct AttentionIo<'a> {
    /// Query rows `[total_q, q_heads, head_dim]`, padded to multiples of [`crate::ROW_ALIGN`] elements.
    pub q: wgpu::BufferBinding<'a>,
    /// The layer's pages, a binding for each segment of the pool ([`KvLayout`]).
    pub kv: Vec<wgpu::BufferBinding<'a>>,
    /// Output rows `[total_q, q_heads, v_head_dim]`, padded like the queries.
    pub out: wgpu::BufferBinding<'a>,
    /// Log-sum-exp `[total_q, q_heads]`, f32, natural logarithm; `-inf` for a row that sees no key.
    pub lse: wgpu::BufferBinding<'a>,
    /// Where the configuration has slopes or sinks: pairs `(slope, sink)` in f32, `[q_heads, 2]`. Then, where keys or values
    /// are fp8: pairs `(key scale, value scale)`, `[kv_heads, 2]`, each from 2^-100 to 2^100; where values are part of the
    /// keys, theirs is the keys'. What the configuration has not may hold anything.
    pub heads: Option<wgpu::BufferBinding<'a>>,
    /// Where the configuration has a bias: `[1 or q_heads, pairs]`, a pair for every query row and key of its sequence,
    /// row by row and sequence after sequence. `-inf` hides a key; NaN and `+inf` must not occur. Elements are not padded,
    /// but for the whole, which takes full 32-bit words.
    pub bias: Option<wgpu::BufferBinding<'a>>,
}

/// Scratch that calls recorded one after the other may share: partial states, and the status words.
#[derive(Clone, Debug)]
pub struct Workspace {
    device: wgpu::Device,
    buffer: wgpu::Buffer,
}

/// The most bytes of partial states that a workspace may have.
pub(crate) fn workspace_max(limits: &wgpu::Limits) -> u64 {
    buffers::binding_bytes(limits).saturating_sub(STATUS_ROOM)
}

/// Bytes before the partial states.
pub(crate) const STATUS_ROOM: u64 = STATUS_WORDS as u64 * 4;

impl Workspace {
    /// Room for plans of up to `bytes` ([`Plan::workspace_bytes`]). The status words start at zero.
    ///
    /// # Errors
    /// [`BindError::TooLarge`] if the device cannot bind so much at once; [`BindError::OutOfMemory`].
    pub fn new(device: &wgpu::Device, bytes: u64) -> Result<Self, BindError> {
        let found = buffers::binding_bytes(&device.limits());
        let needed = Self::buffer_bytes(bytes);
        if needed > found {
            return Err(BindError::TooLarge { buffer: "workspace", found, needed });
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        let label = Some("attention workspace");
        let descriptor = wgpu::BufferDescriptor { label, size: needed, usage, mapped_at_creation: false };
        Ok(Self { device: device.clone(), buffer: buffers::create(device, &descriptor)? })
    }

    pub(crate) fn device(&self) -> &wgpu::Device {
        &self.device
    }

    /// Bytes of the buffer where plans need up to `bytes`: the status words, then partial states. An empty binding is not
    /// allowed.
    pub(crate) fn buffer_bytes(bytes: u64) -> u64 {
        STATUS_ROOM.saturating_add(bytes.max(16))
    }

    /// The buffer. It begins with the two status words ([`crate::STATUS_BYTES`]), to be copied out and read as
    /// [`crate::Status`].
    pub fn status(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// The part that an append binds.
    pub(crate) fn status_binding(&self) -> wgpu::BufferBinding<'_> {
        wgpu::BufferBinding { buffer: &self.buffer, offset: 0, size: wgpu::BufferSize::new(STATUS_ROOM) }
    }
}

/// A call with its bindings: recording it creates nothing. It follows its [`DevicePlan`], which may be written anew.
#[derive(Clone, Debug)]
pub struct Call {
    kernels: Kernels,
    /// For each group of segments.
    bindings: Vec<wgpu::BindGroup>,
    written: Written,
    axis_max: u32,
}

impl Call {
    /// Records the call, with the kernels that it was bound for: one dispatch per slice of the plan that was written last
    /// ([`Plan::slices`]). Creates nothing, submits nothing.
    pub fn encode(&self, pass: &mut wgpu::ComputePass<'_>) {
        self.encode_slices(pass, 0..usize::MAX);
    }

    /// Records some of the call's slices, as far as there are such. Together they must reach the device in the order of
    /// [`Plan::slices`], in as many submits as wanted, with the same plan.
    pub fn encode_slices(&self, pass: &mut wgpu::ComputePass<'_>, slices: Range<usize>) {
        let dispatches = self.written.dispatches();
        for Dispatch { kernel, groups, block, segment_group } in dispatches.iter().take(slices.end).skip(slices.start) {
            // What was written or bound has passed `check_grid`.
            let bindings = self.bindings.get(*segment_group as usize);
            if let (Some([x, y, z]), Some(bindings)) = (fold_grid(*groups, self.axis_max), bindings) {
                pass.set_pipeline(self.kernels.pipeline(*kernel));
                pass.set_bind_group(0, bindings, &[block * PARAMS_BYTES as u32]);
                pass.dispatch_workgroups(x, y, z);
            }
        }
    }

    /// Workgroups that report their end, for [`crate::Status::check`]: those of the plan that was written last.
    pub fn workgroups(&self) -> u32 {
        self.written.dispatches().iter().fold(0, |sum, dispatch| sum.wrapping_add(dispatch.groups))
    }

    /// Slices of the plan that was written last ([`Plan::slices`]).
    pub fn slices(&self) -> usize {
        self.written.dispatches().len()
    }

    /// One workgroup of one kernel, whatever the plan has for it. With an empty plan it returns at once: drivers that
    /// compile at the first dispatch do it then.
    pub(crate) fn of_one_workgroup(mut self, kernel: KernelId) -> Self {
        self.written = Written::new(vec![Dispatch { kernel, groups: 1, block: 0, segment_group: 0 }]);
        self
    }
}

/// The kernels for one configuration. It stores neither device nor queue.
#[derive(Clone, Debug)]
pub struct Attention {
    kernels: Kernels,
    config: AttentionConfig,
    workspace_max: u64,
}

impl Attention {
    /// Compiles kernels on `device`, which was opened on `adapter`: those that the rule prefers, or those without subgroups
    /// where the adapter has subgroups of several sizes.
    ///
    /// Nothing is run. [`crate::Runner::choose`] also tests the kernels before it hands them out, and steps down where an
    /// adapter does not do what it says.
    ///
    /// # Errors
    /// As [`Kernels::new`].
    pub async fn new(
        device: &wgpu::Device,
        adapter: &wgpu::AdapterInfo,
        config: &AttentionConfig,
    ) -> Result<Self, BuildError> {
        let (facts, geometry) = (AdapterFacts::new(adapter, device), config.layout.geometry());
        let base = Variants::base(&facts, geometry);
        let candidates = config.kernels(base).candidates(&facts);
        // The first has subgroups, if the last is another.
        let preferred = match facts.subgroup_sizes {
            Some((min, max)) if min == max => candidates.first(),
            _ => candidates.last(),
        };
        let variants = preferred.copied().unwrap_or(base);
        Self::with_variants(device, config, variants).await
    }

    /// Compiles the kernels that the caller names: [`Variants::quick`], say, or those of a [`crate::Tuning`].
    ///
    /// # Errors
    /// As [`Kernels::new`].
    pub async fn with_variants(
        device: &wgpu::Device,
        config: &AttentionConfig,
        variants: Variants,
    ) -> Result<Self, BuildError> {
        Self::with_kernels(Kernels::new(device, &config.kernels(variants)).await?, config)
    }

    /// Uses kernels that were compiled before: pools of other sizes, pages, scales, causal masks and lengths of windows share
    /// them.
    ///
    /// # Errors
    /// [`BuildError::OtherConfig`] if they were compiled for other dimensions, types, options or segments.
    pub fn with_kernels(kernels: Kernels, config: &AttentionConfig) -> Result<Self, BuildError> {
        let needed = config.kernels(kernels.config().variants).bound_as(kernels.config());
        if kernels.config().pipeline_key() != needed.pipeline_key() {
            return Err(BuildError::OtherConfig { found: Box::new(*kernels.config()), needed: Box::new(needed) });
        }
        Ok(Self { workspace_max: kernels.workspace_max(), kernels, config: *config })
    }

    /// The same with plans that need at most `bytes` of partial states at a time ([`Plan::workspace_bytes`]), and never more
    /// than the device can bind, which is what they go by otherwise.
    ///
    /// Where a batch has more, its work is done in rounds, each of sequences, or rows of one, whose states fit together; a
    /// round's dispatches follow the last one's merges, and use the same workspace. It changes no bit.
    #[must_use]
    pub fn with_workspace_max(self, bytes: u64) -> Self {
        Self { workspace_max: bytes.min(self.kernels.workspace_max()), ..self }
    }

    /// The configuration.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// The pool's segments, as the kernels bind them.
    pub(crate) fn groups(&self) -> SegmentGroups {
        SegmentGroups::new(&self.config.layout, self.kernels.config().segments)
    }

    /// The compiled kernels.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Room for the plans of all steps within `max`: for [`DevicePlan::with_capacity`], [`Workspace::new`] and the buffers of a
    /// step's rows. Masks, biases and shared prefixes are counted where the configuration has them.
    ///
    /// It is an upper bound: no step within `max` needs more, and in common settings some step needs more than half of it. Room
    /// for plans that are cut is not counted ([`PlanCapacity::blocks`]).
    pub fn capacity(&self, max: &StepMax) -> PlanCapacity {
        max.capacity(&self.setting(&self.groups(), &self.kernels.config().tiles()))
    }

    /// Plans one step. Pure host work; the plan serves every layer of the step.
    ///
    /// # Errors
    /// [`PlanError`], with the numbers found and needed.
    pub fn plan(&self, batch: &Batch<'_>) -> Result<Plan, PlanError> {
        self.plan_with(batch, &[], None)
    }

    /// The same with a mask: whether a row may see a key, `[sum of q_len * kv_len]`, row by row and sequence after sequence.
    /// It is joined with causal mask and window by AND.
    ///
    /// # Errors
    /// [`PlanError`], with the numbers found and needed.
    pub fn plan_masked(&self, batch: &Batch<'_>, mask: &[bool]) -> Result<Plan, PlanError> {
        self.plan_with(batch, &[], Some(mask))
    }

    /// The same with prefixes that sequences share, and with a mask where the configuration has one. Each prefix is read
    /// once for all rows of its sequences, whatever they see of it; the result is that of [`Attention::plan`] within the
    /// bound. [`Batch::shared_prefixes`] finds prefixes.
    ///
    /// The configuration must have [`Extras::shared_prefixes`].
    ///
    /// # Errors
    /// [`PlanError`], with the numbers found and needed.
    pub fn plan_shared(
        &self,
        batch: &Batch<'_>,
        prefixes: &[SharedPrefix],
        mask: Option<&[bool]>,
    ) -> Result<Plan, PlanError> {
        if !self.config.extras.shared_prefixes {
            return Err(PlanError::SharedPrefixesGiven);
        }
        self.plan_with(batch, prefixes, mask)
    }

    fn plan_with(
        &self,
        batch: &Batch<'_>,
        prefixes: &[SharedPrefix],
        mask: Option<&[bool]>,
    ) -> Result<Plan, PlanError> {
        if self.config.extras.mask != mask.is_some() {
            return Err(PlanError::MaskGiven { given: mask.is_some() });
        }
        Plan::new(batch, &self.setting(&self.groups(), &self.kernels.config().tiles()), prefixes, mask)
    }

    /// What its plans are made for.
    pub(crate) fn purpose(&self) -> Purpose {
        let AttentionConfig { options, extras, .. } = self.config;
        Purpose { groups: self.groups(), tiles: self.kernels.config().tiles(), options, extras }
    }

    fn setting<'a>(&'a self, pool: &'a SegmentGroups, tiles: &'a Tiles) -> Setting<'a> {
        let AttentionConfig { options, extras, .. } = &self.config;
        Setting { pool, options, extras, tiles, workspace_max: self.workspace_max }
    }

    /// Binds a plan to one layer's buffers. A call stays valid as long as its buffers and may be recorded any
    /// number of times.
    ///
    /// # Errors
    /// [`BindError`]; nothing was recorded.
    pub fn bind(
        &self,
        device: &wgpu::Device,
        plan: &DevicePlan,
        io: AttentionIo<'_>,
        workspace: &Workspace,
    ) -> Result<Call, BindError> {
        let parts =
            [("plan", plan.buffer.device()), ("kernels", self.kernels.device()), ("workspace", workspace.device())];
        check_devices(device, &parts)?;
        let purpose = self.purpose();
        purpose.check(&plan.purpose)?;
        let PlanCapacity { total_q, score_pairs, workspace_bytes, .. } = plan.capacity;
        let bytes = self.config.buffer_bytes(total_q);
        let limits = device.limits();
        let (plan_words, plan_bytes) = plan.buffer.words();
        let mut entries = vec![
            ("plan", plan_words, plan_bytes),
            ("q", io.q, bytes.q),
            ("out", io.out, bytes.out),
            ("lse", io.lse, bytes.lse),
            ("workspace", workspace.buffer.as_entire_buffer_binding(), Workspace::buffer_bytes(workspace_bytes)),
        ];
        // In the order of `Bindings`.
        let extras =
            [("heads", io.heads, self.config.heads_bytes()), ("bias", io.bias, self.config.bias_bytes(score_pairs))];
        for (buffer, given, needed) in extras {
            match (given, needed) {
                (Some(given), Some(needed)) => entries.push((buffer, given, needed)),
                (None, None) => {}
                (given, _) => return Err(BindError::Extra { buffer, given: given.is_some() }),
            }
        }
        entries.extend(page_entries(&self.config.layout, io.kv)?);
        let bindings = storage_bindings(&limits, &entries, &["out", "lse", "workspace"])?;
        check_grids(&plan.buffer, &plan.written)?;
        Ok(Call {
            kernels: self.kernels.clone(),
            bindings: bind_groups(
                device,
                self.kernels.attention_layout(),
                plan.buffer.params(),
                &bindings,
                &purpose.groups,
            ),
            written: plan.written.clone(),
            axis_max: limits.max_compute_workgroups_per_dimension,
        })
    }
}

/// What a plan is made for: kernels, a pool and scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Purpose {
    pub groups: SegmentGroups,
    pub tiles: Tiles,
    pub options: AttentionOptions,
    pub extras: Extras,
}

impl Purpose {
    /// Checks that a plan that was made for `found` serves this.
    pub fn check(&self, found: &Self) -> Result<(), BindError> {
        if found.groups.layout() != self.groups.layout() {
            let [found, needed] = [found, self].map(|purpose| Box::new(*purpose.groups.layout()));
            return Err(BindError::OtherLayout { found, needed });
        }
        if (found.groups, found.tiles) != (self.groups, self.tiles) {
            return Err(BindError::OtherKernels);
        }
        if (found.options, found.extras) != (self.options, self.extras) {
            let [found, needed] = [found, self].map(|purpose| Box::new((purpose.options, purpose.extras)));
            return Err(BindError::OtherScores { found, needed });
        }
        Ok(())
    }
}

/// The fields that differ, in words.
fn differences(found: &(AttentionOptions, Extras), needed: &(AttentionOptions, Extras)) -> String {
    let fields = |(options, extras): &(AttentionOptions, Extras)| {
        let AttentionOptions { scale, causal, window_left, window_right, softcap } = options;
        let Extras { alibi_slopes, sinks, mask, bias, shared_prefixes } = extras;
        let bias =
            bias.map(|Bias { dtype, per_head }| if per_head { format!("{dtype} per head") } else { dtype.to_string() });
        let none = || "none".to_owned();
        let reach = |reach: &Option<u32>| reach.map_or_else(none, |reach| reach.to_string());
        [
            ("scale", scale.to_string()),
            ("causal", causal.to_string()),
            ("window_left", reach(window_left)),
            ("window_right", reach(window_right)),
            ("softcap", softcap.map_or_else(none, |cap| cap.to_string())),
            ("alibi_slopes", alibi_slopes.to_string()),
            ("sinks", sinks.to_string()),
            ("mask", mask.to_string()),
            ("bias", bias.unwrap_or_else(none)),
            ("shared_prefixes", shared_prefixes.to_string()),
        ]
    };
    let both = fields(found).into_iter().zip(fields(needed)).filter(|((_, found), (_, needed))| found != needed);
    let words: Vec<String> =
        both.map(|((name, found), (_, needed))| format!("{name} is {found}, {needed} is needed")).collect();
    words.join("; ")
}

/// Checks that parts, each with its name, were made on `device`.
pub(crate) fn check_devices(device: &wgpu::Device, parts: &[(&'static str, &wgpu::Device)]) -> Result<(), BindError> {
    match parts.iter().find(|(_, of)| *of != device) {
        Some((part, _)) => Err(BindError::OtherDevice { part }),
        None => Ok(()),
    }
}

/// Entries of [`storage_bindings`] for the segments of a pool.
pub(crate) fn page_entries<'a>(
    layout: &KvLayout,
    kv: Vec<wgpu::BufferBinding<'a>>,
) -> Result<impl Iterator<Item = (&'static str, wgpu::BufferBinding<'a>, u64)>, BindError> {
    let (found, needed) = (kv.len(), layout.segments().get() as usize);
    if found != needed {
        return Err(BindError::Segments { found, needed });
    }
    Ok(kv.into_iter().zip(layout.segment_bytes()).map(|(binding, bytes)| ("kv", binding, bytes.max(16))))
}

/// Checks storage bindings, each with its name and the bytes that the shape needs, against what the device allows;
/// `written` are the names of those that a kernel writes to.
///
/// What comes back is bound to these bytes alone. A stray access then cannot reach what lies beside them in the caller's
/// buffer, which may be larger than a binding, and a size of the caller's that WebGPU refuses (past the buffer's end,
/// or no multiple of 4) does no harm where the bytes are there.
pub(crate) fn storage_bindings<'a>(
    limits: &wgpu::Limits,
    entries: &[(&'static str, wgpu::BufferBinding<'a>, u64)],
    written: &[&'static str],
) -> Result<Vec<wgpu::BufferBinding<'a>>, BindError> {
    let allowed = limits.max_storage_buffer_binding_size;
    let alignment = u64::from(limits.min_storage_buffer_offset_alignment);
    for (buffer, binding, needed) in entries {
        let (buffer, needed) = (*buffer, *needed);
        let usage = binding.buffer.usage();
        if !usage.contains(wgpu::BufferUsages::STORAGE) {
            return Err(BindError::Usage { buffer, found: usage, needed: wgpu::BufferUsages::STORAGE });
        }
        if needed > allowed {
            return Err(BindError::TooLarge { buffer, found: allowed, needed });
        }
        let rest = binding.buffer.size().saturating_sub(binding.offset);
        let found = binding.size.map_or(rest, |size| size.get().min(rest));
        if found < needed {
            return Err(BindError::TooSmall { buffer, found, needed });
        }
        if !binding.offset.is_multiple_of(alignment) {
            return Err(BindError::Unaligned { buffer, found: binding.offset, needed: alignment });
        }
    }
    for (index, (name, a, a_bytes)) in entries.iter().enumerate() {
        for (other_index, (other, b, b_bytes)) in entries.iter().enumerate() {
            if index == other_index || !written.contains(name) || a.buffer != b.buffer {
                continue;
            }
            if !written.contains(other) {
                return Err(BindError::ReadAndWritten { written: name, read: other });
            }
            if a.offset + a_bytes > b.offset && b.offset + b_bytes > a.offset {
                return Err(BindError::Overlap { written: name, other });
            }
        }
    }
    let bound = |(_, binding, needed): &(_, wgpu::BufferBinding<'a>, u64)| wgpu::BufferBinding {
        size: wgpu::BufferSize::new(*needed),
        ..binding.clone()
    };
    Ok(entries.iter().map(bound).collect())
}

/// Checks that the dispatches of what was written can be made.
pub(crate) fn check_grids(buffer: &PlanBuffer, written: &Written) -> Result<(), BindError> {
    for Dispatch { kernel, groups: needed, .. } in written.dispatches().iter() {
        let (kernel, needed) = (kernel.entry_point(), *needed);
        buffer.check_grid(needed).map_err(|axis_max| BindError::TooManyWorkgroups { kernel, needed, axis_max })?;
    }
    Ok(())
}

/// A bind group for each group of a pool's segments, which are the last of `bindings`.
pub(crate) fn bind_groups(
    device: &wgpu::Device,
    layout: &wgpu::BindGroupLayout,
    params: wgpu::BufferBinding<'_>,
    bindings: &[wgpu::BufferBinding<'_>],
    groups: &SegmentGroups,
) -> Vec<wgpu::BindGroup> {
    let segments = groups.layout().segments().get() as usize;
    let (others, pages) = bindings.split_at(bindings.len().saturating_sub(segments));
    let bound = |group: u32| {
        let segments = groups.segments(group);
        let pages = pages.get(segments.start as usize..segments.end as usize).unwrap_or_default();
        let resources = std::iter::once(&params).chain(others).chain(pages).cloned();
        bind_group(device, layout, resources)
    };
    (0..groups.count()).map(bound).collect()
}

pub(crate) fn bind_group<'a>(
    device: &wgpu::Device,
    layout: &wgpu::BindGroupLayout,
    resources: impl Iterator<Item = wgpu::BufferBinding<'a>>,
) -> wgpu::BindGroup {
    let entries: Vec<_> = (0..)
        .zip(resources)
        .map(|(binding, resource)| wgpu::BindGroupEntry { binding, resource: wgpu::BindingResource::Buffer(resource) })
        .collect();
    device.create_bind_group(&wgpu::BindGroupDescriptor { label: Some("paged-attention"), layout, entries: &entries })
}
