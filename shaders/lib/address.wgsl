// The one addressing function of paged rows, and of their scales. Host twin: `RowLayout::offset` in src/kv/layout.rs.

// Strides in vectors of 16 bytes, or in words for scales; `base` is where the first row of page 0 starts.
struct RowLayout {
    base: u32,
    page_stride: u32,
    head_stride: u32,
    slot_stride: u32,
}

fn row_offset(rows: RowLayout, page: u32, kv_head: u32, slot: u32) -> u32 {
    return rows.base + page * rows.page_stride + kv_head * rows.head_stride + slot * rows.slot_stride;
}
