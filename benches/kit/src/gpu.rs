//! A device to measure on, and the few calls that every contender needs.

use std::time::Instant;

use paged_attention::{RunError, Runner, adapter};
use wgpu::util::DeviceExt;

use crate::error::BenchError;

/// Records the work of one call into an encoder.
pub type Record<'a> = &'a dyn Fn(&mut wgpu::CommandEncoder);

/// An adapter with a runner on it.
#[derive(Debug)]
pub struct Gpu {
    /// Owns device and queue, and chooses kernels.
    pub runner: Runner,
}

impl Gpu {
    /// Opens the adapter that is asked for, or the best. Obeys `WGPU_BACKEND` and wgpu's other variables.
    ///
    /// # Errors
    /// [`BenchError::Adapter`], [`BenchError::Run`].
    pub fn open(wanted: Option<&str>) -> Result<Self, BenchError> {
        let adapter = pollster::block_on(adapter::discover(wanted))?;
        let runner = Runner::new(&adapter)
            .map_err(|error| BenchError::Run { name: adapter::describe(&adapter.get_info()), error })?;
        Ok(Self { runner })
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        self.runner.device()
    }

    /// The largest storage binding, in bytes.
    pub fn binding_bytes_max(&self) -> u64 {
        let limits = self.device().limits();
        limits.max_storage_buffer_binding_size.min(limits.max_buffer_size)
    }

    /// A pipeline with the layout that its shader implies.
    pub fn pipeline(&self, entry_point: &str, source: String) -> wgpu::ComputePipeline {
        let module = self.device().create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(entry_point),
            source: wgpu::ShaderSource::Wgsl(source.into()),
        });
        self.device().create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(entry_point),
            layout: None,
            module: &module,
            entry_point: Some(entry_point),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Every word of the kernels here is written before it is read.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        })
    }

    /// Bind group 0 of `pipeline`, with the buffers at bindings 0, 1, and so on.
    pub fn bind(&self, pipeline: &wgpu::ComputePipeline, buffers: &[&wgpu::Buffer]) -> wgpu::BindGroup {
        let entries: Vec<_> = (0..)
            .zip(buffers)
            .map(|(binding, buffer)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        self.device().create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &entries,
        })
    }

    /// A storage buffer that holds `words`.
    pub fn upload<T: bytemuck::NoUninit>(&self, label: &str, words: &[T]) -> wgpu::Buffer {
        self.device().create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: Some(label),
            contents: bytemuck::cast_slice(words),
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC,
        })
    }

    /// A storage buffer of `count` f32 zeros.
    pub fn zeros(&self, label: &str, count: u64) -> wgpu::Buffer {
        self.device().create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: 4 * count.max(1),
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        })
    }

    /// Waits for all work and reads a whole buffer of 32-bit words.
    ///
    /// # Errors
    /// [`BenchError::Device`].
    pub fn read<T: bytemuck::Pod>(&self, buffer: &wgpu::Buffer) -> Result<Vec<T>, BenchError> {
        let staging = self.device().create_buffer(&wgpu::BufferDescriptor {
            label: Some("read"),
            size: buffer.size(),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = self.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, buffer.size());
        self.runner.queue().submit([encoder.finish()]);
        // Whether it could be mapped shows below.
        staging.map_async(wgpu::MapMode::Read, .., |_| {});
        self.wait()?;
        let view = staging.get_mapped_range(..).map_err(|error| BenchError::Device(error.to_string()))?;
        Ok(bytemuck::pod_collect_to_vec(&view))
    }

    /// Waits for all submitted work.
    ///
    /// # Errors
    /// [`BenchError::Device`].
    pub fn wait(&self) -> Result<(), BenchError> {
        match self.device().poll(wgpu::PollType::wait_indefinitely()) {
            Ok(_) => Ok(()),
            Err(error) => Err(BenchError::Device(error.to_string())),
        }
    }

    /// Seconds from recording `repeats` calls to the end of their execution, one submit for all.
    ///
    /// # Errors
    /// [`BenchError::Device`].
    pub fn seconds(&self, record: Record<'_>, repeats: u32) -> Result<f64, BenchError> {
        self.wait()?;
        let start = Instant::now();
        let mut encoder = self.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for _ in 0..repeats {
            record(&mut encoder);
        }
        self.runner.queue().submit([encoder.finish()]);
        self.wait()?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// How often to repeat a call so that one timing takes some `target` seconds: the submit's own cost then weighs
    /// little. Runs it twice, since the first run may compile.
    ///
    /// # Errors
    /// [`BenchError::Device`].
    pub fn repeats(&self, record: Record<'_>, target: f64) -> Result<u32, BenchError> {
        self.seconds(record, 1)?;
        Ok(((target / self.seconds(record, 1)?) as u32).clamp(1, 1000))
    }
}

/// Names the shape in an error of the crate.
pub(crate) fn of_shape<E: Into<RunError>>(name: &str) -> impl Fn(E) -> BenchError + '_ {
    move |error| BenchError::Run { name: name.to_owned(), error: error.into() }
}

/// Records one dispatch in a pass of its own.
pub fn dispatch(
    encoder: &mut wgpu::CommandEncoder,
    pipeline: &wgpu::ComputePipeline,
    bind_group: &wgpu::BindGroup,
    [x, y, z]: [u32; 3],
) {
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
    pass.set_pipeline(pipeline);
    pass.set_bind_group(0, bind_group, &[]);
    pass.dispatch_workgroups(x, y, z);
}

/// The middle value; of an even number the upper one of the two in the middle; NaN of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The least of some times; infinity of none.
pub fn best(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(f64::INFINITY, f64::min)
}
