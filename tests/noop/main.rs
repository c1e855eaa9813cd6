//! What shows without any adapter: wgpu's `noop` backend checks layouts, limits and recording, and computes nothing.
// The short forms are allowed in test functions only; here the helpers belong to them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod bind;
mod build;
mod plans;
mod pools;

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
