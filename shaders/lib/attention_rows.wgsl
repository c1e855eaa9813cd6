// Loads of query, key and value chunks, and the end of a row: its partial state or its result.

fn load_q(row: u32, chunk: u32) -> Chunk {
    let vector = (row * QK_CHUNKS + chunk) * chunk_vectors(Q_DTYPE);
    return unpack_chunk(Q_DTYPE, q_rows[vector], q_rows[vector + chunk_vectors(Q_DTYPE) - 1u], chunk, HEAD_DIM);
}

// `offset` comes from `key_row_offsets`.
fn load_kv(offset: u32, chunk: u32, dim: u32) -> Chunk {
    if offset == NO_ROW {
        return ZERO_CHUNK;
    }
    let vector = offset + chunk * chunk_vectors(KV_DTYPE);
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

fn store_partial_chunk(state: u32, chunk: u32, value: Chunk) {
    let vector = state * (V_VECS + 1u) + 1u + chunk * 2u;
    partials[vector] = value.lo;
    partials[vector + 1u] = value.hi;
}

fn store_partial_state(state: u32, row: RowState) {
    partials[state * (V_VECS + 1u)] = vec4<f32>(row.m, row.l, 0.0, 0.0);
}

// A row's result is its accumulator times this. Zero for a row that saw no key, whose accumulator is zero too.
fn normaliser(row: RowState) -> f32 {
    return select(0.0, 1.0 / select(1.0, row.l, has_seen(row)), has_seen(row));
}

fn store_lse(row_index: u32, row: RowState) {
    let value = (row.m + log2(select(1.0, row.l, has_seen(row)))) * LN_2;
    lse[row_index] = select(NEGATIVE_INFINITY_BITS, bitcast<u32>(value), has_seen(row));
}

fn scaled(chunk: Chunk, factor: f32) -> Chunk {
    return Chunk(chunk.lo * factor, chunk.hi * factor);
}
