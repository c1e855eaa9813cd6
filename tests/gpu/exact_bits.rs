//! What must not change a single bit.

use paged_attention::{Case, Output, RowOrder, RunOptions};
use paged_attention_cases::{CaseSpec, Heads, PageOrder, Poison, Pool, Seq, Sequence, assemble, build, generate};

use crate::common::{CONFIGS, Tally, bits, difference, gpu, is_decode, plain_options, rows_of, run_options};

/// Prompts, chunks, short ones and decodes of several splits together.
const MIXED: [(u32, u32); 12] =
    [(70, 200), (1, 700), (33, 33), (3, 90), (1, 1), (16, 16), (1, 257), (5, 40), (0, 20), (1, 300), (17, 129), (1, 0)];

/// Every configuration, with and without a mask, as one mixed batch.
fn mixed(name: &str) -> Vec<CaseSpec> {
    CONFIGS
        .into_iter()
        .flat_map(|(dtype, heads)| {
            [false, true]
                .map(|causal| CaseSpec::new(format!("bits/{name}"), heads, MIXED).dtype(dtype).causal(causal).seed(31))
        })
        .collect()
}

/// Compares every variant of every mixed batch with the first.
fn all_same(test: &'static str, variants: impl Fn(&CaseSpec) -> Vec<CaseSpec>) {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new(test);
    for spec in mixed(test) {
        let variants = variants(&spec);
        let (first, others) = variants.split_first().unwrap();
        let Some((_, expected)) = tally.check(gpu, first) else { continue };
        for other in others {
            match gpu.run_spec(other) {
                Ok((case, output)) => tally.same(other, &case, difference(&output, &expected)),
                Err(why) => tally.fail(other, None, why),
            }
        }
    }
    tally.finish();
}

#[test]
fn where_the_pages_lie() {
    all_same("placement", |spec| {
        let pool = Pool::new(16).poison(Poison::Zero);
        [
            pool.times(1).order(PageOrder::InOrder),
            pool.times(1).order(PageOrder::Reversed),
            pool.times(1),
            pool.times(5).order(PageOrder::InOrder),
            pool.times(3),
            pool.times(7),
            pool.surplus(3),
        ]
        .map(|pool| spec.clone().paged(pool))
        .to_vec()
    });
}

/// Rows by head and by slot, through the append and in pages already, in every variant.
#[test]
fn in_which_order_the_rows_of_a_page_lie() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("order");
    for spec in mixed("order") {
        for variants in gpu.every_variant(&spec.heads.geometry().unwrap()) {
            for input in [spec.clone().paged(Pool::new(16).poison(Poison::NaN)), spec.clone().contiguous(Pool::new(7))]
            {
                let case = build(&input).unwrap();
                let options = RunOptions { variants: Some(variants), ..run_options(&input) };
                let Some(expected) = tally.check_case(gpu, &input, &case, &options) else { continue };
                let slot_head = RunOptions { order: RowOrder::SlotHead, ..options };
                match gpu.run(&case, &slot_head) {
                    Ok(output) => tally.same(&input, &case, difference(&output, &expected)),
                    Err(why) => tally.fail(&input, None, why),
                }
            }
        }
    }
    tally.finish();
}

#[test]
fn how_large_the_pages_are() {
    all_same("page-size", |spec| {
        [16, 1, 2, 3, 4, 8, 13, 32, 64, 100, 128, 1000].map(|size| spec.clone().paged(Pool::new(size))).to_vec()
    });
}

#[test]
fn what_lies_in_slots_that_nobody_owns() {
    all_same("poison", |spec| {
        // The same pages each time: only what is not owned changes.
        let fills = [Poison::Zero, Poison::NaN, Poison::Infinity, Poison::Mixed, Poison::Garbage];
        [4, 16]
            .into_iter()
            .flat_map(|size| fills.map(|poison| Pool::new(size).times(3).surplus(1).poison(poison)))
            .map(|pool| spec.clone().paged(pool))
            .collect()
    });
}

#[test]
fn written_by_append_or_in_pages_already() {
    all_same("append", |spec| {
        let mut variants = vec![spec.clone().paged(Pool::new(16))];
        for size in [1, 7, 16, 64] {
            variants.push(spec.clone().contiguous(Pool::new(size)));
            variants.push(spec.clone().contiguous(Pool::new(size).times(1).order(PageOrder::InOrder)));
        }
        variants
    });
}

#[test]
fn sharing_pages_with_another_sequence() {
    all_same("sharing", |spec| {
        // Every prompt of the batch twice, once over pages of its own.
        let twice: Vec<Seq> = spec.seqs.iter().flat_map(|s| [*s, Seq { q_stream: s.q_stream + 100, ..*s }]).collect();
        let spec = spec.clone().seqs(twice);
        vec![spec.clone().paged(Pool::new(16)), spec.paged(Pool::new(16).shared())]
    });
}

#[test]
fn the_same_call_again() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("rerun");
    for spec in mixed("rerun") {
        let Some((case, expected)) = tally.check(gpu, &spec) else { continue };
        for run in 1..20 {
            let output = gpu.run(&case, &run_options(&spec)).unwrap();
            tally.same(format!("run {run} of {spec}"), &case, difference(&output, &expected));
        }
    }
    // Once more on a device of its own.
    let spec = &mixed("rerun")[3];
    let (case, expected) = gpu.run_spec(spec).unwrap();
    let variants = gpu.variants(|base| run_options(spec).kernels(&case, base), case.geometry()).unwrap();
    let options = RunOptions { variants: Some(variants), ..run_options(spec) };
    let output = gpu.fresh_runner().run(&case, &options).unwrap();
    tally.same(format!("another device, {spec}"), &case, difference(&output, &expected));
    tally.finish();
}

/// Every sequence alone, in a batch of 4 and in one of 12.
#[test]
fn who_else_is_in_the_batch() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("neighbours");
    for spec in mixed("neighbours") {
        let Some((twelve, in_twelve)) = tally.check(gpu, &spec) else { continue };
        let compare = |tally: &mut Tally, part: &[(usize, Seq)]| {
            let part_spec = spec.clone().seqs(part.iter().map(|(_, seq)| *seq).collect());
            let (case, output) = gpu.run_spec(&part_spec).unwrap();
            for (i, (seq, s)) in part.iter().enumerate() {
                let a = rows_of(&case, &output, i, 0, s.q_len);
                let b = rows_of(&twelve, &in_twelve, *seq, 0, s.q_len);
                let differ = bits("out", &a.out, &b.out).or_else(|| bits("lse", &a.lse, &b.lse));
                tally.same(format!("sequence {seq} as number {i} of {part_spec}"), &case, differ);
            }
        };
        let numbered: Vec<(usize, Seq)> = spec.seqs.iter().copied().enumerate().collect();
        for one in numbered.chunks(1) {
            compare(&mut tally, one);
        }
        for four in numbered.chunks(4) {
            compare(&mut tally, four);
        }
        // Others before it: every sequence changes its number.
        let reversed: Vec<(usize, Seq)> = numbered.iter().rev().copied().collect();
        for four in reversed.chunks(4) {
            compare(&mut tally, four);
        }
        compare(&mut tally, &reversed);
    }
    tally.finish();
}

/// A prompt in chunks of 7, 64 and 128, over a cached prefix: the same bits where the same kernel serves a row.
#[test]
fn a_prompt_in_chunks() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("chunks");
    for (dtype, heads) in CONFIGS {
        for (rows, cached) in [(300, 0), (150, 77)] {
            let spec = CaseSpec::new("bits/chunks", heads, [(rows, cached + rows)]).dtype(dtype).causal(true).seed(32);
            let whole = generate(&spec).unwrap().remove(0);
            let Some((whole_case, expected)) = tally.check(gpu, &spec) else { continue };
            // 4 and 1 are served by the decode kernel; 5 is or is not, by the group.
            for size in [7, 64, 128, 33, 5, 4, 1] {
                let cuts: Vec<(u32, u32)> =
                    (0..rows).step_by(size as usize).map(|start| (start, rows.min(start + size))).collect();
                let chunks: Vec<Sequence> =
                    cuts.iter().map(|(start, end)| whole.chunk(&heads, *start, *end, cached + end)).collect();
                let what = format!("chunks of {size}, {spec}");
                let case = assemble(&spec, &chunks).unwrap();
                let Some(output) = tally.check_case(gpu, &what, &case, &run_options(&spec)) else { continue };
                for (seq, (start, end)) in cuts.iter().enumerate() {
                    if is_decode(&heads, end - start) == is_decode(&heads, rows) {
                        let a = rows_of(&case, &output, seq, 0, end - start);
                        let b = rows_of(&whole_case, &expected, 0, *start, *end);
                        let differ = bits("out", &a.out, &b.out).or_else(|| bits("lse", &a.lse, &b.lse));
                        tally.same(format!("rows {start}..{end} in {what}"), &case, differ);
                    }
                }
            }
        }
    }
    tally.finish();
}

/// Short sequences in the decode kernel: its rows do not depend on each other either.
#[test]
fn short_rows_together_or_one_by_one() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("short-rows");
    for (dtype, heads) in CONFIGS {
        let rows = 16 / (heads.q_heads / heads.kv_heads);
        for kv_len in [rows, 100, 255, 256, 270, 800] {
            let spec = CaseSpec::new("bits/short", heads, [(rows, kv_len)]).dtype(dtype).causal(true).seed(33);
            let whole = generate(&spec).unwrap().remove(0);
            let Some((whole_case, expected)) = tally.check(gpu, &spec) else { continue };
            let single: Vec<Sequence> =
                (0..rows).map(|i| whole.chunk(&heads, i, i + 1, kv_len - rows + i + 1)).collect();
            let case = assemble(&spec, &single).unwrap();
            let Some(output) = tally.check_case(gpu, &spec, &case, &run_options(&spec)) else { continue };
            let a = rows_of(&whole_case, &expected, 0, 0, rows);
            let differ = bits("out", &a.out, &output.out).or_else(|| bits("lse", &a.lse, &output.lse));
            tally.same(format!("one by one, {spec}"), &case, differ);
        }
    }
    tally.finish();
}

/// 20,000 and 131,072 keys: contiguous input through append equals a pool without spare pages, at random.
#[test]
fn long_sequences_in_a_tight_pool() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("long-pool");
    let heads = Heads::new(2, 1, 64);
    for (q_len, kv_len) in [(16, 20_000), (1, 131_072)] {
        let spec = CaseSpec::new("bits/long", heads, [(q_len, kv_len)]).dtype(paged_attention::Dtype::F16).seed(34);
        let run = |case: &Case| -> Output { gpu.run(case, &plain_options(16)).unwrap() };
        let contiguous = run(&build(&spec.clone().contiguous(Pool::new(16))).unwrap());
        let paged = build(&spec.clone().paged(Pool::new(16).times(1))).unwrap();
        tally.same(&spec, &paged, difference(&run(&paged), &contiguous));
    }
    tally.finish();
}
