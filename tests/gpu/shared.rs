//! Shared prefixes: each read once for all sequences that share it, with the result of every sequence alone.

use std::ops::Range;

use paged_attention::{
    Batch, Case, Dtype, KvDtype, KvDtypes, KvSource, Output, RunOptions, SharedPrefix, States, Tensor,
};
use paged_attention_cases::{
    Alibi, CaseSpec, Heads, Mask, Modifiers, Pool, Seq, SharedSpec, Sinks, build, share_pages, shared,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::common::{EVERY_MODIFIER, HIDING_BIAS, Tally, bits, difference, gpu, rows_of, run_options, say};

/// How a description is run, with its prefixes shared.
fn options(shared: &SharedSpec) -> RunOptions {
    RunOptions { shared_prefixes: shared.prefixes.clone(), ..run_options(&shared.spec) }
}

fn prefix(seqs: Range<usize>, tokens: u32) -> SharedPrefix {
    SharedPrefix { seqs, tokens }
}

/// Rows of the table, by the beginnings of their names.
fn rows(names: &[&str]) -> Vec<SharedSpec> {
    let named = |row: &SharedSpec| names.iter().any(|name| row.spec.name.starts_with(&format!("shared/{name}")));
    shared().into_iter().filter(named).collect()
}

/// Every table with prefixes: the trees as they are declared, the others as they are found.
fn table(others: Vec<CaseSpec>) -> Vec<SharedSpec> {
    let with_prefix = others.into_iter().filter(|spec| spec.shared_prefix > 0);
    let found = with_prefix.map(|spec| {
        let prefixes = found(&build(&spec).unwrap());
        assert_eq!(prefixes, [prefix(0..spec.seqs.len(), spec.shared_prefix)], "{spec}");
        SharedSpec { spec, prefixes }
    });
    shared().into_iter().chain(found).collect()
}

/// The prefixes that the page table of a case tells.
fn found(case: &Case) -> Vec<SharedPrefix> {
    let KvSource::Paged { page_indptr, page_ids, kv_len, .. } = case.kv() else { panic!("the case is not paged") };
    let batch = Batch { q_indptr: case.q_indptr(), page_indptr, page_ids, kv_len };
    batch.shared_prefixes(case.page_size().unwrap(), 1)
}

fn check_table(test: &'static str, table: Vec<SharedSpec>) {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new(test);
    for row in table {
        let case = row.build().unwrap();
        let Some(output) = tally.check_case(gpu, &row.spec, &case, &options(&row)) else { continue };
        if !output.kernels.iter().any(|used| used.kernel == "merge") {
            tally.fail(&row.spec, Some(&case), "nothing was merged");
        }
    }
    tally.finish();
}

#[test]
fn shared_prefixes_are_within_the_bound() {
    check_table("shared", table(paged_attention_cases::options()));
}

#[test]
#[ignore = "minutes on a software adapter"]
fn all_shared_prefixes_are_within_the_bound() {
    check_table("shared/full", table(paged_attention_cases::options_full()));
}

/// The rule's choice is the only one that other tests see.
#[test]
fn in_every_variant() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("shared/variants");
    for row in rows(&["chunks-f16", "rows-inside-f16", "odd-f16", "tree-f16"]) {
        let case = row.build().unwrap();
        tally.check_every_variant(gpu, &row.spec, &case, &options(&row));
    }
    tally.finish();
}

/// A row sees of a prefix what it sees of it in its own sequence, whatever the others see.
#[test]
fn options_go_by_each_sequence() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("shared/options");
    const NONE: Modifiers = Modifiers::NONE;
    let window = |left, right| Modifiers { window_left: left, window_right: right, ..NONE };
    let row = rows(&["tree-f16"]).remove(0);
    for (causal, modifiers) in [
        (false, NONE),
        (true, window(Some(40), None)),
        (true, window(Some(200), None)),
        (false, window(None, Some(3))),
        (false, window(Some(250), Some(0))),
        (true, Modifiers { softcap: Some(2.0), ..NONE }),
        (true, Modifiers { alibi: Some(Alibi::Mixed), ..NONE }),
        (true, Modifiers { sinks: Some(Sinks::Within(10.0)), ..NONE }),
        (true, Modifiers { mask: Some(Mask::Random(50)), ..NONE }),
        (false, Modifiers { mask: Some(Mask::Blocks(16)), ..NONE }),
        (true, Modifiers { mask: Some(Mask::Nothing), ..NONE }),
        (false, Modifiers { bias: Some(HIDING_BIAS), ..NONE }),
        (true, EVERY_MODIFIER),
    ] {
        let spec = row.spec.clone().modified(modifiers).causal(causal);
        // Small heads: each choice of options is a compilation of its own.
        let row = SharedSpec { spec: CaseSpec { heads: Heads::new(4, 2, 16), ..spec }, prefixes: row.prefixes.clone() };
        let case = row.build().unwrap();
        tally.check_every_variant(gpu, &row.spec, &case, &options(&row));
    }
    tally.finish();
}

/// Scales go with the page, whoever reads it.
#[test]
fn stored_in_every_type() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("shared/stored");
    let (int8, fp8, f16) = (KvDtype::Int8, KvDtype::Fp8, KvDtype::F16);
    for row in rows(&["tree-f32", "odd-f32", "rows-inside-f32"]) {
        let row = SharedSpec { spec: CaseSpec { heads: Heads::new(4, 2, 24), ..row.spec }, ..row };
        let case = row.build().unwrap();
        for (k, v) in [(int8, int8), (fp8, fp8), (int8, f16), (f16, fp8)] {
            let kv = KvDtypes { k, v };
            let options = RunOptions { kv: Some(kv), ..options(&row) };
            tally.check_every_variant(gpu, format!("{}, {kv}", row.spec), &case, &options);
        }
    }
    tally.finish();
}

#[test]
fn random_prefixes() {
    let Some(gpu) = gpu() else { return };
    let seed = std::env::var("PAGED_ATTENTION_SHARED_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(rand::random::<u64>);
    say(&format!("shared/random: PAGED_ATTENTION_SHARED_SEED={seed}"));
    let mut rng = StdRng::seed_from_u64(seed);
    let mut tally = Tally::new("shared/random");
    for number in 0..60 {
        let page_size = [1, 4, 16, 33][number % 4];
        // The first sequence of a prefix has all pages of it in full, so that those behind it may go on in them.
        let mut lengths: Vec<(u32, u32)> = (0..rng.random_range(1..9))
            .map(|_| {
                (rng.random_range(0..[2, 5, 60][number % 3]), page_size * rng.random_range(0..1 + 700 / page_size))
            })
            .collect();
        let mut prefixes = Vec::new();
        draw(0..lengths.len(), 0, &lengths, &mut rng, &mut prefixes);
        // Others end anywhere.
        for (seq, (_, kv_len)) in lengths.iter_mut().enumerate() {
            if !prefixes.iter().any(|prefix| prefix.seqs.start == seq) {
                let around = prefixes.iter().filter(|prefix| prefix.seqs.contains(&seq)).map(|prefix| prefix.tokens);
                *kv_len = rng.random_range(around.max().unwrap_or(0)..=*kv_len);
            }
        }
        let spec = CaseSpec::new("shared/random", Heads::new(4, 2, 64), lengths).dtype(Dtype::F16);
        let spec = spec.causal(number % 5 > 0).paged(Pool::new(page_size)).seed(number as u64);
        let row = SharedSpec { spec, prefixes };
        let case = row.build().unwrap();
        tally.check_case(gpu, format!("{}, {:?}", row.spec, row.prefixes), &case, &options(&row));
    }
    tally.finish();
}

/// Prefixes of more than `tokens` tokens inside `seqs`.
fn draw(seqs: Range<usize>, tokens: u32, lengths: &[(u32, u32)], rng: &mut StdRng, prefixes: &mut Vec<SharedPrefix>) {
    let mut start = seqs.start;
    while start < seqs.end {
        let end = rng.random_range(start + 1..=seqs.end);
        let shortest = lengths[start..end].iter().map(|(_, kv_len)| *kv_len).min().unwrap();
        if shortest > tokens && rng.random_bool(0.8) {
            let longer = rng.random_range(tokens + 1..=shortest);
            prefixes.push(prefix(start..end, longer));
            draw(start..end, longer, lengths, rng, prefixes);
        }
        start = end;
    }
}

/// More than 16 tile rows share each prefix, with or without the first sequences. Bits are those of every page size and placement, of every run, and of every batch around the sequences that share; and
/// as long as the same kernel takes the prefix, of any number of them.
#[test]
fn what_changes_no_bits() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("shared/bits");
    let lengths = [(1, 580), (1, 700), (3, 520), (1, 512), (20, 600), (9, 513), (1, 999), (2, 640), (1, 700), (1, 530)];
    let heads = Heads::new(4, 2, 64);
    let spec = |pool: Pool, lengths: &[(u32, u32)]| {
        CaseSpec::new("shared/bits", heads, lengths.iter().copied()).dtype(Dtype::F16).causal(true).paged(pool).seed(5)
    };
    let prefixes = vec![prefix(0..10, 128), prefix(0..4, 512), prefix(5..10, 256)];
    let first = SharedSpec { spec: spec(Pool::new(16), &lengths), prefixes: prefixes.clone() };
    let case = first.build().unwrap();
    let Some(expected) = tally.check_case(gpu, &first.spec, &case, &options(&first)) else { return tally.finish() };
    for pool in [Pool::new(16), Pool::new(16).times(5), Pool::new(1), Pool::new(4).times(1), Pool::new(128)] {
        let row = SharedSpec { spec: spec(pool, &lengths), prefixes: prefixes.clone() };
        let case = row.build().unwrap();
        let output = gpu.run(&case, &options(&row)).unwrap();
        tally.same(&row.spec, &case, difference(&output, &expected));
    }
    // The last sequences alone, without those before; without one of them; and with another batch around them.
    let rest = |range: Range<usize>, before: u32| {
        let mut whole = spec(Pool::new(16), &lengths);
        let seqs = whole.seqs.clone();
        let others = (0..before).map(|i| Seq { q_len: 30, kv_len: 45, q_stream: 90 + i, ..seqs[0] });
        whole.seqs = others.chain(seqs[range].iter().copied()).collect();
        whole
    };
    for (range, before) in [(5..10, 0), (5..9, 0), (5..10, 3)] {
        let from = before as usize;
        let sharing = from..from + range.len();
        // Inside the outer prefix, which they have to themselves.
        let prefixes = vec![prefix(sharing.clone(), 128), prefix(sharing.clone(), 256)];
        // The pages of the first of all are shared by all.
        let row = SharedSpec { spec: rest(range.clone(), before), prefixes };
        let case = with_keys_of(&row.build().unwrap(), from, &case, range.start, 128);
        let output = gpu.run(&case, &options(&row)).unwrap();
        for (seq, place) in range.zip(sharing) {
            let (a, b) = (rows_of(&case, &output, place, 0, lengths[seq].0), {
                rows_of(&first.build().unwrap(), &expected, seq, 0, lengths[seq].0)
            });
            let difference = bits("out", &a.out, &b.out).or(bits("lse", &a.lse, &b.lse));
            tally.same(format!("sequence {seq} of {}", row.spec), &case, difference);
        }
    }
    for _ in 0..5 {
        let output = gpu.run(&case, &options(&first)).unwrap();
        tally.same("the same call again", &case, difference(&output, &expected));
    }
    tally.finish();
}

/// `case` with the first `tokens` keys and values of its sequence `seq` replaced by those of another case's sequence.
fn with_keys_of(case: &Case, seq: usize, other: &Case, other_seq: usize, tokens: u32) -> Case {
    let page_size = case.page_size().unwrap();
    assert_eq!(Some(page_size), other.page_size());
    let (
        KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len },
        KvSource::Paged { k_pages: other_k, v_pages: other_v, page_indptr: other_indptr, page_ids: other_ids, .. },
    ) = (case.kv(), other.kv())
    else {
        panic!("the cases are not paged")
    };
    let copied = |into: &Tensor, from: &Tensor| {
        let page: usize = into.shape()[1..].iter().product();
        let (mut into_values, from_values) = (into.to_f32(), from.to_f32());
        for entry in 0..page_size.pages_for(tokens) as usize {
            let to = page_ids[page_indptr[seq] as usize + entry] as usize * page;
            let at = other_ids[other_indptr[other_seq] as usize + entry] as usize * page;
            into_values[to..to + page].copy_from_slice(&from_values[at..at + page]);
        }
        Tensor::from_f32(into.dtype(), into.shape(), &into_values).unwrap()
    };
    let kv = KvSource::Paged {
        k_pages: copied(k_pages, other_k),
        v_pages: copied(v_pages, other_v),
        page_indptr: page_indptr.clone(),
        page_ids: page_ids.clone(),
        kv_len: kv_len.clone(),
    };
    Case::new(*case.geometry(), *case.options(), case.q().clone(), case.q_indptr().to_vec(), kv).unwrap()
}

/// Two calls over parts of the keys, merged on the host, are the call over all of them.
#[test]
fn results_over_parts_of_the_keys_merge() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("shared/host-merge");
    // Rows without keys among them.
    let lengths = [(3, 700), (40, 300), (1, 90), (5, 0), (2, 64)];
    let spec = CaseSpec::new("shared/host-merge", Heads::new(4, 2, 64), lengths).dtype(Dtype::F16).paged(Pool::new(16));
    let whole = build(&spec).unwrap();
    let KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len } = whole.kv() else { panic!("not paged") };
    // Pages turn by turn, and of each sequence's last page as much as it has.
    let part = |number: usize| {
        let mut part_ids = Vec::new();
        let (mut part_indptr, mut part_len) = (vec![0], Vec::new());
        for (seq, kv_len) in kv_len.iter().enumerate() {
            let pages = &page_ids[page_indptr[seq] as usize..page_indptr[seq + 1] as usize];
            let own: Vec<usize> = (0..pages.len()).filter(|entry| entry % 3 == number).collect();
            let tokens = |entry: &usize| 16.min(kv_len - 16 * *entry as u32);
            part_len.push(own.iter().map(tokens).sum::<u32>());
            part_ids.extend(own.iter().map(|entry| pages[*entry]));
            part_indptr.push(part_ids.len() as u32);
        }
        let kv = KvSource::Paged {
            k_pages: k_pages.clone(),
            v_pages: v_pages.clone(),
            page_indptr: part_indptr,
            page_ids: part_ids,
            kv_len: part_len,
        };
        Case::new(*whole.geometry(), *whole.options(), whole.q().clone(), whole.q_indptr().to_vec(), kv).unwrap()
    };
    let mut merged: Option<(States<f32>, Output)> = None;
    for number in [2, 0, 1] {
        let case = part(number);
        let Some(output) = tally.check_case(gpu, format!("part {number}"), &case, &run_options(&spec)) else { return };
        let states = States { out: output.out.clone(), lse: output.lse.clone() };
        match &mut merged {
            Some((merged, _)) => merged.merge(&states).unwrap(),
            None => merged = Some((states, output)),
        }
    }
    let (merged, mut output) = merged.unwrap();
    let mut chains = gpu.run(&whole, &run_options(&spec)).unwrap().chains;
    // Steps of no more than a key, and two merges.
    chains.iter_mut().for_each(|chains| (chains.step_keys, chains.accumulate) = (1, chains.accumulate + 8));
    (output.out, output.lse, output.chains) = (merged.out, merged.lse, chains);
    match crate::common::judge(&whole, &output) {
        Ok(report) => tally.ratio(report.max_bound_ratio, &spec),
        Err(why) => tally.fail(&spec, Some(&whole), why),
    }
    tally.finish();
}

/// Declared for pages that are not the same: refused, on the host, with the numbers.
#[test]
fn pages_that_are_not_shared() {
    let Some(gpu) = gpu() else { return };
    let spec = CaseSpec::new("shared/refused", Heads::new(4, 2, 64), [(1, 40), (1, 40)]).dtype(Dtype::F16);
    let case = build(&spec.clone().paged(Pool::new(16))).unwrap();
    let declared = vec![prefix(0..2, 17)];
    let run = RunOptions { shared_prefixes: declared.clone(), ..run_options(&spec) };
    let error = gpu.run(&case, &run).unwrap_err().to_string();
    assert!(error.starts_with("shared prefix 0: entry 0 of the page table of sequence 1 is "), "{error}");
    let shared = share_pages(&case, &declared).unwrap();
    assert!(gpu.run(&shared, &run).is_ok());
}
