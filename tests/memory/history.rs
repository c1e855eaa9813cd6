//! What a sequence consists of.

use paged_attention::{Dtype, HeadGeometry, KvLayout, Namespace, PageSize, TokenChain};

/// The fields of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub model: String,
    pub version: String,
    pub adapter: String,
    pub positions: String,
    pub kv_heads: u32,
    pub dtype: Dtype,
    pub salt: String,
}

impl Default for Name {
    fn default() -> Self {
        let [model, version, adapter, positions, salt] = ["llama", "1", "", "rope 1e4", "tenant"].map(str::to_string);
        Self { model, version, adapter, positions, kv_heads: 2, dtype: Dtype::F16, salt }
    }
}

impl Name {
    pub fn salted(salt: &str) -> Self {
        Self { salt: salt.into(), ..Self::default() }
    }

    fn chain(&self, page_size: PageSize) -> TokenChain {
        let heads = HeadGeometry::new(self.kv_heads, self.kv_heads, 8).unwrap();
        let layout = KvLayout::new(heads, self.dtype, page_size, 1).unwrap();
        TokenChain::new(&Namespace {
            model: &self.model,
            version: &self.version,
            adapter: &self.adapter,
            positions: &self.positions,
            layout: &layout,
            salt: self.salt.as_bytes(),
        })
    }
}

/// A token, and of which content it is which part, where it stands for something else than itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tok {
    pub token: u32,
    pub content: Option<(u32, u32)>,
}

/// Namespace and tokens of a sequence, with the library's chain over them, and per position a fingerprint of all up to it.
#[derive(Clone, Debug)]
pub struct History {
    pub name: Name,
    pub tokens: Vec<Tok>,
    pub chain: TokenChain,
    prints: Vec<u64>,
}

impl History {
    pub fn new(name: Name, page_size: PageSize) -> Self {
        Self { chain: name.chain(page_size), name, tokens: Vec::new(), prints: Vec::new() }
    }

    pub fn of(name: &Name, page_size: u32, tokens: &[u32]) -> Self {
        let mut history = Self::new(name.clone(), PageSize::new(page_size).unwrap());
        history.push(tokens, None);
        history
    }

    /// Appends tokens, which stand for `content` where there is one.
    pub fn push(&mut self, tokens: &[u32], content: Option<u32>) {
        for (at, token) in (0..).zip(tokens) {
            let token = Tok { token: *token, content: content.map(|content| (content, at)) };
            // FNV-1a over everything that keys and values depend on.
            let start = self.prints.last().copied().unwrap_or_else(|| fnv(FNV, format!("{:?}", self.name).as_bytes()));
            let (content, at) = token.content.map_or((0, 0), |(content, at)| (content + 1, at));
            let print = [token.token, content, at].iter().fold(start, |print, word| fnv(print, &word.to_le_bytes()));
            self.prints.push(print);
            self.tokens.push(token);
        }
        match content {
            Some(content) => self.chain.push_content(tokens, &content.to_le_bytes()),
            None => self.chain.push(tokens),
        }
    }

    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.prints.truncate(len);
        self.chain.truncate(len);
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// What the slot of a position must hold.
    pub fn print(&self, position: u32) -> u64 {
        self.prints[position as usize]
    }
}

const FNV: u64 = 0xcbf2_9ce4_8422_2325;

fn fnv(start: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(start, |print, byte| (print ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
