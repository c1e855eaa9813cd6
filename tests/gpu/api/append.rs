//! Appending: exactly the rows addressed, bit for bit.

use paged_attention::kernels::{KernelId, SourceEdit};
use paged_attention::{
    Append, AppendError, AppendPlan, AppendSource, AttentionConfig, AttentionOptions, Batch, BatchError, BindError,
    Dtype, Extras, Kernels, KvLayout, NewRows, PageSize, Pairing, PoolView, Rotary, Rotation, RowOrder, Status, Tensor,
    Workspace, reference,
};
use paged_attention_cases::Heads;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::host::{Guarded, Host, host, padded_rows};
use crate::common::CONFIGS;

/// A pool on the device and what must lie in it.
struct Pool<'h> {
    host: &'h Host,
    layout: KvLayout,
    expected: Vec<u8>,
    kv: Guarded,
    workspace: Workspace,
    workgroups: u32,
}

fn random_bytes(rng: &mut StdRng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes[..]);
    bytes
}

fn layout(dtype: Dtype, heads: Heads, page_size: u32, page_count: u32) -> KvLayout {
    KvLayout::new(heads.geometry().unwrap(), dtype, PageSize::new(page_size).unwrap(), page_count).unwrap()
}

impl<'h> Pool<'h> {
    /// Bytes of any kind in every slot: rows are copied, whatever their bits mean.
    fn new(host: &'h Host, rng: &mut StdRng, layout: KvLayout) -> Self {
        let expected = random_bytes(rng, layout.bytes() as usize);
        let (kv, workspace) = (Guarded::new(host, &expected), Workspace::new(&host.device, 0).unwrap());
        Self { host, layout, expected, kv, workspace, workgroups: 0 }
    }

    fn row_bytes(&self) -> [usize; 2] {
        let geometry = self.layout.geometry();
        [geometry.head_dim(), geometry.v_head_dim()].map(|dim| self.layout.dtypes().k.row_vectors(dim) as usize * 16)
    }

    /// Where a key row and a value row lie, by what the layout's documentation says: `[page, (keys then values),
    /// kv_head, slot, dim]`, or slot and head the other way round.
    fn places(&self, page: u32, kv_head: u32, slot: u32) -> [usize; 2] {
        let [k_row, v_row] = self.row_bytes();
        let (kv_heads, page_size) = (self.layout.geometry().kv_heads(), self.layout.page_size().get());
        let rows = (kv_heads * page_size) as usize;
        let page_start = page as usize * rows * (k_row + v_row);
        let row = match self.layout.order() {
            RowOrder::HeadSlot => kv_head * page_size + slot,
            RowOrder::SlotHead => slot * kv_heads + kv_head,
        } as usize;
        [page_start + row * k_row, page_start + rows * k_row + row * v_row]
    }

    /// Appends random rows and does the same to the expectation.
    fn append(&mut self, rng: &mut StdRng, batch: &Batch<'_>) {
        // The append kernel is the same for every configuration.
        self.append_with(rng, batch, &any_kernels(self.host));
    }

    fn append_with(&mut self, rng: &mut StdRng, batch: &Batch<'_>, kernels: &Kernels) {
        let plan = AppendPlan::new(&self.layout, batch).unwrap();
        assert_eq!(plan.tokens(), batch.total_q());
        let [k_row, v_row] = self.row_bytes();
        let kv_heads = self.layout.geometry().kv_heads();
        let rows = (batch.total_q() * kv_heads) as usize;
        let [k, v] = [random_bytes(rng, rows * k_row), random_bytes(rng, rows * v_row)];
        let mut row = 0;
        for seq in 0..batch.seqs() {
            let q_len = batch.q_indptr[seq + 1] - batch.q_indptr[seq];
            let pages = &batch.page_ids[batch.page_indptr[seq] as usize..batch.page_indptr[seq + 1] as usize];
            for position in batch.kv_len[seq] - q_len..batch.kv_len[seq] {
                let page_size = self.layout.page_size().get();
                for kv_head in 0..kv_heads {
                    let places = self.places(pages[(position / page_size) as usize], kv_head, position % page_size);
                    self.expected[places[0]..][..k_row].copy_from_slice(&k[row * k_row..][..k_row]);
                    self.expected[places[1]..][..v_row].copy_from_slice(&v[row * v_row..][..v_row]);
                    row += 1;
                }
            }
        }
        let (k, v) = (Guarded::new(self.host, &k), Guarded::new(self.host, &v));
        let source = AppendSource { k: k.binding(), v: v.binding(), kv: vec![self.kv.binding()], head_scales: None };
        let append = Append::upload(&self.host.device, &plan).unwrap();
        let call = append.bind(&self.host.device, kernels, source, &self.workspace).unwrap();
        assert_eq!(call.workgroups() == 0, plan.tokens() == 0);
        self.host.submit(|pass| call.encode(pass));
        self.workgroups += call.workgroups();
    }

    /// The first byte that is not as it should be.
    fn difference(&self) -> Option<usize> {
        let found = self.kv.read(self.host, "pool");
        (0..self.expected.len()).find(|i| found[*i] != self.expected[*i])
    }

    fn check(&self, what: &str) {
        assert_eq!(self.difference(), None, "{what}: first byte that differs, of {}", self.expected.len());
        self.host.status(&self.workspace).check(self.workgroups).unwrap();
    }
}

fn any_kernels(host: &Host) -> Kernels {
    let (dtype, heads) = CONFIGS[0];
    kernels(host, layout(dtype, heads, 1, 1), dtype.into())
}

fn kernels(host: &Host, layout: KvLayout, new_rows: NewRows) -> Kernels {
    let (q, out, options) = (Dtype::F32, Dtype::F32, AttentionOptions::new(layout.geometry()));
    let config = AttentionConfig { q, out, layout, new_rows, options, extras: Extras::NONE };
    host.attention(&config).kernels().clone()
}

/// Every type, dimensions with and without padding, keys and values alike and not.
const POOLS: [(Dtype, Heads); 5] = [
    (Dtype::F32, Heads::new(2, 1, 64)),
    (Dtype::F32, Heads::new(3, 3, 5).with_v(17)),
    (Dtype::F16, Heads::new(4, 2, 59)),
    (Dtype::Bf16, Heads::new(2, 2, 3).with_v(250)),
    (Dtype::Bf16, Heads::new(8, 8, 128).with_v(64)),
];

#[test]
fn rows_go_where_they_belong_and_nowhere_else() {
    let Some(host) = host() else { return };
    let orders = [RowOrder::HeadSlot, RowOrder::SlotHead];
    for ((dtype, heads), order) in POOLS.iter().flat_map(|pool| orders.map(|order| (*pool, order))) {
        for page_size in [1, 3, 16] {
            let what = format!("{dtype}, {heads:?}, pages of {page_size}, {order:?}");
            let mut rng = StdRng::seed_from_u64(page_size.into());
            let page_count = 40;
            let mut pool = Pool::new(host, &mut rng, layout(dtype, heads, page_size, page_count).with_order(order));
            for round in 0..4 {
                let mut pages: Vec<u32> = (0..page_count).collect();
                pages.shuffle(&mut rng);
                // Some sequences fill their pages to the last slot; some have pages to spare; some get nothing.
                let mut lengths = Vec::new();
                let [mut q_indptr, mut page_indptr] = [vec![0], vec![0]];
                for seq in 0..6 {
                    let pages = rng.random_range(1..=6);
                    let capacity = pages * page_size;
                    let kv_len = if seq % 2 == 0 { capacity } else { rng.random_range(0..=capacity) };
                    let new = match seq % 3 {
                        0 => kv_len,
                        1 => rng.random_range(0..=kv_len),
                        _ => kv_len.min(1),
                    };
                    lengths.push(kv_len);
                    q_indptr.push(q_indptr[seq] + new);
                    page_indptr.push(page_indptr[seq] + pages);
                }
                let page_ids = &pages[..page_indptr[6] as usize];
                let batch = Batch { q_indptr: &q_indptr, page_indptr: &page_indptr, page_ids, kv_len: &lengths };
                pool.append(&mut rng, &batch);
                pool.check(&format!("{what}, round {round}"));
            }
        }
    }
}

#[test]
fn no_tokens_is_no_work() {
    let Some(host) = host() else { return };
    let mut rng = StdRng::seed_from_u64(1);
    let mut pool = Pool::new(host, &mut rng, layout(Dtype::F16, Heads::new(4, 2, 59), 4, 3));
    pool.append(&mut rng, &Batch { q_indptr: &[0], page_indptr: &[0], page_ids: &[], kv_len: &[] });
    let some = Batch { q_indptr: &[0, 0, 0], page_indptr: &[0, 2, 3], page_ids: &[2, 0, 1], kv_len: &[7, 0] };
    pool.append(&mut rng, &some);
    pool.check("no tokens");
    assert_eq!(host.status(&pool.workspace), Status::default());
}

/// A sequence that grows token by token: older rows stay, and so does a neighbour's part of a shared page.
#[test]
fn one_token_at_a_time_up_to_the_last_slot() {
    let Some(host) = host() else { return };
    let mut rng = StdRng::seed_from_u64(2);
    let mut pool = Pool::new(host, &mut rng, layout(Dtype::F16, Heads::new(4, 2, 59), 3, 4));
    for kv_len in 1..=9 {
        // The other one reads the same first page and writes nothing.
        let batch =
            Batch { q_indptr: &[0, 1, 1], page_indptr: &[0, 3, 4], page_ids: &[3, 0, 2, 3], kv_len: &[kv_len, 3] };
        pool.append(&mut rng, &batch);
        pool.check(&format!("token {kv_len}"));
    }
    // The tenth has no slot.
    let past = Batch { q_indptr: &[0, 1], page_indptr: &[0, 3], page_ids: &[3, 0, 2], kv_len: &[10] };
    assert_eq!(
        AppendPlan::new(&pool.layout, &past),
        Err(AppendError::Batch(BatchError::PastPages { seq: 0, found: 10, pages: 3, page_size: 3, capacity: 9 }))
    );
    // Nor may two write into one, or more be new than there are.
    let twice = Batch { q_indptr: &[0, 1, 2], page_indptr: &[0, 1, 2], page_ids: &[1, 1], kv_len: &[2, 2] };
    assert_eq!(AppendPlan::new(&pool.layout, &twice), Err(AppendError::SameSlot { page: 1, slot: 1 }));
    let more = Batch { q_indptr: &[0, 3], page_indptr: &[0, 1], page_ids: &[1], kv_len: &[2] };
    assert_eq!(AppendPlan::new(&pool.layout, &more), Err(AppendError::TooMany { seq: 0, new: 3, kv_len: 2 }));
    // Nor with too few rows to copy.
    let one = Batch { kv_len: &[9], ..past };
    let append = AppendPlan::new(&pool.layout, &one).unwrap();
    let append = Append::upload(&host.device, &append).unwrap();
    let [short, enough] = [16, 2 * 64 * 2].map(|bytes| Guarded::unwritten(host, bytes));
    let source =
        AppendSource { k: enough.binding(), v: short.binding(), kv: vec![pool.kv.binding()], head_scales: None };
    let error = append.bind(&host.device, &any_kernels(host), source, &pool.workspace).unwrap_err();
    assert_eq!(error, BindError::TooSmall { buffer: "v", found: 16, needed: 256 });
    host.submit(|_| {});
    pool.check("after refusals");
}

/// Keys are turned by the positions that the caller gives, whatever their places in the sequences are (or by their places,
/// where none are given); values stay as they are.
#[test]
fn keys_are_rotated_by_their_positions() {
    let Some(host) = host() else { return };
    let (dim, v_dim) = (22, 5);
    let layout = layout(Dtype::F32, Heads::new(2, 2, dim).with_v(v_dim), 4, 5);
    let batch = Batch { q_indptr: &[0, 4, 6], page_indptr: &[0, 2, 3], page_ids: &[4, 1, 0], kv_len: &[6, 3] };
    let places = [(4, 2), (4, 3), (1, 0), (1, 1), (0, 1), (0, 2)];
    let mut rng = StdRng::seed_from_u64(5);
    let mut rows = |dim: u32| -> Vec<f32> { (0..6 * 2 * dim).map(|_| rng.random_range(-1.0..1.0)).collect() };
    let (keys, values) = (rows(dim), rows(v_dim));
    let padded = |rows: &[f32], dim: u32| {
        let rows = Tensor::from_f32(Dtype::F32, &[rows.len()], rows).unwrap();
        Guarded::new(host, &padded_rows(&rows, dim))
    };
    for (pairing, given) in [Pairing::Interleaved, Pairing::HalfSplit]
        .into_iter()
        .flat_map(|pairing| [None, Some([7, 0, 9, 9, 100_000, 3])].map(|given| (pairing, given)))
    {
        // Part of the row, a base, and scaling.
        let rotary = Rotary::new(pairing, 12, 1e5).unwrap().from_element(3).with_linear_scaling(2.0).unwrap();
        let positions = given.unwrap_or([2, 3, 4, 5, 1, 2]);
        let rotation = Rotation { rotary: &rotary, positions: given.as_ref().map(|given| &given[..]) };
        let plan = AppendPlan::converting(&layout, &batch, Dtype::F32, Some(rotation)).unwrap();
        let (k, v) = (padded(&keys, dim), padded(&values, v_dim));
        let (kv, workspace) = (Guarded::unwritten(host, layout.bytes()), Workspace::new(&host.device, 0).unwrap());
        let source = AppendSource { k: k.binding(), v: v.binding(), kv: vec![kv.binding()], head_scales: None };
        let append = Append::upload(&host.device, &plan).unwrap();
        let kernels = kernels(host, layout, *plan.new_rows());
        let call = append.bind(&host.device, &kernels, source, &workspace).unwrap();
        host.submit(|pass| call.encode(pass));
        host.status(&workspace).check(call.workgroups()).unwrap();
        let bytes = kv.read(host, "pool");
        let view = PoolView::new(&layout, &bytes, &[]);
        for (token, ((page, slot), position)) in places.into_iter().zip(positions).enumerate() {
            for head in 0..2 {
                let of = |rows: &[f32], dim: u32| rows[(2 * token + head) * dim as usize..][..dim as usize].to_vec();
                let what = format!("{rotary:?}, token {token} at {position}, head {head}");
                assert_eq!(view.value(page, head as u32, slot), Some(of(&values, v_dim)), "{what}");
                let mut expected = of(&keys, dim);
                reference::storage::rotate(&rotary, position, &mut expected);
                let found = view.key(page, head as u32, slot).unwrap();
                // Rotated elements are below 2 in magnitude; a position off by one turns the first pair by half a radian.
                let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off < 1e-6, "{what}: {found:?}, {expected:?} is needed");
            }
        }
    }
}

/// Rows in the wrong place, rows too many or too few: one byte is enough to show it.
#[test]
fn a_faulty_append_is_noticed() {
    let Some(host) = host() else { return };
    let config = *any_kernels(host).config();
    let batch = Batch { q_indptr: &[0, 5, 6], page_indptr: &[0, 2, 4], page_ids: &[2, 0, 3, 1], kv_len: &[7, 5] };
    for (from, to) in [
        ("slots[row / params.kv_heads] % params.page_size", "(slots[row / params.kv_heads] + 1u) % params.page_size"),
        // A vector that nobody asked for, at the end of the last page.
        ("report_done(lane);", "store_pages(arrayLength(&kv_pages_0) - 1u, vec4<u32>(lane)); report_done(lane);"),
        ("row < params.tokens * params.kv_heads", "row + 1u < params.tokens * params.kv_heads"),
        ("row_offset(params.v_rows, page, kv_head, slot)", "row_offset(params.v_rows, page, 0u, slot)"),
        // Not bit for bit.
        (
            "new_k[row * params.k_row_vectors + vector]",
            "new_k[row * params.k_row_vectors + vector] & vec4<u32>(0xfffffffeu)",
        ),
    ] {
        let edits = [SourceEdit { kernel: KernelId::Append, from, to }];
        let kernels = pollster::block_on(Kernels::with_edits(&host.device, &config, &edits)).unwrap();
        let mut rng = StdRng::seed_from_u64(4);
        let mut pool = Pool::new(host, &mut rng, layout(Dtype::F16, Heads::new(4, 2, 20), 4, 4));
        pool.append(&mut rng, &batch);
        assert_eq!(pool.difference(), None);
        pool.append_with(&mut rng, &batch, &kernels);
        assert!(pool.difference().is_some(), "nobody notices {to}");
    }
}
