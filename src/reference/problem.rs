//! A case laid out for the reference: which keys and values a row sees.

use std::ops::Range;

use crate::case::{Case, SequenceKv};

/// Keys and values in f32 that a part holds, unless one sequence takes more.
const PART_BYTES: u128 = 1 << 28;

/// The rows of some successive sequences of a case.
pub(crate) struct Problem<'a> {
    case: &'a Case,
    /// Of the whole case.
    q: &'a [f32],
    q_heads: usize,
    group: usize,
    head_dim: usize,
    v_head_dim: usize,
    seqs: Vec<Sequence>,
}

/// A sequence with query rows.
struct Sequence {
    /// Its number in the case.
    seq: usize,
    q_start: usize,
    q_len: usize,
    kv: SequenceKv,
    /// Largest `sum_i |k_i|` of a key, `[kv_heads]`; empty without keys.
    k_sum_max: Vec<f64>,
    /// Largest `|v|` of each dimension, `[kv_heads, v_head_dim]`; empty without keys.
    v_max: Vec<f64>,
}

/// One query row and head, with the keys and values that it sees.
#[derive(Clone, Debug)]
pub(crate) struct RowTask<'a> {
    pub seq: usize,
    /// `[head_dim]`.
    pub q: &'a [f32],
    /// Positions of the keys that the row sees, `[n]`, rising.
    pub keys: Vec<u32>,
    /// `[kv_len, head_dim]`, seen or not.
    pub k: &'a [f32],
    /// `[kv_len, v_head_dim]`, seen or not.
    pub v: &'a [f32],
    pub head_dim: usize,
    pub v_head_dim: usize,
    pub scale: f64,
    pub softcap: Option<f64>,
    /// The head's ALiBi slope.
    pub slope: Option<f64>,
    /// The row's position, which is negative where there are more query rows than keys.
    pub position: i64,
    /// What is added to the scores of `keys`, `[n]`.
    pub bias: Option<Vec<f32>>,
    /// The head's sink.
    pub sink: Option<f64>,
    /// Largest `sum_i |k_i|` of a key of the sequence.
    pub k_sum_max: f64,
    /// Largest `|v|` of the sequence in each dimension, `[v_head_dim]`; empty if the sequence has no keys.
    pub v_max: &'a [f64],
}

/// Row `index` of `[rows, dim]`; empty past the end.
fn row_of(rows: &[f32], index: u32, dim: usize) -> &[f32] {
    rows.get(index as usize * dim..).and_then(|rows| rows.get(..dim)).unwrap_or(&[])
}

impl RowTask<'_> {
    /// The keys that the row sees, `[n]` of `[head_dim]`.
    pub(crate) fn seen_k(&self) -> impl Iterator<Item = &[f32]> {
        self.keys.iter().map(|key| row_of(self.k, *key, self.head_dim))
    }

    /// The values that the row sees, `[n]` of `[v_head_dim]`.
    pub(crate) fn seen_v(&self) -> impl Iterator<Item = &[f32]> {
        self.keys.iter().map(|key| row_of(self.v, *key, self.v_head_dim))
    }

    /// What ALiBi adds to the score of a key.
    pub(crate) fn alibi(&self, key: u32) -> f64 {
        self.slope.map_or(0.0, |slope| slope * (i64::from(key) - self.position) as f64)
    }

    /// What the bias adds to the score of key `index` of those seen.
    pub(crate) fn bias(&self, index: usize) -> f64 {
        self.bias.as_ref().and_then(|bias| bias.get(index)).map_or(0.0, |bias| f64::from(*bias))
    }
}

impl<'a> Problem<'a> {
    /// Calls `work` with one part of `case` after the other: together they have every query row, in order. Sequences may
    /// share pages, so that keys and values of all of them can be far more than the case itself.
    pub(crate) fn for_parts(case: &Case, mut work: impl FnMut(&Problem<'_>)) {
        let q = case.q().to_f32();
        let lengths = case.lengths();
        let (mut seqs, mut bytes) = (0..0, 0);
        for (seq, (q_len, kv_len)) in lengths.iter().enumerate() {
            let own = if *q_len > 0 { case.gathered_bytes(*kv_len) } else { 0 };
            if bytes + own > PART_BYTES && !seqs.is_empty() {
                work(&Problem::new(case, &q, seqs.clone(), &lengths));
                (seqs, bytes) = (seq..seq, 0);
            }
            (seqs.end, bytes) = (seq + 1, bytes + own);
        }
        work(&Problem::new(case, &q, seqs, &lengths));
    }

    fn new(case: &'a Case, q: &'a [f32], seqs: Range<usize>, lengths: &[(u32, u32)]) -> Self {
        let geometry = case.geometry();
        let (head_dim, v_head_dim) = (geometry.head_dim() as usize, geometry.v_head_dim() as usize);
        let kv_heads = geometry.kv_heads() as usize;
        let starts = case.q_indptr().iter().map(|start| *start as usize);
        let all = starts.zip(lengths).enumerate().skip(seqs.start).take(seqs.len());
        let seqs = all.filter(|(_, (_, (q_len, _)))| *q_len > 0).filter_map(|(seq, (q_start, (q_len, kv_len)))| {
            let kv = case.sequence_kv(seq)?;
            let heads = if *kv_len > 0 { kv_heads } else { 0 };
            let k_sum_max = (0..heads)
                .map(|head| {
                    let sums = kv.k(head).chunks_exact(head_dim).map(|k| k.iter().map(|x| f64::from(x.abs())).sum());
                    sums.fold(0.0, f64::max)
                })
                .collect();
            let mut v_max = vec![0.0; heads * v_head_dim];
            for (head, max) in v_max.chunks_exact_mut(v_head_dim).enumerate() {
                for v in kv.v(head).chunks_exact(v_head_dim) {
                    for (max, v) in max.iter_mut().zip(v) {
                        *max = f64::max(*max, f64::from(v.abs()));
                    }
                }
            }
            Some(Sequence { seq, q_start, q_len: *q_len as usize, kv, k_sum_max, v_max })
        });
        Self {
            case,
            q,
            q_heads: geometry.q_heads() as usize,
            group: geometry.group() as usize,
            head_dim,
            v_head_dim,
            seqs: seqs.collect(),
        }
    }

    /// Packed query rows.
    pub(crate) fn rows(&self) -> Range<usize> {
        match (self.seqs.first(), self.seqs.last()) {
            (Some(first), Some(last)) => first.q_start..last.q_start + last.q_len,
            _ => 0..0,
        }
    }

    /// Keys of the longest sequence.
    pub(crate) fn keys_max(&self) -> usize {
        self.seqs.iter().map(|seq| seq.kv.kv_len()).max().unwrap_or(0)
    }

    pub(crate) fn q_heads(&self) -> usize {
        self.q_heads
    }

    /// `None` for a row that is not in this part, and past the last head.
    pub(crate) fn row(&self, row: usize, head: usize) -> Option<RowTask<'_>> {
        let seq = self.seqs.partition_point(|seq| seq.q_start + seq.q_len <= row);
        let sequence = self.seqs.get(seq)?;
        let (kv, kv_head) = (&sequence.kv, head / self.group);
        let i = row.checked_sub(sequence.q_start)?;
        let (mask, bias) =
            (self.case.mask_row(sequence.seq, i as u32), self.case.bias_row(sequence.seq, i as u32, head));
        let bias_of = |key: usize| bias.as_ref().map_or(Some(0.0), |bias| bias.get(key).copied());
        let keys: Vec<u32> = (0..kv.kv_len())
            .filter(|j| self.sees(sequence, i, *j))
            .filter(|j| mask.is_none_or(|mask| mask.get(*j).is_some_and(|sees| *sees)))
            .filter(|j| bias_of(*j) > Some(f32::NEG_INFINITY))
            .map(|j| j as u32)
            .collect();
        let bias = bias.as_ref().map(|_| keys.iter().filter_map(|key| bias_of(*key as usize)).collect());
        let q_start = (row * self.q_heads + head) * self.head_dim;
        let v_max_start = kv_head * self.v_head_dim;
        let (k_sum_max, v_max): (f64, &[f64]) = match kv.kv_len() {
            0 => (0.0, &[]),
            _ => (*sequence.k_sum_max.get(kv_head)?, sequence.v_max.get(v_max_start..v_max_start + self.v_head_dim)?),
        };
        let (options, extras) = (self.case.options(), self.case.extras());
        let of_head = |values: &Option<Vec<f32>>| values.as_ref()?.get(head).map(|x| f64::from(*x));
        Some(RowTask {
            seq: sequence.seq,
            q: self.q.get(q_start..q_start + self.head_dim)?,
            keys,
            k: kv.k(kv_head),
            v: kv.v(kv_head),
            head_dim: self.head_dim,
            v_head_dim: self.v_head_dim,
            scale: options.scale,
            softcap: options.softcap,
            slope: of_head(&extras.alibi_slopes),
            position: kv.kv_len() as i64 - sequence.q_len as i64 + i as i64,
            bias,
            sink: of_head(&extras.sinks),
            k_sum_max,
            v_max,
        })
    }

    /// Which keys causal mask and window leave: query row `i` of a sequence sits at position `pos = kv_len - q_len + i`,
    /// and sees keys `pos - window_left ..= pos + window_right`, a causal row none after `pos`. Written without
    /// differences, since that position may be negative.
    fn sees(&self, sequence: &Sequence, i: usize, j: usize) -> bool {
        let options = self.case.options();
        let (key, own) = ((j + sequence.q_len) as u64, (sequence.kv.kv_len() + i) as u64);
        (!options.causal || key <= own)
            && options.window_left.is_none_or(|left| own <= key + u64::from(left))
            && options.window_right.is_none_or(|right| key <= own + u64::from(right))
    }
}
