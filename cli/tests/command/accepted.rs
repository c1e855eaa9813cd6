//! Inputs that must pass every check. Without an adapter they end with exit status 3, so these tests need none.

#[cfg(unix)]
use crate::support::in_little_memory;
use crate::support::{File, folder_with, names_in, without_adapter};

fn check(rows: &[(&str, Vec<u8>, &[&str])]) {
    let mut failures = Vec::new();
    for (name, case, flags) in rows {
        let (folder, _) = folder_with(case);
        let args: Vec<&str> =
            ["attend", "case.safetensors", "--out", "out.safetensors"].iter().chain(*flags).copied().collect();
        let run = without_adapter(folder.path(), &args);
        if run.code != Some(3) || !run.stderr.contains("mesa-vulkan-drivers") || !run.stdout.is_empty() {
            failures.push(format!("{name}: {run:?}"));
        }
        assert_eq!(names_in(folder.path()), ["case.safetensors"], "{name}");
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn neutral_and_legal_inputs() {
    let (flat, paged) = (File::contiguous, File::paged);
    check(&[
        ("contiguous", flat().bytes(), &[]),
        ("paged", paged().bytes(), &[]),
        ("u32 and i64 indices", flat().u32("q_indptr", &[0, 1, 3]).i64("kv_indptr", &[0, 4, 10]).bytes(), &[]),
        ("one sequence without indptr", flat().without("q_indptr").without("kv_indptr").bytes(), &[]),
        ("one sequence, one indptr", flat().without("q_indptr").i32("kv_indptr", &[0, 10]).bytes(), &[]),
        (
            "paged, one sequence",
            paged().without("q_indptr").i32("page_indptr", &[0, 4]).i32("kv_len", &[13]).bytes(),
            &[],
        ),
        (
            "no sequences",
            flat()
                .f32("q", &[0, 4, 8])
                .f32("k", &[0, 2, 8])
                .f32("v", &[0, 2, 8])
                .i32("q_indptr", &[0])
                .i32("kv_indptr", &[0])
                .bytes(),
            &[],
        ),
        ("no rows", flat().f32("q", &[0, 4, 8]).i32("q_indptr", &[0, 0, 0]).bytes(), &[]),
        ("no keys", flat().f32("k", &[0, 2, 8]).f32("v", &[0, 2, 8]).i32("kv_indptr", &[0, 0, 0]).bytes(), &[]),
        (
            "no pages",
            paged()
                .f32("k_pages", &[0, 4, 2, 8])
                .f32("v_pages", &[0, 4, 2, 8])
                .i32("page_indptr", &[0, 0, 0])
                .i32("page_ids", &[])
                .i32("kv_len", &[0, 0])
                .bytes(),
            &[],
        ),
        ("shared pages", paged().i32("page_ids", &[1, 0, 1, 0]).bytes(), &[]),
        ("shared pages, read once", paged().i32("page_ids", &[1, 0, 1, 0]).bytes(), &["--share-prefixes"]),
        ("nothing shared", paged().bytes(), &["--share-prefixes=4"]),
        ("value dimension of its own", flat().f32("v", &[10, 2, 5]).bytes(), &[]),
        ("dimension 256", flat().f32("q", &[3, 4, 256]).f32("k", &[10, 2, 256]).bytes(), &[]),
        // Sequence 0 owns one slot of page 0, nobody owns page 4.
        ("NaN in a tail", paged().f32_with("k_pages", &[5, 4, 2, 8], 16, f32::NAN).bytes(), &[]),
        ("NaN in a spare page", paged().f32_with("v_pages", &[5, 4, 2, 8], 4 * 64, f32::NAN).bytes(), &[]),
        (
            "unknown metadata",
            flat().meta("made_by", "somebody").meta("causal", "true").meta("scale", "-0.5").bytes(),
            &[],
        ),
        (
            "neutral metadata",
            flat().meta("window_left", "-1").meta("window_right", "-1").meta("softcap", "0.0").bytes(),
            &[],
        ),
        (
            "neutral flags",
            flat().bytes(),
            &[
                "--window-left",
                "-1",
                "--window-right=-1",
                "--softcap",
                "0",
                "--scale",
                "-1e-3",
                "--causal",
                "false",
                "--kv-dtype",
                "f32",
                "--layout",
                "head",
                "--out-dtype",
                "f16",
                "--page-size",
                "1",
                "--shuffle-pages",
                "7",
            ],
        ),
        (
            "windows and a cap in the metadata",
            flat().meta("window_left", "0").meta("window_right", "4294967295").meta("softcap", "30.5").bytes(),
            &[],
        ),
        (
            "windows and a cap by flag, pages of another type",
            paged().bytes(),
            &["--window-left", "3", "--window-right=0", "--softcap", "5e1", "--kv-dtype", "bf16"],
        ),
        ("contiguous keys of another type", flat().bytes(), &["--kv-dtype", "f16"]),
        ("pages of 8 bits in the other order", paged().bytes(), &["--kv-dtype", "int8/fp8", "--layout", "slot"]),
        // Nobody owns page 4.
        (
            "past f16 where nobody owns it",
            paged().f32_with("k_pages", &[5, 4, 2, 8], 4 * 64, 1e30).bytes(),
            &["--kv-dtype", "f16"],
        ),
        (
            "slopes, sinks, mask and bias",
            flat()
                .f32("alibi_slopes", &[4])
                .f32("sinks", &[4])
                .raw("mask", "BOOL", &[16], vec![1; 16])
                .f32_with("bias", &[4, 16], 3, f32::NEG_INFINITY)
                .bytes(),
            &[],
        ),
        (
            "mask and shared bias in f16, on pages",
            paged().raw("mask", "U8", &[21], vec![0; 21]).f16_zeros("bias", &[1, 21]).bytes(),
            &[],
        ),
        (
            "pages that no row sees are not there",
            paged().u32("page_ids", &[u32::MAX, 0, u32::MAX, 2]).meta("window_left", "0").bytes(),
            &["--causal", "true"],
        ),
        (
            "mask of nothing",
            flat()
                .f32("q", &[0, 4, 8])
                .i32("q_indptr", &[0, 0, 0])
                .raw("mask", "U8", &[0], vec![])
                .f32("bias", &[1, 0])
                .bytes(),
            &[],
        ),
        ("flags win", flat().meta("scale", "nan").meta("softcap", "x").bytes(), &["--scale", "1", "--softcap", "0"]),
    ]);
}

#[test]
fn causal_needs_no_value() {
    let (folder, _) = folder_with(&File::contiguous().meta("causal", "nonsense").bytes());
    let case = "case.safetensors";
    for args in [
        &["attend", case, "--causal"][..],
        &["attend", case, "--causal", "--json"],
        &["attend", case, "--causal", "true"],
        &["attend", "--causal=false", case],
        &["attend", "--causal", "true", case],
    ] {
        assert_eq!(without_adapter(folder.path(), args).code, Some(3), "{args:?}");
    }
}

/// Small files that would take terabytes, were their keys written out per sequence or their heads looked at one by one.
#[cfg(unix)]
#[test]
fn small_files_take_little_memory() {
    for (name, file) in [
        ("2.6e9 keys", File::on_one_page(&[0, 0], 40_000, 2_600_000_000)),
        ("20,000 sequences", File::on_one_page(&[0; 20_001], 1, 65_536)),
        ("20,000 sequences, one row", File::on_one_page(&[[0; 20_000].as_slice(), &[1]].concat(), 1, 65_536)),
        ("empty sequences", File::many_heads().u32("q_indptr", &[0; 50_001]).u32("kv_indptr", &[0; 50_001])),
        ("one group", File::many_heads().f16_zeros("k", &[0, 1, 256]).f16_zeros("v", &[0, 1, 256])),
    ] {
        let (folder, _) = folder_with(&file.bytes());
        let run = in_little_memory(folder.path(), &["attend", "case.safetensors"]);
        assert_eq!(run.code, Some(3), "{name}: {run:?}");
        assert!(run.stderr.contains("mesa-vulkan-drivers"), "{name}: {run:?}");
    }
}

#[test]
fn help_offers_every_type_and_order_of_the_pages() {
    let folder = tempfile::tempdir().unwrap();
    for flag in ["-h", "--help"] {
        let run = without_adapter(folder.path(), &["attend", flag]);
        for value in ["f32, f16, bf16, int8", "fp8", "int8/f16", "slot", "head"] {
            assert!(run.stdout.contains(value), "{value}: {run:?}");
        }
    }
}

#[test]
fn unknown_tensors_are_warned_about() {
    let (folder, _) = folder_with(&File::contiguous().f32("positions", &[3]).bytes());
    let run = without_adapter(folder.path(), &["attend", "case.safetensors", "--json"]);
    assert_eq!(run.code, Some(3), "{run:?}");
    assert!(run.stderr.contains("warning") && run.stderr.contains("`positions`"), "{run:?}");
}

#[test]
fn help_and_version() {
    let folder = tempfile::tempdir().unwrap();
    for (args, says) in [
        (vec!["--help"], "doctor"),
        (vec!["--version"], "paged-attention"),
        (vec!["attend", "--help"], "page_indptr"),
        (vec!["attend", "--help"], "docs/case-format.md"),
        (vec!["--help"], "docs/case-format.md"),
        (vec!["attend", "-h"], "--shuffle-pages"),
        (vec!["doctor", "--help"], "WGPU_BACKEND"),
    ] {
        let run = without_adapter(folder.path(), &args);
        assert_eq!(run.code, Some(0), "{run:?}");
        assert!(run.stdout.contains(says), "{args:?} must say {says}: {run:?}");
    }
    assert_eq!(without_adapter(folder.path(), &["flash"]).code, Some(2));
}

#[test]
fn doctor_without_adapters_says_what_to_install() {
    let folder = tempfile::tempdir().unwrap();
    for args in [&["doctor"][..], &["doctor", "--json"], &["doctor", "--adapter", "0"]] {
        let run = without_adapter(folder.path(), args);
        assert_eq!(run.code, Some(3), "{run:?}");
        assert!(run.stderr.contains("mesa-vulkan-drivers"), "{run:?}");
    }
}

/// A broken case does not keep the others of a folder from running; the worst status counts.
#[test]
fn one_bad_case_of_several() {
    let (folder, _) = folder_with(&File::contiguous().bytes());
    std::fs::write(folder.path().join("bad.safetensors"), b"nothing").unwrap();
    let run = without_adapter(folder.path(), &["attend", "."]);
    assert_eq!(run.code, Some(3), "the good case asks for an adapter: {run:?}");
    assert!(run.stderr.contains("bad.safetensors: not a valid"), "{run:?}");
    std::fs::remove_file(folder.path().join("case.safetensors")).unwrap();
    let run = without_adapter(folder.path(), &["attend", ".", "nowhere", "--out", "out"]);
    assert_eq!(run.code, Some(2), "no case is left to run: {run:?}");
    assert_eq!(names_in(folder.path()), ["bad.safetensors"]);
}
