// Copies whole pages inside a segment of one layer, whatever their type and order, as words.
//
// Grid: copies x LANES vectors of 16 bytes of a page, folded into three axes.
//
// Bindings (group 0):
//   0 params    uniform, `CopyParams`
//   1 copies    [copies] pairs of pages, counted from the segment's first: from, to
//   2 workspace its status words
//   3 kv_pages_0 the segment's pages (lib/pages.wgsl)
//
// Workgroup memory: none. Preconditions, checked by `KvStore::copies`: every page lies in the segment, and no page that one
// copy writes is read or written by another.

struct CopyParams {
    page_vectors: u32,
    page_count: u32,
    // Of one copy, and of all.
    page_groups: u32,
    groups: u32,
}

@group(0) @binding(0) var<uniform> params: CopyParams;
@group(0) @binding(1) var<storage, read> copies: array<vec2<u32>>;
struct Workspace {
    status: array<atomic<u32>, STATUS_WORDS>,
}

@group(0) @binding(2) var<storage, read_write> workspace: Workspace;

@compute @workgroup_size(LANES)
fn copy_pages(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) group_count: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let group = linear_group(group_id, group_count);
    if group >= params.groups {
        return;
    }
    let pages = copies[group / params.page_groups];
    let vector = group % params.page_groups * LANES + lane;
    if max(pages.x, pages.y) >= params.page_count {
        report_error(ERROR_PAGE_ID);
    } else if vector < params.page_vectors {
        store_pages(pages.y * params.page_vectors + vector, load_pages(pages.x * params.page_vectors + vector));
    }
    report_done(lane);
}
