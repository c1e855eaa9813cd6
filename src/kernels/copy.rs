//! The kernel that copies pages inside a segment: it depends on nothing.

use super::Access::{Read, Uniform, Write};
use super::{BuildError, LANES, Need, layout, pipeline, source};
use crate::status::STATUS_WORDS;

/// Its entry point, and the name of its file.
const NAME: &str = "copy_pages";

/// Storage buffers that it binds before the pages: the copies, the status words.
const OTHER_STORAGE_BUFFERS: u32 = 2;

/// The whole WGSL module of the kernel that copies pages, `copy_pages`.
///
/// # Errors
/// [`BuildError::Template`] where the file is not of the form that the host expects.
pub fn copy_pages_wgsl() -> Result<String, BuildError> {
    let constants = [
        ("LANES", LANES),
        ("STATUS_WORDS", STATUS_WORDS),
        ("KV_BINDING", OTHER_STORAGE_BUFFERS + 1),
        ("SEGMENTS", 1),
        ("SEGMENTED", 0),
        ("WRITES_PAGES", 1),
        ("PAGES_IN_WORDS", 0),
    ];
    let files = [
        include_str!("../../shaders/lib/grid.wgsl"),
        include_str!("../../shaders/lib/status.wgsl"),
        include_str!("../../shaders/lib/pages.wgsl"),
        include_str!("../../shaders/copy_pages.wgsl"),
    ];
    source::module(NAME, &constants, files)
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
        let storage_buffers = OTHER_STORAGE_BUFFERS + 1;
        Need { workgroup_bytes: 0, lanes: LANES, storage_buffers }.check(&device.limits(), NAME)?;
        let mut wgsl = copy_pages_wgsl()?;
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
