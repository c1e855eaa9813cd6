//! Ten thousand steps of a tiny model: nothing is made after the first ones, and memory stays as it is. A process of its
//! own, so that no other test's memory is counted.
// The short forms are allowed in test functions only; here the helpers belong to them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::io::Write as _;
use std::time::Instant;

use paged_attention::{
    Append, AppendCall, AppendPlan, AppendSource, Attention, AttentionConfig, AttentionIo, AttentionOptions, Batch,
    BatchBuilder, BlockPool, BlockTable, Call, DevicePlan, Dtype, Extras, HeadGeometry, KvLayout, PageSize,
    PlanCapacity, PoolConfig, STATUS_BYTES, Status, StepMax, Workspace, WriteError, adapter, wgpu,
};
use wgpu::util::StagingBelt;

const STEPS: u32 = 10_000;
/// Steps until everything that is needed has been made.
const WARM_UP: u32 = 500;
const LAYERS: usize = 2;
/// Tokens at which a sequence ends and another takes its place, with a prompt of `PROMPT` tokens.
const ENDS: [u32; 3] = [61, 300, 613];
const PROMPT: u32 = 20;
const HEADS: [u32; 2] = [4, 2];
const DIM: u32 = 8;

/// Query rows of a step: at most all sequences begin at once.
const ROWS_MAX: u32 = ENDS.len() as u32 * PROMPT;

struct Model {
    device: wgpu::Device,
    queue: wgpu::Queue,
    attention: Attention,
    plan: DevicePlan,
    append: Append,
    workspace: Workspace,
    belt: StagingBelt,
    /// Query, key and value rows of a step: one buffer for all layers here.
    rows: [wgpu::Buffer; 3],
    layers: Vec<Layer>,
}

struct Layer {
    kv: wgpu::Buffer,
    out: wgpu::Buffer,
    lse: wgpu::Buffer,
    append: AppendCall,
    call: Call,
}

fn buffer(device: &wgpu::Device, size: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
}

fn noise(index: u32) -> f32 {
    let mut x = index.wrapping_mul(0x9e37_79b9);
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    ((x ^ (x >> 13)) >> 8) as f32 / 8_388_608.0 - 1.0
}

impl Model {
    fn new(adapter: &wgpu::Adapter) -> Self {
        let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor::default())).unwrap();
        let heads = HeadGeometry::new(HEADS[0], HEADS[1], DIM).unwrap();
        let page_size = PageSize::new(16).unwrap();
        let pages_max: Vec<u32> = ENDS.iter().map(|tokens| page_size.pages_for(*tokens)).collect();
        let layout = KvLayout::new(heads, Dtype::F32, page_size, pages_max.iter().sum()).unwrap();
        let config = AttentionConfig {
            q: Dtype::F32,
            out: Dtype::F32,
            layout,
            new_rows: Dtype::F32.into(),
            options: AttentionOptions::new(&heads).with_causal(true),
            extras: Extras::NONE,
        };
        let attention = pollster::block_on(Attention::new(&device, &adapter.get_info(), &config)).unwrap();
        let largest = attention.capacity(&StepMax {
            sequences: ENDS.len() as u32,
            q_len: PROMPT,
            kv_len: ENDS[2],
            total_kv: u64::from(ENDS.iter().sum::<u32>()),
            ..StepMax::default()
        });
        let workspace = Workspace::new(&device, largest.workspace_bytes).unwrap();
        let plan = DevicePlan::with_capacity(&device, &attention, &largest).unwrap();
        let append = Append::with_capacity(&device, &layout, &config.new_rows, largest.total_q).unwrap();
        let belt = StagingBelt::new(device.clone(), 1 << 16);
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
        let row_bytes = |heads: u32| u64::from(ROWS_MAX * heads * DIM * 4);
        let rows = [HEADS[0], HEADS[1], HEADS[1]].map(|heads| buffer(&device, row_bytes(heads), usage));
        let layers = Vec::new();
        let mut model = Self { device, queue, attention, plan, append, workspace, belt, rows, layers };
        for _ in 0..LAYERS {
            let storage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
            let kv = layout.create_buffer(&model.device).unwrap();
            let out = buffer(&model.device, row_bytes(HEADS[0]), storage);
            let lse = buffer(&model.device, u64::from(ROWS_MAX * HEADS[0] * 4), storage);
            let source = AppendSource {
                k: model.rows[1].as_entire_buffer_binding(),
                v: model.rows[2].as_entire_buffer_binding(),
                kv: vec![kv.as_entire_buffer_binding()],
                head_scales: None,
            };
            let kernels = model.attention.kernels();
            let append = model.append.bind(&model.device, kernels, source, &model.workspace).unwrap();
            let call = model.bind(&model.plan, &kv, &out, &lse, &model.workspace);
            model.layers.push(Layer { kv, out, lse, append, call });
        }
        model
    }

    fn bind(
        &self,
        plan: &DevicePlan,
        kv: &wgpu::Buffer,
        out: &wgpu::Buffer,
        lse: &wgpu::Buffer,
        workspace: &Workspace,
    ) -> Call {
        let io = AttentionIo {
            q: self.rows[0].as_entire_buffer_binding(),
            kv: vec![kv.as_entire_buffer_binding()],
            out: out.as_entire_buffer_binding(),
            lse: lse.as_entire_buffer_binding(),
            heads: None,
            bias: None,
        };
        self.attention.bind(&self.device, plan, io, workspace).unwrap()
    }

    /// Records and submits one step, and says how many workgroups it has.
    fn step(&mut self, step: u32, batch: &Batch<'_>) -> u32 {
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for (index, (rows, heads)) in self.rows.iter().zip([HEADS[0], HEADS[1], HEADS[1]]).enumerate() {
            let elements = batch.total_q() * heads * DIM;
            let values: Vec<u8> = (0..elements)
                .flat_map(|at| noise(step.wrapping_mul(7919) ^ (at << 2 | index as u32)).to_le_bytes())
                .collect();
            let size = wgpu::BufferSize::new(values.len() as u64).unwrap();
            self.belt.write_buffer(&mut encoder, rows, 0, size).copy_from_slice(&values);
        }
        let layout = &self.attention.config().layout;
        self.append.write(&mut self.belt, &mut encoder, &AppendPlan::new(layout, batch).unwrap()).unwrap();
        self.plan.write(&mut self.belt, &mut encoder, &self.attention.plan(batch).unwrap()).unwrap();
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            for layer in &self.layers {
                layer.append.encode(&mut pass);
                layer.call.encode(&mut pass);
            }
        }
        self.belt.finish();
        self.queue.submit([encoder.finish()]);
        self.belt.recall();
        let workgroups = self.layers.iter().map(|layer| layer.append.workgroups() + layer.call.workgroups());
        workgroups.fold(0, u32::wrapping_add)
    }

    fn wait(&self) {
        self.device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    }

    fn read(&self, buffer: &wgpu::Buffer, bytes: u64) -> Vec<u8> {
        let readback = self::buffer(&self.device, bytes, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(buffer, 0, &readback, 0, bytes);
        self.queue.submit([encoder.finish()]);
        readback.map_async(wgpu::MapMode::Read, .., |mapped| mapped.unwrap());
        self.wait();
        let mapped = readback.slice(..).get_mapped_range().unwrap();
        mapped.to_vec()
    }

    /// What the backend has made and not yet given back, in number and in bytes.
    fn made(&self) -> Vec<isize> {
        let counters = self.device.get_internal_counters().hal;
        [
            &counters.buffers,
            &counters.bind_groups,
            &counters.bind_group_layouts,
            &counters.pipeline_layouts,
            &counters.compute_pipelines,
            &counters.shader_modules,
            &counters.query_sets,
            &counters.memory_allocations,
            &counters.buffer_memory,
        ]
        .map(wgpu::wgt::InternalCounter::read)
        .to_vec()
    }
}

/// Bytes of the process in memory; `None` where the system does not say so.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[test]
fn ten_thousand_steps_make_nothing() {
    if std::env::var("PAGED_ATTENTION_SKIP_GPU").is_ok_and(|value| value == "1") {
        return;
    }
    let wanted = std::env::var("PAGED_ATTENTION_ADAPTER").ok();
    let adapter = pollster::block_on(adapter::discover(wanted.as_deref())).unwrap();
    let mut model = Model::new(&adapter);
    let layout = model.attention.config().layout;
    let mut pool = BlockPool::new(&PoolConfig {
        page_size: layout.page_size(),
        page_count: layout.page_count(),
        host_slot_count: 0,
    })
    .unwrap();
    let mut tables: Vec<(BlockTable, u32)> = ENDS.iter().map(|_| (pool.new_table().unwrap(), 0)).collect();
    let (mut builder, mut copies) = (BatchBuilder::default(), Vec::new());
    let (mut workgroups, mut prompts) = (0_u32, 0);
    let (mut made, mut resident) = (Vec::new(), None);
    let started = Instant::now();
    for step in 0..STEPS {
        builder.clear();
        for ((table, tokens), end) in tables.iter_mut().zip(ENDS) {
            if *tokens == end {
                let fresh = pool.new_table().unwrap();
                pool.release(std::mem::replace(table, fresh)).unwrap();
                *tokens = 0;
            }
            let new = if *tokens == 0 { PROMPT } else { 1 };
            prompts += u32::from(*tokens == 0);
            *tokens += new;
            pool.extend(table, new, &mut copies).unwrap();
            builder.push(table, new).unwrap();
        }
        workgroups = workgroups.wrapping_add(model.step(step, &builder.batch()));
        if step >= WARM_UP {
            // What a submission uses is kept until it was waited for.
            assert_eq!(model.made(), made, "made in step {step}");
        }
        model.wait();
        if step + 1 == WARM_UP {
            made = model.made();
            resident = resident_bytes();
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let grown = resident_bytes().zip(resident).map(|(now, then)| now.saturating_sub(then));
    let _ = writeln!(
        std::io::stderr(),
        "steady: {STEPS} steps with {prompts} prompts in {seconds:.1} s; memory of the process grew by {grown:?} bytes"
    );
    // A page table, a plan or a command buffer that is kept in each step would be megabytes.
    assert!(grown.is_none_or(|bytes| bytes < 1 << 20), "{grown:?} bytes more");
    assert!(prompts > 100);

    let words = model.read(model.workspace.status(), STATUS_BYTES);
    let [completed, errors] = [0, 4].map(|at| u32::from_le_bytes(words[at..at + 4].try_into().unwrap()));
    Status::from_words([completed, errors]).check(workgroups).unwrap();

    // The counting is seen to work; and a plan of its own for the last step has the same result.
    let before = model.made();
    let batch = builder.batch();
    let plan = model.attention.plan(&batch).unwrap();
    let fresh = DevicePlan::upload(&model.device, &plan).unwrap();
    let layer = &model.layers[1];
    let storage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let [out, lse] = [&layer.out, &layer.lse].map(|like| buffer(&model.device, like.size(), storage));
    let call = model.bind(&fresh, &layer.kv, &out, &lse, &model.workspace);
    let after = model.made();
    assert!(after[0] >= before[0] + 3 && after[1] == before[1] + 1, "{before:?}, then {after:?}");
    let mut encoder = model.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    call.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    model.queue.submit([encoder.finish()]);
    let rows = u64::from(batch.total_q() * HEADS[0]);
    for (written, fresh, bytes) in [(&layer.out, &out, rows * u64::from(DIM) * 4), (&layer.lse, &lse, rows * 4)] {
        assert_eq!(model.read(written, bytes), model.read(fresh, bytes));
    }

    // A plan for more than there is room for is refused, with both numbers, and the plan on the device stays.
    let table = |tokens: u32| {
        let pages = layout.page_size().pages_for(tokens);
        let page_ids: Vec<u32> = (0..pages).collect();
        let batch = Batch { q_indptr: &[0, tokens], page_indptr: &[0, pages], page_ids: &page_ids, kv_len: &[tokens] };
        (model.attention.plan(&batch).unwrap(), AppendPlan::new(&layout, &batch).unwrap())
    };
    let (large, large_append) = table(ROWS_MAX + 1);
    let mut encoder = model.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let (found, needed) = (ROWS_MAX.into(), (ROWS_MAX + 1).into());
    assert_eq!(
        model.plan.write(&mut model.belt, &mut encoder, &large),
        Err(WriteError::Capacity { what: "query rows", found, needed })
    );
    assert_eq!(
        model.append.write(&mut model.belt, &mut encoder, &large_append),
        Err(WriteError::Capacity { what: "new tokens", found, needed })
    );
    assert_eq!(model.layers[0].call.workgroups(), plan.workgroups().iter().map(|(_, groups)| groups).sum::<u32>());
    let PlanCapacity { total_q, .. } = *model.plan.capacity();
    assert_eq!(total_q, ROWS_MAX);
}
