//! The recurrence of online softmax, in float64.

use std::num::NonZeroUsize;

use super::sum::Sum;

/// One row of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct OnlineRow {
    /// `[v_head_dim]`; zeros for a row without keys.
    pub out: Vec<f64>,
    /// Natural logarithm, the sink included; `-inf` for a row without keys and sink.
    pub lse: f64,
}

/// Attends over `scores` `[n]` and `values` `[n, v_head_dim]`, `block` keys at a time.
///
/// With the running maximum `m`, sum `l` and accumulator `acc`, a block of scores `s` and values `v` takes them to
///
/// ```text
/// m'   = max(m, max_j s_j)
/// l'   = e^(m - m') * l   + sum_j e^(s_j - m')
/// acc' = e^(m - m') * acc + sum_j e^(s_j - m') * v_j
/// ```
///
/// and the row is `acc / l` at the end (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). A sink
/// joins at the end, like a key without a value. Sums are compensated, so that what is left is the rounding of the
/// exponentials and of the products.
pub fn online_row(
    scores: &[f64],
    values: &[f32],
    v_head_dim: usize,
    block: NonZeroUsize,
    sink: Option<f64>,
) -> OnlineRow {
    let mut max = f64::NEG_INFINITY;
    let mut sum = Sum::default();
    let mut acc = vec![Sum::default(); v_head_dim];
    let dim = v_head_dim.max(1);
    // The sink is a block of its own.
    let keys = scores.chunks(block.get()).zip(values.chunks(block.get().saturating_mul(dim)));
    for (scores, values) in keys.chain(sink.as_ref().map(|sink| (std::slice::from_ref(sink), &[][..]))) {
        let block_max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if block_max > max {
            // Before the first key there is nothing to rescale, and -inf - -inf is never formed.
            if max > f64::NEG_INFINITY {
                sum.scale_exp(max - block_max);
                acc.iter_mut().for_each(|acc| acc.scale_exp(max - block_max));
            }
            max = block_max;
        }
        let mut values = values.chunks_exact(dim);
        for score in scores {
            let weight = (score - max).exp();
            sum.add(weight);
            for (acc, v) in acc.iter_mut().zip(values.next().unwrap_or_default()) {
                acc.add(weight * f64::from(*v));
            }
        }
    }
    if max == f64::NEG_INFINITY {
        return OnlineRow { out: vec![0.0; v_head_dim], lse: f64::NEG_INFINITY };
    }
    let sum = sum.value();
    OnlineRow { out: acc.iter().map(|acc| acc.value() / sum).collect(), lse: max + sum.ln() }
}
