//! Rows of the table for what changes scores: window, soft cap, ALiBi, sinks, masks, bias.

use paged_attention::Dtype::{Bf16, F16, F32};
use paged_attention::kernels::SPLIT_KEYS;

use crate::modifiers::{Alibi, Bias, BiasValues, Mask, Modifiers, Sinks};
use crate::spec::{CaseSpec, Heads, Pool, Values};
use crate::table::FEW;

/// A prompt of several tiles, a chunk on top of a cache, more rows than keys, a few rows, and decodes of one split and of
/// three.
const LENGTHS: [(u32, u32); 6] = [(70, 70), (33, 150), (20, 9), (5, 40), (1, 90), (1, 2 * SPLIT_KEYS + 41)];

/// One option at a time, and a shared prefix. Seconds on a software adapter with two cores.
pub fn options() -> Vec<CaseSpec> {
    let mut table = Vec::new();
    for (kind, dtype, heads) in FEW {
        let row = |name: String, modifiers: Modifiers| {
            CaseSpec::new(name, heads, LENGTHS)
                .dtype(dtype)
                .causal(true)
                .paged(Pool::new(13).times(3))
                .modified(modifiers)
                .seed(31)
        };
        for (what, modifiers) in modifiers() {
            let (group, what) = what.split_once('/').unwrap_or(("", what));
            table.push(row(format!("{group}/{kind}-{what}"), modifiers));
            table.push(row(format!("{group}/{kind}-{what}-both-ways"), modifiers).causal(false));
        }
        // Scores that reach the cap, and that lie far apart.
        for cap in [1.0, 30.0] {
            let modifiers = Modifiers { softcap: Some(cap), ..Modifiers::NONE };
            for (what, values) in [
                ("spread-30", Values::Spread { score: 30.0 }),
                ("spread-1e4", Values::Spread { score: 1e4 }),
                ("equal-0", Values::EqualScores { level: 0.0 }),
                ("equal-down-6e4", Values::EqualScores { level: -6e4 }),
                ("peaky", Values::Peaky),
            ] {
                table.push(row(format!("softcap/{kind}-{cap}-{what}"), modifiers).values(values));
            }
        }
    }
    table.extend(windows());
    table.extend(prefixes(false));
    table
}

/// The rest of the shared prefixes: minutes on a software adapter.
pub fn options_full() -> Vec<CaseSpec> {
    prefixes(true)
}

/// `group/what`, and the option.
fn modifiers() -> Vec<(&'static str, Modifiers)> {
    const NONE: Modifiers = Modifiers::NONE;
    let window = |left, right| Modifiers { window_left: left, window_right: right, ..NONE };
    let bias = |per_head, dtype, values| Modifiers { bias: Some(Bias { per_head, dtype, values }), ..NONE };
    let mask = |mask| Modifiers { mask: Some(mask), ..NONE };
    let sinks = |sinks| Modifiers { sinks: Some(sinks), ..NONE };
    let softcap = |cap| Modifiers { softcap: Some(cap), ..NONE };
    let alibi = |alibi| Modifiers { alibi: Some(alibi), ..NONE };
    vec![
        ("window/0", window(Some(0), None)),
        ("window/3", window(Some(3), None)),
        ("window/43-right-5", window(Some(43), Some(5))),
        ("window/right-0", window(None, Some(0))),
        ("window/right-17", window(None, Some(17))),
        ("window/all", window(Some(u32::MAX), Some(u32::MAX))),
        ("softcap/1", softcap(1.0)),
        ("softcap/30", softcap(30.0)),
        ("softcap/50", softcap(50.0)),
        ("alibi/customary", alibi(Alibi::Customary)),
        ("alibi/mixed", alibi(Alibi::Mixed)),
        ("sinks/within-10", sinks(Sinks::Within(10.0))),
        ("sinks/at-1e4", sinks(Sinks::At(1e4))),
        ("masks/causal", mask(Mask::Causal)),
        ("masks/random-50", mask(Mask::Random(50))),
        ("masks/random-3", mask(Mask::Random(3))),
        ("masks/tree", mask(Mask::Tree)),
        ("masks/prefix", mask(Mask::Prefix(20))),
        ("masks/blocks", mask(Mask::Blocks(16))),
        ("masks/nothing", mask(Mask::Nothing)),
        ("masks/everything", mask(Mask::Everything)),
        ("bias/shared-f32", bias(false, F32, BiasValues::Normal(3.0))),
        ("bias/relative-f16", bias(true, F16, BiasValues::Relative)),
        ("bias/hiding-f32", bias(true, F32, BiasValues::Hiding(60))),
        ("bias/hiding-all-f16", bias(false, F16, BiasValues::Hiding(100))),
        ("bias/causal-f16", bias(false, F16, BiasValues::Causal)),
    ]
}

/// Windows that begin within a page, a step and a split, over lengths on either side; prompts and single tokens. Pages
/// wholly outside are not there.
fn windows() -> Vec<CaseSpec> {
    let mut table = Vec::new();
    for left in [3, 13, 43] {
        let lengths = [1, 19, 99, 1999];
        let window = Modifiers { window_left: Some(left), ..Modifiers::NONE };
        let row = |what: &str, lengths: Vec<(u32, u32)>| {
            CaseSpec::new(format!("window/{what}-{left}"), Heads::new(4, 2, 64), lengths)
                .dtype(F16)
                .causal(true)
                .paged(Pool::new(16).times(2).withheld())
                .modified(window)
                .seed(32)
        };
        table.push(row("decodes", lengths.map(|kv_len| (1, kv_len)).to_vec()));
        table.push(row("prompts", lengths.map(|kv_len| (kv_len, kv_len)).to_vec()));
    }
    // Most of the pages, and whole splits, lie outside.
    let window = Modifiers { window_left: Some(256), ..Modifiers::NONE };
    for (q_len, kv_len) in [(1, 16_384), (17, 16_384), (300, 5_000)] {
        table.push(
            CaseSpec::new(format!("window/long-{q_len}x{kv_len}"), Heads::new(2, 1, 64), [(q_len, kv_len)])
                .dtype(F16)
                .causal(true)
                .paged(Pool::new(16).times(1).withheld())
                .modified(window)
                .seed(33),
        );
    }
    table
}

/// A prefix of 128, 512 or 2048 tokens shared by 12 sequences with 17 or 37 of their own, as single tokens and as prompts.
fn prefixes(full: bool) -> Vec<CaseSpec> {
    let mut table = Vec::new();
    for (prefix, own, page_size) in [128, 512, 2048]
        .into_iter()
        .flat_map(|prefix| [(prefix, 17, 16), (prefix, 37, 1), (prefix, 17, 1), (prefix, 37, 16)])
    {
        for q_len in [1, own] {
            // Enough for an ordinary run: each prefix, each page size, each own length.
            let quick = matches!((prefix, own, page_size), (128, 17, 16) | (512, 37, 1))
                || (prefix == 2048 && q_len == 1 && page_size == 16);
            if quick != full {
                table.push(
                    CaseSpec::new(
                        format!("prefix/{prefix}-own-{own}-q{q_len}-page-{page_size}"),
                        Heads::new(4, 2, 64),
                        (0..12).map(|_| (q_len, prefix + own)),
                    )
                    .dtypes(F32, Bf16)
                    .causal(true)
                    .shared_prefix(prefix)
                    .paged(Pool::new(page_size))
                    .seed(34),
                );
            }
        }
    }
    table
}
