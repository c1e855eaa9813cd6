//! What the adapter can do at most through wgpu: multiply-adds, reading, and how long an empty dispatch takes.

use crate::gpu::{Gpu, dispatch, median};

/// Multiply-adds of f32 that one workgroup of `fma.wgsl` does: lanes, iterations, steps, chains, components.
const FMA_PER_GROUP: u32 = 64 * 256 * 8 * 3 * 4;

/// Size of the buffer that is read: larger than a CPU's caches, smaller than the default binding limit.
const READ_BYTES: u32 = 112 << 20;

/// Multiply-adds in registers.
pub struct FmaRate {
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
    groups: u32,
}

impl FmaRate {
    /// Chooses a grid that takes some 50 ms.
    pub fn new(gpu: &Gpu) -> Self {
        const GROUPS_MAX: u32 = 1 << 15;
        let pipeline = gpu.pipeline("fma_rate", include_str!("fma.wgsl").to_owned());
        let sink = gpu.zeros("sink", 4 * u64::from(GROUPS_MAX));
        let mut rate = Self { bind_group: gpu.bind(&pipeline, &[&sink]), pipeline, groups: 64 };
        rate.gflops(gpu);
        while rate.groups < GROUPS_MAX && rate.seconds(gpu) < 0.04 {
            rate.groups *= 2;
        }
        // Each chain tends to c / (1 - b) = 1.
        let last = gpu.read(&sink)[4 * rate.groups as usize - 1];
        assert!((last - 3.0).abs() < 1e-3, "fma.wgsl returned {last}");
        rate
    }

    fn seconds(&self, gpu: &Gpu) -> f64 {
        gpu.seconds(&|encoder| dispatch(encoder, &self.pipeline, &self.bind_group, [self.groups, 1, 1]), 1)
    }

    /// One measurement, in 10^9 operations per second; a multiply-add is two.
    pub fn gflops(&self, gpu: &Gpu) -> f64 {
        2e-9 * f64::from(self.groups) * f64::from(FMA_PER_GROUP) / self.seconds(gpu)
    }
}

/// Reading rates in 10^9 bytes per second, with the invocations laid over the buffer in several ways; medians.
pub fn read_rates(gpu: &Gpu, rounds: usize) -> Vec<(&'static str, f64)> {
    let total_vecs = READ_BYTES / 16;
    let ones = vec![1.0f32; READ_BYTES as usize / 4];
    let data = gpu.upload("data", &ones);
    [
        ("interleaved over the grid", 64, 0, 896),
        ("a contiguous row per invocation", 64, 1, 896),
        ("a contiguous block per workgroup of 64", 64, 2, 896),
        ("a contiguous block per workgroup of 8", 8, 2, 896),
    ]
    .map(|(name, lanes, pattern, vecs)| {
        let groups = total_vecs / lanes / vecs;
        assert_eq!(groups * lanes * vecs, total_vecs, "the grid covers the buffer");
        let source = format!(
            "const LANES: u32 = {lanes}u;\nconst GROUPS: u32 = {groups}u;\nconst VECS: u32 = {vecs}u;\n\
             const PATTERN: u32 = {pattern}u;\n{}",
            include_str!("read.wgsl")
        );
        let pipeline = gpu.pipeline("read_rate", source);
        let sink = gpu.zeros("sink", u64::from(4 * groups * lanes));
        let bind_group = gpu.bind(&pipeline, &[&data, &sink]);
        let record = |encoder: &mut wgpu::CommandEncoder| dispatch(encoder, &pipeline, &bind_group, [groups, 1, 1]);
        gpu.seconds(&record, 1);
        assert!(gpu.read(&sink).iter().all(|sum| *sum == vecs as f32), "every vec4 is read once");
        let rates: Vec<_> = (0..rounds).map(|_| 1e-9 * f64::from(READ_BYTES) / gpu.seconds(&record, 1)).collect();
        (name, median(&rates))
    })
    .to_vec()
}

/// Microseconds of one almost empty dispatch: with its own submit and wait, and as one of many in a submit.
pub fn dispatch_us(gpu: &Gpu) -> (f64, f64) {
    const MANY: u32 = 100;
    let source = "@group(0) @binding(0) var<storage, read_write> sink: array<u32>;\n\
                  @compute @workgroup_size(1) fn nothing() { sink[0] = 1u; }";
    let pipeline = gpu.pipeline("nothing", source.to_owned());
    let bind_group = gpu.bind(&pipeline, &[&gpu.zeros("sink", 1)]);
    let record = |encoder: &mut wgpu::CommandEncoder| dispatch(encoder, &pipeline, &bind_group, [1, 1, 1]);
    let measure = |repeats: u32| {
        let times: Vec<_> = (0..30).map(|_| 1e6 * gpu.seconds(&record, repeats) / f64::from(repeats)).collect();
        median(&times)
    };
    measure(1);
    (measure(1), measure(MANY))
}
