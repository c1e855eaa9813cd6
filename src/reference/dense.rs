//! Attention by its definition: all scores of a row, then the softmax, then the mean of the values.

use super::problem::RowTask;
use super::sum::Sum;

/// Values summed plainly before the sum moves into a compensated one: at most this many roundings per sum.
const PLAIN_KEYS: usize = 8;

/// One row of dense attention, with what the error bound needs of it. Reused from row to row.
#[derive(Debug, Default)]
pub(crate) struct DenseRow {
    /// `scale * q . k_j`, `[n]`.
    pub scaled: Vec<f64>,
    /// `A_j = |scale| * sum_i |q_i k_ji|`, `[n]`.
    pub magnitude: Vec<f64>,
    /// `s_j`: softly capped, with ALiBi and bias, `[n]`; then the sink, where there is one: a last key without a value.
    pub score: Vec<f64>,
    /// `e^(s_j - max)`, as many as there are scores.
    pub weight: Vec<f64>,
    /// Sum of the weights: 1 or more, and 0 for a row without keys and sink.
    pub weight_sum: f64,
    /// `ln(sum_j e^(s_j))`; `-inf` for a row without keys and sink.
    pub lse: f64,
    /// `[v_head_dim]`; zeros for a row without keys.
    pub out: Vec<f64>,
    sums: Vec<Sum>,
    part: Vec<f64>,
}

impl DenseRow {
    /// Fills everything.
    pub(crate) fn attend(&mut self, task: &RowTask<'_>) {
        self.make_scores(task);
        self.make_weights();
        self.make_out(task);
    }

    /// Fills `scaled`, `magnitude` and `score`.
    pub(crate) fn make_scores(&mut self, task: &RowTask<'_>) {
        self.scaled.clear();
        self.magnitude.clear();
        self.score.clear();
        for (index, (key, k)) in task.keys.iter().zip(task.seen_k()).enumerate() {
            let (dot, absolute) = dot(task.q, k);
            let scaled = task.scale * dot;
            let capped = task.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
            self.scaled.push(scaled);
            self.magnitude.push(task.scale.abs() * absolute);
            self.score.push(capped + task.alibi(*key) + task.bias(index));
        }
        self.score.extend(task.sink);
    }

    /// The shifted softmax, whose rounding errors do not depend on the level of the scores (Blanchard, Higham and
    /// Higham, "Accurately computing the log-sum-exp and softmax functions", IMA J. Numer. Anal. 41, 2021).
    fn make_weights(&mut self) {
        let max = self.score.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut sum = Sum::default();
        self.weight.clear();
        for score in &self.score {
            let weight = (score - max).exp();
            sum.add(weight);
            self.weight.push(weight);
        }
        self.weight_sum = sum.value();
        self.lse = if self.score.is_empty() { f64::NEG_INFINITY } else { max + self.weight_sum.ln() };
    }

    fn make_out(&mut self, task: &RowTask<'_>) {
        self.sums.clear();
        self.sums.resize(task.v_head_dim, Sum::default());
        self.part.clear();
        self.part.resize(task.v_head_dim, 0.0);
        for (index, (weight, v)) in self.weight.iter().zip(task.seen_v()).enumerate() {
            for (part, v) in self.part.iter_mut().zip(v) {
                *part += weight * f64::from(*v);
            }
            if (index + 1) % PLAIN_KEYS == 0 || index + 1 == task.keys.len() {
                for (sum, part) in self.sums.iter_mut().zip(&mut self.part) {
                    sum.add(std::mem::take(part));
                }
            }
        }
        self.out.clear();
        let seen = !self.weight.is_empty();
        self.out.extend(self.sums.iter().map(|sum| if seen { sum.value() / self.weight_sum } else { 0.0 }));
    }
}

/// `(sum_i q_i k_i, sum_i |q_i k_i|)`, in eight lanes: the products are exact, and a chain has an eighth of the sums.
fn dot(q: &[f32], k: &[f32]) -> (f64, f64) {
    const LANES: usize = 8;
    let (mut sums, mut absolutes) = ([0.0; LANES], [0.0; LANES]);
    let (q_chunks, k_chunks) = (q.chunks_exact(LANES), k.chunks_exact(LANES));
    let tail = q_chunks.remainder().iter().zip(k_chunks.remainder());
    for (q, k) in q_chunks.zip(k_chunks) {
        for (((sum, absolute), q), k) in sums.iter_mut().zip(&mut absolutes).zip(q).zip(k) {
            let product = f64::from(*q) * f64::from(*k);
            *sum += product;
            *absolute += product.abs();
        }
    }
    for (((sum, absolute), q), k) in
        sums.iter_mut().zip(&mut absolutes).zip(tail.clone().map(|t| t.0)).zip(tail.map(|t| t.1))
    {
        let product = f64::from(*q) * f64::from(*k);
        *sum += product;
        *absolute += product.abs();
    }
    let pairs = |[a, b, c, d, e, f, g, h]: [f64; LANES]| ((a + b) + (c + d)) + ((e + f) + (g + h));
    (pairs(sums), pairs(absolutes))
}
