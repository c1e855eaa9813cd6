//! `bench`: what it refuses without an adapter, and what it reports with one.

use crate::gpu::{run, skipped};
use crate::support::{names_in, without_adapter};

#[test]
fn refusals_touch_no_adapter() {
    let folder = tempfile::tempdir().unwrap();
    for (args, says) in [
        (vec!["--shape", "P9"], "P1, P2"),
        (vec!["--shape", "q=1,kv=8,heads=4/2"], "dim"),
        (vec!["--shape", "q=1,kv=8,heads=4/2,dim=12"], "multiple of 8"),
        (vec!["--dtype", "bf16"], "f16"),
        (vec!["--plot", "."], "folder"),
        (vec!["--plot", "none/there.svg"], "no folder none"),
        (vec!["--plot", "a.png"], "a.png: the plot is SVG; a name that ends in .svg is needed"),
        (vec!["--growth", "--plot", "a.svg.gz"], "a.svg.gz"),
        (vec!["--variants", "best"], "chosen, quick, base"),
        (vec!["--tuning", "none.txt"], "--tuning none.txt"),
        (vec!["--growth", "--plot", "none/there.svg"], "no folder none"),
        (vec!["--growth", "--shape", "P1"], "cannot be used with"),
        (vec!["--page-size", "0"], "--page-size"),
    ] {
        let run = without_adapter(folder.path(), &[vec!["bench"], args.clone()].concat());
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args:?}: {run:?}");
        assert!(run.stderr.contains(says), "{args:?}: {run:?}");
    }
    for growth in [&["bench", "--quick"][..], &["bench", "--quick", "--growth"]] {
        let run = without_adapter(folder.path(), growth);
        assert_eq!((run.code, run.stdout.as_str()), (Some(3), ""), "{run:?}");
    }
    assert!(names_in(folder.path()).is_empty());
}

#[test]
fn fields_of_the_report() {
    if skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (prefill, decode) = ("q=20,kv=24,heads=4/2,dim=16", "q=1,kv=300,heads=4/2,dim=16,seqs=2");
    let args = ["bench", "--quick", "--json", "--shape", prefill, "--shape", decode, "--plot", "plot.svg"];
    for dtype in ["f32", "f16"] {
        let run = run(folder.path(), &[&args[..], &["--dtype", dtype]].concat());
        assert_eq!(run.code, Some(0), "{run:?}");
        let report = run.json();
        for key in ["fma_gflops", "dispatch_us"] {
            assert!(report["limits"][key].as_f64() > Some(0.0), "{key}: {report}");
        }
        let shapes = report["shapes"].as_array().unwrap();
        let names: Vec<_> = shapes.iter().map(|shape| shape["name"].as_str().unwrap()).collect();
        assert_eq!(names, [prefill, decode]);
        for shape in shapes {
            for key in [
                "median_ms",
                "best_ms",
                "gflops",
                "kv_gbps",
                "read_gbps",
                "share",
                "paged_over_contiguous",
                "page_of_one_over_contiguous",
                "unfused_over_this",
                "encode_us",
                "max_bound_ratio",
            ] {
                assert!(shape[key].as_f64() > Some(0.0), "{key}: {shape}");
            }
            assert_eq!(shape["dtype"], dtype);
            assert!(shape["best_ms"].as_f64() <= shape["median_ms"].as_f64(), "{shape}");
            let choice = &shape["choice"];
            assert_eq!((&choice["by"], &choice["rule"]["prefill"]), (&"rule".into(), &choice["prefill"]), "{shape}");
            assert!(choice["compile"]["decode_ms"].as_f64() > Some(0.0), "{shape}");
            assert!(shape["max_abs_error"].as_f64() < Some(1e-5), "{shape}");
            assert!(shape["max_bound_ratio"].as_f64() <= Some(1.0), "{shape}");
            assert!(shape["together_over_apart"].is_null(), "{shape}");
            // The share follows from what is reported beside it.
            let number = |key: &str| shape[key].as_f64().unwrap();
            let (work, limit) = match shape["limit"].as_str() {
                Some("read") => (number("kv_bytes"), number("read_gbps")),
                _ => (number("flop"), report["limits"]["fma_gflops"].as_f64().unwrap()),
            };
            let share = 1e-6 * work / number("best_ms") / limit;
            assert!((share / number("share") - 1.0).abs() < 1e-9, "{share}: {shape}");
        }
        assert!(shapes[0]["kernel"].as_str().unwrap().starts_with("prefill-"), "{report}");
        let kernel = shapes[1]["kernel"].as_str().unwrap();
        assert!(kernel.starts_with("decode-") && kernel.ends_with("+merge"), "{kernel}");
        let svg = std::fs::read_to_string(folder.path().join("plot.svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains(decode), "{svg}");
    }
}

/// A batch of prompts and decodes, in its own columns.
#[test]
fn mixed_batch() {
    if skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let report = run(folder.path(), &["bench", "--quick", "--json", "--shape", "M1", "--page-size", "8"]).json();
    let shape = &report["shapes"][0];
    assert_eq!((&shape["limit"], &report["page_size"]), (&"fma+read".into(), &8.into()), "{report}");
    let median = |key: &str| {
        let mut seconds: Vec<f64> =
            shape["seconds"][key].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect();
        assert_eq!(seconds.len(), 3, "{shape}");
        seconds.sort_by(f64::total_cmp);
        seconds[1]
    };
    // Two calls that do what the one does take neither half nor twice its time.
    assert!((0.5..2.0).contains(&(median("paged") / median("apart"))), "{shape}");
    assert!((0.5..2.0).contains(&shape["together_over_apart"].as_f64().unwrap()), "{shape}");
    for kernel in ["prefill-", "decode-", "merge"] {
        assert!(shape["kernel"].as_str().unwrap().contains(kernel), "{shape}");
    }
}

#[test]
fn growth_with_a_figure() {
    if skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["bench", "--growth", "--quick", "--dtype", "f16", "--plot", "growth.svg"];
    let run_json = run(folder.path(), &[&arguments[..], &["--json"]].concat());
    assert_eq!(run_json.code, Some(0), "{run_json:?}");
    let report = run_json.json();
    for (curve, lengths) in [("prefill", [512, 1024, 2048]), ("decode", [1024, 2048, 4096])] {
        let points = report[curve]["points"].as_array().unwrap();
        let found: Vec<_> = points.iter().map(|point| point["kv_len"].as_u64().unwrap()).collect();
        assert_eq!(found, lengths, "{report}");
        for point in points {
            assert!(point["best_ms"].as_f64() <= point["median_ms"].as_f64(), "{point}");
            assert!(point["max_bound_ratio"].as_f64() <= Some(1.0), "{point}");
            assert!(point["rows_checked"].as_u64() > Some(0), "{point}");
        }
    }
    // Short ones on a machine that may be busy: only that prompts grow faster than single tokens do.
    let exponent = report["prefill"]["exponent"].as_f64().unwrap();
    assert!((1.3..2.7).contains(&exponent), "{report}");
    let svg = std::fs::read_to_string(folder.path().join("growth.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.matches("<circle").count() == 6, "{svg}");
    for says in [format!("power of {exponent:.3}"), "ns per key".to_owned()] {
        assert!(svg.contains(&says), "{says}: {svg}");
    }
}

#[test]
fn base_variants_and_the_table() {
    if skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let shape = "q=20,kv=24,heads=4/2,dim=16";
    let run = run(folder.path(), &["bench", "--quick", "--variants", "base", "--shape", shape]);
    assert_eq!(run.code, Some(0), "{run:?}");
    for says in ["prefill-uniform", "not to be quoted", "multiply-adds", "float64", "variants base", shape] {
        assert!(run.stdout.contains(says), "{says}: {run:?}");
    }
}

/// A table's choice, one by name, and one that is quick to compile: each runs and is said to.
#[test]
fn variants_that_are_asked_for() {
    if skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let shape = "q=20,kv=24,heads=4/2,dim=16";
    let bench =
        |flags: &[&str]| run(folder.path(), &[&["bench", "--quick", "--shape", shape, "--json"], flags].concat());
    let names = "prefill-uniform-r2k4l5s8a+decode-workgroup";
    let named = bench(&["--variants", names]);
    let report = named.json();
    assert_eq!((&report["variants"], &report["shapes"][0]["choice"]), (&names.into(), &serde_json::Value::Null));
    assert!(report["shapes"][0]["kernel"].as_str().unwrap().starts_with("prefill-uniform-r2k4l5s8a"), "{report}");
    let report = bench(&["--variants", "quick"]).json();
    assert_eq!((&report["variants"], &report["shapes"][0]["choice"]["by"]), (&"quick".into(), &"quick".into()));

    let tune = ["tune", "--heads", "4/2", "--head-dim", "16", "--budget", "0", "--out", "table.txt"];
    let table = run(folder.path(), &tune).stdout;
    let report = bench(&["--tuning", "table.txt"]).json();
    let shape = &report["shapes"][0];
    assert_eq!(shape["choice"]["by"], "tuning", "{report}");
    let first = table.lines().map(str::trim).find(|line| line.starts_with("prefill-")).unwrap();
    assert_eq!(shape["kernel"].as_str(), first.split(' ').next(), "{report}");
    let adapter = report["adapter"].as_str().unwrap();
    std::fs::write(folder.path().join("table.txt"), table.replace(adapter, "Imaginary 9000")).unwrap();
    let refused = bench(&["--tuning", "table.txt"]);
    assert_eq!((refused.code, refused.stdout.as_str()), (Some(2), ""), "{refused:?}");
    assert!(refused.stderr.contains("Imaginary 9000") && refused.stderr.contains(adapter), "{refused:?}");
}
