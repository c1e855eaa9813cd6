//! Faults of stored keys and values: scales left out, mixed up or at the wrong place, codes misread, rotations gone wrong.

use paged_attention::{AttentionOptions, KvDtype, KvDtypes, Pairing, Rotary};
use paged_attention_cases::{assemble, generate};

use super::*;

const INT8: KvDtypes = KvDtypes { k: KvDtype::Int8, v: KvDtype::Int8 };
const FP8: KvDtypes = KvDtypes { k: KvDtype::Fp8, v: KvDtype::Fp8 };

/// A prompt, a decode of several splits, and pages of several slots.
fn spec(name: &str) -> CaseSpec {
    CaseSpec::new(format!("faults/{name}"), Heads::new(4, 2, 24), [(20, 60), (1, 2 * SPLIT_KEYS + 37)])
        .causal(true)
        .contiguous(Pool::new(4))
}

/// The real kernels pass; those with `edits` do not, in any variant.
fn noticed_stored(gpu: &Gpu, fault: &str, kv: KvDtypes, rotary: Option<&Rotary>, edits: &[SourceEdit]) {
    let spec = spec(fault);
    noticed_in(gpu, fault, (&spec, &build(&spec).unwrap()), kv, rotary, edits);
}

fn noticed_in(
    gpu: &Gpu,
    fault: &str,
    of: (&CaseSpec, &Case),
    kv: KvDtypes,
    rotary: Option<&Rotary>,
    edits: &[SourceEdit],
) {
    let options = |options| RunOptions { kv: Some(kv), rotary: rotary.cloned(), ..options };
    noticed_with(gpu, fault, of, options, |_| edits.to_vec(), judged);
}

/// The same edit in both kernels that read keys and values.
fn readers(from: &'static str, to: &'static str) -> [SourceEdit; 2] {
    [KernelId::Prefill, KernelId::Decode].map(|kernel| edit(kernel, from, to))
}

#[test]
fn scales_of_rows() {
    let Some(gpu) = gpu() else { return };
    let scale = "return bitcast<f32>(words[word % 4u]);";
    let of_slot = |part: &str, wrong: &str| {
        let from = format!("row_offset(params.{part}_scales, page, kv_head, slot)");
        let to = format!("row_offset(params.{wrong}_scales, page, kv_head, slot)");
        [KernelId::Prefill, KernelId::Decode].map(|kernel| edit_text(kernel, from.clone(), to.clone()))
    };
    for (fault, edits) in [
        ("no scale", readers(scale, "return 0.0078125;")),
        (
            "the scale of the slot before",
            readers("row_scale(word: u32) -> f32 {", "row_scale(next: u32) -> f32 { let word = max(next, 1u) - 1u;"),
        ),
        ("keys with the scales of values", of_slot("k", "v")),
        ("values with the scales of keys", of_slot("v", "k")),
        (
            "all heads have the first one's",
            readers("kv_head * rows.head_stride", "min(kv_head, rows.head_stride / 100000u) * rows.head_stride"),
        ),
        (
            "bytes without a sign",
            readers(
                "vec4<f32>(bitcast<vec4<i32>>(spread(word)) >> vec4<u32>(24u))",
                "vec4<f32>(spread(word) >> vec4<u32>(24u))",
            ),
        ),
        ("the wrong half of a vector", readers("vector.zw, chunk % 2u == 1u", "vector.zw, chunk % 2u == 0u")),
        ("bytes in the other order", readers("vec4<u32>(24u, 16u, 8u, 0u)", "vec4<u32>(0u, 8u, 16u, 24u)")),
    ] {
        noticed_stored(gpu, fault, INT8, None, &edits);
    }
    // Weights are summed without the scales of their values.
    noticed_stored(
        gpu,
        "scaled weights are summed",
        INT8,
        None,
        &[
            edit(
                KernelId::Prefill,
                "        sum_0 += p_0_0;\n        p_0_0 *= v_scale_0;",
                "        p_0_0 *= v_scale_0;\n        sum_0 += p_0_0;",
            ),
            edit(KernelId::Decode, "sum += p;", "sum += p * scales_of[key].y;"),
        ],
    );
}

/// A key's scale comes before the soft cap: after it, it would only shrink what is left.
#[test]
fn scales_before_modifiers() {
    let Some(gpu) = gpu() else { return };
    let spec = spec("softcap");
    let plain = build(&spec).unwrap();
    let options = AttentionOptions::new(plain.geometry()).with_causal(true).with_softcap(Some(2.0));
    let (q, q_indptr, kv) = (plain.q().clone(), plain.q_indptr().to_vec(), plain.kv().clone());
    let case = Case::new(*plain.geometry(), options, q, q_indptr, kv).unwrap();
    let edits = |config: &KernelConfig| {
        let rows = config.variants.prefill.rows_per_lane;
        let keys = config.variants.prefill.step_keys;
        let mut edits = Vec::new();
        for (r, k) in (0..rows).flat_map(|r| (0..keys).map(move |k| (r, k))) {
            let scale = format!("        s_{r}_{k} *= k_scale_{k};\n");
            edits.push(edit_text(KernelId::Prefill, scale, String::new()));
            let scored = format!("scored(scores_{r}, step + {k}u, s_{r}_{k});");
            let late = format!(
                "scored(scores_{r}, step + {k}u, s_{r}_{k}); let late_{r}_{k} = score_{r}_{k}.value * k_scale_{k};"
            );
            edits.push(edit_text(KernelId::Prefill, scored, late));
            for (from, to) in [
                ("max(m_{r}, score_{r}_{k}.value)", "max(m_{r}, late_{r}_{k})"),
                ("weight(score_{r}_{k}.value", "weight(late_{r}_{k}"),
            ] {
                let fill = |text: &str| text.replace("{r}", &r.to_string()).replace("{k}", &k.to_string());
                edits.push(edit_text(KernelId::Prefill, fill(from), fill(to)));
            }
        }
        edits
    };
    let kv = |options| RunOptions { kv: Some(INT8), ..options };
    noticed_with(gpu, "scale after the soft cap", (&spec, &case), kv, edits, judged);
}

#[test]
fn scales_of_heads() {
    let Some(gpu) = gpu() else { return };
    for (fault, edits) in [
        ("keys with the value's", readers("return head_scales(kv_head).x;", "return head_scales(kv_head).y;")),
        ("values with the key's", readers("return head_scales(kv_head).y;", "return head_scales(kv_head).x;")),
        ("one for all heads", readers("return heads[kv_head];", "return heads[0];")),
        ("bias of 8", readers("vec4<u32>(0x3c000000u)", "vec4<u32>(0x3b800000u)")),
        ("no sign", readers("bits | (bytes & vec4<u32>(0x80000000u))", "bits")),
        ("6 bits", readers("& vec4<u32>(0x7fu)", "& vec4<u32>(0x3fu)")),
    ] {
        noticed_stored(gpu, fault, FP8, None, &edits);
    }
    // One value so large that the others of its head are among the smallest numbers.
    let fault = "small numbers are lost";
    let spec = spec(fault);
    let mut sequences = generate(&spec).unwrap();
    sequences.iter_mut().for_each(|sequence| sequence.v[0] = 4e4);
    let case = assemble(&spec, &sequences).unwrap();
    let edits = readers("vec4<f32>(magnitude) * 0.001953125", "vec4<f32>(magnitude) * 0.0");
    noticed_in(gpu, fault, (&spec, &case), FP8, None, &edits);
}

#[test]
fn what_an_append_stores() {
    let Some(gpu) = gpu() else { return };
    let one = |from, to| [edit(KernelId::Append, from, to)];
    for (kv, fault, edits) in [
        (INT8, "the largest of one chunk", one("part_max[lane - first_chunk + i]", "part_max[lane]")),
        (INT8, "the largest with its sign", one("max(abs(chunk.lo), abs(chunk.hi))", "max(chunk.lo, chunk.hi)")),
        (
            INT8,
            "cut off",
            one("vec4<i32>(round(clamp(numbers, -limit, limit)))", "vec4<i32>(clamp(numbers, -limit, limit))"),
        ),
        (INT8, "steps of 128", one("127.0 / largest", "128.0 / largest")),
        (INT8, "a scale of 128", one("largest / 127.0", "largest / 128.0")),
        (INT8, "no scale is written", one("store_pages(select(scale_k, scale_v, is_value), bitcast<u32>(scale));", "")),
        (INT8, "scales of keys alone", one("store_pages(select(scale_k, scale_v, is_value)", "store_pages(scale_k")),
        (FP8, "not rounded", one("+ vec4<u32>(0x7ffffu) +", "+ vec4<u32>(0u) +")),
        (
            FP8,
            "no small numbers",
            one("small, magnitude < vec4<u32>(0x3c800000u)", "vec4<u32>(0u), magnitude < vec4<u32>(0x3c800000u)"),
        ),
        (
            FP8,
            "the other scale",
            one(
                "select(heads[kv_head].x, heads[kv_head].y, is_value)",
                "select(heads[kv_head].y, heads[kv_head].x, is_value)",
            ),
        ),
        (FP8, "one byte moved", one("(bytes.y << 8u)", "(bytes.y << 16u)")),
        (KvDtype::Bf16.into(), "bf16 cut off", one("vec4<u32>(0x7fffu)", "vec4<u32>(0u)")),
        (KvDtype::F16.into(), "f16 cut off", one("vec4<u32>(0xfffu)", "vec4<u32>(0u)")),
        (
            KvDtypes { k: KvDtype::Fp8, v: KvDtype::F16 },
            "keys as values",
            one("let is_value = index >= rows;", "let is_value = index > rows;"),
        ),
    ] {
        noticed_stored(gpu, fault, kv, None, &edits);
    }
}

#[test]
fn rotations() {
    let Some(gpu) = gpu() else { return };
    let one = |from, to| [edit(KernelId::Append, from, to)];
    for pairing in [Pairing::Interleaved, Pairing::HalfSplit] {
        let rotary = Rotary::new(pairing, 16, 100.0).unwrap().from_element(4);
        for (fault, edits) in [
            ("backwards", one("select(-turned, turned, is_second)", "select(turned, -turned, is_second)")),
            ("both alike", one("select(-turned, turned, is_second)", "turned")),
            ("the angles of the token before", one("2u * (token *", "2u * ((max(token, 1u) - 1u) *")),
            (
                "sine for cosine",
                one("let cosine = bitcast<f32>(plan[turn]);", "let cosine = bitcast<f32>(plan[turn + 1u]);"),
            ),
            ("from the first element on", one("const ROTARY_FIRST = 4u;", "const ROTARY_FIRST = 0u;")),
            ("two elements fewer", one("place >= ROTARY_DIMS {", "place >= ROTARY_DIMS - 2u {")),
        ] {
            let fault = format!("{fault}, {pairing:?}");
            noticed_stored(gpu, &fault, KvDtype::F16.into(), Some(&rotary), &edits);
        }
    }
    // One pairing for the other.
    let interleaved = Rotary::new(Pairing::Interleaved, 16, 100.0).unwrap();
    let halves = [
        edit(KernelId::Append, "let pair = place / 2u;", "let pair = place % (ROTARY_DIMS / 2u);"),
        edit(KernelId::Append, "let is_second = place % 2u == 1u;", "let is_second = place >= ROTARY_DIMS / 2u;"),
        edit(
            KernelId::Append,
            "select(i + 1u, i - 1u, is_second)",
            "select(i + ROTARY_DIMS / 2u, i - ROTARY_DIMS / 2u, is_second)",
        ),
    ];
    noticed_stored(gpu, "halves for neighbours", KvDtype::F16.into(), Some(&interleaved), &halves);
}
