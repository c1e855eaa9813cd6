//! The shapes that are measured, their random tensors, and the result in f64 on the CPU.

use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};

/// One attention call on contiguous f32 tensors.
pub struct Problem {
    pub name: &'static str,
    pub q_heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub v_head_dim: u32,
    pub scale: f32,
    pub causal: bool,
    /// `(q_len, kv_len)` of each sequence.
    pub lengths: Vec<(u32, u32)>,
    /// `[total_q, q_heads, head_dim]`
    pub q: Vec<f32>,
    /// `[total_kv, kv_heads, head_dim]`
    pub k: Vec<f32>,
    /// `[total_kv, kv_heads, v_head_dim]`
    pub v: Vec<f32>,
}

/// The keys `0 .. visible_keys` are seen by query row `row`.
pub fn visible_keys(causal: bool, (q_len, kv_len): (u32, u32), row: u32) -> u32 {
    if causal { (kv_len + row + 1).saturating_sub(q_len).min(kv_len) } else { kv_len }
}

impl Problem {
    /// Normally distributed tensors for sequences of `lengths`.
    pub fn new(
        name: &'static str,
        (q_heads, kv_heads): (u32, u32),
        (head_dim, v_head_dim): (u32, u32),
        causal: bool,
        lengths: &[(u32, u32)],
    ) -> Self {
        let mut rng = rand::rngs::StdRng::seed_from_u64(7);
        let mut normal = |rows: u32, heads: u32, dim: u32| -> Vec<f32> {
            (0..rows * heads * dim).map(|_| StandardNormal.sample(&mut rng)).collect()
        };
        let total_q = lengths.iter().map(|(q_len, _)| q_len).sum();
        let total_kv = lengths.iter().map(|(_, kv_len)| kv_len).sum();
        Self {
            name,
            q_heads,
            kv_heads,
            head_dim,
            v_head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            causal,
            lengths: lengths.to_vec(),
            q: normal(total_q, q_heads, head_dim),
            k: normal(total_kv, kv_heads, head_dim),
            v: normal(total_kv, kv_heads, v_head_dim),
        }
    }

    /// Floating-point operations that attention needs: two per multiply-add of every visible pair, softmax not counted.
    pub fn flop(&self) -> f64 {
        let pairs: u64 = self
            .lengths
            .iter()
            .flat_map(|length| (0..length.0).map(|row| u64::from(visible_keys(self.causal, *length, row))))
            .sum();
        2.0 * pairs as f64 * f64::from(self.q_heads) * f64::from(self.head_dim + self.v_head_dim)
    }

    /// Bytes of K and V, each counted once.
    pub fn kv_bytes(&self) -> f64 {
        4.0 * (self.k.len() + self.v.len()) as f64
    }

    /// The output in f64, `[total_q, q_heads, v_head_dim]`: scores, softmax and weighted sum as the textbook has them.
    pub fn reference(&self) -> Vec<f64> {
        let (q_heads, kv_heads) = (self.q_heads as usize, self.kv_heads as usize);
        let (head_dim, v_head_dim) = (self.head_dim as usize, self.v_head_dim as usize);
        let row_of = |tensor: &'_ [f32], row: usize, heads: usize, head: usize, dim: usize| -> Vec<f64> {
            let start = (row * heads + head) * dim;
            tensor[start..start + dim].iter().map(|x| f64::from(*x)).collect()
        };
        let mut out = Vec::new();
        let (mut q_start, mut kv_start) = (0, 0);
        for length in self.lengths.iter().copied() {
            let (q_len, kv_len) = (length.0 as usize, length.1 as usize);
            let mut seq_out = vec![0.0; q_len * q_heads * v_head_dim];
            for head in 0..q_heads {
                let kv_head = head / (q_heads / kv_heads);
                let rows = |tensor, dim| -> Vec<Vec<f64>> {
                    (0..kv_len).map(|key| row_of(tensor, kv_start + key, kv_heads, kv_head, dim)).collect()
                };
                let (keys, values) = (rows(&self.k, head_dim), rows(&self.v, v_head_dim));
                for row in 0..q_len {
                    let query = row_of(&self.q, q_start + row, q_heads, head, head_dim);
                    let visible = visible_keys(self.causal, length, row as u32) as usize;
                    let scores: Vec<f64> = keys[..visible]
                        .iter()
                        .map(|key| f64::from(self.scale) * query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>())
                        .collect();
                    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    let start = (row * q_heads + head) * v_head_dim;
                    for (weight, value) in weights.iter().zip(&values) {
                        for (o, x) in seq_out[start..start + v_head_dim].iter_mut().zip(value) {
                            *o += weight / sum * x;
                        }
                    }
                }
            }
            out.extend(seq_out);
            q_start += q_len;
            kv_start += kv_len;
        }
        out
    }
}

/// The largest distance from the f64 result. NaN anywhere is an infinite distance.
pub fn largest_error(found: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(found.len(), reference.len(), "elements of the output");
    found
        .iter()
        .zip(reference)
        .map(|(x, y)| (f64::from(*x) - y).abs())
        .fold(0.0, |worst, error| if error.is_nan() { f64::INFINITY } else { f64::max(worst, error) })
}
