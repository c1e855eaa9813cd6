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
// Workgroup memory: 16 * DECODE_ROWS * QK_VECS + 4 * SCORES + 4 * SPLIT_KEYS + 8 * LANES bytes
// (`Tiles::decode_bytes`), SCORES = max(DECODE_ROWS * SPLIT_KEYS, 8 * LANES).
// Preconditions: see lib/attention.wgsl. SPLIT_KEYS is a multiple of LANES, DECODE_ROWS <= ROW_SLOTS, a power of
// two, PARTS = LANES / ROW_SLOTS, V_CHUNKS <= LANES (`Tiles::new`).

var<workgroup> q_tile: array<vec4<f32>, DECODE_ROWS * QK_VECS>;
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
        q_tile[2u * i] = chunk.lo;
        q_tile[2u * i + 1u] = chunk.hi;
    }
    workgroupBarrier();

    // Scores, a lane per key.
    for (var key = lane; key < SPLIT_KEYS; key += LANES) {
        var s: array<f32, DECODE_ROWS>;
        for (var r = 0u; r < DECODE_ROWS; r++) {
            s[r] = 0.0;
        }
        v_rows[key] = NO_ROW;
        if key < keys {
            let key_row = key_row_offsets(seq, item.kv_head, item.key_begin + key);
            v_rows[key] = key_row.y;
            for (var c = 0u; c < QK_CHUNKS; c++) {
                let k = load_kv(key_row.x, c, HEAD_DIM);
                for (var r = 0u; r < DECODE_ROWS; r++) {
                    let q = r * QK_VECS + 2u * c;
                    s[r] += dot(q_tile[q], k.lo) + dot(q_tile[q + 1u], k.hi);
                }
            }
        }
        for (var r = 0u; r < DECODE_ROWS; r++) {
            scores[r * SPLIT_KEYS + key] = s[r];
        }
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
        for (var key = part; key < SPLIT_KEYS; key += PARTS) {
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

    // Weighted values: lane = (key stream, chunk).
    var acc: array<Chunk, DECODE_ROWS>;
    for (var r = 0u; r < DECODE_ROWS; r++) {
        acc[r] = ZERO_CHUNK;
    }
    let chunk = lane % V_CHUNKS;
    if lane < KEY_STREAMS * V_CHUNKS {
        for (var key = lane / V_CHUNKS; key < keys; key += KEY_STREAMS) {
            let v = load_kv(v_rows[key], chunk, V_HEAD_DIM);
            for (var r = 0u; r < DECODE_ROWS; r++) {
                let p = vec4<f32>(scores[r * SPLIT_KEYS + key]);
                acc[r].lo = fma(p, v.lo, acc[r].lo);
                acc[r].hi = fma(p, v.hi, acc[r].hi);
            }
        }
    }

    // Join the key streams, as many rows at a time as fit, and write.
    for (var first = 0u; first < DECODE_ROWS; first += JOIN_ROWS) {
        workgroupBarrier();
        for (var r = 0u; r < JOIN_ROWS && first + r < DECODE_ROWS; r++) {
            let word = (r * LANES + lane) * 8u;
            let sum = acc[first + r];
            scores[word] = sum.lo.x;
            scores[word + 1u] = sum.lo.y;
            scores[word + 2u] = sum.lo.z;
            scores[word + 3u] = sum.lo.w;
            scores[word + 4u] = sum.hi.x;
            scores[word + 5u] = sum.hi.y;
            scores[word + 6u] = sum.hi.z;
            scores[word + 7u] = sum.hi.w;
        }
        workgroupBarrier();
        for (var i = lane; i < JOIN_ROWS * V_CHUNKS; i += LANES) {
            let r = first + i / V_CHUNKS;
            if r < rows {
                var total = ZERO_CHUNK;
                for (var stream = 0u; stream < KEY_STREAMS; stream++) {
                    let word = (i / V_CHUNKS * LANES + stream * V_CHUNKS + i % V_CHUNKS) * 8u;
                    total.lo += vec4<f32>(scores[word], scores[word + 1u], scores[word + 2u], scores[word + 3u]);
                    total.hi += vec4<f32>(scores[word + 4u], scores[word + 5u], scores[word + 6u], scores[word + 7u]);
                }
                var state = EMPTY_ROW;
                for (var p = 0u; p < PARTS; p++) {
                    state.m = max(state.m, part_max[r * PARTS + p]);
                    state.l += part_sum[r * PARTS + p];
                }
                finish_split(seq, item, r, i % V_CHUNKS, total, state);
            }
        }
    }
    report_done(lane);
}

// One chunk of a row: the result where the keys were not split, else its share of the split's partial state.
fn finish_split(seq: Sequence, item: WorkItem, r: u32, chunk: u32, acc: Chunk, state: RowState) {
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
