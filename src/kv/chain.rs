//! What a block of tokens is known by: a hash over all that its keys and values depend on.

use std::ops::Range;

use super::layout::KvLayout;
use crate::geometry::PageSize;

/// Everything besides tokens that changes keys and values. Sequences share blocks only inside one namespace.
///
/// Every field goes into the hash under its own name and with its length, so text that moves from one field to another
/// makes another namespace. Use an empty value where a field does not apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace<'a> {
    /// The model, best as a digest of its weights.
    pub model: &'a str,
    /// Its version, quantisation included.
    pub version: &'a str,
    /// The adapter (LoRA) and its version.
    pub adapter: &'a str,
    /// How positions enter: kind of embedding, base, scaling, first position.
    pub positions: &'a str,
    /// KV heads, dimensions, storage type and page size.
    pub layout: &'a KvLayout,
    /// Who may share. The time of a first token tells whether a prefix was cached, so requests that must not learn of
    /// each other need different salts: one per user or group that trusts itself.
    pub salt: &'a [u8],
}

/// A hash that stands for a block, all blocks before it and the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlockKey([u8; 32]);

impl BlockKey {
    /// A part of it: as good as any number.
    pub fn word(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

/// The bytes to hash: named fields, each name and value behind its length, so that different fields never look alike.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn push(&mut self, name: &str, value: &[u8]) {
        self.head(name, value.len());
        self.0.extend_from_slice(value);
    }

    fn push_words(&mut self, name: &str, words: &[u32]) {
        self.head(name, 4 * words.len());
        self.0.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }

    fn head(&mut self, name: &str, value_bytes: usize) {
        self.0.extend_from_slice(&(name.len() as u64).to_le_bytes());
        self.0.extend_from_slice(name.as_bytes());
        self.0.extend_from_slice(&(value_bytes as u64).to_le_bytes());
    }

    fn key(&self) -> BlockKey {
        BlockKey(*blake3::hash(&self.0).as_bytes())
    }
}

impl Namespace<'_> {
    fn key(&self) -> BlockKey {
        let Self { model, version, adapter, positions, layout, salt } = self;
        let geometry = layout.geometry();
        let mut fields = Fields::default();
        fields.push("paged-attention namespace", b"1");
        for (name, text) in [("model", model), ("version", version), ("adapter", adapter), ("positions", positions)] {
            fields.push(name, text.as_bytes());
        }
        fields.push("dtype", layout.dtypes().to_string().as_bytes());
        fields.push_words(
            "layout",
            &[geometry.kv_heads(), geometry.head_dim(), geometry.v_head_dim(), layout.page_size().get()],
        );
        fields.push("salt", salt);
        fields.key()
    }
}

/// Tokens that stand for content of another kind, such as an image.
#[derive(Clone, Debug)]
struct Span {
    range: Range<usize>,
    content: [u8; 32],
}

/// The tokens of a sequence and the key of each of its full blocks, in one namespace.
///
/// Hashing happens here, once per block and outside of the pool, so a lock around the pool is not held for it.
#[derive(Clone, Debug)]
pub struct TokenChain {
    root: BlockKey,
    page_size: PageSize,
    tokens: Vec<u32>,
    spans: Vec<Span>,
    keys: Vec<BlockKey>,
}

impl TokenChain {
    /// A chain without tokens, for pages of `namespace.layout`'s size.
    pub fn new(namespace: &Namespace<'_>) -> Self {
        Self {
            root: namespace.key(),
            page_size: namespace.layout.page_size(),
            tokens: Vec::new(),
            spans: Vec::new(),
            keys: Vec::new(),
        }
    }

    /// Appends tokens.
    pub fn push(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        self.hash_full_blocks();
    }

    /// Appends placeholder tokens whose keys and values come from `content` (the bytes of an image, or a digest of
    /// them). The content, and which part of it, enters the key of every block that the placeholders overlap.
    pub fn push_content(&mut self, tokens: &[u32], content: &[u8]) {
        let begin = self.tokens.len();
        let range = begin..begin + tokens.len();
        if !range.is_empty() {
            self.spans.push(Span { range, content: *blake3::hash(content).as_bytes() });
        }
        self.push(tokens);
    }

    /// Drops all tokens from position `len` on: the rollback of speculated tokens.
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.keys.truncate(len / self.block_len());
        self.spans.retain_mut(|span| {
            // What is left of a span keeps its content: the same rows as before.
            span.range.end = span.range.end.min(len);
            !span.range.is_empty()
        });
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens per block.
    pub fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Key and tokens of each full block, from block `first` on.
    pub(super) fn blocks(&self, first: usize) -> impl ExactSizeIterator<Item = (BlockKey, &[u32])> {
        let keys = self.keys.get(first..).unwrap_or_default();
        let tokens = self.tokens.get(first * self.block_len()..).unwrap_or_default();
        keys.iter().copied().zip(tokens.chunks_exact(self.block_len()))
    }

    /// Keys that say nothing but which block it is, as if the hash were broken.
    #[cfg(test)]
    pub(super) fn with_broken_hash(mut self) -> Self {
        for (block, key) in self.keys.iter_mut().enumerate() {
            key.0 = [block as u8; 32];
        }
        self
    }

    fn block_len(&self) -> usize {
        self.page_size.get() as usize
    }

    fn hash_full_blocks(&mut self) {
        let block_len = self.block_len();
        let first = self.keys.len();
        // Spans are in order, so those before the first new block end before it.
        let skip = self.spans.partition_point(|span| span.range.end <= first * block_len);
        let spans = self.spans.get(skip..).unwrap_or_default();
        let mut parent = self.keys.last().copied().unwrap_or(self.root);
        let tokens = self.tokens.get(first * block_len..).unwrap_or_default();
        let mut fields = Fields::default();
        for (block, tokens) in (first..).zip(tokens.chunks_exact(block_len)) {
            let range = block * block_len..(block + 1) * block_len;
            fields.0.clear();
            fields.push("parent", &parent.0);
            fields.push_words("tokens", tokens);
            let overlaps = |span: &&Span| span.range.start.max(range.start) < span.range.end.min(range.end);
            for span in spans.iter().filter(overlaps) {
                let (start, end) = (span.range.start.max(range.start), span.range.end.min(range.end));
                fields.push("content", &span.content);
                // Where in the block it lies, and where in the content that begins.
                for (name, position) in
                    [("from", start - range.start), ("to", end - range.start), ("offset", start - span.range.start)]
                {
                    fields.push(name, &(position as u64).to_le_bytes());
                }
            }
            parent = fields.key();
            self.keys.push(parent);
        }
    }
}
