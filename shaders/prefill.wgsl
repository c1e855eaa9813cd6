// Prefill: exact attention of many query rows of one sequence, step by step over its keys with an online softmax
// (FlashAttention; Dao et al. 2022).
//
// Grid: one workgroup per (work item, KV head); an item is PREFILL_LANES * ROWS_PER_LANE tile rows of a sequence and
// the keys they see (of one split, where the host splits them). A tile row is (token, query head of the group): all
// heads that share a KV head share its loads.
// Each lane owns ROWS_PER_LANE tile rows, their queries and accumulators in registers. A key reaches all lanes in one of
// two ways:
// - without subgroups all lanes read the same address: a scalar load on some devices, a broadcast on others;
// - with subgroups each lane reads other words, neighbouring lanes neighbouring ones, and the subgroup broadcasts them.
// There is nothing to stage in workgroup memory, so there is no barrier.
//
// Lines between `//each`, `//if` and `//end` are repeated or chosen by the host (src/kernels/template.rs): registers need
// names, since an array that a loop indexes ends up in memory.
//
// Workgroup memory: none. Preconditions: see lib/attention.wgsl.

@compute @workgroup_size(PREFILL_LANES)
fn prefill(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) group_count: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    //if PREFILL_SUBGROUP
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
    @builtin(subgroup_size) subgroup_size: u32,
    //end
) {
    let group = linear_group(group_id, group_count);
    if group >= params.prefill_groups {
        report_groups(params.prefill_groups);
        return;
    }
    let item = work_item(params.prefill_items, group);
    let seq = sequence(item.sequence);
    let row_count = seq.rows_end;
    //if PREFILL_SUBGROUP
    if subgroup_size != PREFILL_SUBGROUP {
        report_error(ERROR_SUBGROUP);
    }
    // Chunk i of a step's keys is loaded by lane i % PREFILL_SUBGROUP of every subgroup into its register i / PREFILL_SUBGROUP.
    //each i K_LOADS
    let k_key_$i = (${i * PREFILL_SUBGROUP}u + subgroup_lane) / QK_CHUNKS;
    let k_chunk_$i = (${i * PREFILL_SUBGROUP}u + subgroup_lane) % QK_CHUNKS;
    //end
    //if LATENT
    //else
    //each i V_LOADS
    let v_key_$i = (${i * PREFILL_SUBGROUP}u + subgroup_lane) / V_CHUNKS;
    let v_chunk_$i = (${i * PREFILL_SUBGROUP}u + subgroup_lane) % V_CHUNKS;
    //end
    //end
    //end

    //each r ROWS_PER_LANE
    // A lane without a row repeats the last one and writes nothing.
    let row_$r = min(tile_row(item, $ru, lane), row_count - 1u);
    //if MASK
    var scores_$r = score_row(seq, item, row_$r);
    //else
    let scores_$r = score_row(seq, item, row_$r);
    //end
    let query_$r = query_row(seq, item.kv_head, row_$r);
    var state_$r = EMPTY_ROW;
    //each c QK_CHUNKS
    let q_$r_$c = scaled(load_q(query_$r, $cu), params.q_factor);
    //end
    //each c V_CHUNKS
    var acc_$r_$c = ZERO_CHUNK;
    //end
    //end

    //if MASK
    // Stretch by stretch; what the mask hides from all rows is not read.
    for (var run = 0u; run < item.runs; run++) {
    let stretch = mask_run(item.first_run + run);
    let key_begin = stretch.key_begin;
    let key_end = stretch.key_end;
    //each r ROWS_PER_LANE
    scores_$r.tested = stretch.tested;
    //end
    //else
    let key_begin = item.key_begin;
    let key_end = item.key_end;
    //end
    var at = cursor_at(seq, key_begin);
    // Steps lie at multiples of their size, wherever the keys begin.
    var step = key_begin / STEP_KEYS * STEP_KEYS;
    for (; step < key_end; step += STEP_KEYS) {
        //if GROUPED
        var any_here = false;
        //end
        //each k STEP_KEYS
        if !at.page.exists {
            report_error(ERROR_PAGE_ID);
            step = key_end;
            break;
        }
        let k_row_$k = row_offset(params.k_rows, at.page.id, item.kv_head, at.slot);
        let v_row_$k = row_offset(params.v_rows, at.page.id, item.kv_head, at.slot);
        //if K_SCALED
        let k_scale_$k = key_scale(at.page.id, item.kv_head, at.slot);
        //end
        //if V_SCALED
        let v_scale_$k = value_scale(at.page.id, item.kv_head, at.slot);
        //end
        //if GROUPED
        any_here = any_here || is_here(at.page.id);
        //end
        // The keys after this one, as far as there are any; before the first key there is none either.
        at = advanced(at, step + $ku - key_begin < key_end - key_begin - 1u);
        //end

        //if GROUPED
        // A step without a key of this dispatch changes nothing.
        if !any_here {
            continue;
        }
        //end
        //each r ROWS_PER_LANE
        //each k STEP_KEYS
        var s_$r_$k = 0.0;
        //end
        //end
        //if PREFILL_SUBGROUP
        //each i K_LOADS
        var k_offset_$i = k_row_0;
        //each k 1 STEP_KEYS
        k_offset_$i = select(k_offset_$i, k_row_$k, k_key_$i >= $ku);
        //end
        let keys_$i = load_key(k_offset_$i, k_chunk_$i);
        //end
        //end
        //each c QK_CHUNKS
        {
            //each k STEP_KEYS
            //if PREFILL_SUBGROUP
            let key_$k = Chunk(
                subgroupBroadcast(keys_${k * QK_CHUNKS + c / PREFILL_SUBGROUP}.lo, ${k * QK_CHUNKS + c % PREFILL_SUBGROUP}u),
                subgroupBroadcast(keys_${k * QK_CHUNKS + c / PREFILL_SUBGROUP}.hi, ${k * QK_CHUNKS + c % PREFILL_SUBGROUP}u),
            );
            //else
            let key_$k = load_key(k_row_$k, $cu);
            //end
            //end
            //each r ROWS_PER_LANE
            //each k STEP_KEYS
            s_$r_$k = dot_chunk(q_$r_$c, key_$k, s_$r_$k);
            //end
            //end
        }
        //end

        //each r ROWS_PER_LANE
        var m_$r = state_$r.m;
        //each k STEP_KEYS
        //if K_SCALED
        s_$r_$k *= k_scale_$k;
        //end
        let score_$r_$k = scored(scores_$r, step + $ku, s_$r_$k);
        m_$r = max(m_$r, score_$r_$k.value);
        //end
        let rescale_$r = weight(state_$r.m, m_$r);
        var sum_$r = 0.0;
        //each k STEP_KEYS
        //if V_SCALED
        var p_$r_$k = select(0.0, weight(score_$r_$k.value, m_$r), score_$r_$k.visible);
        sum_$r += p_$r_$k;
        p_$r_$k *= v_scale_$k;
        //else
        let p_$r_$k = select(0.0, weight(score_$r_$k.value, m_$r), score_$r_$k.visible);
        sum_$r += p_$r_$k;
        //end
        //end
        state_$r = RowState(m_$r, fma(state_$r.l, rescale_$r, sum_$r));
        //end

        // Latent values are registers of the keys already.
        //if PREFILL_SUBGROUP
        //if LATENT
        //else
        //each i V_LOADS
        var v_offset_$i = v_row_0;
        //each k 1 STEP_KEYS
        v_offset_$i = select(v_offset_$i, v_row_$k, v_key_$i >= $ku);
        //end
        let values_$i = load_value(v_offset_$i, v_chunk_$i);
        //end
        //end
        //end
        //each c V_CHUNKS
        {
            //each k STEP_KEYS
            //if PREFILL_SUBGROUP
            //if LATENT
            let value_$k = Chunk(
                subgroupBroadcast(keys_${k * QK_CHUNKS + c / PREFILL_SUBGROUP}.lo, ${k * QK_CHUNKS + c % PREFILL_SUBGROUP}u),
                subgroupBroadcast(keys_${k * QK_CHUNKS + c / PREFILL_SUBGROUP}.hi, ${k * QK_CHUNKS + c % PREFILL_SUBGROUP}u),
            );
            //else
            let value_$k = Chunk(
                subgroupBroadcast(values_${k * V_CHUNKS + c / PREFILL_SUBGROUP}.lo, ${k * V_CHUNKS + c % PREFILL_SUBGROUP}u),
                subgroupBroadcast(values_${k * V_CHUNKS + c / PREFILL_SUBGROUP}.hi, ${k * V_CHUNKS + c % PREFILL_SUBGROUP}u),
            );
            //end
            //else
            let value_$k = load_value(v_row_$k, $cu);
            //end
            //end
            //each r ROWS_PER_LANE
            var part_$r = scaled(value_0, p_$r_0);
            //each k 1 STEP_KEYS
            part_$r = fma_chunk(p_$r_$k, value_$k, part_$r);
            //end
            acc_$r_$c = fma_chunk(rescale_$r, acc_$r_$c, part_$r);
            //end
        }
        //end
    }

    if step < key_end {
        report_error(ERROR_CUT_SHORT);
    }
    //if MASK
    }
    //end

    // The stores stand once for all rows of a lane: each is many blocks of code on llvmpipe, whose compiler takes time that
    // grows with their square.
    for (var r = 0u; r < ROWS_PER_LANE; r++) {
        let row = tile_row(item, r, lane);
        if row < row_count {
            var state = EMPTY_ROW;
            //each r ROWS_PER_LANE
            state.m = select(state.m, state_$r.m, r == $ru);
            state.l = select(state.l, state_$r.l, r == $ru);
            //end
            let query = query_row(seq, item.kv_head, row);
            let index = partial_state(seq, split_of(seq, item), item.kv_head, row);
            let end = ending(state, query);
            //each c V_CHUNKS
            {
                var chunk = acc_0_$c;
                //each r 1 ROWS_PER_LANE
                chunk = chosen(chunk, acc_$r_$c, r == $ru);
                //end
                if seq.state_rows == 0u {
                    store_out(query, $cu, scaled(chunk, end.factor));
                } else {
                    store_partial_chunk(index, $cu, chunk);
                }
            }
            //end
            if seq.state_rows == 0u {
                lse[query] = end.lse;
            } else {
                store_partial_state(index, state);
            }
        }
    }
    report_done(lane);
}

fn tile_row(item: WorkItem, r: u32, lane: u32) -> u32 {
    return item.first_row + r * PREFILL_LANES + lane;
}
