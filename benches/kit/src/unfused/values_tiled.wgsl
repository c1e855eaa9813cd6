// Third of three: O = P V for a tile of query rows of one sequence and query head.
//
// grid      x: tile of 64 value elements, y: tile of 64 query rows, z: sequence * Q_HEADS + query head
// bindings  0 p    weights, f32 as vec4 (rows start at multiples of 4)
//           1 v    [total_kv, KV_HEADS, V_HEAD_DIM] f32, as vec4
//           2 out  [total_q, Q_HEADS, V_HEAD_DIM] f32, as vec4
//           3 seqs
// workgroup memory: weights 64 x 16, values 16 x 64, 8192 bytes
//
// An invocation owns 4 query rows by 4 value elements. Key tiles past the last visible key are left out. Weights
// past a row's own last visible key count as zero, whatever the score matrix holds there; keys past the sequence's
// end read its last row of V with weight zero.

const TILE: u32 = 64u;
const KEYS: u32 = 16u;
const KEY_VECS: u32 = 4u;

@group(0) @binding(0) var<storage, read> p: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> v: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> seqs: array<Seq>;

var<workgroup> p_tile: array<vec4<f32>, TILE * KEY_VECS>;
var<workgroup> v_tile: array<vec4<f32>, KEYS * 16u>;

fn weigh(sum: vec4<f32>, p: vec4<f32>, v0: vec4<f32>, v1: vec4<f32>, v2: vec4<f32>, v3: vec4<f32>) -> vec4<f32> {
    return fma(vec4<f32>(p.w), v3, fma(vec4<f32>(p.z), v2, fma(vec4<f32>(p.y), v1, fma(vec4<f32>(p.x), v0, sum))));
}

@compute @workgroup_size(16, 16)
fn values_tiled(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let seq = seqs[group.z / Q_HEADS];
    let head = group.z % Q_HEADS;
    let row_start = group.y * TILE;
    if row_start >= seq.q_len {
        return;
    }
    let keys = visible_keys(seq, min(row_start + TILE, seq.q_len) - 1u);

    let p_row = min(row_start + index / KEY_VECS, seq.q_len - 1u);
    let p_from = score_row(seq, head, p_row) / 4u;
    let p_visible = visible_keys(seq, p_row);
    let p_vec = index % KEY_VECS;
    let vecs = V_HEAD_DIM / 4u;
    let vec = group.x * 16u + local.x;
    let v_vec = min(vec, vecs - 1u);

    var o0 = vec4<f32>();
    var o1 = vec4<f32>();
    var o2 = vec4<f32>();
    var o3 = vec4<f32>();
    for (var key_start = 0u; key_start < keys; key_start += KEYS) {
        let key = key_start + p_vec * 4u;
        let weights = p[p_from + min(key / 4u, seq.s_stride / 4u - 1u)];
        p_tile[index] = select(vec4<f32>(), weights, vec4<u32>(key) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(p_visible));
        let v_key = min(key_start + local.y, seq.kv_len - 1u);
        v_tile[index] = v[((seq.kv_start + v_key) * KV_HEADS + head / GROUP) * vecs + v_vec];
        workgroupBarrier();
        for (var i = 0u; i < KEY_VECS; i++) {
            let v0 = v_tile[64u * i + local.x];
            let v1 = v_tile[64u * i + 16u + local.x];
            let v2 = v_tile[64u * i + 32u + local.x];
            let v3 = v_tile[64u * i + 48u + local.x];
            let p_at = local.y * 4u * KEY_VECS + i;
            o0 = weigh(o0, p_tile[p_at], v0, v1, v2, v3);
            o1 = weigh(o1, p_tile[p_at + KEY_VECS], v0, v1, v2, v3);
            o2 = weigh(o2, p_tile[p_at + 2u * KEY_VECS], v0, v1, v2, v3);
            o3 = weigh(o3, p_tile[p_at + 3u * KEY_VECS], v0, v1, v2, v3);
        }
        workgroupBarrier();
    }

    let o = array<vec4<f32>, 4>(o0, o1, o2, o3);
    for (var i = 0u; i < 4u; i++) {
        let row = row_start + local.y * 4u + i;
        if row < seq.q_len && vec < vecs {
            out[((seq.q_start + row) * Q_HEADS + head) * vecs + vec] = o[i];
        }
    }
}
