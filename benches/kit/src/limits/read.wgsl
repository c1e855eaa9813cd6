// Reads a buffer once and adds it up, with the invocations laid over it in one of three ways.
//
// grid      x: GROUPS workgroups of LANES invocations
// bindings  0 data  GROUPS * LANES * VECS vec4 of f32
//           1 sink  one vec4 of f32 per invocation, so that no load is thrown away
// workgroup memory: none
//
// The host puts in front: LANES, GROUPS, VECS (vec4 per invocation), and PATTERN
//   0  interleaved: neighbouring invocations of the whole grid read neighbouring vec4, then step over the grid
//   1  a row each: an invocation reads a contiguous stretch of its own
//   2  a block each: a workgroup reads a contiguous stretch, its invocations interleaved in it

@group(0) @binding(0) var<storage, read> data: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> sink: array<vec4<f32>>;

@compute @workgroup_size(LANES)
fn read_rate(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let invocation = group.x * LANES + lane;
    var start = invocation;
    var step = GROUPS * LANES;
    if PATTERN == 1u {
        start = invocation * VECS;
        step = 1u;
    } else if PATTERN == 2u {
        start = group.x * LANES * VECS + lane;
        step = LANES;
    }
    // Two sums: one addition need not wait for the other.
    var even = vec4<f32>();
    var odd = vec4<f32>();
    for (var i = 0u; i < VECS; i += 2u) {
        even += data[start + i * step];
        odd += data[start + (i + 1u) * step];
    }
    sink[invocation] = even + odd;
}
