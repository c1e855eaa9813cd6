//! What can be wrong with a case.

use thiserror::Error;

use crate::batch::BatchError;
use crate::geometry::GeometryError;

/// A case whose parts do not fit together.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CaseError {
    /// A dimension or the scale is unusable.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A tensor's shape is not the one that the others ask for.
    #[error("`{tensor}` has shape {found:?}; {needed} is needed")]
    Shape {
        /// Name of the tensor.
        tensor: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// What is needed, in words and numbers.
        needed: String,
    },
    /// Keys and values are stored in different types.
    #[error("`{tensor}` is {found}; keys and values must have the same type, and the keys are {needed}")]
    KvDtype {
        /// Name of the value tensor.
        tensor: &'static str,
        /// Its type.
        found: crate::Dtype,
        /// The keys' type.
        needed: crate::Dtype,
    },
    /// An index tensor (`q_indptr`, `kv_indptr`, `page_indptr`, `page_ids`, `kv_len`) is unusable.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// An owned element is NaN or infinite. (In a bias, `-inf` is allowed.)
    #[error("`{tensor}` holds {value} at {index:?}; owned values must be finite{}", match *tensor {
        "bias" => ", or -inf to hide a key",
        _ => "",
    })]
    NotFinite {
        /// Name of the tensor.
        tensor: &'static str,
        /// The offending index, one entry per dimension.
        index: Vec<usize>,
        /// The value found.
        value: f32,
    },
    /// The bias is stored in a type that no kernel reads.
    #[error("`bias` is {found}; f32 or f16 is needed")]
    BiasDtype {
        /// Its type.
        found: crate::Dtype,
    },
    /// A soft cap that is no number, or outside the supported range.
    #[error("softcap is {found}; {:e} to {:e} is supported", crate::SOFTCAP_MIN, crate::SOFTCAP_MAX)]
    SoftcapRange {
        /// The cap found.
        found: f64,
    },
    /// More work or memory than a check can take: [`crate::CASE_SCORES_MAX`],
    /// [`crate::CASE_BYTES_MAX`], [`crate::SEQUENCE_BYTES_MAX`].
    #[error("{}the case has {found} {what}; at most {limit} are supported", match seq {
        Some(seq) => format!("sequence {seq} of "),
        None => String::new(),
    })]
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// The sequence, where the limit is one for each.
        seq: Option<usize>,
        /// How much there is.
        found: u128,
        /// The largest number.
        limit: u64,
    },
    /// A sum of weighted values may leave the range of f32: weights are at most 1 and normalised at the end.
    #[error(
        "sequence {seq}, KV head {kv_head}: {kv_len} keys with values of up to {found:.4e} may sum to {sum:.4e}; at most \
         {limit:.4e} is supported"
    )]
    ValueRange {
        /// The sequence.
        seq: usize,
        /// The KV head.
        kv_head: usize,
        /// Keys of the sequence.
        kv_len: u32,
        /// The largest magnitude among the values.
        found: f64,
        /// That times the number of keys.
        sum: f64,
        /// The largest supported sum.
        limit: f64,
    },
    /// Values too large for the output type.
    #[error("`{tensor}` holds {found:.4e}, and so may the output; {dtype} reaches {limit}")]
    OutRange {
        /// Name of the value tensor.
        tensor: &'static str,
        /// The largest magnitude among the owned values.
        found: f64,
        /// The output type.
        dtype: crate::Dtype,
        /// The largest number of that type.
        limit: f64,
    },
    /// A key or value is outside the range of the type in which the pages are to hold it.
    #[error("`{tensor}` holds {value:e} at {index:?}; {dtype}, in which the pages are to hold it, reaches {limit}")]
    StoredRange {
        /// Name of the tensor.
        tensor: &'static str,
        /// The offending index, one entry per dimension.
        index: Vec<usize>,
        /// The element found.
        value: f32,
        /// The pages' type.
        dtype: crate::Dtype,
        /// The largest number of that type.
        limit: f64,
    },
    /// A dot product with a stored key may overflow before it is multiplied by the key's scale.
    #[error(
        "query row {row}, head {head}: |scale| * sum |q_i|, times {largest}, the largest stored element of a key, is \
         {found:.4e}; at most {limit:.4e} is supported"
    )]
    StoredDotRange {
        /// Packed query row.
        row: usize,
        /// Query head.
        head: usize,
        /// The largest magnitude of a stored element.
        largest: f64,
        /// The product found, the scale counted as 1 at least.
        found: f64,
        /// The largest supported product.
        limit: f64,
    },
    /// A score may leave the range in which the kernels are exact.
    #[error(
        "query row {row}, head {head}: the score of key {key} of its sequence may reach {found:.4e} in magnitude, partial \
         sums included; at most {limit:.4e} is supported"
    )]
    ScoreRange {
        /// Packed query row.
        row: usize,
        /// Query head.
        head: usize,
        /// Key position in the row's sequence.
        key: usize,
        /// The magnitude found: `|scale| * sum |q_i k_i|` (over the soft cap, where it is that which is too large), or
        /// the capped score with the magnitudes of what ALiBi and bias add.
        found: f64,
        /// The largest supported magnitude: [`crate::SCORE_LOG2_MAX`] in natural units, less room for rounding.
        limit: f64,
    },
    /// A sink lies outside the range of scores.
    #[error("`sinks` holds {found:.4e} at [{head}]; at most {limit:.4e} in magnitude is supported")]
    SinkRange {
        /// Query head.
        head: usize,
        /// The sink.
        found: f64,
        /// The largest supported magnitude.
        limit: f64,
    },
    /// A dot product may overflow before the scale makes it smaller.
    #[error(
        "query row {row}, head {head}: sum |q_i k_i| for key {key} of its sequence reaches {found:.4e}; \
         at most {limit:.4e} is supported"
    )]
    DotRange {
        /// Packed query row.
        row: usize,
        /// Query head.
        head: usize,
        /// Key position in the row's sequence.
        key: usize,
        /// The sum found.
        found: f64,
        /// The largest supported sum: `f32::MAX`, less room for rounding.
        limit: f64,
    },
    /// A query may overflow where a kernel scales it before the dot product.
    #[error(
        "query row {row}, head {head}: |scale| * max |q_i|, over the soft cap if there is one, is {found:.4e}; at most \
         {limit:.4e} is supported"
    )]
    ScaledQueryRange {
        /// Packed query row.
        row: usize,
        /// Query head.
        head: usize,
        /// The magnitude found.
        found: f64,
        /// The largest supported magnitude.
        limit: f64,
    },
    /// The scale is finite, but not as the f32 that the kernels multiply by.
    #[error("scale, over the soft cap if there is one, is {found:.4e}; at most {limit:.4e} in magnitude is supported")]
    ScaleRange {
        /// The scale found, or the scale over the soft cap.
        found: f64,
        /// The largest supported magnitude: `f32::MAX / log2(e)`, less room for rounding.
        limit: f64,
    },
    /// The values of latent attention are not the first elements of the keys.
    #[error("`{v}` is not the first {v_head_dim} elements of each row of `{k}`, which latent attention's values are")]
    LatentValues {
        /// Name of the keys.
        k: &'static str,
        /// Name of the values.
        v: &'static str,
        /// Elements of a value row.
        v_head_dim: u32,
    },
}
