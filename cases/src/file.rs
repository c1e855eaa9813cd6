//! Cases as files: what the command reads and what a bug report holds.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use paged_attention::{Case, CaseExtras, Dtype, KvSource, Tensor};
use safetensors::View;
use thiserror::Error;

/// A case that could not be written.
#[derive(Debug, Error)]
#[error("cannot write {}: {source}", path.display())]
pub struct FileError {
    /// The file.
    pub path: PathBuf,
    /// Why not.
    pub source: safetensors::SafeTensorError,
}

/// Writes a case as a safetensors file with everything it takes to run it again.
///
/// # Errors
/// [`FileError`].
pub fn write_case(case: &Case, path: &Path) -> Result<(), FileError> {
    let mut tensors = vec![("q", Entry::of(case.q())), ("q_indptr", Entry::indices(case.q_indptr()))];
    match case.kv() {
        KvSource::Contiguous { k, v, kv_indptr } => {
            tensors.extend([("k", Entry::of(k)), ("v", Entry::of(v)), ("kv_indptr", Entry::indices(kv_indptr))]);
        }
        KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len } => tensors.extend([
            ("k_pages", Entry::of(k_pages)),
            ("v_pages", Entry::of(v_pages)),
            ("page_indptr", Entry::indices(page_indptr)),
            ("page_ids", Entry::indices(page_ids)),
            ("kv_len", Entry::indices(kv_len)),
        ]),
    }
    let CaseExtras { alibi_slopes, sinks, mask, bias, .. } = case.extras();
    for (name, values) in [("alibi_slopes", alibi_slopes), ("sinks", sinks)] {
        tensors.extend(values.as_ref().map(|values| (name, Entry::floats(values))));
    }
    tensors.extend(mask.as_ref().map(|mask| ("mask", Entry::flags(mask))));
    tensors.extend(bias.as_ref().map(|bias| ("bias", Entry::of(bias))));
    // Rust prints a float with the digits that read back as the same one.
    let options = case.options();
    let settings = [
        ("causal", Some(options.causal.to_string())),
        ("scale", Some(format!("{:e}", options.scale))),
        ("window_left", options.window_left.map(|keys| keys.to_string())),
        ("window_right", options.window_right.map(|keys| keys.to_string())),
        ("softcap", options.softcap.map(|cap| format!("{cap:e}"))),
    ];
    let metadata: HashMap<String, String> =
        settings.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
    safetensors::serialize_to_file(tensors, Some(metadata), path)
        .map_err(|source| FileError { path: path.to_owned(), source })
}

/// A tensor on its way into a file.
struct Entry<'a> {
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    data: Cow<'a, [u8]>,
}

impl<'a> Entry<'a> {
    fn of(tensor: &'a Tensor) -> Self {
        Self {
            dtype: match tensor.dtype() {
                Dtype::F32 => safetensors::Dtype::F32,
                Dtype::F16 => safetensors::Dtype::F16,
                Dtype::Bf16 => safetensors::Dtype::BF16,
            },
            shape: tensor.shape().to_vec(),
            data: Cow::Borrowed(tensor.bytes()),
        }
    }

    fn floats(values: &[f32]) -> Self {
        Self {
            dtype: safetensors::Dtype::F32,
            shape: vec![values.len()],
            data: Cow::Owned(values.iter().flat_map(|x| x.to_le_bytes()).collect()),
        }
    }

    fn flags(flags: &[bool]) -> Self {
        Self {
            dtype: safetensors::Dtype::BOOL,
            shape: vec![flags.len()],
            data: Cow::Owned(flags.iter().map(|flag| u8::from(*flag)).collect()),
        }
    }

    fn indices(indices: &[u32]) -> Self {
        Self {
            dtype: safetensors::Dtype::U32,
            shape: vec![indices.len()],
            data: Cow::Owned(indices.iter().flat_map(|x| x.to_le_bytes()).collect()),
        }
    }
}

impl View for Entry<'_> {
    fn dtype(&self) -> safetensors::Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}
