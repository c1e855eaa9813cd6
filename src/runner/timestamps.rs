//! Time on the device, where it has timestamps.

/// Two timestamps, around all attention passes.
pub(super) struct Queries {
    set: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    readback: wgpu::Buffer,
}

impl Queries {
    pub(super) fn new(device: &wgpu::Device) -> Option<Self> {
        device.features().contains(wgpu::Features::TIMESTAMP_QUERY).then(|| {
            let buffer = |usage| {
                device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some("timestamps"),
                    size: 16,
                    usage,
                    mapped_at_creation: false,
                })
            };
            Self {
                set: device.create_query_set(&wgpu::QuerySetDescriptor {
                    label: Some("timestamps"),
                    ty: wgpu::QueryType::Timestamp,
                    count: 2,
                }),
                resolved: buffer(wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC),
                readback: buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST),
            }
        })
    }

    /// What the first pass writes at its beginning, and the last one at its end.
    pub(super) fn writes(&self, is_first: bool, is_last: bool) -> Option<wgpu::ComputePassTimestampWrites<'_>> {
        (is_first || is_last).then_some(wgpu::ComputePassTimestampWrites {
            query_set: &self.set,
            beginning_of_pass_write_index: is_first.then_some(0),
            end_of_pass_write_index: is_last.then_some(1),
        })
    }

    pub(super) fn resolve(self, encoder: &mut wgpu::CommandEncoder) -> wgpu::Buffer {
        encoder.resolve_query_set(&self.set, 0..2, &self.resolved, 0);
        encoder.copy_buffer_to_buffer(&self.resolved, 0, &self.readback, 0, 16);
        self.readback
    }
}

pub(super) fn elapsed_ms(bytes: &[u8], period_ns: f32) -> Option<f64> {
    let mut ticks = bytes.chunks_exact(8).filter_map(|tick| tick.try_into().ok()).map(u64::from_le_bytes);
    let (begin, end) = (ticks.next()?, ticks.next()?);
    Some(end.checked_sub(begin)? as f64 * f64::from(period_ns) * 1e-6)
}
