// Merge: folds a row's partial states, in order of their keys, into its result.
//
// Grid: one workgroup per (work item, KV head); an item is MERGE_ROWS tile rows of a sequence whose rows have partial
// states. V_CHUNKS lanes share a row, a chunk of 8 elements each. With SOURCES an item names its sources: the shared
// prefixes around the sequence from the outside in, then the sequence itself (cascade inference; Ye et al. 2024), each with
// GROUPED once for every group of segments that has pages of it.
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
        report_groups(params.merge_groups);
        return;
    }
    let item = work_item(params.merge_items, group);
    let seq = sequence(item.sequence);
    let row = item.first_row + lane / V_CHUNKS;
    let chunk = lane % V_CHUNKS;
    if lane / V_CHUNKS < MERGE_ROWS && row < seq.rows_end {
        var folded = Folded(EMPTY_ROW, ZERO_CHUNK);
        //if SOURCES
        var at = item.key_begin;
        for (; at < item.key_end; at++) {
            let source = sequence(plan[at]);
            folded = fold(folded, source, item.kv_head, row + (seq.q_begin - source.q_begin) * GROUP, chunk);
        }
        if at < item.key_end {
            report_error(ERROR_CUT_SHORT);
        }
        //else
        folded = fold(folded, seq, item.kv_head, row, chunk);
        //end
        let query = query_row(seq, item.kv_head, row);
        let end = ending(folded.state, query);
        store_out(query, chunk, scaled(folded.acc, end.factor));
        if chunk == 0u {
            lse[query] = end.lse;
        }
    }
    report_done(lane);
}

// A row's state, and the chunk of its accumulator that a lane has.
struct Folded {
    state: RowState,
    acc: Chunk,
}

// What was folded before, and after it the splits of `source`, where the row is number `row`.
fn fold(before: Folded, source: Sequence, kv_head: u32, row: u32, chunk: u32) -> Folded {
    var state = before.state;
    var acc = before.acc;
    var split = 0u;
    for (; split < source.splits; split++) {
        let index = partial_state(source, split, kv_head, row);
        let part = load_partial_state(index);
        if has_seen(part) {
            let m = max(state.m, part.m);
            let kept = weight(state.m, m);
            let added = weight(part.m, m);
            state = RowState(m, fma(state.l, kept, part.l * added));
            acc = fma_chunk(kept, acc, scaled(load_partial_chunk(index, chunk), added));
        }
    }
    if split < source.splits {
        report_error(ERROR_CUT_SHORT);
    }
    return Folded(state, acc);
}
