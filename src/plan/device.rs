//! Plans on the device: a buffer that is made once and written for every step.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

use super::Plan;
use super::slices::Dispatch;
use crate::attention::{Attention, BindError, Purpose};
use crate::buffers::{self, OutOfMemory};
use crate::kernels::fold_grid;

/// Bytes from one block of parameters to the next: the largest offset alignment that a device may ask for.
pub(crate) const PARAMS_BYTES: u64 = 256;

/// Places for blocks of parameters in a buffer that is written again and again: each write takes the next, and clears the
/// others. A call that was recorded for a write which never reached the device then finds parameters without workgroups, and
/// its kernels say so (`report_groups` in shaders/lib/status.wgsl); unless as many writes as there are places were lost in a row, or a
/// multiple of them.
const TURNS: u32 = 8;

/// A plan for which no buffer could be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("there is no buffer to write the plan of {bytes} bytes into: {message}")]
pub struct UploadError {
    /// Bytes of the plan.
    pub bytes: u64,
    /// The device's message.
    pub message: String,
}

/// A plan that cannot take the place of another on the device. Nothing was recorded, and the other one stays.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The plan is too large.
    #[error("the plan has {needed} {what}; there is room for {found}")]
    Capacity {
        /// What is counted.
        what: &'static str,
        /// The capacity.
        found: u64,
        /// How many the plan has.
        needed: u64,
    },
    /// The plan was made for something else: what that is.
    #[error(transparent)]
    Other(#[from] BindError),
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
    /// The staging belt had no memory for it.
    #[error("there is no staging memory for the plan's {bytes} bytes: {message}")]
    Staging {
        /// Bytes of the plan.
        bytes: u64,
        /// The device's message.
        message: String,
    },
}

/// What the plans of a [`DevicePlan`] may need at most.
///
/// [`Attention::capacity`] gives it for all steps of an application, from the largest numbers that they may have. Plans of
/// sample batches ([`Plan::capacity`]) are no substitute: a shorter sequence, or one with fewer new tokens, may need more. A
/// step that needs more is refused ([`WriteError::Capacity`]), and can be planned with buffers of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanCapacity {
    /// Words of work items, page tables and the like.
    pub words: u64,
    /// Blocks of parameters: one, and one for each slice of a kernel whose work was cut ([`Plan::cut`]), that reads pages of
    /// one group of segments among several, or that is of one round among several ([`Plan::slices`]). Who cuts plans adds as
    /// many slices as they have at most.
    pub blocks: u32,
    /// Query rows of all sequences.
    pub total_q: u32,
    /// Pairs of a query row and a key of its sequence: elements of a head's bias.
    pub score_pairs: u64,
    /// Bytes of partial states ([`Plan::workspace_bytes`]): no plan needs more than the device can bind, or than
    /// [`Attention::with_workspace_max`] says, so that what sequences need together may be lowered to that.
    pub workspace_bytes: u64,
}

impl PlanCapacity {
    /// Room for one batch with the sequences of both, as long as their partial states fit into one workspace. Where they do not,
    /// the batch is done in rounds, each with blocks of its own: [`Attention::capacity`] counts these.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            words: self.words.saturating_add(other.words),
            // Each counts the one that every plan has.
            blocks: self.blocks.max(1).saturating_add(other.blocks.saturating_sub(1)),
            total_q: self.total_q.saturating_add(other.total_q),
            score_pairs: self.score_pairs.saturating_add(other.score_pairs),
            workspace_bytes: self.workspace_bytes.saturating_add(other.workspace_bytes),
        }
    }

    /// Room for what either has room for.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            words: self.words.max(other.words),
            blocks: self.blocks.max(other.blocks),
            total_q: self.total_q.max(other.total_q),
            score_pairs: self.score_pairs.max(other.score_pairs),
            workspace_bytes: self.workspace_bytes.max(other.workspace_bytes),
        }
    }

    /// Whether there is room for `needed`.
    fn check(&self, needed: &Self) -> Result<(), WriteError> {
        for (what, found, needed) in [
            ("words", self.words, needed.words),
            ("blocks of parameters", self.blocks.into(), needed.blocks.into()),
            ("query rows", self.total_q.into(), needed.total_q.into()),
            ("pairs of query row and key", self.score_pairs, needed.score_pairs),
            ("bytes of partial states", self.workspace_bytes, needed.workspace_bytes),
        ] {
            if found < needed {
                return Err(WriteError::Capacity { what, found, needed });
            }
        }
        Ok(())
    }
}

/// Room for plans on the device, and the plan that was written last. Clones are the same plan.
///
/// A [`crate::Call`] that is bound to it follows it: after [`DevicePlan::write`], what is recorded is the new plan, and
/// nothing is bound again.
#[derive(Clone, Debug)]
pub struct DevicePlan {
    pub(crate) buffer: PlanBuffer,
    pub(crate) purpose: Purpose,
    pub(crate) capacity: PlanCapacity,
    pub(crate) written: Written,
}

/// The dispatches of the plan that was written last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Written(Arc<Mutex<Vec<Dispatch>>>);

impl Written {
    pub fn new(dispatches: Vec<Dispatch>) -> Self {
        Self(Arc::new(Mutex::new(dispatches)))
    }

    pub fn dispatches(&self) -> MutexGuard<'_, Vec<Dispatch>> {
        // A list is replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DevicePlan {
    /// Creates one small buffer and writes the plan into it as it is made: nothing is queued, so any number of
    /// plans may be recorded before one submit.
    ///
    /// # Errors
    /// [`UploadError`] where the device allows no buffer of that size, has no memory, or is lost.
    pub fn upload(device: &wgpu::Device, plan: &Plan) -> Result<Self, UploadError> {
        let (blocks, words) = (plan.blocks(), bytemuck::cast_slice(&plan.words));
        let buffer = PlanBuffer::filled(device, "attention plan", &blocks, words)?;
        let written = Written::new(plan.dispatches());
        Ok(Self { buffer, purpose: plan.purpose(), capacity: plan.capacity(), written })
    }

    /// Creates the buffer for plans of `attention` that need no more than `capacity`. It is never made larger: where a
    /// step needs more, make another one and bind it.
    ///
    /// Until a plan is written, its calls record nothing.
    ///
    /// # Errors
    /// [`UploadError`] where the device allows no buffer of that size or has no memory.
    pub fn with_capacity(
        device: &wgpu::Device,
        attention: &Attention,
        capacity: &PlanCapacity,
    ) -> Result<Self, UploadError> {
        let buffer = PlanBuffer::new(device, "attention plan", capacity.blocks, capacity.words)?;
        Ok(Self { buffer, purpose: attention.purpose(), capacity: *capacity, written: Written::default() })
    }

    /// Records that `plan` takes the place of the one before, in the order of `encoder`: what was recorded into it until
    /// now uses the old plan, what is recorded from now on the new one. Creates nothing as long as `belt` has room.
    ///
    /// If the encoder is given up instead of submitted, the device keeps the old plan: write again before any call is
    /// recorded. Calls that were recorded all the same compute nothing, and say so ([`crate::StatusError::Unwritten`]);
    /// so do those recorded before and submitted after. (Eight lost writes in a row, or a multiple of it, pass unnoticed.)
    ///
    /// `belt.finish()` comes before the submit, `belt.recall()` after it. A belt whose chunks hold what a step writes, about
    /// 4 bytes for each of [`PlanCapacity::words`] and what its appends and rows take, makes no more of them.
    ///
    /// # Errors
    /// [`WriteError`]; nothing was recorded.
    pub fn write(
        &self,
        belt: &mut wgpu::util::StagingBelt,
        encoder: &mut wgpu::CommandEncoder,
        plan: &Plan,
    ) -> Result<(), WriteError> {
        self.purpose.check(&plan.purpose())?;
        self.capacity.check(&plan.capacity())?;
        let words = bytemuck::cast_slice(&plan.words);
        *self.written.dispatches() = self.buffer.write(belt, encoder, &plan.blocks(), words, plan.dispatches())?;
        Ok(())
    }

    /// What its plans may need at most.
    pub fn capacity(&self) -> &PlanCapacity {
        &self.capacity
    }
}

/// A buffer with blocks of parameters at its start and words behind them.
#[derive(Clone, Debug)]
pub(crate) struct PlanBuffer {
    device: wgpu::Device,
    buffer: wgpu::Buffer,
    /// Blocks of one place, of which there are [`TURNS`].
    blocks: u32,
    /// Which write was the last.
    turn: Arc<AtomicU32>,
    axis_max: u32,
}

/// Bytes of such a buffer: an empty binding is not allowed.
pub(crate) fn plan_buffer_bytes(blocks: u32, words: u64) -> u64 {
    words_begin(blocks).saturating_add(words.max(1).saturating_mul(4))
}

fn words_begin(blocks: u32) -> u64 {
    PARAMS_BYTES * u64::from(TURNS) * u64::from(blocks.max(1))
}

/// Parameters, one after the other at the distance that a dynamic offset may have.
pub(crate) fn blocks_of<T: bytemuck::Pod>(params: impl IntoIterator<Item = T>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for params in params {
        bytes.extend_from_slice(bytemuck::bytes_of(&params));
        bytes.resize(bytes.len().next_multiple_of(PARAMS_BYTES as usize), 0);
    }
    bytes
}

impl PlanBuffer {
    /// With room for so much, and zeros: to be written.
    pub fn new(device: &wgpu::Device, label: &str, blocks: u32, words: u64) -> Result<Self, UploadError> {
        Self::create(device, label, blocks, words, false).map_err(|UploadError { bytes, message }| UploadError {
            bytes,
            message: format!("{message}; does what was asked for (`StepMax`) state all that is known?"),
        })
    }

    /// With these blocks and words, written as it is made. The last block may be cut.
    pub fn filled(device: &wgpu::Device, label: &str, blocks: &[u8], words: &[u8]) -> Result<Self, UploadError> {
        let count = blocks.len().div_ceil(PARAMS_BYTES as usize) as u32;
        let made = Self::create(device, label, count, words.len() as u64 / 4, true)?;
        for (offset, part) in [(0, blocks), (words_begin(made.blocks), words)] {
            if !part.is_empty() {
                let mapped = made.buffer.slice(offset..offset + part.len() as u64).get_mapped_range_mut();
                let failed =
                    |error: wgpu::MapRangeError| UploadError { bytes: made.buffer.size(), message: error.to_string() };
                mapped.map_err(failed)?.copy_from_slice(part);
            }
        }
        made.buffer.unmap();
        Ok(made)
    }

    fn create(
        device: &wgpu::Device,
        label: &str,
        blocks: u32,
        words: u64,
        mapped_at_creation: bool,
    ) -> Result<Self, UploadError> {
        let bytes = plan_buffer_bytes(blocks, words);
        let limits = device.limits();
        let allowed = buffers::binding_bytes(&limits);
        if bytes > allowed {
            return Err(UploadError { bytes, message: format!("the device allows {allowed}") });
        }
        let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
        let descriptor = wgpu::BufferDescriptor { label: Some(label), size: bytes, usage, mapped_at_creation };
        let buffer = buffers::create(device, &descriptor)
            .map_err(|OutOfMemory { bytes, message, .. }| UploadError { bytes, message })?;
        let axis_max = limits.max_compute_workgroups_per_dimension;
        Ok(Self { device: device.clone(), buffer, blocks: blocks.max(1), turn: Arc::default(), axis_max })
    }

    /// Records that it gets these blocks and words, for which it must have room, if `dispatches` can be made; these come
    /// back with the places of their blocks.
    pub fn write(
        &self,
        belt: &mut wgpu::util::StagingBelt,
        encoder: &mut wgpu::CommandEncoder,
        blocks: &[u8],
        words: &[u8],
        mut dispatches: Vec<Dispatch>,
    ) -> Result<Vec<Dispatch>, WriteError> {
        for Dispatch { kernel, groups: needed, .. } in &dispatches {
            let (kernel, needed) = (kernel.entry_point(), *needed);
            self.check_grid(needed).map_err(|axis_max| WriteError::TooManyWorkgroups { kernel, needed, axis_max })?;
        }
        let bytes = (blocks.len() + words.len()) as u64;
        let Some(size) = wgpu::BufferSize::new(bytes) else { return Ok(dispatches) };
        let staged = belt.allocate(size, ALIGNMENT);
        let mapped = staged.get_mapped_range_mut();
        let mut mapped = mapped.map_err(|error| WriteError::Staging { bytes, message: error.to_string() })?;
        mapped.slice(..blocks.len()).copy_from_slice(blocks);
        mapped.slice(blocks.len()..).copy_from_slice(words);
        drop(mapped);
        let turn = (self.turn.fetch_add(1, Ordering::Relaxed) + 1) % TURNS;
        let place = PARAMS_BYTES * u64::from(self.blocks);
        let (begin, end) = (place * u64::from(turn), place * u64::from(turn + 1));
        for others in [0..begin, end..words_begin(self.blocks)] {
            if !others.is_empty() {
                encoder.clear_buffer(&self.buffer, others.start, Some(others.end - others.start));
            }
        }
        let words_from = staged.offset() + blocks.len() as u64;
        for (from, to, part) in [(staged.offset(), begin, blocks), (words_from, words_begin(self.blocks), words)] {
            if !part.is_empty() {
                encoder.copy_buffer_to_buffer(staged.buffer(), from, &self.buffer, to, part.len() as u64);
            }
        }
        for dispatch in &mut dispatches {
            dispatch.block += turn * self.blocks;
        }
        Ok(dispatches)
    }

    /// Checks that so many workgroups can be dispatched at once. The error is what the device allows on an axis.
    pub fn check_grid(&self, groups: u32) -> Result<(), u32> {
        fold_grid(groups, self.axis_max).map(|_| ()).ok_or(self.axis_max)
    }

    pub fn device(&self) -> &wgpu::Device {
        &self.device
    }

    /// The first block; the others are reached by dynamic offsets.
    pub fn params(&self) -> wgpu::BufferBinding<'_> {
        wgpu::BufferBinding { buffer: &self.buffer, offset: 0, size: wgpu::BufferSize::new(PARAMS_BYTES) }
    }

    /// All words, and their bytes.
    pub fn words(&self) -> (wgpu::BufferBinding<'_>, u64) {
        let offset = words_begin(self.blocks);
        (wgpu::BufferBinding { buffer: &self.buffer, offset, size: None }, self.buffer.size().saturating_sub(offset))
    }
}

/// WebGPU copies whole words.
const ALIGNMENT: wgpu::BufferSize = match wgpu::BufferSize::new(wgpu::COPY_BUFFER_ALIGNMENT) {
    Some(alignment) => alignment,
    None => wgpu::BufferSize::MIN,
};
