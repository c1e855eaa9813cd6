// First of three for single-token queries: scores of all query heads that share a KV head, so that a key is read once.
//
// grid      x: block of 64 keys, y: 1, z: sequence * KV_HEADS + KV head
// bindings  0 q  [seqs, Q_HEADS, HEAD_DIM] f32, as vec4
//           1 k  [total_kv, KV_HEADS, HEAD_DIM] f32, as vec4
//           2 s  scores, f32
//           3 seqs, each with q_len 1
// workgroup memory: 256 vec4 of f32, 4096 bytes
//
// Sixteen neighbouring invocations read one key, 256 contiguous bytes at a time, for four keys that are 16 apart; the
// parts of a dot product are added up through workgroup memory. One key at a time with a tree of barriers per head
// took 1.5 to 3 times as long. A sequence's only query row sees all of its keys, causal or not.

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> k: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> s: array<f32>;
@group(0) @binding(3) var<storage, read> seqs: array<Seq>;

// One component per key of the four.
var<workgroup> parts: array<vec4<f32>, 256>;

@compute @workgroup_size(16, 16)
fn scores_decode(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let seq = seqs[group.z / KV_HEADS];
    let kv_head = group.z % KV_HEADS;
    let key_start = group.x * 64u;
    if key_start >= seq.kv_len {
        return;
    }
    let vecs = HEAD_DIM / 4u;
    let q_from = (seq.q_start * Q_HEADS + kv_head * GROUP) * vecs;
    // Keys past the end repeat the last one; their scores are not stored.
    let keys = min(vec4<u32>(key_start + local.y) + vec4<u32>(0u, 16u, 32u, 48u), vec4<u32>(seq.kv_len - 1u));
    let k_from = ((seq.kv_start + keys) * KV_HEADS + kv_head) * vecs;

    var sums = array<vec4<f32>, GROUP>();
    for (var vec = local.x; vec < vecs; vec += 16u) {
        let k0 = k[k_from.x + vec];
        let k1 = k[k_from.y + vec];
        let k2 = k[k_from.z + vec];
        let k3 = k[k_from.w + vec];
        for (var i = 0u; i < GROUP; i++) {
            let row = q[q_from + i * vecs + vec];
            sums[i] += vec4<f32>(dot(row, k0), dot(row, k1), dot(row, k2), dot(row, k3));
        }
    }
    for (var i = 0u; i < GROUP; i++) {
        parts[index] = sums[i];
        workgroupBarrier();
        if index < 64u && key_start + index < seq.kv_len {
            var score = 0.0;
            for (var part = 0u; part < 16u; part++) {
                score += parts[(index % 16u) * 16u + part][index / 16u];
            }
            s[score_row(seq, kv_head * GROUP + i, 0u) + key_start + index] = SCALE * score;
        }
        workgroupBarrier();
    }
}
