// What prefill, decode and merge share: bindings, the step's plan, and the masking rule.
//
// The host prepends constants (see src/kernels/source.rs): LANES, GROUP, HEAD_DIM, V_HEAD_DIM, their vector and
// chunk counts, Q_DTYPE, K_DTYPE, V_DTYPE, OUT_DTYPE. A vector is 4 elements in f32; a chunk is 8 elements, the unit in
// which rows are padded and loaded.
//
// Bindings (group 0):
//   params     uniform, `Params`; written by the plan, at a dynamic offset: one block for all, or one for each dispatch
//   plan       u32 words: records, sources of merges, owners of rows, work items, masks, page ids; offsets in `Params`
//   q_rows     [total_q, q_heads] rows of Q_DTYPE, padded to whole chunks
//   out_rows   [total_q, q_heads] rows of OUT_DTYPE, padded to whole chunks
//   lse        [total_q, q_heads] f32 as bits, natural logarithm
//   workspace  status words, then [states] of 1 + V_VECS vectors: (m, l, 0, 0), then the unnormalised accumulator
//   heads      [q_heads] of (ALiBi slope, sink), where either is on; then [kv_heads] of (key scale, value scale), where
//              either is fp8
//   bias       [1 or q_heads, pairs of query row and key] of BIAS_DTYPE; where it is on
//   kv_pages_N [pages] of keys, values, scales of key rows and of value rows, addressed by `row_offset`; K_DTYPE, V_DTYPE
//              (lib/pages.wgsl)
//
// Preconditions, checked by `Batch::validate`, `Attention::plan` and `Attention::bind`: indptrs, page ids,
// lengths, buffer sizes. A page id is checked again by `checked_page`.

struct Params {
    k_rows: RowLayout,
    v_rows: RowLayout,
    k_scales: RowLayout,
    v_scales: RowLayout,
    // scale * log2(e): scores are kept in units of log2. With a softcap: scale / softcap.
    q_factor: f32,
    // softcap * log2(e)
    softcap_log2: f32,
    // Keys that a row sees before and after its own position, or UNLIMITED.
    reach_left: u32,
    reach_right: u32,
    kv_heads: u32,
    page_size: u32,
    page_count: u32,
    // Elements of the bias from one head to the next; 0 where all heads share it.
    bias_head_stride: u32,
    // First words of the plan's parts, and workgroups per kernel.
    page_ids: u32,
    masks: u32,
    runs: u32,
    owners: u32,
    prefill_items: u32,
    prefill_groups: u32,
    decode_items: u32,
    decode_groups: u32,
    merge_items: u32,
    merge_groups: u32,
    // The first of the kernel's workgroups, where its work was cut into several dispatches.
    first_group: u32,
    // Where a dispatch does not bind all segments of the pool: the pages whose keys it takes.
    first_page: u32,
    pages: u32,
}

const UNLIMITED = 0xffffffffu;

struct Workspace {
    status: array<atomic<u32>, STATUS_WORDS>,
    states: array<vec4<f32>>,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> plan: array<u32>;
@group(0) @binding(2) var<storage, read> q_rows: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> out_rows: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> lse: array<u32>;
@group(0) @binding(5) var<storage, read_write> workspace: Workspace;
//if HEADS_BINDING
@group(0) @binding(${HEADS_BINDING}) var<storage, read> heads: array<vec2<f32>>;
//end
//if BIAS
@group(0) @binding(${BIAS_BINDING}) var<storage, read> bias: array<u32>;
//end

// A sequence of the batch, or some of its rows; or, with SHARED, the prefix of some: their rows, one after the other, and the keys that they
// share.
struct Sequence {
    // First packed query row, and how many.
    q_begin: u32,
    q_len: u32,
    kv_len: u32,
    // First entry of the page table.
    page_begin: u32,
    // Where the partial states of its tile row 0 begin, or would, if it had that row: they wrap.
    partial_begin: u32,
    // How many splits of `split_keys` keys have keys that are seen, and the first of them.
    splits: u32,
    first_split: u32,
    split_keys: u32,
    // Where its tile rows end, and how many have partial states at the same time; 0 where work items make whole results.
    rows_end: u32,
    state_rows: u32,
    //if MASK
    // First word of its mask.
    mask_begin: u32,
    //end
    //if BIAS
    // First element of its bias.
    bias_begin: u32,
    //end
}

fn sequence(index: u32) -> Sequence {
    let word = index * SEQUENCE_WORDS;
    return Sequence(
        plan[word],
        plan[word + 1u],
        plan[word + 2u],
        plan[word + 3u],
        plan[word + 4u],
        plan[word + 5u],
        plan[word + 6u],
        plan[word + 7u],
        plan[word + 8u],
        plan[word + 9u],
        //if MASK
        plan[word + 10u],
        //end
        //if BIAS
        plan[word + 11u],
        //end
    );
}

struct WorkItem {
    sequence: u32,
    // First tile row of the item: rows are (token, query head of the group).
    first_row: u32,
    // Keys `key_begin .. key_end`. A merge has its sources there instead, as far as SOURCES.
    key_begin: u32,
    key_end: u32,
    kv_head: u32,
    //if MASK
    // The stretches of these keys that the mask leaves.
    first_run: u32,
    runs: u32,
    //end
}

// The work item of workgroup `group` of the dispatch, in the list that starts at word `items`: every item once per KV head.
fn work_item(items: u32, group: u32) -> WorkItem {
    let place = params.first_group + group;
    let word = items + place / params.kv_heads * ITEM_WORDS;
    return WorkItem(
        plan[word],
        plan[word + 1u],
        plan[word + 2u],
        plan[word + 3u],
        place % params.kv_heads,
        //if MASK
        plan[word + 4u],
        plan[word + 5u],
        //end
    );
}

//if MASK
// Keys that lie one after the other: none of them hidden from a row of the item by the mask, or to be tested.
struct Run {
    key_begin: u32,
    key_end: u32,
    tested: bool,
}

fn mask_run(index: u32) -> Run {
    let word = params.runs + index * 3u;
    return Run(plan[word], plan[word + 1u], plan[word + 2u] != 0u);
}
//end

// The rule of causal mask and window: the row of `token` sees keys `first_visible .. end_visible`, as far as there are
// any. Bottom-right alignment: its position is kv_len - q_len + token.
fn end_visible(seq: Sequence, token: u32) -> u32 {
    // A row before the first key needs a longer reach than there are keys.
    let reach = seq.kv_len + token + 1u + min(params.reach_right, seq.q_len + seq.kv_len);
    let end = select(0u, reach - seq.q_len, reach > seq.q_len);
    return select(min(end, seq.kv_len), seq.kv_len, params.reach_right == UNLIMITED);
}

fn first_visible(seq: Sequence, token: u32) -> u32 {
    let before = seq.q_len + min(params.reach_left, seq.kv_len);
    let at = seq.kv_len + token;
    return select(0u, at - before, at > before && params.reach_left != UNLIMITED);
}

// Index of a query (and output) row: `[total_q, q_heads]`.
fn query_row(seq: Sequence, kv_head: u32, row: u32) -> u32 {
    return (seq.q_begin + row / GROUP) * (params.kv_heads * GROUP) + kv_head * GROUP + row % GROUP;
}

// Index of a partial state: `[splits, kv_heads, rows]` within a sequence, splits counted from its first.
fn partial_state(seq: Sequence, split: u32, kv_head: u32, row: u32) -> u32 {
    return seq.partial_begin + (split * params.kv_heads + kv_head) * seq.state_rows + row;
}

// The split that an item works on.
fn split_of(seq: Sequence, item: WorkItem) -> u32 {
    return item.key_begin / seq.split_keys - seq.first_split;
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

//if GROUPED
// Whether the keys of a page are this dispatch's. The others' are hidden here, and taken by another one; the merge joins them.
fn is_here(id: u32) -> bool {
    return id - params.first_page < params.pages;
}
//end

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

// Where the rows of a key of `page` start: x of the key, y of the value.
fn key_rows(page: u32, kv_head: u32, key: u32) -> vec2<u32> {
    let slot = key % params.page_size;
    return vec2<u32>(
        row_offset(params.k_rows, page, kv_head, slot),
        row_offset(params.v_rows, page, kv_head, slot),
    );
}
