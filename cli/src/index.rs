//! Index tensors: I32, U32 or I64 in the file, `u32` from here on.

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::error::InputError;

/// Reads a one-dimensional index tensor.
pub fn read(tensor: &'static str, view: &TensorView<'_>) -> Result<Vec<u32>, InputError> {
    let wide: Vec<i64> = match view.dtype() {
        Dtype::I32 => decode(view.data(), |bytes| i64::from(i32::from_le_bytes(bytes))),
        Dtype::U32 => decode(view.data(), |bytes| i64::from(u32::from_le_bytes(bytes))),
        Dtype::I64 => decode(view.data(), i64::from_le_bytes),
        found => {
            return Err(InputError::Dtype { tensor, found: found.to_string(), needed: "I32, U32 or I64" });
        }
    };
    if view.shape().len() != 1 {
        return Err(InputError::Shape {
            tensor,
            found: view.shape().to_vec(),
            needed: "one dimension is needed".into(),
        });
    }
    wide.into_iter()
        .enumerate()
        .map(|(index, found)| u32::try_from(found).map_err(|_| InputError::IndexValue { tensor, index, found }))
        .collect()
}

fn decode<const N: usize>(bytes: &[u8], element: fn([u8; N]) -> i64) -> Vec<i64> {
    bytes.chunks_exact(N).filter_map(|chunk| chunk.try_into().ok()).map(element).collect()
}
