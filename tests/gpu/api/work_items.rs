//! More workgroups than one axis of a dispatch takes.

use paged_attention::{
    AttentionConfig, AttentionIo, AttentionOptions, Batch, DevicePlan, Dtype, Extras, HeadGeometry, KvLayout, PageSize,
    Workspace,
};

use super::host::{Guarded, host, owned};

/// Each sequence has one key, so that its result is that key's value and its sum the score: known without a reference.
#[test]
fn more_sequences_than_an_axis_has_workgroups() {
    const SEQS: u32 = 66_000;
    const PAGES: u32 = 7;
    let Some(host) = host() else { return };
    assert_eq!(host.device.limits().max_compute_workgroups_per_dimension, 65_535);
    let geometry = HeadGeometry::new(1, 1, 8).unwrap();
    let layout = KvLayout::new(geometry, Dtype::F32, PageSize::new(1).unwrap(), PAGES).unwrap();
    let options = AttentionOptions::new(&geometry).with_scale(0.5);
    let attention = host.attention(&AttentionConfig {
        q: Dtype::F32,
        out: Dtype::F32,
        layout,
        new_rows: Dtype::F32.into(),
        options,
        extras: Extras::NONE,
    });

    let rows: Vec<u32> = (0..=SEQS).collect();
    let page_ids: Vec<u32> = (0..SEQS).map(|seq| seq % PAGES).collect();
    let lengths = vec![1; SEQS as usize];
    let batch = Batch { q_indptr: &rows, page_indptr: &rows, page_ids: &page_ids, kv_len: &lengths };
    let plan = attention.plan(&batch).unwrap();
    assert_eq!(plan.workgroups().map(|(_, groups)| groups), [0, SEQS, 0]);

    // A query with one element, the row's number; keys that pick it; values that tell page and place.
    let bytes = |values: Vec<f32>| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let q = (0..SEQS).flat_map(|seq| (0..8).map(move |i| if i == 3 { seq as f32 } else { 0.0 })).collect();
    let value = |page: u32, i: u32| (100 * page + i + 1) as f32;
    let pool = (0..PAGES)
        .flat_map(|page| (0..16).map(move |i| if i < 8 { f32::from(i == 3) } else { value(page, i - 8) }))
        .collect();
    let (q, kv) = (Guarded::new(host, &bytes(q)), Guarded::new(host, &bytes(pool)));
    let [out, lse] = [u64::from(SEQS) * 32, u64::from(SEQS) * 4].map(|bytes| Guarded::unwritten(host, bytes));
    let io = AttentionIo {
        q: q.binding(),
        kv: vec![kv.binding()],
        out: out.binding(),
        lse: lse.binding(),
        heads: None,
        bias: None,
    };
    let workspace = Workspace::new(&host.device, plan.workspace_bytes()).unwrap();
    let call = attention.bind(&host.device, &DevicePlan::upload(&host.device, &plan).unwrap(), io, &workspace).unwrap();
    host.submit(|pass| call.encode(pass));
    assert_eq!(call.workgroups(), SEQS);
    host.status(&workspace).check(SEQS).unwrap();

    let out = owned(Dtype::F32, &out.read(host, "out"), 8);
    let lse = owned(Dtype::F32, &lse.read(host, "lse"), 1);
    for seq in 0..SEQS {
        let at = seq as usize;
        for i in 0..8 {
            assert_eq!(out[at * 8 + i as usize], value(seq % PAGES, i), "sequence {seq}, element {i}");
        }
        let score = f64::from(seq) * 0.5;
        assert!(
            (f64::from(lse[at]) - score).abs() <= 4.0 * f64::from(f32::EPSILON) * score,
            "sequence {seq}: {}",
            lse[at]
        );
    }
}
