//! `tune`, `--tuning` and `--variants`: what is refused without an adapter, and what is chosen and said with one.

use std::path::Path;

use serde_json::Value;

use crate::gpu::{run, skipped};
use crate::support::{File, Run, folder_with, names_in, with_adapter, with_env, without_adapter};

/// A table for an adapter that nobody has, with the shape of [`File::contiguous`].
const FOREIGN: &str = "\
paged-attention tuning 1
version 0.1.0
adapter Imaginary 9000
backend vulkan
driver imaginary 1.2.3
group=2 head_dim=8 v_head_dim=8 q=f32 kv=f32 out=f32
  prefill-uniform-r1k4l64 run_ms=1 compile_ms=1
  decode-workgroup run_ms=1 compile_ms=1
";

#[test]
fn refusals_touch_no_adapter() {
    let (folder, _) = folder_with(&File::contiguous().bytes());
    std::fs::write(folder.path().join("foreign.txt"), FOREIGN).unwrap();
    std::fs::write(folder.path().join("corrupt.txt"), FOREIGN.replace("r1k4l64", "r1k4l63s7")).unwrap();
    let before = names_in(folder.path());
    let attend = |flags: &[&'static str]| [&["attend", "case.safetensors"], flags].concat();
    let names = "prefill-uniform-r1k4l64+decode-workgroup";
    for (args, says) in [
        (vec!["tune", "--heads", "3/2"], &["3", "multiple", "2"][..]),
        (vec!["tune", "--heads", "8"], &["Q/KV"]),
        (vec!["tune", "--heads", "8/0"], &["kv_heads is 0"]),
        (vec!["tune", "--head-dim", "0"], &["head_dim is 0", "1 to 576"]),
        (vec!["tune", "--head-dim", "64/513"], &["v_head_dim is 513"]),
        (vec!["tune", "--head-dim", "x"], &["`x` is no whole number"]),
        (vec!["tune", "--dtype", "f8"], &["f32, f16, bf16"]),
        (vec!["tune", "--out-dtype", "bf16"], &["f32, f16"]),
        (vec!["tune", "--budget", "-1"], &["0 to 3600"]),
        (vec!["tune", "--budget", "nan"], &["0 to 3600"]),
        (vec!["tune", "--out", "."], &["--out .", "folder"]),
        (vec!["tune", "--out", "none/there.txt"], &["none/there.txt", "no file can be written"]),
        (attend(&["--tuning", "none.txt"]), &["--tuning none.txt"]),
        (attend(&["--tuning", "case.safetensors"]), &["--tuning case.safetensors"]),
        (attend(&["--tuning", "corrupt.txt"]), &["line 7", "r1k4l63s7", "keys per split"]),
        (vec!["doctor", "--tuning", "corrupt.txt"], &["line 7", "r1k4l63s7"]),
        (attend(&["--variants", "best"]), &["\"best\"", "chosen, quick, base"]),
        (attend(&["--variants", "prefill-uniform-r0k4l64+decode-workgroup"]), &["r0k4l64", "rows per lane"]),
        (attend(&["--variants", names, "--tuning", "foreign.txt"]), &[names, "nothing to choose"]),
        (attend(&["--variants", "quick", "--tuning", "foreign.txt"]), &["quick", "nothing to choose"]),
    ] {
        let run = without_adapter(folder.path(), &args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args:?}: {run:?}");
        assert!(says.iter().all(|part| run.stderr.contains(part)), "{args:?}: {run:?}");
        assert_eq!(names_in(folder.path()), before, "{args:?}");
    }
    for args in [vec!["tune"], attend(&["--tuning", "foreign.txt"]), attend(&["--variants", names])] {
        let run = without_adapter(folder.path(), &args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(3), ""), "{args:?}: {run:?}");
        assert!(run.stderr.contains("WGPU_BACKEND=\"noop\""), "{args:?}: {run:?}");
    }
}

/// Kernels of a report, without those that have no variants.
fn kernels(report: &Value) -> Vec<&str> {
    let names = report["kernel"].as_array().unwrap().iter().map(|kernel| kernel["name"].as_str().unwrap());
    names.filter(|name| name.starts_with("prefill-") || name.starts_with("decode-")).collect()
}

fn attend(folder: &Path, flags: &[&str]) -> Run {
    let run = run(folder, &[&["attend", "case.safetensors", "--json"], flags].concat());
    assert_eq!(run.code, Some(0), "{run:?}");
    run
}

#[test]
fn a_table_is_made_and_used() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::contiguous().bytes());
    let tune = ["tune", "--heads", "4/2", "--head-dim", "8", "--budget", "2", "--out", "table.txt"];
    let made = run(folder.path(), &tune);
    assert_eq!(made.code, Some(0), "{made:?}");
    let text = std::fs::read_to_string(folder.path().join("table.txt")).unwrap();
    assert_eq!(text, made.stdout);
    let shape = "group=2 head_dim=8 v_head_dim=8 q=f32 kv=f32 out=f32";
    assert!(text.starts_with("paged-attention tuning 1\n") && text.contains(&format!("\n{shape}\n")), "{text}");

    // The table's choice may be the rule's. Whatever is first in it is used.
    let untuned = attend(folder.path(), &[]).json();
    assert_eq!((&untuned["choice"]["by"], &untuned["choice"]["stepped_down"]), (&"rule".into(), &Value::Array(vec![])));
    let mut lines: Vec<&str> = text.lines().collect();
    let is_decode = |line: &&str| line.trim().starts_with("decode-");
    let (first, last) = (lines.iter().position(is_decode).unwrap(), lines.iter().rposition(is_decode).unwrap());
    lines.swap(first, last);
    let wanted = lines[first].trim().split(' ').next().unwrap();
    std::fs::write(folder.path().join("table.txt"), lines.join("\n")).unwrap();
    let tuned = attend(folder.path(), &["--tuning", "table.txt"]).json();
    assert_eq!((&tuned["choice"]["by"], &tuned["choice"]["decode"]), (&"tuning".into(), &wanted.into()), "{tuned}");
    assert_eq!(tuned["choice"]["rule"]["prefill"], untuned["choice"]["prefill"]);
    assert_eq!(tuned["choice"]["rule"]["decode"], untuned["choice"]["decode"]);
    assert_eq!(kernels(&tuned), [wanted], "{tuned}");
    let table = run(folder.path(), &["attend", "case.safetensors", "--tuning", "table.txt"]);
    assert!(table.stdout.contains("choice    by the tuning table"), "{table:?}");
    if kernels(&untuned) != [wanted] {
        assert!(table.stdout.contains(&format!("+{}; compiled in", kernels(&untuned)[0])), "{table:?}");
    }

    // Another shape is not in the table.
    let other =
        run(folder.path(), &["attend", "case.safetensors", "--tuning", "table.txt", "--out-dtype", "f16", "--json"]);
    assert_eq!(other.json()["choice"]["by"], "rule-untuned", "{other:?}");

    let doctor = run(folder.path(), &["doctor", "--json", "--adapter", "0", "--tuning", "table.txt"]);
    let tuning = &doctor.json()["adapters"][0]["tuning"];
    assert!(tuning["refused"].is_null(), "{doctor:?}");
    let entry = &tuning["entries"][0];
    assert_eq!((&entry["shape"], &entry["error"]), (&shape.into(), &Value::Null), "{entry}");
    assert_eq!((&entry["chosen"]["by"], &entry["chosen"]["decode"]), (&"tuning".into(), &wanted.into()), "{entry}");
    assert_eq!(entry["chosen"]["rule"], tuned["choice"]["rule"]);
    assert!(entry["chosen"]["compile"]["decode_ms"].as_f64() > Some(0.0), "{entry}");
}

#[test]
fn the_report_of_tune() {
    if skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let args =
        ["tune", "--json", "--budget", "0", "--heads", "2/1", "--heads", "6/3", "--head-dim", "8/16", "--dtype", "f16"];
    let run = run(folder.path(), &args);
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    // 2/1 and 6/3 are one shape.
    let [shape] = &report["shapes"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!(shape["shape"], "group=2 head_dim=8 v_head_dim=16 q=f16 kv=f16 out=f32");
    let timed = shape["timed"].as_array().unwrap();
    for (kernel, chosen) in [("prefill-", &shape["prefill"]), ("decode-", &shape["decode"])] {
        let times: Vec<_> = timed.iter().filter(|t| t["variant"].as_str().unwrap().starts_with(kernel)).collect();
        assert_eq!(times[0]["variant"], *chosen, "{shape}");
        assert!(times.iter().all(|t| t["run_ms"].as_f64() > Some(0.0) && t["compile_ms"].as_f64() > Some(0.0)));
    }
    assert!(shape["rule"]["prefill"].as_str().unwrap().starts_with("prefill-"));
    let left_out = shape["left_out"].as_array().unwrap();
    assert!(left_out.iter().any(|left_out| left_out["reason"] == "no time was left"), "{shape}");
    let table = report["table"].as_str().unwrap();
    for left_out in left_out {
        assert!(table.contains(&format!("#   {} left out: ", left_out["variant"].as_str().unwrap())), "{table}");
    }
    // It is a table that can be used as it is.
    std::fs::write(folder.path().join("table.txt"), table).unwrap();
    std::fs::write(folder.path().join("case.safetensors"), File::contiguous().bytes()).unwrap();
    assert_eq!(attend(folder.path(), &["--tuning", "table.txt"]).json()["choice"]["by"], "rule-untuned");
}

#[test]
fn a_table_of_another_adapter_is_refused() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::contiguous().bytes());
    std::fs::write(folder.path().join("foreign.txt"), FOREIGN).unwrap();
    let refused = with_adapter(
        folder.path(),
        &["attend", "case.safetensors", "--tuning", "foreign.txt", "--out", "out.safetensors"],
    );
    assert_eq!((refused.code, refused.stdout.as_str()), (Some(2), ""), "{refused:?}");
    let own = attend(folder.path(), &[]).json();
    for part in ["foreign.txt", "Imaginary 9000 (vulkan, imaginary 1.2.3)", own["adapter"].as_str().unwrap()] {
        assert!(refused.stderr.contains(part), "{part}: {refused:?}");
    }
    assert_eq!(names_in(folder.path()), ["case.safetensors", "foreign.txt"]);
    // The doctor says so, and goes by the rule.
    let doctor = run(folder.path(), &["doctor", "--json", "--adapter", "0", "--tuning", "foreign.txt"]);
    assert_eq!(doctor.code, Some(0), "{doctor:?}");
    let adapter = &doctor.json()["adapters"][0];
    assert!(adapter["tuning"]["refused"].as_str().unwrap().contains("Imaginary 9000"), "{adapter}");
    assert_eq!(adapter["tuning"]["entries"], Value::Array(vec![]));
    assert!(adapter["kernels"].as_array().unwrap().iter().all(|kernel| kernel["chosen"]["by"] == "rule"), "{adapter}");
}

#[test]
fn named_and_base_variants() {
    if skipped() {
        return;
    }
    let (folder, _) = folder_with(&File::contiguous().bytes());
    let names = "prefill-uniform-r2k4l5s8a+decode-workgroup";
    let named = attend(folder.path(), &["--variants", names]).json();
    assert_eq!((kernels(&named), &named["choice"]), (vec!["decode-workgroup"], &Value::Null));
    // Forty rows prefill, over keys in splits of 9.
    let prompt = File::default().f32("q", &[40, 2, 8]).f32("k", &[50, 1, 8]).f32("v", &[50, 1, 8]);
    std::fs::write(folder.path().join("case.safetensors"), prompt.bytes()).unwrap();
    let named = attend(folder.path(), &["--variants", names]).json();
    assert_eq!(kernels(&named), ["prefill-uniform-r2k4l5s8a"]);
    // Subgroups of a size that the adapter has not are refused before anything runs.
    let features = &run(folder.path(), &["doctor", "--json", "--adapter", "0"]).json()["adapters"][0]["features"];
    let ends = ["subgroup_min_size", "subgroup_max_size"].map(|end| features[end].as_u64().unwrap());
    let has = |size: &u64| features["subgroups"] == true && (ends[0]..=ends[1]).contains(size);
    if let Some(size) = [4, 8, 16, 32, 64].into_iter().find(|size| !has(size)) {
        let decode = format!("decode-exchange{size}");
        let names = format!("prefill-uniform-r1k4l64+{decode}");
        let refused = run(folder.path(), &["attend", "case.safetensors", "--json", "--variants", &names]);
        assert_eq!((refused.code, refused.stdout.as_str()), (Some(2), ""), "{refused:?}");
        let needs = format!("--variants cannot be used: {decode} needs subgroups of {size}");
        assert!(refused.stderr.contains(&needs), "{refused:?}");
    }
    let base = attend(folder.path(), &["--variants", "base"]).json();
    assert!(kernels(&base)[0].starts_with("prefill-uniform-"), "{base}");
    assert_eq!(base["choice"], Value::Null);
    let doctor = run(folder.path(), &["doctor", "--json", "--adapter", "0", "--variants", "base"]);
    let adapter = &doctor.json()["adapters"][0];
    assert_eq!((doctor.code, &adapter["passed"]), (Some(0), &true.into()), "{adapter}");
    assert!(adapter["kernels"].as_array().unwrap().iter().all(|kernel| kernel["chosen"].is_null()), "{adapter}");
}

/// Without a driver's cache of compiled shaders: the variants that are quick to compile are.
#[test]
fn quick_variants_compile_in_less_time() {
    if skipped() {
        return;
    }
    let file = File::default().f32("q", &[40, 2, 64]).f32("k", &[50, 1, 64]).f32("v", &[50, 1, 64]);
    let (folder, _) = folder_with(&file.bytes());
    let attend = |flags: &[&str]| {
        let args = [&["attend", "case.safetensors", "--json"], flags].concat();
        let run = with_env(folder.path(), &args, &[("MESA_SHADER_CACHE_DISABLE", "true")]);
        assert_eq!(run.code, Some(0), "{run:?}");
        run.json()
    };
    let mut ratios = Vec::new();
    // Other tests keep the machine busy: up to three tries.
    for _ in 0..3 {
        let (rule, quick) = (attend(&[]), attend(&["--variants", "quick"]));
        let [rule, quick] = [&rule["choice"], &quick["choice"]];
        assert_eq!((&rule["by"], &quick["by"]), (&"rule".into(), &"quick".into()));
        assert_eq!((&quick["rule"]["prefill"], &quick["rule"]["decode"]), (&rule["prefill"], &rule["decode"]));
        assert_ne!(quick["prefill"], rule["prefill"]);
        let compile = &quick["compile"];
        let sum: f64 =
            ["prefill_ms", "decode_ms", "merge_ms", "append_ms"].map(|key| compile[key].as_f64().unwrap()).iter().sum();
        assert!((sum - quick["compile_ms"].as_f64().unwrap()).abs() < 1e-6, "{quick}");
        let ratio = quick["compile_ms"].as_f64().unwrap() / rule["compile_ms"].as_f64().unwrap();
        ratios.push(ratio);
        // Other drivers have other caches.
        if ratio < 0.8 || !attend(&[])["driver"].as_str().unwrap().contains("llvmpipe") {
            return;
        }
    }
    panic!("compile time of quick over the rule's: {ratios:?}");
}
