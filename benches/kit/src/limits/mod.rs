//! What the adapter can do at most through wgpu: multiply-adds, reading, and how long an empty dispatch takes.

use crate::error::BenchError;
use crate::gpu::{Gpu, best, dispatch, median};

/// Multiply-adds of f32 that one workgroup of `fma.wgsl` does: lanes, iterations, steps, chains, components.
const FMA_PER_GROUP: u32 = 64 * 256 * 8 * 3 * 4;

/// Workgroups on an axis that WebGPU guarantees.
const GROUPS_MAX: u32 = 65_535;

/// Multiply-adds in registers.
#[derive(Debug)]
pub struct FmaRate {
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
    groups: u32,
}

impl FmaRate {
    /// Chooses a grid that takes some `target` seconds.
    ///
    /// # Errors
    /// [`BenchError::Device`], also where the kernel computes something else.
    pub fn new(gpu: &Gpu, target: f64) -> Result<Self, BenchError> {
        const FMA_GROUPS_MAX: u32 = 1 << 15;
        let pipeline = gpu.pipeline("fma_rate", include_str!("fma.wgsl").to_owned());
        let sink = gpu.zeros("sink", 4 * u64::from(FMA_GROUPS_MAX));
        let mut rate = Self { bind_group: gpu.bind(&pipeline, &[&sink]), pipeline, groups: 64 };
        rate.gflops(gpu)?;
        while rate.groups < FMA_GROUPS_MAX && rate.seconds(gpu)? < 0.8 * target {
            rate.groups *= 2;
        }
        // Each chain tends to c / (1 - b) = 1.
        let sums = gpu.read::<f32>(&sink)?;
        match sums.get(4 * rate.groups as usize - 1) {
            Some(sum) if (sum - 3.0).abs() < 1e-3 => Ok(rate),
            sum => Err(BenchError::Device(format!("fma.wgsl returned {sum:?}; 3 is right"))),
        }
    }

    fn seconds(&self, gpu: &Gpu) -> Result<f64, BenchError> {
        gpu.seconds(&|encoder| dispatch(encoder, &self.pipeline, &self.bind_group, [self.groups, 1, 1]), 1)
    }

    /// One measurement, in 10^9 operations per second; a multiply-add is two.
    ///
    /// # Errors
    /// [`BenchError::Device`].
    pub fn gflops(&self, gpu: &Gpu) -> Result<f64, BenchError> {
        Ok(2e-9 * f64::from(self.groups) * f64::from(FMA_PER_GROUP) / self.seconds(gpu)?)
    }
}

/// Reading a buffer of a given size once, in the ways that turned out to be the fastest.
#[derive(Debug)]
pub struct ReadRate {
    patterns: Vec<ReadPattern>,
}

/// The invocations laid over the buffer in one way.
#[derive(Debug)]
struct ReadPattern {
    name: String,
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
    groups: u32,
    bytes: f64,
    repeats: u32,
}

impl ReadPattern {
    fn seconds(&self, gpu: &Gpu, repeats: u32) -> Result<f64, BenchError> {
        let record = |encoder: &mut wgpu::CommandEncoder| {
            dispatch(encoder, &self.pipeline, &self.bind_group, [self.groups, 1, 1]);
        };
        Ok(gpu.seconds(&record, repeats)? / f64::from(repeats))
    }
}

impl ReadRate {
    /// Tries all ways on `bytes` bytes and keeps the best three.
    ///
    /// # Errors
    /// [`BenchError::Device`], also where not every byte is read once.
    pub fn new(gpu: &Gpu, bytes: f64, target: f64) -> Result<Self, BenchError> {
        const KEPT: usize = 3;
        const VECS_MIN: u32 = 128;
        // As much as a binding holds: a layout that asks for more is refused elsewhere.
        let total_vecs = ((bytes as u64).min(gpu.binding_bytes_max()) / 16).max(VECS_MIN.into()) as u32;
        let data = gpu.upload("data", &vec![1.0f32; 4 * total_vecs as usize]);
        let mut tried = Vec::new();
        for (what, lanes, pattern) in [
            ("interleaved over the grid", 64, 0),
            ("a contiguous row per invocation", 64, 1),
            ("a contiguous block per workgroup of 64", 64, 2),
            ("a contiguous block per workgroup of 8", 8, 2),
        ] {
            // Few long invocations, as a CPU likes them, and many short ones, as a GPU does.
            for (length, vecs_wanted) in [("long", 896), ("short", 32)] {
                let groups_wanted = (total_vecs / (lanes * vecs_wanted)).max(64).min(total_vecs / (lanes * 2)).max(1);
                let groups = groups_wanted.min(GROUPS_MAX);
                let vecs = total_vecs / (lanes * groups) / 2 * 2;
                let source = format!(
                    "const LANES: u32 = {lanes}u;\nconst GROUPS: u32 = {groups}u;\nconst VECS: u32 = {vecs}u;\n\
                     const PATTERN: u32 = {pattern}u;\n{}",
                    include_str!("read.wgsl")
                );
                let pipeline = gpu.pipeline("read_rate", source);
                let sink = gpu.zeros("sink", u64::from(4 * groups * lanes));
                let mut pattern = ReadPattern {
                    name: format!("{what}, {length}"),
                    bind_group: gpu.bind(&pipeline, &[&data, &sink]),
                    pipeline,
                    groups,
                    bytes: 16.0 * f64::from(groups) * f64::from(lanes) * f64::from(vecs),
                    repeats: 1,
                };
                let mut times = Vec::new();
                for _ in 0..3 {
                    times.push(pattern.seconds(gpu, 1)?);
                }
                if gpu.read::<f32>(&sink)?.iter().any(|sum| *sum != vecs as f32) {
                    return Err(BenchError::Device(format!("read.wgsl did not read every word once ({what})")));
                }
                let seconds = best(&times);
                pattern.repeats = ((target / seconds) as u32).clamp(1, 1000);
                tried.push((pattern.bytes / seconds, pattern));
            }
        }
        tried.sort_by(|a, b| b.0.total_cmp(&a.0));
        tried.truncate(KEPT);
        Ok(Self { patterns: tried.into_iter().map(|(_, pattern)| pattern).collect() })
    }

    /// One measurement in 10^9 bytes per second: the best of the ways, and which it was.
    ///
    /// # Errors
    /// [`BenchError::Device`].
    pub fn gbps(&self, gpu: &Gpu) -> Result<(f64, &str), BenchError> {
        let mut highest = (0.0, "");
        for pattern in &self.patterns {
            let rate = 1e-9 * pattern.bytes / pattern.seconds(gpu, pattern.repeats)?;
            if rate > highest.0 {
                highest = (rate, pattern.name.as_str());
            }
        }
        Ok(highest)
    }
}

/// One almost empty dispatch.
#[derive(Debug)]
pub struct Latency {
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
}

impl Latency {
    /// Compiles it.
    ///
    /// # Errors
    /// [`BenchError::Device`].
    pub fn new(gpu: &Gpu) -> Result<Self, BenchError> {
        let source = "@group(0) @binding(0) var<storage, read_write> sink: array<u32>;\n\
                      @compute @workgroup_size(1) fn nothing() { sink[0] = 1u; }";
        let pipeline = gpu.pipeline("nothing", source.to_owned());
        let latency = Self { bind_group: gpu.bind(&pipeline, &[&gpu.zeros("sink", 1)]), pipeline };
        latency.dispatch_us(gpu, 1)?;
        Ok(latency)
    }

    /// Microseconds of one of `repeats` dispatches in a submit, waiting for it included; the median of some.
    ///
    /// # Errors
    /// [`BenchError::Device`].
    pub fn dispatch_us(&self, gpu: &Gpu, repeats: u32) -> Result<f64, BenchError> {
        let record = |encoder: &mut wgpu::CommandEncoder| {
            dispatch(encoder, &self.pipeline, &self.bind_group, [1, 1, 1]);
        };
        let mut times = Vec::new();
        for _ in 0..15 {
            times.push(1e6 * gpu.seconds(&record, repeats)? / f64::from(repeats));
        }
        Ok(median(&times))
    }
}
