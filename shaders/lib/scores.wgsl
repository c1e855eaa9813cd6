// What happens to a score besides the scale: the one place for masks and modifiers. What is off is not compiled in.
//
// In this order (natural units; the kernels keep scores in units of log2):
//   s = scale * q . k;  s = softcap * tanh(s / softcap);  s += slope * (key - position);  s += bias
// A key is hidden by the causal mask or window, by the mask, or by a bias of -inf; or because another dispatch takes it.

// What a row's scores need to know of the row.
struct ScoreRow {
    // Keys `begin .. end` are in reach.
    end: u32,
    //if BEGIN
    begin: u32,
    //end
    //if GROUPED
    // First entry of the page table in `plan`.
    entries: u32,
    //end
    //if ALIBI
    position: i32,
    slope_log2: f32,
    //end
    //if MASK
    mask: u32,
    // Whether the mask is looked at. Not where it hides none of the keys from any row.
    tested: bool,
    //end
    //if BIAS
    bias: u32,
    //end
}

struct Score {
    // NO_SCORE where the key is hidden.
    value: f32,
    visible: bool,
}

// Of tile row `row` of an item's sequence.
fn score_row(seq: Sequence, item: WorkItem, row: u32) -> ScoreRow {
    //if SHARED
    // Rows of several sequences go through a shared prefix. Each sees of it what it would see in its own sequence, and
    // nothing past the item's keys, which may begin and end inside a step.
    let packed_row = seq.q_begin + row / GROUP;
    let own = sequence(plan[params.owners + packed_row]);
    let token = packed_row - own.q_begin;
    //else
    let own = seq;
    let token = row / GROUP;
    //end
    //if HEADS
    let head = item.kv_head * GROUP + row % GROUP;
    //else
    //if BIAS
    let head = item.kv_head * GROUP + row % GROUP;
    //end
    //end
    return ScoreRow(
        //if SHARED
        min(end_visible(own, token), item.key_end),
        max(first_visible(own, token), item.key_begin),
        //else
        end_visible(own, token),
        //if BEGIN
        first_visible(own, token),
        //end
        //end
        //if GROUPED
        params.page_ids + seq.page_begin,
        //end
        //if ALIBI
        i32(own.kv_len + token) - i32(own.q_len),
        heads[head].x * LOG2_E,
        //end
        //if MASK
        params.masks + own.mask_begin + token * ((own.kv_len + 31u) / 32u),
        true,
        //end
        //if BIAS
        head * params.bias_head_stride + own.bias_begin + token * own.kv_len,
        //end
    );
}

// `s` comes from queries that were scaled by `params.q_factor`. A hidden key is hidden before anything is computed from
// its score.
fn scored(row: ScoreRow, key: u32, s: f32) -> Score {
    var visible = key < row.end;
    //if BEGIN
    visible = visible && key >= row.begin;
    //end
    //if GROUPED
    visible = visible && is_here(plan[row.entries + key / params.page_size]);
    //end
    //if MASK
    if row.tested {
        visible = visible && ((plan[row.mask + key / 32u] >> (key % 32u)) & 1u) != 0u;
    }
    //end
    var value = s;
    //if SOFTCAP
    value = soft_capped(value);
    //end
    //if ALIBI
    value = fma(row.slope_log2, f32(i32(key) - row.position), value);
    //end
    //if BIAS
    let added = bias_at(row.bias + key);
    visible = visible && added.visible;
    value = fma(added.value, LOG2_E, value);
    //end
    return Score(select(NO_SCORE, value, visible), visible);
}

//if SOFTCAP
// softcap * log2(e) * tanh(x). WGSL's own tanh may be off by 1e-5; this is off by a few units of the last place of 1.
fn soft_capped(x: f32) -> f32 {
    let e = exp2(-2.0 * LOG2_E * abs(x));
    return sign(x) * params.softcap_log2 * ((1.0 - e) / (1.0 + e));
}
//end

//if BIAS
// The element of that index: its value, or that it is -inf, as told by its bits.
fn bias_at(index: u32) -> Score {
    //if BIAS_F32
    let bits = bias[index];
    let visible = bits != NEGATIVE_INFINITY_BITS;
    return Score(bitcast<f32>(select(0u, bits, visible)), visible);
    //else
    let half = (bias[index / 2u] >> (16u * (index % 2u))) & 0xffffu;
    let visible = half != 0xfc00u;
    return Score(unpack2x16float(select(0u, half, visible)).x, visible);
    //end
}
//end
