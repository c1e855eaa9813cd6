// The pages of the pool: in one binding, or in SEGMENTS of them, the last ones of the kernel. Each has the same number of whole
// pages, the last one as many as are left. What `row_offset` says counts through all of them, in vectors of 16 bytes; or in
// words, for the kernel that writes single words.
// Where the pool has more segments than a dispatch binds (GROUPED), offsets count from the first of those, and what lies in
// none of them is read as zeros, and not written.

//if PAGES_IN_WORDS
alias PageUnit = u32;
//else
alias PageUnit = vec4<u32>;
//end

//each s SEGMENTS
//if WRITES_PAGES
@group(0) @binding(${KV_BINDING + s}) var<storage, read_write> kv_pages_$s: array<PageUnit>;
//else
@group(0) @binding(${KV_BINDING + s}) var<storage, read> kv_pages_$s: array<PageUnit>;
//end
//end

fn load_pages(index: u32) -> PageUnit {
    //if SEGMENTED
    // The host binds no more than the segment.
    let size = arrayLength(&kv_pages_0);
    var unit = PageUnit();
    if index < size {
        unit = kv_pages_0[index];
    }
    //each s 1 SEGMENTS
    else if index - $su * size < size {
        unit = kv_pages_$s[index - $su * size];
    }
    //end
    return unit;
    //else
    return kv_pages_0[index];
    //end
}

//if WRITES_PAGES
fn store_pages(index: u32, unit: PageUnit) {
    //if SEGMENTED
    let size = arrayLength(&kv_pages_0);
    if index < size {
        kv_pages_0[index] = unit;
    }
    //each s 1 SEGMENTS
    else if index - $su * size < size {
        kv_pages_$s[index - $su * size] = unit;
    }
    //end
    //else
    kv_pages_0[index] = unit;
    //end
}
//end
