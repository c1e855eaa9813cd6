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
