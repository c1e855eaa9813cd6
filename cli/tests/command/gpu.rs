//! Runs on an adapter. They fail where there is none; PAGED_ATTENTION_SKIP_GPU=1 is for machines without.

use std::path::{Path, PathBuf};

use half::f16;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

#[cfg(target_os = "linux")]
use crate::support::in_shell;
use crate::support::{File, Run, folder_with, names_in, with_adapter};

/// Whether the test is to be left out, which is said aloud.
pub fn skipped() -> bool {
    let skip = std::env::var_os("PAGED_ATTENTION_SKIP_GPU").is_some_and(|value| value == "1");
    if skip {
        println!("SKIPPED: PAGED_ATTENTION_SKIP_GPU=1 is set");
    }
    skip
}

pub fn run(folder: &Path, args: &[&str]) -> Run {
    let run = with_adapter(folder, args);
    assert_ne!(
        run.code,
        Some(3),
        "these tests need an adapter: install mesa-vulkan-drivers, or set PAGED_ATTENTION_SKIP_GPU=1 to do without\n{run:?}"
    );
    run
}

fn fixture() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/smollm2-135m-layer20.safetensors");
    std::fs::read(path).unwrap()
}

/// `out` and `lse` of a result: type, shape, bytes.
fn tensors(path: PathBuf) -> [(Dtype, Vec<usize>, Vec<u8>); 2] {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), 2);
    ["out", "lse"].map(|name| {
        let tensor = file.tensor(name).unwrap();
        (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec())
    })
}

fn check_fields(report: &Value) {
    for key in ["adapter", "backend", "driver", "max_abs_error", "max_bound_ratio", "nmse", "gpu_ms", "wall_ms"] {
        assert!(report.get(key).is_some(), "no `{key}`: {report}");
    }
    assert!(report["backend"].is_string() && report["wall_ms"].is_f64());
    for kernel in report["kernel"].as_array().unwrap() {
        assert!(kernel["name"].is_string() && !kernel["reason"].as_str().unwrap().is_empty(), "{kernel}");
    }
}

#[test]
fn real_tensors() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&fixture());
    let run =
        run(folder.path(), &["attend", "case.safetensors", "--causal", "true", "--json", "--out", "out.safetensors"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    check_fields(&report);
    let ratio = report["max_bound_ratio"].as_f64().unwrap();
    assert!(ratio > 0.0 && ratio <= 1.0, "{report}");
    assert!(report["max_abs_error"].as_f64().unwrap() < 1e-4, "{report}");
    assert_eq!(report["shape"]["total_q"], 600);
    let [out, lse] = tensors(folder.path().join("out.safetensors"));
    assert_eq!((out.0, out.1), (Dtype::F32, vec![600, 9, 64]));
    assert_eq!((lse.0, lse.1), (Dtype::F32, vec![600, 9]));
}

#[test]
fn table_for_people() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::contiguous().bytes());
    let run = run(folder.path(), &["attend", "case.safetensors"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    for part in [
        "adapter",
        "kernels",
        "2 seqs, 3 rows x 4 heads on 10 keys x 2 heads, d 8",
        "measured/bound",
        "ms",
        "inside the bound",
    ] {
        assert!(run.stdout.contains(part), "{part:?} is not said: {run:?}");
    }
    assert_eq!(names_in(folder.path()), ["case.safetensors"]);
}

/// Where the pages lie, how large they are and in which order their rows does not show in the result, not even in the last bit.
#[test]
fn placement_does_not_change_a_bit() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::contiguous().bytes());
    let runs: [&[&str]; 5] = [
        &[],
        &["--layout", "slot", "--page-size", "4"],
        &["--page-size", "1"],
        &["--page-size", "4", "--shuffle-pages", "1"],
        &["--page-size", "3", "--shuffle-pages", "2"],
    ];
    let results: Vec<_> = runs
        .iter()
        .map(|flags| {
            let args = [&["attend", "case.safetensors", "--out", "out.safetensors"], *flags].concat();
            let run = run(folder.path(), &args);
            assert_eq!(run.code, Some(0), "{run:?}");
            tensors(folder.path().join("out.safetensors"))
        })
        .collect();
    assert!(results.iter().all(|result| *result == results[0]));
}

/// The tokens that both sequences have in the same pages are read once, with the same result but for rounding.
#[test]
fn shared_prefixes() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::paged().i32("page_ids", &[1, 0, 1, 0]).bytes());
    for (flags, merged) in [(&[][..], false), (&["--share-prefixes"], true), (&["--share-prefixes=6"], false)] {
        let args = [&["attend", "case.safetensors", "--json"], flags].concat();
        let run = run(folder.path(), &args);
        assert_eq!(run.code, Some(0), "{run:?}");
        let report: Value = serde_json::from_str(&run.stdout).unwrap();
        let kernels = report["kernel"].as_array().unwrap();
        assert_eq!(kernels.iter().any(|kernel| kernel["name"] == "merge"), merged, "{report}");
    }
}

/// The keys of [`File::contiguous`] in pages of 4, with NaN in every slot that no sequence owns.
fn paged_twin() -> File {
    let (header, data) = File::contiguous().parts();
    let rows = |name: &str| -> Vec<[f32; 16]> {
        let offsets = [0, 1].map(|end| header[name]["data_offsets"][end].as_u64().unwrap() as usize);
        let values: Vec<f32> =
            data[offsets[0]..offsets[1]].chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        values.chunks(16).map(|row| row.try_into().unwrap()).collect()
    };
    // Sequence 0: 4 keys in page 2. Sequence 1: 6 keys in pages 4 and 1.
    let place = |key: usize| if key < 4 { (2, key) } else { ([4, 1][(key - 4) / 4], (key - 4) % 4) };
    let pages = |name: &str| {
        let mut pool = vec![f32::NAN; 5 * 4 * 16];
        for (key, row) in rows(name).iter().enumerate() {
            let (page, slot) = place(key);
            pool[(page * 4 + slot) * 16..][..16].copy_from_slice(row);
        }
        pool
    };
    File::default()
        .f32("q", &[3, 4, 8])
        .i32("q_indptr", &[0, 1, 3])
        .f32_values("k_pages", &[5, 4, 2, 8], &pages("k"))
        .f32_values("v_pages", &[5, 4, 2, 8], &pages("v"))
        .i32("page_indptr", &[0, 1, 3])
        .i32("page_ids", &[2, 4, 1])
        .i32("kv_len", &[4, 6])
}

#[test]
fn paged_and_contiguous_give_the_same_bits() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::contiguous().bytes());
    std::fs::write(folder.path().join("paged.safetensors"), paged_twin().bytes()).unwrap();
    let run = run(folder.path(), &["attend", ".", "--causal", "true", "--out", "results", "--json"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    for key in
        ["adapter", "backend", "driver", "kernel", "max_abs_error", "max_bound_ratio", "nmse", "gpu_ms", "wall_ms"]
    {
        assert!(report.get(key).is_some(), "no `{key}`: {report}");
    }
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 2);
    cases.iter().for_each(check_fields);
    assert_eq!(names_in(&folder.path().join("results")), ["case.safetensors", "paged.safetensors"]);
    let result = |name| tensors(folder.path().join("results").join(name));
    assert_eq!(result("case.safetensors"), result("paged.safetensors"));
}

/// Everything that changes scores, in one file; what the report says of it, and that flags win.
#[test]
fn options_of_the_scores() {
    if skipped() {
        return;
    }
    let mask: Vec<u8> = (0..16).map(|entry| u8::from(entry % 3 > 0)).collect();
    let file = File::contiguous()
        .f32("alibi_slopes", &[4])
        .f32("sinks", &[4])
        .raw("mask", "U8", &[16], mask)
        .f32_with("bias", &[4, 16], 3, f32::NEG_INFINITY)
        .meta("window_left", "4")
        .meta("softcap", "2.5");
    let (folder, _) = folder_with(&file.bytes());
    let first = run(folder.path(), &["attend", "case.safetensors", "--json"]);
    assert_eq!(first.code, Some(0), "{first:?}");
    let shape = &first.json()["shape"];
    assert_eq!((&shape["window_left"], &shape["window_right"]), (&4.into(), &Value::Null), "{shape}");
    assert_eq!(shape["softcap"], 2.5, "{shape}");
    assert_eq!(shape["extras"], serde_json::json!(["alibi_slopes", "sinks", "mask", "bias"]), "{shape}");
    let args = ["attend", "case.safetensors", "--window-left=-1", "--window-right", "1", "--softcap", "7"];
    let second = run(folder.path(), &args);
    assert_eq!(second.code, Some(0), "{second:?}");
    let says = "window all left and 1 right, cap 7, alibi_slopes, sinks, mask, bias";
    assert!(second.stdout.contains(says), "{second:?}");
    // Rows that see their own position alone need no page before it.
    let file = File::paged().u32("page_ids", &[u32::MAX, 0, u32::MAX, 2]).meta("window_left", "0");
    let (folder, _) = folder_with(&file.meta("causal", "true").bytes());
    let third = run(folder.path(), &["attend", "case.safetensors"]);
    assert_eq!(third.code, Some(0), "{third:?}");
}

/// A triangle as a mask, as a bias, as a window and as a flag: the same result, to rounding.
#[test]
fn ways_to_be_causal_agree() {
    if skipped() {
        return;
    }
    // Rows at 3 of 4 keys, and at 4 and 5 of 6.
    let sees = |key: usize| key != 4 + 5;
    let triangle: Vec<u8> = (0..16).map(|key| u8::from(sees(key))).collect();
    let bias: Vec<f32> = (0..16).map(|key| if sees(key) { 0.0 } else { f32::NEG_INFINITY }).collect();
    let flat = File::contiguous;
    let (folder, _) = folder_with(&flat().meta("causal", "true").bytes());
    for (name, file) in [
        ("mask", flat().raw("mask", "BOOL", &[16], triangle)),
        ("bias", flat().f32_values("bias", &[1, 16], &bias)),
        ("window", flat().meta("window_right", "0")),
        ("all", flat()),
    ] {
        std::fs::write(folder.path().join(format!("{name}.safetensors")), file.bytes()).unwrap();
    }
    let run = run(folder.path(), &["attend", ".", "--out", "results"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let result = |name: &str| -> Vec<f32> {
        let [out, lse] = tensors(folder.path().join("results").join(format!("{name}.safetensors")));
        let bytes = [out.2, lse.2].concat();
        bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let near = |name: &str| result(name).iter().zip(result("case")).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(near("mask") && near("bias") && near("window"));
    assert!(!near("all"));
}

/// Pages in another type than the file's hold what a file in that type holds.
#[test]
fn pages_of_another_type() {
    if skipped() {
        return;
    }
    let (header, data) = File::contiguous().parts();
    let rounded = |name: &str| -> Vec<u8> {
        let [start, end] = [0, 1].map(|end| header[name]["data_offsets"][end].as_u64().unwrap() as usize);
        let values = data[start..end].chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect()
    };
    let halves =
        File::contiguous().raw("k", "F16", &[10, 2, 8], rounded("k")).raw("v", "F16", &[10, 2, 8], rounded("v"));
    let (folder, _) = folder_with(&File::contiguous().bytes());
    std::fs::write(folder.path().join("halves.safetensors"), halves.bytes()).unwrap();
    for (case, flags) in [("case", &["--kv-dtype", "f16"][..]), ("halves", &[])] {
        let (file, out) = (format!("{case}.safetensors"), format!("{case}-out.safetensors"));
        let run = run(folder.path(), &[&["attend", &file, "--out", &out, "--json"], flags].concat());
        assert_eq!(run.code, Some(0), "{run:?}");
        assert_eq!(run.json()["shape"]["kv_dtype"], "f16");
    }
    let result = |case: &str| tensors(folder.path().join(format!("{case}-out.safetensors")));
    assert_eq!(result("case"), result("halves"));
}

/// Real tensors, and keys with a channel far out: both judgements are inside their bounds, and the memory is said.
#[test]
fn pages_of_eight_bits() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&fixture());
    let keys = (0..10 * 2 * 8).map(|i| (i as f32).sin() * if i % 8 == 3 { 40.0 } else { 1.0 });
    let outliers = File::contiguous().raw("k", "F32", &[10, 2, 8], keys.flat_map(f32::to_le_bytes).collect());
    std::fs::write(folder.path().join("outliers.safetensors"), outliers.bytes()).unwrap();
    // Rows of 64 elements, 3 KV heads; rows of 8 elements, 2 KV heads, each in 16 bytes. int8 adds a scale to each row.
    for (case, flag, bytes, f16) in [
        ("case", "int8", 2 * 3 * (64 + 4), 768),
        ("case", "fp8", 2 * 3 * 64, 768),
        ("case", "int8/f16", 3 * (64 + 4 + 128), 768),
        ("outliers", "int8", 2 * 2 * (16 + 4), 64),
        ("outliers", "bf16/int8", 2 * (16 + 16 + 4), 64),
    ] {
        let file = format!("{case}.safetensors");
        let args = ["attend", &file, "--causal", "--kv-dtype", flag, "--layout", "slot"];
        let json = run(folder.path(), &[&args[..], &["--json"]].concat());
        assert_eq!(json.code, Some(0), "{json:?}");
        let report = json.json();
        assert_eq!(report["shape"]["kv_dtype"], flag);
        assert_eq!(report["shape"]["kv_bytes_per_token"], f64::from(bytes));
        assert_eq!(report["shape"]["kv_bytes_per_token_f16"], f64::from(f16));
        let ratio = |value: &Value| value.as_f64().unwrap();
        assert!((0.0..=1.0).contains(&ratio(&report["max_bound_ratio"])), "{report}");
        for part in ["k", "v", "out", "lse"] {
            let ratio = ratio(&report["storage"][format!("max_bound_ratio_{part}")]);
            assert!((0.0..=1.0).contains(&ratio), "{part}: {report}");
        }
        assert!(ratio(&report["storage"]["max_abs_error"]) > ratio(&report["max_abs_error"]), "{report}");
        let table = run(folder.path(), &args);
        assert_eq!(table.code, Some(0), "{table:?}");
        let memory = format!("{bytes} bytes per token in the pages; {f16} in f16");
        assert!(table.stdout.contains(&memory) && table.stdout.contains("storage"), "{table:?}");
    }
}

#[test]
fn half_precision_output() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::contiguous().bytes());
    let at = |name: &str| folder.path().join(name);
    let full = run(folder.path(), &["attend", "case.safetensors", "--out", "full.safetensors"]);
    let half = run(folder.path(), &["attend", "case.safetensors", "--out", "half.safetensors", "--out-dtype", "f16"]);
    assert_eq!((full.code, half.code), (Some(0), Some(0)), "{full:?} {half:?}");
    let [full_out, full_lse] = tensors(at("full.safetensors"));
    let [half_out, half_lse] = tensors(at("half.safetensors"));
    assert_eq!(full_lse, half_lse);
    assert_eq!((half_out.0, &half_out.1), (Dtype::F16, &full_out.1));
    for (full, half) in full_out.2.chunks(4).zip(half_out.2.chunks(2)) {
        let full = f32::from_le_bytes(full.try_into().unwrap());
        let half = f16::from_le_bytes(half.try_into().unwrap()).to_f32();
        assert!((full - half).abs() <= full.abs() / 1024.0 + 1e-7, "{full} became {half}");
    }
}

#[test]
fn rows_without_keys_and_batches_without_rows() {
    if skipped() {
        return;
    }
    let no_keys = File::contiguous().f32("k", &[0, 2, 8]).f32("v", &[0, 2, 8]).i32("kv_indptr", &[0, 0, 0]);
    let (folder, _) = folder_with(&no_keys.bytes());
    let args = ["attend", "case.safetensors", "--out", "out.safetensors", "--json"];
    let result = run(folder.path(), &args);
    assert_eq!(result.code, Some(0), "{result:?}");
    let [out, lse] = tensors(folder.path().join("out.safetensors"));
    assert!(out.2.iter().all(|byte| *byte == 0), "exactly +0");
    assert!(lse.2.chunks(4).all(|bytes| bytes == f32::NEG_INFINITY.to_le_bytes()));

    let no_rows = File::contiguous().f32("q", &[0, 4, 8]).i32("q_indptr", &[0, 0, 0]);
    let no_seqs = File::contiguous()
        .f32("q", &[0, 4, 8])
        .f32("k", &[0, 2, 8])
        .f32("v", &[0, 2, 8])
        .i32("q_indptr", &[0])
        .i32("kv_indptr", &[0]);
    for file in [no_rows, no_seqs] {
        let (folder, _) = folder_with(&file.bytes());
        let result = run(folder.path(), &args);
        assert_eq!(result.code, Some(0), "{result:?}");
        assert_eq!(result.json()["max_bound_ratio"].as_f64(), Some(0.0));
        let [out, lse] = tensors(folder.path().join("out.safetensors"));
        assert_eq!((out.1, lse.1), (vec![0, 4, 8], vec![0, 4]));
    }
}

/// 65,536 query heads on one KV head, without a row: nothing is computed, so nothing is tested. With a row, the test of
/// the kernels is in proportion.
#[test]
fn large_groups() {
    if skipped() {
        return;
    }
    let no_rows = File::default().f16_zeros("q", &[0, 65_536, 8]).f16_zeros("k", &[3, 1, 8]).f16_zeros("v", &[3, 1, 8]);
    let rows = File::default().f32("q", &[3, 1024, 8]).f32("k", &[300, 1, 8]).f32("v", &[300, 1, 8]);
    for file in [no_rows, rows] {
        let (folder, _) = folder_with(&file.bytes());
        let run = run(folder.path(), &["attend", "case.safetensors"]);
        assert_eq!(run.code, Some(0), "{run:?}");
    }
}

/// Sequences without query rows may share as many pages as they like.
#[test]
fn endless_sequences_without_rows() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::on_one_page(&[0, 0], 40_000, 2_600_000_000).bytes());
    let run = run(folder.path(), &["attend", "case.safetensors"]);
    assert_eq!(run.code, Some(0), "{run:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_report_that_is_lost_is_a_failure() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::contiguous().bytes());
    for flags in ["--json", "", ". --json"] {
        let run = in_shell(folder.path(), &format!("exec \"$0\" attend case.safetensors {flags} > /dev/full"));
        assert_eq!(run.code, Some(2), "{flags}: {run:?}");
        assert!(run.stderr.contains("error: the report cannot be written to standard output"), "{run:?}");
    }
    let run = in_shell(folder.path(), "exec \"$0\" doctor > /dev/full");
    assert_eq!(run.code, Some(2), "{run:?}");
    // A reader that leaves early is none.
    let run = in_shell(folder.path(), "\"$0\" attend case.safetensors | true");
    assert!(!run.stderr.contains("the report cannot be written"), "{run:?}");
}

/// One of each, in words.
#[test]
fn counts_of_one() {
    if skipped() {
        return;
    }
    let file = File::default().f32("q", &[1, 1, 8]).f32("k", &[1, 1, 8]).f32("v", &[1, 1, 8]);
    let (folder, _) = folder_with(&file.bytes());
    let run = run(folder.path(), &["attend", "."]);
    assert_eq!(run.code, Some(0), "{run:?}");
    for part in ["1 seq, 1 row x 1 head on 1 key x 1 head", "1 case: 1 inside"] {
        assert!(run.stdout.contains(part), "{part}: {run:?}");
    }
}

/// A folder with a broken case still runs the others, writes their results and none for the broken one.
#[test]
fn one_bad_case_of_several() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::contiguous().bytes());
    std::fs::write(folder.path().join("bad.safetensors"), File::contiguous().without("v").bytes()).unwrap();
    let run = run(folder.path(), &["attend", ".", "--out", "results", "--json"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("bad.safetensors: `v` is missing"), "{run:?}");
    let report = run.json();
    assert_eq!((report["passed"].as_u64(), report["unusable"].as_u64()), (Some(1), Some(1)));
    assert_eq!(names_in(&folder.path().join("results")), ["case.safetensors"]);
}

#[test]
fn adapters_by_name() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::contiguous().bytes());
    let report = run(folder.path(), &["attend", "case.safetensors", "--json", "--adapter", "0"]);
    assert_eq!(report.code, Some(0), "{report:?}");
    let name = report.json()["adapter"].as_str().unwrap().to_uppercase();
    let again = run(folder.path(), &["attend", "case.safetensors", "--json", "--adapter", &name]);
    assert_eq!(again.json()["adapter"], report.json()["adapter"]);
    let none = with_adapter(folder.path(), &["attend", "case.safetensors", "--adapter", "no such card"]);
    assert_eq!(none.code, Some(3), "{none:?}");
    assert!(none.stderr.contains("no such card") && none.stderr.contains("0: "), "{none:?}");
}

#[test]
fn doctor() {
    if skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run = run(folder.path(), &["doctor", "--json"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    let chosen = &report["adapters"][0];
    assert_eq!(chosen["chosen"], true, "{chosen}");
    assert!(chosen["limits"]["storage_binding_bytes"].as_u64() > Some(0), "{chosen}");
    let kernels: Vec<_> = chosen["kernels"].as_array().unwrap().iter().map(|kernel| kernel["kernel"].clone()).collect();
    assert_eq!(kernels, ["append", "prefill", "decode", "merge"]);
    for kernel in chosen["kernels"].as_array().unwrap() {
        let choice = &kernel["chosen"];
        assert!(choice["prefill"].as_str().unwrap().starts_with("prefill-"), "{kernel}");
        assert!(choice["decode"].as_str().unwrap().starts_with("decode-"), "{kernel}");
        assert!(choice["compile_ms"].as_f64() > Some(0.0) && choice["stepped_down"].is_array(), "{kernel}");
    }
    for line in ["adapter 0: compiling and testing append", "adapter 0: compiling and testing merge"] {
        assert!(run.stderr.contains(line), "{run:?}");
    }
    for other in report["adapters"].as_array().unwrap().iter().skip(1) {
        let second_software = other["backend"] == "gl" && other["kind"] == "software renderer";
        assert_eq!(other["skipped"].is_string(), second_software && chosen["kind"] == other["kind"], "{other}");
    }
    assert!(chosen["kernels"].as_array().unwrap().iter().all(|kernel| kernel["passed"] == true), "{chosen}");
}
