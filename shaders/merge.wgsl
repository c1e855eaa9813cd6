// Merge: folds a row's partial states, split by split from the left, into its result.
//
// Grid: one workgroup per (work item, KV head); an item is MERGE_ROWS tile rows of a sequence whose keys were
// split. V_CHUNKS lanes share a row, a chunk of 8 elements each.
// Folding from the left keeps a row's bits the same however many empty splits follow its last key.
//
// Workgroup memory: none. Preconditions: see lib/attention.wgsl; V_CHUNKS <= LANES (`V_HEAD_DIM_MAX`).

@compute @workgroup_size(LANES)
fn merge(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) group_count: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let group = linear_group(group_id, group_count);
    if group >= params.merge_groups {
        return;
    }
    let item = work_item(params.merge_items, group);
    let seq = sequence(item.sequence);
    let row = item.first_row + lane / V_CHUNKS;
    let chunk = lane % V_CHUNKS;
    if lane / V_CHUNKS < MERGE_ROWS && row < seq.q_len * GROUP {
        var state = EMPTY_ROW;
        var acc = ZERO_CHUNK;
        var split = seq.first_split;
        for (; split < seq.first_split + seq.splits; split++) {
            let index = partial_state(seq, split, item.kv_head, row);
            let part = load_partial_state(index);
            if has_seen(part) {
                let m = max(state.m, part.m);
                let kept = weight(state.m, m);
                let added = weight(part.m, m);
                state = RowState(m, fma(state.l, kept, part.l * added));
                acc = fma_chunk(kept, acc, scaled(load_partial_chunk(index, chunk), added));
            }
        }
        if split < seq.first_split + seq.splits {
            report_error(ERROR_CUT_SHORT);
        }
        let query = query_row(seq, item.kv_head, row);
        let end = ending(state, query);
        store_out(query, chunk, scaled(acc, end.factor));
        if chunk == 0u {
            lse[query] = end.lse;
        }
    }
    report_done(lane);
}
