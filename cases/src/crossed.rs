//! Options crossed with each other, shapes, storage types, page sizes and shared prefixes, at random.

use std::ops::Range;

use paged_attention::Dtype::{self, Bf16, F16, F32};
use paged_attention::{Case, KvDtype, KvDtypes, RowOrder, SharedPrefix};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::layout::build;
use crate::modifiers::{Alibi, Bias, BiasValues, Mask, Modifiers, Sinks};
use crate::shared::share_pages;
use crate::spec::{CaseSpec, Heads, PageOrder, Poison, Pool, SpecError, Values};

/// Which options a case has, as far as kernels may be compiled for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OptionSet {
    /// A window that ends on the left.
    pub window: bool,
    /// A soft cap.
    pub softcap: bool,
    /// ALiBi.
    pub alibi: bool,
    /// Sinks.
    pub sinks: bool,
    /// A mask.
    pub mask: bool,
    /// A bias of that type.
    pub bias: Option<Dtype>,
    /// Prefixes that sequences share.
    pub shared: bool,
}

/// What kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSpec {
    /// Heads and dimensions.
    pub heads: Heads,
    /// Type of the queries.
    pub q: Dtype,
    /// Type of keys and values.
    pub kv: Dtype,
    /// Types in which pages hold them.
    pub stored: KvDtypes,
    /// Type of the output.
    pub out: Dtype,
    /// Options.
    pub options: OptionSet,
}

/// A case drawn at random, and how it is to be run.
#[derive(Clone, Debug, PartialEq)]
pub struct Crossed {
    /// The case, before its prefixes are shared.
    pub spec: CaseSpec,
    /// What its sequences share: at least one prefix where its kernel has them on, else none.
    pub prefixes: Vec<SharedPrefix>,
    /// Types in which pages hold keys and values.
    pub stored: KvDtypes,
    /// Order of slot and head inside a page.
    pub order: RowOrder,
}

impl Crossed {
    /// # Errors
    /// [`SpecError`].
    pub fn build(&self) -> Result<Case, SpecError> {
        let case = build(&self.spec)?;
        if self.prefixes.is_empty() { Ok(case) } else { share_pages(&case, &self.prefixes) }
    }
}

/// Few enough to be compiled. Every third of them, from the first, second or third one on, has each option on somewhere and off
/// somewhere: tests run those in one variant of the kernels.
pub fn crossed_kernels() -> Vec<KernelSpec> {
    let (int8, fp8) = (KvDtype::Int8, KvDtype::Fp8);
    let of = |k: KvDtype, v: KvDtype| KvDtypes { k, v };
    let set = |letters: &str, bias| OptionSet {
        window: letters.contains('w'),
        softcap: letters.contains('c'),
        alibi: letters.contains('a'),
        sinks: letters.contains('s'),
        mask: letters.contains('m'),
        bias,
        shared: letters.contains('p'),
    };
    let kernel = |heads, (q, kv, out): (Dtype, Dtype, Dtype), stored: Option<KvDtypes>, letters, bias| KernelSpec {
        heads,
        q,
        kv,
        stored: stored.unwrap_or(kv.into()),
        out,
        options: set(letters, bias),
    };
    let all_f32 = (F32, F32, F32);
    vec![
        kernel(Heads::new(4, 2, 16), (F16, F16, F32), None, "wcasmp", Some(F16)),
        kernel(Heads::new(2, 2, 24), all_f32, Some(of(int8, int8)), "csp", None),
        kernel(Heads::new(4, 1, 40), (Bf16, Bf16, F32), None, "a", Some(F32)),
        kernel(Heads::new(6, 2, 8), (F16, F32, F16), None, "wa", Some(F32)),
        kernel(Heads::new(2, 1, 21), (F32, F16, F32), Some(of(fp8, fp8)), "wcsm", None),
        kernel(Heads::new(2, 1, 32).with_v(16), all_f32, None, "wsmp", None),
        kernel(Heads::new(8, 1, 16), (F16, F16, F32), Some(of(int8, KvDtype::F16)), "c", Some(F32)),
        kernel(Heads::new(2, 2, 64), all_f32, None, "am", Some(F16)),
        kernel(Heads::new(2, 1, 3), all_f32, None, "wcasm", Some(F32)),
        kernel(Heads::new(4, 2, 16), (F16, Bf16, F32), Some(of(fp8, int8)), "wap", None),
    ]
}

/// A random case for `kernel`; the same seed gives the same one.
pub fn crossed(kernel: &KernelSpec, seed: u64) -> Crossed {
    let rng = &mut StdRng::seed_from_u64(seed);
    let KernelSpec { heads, q, kv, stored, out, options } = *kernel;
    let mut lengths: Vec<(u32, u32)> = (0..rng.random_range(1..5)).map(|_| lengths(rng)).collect();
    if let Some((_, kv_len)) = lengths.first_mut().filter(|_| options.shared) {
        *kv_len = (*kv_len).max(1);
    }
    let keys_max = lengths.iter().map(|(_, kv_len)| *kv_len).max().unwrap_or(0);
    let mut spec = CaseSpec::new(format!("crossed/{seed}"), heads, lengths.iter().copied())
        .dtypes(q, kv)
        .out(out)
        .causal(rng.random())
        .modified(modifiers(rng, options, keys_max))
        .values(values(rng))
        .seed(seed);
    let pool = pool(rng);
    let order = pick(rng, &[RowOrder::HeadSlot, RowOrder::SlotHead]);
    let mut prefixes = Vec::new();
    if options.shared {
        // The same keys, so that queries suit them; and a table with all pages, of which the first is shared.
        spec.seqs.iter_mut().for_each(|seq| seq.kv_stream = 0);
        spec = spec.paged(Pool { withhold: false, ..pool });
        let kv_len: Vec<u32> = lengths.iter().map(|(_, kv_len)| *kv_len).collect();
        share(rng, 0..kv_len.len(), 0, (&kv_len, pool.page_size), &mut prefixes);
        if prefixes.is_empty() {
            prefixes.extend(kv_len.first().map(|tokens| SharedPrefix { seqs: 0..1, tokens: *tokens }));
        }
    } else {
        spec = if rng.random_range(0..3) == 0 { spec.contiguous(pool) } else { spec.paged(pool) };
    }
    Crossed { spec, prefixes, stored, order }
}

/// Prefixes of more than `tokens` tokens inside `seqs`, outer ones first. Where a prefix ends inside a page, its first sequence
/// has as much of that page as any other.
fn share(
    rng: &mut StdRng,
    seqs: Range<usize>,
    tokens: u32,
    (kv_len, page_size): (&[u32], u32),
    prefixes: &mut Vec<SharedPrefix>,
) {
    let mut start = seqs.start;
    while start < seqs.end {
        let end = rng.random_range(start + 1..=seqs.end);
        let members = kv_len.get(start..end).unwrap_or_default();
        let shortest = members.iter().copied().min().unwrap_or(0);
        if shortest > tokens && rng.random_range(0..4) > 0 {
            let drawn = rng.random_range(tokens + 1..=shortest);
            let page_end = drawn.next_multiple_of(page_size);
            let have = |kv_len: &u32| page_end.min(*kv_len);
            let longer = if members.iter().map(have).max() == members.first().map(have) {
                drawn
            } else {
                drawn / page_size * page_size
            };
            if longer > tokens {
                prefixes.push(SharedPrefix { seqs: start..end, tokens: longer });
                share(rng, start..end, longer, (kv_len, page_size), prefixes);
            }
        }
        start = end;
    }
}

/// `(q_len, kv_len)`: small numbers often, so that edges are met; large ones sometimes.
fn lengths(rng: &mut StdRng) -> (u32, u32) {
    let q_len = match rng.random_range(0..8) {
        0..3 => 1,
        3..6 => rng.random_range(0..20),
        _ => rng.random_range(0..140),
    };
    let kv_len = match rng.random_range(0..8) {
        0..3 => rng.random_range(0..40),
        3..7 => rng.random_range(0..300),
        _ => rng.random_range(250..1100),
    };
    (q_len, kv_len)
}

fn pool(rng: &mut StdRng) -> Pool {
    let sizes = [1, 4, 8, 16, 32, 64, 128];
    let page_size = if rng.random() { pick(rng, &sizes) } else { rng.random_range(1..70) };
    Pool {
        page_size,
        times: rng.random_range(1..4),
        order: pick(rng, &[PageOrder::InOrder, PageOrder::Reversed, PageOrder::Shuffled]),
        poison: pick(rng, &[Poison::Zero, Poison::NaN, Poison::Infinity, Poison::Mixed, Poison::Garbage]),
        surplus: rng.random_range(0..3),
        share: false,
        withhold: rng.random(),
    }
}

fn values(rng: &mut StdRng) -> Values {
    match rng.random_range(0..12) {
        0..6 => Values::Normal,
        6 => Values::Peaky,
        7 => Values::OutlierChannels,
        8 => Values::LoudFuture,
        9 => Values::Offset,
        10 => Values::EqualScores { level: rng.random_range(-2.5e5..2.5e5) },
        // Up to what f16 queries and keys can make.
        _ => Values::Spread { score: 10_f64.powf(rng.random_range(-2.0..7.0)) },
    }
}

fn modifiers(rng: &mut StdRng, options: OptionSet, keys: u32) -> Modifiers {
    let OptionSet { window, softcap, alibi, sinks, mask, bias, shared: _ } = options;
    Modifiers {
        window_left: window.then(|| side(rng, keys)),
        // On the right it is no matter of compiling.
        window_right: (rng.random_range(0..3) == 0).then(|| side(rng, keys)),
        softcap: softcap.then(|| match rng.random_range(0..4) {
            0 => pick(rng, &[1.0, 30.0, 50.0]),
            1 => 10_f64.powf(rng.random_range(-3.0..6.0)),
            _ => rng.random_range(0.5..60.0),
        }),
        alibi: alibi.then(|| pick(rng, &[Alibi::Customary, Alibi::Mixed])),
        sinks: sinks.then(|| match rng.random_range(0..4) {
            0 => Sinks::At(10_f32.powf(rng.random_range(0.0..5.0))),
            _ => Sinks::Within(10.0),
        }),
        mask: mask.then(|| match rng.random_range(0..9) {
            0 => Mask::Causal,
            1 => Mask::Random(rng.random_range(0..10)),
            2 => Mask::Random(rng.random_range(10..100)),
            3 => Mask::Prefix(rng.random_range(0..100)),
            4 => Mask::Blocks(rng.random_range(1..70)),
            5 => Mask::Nothing,
            6 => Mask::Everything,
            _ => Mask::Tree,
        }),
        bias: bias.map(|dtype| Bias {
            per_head: rng.random(),
            dtype,
            values: match rng.random_range(0..5) {
                0 => BiasValues::Relative,
                1 => BiasValues::Hiding(rng.random_range(0..=100)),
                2 => BiasValues::Causal,
                _ => BiasValues::Normal(10_f32.powf(rng.random_range(-2.0..3.0))),
            },
        }),
    }
}

/// Keys to one side: none, few, up to all, and more than there are.
fn side(rng: &mut StdRng, keys: u32) -> u32 {
    match rng.random_range(0..8) {
        0 => 0,
        1 => pick(rng, &[keys, keys + 1, u32::MAX]),
        2..5 => rng.random_range(0..40),
        _ => rng.random_range(0..=keys),
    }
}

#[allow(clippy::indexing_slicing, reason = "the index is drawn below the length, and no list here is empty")]
fn pick<T: Copy>(rng: &mut StdRng, from: &[T]) -> T {
    from[rng.random_range(0..from.len())]
}
