// Append: copies new key and value rows into the pages, bit for bit. (Rows that are rotated, or of another type than the
// pages, take append_converted.wgsl.)
//
// Grid: one lane per vector of 16 bytes of (token, KV head, key row then value row), folded into three axes.
//
// Bindings (group 0), beside those of lib/append.wgsl:
//   1 slots      [tokens] destination of each token: page * page_size + slot
//   5 kv_pages_N the pages, addressed by `row_offset` (lib/pages.wgsl)
//
// New rows are in the pages' type. Workgroup memory: none. Preconditions, checked by `AppendPlan::new` and `Append::bind`:
// every destination lies in the pool and occurs once; buffer sizes.

@group(0) @binding(1) var<storage, read> slots: array<u32>;

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
    let row_vectors = params.k_row_vectors + params.v_row_vectors;
    let row = (group * LANES + lane) / row_vectors;
    let vector = (group * LANES + lane) % row_vectors;
    if row < params.tokens * params.kv_heads {
        let kv_head = row % params.kv_heads;
        let page = slots[row / params.kv_heads] / params.page_size;
        let slot = slots[row / params.kv_heads] % params.page_size;
        if page >= params.page_count {
            report_error(ERROR_PAGE_ID);
        } else if vector < params.k_row_vectors {
            let target_vector = row_offset(params.k_rows, page, kv_head, slot) + vector;
            store_pages(target_vector, new_k[row * params.k_row_vectors + vector]);
        } else {
            let v_vector = vector - params.k_row_vectors;
            let target_vector = row_offset(params.v_rows, page, kv_head, slot) + v_vector;
            store_pages(target_vector, new_v[row * params.v_row_vectors + v_vector]);
        }
    }
    report_done(lane);
}
