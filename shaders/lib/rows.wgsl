// Rows of 16- and 32-bit floats as chunks of 8 elements. 16-bit storage is read and written as packed words, so
// that no device feature is needed. Elements past a row's dimension are unowned: their words are cleared before
// they become floats, since a NaN cannot be masked afterwards.

const DTYPE_F32 = 0u;
const DTYPE_F16 = 1u;
const DTYPE_BF16 = 2u;

struct Chunk {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

const ZERO_CHUNK = Chunk(vec4<f32>(0.0), vec4<f32>(0.0));

// Vectors of 16 bytes that a chunk takes in storage.
fn chunk_vectors(dtype: u32) -> u32 {
    return select(1u, 2u, dtype == DTYPE_F32);
}

// The words of 4 f32 elements from index `first` on, unowned ones cleared.
fn owned_words(words: vec4<u32>, first: u32, dim: u32) -> vec4<u32> {
    return select(vec4<u32>(0u), words, vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(dim));
}

// The words of 8 16-bit elements from index `first` on, unowned halves cleared.
fn owned_halves(words: vec4<u32>, first: u32, dim: u32) -> vec4<u32> {
    let low = vec4<u32>(first) + vec4<u32>(0u, 2u, 4u, 6u);
    let mask_low = select(vec4<u32>(0u), vec4<u32>(0x0000ffffu), low < vec4<u32>(dim));
    let mask_high = select(vec4<u32>(0u), vec4<u32>(0xffff0000u), low + vec4<u32>(1u) < vec4<u32>(dim));
    return words & (mask_low | mask_high);
}

// 8 elements from index `8 * chunk` of a row with `dim` elements. `second` holds the upper four of an f32 row.
fn unpack_chunk(dtype: u32, first: vec4<u32>, second: vec4<u32>, chunk: u32, dim: u32) -> Chunk {
    if dtype == DTYPE_F32 {
        if dim % 8u == 0u {
            return Chunk(bitcast<vec4<f32>>(first), bitcast<vec4<f32>>(second));
        }
        return Chunk(
            bitcast<vec4<f32>>(owned_words(first, chunk * 8u, dim)),
            bitcast<vec4<f32>>(owned_words(second, chunk * 8u + 4u, dim)),
        );
    }
    var words = first;
    if dim % 8u != 0u {
        words = owned_halves(words, chunk * 8u, dim);
    }
    if dtype == DTYPE_F16 {
        return Chunk(
            vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)),
            vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w)),
        );
    }
    let low = bitcast<vec4<f32>>(words << vec4<u32>(16u));
    let high = bitcast<vec4<f32>>(words & vec4<u32>(0xffff0000u));
    return Chunk(vec4<f32>(low.x, high.x, low.y, high.y), vec4<f32>(low.z, high.z, low.w, high.w));
}

//if SCALED
const DTYPE_INT8 = 3u;
const DTYPE_FP8 = 4u;

// 8 elements from index `8 * chunk` of a row of 8-bit elements; `vector` holds this chunk and the one that it pairs with.
fn unpack_byte_chunk(dtype: u32, vector: vec4<u32>, chunk: u32, dim: u32) -> Chunk {
    var words = select(vector.xy, vector.zw, chunk % 2u == 1u);
    if dim % 8u != 0u {
        words = owned_bytes(words, chunk * 8u, dim);
    }
    if dtype == DTYPE_INT8 {
        return Chunk(unpack_int8(words.x), unpack_int8(words.y));
    }
    return Chunk(unpack_fp8(words.x), unpack_fp8(words.y));
}

// The words of 8 8-bit elements from index `first` on, unowned ones cleared.
fn owned_bytes(words: vec2<u32>, first: u32, dim: u32) -> vec2<u32> {
    let begin = vec2<u32>(first, first + 4u);
    let owned = min(vec2<u32>(dim) - min(vec2<u32>(dim), begin), vec2<u32>(4u));
    let mask = (vec2<u32>(1u) << ((vec2<u32>(8u) * owned) % vec2<u32>(32u))) - vec2<u32>(1u);
    return words & select(mask, vec2<u32>(0xffffffffu), owned == vec2<u32>(4u));
}

// The bytes of a word, each at the top of a word of its own.
fn spread(word: u32) -> vec4<u32> {
    return vec4<u32>(word) << vec4<u32>(24u, 16u, 8u, 0u);
}

fn unpack_int8(word: u32) -> vec4<f32> {
    return vec4<f32>(bitcast<vec4<i32>>(spread(word)) >> vec4<u32>(24u));
}

// e4m3fn: 1 bit of sign, 4 of exponent with a bias of 7, 3 of mantissa. With exponent 0 the mantissa counts units of 2^-9;
// those are made from an integer, since as an f32 with too small an exponent they might be flushed to zero.
fn unpack_fp8(word: u32) -> vec4<f32> {
    let bytes = spread(word);
    let magnitude = (bytes >> vec4<u32>(24u)) & vec4<u32>(0x7fu);
    let normal = (magnitude << vec4<u32>(20u)) + vec4<u32>(0x3c000000u);
    let small = bitcast<vec4<u32>>(vec4<f32>(magnitude) * 0.001953125);
    let bits = select(normal, small, magnitude < vec4<u32>(8u));
    return bitcast<vec4<f32>>(bits | (bytes & vec4<u32>(0x80000000u)));
}
//end

const F16_MAX = 65504.0;

// The words of 8 f16 elements; what lies outside the range of f16 becomes its largest value.
fn pack_f16_chunk(chunk: Chunk) -> vec4<u32> {
    let limit = vec4<f32>(F16_MAX);
    let lo = clamp(chunk.lo, -limit, limit);
    let hi = clamp(chunk.hi, -limit, limit);
    return vec4<u32>(pack2x16float(lo.xy), pack2x16float(lo.zw), pack2x16float(hi.xy), pack2x16float(hi.zw));
}

// Arithmetic on chunks. A dot product continues `sum` in one chain, in order of dimension.

fn dot_chunk(a: Chunk, b: Chunk, sum: f32) -> f32 {
    var s = fma(a.lo.x, b.lo.x, sum);
    s = fma(a.lo.y, b.lo.y, s);
    s = fma(a.lo.z, b.lo.z, s);
    s = fma(a.lo.w, b.lo.w, s);
    s = fma(a.hi.x, b.hi.x, s);
    s = fma(a.hi.y, b.hi.y, s);
    s = fma(a.hi.z, b.hi.z, s);
    return fma(a.hi.w, b.hi.w, s);
}

fn scaled(chunk: Chunk, factor: f32) -> Chunk {
    return Chunk(chunk.lo * factor, chunk.hi * factor);
}

// `b` where `condition` holds, else `a`.
fn chosen(a: Chunk, b: Chunk, condition: bool) -> Chunk {
    return Chunk(select(a.lo, b.lo, condition), select(a.hi, b.hi, condition));
}

// factor * a + b
fn fma_chunk(factor: f32, a: Chunk, b: Chunk) -> Chunk {
    return Chunk(fma(vec4<f32>(factor), a.lo, b.lo), fma(vec4<f32>(factor), a.hi, b.hi));
}
