//! Files that are no safetensors files, or broken ones, and flags and metadata that cannot be used.

use serde_json::json;

use crate::support::{
    File, assemble, broken, check_refusals, folder_with, names_in, refusal, refusal_with, without_adapter,
};

#[test]
fn broken_files() {
    let good = File::contiguous();
    let bytes = good.bytes();
    let (header, data) = good.parts();
    let header_len = header.to_string().len();
    let mut not_utf8 = assemble(&header.to_string(), &data);
    not_utf8[20] = 0xff;
    let with_metadata = |metadata: &str| {
        let text = header.to_string();
        assemble(&format!("{{\"__metadata__\":{metadata},{}", &text[1..]), &data)
    };
    check_refusals(&[
        broken("empty", vec![], &["has 0 bytes", "8"]),
        broken("five bytes", vec![1, 2, 3, 4, 5], &["has 5 bytes"]),
        broken("length without header", 1000_u64.to_le_bytes().to_vec(), &["header of 1000 bytes", "0 more bytes"]),
        broken("huge header", u64::MAX.to_le_bytes().to_vec(), &["18446744073709551615"]),
        broken("header cut short", bytes[..8 + header_len / 2].to_vec(), &["announce a header of"]),
        broken("no JSON", assemble("{\"q\": [", &[]), &["JSON"]),
        broken("a list for a header", assemble("[1, 2]", &[]), &["JSON"]),
        broken("header not UTF-8", not_utf8, &["UTF-8"]),
        broken("data cut short", bytes[..bytes.len() - 5].to_vec(), &["cut short", "the file has"]),
        broken("no data at all", bytes[..8 + header_len].to_vec(), &["cut short", "the file has 0"]),
        broken("bytes after the data", [bytes.as_slice(), &[0; 3]].concat(), &["after its last tensor"]),
        broken("another format", b"PK\x03\x04 a zip archive, for instance, with some more text".to_vec(), &["header"]),
        broken(
            "unknown type",
            good.with_header(|header| header["q"]["dtype"] = json!("F128")),
            &["`q`", "F128", "expected one of"],
        ),
        broken(
            "negative dimension",
            good.with_header(|header| header["q"]["shape"] = json!([-3, 4, 8])),
            &["`q`", "-3"],
        ),
        broken("shape is a number", good.with_header(|header| header["v"]["shape"] = json!(3)), &["`v`"]),
        broken(
            "entry without offsets",
            good.with_header(|header| {
                header["k"].as_object_mut().unwrap().remove("data_offsets");
            }),
            &["`k`", "data_offsets"],
        ),
        broken(
            "shape asks for more than the offsets give",
            good.with_header(|header| header["q"]["shape"] = json!([30, 4, 8])),
            &["`q`", "[30, 4, 8]", "3840", "384"],
        ),
        broken(
            "elements overflow",
            good.with_header(|header| header["q"]["shape"] = json!([1_u64 << 40, 1 << 20, 1 << 20])),
            &["`q`", "more elements than can be addressed"],
        ),
        broken(
            "elements overflow beside a zero",
            good.with_header(|header| header["q"]["shape"] = json!([u64::MAX, 3, 0])),
            &["`q`", "more elements than can be addressed"],
        ),
        broken(
            "bytes overflow",
            good.with_header(|header| header["q"]["shape"] = json!([1_u64 << 61, 4, 1])),
            &["`q`", "more elements than can be addressed"],
        ),
        broken(
            "dimension past 64 bits",
            good.with_header(|header| header["q"]["shape"] = json!([1e30, 4, 8])),
            &["`q`"],
        ),
        broken(
            "overlapping offsets",
            good.with_header(|header| header["k"]["data_offsets"] = header["q"]["data_offsets"].clone()),
            &["data_offsets", "overlap"],
        ),
        broken(
            "offsets past the end",
            good.with_header(|header| {
                let start = header["v"]["data_offsets"][0].as_u64().unwrap();
                header["v"] = json!({"dtype": "F32", "shape": [1000, 2, 8], "data_offsets": [start, start + 64000]});
            }),
            &["cut short"],
        ),
        broken(
            "end before start",
            good.with_header(|header| header["v"]["data_offsets"] = json!([640, 0])),
            &["data_offsets"],
        ),
        broken(
            "negative offset",
            good.with_header(|header| header["v"]["data_offsets"] = json!([-1, 639])),
            &["`v`", "-1"],
        ),
        broken(
            "a name twice",
            {
                let text = header.to_string();
                let again = format!("{{\"q\":{},{}", header["q"], &text[1..]);
                assemble(&again, &data)
            },
            &["`q`", "twice"],
        ),
        broken(
            "a metadata key twice",
            with_metadata("{\"causal\":\"true\",\"causal\":\"false\"}"),
            &["`causal` twice"],
        ),
        broken("an unknown key twice", with_metadata("{\"a\":\"\",\"causal\":\"true\",\"a\":\"\"}"), &["`a` twice"]),
        broken(
            "metadata is no object",
            good.with_header(|header| header["__metadata__"] = json!("causal")),
            &["`__metadata__`", "object of strings"],
        ),
        broken("metadata holds a number", good.clone().meta_value("scale", json!(0.5)).bytes(), &["`scale`", "string"]),
        broken(
            "metadata holds a bool",
            good.clone().meta_value("causal", json!(true)).bytes(),
            &["`causal`", "string"],
        ),
    ]);
}

#[test]
fn metadata_values() {
    let good = File::contiguous();
    check_refusals(&[
        refusal("causal", &good.clone().meta("causal", "yes"), &["`causal`", "\"yes\"", "`true` or `false`"]),
        refusal("Python's True", &good.clone().meta("causal", "True"), &["`causal`", "\"True\""]),
        refusal("scale not a number", &good.clone().meta("scale", "1/8"), &["`scale`", "\"1/8\"", "finite number"]),
        refusal("scale NaN", &good.clone().meta("scale", "nan"), &["`scale`", "\"nan\"", "finite number"]),
        refusal("scale infinite", &good.clone().meta("scale", "-inf"), &["`scale`", "\"-inf\""]),
        refusal("scale overflows", &good.clone().meta("scale", "1e400"), &["`scale`", "\"1e400\""]),
        refusal("half a key", &good.clone().meta("window_left", "1.5"), &["`window_left`", "\"1.5\"", "whole number"]),
        refusal("wide window", &good.clone().meta("window_left", "4294967296"), &["`window_left`", "to 4294967295"]),
        refusal("bad window", &good.clone().meta("window_right", "-2"), &["`window_right`", "\"-2\"", "whole number"]),
        refusal("soft cap", &good.clone().meta("softcap", "1e30"), &["`softcap`", "\"1e30\"", "to 1.15e18"]),
        refusal("bad soft cap", &good.clone().meta("softcap", "-1"), &["`softcap`", "\"-1\"", "0 for none"]),
        refusal("empty", &good.clone().meta("scale", ""), &["`scale`", "\"\""]),
        // The flag wins over one key, and the other one still counts.
        refusal_with("other key", &good.meta("softcap", "x"), &["--causal", "true"], &["`softcap`"]),
    ]);
}

#[test]
fn flag_values() {
    let good = File::contiguous();
    let f = |name, flags, says| refusal_with(name, &good, flags, says);
    check_refusals(&[
        f("causal", &["--causal", "maybe"], &["--causal", "'maybe'"]),
        f("scale", &["--scale", "nan"], &["--scale", "'nan'", "finite number"]),
        f("scale", &["--scale", "inf"], &["--scale", "'inf'"]),
        f("scale", &["--scale", "-inf"], &["--scale", "'-inf'"]),
        f("scale", &["--scale", "x"], &["--scale", "'x'"]),
        f("window", &["--window-left", "x"], &["--window-left", "'x'", "whole number"]),
        f("window", &["--window-right", "0.5"], &["--window-right", "'0.5'"]),
        f("window", &["--window-left", "-2"], &["--window-left", "'-2'"]),
        f("soft cap", &["--softcap", "inf"], &["--softcap", "'inf'", "0 for none"]),
        f("soft cap", &["--softcap", "-1"], &["--softcap", "'-1'"]),
        f("page size", &["--page-size", "0"], &["--page-size", "page_size is 0", "at least 1"]),
        f("page size", &["--page-size", "-1"], &["--page-size"]),
        f("page size", &["--page-size", "4294967296"], &["--page-size", "4294967295"]),
        f("seed", &["--shuffle-pages", "x"], &["--shuffle-pages", "'x'"]),
        refusal_with(
            "key past f16",
            &good.clone().f32_with("k", &[10, 2, 8], 21, 1e5),
            &["--kv-dtype", "f16"],
            &["`k` holds 1e5 at [1, 0, 5]", "f16", "65504"],
        ),
        refusal_with(
            "value past f16, in a page",
            &File::paged().f32_with("v_pages", &[5, 4, 2, 8], 64, -1e5),
            &["--kv-dtype", "f16"],
            &["`v_pages` holds -1e5 at [1, 0, 0, 0]", "f16", "65504"],
        ),
        f("kv type", &["--kv-dtype", "f64"], &["--kv-dtype", "'f64'"]),
        f("value type", &["--kv-dtype", "int8/int4"], &["--kv-dtype", "'int8/int4'", "f32, f16, bf16, int8 or fp8"]),
        f("three types", &["--kv-dtype", "int8/f16/fp8"], &["found \"int8/f16/fp8\"", "two of them joined by /"]),
        f("out type", &["--out-dtype", "bf16"], &["--out-dtype", "'bf16'"]),
        f("layout", &["--layout", "dim"], &["--layout", "'dim'"]),
        f("page past 32 bits", &["--page-size", "4294967295"], &["--page-size 4294967295", "can be addressed"]),
        f("causal", &["--causal", "maybe"], &["--causal", "`true` or `false`"]),
        f("unknown flag", &["--sinks", "3"], &["--sinks"]),
        f("missing value", &["--scale"], &["--scale"]),
        refusal_with("page size", &File::paged(), &["--page-size", "4"], &["--page-size", "paged already"]),
        f("no pages to share", &["--share-prefixes"], &["--share-prefixes", "no pages"]),
        f("no tokens", &["--share-prefixes=0"], &["--share-prefixes", "'0'"]),
        refusal_with("shuffle", &File::paged(), &["--shuffle-pages", "1"], &["--shuffle-pages", "paged already"]),
    ]);
}

#[test]
fn files_that_are_not_there() {
    let (folder, _) = folder_with(&File::contiguous().bytes());
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    std::fs::write(folder.path().join("empty/notes.txt"), "no case").unwrap();
    for (argument, says) in [("missing.safetensors", "cannot be read"), ("empty", "holds no *.safetensors file")] {
        let run = without_adapter(folder.path(), &["attend", argument]);
        assert_eq!(run.code, Some(2), "{run:?}");
        assert!(run.stderr.contains(argument) && run.stderr.contains(says), "{run:?}");
        assert_eq!(run.stderr.matches("error:").count(), 1, "{run:?}");
        assert!(run.stdout.is_empty(), "{run:?}");
    }
    let run = without_adapter(folder.path(), &["attend"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert_eq!(names_in(folder.path()), ["case.safetensors", "empty"]);
}

/// What has no end, or keeps a reader waiting, is not read at all.
#[cfg(unix)]
#[test]
fn pipes_and_devices() {
    let (folder, _) = folder_with(&File::contiguous().bytes());
    assert!(
        std::process::Command::new("mkfifo").arg(folder.path().join("pipe.safetensors")).status().unwrap().success()
    );
    for argument in ["pipe.safetensors", "/dev/zero", "/dev/null"] {
        let run = without_adapter(folder.path(), &["attend", argument, "--json"]);
        assert_eq!(run.code, Some(2), "{run:?}");
        assert!(run.stderr.contains(argument) && run.stderr.contains("found a device or pipe"), "{run:?}");
    }
    // The other case of the folder asks for an adapter.
    let run = without_adapter(folder.path(), &["attend", "."]);
    assert_eq!(run.code, Some(3), "{run:?}");
    assert!(run.stderr.contains("pipe.safetensors: found a device or pipe"), "{run:?}");
}

#[cfg(unix)]
#[test]
fn names_that_are_not_utf8() {
    use std::ffi::{OsStr, OsString};
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let name = OsStr::from_bytes(b"caf\xe9.safetensors");
    let args = |case: &OsStr| -> Vec<OsString> { vec!["attend".into(), case.to_owned(), "--json".into()] };
    let run = without_adapter(folder.path(), &args(name));
    assert_eq!(run.code, Some(2), "{run:?}");
    // Some file systems refuse such a name; then there is no more to test.
    if std::fs::write(folder.path().join(name), File::contiguous().bytes()).is_ok() {
        assert_eq!(without_adapter(folder.path(), &args(name)).code, Some(3));
        assert_eq!(without_adapter(folder.path(), &args(OsStr::new("."))).code, Some(3));
    }
}
