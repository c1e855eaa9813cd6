//! Sequences into cases: packed rows or pages.

use std::collections::{HashMap, HashSet};

use paged_attention::{AttentionOptions, Case, Dtype, KvSource, NO_PAGE, PageSize, Tensor};
use rand::RngExt;
use rand::seq::SliceRandom;

use crate::modifiers::{self, Modifiers};
use crate::spec::{CaseSpec, KvInput, PageOrder, Poison, Pool, SpecError};
use crate::values::{Sequence, generate, stream};

/// The case that a description stands for.
///
/// # Errors
/// [`SpecError`].
pub fn build(spec: &CaseSpec) -> Result<Case, SpecError> {
    assemble(spec, &generate(spec)?)
}

/// A case of `sequences`; of `spec`, everything counts but the lengths and the kind of values.
///
/// # Errors
/// [`SpecError`].
pub fn assemble(spec: &CaseSpec, sequences: &[Sequence]) -> Result<Case, SpecError> {
    let geometry = spec.heads.geometry()?;
    let heads = &spec.heads;
    let rows = Rows {
        q: heads.q_heads as usize * heads.head_dim as usize,
        k: heads.kv_heads as usize * heads.head_dim as usize,
        v: heads.kv_heads as usize * heads.v_head_dim as usize,
    };
    for (seq, s) in sequences.iter().enumerate() {
        let scores = s.q_len as usize * s.kv_len as usize;
        let Modifiers { mask, bias, .. } = spec.modifiers;
        let bias_heads = bias.map_or(0, |bias| bias.heads(heads.q_heads) as usize);
        for (tensor, found, needed) in [
            ("q", s.q.len(), s.q_len as usize * rows.q),
            ("k", s.k.len(), s.kv_len as usize * rows.k),
            ("v", s.v.len(), s.kv_len as usize * rows.v),
            ("mask", s.mask.as_ref().map_or(0, Vec::len), if mask.is_some() { scores } else { 0 }),
            ("bias", s.bias.as_ref().map_or(0, Vec::len), scores * bias_heads),
        ] {
            if found != needed {
                return Err(SpecError::SequenceSize { seq, tensor, found, needed });
            }
        }
    }
    let q: Vec<f32> = sequences.iter().flat_map(|s| s.q.iter().copied()).collect();
    let q_indptr = indptr("query rows", sequences.iter().map(|s| s.q_len))?;
    let total_q = q_indptr.last().map_or(0, |n| *n as usize);
    let dims = |head_count: u32, dim: u32| (head_count as usize, dim as usize);
    let (q_heads, head_dim) = dims(heads.q_heads, heads.head_dim);
    let (kv_heads, v_head_dim) = dims(heads.kv_heads, heads.v_head_dim);
    let q = Tensor::from_f32(spec.q, &[total_q, q_heads, head_dim], &q)?;

    let kv = match &spec.kv_input {
        KvInput::Contiguous(_) => {
            let kv_indptr = indptr("keys", sequences.iter().map(|s| s.kv_len))?;
            let total_kv = kv_indptr.last().map_or(0, |n| *n as usize);
            let packed = |part: fn(&Sequence) -> &Vec<f32>, dim: usize| {
                let data: Vec<f32> = sequences.iter().flat_map(|s| part(s).iter().copied()).collect();
                Tensor::from_f32(spec.kv, &[total_kv, kv_heads, dim], &data)
            };
            KvSource::Contiguous { k: packed(|s| &s.k, head_dim)?, v: packed(|s| &s.v, v_head_dim)?, kv_indptr }
        }
        KvInput::Paged(pool) => {
            let page_size = spec.page_size()?;
            let (page, prefix_pages) = (page_size.get() as usize, spec.shared_prefix / page_size.get());
            check_prefix(prefix_pages * page_size.get(), &rows, sequences)?;
            let mut table = page_table(pool, page_size, (spec.seed, prefix_pages), sequences)?;
            let filled = |part: fn(&Sequence) -> &Vec<f32>, row: usize, dim: usize| {
                let mut data = poisoned(pool.poison, spec.kv, table.page_count as usize * page * row, spec.seed);
                let bounds = table.indptr.iter().zip(table.indptr.iter().skip(1));
                for (s, (start, end)) in sequences.iter().zip(bounds) {
                    let ids = table.ids.iter().take(*end as usize).skip(*start as usize);
                    for (source, id) in part(s).chunks((page * row).max(1)).zip(ids) {
                        let start = *id as usize * page * row;
                        if let Some(slots) = data.get_mut(start..start + source.len()) {
                            slots.copy_from_slice(source);
                        }
                    }
                }
                Tensor::from_f32(spec.kv, &[table.page_count as usize, page, kv_heads, dim], &data)
            };
            let (k_pages, v_pages) = (filled(|s| &s.k, rows.k, head_dim)?, filled(|s| &s.v, rows.v, v_head_dim)?);
            if pool.withhold {
                table.withhold(&spec.options()?, page_size, sequences);
            }
            KvSource::Paged {
                k_pages,
                v_pages,
                page_indptr: table.indptr,
                page_ids: table.ids,
                kv_len: sequences.iter().map(|s| s.kv_len).collect(),
            }
        }
    };
    let case = Case::new(geometry, spec.options()?, q, q_indptr, kv)?;
    // A case without extras has passed its checks.
    let extras = modifiers::extras(spec, sequences)?;
    Ok(if extras.is_empty() { case } else { case.with_extras(extras)? })
}

/// Refuses sequences that would write different tokens into the pages that they share.
fn check_prefix(tokens: u32, rows: &Rows, sequences: &[Sequence]) -> Result<(), SpecError> {
    type Part = fn(&Sequence) -> &Vec<f32>;
    let parts: [(&'static str, Part, usize); 2] = [("k", |s| &s.k, rows.k), ("v", |s| &s.v, rows.v)];
    for (tensor, part, row) in parts {
        // Sequences may be shorter than the prefix; the longest of them has the most of it.
        let longest = sequences.iter().max_by_key(|s| s.kv_len).map(part);
        for (seq, s) in sequences.iter().enumerate() {
            let shared = |data: &Vec<f32>| data.iter().take(tokens as usize * row).map(|x| x.to_bits()).collect();
            let (own, whole): (Vec<u32>, Vec<u32>) = (shared(part(s)), longest.map(shared).unwrap_or_default());
            if !whole.starts_with(&own) {
                return Err(SpecError::Prefix { seq, tensor, tokens });
            }
        }
    }
    Ok(())
}

/// The pages for a contiguous case of `spec` to be written into, sequence after sequence.
///
/// # Errors
/// [`SpecError::TooMany`].
pub fn append_page_ids(spec: &CaseSpec) -> Result<Vec<u32>, SpecError> {
    let page_size = spec.page_size()?;
    let needed = spec.seqs.iter().map(|s| page_size.pages_for(s.kv_len) as usize).sum();
    Ok(page_order(spec.kv_input.pool(), needed, spec.seed)?.0)
}

/// Elements of a row of all heads.
struct Rows {
    q: usize,
    k: usize,
    v: usize,
}

struct PageTable {
    indptr: Vec<u32>,
    ids: Vec<u32>,
    page_count: u32,
}

impl PageTable {
    /// Leaves out the pages that no row can see: whoever looked for them would find none.
    fn withhold(&mut self, options: &AttentionOptions, page_size: PageSize, sequences: &[Sequence]) {
        for (s, first) in sequences.iter().zip(&self.indptr) {
            let rows = (0..s.q_len).map(|row| options.visible(s.q_len, s.kv_len, row)).filter(|keys| !keys.is_empty());
            let seen: HashSet<u32> =
                rows.flat_map(|keys| keys.start / page_size.get()..page_size.pages_for(keys.end)).collect();
            let own = self.ids.iter_mut().skip(*first as usize).take(page_size.pages_for(s.kv_len) as usize);
            for (_, id) in (0..).zip(own).filter(|(entry, _)| !seen.contains(entry)) {
                *id = NO_PAGE;
            }
        }
    }
}

fn page_table(
    pool: &Pool,
    page_size: PageSize,
    (seed, prefix_pages): (u64, u32),
    sequences: &[Sequence],
) -> Result<PageTable, SpecError> {
    let pages_of = |s: &Sequence| page_size.pages_for(s.kv_len);
    // Full pages of the prefix come first, as many as the longest sequence has.
    let prefix_of = |s: &Sequence| prefix_pages.min(s.kv_len / page_size.get()) as usize;
    let mut needed = sequences.iter().map(prefix_of).max().unwrap_or(0);
    // The first of the sequences that share their pages brings them in.
    let mut owner: HashMap<(u32, u32), usize> = HashMap::new();
    let mut starts = Vec::with_capacity(sequences.len());
    for s in sequences {
        let prefix = prefix_of(s);
        let own = pages_of(s) as usize - prefix + pool.surplus as usize;
        let start = if pool.share { *owner.entry((s.kv_stream, s.kv_len)).or_insert(needed) } else { needed };
        if start == needed {
            needed += own;
        }
        starts.push((prefix, start, own));
    }
    let (order, page_count) = page_order(pool, needed, seed)?;
    let ids = starts.iter().flat_map(|(prefix, start, own)| {
        let shared = order.iter().copied().take(*prefix);
        shared.chain(order.iter().copied().skip(*start).take(*own))
    });
    Ok(PageTable {
        indptr: indptr("page-table entries", starts.iter().map(|(prefix, _, own)| (prefix + own) as u32))?,
        ids: ids.collect(),
        page_count,
    })
}

/// `needed` page ids in the order of their use, and the number of pages in the pool.
fn page_order(pool: &Pool, needed: usize, seed: u64) -> Result<(Vec<u32>, u32), SpecError> {
    let found = needed.saturating_mul(pool.times.max(1) as usize);
    let page_count = u32::try_from(found).map_err(|_| SpecError::TooMany { what: "the number of pages", found })?;
    let mut ids: Vec<u32> = (0..page_count).collect();
    match pool.order {
        PageOrder::InOrder => {}
        PageOrder::Reversed => ids.reverse(),
        PageOrder::Shuffled => ids.shuffle(&mut stream(seed, PAGE_TAG, pool.page_size)),
    }
    ids.truncate(needed);
    Ok((ids, page_count))
}

/// Streams for what no sequence owns: apart from those of the values.
const PAGE_TAG: u64 = 16;
const POISON_TAG: u64 = 17;

fn poisoned(poison: Poison, dtype: Dtype, len: usize, seed: u64) -> Vec<f32> {
    // The largest magnitude that is finite in every type.
    const LARGE: f32 = 60_000.0;
    let cycle = |values: &[f32]| values.iter().copied().cycle().take(len).collect();
    match poison {
        Poison::Zero => vec![0.0; len],
        Poison::NaN => vec![f32::NAN; len],
        Poison::Infinity => vec![f32::INFINITY; len],
        // Five values: no row length of the table is a multiple, so that every channel meets each of them.
        Poison::Mixed => match dtype {
            Dtype::F16 => cycle(&[f32::NAN, f32::INFINITY, LARGE, f32::NEG_INFINITY, -LARGE]),
            Dtype::F32 | Dtype::Bf16 => cycle(&[f32::NAN, f32::INFINITY, 3e38, f32::NEG_INFINITY, -3e38]),
        },
        Poison::Garbage => {
            let mut rng = stream(seed, POISON_TAG, 0);
            (0..len).map(|_| rng.random_range(-LARGE..LARGE)).collect()
        }
    }
}

/// Running sums, from 0.
fn indptr(what: &'static str, lengths: impl Iterator<Item = u32>) -> Result<Vec<u32>, SpecError> {
    let mut sum = 0_usize;
    let mut ends = vec![0];
    for len in lengths {
        sum += len as usize;
        ends.push(u32::try_from(sum).map_err(|_| SpecError::TooMany { what, found: sum })?);
    }
    Ok(ends)
}
