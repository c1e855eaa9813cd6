//! Rows that are read from or written to another segment of the pool than they lie in.

use super::*;

/// Three segments of pages at random places, all of them in use; the last segment is shorter.
fn noticed_in_segments(gpu: &Gpu, fault: &str, spec: &CaseSpec, edits: &[SourceEdit]) {
    let spec = spec.clone().contiguous(Pool::new(4).times(1));
    let case = build(&spec).unwrap();
    let three = |options: RunOptions| {
        let pages = options.page_ids.as_ref().unwrap().iter().max().unwrap() + 1;
        RunOptions { segment_pages: NonZeroU32::new(pages / 3 + 1), ..options }
    };
    noticed_with(gpu, fault, (&spec, &case), three, |_| edits.to_vec(), judged);
}

#[test]
fn keys_are_read_from_another_segment() {
    let Some(gpu) = gpu() else { return };
    for (kernel, spec) in [(KernelId::Prefill, prefill("segments")), (KernelId::Decode, decode("segments"))] {
        for (fault, from, to) in [
            (
                "the first for the second",
                "unit = kv_pages_1[index - 1u * size]",
                "unit = kv_pages_0[index - 1u * size]",
            ),
            ("the last one is left out", "unit = kv_pages_2[index - 2u * size];", ""),
            ("one vector off", "unit = kv_pages_1[index - 1u * size]", "unit = kv_pages_1[index - 1u * size - 1u]"),
            ("the border one vector early", "if index < size {", "if index + 1u < size {"),
            ("the border one vector late", "index - 1u * size < size", "index - 1u * size <= size"),
            (
                "the size of a shorter one",
                "let size = arrayLength(&kv_pages_0);",
                "let size = arrayLength(&kv_pages_2);",
            ),
        ] {
            noticed_in_segments(gpu, fault, &spec, &[edit(kernel, from, to)]);
        }
    }
}

#[test]
fn rows_are_written_to_another_segment() {
    let Some(gpu) = gpu() else { return };
    for (fault, from, to) in [
        ("the first for the second", "kv_pages_1[index - 1u * size] = unit", "kv_pages_0[index - 1u * size] = unit"),
        ("the last one is left out", "kv_pages_2[index - 2u * size] = unit;", ""),
        ("one vector off", "kv_pages_1[index - 1u * size] = unit", "kv_pages_1[index - 1u * size + 1u] = unit"),
    ] {
        noticed_in_segments(gpu, fault, &prefill("segments"), &[edit(KernelId::Append, from, to)]);
    }
}
