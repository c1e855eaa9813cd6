// Second of three: each score row becomes a row of weights, in place.
//
// grid      x: query row, y: 1, z: sequence * Q_HEADS + query head
// bindings  0 s  scores in, weights out, f32; past a row's visible keys nothing is read or written
//           1 seqs
// workgroup memory: 64 f32, 256 bytes
//
// Three passes: the maximum, exponentials and their sum, the division. A row that sees no key is left alone.

const LANES: u32 = 64u;

@group(0) @binding(0) var<storage, read_write> s: array<f32>;
@group(0) @binding(1) var<storage, read> seqs: array<Seq>;

var<workgroup> partial: array<f32, LANES>;

@compute @workgroup_size(64)
fn softmax(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let seq = seqs[group.z / Q_HEADS];
    let row = group.x;
    if row >= seq.q_len || visible_keys(seq, row) == 0u {
        return;
    }
    let start = score_row(seq, group.z % Q_HEADS, row);
    let end = start + visible_keys(seq, row);

    // Seeded with a score of the row, so that any finite score may be the largest.
    var highest = s[start];
    for (var i = start + lane; i < end; i += LANES) {
        highest = max(highest, s[i]);
    }
    partial[lane] = highest;
    workgroupBarrier();
    for (var width = LANES / 2u; width > 0u; width /= 2u) {
        if lane < width {
            partial[lane] = max(partial[lane], partial[lane + width]);
        }
        workgroupBarrier();
    }
    highest = partial[0];
    workgroupBarrier();

    var sum = 0.0;
    for (var i = start + lane; i < end; i += LANES) {
        let weight = exp(s[i] - highest);
        s[i] = weight;
        sum += weight;
    }
    partial[lane] = sum;
    workgroupBarrier();
    for (var width = LANES / 2u; width > 0u; width /= 2u) {
        if lane < width {
            partial[lane] += partial[lane + width];
        }
        workgroupBarrier();
    }

    // The same lane wrote these words above.
    let inverse = 1.0 / partial[0];
    for (var i = start + lane; i < end; i += LANES) {
        s[i] *= inverse;
    }
}
