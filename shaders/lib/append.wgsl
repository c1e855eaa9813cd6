// What the append kernels share: parameters, new rows, status words.
//
// Bindings (group 0); 1 and those from 5 on are the kernels' own:
//   0 params    uniform, `AppendParams`
//   2 new_k     [tokens, kv_heads] key rows, padded to whole chunks
//   3 new_v     [tokens, kv_heads] value rows, alike
//   4 workspace its status words

struct AppendParams {
    k_rows: RowLayout,
    v_rows: RowLayout,
    k_scales: RowLayout,
    v_scales: RowLayout,
    tokens: u32,
    kv_heads: u32,
    page_size: u32,
    page_count: u32,
    groups: u32,
    // Vectors of 16 bytes per new key row and per new value row.
    k_row_vectors: u32,
    v_row_vectors: u32,
    // First word of the cosines and sines, where keys are rotated.
    turns: u32,
}

struct Workspace {
    status: array<atomic<u32>, STATUS_WORDS>,
}

@group(0) @binding(0) var<uniform> params: AppendParams;
@group(0) @binding(2) var<storage, read> new_k: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> new_v: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> workspace: Workspace;
