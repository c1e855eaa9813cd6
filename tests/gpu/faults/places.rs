//! Keys, heads and pages that a kernel reaches wrongly or not at all: single keys far out, heads past the eighth, pages
//! past 16 bits, places past 64 MiB.

use paged_attention_cases::quick;

use super::*;

/// A row of the table.
fn row(name: &str) -> CaseSpec {
    quick().into_iter().find(|spec| spec.name == name).unwrap()
}

/// The kernels without the keys of `list`, as if they had been overlooked: no score, no weight.
fn without_keys(list: &[u32]) -> Vec<SourceEdit> {
    let tests: Vec<String> = list.iter().map(|key| format!("key == {key}u")).collect();
    let function = format!("fn overlooked(key: u32) -> bool {{\n    return {};\n}}\n", tests.join(" || "));
    let entry = |kernel, text: &str| edit_text(kernel, text.into(), format!("{function}{text}"));
    let mut edits = vec![
        entry(KernelId::Decode, "@compute @workgroup_size(DECODE_LANES)"),
        entry(KernelId::Prefill, "@compute @workgroup_size(PREFILL_LANES)"),
    ];
    let visible = "var visible = key < row.end;";
    edits
        .extend([KernelId::Decode, KernelId::Prefill].map(|kernel| {
            edit_text(kernel, visible.into(), "var visible = key < row.end && !overlooked(key);".into())
        }));
    edits
}

/// Every key that a needle case seeks is missed by the row that seeks it; and the last of a split alone by the verifier.
#[test]
fn a_single_lost_key_is_noticed() {
    let Some(gpu) = gpu() else { return };
    // Split 40 of a decode; split 0 of a CPU's prefill.
    for (name, alone) in [("needles/decode-131072", 10_495), ("needles/prefill-131072", 32_767)] {
        let spec = row(name);
        let Values::Needles { keys } = spec.values else { panic!("{spec} has no needles") };
        let rows_stay = |case: &Case, real: &Output, output: &Output| {
            let dim = case.geometry().v_head_dim() as usize;
            let moved: Vec<f32> = (real.out.chunks(dim).zip(output.out.chunks(dim)))
                .map(|(a, b)| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max))
                .collect();
            let least = moved.iter().copied().fold(f32::INFINITY, f32::min);
            match moved.iter().filter(|moved| **moved > 0.3).count() {
                0 => Ok(()),
                rows if rows == moved.len() => Err(format!("each of {rows} rows moves by {least} or more")),
                rows => panic!("{spec}: {rows} of {} rows move when their key is lost", moved.len()),
            }
        };
        noticed_in(gpu, "all needles lost", &spec, |_| without_keys(keys), rows_stay);
        noticed_by_variant(gpu, &format!("key {alone} lost"), &spec, |_| without_keys(&[alone]));
    }
    // Of shorter sequences any key will do.
    for (name, key) in [("needles/decode-each-f32-g1", 777), ("needles/prefill-each-f32-g1", 200)] {
        noticed_by_variant(gpu, &format!("key {key} lost"), &row(name), |_| without_keys(&[key]));
    }
}

#[test]
fn kv_heads_past_the_eighth() {
    let Some(gpu) = gpu() else { return };
    let address = ("kv_head * rows.head_stride", "min(kv_head, 7u) * rows.head_stride");
    for heads in ["12over12", "20over10"] {
        let [paged, contiguous] = ["paged", "contiguous"].map(|kind| row(&format!("heads/{heads}-{kind}")));
        for kernel in ATTENTION.into_iter().filter(|kernel| *kernel != KernelId::Merge) {
            noticed(gpu, "KV head 7 at most, address", &paged, &[edit(kernel, address.0, address.1)]);
        }
        noticed(gpu, "KV head 7 at most, append", &contiguous, &[edit(KernelId::Append, address.0, address.1)]);
        for kernel in ATTENTION {
            let edits = [edit(kernel, "place % params.kv_heads,", "min(7u, place % params.kv_heads),")];
            noticed(gpu, "KV head 7 at most, item", &paged, &edits);
        }
    }
}

#[test]
fn fault_16_pages_past_16_bits_and_64_mib() {
    let Some(gpu) = gpu() else { return };
    let page = [("page * rows.page_stride", "(page & 0xffffu) * rows.page_stride")];
    // Where the address is made, and where a kernel uses it.
    let made = [
        ("return rows.base + page", "return 0x3fffffu & (rows.base + page"),
        ("slot * rows.slot_stride;", "slot * rows.slot_stride);"),
    ];
    let used = [("row + chunk * chunk_vectors(K_DTYPE);", "(row + chunk * chunk_vectors(K_DTYPE)) & 0x3fffffu;")];
    for (kernel, name, edits) in [
        (KernelId::Prefill, "70000-pages-paged", &page[..]),
        (KernelId::Decode, "70000-pages-paged", &page[..]),
        (KernelId::Append, "70000-pages-contiguous", &page[..]),
        (KernelId::Prefill, "100-mib-paged", &used[..]),
        (KernelId::Decode, "100-mib-paged", &used[..]),
        (KernelId::Append, "100-mib-contiguous", &made[..]),
    ] {
        let edits: Vec<_> = edits.iter().map(|(from, to)| edit(kernel, from, to)).collect();
        noticed(gpu, &format!("16 {name}, {}", kernel.entry_point()), &row(&format!("pools/{name}")), &edits);
    }
}
