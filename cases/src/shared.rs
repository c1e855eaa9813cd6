//! Sequences that share the pages of their first tokens.

use paged_attention::{Case, KvSource, SharedPrefix};

use crate::layout::build;
use crate::spec::{CaseSpec, Pool, SpecError};
use crate::table::FEW;

/// A description of which sequences share prefixes.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedSpec {
    /// The sequences, as if each had pages of its own.
    pub spec: CaseSpec,
    /// What they share: outer prefixes first.
    pub prefixes: Vec<SharedPrefix>,
}

impl SharedSpec {
    /// The case: in every prefix the tables of all sequences have the pages of its first one.
    ///
    /// # Errors
    /// [`SpecError`].
    pub fn build(&self) -> Result<Case, SpecError> {
        share_pages(&build(&self.spec)?, &self.prefixes)
    }
}

/// The same case with the pages of prefixes shared, a last one that is partly filled included: what others have behind the
/// prefix there is then what the first sequence has. Pages that are nobody's any more stay in the pool.
///
/// # Errors
/// [`SpecError::NotPaged`]; [`SpecError::SharedPages`] for a prefix that reaches past the pages of a sequence.
pub fn share_pages(case: &Case, prefixes: &[SharedPrefix]) -> Result<Case, SpecError> {
    let (KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len }, Some(page_size)) =
        (case.kv(), case.page_size())
    else {
        return Err(SpecError::NotPaged);
    };
    let mut shared = page_ids.clone();
    for (prefix, SharedPrefix { seqs, tokens }) in prefixes.iter().enumerate() {
        let pages = page_size.pages_for(*tokens) as usize;
        let entries = |seq: usize| {
            let (begin, end) = (*page_indptr.get(seq)? as usize, *page_indptr.get(seq + 1)? as usize);
            (pages <= end - begin).then_some(begin..begin + pages)
        };
        for seq in seqs.clone() {
            let places = entries(seqs.start).zip(entries(seq));
            let (from, to) = places.ok_or(SpecError::SharedPages { prefix, seq })?;
            shared.copy_within(from, to.start);
        }
    }
    let kv = KvSource::Paged {
        k_pages: k_pages.clone(),
        v_pages: v_pages.clone(),
        page_indptr: page_indptr.clone(),
        page_ids: shared,
        kv_len: kv_len.clone(),
    };
    let same = Case::new(*case.geometry(), *case.options(), case.q().clone(), case.q_indptr().to_vec(), kv)?;
    Ok(same.with_extras(case.extras().clone())?)
}

/// Prefixes around short chunks and prompts, with rows inside them and with nothing behind them; that end inside pages and
/// steps; and nested ones. (Those of 128, 512 and 2048 tokens are rows of [`options`](crate::options).)
pub fn shared() -> Vec<SharedSpec> {
    let mut table = Vec::new();
    let prefix = |seqs, tokens| SharedPrefix { seqs, tokens };
    for (_, dtype, heads) in FEW {
        let row = |name: &str, lengths: Vec<(u32, u32)>, page_size: u32, prefixes: Vec<SharedPrefix>| {
            let spec = CaseSpec::new(format!("shared/{name}-{dtype}"), heads, lengths).dtype(dtype).causal(true);
            SharedSpec { spec: spec.paged(Pool::new(page_size)).seed(13), prefixes }
        };
        let lengths = vec![(5, 133), (17, 145), (40, 168), (1, 129), (0, 140), (3, 128)];
        table.push(row("chunks", lengths, 16, vec![prefix(0..6, 128)]));
        table.push(row("rows-inside", vec![(60, 180), (90, 170), (170, 170)], 16, vec![prefix(0..3, 160)]));
        table.push(row("whole", vec![(1, 301), (1, 300), (2, 300)], 7, vec![prefix(0..3, 300)]));
        // Neighbours that share nothing, and one that shares with itself.
        let lengths = vec![(1, 20), (1, 600), (1, 259), (2, 280), (1, 300), (30, 77)];
        table.push(row("odd", lengths, 32, vec![prefix(1..4, 259), prefix(5..6, 33)]));
        let tree = vec![
            prefix(0..9, 64),
            prefix(0..6, 300),
            prefix(0..3, 301),
            prefix(1..3, 640),
            prefix(3..6, 512),
            prefix(6..9, 97),
        ];
        let lengths = [700, 641, 650, 513, 530, 700, 130, 97, 98].map(|kv_len| (1 + kv_len % 3, kv_len));
        table.push(row("tree", lengths.to_vec(), 16, tree));
        // So many rows that the prefix takes several tiles and is not split.
        table.push(row("rows", vec![(90, 700); 4], 16, vec![prefix(0..4, 610)]));
    }
    table
}
