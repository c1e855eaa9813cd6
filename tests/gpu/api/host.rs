//! The application: it owns the device, and knows what lies in every byte of its buffers.

use std::sync::{Mutex, OnceLock, PoisonError};

use paged_attention::kernels::Kernels;
use paged_attention::{
    Attention, AttentionConfig, AttentionIo, Batch, Case, Dtype, Extras, KvLayout, KvSource, Status, Tensor, Workspace,
    padded_dim, wgpu,
};

use crate::common::{Gpu, gpu};

/// A device with the limits that an application gets where it asks for nothing.
pub struct Host {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    gpu: &'static Gpu,
    kernels: Mutex<Vec<Kernels>>,
}

/// The device that the tests of this module share. wgpu's own handler turns an error that nobody asked for into a
/// panic, so recording that is not valid fails the test.
pub fn host() -> Option<&'static Host> {
    static HOST: OnceLock<Host> = OnceLock::new();
    let gpu = gpu()?;
    Some(HOST.get_or_init(|| Host::open(gpu, wgpu::Limits::default())))
}

impl Host {
    pub fn open(gpu: &'static Gpu, limits: wgpu::Limits) -> Self {
        let adapter = gpu.adapter();
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("application"),
            required_features: adapter.features() & wgpu::Features::SUBGROUP,
            required_limits: limits.or_worse_values_from(&adapter.limits()),
            ..wgpu::DeviceDescriptor::default()
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).unwrap();
        Self { device, queue, gpu, kernels: Mutex::default() }
    }

    /// Attention for a configuration; each pipeline is made once.
    pub fn attention(&self, config: &AttentionConfig) -> Attention {
        let geometry = config.layout.geometry();
        let wanted = config.kernels(self.gpu.variants(|base| config.kernels(base), geometry).unwrap());
        let mut made = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let known = made.iter().find(|kernels| kernels.config().pipeline_key() == wanted.pipeline_key()).cloned();
        let kernels = known.unwrap_or_else(|| {
            let kernels = pollster::block_on(Kernels::new(&self.device, &wanted)).unwrap();
            made.push(kernels.clone());
            kernels
        });
        Attention::with_kernels(kernels, config).unwrap()
    }

    /// A buffer with contents.
    pub fn buffer(&self, contents: &[u8]) -> wgpu::Buffer {
        let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: contents.len() as u64,
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: true,
        });
        buffer.slice(..).get_mapped_range_mut().unwrap().copy_from_slice(contents);
        buffer.unmap();
        buffer
    }

    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default())
    }

    /// Records into one pass and submits it.
    pub fn submit(&self, record: impl FnOnce(&mut wgpu::ComputePass<'_>)) {
        let mut encoder = self.encoder();
        record(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
        self.queue.submit([encoder.finish()]);
    }

    /// All bytes of a buffer, after what was submitted before.
    pub fn read(&self, buffer: &wgpu::Buffer) -> Vec<u8> {
        let readback = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: buffer.size(),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = self.encoder();
        encoder.copy_buffer_to_buffer(buffer, 0, &readback, 0, buffer.size());
        self.queue.submit([encoder.finish()]);
        readback.map_async(wgpu::MapMode::Read, .., |mapped| mapped.unwrap());
        self.device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
        let mapped = readback.slice(..).get_mapped_range().unwrap();
        mapped.to_vec()
    }

    pub fn status(&self, workspace: &Workspace) -> Status {
        let bytes = self.read(workspace.status());
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        Status::from_words([word(0), word(4)])
    }
}

/// What surrounds a range that a call is bound to.
const GUARD: u8 = 0xa5;
/// What an output holds before a call: NaN in every type.
pub const UNWRITTEN: u8 = 0xff;

/// A range of a larger buffer.
pub struct Guarded {
    pub buffer: wgpu::Buffer,
    offset: u64,
    bytes: u64,
}

impl Guarded {
    /// `contents` at the smallest offset that is not zero, with guards on both sides.
    pub fn new(host: &Host, contents: &[u8]) -> Self {
        let offset = u64::from(host.device.limits().min_storage_buffer_offset_alignment);
        // A call over no rows still binds one vector.
        let bytes = contents.len().max(16);
        let mut all = vec![GUARD; offset as usize + bytes + 80];
        all[offset as usize..][..contents.len()].copy_from_slice(contents);
        Self { buffer: host.buffer(&all), offset, bytes: bytes as u64 }
    }

    pub fn unwritten(host: &Host, bytes: u64) -> Self {
        Self::new(host, &vec![UNWRITTEN; bytes as usize])
    }

    pub fn binding(&self) -> wgpu::BufferBinding<'_> {
        wgpu::BufferBinding { buffer: &self.buffer, offset: self.offset, size: wgpu::BufferSize::new(self.bytes) }
    }

    /// The range's bytes.
    ///
    /// # Panics
    /// Where a guard was written to.
    pub fn read(&self, host: &Host, what: &str) -> Vec<u8> {
        let all = host.read(&self.buffer);
        let (before, rest) = all.split_at(self.offset as usize);
        let (inside, after) = rest.split_at(self.bytes as usize);
        for (side, guard) in [("before", before), ("after", after)] {
            let written = guard.iter().position(|byte| *byte != GUARD);
            assert_eq!(written, None, "{what}: a byte {side} the range was written");
        }
        inside.to_vec()
    }
}

/// A paged case in the application's buffers: one layer.
pub struct Layer<'a> {
    case: &'a Case,
    pub config: AttentionConfig,
    q_bytes: Vec<u8>,
    kv_bytes: Vec<u8>,
    q: Guarded,
    kv: Guarded,
    out: Guarded,
    lse: Guarded,
}

/// The page table of a paged case.
pub fn batch(case: &Case) -> Batch<'_> {
    let KvSource::Paged { page_indptr, page_ids, kv_len, .. } = case.kv() else {
        panic!("a paged case is needed");
    };
    Batch { q_indptr: case.q_indptr(), page_indptr, page_ids, kv_len }
}

impl<'a> Layer<'a> {
    pub fn new(host: &Host, case: &'a Case, out: Dtype) -> Self {
        let KvSource::Paged { k_pages, v_pages, .. } = case.kv() else {
            panic!("a paged case is needed");
        };
        let geometry = *case.geometry();
        let layout =
            KvLayout::new(geometry, k_pages.dtype(), case.page_size().unwrap(), k_pages.shape()[0] as u32).unwrap();
        let config = AttentionConfig {
            q: case.q().dtype(),
            out,
            layout,
            new_rows: k_pages.dtype().into(),
            options: *case.options(),
            extras: Extras::NONE,
        };
        let q_bytes = padded_rows(case.q(), geometry.head_dim());
        let kv_bytes = pool_bytes(&layout, k_pages, v_pages);
        let rows = u64::from(batch(case).total_q()) * u64::from(geometry.q_heads());
        Self {
            case,
            config,
            q: Guarded::new(host, &q_bytes),
            kv: Guarded::new(host, &kv_bytes),
            out: Guarded::unwritten(host, rows * u64::from(out.row_words(geometry.v_head_dim())) * 4),
            lse: Guarded::unwritten(host, rows * 4),
            q_bytes,
            kv_bytes,
        }
    }

    pub fn io(&self) -> AttentionIo<'_> {
        AttentionIo {
            q: self.q.binding(),
            kv: vec![self.kv.binding()],
            out: self.out.binding(),
            lse: self.lse.binding(),
            heads: None,
            bias: None,
        }
    }

    /// Output and log-sum-exp.
    ///
    /// # Panics
    /// Where anything else was written to.
    pub fn results(&self, host: &Host) -> [Vec<f32>; 2] {
        let unchanged = |what, range: &Guarded, expected: &[u8]| {
            let found = range.read(host, what);
            assert!(found[..expected.len()] == *expected, "{what} is an input and has changed");
        };
        unchanged("q", &self.q, &self.q_bytes);
        unchanged("kv", &self.kv, &self.kv_bytes);
        let rows = self.case.q().shape()[0] * self.config.layout.geometry().q_heads() as usize;
        let mut lse = self.lse.read(host, "lse");
        lse.truncate(rows * 4);
        let mut out = self.out.read(host, "out");
        let dim = self.config.layout.geometry().v_head_dim();
        out.truncate(rows * self.config.out.row_words(dim) as usize * 4);
        [owned(self.config.out, &out, dim), owned(Dtype::F32, &lse, 1)]
    }

    /// Whether out and log-sum-exp are as they were before any call.
    pub fn is_untouched(&self, host: &Host) -> bool {
        [&self.out, &self.lse].iter().all(|range| range.read(host, "results").iter().all(|byte| *byte == UNWRITTEN))
    }
}

/// Rows of a tensor as the device wants them. The padding is unowned, so it is NaN.
pub fn padded_rows(tensor: &Tensor, dim: u32) -> Vec<u8> {
    let [row, place] = [dim, padded_dim(dim)].map(|dim| (dim * tensor.dtype().bytes()) as usize);
    tensor
        .bytes()
        .chunks_exact(row)
        .flat_map(|bytes| bytes.iter().copied().chain(std::iter::repeat_n(UNWRITTEN, place - row)))
        .collect()
}

/// The elements of padded rows.
pub fn owned(dtype: Dtype, rows: &[u8], dim: u32) -> Vec<f32> {
    let row = (dim * dtype.bytes()) as usize;
    // Single words, as of log-sum-exp, are not padded.
    let place = if dim == 1 && dtype == Dtype::F32 { row } else { (padded_dim(dim) * dtype.bytes()) as usize };
    let packed: Vec<u8> = rows.chunks_exact(place).flat_map(|bytes| bytes[..row].iter().copied()).collect();
    Tensor::from_bytes(dtype, &[packed.len() / dtype.bytes() as usize], packed).unwrap().to_f32()
}

/// `[page, slot, head, dim]` tensors in the order of the pool.
pub fn pool_bytes(layout: &KvLayout, k_pages: &Tensor, v_pages: &Tensor) -> Vec<u8> {
    let mut pool = vec![UNWRITTEN; layout.bytes() as usize];
    let geometry = layout.geometry();
    let (kv_heads, page_size) = (geometry.kv_heads(), layout.page_size().get());
    for (tensor, rows, dim) in
        [(k_pages, layout.k_rows(), geometry.head_dim()), (v_pages, layout.v_rows(), geometry.v_head_dim())]
    {
        let row_bytes = (dim * tensor.dtype().bytes()) as usize;
        for (row, bytes) in (0..).zip(tensor.bytes().chunks_exact(row_bytes)) {
            let (token, kv_head) = (row / kv_heads, row % kv_heads);
            let start = 16 * rows.offset(token / page_size, kv_head, token % page_size) as usize;
            pool[start..start + row_bytes].copy_from_slice(bytes);
        }
    }
    pool
}
