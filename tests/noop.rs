//! What shows without any adapter: wgpu's `noop` backend checks layouts, limits and recording, and computes nothing.
// The short forms are allowed in test functions only; here the helpers belong to them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::io::Write as _;
use std::num::NonZeroU32;
use std::time::Instant;

use paged_attention::kernels::{
    AdapterFacts, DecodeVariant, KernelConfig, KernelId, Kernels, PrefillVariant, SPLIT_KEYS, SourceEdit, Variants,
};
use paged_attention::{
    Append, AppendError, AppendPlan, AppendSource, Attention, AttentionConfig, AttentionIo, AttentionOptions, Batch,
    BatchError, Bias, BindError, BuildError, CopyError, DevicePlan, Dtype, Extras, HeadGeometry, KvLayout, KvStore,
    LayoutError, Modifiers, OutOfMemory, PageCopy, PageSize, Plan, PlanCapacity, PlanError, StoreError, Workspace,
    WriteError, wgpu,
};

/// A device of no features and these limits. An error that no scope catches is a panic.
fn device(limits: wgpu::Limits) -> (wgpu::Device, wgpu::Queue, wgpu::AdapterInfo) {
    let (adapter, device, queue) = adapter_and_device(limits);
    (device, queue, adapter.get_info())
}

fn adapter_and_device(limits: wgpu::Limits) -> (wgpu::Adapter, wgpu::Device, wgpu::Queue) {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::NOOP;
    descriptor.backend_options.noop = wgpu::NoopBackendOptions {
        enable: true,
        limits: Some(limits.clone()),
        features: Some(wgpu::Features::empty()),
        ..wgpu::NoopBackendOptions::default()
    };
    let instance = wgpu::Instance::new(descriptor);
    let adapter = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default())).unwrap();
    assert_eq!(adapter.get_info().backend, wgpu::Backend::Noop);
    let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..wgpu::DeviceDescriptor::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).unwrap();
    (adapter, device, queue)
}

fn layout(geometry: HeadGeometry, dtype: Dtype, page_size: u32, page_count: u32) -> KvLayout {
    KvLayout::new(geometry, dtype, PageSize::new(page_size).unwrap(), page_count).unwrap()
}

fn config(geometry: HeadGeometry, dtype: Dtype, page_size: u32, page_count: u32) -> AttentionConfig {
    AttentionConfig {
        q: dtype,
        out: Dtype::F32,
        layout: layout(geometry, dtype, page_size, page_count),
        new_rows: dtype.into(),
        options: AttentionOptions::new(&geometry).with_causal(true),
        extras: Extras::NONE,
    }
}

/// For queries, keys and values, and output of these types, without modifiers.
fn kernels_of(geometry: HeadGeometry, (q, kv, out): (Dtype, Dtype, Dtype), variants: Variants) -> KernelConfig {
    let (kv, new_rows) = (kv.into(), kv.into());
    KernelConfig { geometry, q, kv, new_rows, out, modifiers: Modifiers::NONE, segments: NonZeroU32::MIN, variants }
}

fn storage(device: &wgpu::Device, size: u64) -> wgpu::Buffer {
    device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size,
        usage: wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    })
}

fn binding(buffer: &wgpu::Buffer, offset: u64, size: u64) -> wgpu::BufferBinding<'_> {
    wgpu::BufferBinding { buffer, offset, size: wgpu::BufferSize::new(size) }
}

/// The variants that a GPU without subgroups gets.
fn base(geometry: &HeadGeometry) -> Variants {
    Variants::base(&AdapterFacts::PLAIN_GPU, geometry)
}

/// Past the capture of the test harness.
fn say(line: &str) {
    // Nobody may be watching.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// One application on a noop device: attention, a plan with all three kernels, and buffers of exactly the bytes needed.
struct App {
    adapter: wgpu::Adapter,
    device: wgpu::Device,
    queue: wgpu::Queue,
    attention: Attention,
    plan: Plan,
    device_plan: DevicePlan,
    workspace: Workspace,
    buffers: [wgpu::Buffer; 4],
}

const NAMES: [&str; 4] = ["q", "kv", "out", "lse"];
/// A prompt of 40, a decode of 300 keys in two splits: 41 rows, 4 query heads over 2, dimension 20 padded to 24.
const Q_INDPTR: [u32; 3] = [0, 40, 41];
const PAGE_INDPTR: [u32; 3] = [0, 3, 22];
const KV_LEN: [u32; 3 - 1] = [40, 300];
const PAGE_COUNT: u32 = 22;

fn with_mixed_batch<T>(work: impl FnOnce(&Batch<'_>) -> T) -> T {
    let page_ids: Vec<u32> = (0..PAGE_COUNT).rev().collect();
    work(&Batch { q_indptr: &Q_INDPTR, page_indptr: &PAGE_INDPTR, page_ids: &page_ids, kv_len: &KV_LEN })
}

/// Bytes of `NAMES`: `[41, 4, 24]` in f16, 22 pages of 16 slots, 2 heads, keys and values, `[41, 4, 24]` and `[41, 4]`
/// in f32.
const NEEDED: [u64; 4] = [41 * 4 * 24 * 2, 22 * 16 * 2 * 2 * 24 * 2, 41 * 4 * 24 * 4, 41 * 4 * 4];

impl App {
    fn new(limits: wgpu::Limits) -> Self {
        let (adapter, device, queue) = adapter_and_device(limits);
        let info = adapter.get_info();
        let config = config(HeadGeometry::new(4, 2, 20).unwrap(), Dtype::F16, 16, PAGE_COUNT);
        let attention = pollster::block_on(Attention::new(&device, &info, &config)).unwrap();
        let plan = with_mixed_batch(|batch| attention.plan(batch)).unwrap();
        assert!(plan.workgroups().iter().all(|(_, groups)| *groups > 0));
        let device_plan = DevicePlan::upload(&device, &plan).unwrap();
        let workspace = Workspace::new(&device, plan.workspace_bytes()).unwrap();
        let buffers = NEEDED.map(|bytes| storage(&device, bytes));
        Self { adapter, device, queue, attention, plan, device_plan, workspace, buffers }
    }

    fn io(&self) -> AttentionIo<'_> {
        let [q, kv, out, lse] = self.buffers.each_ref().map(|buffer| buffer.as_entire_buffer_binding());
        AttentionIo { q, kv: vec![kv], out, lse, heads: None, bias: None }
    }

    /// With one of the bindings replaced.
    fn bind(&self, name: &str, with: wgpu::BufferBinding<'_>) -> Result<(), BindError> {
        let mut io = self.io();
        match name {
            "q" => io.q = with,
            "kv" => io.kv = vec![with],
            "out" => io.out = with,
            _ => io.lse = with,
        }
        self.attention.bind(&self.device, &self.device_plan, io, &self.workspace).map(|_| ())
    }
}

fn too_small(buffer: &'static str, found: u64, needed: u64) -> Result<(), BindError> {
    Err(BindError::TooSmall { buffer, found, needed })
}

#[test]
fn buffers_that_are_too_small() {
    let app = App::new(wgpu::Limits::default());
    app.attention.bind(&app.device, &app.device_plan, app.io(), &app.workspace).unwrap();
    for (name, needed) in NAMES.into_iter().zip(NEEDED) {
        let large = storage(&app.device, needed + 512);
        // By the binding's size, by what is left of the buffer, and past its end.
        assert_eq!(app.bind(name, binding(&large, 256, needed - 4)), too_small(name, needed - 4, needed));
        let rest = wgpu::BufferBinding { buffer: &large, offset: 768, size: None };
        assert_eq!(app.bind(name, rest), too_small(name, needed - 256, needed));
        assert_eq!(app.bind(name, binding(&large, 1 << 40, needed)), too_small(name, 0, needed));
        // Exactly enough, at the start and at an offset.
        assert_eq!(app.bind(name, binding(&large, 0, needed)), Ok(()));
        assert_eq!(app.bind(name, binding(&large, 512, needed)), Ok(()));
    }
    // 2 splits of 2 KV heads and 2 rows, each a state of 7 vectors.
    let needed = app.plan.workspace_bytes();
    assert_eq!(needed, 2 * 2 * 2 * 7 * 16);
    for bytes in [0, 16, needed - 16] {
        let workspace = Workspace::new(&app.device, bytes).unwrap();
        let error = app.attention.bind(&app.device, &app.device_plan, app.io(), &workspace).map(|_| ());
        // The status words come before the states.
        assert_eq!(error, too_small("workspace", 256 + bytes.max(16), 256 + needed));
    }
    let roomy = Workspace::new(&app.device, 10 * needed).unwrap();
    app.attention.bind(&app.device, &app.device_plan, app.io(), &roomy).unwrap();
}

/// A caller may bind a large arena from an offset on, or say a size that is no multiple of 4 or ends past the buffer:
/// what counts is that the bytes needed are there.
#[test]
fn bindings_that_hold_more_than_needed() {
    let app = App::new(wgpu::Limits { max_storage_buffer_binding_size: 1 << 17, ..wgpu::Limits::default() });
    for (name, needed) in NAMES.into_iter().zip(NEEDED) {
        let odd = storage(&app.device, 512 + needed + 3);
        for size in [needed + 1, needed + 3, needed + 100, u64::MAX] {
            assert_eq!(app.bind(name, binding(&odd, 512, size)), Ok(()), "{name}, {size}");
        }
        assert_eq!(app.bind(name, wgpu::BufferBinding { buffer: &odd, offset: 512, size: None }), Ok(()));
        let arena = storage(&app.device, 1 << 20);
        assert_eq!(app.bind(name, wgpu::BufferBinding { buffer: &arena, offset: 256, size: None }), Ok(()));
    }
}

/// What the documentation of `AttentionIo` says of one buffer for several tensors: what is bound, wgpu takes.
#[test]
fn tensors_that_share_a_buffer() {
    let app = App::new(wgpu::Limits::default());
    let [q, kv, out, lse] = NEEDED;
    let arena = storage(&app.device, 1 << 20);
    let record = |io: AttentionIo<'_>| {
        let call = app.attention.bind(&app.device, &app.device_plan, io, &app.workspace)?;
        // An error that no scope catches is a panic.
        let mut encoder = app.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        call.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
        let _commands = encoder.finish();
        Ok(())
    };
    let part = |place: u64, size| binding(&arena, place << 18, size);
    assert_eq!(record(AttentionIo { q: part(0, q), kv: vec![part(1, kv)], ..app.io() }), Ok(()));
    assert_eq!(record(AttentionIo { out: part(0, out), lse: part(1, lse), ..app.io() }), Ok(()));
    let refused = |written, read| Err(BindError::ReadAndWritten { written, read });
    assert_eq!(record(AttentionIo { q: part(0, q), out: part(1, out), ..app.io() }), refused("out", "q"));
    assert_eq!(record(AttentionIo { kv: vec![part(0, kv)], lse: part(1, lse), ..app.io() }), refused("lse", "kv"));
}

/// A part of another device is refused by name, by attention, appends and copies of pages.
#[test]
fn parts_of_another_device() {
    let app = App::new(wgpu::Limits::default());
    let (device, _queue) = pollster::block_on(app.adapter.request_device(&wgpu::DeviceDescriptor::default())).unwrap();
    let other = |part| BindError::OtherDevice { part };
    let workspace = Workspace::new(&device, app.plan.workspace_bytes()).unwrap();
    let plan = DevicePlan::upload(&device, &app.plan).unwrap();
    let bind = |device, plan, workspace| app.attention.bind(device, plan, app.io(), workspace).map(|_| ());
    assert_eq!(bind(&app.device, &app.device_plan, &workspace), Err(other("workspace")));
    assert_eq!(bind(&app.device, &plan, &app.workspace), Err(other("plan")));
    assert_eq!(bind(&device, &plan, &workspace), Err(other("kernels")));

    let layout = app.attention.config().layout;
    let append = with_mixed_batch(|batch| AppendPlan::new(&layout, batch)).unwrap();
    let append = Append::upload(&device, &append).unwrap();
    let buffer = storage(&device, 1 << 20);
    let all = buffer.as_entire_buffer_binding();
    let source = AppendSource { k: all.clone(), v: all.clone(), kv: vec![all], head_scales: None };
    let error = append.bind(&device, app.attention.kernels(), source, &workspace).map(|_| ());
    assert_eq!(error, Err(other("kernels")));

    let mut store = pollster::block_on(KvStore::new(&device, &layout, 1, 0)).unwrap();
    let error = store.copies(&device, &[], &app.workspace).map(|_| ());
    assert_eq!(error, Err(CopyError::Bind(other("workspace"))));
    let error = store.copies(&app.device, &[], &app.workspace).map(|_| ());
    assert_eq!(error, Err(CopyError::Bind(other("store"))));
}

/// What makes kernels can be awaited on any thread: servers hand their futures to an executor.
#[test]
fn futures_that_move_between_threads() {
    fn moves<T: Send>(future: T) -> T {
        future
    }
    let (device, _queue, info) = device(wgpu::Limits::default());
    let config = config(HeadGeometry::new(2, 1, 8).unwrap(), Dtype::F32, 4, 2);
    pollster::block_on(moves(Attention::new(&device, &info, &config))).unwrap();
    pollster::block_on(moves(KvStore::new(&device, &config.layout, 1, 0))).unwrap();
}

/// Bytes of what is written belong to nobody else, in one buffer or not.
#[test]
fn tensors_that_overlap() {
    let app = App::new(wgpu::Limits::default());
    let [q, kv, out, lse] = NEEDED;
    let arena = storage(&app.device, 1 << 20);
    let bind = |io| app.attention.bind(&app.device, &app.device_plan, io, &app.workspace).map(|_| ());
    let both = |offset| AttentionIo { out: binding(&arena, 0, out), lse: binding(&arena, offset, lse), ..app.io() };
    let touching = out.next_multiple_of(256);
    assert_eq!(bind(both(touching)), Ok(()));
    assert_eq!(bind(both(touching - 256)), Err(BindError::Overlap { written: "out", other: "lse" }));
    let alone = AttentionIo { kv: vec![binding(&arena, 0, kv)], out: binding(&arena, 256, out), ..app.io() };
    assert_eq!(bind(alone), Err(BindError::ReadAndWritten { written: "out", read: "kv" }));
    // What is read alone may be the same.
    let read = AttentionIo { q: binding(&arena, 0, q), kv: vec![binding(&arena, 0, kv)], ..app.io() };
    assert_eq!(bind(read), Ok(()));
}

/// A plan is for the kernels that made it, a buffer for the use that it was made for, a workspace within limits.
#[test]
fn parts_that_do_not_belong_together() {
    let app = App::new(wgpu::Limits::default());
    let config = *app.attention.config();
    let geometry = *config.layout.geometry();
    let own = app.attention.kernels().config().variants;
    let all = [AdapterFacts::PLAIN_GPU, AdapterFacts::PLAIN_CPU].map(|facts| Variants::base(&facts, &geometry));
    let variants = all.into_iter().find(|variants| *variants != own).unwrap();
    let kernels = pollster::block_on(Kernels::new(&app.device, &config.kernels(variants))).unwrap();
    let other = Attention::with_kernels(kernels, &config).unwrap();
    let error = other.bind(&app.device, &app.device_plan, app.io(), &app.workspace).map(|_| ());
    assert_eq!(error, Err(BindError::OtherKernels));
    // Scores that the plan was not made for, and the other way round.
    let with = |extras| AttentionConfig { extras, ..config };
    let scored = |options| AttentionConfig { options, ..config };
    let mut other_scale = config.options;
    other_scale.scale = 0.5;
    for config in [
        with(Extras { shared_prefixes: true, ..Extras::NONE }),
        with(Extras { mask: true, ..Extras::NONE }),
        with(Extras { bias: Some(Bias { dtype: Dtype::F32, per_head: true }), ..Extras::NONE }),
        with(Extras { alibi_slopes: true, ..Extras::NONE }),
        with(Extras { sinks: true, ..Extras::NONE }),
        scored(config.options.with_window(Some(3), None)),
        scored(config.options.with_softcap(Some(5.0))),
        scored(config.options.with_causal(false)),
        scored(other_scale),
    ] {
        let extras = config.extras;
        let kernels = pollster::block_on(Kernels::new(&app.device, &config.kernels(own))).unwrap();
        let other = Attention::with_kernels(kernels, &config).unwrap();
        let bind =
            |attention: &Attention, plan| attention.bind(&app.device, plan, app.io(), &app.workspace).map(|_| ());
        let other_scores = |found: &AttentionConfig, needed: &AttentionConfig| {
            let [found, needed] = [found, needed].map(|config| Box::new((config.options, config.extras)));
            Err(BindError::OtherScores { found, needed })
        };
        assert_eq!(bind(&other, &app.device_plan), other_scores(app.attention.config(), &config));
        let batch = Batch { q_indptr: &[0], page_indptr: &[0], page_ids: &[], kv_len: &[] };
        let plan = if extras.mask { other.plan_masked(&batch, &[]) } else { other.plan(&batch) };
        let plan = DevicePlan::upload(&app.device, &plan.unwrap()).unwrap();
        assert_eq!(bind(&app.attention, &plan), other_scores(&config, app.attention.config()));
    }
    let batch = Batch { q_indptr: &[0], page_indptr: &[0], page_ids: &[], kv_len: &[] };
    assert_eq!(app.attention.plan_shared(&batch, &[], None), Err(PlanError::SharedPrefixesGiven));

    let usage = wgpu::BufferUsages::COPY_DST;
    let descriptor = wgpu::BufferDescriptor { label: None, size: 1 << 20, usage, mapped_at_creation: false };
    let copy_only = app.device.create_buffer(&descriptor);
    for buffer in NAMES {
        let error = app.bind(buffer, copy_only.as_entire_buffer_binding());
        assert_eq!(error, Err(BindError::Usage { buffer, found: usage, needed: wgpu::BufferUsages::STORAGE }));
    }

    let found = 1 << 27;
    let error = Workspace::new(&app.device, found + 16).map(|_| ());
    assert_eq!(error, Err(BindError::TooLarge { buffer: "workspace", found, needed: found + 16 + 256 }));
}

/// Sizes of a variant that the kernels cannot have.
#[test]
fn variants_that_cannot_be_built() {
    let (device, ..) = device(wgpu::Limits::default());
    let geometry = HeadGeometry::new(4, 2, 20).unwrap();
    let good = base(&geometry);
    let PrefillVariant { split_keys, .. } = good.prefill;
    for (prefill, decode) in [
        (PrefillVariant { rows_per_lane: 0, ..good.prefill }, good.decode),
        (PrefillVariant { lanes: 0, ..good.prefill }, good.decode),
        (PrefillVariant { lanes: 20, subgroup: 8, ..good.prefill }, good.decode),
        (PrefillVariant { subgroup: 5, ..good.prefill }, good.decode),
        (PrefillVariant { step_keys: 0, ..good.prefill }, good.decode),
        (PrefillVariant { step_keys: 3, split_keys, ..good.prefill }, good.decode),
        (good.prefill, DecodeVariant::Streams { subgroup: 0 }),
        (good.prefill, DecodeVariant::Exchange { subgroup: 7 }),
    ] {
        let variants = Variants { prefill, decode };
        let config = kernels_of(geometry, (Dtype::F32, Dtype::F32, Dtype::F32), variants);
        let error = pollster::block_on(Kernels::new(&device, &config)).unwrap_err();
        assert!(matches!(error, BuildError::Variants { .. }), "{error}");
    }
    let variants = Variants { decode: DecodeVariant::Exchange { subgroup: 8 }, ..good };
    let config = kernels_of(geometry, (Dtype::F32, Dtype::F32, Dtype::F32), variants);
    let error = pollster::block_on(Kernels::new(&device, &config)).unwrap_err();
    assert_eq!(error, BuildError::Subgroups { kernel: "decode", subgroup: 8 });
}

#[test]
fn bindings_that_the_device_does_not_allow() {
    // All of it fits but the pages; the buffers themselves may be larger than a binding.
    let [q, kv, ..] = NEEDED;
    let limits = wgpu::Limits { max_storage_buffer_binding_size: kv - 4, ..wgpu::Limits::default() };
    let app = App::new(limits.clone());
    let error = app.attention.bind(&app.device, &app.device_plan, app.io(), &app.workspace).map(|_| ());
    assert_eq!(error, Err(BindError::TooLarge { buffer: "kv", found: kv - 4, needed: kv }));
    let config = app.attention.config();
    assert_eq!(
        config.layout.create_buffer(&app.device).map(|_| ()),
        Err(LayoutError::Binding { needed: kv, found: kv - 4 })
    );
    let small = App::new(wgpu::Limits { max_storage_buffer_binding_size: 4096, ..limits });
    let error = small.attention.bind(&small.device, &small.device_plan, small.io(), &small.workspace).map(|_| ());
    assert_eq!(error, Err(BindError::TooLarge { buffer: "q", found: 4096, needed: q }));
    // A buffer limit below the binding limit counts as well.
    let limits = wgpu::Limits { max_buffer_size: kv - 16, ..wgpu::Limits::default() };
    assert_eq!(
        config.layout.create_buffer(&device(limits).0).map(|_| ()),
        Err(LayoutError::Binding { needed: kv, found: kv - 16 })
    );
}

#[test]
fn offsets_that_are_not_aligned() {
    for alignment in [256, 32] {
        let limits = wgpu::Limits { min_storage_buffer_offset_alignment: alignment, ..wgpu::Limits::default() };
        let app = App::new(limits);
        for (name, needed) in NAMES.into_iter().zip(NEEDED) {
            let large = storage(&app.device, needed + 512);
            let unaligned = |found| Err(BindError::Unaligned { buffer: name, found, needed: alignment.into() });
            for offset in [4, 16, 31, 257, 300] {
                assert_eq!(app.bind(name, binding(&large, offset, needed)), unaligned(offset));
            }
            let expected = if alignment == 32 { Ok(()) } else { unaligned(32) };
            assert_eq!(app.bind(name, binding(&large, 32, needed)), expected);
        }
    }
}

#[test]
fn a_plan_for_another_pool() {
    let app = App::new(wgpu::Limits::default());
    let geometry = *app.attention.config().layout.geometry();
    for layout in [
        layout(geometry, Dtype::F16, 16, PAGE_COUNT + 1),
        layout(geometry, Dtype::F16, 8, PAGE_COUNT),
        // Twice the heads in the same group: the same pipelines, another pool.
        layout(HeadGeometry::new(8, 4, 20).unwrap(), Dtype::F16, 16, PAGE_COUNT),
    ] {
        let config = AttentionConfig { layout, ..*app.attention.config() };
        let other = Attention::with_kernels(app.attention.kernels().clone(), &config).unwrap();
        let error = other.bind(&app.device, &app.device_plan, app.io(), &app.workspace).map(|_| ());
        assert_eq!(error, Err(BindError::OtherLayout));
    }
}

#[test]
fn more_workgroups_than_three_axes_hold() {
    let groups = App::new(wgpu::Limits::default()).plan.workgroups();
    let mut refused = Vec::new();
    for axis_max in 1.. {
        let limits = wgpu::Limits { max_compute_workgroups_per_dimension: axis_max, ..wgpu::Limits::default() };
        let app = App::new(limits);
        let bound = app.attention.bind(&app.device, &app.device_plan, app.io(), &app.workspace).map(|_| ());
        // The first kernel that does not fit is named.
        let Some((kernel, needed)) = groups.into_iter().find(|(_, groups)| *groups > axis_max.pow(3)) else {
            assert_eq!(bound, Ok(()));
            break;
        };
        let kernel = kernel.entry_point();
        assert_eq!(bound, Err(BindError::TooManyWorkgroups { kernel, needed, axis_max }));
        refused.push(kernel);
    }
    assert!(!refused.is_empty());
}

#[test]
fn appends_that_cannot_be_bound() {
    let app = App::new(wgpu::Limits::default());
    let layout = app.attention.config().layout;
    // The 41 last tokens; 3 vectors per key row and per value row, 2 heads.
    let plan = with_mixed_batch(|batch| AppendPlan::new(&layout, batch)).unwrap();
    assert_eq!(plan.tokens(), 41);
    let append = Append::upload(&app.device, &plan).unwrap();
    let needed = [("k", 41 * 2 * 3 * 16), ("v", 41 * 2 * 3 * 16), ("kv", NEEDED[1])];
    let buffers = needed.map(|(_, bytes)| storage(&app.device, bytes + 256));
    let bind = |name: &str, with: wgpu::BufferBinding<'_>| {
        let [mut k, mut v, mut kv] = buffers.each_ref().map(|buffer| buffer.as_entire_buffer_binding());
        match name {
            "k" => k = with,
            "v" => v = with,
            _ => kv = with,
        }
        append.bind(
            &app.device,
            app.attention.kernels(),
            AppendSource { k, v, kv: vec![kv], head_scales: None },
            &app.workspace,
        )
    };
    for ((name, needed), buffer) in needed.into_iter().zip(&buffers) {
        let error = |with| bind(name, with).map(|_| ());
        assert_eq!(error(binding(buffer, 0, needed)), Ok(()));
        assert_eq!(error(binding(buffer, 256, u64::MAX)), Ok(()));
        assert_eq!(error(binding(buffer, 0, needed - 16)), too_small(name, needed - 16, needed));
        assert_eq!(error(binding(buffer, 512, needed)), too_small(name, needed - 256, needed));
        let unaligned = Err(BindError::Unaligned { buffer: name, found: 16, needed: 256 });
        assert_eq!(error(binding(buffer, 16, needed)), unaligned);
    }
    // 41 tokens * 2 heads * 6 vectors over 64 lanes.
    let groups = (41_u32 * 2 * 6).div_ceil(64);
    assert_eq!(bind("k", binding(&buffers[0], 0, needed[0].1)).unwrap().workgroups(), groups);
    let small = App::new(wgpu::Limits { max_compute_workgroups_per_dimension: 1, ..wgpu::Limits::default() });
    let append = Append::upload(&small.device, &plan).unwrap();
    let buffers = needed.map(|(_, bytes)| storage(&small.device, bytes));
    let [k, v, kv] = buffers.each_ref().map(|buffer| buffer.as_entire_buffer_binding());
    let source = AppendSource { k, v, kv: vec![kv], head_scales: None };
    assert_eq!(
        append.bind(&small.device, small.attention.kernels(), source, &small.workspace).map(|_| ()),
        Err(BindError::TooManyWorkgroups { kernel: "append", needed: groups, axis_max: 1 })
    );
}

/// 22 pages in segments of 9, 9 and 4: each has a binding of its own, with its own size.
#[test]
fn pools_in_segments() {
    let app = App::new(wgpu::Limits::default());
    let page_bytes = NEEDED[1] / u64::from(PAGE_COUNT);
    let config = *app.attention.config();
    let limits = wgpu::Limits { max_storage_buffer_binding_size: 10 * page_bytes - 1, ..wgpu::Limits::default() };
    let segmented = AttentionConfig { layout: config.layout.within(&limits).unwrap(), ..config };
    let bytes = [9, 9, 4].map(|pages| pages * page_bytes);
    assert_eq!(segmented.layout.segment_bytes().collect::<Vec<u64>>(), bytes);

    // Kernels, plans and calls are for one number of segments.
    let variants = app.attention.kernels().config().variants;
    let needed = Box::new(segmented.kernels(variants));
    let found = Box::new(*app.attention.kernels().config());
    assert_eq!(
        Attention::with_kernels(app.attention.kernels().clone(), &segmented).map(|_| ()),
        Err(BuildError::OtherConfig { found, needed })
    );
    let attention = pollster::block_on(Attention::with_variants(&app.device, &segmented, variants)).unwrap();
    let bind = |plan: &DevicePlan, kv: Vec<wgpu::BufferBinding<'_>>| {
        let io = AttentionIo { kv, ..app.io() };
        attention.bind(&app.device, plan, io, &app.workspace).map(|_| ())
    };
    let whole = app.buffers[1].as_entire_buffer_binding();
    assert_eq!(bind(&app.device_plan, vec![whole.clone()]), Err(BindError::OtherLayout));
    let plan = with_mixed_batch(|batch| attention.plan(batch)).unwrap();
    let plan = DevicePlan::upload(&app.device, &plan).unwrap();
    for given in [0, 1, 2, 4] {
        let error = Err(BindError::Segments { found: given, needed: 3 });
        assert_eq!(bind(&plan, vec![whole.clone(); given]), error);
    }
    let buffers = segmented.layout.create_segments(&app.device).unwrap();
    assert_eq!(buffers.iter().map(wgpu::Buffer::size).collect::<Vec<u64>>(), bytes);
    let segments = || buffers.iter().map(wgpu::Buffer::as_entire_buffer_binding).collect::<Vec<_>>();
    assert_eq!(bind(&plan, segments()), Ok(()));
    let mut short = segments();
    short.swap(1, 2);
    assert_eq!(bind(&plan, short), too_small("kv", bytes[2], bytes[1]));
    let small = device(wgpu::Limits { max_buffer_size: bytes[0] - 4, ..wgpu::Limits::default() }).0;
    let error = LayoutError::Binding { needed: bytes[0], found: bytes[0] - 4 };
    assert_eq!(segmented.layout.create_segments(&small).map(|_| ()), Err(error));

    // Appends as well, which write to the segments.
    let append = with_mixed_batch(|batch| AppendPlan::new(&segmented.layout, batch)).unwrap();
    let append = Append::upload(&app.device, &append).unwrap();
    let rows = storage(&app.device, 41 * 2 * 3 * 16);
    let bind = |kernels: &Kernels, kv: Vec<wgpu::BufferBinding<'_>>| {
        let rows = rows.as_entire_buffer_binding();
        let source = AppendSource { k: rows.clone(), v: rows, kv, head_scales: None };
        append.bind(&app.device, kernels, source, &app.workspace).map(|_| ())
    };
    assert_eq!(bind(attention.kernels(), segments()), Ok(()));
    assert_eq!(bind(app.attention.kernels(), segments()), Err(BindError::OtherLayout));
    let error = Err(BindError::Segments { found: 1, needed: 3 });
    assert_eq!(bind(attention.kernels(), vec![whole]), error);
    let twice = vec![segments()[0].clone(), segments()[0].clone(), segments()[2].clone()];
    assert_eq!(bind(attention.kernels(), twice), Err(BindError::Overlap { written: "kv", other: "kv" }));
}

#[test]
fn more_segments_than_bindings() {
    let geometry = HeadGeometry::new(4, 2, 20).unwrap();
    let plain = kernels_of(geometry, (Dtype::F16, Dtype::F16, Dtype::F32), base(&geometry));
    let heads = Modifiers { alibi: true, ..Modifiers::NONE };
    let all = Modifiers { bias: Some(Dtype::F32), ..heads };
    for (modifiers, fit) in [(Modifiers::NONE, 3), (heads, 2), (all, 1)] {
        let build = |segments: u32, storage_buffers: u32| {
            let limits =
                wgpu::Limits { max_storage_buffers_per_shader_stage: storage_buffers, ..wgpu::Limits::default() };
            let config = KernelConfig { modifiers, segments: NonZeroU32::new(segments).unwrap(), ..plain };
            let built = pollster::block_on(Kernels::new(&device(limits).0, &config))?;
            Ok((built.config().segments.get(), built.config().modifiers.grouped))
        };
        assert_eq!(build(fit, 8), Ok((fit, false)));
        for segments in [fit + 1, 40, u32::MAX] {
            assert_eq!(build(segments, 8), Ok((fit, true)));
        }
        // Not even one segment has a binding.
        let (kernel, limit, found) = ("prefill", "max_storage_buffers_per_shader_stage", 8 - fit);
        let error = BuildError::Limit { kernel, limit, found: found.into(), needed: u64::from(found) + 1 };
        assert_eq!(build(2, found), Err(error));
    }
}

#[test]
fn kernels_that_cannot_be_built() {
    let geometry = HeadGeometry::new(4, 2, 20).unwrap();
    let kernel_config = kernels_of(geometry, (Dtype::F16, Dtype::F16, Dtype::F32), base(&geometry));
    let build = |limits, config: &KernelConfig| pollster::block_on(Kernels::new(&device(limits).0, config)).map(|_| ());
    let default = wgpu::Limits::default;
    assert_eq!(build(default(), &kernel_config), Ok(()));
    let bf16 = KernelConfig { out: Dtype::Bf16, ..kernel_config };
    assert_eq!(build(default(), &bf16), Err(BuildError::OutDtype { found: Dtype::Bf16 }));
    let modifiers = Modifiers { bias: Some(Dtype::Bf16), ..kernel_config.modifiers };
    let bf16 = KernelConfig { modifiers, ..kernel_config };
    assert_eq!(build(default(), &bf16), Err(BuildError::BiasDtype { found: Dtype::Bf16 }));

    let decode_bytes = KernelId::Decode.workgroup_bytes(&kernel_config);
    for (limits, kernel, limit, found, needed) in [
        (
            wgpu::Limits { max_compute_workgroup_storage_size: decode_bytes - 1, ..default() },
            "decode",
            "max_compute_workgroup_storage_size",
            decode_bytes - 1,
            decode_bytes,
        ),
        (
            wgpu::Limits { max_compute_invocations_per_workgroup: 63, ..default() },
            "prefill",
            "max_compute_invocations_per_workgroup",
            63,
            64,
        ),
        (
            wgpu::Limits { max_compute_workgroup_size_x: 32, ..default() },
            "prefill",
            "max_compute_workgroup_size_x",
            32,
            64,
        ),
        (
            wgpu::Limits { max_storage_buffers_per_shader_stage: 5, ..default() },
            "prefill",
            "max_storage_buffers_per_shader_stage",
            5,
            6,
        ),
    ] {
        let (found, needed) = (found.into(), needed.into());
        assert_eq!(build(limits, &kernel_config), Err(BuildError::Limit { kernel, limit, found, needed }));
    }
    // Exactly what is needed.
    let enough = wgpu::Limits {
        max_compute_workgroup_storage_size: decode_bytes,
        max_compute_invocations_per_workgroup: 64,
        max_compute_workgroup_size_x: 64,
        max_storage_buffers_per_shader_stage: 6,
        ..default()
    };
    assert_eq!(build(enough, &kernel_config), Ok(()));

    // Kernels of another configuration; head counts of the same ratio are the same configuration.
    let (device, ..) = device(default());
    let kernels = pollster::block_on(Kernels::new(&device, &kernel_config)).unwrap();
    let with = |config: &AttentionConfig| Attention::with_kernels(kernels.clone(), config).map(|_| ());
    let same = config(HeadGeometry::new(16, 8, 20).unwrap(), Dtype::F16, 3, 7);
    assert_eq!(with(&same), Ok(()));
    for other in [
        AttentionConfig { q: Dtype::F32, ..same },
        AttentionConfig { out: Dtype::F16, ..same },
        config(HeadGeometry::new(16, 16, 20).unwrap(), Dtype::F16, 3, 7),
        config(HeadGeometry::new(16, 8, 24).unwrap(), Dtype::F16, 3, 7),
        config(HeadGeometry::with_v_head_dim(16, 8, 20, 24).unwrap(), Dtype::F16, 3, 7),
        AttentionConfig { new_rows: Dtype::F32.into(), ..same },
        AttentionConfig { options: same.options.with_window(Some(4), None), ..same },
        AttentionConfig { extras: Extras { sinks: true, ..Extras::NONE }, ..same },
    ] {
        let needed = Box::new(other.kernels(kernel_config.variants));
        // Found and needed must not read the same.
        assert_ne!(kernel_config.to_string(), needed.to_string());
        assert_eq!(with(&other), Err(BuildError::OtherConfig { found: Box::new(kernel_config), needed }));
    }
}

/// The shapes of kernels at the ends of what is supported, made with WebGPU's default limits and no feature; then one
/// application that appends and attends, of which wgpu validates every command.
#[test]
fn base_kernels_need_default_limits_and_no_features() {
    let (device, _, info) = device(wgpu::Limits::default());
    assert!(device.features().is_empty());
    for facts in [AdapterFacts::PLAIN_GPU, AdapterFacts::PLAIN_CPU] {
        for (q_heads, kv_heads, head_dim, v_head_dim) in
            [(2, 2, 64, 64), (8, 1, 128, 128), (9, 1, 59, 111), (71, 1, 256, 256), (1, 1, 1, 256), (64, 8, 256, 1)]
        {
            for (q, kv, out) in [
                (Dtype::F32, Dtype::F32, Dtype::F32),
                (Dtype::F16, Dtype::F16, Dtype::F16),
                (Dtype::Bf16, Dtype::F16, Dtype::F32),
            ] {
                let geometry = HeadGeometry::with_v_head_dim(q_heads, kv_heads, head_dim, v_head_dim).unwrap();
                let variants = Variants::base(&facts, &geometry);
                let config = kernels_of(geometry, (q, kv, out), variants);
                pollster::block_on(Kernels::new(&device, &config)).unwrap();
            }
        }
    }
    assert_eq!(info.backend, wgpu::Backend::Noop);

    let app = App::new(wgpu::Limits::default());
    let layout = app.attention.config().layout;
    let plan = with_mixed_batch(|batch| AppendPlan::new(&layout, batch)).unwrap();
    let append = Append::upload(&app.device, &plan).unwrap();
    let new_rows = [(); 2].map(|()| storage(&app.device, 41 * 2 * 3 * 16));
    let [k, v] = new_rows.each_ref().map(|buffer| buffer.as_entire_buffer_binding());
    let source = AppendSource { k, v, kv: vec![app.buffers[1].as_entire_buffer_binding()], head_scales: None };
    let append = append.bind(&app.device, app.attention.kernels(), source, &app.workspace).unwrap();
    let call = app.attention.bind(&app.device, &app.device_plan, app.io(), &app.workspace).unwrap();
    let mut encoder = app.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        append.encode(&mut pass);
        call.encode(&mut pass);
    }
    app.queue.submit([encoder.finish()]);
}

/// Recording takes no device, so it cannot make anything; and it is quick.
#[test]
fn recording_is_quick() {
    let app = App::new(wgpu::Limits::default());
    let call = app.attention.bind(&app.device, &app.device_plan, app.io(), &app.workspace).unwrap();
    let mut milliseconds: Vec<f64> = (0..15)
        .map(|_| {
            let mut encoder = app.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let start = Instant::now();
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                for _ in 0..1000 {
                    call.encode(&mut pass);
                }
            }
            // wgpu checks a pass where it ends.
            let _commands = encoder.finish();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    milliseconds.sort_by(f64::total_cmp);
    let median = milliseconds[milliseconds.len() / 2];
    say(&format!("encode: 1,000 calls of 3 dispatches in {median:.2} ms (median)"));
    // Hundreds of times what it takes: only that nothing large creeps in.
    assert!(median < 500.0, "{median} ms");
}

/// A whole prefill takes no scratch, and its plan grows with the prompt, not with its square.
#[test]
fn prefill_memory_grows_linearly() {
    let (device, ..) = device(wgpu::Limits::default());
    for facts in [AdapterFacts::PLAIN_GPU, AdapterFacts::PLAIN_CPU] {
        let config = config(HeadGeometry::new(8, 8, 64).unwrap(), Dtype::F16, 16, 512);
        let kernels = pollster::block_on(Kernels::new(
            &device,
            &config.kernels(Variants::base(&facts, config.layout.geometry())),
        ))
        .unwrap();
        let attention = Attention::with_kernels(kernels, &config).unwrap();
        let page_ids: Vec<u32> = (0..512).collect();
        let mut bytes = [1024_u32, 2048, 4096, 8192].map(|tokens| {
            let pages = tokens / 16;
            let plan = attention
                .plan(&Batch {
                    q_indptr: &[0, tokens],
                    page_indptr: &[0, pages],
                    page_ids: &page_ids[..pages as usize],
                    kv_len: &[tokens],
                })
                .unwrap();
            let (workspace, plan) = (plan.workspace_bytes(), plan.device_bytes());
            say(&format!("prefill of {tokens} tokens, 8 heads, {facts:?}: workspace {workspace}, plan {plan} bytes"));
            assert_eq!(workspace, 0);
            plan
        });
        // Less what a plan always has, doubling the tokens doubles the bytes.
        let fixed = 2 * bytes[0] - bytes[1];
        bytes.iter_mut().for_each(|bytes| *bytes -= fixed);
        assert!(fixed < 400 && bytes.windows(2).all(|pair| pair[1] == 2 * pair[0]), "{fixed} + {bytes:?}");
    }
}

fn order(tensor: &'static str, index: usize, found: u32, previous: u32) -> BatchError {
    BatchError::Order { tensor, index, found, previous }
}

#[test]
fn batches_that_cannot_be_planned() {
    let (device, _, info) = device(wgpu::Limits::default());
    let attention = |config: &AttentionConfig| pollster::block_on(Attention::new(&device, &info, config)).unwrap();
    let small = attention(&config(HeadGeometry::new(2, 2, 8).unwrap(), Dtype::F16, 4, 3));
    let good = Batch { q_indptr: &[0, 1, 3], page_indptr: &[0, 2, 3], page_ids: &[2, 0, 1], kv_len: &[8, 3] };
    small.plan(&good).unwrap();
    let length = |tensor, found| BatchError::Length {
        tensor,
        found,
        needed: 3,
        why: "one more than there are sequences in `kv_len`",
    };
    for (batch, expected) in [
        (Batch { q_indptr: &[0, 1], ..good }, length("q_indptr", 2)),
        (Batch { q_indptr: &[], ..good }, length("q_indptr", 0)),
        (Batch { page_indptr: &[0, 2, 3, 3], ..good }, length("page_indptr", 4)),
        (Batch { q_indptr: &[1, 1, 3], ..good }, BatchError::Start { tensor: "q_indptr", found: 1 }),
        (Batch { q_indptr: &[0, 4, 3], ..good }, order("q_indptr", 2, 3, 4)),
        (Batch { page_indptr: &[0, 2, 1], ..good }, order("page_indptr", 2, 1, 2)),
        (
            Batch { page_indptr: &[0, 2, 2], kv_len: &[8, 0], ..good },
            BatchError::End { tensor: "page_indptr", found: 2, needed: 3 },
        ),
        (Batch { page_ids: &[2, 3, 1], ..good }, BatchError::PageId { index: 1, found: 3, page_count: 3 }),
        (
            Batch { kv_len: &[9, 3], ..good },
            BatchError::PastPages { seq: 0, found: 9, pages: 2, page_size: 4, capacity: 8 },
        ),
        (
            Batch { kv_len: &[8, u32::MAX], ..good },
            BatchError::PastPages { seq: 1, found: u32::MAX, pages: 1, page_size: 4, capacity: 4 },
        ),
    ] {
        assert_eq!(small.plan(&batch), Err(PlanError::Batch(expected.clone())));
        assert_eq!(AppendPlan::new(&small.config().layout, &batch), Err(AppendError::Batch(expected)));
    }

    // Scales that are no finite f32 in units of log2.
    for scale in [f64::NAN, f64::INFINITY, f64::MAX, -3e38] {
        let options = small.config().options.with_scale(scale);
        let scaled =
            Attention::with_kernels(small.kernels().clone(), &AttentionConfig { options, ..*small.config() }).unwrap();
        let error = scaled.plan(&good).unwrap_err();
        assert!(matches!(error, PlanError::Scale { found } if found.to_bits() == scale.to_bits()), "{error}");
    }

    // Keys and rows past 32 bits: one page of 2^31 - 1 tokens, twice in the table.
    let huge = config(HeadGeometry::new(1, 1, 8).unwrap(), Dtype::F16, i32::MAX as u32, 1);
    let huge = attention(&huge);
    let batch = Batch { q_indptr: &[0, 1], page_indptr: &[0, 2], page_ids: &[0, 0], kv_len: &[u32::MAX - 1] };
    assert_eq!(huge.plan(&batch), Err(PlanError::TooLong { seq: 0, q_len: 1, kv_len: u32::MAX - 1 }));
    let batch = Batch { q_indptr: &[0, 0, 7], page_indptr: &[0, 0, 2], kv_len: &[0, u32::MAX - 7], ..batch };
    assert_eq!(huge.plan(&batch), Err(PlanError::TooLong { seq: 1, q_len: 7, kv_len: u32::MAX - 7 }));

    // Rows whose elements pass 32-bit offsets: 2 vectors of f32 for each.
    let rows = 1_u32 << 31;
    let batch = Batch { q_indptr: &[0, rows], page_indptr: &[0, 0], page_ids: &[], kv_len: &[0] };
    let limit = u64::from(u32::MAX);
    assert_eq!(huge.plan(&batch), Err(PlanError::TooMany { what: "output vectors", needed: 1 << 32, limit }));

    // Partial states of a row: 4,096 splits and 1,024 KV heads, each of 65 vectors. No binding holds them.
    let wide = attention(&config(HeadGeometry::new(16_384, 1024, 256).unwrap(), Dtype::F16, 4096, 1));
    let table = [0; 256];
    let batch = Batch { q_indptr: &[0, 1], page_indptr: &[0, 256], page_ids: &table, kv_len: &[256 * 4096] };
    let needed = (256 * 4096 / u64::from(SPLIT_KEYS)) * 1024 * 65 * 16;
    let limit = (128 << 20) - 256;
    assert_eq!(wide.plan(&batch), Err(PlanError::Workspace { seq: 0, needed, limit }));
}

#[test]
fn appends_that_cannot_be_planned() {
    let layout_of =
        |page_size, page_count| layout(HeadGeometry::new(2, 2, 8).unwrap(), Dtype::F16, page_size, page_count);
    let small = layout_of(4, 3);
    let good = Batch { q_indptr: &[0, 1, 3], page_indptr: &[0, 2, 3], page_ids: &[2, 0, 1], kv_len: &[8, 3] };
    assert_eq!(AppendPlan::new(&small, &good).unwrap().tokens(), 3);
    assert_eq!(
        AppendPlan::new(&small, &Batch { q_indptr: &[0, 1, 5], ..good }),
        Err(AppendError::TooMany { seq: 1, new: 4, kv_len: 3 })
    );
    // Position 7 of the one is slot 3 of page 0; so is position 3 of the other.
    let shared = Batch { page_ids: &[2, 0, 0], kv_len: &[8, 4], ..good };
    assert_eq!(AppendPlan::new(&small, &shared), Err(AppendError::SameSlot { page: 0, slot: 3 }));
    // Sharing a page is no fault where only one writes to it, or both to slots of their own.
    AppendPlan::new(&small, &Batch { q_indptr: &[0, 1, 1], ..shared }).unwrap();
    AppendPlan::new(&small, &Batch { kv_len: &[8, 3], ..shared }).unwrap();

    // 2^31 - 1 heads of two vectors: the kernel counts up to a group short of 2^32.
    let heads = i32::MAX as u32;
    let wide = layout(HeadGeometry::new(heads, heads, 8).unwrap(), Dtype::F16, 1, 1);
    let batch = Batch { q_indptr: &[0, 1], page_indptr: &[0, 1], page_ids: &[0], kv_len: &[1] };
    let (needed, limit) = (u64::from(u32::MAX) - 1, u64::from(u32::MAX) - 64);
    assert_eq!(
        AppendPlan::new(&wide, &batch),
        Err(AppendError::TooLarge { what: "vectors of 16 bytes", needed, limit })
    );
}

#[test]
fn pools_that_cannot_be_addressed() {
    let geometry = HeadGeometry::new(8, 8, 128).unwrap();
    let pool = |page_size, page_count| {
        KvLayout::new(geometry, Dtype::F16, PageSize::new(page_size).unwrap(), page_count).map(|layout| layout.bytes())
    };
    // A page of 16 tokens: 8 heads, keys and values of 16 vectors.
    let (page_bytes, limit) = (16 * 8 * 2 * 16 * 16, u64::from(u32::MAX) * 16);
    assert_eq!(pool(16, 1_048_575), Ok(1_048_575 * page_bytes));
    let needed = 1_048_576 * u128::from(page_bytes);
    assert_eq!(pool(16, 1_048_576), Err(LayoutError::TooLarge { page_count: 1_048_576, page_bytes, needed, limit }));
    let page_bytes = u64::from(u32::MAX) * 4096;
    let needed = u128::from(u32::MAX) * u128::from(page_bytes);
    let error = LayoutError::TooLarge { page_count: u32::MAX, page_bytes, needed, limit };
    assert_eq!(pool(u32::MAX, u32::MAX), Err(error));
}

/// Pages of 4 slots and 2 heads, keys and values of 24 elements in f16.
const PAGE_BYTES: u64 = 4 * 2 * 2 * 24 * 2;

fn store(device: &wgpu::Device, pages: u32, layers: u32, slots: u32) -> Result<KvStore, StoreError> {
    let layout = layout(HeadGeometry::new(4, 2, 20).unwrap(), Dtype::F16, 4, pages);
    assert_eq!(layout.page_bytes(), PAGE_BYTES);
    pollster::block_on(KvStore::new(device, &layout, layers, slots))
}

#[test]
fn stores_have_the_bytes_that_are_counted() {
    let (device, ..) = device(wgpu::Limits::default());
    for (pages, layers, slots) in [(7, 3, 5), (1, 1, 0), (7, 0, 2), (20, 32, 1)] {
        let made = store(&device, pages, layers, slots).unwrap();
        let of_layers = |count: u32| u64::from(count) * u64::from(layers) * PAGE_BYTES;
        assert_eq!((made.bytes(), made.host_bytes(), made.layers()), (of_layers(pages), of_layers(slots), layers));
        for layer in 0..layers {
            let segments = made.pages(layer).unwrap();
            let sizes: Vec<_> = segments.iter().map(|pages| (pages.offset, pages.buffer.size())).collect();
            assert_eq!(sizes, [(0, made.layout().bytes())]);
        }
        let none = StoreError::Layer { found: layers, layers };
        assert_eq!(made.pages(layers).err(), Some(none.clone()));
        assert_eq!(none.to_string(), format!("layer {layers} was asked for; there are {layers}"));
    }
    // An empty binding is not allowed, so a store without pages has a vector per layer.
    assert_eq!(store(&device, 0, 3, 0).unwrap().bytes(), 3 * 16);
}

#[test]
fn stores_that_cannot_be() {
    let limits = wgpu::Limits { max_storage_buffer_binding_size: 8 * PAGE_BYTES, ..wgpu::Limits::default() };
    let (small, ..) = device(limits);
    assert!(store(&small, 8, 2, 0).is_ok());
    let refused = LayoutError::Binding { needed: 9 * PAGE_BYTES, found: 8 * PAGE_BYTES };
    assert_eq!(store(&small, 9, 2, 0).err(), Some(StoreError::Layout(refused)));
    // More than an address space has: of host slots, and of pages where the device's limits leave it to the driver.
    let needed = u128::from(u32::MAX) * u128::from(u32::MAX) * u128::from(PAGE_BYTES);
    let error = store(&small, 0, u32::MAX, u32::MAX).err();
    assert_eq!(error, Some(StoreError::HostMemory { needed }));
    let kernel_limits = wgpu::Limits { max_storage_buffers_per_shader_stage: 2, ..wgpu::Limits::default() };
    let (few, ..) = device(kernel_limits);
    let limit =
        BuildError::Limit { kernel: "copy_pages", limit: "max_storage_buffers_per_shader_stage", found: 2, needed: 3 };
    assert_eq!(store(&few, 1, 1, 0).err(), Some(StoreError::Build(limit)));
}

/// Each list is refused with the numbers, and a list that is right goes through afterwards.
#[test]
fn copies_that_are_refused() {
    let limits = wgpu::Limits {
        max_buffer_size: 10 * PAGE_BYTES,
        max_storage_buffer_binding_size: 10 * PAGE_BYTES,
        max_compute_workgroups_per_dimension: 1,
        ..wgpu::Limits::default()
    };
    let (device, queue, _) = device(limits);
    let mut store = store(&device, 10, 2, 6).unwrap();
    let workspace = Workspace::new(&device, 0).unwrap();
    let on_device = |from, to| PageCopy::OnDevice { from, to };
    let to_host = |page, slot| PageCopy::ToHost { page, slot };
    let to_device = |slot, page| PageCopy::ToDevice { slot, page };
    let page = |found| CopyError::Page { found, page_count: 10 };
    let slot = |found| CopyError::Slot { found, slot_count: 6 };
    for (list, error) in [
        (vec![on_device(10, 1)], page(10)),
        (vec![on_device(1, u32::MAX)], page(u32::MAX)),
        (vec![on_device(0, 1), to_host(11, 0)], page(11)),
        (vec![to_device(0, 12)], page(12)),
        (vec![on_device(0, 1), on_device(3, 3), on_device(4, 5)], CopyError::ToItself { page: 3 }),
        (vec![to_host(0, 6)], slot(6)),
        (vec![to_host(0, 1), to_device(7, 0)], slot(7)),
        (vec![to_device(1, 0)], CopyError::Empty { slot: 1, awaited: false }),
        (vec![to_host(0, 1), to_device(1, 0)], CopyError::Empty { slot: 1, awaited: true }),
        (
            (0..6).map(|page| to_host(page, page)).collect(),
            CopyError::TooLarge {
                direction: "to the host",
                pages: 6,
                needed: 12 * u128::from(PAGE_BYTES),
                found: 10 * PAGE_BYTES,
            },
        ),
        // A page takes one workgroup.
        (
            vec![on_device(0, 1), on_device(0, 2)],
            CopyError::Bind(BindError::TooManyWorkgroups { kernel: "copy_pages", needed: 2, axis_max: 1 }),
        ),
    ] {
        let found = store.copies(&device, &list, &workspace);
        assert_eq!(found.err(), Some(error.clone()), "{list:?}");
        assert!(!error.to_string().contains('{'), "{error}");
    }
    assert_eq!(
        CopyError::Empty { slot: 1, awaited: true }.to_string(),
        "host slot 1 is to be read, and what is copied has not reached it"
    );

    // No refusal has left anything behind: slot 1 still holds nothing, and five pages go there and back.
    let list: Vec<_> = (0..5).map(|page| to_host(page, page)).chain([on_device(0, 9)]).collect();
    let copies = store.copies(&device, &list, &workspace).unwrap();
    assert_eq!(copies.workgroups(), 2);
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let arriving = copies.encode(&mut encoder).unwrap();
    queue.submit([encoder.finish()]);
    assert_eq!(arriving.buffer().size(), 10 * PAGE_BYTES);
    assert!(matches!(store.receive(&arriving), Err(CopyError::NotMapped { .. })));
    arriving.buffer().map_async(wgpu::MapMode::Read, .., |mapped| mapped.unwrap());
    device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    assert_eq!(store.receive(&arriving), Ok(5));
    let list: Vec<_> = (0..5).map(|slot| to_device(slot, 9 - slot)).collect();
    let copies = store.copies(&device, &list, &workspace).unwrap();
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    assert!(copies.encode(&mut encoder).is_none());
    queue.submit([encoder.finish()]);
    // Nothing to do is nothing to record.
    let nothing = store.copies(&device, &[], &workspace).unwrap();
    assert_eq!(nothing.workgroups(), 0);
    assert!(nothing.encode(&mut device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default())).is_none());
}

/// In a process that may have 3 GB, since wgpu knows of no device with less memory than its limits.
#[cfg(unix)]
#[test]
fn memory_that_is_not_there() {
    let run = "ulimit -v 3000000 && exec \"$0\" --exact --ignored out_of_memory";
    let child = std::process::Command::new("sh").arg("-c").arg(run).arg(std::env::current_exe().unwrap()).output();
    let output = child.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

/// More than the process may have: an error of the call alone, which reaches no handler (here one that panics), and the
/// device goes on.
#[test]
#[ignore = "run by `memory_that_is_not_there` with little memory"]
fn out_of_memory() {
    let bytes = 4_000_000_000;
    let limit = 4_294_967_292;
    let limits =
        wgpu::Limits { max_buffer_size: limit, max_storage_buffer_binding_size: limit, ..wgpu::Limits::default() };
    let app = App::new(limits);
    match Workspace::new(&app.device, bytes) {
        Err(BindError::OutOfMemory(OutOfMemory { buffer, bytes: found, .. })) => {
            assert_eq!((buffer.as_str(), found), ("attention workspace", bytes + 256));
        }
        other => panic!("{other:?}"),
    }
    let capacity = PlanCapacity { words: bytes / 4, ..app.plan.capacity() };
    let error = DevicePlan::with_capacity(&app.device, &app.attention, &capacity).map(|_| ()).unwrap_err();
    // Eight places for parameters.
    assert_eq!(error.bytes, bytes + 8 * 256);
    let config = app.attention.config();
    // 2 heads, keys and values of 48 bytes.
    let pool = layout(*config.layout.geometry(), Dtype::F16, 16, (bytes / (16 * 2 * 2 * 48)) as u32);
    match pool.create_buffer(&app.device) {
        Err(LayoutError::OutOfMemory(OutOfMemory { bytes, .. })) => assert_eq!(bytes, pool.bytes()),
        other => panic!("{other:?}"),
    }
    // The same device, with what it has memory for.
    let capacity = app.plan.capacity();
    let plan = DevicePlan::with_capacity(&app.device, &app.attention, &capacity).unwrap();
    let workspace = Workspace::new(&app.device, capacity.workspace_bytes).unwrap();
    app.attention.bind(&app.device, &plan, app.io(), &workspace).unwrap();
    // More than a buffer may have is refused before it is asked for.
    let capacity = PlanCapacity { words: 1 << 59, ..capacity };
    let error = DevicePlan::with_capacity(&app.device, &app.attention, &capacity).map(|_| ()).unwrap_err();
    assert!(error.message.contains("the device allows"), "{error}");
}

/// A shader that the device refuses is an error of the build alone, with the kernel's name.
#[test]
fn pipelines_that_are_refused() {
    let (device, ..) = device(wgpu::Limits::default());
    let geometry = HeadGeometry::new(4, 2, 20).unwrap();
    let config = kernels_of(geometry, (Dtype::F16, Dtype::F16, Dtype::F32), base(&geometry));
    for kernel in KernelId::ALL {
        let edits = [SourceEdit { kernel, from: "report_done(lane);", to: "report_done(lane, 1u);" }];
        match pollster::block_on(Kernels::with_edits(&device, &config, &edits)) {
            Err(BuildError::Pipeline { kernel: found, message }) => {
                assert_eq!(found, kernel.entry_point());
                assert!(message.contains("report_done"), "{message}");
            }
            other => panic!("{other:?}"),
        }
        pollster::block_on(Kernels::new(&device, &config)).unwrap();
    }
}

/// What a bias needs bounds the plans with a bias, and no others.
#[test]
fn more_pairs_than_a_bias_can_have() {
    let app = App::new(wgpu::Limits::default());
    // 2^32 pairs, over one page again and again.
    let page_ids = vec![0; 1 << 12];
    let batch = Batch { q_indptr: &[0, 1 << 16], page_indptr: &[0, 1 << 12], page_ids: &page_ids, kv_len: &[1 << 16] };
    assert_eq!(app.attention.plan(&batch).unwrap().capacity().score_pairs, 1 << 32);
    let config = *app.attention.config();
    let (device, _, info) = device(wgpu::Limits::default());
    let with = |extras| {
        let config = AttentionConfig { extras, ..config };
        pollster::block_on(Attention::new(&device, &info, &config)).unwrap()
    };
    let bias = |per_head| Extras { bias: Some(Bias { dtype: Dtype::F16, per_head }), ..Extras::NONE };
    let half = Batch { q_indptr: &[0, 1 << 15], ..batch };
    assert!(with(bias(false)).plan(&half).is_ok());
    // Four heads with a bias each.
    for (per_head, batch) in [(false, &batch), (true, &half)] {
        assert!(matches!(with(bias(per_head)).plan(batch), Err(PlanError::TooMany { .. })));
    }
    // Capacities add up until nothing can be bound.
    let attention = with(bias(false));
    let plan = with_mixed_batch(|batch| attention.plan(batch)).unwrap();
    let capacity = PlanCapacity { score_pairs: u64::MAX, ..plan.capacity() };
    let plan = DevicePlan::with_capacity(&device, &attention, &capacity).unwrap();
    let io = AttentionIo { bias: Some(app.buffers[0].as_entire_buffer_binding()), ..app.io() };
    match attention.bind(&device, &plan, io, &app.workspace) {
        Err(BindError::TooLarge { needed, .. }) => assert_eq!(needed, u64::MAX),
        other => panic!("{other:?}"),
    }
}

/// A plan that takes another's place on the device: what does not fit is refused with both numbers, and nothing changes.
#[test]
fn plans_that_cannot_be_written() {
    let app = App::new(wgpu::Limits { max_compute_workgroups_per_dimension: 3, ..wgpu::Limits::default() });
    let groups: Vec<u32> = app.plan.workgroups().iter().map(|(_, groups)| *groups).collect();
    let empty = Batch { q_indptr: &[0], page_indptr: &[0], page_ids: &[], kv_len: &[] };
    let mut belt = wgpu::util::StagingBelt::new(app.device.clone(), 1 << 16);
    let mut encoder = app.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let capacity = app.plan.capacity();
    let room = |capacity: PlanCapacity| DevicePlan::with_capacity(&app.device, &app.attention, &capacity).unwrap();
    let short = |what, found, needed| Err(WriteError::Capacity { what, found, needed });
    for (less, expected) in [
        (PlanCapacity { words: capacity.words - 1, ..capacity }, short("words", capacity.words - 1, capacity.words)),
        (PlanCapacity { total_q: 40, ..capacity }, short("query rows", 40, 41)),
        (PlanCapacity { score_pairs: 0, ..capacity }, short("pairs of query row and key", 0, 40 * 40 + 300)),
        (
            PlanCapacity { workspace_bytes: 16, ..capacity },
            short("bytes of partial states", 16, app.plan.workspace_bytes()),
        ),
    ] {
        assert_eq!(room(less).write(&mut belt, &mut encoder, &app.plan), expected);
    }
    // Cut work needs blocks: one for each slice of a kernel that has several.
    let mut cut = app.plan.clone();
    cut.cut(|_| 1);
    let all: u32 = groups.iter().sum();
    let parts = groups.iter().filter(|groups| **groups > 1).sum::<u32>();
    assert_eq!((cut.slices().len() as u32, cut.capacity().blocks), (all, 1 + parts));
    let device_plan = room(capacity);
    assert_eq!(
        device_plan.write(&mut belt, &mut encoder, &cut),
        short("blocks of parameters", 1, u64::from(1 + parts))
    );
    let call = app.attention.bind(&app.device, &device_plan, app.io(), &app.workspace).unwrap();
    assert_eq!((call.slices(), call.workgroups()), (0, 0));
    device_plan.write(&mut belt, &mut encoder, &app.plan).unwrap();
    assert_eq!((call.slices(), call.workgroups()), (3, all));
    device_plan.write(&mut belt, &mut encoder, &app.attention.plan(&empty).unwrap()).unwrap();
    assert_eq!((call.slices(), call.workgroups()), (0, 0));

    // Another pool, and more workgroups than three axes hold.
    let config = *app.attention.config();
    let layout = layout(*config.layout.geometry(), Dtype::F16, 16, PAGE_COUNT + 1);
    let kernels = app.attention.kernels().clone();
    let other = Attention::with_kernels(kernels, &AttentionConfig { layout, ..config }).unwrap();
    let foreign = other.plan(&empty).unwrap();
    assert_eq!(device_plan.write(&mut belt, &mut encoder, &foreign), Err(WriteError::Other));
    let small = App::new(wgpu::Limits { max_compute_workgroups_per_dimension: 1, ..wgpu::Limits::default() });
    let mut cut = small.plan.clone();
    cut.cut(|_| 1);
    let device_plan = DevicePlan::with_capacity(&small.device, &small.attention, &cut.capacity()).unwrap();
    let mut belt = wgpu::util::StagingBelt::new(small.device.clone(), 1 << 16);
    let mut encoder = small.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let (kernel, needed) = small.plan.workgroups().into_iter().find(|(_, groups)| *groups > 1).unwrap();
    assert_eq!(
        device_plan.write(&mut belt, &mut encoder, &small.plan),
        Err(WriteError::TooManyWorkgroups { kernel: kernel.entry_point(), needed, axis_max: 1 })
    );
    device_plan.write(&mut belt, &mut encoder, &cut).unwrap();
    let call = small.attention.bind(&small.device, &device_plan, small.io(), &small.workspace).unwrap();
    call.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    belt.finish();
    small.queue.submit([encoder.finish()]);
}
