// Shared by the five kernels of the unfused baseline; the host puts it in front of each of them, and in front of
// both a few constants:
//
//   Q_HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM: u32   the dimensions are multiples of 4
//   SCALE: f32, CAUSAL: bool
//
// Tensors are f32, packed, without pages: q [total_q, Q_HEADS, HEAD_DIM], k [total_kv, KV_HEADS, HEAD_DIM],
// v [total_kv, KV_HEADS, V_HEAD_DIM], out [total_q, Q_HEADS, V_HEAD_DIM]. The score matrix holds, for each sequence
// and query head, q_len rows of `s_stride` f32; only the first kv_len of a row mean anything.
//
// Preconditions are checked by `Unfused::new` in mod.rs.

const GROUP: u32 = Q_HEADS / KV_HEADS;

struct Seq {
    q_start: u32,   // first row in q and out
    q_len: u32,     // rows
    kv_start: u32,  // first row in k and v
    kv_len: u32,    // rows
    s_start: u32,   // first f32 of the score matrix of head 0
    s_stride: u32,  // f32 from one score row to the next, a multiple of 4
}

// Keys 0 .. visible_keys are seen by query row `row`: all, or those at or before its own position.
fn visible_keys(seq: Seq, row: u32) -> u32 {
    if CAUSAL {
        let end = seq.kv_len + row + 1u;
        return min(select(0u, end - seq.q_len, end > seq.q_len), seq.kv_len);
    }
    return seq.kv_len;
}

// First f32 of the scores of one query row.
fn score_row(seq: Seq, head: u32, row: u32) -> u32 {
    return seq.s_start + (head * seq.q_len + row) * seq.s_stride;
}
