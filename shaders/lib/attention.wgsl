// What prefill, decode and merge share: bindings, the step's plan, and the masking rule.
//
// The host prepends constants (see src/kernels/source.rs): LANES, GROUP, HEAD_DIM, V_HEAD_DIM, their vector and
// chunk counts, Q_DTYPE, KV_DTYPE, OUT_DTYPE. A vector is 4 elements in f32; a chunk is 8 elements, the unit in
// which rows are padded and loaded.
//
// Bindings (group 0):
//   0 params    uniform, `Params`; written by the plan
//   1 plan      u32 words: sequence records, work items, page ids; offsets in `Params`
//   2 q_rows    [total_q, q_heads] rows of Q_DTYPE, padded to whole chunks
//   3 kv_pages  [pages] of keys then values, addressed by `row_offset`; KV_DTYPE
//   4 out_rows  [total_q, q_heads] rows of OUT_DTYPE, padded to whole chunks
//   5 lse       [total_q, q_heads] f32 as bits, natural logarithm
//   6 partials  [states] of 1 + V_VECS vectors: (m, l, 0, 0), then the unnormalised accumulator
//   7 status    [0] workgroups that came to their end, [1] error bits
//
// Preconditions, checked by `Batch::validate`, `Attention::plan` and `Attention::bind`: indptrs, page ids,
// lengths, buffer sizes. A page id is checked again by `checked_page`.

struct Params {
    k_rows: RowLayout,
    v_rows: RowLayout,
    // scale * log2(e): scores are kept in units of log2.
    scale_log2: f32,
    causal: u32,
    kv_heads: u32,
    page_size: u32,
    page_count: u32,
    // First words of the plan's parts, and workgroups per kernel.
    page_ids: u32,
    prefill_items: u32,
    prefill_groups: u32,
    decode_items: u32,
    decode_groups: u32,
    merge_items: u32,
    merge_groups: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> plan: array<u32>;
@group(0) @binding(2) var<storage, read> q_rows: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> kv_pages: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> out_rows: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> lse: array<u32>;
@group(0) @binding(6) var<storage, read_write> partials: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> status: array<atomic<u32>>;

struct Sequence {
    // First packed query row, and how many.
    q_begin: u32,
    q_len: u32,
    kv_len: u32,
    // First entry of the page table.
    page_begin: u32,
    // First partial state, and how many splits the keys have; 1: no partial states.
    partial_begin: u32,
    splits: u32,
}

fn sequence(index: u32) -> Sequence {
    let word = index * 6u;
    return Sequence(plan[word], plan[word + 1u], plan[word + 2u], plan[word + 3u], plan[word + 4u], plan[word + 5u]);
}

struct WorkItem {
    sequence: u32,
    // First tile row of the item: rows are (token, query head of the group).
    first_row: u32,
    // Keys `key_begin .. key_end`.
    key_begin: u32,
    key_end: u32,
    kv_head: u32,
}

// The work item of workgroup `group` in the list that starts at word `items`: every item once per KV head.
fn work_item(items: u32, group: u32) -> WorkItem {
    let word = items + group / params.kv_heads * 4u;
    return WorkItem(plan[word], plan[word + 1u], plan[word + 2u], plan[word + 3u], group % params.kv_heads);
}

// The masking rule: the row of `token` sees keys `0 .. visible_keys`. Bottom-right alignment.
fn visible_keys(seq: Sequence, token: u32) -> u32 {
    let through_own = seq.kv_len + token + 1u;
    let causal_end = select(0u, through_own - seq.q_len, through_own > seq.q_len);
    return select(seq.kv_len, min(causal_end, seq.kv_len), params.causal != 0u);
}

// Index of a query (and output) row: `[total_q, q_heads]`.
fn query_row(seq: Sequence, kv_head: u32, row: u32) -> u32 {
    return (seq.q_begin + row / GROUP) * (params.kv_heads * GROUP) + kv_head * GROUP + row % GROUP;
}

// Index of a partial state: `[splits, kv_heads, rows]` within a sequence.
fn partial_state(seq: Sequence, split: u32, kv_head: u32, row: u32) -> u32 {
    return seq.partial_begin + (split * params.kv_heads + kv_head) * seq.q_len * GROUP + row;
}

// Entry of the page table in `plan` for a key.
fn page_entry(seq: Sequence, key: u32) -> u32 {
    return params.page_ids + seq.page_begin + key / params.page_size;
}

struct Page {
    id: u32,
    exists: bool,
}

// A page id outside the pool must not lead to another page's keys: what does not exist is not read, and reported.
fn checked_page(id: u32) -> Page {
    return Page(id, id < params.page_count);
}

// Walks the keys of a sequence in order: one look into the page table per page, and no division.
struct Cursor {
    entry: u32,
    slot: u32,
    page: Page,
}

fn cursor_at(seq: Sequence, key: u32) -> Cursor {
    let entry = page_entry(seq, key);
    return Cursor(entry, key % params.page_size, checked_page(plan[entry]));
}

// The place of the key after, or the same again where there is none.
fn advanced(at: Cursor, exists: bool) -> Cursor {
    var next = at;
    next.slot += select(0u, 1u, exists);
    if next.slot == params.page_size {
        next.entry += 1u;
        next.slot = 0u;
        next.page = checked_page(plan[next.entry]);
    }
    return next;
}

// Whether every page of keys `key_begin .. key_end` exists. All lanes come to the same answer.
fn pages_exist(seq: Sequence, key_begin: u32, key_end: u32) -> bool {
    var exist = true;
    if key_begin < key_end {
        for (var entry = page_entry(seq, key_begin); entry <= page_entry(seq, key_end - 1u); entry++) {
            exist = exist && checked_page(plan[entry]).exists;
        }
    }
    return exist;
}

// Where a key's rows start, its page being known to exist: x of the key, y of the value.
fn key_rows(seq: Sequence, kv_head: u32, key: u32) -> vec2<u32> {
    let page = plan[page_entry(seq, key)];
    let slot = key % params.page_size;
    return vec2<u32>(
        row_offset(params.k_rows, page, kv_head, slot),
        row_offset(params.v_rows, page, kv_head, slot),
    );
}
