// The online softmax, and with it the one merge rule (Milakov and Gimelshein 2018; Dao et al. 2022):
//
//   m' = max(m, m_new),  l' = 2^(m - m') l + 2^(m_new - m') l_new,  the accumulators alike.
//
// Scores are in units of log2. No infinity and no NaN arises: an implementation may assume that there are none.

const LN_2 = 0.6931471805599453;
const LOG2_E = 1.4426950408889634;
const NEGATIVE_INFINITY_BITS = 0xff800000u;

// Seeds a running maximum. No score of the supported range reaches it (-2^126; `SCORE_LOG2_MAX` on the host), and
// a difference from any of them is finite. Only its role as a seed matters: whether a row has seen a key is asked
// of `has_seen`, never of this value.
const NO_SCORE = -8.507059173023462e37;

// `m`: running maximum; `l`: sum of the weights relative to it. The key that sets the maximum has weight 1, so
// `l` is at least 1 once a key was seen and exactly 0 before.
struct RowState {
    m: f32,
    l: f32,
}

const EMPTY_ROW = RowState(NO_SCORE, 0.0);

fn has_seen(row: RowState) -> bool {
    return row.l > 0.0;
}

// The weight of score `s` under the maximum `m >= s`; exactly 1 for the maximum itself.
fn weight(s: f32, m: f32) -> f32 {
    return select(exp2(s - m), 1.0, s == m);
}
