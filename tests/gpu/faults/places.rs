//! Keys, heads and pages that a kernel reaches wrongly or not at all: single keys far out, heads past the eighth, pages
//! past 16 bits, places past 64 MiB.

use paged_attention_cases::quick;

use super::*;
use crate::common::rows_of;

/// A row of the table.
fn row(name: &str) -> CaseSpec {
    quick().into_iter().find(|spec| spec.name == name).unwrap()
}

/// The kernels without the keys of `list`, as if they had been overlooked: no score, no weight.
fn without_keys(config: &KernelConfig, list: &[u32]) -> Vec<SourceEdit> {
    let tests: Vec<String> = list.iter().map(|key| format!("key == {key}u")).collect();
    let function = format!("fn overlooked(key: u32) -> bool {{\n    return {};\n}}\n", tests.join(" || "));
    let entry = |kernel, text: &str| edit_text(kernel, text.into(), format!("{function}{text}"));
    let highest = "highest = max(highest, scores[row * SPLIT_KEYS + key]);";
    let mut edits = vec![
        entry(KernelId::Decode, "@compute @workgroup_size(DECODE_LANES)"),
        edit_text(KernelId::Decode, highest.into(), format!("if !overlooked(item.key_begin + key) {{ {highest} }}")),
        edit(KernelId::Decode, "if key < row_keys {", "if key < row_keys && !overlooked(item.key_begin + key) {"),
        entry(KernelId::Prefill, "@compute @workgroup_size(PREFILL_LANES)"),
    ];
    let tiles = config.tiles().prefill;
    edits.extend((0..tiles.rows_per_lane).flat_map(|r| (0..tiles.step_keys).map(move |k| (r, k))).map(|(r, k)| {
        let visible = format!("let visible_{r}_{k} = step + {k}u < end_{r}");
        edit_text(KernelId::Prefill, format!("{visible};"), format!("{visible} && !overlooked(step + {k}u);"))
    }));
    edits
}

/// Every key that a needle case seeks is missed by the row that seeks it; and each alone by the verifier.
#[test]
fn a_single_lost_key_is_noticed() {
    let Some(gpu) = gpu() else { return };
    for (name, alone) in [
        // The last key of split 40, and the last of all.
        ("needles/decode-131072", [10_495, 131_071]),
        // The ends of a CPU's prefill splits.
        ("needles/prefill-131072", [32_767, 131_071]),
    ] {
        let spec = row(name);
        let Values::Needles { keys } = spec.values else { panic!("{spec} has no needles") };
        let all_rows = |case: &Case, real: &Output, output: &Output| {
            if std::ptr::eq(real, output) {
                return judge(case, output).map(|_| ());
            }
            let dim = case.geometry().v_head_dim() as usize;
            let [real, found] = [real, output].map(|output| rows_of(case, output, 0, 0, case.lengths()[0].0).out);
            let moved = real
                .chunks(dim)
                .zip(found.chunks(dim))
                .map(|(a, b)| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max));
            let least = moved.fold(f32::INFINITY, f32::min);
            // A row whose key is still met keeps its result.
            assert!(least > 0.3, "{spec}: a row moves by {least} when its key is lost");
            judge(case, output).map(|_| ())
        };
        noticed_in(gpu, "all needles lost", &spec, |config| without_keys(config, keys), all_rows);
        for key in alone {
            noticed_by_variant(gpu, &format!("key {key} lost"), &spec, |config| without_keys(config, &[key]));
        }
    }
}

/// The same for any key of shorter sequences, in places where loops end.
#[test]
fn any_lost_key_of_a_short_sequence_is_noticed() {
    let Some(gpu) = gpu() else { return };
    for (name, keys) in
        [("needles/decode-each-f32-g1", [0, 255, 256, 777, 808]), ("needles/prefill-each-f32-g1", [0, 1, 63, 200, 262])]
    {
        for key in keys {
            noticed_by_variant(gpu, &format!("key {key} lost"), &row(name), |config| without_keys(config, &[key]));
        }
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
            let edits = [edit(kernel, "group % params.kv_heads);", "min(7u, group % params.kv_heads));")];
            noticed(gpu, "KV head 7 at most, item", &paged, &edits);
        }
    }
}

#[test]
fn fault_16_pages_past_16_bits_and_64_mib() {
    let Some(gpu) = gpu() else { return };
    let page = [("page * rows.page_stride", "(page & 0xffffu) * rows.page_stride")];
    let vector = [
        ("return rows.base + page", "return 0x3fffffu & (rows.base + page"),
        ("slot * rows.slot_stride;", "slot * rows.slot_stride);"),
    ];
    for (what, pool, edits) in [("page", "70000-pages", &page[..]), ("vector", "100-mib", &vector[..])] {
        for (kernel, kind) in
            [(KernelId::Prefill, "paged"), (KernelId::Decode, "paged"), (KernelId::Append, "contiguous")]
        {
            let edits: Vec<_> = edits.iter().map(|(from, to)| edit(kernel, from, to)).collect();
            noticed(
                gpu,
                &format!("16 {what}, {}", kernel.entry_point()),
                &row(&format!("pools/{pool}-{kind}")),
                &edits,
            );
        }
    }
    // The same where the address is used.
    let spec = row("pools/100-mib-paged");
    let load = "let vector = row + chunk * chunk_vectors(KV_DTYPE);";
    for kernel in [KernelId::Prefill, KernelId::Decode] {
        let edits = [edit(kernel, load, "let vector = (row + chunk * chunk_vectors(KV_DTYPE)) & 0x3fffffu;")];
        noticed(gpu, "16 load", &spec, &edits);
    }
}
