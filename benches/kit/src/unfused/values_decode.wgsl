// Third of three for single-token queries: O = P V of all query heads that share a KV head, so that a value is read
// once.
//
// grid      x: tile of 64 value elements, y: 1, z: sequence * KV_HEADS + KV head
// bindings  0 p    weights, f32
//           1 v    [total_kv, KV_HEADS, V_HEAD_DIM] f32, as vec4
//           2 out  [seqs, Q_HEADS, V_HEAD_DIM] f32, as vec4
//           3 seqs, each with q_len 1
// workgroup memory: 256 vec4 of f32, 4096 bytes
//
// Sixteen neighbouring invocations read 256 contiguous bytes of one value; the 16 rows of invocations take every
// sixteenth key and add up through workgroup memory at the end.

@group(0) @binding(0) var<storage, read> p: array<f32>;
@group(0) @binding(1) var<storage, read> v: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> seqs: array<Seq>;

var<workgroup> partial: array<vec4<f32>, 256>;

@compute @workgroup_size(16, 16)
fn values_decode(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let seq = seqs[group.z / KV_HEADS];
    let kv_head = group.z % KV_HEADS;
    let vecs = V_HEAD_DIM / 4u;
    let vec = group.x * 16u + local.x;
    let v_from = (seq.kv_start * KV_HEADS + kv_head) * vecs + min(vec, vecs - 1u);
    let p_from = score_row(seq, kv_head * GROUP, 0u);

    var sums = array<vec4<f32>, GROUP>();
    for (var key = local.y; key < seq.kv_len; key += 16u) {
        let value = v[v_from + key * KV_HEADS * vecs];
        for (var i = 0u; i < GROUP; i++) {
            sums[i] = fma(vec4<f32>(p[p_from + i * seq.s_stride + key]), value, sums[i]);
        }
    }
    for (var i = 0u; i < GROUP; i++) {
        partial[index] = sums[i];
        workgroupBarrier();
        for (var width = 8u; width > 0u; width /= 2u) {
            if local.y < width {
                partial[index] += partial[index + 16u * width];
            }
            workgroupBarrier();
        }
        if local.y == 0u && vec < vecs && seq.q_len == 1u {
            out[(seq.q_start * Q_HEADS + kv_head * GROUP + i) * vecs + vec] = partial[index];
        }
        workgroupBarrier();
    }
}
