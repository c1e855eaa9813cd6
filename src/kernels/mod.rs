//! Shader sources, their sizes against the device's limits, and compiled pipelines.

mod alternatives;
mod copy;
mod grid;
pub(crate) mod names;
#[cfg(test)]
mod shader_layout;
mod source;
mod template;
mod tiles;
mod variant;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use thiserror::Error;

use crate::attention::{Bias, Extras, workspace_max};
use crate::case::AttentionOptions;
use crate::geometry::{Dtype, HeadGeometry};
use crate::kv::{KvDtypes, NewRows, RotaryError};
pub use alternatives::Alternatives;
pub(crate) use copy::CopyKernel;
pub use copy::copy_pages_wgsl;
pub(crate) use grid::fold_grid;
pub use names::NameError;
pub use source::KernelId;
pub(crate) use tiles::append_row_lanes;
pub use tiles::{DECODE_ROWS_MAX, LANES, Pass, SHARED_ROWS_SPLIT_MAX, SHARED_SPLIT_KEYS, SPLIT_KEYS, Tiles};
pub use variant::{AdapterFacts, DecodeVariant, ItemOrder, PrefillVariant, SUBGROUP_SIZES, Variants};

/// What the kernels are specialised for.
///
/// Page size, page count, head counts (but for their ratio), lengths, scale and causal mask are not part of it: they
/// come with the plan, and so do the reach of a window and the size of a softcap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelConfig {
    /// Heads; the group size and the two dimensions are compiled in.
    pub geometry: HeadGeometry,
    /// Type of the query rows.
    pub q: Dtype,
    /// Types of the pages.
    pub kv: KvDtypes,
    /// New rows, as an append finds them.
    pub new_rows: NewRows,
    /// Type of the output rows: [`Dtype::F32`] or [`Dtype::F16`].
    pub out: Dtype,
    /// What happens to scores besides the scale.
    pub modifiers: Modifiers,
    /// Segments of the pool ([`crate::KvLayout::segments`]); of a pool in several groups, those that a dispatch binds.
    pub segments: NonZeroU32,
    /// How they are built.
    pub variants: Variants,
}

/// What happens to scores besides the scale and the causal mask, whether keys are shared, and whether some lie out of reach.
/// Compiled in, so that what is off costs nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Modifiers {
    /// A window that ends on the left.
    pub window_left: bool,
    /// A softcap.
    pub softcap: bool,
    /// ALiBi slopes.
    pub alibi: bool,
    /// Attention sinks.
    pub sinks: bool,
    /// A mask.
    pub mask: bool,
    /// A bias, and its type.
    pub bias: Option<Dtype>,
    /// Prefixes that sequences share.
    pub shared_prefixes: bool,
    /// A pool in more segments than a dispatch binds: the keys of the others are left to other dispatches.
    pub grouped: bool,
}

impl Modifiers {
    /// No modifier.
    pub const NONE: Self = Self {
        window_left: false,
        softcap: false,
        alibi: false,
        sinks: false,
        mask: false,
        bias: None,
        shared_prefixes: false,
        grouped: false,
    };

    /// Options and extras that ask for these modifiers.
    pub(crate) fn example(&self, geometry: &HeadGeometry) -> (AttentionOptions, Extras) {
        let options = AttentionOptions::new(geometry)
            .with_window(self.window_left.then_some(40), None)
            .with_softcap(self.softcap.then_some(5.0));
        let bias = self.bias.map(|dtype| Bias { dtype, per_head: false });
        let Self { alibi: alibi_slopes, sinks, mask, shared_prefixes, .. } = *self;
        (options, Extras { alibi_slopes, sinks, mask, bias, shared_prefixes })
    }

    /// Whether merges name what they fold.
    pub(crate) fn names_sources(&self) -> bool {
        self.shared_prefixes || self.grouped
    }

    /// Whether there are numbers per query head.
    pub(crate) fn heads(&self) -> bool {
        self.alibi || self.sinks
    }
}

/// What kernels compute, as opposed to how they are built, whatever happens to scores: a choice among variants is made per
/// shape.
///
/// Its text, such as `group=3 head_dim=64 v_head_dim=64 q=f16 kv=f16 out=f32`, can be parsed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelShape {
    /// Of one KV head.
    geometry: HeadGeometry,
    q: Dtype,
    kv: KvDtypes,
    out: Dtype,
}

impl KernelShape {
    /// A configuration of this shape, with one KV head, without modifiers, with the pool in one binding, and with new rows
    /// in the type of the pages, or of the queries where those have none that a tensor could have.
    pub fn config(&self, variants: Variants) -> KernelConfig {
        let Self { geometry, q, kv, out } = *self;
        let new_rows = kv.float().unwrap_or(q).into();
        let (modifiers, segments) = (Modifiers::NONE, NonZeroU32::MIN);
        KernelConfig { geometry, q, kv, new_rows, out, modifiers, segments, variants }
    }
}

/// See [`KernelConfig::pipeline_key`].
pub type PipelineKey = (KernelShape, NewRows, Modifiers, NonZeroU32, Variants);

impl KernelConfig {
    /// The configuration without its variants, and of the head counts their ratio alone.
    pub fn shape(&self) -> KernelShape {
        let Self { geometry, q, kv, out, .. } = *self;
        KernelShape { geometry: geometry.of_one_kv_head(), q, kv: kv.of(&geometry), out }
    }

    /// The same on a device with these limits: where the pool has more segments than there are bindings, a dispatch binds as
    /// many as fit ([`Modifiers::grouped`]). [`Kernels`] and [`crate::Runner`] do it themselves.
    #[must_use]
    pub fn within(self, limits: &wgpu::Limits) -> Self {
        let others = KernelId::ALL.into_iter().map(|kernel| kernel.other_storage_buffers(&self)).max().unwrap_or(0);
        // One more binding is of the parameters.
        let bindings = limits.max_bindings_per_bind_group.saturating_sub(1);
        let fit = limits.max_storage_buffers_per_shader_stage.min(bindings).saturating_sub(others);
        self.binding(NonZeroU32::new(fit).unwrap_or(NonZeroU32::MIN))
    }

    /// The same with at most so many segments in a dispatch.
    fn binding(self, most: NonZeroU32) -> Self {
        if self.segments <= most {
            return self;
        }
        Self { segments: most, modifiers: Modifiers { grouped: true, ..self.modifiers }, ..self }
    }

    /// The same for kernels that were built with `built`, which bind no more segments than that.
    pub(crate) fn bound_as(self, built: &Self) -> Self {
        if built.modifiers.grouped { self.binding(built.segments) } else { self }
    }

    /// Whether pools in so many segments are what it is for.
    pub(crate) fn serves(&self, segments: NonZeroU32) -> bool {
        if self.modifiers.grouped { segments > self.segments } else { segments == self.segments }
    }

    /// Equal for two configurations exactly if the same pipelines serve both.
    pub fn pipeline_key(&self) -> PipelineKey {
        (self.shape(), self.new_rows, self.modifiers, self.segments, self.variants)
    }

    /// The variants to try, best first: [`Variants::candidates`] of the geometry, with more rows where prefixes are shared.
    pub fn candidates(&self, facts: &AdapterFacts) -> Vec<Variants> {
        let candidates = Variants::candidates(facts, &self.geometry).into_iter();
        match self.modifiers.shared_prefixes {
            true => candidates.map(|variants| variants.sharing(facts)).collect(),
            false => candidates.collect(),
        }
    }

    /// Whether an append copies new rows bit for bit.
    pub(crate) fn append_copies(&self) -> bool {
        self.new_rows.copied(self.kv.of(&self.geometry))
    }

    /// The tile sizes.
    pub fn tiles(&self) -> Tiles {
        let scaled = self.kv.of(&self.geometry).has_scales();
        Tiles::with_scales(&self.geometry, &self.variants, scaled)
    }
}

impl fmt::Display for KernelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.shape(), self.variants)?;
        match (self.segments.get(), self.modifiers.grouped) {
            (1, false) => {}
            (segments, false) => write!(f, " segments={segments}")?,
            (segments, true) => write!(f, " segments={segments} of more")?,
        }
        let NewRows { dtype, rotary } = self.new_rows;
        if !self.append_copies() {
            write!(f, " new={dtype}")?;
        }
        if let Some(rotary) = rotary {
            write!(f, " {rotary:?}")?;
        }
        write!(f, "{}", self.modifiers)
    }
}

impl fmt::Display for Modifiers {
    /// A word for each that is there, with a space before it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Groups of segments are told with the segments.
        let Self { window_left, softcap, alibi, sinks, mask, bias, shared_prefixes, grouped: _ } = *self;
        for (name, there) in [
            ("window", window_left),
            ("softcap", softcap),
            ("alibi", alibi),
            ("sinks", sinks),
            ("mask", mask),
            ("shared_prefixes", shared_prefixes),
        ] {
            if there {
                write!(f, " {name}")?;
            }
        }
        bias.map_or(Ok(()), |dtype| write!(f, " bias={dtype}"))
    }
}

/// Kernels that cannot be built on a device.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The output type has no kernel.
    #[error("output type {found} is not supported; f32 and f16 are")]
    OutDtype {
        /// The type found.
        found: Dtype,
    },
    /// A bias of this type has no kernel.
    #[error("bias type {found} is not supported; f32 and f16 are")]
    BiasDtype {
        /// The type found.
        found: Dtype,
    },
    /// The keys cannot be rotated so.
    #[error(transparent)]
    Rotary(#[from] RotaryError),
    /// The device allows less than a kernel needs. wgpu itself does not check all of these.
    #[error("kernel `{kernel}` needs {limit} of {needed}; the device allows {found}")]
    Limit {
        /// The kernel's name.
        kernel: &'static str,
        /// The limit's name in WebGPU.
        limit: &'static str,
        /// What the device allows.
        found: u64,
        /// What the kernel needs.
        needed: u64,
    },
    /// A shader file's template is broken: a fault of this crate.
    #[error("kernel `{kernel}`: {message}")]
    Template {
        /// The kernel's name.
        kernel: &'static str,
        /// What is wrong.
        message: String,
    },
    /// The shader or pipeline was refused, or there is no memory for it.
    #[error("kernel `{kernel}` was refused: {message}")]
    Pipeline {
        /// The kernel's name.
        kernel: &'static str,
        /// The device's message.
        message: String,
    },
    /// A kernel uses subgroups, and the device was opened without them.
    #[error("kernel `{kernel}` is built for subgroups of {subgroup}; the device has `SUBGROUP` not enabled")]
    Subgroups {
        /// The kernel's name.
        kernel: &'static str,
        /// The subgroup size.
        subgroup: u32,
    },
    /// Sizes of a variant that do not go together.
    #[error("{variants} cannot be built: {needed} is needed")]
    Variants {
        /// The variants.
        variants: Box<Variants>,
        /// What is needed.
        needed: &'static str,
    },
    /// Pipelines for another configuration were handed over.
    #[error("the kernels were built for {found}; {needed} is needed")]
    OtherConfig {
        /// What the kernels were built for.
        found: Box<KernelConfig>,
        /// What is needed.
        needed: Box<KernelConfig>,
    },
    /// A source edit of a test does not apply.
    #[error("edit of `{kernel}`: {from:?} does not occur in it")]
    Edit {
        /// The kernel's name.
        kernel: &'static str,
        /// The text looked for.
        from: String,
    },
}

/// A change to a kernel's source, by which tests show that they would notice a fault.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct SourceEdit {
    pub kernel: KernelId,
    pub from: &'static str,
    pub to: &'static str,
}

/// Compiled kernels. Cloning is cheap; they belong to the device that made them.
#[derive(Clone, Debug)]
pub struct Kernels {
    config: KernelConfig,
    inner: Arc<Pipelines>,
}

#[derive(Debug)]
struct Pipelines {
    device: wgpu::Device,
    layouts: Layouts,
    /// Bytes of partial states that the device can bind.
    workspace_max: u64,
    prefill: wgpu::ComputePipeline,
    decode: wgpu::ComputePipeline,
    merge: wgpu::ComputePipeline,
    append: wgpu::ComputePipeline,
}

/// What the kernels' bind groups look like.
#[derive(Debug)]
pub(crate) struct Layouts {
    attention: wgpu::BindGroupLayout,
    append: wgpu::BindGroupLayout,
}

impl Layouts {
    /// Once `config` is found to suit the device.
    pub(crate) fn new(device: &wgpu::Device, config: &KernelConfig) -> Result<Self, BuildError> {
        check(device, config)?;
        let with_pages = |mut accesses: Vec<Access>, kernel: KernelId, pages: Access| {
            // Slopes, sinks and scales, the bias.
            accesses.resize(kernel.other_storage_buffers(config) as usize + 1, Read);
            accesses.resize(kernel.storage_buffers(config) as usize + 1, pages);
            layout(device, kernel.entry_point(), &accesses)
        };
        Ok(Self {
            attention: with_pages(vec![Blocks, Read, Read, Write, Write, Write], KernelId::Prefill, Read),
            append: with_pages(vec![Blocks, Read, Read, Read, Write], KernelId::Append, Write),
        })
    }

    pub(crate) fn of(&self, kernel: KernelId) -> &wgpu::BindGroupLayout {
        match kernel {
            KernelId::Prefill | KernelId::Decode | KernelId::Merge => &self.attention,
            KernelId::Append => &self.append,
        }
    }
}

impl Kernels {
    /// Compiles the kernels for `config` ([`KernelConfig::within`] its limits) on `device`.
    ///
    /// Uses validation error scopes of the calling thread; waits for the device to answer them.
    ///
    /// # Errors
    /// [`BuildError`]; what `config` or the device do not allow is found before anything is made.
    pub async fn new(device: &wgpu::Device, config: &KernelConfig) -> Result<Self, BuildError> {
        Self::with_edits(device, config, &[]).await
    }

    #[doc(hidden)]
    pub async fn with_edits(
        device: &wgpu::Device,
        config: &KernelConfig,
        edits: &[SourceEdit],
    ) -> Result<Self, BuildError> {
        let config = &config.within(&device.limits());
        let layouts = Layouts::new(device, config)?;
        let make = async |kernel: KernelId| {
            pipeline(device, kernel.entry_point(), edited(kernel, config, edits)?, layouts.of(kernel)).await
        };
        let [prefill, decode, merge, append] = KernelId::ALL;
        let pipelines = [make(prefill).await?, make(decode).await?, make(merge).await?, make(append).await?];
        Ok(Self::assemble(device, config, layouts, pipelines))
    }

    /// Kernels of pipelines in the order of [`KernelId::ALL`], for a configuration that is within the device's limits.
    pub(crate) fn assemble(
        device: &wgpu::Device,
        config: &KernelConfig,
        layouts: Layouts,
        [prefill, decode, merge, append]: [wgpu::ComputePipeline; 4],
    ) -> Self {
        let workspace_max = workspace_max(&device.limits());
        let inner = Pipelines { device: device.clone(), layouts, workspace_max, prefill, decode, merge, append };
        Self { config: *config, inner: Arc::new(inner) }
    }

    /// What the kernels were built for.
    pub fn config(&self) -> &KernelConfig {
        &self.config
    }

    pub(crate) fn device(&self) -> &wgpu::Device {
        &self.inner.device
    }

    pub(crate) fn workspace_max(&self) -> u64 {
        self.inner.workspace_max
    }

    pub(crate) fn attention_layout(&self) -> &wgpu::BindGroupLayout {
        &self.inner.layouts.attention
    }

    pub(crate) fn append_layout(&self) -> &wgpu::BindGroupLayout {
        &self.inner.layouts.append
    }

    pub(crate) fn pipeline(&self, kernel: KernelId) -> &wgpu::ComputePipeline {
        match kernel {
            KernelId::Prefill => &self.inner.prefill,
            KernelId::Decode => &self.inner.decode,
            KernelId::Merge => &self.inner.merge,
            KernelId::Append => &self.inner.append,
        }
    }
}

/// Refuses what the device cannot run, before anything is made.
fn check(device: &wgpu::Device, config: &KernelConfig) -> Result<(), BuildError> {
    if config.out == Dtype::Bf16 {
        return Err(BuildError::OutDtype { found: config.out });
    }
    if let Some(found) = config.modifiers.bias.filter(|dtype| *dtype == Dtype::Bf16) {
        return Err(BuildError::BiasDtype { found });
    }
    config.variants.validate()?;
    if let Some(rotary) = config.new_rows.rotary {
        rotary.check(config.geometry.head_dim())?;
    }
    for kernel in KernelId::ALL {
        let subgroup = kernel.subgroup(config);
        if subgroup > 0 && !device.features().contains(wgpu::Features::SUBGROUP) {
            return Err(BuildError::Subgroups { kernel: kernel.entry_point(), subgroup });
        }
        let need = Need {
            workgroup_bytes: kernel.workgroup_bytes(config),
            lanes: kernel.lanes(config),
            storage_buffers: kernel.storage_buffers(config),
        };
        need.check(&device.limits(), kernel.entry_point())?;
    }
    Ok(())
}

/// What a kernel needs of a device.
struct Need {
    workgroup_bytes: u32,
    lanes: u32,
    storage_buffers: u32,
}

impl Need {
    /// Checks the needs against a device's limits; wgpu checks neither workgroup memory nor, for constants that are set
    /// late, the workgroup's size.
    fn check(&self, limits: &wgpu::Limits, kernel: &'static str) -> Result<(), BuildError> {
        for (limit, found, needed) in [
            ("max_compute_workgroup_storage_size", limits.max_compute_workgroup_storage_size, self.workgroup_bytes),
            ("max_compute_invocations_per_workgroup", limits.max_compute_invocations_per_workgroup, self.lanes),
            ("max_compute_workgroup_size_x", limits.max_compute_workgroup_size_x, self.lanes),
            ("max_storage_buffers_per_shader_stage", limits.max_storage_buffers_per_shader_stage, self.storage_buffers),
        ] {
            if found < needed {
                return Err(BuildError::Limit { kernel, limit, found: found.into(), needed: needed.into() });
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Access {
    Uniform,
    /// A uniform at a dynamic offset.
    Blocks,
    Read,
    Write,
}
use Access::{Blocks, Read, Uniform, Write};

fn layout(device: &wgpu::Device, label: &str, accesses: &[Access]) -> wgpu::BindGroupLayout {
    let entries: Vec<_> = (0..)
        .zip(accesses)
        .map(|(binding, access)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: match access {
                    Uniform | Blocks => wgpu::BufferBindingType::Uniform,
                    Read => wgpu::BufferBindingType::Storage { read_only: true },
                    Write => wgpu::BufferBindingType::Storage { read_only: false },
                },
                has_dynamic_offset: matches!(access, Blocks),
                min_binding_size: None,
            },
            count: None,
        })
        .collect();
    device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(label), entries: &entries })
}

fn edited(kernel: KernelId, config: &KernelConfig, edits: &[SourceEdit]) -> Result<String, BuildError> {
    let mut wgsl = kernel.wgsl(config)?;
    for edit in edits.iter().filter(|edit| edit.kernel == kernel) {
        if !wgsl.contains(edit.from) {
            return Err(BuildError::Edit { kernel: kernel.entry_point(), from: edit.from.into() });
        }
        wgsl = wgsl.replace(edit.from, edit.to);
    }
    Ok(wgsl)
}

/// Compiles the kernel with the entry point `name`.
pub(crate) async fn pipeline(
    device: &wgpu::Device,
    name: &'static str,
    wgsl: String,
    layout: &wgpu::BindGroupLayout,
) -> Result<wgpu::ComputePipeline, BuildError> {
    // Scopes are of this thread, so they are popped before anything is awaited.
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some(name),
        source: wgpu::ShaderSource::Wgsl(wgsl.into()),
    });
    let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: Some(name),
        bind_group_layouts: &[Some(layout)],
        immediate_size: 0,
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(name),
        layout: Some(&pipeline_layout),
        module: &module,
        entry_point: Some(name),
        compilation_options: wgpu::PipelineCompilationOptions::default(),
        cache: None,
    });
    let (internal, validation, memory) = (internal.pop(), validation.pop(), memory.pop());
    match internal.await.or(validation.await).or(memory.await) {
        Some(error) => Err(BuildError::Pipeline { kernel: name, message: error.to_string() }),
        None => Ok(pipeline),
    }
}
