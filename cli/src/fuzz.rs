//! Mutated case files: nothing panics, every plan stays inside of what it was made for, and what is accepted computes right.
//!
//! `FUZZ_SEED` repeats a run; a panic tells the number of its input, and `FUZZ_INPUT` is that input alone.

use std::collections::HashSet;
use std::io::Write as _;
use std::time::Instant;

use clap::Parser;
use paged_attention::kernels::{AdapterFacts, KernelId, Variants};
use paged_attention::{Case, HeadGeometry, RunError, RunOptions, adapter};
use paged_attention_cases::{Crossed, crossed, crossed_kernels, write_case};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use crate::args::{AttendArgs, Cli, Command};
use crate::{attend, case_file};

/// Small files of every kind: paged and packed, with and without each option, every type.
fn corpus() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("case.safetensors");
    let kernels = crossed_kernels();
    let drawn = (0..400).zip(kernels.iter().cycle()).map(|(seed, kernel)| crossed(kernel, seed));
    let files: Vec<Vec<u8>> = drawn
        .filter(|Crossed { spec, .. }| spec.flops() < 2e5 && spec.seqs.iter().all(|seq| seq.kv_len < 100))
        .filter_map(|drawn| {
            write_case(&drawn.build().unwrap(), &path).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            (bytes.len() < 40_000).then_some(bytes)
        })
        .collect();
    assert!(files.len() > 20, "{} small cases", files.len());
    files
}

/// Flags of the command in turn.
fn flags() -> Vec<AttendArgs> {
    [
        "",
        "--page-size 3 --shuffle-pages 7",
        "--page-size 4294967295",
        "--share-prefixes 1",
        "--kv-dtype int8 --layout slot",
        "--kv-dtype fp8 --page-size 1",
        "--causal true --window-left 3 --softcap 2",
        "--window-right 4294967295 --scale 1e-30",
    ]
    .map(|flags| {
        let words = ["paged-attention", "attend", "case"].into_iter().chain(flags.split_whitespace());
        let Command::Attend(args) = Cli::parse_from(words).command else { panic!("another command") };
        args
    })
    .into()
}

/// Header and data of a file that is in order.
fn parts(bytes: &[u8]) -> Option<(Value, Vec<u8>)> {
    let length = usize::try_from(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?)).ok()?;
    let header = serde_json::from_slice(bytes.get(8..length.checked_add(8)?)?).ok()?;
    Some((header, bytes.get(8 + length..)?.to_vec()))
}

fn joined(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn pick<'a, T>(rng: &mut StdRng, from: &'a [T]) -> &'a T {
    &from[rng.random_range(0..from.len())]
}

/// Numbers at which something changes, and any others.
fn number(rng: &mut StdRng) -> u64 {
    match rng.random_range(0..4) {
        0 => *pick(rng, &[0, 1, 2, 3, 7, 8, 16, 255, 256, 257, 511, 512, 513, 577, 65_535, 65_536]),
        1 => *pick(rng, &[1 << 31, (1 << 31) - 1, u64::from(u32::MAX), 1 << 32, u64::MAX, i64::MAX as u64, 1 << 63]),
        2 => rng.random_range(0..40),
        _ => rng.random(),
    }
}

/// The bytes of a tensor in the file's data, by its header.
fn range(header: &Value, name: &str, data: &[u8]) -> Option<std::ops::Range<usize>> {
    let offsets = header.get(name)?.get("data_offsets")?;
    let [begin, end] = [0, 1].map(|at| offsets.get(at).and_then(Value::as_u64));
    let range = begin? as usize..end? as usize;
    (range.start <= range.end && range.end <= data.len()).then_some(range)
}

const INDICES: [&str; 5] = ["q_indptr", "kv_indptr", "page_indptr", "page_ids", "kv_len"];

/// Changes a header or data in one place, mostly in such a way that the file stays well formed.
fn change(rng: &mut StdRng, header: &mut Value, data: &mut Vec<u8>, wild: bool) {
    let names: Vec<String> = header.as_object().into_iter().flatten().map(|(name, _)| name.clone()).collect();
    let name = pick(rng, &names).clone();
    match rng.random_range(if wild { 0..11 } else { 4..11 }) {
        0 => {
            // A dimension, a type, an offset.
            let entry = &mut header[&name];
            match rng.random_range(0..3) {
                0 => {
                    if let Some(shape) = entry.get_mut("shape").and_then(Value::as_array_mut).filter(|s| !s.is_empty())
                    {
                        let at = rng.random_range(0..shape.len());
                        shape[at] = json!(number(rng));
                    }
                }
                1 => {
                    let types = ["F32", "F16", "BF16", "I32", "U32", "I64", "U8", "BOOL", "F64", "I8", "F8_E4M3"];
                    entry["dtype"] = json!(pick(rng, &types));
                }
                _ => entry["data_offsets"] = json!([number(rng), number(rng)]),
            }
        }
        1 => {
            let entry = header.as_object_mut().and_then(|header| header.remove(&name)).unwrap_or_default();
            let other = pick(rng, &["q", "k", "v", "mask", "bias", "sinks", "alibi_slopes", "other"]);
            if rng.random() {
                header[*other] = entry;
            }
        }
        2 => {
            // Dimensions of a tensor with as many elements.
            if let Some(shape) = header[&name].get_mut("shape").and_then(Value::as_array_mut) {
                shape.reverse();
                if rng.random() {
                    shape.push(json!(1));
                }
            }
        }
        3 => {
            let at = rng.random_range(0..=data.len());
            data.truncate(at);
        }
        4 => {
            let key = pick(rng, &["causal", "scale", "window_left", "window_right", "softcap"]);
            let values = [
                "true",
                "false",
                "-1",
                "0",
                "1",
                "3",
                "17",
                "4294967295",
                "4294967296",
                "-2",
                "0.5",
                "30",
                "1e-3",
                "1e-45",
                "1e300",
                "nan",
                "inf",
                "-inf",
                "",
                " 1",
                "1e400",
                "yes",
                "0.1",
            ];
            header["__metadata__"][*key] = json!(pick(rng, &values));
        }
        5..9 => {
            // An entry of an index tensor.
            let index = *pick(rng, &INDICES);
            let Some(range) = range(header, index, data) else { return };
            if range.len() >= 4 {
                let at = range.start + 4 * rng.random_range(0..range.len() / 4);
                let old = u32::from_le_bytes(data[at..at + 4].try_into().unwrap());
                let new = match rng.random_range(0..6) {
                    0 => old.wrapping_add(1),
                    1 => old.wrapping_sub(1),
                    2 => old / 2,
                    3 => u32::MAX,
                    4 => rng.random_range(0..8),
                    _ => number(rng) as u32,
                };
                data[at..at + 4].copy_from_slice(&new.to_le_bytes());
            }
        }
        9 => {
            // Bytes of anything.
            if let Some(range) = range(header, &name, data).filter(|range| !range.is_empty()) {
                let at = rng.random_range(range);
                data[at] = rng.random();
            }
        }
        _ => {
            // A mask's entry turned round, or a whole tensor of zeros.
            match range(header, if rng.random() { "mask" } else { &name }, data) {
                Some(range) if range.len() > 1 && name == "mask" => {
                    let at = rng.random_range(range);
                    data[at] ^= 1;
                }
                Some(range) => data[range].fill(0),
                None => {}
            }
        }
    }
}

/// A file changed in one to five places. Where it is not `wild`, its shapes and types stay.
fn mutated(rng: &mut StdRng, file: &[u8], wild: bool) -> Vec<u8> {
    let (mut header, mut data) = parts(file).unwrap();
    for _ in 0..rng.random_range(1..=4) {
        change(rng, &mut header, &mut data, wild);
    }
    let mut bytes = joined(&header, &data);
    if wild && rng.random_range(0..8) == 0 {
        // In the header's length and text as well.
        for _ in 0..rng.random_range(1..4) {
            let end = if rng.random() { 200 } else { bytes.len() }.min(bytes.len());
            let at = rng.random_range(0..end.max(1));
            match rng.random_range(0..3) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at.min(bytes.len()), rng.random()),
                _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = rng.random()),
            }
        }
    }
    bytes
}

/// The kinds of variants that plans differ by.
fn variants(rng: &mut StdRng, geometry: &HeadGeometry) -> Variants {
    let facts =
        *pick(rng, &[AdapterFacts::PLAIN_CPU, AdapterFacts::PLAIN_GPU, AdapterFacts::PLAIN_GPU.with_subgroups(32)]);
    let mut variants = Variants::candidates(&facts, geometry)[0];
    // Short enough for prompts to be split.
    if rng.random() {
        variants.prefill.split_keys = 16 * rng.random_range(1..5);
    }
    variants
}

/// All that the command does with a file before it opens an adapter, and the plan.
fn accepted(bytes: &[u8], args: &AttendArgs) -> Option<(Case, RunOptions)> {
    let case = case_file::parse(bytes, &args.settings, &args.paging).ok()?.case;
    let (options, _) = attend::run_options(args, &case).ok()?;
    options.validate(&case).ok()?;
    Some((case, options))
}

/// Says which input it was, if it panics.
struct Input {
    seed: u64,
    number: u64,
}

impl Drop for Input {
    fn drop(&mut self) {
        if std::thread::panicking() {
            say(&format!("FUZZ_SEED={} FUZZ_INPUT={}", self.seed, self.number));
        }
    }
}

fn say(line: &str) {
    // Nobody may be watching.
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number is needed"))
}

/// The stream of an input.
fn stream(seed: u64, number: u64) -> StdRng {
    StdRng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number)
}

fn host_side(count: u64) {
    let start = Instant::now();
    let (corpus, flags) = (corpus(), flags());
    let seed = environment("FUZZ_SEED").unwrap_or_else(rand::random);
    say(&format!("fuzz: FUZZ_SEED={seed}"));
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64);
    let run = |number: u64| {
        let _input = Input { seed, number };
        let rng = &mut stream(seed, number);
        let file = pick(rng, &corpus);
        let wild = rng.random();
        let bytes = mutated(rng, file, wild);
        let args = pick(rng, &flags);
        let Some((case, options)) = accepted(&bytes, args) else { return [0, 0] };
        match options.plan(&case, variants(rng, case.geometry())) {
            Ok(plan) => {
                assert_eq!(plan.out_of_range(), None);
                [1, 1]
            }
            Err(RunError::Plan(_)) => [1, 0],
            Err(error) => panic!("{error}"),
        }
    };
    if let Some(number) = environment("FUZZ_INPUT") {
        run(number);
        return;
    }
    let counts = std::thread::scope(|scope| {
        let run = &run;
        let workers: Vec<_> = (0..threads)
            .map(|first| {
                scope.spawn(move || {
                    (first..count).step_by(threads as usize).map(run).fold([0, 0], |a, b| [a[0] + b[0], a[1] + b[1]])
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).fold([0_u64; 2], |a, b| [a[0] + b[0], a[1] + b[1]])
    });
    let seconds = start.elapsed().as_secs_f64();
    say(&format!("fuzz: {count} inputs in {seconds:.1} s, {} accepted, {} planned", counts[0], counts[1]));
    // Neither is everything refused, nor nothing.
    assert!(counts[1] > count / 20 && counts[1] < count * 19 / 20, "{counts:?} of {count}");
}

#[test]
fn mutated_files_make_no_panic() {
    host_side(10_000);
}

#[test]
#[ignore = "a million inputs: `ci/lanes fuzz`"]
fn a_million_mutated_files_make_no_panic() {
    host_side(1_000_000);
}

/// Accepted ones are run and judged, over pipelines as few as those of the files that they come from.
fn on_the_adapter(count: usize) {
    if std::env::var_os("PAGED_ATTENTION_SKIP_GPU").is_some_and(|value| value == "1") {
        println!("SKIPPED: PAGED_ATTENTION_SKIP_GPU=1 is set");
        return;
    }
    const PIPELINES_MAX: usize = 60;
    let start = Instant::now();
    let wanted = std::env::var("PAGED_ATTENTION_ADAPTER").ok();
    let adapter = pollster::block_on(adapter::discover(wanted.as_deref())).expect("this test needs an adapter");
    let mut runner = paged_attention::Runner::new(&adapter).unwrap();
    let (corpus, args) = (corpus(), flags().remove(0));
    let seed = environment("FUZZ_SEED").unwrap_or_else(rand::random);
    say(&format!("fuzz: FUZZ_SEED={seed}"));
    let (mut ran, mut largest, mut pipelines) = (0, (0.0_f64, String::new()), HashSet::new());
    for number in environment("FUZZ_INPUT").unwrap_or(0).. {
        let _input = Input { seed, number };
        let rng = &mut stream(seed, number);
        let file = pick(rng, &corpus);
        let bytes = mutated(rng, file, false);
        let Some((case, options)) = accepted(&bytes, &args) else { continue };
        let facts = AdapterFacts::new(runner.adapter_info(), runner.device());
        let variants = Variants::candidates(&facts, case.geometry())[0];
        let Ok(_) = options.plan(&case, variants) else { continue };
        let config = options.kernels(&case, variants);
        let texts = KernelId::ALL.map(|kernel| kernel.wgsl(&config).unwrap());
        let new = texts.iter().filter(|text| !pipelines.contains(*text)).count();
        if pipelines.len() + new > PIPELINES_MAX {
            continue;
        }
        pipelines.extend(texts);
        let options = RunOptions { variants: Some(variants), ..options };
        let output = runner.run(&case, &options).unwrap_or_else(|error| panic!("{error}"));
        let judged = attend::judge(&case, &output).unwrap_or_else(|error| panic!("{error}"));
        assert!(judged.report.passed(), "{}", judged.report);
        if judged.report.max_bound_ratio > largest.0 {
            let worst = judged.report.worst.map(|worst| worst.to_string()).unwrap_or_default();
            largest = (judged.report.max_bound_ratio, format!("FUZZ_INPUT={number}: {worst}"));
        }
        ran += 1;
        if ran == count || environment("FUZZ_INPUT").is_some() {
            break;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    say(&format!("fuzz: {ran} accepted inputs run over {} pipelines in {seconds:.1} s", pipelines.len()));
    say(&format!("fuzz: largest measured/bound {:.4}, {}", largest.0, largest.1));
}

#[test]
fn accepted_mutants_are_computed_right() {
    on_the_adapter(40);
}

#[test]
#[ignore = "2,000 runs: `ci/lanes fuzz`"]
fn two_thousand_accepted_mutants_are_computed_right() {
    on_the_adapter(2_000);
}
