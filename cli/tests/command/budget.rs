//! `budget`: counted by the command, and counted again here; no adapter is touched.

use std::path::Path;

use serde_json::Value;

use crate::support::{Run, names_in, without_adapter};

/// 32 layers, 8 KV heads, d 128, 2 bytes, 4096 tokens.
const MODEL: [&str; 11] =
    ["budget", "--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--bytes", "2", "--tokens", "4096"];

fn budget(folder: &Path, args: &[&str]) -> Run {
    without_adapter(folder, &[&MODEL[..], args].concat())
}

fn json(folder: &Path, args: &[&str]) -> Value {
    let run = budget(folder, &[&["--json"], args].concat());
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{run:?}");
    run.json()
}

#[test]
fn a_common_model() {
    let folder = tempfile::tempdir().unwrap();
    let report = json(folder.path(), &[]);
    assert_eq!((&report["bytes_per_token"], &report["total_bytes"]), (&131_072.into(), &536_870_912.into()));
    assert_eq!(
        (&report["mean_tail_slots"], &report["tail_slots_bound"], &report["reserved_waste_slots"]),
        (&7.5.into(), &15.into(), &255.5.into())
    );
    // One request's tokens make the total, whatever the lengths and pages.
    let other = json(folder.path(), &["--lengths", "fixed:33", "--page-size", "100"]);
    assert_eq!(other["total_bytes"], report["total_bytes"]);
    assert_eq!(
        (&other["mean_tail_slots"], &other["tail_slots_bound"], &other["reserved_waste_slots"]),
        (&67.0.into(), &99.into(), &0.0.into())
    );
    let args = [&MODEL[..3], &["--kv-heads", "32"], &MODEL[5..], &["--json"]].concat();
    assert_eq!(without_adapter(folder.path(), &args).json()["total_bytes"], 2_u64 << 30);
    assert!(names_in(folder.path()).is_empty());
}

#[test]
fn the_table() {
    let folder = tempfile::tempdir().unwrap();
    let run = budget(folder.path(), &["--memory", "24GiB"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    for says in [
        "131072 bytes",
        "0.5 GiB",
        "7.5 slots",
        "15 at most",
        "255.5 slots",
        "24 GiB",
        "KV pages",
        "head-room",
        "missing for one more",
    ] {
        assert!(run.stdout.contains(says), "{says}: {run:?}");
    }
    // No more is said of memory than was asked.
    let run = budget(folder.path(), &[]);
    assert!(!run.stdout.contains("KV pages"), "{run:?}");
}

/// The worked example of docs/budget.md.
#[test]
fn six_requests_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("lengths.txt"), "7\r\n16\n\n 30\n45\n100\n250").unwrap();
    let report = json(folder.path(), &["--lengths", "file:lengths.txt"]);
    let counted = &report["counted"];
    for (key, value) in [
        ("lengths", 6),
        ("tokens", 448),
        ("pages", 30),
        ("tail_slots", 32),
        ("tail_slots_bound", 90),
        ("reserved_waste_slots", 1052),
    ] {
        assert_eq!(counted[key], value, "{key}: {report}");
    }
    assert_eq!(report["mean_tail_slots"], 32.0 / 6.0);
    let report = json(folder.path(), &["--lengths", "file:lengths.txt", "--reserve", "512"]);
    assert_eq!((&report["reserved_tokens"], &report["counted"]["reserved_waste_slots"]), (&512.into(), &2624.into()));
}

/// The example that docs/budget.md shows is what the command prints.
#[test]
fn the_example_of_the_documentation() {
    let folder = tempfile::tempdir().unwrap();
    let docs = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/budget.md")).unwrap();
    let example = docs.split("```").find_map(|block| block.strip_prefix("text\n$ paged-attention ")).unwrap();
    let (command, shown) = example.split_once("512\n").unwrap();
    let args: Vec<&str> = command.split_whitespace().filter(|word| *word != "\\").chain(["512"]).collect();
    let run = without_adapter(folder.path(), &args);
    assert_eq!((run.code, run.stdout.as_str()), (Some(0), shown), "{args:?}");
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no whole number: {value}"))
}

#[test]
fn what_fits() {
    let folder = tempfile::tempdir().unwrap();
    let stated = ["--weights", "16GB", "--communication", "1MiB", "--other", "3MiB", "--headroom", "1.5GiB"];
    let flags = [&["--memory", "24GiB", "--q-heads", "32", "--prefill-rows", "128"], &stated[..]].concat();
    let report = json(folder.path(), &flags);
    let (memory, parts) = (&report["memory"], &report["memory"]["parts"]);
    assert_eq!(memory["memory_bytes"], 24_u64 << 30);
    let names = ["weights", "activations", "workspace", "communication", "kv", "metadata", "other", "headroom"];
    for step in ["steady_decode", "prefill_peak", "needed"] {
        let sum: u64 = names.iter().map(|name| number(&parts[step][name])).sum();
        assert_eq!(sum, number(&parts[step]["total"]), "{step}: {report}");
        assert_eq!(parts[step]["weights"], 16_000_000_000_u64);
        assert_eq!(parts[step]["communication"], 1 << 20);
        assert_eq!(parts[step]["other"], 3 << 20);
        assert_eq!(parts[step]["headroom"], 3_u64 << 29);
    }
    for name in names {
        let larger = number(&parts["steady_decode"][name]).max(number(&parts["prefill_peak"][name]));
        assert_eq!(number(&parts["needed"][name]), larger, "{name}: {report}");
    }
    assert!(number(&parts["prefill_peak"]["activations"]) > number(&parts["steady_decode"]["activations"]));
    // Equation 1 with tails: 16.5 pages of 2 MiB for each request, and what is left is too little for one more.
    let (requests, free) = (number(&memory["requests"]), number(&memory["free_bytes"]));
    assert_eq!(parts["requests"], requests);
    assert_eq!((number(&parts["pages"]), number(&parts["page_bytes"])), ((33 * requests).div_ceil(2), 2 << 20));
    assert_eq!(number(&parts["needed"]["kv"]), number(&parts["pages"]) * (2 << 20));
    assert_eq!(number(&parts["needed"]["total"]) + free, 24 << 30);
    assert!(free < 17 * (2 << 20) + (1 << 20), "{report}");
    // About half as many with reservations: 512 tokens instead of 264.
    let reserved = number(&memory["requests_reserved"]);
    assert!(reserved * 512 <= requests * 264 && (reserved + 2) * 512 > requests * 264, "{report}");
    // More memory for exactly one more.
    let more = (number(&parts["needed"]["total"]) + 17 * (2 << 20) + (1 << 20)).to_string();
    let flags = [&["--memory", &more, "--q-heads", "32", "--prefill-rows", "128"], &stated[..]].concat();
    assert_eq!(number(&json(folder.path(), &flags)["memory"]["requests"]), requests + 1);
}

#[test]
fn nothing_fits() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--memory", "8GiB", "--weights", "8GiB"];
    let report = json(folder.path(), &flags);
    let memory = &report["memory"];
    assert_eq!((&memory["requests"], &memory["parts"]["requests"]), (&0.into(), &1.into()));
    let missing = number(&memory["parts"]["needed"]["total"]) - (8 << 30);
    assert_eq!(memory["free_bytes"].as_i64(), Some(-(missing as i64)));
    let run = budget(folder.path(), &flags);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stdout.contains("0 in pages") && run.stdout.contains("are missing for one more"), "{run:?}");
}

/// Rows of a CSV file under its head.
fn csv(folder: &Path, name: &str, head: &str) -> Vec<Vec<f64>> {
    let text = std::fs::read_to_string(folder.join(name)).unwrap();
    let (first, rows) = text.split_once('\n').unwrap();
    assert_eq!(first, head);
    rows.lines().map(|row| row.split(',').map(|cell| cell.parse().unwrap()).collect()).collect()
}

#[test]
fn the_figures() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().join("new/figures");
    let report = json(folder.path(), &["--figures", "new/figures", "--page-size", "48"]);
    let names = ["kv-gib.csv", "kv-gib.svg", "tail-waste.csv", "tail-waste.svg"];
    assert_eq!(names_in(&here), names);
    let mut written: Vec<&str> =
        report["figures"].as_array().unwrap().iter().map(|path| path.as_str().unwrap()).collect();
    written.sort_unstable();
    assert_eq!(written, names.map(|name| format!("new/figures/{name}")));

    let rows = csv(&here, "kv-gib.csv", "kv_heads,tokens,bytes,gib");
    for row in &rows {
        assert_eq!(row[2], 2.0 * 32.0 * row[0] * 128.0 * 2.0 * row[1]);
        assert_eq!(row[3] * f64::from(1 << 30), row[2]);
    }
    let at_4096 = |heads: f64| rows.iter().find(|row| row[0] == heads && row[1] == 4096.0).map(|row| row[3]);
    assert_eq!([2.0, 4.0, 8.0, 16.0, 32.0].map(at_4096), [0.125, 0.25, 0.5, 1.0, 2.0].map(Some));

    let head = "page_size,mean_tail_slots,expected_tail_slots,tail_slots_bound,reserved_waste_slots,\
                lengths,tail_slots,reserved_slots";
    let rows = csv(&here, "tail-waste.csv", head);
    let sizes: Vec<f64> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(sizes, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 48.0, 64.0, 128.0, 256.0, 512.0]);
    for row in &rows {
        let size = row[0] as u64;
        let slots: u64 = (1..=512_u64).map(|tokens| tokens.div_ceil(size) * size - tokens).sum();
        assert_eq!(
            row[1..],
            [slots as f64 / 512.0, (row[0] - 1.0) / 2.0, row[0] - 1.0, 255.5, 512.0, slots as f64, 130_816.0]
        );
    }
    for (name, says) in [
        ("kv-gib.svg", ["GiB", "tokens", "2 KV heads", "32 KV heads"]),
        ("tail-waste.svg", ["tokens per page", "reserved", "(B - 1) / 2", "uniform:1:512"]),
    ] {
        let svg = std::fs::read_to_string(here.join(name)).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        for text in says {
            assert!(svg.contains(text), "{name}: {text}");
        }
    }
}

/// Text in a figure that would be markup.
#[test]
fn a_name_with_markup() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a&b<c>"), "5\n").unwrap();
    json(folder.path(), &["--figures", ".", "--lengths", "file:a&b<c>"]);
    let svg = std::fs::read_to_string(folder.path().join("tail-waste.svg")).unwrap();
    assert!(svg.contains("file:a&amp;b&lt;c&gt;") && !svg.contains("a&b"), "{svg}");
}

#[test]
fn refusals() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    for (name, text) in [("empty", "\n \n"), ("zero", "3\n\n0\n"), ("word", "3\nfour\n"), ("large", "4294967296")] {
        std::fs::write(here.join(name), text).unwrap();
    }
    std::fs::create_dir_all(here.join("taken/tail-waste.csv")).unwrap();
    let before = names_in(here);
    let memory = ["--memory", "24GiB"];
    let mut failures = Vec::new();
    for (args, says) in [
        (vec!["--page-size", "0"], vec!["page"]),
        (vec!["--lengths", "uniform:0:5"], vec!["is 0", "at least 1"]),
        (vec!["--lengths", "uniform:5:4"], vec!["from 5 to 4"]),
        (vec!["--lengths", "fixed:0"], vec!["is 0"]),
        (vec!["--lengths", "geometric:0.5"], vec!["uniform:FIRST:LAST"]),
        (vec!["--lengths", "file:none"], vec!["file:none", "cannot be read"]),
        (vec!["--lengths", "file:."], vec!["a folder"]),
        (vec!["--lengths", "file:empty"], vec!["file:empty", "0 lengths"]),
        (vec!["--lengths", "file:zero"], vec!["line 3", "\"0\"", "from 1"]),
        (vec!["--lengths", "file:word"], vec!["line 2", "\"four\""]),
        (vec!["--lengths", "file:large"], vec!["line 1", "4294967295"]),
        (vec!["--reserve", "511"], vec!["511", "512"]),
        (vec!["--figures", "zero"], vec!["--figures zero", "a folder is needed"]),
        (vec!["--figures", "zero/deeper"], vec!["--figures zero/deeper"]),
        (vec!["--figures", ""], vec!["--figures"]),
        (vec!["--figures", "taken"], vec!["tail-waste.csv", "found a folder"]),
        (vec!["--weights", "1GiB"], vec!["--memory"]),
        (vec!["--memory", "24GIBB"], vec!["24GIBB", "24GiB"]),
        (vec!["--memory", "99EiB"], vec!["99EiB"]),
        (vec!["--memory", "-1"], vec!["--memory", "'-1'", "24GiB, 24GB or a number of bytes"]),
        ([&memory[..], &["--weights", "-5GB"]].concat(), vec!["--weights", "'-5GB'", "24GiB"]),
        ([&memory[..], &["--q-heads", "12"]].concat(), vec!["12", "8"]),
        ([&memory[..], &["--prefill-rows", "0"]].concat(), vec!["prefill-rows"]),
        ([&memory[..], &["--lengths", "uniform:1:99999999"]].concat(), vec!["99999999", "16777216"]),
        ([&memory[..], &["--activations-per-row", "16EB", "--figures", "new"]].concat(), vec!["activations", "passes"]),
    ] {
        let run = budget(here, &args);
        let said = run.stderr.matches("error:").count() == 1 && says.iter().all(|part| run.stderr.contains(part));
        if (run.code, run.stdout.as_str()) != (Some(2), "") || !said || names_in(here) != before {
            failures.push(format!("{args:?}: {run:?}"));
        }
    }
    // Other numbers of the model.
    for (flag, value, says) in [
        ("--layers", "0", "0"),
        ("--kv-heads", "x", "x"),
        ("--head-dim", "0", "0"),
        ("--bytes", "0", "0"),
        ("--tokens", "0", "0"),
        ("--tokens", "18446744073709551615", "passes 18446744073709551615"),
        ("--layers", "4294967296", "4294967296"),
    ] {
        let mut args = MODEL;
        let at = args.iter().position(|arg| *arg == flag).unwrap();
        args[at + 1] = value;
        let run = without_adapter(here, &args);
        if (run.code, run.stdout.as_str()) != (Some(2), "") || !run.stderr.contains(says) {
            failures.push(format!("{flag} {value}: {run:?}"));
        }
    }
    for (at, value, says) in [(8, "3", "--bytes is 3"), (6, "577", "577")] {
        let mut args = MODEL;
        args[at] = value;
        let run = without_adapter(here, &[&args[..], &memory].concat());
        if (run.code, run.stdout.as_str()) != (Some(2), "") || !run.stderr.contains(says) {
            failures.push(format!("{args:?}: {run:?}"));
        }
        // Equation 1 takes them.
        assert_eq!(without_adapter(here, &args).code, Some(0));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(names_in(&here.join("taken")), ["tail-waste.csv"]);
}
