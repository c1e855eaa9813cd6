//! One attention problem on the host, validated: what the reference, the runner and the verifier share.

mod error;
mod extras;
mod validate;

use std::ops::Range;

pub use self::error::CaseError;
pub use self::extras::CaseExtras;
use crate::batch::NO_PAGE;
use crate::geometry::{Dtype, HeadGeometry, PageSize};
use crate::tensor::Tensor;

/// The largest `|score| * log2(e)` that a caller may produce, partial sums included.
///
/// The kernels keep scores in units of log2 and seed running maxima with `-2^126`, which no score in
/// this range can reach; a difference of two scores stays finite too.
pub const SCORE_LOG2_MAX: f64 = 8.507_059_173_023_462e37; // 2^126

/// The most scores that a case may have: query rows times keys times query heads, summed over the sequences.
///
/// A case is made to be checked in float64, score by score. This many take days on any machine, while a file of a few
/// kilobytes can ask for more: sequences may share pages.
pub const CASE_SCORES_MAX: u64 = 1 << 40;

/// The most bytes that the keys and values of all sequences with query rows may take, each sequence's own copy in f32.
pub const CASE_BYTES_MAX: u64 = 1 << 36;

/// The most bytes that a single sequence with query rows may take while it is checked: its keys and values in f32, and
/// 144 bytes per key for the reference.
pub const SEQUENCE_BYTES_MAX: u64 = 1 << 34;

/// Bytes per key that the reference and its bound keep beside a row, at most.
pub(crate) const SCRATCH_BYTES_PER_KEY: u64 = 144;

/// The smallest soft cap.
pub const SOFTCAP_MIN: f64 = 1.0 / SOFTCAP_MAX;

/// The largest soft cap: 2^60. Beyond, factors leave the range of f32.
pub const SOFTCAP_MAX: f64 = 1_152_921_504_606_846_976.0;

/// What is computed, apart from the tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// The factor of `q . k`; usually [`HeadGeometry::default_scale`]. Finite.
    pub scale: f64,
    /// Whether query row `i` sees only keys `j <= pos`, where `pos = kv_len - q_len + i` is its own position
    /// (bottom-right alignment).
    pub causal: bool,
    /// Query row `i` sees only keys `j >= pos - window_left`; `None` is no limit.
    pub window_left: Option<u32>,
    /// Query row `i` sees only keys `j <= pos + window_right`; `None` is no limit.
    pub window_right: Option<u32>,
    /// A scaled score `s` becomes `softcap * tanh(s / softcap)`; `None` leaves it. Between [`SOFTCAP_MIN`] and
    /// [`SOFTCAP_MAX`].
    pub softcap: Option<f64>,
}

impl AttentionOptions {
    /// Bidirectional attention with the customary scale.
    pub fn new(geometry: &HeadGeometry) -> Self {
        Self { scale: geometry.default_scale(), causal: false, window_left: None, window_right: None, softcap: None }
    }

    /// The same with a causal mask, or without.
    #[must_use]
    pub fn with_causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// The same with another scale.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// The same with a sliding window of `left` keys before a row's own position and `right` after it.
    #[must_use]
    pub fn with_window(self, left: Option<u32>, right: Option<u32>) -> Self {
        Self { window_left: left, window_right: right, ..self }
    }

    /// The same with the scores capped softly, or not.
    #[must_use]
    pub fn with_softcap(self, softcap: Option<f64>) -> Self {
        Self { softcap, ..self }
    }

    /// The softcap, where it is outside of its range.
    pub(crate) fn softcap_outside(&self) -> Option<f64> {
        self.softcap.filter(|cap| !(SOFTCAP_MIN..=SOFTCAP_MAX).contains(cap))
    }

    /// The keys that query row `row` of a sequence sees, as far as causal mask and window go: `start <= end <= kv_len`.
    ///
    /// This is the host's statement of the masking rule; the reference has its own.
    pub fn visible(&self, q_len: u32, kv_len: u32, row: u32) -> Range<u32> {
        let position = i64::from(kv_len) - i64::from(q_len) + i64::from(row);
        let clamped = |key: i64| key.clamp(0, i64::from(kv_len)) as u32;
        // `None` is a reach past both ends.
        let start = self.window_left.map_or(0, |left| clamped(position - i64::from(left)));
        let right = self.window_right.map_or(i64::MAX, i64::from);
        let reach = if self.causal { 0 } else { right };
        let end = clamped(position.saturating_add(reach).saturating_add(1));
        start.min(end)..end
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
        /// Pages of all sequences in order of position. Sequences may share pages. [`crate::NO_PAGE`] is legal where
        /// causal mask and window leave no row a key of the page.
        page_ids: Vec<u32>,
        /// `[seqs]`: tokens of each sequence.
        kv_len: Vec<u32>,
    },
}

impl KvSource {
    /// The type of the elements, keys and values alike.
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::Contiguous { k, .. } | Self::Paged { k_pages: k, .. } => k.dtype(),
        }
    }
}

/// One attention problem on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    geometry: HeadGeometry,
    options: AttentionOptions,
    q: Tensor,
    q_indptr: Vec<u32>,
    kv: KvSource,
    extras: CaseExtras,
    /// `[seqs + 1]`; see [`Case::score_indptr`].
    score_indptr: Vec<u64>,
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
        let (extras, score_indptr) = (CaseExtras::default(), Vec::new());
        let mut case = Self { geometry, options, q, q_indptr, kv, extras, score_indptr };
        case.validate()?;
        case.score_indptr = score_indptr_of(&case.lengths());
        Ok(case)
    }

    /// The same with other keys and values.
    ///
    /// # Errors
    /// As [`Case::new`] and [`Case::with_extras`].
    pub fn with_kv(self, kv: KvSource) -> Result<Self, CaseError> {
        let Self { geometry, options, q, q_indptr, extras, .. } = self;
        Self::new(geometry, options, q, q_indptr, kv)?.with_extras(extras)
    }

    /// Heads and dimensions.
    pub fn geometry(&self) -> &HeadGeometry {
        &self.geometry
    }

    /// Scale, mask, window and soft cap.
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

/// Running sums of `q_len * kv_len`, from 0. [`CASE_SCORES_MAX`] bounds them.
fn score_indptr_of(lengths: &[(u32, u32)]) -> Vec<u64> {
    let mut end = 0;
    let ends = lengths.iter().map(|(q_len, kv_len)| {
        end += u64::from(*q_len) * u64::from(*kv_len);
        end
    });
    std::iter::once(0).chain(ends).collect()
}

fn width(ends: &[u32]) -> u32 {
    match ends {
        [start, end] => end.saturating_sub(*start),
        _ => 0,
    }
}

/// One sequence's keys and values, gathered from wherever they lie.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceKv {
    kv_len: usize,
    head_dim: usize,
    v_head_dim: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl SequenceKv {
    /// Tokens of the sequence.
    pub fn kv_len(&self) -> usize {
        self.kv_len
    }

    /// Keys `[kv_len, head_dim]` of one KV head; empty for a head that does not exist.
    pub fn k(&self, kv_head: usize) -> &[f32] {
        head_rows(&self.k, kv_head, self.kv_len * self.head_dim)
    }

    /// Values `[kv_len, v_head_dim]` of one KV head; empty for a head that does not exist.
    pub fn v(&self, kv_head: usize) -> &[f32] {
        head_rows(&self.v, kv_head, self.kv_len * self.v_head_dim)
    }
}

fn head_rows(rows: &[f32], head: usize, len: usize) -> &[f32] {
    head.checked_mul(len).and_then(|start| rows.get(start..start + len)).unwrap_or(&[])
}

impl Case {
    /// Keys and values of sequence `seq` as f32, one KV head after the other; only slots that the sequence owns, and zeros
    /// where a page is [`crate::NO_PAGE`]. `None` if there is no such sequence.
    pub fn sequence_kv(&self, seq: usize) -> Option<SequenceKv> {
        let (kv_len, runs) = self.owned_runs(seq)?;
        let (k, v) = match &self.kv {
            KvSource::Contiguous { k, v, .. } => (k, v),
            KvSource::Paged { k_pages, v_pages, .. } => (k_pages, v_pages),
        };
        let kv_heads = self.geometry.kv_heads() as usize;
        let gather = |tensor: &Tensor, dim: usize| {
            let mut out = Vec::with_capacity(kv_len * kv_heads * dim);
            if kv_len > 0 {
                for head in 0..kv_heads {
                    for run in runs.clone() {
                        let Some(rows) = run.rows() else {
                            out.resize(out.len() + run.len * dim, 0.0);
                            continue;
                        };
                        for row in rows {
                            tensor.extend_f32((row * kv_heads + head) * dim, dim, &mut out)?;
                        }
                    }
                }
            }
            Some(out)
        };
        let (head_dim, v_head_dim) = (self.geometry.head_dim() as usize, self.geometry.v_head_dim() as usize);
        Some(SequenceKv { kv_len, head_dim, v_head_dim, k: gather(k, head_dim)?, v: gather(v, v_head_dim)? })
    }

    /// How many tokens sequence `seq` has and where they lie.
    fn owned_runs(&self, seq: usize) -> Option<(usize, impl Iterator<Item = OwnedRun> + Clone)> {
        let (packed, pages, page_size, kv_len) = match &self.kv {
            KvSource::Contiguous { kv_indptr, .. } => {
                let (start, end) = (*kv_indptr.get(seq)? as usize, *kv_indptr.get(seq + 1)? as usize);
                (Some(OwnedRun { first: Some(start), len: end - start }), &[][..], 1, end - start)
            }
            KvSource::Paged { page_indptr, page_ids, kv_len, .. } => {
                let (start, end) = (*page_indptr.get(seq)? as usize, *page_indptr.get(seq + 1)? as usize);
                let pages = page_ids.get(start..end)?;
                (None, pages, self.page_size()?.get() as usize, *kv_len.get(seq)? as usize)
            }
        };
        let paged = pages.iter().zip((0..kv_len).step_by(page_size)).map(move |(page, before)| OwnedRun {
            first: (*page != NO_PAGE).then_some(*page as usize * page_size),
            len: page_size.min(kv_len - before),
        });
        Some((kv_len, packed.into_iter().chain(paged)))
    }
}

/// Successive tokens of a sequence: rows of the contiguous tensors, or of `page * page_size + slot`.
#[derive(Clone, Copy)]
struct OwnedRun {
    /// `None` where the page is not there.
    first: Option<usize>,
    len: usize,
}

impl OwnedRun {
    fn rows(self) -> Option<Range<usize>> {
        self.first.map(|first| first..first + self.len)
    }
}
