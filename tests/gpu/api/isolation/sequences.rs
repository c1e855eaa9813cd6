//! Sequences, and what their tokens make of keys, values and queries.

use super::*;

pub enum Place {
    Device(BlockTable),
    Host(SwappedTable),
    /// Of a server that has given the pages back and goes on with them.
    Stale(Vec<u32>, u32),
}

/// What a sequence consists of.
#[derive(Clone)]
pub struct History {
    pub tenant: u64,
    pub chain: TokenChain,
    /// Fingerprints of tenant and tokens, up to each token.
    pub prints: Vec<u64>,
}

pub struct Live {
    pub history: History,
    pub place: Place,
}

impl History {
    pub fn push(&mut self, tokens: &[u32]) {
        self.chain.push(tokens);
        for token in tokens {
            let before = self.prints.last().copied().unwrap_or(self.tenant);
            // FNV-1a, a word at a time, stirred.
            let print = (before ^ u64::from(*token)).wrapping_mul(0x0000_0100_0000_01b3);
            self.prints.push(print ^ (print >> 29));
        }
    }

    pub fn truncate(&mut self, len: usize) {
        self.chain.truncate(len);
        self.prints.truncate(len);
    }
}

/// A sequence's part of a step.
pub struct Part {
    pub id: u64,
    /// Tokens to be appended.
    pub new: u32,
    pub q_len: u32,
    pub kv_len: u32,
    /// The page table that the batch gets.
    pub pages: Vec<u32>,
    /// The pages that the pool says are the sequence's.
    pub own: Vec<u32>,
    pub prints: Vec<u64>,
}

/// Which of a token's rows.
#[derive(Clone, Copy)]
pub enum Kind {
    Q = 1,
    K = 2,
    V = 3,
}

/// Rows of the token with a fingerprint: `heads` times the dimension.
pub fn rows(print: u64, layer: u32, kind: Kind) -> impl Iterator<Item = f32> {
    let heads = if matches!(kind, Kind::Q) { HEADS.q_heads } else { HEADS.kv_heads };
    let mut random = StdRng::seed_from_u64(print ^ (u64::from(layer) << 8 | kind as u64) << 40);
    // Queries and keys large enough for a few keys to count.
    (0..heads * HEADS.head_dim).map(move |_| random.random_range(-2.0..2.0))
}

impl Part {
    /// Rows of the last `tokens` tokens.
    pub fn last(&self, tokens: u32, layer: u32, kind: Kind) -> Vec<f32> {
        let prints = &self.prints[(self.kv_len - tokens) as usize..];
        prints.iter().flat_map(|print| rows(*print, layer, kind)).collect()
    }

    pub fn sequence(&self, layer: u32) -> Sequence {
        Sequence {
            q_len: self.q_len,
            kv_len: self.kv_len,
            kv_stream: 0,
            q: self.last(self.q_len, layer, Kind::Q),
            k: self.last(self.kv_len, layer, Kind::K),
            v: self.last(self.kv_len, layer, Kind::V),
            mask: None,
            bias: None,
        }
    }
}

/// A batch of some parts.
#[derive(Default)]
pub struct Rows {
    pub q_indptr: Vec<u32>,
    pub page_indptr: Vec<u32>,
    pub page_ids: Vec<u32>,
    pub kv_len: Vec<u32>,
}

impl Rows {
    pub fn new<'p>(parts: impl Iterator<Item = (&'p Part, u32)>) -> Self {
        let mut rows = Self { q_indptr: vec![0], page_indptr: vec![0], ..Self::default() };
        for (part, q_len) in parts {
            rows.q_indptr.push(rows.q_indptr[rows.kv_len.len()] + q_len);
            rows.page_ids.extend(&part.pages);
            rows.page_indptr.push(rows.page_ids.len() as u32);
            rows.kv_len.push(part.kv_len);
        }
        rows
    }

    pub fn batch(&self) -> Batch<'_> {
        let Self { q_indptr, page_indptr, page_ids, kv_len } = self;
        Batch { q_indptr, page_indptr, page_ids, kv_len }
    }
}
