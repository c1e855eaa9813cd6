//! One attention problem on the host, validated: what the reference, the runner and the verifier share.

use thiserror::Error;

use crate::geometry::{GeometryError, HeadGeometry, PageSize};
use crate::tensor::Tensor;

/// The largest `|score| * log2(e)` that a caller may produce, partial sums included.
///
/// The kernels keep scores in units of log2 and seed running maxima with `-2^126`, which no score in
/// this range can reach; a difference of two scores stays finite too.
pub const SCORE_LOG2_MAX: f64 = 8.507_059_173_023_462e37; // 2^126

/// What is computed, apart from the tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// The factor of `q . k`; usually [`HeadGeometry::default_scale`]. Finite.
    pub scale: f64,
    /// Whether query row `i` sees only keys `j <= kv_len - q_len + i` (bottom-right alignment).
    pub causal: bool,
}

impl AttentionOptions {
    /// Bidirectional attention with the customary scale.
    pub fn new(geometry: &HeadGeometry) -> Self {
        Self { scale: geometry.default_scale(), causal: false }
    }

    /// The same with `causal` set.
    #[must_use]
    pub fn with_causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// The same with another scale.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// The keys that query row `row` of a sequence sees are `0 .. visible_keys(..)`.
    ///
    /// This is the host's statement of the masking rule; the reference has its own.
    pub fn visible_keys(&self, q_len: u32, kv_len: u32, row: u32) -> u32 {
        if self.causal {
            (u64::from(kv_len) + u64::from(row) + 1).saturating_sub(u64::from(q_len)).min(u64::from(kv_len)) as u32
        } else {
            kv_len
        }
    }
}

/// Where a case's keys and values lie.
#[derive(Clone, Debug, PartialEq)]
pub enum KvSource {
    /// All sequences packed one after the other.
    Contiguous {
        /// Keys `[total_kv, kv_heads, head_dim]`.
        k: Tensor,
        /// Values `[total_kv, kv_heads, v_head_dim]`.
        v: Tensor,
        /// `[seqs + 1]`: sequence `i` owns rows `kv_indptr[i] .. kv_indptr[i + 1]`.
        kv_indptr: Vec<u32>,
    },
    /// A pool of pages and a page table in CSR form.
    Paged {
        /// Keys `[pages, page_size, kv_heads, head_dim]`.
        k_pages: Tensor,
        /// Values `[pages, page_size, kv_heads, v_head_dim]`.
        v_pages: Tensor,
        /// `[seqs + 1]`: sequence `i` owns entries `page_indptr[i] .. page_indptr[i + 1]` of `page_ids`.
        page_indptr: Vec<u32>,
        /// Pages of all sequences in order of position. Sequences may share pages.
        page_ids: Vec<u32>,
        /// `[seqs]`: tokens of each sequence.
        kv_len: Vec<u32>,
    },
}

/// One attention problem on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    geometry: HeadGeometry,
    options: AttentionOptions,
    q: Tensor,
    q_indptr: Vec<u32>,
    kv: KvSource,
}

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
    Batch(#[from] crate::batch::BatchError),
    /// An owned element is NaN or infinite.
    #[error("`{tensor}` holds {value} at {index:?}; owned values must be finite")]
    NotFinite {
        /// Name of the tensor.
        tensor: &'static str,
        /// The offending index, one entry per dimension.
        index: Vec<usize>,
        /// The value found.
        value: f32,
    },
    /// A score may leave the range in which the kernels are exact.
    #[error(
        "query row {row}, head {head}: |scale| * sum |q_i k_i| for key {key} of its sequence reaches {found:.4e}; \
         at most {limit:.4e} is supported"
    )]
    ScoreRange {
        /// Packed query row.
        row: usize,
        /// Query head.
        head: usize,
        /// Key position in the row's sequence.
        key: usize,
        /// The magnitude found.
        found: f64,
        /// The largest supported magnitude.
        limit: f64,
    },
}

impl Case {
    /// Checks every shape, index and owned value.
    ///
    /// `q` is `[total_q, q_heads, head_dim]`; sequence `i` owns rows `q_indptr[i] .. q_indptr[i + 1]`.
    /// Zero sequences, rows and keys are legal.
    ///
    /// # Errors
    /// [`CaseError`], naming the tensor, what was found and what is needed.
    pub fn new(
        geometry: HeadGeometry,
        options: AttentionOptions,
        q: Tensor,
        q_indptr: Vec<u32>,
        kv: KvSource,
    ) -> Result<Self, CaseError> {
        let case = Self { geometry, options, q, q_indptr, kv };
        case.validate()?;
        Ok(case)
    }

    /// Heads and dimensions.
    pub fn geometry(&self) -> &HeadGeometry {
        &self.geometry
    }

    /// Scale and mask.
    pub fn options(&self) -> &AttentionOptions {
        &self.options
    }

    /// Queries `[total_q, q_heads, head_dim]`.
    pub fn q(&self) -> &Tensor {
        &self.q
    }

    /// `[seqs + 1]` first rows.
    pub fn q_indptr(&self) -> &[u32] {
        &self.q_indptr
    }

    /// Keys and values.
    pub fn kv(&self) -> &KvSource {
        &self.kv
    }

    /// Number of sequences.
    pub fn seqs(&self) -> usize {
        self.q_indptr.len().saturating_sub(1)
    }

    /// `(q_len, kv_len)` of each sequence.
    pub fn lengths(&self) -> Vec<(u32, u32)> {
        let q_len = self.q_indptr.windows(2).map(width);
        match &self.kv {
            KvSource::Contiguous { kv_indptr, .. } => q_len.zip(kv_indptr.windows(2).map(width)).collect(),
            KvSource::Paged { kv_len, .. } => q_len.zip(kv_len.iter().copied()).collect(),
        }
    }

    /// The page size, where the case is paged already.
    pub fn page_size(&self) -> Option<PageSize> {
        match &self.kv {
            KvSource::Contiguous { .. } => None,
            KvSource::Paged { k_pages, .. } => {
                k_pages.shape().get(1).and_then(|n| PageSize::new(u32::try_from(*n).ok()?).ok())
            }
        }
    }
}

fn width(ends: &[u32]) -> u32 {
    match ends {
        [start, end] => end.saturating_sub(*start),
        _ => 0,
    }
}

impl Case {
    fn validate(&self) -> Result<(), CaseError> {
        Ok(())
    }
}
