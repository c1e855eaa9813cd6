//! What can be wrong with an input. Every message says what was found and what is needed.

use thiserror::Error;

/// An input that cannot be used: exit status 2.
#[derive(Debug, Error)]
pub enum InputError {
    /// The file cannot be read at all.
    #[error("cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// A pipe or a device, which may have no end.
    #[error("found {found}; an ordinary file or a folder is needed")]
    NotAFile {
        /// What is there.
        found: &'static str,
    },
    /// A folder without cases.
    #[error("the folder holds no *.safetensors file")]
    EmptyFolder,
    /// Not a safetensors file, or a broken one.
    #[error("not a valid safetensors file: {0}")]
    Header(String),
    /// A tensor that must be there is not.
    #[error("`{tensor}` is missing: {why}")]
    Missing {
        /// The tensor.
        tensor: &'static str,
        /// What asks for it.
        why: String,
    },
    /// Two tensors exclude each other.
    #[error("`{tensor}` cannot be used together with `{other}`: {why}")]
    Conflict {
        /// The tensor.
        tensor: &'static str,
        /// The one that excludes it.
        other: &'static str,
        /// The rule.
        why: &'static str,
    },
    /// A tensor has a type that is not provided for.
    #[error("`{tensor}` is {found}; {needed} is needed")]
    Dtype {
        /// The tensor.
        tensor: &'static str,
        /// Its type.
        found: String,
        /// The types that will do.
        needed: &'static str,
    },
    /// A tensor has the wrong number of dimensions, or one that is unusable.
    #[error("`{tensor}` has shape {found:?}; {needed}")]
    Shape {
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// What is needed.
        needed: String,
    },
    /// An entry of an index tensor is negative or too large.
    #[error("`{tensor}`[{index}] is {found}; 0 to {} is needed", u32::MAX)]
    IndexValue {
        /// The tensor.
        tensor: &'static str,
        /// Position of the entry.
        index: usize,
        /// The entry.
        found: i64,
    },
    /// An entry of a mask that is neither 0 nor 1.
    #[error("`{tensor}`[{index}] is {found}; 0 (hidden) or 1 (visible) is needed")]
    MaskValue {
        /// The tensor.
        tensor: &'static str,
        /// Position of the entry.
        index: usize,
        /// The entry.
        found: u8,
    },
    /// A metadata string that cannot be used.
    #[error("metadata `{key}` is \"{found}\": {needed}")]
    Metadata {
        /// The key.
        key: &'static str,
        /// The string found.
        found: String,
        /// What is needed.
        needed: String,
    },
    /// A flag that does not go with the file.
    #[error("{flag} cannot be used: {why}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What is in the way.
        why: String,
    },
    /// A tuning table that cannot be used.
    #[error("--tuning {}: {why}", path.display())]
    Tuning {
        /// The file.
        path: std::path::PathBuf,
        /// What is in the way.
        why: String,
    },
    /// The parts do not fit together.
    #[error(transparent)]
    Case(#[from] paged_attention::CaseError),
    /// A pool that no device can address.
    #[error("{what}: {error}")]
    Pool {
        /// The flag or the tensor that asks for it.
        what: String,
        /// The numbers.
        error: paged_attention::LayoutError,
    },
    /// A run that no device can do.
    #[error(transparent)]
    Run(paged_attention::RunError),
    /// A tensor's bytes do not fit its shape. The header's check comes first, so this does not happen.
    #[error("`{tensor}`: {error}")]
    Tensor {
        /// The tensor.
        tensor: &'static str,
        /// What is wrong.
        error: paged_attention::TensorError,
    },
}
