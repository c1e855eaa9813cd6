// Loads of query, key and value chunks, and the end of a row: its partial state or its result.

fn load_q(row: u32, chunk: u32) -> Chunk {
    let vector = (row * QK_CHUNKS + chunk) * chunk_vectors(Q_DTYPE);
    return unpack_chunk(Q_DTYPE, q_rows[vector], q_rows[vector + chunk_vectors(Q_DTYPE) - 1u], chunk, HEAD_DIM);
}

// `row` comes from `row_offset`. What has a scale comes without it.
fn load_key(row: u32, chunk: u32) -> Chunk {
    //if K_SCALED
    return unpack_byte_chunk(K_DTYPE, load_pages(row + chunk / 2u), chunk, HEAD_DIM);
    //else
    let vector = row + chunk * chunk_vectors(K_DTYPE);
    return unpack_chunk(K_DTYPE, load_pages(vector), load_pages(vector + chunk_vectors(K_DTYPE) - 1u), chunk, HEAD_DIM);
    //end
}

fn load_value(row: u32, chunk: u32) -> Chunk {
    //if V_SCALED
    return unpack_byte_chunk(V_DTYPE, load_pages(row + chunk / 2u), chunk, V_HEAD_DIM);
    //else
    let vector = row + chunk * chunk_vectors(V_DTYPE);
    return unpack_chunk(V_DTYPE, load_pages(vector), load_pages(vector + chunk_vectors(V_DTYPE) - 1u), chunk, V_HEAD_DIM);
    //end
}

//if K_SCALED
// The scale of a key: of its row, or of its head. A score is multiplied by it before anything else happens to it.
fn key_scale(page: u32, kv_head: u32, slot: u32) -> f32 {
    //if K_ROW_SCALES
    return row_scale(row_offset(params.k_scales, page, kv_head, slot));
    //else
    return head_scales(kv_head).x;
    //end
}
//end

//if V_SCALED
// The scale of a value; the value's weight is multiplied by it, after the weights were summed.
fn value_scale(page: u32, kv_head: u32, slot: u32) -> f32 {
    //if V_ROW_SCALES
    return row_scale(row_offset(params.v_scales, page, kv_head, slot));
    //else
    //if LATENT
    return head_scales(kv_head).x;
    //else
    return head_scales(kv_head).y;
    //end
    //end
}
//end

//if SCALED
// The scales of a key of `page`: x of the key, y of the value; 1 where there is none.
fn key_scales(page: u32, kv_head: u32, key: u32) -> vec2<f32> {
    let slot = key % params.page_size;
    var scales = vec2<f32>(1.0);
    //if K_SCALED
    scales.x = key_scale(page, kv_head, slot);
    //end
    //if V_SCALED
    scales.y = value_scale(page, kv_head, slot);
    //end
    return scales;
}
//end

//if ROW_SCALES
fn row_scale(word: u32) -> f32 {
    let words = load_pages(word / 4u);
    return bitcast<f32>(words[word % 4u]);
}
//end

//if HEAD_SCALES
fn head_scales(kv_head: u32) -> vec2<f32> {
    //if HEADS
    return heads[params.kv_heads * GROUP + kv_head];
    //else
    return heads[kv_head];
    //end
}
//end

fn store_out(row: u32, chunk: u32, value: Chunk) {
    let vector = (row * V_CHUNKS + chunk) * chunk_vectors(OUT_DTYPE);
    if OUT_DTYPE == DTYPE_F32 {
        out_rows[vector] = bitcast<vec4<u32>>(value.lo);
        out_rows[vector + 1u] = bitcast<vec4<u32>>(value.hi);
    } else {
        out_rows[vector] = pack_f16_chunk(value);
    }
}

// A partial state is 1 + V_VECS vectors: (m, l, 0, 0), then the unnormalised accumulator.
fn partial_vector(state: u32) -> u32 {
    return state * (V_VECS + 1u);
}

fn store_partial_chunk(state: u32, chunk: u32, value: Chunk) {
    let vector = partial_vector(state) + 1u + chunk * 2u;
    workspace.states[vector] = value.lo;
    workspace.states[vector + 1u] = value.hi;
}

fn load_partial_chunk(state: u32, chunk: u32) -> Chunk {
    let vector = partial_vector(state) + 1u + chunk * 2u;
    return Chunk(workspace.states[vector], workspace.states[vector + 1u]);
}

fn store_partial_state(state: u32, row: RowState) {
    workspace.states[partial_vector(state)] = vec4<f32>(row.m, row.l, 0.0, 0.0);
}

fn load_partial_state(state: u32) -> RowState {
    let words = workspace.states[partial_vector(state)];
    return RowState(words.x, words.y);
}

// The end of a row: its result is its accumulator times `factor`, which is zero for a row that saw no key.
struct Ending {
    factor: f32,
    lse: u32,
}

// `query` is the row's index, from `query_row`.
fn ending(row: RowState, query: u32) -> Ending {
    //if SINKS
    // A sink is a score without a value: it joins the sum of weights, once, when all keys have.
    let sink = heads[query % (params.kv_heads * GROUP)].y * LOG2_E;
    let m = max(row.m, sink);
    let kept = select(0.0, weight(row.m, m), has_seen(row));
    let l = fma(row.l, kept, weight(sink, m));
    return Ending(kept / l, bitcast<u32>((m + log2(l)) * LN_2));
    //else
    let l = select(1.0, row.l, has_seen(row));
    let value = (row.m + log2(l)) * LN_2;
    return Ending(
        select(0.0, 1.0 / l, has_seen(row)),
        select(NEGATIVE_INFINITY_BITS, bitcast<u32>(value), has_seen(row)),
    );
    //end
}
