//! Faults of limits and of what is left behind: bindings that are too small, buffers that pile up.

use paged_attention::{AttentionIo, Batch, DevicePlan, Workspace};

use super::*;
use crate::api::host::{Host, Layer, batch};

/// Split scratch past what a device binds is refused with the numbers before anything is recorded, and a pool comes in segments; who
/// would read zeros there, as out of a binding that ends too early, is noticed.
#[test]
fn fault_15_more_than_a_binding_holds() {
    let Some(gpu) = gpu() else { return };
    let limits = gpu.fresh_runner().device().limits();
    let with_bytes = |bytes| {
        let limits = wgpu::Limits { max_storage_buffer_binding_size: bytes, ..limits.clone() };
        gpu.limited_runner(limits)
    };
    // Many rows over few pages: their states take more than the pool.
    let lengths: Vec<(u32, u32)> = vec![(1, 2 * SPLIT_KEYS + 37); 12];
    let spec = CaseSpec::new("faults/15", HEADS, lengths).paged(Pool { share: true, ..Pool::new(16).times(1) });
    let spec =
        spec.clone().seqs(spec.seqs.iter().map(|seq| paged_attention_cases::Seq { kv_stream: 0, ..*seq }).collect());
    let case = build(&spec).unwrap();
    let options = base_options(&spec);
    // 12 * 3 splits * 4 heads states of 48 bytes, behind the status words.
    let KvSource::Paged { k_pages, .. } = case.kv() else { panic!("not paged") };
    let pool = 2 * k_pages.bytes().len() as u64;
    let expected = gpu.run(&case, &options).unwrap();
    let states = expected.workspace_bytes;
    assert_eq!(states, 12 * 3 * 4 * 48);
    // A pool that just does not fit comes in two segments, with the same bits.
    let segmented = with_bytes(pool.next_multiple_of(1024) - 1024).run(&case, &options).unwrap();
    assert_eq!((segmented.out, segmented.lse), (expected.out, expected.lse));
    let decode = decode("15");
    let workspace = Workspace::new(with_bytes(4096).device(), states).unwrap_err();
    assert!(matches!(workspace, BindError::TooLarge { buffer: "workspace", found: 4096, needed } if needed > states));
    let edits = [edit(
        KernelId::Merge,
        "let words = workspace.states[partial_vector(state)];",
        "let words = select(workspace.states[partial_vector(state)], vec4<f32>(0.0), partial_vector(state) > 20u);",
    )];
    noticed(gpu, "15 states", &decode, &edits);
    for (kernel, spec) in [(KernelId::Prefill, prefill("15")), (KernelId::Decode, decode)] {
        let from = "let vector = row + chunk * chunk_vectors(K_DTYPE);";
        let to = "let vector = row + chunk * chunk_vectors(K_DTYPE); if vector > 300u { return ZERO_CHUNK; }";
        noticed(gpu, "15 keys", &spec, &[edit(kernel, from, to)]);
    }
}

/// Buffers, bind groups, memory: what wgpu's backend has.
fn held(device: &wgpu::Device) -> [isize; 4] {
    device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    let counters = device.get_internal_counters().hal;
    [
        counters.buffers.read(),
        counters.bind_groups.read(),
        counters.memory_allocations.read(),
        counters.compute_pipelines.read(),
    ]
}

/// Whether what is held grows from the 5th to the 40th of the same works.
fn grows(device: &wgpu::Device, mut work: impl FnMut()) -> Result<(), String> {
    (0..5).for_each(|_| work());
    let before = held(device);
    (0..35).for_each(|_| work());
    let after = held(device);
    if before == after { Ok(()) } else { Err(format!("{before:?} became {after:?}")) }
}

/// Runs and steps leave nothing behind; and what is kept per call, or staged and never submitted, is noticed.
#[test]
fn fault_24_what_calls_leave_behind() {
    let Some(gpu) = gpu() else { return };
    let spec = CaseSpec::new("faults/24", HEADS, [(40, 75), (1, 600), (1, 30)]).causal(true).paged(Pool::new(4));
    let case = build(&spec).unwrap();
    let options = base_options(&spec);
    let mut runner = gpu.fresh_runner();
    let device = runner.device().clone();
    grows(&device, || {
        runner.run(&case, &options).unwrap();
    })
    .unwrap();
    // An application's step: plan, upload, bind, record; and a plan that is never used.
    let host = Host::open(gpu, device.limits());
    let layer = Layer::new(&host, &case, Dtype::F32);
    let attention = host.attention(&layer.config);
    let workspace = Workspace::new(&host.device, attention.plan(&batch(&case)).unwrap().workspace_bytes()).unwrap();
    let step = |batch: &Batch<'_>| {
        let plan = attention.plan(batch).unwrap();
        let used = DevicePlan::upload(&host.device, &plan).unwrap();
        let _unused = DevicePlan::upload(&host.device, &plan).unwrap();
        let io: AttentionIo<'_> = layer.io();
        let call = attention.bind(&host.device, &used, io, &workspace).unwrap();
        host.submit(|pass| call.encode(pass));
        call
    };
    grows(&host.device, || {
        step(&batch(&case));
    })
    .unwrap();
    let mut kept = Vec::new();
    let why = grows(&host.device, || kept.push(step(&batch(&case)))).unwrap_err();
    say(&format!("24 kept calls: noticed: {why}"));
    let target = host.device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 256,
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let why = grows(&host.device, || host.queue.write_buffer(&target, 0, &[0; 256])).unwrap_err();
    say(&format!("24 staged and not submitted: noticed: {why}"));
}
