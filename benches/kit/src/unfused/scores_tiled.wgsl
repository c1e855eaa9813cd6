// First of three: scores S = SCALE * Q K^T of one sequence and query head, written to memory.
//
// grid      x: tile of 64 keys, y: tile of 64 query rows, z: sequence * Q_HEADS + query head
// bindings  0 q  [total_q, Q_HEADS, HEAD_DIM] f32, as vec4
//           1 k  [total_kv, KV_HEADS, HEAD_DIM] f32, as vec4
//           2 s  scores, f32
//           3 seqs
// workgroup memory: two tiles of 64 rows x 16 elements, 8192 bytes
//
// An invocation owns 4 query rows by 4 keys. Its keys are 16 apart, so that neighbours store to neighbouring words.
// Tiles that the causal mask hides altogether are left out; masked scores inside a tile are computed and ignored.

const TILE: u32 = 64u;
const DEPTH_VECS: u32 = 4u;

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> k: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> s: array<f32>;
@group(0) @binding(3) var<storage, read> seqs: array<Seq>;

var<workgroup> q_tile: array<vec4<f32>, TILE * DEPTH_VECS>;
var<workgroup> k_tile: array<vec4<f32>, TILE * DEPTH_VECS>;

fn scores_of(row: vec4<f32>, k0: vec4<f32>, k1: vec4<f32>, k2: vec4<f32>, k3: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(dot(row, k0), dot(row, k1), dot(row, k2), dot(row, k3));
}

fn store(seq: Seq, head: u32, row: u32, key: u32, scores: vec4<f32>) {
    if row >= seq.q_len {
        return;
    }
    let start = score_row(seq, head, row) + key;
    for (var i = 0u; i < 4u; i++) {
        if key + 16u * i < seq.kv_len {
            s[start + 16u * i] = SCALE * scores[i];
        }
    }
}

@compute @workgroup_size(16, 16)
fn scores_tiled(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let seq = seqs[group.z / Q_HEADS];
    let head = group.z % Q_HEADS;
    let key_start = group.x * TILE;
    let row_start = group.y * TILE;
    if row_start >= seq.q_len || key_start >= visible_keys(seq, min(row_start + TILE, seq.q_len) - 1u) {
        return;
    }

    // One vec4 of either tile per invocation and step. Rows past the end repeat the last one and are never stored.
    let load_row = index / DEPTH_VECS;
    let load_vec = index % DEPTH_VECS;
    let vecs = HEAD_DIM / 4u;
    let q_from = ((seq.q_start + min(row_start + load_row, seq.q_len - 1u)) * Q_HEADS + head) * vecs;
    let k_from = ((seq.kv_start + min(key_start + load_row, seq.kv_len - 1u)) * KV_HEADS + head / GROUP) * vecs;

    var s0 = vec4<f32>();
    var s1 = vec4<f32>();
    var s2 = vec4<f32>();
    var s3 = vec4<f32>();
    let q_at = local.y * 4u * DEPTH_VECS;
    let k_at = local.x * DEPTH_VECS;
    for (var depth = 0u; depth < vecs; depth += DEPTH_VECS) {
        let vec = depth + load_vec;
        let inside = vec < vecs;
        q_tile[index] = select(vec4<f32>(), q[q_from + min(vec, vecs - 1u)], inside);
        k_tile[index] = select(vec4<f32>(), k[k_from + min(vec, vecs - 1u)], inside);
        workgroupBarrier();
        for (var i = 0u; i < DEPTH_VECS; i++) {
            let k0 = k_tile[k_at + i];
            let k1 = k_tile[k_at + 16u * DEPTH_VECS + i];
            let k2 = k_tile[k_at + 32u * DEPTH_VECS + i];
            let k3 = k_tile[k_at + 48u * DEPTH_VECS + i];
            s0 += scores_of(q_tile[q_at + i], k0, k1, k2, k3);
            s1 += scores_of(q_tile[q_at + DEPTH_VECS + i], k0, k1, k2, k3);
            s2 += scores_of(q_tile[q_at + 2u * DEPTH_VECS + i], k0, k1, k2, k3);
            s3 += scores_of(q_tile[q_at + 3u * DEPTH_VECS + i], k0, k1, k2, k3);
        }
        workgroupBarrier();
    }

    let row = row_start + local.y * 4u;
    let key = key_start + local.x;
    store(seq, head, row, key, s0);
    store(seq, head, row + 1u, key, s1);
    store(seq, head, row + 2u, key, s2);
    store(seq, head, row + 3u, key, s3);
}
