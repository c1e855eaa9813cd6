//! Buffers for which there may be no memory.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use thiserror::Error;

/// The device has no memory for a buffer. Nothing was made, and the device stays in use.
///
/// Known at once on every backend but a browser's, which tells it through the error scopes of the caller alone.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the device has no memory for `{buffer}`, which needs {bytes} bytes: {message}")]
pub struct OutOfMemory {
    /// Which buffer.
    pub buffer: String,
    /// Bytes needed.
    pub bytes: u64,
    /// The device's message.
    pub message: String,
}

/// The most bytes that a buffer may have and be bound.
pub(crate) fn binding_bytes(limits: &wgpu::Limits) -> u64 {
    limits.max_storage_buffer_binding_size.min(limits.max_buffer_size)
}

/// Creates a buffer; that there is no memory for it is this call's own error, and reaches no handler of the caller's.
pub(crate) fn create(
    device: &wgpu::Device,
    descriptor: &wgpu::BufferDescriptor<'_>,
) -> Result<wgpu::Buffer, OutOfMemory> {
    let scope = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let buffer = device.create_buffer(descriptor);
    // wgpu's own backends have the answer ready; nothing may be waited for here.
    match pin!(scope.pop()).as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Some(error)) => Err(OutOfMemory {
            buffer: descriptor.label.unwrap_or_default().to_owned(),
            bytes: descriptor.size,
            message: error.to_string(),
        }),
        Poll::Ready(None) | Poll::Pending => Ok(buffer),
    }
}
