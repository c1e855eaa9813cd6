// Decode: exact attention of few query rows over one split of a sequence's keys (split-KV, as in Flash-Decoding),
// without subgroups.
//
// Grid: one workgroup per (work item, KV head); an item is DECODE_ROWS tile rows and the keys of one split of
// SPLIT_KEYS. A tile row is (token, query head of the group), so each key and value is read once for all of them.
// Scores: a lane per key. Weights: PARTS lanes per row. Values: a lane per chunk of 8 dimensions, KEY_STREAMS keys
// at a time, so that neighbouring lanes read neighbouring words.
// Which lane takes which key depends on the key's place in its split alone: a row's bits do not depend on keys
// that it does not see.
//
// Lines between `//each x COUNT` and `//end` are repeated by the host: see prefill.wgsl.
//
// Workgroup memory: 32 * DECODE_ROWS * QK_CHUNKS + 4 * SCORES + 4 * SPLIT_KEYS + 8 * LANES bytes
// (`Tiles::decode_bytes`).
// Preconditions: see lib/attention.wgsl, and `Tiles::new`: SPLIT_KEYS is a multiple of LANES; SCORES is at least
// DECODE_ROWS * SPLIT_KEYS and at least 8 * LANES; PARTS * DECODE_ROWS <= LANES; V_CHUNKS <= LANES.

var<workgroup> q_tile: array<Chunk, DECODE_ROWS * QK_CHUNKS>;
// Scores, then weights, [DECODE_ROWS, SPLIT_KEYS]; at the end partial sums of the accumulators.
var<workgroup> scores: array<f32, SCORES>;
// Where the split's value rows start.
var<workgroup> v_rows: array<u32, SPLIT_KEYS>;
// Per row, PARTS partial maxima and PARTS partial sums.
var<workgroup> part_max: array<f32, LANES>;
var<workgroup> part_sum: array<f32, LANES>;

@compute @workgroup_size(LANES)
fn decode(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) group_count: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let group = linear_group(group_id, group_count);
    if group >= params.decode_groups {
        return;
    }
    let item = work_item(params.decode_items, group);
    let seq = sequence(item.sequence);
    let rows = min(seq.q_len * GROUP - item.first_row, DECODE_ROWS);
    let keys = item.key_end - item.key_begin;

    // The queries; rows past the last are zero and never written.
    for (var i = lane; i < DECODE_ROWS * QK_CHUNKS; i += LANES) {
        var chunk = ZERO_CHUNK;
        if i / QK_CHUNKS < rows {
            let query = query_row(seq, item.kv_head, item.first_row + i / QK_CHUNKS);
            chunk = scaled(load_q(query, i % QK_CHUNKS), params.scale_log2);
        }
        q_tile[i] = chunk;
    }
    workgroupBarrier();

    // Scores, a lane per key.
    for (var key = lane; key < keys; key += LANES) {
        let page = checked_page(plan[page_entry(seq, item.key_begin + key)]);
        let slot = (item.key_begin + key) % params.page_size;
        if !page.exists {
            report_error(ERROR_PAGE_ID);
        }
        let k_row = row_offset(params.k_rows, page.id, item.kv_head, slot);
        v_rows[key] = select(NO_ROW, row_offset(params.v_rows, page.id, item.kv_head, slot), page.exists);
        //each r DECODE_ROWS
        var s_$r = 0.0;
        //end
        if page.exists {
            for (var c = 0u; c < QK_CHUNKS; c++) {
                let k = load_kv(k_row, c, HEAD_DIM);
                //each r DECODE_ROWS
                s_$r = dot_chunk(q_tile[$ru * QK_CHUNKS + c], k, s_$r);
                //end
            }
        }
        //each r DECODE_ROWS
        scores[$ru * SPLIT_KEYS + key] = s_$r;
        //end
    }
    workgroupBarrier();

    // Maximum, weights and their sum, PARTS lanes per row.
    let row = lane / PARTS;
    let part = lane % PARTS;
    let owns_row = row < rows;
    let row_end = select(0u, visible_keys(seq, (item.first_row + row) / GROUP), owns_row);
    let row_keys = min(max(row_end, item.key_begin) - item.key_begin, keys);
    var highest = NO_SCORE;
    for (var key = part; key < row_keys; key += PARTS) {
        highest = max(highest, scores[row * SPLIT_KEYS + key]);
    }
    part_max[lane] = highest;
    workgroupBarrier();
    for (var i = 0u; i < PARTS; i++) {
        highest = max(highest, part_max[row * PARTS + i]);
    }
    var sum = 0.0;
    if owns_row {
        for (var key = part; key < keys; key += PARTS) {
            var p = 0.0;
            if key < row_keys {
                p = weight(scores[row * SPLIT_KEYS + key], highest);
            }
            scores[row * SPLIT_KEYS + key] = p;
            sum += p;
        }
    }
    part_sum[lane] = sum;
    workgroupBarrier();

    // Weighted values: lane = (key stream, chunk). A row past the last has scores of zero for weights.
    //each r DECODE_ROWS
    var acc_$r = ZERO_CHUNK;
    //end
    let chunk = lane % V_CHUNKS;
    if lane < KEY_STREAMS * V_CHUNKS {
        for (var key = lane / V_CHUNKS; key < keys; key += KEY_STREAMS) {
            if v_rows[key] != NO_ROW {
                let v = load_kv(v_rows[key], chunk, V_HEAD_DIM);
                //each r DECODE_ROWS
                acc_$r = fma_chunk(scores[$ru * SPLIT_KEYS + key], v, acc_$r);
                //end
            }
        }
    }

    // Join the key streams, row by row, and write.
    //each r DECODE_ROWS
    workgroupBarrier();
    store_stream(lane, acc_$r);
    workgroupBarrier();
    if lane < V_CHUNKS && $ru < rows {
        finish_split(seq, item, $ru, lane, joined_streams(lane));
    }
    //end
    report_done(lane);
}

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

// One chunk of a row: the result where the keys were not split, else its share of the split's partial state.
fn finish_split(seq: Sequence, item: WorkItem, r: u32, chunk: u32, acc: Chunk) {
    var state = EMPTY_ROW;
    for (var p = 0u; p < PARTS; p++) {
        state.m = max(state.m, part_max[r * PARTS + p]);
        state.l += part_sum[r * PARTS + p];
    }
    let row = item.first_row + r;
    if seq.splits == 1u {
        let query = query_row(seq, item.kv_head, row);
        store_out(query, chunk, scaled(acc, normaliser(state)));
        if chunk == 0u {
            store_lse(query, state);
        }
    } else {
        let index = partial_state(seq, item.key_begin / SPLIT_KEYS, item.kv_head, row);
        store_partial_chunk(index, chunk, acc);
        if chunk == 0u {
            store_partial_state(index, state);
        }
    }
}
