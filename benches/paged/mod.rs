//! Ours: the crate's own kernels on a paged cache in f32, through plan, upload, bind and encode.

use paged_attention::{
    Append, AppendPlan, AppendSource, Attention, AttentionConfig, AttentionIo, AttentionOptions, Batch, Call,
    DevicePlan, Dtype, HeadGeometry, KvLayout, PageSize, Status, Workspace, padded_dim,
};

use crate::gpu::Gpu;
use crate::problem::Problem;

/// Tokens per page.
const PAGE_SIZE: u32 = 16;

/// A call that is ready to be recorded.
pub struct Paged {
    attention: Attention,
    call: Call,
    /// `[total_q, q_heads, v_head_dim]`.
    pub out: wgpu::Buffer,
}

impl Paged {
    /// Writes the keys and values into pages whose order is scattered, and binds the call.
    pub fn new(gpu: &Gpu, problem: &Problem) -> Self {
        let Problem { q_heads, kv_heads, head_dim, v_head_dim, causal, .. } = *problem;
        assert!(
            [head_dim, v_head_dim].iter().all(|dim| *dim == padded_dim(*dim)),
            "packed rows are uploaded as they are"
        );
        let geometry =
            HeadGeometry::with_v_head_dim(q_heads, kv_heads, head_dim, v_head_dim).expect("a legal geometry");
        let page_size = PageSize::new(PAGE_SIZE).expect("a legal page size");

        let (mut q_indptr, mut kv_indptr, mut page_indptr) = (vec![0], vec![0], vec![0]);
        for ((q_len, kv_len), i) in problem.lengths.iter().zip(0..) {
            q_indptr.push(q_indptr[i] + q_len);
            kv_indptr.push(kv_indptr[i] + kv_len);
            page_indptr.push(page_indptr[i] + page_size.pages_for(*kv_len));
        }
        let kv_len: Vec<u32> = problem.lengths.iter().map(|(_, kv_len)| *kv_len).collect();
        let page_count = page_indptr.last().copied().unwrap_or(0);
        let page_ids = scattered(page_count);
        let batch = Batch { q_indptr: &q_indptr, page_indptr: &page_indptr, page_ids: &page_ids, kv_len: &kv_len };

        let device = &gpu.device;
        let layout = KvLayout::new(geometry, Dtype::F32, page_size, page_count).expect("a pool that can be addressed");
        let options = AttentionOptions::new(&geometry).with_causal(causal).with_scale(problem.scale.into());
        let config = AttentionConfig { q: Dtype::F32, out: Dtype::F32, layout, options };
        let attention = pollster::block_on(Attention::new(device, &gpu.adapter.get_info(), &config))
            .expect("the kernels are built");
        let plan = attention.plan(&batch).expect("the batch is legal");
        let workspace = Workspace::new(device, plan.workspace_bytes()).expect("the workspace fits");

        let [q, k, v] = [("q", &problem.q), ("k", &problem.k), ("v", &problem.v)].map(|(name, x)| gpu.upload(name, x));
        let kv = layout.create_buffer(device).expect("the pool fits into a binding");
        let out = gpu.zeros("out", u64::from(plan.total_q() * q_heads * v_head_dim));
        let lse = gpu.zeros("lse", u64::from(plan.total_q() * q_heads));

        // Every token is new.
        let append_plan = AppendPlan::new(&layout, &Batch { q_indptr: &kv_indptr, ..batch }).expect("legal rows");
        let append = Append::upload(device, &append_plan).expect("the plan is uploaded");
        let source = AppendSource {
            k: k.as_entire_buffer_binding(),
            v: v.as_entire_buffer_binding(),
            kv: kv.as_entire_buffer_binding(),
        };
        let append = append.bind(device, attention.kernels(), source, &workspace).expect("the append is bound");

        let io = AttentionIo {
            q: q.as_entire_buffer_binding(),
            kv: kv.as_entire_buffer_binding(),
            out: out.as_entire_buffer_binding(),
            lse: lse.as_entire_buffer_binding(),
        };
        let device_plan = DevicePlan::upload(device, &plan).expect("the plan is uploaded");
        let call = attention.bind(device, &device_plan, io, &workspace).expect("the call is bound");

        let paged = Self { attention, call, out };
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        append.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
        paged.encode(&mut encoder);
        gpu.queue.submit([encoder.finish()]);
        let status = gpu.read(workspace.status());
        let dispatched = append.workgroups().wrapping_add(paged.call.workgroups());
        Status::from_words([status[0].to_bits(), status[1].to_bits()]).check(dispatched).expect("all workgroups ended");
        paged
    }

    /// Records the call.
    pub fn encode(&self, encoder: &mut wgpu::CommandEncoder) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        self.attention.encode(&mut pass, &self.call);
    }
}

/// The ids `0 .. count` in an order in which few neighbours stay neighbours, as in a cache that has been in use.
fn scattered(count: u32) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..count).collect();
    ids.sort_by_key(|id| id.wrapping_mul(0x9e37_79b9).rotate_left(13));
    ids
}
