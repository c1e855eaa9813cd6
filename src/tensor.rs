//! Tensors on the host: the bytes of a file or of another library, with their type and shape.

use half::{bf16, f16};
use thiserror::Error;

use crate::geometry::Dtype;

/// Bytes, type and shape do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The product of the dimensions does not fit into memory addressing.
    #[error("shape {shape:?} has more elements than can be addressed")]
    Overflow {
        /// The shape found.
        shape: Vec<usize>,
    },
    /// The data is shorter or longer than the shape says.
    #[error("shape {shape:?} of {dtype} needs {needed} bytes; {found} were given")]
    Length {
        /// The shape found.
        shape: Vec<usize>,
        /// The element type.
        dtype: Dtype,
        /// Bytes that the shape needs.
        needed: usize,
        /// Bytes given.
        found: usize,
    },
}

/// A dense row-major host tensor `[rows, heads, dim]` (or `[pages, page_size, heads, dim]`) of floats.
///
/// The bytes are little-endian, without padding between rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    /// Takes bytes as they lie in a file.
    ///
    /// # Errors
    /// [`TensorError`] if the length is not what shape and type need.
    pub fn from_bytes(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Result<Self, TensorError> {
        let needed = shape
            .iter()
            .try_fold(dtype.bytes() as usize, |size, dim| size.checked_mul(*dim))
            .ok_or_else(|| TensorError::Overflow { shape: shape.to_vec() })?;
        if needed != bytes.len() {
            return Err(TensorError::Length { shape: shape.to_vec(), dtype, needed, found: bytes.len() });
        }
        Ok(Self { dtype, shape: shape.to_vec(), bytes })
    }

    /// Rounds `values` to `dtype` (to nearest, ties to even).
    ///
    /// # Errors
    /// [`TensorError`] if the number of values is not what the shape needs.
    pub fn from_f32(dtype: Dtype, shape: &[usize], values: &[f32]) -> Result<Self, TensorError> {
        let bytes = match dtype {
            Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            Dtype::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        };
        Self::from_bytes(dtype, shape, bytes)
    }

    /// The first `dim` elements of each innermost row; the whole rows where they are no longer.
    #[must_use]
    pub fn first_of_rows(&self, dim: usize) -> Self {
        let row = self.shape.last().copied().unwrap_or(1);
        let size = self.dtype.bytes() as usize;
        let kept = dim.min(row);
        let rows = self.bytes.chunks_exact((row * size).max(1));
        let bytes = rows.flat_map(|row| row.iter().take(kept * size)).copied().collect();
        let mut shape = self.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = kept;
        }
        Self { dtype: self.dtype, shape, bytes }
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements, little-endian, without padding.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The elements as f32, which holds every value of every [`Dtype`] exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.bytes.len() / self.dtype.bytes() as usize);
        decode(self.dtype, &self.bytes, &mut out);
        out
    }

    /// Appends the `count` elements from `start` on, in row-major order, to `out`; `None` if there are fewer.
    pub(crate) fn extend_f32(&self, start: usize, count: usize, out: &mut Vec<f32>) -> Option<()> {
        let size = self.dtype.bytes() as usize;
        let (first, len) = (start.checked_mul(size)?, count.checked_mul(size)?);
        decode(self.dtype, self.bytes.get(first..first.checked_add(len)?)?, out);
        Some(())
    }
}

fn decode(dtype: Dtype, bytes: &[u8], out: &mut Vec<f32>) {
    fn append<const N: usize>(bytes: &[u8], out: &mut Vec<f32>, element: fn([u8; N]) -> f32) {
        out.extend(bytes.chunks_exact(N).filter_map(|b| b.try_into().ok()).map(element));
    }
    match dtype {
        Dtype::F32 => append(bytes, out, f32::from_le_bytes),
        Dtype::F16 => append(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        Dtype::Bf16 => append(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
    }
}
