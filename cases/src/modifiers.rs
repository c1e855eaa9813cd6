//! What changes the scores of a case, and the tensors of it.

use std::fmt;

use paged_attention::{CaseExtras, Dtype, Tensor};
use rand::RngExt;
use rand_distr::StandardNormal;

use crate::spec::{CaseSpec, Seq, SpecError};
use crate::values::{Sequence, Tag, stream};

/// What changes scores, beside the causal mask and the scale. [`Modifiers::NONE`] is the rest of a literal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Modifiers {
    /// Keys visible to the left of a row's own position; `None` is no limit.
    pub window_left: Option<u32>,
    /// Keys visible to the right of a row's own position; `None` is no limit.
    pub window_right: Option<u32>,
    /// The soft cap.
    pub softcap: Option<f64>,
    /// ALiBi slopes.
    pub alibi: Option<Alibi>,
    /// Attention sinks.
    pub sinks: Option<Sinks>,
    /// A mask per query row and key.
    pub mask: Option<Mask>,
    /// An additive bias.
    pub bias: Option<Bias>,
}

impl Modifiers {
    /// None of them.
    pub const NONE: Self =
        Self { window_left: None, window_right: None, softcap: None, alibi: None, sinks: None, mask: None, bias: None };
}

impl fmt::Display for Modifiers {
    /// Those there are, each after a comma.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { window_left, window_right, softcap, alibi, sinks, mask, bias } = self;
        let side = |side: &Option<u32>| side.map_or("-".to_owned(), |side| side.to_string());
        if window_left.is_some() || window_right.is_some() {
            write!(f, ", window {}/{}", side(window_left), side(window_right))?;
        }
        if let Some(cap) = softcap {
            write!(f, ", cap {cap}")?;
        }
        if let Some(alibi) = alibi {
            write!(f, ", alibi {alibi:?}")?;
        }
        if let Some(sinks) = sinks {
            write!(f, ", sinks {sinks:?}")?;
        }
        if let Some(mask) = mask {
            write!(f, ", mask {mask:?}")?;
        }
        if let Some(Bias { per_head, dtype, values }) = bias {
            write!(f, ", bias {dtype} {values:?}{}", if *per_head { " per head" } else { "" })?;
        }
        Ok(())
    }
}

/// ALiBi slopes, one per query head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alibi {
    /// `2^(-8 (h + 1) / q_heads)` for head `h`: falling with the distance, since keys lie to the left
    /// (Press, Smith and Lewis 2022).
    Customary,
    /// 0, 0.5, -0.25 and 3 in turn.
    Mixed,
}

/// Attention sinks, one per query head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sinks {
    /// Uniform between minus this and this.
    Within(f32),
    /// This and minus this in turn.
    At(f32),
}

/// Which keys a row may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Those up to its own position.
    Causal,
    /// Each with this probability in percent.
    Random(u32),
    /// The last `q_len` tokens are nodes of a random tree, as in speculative decoding: a row sees the tokens before them,
    /// itself and its ancestors.
    Tree,
    /// The first so many keys, and those up to its own position (prefix LM).
    Prefix(u32),
    /// Blocks of so many rows and keys, a third of them, and always that on the diagonal.
    Blocks(u32),
    /// No key.
    Nothing,
    /// All keys.
    Everything,
}

/// What is added to scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bias {
    /// Whether each query head has its own.
    pub per_head: bool,
    /// F32 or F16.
    pub dtype: Dtype,
    /// The numbers.
    pub values: BiasValues,
}

impl Bias {
    /// How many of the query heads have numbers of their own.
    pub(crate) fn heads(&self, q_heads: u32) -> u32 {
        if self.per_head { q_heads } else { 1 }
    }
}

/// The numbers of a bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BiasValues {
    /// From N(0, 1), times this.
    Normal(f32),
    /// A number per head for each power of two of the distance between row and key, as relative positions have.
    Relative,
    /// N(0, 1), but `-inf` with this probability in percent.
    Hiding(u32),
    /// 0 up to the row's own position, `-inf` after it.
    Causal,
}

/// The mask of one sequence, `[q_len, kv_len]`.
pub(crate) fn mask(mask: Mask, seed: u64, seq: &Seq) -> Vec<bool> {
    let mut rng = stream(seed, Tag::Mask as u64, seq.q_stream);
    let (q_len, kv_len) = (i64::from(seq.q_len), i64::from(seq.kv_len));
    let own = |row: i64| kv_len - q_len + row;
    // The parent of each node: one before it, or none.
    let parents: Vec<Option<i64>> = match mask {
        Mask::Tree => (0..q_len).map(|node| Some(rng.random_range(-1..node.max(0))).filter(|at| *at >= 0)).collect(),
        _ => Vec::new(),
    };
    let block_count = |len: i64, size: u32| len.div_euclid(i64::from(size.max(1))) + 1;
    let blocks: Vec<bool> = match mask {
        Mask::Blocks(size) => {
            let count = block_count(q_len, size) * block_count(kv_len, size);
            (0..count).map(|_| rng.random_range(0..3) == 0).collect()
        }
        _ => Vec::new(),
    };
    let mut entries = Vec::with_capacity((q_len * kv_len) as usize);
    for row in 0..q_len {
        let lineage: Vec<i64> = match mask {
            Mask::Tree => {
                let up = |node: &i64| parents.get(*node as usize).copied().flatten();
                std::iter::successors(Some(row), up).collect()
            }
            _ => Vec::new(),
        };
        entries.extend((0..kv_len).map(|key| match mask {
            Mask::Causal => key <= own(row),
            Mask::Random(percent) => rng.random_range(0..100) < percent,
            Mask::Tree => key < kv_len - q_len || lineage.contains(&(key - (kv_len - q_len))),
            Mask::Prefix(keys) => key < i64::from(keys) || key <= own(row),
            Mask::Blocks(size) => {
                let size_i = i64::from(size.max(1));
                let at = row.div_euclid(size_i) * block_count(kv_len, size) + key.div_euclid(size_i);
                own(row).div_euclid(size_i) == key.div_euclid(size_i) || blocks.get(at as usize) == Some(&true)
            }
            Mask::Nothing => false,
            Mask::Everything => true,
        }));
    }
    entries
}

/// The bias of one sequence, `[1 or q_heads, q_len, kv_len]`.
pub(crate) fn bias(bias: Bias, seed: u64, q_heads: u32, seq: &Seq) -> Vec<f32> {
    let mut rng = stream(seed, Tag::Bias as u64, seq.q_stream);
    let (q_len, kv_len) = (i64::from(seq.q_len), i64::from(seq.kv_len));
    let heads = bias.heads(q_heads);
    let mut entries = Vec::with_capacity((i64::from(heads) * q_len * kv_len) as usize);
    for _ in 0..heads {
        // By the bits of the distance, for keys before the row and after it.
        let buckets: Vec<f32> = (0..128).map(|_| rng.sample(StandardNormal)).collect();
        for row in 0..q_len {
            let own = kv_len - q_len + row;
            entries.extend((0..kv_len).map(|key| match bias.values {
                BiasValues::Normal(spread) => spread * rng.sample::<f32, _>(StandardNormal),
                BiasValues::Relative => {
                    let bits = (key - own).unsigned_abs().checked_ilog2().map_or(0, |bits| bits + 1);
                    buckets.get(if key > own { 64 } else { 0 } + bits as usize).copied().unwrap_or(0.0)
                }
                BiasValues::Hiding(percent) if rng.random_range(0..100) < percent => f32::NEG_INFINITY,
                BiasValues::Hiding(_) => rng.sample(StandardNormal),
                BiasValues::Causal if key > own => f32::NEG_INFINITY,
                BiasValues::Causal => 0.0,
            }));
        }
    }
    entries
}

/// The tensors of a case of `sequences`.
pub(crate) fn extras(spec: &CaseSpec, sequences: &[Sequence]) -> Result<CaseExtras, SpecError> {
    let Modifiers { alibi, sinks, mask, bias, .. } = spec.modifiers;
    let heads = 0..spec.heads.q_heads;
    let mut extras = CaseExtras::default();
    extras.alibi_slopes = alibi.map(|alibi| {
        let slope = |head: u32| match alibi {
            Alibi::Customary => (-8.0 * (head + 1) as f32 / spec.heads.q_heads as f32).exp2(),
            Alibi::Mixed => match head % 4 {
                0 => 0.0,
                1 => 0.5,
                2 => -0.25,
                _ => 3.0,
            },
        };
        heads.clone().map(slope).collect()
    });
    extras.sinks = sinks.map(|sinks| {
        let mut rng = stream(spec.seed, Tag::Sinks as u64, 0);
        let sink = |head: u32| match sinks {
            Sinks::Within(range) => rng.random_range(-range..=range),
            Sinks::At(level) => {
                if head.is_multiple_of(2) {
                    level
                } else {
                    -level
                }
            }
        };
        heads.map(sink).collect()
    });
    extras.mask = mask.map(|_| sequences.iter().flat_map(|s| s.mask.iter().flatten().copied()).collect());
    if let Some(bias) = bias {
        let rows = bias.heads(spec.heads.q_heads) as usize;
        let sizes = || sequences.iter().map(|s| s.q_len as usize * s.kv_len as usize);
        let mut values = Vec::with_capacity(rows * sizes().sum::<usize>());
        for row in 0..rows {
            for (s, size) in sequences.iter().zip(sizes()) {
                values.extend(s.bias.iter().flatten().skip(row * size).take(size));
            }
        }
        extras.bias = Some(Tensor::from_f32(bias.dtype, &[rows, sizes().sum()], &values)?);
    }
    Ok(extras)
}
