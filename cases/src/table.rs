//! The table: what every kernel has to compute within the bound.
//!
//! A pipeline is made per head dimensions, group size and storage types. Making one takes longer than most
//! cases, so the quick part stays within a few of them; crossing them all is the full part's.

use paged_attention::Dtype::{self, Bf16, F16, F32};
use paged_attention::kernels::SPLIT_KEYS;

use crate::spec::{CaseSpec, Heads, PageOrder, Poison, Pool, Seq, Values};

/// The part that an ordinary test run goes through: seconds on a software adapter with two cores.
pub fn quick() -> Vec<CaseSpec> {
    let mut table = Vec::new();
    for (kind, dtype, heads, single) in [
        ("mha", F32, Heads::new(2, 2, 64), Heads::new(1, 1, 64)),
        ("gqa", F16, Heads::new(4, 2, 64), Heads::new(2, 1, 64)),
        ("mqa", Bf16, Heads::new(4, 1, 64), Heads::new(4, 1, 64)),
    ] {
        for causal in [false, true] {
            table.extend(lengths(kind, dtype, heads, causal, &LENGTHS_SHORT));
        }
        table.extend(lengths(kind, dtype, single, true, &LENGTHS_LONG));
    }
    table.extend(lengths("mha", F32, Heads::new(1, 1, 64), false, &LENGTHS_LONG));
    for kv_heads in [6, 3, 1] {
        table.extend(pools(kv_heads, F16));
    }
    table.extend(decode_quick());
    for group in [1, 4, 7, 8] {
        let heads = Heads::new(group, 1, 64);
        table.extend(
            [
                CaseSpec::new(format!("mixed/decodes-g{group}"), heads, repeat(7, (1, 2048))),
                CaseSpec::new(
                    format!("mixed/short-and-long-g{group}"),
                    heads,
                    join(repeat(26, (1, 600)), repeat(12, (3, 1000))),
                ),
                CaseSpec::new(
                    format!("mixed/chunks-g{group}"),
                    heads,
                    join(repeat(10, (1, 1024)), repeat(2, (17, 2048))),
                ),
            ]
            .map(|spec| spec.dtype(F16).causal(true)),
        );
    }
    let dtypes = [F32, F16, Bf16];
    table.extend(DIMS.iter().zip(dtypes.iter().cycle()).map(|(heads, dtype)| dims(*heads, *dtype)));
    for (kind, dtype, heads) in FEW {
        table.extend(empty(kind, dtype, heads));
        table.extend(value_rows(kind, dtype, heads));
    }
    table.extend(splits(F32, Heads::new(4, 1, 64)).map(|spec| spec.named("splits/f32-g4")));
    table.extend(splits(F16, Heads::new(2, 2, 64)).map(|spec| spec.named("splits/f16-g1")));
    for (i, q_len) in SIZES.iter().enumerate() {
        table.push(sizes(*q_len, F16, Heads::new(2, 1, 64), i % 3 != 0));
    }
    table.extend(long());
    table.extend(needles());
    table.extend(items());
    table.extend(many_heads());
    table.extend(large_pools());
    for (q, kv, out) in [(F32, F16, F32), (F16, F32, F16), (Bf16, F16, F32), (F32, Bf16, F16)] {
        table.extend(dtype_rows(q, kv, out));
    }
    table
}

/// The rest: full sizes, and the options crossed. Four minutes on a software adapter with two cores.
pub fn full() -> Vec<CaseSpec> {
    let mut table = Vec::new();
    for dtype in [F32, F16, Bf16] {
        for (kind, heads) in
            [("mha", Heads::new(6, 6, 64)), ("gqa", Heads::new(6, 3, 64)), ("mqa", Heads::new(6, 1, 64))]
        {
            for causal in [false, true] {
                table.extend(lengths(kind, dtype, heads, causal, &LENGTHS_SHORT));
                table.extend(lengths(kind, dtype, heads, causal, &LENGTHS_LONG));
            }
        }
        for kv_heads in [6, 3, 1] {
            table.extend(pools(kv_heads, dtype));
        }
        for heads in DIMS {
            table.push(dims(heads, dtype));
        }
        for q_len in SIZES {
            for causal in [false, true] {
                table.push(sizes(q_len, dtype, Heads::new(4, 2, 64), causal));
            }
        }
        for q in [F32, F16, Bf16] {
            for out in [F32, F16] {
                table.extend(dtype_rows(q, dtype, out));
            }
        }
    }
    table.extend(decode_full());
    // Past what Mesa 22.3's limit on loops leaves a prefill row, see `long`.
    for (heads, kv_len) in [(Heads::new(2, 1, 8), 180_000), (Heads::new(2, 1, 64), 200_000)] {
        table.push(
            CaseSpec::new(format!("long/17x{kv_len}-d{}", heads.head_dim), heads, [(17, kv_len)])
                .dtype(F16)
                .causal(true)
                .paged(Pool::new(16).times(1))
                .seed(18),
        );
    }
    // Keys and values of a row stay under 128 MiB, which one binding holds everywhere.
    for group in [1, 4, 7, 8] {
        let heads = Heads::new(group, 1, 32);
        table.extend(
            [
                CaseSpec::new(format!("mixed/decodes-g{group}"), heads, repeat(77, (1, 2048))),
                CaseSpec::new(
                    format!("mixed/short-and-long-g{group}"),
                    heads,
                    join(repeat(264, (1, 600)), repeat(128, (3, 5000))),
                )
                .paged(Pool::new(16).times(1)),
                CaseSpec::new(
                    format!("mixed/chunks-g{group}"),
                    heads,
                    join(repeat(100, (1, 1024)), repeat(8, (17, 8192))),
                ),
            ]
            .map(|spec| spec.dtype(F16).causal(true)),
        );
    }
    // Same names as in the quick part would leave a reader guessing which one failed.
    table.into_iter().map(|spec| CaseSpec { name: format!("full/{}", spec.name), ..spec }).collect()
}

/// `(q_len, kv_len)` that other suites have found bugs with.
const LENGTHS_SHORT: [(u32, u32); 9] =
    [(1, 1), (1, 3), (2, 1), (511, 1), (3, 513), (64, 128), (113, 203), (239, 1), (799, 3)];
const LENGTHS_LONG: [(u32, u32); 2] = [(1023, 1024), (1024, 1023)];

fn lengths(kind: &str, dtype: Dtype, heads: Heads, causal: bool, list: &[(u32, u32)]) -> Vec<CaseSpec> {
    let mask = if causal { "causal" } else { "all" };
    // A page size that divides nothing here.
    let pool = Pool::new(if causal { 7 } else { 16 });
    list.iter()
        .map(|(q, kv)| {
            CaseSpec::new(format!("lengths/{kind}-{dtype}-{q}x{kv}-{mask}"), heads, [(*q, *kv)])
                .dtype(dtype)
                .causal(causal)
                .paged(pool)
                .seed(1)
        })
        .collect()
}

/// Pools of three times the need, at random.
fn pools(kv_heads: u32, dtype: Dtype) -> Vec<CaseSpec> {
    let heads = Heads::new(6, kv_heads, 64);
    [(1, 128), (1, 339), (3, 1024), (64, 800), (3, 799)]
        .into_iter()
        .zip([1, 8, 16, 5, 64])
        .map(|((q, kv), page_size)| {
            CaseSpec::new(format!("pools/{dtype}-6over{kv_heads}-{q}x{kv}"), heads, [(q, kv)])
                .dtype(dtype)
                .causal(true)
                .paged(Pool::new(page_size).times(3).poison(Poison::Mixed).surplus(2))
                .seed(2)
        })
        .collect()
}

fn decode(heads: Heads, dtype: Dtype, batch: u32, kv_len: u32, page_size: u32) -> CaseSpec {
    let Heads { q_heads, kv_heads, head_dim, .. } = heads;
    let name = format!("decode/{dtype}-{q_heads}over{kv_heads}-d{head_dim}-{batch}x{kv_len}-page{page_size}");
    CaseSpec::new(name, heads, repeat(batch, (1, kv_len)))
        .dtype(dtype)
        .causal(true)
        .paged(Pool::new(page_size).times(1).poison(Poison::Infinity))
        .seed(3)
}

fn decode_quick() -> Vec<CaseSpec> {
    let (mha, gqa) = (Heads::new(4, 4, 128), Heads::new(32, 4, 128));
    [
        (mha, 12, 54, 1),
        (mha, 17, 97, 8),
        (mha, 128, 97, 16),
        (mha, 2, 16384, 16),
        (gqa, 12, 512, 8),
        (gqa, 17, 97, 1),
        (gqa, 4, 2048, 16),
        (Heads::new(32, 4, 256), 12, 97, 16),
        (Heads::new(32, 4, 256), 3, 512, 1),
    ]
    .map(|(heads, batch, kv_len, page_size)| decode(heads, F16, batch, kv_len, page_size))
    .to_vec()
}

fn decode_full() -> Vec<CaseSpec> {
    let mut table = Vec::new();
    for dim in [128, 256] {
        for q_heads in [4, 32] {
            let heads = Heads::new(q_heads, 4, dim);
            for kv_len in [54, 97, 512, 2048, 16384] {
                // Two bytes an element, four KV heads: as many sequences as keep keys and values under 100 MB.
                let fit = 100_000_000 / (kv_len * 4 * dim * 2 * 2);
                let mut batches = [12, 17, 128].map(|batch: u32| batch.min(fit)).to_vec();
                batches.dedup();
                for batch in batches {
                    for page_size in [1, 8, 16] {
                        table.push(decode(heads, F16, batch, kv_len, page_size));
                    }
                }
            }
        }
    }
    table
}

const DIMS: [Heads; 22] = [
    Heads::new(2, 1, 32),
    Heads::new(2, 1, 40),
    Heads::new(2, 1, 59),
    Heads::new(2, 1, 80),
    Heads::new(2, 1, 96),
    Heads::new(2, 1, 111),
    Heads::new(2, 1, 112),
    Heads::new(2, 1, 120),
    Heads::new(2, 1, 128),
    Heads::new(2, 1, 192),
    Heads::new(2, 1, 256),
    Heads::new(2, 1, 192).with_v(128),
    // Multi-head latent attention.
    Heads::new(4, 1, 576).with_v(512),
    Heads::new(2, 1, 300).with_v(500),
    Heads::new(2, 1, 128).with_v(64),
    Heads::new(2, 1, 64),
    // Below a padded row, and value rows longer than the keys'.
    Heads::new(2, 1, 1),
    Heads::new(2, 1, 3),
    Heads::new(2, 1, 8),
    Heads::new(2, 1, 9),
    Heads::new(2, 1, 17).with_v(250),
    Heads::new(2, 1, 255).with_v(1),
];

/// A prompt of three tiles, a chunk, a short one and a decode of two splits.
fn dims(heads: Heads, dtype: Dtype) -> CaseSpec {
    let Heads { head_dim, v_head_dim, .. } = heads;
    CaseSpec::new(format!("dims/{dtype}-{head_dim}-{v_head_dim}"), heads, [(70, 70), (33, 150), (5, 40), (1, 300)])
        .dtype(dtype)
        .causal(true)
        .paged(Pool::new(16).times(3).poison(Poison::Mixed))
        .seed(4)
}

/// Configurations that other rows use anyway.
pub(crate) const FEW: [(&str, Dtype, Heads); 3] = [
    ("f32-g1", F32, Heads::new(2, 2, 64)),
    ("f16-g2", F16, Heads::new(4, 2, 64)),
    ("bf16-g4", Bf16, Heads::new(4, 1, 64)),
];

/// Rows without keys, sequences without rows, batches without sequences.
fn empty(kind: &str, dtype: Dtype, heads: Heads) -> Vec<CaseSpec> {
    [
        ("no-sequences", vec![]),
        ("no-rows", vec![(0, 2), (0, 40)]),
        ("no-rows-no-keys", vec![(0, 0)]),
        ("q2-kv5", vec![(2, 5)]),
        ("q5-kv2", vec![(5, 2)]),
        ("kv0-q1", vec![(1, 0)]),
        ("kv0-q64", vec![(64, 0)]),
        ("kv0-q128", vec![(128, 0)]),
        ("first-rows-blind", vec![(100, 30), (130, 65), (40, 300)]),
        ("neighbours", vec![(0, 2), (64, 0)]),
        ("among-others", vec![(1, 0), (3, 70), (0, 9), (64, 0), (1, 33), (0, 0), (20, 5), (1, 600), (1, 0)]),
    ]
    .into_iter()
    .flat_map(|(what, lengths)| {
        [false, true].map(|causal| {
            let mask = if causal { "causal" } else { "all" };
            CaseSpec::new(format!("empty/{kind}-{what}-{mask}"), heads, lengths.clone())
                .dtype(dtype)
                .causal(causal)
                .paged(Pool::new(4))
                .seed(6)
        })
    })
    .collect()
}

/// Decodes of 1, 2, 3, 5, 17 and 97 splits, at their edges.
fn splits(dtype: Dtype, heads: Heads) -> [CaseSpec; 1] {
    let edges = [1, 2, 3, 5, 17].into_iter().flat_map(|n| [n * SPLIT_KEYS - 1, n * SPLIT_KEYS, n * SPLIT_KEYS + 1]);
    let lengths = edges.chain([97 * SPLIT_KEYS - 3]).map(|kv_len| (1, kv_len));
    [CaseSpec::new("splits", heads, lengths).dtype(dtype).causal(true).paged(Pool::new(16).times(1)).seed(12)]
}

const SIZES: [u32; 12] = [1, 3, 7, 15, 31, 33, 63, 65, 127, 129, 255, 257];
const SIZES_KV: [u32; 10] = [2, 5, 11, 17, 97, 251, 509, 511, 513, 1021];

/// One row count against sizes around powers of two, and primes, in one batch.
fn sizes(q_len: u32, dtype: Dtype, heads: Heads, causal: bool) -> CaseSpec {
    let mask = if causal { "causal" } else { "all" };
    let group = heads.q_heads / heads.kv_heads.max(1);
    let lengths = SIZES.into_iter().chain(SIZES_KV).map(|kv_len| (q_len, kv_len));
    CaseSpec::new(format!("sizes/{dtype}-g{group}-q{q_len}-{mask}"), heads, lengths)
        .dtype(dtype)
        .causal(causal)
        .paged(Pool::new(13))
        .seed(16)
}

/// 20,000 and 131,072 keys, in a pool without spare pages; and prompts over as many as a driver cuts short.
fn long() -> Vec<CaseSpec> {
    let (narrow, wide) = (Heads::new(2, 1, 64), Heads::new(2, 1, 256));
    // Mesa's software driver, in old versions, ends all loops of an invocation after 65,535 iterations, with no
    // word about it: a row over thousands of keys then misses the last ones.
    vec![
        CaseSpec::new("long/16x20000", narrow, [(16, 20_000)]),
        CaseSpec::new("long/17x9000", narrow, [(17, 9_000)]),
        CaseSpec::new("long/17x131072", narrow, [(17, 131_072)]),
        CaseSpec::new("long/17x2500-d256", wide, [(17, 2_500)]),
        CaseSpec::new("long/1x20000-d256", wide, [(1, 20_000)]),
        CaseSpec::new("long/1x131072", narrow, [(1, 131_072)]),
        CaseSpec::new("long/1x131072-peaky", narrow, [(1, 131_072)]).values(Values::Peaky),
    ]
    .into_iter()
    .map(|spec| spec.dtype(F16).causal(true).paged(Pool::new(16).times(1)).seed(18))
    .collect()
}

/// Keys around the ends of decode splits (40 * 256 is the first of number 40) and far ones, of 131,072.
const NEEDLES_DECODE: [u32; 16] =
    [0, 255, 256, 511, 512, 5_000, 10_239, 10_240, 10_495, 20_000, 32_767, 32_768, 60_000, 65_535, 65_536, 131_071];

/// Far keys, and keys around multiples of 32,768: the ends of prefill splits on a CPU.
const NEEDLES_PREFILL: [u32; 17] = [
    0, 1, 5_000, 20_000, 32_766, 32_767, 32_768, 32_769, 60_000, 65_535, 65_536, 90_000, 98_303, 98_304, 120_000,
    131_070, 131_071,
];

/// Rows that depend on one key each: at far places and at the ends of splits, and on every key of shorter sequences.
fn needles() -> Vec<CaseSpec> {
    let long = |name: &str, q_len, keys| {
        CaseSpec::new(name, Heads::new(2, 1, 64), [(q_len, 131_072)])
            .dtype(F16)
            .paged(Pool::new(16).times(1))
            .values(Values::Needles { keys })
    };
    // As many sequences over the same keys as it takes for every key to be sought.
    let each = |name: String, dtype, heads: Heads, (q_len, kv_len): (u32, u32), causal| {
        let count = kv_len.div_ceil(q_len * (heads.q_heads / heads.kv_heads));
        let spec = CaseSpec::new(name, heads, repeat(count, (q_len, kv_len)));
        let seqs = spec.seqs.iter().map(|s| Seq { kv_stream: 0, ..*s }).collect();
        spec.seqs(seqs).dtype(dtype).causal(causal).paged(Pool::new(13).shared()).values(Values::Needles { keys: &[] })
    };
    let mut table =
        vec![long("needles/decode-131072", 8, &NEEDLES_DECODE), long("needles/prefill-131072", 17, &NEEDLES_PREFILL)];
    for (kind, dtype, heads) in FEW {
        table.push(each(format!("needles/decode-each-{kind}"), dtype, heads, (1, 3 * SPLIT_KEYS + 41), true));
        table.push(each(format!("needles/prefill-each-{kind}"), dtype, heads, (71, 263), false));
        table.push(each(format!("needles/prefill-each-causal-{kind}"), dtype, heads, (263, 263), true));
    }
    table.into_iter().map(|spec| spec.seed(22)).collect()
}

/// More KV heads than 8, written by the crate and in pages already.
fn many_heads() -> Vec<CaseSpec> {
    [Heads::new(12, 12, 8), Heads::new(20, 10, 8), Heads::new(33, 33, 8)]
        .into_iter()
        .flat_map(|heads| {
            let spec = CaseSpec::new("", heads, [(40, 75), (1, 2 * SPLIT_KEYS + 37), (3, 20)]).causal(true).seed(23);
            let kind = format!("heads/{}over{}", heads.q_heads, heads.kv_heads);
            [
                spec.clone().named(format!("{kind}-paged")).paged(Pool::new(4)),
                spec.named(format!("{kind}-contiguous")).contiguous(Pool::new(4)),
            ]
        })
        .collect()
}

/// Pools whose last pages are the ones used: page ids past 16 bits, and places past 64 MiB (of 128 that every device
/// binds).
fn large_pools() -> Vec<CaseSpec> {
    let spec = |name: &str, pool: Pool| {
        let pool = pool.order(PageOrder::Reversed);
        let spec = CaseSpec::new("", Heads::new(4, 2, 8), [(40, 40), (1, 57), (3, 3)]).causal(true).seed(24);
        [
            spec.clone().named(format!("pools/{name}-paged")).paged(pool),
            spec.named(format!("pools/{name}-contiguous")).contiguous(pool),
        ]
    };
    // 100 pages of 1 token: 70,000 pages of 128 bytes. 3 + 4 + 1 pages of 16: 51,200 pages of 2,048 bytes.
    let mut table = spec("70000-pages", Pool::new(1).times(700)).to_vec();
    table.extend(spec("100-mib", Pool::new(16).times(6_400)));
    table
}

/// More work items than one axis of a dispatch takes, in each of the kernels.
fn items() -> [CaseSpec; 4] {
    let pool = Pool::new(1).shared().order(PageOrder::Shuffled);
    [
        CaseSpec::new("items/decode-sequences", Heads::new(1, 1, 8), repeat(66_000, (1, 2))),
        CaseSpec::new("items/decode-heads", Heads::new(66, 66, 8), repeat(1_000, (1, 3))),
        CaseSpec::new("items/prefill", Heads::new(66, 66, 8), repeat(1_000, (17, 3))),
        // Two splits each, all of the same keys.
        CaseSpec::new("items/merge", Heads::new(16, 1, 8), repeat(4_200, (1, SPLIT_KEYS + 1))).paged(Pool::new(16)),
    ]
    .map(|spec| {
        let seqs = spec.seqs.iter().map(|s| Seq { kv_stream: s.kv_stream % 5, ..*s }).collect();
        let page_size = spec.kv_input.pool().page_size;
        spec.seqs(seqs).causal(true).paged(Pool { page_size, ..pool }).seed(19)
    })
}

/// The kinds of values, over a prompt, a chunk, a short one and a decode of three splits.
fn value_rows(kind: &str, dtype: Dtype, heads: Heads) -> Vec<CaseSpec> {
    let mut kinds = vec![
        ("normal", Values::Normal),
        ("peaky", Values::Peaky),
        ("outlier-channels", Values::OutlierChannels),
        ("loud-future", Values::LoudFuture),
        ("offset", Values::Offset),
        ("spread-30", Values::Spread { score: 30.0 }),
        ("spread-1e4", Values::Spread { score: 1e4 }),
        ("equal-0", Values::EqualScores { level: 0.0 }),
        ("equal-up-1e4", Values::EqualScores { level: 1e4 }),
        ("equal-down-1e4", Values::EqualScores { level: -1e4 }),
        ("equal-down-5e4", Values::EqualScores { level: -5e4 }),
        ("equal-up-6e4", Values::EqualScores { level: 6e4 }),
        ("equal-down-6e4", Values::EqualScores { level: -6e4 }),
        ("equal-down-1e5", Values::EqualScores { level: -1e5 }),
        ("equal-up-2.45e5", Values::EqualScores { level: 2.45e5 }),
        ("equal-down-2.45e5", Values::EqualScores { level: -2.45e5 }),
        ("one-above-down-1e5", Values::OneAbove { level: -1e5, lead: 1024.0 }),
        ("one-above-0", Values::OneAbove { level: 0.0, lead: 5.0 }),
    ];
    match dtype {
        // Numbers that f16 does not reach, or that only f16 has.
        Dtype::F16 => kinds.push(("subnormal", Values::F16Subnormal)),
        Dtype::F32 | Dtype::Bf16 => kinds.extend([
            ("spread-1e18", Values::Spread { score: 1e18 }),
            ("equal-down-3e37", Values::EqualScores { level: -3e37 }),
            ("equal-up-3e37", Values::EqualScores { level: 3e37 }),
        ]),
    }
    kinds
        .into_iter()
        .map(|(what, values)| {
            CaseSpec::new(format!("values/{kind}-{what}"), heads, [(70, 100), (32, 32), (2, 64), (1, 700)])
                .dtype(dtype)
                .causal(true)
                .paged(Pool::new(16).times(3))
                .values(values)
                .seed(7)
        })
        .collect()
}

/// Storage types in every place.
fn dtype_rows(q: Dtype, kv: Dtype, out: Dtype) -> [CaseSpec; 2] {
    let spec = CaseSpec::new("", Heads::new(4, 2, 64), [(70, 70), (33, 150), (1, 300), (1, 20)])
        .dtypes(q, kv)
        .out(out)
        .causal(true)
        .seed(8);
    [
        spec.clone().named(format!("dtypes/{q}-{kv}-{out}-paged")).paged(Pool::new(16)),
        spec.named(format!("dtypes/{q}-{kv}-{out}-contiguous")).contiguous(Pool::new(16)),
    ]
}

fn repeat(count: u32, lengths: (u32, u32)) -> Vec<(u32, u32)> {
    (0..count).map(|_| lengths).collect()
}

fn join(mut a: Vec<(u32, u32)>, b: Vec<(u32, u32)>) -> Vec<(u32, u32)> {
    a.extend(b);
    a
}
