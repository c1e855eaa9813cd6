//! Faults of range and of masks.

use paged_attention_cases::{Bias, BiasValues, Mask, Modifiers};

use super::*;

/// f16 accumulators that stop at 65,504, with no NaN to see: over thousands of keys of equal weight, or in high scores.
#[test]
fn fault_10_accumulators_of_too_little_range() {
    let Some(gpu) = gpu() else { return };
    // Values near 100, and weights near 1: 700 keys and more leave the range, a decode's splits do so only together.
    let flat = |lengths| CaseSpec::new("faults/10", HEADS, [lengths]).values(Values::Offset).scale(1e-3);
    let sum = "return Chunk(fma(vec4<f32>(factor), a.lo, b.lo), fma(vec4<f32>(factor), a.hi, b.hi));";
    let limits = "let limit = vec4<f32>(65504.0);";
    let clamped = format!(
        "{limits} return Chunk(clamp(fma(vec4<f32>(factor), a.lo, b.lo), -limit, limit), \
         clamp(fma(vec4<f32>(factor), a.hi, b.hi), -limit, limit));"
    );
    for (kernel, spec) in [(KernelId::Prefill, flat((40, 1_000))), (KernelId::Merge, flat((1, 1_000)))] {
        let edits = [edit_text(kernel, sum.into(), clamped.clone())];
        noticed(gpu, &format!("10 accumulators, {}", kernel.entry_point()), &spec, &edits);
    }
    // Within a split it takes larger values.
    let spec = flat((1, 200)).scale(1e-9).values(Values::EqualScores { level: 0.0 });
    let case = build(&spec).unwrap();
    let KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len } = case.kv() else { panic!("not paged") };
    let loud: Vec<f32> = v_pages.to_f32().iter().map(|v| v * 1_000.0 + 3_000.0).collect();
    let kv = KvSource::Paged {
        k_pages: k_pages.clone(),
        v_pages: paged_attention::Tensor::from_f32(Dtype::F32, v_pages.shape(), &loud).unwrap(),
        page_indptr: page_indptr.clone(),
        page_ids: page_ids.clone(),
        kv_len: kv_len.clone(),
    };
    let case = Case::new(*case.geometry(), *case.options(), case.q().clone(), case.q_indptr().to_vec(), kv).unwrap();
    noticed_case(
        gpu,
        "10 accumulators, decode",
        &spec,
        &case,
        |config| {
            let mut edits = vec![edit_text(KernelId::Decode, sum.into(), clamped.clone())];
            // Streams of keys are added up afterwards.
            if !matches!(config.variants.decode, DecodeVariant::Streams { .. }) {
                let joined = "return Chunk(clamp(total.lo, -limit, limit), clamp(total.hi, -limit, limit));";
                edits.push(edit_text(KernelId::Decode, "return total;".into(), format!("{limits} {joined}")));
            }
            edits
        },
        judged,
    );
    // The weights' sum, of more keys than 65,504.
    let spec = CaseSpec::new("faults/10-sum", Heads::new(1, 1, 8), [(1, 70_000)]).scale(1e-3);
    let edits = [edit(
        KernelId::Merge,
        "fma(state.l, kept, part.l * added)",
        "min(65504.0, fma(state.l, kept, part.l * added))",
    )];
    noticed(gpu, "10 sum, merge", &spec.clone().dtype(Dtype::F16), &edits);
    // Scores: keys alike, so that only the row's sum tells, and keys unlike, of which the highest then share the weight.
    let dot = "return fma(a.hi.w, b.hi.w, s);";
    for (spec, values) in both("10").into_iter().flat_map(|spec| {
        [Values::EqualScores { level: 1e5 }, Values::Spread { score: 1e5 }].map(|values| (spec.clone(), values))
    }) {
        let kernels = [KernelId::Prefill, KernelId::Decode];
        let edits = kernels.map(|kernel| edit(kernel, dot, "return clamp(fma(a.hi.w, b.hi.w, s), -65504.0, 65504.0);"));
        noticed(gpu, "10 scores", &spec.values(values), &edits);
    }
}

#[test]
fn fault_19_masks_applied_twice_or_to_other_rows() {
    let Some(gpu) = gpu() else { return };
    // More keys than rows and a group of two: rows, tokens and keys all count differently.
    let shapes = [(40, 75), (3, 20)];
    let visible = "return select(min(end, seq.kv_len), seq.kv_len, params.reach_right == UNLIMITED);";
    let causal = |end: &str| format!("return select({end}, seq.kv_len, params.reach_right == UNLIMITED);");
    for lengths in shapes {
        let spec = CaseSpec::new("faults/19", HEADS, [lengths]).causal(true).paged(Pool::new(4));
        let kernels = [KernelId::Prefill, KernelId::Decode];
        for (what, to) in [
            // Aligned to the first key on top of the last.
            ("twice", causal("min(min(end, token + 1u), seq.kv_len)")),
            ("twice, shifted", causal("max(min(end, seq.kv_len), 1u) - 1u")),
            ("square", causal("min(token + 1u, seq.kv_len)")),
            ("none", "return seq.kv_len;".into()),
        ] {
            // A decode's tile is one token, whose keys end where the item's do.
            if what == "none" && lengths.0 < 16 {
                continue;
            }
            noticed(
                gpu,
                &format!("19 {what}"),
                &spec,
                &kernels.map(|kernel| edit_text(kernel, visible.into(), to.clone())),
            );
        }
        // The group's heads taken for tokens.
        let edits = kernels.map(|kernel| edit(kernel, "let token = row / GROUP;", "let token = row;"));
        if lengths.0 > 16 {
            noticed(gpu, "19 rows for tokens", &spec, &edits);
        }
        // A mask that nobody asked for.
        let to = "return min(seq.kv_len + token + 1u - seq.q_len, seq.kv_len);";
        noticed(gpu, "19 unasked", &spec.causal(false), &kernels.map(|kernel| edit(kernel, visible, to)));
    }
}

/// Masks and biases of other rows and heads, more keys than rows: a kernel that counts them as if they were square, forgets the
/// head, or takes the causal mask on top of one that already has it, is noticed.
#[test]
fn fault_19_masks_and_biases_of_other_rows_and_heads() {
    let Some(gpu) = gpu() else { return };
    let kernels = [KernelId::Prefill, KernelId::Decode];
    let both = |from: &'static str, to: &'static str| kernels.map(|kernel| edit(kernel, from, to));
    let lengths = [(40, 75), (3, 300), (1, 90)];
    let masked = |mask| {
        let modifiers = Modifiers { mask: Some(mask), ..Modifiers::NONE };
        CaseSpec::new("faults/19", HEADS, lengths).modified(modifiers).paged(Pool::new(4)).seed(19)
    };
    let row = "token * ((own.kv_len + 31u) / 32u)";
    for (what, from, to) in [
        ("square mask", row, "token * ((own.q_len + 31u) / 32u)"),
        ("the mask of tile rows", row, "row * ((own.kv_len + 31u) / 32u)"),
        ("one mask for all sequences", "own.mask_begin + ", "0u * own.mask_begin + "),
        ("the mask of the next key", ">> (key % 32u)) & 1u)", ">> ((key + 1u) % 32u)) & 1u)"),
    ] {
        noticed(gpu, &format!("19 {what}"), &masked(Mask::Random(60)), &both(from, to));
    }
    // A mask that lets rows see ahead, and a kernel that knows better.
    let visible = "var visible = key < row.end;";
    let causal = "var visible = key < min(row.end, own_end(row));";
    let function = "struct Score {";
    let own_end = "fn own_end(row: ScoreRow) -> u32 {\n    return max(row.end, 20u) - 20u;\n}\n\nstruct Score {";
    let edits: Vec<SourceEdit> = kernels
        .into_iter()
        .flat_map(|kernel| [edit(kernel, visible, causal), edit(kernel, function, own_end)])
        .collect();
    noticed(gpu, "19 a reach on top of a mask", &masked(Mask::Prefix(70)), &edits);
    let bias = Bias { per_head: true, dtype: Dtype::F32, values: BiasValues::Normal(3.0) };
    let biased = CaseSpec::new("faults/19", HEADS, lengths)
        .modified(Modifiers { bias: Some(bias), ..Modifiers::NONE })
        .paged(Pool::new(4));
    for (what, from, to) in [
        ("one bias for all heads", "head * params.bias_head_stride", "0u * params.bias_head_stride"),
        ("a group's bias", "head * params.bias_head_stride", "head / GROUP * params.bias_head_stride"),
        ("square bias", "token * own.kv_len", "token * own.q_len"),
        ("one bias for all sequences", "own.bias_begin + ", "0u * own.bias_begin + "),
    ] {
        noticed(gpu, &format!("19 {what}"), &biased, &both(from, to));
    }
}
