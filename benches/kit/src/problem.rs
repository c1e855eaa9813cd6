//! The shapes that are measured, their random tensors, and the result in f64 on the CPU.

use paged_attention::{Dtype, Tensor};
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};

use crate::error::BenchError;

/// The case table's shapes to be timed ([`paged_attention_cases::speed`]): P1 to P3 prefill, causal; D1 to D3 decode.
pub const NAMES: [&str; 6] = ["P1", "P2", "P3", "D1", "D2", "D3"];

/// The f32 kernels stay well below this on normally distributed tensors, whose outputs are of order 1.
pub const ERROR_MAX: f64 = 2e-5;

/// Above so many multiply-adds, rows are checked in samples.
const REFERENCE_FMA_MAX: f64 = 4e9;

/// One attention call on contiguous tensors.
#[derive(Clone, Debug)]
pub struct Problem {
    /// What it is called in reports.
    pub name: String,
    /// Query heads.
    pub q_heads: u32,
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Elements of a query or key row.
    pub head_dim: u32,
    /// Elements of a value row.
    pub v_head_dim: u32,
    /// Type of queries, keys and values; outputs are f32.
    pub dtype: Dtype,
    /// Factor of `q . k`.
    pub scale: f32,
    /// Bottom-right aligned causal mask.
    pub causal: bool,
    /// `(q_len, kv_len)` of each sequence.
    pub lengths: Vec<(u32, u32)>,
    /// `[total_q, q_heads, head_dim]`; values that `dtype` holds exactly, as are the others.
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
    ///
    /// # Errors
    /// [`BenchError::Shape`] for heads and dimensions that the kernels or the baseline do not take.
    pub fn new(
        name: &str,
        (q_heads, kv_heads): (u32, u32),
        (head_dim, v_head_dim): (u32, u32),
        causal: bool,
        lengths: &[(u32, u32)],
        dtype: Dtype,
    ) -> Result<Self, BenchError> {
        let refuse = |why: String| Err(BenchError::Shape { name: name.to_owned(), why });
        if kv_heads == 0 || q_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
            return refuse(format!("{q_heads} query heads over {kv_heads} KV heads; a multiple is needed"));
        }
        for dim in [head_dim, v_head_dim] {
            if dim == 0 || !dim.is_multiple_of(paged_attention::ROW_ALIGN) || dim > paged_attention::HEAD_DIM_MAX {
                return refuse(format!(
                    "head dimension {dim}; a multiple of {} up to {} is needed",
                    paged_attention::ROW_ALIGN,
                    paged_attention::HEAD_DIM_MAX
                ));
            }
        }
        let total = |length: fn(&(u32, u32)) -> u32| lengths.iter().map(|l| u64::from(length(l))).sum::<u64>();
        let (total_q, total_kv) = (total(|l| l.0), total(|l| l.1));
        let words = |rows: u64, heads: u32, dim: u32| rows * u64::from(heads) * u64::from(dim);
        let dim_max = head_dim.max(v_head_dim);
        if words(total_q, q_heads, dim_max).max(words(total_kv, kv_heads, dim_max)) > u64::from(u32::MAX) {
            return refuse("a tensor has more elements than 32 bits count".to_owned());
        }
        let mut rng = rand::rngs::StdRng::seed_from_u64(7);
        let mut normal = |words: u64| -> Result<Vec<f32>, BenchError> {
            let values: Vec<f32> = (0..words).map(|_| StandardNormal.sample(&mut rng)).collect();
            Ok(tensor(name, dtype, &values)?.to_f32())
        };
        Ok(Self {
            name: name.to_owned(),
            q_heads,
            kv_heads,
            head_dim,
            v_head_dim,
            dtype,
            scale: 1.0 / (head_dim as f32).sqrt(),
            causal,
            lengths: lengths.to_vec(),
            q: normal(words(total_q, q_heads, head_dim))?,
            k: normal(words(total_kv, kv_heads, head_dim))?,
            v: normal(words(total_kv, kv_heads, v_head_dim))?,
        })
    }

    /// One of [`NAMES`].
    ///
    /// # Errors
    /// [`BenchError::Shape`] for another name.
    pub fn named(name: &str, dtype: Dtype) -> Result<Self, BenchError> {
        let Some(spec) = paged_attention_cases::speed().into_iter().find(|spec| spec.name == name) else {
            let why = format!("the shapes are {}", NAMES.join(", "));
            return Err(BenchError::Shape { name: name.to_owned(), why });
        };
        let lengths: Vec<(u32, u32)> = spec.seqs.iter().map(|seq| (seq.q_len, seq.kv_len)).collect();
        let heads = spec.heads;
        Self::new(name, (heads.q_heads, heads.kv_heads), (heads.head_dim, heads.v_head_dim), true, &lengths, dtype)
    }

    /// Whether every sequence has one query row: the limit is then reading, not arithmetic.
    pub fn decodes(&self) -> bool {
        self.lengths.iter().all(|(q_len, _)| *q_len == 1)
    }

    /// Rows of all sequences: queries, keys.
    pub fn totals(&self) -> (u64, u64) {
        self.lengths.iter().fold((0, 0), |(q, kv), (q_len, kv_len)| (q + u64::from(*q_len), kv + u64::from(*kv_len)))
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
        f64::from(self.dtype.bytes()) * (self.k.len() + self.v.len()) as f64
    }

    /// The bytes of one of the tensors as the device takes them.
    ///
    /// # Errors
    /// [`BenchError::Shape`].
    pub fn bytes_of(&self, values: &[f32]) -> Result<Vec<u8>, BenchError> {
        Ok(tensor(&self.name, self.dtype, values)?.bytes().to_vec())
    }

    /// The output in f64: scores, softmax and weighted sum as the textbook has them. Of a large problem, of rows that
    /// are spread evenly. Uses all processors.
    pub fn reference(&self) -> Reference {
        let stride = (self.flop() / 2.0 / REFERENCE_FMA_MAX).ceil().max(1.0) as usize;
        let mut places = Vec::new();
        let (mut q_start, mut kv_start) = (0, 0);
        for length in self.lengths.iter().copied() {
            places.extend((0..length.0).map(|row| Place {
                q_row: q_start + row as usize,
                kv_start,
                keys: visible_keys(self.causal, length, row) as usize,
            }));
            q_start += length.0 as usize;
            kv_start += length.1 as usize;
        }
        let total_rows = places.len();
        let mut index = 0;
        places.retain(|_| {
            index += 1;
            index % stride == 0 || index == total_rows
        });
        // Every processor takes every n-th row: causal rows grow, so that each gets as much.
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        let done: Vec<Vec<(usize, Vec<f64>)>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..workers)
                .map(|worker| {
                    let own = places.iter().skip(worker).step_by(workers);
                    scope.spawn(move || own.map(|place| (place.q_row, self.row(place))).collect())
                })
                .collect();
            // A worker does not panic: it only computes.
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        let row_len = self.q_heads as usize * self.v_head_dim as usize;
        Reference { rows: done.into_iter().flatten().collect(), rows_expected: places.len(), total_rows, row_len }
    }

    /// The output row of one query row, `[q_heads, v_head_dim]`.
    fn row(&self, place: &Place) -> Vec<f64> {
        let (q_heads, kv_heads) = (self.q_heads as usize, self.kv_heads as usize);
        let (head_dim, v_head_dim) = (self.head_dim as usize, self.v_head_dim as usize);
        let mut out = Vec::with_capacity(q_heads * v_head_dim);
        for head in 0..q_heads {
            let kv_head = head / (q_heads / kv_heads);
            let row_of =
                |dim| RowsOf { first: (place.kv_start * kv_heads + kv_head) * dim, stride: kv_heads * dim, dim };
            let start = (place.q_row * q_heads + head) * head_dim;
            let query = self.q.get(start..start + head_dim).unwrap_or_default();
            let scores: Vec<f64> =
                row_of(head_dim).of(&self.k, place.keys).map(|key| f64::from(self.scale) * dot(query, key)).collect();
            let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut head_out = vec![0.0; v_head_dim];
            for (weight, value) in weights.iter().zip(row_of(v_head_dim).of(&self.v, place.keys)) {
                for (o, x) in head_out.iter_mut().zip(value) {
                    *o += weight / sum * f64::from(*x);
                }
            }
            out.extend(head_out);
        }
        out
    }
}

/// A query row and what it sees.
struct Place {
    q_row: usize,
    kv_start: usize,
    keys: usize,
}

/// Rows of one head in a packed tensor.
struct RowsOf {
    first: usize,
    stride: usize,
    dim: usize,
}

impl RowsOf {
    fn of<'a>(&self, tensor: &'a [f32], count: usize) -> impl Iterator<Item = &'a [f32]> + use<'a> {
        let dim = self.dim;
        let rows = tensor.get(self.first..).unwrap_or_default().chunks(self.stride);
        rows.take(count).filter_map(move |row| row.get(..dim))
    }
}

/// Four sums, so that one addition need not wait for the other.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0; 4];
    for (a, b) in a.chunks(4).zip(b.chunks(4)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    sums.iter().sum()
}

fn tensor(name: &str, dtype: Dtype, values: &[f32]) -> Result<Tensor, BenchError> {
    Tensor::from_f32(dtype, &[values.len()], values)
        .map_err(|error| BenchError::Shape { name: name.to_owned(), why: error.to_string() })
}

/// What the output has to be.
#[derive(Clone, Debug)]
pub struct Reference {
    /// Output rows by index.
    rows: Vec<(usize, Vec<f64>)>,
    rows_expected: usize,
    total_rows: usize,
    row_len: usize,
}

impl Reference {
    /// Rows that are compared, and rows that there are.
    pub fn coverage(&self) -> (usize, usize) {
        (self.rows.len(), self.total_rows)
    }

    /// The largest distance of an output from it. NaN anywhere, and an output of another size, is an infinite one.
    pub fn largest_error(&self, found: &[f32]) -> f64 {
        if self.rows.len() != self.rows_expected || found.len() < self.total_rows * self.row_len {
            return f64::INFINITY;
        }
        self.rows
            .iter()
            .flat_map(|(row, expected)| {
                let found = found.get(row * self.row_len..).unwrap_or_default();
                found.iter().zip(expected).map(|(x, y)| (f64::from(*x) - y).abs())
            })
            .fold(0.0, |worst, error| if error.is_nan() { f64::INFINITY } else { f64::max(worst, error) })
    }
}

/// Small ragged batches that reach every branch of all contenders.
///
/// # Errors
/// None, as long as the table here is right.
pub fn small_shapes() -> Result<Vec<Problem>, BenchError> {
    let lengths: [&[(u32, u32)]; 3] = [
        &[(70, 131), (1, 5), (0, 9), (3, 0), (129, 129), (5, 3)],
        &[(65, 17), (2, 200)],
        &[(1, 1), (1, 77), (1, 0), (1, 16)],
    ];
    let [causal, bidirectional, decode] = lengths;
    Ok(vec![
        Problem::new("ragged causal", (6, 2), (80, 72), true, causal, Dtype::F32)?,
        Problem::new("ragged bidirectional", (2, 2), (8, 8), false, bidirectional, Dtype::F32)?,
        Problem::new("ragged decode", (8, 2), (96, 128), true, decode, Dtype::F32)?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_the_named_shapes() {
        let p1 = Problem::named("P1", Dtype::F32).unwrap();
        // Every row sees itself: N (N + 1) / 2 pairs.
        assert_eq!(p1.flop(), 4.0 * 8.0 * 64.0 * (1024.0 * 1025.0 / 2.0));
        assert_eq!(p1.kv_bytes(), 4.0 * 2.0 * 8.0 * 64.0 * 1024.0);
        assert!(!p1.decodes());
        let d2 = Problem::named("D2", Dtype::F16).unwrap();
        assert_eq!(d2.kv_bytes(), 2.0 * 2.0 * 3.0 * 64.0 * 8.0 * 1024.0);
        assert_eq!(d2.flop(), 4.0 * 9.0 * 64.0 * 8.0 * 1024.0);
        assert!(d2.decodes());
        assert_eq!(d2.totals(), (8, 8192));
        assert!(Problem::named("P4", Dtype::F32).is_err());
    }

    #[test]
    fn unusable_shapes() {
        for (heads, dim) in [((3, 2), 64), ((0, 0), 64), ((4, 2), 0), ((4, 2), 60), ((4, 2), 1 << 20)] {
            assert!(Problem::new("x", heads, (dim, dim), true, &[(1, 1)], Dtype::F32).is_err(), "{heads:?} {dim}");
        }
    }

    /// One key: the output is its value. A wrong element is seen wherever it is.
    #[test]
    fn reference_and_its_comparison() {
        let problem = Problem::new("one", (2, 1), (8, 16), true, &[(1, 1), (2, 2)], Dtype::F16).unwrap();
        let reference = problem.reference();
        assert_eq!(reference.coverage(), (3, 3));
        let mut found = problem.v[..16].repeat(2);
        found.extend(problem.v[16..32].repeat(2));
        found.extend([0.0; 32]);
        assert!(reference.largest_error(&found) > 0.0, "the last row is not zero");
        let last = reference.rows.iter().find(|(row, _)| *row == 2).unwrap().1.clone();
        found.truncate(64);
        found.extend(last.iter().map(|x| *x as f32));
        assert!(reference.largest_error(&found) < 1e-6);
        found[40] = f32::NAN;
        assert_eq!(reference.largest_error(&found), f64::INFINITY);
        assert_eq!(reference.largest_error(&found[1..]), f64::INFINITY);
    }
}
