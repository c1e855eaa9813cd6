// Chunks of 8 elements as words of the pages: the inverse of `unpack_chunk`. Rounding is to nearest, ties to even, in
// integers, so that it is the same on every device; what rounds to infinity becomes the largest number.

// The words of 8 f16 or bf16 elements.
fn pack_half_chunk(dtype: u32, chunk: Chunk) -> vec4<u32> {
    let lo = half_bits(dtype, chunk.lo);
    let hi = half_bits(dtype, chunk.hi);
    return vec4<u32>(lo.x | (lo.y << 16u), lo.z | (lo.w << 16u), hi.x | (hi.y << 16u), hi.z | (hi.w << 16u));
}

fn half_bits(dtype: u32, numbers: vec4<f32>) -> vec4<u32> {
    if dtype == DTYPE_F16 {
        return f16_bits(numbers);
    }
    return bf16_bits(bitcast<vec4<u32>>(numbers));
}

fn f16_bits(numbers: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(numbers);
    let magnitude = bits & vec4<u32>(0x7fffffffu);
    let rounded = (magnitude + vec4<u32>(0xfffu) + ((magnitude >> vec4<u32>(13u)) & vec4<u32>(1u))) >> vec4<u32>(13u);
    // Below 2^-14, units of 2^-24; 1024 of them are 2^-14 again.
    let small = vec4<u32>(round(bitcast<vec4<f32>>(min(magnitude, vec4<u32>(0x38800000u))) * 16777216.0));
    let number = select(min(rounded - vec4<u32>(0x1c000u), vec4<u32>(0x7bffu)), small, magnitude < vec4<u32>(0x38800000u));
    return number | ((bits >> vec4<u32>(16u)) & vec4<u32>(0x8000u));
}

fn bf16_bits(bits: vec4<u32>) -> vec4<u32> {
    let magnitude = bits & vec4<u32>(0x7fffffffu);
    let rounded = (magnitude + vec4<u32>(0x7fffu) + ((magnitude >> vec4<u32>(16u)) & vec4<u32>(1u))) >> vec4<u32>(16u);
    return min(rounded, vec4<u32>(0x7f7fu)) | ((bits >> vec4<u32>(16u)) & vec4<u32>(0x8000u));
}

//if SCALED
// A number that has been divided by its scale, as int8: to nearest, ties to even.
fn pack_int8(numbers: vec4<f32>) -> u32 {
    let limit = vec4<f32>(127.0);
    let bytes = bitcast<vec4<u32>>(vec4<i32>(round(clamp(numbers, -limit, limit)))) & vec4<u32>(0xffu);
    return bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
}

// The same as fp8: see `unpack_fp8`. What is larger than 448 becomes 448.
fn pack_fp8(numbers: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(numbers);
    let magnitude = bits & vec4<u32>(0x7fffffffu);
    let rounded = (magnitude + vec4<u32>(0x7ffffu) + ((magnitude >> vec4<u32>(20u)) & vec4<u32>(1u))) >> vec4<u32>(20u);
    // Below 2^-6, units of 2^-9; 8 of them are 2^-6 again.
    let small = vec4<u32>(round(bitcast<vec4<f32>>(min(magnitude, vec4<u32>(0x3c800000u))) * 512.0));
    let number = select(min(rounded - vec4<u32>(0x3c0u), vec4<u32>(0x7eu)), small, magnitude < vec4<u32>(0x3c800000u));
    let bytes = number | ((bits >> vec4<u32>(24u)) & vec4<u32>(0x80u));
    return bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
}

fn largest_of(chunk: Chunk) -> f32 {
    let four = max(abs(chunk.lo), abs(chunk.hi));
    return max(max(four.x, four.y), max(four.z, four.w));
}
//end
