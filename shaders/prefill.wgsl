// Prefill: exact attention of many query rows of one sequence, by tiles of keys and an online softmax
// (FlashAttention; Dao et al. 2022), without subgroups.
//
// Grid: one workgroup per (work item, KV head); an item is LANES tile rows of a sequence and the keys they see. A
// tile row is (token, query head of the group): all heads that share a KV head share its loads.
// Each lane owns one tile row, its query and its accumulator in registers. A tile of TILE_KEYS keys and values is
// staged in workgroup memory, where all lanes read the same address at the same time.
//
// Workgroup memory: 16 * TILE_KEYS * (QK_VECS + V_VECS) + 8 * LANES bytes (`Tiles::prefill_bytes`).
// Preconditions: see lib/attention.wgsl. TILE_KEYS is a multiple of STEP_KEYS = 4 and divides LANES (`Tiles::new`).

var<workgroup> k_tile: array<vec4<f32>, TILE_KEYS * QK_VECS>;
var<workgroup> v_tile: array<vec4<f32>, TILE_KEYS * V_VECS>;
// Row offsets of the next LANES keys: pages are looked up once per key, not once per load.
var<workgroup> key_rows: array<vec2<u32>, LANES>;

@compute @workgroup_size(LANES)
fn prefill(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) group_count: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let group = linear_group(group_id, group_count);
    if group >= params.prefill_groups {
        return;
    }
    let item = work_item(params.prefill_items, group);
    let seq = sequence(item.sequence);
    let row_count = seq.q_len * GROUP;
    let row = item.first_row + lane;
    let owns_row = row < row_count;
    // A lane without a row repeats the last one and writes nothing.
    let query = query_row(seq, item.kv_head, min(row, row_count - 1u));
    let row_end = select(0u, visible_keys(seq, row / GROUP), owns_row);

    var q: array<vec4<f32>, QK_VECS>;
    for (var c = 0u; c < QK_CHUNKS; c++) {
        let chunk = scaled(load_q(query, c), params.scale_log2);
        q[2u * c] = chunk.lo;
        q[2u * c + 1u] = chunk.hi;
    }
    var acc: array<vec4<f32>, V_VECS>;
    for (var c = 0u; c < V_VECS; c++) {
        acc[c] = vec4<f32>(0.0);
    }
    var state = EMPTY_ROW;

    for (var tile = item.key_begin; tile < item.key_end; tile += TILE_KEYS) {
        workgroupBarrier();
        if tile % LANES == 0u {
            let key = tile + lane;
            key_rows[lane] = vec2<u32>(NO_ROW);
            if key < item.key_end {
                key_rows[lane] = key_row_offsets(seq, item.kv_head, key);
            }
            workgroupBarrier();
        }
        for (var i = lane; i < TILE_KEYS * QK_CHUNKS; i += LANES) {
            let chunk = load_kv(key_rows[tile % LANES + i / QK_CHUNKS].x, i % QK_CHUNKS, HEAD_DIM);
            k_tile[2u * i] = chunk.lo;
            k_tile[2u * i + 1u] = chunk.hi;
        }
        for (var i = lane; i < TILE_KEYS * V_CHUNKS; i += LANES) {
            let chunk = load_kv(key_rows[tile % LANES + i / V_CHUNKS].y, i % V_CHUNKS, V_HEAD_DIM);
            v_tile[2u * i] = chunk.lo;
            v_tile[2u * i + 1u] = chunk.hi;
        }
        workgroupBarrier();

        for (var step = 0u; step < TILE_KEYS && tile + step < row_end; step += 4u) {
            let k0 = step * QK_VECS;
            let k1 = k0 + QK_VECS;
            let k2 = k1 + QK_VECS;
            let k3 = k2 + QK_VECS;
            var s = vec4<f32>(0.0);
            for (var c = 0u; c < QK_VECS; c++) {
                s += vec4<f32>(
                    dot(q[c], k_tile[k0 + c]),
                    dot(q[c], k_tile[k1 + c]),
                    dot(q[c], k_tile[k2 + c]),
                    dot(q[c], k_tile[k3 + c]),
                );
            }
            let visible = vec4<u32>(tile + step) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(row_end);
            s = select(vec4<f32>(NO_SCORE), s, visible);
            let m = max(state.m, max(max(s.x, s.y), max(s.z, s.w)));
            let p = select(vec4<f32>(0.0), weights(s, m), visible);
            let rescale = weight(state.m, m);
            state = RowState(m, fma(state.l, rescale, (p.x + p.y) + (p.z + p.w)));
            let v0 = step * V_VECS;
            let v1 = v0 + V_VECS;
            let v2 = v1 + V_VECS;
            let v3 = v2 + V_VECS;
            for (var c = 0u; c < V_VECS; c++) {
                var sum = p.x * v_tile[v0 + c];
                sum = fma(vec4<f32>(p.y), v_tile[v1 + c], sum);
                sum = fma(vec4<f32>(p.z), v_tile[v2 + c], sum);
                sum = fma(vec4<f32>(p.w), v_tile[v3 + c], sum);
                acc[c] = fma(acc[c], vec4<f32>(rescale), sum);
            }
        }
    }

    if owns_row {
        let factor = normaliser(state);
        for (var c = 0u; c < V_CHUNKS; c++) {
            store_out(query, c, scaled(Chunk(acc[2u * c], acc[2u * c + 1u]), factor));
        }
        store_lse(query, state);
    }
    report_done(lane);
}
