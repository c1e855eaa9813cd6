//! Rows of the table with a purpose beside correctness: what is timed, and what `doctor` runs on an adapter.

use paged_attention::Dtype;

use crate::spec::{CaseSpec, Heads, Pool};

/// The shapes of `bench`: prompts P1 to P3, single tokens D1 to D3, both in one batch M1 and M2. f32, contiguous, causal.
///
/// | name | query/KV heads | dimension | sequences of (query rows, keys) |
/// | --- | --- | --- | --- |
/// | P1 | 8/8 | 64 | (1024, 1024) |
/// | P2 | 9/3 | 64 | (512, 512) |
/// | P3 | 8/2 | 128 | (1024, 1024) |
/// | D1 | 32/8 | 128 | (1, 4096) |
/// | D2 | 9/3 | 64 | 8 of (1, 1024) |
/// | D3 | 8/8 | 128 | (1, 16384) |
/// | M1 | 9/3 | 64 | 63 of (1, 512 to 1024), (512, 512) |
/// | M2 | 8/2 | 128 | as M1 |
pub fn speed() -> Vec<CaseSpec> {
    // No length twice, and neighbours of different lengths.
    let decodes = (0..63).map(|i| (1, 512 + i * 331 % 513));
    let mixed: Vec<(u32, u32)> = decodes.chain([(512, 512)]).collect();
    [
        ("P1", Heads::new(8, 8, 64), vec![(1024, 1024)]),
        ("P2", Heads::new(9, 3, 64), vec![(512, 512)]),
        ("P3", Heads::new(8, 2, 128), vec![(1024, 1024)]),
        ("D1", Heads::new(32, 8, 128), vec![(1, 4096)]),
        ("D2", Heads::new(9, 3, 64), vec![(1, 1024); 8]),
        ("D3", Heads::new(8, 8, 128), vec![(1, 16_384)]),
        ("M1", Heads::new(9, 3, 64), mixed.clone()),
        ("M2", Heads::new(8, 2, 128), mixed),
    ]
    .into_iter()
    .map(|(name, heads, lengths)| timed(name, heads, lengths))
    .collect()
}

/// The shapes of `bench --growth`, each twice as long as the one before: whole prompts of 512 to 8,192 tokens, 8/8 heads;
/// single tokens over 1,024 to 131,072 keys, 8/2 heads (128 MiB in f32: what every adapter binds). Dimension 64.
pub fn growth() -> [Vec<CaseSpec>; 2] {
    let doublings = |first: u32, count: u32| (0..count).map(move |i| first << i);
    let (prefill, decode) = (Heads::new(8, 8, 64), Heads::new(8, 2, 64));
    [
        doublings(512, 5).map(|n| timed(&format!("prefill {n}"), prefill, vec![(n, n)])).collect(),
        doublings(1024, 8).map(|n| timed(&format!("decode {n}"), decode, vec![(1, n)])).collect(),
    ]
}

/// A shape to be timed: f32, contiguous, causal.
pub fn timed(name: &str, heads: Heads, lengths: Vec<(u32, u32)>) -> CaseSpec {
    CaseSpec::new(name, heads, lengths).causal(true).contiguous(Pool::new(16)).seed(7)
}

/// The shape by which the sharing of prefixes is judged: 16 requests of one token, 4,096 tokens shared and 64 of each.
pub fn shared_speed() -> CaseSpec {
    let spec = CaseSpec::new("shared", Heads::new(8, 2, 128), [(1, 4160); 16]).dtype(Dtype::F16).causal(true);
    spec.shared_prefix(4096).paged(Pool::new(16).times(1)).seed(7)
}

/// For each kernel a small case that makes it run, as `(first part of the kernel's name, case)`.
pub fn self_tests() -> [(&'static str, CaseSpec); 4] {
    let (small, usual, wide) = (Heads::new(4, 2, 40).with_v(24), Heads::new(6, 2, 64), Heads::new(8, 2, 128));
    let spec = |name: &str, heads, lengths: &[(u32, u32)]| {
        CaseSpec::new(format!("self-test/{name}"), heads, lengths.iter().copied()).causal(true)
    };
    [
        // Contiguous keys of two sequences, scattered over a pool of small pages.
        ("append", spec("append", small, &[(1, 37), (1, 5)]).dtypes(Dtype::F32, Dtype::F16).contiguous(Pool::new(4))),
        // A prompt on top of a cached prefix, and a short one.
        ("prefill", spec("prefill", usual, &[(40, 59), (17, 17)]).dtype(Dtype::F16).paged(Pool::new(4))),
        // Single tokens of sequences that need no merge.
        ("decode", spec("decode", wide, &[(1, 200), (1, 3), (1, 255)]).dtype(Dtype::Bf16).paged(Pool::new(8))),
        // One whose keys are split, beside one whose are not.
        ("merge", spec("merge", usual, &[(1, 700), (2, 90)]).dtype(Dtype::F32).paged(Pool::new(16))),
    ]
}
