// Fused multiply-adds in registers, nothing else: what the adapter can do at most.
//
// grid      x: workgroups, each of 64 invocations
// bindings  0 sink  one vec4 of f32 per workgroup, so that no result is thrown away
// workgroup memory: none
//
// Three chains of vec4 are 12 independent chains of f32: enough to hide a latency of 4 cycles on two ports, and with
// the factors few enough for the 16 registers of AVX2. Four spill there (141 against 198 GFLOP/s on two cores), two do
// not hide the latency (150). A GPU hides the rest with its other invocations. The body is unrolled, so that the loop
// itself weighs little; FMA_PER_GROUP in mod.rs counts its operations.

const ITERATIONS: u32 = 256u;

@group(0) @binding(0) var<storage, read_write> sink: array<vec4<f32>>;

@compute @workgroup_size(64)
fn fma_rate(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    // The factors differ per invocation: a compiler must not take the work out of the vector units. Every chain
    // tends to c / (1 - b) = 1, so that no operation is a slow denormal or an overflow.
    let b = vec4<f32>(0.75 + f32(lane) * 0.0001);
    let c = vec4<f32>(0.25 - f32(lane) * 0.0001);
    var x0 = vec4<f32>(1.1, 1.2, 1.3, 1.4);
    var x1 = vec4<f32>(1.5, 1.6, 1.7, 1.8);
    var x2 = vec4<f32>(0.1, 0.2, 0.3, 0.4);
    for (var i = 0u; i < ITERATIONS; i++) {
        x0 = fma(x0, b, c); x1 = fma(x1, b, c); x2 = fma(x2, b, c);
        x0 = fma(x0, b, c); x1 = fma(x1, b, c); x2 = fma(x2, b, c);
        x0 = fma(x0, b, c); x1 = fma(x1, b, c); x2 = fma(x2, b, c);
        x0 = fma(x0, b, c); x1 = fma(x1, b, c); x2 = fma(x2, b, c);
        x0 = fma(x0, b, c); x1 = fma(x1, b, c); x2 = fma(x2, b, c);
        x0 = fma(x0, b, c); x1 = fma(x1, b, c); x2 = fma(x2, b, c);
        x0 = fma(x0, b, c); x1 = fma(x1, b, c); x2 = fma(x2, b, c);
        x0 = fma(x0, b, c); x1 = fma(x1, b, c); x2 = fma(x2, b, c);
    }
    sink[group.x] = x0 + x1 + x2;
}
