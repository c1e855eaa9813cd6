// Append with conversion: rotates new key rows, turns new rows into the type of the pages, and writes them there.
//
// Grid: ROW_LANES lanes per row; rows are [tokens, kv_heads] of keys, then of values (none where values are part of the
// keys); folded into three axes. A lane takes chunks of 8 elements.
//
// Bindings (group 0), beside those of lib/append.wgsl:
//   1 plan      [tokens] destination of each token, page * page_size + slot; then, where keys are rotated,
//               [tokens, ROTARY_DIMS / 2] of (cos, sin) in f32
//   5 heads     [kv_heads] of (key scale, value scale), where either is fp8
//   kv_pages_N  the pages, addressed by `row_offset`, in words (lib/pages.wgsl): no lane writes a part of a vector that
//               another one writes to as well
//
// New rows are of NEW_DTYPE.
// int8: the scale of a row is its largest magnitude over 127, and elements are divided by it and rounded. A row whose
// largest magnitude is below INT8_FLOOR becomes zero.
// fp8: elements are divided by the scale of their head and rounded; what is larger than 448 then becomes 448.
//
// Workgroup memory: LANES words, where rows have scales. Preconditions, checked by `AppendPlan::converting` and
// `Append::bind`: every destination lies in the pool and occurs once; buffer sizes; the rotated elements. The caller's:
// numbers are finite, rotated ones too; scales of heads are from 2^-100 to 2^100.

@group(0) @binding(1) var<storage, read> plan: array<u32>;
//if HEAD_SCALES
@group(0) @binding(5) var<storage, read> heads: array<vec2<f32>>;
//end

//if ROW_SCALES
// 2^-100: below, the inverse of a scale would leave the range of f32.
const INT8_FLOOR = 7.888609052210118e-31;

// The largest magnitude that each lane has seen of its row.
var<workgroup> part_max: array<f32, LANES>;
//end

@compute @workgroup_size(LANES)
fn append(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) group_count: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let group = linear_group(group_id, group_count);
    if group >= params.groups {
        report_groups(params.groups);
        return;
    }
    let rows = params.tokens * params.kv_heads;
    let index = group * (LANES / ROW_LANES) + lane / ROW_LANES;
    let is_value = index >= rows;
    let row = select(index, index - rows, is_value);
    let exists = row < rows && !(is_value && V_ROWS == 0u);
    let chunks = select(0u, select(QK_CHUNKS, V_CHUNKS, is_value), exists);
    let first_chunk = lane % ROW_LANES;
    //if SCALED
    // What elements are multiplied by before they are stored.
    var inverse = 1.0;
    //end
    //if ROW_SCALES
    var largest = 0.0;
    for (var chunk = first_chunk; chunk < chunks; chunk += ROW_LANES) {
        largest = max(largest, largest_of(new_chunk(is_value, row, chunk)));
    }
    part_max[lane] = largest;
    workgroupBarrier();
    for (var i = 0u; i < ROW_LANES; i++) {
        largest = max(largest, part_max[lane - first_chunk + i]);
    }
    let is_zero = largest < INT8_FLOOR;
    //end
    if exists {
        let token = row / params.kv_heads;
        let kv_head = row % params.kv_heads;
        let page = plan[token] / params.page_size;
        let slot = plan[token] % params.page_size;
        if page >= params.page_count {
            report_error(ERROR_PAGE_ID);
        } else {
            //if ROW_SCALES
            if select(K_ROW_SCALES, V_ROW_SCALES, is_value) != 0u {
                inverse = select(127.0 / largest, 0.0, is_zero);
                if first_chunk == 0u {
                    let scale = select(largest / 127.0, 0.0, is_zero);
                    let scale_k = row_offset(params.k_scales, page, kv_head, slot);
                    let scale_v = row_offset(params.v_scales, page, kv_head, slot);
                    store_pages(select(scale_k, scale_v, is_value), bitcast<u32>(scale));
                }
            }
            //end
            //if HEAD_SCALES
            if select(K_HEAD_SCALES, V_HEAD_SCALES, is_value) != 0u {
                inverse = 1.0 / select(heads[kv_head].x, heads[kv_head].y, is_value);
            }
            //end
            if is_value {
                let word = 4u * row_offset(params.v_rows, page, kv_head, slot);
                for (var chunk = first_chunk; chunk < chunks; chunk += ROW_LANES) {
                    if V_DTYPE == NEW_DTYPE {
                        copy_value_chunk(word, row, chunk);
                    } else {
                        //if SCALED
                        store_chunk(V_DTYPE, word, chunk, scaled(new_chunk(true, row, chunk), inverse));
                        //else
                        store_chunk(V_DTYPE, word, chunk, new_chunk(true, row, chunk));
                        //end
                    }
                }
            } else {
                let word = 4u * row_offset(params.k_rows, page, kv_head, slot);
                for (var chunk = first_chunk; chunk < chunks; chunk += ROW_LANES) {
                    if K_DTYPE == NEW_DTYPE && ROTARY == 0u {
                        copy_key_chunk(word, row, chunk);
                    } else {
                        //if SCALED
                        store_chunk(K_DTYPE, word, chunk, scaled(new_chunk(false, row, chunk), inverse));
                        //else
                        store_chunk(K_DTYPE, word, chunk, new_chunk(false, row, chunk));
                        //end
                    }
                }
            }
        }
    }
    report_done(lane);
}

// A chunk of a new row, a key's rotated; zero past the row's end.
fn new_chunk(is_value: bool, row: u32, chunk: u32) -> Chunk {
    if is_value {
        let vector = new_vector(row, chunk, V_CHUNKS);
        let second = vector + chunk_vectors(NEW_DTYPE) - 1u;
        return unpack_chunk(NEW_DTYPE, new_v[vector], new_v[second], chunk, V_HEAD_DIM);
    }
    //if ROTARY
    return rotated_chunk(row, chunk);
    //else
    let vector = new_vector(row, chunk, QK_CHUNKS);
    let second = vector + chunk_vectors(NEW_DTYPE) - 1u;
    return unpack_chunk(NEW_DTYPE, new_k[vector], new_k[second], chunk, HEAD_DIM);
    //end
}

// Where a chunk of a new row with `chunks` of them begins.
fn new_vector(row: u32, chunk: u32, chunks: u32) -> u32 {
    return (row * chunks + chunk) * chunk_vectors(NEW_DTYPE);
}

// Bit for bit, into the row that starts at `row_word`.
fn copy_key_chunk(row_word: u32, row: u32, chunk: u32) {
    let vector = new_vector(row, chunk, QK_CHUNKS);
    for (var i = 0u; i < chunk_vectors(NEW_DTYPE); i++) {
        store_words(row_word + 4u * (chunk * chunk_vectors(NEW_DTYPE) + i), new_k[vector + i]);
    }
}

fn copy_value_chunk(row_word: u32, row: u32, chunk: u32) {
    let vector = new_vector(row, chunk, V_CHUNKS);
    for (var i = 0u; i < chunk_vectors(NEW_DTYPE); i++) {
        store_words(row_word + 4u * (chunk * chunk_vectors(NEW_DTYPE) + i), new_v[vector + i]);
    }
}

fn store_chunk(dtype: u32, row_word: u32, chunk: u32, values: Chunk) {
    //if SCALED
    if dtype == DTYPE_INT8 {
        store_pages(row_word + 2u * chunk, pack_int8(values.lo));
        store_pages(row_word + 2u * chunk + 1u, pack_int8(values.hi));
        return;
    }
    if dtype == DTYPE_FP8 {
        store_pages(row_word + 2u * chunk, pack_fp8(values.lo));
        store_pages(row_word + 2u * chunk + 1u, pack_fp8(values.hi));
        return;
    }
    //end
    let word = row_word + 4u * chunk * chunk_vectors(dtype);
    if dtype == DTYPE_F32 {
        store_words(word, bitcast<vec4<u32>>(values.lo));
        store_words(word + 4u, bitcast<vec4<u32>>(values.hi));
    } else {
        store_words(word, pack_half_chunk(dtype, values));
    }
}

fn store_words(word: u32, words: vec4<u32>) {
    store_pages(word, words.x);
    store_pages(word + 1u, words.y);
    store_pages(word + 2u, words.z);
    store_pages(word + 3u, words.w);
}

//if ROTARY
fn rotated_chunk(row: u32, chunk: u32) -> Chunk {
    let token = row / params.kv_heads;
    let i = 8u * chunk;
    return Chunk(
        vec4<f32>(
            rotated(row, token, i),
            rotated(row, token, i + 1u),
            rotated(row, token, i + 2u),
            rotated(row, token, i + 3u),
        ),
        vec4<f32>(
            rotated(row, token, i + 4u),
            rotated(row, token, i + 5u),
            rotated(row, token, i + 6u),
            rotated(row, token, i + 7u),
        ),
    );
}

// Element `i` of a new key row: (a, b) become (a cos - b sin, a sin + b cos). The table's cosines and sines are the
// host's, made in float64.
fn rotated(row: u32, token: u32, i: u32) -> f32 {
    let place = i - ROTARY_FIRST;
    if i < ROTARY_FIRST || place >= ROTARY_DIMS {
        return new_element(row, i);
    }
    //if HALF_SPLIT
    let pair = place % (ROTARY_DIMS / 2u);
    let is_second = place >= ROTARY_DIMS / 2u;
    let other = select(i + ROTARY_DIMS / 2u, i - ROTARY_DIMS / 2u, is_second);
    //else
    let pair = place / 2u;
    let is_second = place % 2u == 1u;
    let other = select(i + 1u, i - 1u, is_second);
    //end
    let turn = params.turns + 2u * (token * (ROTARY_DIMS / 2u) + pair);
    let cosine = bitcast<f32>(plan[turn]);
    let sine = bitcast<f32>(plan[turn + 1u]);
    let turned = sine * new_element(row, other);
    return fma(cosine, new_element(row, i), select(-turned, turned, is_second));
}

// Zero past the row's end, where nothing is owned.
fn new_element(row: u32, i: u32) -> f32 {
    if i >= HEAD_DIM {
        return 0.0;
    }
    if NEW_DTYPE == DTYPE_F32 {
        let vector = new_k[row * 2u * QK_CHUNKS + i / 4u];
        return bitcast<f32>(vector[i % 4u]);
    }
    let vector = new_k[row * QK_CHUNKS + i / 8u];
    let half = (vector[i / 2u % 4u] >> (16u * (i % 2u))) & 0xffffu;
    if NEW_DTYPE == DTYPE_F16 {
        return unpack2x16float(half).x;
    }
    return bitcast<f32>(half << 16u);
}
//end
