// Decode: exact attention of few query rows over one split of a sequence's keys (split-KV, as in Flash-Decoding).
//
// Grid: one workgroup per (work item, KV head); an item is DECODE_ROWS tile rows and the keys of one split of
// SPLIT_KEYS. A tile row is (token, query head of the group), so each key and value is read once for all of them.
//
// Scores, in one of three ways:
// - without subgroups: a lane per key, the queries in workgroup memory;
// - STREAMS: a lane per key, each lane walking through keys that lie one after the other; the queries spread over the
//   subgroup's registers and broadcast;
// - otherwise: LANES_PER_KEY lanes per key, each with chunks of it, so that neighbouring lanes read neighbouring words;
//   sums by exchange within the subgroup.
// With subgroups, a workgroup is one subgroup of DECODE_SUBGROUP lanes.
// Weights: PARTS lanes per row. Values: a lane per chunk of 8 dimensions (V_SPAN chunks where there are more chunks than
// lanes), KEY_STREAMS keys at a time.
// Which lane takes which key depends on the key's place in its split alone: a row's bits do not depend on keys
// that it does not see.
//
// Lines between `//each`, `//if` and `//end` are repeated or chosen by the host: see src/kernels/template.rs.
//
// Workgroup memory: `Tiles::decode_bytes`. Preconditions: see lib/attention.wgsl, and `Tiles::new`.

//if DECODE_SUBGROUP
//else
var<workgroup> q_tile: array<Chunk, DECODE_ROWS * QK_CHUNKS>;
//end
// Scores, then weights, [DECODE_ROWS, SPLIT_KEYS]; at the end partial sums of the accumulators.
var<workgroup> scores: array<f32, SCORES>;
// Where the rows of the split's keys start: x of the key, y of the value.
var<workgroup> rows_of: array<vec2<u32>, SPLIT_KEYS>;
//if SCALED
// Their scales, alike.
var<workgroup> scales_of: array<vec2<f32>, SPLIT_KEYS>;
//end
// Not 0 where one of the split's pages does not exist.
var<workgroup> page_missing: atomic<u32>;
// Per row, PARTS partial maxima and PARTS partial sums.
var<workgroup> part_max: array<f32, DECODE_LANES>;
var<workgroup> part_sum: array<f32, DECODE_LANES>;

@compute @workgroup_size(DECODE_LANES)
fn decode(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) group_count: vec3<u32>,
    //if DECODE_SUBGROUP
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(subgroup_size) subgroup_size: u32,
    //else
    @builtin(local_invocation_index) lane: u32,
    //end
) {
    let group = linear_group(group_id, group_count);
    if group >= params.decode_groups {
        report_groups(params.decode_groups);
        return;
    }
    let item = work_item(params.decode_items, group);
    let seq = sequence(item.sequence);
    let rows = min(seq.rows_end - item.first_row, DECODE_ROWS);
    // Keys are counted from the beginning of their split, wherever the item's own begin: `first .. keys`.
    let split_begin = item.key_begin / SPLIT_KEYS * SPLIT_KEYS;
    let first = item.key_begin - split_begin;
    let keys = select(0u, item.key_end - split_begin, item.key_begin < item.key_end);
    // A page that does not exist is not read: its keys get the rows of page 0, and the item's outcome is dropped
    // (`finish_split`). Loop bounds don't depend on it, so that subgroup operations stay under uniform control.
    var missing = false;
    for (var key = aligned(first, DECODE_LANES) + lane; key < keys; key += DECODE_LANES) {
        if key >= first {
            let page = checked_page(plan[page_entry(seq, split_begin + key)]);
            missing = missing || !page.exists;
            let place = select(0u, page.id, page.exists);
            rows_of[key] = key_rows(place, item.kv_head, split_begin + key);
            //if SCALED
            scales_of[key] = key_scales(place, item.kv_head, split_begin + key);
            //end
        }
    }
    if missing {
        atomicOr(&page_missing, 1u);
    }
    //each r DECODE_ROWS
    //if MASK
    var scores_$r = score_row(seq, item, item.first_row + min($ru, rows - 1u));
    scores_$r.tested = item.runs != 1u || mask_run(item.first_run).tested;
    //else
    let scores_$r = score_row(seq, item, item.first_row + min($ru, rows - 1u));
    //end
    //end

    //if DECODE_SUBGROUP
    if subgroup_size != DECODE_SUBGROUP {
        report_error(ERROR_SUBGROUP);
    }
    // Lane l holds chunks l, l + LANES_PER_KEY, .. of every row. Rows past the last are zero and never written.
    let lane_of_key = lane % LANES_PER_KEY;
    //each r DECODE_ROWS
    //each i Q_LOADS
    var q_$r_$i = ZERO_CHUNK;
    if $ru < rows && lane_of_key + ${i * LANES_PER_KEY}u < QK_CHUNKS {
        let query = query_row(seq, item.kv_head, item.first_row + $ru);
        q_$r_$i = scaled(load_q(query, lane_of_key + ${i * LANES_PER_KEY}u), params.q_factor);
    }
    //end
    //end
    workgroupBarrier();
    //if STREAMS
    for (var i = 0u; i < SPLIT_KEYS / DECODE_SUBGROUP && keys > 0u; i++) {
        // A lane without a key repeats another one and keeps nothing.
        let key = lane * (SPLIT_KEYS / DECODE_SUBGROUP) + i;
        let k_row = rows_of[clamp(key, first, keys - 1u)].x;
        //if K_SCALED
        let k_scale = scales_of[clamp(key, first, keys - 1u)].x;
        //end
        //each r DECODE_ROWS
        var s_$r = 0.0;
        //end
        //each c QK_CHUNKS
        {
            let k = load_key(k_row, $cu);
            //each r DECODE_ROWS
            let q_$r = Chunk(
                subgroupBroadcast(q_$r_${c / DECODE_SUBGROUP}.lo, ${c % DECODE_SUBGROUP}u),
                subgroupBroadcast(q_$r_${c / DECODE_SUBGROUP}.hi, ${c % DECODE_SUBGROUP}u),
            );
            s_$r = dot_chunk(q_$r, k, s_$r);
            //end
        }
        //end
        if key >= first && key < keys {
            //each r DECODE_ROWS
            //if K_SCALED
            s_$r *= k_scale;
            //end
            scores[$ru * SPLIT_KEYS + key] = scored(scores_$r, split_begin + key, s_$r).value;
            //end
        }
    }
    //else
    const TURN = DECODE_SUBGROUP / LANES_PER_KEY;
    for (var turn = aligned(first, TURN); turn < keys; turn += TURN) {
        let key = turn + lane / LANES_PER_KEY;
        let k_row = rows_of[clamp(key, first, keys - 1u)].x;
        //if K_SCALED
        let k_scale = scales_of[clamp(key, first, keys - 1u)].x;
        //end
        //each r DECODE_ROWS
        var s_$r = 0.0;
        //end
        //each i Q_LOADS
        {
            var k = ZERO_CHUNK;
            if lane_of_key + ${i * LANES_PER_KEY}u < QK_CHUNKS {
                k = load_key(k_row, lane_of_key + ${i * LANES_PER_KEY}u);
            }
            //each r DECODE_ROWS
            s_$r = dot_chunk(q_$r_$i, k, s_$r);
            //end
        }
        //end
        //each r DECODE_ROWS
        //each b KEY_LANE_BITS
        s_$r += subgroupShuffleXor(s_$r, 1u << $bu);
        //end
        //end
        if key >= first && key < keys && lane_of_key == 0u {
            //each r DECODE_ROWS
            //if K_SCALED
            s_$r *= k_scale;
            //end
            scores[$ru * SPLIT_KEYS + key] = scored(scores_$r, split_begin + key, s_$r).value;
            //end
        }
    }
    //end
    //else
    for (var i = lane; i < DECODE_ROWS * QK_CHUNKS; i += DECODE_LANES) {
        var chunk = ZERO_CHUNK;
        if i / QK_CHUNKS < rows {
            let query = query_row(seq, item.kv_head, item.first_row + i / QK_CHUNKS);
            chunk = scaled(load_q(query, i % QK_CHUNKS), params.q_factor);
        }
        q_tile[i] = chunk;
    }
    workgroupBarrier();
    for (var key = aligned(first, DECODE_LANES) + lane; key < keys; key += DECODE_LANES) {
        let k_row = rows_of[max(key, first)].x;
        //if K_SCALED
        let k_scale = scales_of[max(key, first)].x;
        //end
        //each r DECODE_ROWS
        var s_$r = 0.0;
        //end
        for (var c = 0u; c < QK_CHUNKS; c++) {
            let k = load_key(k_row, c);
            //each r DECODE_ROWS
            s_$r = dot_chunk(q_tile[$ru * QK_CHUNKS + c], k, s_$r);
            //end
        }
        if key >= first {
            //each r DECODE_ROWS
            //if K_SCALED
            s_$r *= k_scale;
            //end
            scores[$ru * SPLIT_KEYS + key] = scored(scores_$r, split_begin + key, s_$r).value;
            //end
        }
    }
    //end
    workgroupBarrier();

    // Maximum, weights and their sum, PARTS lanes per row.
    let row = lane / PARTS;
    let part = lane % PARTS;
    let owns_row = row < rows;
    var highest = NO_SCORE;
    for (var key = aligned(first, PARTS) + part; key < keys; key += PARTS) {
        if key >= first {
            highest = max(highest, scores[row * SPLIT_KEYS + key]);
        }
    }
    part_max[lane] = highest;
    workgroupBarrier();
    for (var i = 0u; i < PARTS; i++) {
        highest = max(highest, part_max[row * PARTS + i]);
    }
    var sum = 0.0;
    if owns_row {
        for (var key = aligned(first, PARTS) + part; key < keys; key += PARTS) {
            if key >= first {
                // What is hidden has NO_SCORE, which no score of the supported range reaches.
                let s = scores[row * SPLIT_KEYS + key];
                let p = select(0.0, weight(s, highest), s > NO_SCORE);
                //if V_SCALED
                scores[row * SPLIT_KEYS + key] = p * scales_of[key].y;
                //else
                scores[row * SPLIT_KEYS + key] = p;
                //end
                sum += p;
            }
        }
    }
    part_sum[lane] = sum;
    workgroupBarrier();

    // Weighted values: lane = (key stream, chunk). A row past the last has scores for weights, and is never written.
    //each r DECODE_ROWS
    //each i V_SPAN
    var acc_$r_$i = ZERO_CHUNK;
    //end
    //end
    //if STREAMS
    // Weights and places of SUBGROUP keys are read at once and broadcast one by one; a lane past the last chunk repeats
    // that one and keeps nothing.
    var ahead = 0u;
    for (var turn = aligned(first, DECODE_SUBGROUP); turn < keys; turn += DECODE_SUBGROUP) {
        let key = clamp(turn + lane, first, keys - 1u);
        let known = key == turn + lane;
        let v_row = rows_of[key].y;
        // Rows on small pages lie where no CPU looks ahead: their cache lines are asked for together, a row per lane.
        //each l V_ROW_LINES
        ahead |= load_pages(v_row + ${l * 4}u).x;
        //end
        //each r DECODE_ROWS
        let p_$r = select(0.0, scores[$ru * SPLIT_KEYS + key], known);
        //end
        //each k DECODE_SUBGROUP
        {
            let v_row_of_key = subgroupBroadcast(v_row, $ku);
            //each i V_SPAN
            let v_$i = load_value(v_row_of_key, min(lane + ${i * DECODE_LANES}u, V_CHUNKS - 1u));
            //end
            //each r DECODE_ROWS
            let p_of_key_$r = subgroupBroadcast(p_$r, $ku);
            //each i V_SPAN
            acc_$r_$i = fma_chunk(p_of_key_$r, v_$i, acc_$r_$i);
            //end
            //end
        }
        //end
    }
    // Never so, which no compiler knows: it keeps the loads.
    if ahead != 0u && params.kv_heads == 0u {
        report_error(ERROR_CUT_SHORT);
    }
    //else
    let chunk = lane % V_CHUNKS;
    if lane < KEY_STREAMS * V_CHUNKS {
        for (var turn = aligned(first, KEY_STREAMS) + lane / V_CHUNKS; turn < keys; turn += KEY_STREAMS) {
            let key = max(turn, first);
            //each r DECODE_ROWS
            let p_$r = select(0.0, scores[$ru * SPLIT_KEYS + key], key == turn);
            //end
            //each i V_SPAN
            if chunk + ${i * DECODE_LANES}u < V_CHUNKS {
                let v = load_value(rows_of[key].y, chunk + ${i * DECODE_LANES}u);
                //each r DECODE_ROWS
                acc_$r_$i = fma_chunk(p_$r, v, acc_$r_$i);
                //end
            }
            //end
        }
    }
    //end

    //if JOINS
    // Join the key streams, row by row, and write.
    //each r DECODE_ROWS
    workgroupBarrier();
    store_stream(lane, acc_$r_0);
    workgroupBarrier();
    if lane < V_CHUNKS && $ru < rows {
        finish_split(seq, item, $ru, lane, joined_streams(lane));
    }
    //end
    //else
    //each r DECODE_ROWS
    //each i V_SPAN
    if $ru < rows && lane + ${i * DECODE_LANES}u < V_CHUNKS {
        finish_split(seq, item, $ru, lane + ${i * DECODE_LANES}u, acc_$r_$i);
    }
    //end
    //end
    //end
    if lane == 0u && atomicLoad(&page_missing) != 0u {
        report_error(ERROR_PAGE_ID);
    }
    report_done(lane);
}

//if JOINS
// The scores are spent; their memory passes the lanes' accumulators of one row.
fn store_stream(lane: u32, acc: Chunk) {
    let word = lane * 8u;
    scores[word] = acc.lo.x;
    scores[word + 1u] = acc.lo.y;
    scores[word + 2u] = acc.lo.z;
    scores[word + 3u] = acc.lo.w;
    scores[word + 4u] = acc.hi.x;
    scores[word + 5u] = acc.hi.y;
    scores[word + 6u] = acc.hi.z;
    scores[word + 7u] = acc.hi.w;
}

fn joined_streams(chunk: u32) -> Chunk {
    var total = ZERO_CHUNK;
    for (var stream = 0u; stream < KEY_STREAMS; stream++) {
        let word = (stream * V_CHUNKS + chunk) * 8u;
        total.lo += vec4<f32>(scores[word], scores[word + 1u], scores[word + 2u], scores[word + 3u]);
        total.hi += vec4<f32>(scores[word + 4u], scores[word + 5u], scores[word + 6u], scores[word + 7u]);
    }
    return total;
}
//end

// One chunk of a row: the result where the keys were not split, else its share of the split's partial state. Empty
// where a page does not exist.
fn finish_split(seq: Sequence, item: WorkItem, r: u32, chunk: u32, sums: Chunk) {
    var acc = ZERO_CHUNK;
    var state = EMPTY_ROW;
    if atomicLoad(&page_missing) == 0u {
        acc = sums;
        for (var p = 0u; p < PARTS; p++) {
            state.m = max(state.m, part_max[r * PARTS + p]);
            state.l += part_sum[r * PARTS + p];
        }
    }
    let row = item.first_row + r;
    if seq.state_rows == 0u {
        let query = query_row(seq, item.kv_head, row);
        let end = ending(state, query);
        store_out(query, chunk, scaled(acc, end.factor));
        if chunk == 0u {
            lse[query] = end.lse;
        }
    } else {
        let index = partial_state(seq, split_of(seq, item), item.kv_head, row);
        store_partial_chunk(index, chunk, acc);
        if chunk == 0u {
            store_partial_state(index, state);
        }
    }
}

// The multiple of `step` at or below `key`.
fn aligned(key: u32, step: u32) -> u32 {
    return key / step * step;
}
