//! A prompt and then single tokens, on the program's own device: sequences get pages from a pool, new keys and values are
//! appended to them, and attention runs over all. A second sequence joins on the way, and later a fork of the first.
//!
//! ```sh
//! cargo run --release --example decode_steps
//! ```

use half::f16;
use rand::{RngExt, SeedableRng};

use paged_attention::{
    Append, AppendPlan, AppendSource, Attention, AttentionConfig, AttentionIo, AttentionOptions, BatchBuilder,
    BlockPool, BlockTable, DevicePlan, Dtype, Extras, HeadGeometry, KvLayout, KvStore, PageSize, PoolConfig,
    STATUS_BYTES, Status, Workspace, adapter, wgpu,
};

#[expect(clippy::print_stdout, clippy::indexing_slicing, reason = "a program that shows what it did")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let adapter = pollster::block_on(adapter::discover(None))?;
    let info = adapter.get_info();
    // Nothing beyond the default limits is needed, and no feature.
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor::default()))?;
    println!("{}", adapter::describe(&info));

    let heads = HeadGeometry::new(4, 2, 64)?;
    let page_size = PageSize::new(16)?;
    let layout = KvLayout::new(heads, Dtype::F16, page_size, 64)?;
    let options = AttentionOptions::new(&heads).with_causal(true);
    let config = AttentionConfig {
        q: Dtype::F16,
        out: Dtype::F32,
        layout,
        new_rows: Dtype::F16.into(),
        options,
        extras: Extras::NONE,
    };
    let attention = pollster::block_on(Attention::new(&device, &info, &config))?;
    // One layer, and no room on the host.
    let mut store = pollster::block_on(KvStore::new(&device, &layout, 1, 0))?;
    let mut pool = BlockPool::new(&PoolConfig { page_size, page_count: layout.page_count(), host_slot_count: 0 })?;
    let mut sequences: Vec<BlockTable> = Vec::new();
    let mut builder = BatchBuilder::default();
    let mut copies = Vec::new();
    for step in 0..6_u32 {
        if step == 4 {
            // It shares all pages. Whoever appends first gets a copy of the last one, which is partly filled.
            sequences.push(pool.fork(&sequences[0])?);
        }
        // Which sequences get how many new tokens: a prompt of 40, a prompt of 7 at step 2, single tokens otherwise.
        let joins = [(0, 40), (2, 7)].into_iter().find(|(at, _)| *at == step).map(|(_, tokens)| tokens);
        let mut new: Vec<u32> = vec![1; sequences.len()];
        if let Some(tokens) = joins {
            sequences.push(pool.new_table()?);
            new.push(tokens);
        }
        builder.clear();
        for (sequence, new) in sequences.iter_mut().zip(&new) {
            pool.extend(sequence, *new, &mut copies)?;
            builder.push(sequence, *new)?;
        }
        let batch = builder.batch();
        let rows = batch.total_q();

        // What a model would compute for the new tokens.
        let [q, k, v] = [(1, heads.q_heads()), (2, heads.kv_heads()), (3, heads.kv_heads())]
            .map(|(seed, heads)| upload(&device, &queue, rows * heads * 64, seed + 10 * step));
        let storage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        let out = buffer(&device, u64::from(rows * heads.q_heads() * 64 * 4), storage);
        let lse = buffer(&device, u64::from(rows * heads.q_heads() * 4), storage);

        // Plans are made once per step; a model would bind them once per layer.
        let plan = attention.plan(&batch)?;
        let workspace = Workspace::new(&device, plan.workspace_bytes())?;
        let plan = DevicePlan::upload(&device, &plan)?;
        let page_copies = store.copies(&device, &copies, &workspace)?;
        copies.clear();
        let append = Append::upload(&device, &AppendPlan::new(&layout, &batch)?)?;
        let source = AppendSource {
            k: k.as_entire_buffer_binding(),
            v: v.as_entire_buffer_binding(),
            kv: store.pages(0)?,
            head_scales: None,
        };
        let append = append.bind(&device, attention.kernels(), source, &workspace)?;
        let io = AttentionIo {
            q: q.as_entire_buffer_binding(),
            kv: store.pages(0)?,
            out: out.as_entire_buffer_binding(),
            lse: lse.as_entire_buffer_binding(),
            heads: None,
            bias: None,
        };
        let call = attention.bind(&device, &plan, io, &workspace)?;

        let workgroups =
            [page_copies.workgroups(), append.workgroups(), call.workgroups()].into_iter().fold(0, u32::wrapping_add);
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        // Before anything is appended. No page goes to the host here.
        page_copies.encode(&mut encoder);
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            append.encode(&mut pass);
            attention.encode(&mut pass, &call);
        }
        let readback =
            buffer(&device, lse.size() + STATUS_BYTES, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
        encoder.copy_buffer_to_buffer(&lse, 0, &readback, 0, lse.size());
        encoder.copy_buffer_to_buffer(workspace.status(), 0, &readback, lse.size(), STATUS_BYTES);
        queue.submit([encoder.finish()]);

        let words = read(&device, &readback)?;
        let (lse, status) = words.split_at(words.len() - 2);
        Status::from_words([status[0], status[1]]).check(workgroups)?;
        let last: Vec<f32> = batch.q_indptr[1..]
            .iter()
            .map(|end| f32::from_bits(lse[(*end as usize - 1) * heads.q_heads() as usize]))
            .collect();
        let kv_len = batch.kv_len;
        println!("step {step}: {new:?} new tokens, lengths {kv_len:?}, log-sum-exp of each last row {last:.4?}");
    }
    for sequence in sequences {
        pool.release(sequence)?;
    }
    Ok(())
}

fn buffer(device: &wgpu::Device, size: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
}

/// Numbers between -1 and 1, in f16.
fn upload(device: &wgpu::Device, queue: &wgpu::Queue, elements: u32, seed: u32) -> wgpu::Buffer {
    let mut random = rand::rngs::StdRng::seed_from_u64(seed.into());
    let values: Vec<f16> = (0..elements).map(|_| f16::from_f32(random.random_range(-1.0..1.0))).collect();
    let buffer = buffer(device, u64::from(elements) * 2, wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST);
    queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&values));
    buffer
}

fn read(device: &wgpu::Device, buffer: &wgpu::Buffer) -> Result<Vec<u32>, Box<dyn std::error::Error>> {
    let (sender, receiver) = std::sync::mpsc::channel();
    buffer.map_async(wgpu::MapMode::Read, .., move |result| {
        // The receiver waits below.
        let _ = sender.send(result);
    });
    device.poll(wgpu::PollType::wait_indefinitely())?;
    receiver.recv()??;
    Ok(bytemuck::cast_slice(&buffer.slice(..).get_mapped_range()?).to_vec())
}
