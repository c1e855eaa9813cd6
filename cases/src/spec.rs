//! The description of a case.

use std::fmt;

use paged_attention::{AttentionOptions, CaseError, Dtype, GeometryError, HeadGeometry, PageSize, TensorError};
use thiserror::Error;

use crate::modifiers::Modifiers;

/// A description of which no case can be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SpecError {
    /// Heads, dimensions or the page size are unusable.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A tensor is too large.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The parts do not make a case.
    #[error(transparent)]
    Case(#[from] CaseError),
    /// A count does not fit into 32 bits.
    #[error("{what} is {found}; at most {limit} can be used", limit = u32::MAX)]
    TooMany {
        /// What is counted.
        what: &'static str,
        /// The count found.
        found: usize,
    },
    /// Sequences differ where they should have the same tokens.
    #[error("sequence {seq}: `{tensor}` does not begin with the {tokens} tokens that all sequences share")]
    Prefix {
        /// The sequence.
        seq: usize,
        /// `k` or `v`.
        tensor: &'static str,
        /// Tokens shared, in whole pages.
        tokens: u32,
    },
    /// Pages can only be shared where keys and values lie in pages.
    #[error("the keys and values lie in packed rows; pages are needed to be shared")]
    NotPaged,
    /// A shared prefix reaches past the pages of a sequence, or names one that does not exist.
    #[error("shared prefix {prefix} reaches past the pages of sequence {seq}")]
    SharedPages {
        /// The prefix, by its place in the list.
        prefix: usize,
        /// The sequence.
        seq: usize,
    },
    /// The sequences handed over do not have the size that the description says.
    #[error("sequence {seq}: `{tensor}` has {found} elements; {needed} are needed")]
    SequenceSize {
        /// The sequence.
        seq: usize,
        /// `q`, `k`, `v`, `mask` or `bias`.
        tensor: &'static str,
        /// Elements found.
        found: usize,
        /// Elements needed.
        needed: usize,
    },
}

/// Head counts and dimensions, not yet validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub q_heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements of a query or key row.
    pub head_dim: u32,
    /// Elements of a value row.
    pub v_head_dim: u32,
}

impl Heads {
    /// Heads whose keys and values have the same dimension.
    pub const fn new(q_heads: u32, kv_heads: u32, head_dim: u32) -> Self {
        Self { q_heads, kv_heads, head_dim, v_head_dim: head_dim }
    }

    /// The same with another value dimension.
    #[must_use]
    pub const fn with_v(self, v_head_dim: u32) -> Self {
        Self { v_head_dim, ..self }
    }

    /// # Errors
    /// [`GeometryError`].
    pub fn geometry(&self) -> Result<HeadGeometry, GeometryError> {
        HeadGeometry::with_v_head_dim(self.q_heads, self.kv_heads, self.head_dim, self.v_head_dim)
    }
}

/// One sequence: its lengths, and which random streams it draws from.
///
/// A sequence's values depend on its streams and on the case's seed, not on its place in the batch: the same
/// sequence can be put alone and among neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seq {
    /// Query rows.
    pub q_len: u32,
    /// Keys.
    pub kv_len: u32,
    /// Stream of the queries.
    pub q_stream: u32,
    /// Stream of the keys and values. A shorter sequence of the same stream is a prefix of a longer one, up to
    /// what [`Values`] puts at a place that follows from the length.
    pub kv_stream: u32,
}

/// What the values look like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values {
    /// Queries, keys and values from N(0, 1).
    Normal,
    /// N(0, 1), with the key at [`loud_key`](crate::loud_key) scaled by 30.
    Peaky,
    /// N(0, 1), with every 16th channel of queries and keys scaled by 20.
    OutlierChannels,
    /// All keys of a head are the same, and the queries such that every score comes near `level`.
    EqualScores {
        /// The score.
        level: f64,
    },
    /// As `EqualScores`, with the score of the key at [`loud_key`](crate::loud_key) higher by `lead`.
    ///
    /// Channel 0 is spent on the lead, so that it does not drown in the level's rounding.
    OneAbove {
        /// The score of the other keys.
        level: f64,
        /// How far one key lies above.
        lead: f64,
    },
    /// N(0, 1), with the keys that only the later half of the query rows sees scaled by 10,000.
    LoudFuture,
    /// Normal queries and keys, scaled so that scores are near `score`.
    Spread {
        /// Typical magnitude of a score.
        score: f64,
    },
    /// Keys and values near 2^-20: subnormal numbers in f16, which must not be taken for zero.
    F16Subnormal,
    /// N(0, 1) values around a mean of 100.
    Offset,
    /// Keys of random signs, and queries that each seek one key, which then has all but 1e-10 of the weight: a row shows
    /// whether its key was met, however many others there are. For head dimensions of 64 and more; with fewer, keys
    /// are too much alike.
    ///
    /// Row `r`, head `h` of its group seeks key `keys[i % len]`, or key `i` in turn where `keys` is empty, with
    /// `i = (q_stream * q_len + r) * group + h`; the nearest key that causal mask and window leave the row in place of one that
    /// they hide.
    Needles {
        /// The keys sought.
        keys: &'static [u32],
    },
}

/// What the slots hold that no sequence owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// 0.
    Zero,
    /// NaN.
    NaN,
    /// +infinity.
    Infinity,
    /// NaN, both infinities and large numbers in turn.
    Mixed,
    /// Numbers of up to 60,000 in magnitude.
    Garbage,
}

/// The order in which a sequence's pages lie in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOrder {
    /// Ascending.
    InOrder,
    /// Descending.
    Reversed,
    /// At random, spread over the whole pool.
    Shuffled,
}

/// A pool of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Tokens per page.
    pub page_size: u32,
    /// How many times the pages needed the pool has; 1 leaves no spare page.
    pub times: u32,
    /// Where the pages lie.
    pub order: PageOrder,
    /// What unowned slots hold.
    pub poison: Poison,
    /// Page-table entries that each sequence has beyond what its length needs.
    pub surplus: u32,
    /// Whether sequences with the same key stream and length share their pages.
    pub share: bool,
    /// Whether pages of which causal mask and window leave no key to any row are missing from the page table.
    pub withhold: bool,
}

impl Pool {
    /// Twice the pages needed, shuffled, NaN wherever nothing is owned.
    pub const fn new(page_size: u32) -> Self {
        let (order, poison) = (PageOrder::Shuffled, Poison::NaN);
        Self { page_size, times: 2, order, poison, surplus: 0, share: false, withhold: false }
    }

    /// The same with a pool of `times` the pages needed.
    #[must_use]
    pub const fn times(self, times: u32) -> Self {
        Self { times, ..self }
    }

    /// The same in another order.
    #[must_use]
    pub const fn order(self, order: PageOrder) -> Self {
        Self { order, ..self }
    }

    /// The same with other contents of unowned slots.
    #[must_use]
    pub const fn poison(self, poison: Poison) -> Self {
        Self { poison, ..self }
    }

    /// The same with further page-table entries per sequence.
    #[must_use]
    pub const fn surplus(self, surplus: u32) -> Self {
        Self { surplus, ..self }
    }

    /// The same with shared pages.
    #[must_use]
    pub const fn shared(self) -> Self {
        Self { share: true, ..self }
    }

    /// The same without the pages that no row sees.
    #[must_use]
    pub const fn withheld(self) -> Self {
        Self { withhold: true, ..self }
    }
}

/// Where keys and values lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvInput {
    /// Packed rows, which the crate writes into pages itself. Of the pool, `page_size`, `times` and `order` say
    /// which pages it is given ([`append_page_ids`](crate::append_page_ids)).
    Contiguous(Pool),
    /// In pages already.
    Paged(Pool),
}

impl KvInput {
    /// The pool.
    pub const fn pool(&self) -> &Pool {
        match self {
            Self::Contiguous(pool) | Self::Paged(pool) => pool,
        }
    }
}

/// An attention problem in a line. See [`build`](crate::build).
#[derive(Clone, Debug, PartialEq)]
pub struct CaseSpec {
    /// Its name: `group/what`.
    pub name: String,
    /// Heads and dimensions.
    pub heads: Heads,
    /// Type of the queries.
    pub q: Dtype,
    /// Type of keys and values.
    pub kv: Dtype,
    /// Type in which the output is to be stored.
    pub out: Dtype,
    /// The batch.
    pub seqs: Vec<Seq>,
    /// Whether rows see no later keys.
    pub causal: bool,
    /// The softmax scale; `None` is `1/sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// What else changes scores.
    pub modifiers: Modifiers,
    /// Tokens that all sequences begin with, the same ones. In pages, those that it fills are shared. For kinds of
    /// [`Values`] that draw every key alike ([`Values::Normal`], [`Values::OutlierChannels`], [`Values::Spread`],
    /// [`Values::Offset`]).
    pub shared_prefix: u32,
    /// Where keys and values lie.
    pub kv_input: KvInput,
    /// What they look like.
    pub values: Values,
    /// Start of all random streams.
    pub seed: u64,
}

impl CaseSpec {
    /// A case with sequences of `(q_len, kv_len)`: f32, bidirectional, N(0, 1), shuffled pages of 16.
    pub fn new(name: impl Into<String>, heads: Heads, lengths: impl IntoIterator<Item = (u32, u32)>) -> Self {
        Self {
            name: name.into(),
            heads,
            q: Dtype::F32,
            kv: Dtype::F32,
            out: Dtype::F32,
            seqs: (0..)
                .zip(lengths)
                .map(|(i, (q_len, kv_len))| Seq { q_len, kv_len, q_stream: i, kv_stream: i })
                .collect(),
            causal: false,
            scale: None,
            modifiers: Modifiers::NONE,
            shared_prefix: 0,
            kv_input: KvInput::Paged(Pool::new(16)),
            values: Values::Normal,
            seed: 0,
        }
    }

    /// The same with queries, keys and values of one type.
    #[must_use]
    pub fn dtype(self, dtype: Dtype) -> Self {
        Self { q: dtype, kv: dtype, ..self }
    }

    /// The same with queries of one type and keys and values of another.
    #[must_use]
    pub fn dtypes(self, q: Dtype, kv: Dtype) -> Self {
        Self { q, kv, ..self }
    }

    /// The same with the output stored in another type.
    #[must_use]
    pub fn out(self, out: Dtype) -> Self {
        Self { out, ..self }
    }

    /// The same with or without a causal mask.
    #[must_use]
    pub fn causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// The same with another softmax scale.
    #[must_use]
    pub fn scale(self, scale: f64) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// The same with other modifiers of the scores.
    #[must_use]
    pub fn modified(self, modifiers: Modifiers) -> Self {
        Self { modifiers, ..self }
    }

    /// The same with the first `tokens` shared by all sequences.
    #[must_use]
    pub fn shared_prefix(self, tokens: u32) -> Self {
        Self { shared_prefix: tokens, ..self }
    }

    /// The same in pages.
    #[must_use]
    pub fn paged(self, pool: Pool) -> Self {
        Self { kv_input: KvInput::Paged(pool), ..self }
    }

    /// The same in packed rows, to be written into pages of `pool` by the crate.
    #[must_use]
    pub fn contiguous(self, pool: Pool) -> Self {
        Self { kv_input: KvInput::Contiguous(pool), ..self }
    }

    /// The same with other values.
    #[must_use]
    pub fn values(self, values: Values) -> Self {
        Self { values, ..self }
    }

    /// The same with another seed.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// The same with other sequences.
    #[must_use]
    pub fn seqs(self, seqs: Vec<Seq>) -> Self {
        Self { seqs, ..self }
    }

    /// The same under another name.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }

    /// The page size that paged and contiguous cases run with.
    ///
    /// # Errors
    /// [`GeometryError::ZeroPageSize`].
    pub fn page_size(&self) -> Result<PageSize, GeometryError> {
        PageSize::new(self.kv_input.pool().page_size)
    }

    /// Scale, causal mask, window and soft cap.
    ///
    /// # Errors
    /// [`GeometryError`].
    pub fn options(&self) -> Result<AttentionOptions, GeometryError> {
        let Modifiers { window_left, window_right, softcap, .. } = self.modifiers;
        let options = AttentionOptions::new(&self.heads.geometry()?)
            .with_causal(self.causal)
            .with_window(window_left, window_right)
            .with_softcap(softcap);
        Ok(match self.scale {
            Some(scale) => options.with_scale(scale),
            None => options,
        })
    }

    /// Multiplications and additions of the two products, with every key taken as visible.
    pub fn flops(&self) -> f64 {
        let pairs: f64 = self.seqs.iter().map(|s| f64::from(s.q_len) * f64::from(s.kv_len)).sum();
        2.0 * pairs * f64::from(self.heads.q_heads) * f64::from(self.heads.head_dim + self.heads.v_head_dim)
    }
}

impl fmt::Display for CaseSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Heads { q_heads, kv_heads, head_dim, v_head_dim } = self.heads;
        write!(f, "{}: heads {q_heads}/{kv_heads}, d {head_dim}", self.name)?;
        if v_head_dim != head_dim {
            write!(f, "/{v_head_dim}")?;
        }
        write!(f, ", q {} kv {} out {}, (q, kv)", self.q, self.kv, self.out)?;
        // Equal neighbours as one entry: batches of thousands stay readable.
        let same = |a: &Seq, b: &Seq| (a.q_len, a.kv_len) == (b.q_len, b.kv_len);
        for (i, run) in self.seqs.chunk_by(same).enumerate() {
            if i == 12 {
                f.write_str(" …")?;
                break;
            }
            if let Some(seq) = run.first() {
                match run.len() {
                    1 => write!(f, " ({}, {})", seq.q_len, seq.kv_len)?,
                    n => write!(f, " {n}×({}, {})", seq.q_len, seq.kv_len)?,
                }
            }
        }
        if self.causal {
            f.write_str(", causal")?;
        }
        if let Some(scale) = self.scale {
            write!(f, ", scale {scale}")?;
        }
        write!(f, "{}", self.modifiers)?;
        if self.shared_prefix > 0 {
            write!(f, ", first {} shared", self.shared_prefix)?;
        }
        let pool = self.kv_input.pool();
        let kind = if matches!(self.kv_input, KvInput::Paged(_)) { "paged" } else { "contiguous" };
        write!(f, ", {kind} by {} {:?} ×{} {:?}", pool.page_size, pool.order, pool.times, pool.poison)?;
        if pool.surplus > 0 {
            write!(f, " +{}", pool.surplus)?;
        }
        if pool.share {
            f.write_str(" shared")?;
        }
        if pool.withhold {
            f.write_str(" withheld")?;
        }
        write!(f, ", {:?}, seed {}", self.values, self.seed)
    }
}
