//! The kernel that copies pages: the one that depends on no configuration.

use super::Access::{Read, Uniform, Write};
use super::{BuildError, LANES, Need, layout, pipeline};
use crate::status::STATUS_WORDS;

/// Its entry point, and the name of its file.
const NAME: &str = "copy_pages";

/// Storage buffers that it binds: the copies, the pages, the status words.
const STORAGE_BUFFERS: u32 = 3;

/// The whole WGSL module of the kernel that copies pages, `copy_pages`.
pub fn copy_pages_wgsl() -> String {
    [
        "// Constants; written by the host.",
        &format!("const LANES = {LANES}u;"),
        &format!("const STATUS_WORDS = {STATUS_WORDS}u;"),
        "",
        include_str!("../../shaders/lib/grid.wgsl"),
        include_str!("../../shaders/lib/status.wgsl"),
        include_str!("../../shaders/copy_pages.wgsl"),
    ]
    .join("\n")
}

#[derive(Clone, Debug)]
pub(crate) struct CopyKernel {
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
}

impl CopyKernel {
    /// Compiles it, with each `from` in its source replaced by its `to`.
    ///
    /// # Errors
    /// [`BuildError`].
    pub async fn new(device: &wgpu::Device, edits: &[(&str, &str)]) -> Result<Self, BuildError> {
        Need { workgroup_bytes: 0, lanes: LANES, storage_buffers: STORAGE_BUFFERS }.check(&device.limits(), NAME)?;
        let mut wgsl = copy_pages_wgsl();
        for (from, to) in edits {
            if !wgsl.contains(from) {
                return Err(BuildError::Edit { kernel: NAME, from: (*from).into() });
            }
            wgsl = wgsl.replace(from, to);
        }
        let layout = layout(device, NAME, &[Uniform, Read, Write, Write]);
        Ok(Self { pipeline: pipeline(device, NAME, wgsl, &layout).await?, layout })
    }
}
