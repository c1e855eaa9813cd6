//! Well-formed files whose tensors cannot be used.

use crate::support::{File, check_refusals, refusal};

#[test]
fn tensors_missing_or_in_conflict() {
    let (flat, paged) = (File::contiguous, File::paged);
    check_refusals(&[
        refusal("no q", &flat().without("q"), &["`q` is missing", "[total_q, q_heads, head_dim]"]),
        refusal("no k", &flat().without("k"), &["`k` is missing"]),
        refusal("no v", &flat().without("v"), &["`v` is missing"]),
        refusal("neither", &flat().without("k").without("v").without("kv_indptr"), &["`k` is missing", "`k_pages`"]),
        refusal(
            "no q_indptr",
            &flat().without("q_indptr"),
            &["`q_indptr` is missing", "one sequence", "`kv_indptr` is for 2"],
        ),
        refusal("no kv_indptr", &flat().without("kv_indptr"), &["`kv_indptr` is missing", "`q_indptr` is for 2"]),
        refusal("no k_pages", &paged().without("k_pages"), &["`k_pages` is missing"]),
        refusal("no v_pages", &paged().without("v_pages"), &["`v_pages` is missing"]),
        refusal("no page_indptr", &paged().without("page_indptr"), &["`page_indptr` is missing"]),
        refusal("no page_ids", &paged().without("page_ids"), &["`page_ids` is missing"]),
        refusal("no kv_len", &paged().without("kv_len"), &["`kv_len` is missing"]),
        refusal("no q_indptr", &paged().without("q_indptr"), &["`q_indptr` is missing", "`kv_len` is for 2"]),
        refusal("k and k_pages", &paged().f32("k", &[10, 2, 8]), &["`k_pages`", "together with `k`"]),
        refusal("v and k_pages", &paged().f32("v", &[10, 2, 8]), &["`k_pages`", "together with `v`"]),
        refusal("k and v_pages", &flat().f32("v_pages", &[5, 4, 2, 8]), &["`v_pages`", "together with `k`"]),
        refusal("k and page_ids", &flat().i32("page_ids", &[0]), &["`page_ids`", "together with `k`"]),
        refusal("k_pages and kv_indptr", &paged().i32("kv_indptr", &[0, 1, 2]), &["together with `kv_indptr`"]),
    ]);
}

/// 4 query heads; 1 row on 4 keys and 2 on 6 take 16 entries of a mask or a bias.
#[test]
fn tensors_that_change_scores() {
    let flat = File::contiguous;
    let mask = |dtype, entries: &[u8]| flat().raw("mask", dtype, &[entries.len()], entries.to_vec());
    let mut entries = [1; 16];
    entries[11] = 2;
    let bf16 = flat().raw("bias", "BF16", &[1, 16], vec![0; 32]);
    check_refusals(&[
        refusal("slopes in f16", &flat().f16_zeros("alibi_slopes", &[4]), &["`alibi_slopes` is F16", "F32"]),
        refusal("slopes of KV heads", &flat().f32("alibi_slopes", &[2]), &["`alibi_slopes`", "[2]", "[4]"]),
        refusal("slopes of rank 2", &flat().f32("alibi_slopes", &[4, 1]), &["`alibi_slopes`", "[4, 1]", "1 dimension"]),
        refusal("slope NaN", &flat().f32_with("alibi_slopes", &[4], 2, f32::NAN), &["`alibi_slopes`", "NaN", "[2]"]),
        refusal("five sinks", &flat().f32("sinks", &[5]), &["`sinks`", "[5]", "[4]"]),
        refusal("sink", &flat().f32_with("sinks", &[4], 3, f32::NEG_INFINITY), &["`sinks`", "-inf", "[3]", "finite"]),
        refusal("large sink", &flat().f32_with("sinks", &[4], 1, 1e38), &["`sinks`", "1.0000e38", "[1]", "5.8"]),
        refusal("short mask", &mask("U8", &[1; 15]), &["`mask`", "[15]", "[16]", "q_len * kv_len"]),
        refusal(
            "mask of rank 2",
            &flat().raw("mask", "U8", &[2, 8], vec![1; 16]),
            &["`mask`", "[2, 8]", "1 dimension"],
        ),
        refusal("mask of numbers", &flat().f32("mask", &[16]), &["`mask` is F32", "U8 or BOOL"]),
        refusal("mask of twos", &mask("U8", &entries), &["`mask`[11] is 2", "0 (hidden) or 1 (visible)"]),
        refusal("BOOL of twos", &mask("BOOL", &entries), &["`mask`[11] is 2"]),
        refusal("mask on pages", &File::paged().raw("mask", "U8", &[0], vec![]), &["`mask`", "[0]", "[21]"]),
        refusal("bias in bf16", &bf16, &["`bias` is BF16", "F32 or F16"]),
        refusal("bias of KV heads", &flat().f32("bias", &[2, 16]), &["`bias`", "[2, 16]", "[1 or 4, 16]"]),
        refusal("bias of rank 3", &flat().f32("bias", &[4, 2, 8]), &["`bias`", "[4, 2, 8]", "2 dimensions"]),
        refusal("bias of too few", &flat().f32("bias", &[1, 10]), &["`bias`", "[1, 10]", "16"]),
        refusal("bias NaN", &flat().f32_with("bias", &[4, 16], 35, f32::NAN), &["`bias`", "NaN", "[2, 3]", "-inf"]),
        refusal("bias inf", &flat().f32_with("bias", &[1, 16], 3, f32::INFINITY), &["`bias`", "inf", "[0, 3]"]),
        // What frameworks mask with in f32 is no score.
        refusal("least number", &flat().f32_with("bias", &[1, 16], 3, f32::MIN), &["row 0", "key 3", "3.4028e38"]),
    ]);
}

#[test]
fn types() {
    let (flat, paged) = (File::contiguous, File::paged);
    check_refusals(&[
        refusal("q", &flat().raw("q", "F64", &[3, 4, 8], vec![0; 768]), &["`q` is F64", "F32, F16 or BF16"]),
        refusal("q", &flat().raw("q", "I32", &[3, 4, 8], vec![0; 384]), &["`q` is I32", "F32, F16 or BF16"]),
        refusal("k", &flat().raw("k", "U8", &[10, 2, 8], vec![0; 160]), &["`k` is U8", "F32, F16 or BF16"]),
        refusal("v", &flat().raw("v", "F8_E4M3", &[10, 2, 8], vec![0; 160]), &["`v` is F8_E4M3"]),
        refusal("v unlike k", &flat().raw("v", "F16", &[10, 2, 8], vec![0; 320]), &["`v` is f16", "f32"]),
        refusal(
            "v_pages unlike k_pages",
            &paged().raw("v_pages", "BF16", &[5, 4, 2, 8], vec![0; 640]),
            &["`v_pages` is bf16", "f32"],
        ),
        refusal("q_indptr", &flat().f32("q_indptr", &[3]), &["`q_indptr` is F32", "I32, U32 or I64"]),
        refusal("kv_indptr", &flat().raw("kv_indptr", "U64", &[3], vec![0; 24]), &["`kv_indptr` is U64"]),
        refusal("page_indptr", &paged().raw("page_indptr", "I16", &[3], vec![0; 6]), &["`page_indptr` is I16"]),
        refusal("page_ids", &paged().raw("page_ids", "U8", &[4], vec![0; 4]), &["`page_ids` is U8"]),
        refusal("kv_len", &paged().raw("kv_len", "F64", &[2], vec![0; 16]), &["`kv_len` is F64"]),
    ]);
}

#[test]
fn shapes() {
    let (flat, paged) = (File::contiguous, File::paged);
    check_refusals(&[
        refusal("q rank 2", &flat().f32("q", &[3, 32]), &["`q`", "[3, 32]", "3 dimensions"]),
        refusal("q rank 4", &flat().f32("q", &[1, 3, 4, 8]), &["`q`", "[1, 3, 4, 8]", "3 dimensions"]),
        refusal("q scalar", &flat().f32("q", &[]), &["`q`", "[]", "3 dimensions"]),
        refusal("k rank 4", &flat().f32("k", &[10, 1, 2, 8]), &["`k`", "3 dimensions"]),
        refusal("v rank 1", &flat().f32("v", &[160]), &["`v`", "[160]", "3 dimensions"]),
        refusal("k_pages rank 3", &paged().f32("k_pages", &[20, 2, 8]), &["`k_pages`", "4 dimensions"]),
        refusal("v_pages rank 5", &paged().f32("v_pages", &[5, 4, 1, 2, 8]), &["`v_pages`", "4 dimensions"]),
        refusal(
            "q_indptr rank 2",
            &flat().raw("q_indptr", "I32", &[3, 1], vec![0; 12]),
            &["`q_indptr`", "[3, 1]", "one dimension"],
        ),
        refusal("page_ids scalar", &paged().raw("page_ids", "I64", &[], vec![0; 8]), &["`page_ids`", "one dimension"]),
        refusal("no query heads", &flat().f32("q", &[3, 0, 8]), &["`q`", "[3, 0, 8]", "q_heads is 0"]),
        refusal("no KV heads", &flat().f32("k", &[10, 0, 8]).f32("v", &[10, 0, 8]), &["`k`", "kv_heads is 0"]),
        refusal("heads", &flat().f32("q", &[3, 3, 8]), &["`q`", "[3, 3, 8]", "q_heads 3", "kv_heads 2"]),
        refusal("fewer query heads", &flat().f32("q", &[3, 1, 8]), &["`q`", "q_heads 1", "kv_heads 2"]),
        refusal("billions of heads", &flat().f32("q", &[0, 1 << 31, 8]), &["`q`", "[0, 2147483648, 8]", "65536 heads"]),
        refusal("v heads", &flat().f32("v", &[10, 1, 8]), &["`v`", "[10, 1, 8]", "2"]),
        refusal("v_pages heads", &paged().f32("v_pages", &[5, 4, 4, 8]), &["`v_pages`", "[5, 4, 4, 8]", "2"]),
        refusal("k dimension", &flat().f32("k", &[10, 2, 16]), &["`k`", "[10, 2, 16]", "8"]),
        refusal("k_pages dimension", &paged().f32("k_pages", &[5, 4, 2, 7]), &["`k_pages`", "[5, 4, 2, 7]", "8"]),
        refusal("q dimension 0", &flat().f32("q", &[3, 4, 0]), &["`q`", "head_dim is 0"]),
        refusal("v dimension 0", &flat().f32("v", &[10, 2, 0]), &["`v`", "v_head_dim is 0"]),
        refusal("q dimension 577", &flat().f32("q", &[3, 4, 577]), &["`q`", "[3, 4, 577]", "576", "not supported"]),
        refusal("v dimension 513", &flat().f32("v", &[10, 2, 513]), &["`v`", "[10, 2, 513]", "512"]),
        refusal("v rows", &flat().f32("v", &[9, 2, 8]), &["`v`", "[9, 2, 8]", "10"]),
        refusal("v_pages pages", &paged().f32("v_pages", &[4, 4, 2, 8]), &["`v_pages`", "[4, 4, 2, 8]", "5"]),
        refusal("v_pages page size", &paged().f32("v_pages", &[5, 8, 2, 8]), &["`v_pages`", "[5, 8, 2, 8]", "4"]),
        refusal(
            "page size 0",
            &paged().f32("k_pages", &[5, 0, 2, 8]).f32("v_pages", &[5, 0, 2, 8]),
            &["`k_pages`", "[5, 0, 2, 8]", "page_size from 1"],
        ),
        refusal(
            "dimension past 32 bits",
            &flat().raw("q", "F32", &[0, 1 << 33, 8], vec![]),
            &["`q`", "8589934592", "4294967295"],
        ),
    ]);
}

#[test]
fn index_values() {
    let (flat, paged) = (File::contiguous, File::paged);
    check_refusals(&[
        refusal("q_indptr start", &flat().i32("q_indptr", &[1, 1, 3]), &["`q_indptr`", "starts at 1", "0 is needed"]),
        refusal("q_indptr order", &flat().i32("q_indptr", &[0, 4, 3]), &["`q_indptr`[2] is 3", "4"]),
        refusal("q_indptr short end", &flat().i32("q_indptr", &[0, 1, 2]), &["`q_indptr` ends at 2", "3"]),
        refusal("q_indptr long end", &flat().i32("q_indptr", &[0, 1, 4]), &["`q_indptr` ends at 4", "3"]),
        refusal("q_indptr empty", &flat().i32("q_indptr", &[]), &["`q_indptr` has 0 entries"]),
        refusal("q_indptr length", &flat().i32("q_indptr", &[0, 1, 2, 3]), &["3", "4"]),
        refusal("kv_indptr start", &flat().i32("kv_indptr", &[2, 4, 10]), &["`kv_indptr`", "starts at 2"]),
        refusal("kv_indptr order", &flat().i32("kv_indptr", &[0, 11, 10]), &["`kv_indptr`[2] is 10", "11"]),
        refusal("kv_indptr end", &flat().i32("kv_indptr", &[0, 4, 9]), &["`kv_indptr` ends at 9", "10"]),
        refusal("kv_indptr empty", &flat().i32("kv_indptr", &[]), &["`kv_indptr` has 0 entries"]),
        refusal("kv_indptr length", &flat().i32("kv_indptr", &[0, 10]), &["indptr` has"]),
        refusal("page_indptr start", &paged().i32("page_indptr", &[1, 2, 4]), &["`page_indptr`", "starts at 1"]),
        refusal("page_indptr order", &paged().i32("page_indptr", &[0, 5, 4]), &["`page_indptr`[2] is 4", "5"]),
        refusal("page_indptr end", &paged().i32("page_indptr", &[0, 2, 3]), &["`page_indptr` ends at 3", "4"]),
        refusal("page_indptr length", &paged().i32("page_indptr", &[0, 4]), &["`page_indptr` has 2 entries", "3"]),
        refusal("page_indptr empty", &paged().i32("page_indptr", &[]), &["`page_indptr` has 0 entries", "3"]),
        refusal("kv_len length", &paged().i32("kv_len", &[5, 8, 0]), &["`q_indptr` has 3 entries", "4", "`kv_len`"]),
        refusal("page id", &paged().i32("page_ids", &[1, 0, 5, 2]), &["`page_ids`[2] is 5", "5 pages"]),
        refusal("page id", &paged().u32("page_ids", &[1, 0, 3, u32::MAX]), &["`page_ids`[3] is 4294967295"]),
        // An entry that no key reaches is still wrong.
        refusal(
            "spare page id",
            &paged().i32("kv_len", &[4, 0]).i32("page_ids", &[1, 0, 3, 9]),
            &["`page_ids`[3] is 9"],
        ),
        refusal("past pages", &paged().i32("kv_len", &[9, 8]), &["`kv_len`[0] is 9", "2 pages of 4", "8"]),
        refusal("past no pages", &paged().i32("page_indptr", &[0, 0, 4]), &["`kv_len`[0] is 5", "0 pages"]),
        refusal("negative q_indptr", &flat().i32("q_indptr", &[0, -1, 3]), &["`q_indptr`[1] is -1", "0 to 4294967295"]),
        refusal("negative kv_indptr", &flat().i64("kv_indptr", &[-4, 0, 10]), &["`kv_indptr`[0] is -4"]),
        refusal("negative page id", &paged().i32("page_ids", &[1, 0, 3, -1]), &["`page_ids`[3] is -1"]),
        refusal("negative length", &paged().i64("kv_len", &[i64::MIN, 8]), &["`kv_len`[0] is -9223372036854775808"]),
        refusal("negative page_indptr", &paged().i32("page_indptr", &[0, 2, -4]), &["`page_indptr`[2] is -4"]),
        refusal("large page id", &paged().i64("page_ids", &[1, 1 << 32, 3, 2]), &["`page_ids`[1] is 4294967296"]),
        refusal("large length", &paged().i64("kv_len", &[5, i64::MAX]), &["`kv_len`[1] is 9223372036854775807"]),
        refusal("large q_indptr", &flat().i64("q_indptr", &[0, 1, (1 << 32) + 3]), &["`q_indptr`[2] is 4294967299"]),
    ]);
}

#[test]
fn values() {
    let (flat, paged) = (File::contiguous, File::paged);
    let half = |bits: u16| {
        [0x3c00_u16; 160].map(|one| one.to_le_bytes()).concat()[..318]
            .iter()
            .copied()
            .chain(bits.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    check_refusals(&[
        refusal("NaN in q", &flat().f32_with("q", &[3, 4, 8], 32 + 8 + 5, f32::NAN), &["`q`", "NaN", "[1, 1, 5]"]),
        refusal("inf in q", &flat().f32_with("q", &[3, 4, 8], 0, f32::INFINITY), &["`q`", "inf", "[0, 0, 0]"]),
        refusal("-inf in k", &flat().f32_with("k", &[10, 2, 8], 159, f32::NEG_INFINITY), &["`k`", "-inf", "[9, 1, 7]"]),
        refusal("NaN in v", &flat().f32_with("v", &[10, 2, 8], 16, f32::NAN), &["`v`", "NaN", "[1, 0, 0]"]),
        refusal(
            "f16 infinity",
            &flat().raw("k", "F16", &[10, 2, 8], half(0x7c00)).raw("v", "F16", &[10, 2, 8], half(0x3c00)),
            &["`k`", "inf", "[9, 1, 7]"],
        ),
        refusal(
            "bf16 NaN",
            &flat().raw("k", "BF16", &[10, 2, 8], half(0x3f80)).raw("v", "BF16", &[10, 2, 8], half(0x7fc0)),
            &["`v`", "NaN", "[9, 1, 7]"],
        ),
        // Sequence 0 owns 5 tokens: page 1 and slot 0 of page 0.
        refusal(
            "NaN in an owned slot",
            &paged().f32_with("k_pages", &[5, 4, 2, 8], 8 + 3, f32::NAN),
            &["`k_pages`", "NaN", "[0, 0, 1, 3]"],
        ),
        refusal(
            "infinity in an owned slot",
            &paged().f32_with("v_pages", &[5, 4, 2, 8], 64 + 16 * 3, f32::INFINITY),
            &["`v_pages`", "inf", "[1, 3, 0, 0]"],
        ),
        refusal(
            "scores out of range",
            &flat().f32_values("q", &[3, 4, 8], &[1e30; 96]).f32_values("k", &[10, 2, 8], &[1e30; 160]),
            &["supported", "row"],
        ),
    ]);
}

/// More than any check comes to the end of, or any device can address.
#[test]
fn too_much() {
    let rows: Vec<u32> = (0..=1 << 18).collect();
    check_refusals(&[
        refusal(
            "keys of a sequence",
            &File::on_one_page(&[0, 1], 40_000, 2_600_000_000),
            &["sequence 0", "395200000016 bytes", "at most 17179869184"],
        ),
        refusal(
            "keys of all",
            &File::on_one_page(&rows, 1, 65_536),
            &["137443147776 bytes", "over all sequences", "at most 68719476736"],
        ),
        refusal(
            "scores",
            &File::on_one_page(&[0, 1 << 20], 20, 1_100_000),
            &["1153433600000 scores", "at most 1099511627776"],
        ),
        refusal(
            "a page past 32 bits, in a pool without pages",
            &File::paged()
                .f16_zeros("k_pages", &[0, u32::MAX as usize, 1, 4])
                .f16_zeros("v_pages", &[0, u32::MAX as usize, 1, 4])
                .f32("q", &[3, 4, 4])
                .i32("page_indptr", &[0, 0, 0])
                .i32("page_ids", &[])
                .i32("kv_len", &[0, 0]),
            &["`k_pages` has shape [0, 4294967295, 1, 4]", "bytes", "can be addressed"],
        ),
    ]);
}

#[test]
fn hints() {
    let flat = File::contiguous;
    let foreign = File::default().f32("query", &[3, 4, 8]).f32("key", &[10, 2, 8]).f32("value", &[10, 2, 8]);
    check_refusals(&[
        refusal("other names", &foreign, &["`k` is missing", "`key`, `query`, `value`"]),
        refusal("other name of q", &flat().without("q").f32("Q", &[3, 4, 8]), &["`q` is missing", "the file has `Q`"]),
        refusal("a batch of q", &flat().f32("q", &[1, 3, 4, 8]), &["[batch * rows, heads, dim]", "`q_indptr`"]),
        refusal("a batch of k", &flat().f32("k", &[1, 10, 2, 8]), &["[batch * rows, heads, dim]", "`kv_indptr`"]),
        refusal(
            "heads first",
            &flat().f32("q", &[4, 3, 8]).f32("k", &[2, 10, 8]).f32("v", &[2, 10, 8]),
            &["q_heads 3", "[heads, rows, dim] must be transposed"],
        ),
    ]);
}
