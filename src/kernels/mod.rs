//! Shader sources, their sizes against the device's limits, and compiled pipelines.

mod grid;
#[cfg(test)]
mod shader_layout;
mod source;
mod template;
mod tiles;
mod variant;

use std::sync::Arc;

use thiserror::Error;

use crate::attention::{Bias, Extras};
use crate::case::AttentionOptions;
use crate::geometry::{Dtype, HeadGeometry};
pub(crate) use grid::fold_grid;
pub(crate) use source::Bindings;
pub use source::KernelId;
pub use tiles::{DECODE_ROWS_MAX, LANES, SPLIT_KEYS, Tiles};
pub use variant::{AdapterFacts, DecodeVariant, ItemOrder, PrefillVariant, SUBGROUP_SIZES, Variants};

/// What the kernels are specialised for.
///
/// Page size, page count, head counts (but for their ratio), lengths, scale and mask are not part of it: they
/// come with the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelConfig {
    /// Heads; the group size and the two dimensions are compiled in.
    pub geometry: HeadGeometry,
    /// Type of the query rows.
    pub q: Dtype,
    /// Type of the pages.
    pub kv: Dtype,
    /// Type of the output rows: [`Dtype::F32`] or [`Dtype::F16`].
    pub out: Dtype,
    /// What happens to scores besides the scale.
    pub modifiers: Modifiers,
    /// How they are built.
    pub variants: Variants,
}

/// What happens to scores besides the scale and the causal mask. Compiled in, so that what is off costs nothing.
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
}

impl Modifiers {
    /// No modifier.
    pub const NONE: Self =
        Self { window_left: false, softcap: false, alibi: false, sinks: false, mask: false, bias: None };

    /// Options and extras that ask for these modifiers.
    pub(crate) fn example(&self, geometry: &HeadGeometry) -> (AttentionOptions, Extras) {
        let options = AttentionOptions::new(geometry)
            .with_window(self.window_left.then_some(40), None)
            .with_softcap(self.softcap.then_some(5.0));
        let bias = self.bias.map(|dtype| Bias { dtype, per_head: false });
        (options, Extras { alibi_slopes: self.alibi, sinks: self.sinks, mask: self.mask, bias })
    }

    /// Whether there are numbers per query head.
    pub(crate) fn heads(&self) -> bool {
        self.alibi || self.sinks
    }
}

/// See [`KernelConfig::pipeline_key`].
pub type PipelineKey = (u32, u32, u32, bool, [Dtype; 3], Modifiers, Variants);

impl KernelConfig {
    /// Equal for two configurations exactly if the same pipelines serve both.
    pub fn pipeline_key(&self) -> PipelineKey {
        let Self { geometry, q, kv, out, modifiers, variants } = *self;
        (
            geometry.group(),
            geometry.head_dim(),
            geometry.v_head_dim(),
            geometry.is_latent(),
            [q, kv, out],
            modifiers,
            variants,
        )
    }

    /// The tile sizes.
    pub fn tiles(&self) -> Tiles {
        Tiles::new(&self.geometry, &self.variants)
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
    /// The shader or pipeline was refused.
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
    #[error("{variants:?} cannot be built: {why}")]
    Variants {
        /// The variants.
        variants: Box<Variants>,
        /// What is wrong.
        why: &'static str,
    },
    /// Pipelines for another configuration were handed over.
    #[error("the kernels were built for {found:?}; {needed:?} is needed")]
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
    attention_layout: wgpu::BindGroupLayout,
    append_layout: wgpu::BindGroupLayout,
    prefill: wgpu::ComputePipeline,
    decode: wgpu::ComputePipeline,
    merge: wgpu::ComputePipeline,
    append: wgpu::ComputePipeline,
}

impl Kernels {
    /// Compiles the kernels for `config` on `device`.
    ///
    /// Uses validation error scopes of the calling thread; waits for the device to answer them.
    ///
    /// # Errors
    /// [`BuildError::OutDtype`], [`BuildError::Limit`] before anything is made; [`BuildError::Pipeline`].
    pub async fn new(device: &wgpu::Device, config: &KernelConfig) -> Result<Self, BuildError> {
        Self::with_edits(device, config, &[]).await
    }

    #[doc(hidden)]
    pub async fn with_edits(
        device: &wgpu::Device,
        config: &KernelConfig,
        edits: &[SourceEdit],
    ) -> Result<Self, BuildError> {
        if config.out == Dtype::Bf16 {
            return Err(BuildError::OutDtype { found: config.out });
        }
        config.variants.validate()?;
        for kernel in KernelId::ALL {
            let subgroup = kernel.subgroup(config);
            if subgroup > 0 && !device.features().contains(wgpu::Features::SUBGROUP) {
                return Err(BuildError::Subgroups { kernel: kernel.entry_point(), subgroup });
            }
            check_limits(&device.limits(), kernel, config)?;
        }
        let mut accesses = vec![Uniform, Read, Read, Write, Write, Write];
        // Slopes and sinks, the bias, the pages.
        accesses.resize(Bindings::new(&config.modifiers).kv as usize + 1, Read);
        let attention_layout = layout(device, "attention", &accesses);
        let append_layout = layout(device, "append", &[Uniform, Read, Read, Read, Write, Write]);
        let compile = async |kernel: KernelId, layout: &wgpu::BindGroupLayout| {
            pipeline(device, kernel, edited(kernel, config, edits)?, layout).await
        };
        let inner = Pipelines {
            prefill: compile(KernelId::Prefill, &attention_layout).await?,
            decode: compile(KernelId::Decode, &attention_layout).await?,
            merge: compile(KernelId::Merge, &attention_layout).await?,
            append: compile(KernelId::Append, &append_layout).await?,
            attention_layout,
            append_layout,
        };
        Ok(Self { config: *config, inner: Arc::new(inner) })
    }

    /// What the kernels were built for.
    pub fn config(&self) -> &KernelConfig {
        &self.config
    }

    pub(crate) fn attention_layout(&self) -> &wgpu::BindGroupLayout {
        &self.inner.attention_layout
    }

    pub(crate) fn append_layout(&self) -> &wgpu::BindGroupLayout {
        &self.inner.append_layout
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

/// Checks a kernel's needs against a device's limits; wgpu checks neither workgroup memory nor, for constants
/// that are set late, the workgroup's size.
fn check_limits(limits: &wgpu::Limits, kernel: KernelId, config: &KernelConfig) -> Result<(), BuildError> {
    for (limit, found, needed) in [
        (
            "max_compute_workgroup_storage_size",
            limits.max_compute_workgroup_storage_size,
            kernel.workgroup_bytes(config),
        ),
        ("max_compute_invocations_per_workgroup", limits.max_compute_invocations_per_workgroup, kernel.lanes(config)),
        ("max_compute_workgroup_size_x", limits.max_compute_workgroup_size_x, kernel.lanes(config)),
        (
            "max_storage_buffers_per_shader_stage",
            limits.max_storage_buffers_per_shader_stage,
            kernel.storage_buffers(config),
        ),
    ] {
        if found < needed {
            return Err(BuildError::Limit {
                kernel: kernel.entry_point(),
                limit,
                found: found.into(),
                needed: needed.into(),
            });
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Access {
    Uniform,
    Read,
    Write,
}
use Access::{Read, Uniform, Write};

fn layout(device: &wgpu::Device, label: &str, accesses: &[Access]) -> wgpu::BindGroupLayout {
    let entries: Vec<_> = (0..)
        .zip(accesses)
        .map(|(binding, access)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: match access {
                    Uniform => wgpu::BufferBindingType::Uniform,
                    Read => wgpu::BufferBindingType::Storage { read_only: true },
                    Write => wgpu::BufferBindingType::Storage { read_only: false },
                },
                has_dynamic_offset: false,
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

async fn pipeline(
    device: &wgpu::Device,
    kernel: KernelId,
    wgsl: String,
    layout: &wgpu::BindGroupLayout,
) -> Result<wgpu::ComputePipeline, BuildError> {
    let name = kernel.entry_point();
    // Scopes are of this thread, so they are popped before anything is awaited.
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
    let (internal, validation) = (internal.pop(), validation.pop());
    match internal.await.or(validation.await) {
        Some(error) => Err(BuildError::Pipeline { kernel: name, message: error.to_string() }),
        None => Ok(pipeline),
    }
}
