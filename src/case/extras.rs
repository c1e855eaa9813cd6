//! Tensors that change scores: ALiBi slopes, sinks, masks, additive bias.

use std::ops::Range;

use super::{Case, CaseError};
use crate::tensor::Tensor;

/// Optional tensors of a case. A score is `scale * q . k`, softly capped if the options say so, then plus
/// `slope * (j - pos)`, then plus the bias.
///
/// The mask and the bias have an entry per query row and key, sequence after sequence, row-major within each: sequence
/// `i` owns the entries from [`Case::score_indptr`]`[i]` on.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CaseExtras {
    /// ALiBi, `[q_heads]`: adds `slope * (j - pos)` to the score of key `j` for a row at position `pos`.
    pub alibi_slopes: Option<Vec<f32>>,
    /// Attention sinks, `[q_heads]`: a logit that joins the softmax's denominator, and with it the log-sum-exp, but has no
    /// value.
    pub sinks: Option<Vec<f32>>,
    /// `[sum of q_len * kv_len]`: whether the row may see the key; joined with causal mask and window by AND.
    pub mask: Option<Vec<bool>>,
    /// `[1 or q_heads, sum of q_len * kv_len]`, f32 or f16: added to the score; `-inf` hides the key.
    pub bias: Option<Tensor>,
}

impl CaseExtras {
    /// Whether there is none of them.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Case {
    /// The same with other extras in place of those there are; checked as far as they go with the rest.
    ///
    /// # Errors
    /// [`CaseError`], naming the tensor, what was found and what is needed.
    pub fn with_extras(self, extras: CaseExtras) -> Result<Self, CaseError> {
        let case = Self { extras, ..self };
        case.validate_extras()?;
        Ok(case)
    }

    /// Slopes, sinks, mask and bias.
    pub fn extras(&self) -> &CaseExtras {
        &self.extras
    }

    /// `[seqs + 1]`: where each sequence's entries of mask and bias start, and the number of all: sums of
    /// `q_len * kv_len`.
    pub fn score_indptr(&self) -> &[u64] {
        &self.score_indptr
    }

    /// The mask of a sequence's query row, `[kv_len]`; `None` without a mask, and for a row that does not exist.
    pub fn mask_row(&self, seq: usize, row: u32) -> Option<&[bool]> {
        self.extras.mask.as_ref()?.get(self.score_row(seq, row)?)
    }

    /// The bias of a sequence's query row and a head, `[kv_len]`, as f32; `None` without a bias, and for a row or a head
    /// that does not exist.
    pub fn bias_row(&self, seq: usize, row: u32, head: usize) -> Option<Vec<f32>> {
        let (bias, row) = (self.extras.bias.as_ref()?, self.score_row(seq, row)?);
        if head >= self.geometry.q_heads() as usize {
            return None;
        }
        let [heads, entries] = *bias.shape() else { return None };
        // A bias of one head is shared by all.
        let start = if heads > 1 { head.checked_mul(entries)? } else { 0 };
        let mut values = Vec::with_capacity(row.len());
        bias.extend_f32(start.checked_add(row.start)?, row.len(), &mut values)?;
        Some(values)
    }

    /// The entries of mask and bias that belong to a query row.
    fn score_row(&self, seq: usize, row: u32) -> Option<Range<usize>> {
        let (start, end) = (*self.score_indptr.get(seq)?, *self.score_indptr.get(seq.checked_add(1)?)?);
        let q_len = self.q_indptr.get(seq + 1)?.checked_sub(*self.q_indptr.get(seq)?)?;
        if row >= q_len {
            return None;
        }
        let kv_len = (end - start) / u64::from(q_len);
        let first = start + u64::from(row) * kv_len;
        Some(usize::try_from(first).ok()?..usize::try_from(first + kv_len).ok()?)
    }
}
