//! A prompt and then single tokens, on the program's own device: sequences get pages from a pool, new keys and values are
//! appended to them, and attention runs over all. A second sequence joins on the way, and later a fork of the first.
//! Everything on the device is made once; a step writes its plans and rows into it. Only copies of shared pages, which are
//! rare, take buffers of their own.
//!
//! ```sh
//! cargo run --release --example decode_steps
//! ```

use half::f16;
use rand::{RngExt, SeedableRng};

use paged_attention::{
    Append, AppendPlan, AppendSource, Attention, AttentionConfig, AttentionIo, AttentionOptions, BatchBuilder,
    BlockPool, BlockTable, DevicePlan, Dtype, Extras, HeadGeometry, KvLayout, KvStore, PageSize, PlanCapacity,
    STATUS_BYTES, Status, StepMax, Workspace, adapter, wgpu,
};
use wgpu::util::StagingBelt;

/// Sequences side by side, the tokens of each at most, and the tokens of a prompt.
const SEQUENCES_MAX: u32 = 4;
const TOKENS_MAX: u32 = 256;
const PROMPT_MAX: u32 = 40;

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

    // What any step may need, whatever the lengths and however many of them begin or go on.
    let capacity = attention.capacity(&StepMax {
        sequences: SEQUENCES_MAX,
        q_len: PROMPT_MAX,
        kv_len: TOKENS_MAX,
        ..StepMax::default()
    });
    let PlanCapacity { total_q: rows_max, workspace_bytes, .. } = capacity;
    let plan = DevicePlan::with_capacity(&device, &attention, &capacity)?;
    let append = Append::with_capacity(&device, &layout, &config.new_rows, rows_max)?;
    let workspace = Workspace::new(&device, workspace_bytes)?;
    let mut belt = StagingBelt::new(device.clone(), 1 << 18);

    // Rows of a step, in and out. A model would have some for each layer, and bind the plans once for each.
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
    let (bytes, [k, v]) = (config.buffer_bytes(rows_max), append.source_bytes());
    let [q, k, v] = [bytes.q, k, v].map(|bytes| buffer(&device, bytes, usage));
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let [out, lse] = [bytes.out, bytes.lse].map(|bytes| buffer(&device, bytes, usage));
    let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
    let readback = buffer(&device, lse.size() + STATUS_BYTES, usage);
    let source = AppendSource {
        k: k.as_entire_buffer_binding(),
        v: v.as_entire_buffer_binding(),
        kv: store.pages(0)?,
        head_scales: None,
    };
    let append_call = append.bind(&device, attention.kernels(), source, &workspace)?;
    let io = AttentionIo {
        q: q.as_entire_buffer_binding(),
        kv: store.pages(0)?,
        out: out.as_entire_buffer_binding(),
        lse: lse.as_entire_buffer_binding(),
        heads: None,
        bias: None,
    };
    let call = attention.bind(&device, &plan, io, &workspace)?;

    let mut pool = BlockPool::new(&store.pool_config())?;
    let mut sequences: Vec<BlockTable> = Vec::new();
    let mut builder = BatchBuilder::default();
    let mut copies = Vec::new();
    let mut workgroups = 0_u32;
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

        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        // Before anything is appended. No page goes to the host here.
        if !copies.is_empty() {
            let page_copies = store.copies(&device, &copies, &workspace)?;
            copies.clear();
            workgroups = workgroups.wrapping_add(page_copies.workgroups());
            page_copies.encode(&mut encoder);
        }

        // Nothing is made on the device for what follows: rows and plans go through the belt, whose memory is used again.
        append.write(&mut belt, &mut encoder, &AppendPlan::new(&layout, &batch)?)?;
        plan.write(&mut belt, &mut encoder, &attention.plan(&batch)?)?;
        // What a model would compute for the new tokens.
        for (seed, (rows_of, heads)) in
            (1..).zip([(&q, heads.q_heads()), (&k, heads.kv_heads()), (&v, heads.kv_heads())])
        {
            let values = numbers(rows * heads * 64, seed + 10 * step);
            let bytes: &[u8] = bytemuck::cast_slice(&values);
            let size = wgpu::BufferSize::new(bytes.len() as u64).ok_or("a step without rows")?;
            belt.write_buffer(&mut encoder, rows_of, 0, size).copy_from_slice(bytes);
        }
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            append_call.encode(&mut pass);
            call.encode(&mut pass);
        }
        encoder.copy_buffer_to_buffer(&lse, 0, &readback, 0, lse.size());
        encoder.copy_buffer_to_buffer(workspace.status(), 0, &readback, lse.size(), STATUS_BYTES);
        belt.finish();
        queue.submit([encoder.finish()]);
        belt.recall();

        let words = read(&device, &readback)?;
        let (lse, status) = words.split_at(words.len() - 2);
        // The status counts on from step to step.
        workgroups = workgroups.wrapping_add(append_call.workgroups()).wrapping_add(call.workgroups());
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
fn numbers(elements: u32, seed: u32) -> Vec<f16> {
    let mut random = rand::rngs::StdRng::seed_from_u64(seed.into());
    (0..elements).map(|_| f16::from_f32(random.random_range(-1.0..1.0))).collect()
}

fn read(device: &wgpu::Device, buffer: &wgpu::Buffer) -> Result<Vec<u32>, Box<dyn std::error::Error>> {
    let (sender, receiver) = std::sync::mpsc::channel();
    buffer.map_async(wgpu::MapMode::Read, .., move |result| {
        // The receiver waits below.
        let _ = sender.send(result);
    });
    device.poll(wgpu::PollType::wait_indefinitely())?;
    receiver.recv()??;
    let words = bytemuck::cast_slice(&buffer.slice(..).get_mapped_range()?).to_vec();
    buffer.unmap();
    Ok(words)
}
