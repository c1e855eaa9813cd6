//! Random queries, keys and values, sequence by sequence.

use paged_attention::Dtype;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;

use crate::modifiers::{self, Modifiers};
use crate::spec::{CaseSpec, Heads, Seq, SpecError, Values};

/// One sequence's tensors, not yet rounded to their storage types and not yet laid out.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// Query rows.
    pub q_len: u32,
    /// Keys.
    pub kv_len: u32,
    /// Sequences with the same number and length may share pages.
    pub kv_stream: u32,
    /// `[q_len, q_heads, head_dim]`.
    pub q: Vec<f32>,
    /// `[kv_len, kv_heads, head_dim]`.
    pub k: Vec<f32>,
    /// `[kv_len, kv_heads, v_head_dim]`.
    pub v: Vec<f32>,
    /// `[q_len, kv_len]`, where the case has a mask.
    pub mask: Option<Vec<bool>>,
    /// `[1 or q_heads, q_len, kv_len]`, where the case has a bias.
    pub bias: Option<Vec<f32>>,
}

impl Sequence {
    /// Query rows `start .. end` over the first `kv_len` keys: a chunk of a longer prompt.
    ///
    /// What lies outside the sequence is left out.
    #[must_use]
    pub fn chunk(&self, heads: &Heads, start: u32, end: u32, kv_len: u32) -> Self {
        let part = |data: &[f32], row: u32, start: u32, end: u32| -> Vec<f32> {
            let (row, start, end) = (row as usize, start as usize, end as usize);
            data.iter().copied().take(end * row).skip(start * row).collect()
        };
        let (end, kv_len) = (end.min(self.q_len), kv_len.min(self.kv_len));
        let start = start.min(end);
        let scores = ScoreChunk { of: (self.q_len, self.kv_len), rows: start..end, kv_len };
        Self {
            q_len: end - start,
            kv_len,
            kv_stream: self.kv_stream,
            q: part(&self.q, heads.q_heads * heads.head_dim, start, end),
            k: part(&self.k, heads.kv_heads * heads.head_dim, 0, kv_len),
            v: part(&self.v, heads.kv_heads * heads.v_head_dim, 0, kv_len),
            mask: self.mask.as_ref().map(|mask| scores.take(mask)),
            bias: self.bias.as_ref().map(|bias| scores.take(bias)),
        }
    }
}

/// Some rows and the first keys of a mask or a bias.
struct ScoreChunk {
    of: (u32, u32),
    rows: std::ops::Range<u32>,
    kv_len: u32,
}

impl ScoreChunk {
    /// Of `[heads, q_len, kv_len]`.
    fn take<T: Copy>(&self, entries: &[T]) -> Vec<T> {
        let (q_len, kv_len) = (self.of.0 as usize, self.of.1 as usize);
        if kv_len == 0 {
            return Vec::new();
        }
        let rows = entries.chunks(kv_len).enumerate().filter(|(row, _)| self.rows.contains(&((row % q_len) as u32)));
        rows.flat_map(|(_, row)| row.iter().copied().take(self.kv_len as usize)).collect()
    }
}

/// The key that [`Values::Peaky`] and [`Values::OneAbove`] single out among `kv_len`.
pub const fn loud_key(kv_len: u32) -> u32 {
    (kv_len as u64 * 2 / 3) as u32
}

/// Which tensor a stream feeds: streams of different tensors must not coincide.
#[derive(Clone, Copy)]
pub(crate) enum Tag {
    Q = 1,
    K = 2,
    V = 3,
    Direction = 4,
    PrefixK = 5,
    PrefixV = 6,
    Mask = 7,
    Bias = 8,
    Sinks = 9,
}

/// A generator for one tensor of one sequence.
pub(crate) fn stream(seed: u64, tag: u64, number: u32) -> StdRng {
    let mut key = [0_u8; 32];
    for (to, from) in key.chunks_exact_mut(8).zip([seed, tag, u64::from(number), 0]) {
        to.copy_from_slice(&from.to_le_bytes());
    }
    StdRng::from_seed(key)
}

/// The sequences of a case, in order.
///
/// # Errors
/// [`SpecError::Geometry`].
pub fn generate(spec: &CaseSpec) -> Result<Vec<Sequence>, SpecError> {
    // Refuses heads of which the sizes below would make no sense.
    spec.heads.geometry()?;
    let scale = spec.options()?.scale;
    Ok(spec.seqs.iter().map(|seq| sequence(spec, scale, seq)).collect())
}

fn sequence(spec: &CaseSpec, scale: f64, seq: &Seq) -> Sequence {
    let Heads { q_heads, kv_heads, head_dim, v_head_dim } = spec.heads;
    let sized = |a: u32, b: u32, c: u32| a as usize * b as usize * c as usize;
    let normal = |tag: Tag, number: u32, len: usize| -> Vec<f32> {
        let mut rng = stream(spec.seed, tag as u64, number);
        (0..len).map(|_| rng.sample(StandardNormal)).collect()
    };
    // The first tokens are those of every sequence, if the case has a shared prefix.
    let prefix = seq.kv_len.min(spec.shared_prefix);
    let with_prefix = |mut own: Vec<f32>, tag: Tag, dim: u32| {
        own.iter_mut().zip(normal(tag, 0, sized(prefix, kv_heads, dim))).for_each(|(own, shared)| *own = shared);
        own
    };
    let v = normal(Tag::V, seq.kv_stream, sized(seq.kv_len, kv_heads, v_head_dim));
    let v = with_prefix(v, Tag::PrefixV, v_head_dim);
    let Modifiers { mask, bias, .. } = spec.modifiers;
    let mut out = Sequence {
        q_len: seq.q_len,
        kv_len: seq.kv_len,
        kv_stream: seq.kv_stream,
        q: Vec::new(),
        k: Vec::new(),
        v,
        mask: mask.map(|mask| modifiers::mask(mask, spec.seed, seq)),
        bias: bias.map(|bias| modifiers::bias(bias, spec.seed, q_heads, seq)),
    };
    let (q_size, k_size) = (sized(seq.q_len, q_heads, head_dim), sized(seq.kv_len, kv_heads, head_dim));
    match spec.values {
        Values::EqualScores { level } => equal(spec, scale, seq, level, None, &mut out),
        Values::OneAbove { level, lead } => equal(spec, scale, seq, level, Some(lead), &mut out),
        Values::Needles { keys } => {
            out.k = normal(Tag::K, seq.kv_stream, k_size).into_iter().map(f32::signum).collect();
            out.q = seeking(spec, scale, seq, keys, &out.k);
        }
        _ => {
            out.q = normal(Tag::Q, seq.q_stream, q_size);
            out.k = with_prefix(normal(Tag::K, seq.kv_stream, k_size), Tag::PrefixK, head_dim);
        }
    }
    let key_row = kv_heads as usize * head_dim as usize;
    match spec.values {
        Values::Normal | Values::EqualScores { .. } | Values::OneAbove { .. } | Values::Needles { .. } => {}
        Values::Peaky => {
            let start = loud_key(seq.kv_len) as usize * key_row;
            out.k.iter_mut().skip(start).take(key_row).for_each(|x| *x *= 30.0);
        }
        Values::OutlierChannels => {
            // Channel 5 of 16, or the last one of a head with fewer.
            let first = 5.min(head_dim as usize - 1);
            for row in [&mut out.q, &mut out.k].into_iter().flat_map(|x| x.chunks_exact_mut(head_dim as usize)) {
                row.iter_mut().skip(first).step_by(16).for_each(|x| *x *= 20.0);
            }
        }
        Values::LoudFuture => {
            let start = first_future_key(seq.q_len, seq.kv_len) as usize * key_row;
            out.k.iter_mut().skip(start).for_each(|x| *x *= 10_000.0);
        }
        Values::Spread { score } => {
            // q . k has the standard deviation sqrt(head_dim) before the factor.
            let factor = (score / (scale.abs() * f64::from(head_dim).sqrt())).sqrt() as f32;
            [&mut out.q, &mut out.k].into_iter().flatten().for_each(|x| *x *= factor);
        }
        Values::F16Subnormal => {
            let tiny = (-20_f32).exp2();
            [&mut out.k, &mut out.v].into_iter().flatten().for_each(|x| *x *= tiny);
            // Larger queries: the scores then still tell the keys apart.
            out.q.iter_mut().for_each(|x| *x *= 4096.0);
        }
        Values::Offset => out.v.iter_mut().for_each(|x| *x += 100.0),
    }
    out
}

/// The first key that [`Values::LoudFuture`] scales: one that the first half of the rows does not see.
const fn first_future_key(q_len: u32, kv_len: u32) -> u32 {
    kv_len.saturating_sub(q_len / 2)
}

/// Queries that seek one key each: multiples of it, with a score of 64. All others have scores near N(0, 8), so that the
/// highest of 100,000 stays below 40.
fn seeking(spec: &CaseSpec, scale: f64, seq: &Seq, keys: &[u32], k: &[f32]) -> Vec<f32> {
    let Heads { q_heads, kv_heads, head_dim, .. } = spec.heads;
    let (dim, group) = (head_dim as usize, q_heads / kv_heads);
    let factor = (64.0 / (scale * f64::from(head_dim))) as f32;
    let mut q = Vec::with_capacity(seq.q_len as usize * q_heads as usize * dim);
    for row in 0..seq.q_len {
        let seen = spec.options().map_or(0..0, |options| options.visible(seq.q_len, seq.kv_len, row));
        for head in 0..q_heads {
            let tokens = u64::from(seq.q_stream) * u64::from(seq.q_len) + u64::from(row);
            let index = tokens * u64::from(group) + u64::from(head % group);
            let key = match keys.get((index % keys.len().max(1) as u64) as usize) {
                Some(key) => *key,
                None => (index % u64::from(seen.end.max(1))) as u32,
            };
            let key = key.min(seen.end.saturating_sub(1)).max(seen.start);
            let start = (key as usize * kv_heads as usize + (head / group) as usize) * dim;
            // Without a key to see, there is none to seek.
            q.extend(k.iter().skip(start).chain(std::iter::repeat(&0.0)).take(dim).map(|x| x * factor));
        }
    }
    q
}

/// Fills queries and keys so that all scores come near `level`, one of them higher by `lead`.
fn equal(spec: &CaseSpec, scale: f64, seq: &Seq, level: f64, lead: Option<f64>, out: &mut Sequence) {
    let Heads { q_heads, kv_heads, head_dim, .. } = spec.heads;
    let (dim, group) = (head_dim as usize, (q_heads / kv_heads) as usize);
    // Channel 0 carries the lead: there the queries are 32 and the keys 0, but for one.
    const LEAD_Q: f32 = 32.0;
    let reserved = usize::from(lead.is_some());
    let mut rng = stream(spec.seed, Tag::Direction as u64, seq.kv_stream);
    let mut factor = || rng.random_range(0.5_f32..1.5);
    // Sizes that queries and keys share, so that neither overflows a narrow type.
    let size = (level.abs() / (scale.abs() * (dim - reserved).max(1) as f64)).sqrt() as f32;
    let direction: Vec<f32> = (0..kv_heads as usize * dim).map(|_| round(spec.kv, factor() * size)).collect();

    let mut rng = stream(spec.seed, Tag::Q as u64, seq.q_stream);
    for _ in 0..seq.q_len {
        for head in 0..q_heads as usize {
            let key = direction.iter().skip(head / group * dim).take(dim);
            let drawn: Vec<f32> =
                (0..dim).map(|i| if i < reserved { 0.0 } else { rng.random_range(0.5_f32..1.5) * size }).collect();
            let dot: f64 = drawn.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let correction = if dot == 0.0 { 0.0 } else { level / (scale * dot) };
            let row = drawn.iter().map(|q| (f64::from(*q) * correction) as f32);
            out.q.extend(row.enumerate().map(|(i, q)| if i < reserved { LEAD_Q } else { q }));
        }
    }
    for key in 0..seq.kv_len {
        let above = match lead {
            Some(lead) if key == loud_key(seq.kv_len) => (lead / (scale * f64::from(LEAD_Q))) as f32,
            _ => 0.0,
        };
        out.k.extend(direction.iter().enumerate().map(|(i, k)| if i % dim < reserved { above } else { *k }));
    }
}

/// `x` as `dtype` stores it.
fn round(dtype: Dtype, x: f32) -> f32 {
    paged_attention::Tensor::from_f32(dtype, &[1], &[x]).ok().and_then(|t| t.to_f32().first().copied()).unwrap_or(x)
}
