//! Options crossed with each other, shapes, storage types and page sizes, at random.

use paged_attention::Dtype::{self, Bf16, F16, F32};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::modifiers::{Alibi, Bias, BiasValues, Mask, Modifiers, Sinks};
use crate::spec::{CaseSpec, Heads, PageOrder, Poison, Pool, Values};

/// Which options a case has, as far as kernels may be compiled for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OptionSet {
    /// A sliding window.
    pub window: bool,
    /// A soft cap.
    pub softcap: bool,
    /// ALiBi.
    pub alibi: bool,
    /// Sinks.
    pub sinks: bool,
    /// A mask.
    pub mask: bool,
    /// A bias.
    pub bias: bool,
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
    /// Type of the output.
    pub out: Dtype,
    /// Options.
    pub options: OptionSet,
}

/// Few enough to be compiled, and any first `n` of them as different as may be: every two options are together in one of
/// the first four and apart in another.
pub fn crossed_kernels() -> Vec<KernelSpec> {
    let set = |letters: &str| OptionSet {
        window: letters.contains('w'),
        softcap: letters.contains('c'),
        alibi: letters.contains('a'),
        sinks: letters.contains('s'),
        mask: letters.contains('m'),
        bias: letters.contains('b'),
    };
    let kernel = |heads, q, kv, out, letters| KernelSpec { heads, q, kv, out, options: set(letters) };
    vec![
        kernel(Heads::new(4, 2, 64), F16, F16, F32, "wcasmb"),
        kernel(Heads::new(2, 2, 64), F32, F32, F32, "wcs"),
        kernel(Heads::new(4, 1, 64), Bf16, Bf16, F32, "amb"),
        kernel(Heads::new(6, 2, 64), F16, F32, F16, "wab"),
        kernel(Heads::new(2, 1, 59), F32, F16, F32, "csm"),
        kernel(Heads::new(2, 1, 128).with_v(64), F32, F32, F32, "wsm"),
        kernel(Heads::new(8, 1, 64), F16, F16, F32, "cb"),
        kernel(Heads::new(2, 2, 64), F32, F32, F32, "m"),
        kernel(Heads::new(2, 1, 3), F32, F32, F32, "wcasmb"),
        kernel(Heads::new(4, 2, 64), F16, F16, F32, "wa"),
    ]
}

/// A random case for `kernel`; the same seed gives the same one.
pub fn crossed(kernel: &KernelSpec, seed: u64) -> CaseSpec {
    let rng = &mut StdRng::seed_from_u64(seed);
    let KernelSpec { heads, q, kv, out, options } = *kernel;
    let lengths: Vec<(u32, u32)> = (0..rng.random_range(1..5)).map(|_| lengths(rng)).collect();
    let keys_max = lengths.iter().map(|(_, kv_len)| *kv_len).max().unwrap_or(0);
    let spec = CaseSpec::new(format!("crossed/{seed}"), heads, lengths)
        .dtypes(q, kv)
        .out(out)
        .causal(rng.random())
        .modified(modifiers(rng, options, keys_max))
        .values(values(rng))
        .seed(seed);
    let pool = pool(rng);
    if rng.random_range(0..3) == 0 { spec.contiguous(pool) } else { spec.paged(pool) }
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
    let OptionSet { window, softcap, alibi, sinks, mask, bias } = options;
    // One side at least: without any there would be no window.
    let (left, right) = if window { pick(rng, &[(true, false), (false, true), (true, true)]) } else { (false, false) };
    Modifiers {
        window_left: left.then(|| side(rng, keys)),
        window_right: right.then(|| side(rng, keys)),
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
        bias: bias.then(|| Bias {
            per_head: rng.random(),
            dtype: pick(rng, &[F32, F16]),
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
