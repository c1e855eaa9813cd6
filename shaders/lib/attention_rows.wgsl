// Loads of query, key and value chunks, and the end of a row: its partial state or its result.

fn load_q(row: u32, chunk: u32) -> Chunk {
    let vector = (row * QK_CHUNKS + chunk) * chunk_vectors(Q_DTYPE);
    return unpack_chunk(Q_DTYPE, q_rows[vector], q_rows[vector + chunk_vectors(Q_DTYPE) - 1u], chunk, HEAD_DIM);
}

// `row` comes from `row_offset`.
fn load_kv(row: u32, chunk: u32, dim: u32) -> Chunk {
    let vector = row + chunk * chunk_vectors(KV_DTYPE);
    return unpack_chunk(KV_DTYPE, kv_pages[vector], kv_pages[vector + chunk_vectors(KV_DTYPE) - 1u], chunk, dim);
}

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
    partials[vector] = value.lo;
    partials[vector + 1u] = value.hi;
}

fn load_partial_chunk(state: u32, chunk: u32) -> Chunk {
    let vector = partial_vector(state) + 1u + chunk * 2u;
    return Chunk(partials[vector], partials[vector + 1u]);
}

fn store_partial_state(state: u32, row: RowState) {
    partials[partial_vector(state)] = vec4<f32>(row.m, row.l, 0.0, 0.0);
}

fn load_partial_state(state: u32) -> RowState {
    let words = partials[partial_vector(state)];
    return RowState(words.x, words.y);
}

// A row's result is its accumulator times this. Zero for a row that saw no key, whose accumulator is zero too.
fn normaliser(row: RowState) -> f32 {
    return select(0.0, 1.0 / select(1.0, row.l, has_seen(row)), has_seen(row));
}

fn store_lse(row_index: u32, row: RowState) {
    let value = (row.m + log2(select(1.0, row.l, has_seen(row)))) * LN_2;
    lse[row_index] = select(NEGATIVE_INFINITY_BITS, bitcast<u32>(value), has_seen(row));
}
