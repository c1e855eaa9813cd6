//! A device to measure on, and the few calls that every contender needs. Panics on a failure: a bench has no caller.

use std::time::Instant;

use paged_attention::adapter;
use wgpu::util::DeviceExt;

/// Records the work of one call into an encoder.
pub type Record<'a> = &'a dyn Fn(&mut wgpu::CommandEncoder);

/// An adapter and the device opened on it.
pub struct Gpu {
    pub adapter: wgpu::Adapter,
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
}

impl Gpu {
    /// Opens the best adapter, or the one that `PAGED_ATTENTION_ADAPTER` names.
    pub fn open() -> Self {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        let wanted = std::env::var("PAGED_ATTENTION_ADAPTER").ok();
        let adapter = pollster::block_on(adapter::find(&instance, wanted.as_deref()))
            .unwrap_or_else(|error| panic!("{error}; ci/setup installs a software one"));
        let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
            required_features: adapter.features() & wgpu::Features::SUBGROUP,
            // A score matrix may exceed the default 128 MiB; a fused kernel needs no such thing.
            required_limits: adapter.limits(),
            ..Default::default()
        }))
        .expect("the adapter gives a device");
        Self { adapter, device, queue }
    }

    /// A pipeline with the layout that its shader implies.
    pub fn pipeline(&self, entry_point: &str, source: String) -> wgpu::ComputePipeline {
        let module = self.device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(entry_point),
            source: wgpu::ShaderSource::Wgsl(source.into()),
        });
        self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
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
        self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &entries,
        })
    }

    /// A storage buffer that holds `words`.
    pub fn upload<T: bytemuck::NoUninit>(&self, label: &str, words: &[T]) -> wgpu::Buffer {
        self.device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: Some(label),
            contents: bytemuck::cast_slice(words),
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC,
        })
    }

    /// A storage buffer of `count` f32 zeros.
    pub fn zeros(&self, label: &str, count: u64) -> wgpu::Buffer {
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: 4 * count.max(1),
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        })
    }

    /// Waits for all work and reads a whole buffer.
    pub fn read(&self, buffer: &wgpu::Buffer) -> Vec<f32> {
        let staging = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("read"),
            size: buffer.size(),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, buffer.size());
        self.queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, .., |result| result.expect("the buffer can be mapped"));
        self.wait();
        let view = staging.get_mapped_range(..).expect("the buffer is mapped");
        bytemuck::pod_collect_to_vec(&view)
    }

    /// Waits for all submitted work.
    pub fn wait(&self) {
        self.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device answers");
    }

    /// Seconds from recording `repeats` calls to the end of their execution, one submit for all.
    pub fn seconds(&self, record: Record<'_>, repeats: u32) -> f64 {
        self.wait();
        let start = Instant::now();
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for _ in 0..repeats {
            record(&mut encoder);
        }
        self.queue.submit([encoder.finish()]);
        self.wait();
        start.elapsed().as_secs_f64()
    }
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

/// The middle value; of an even number the upper one of the two in the middle.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
