//! Batches, appends and writes that are refused; what plans and recording take.

use super::*;

#[test]
fn more_workgroups_than_three_axes_hold() {
    let groups = App::new(wgpu::Limits::default()).plan.workgroups();
    let mut refused = Vec::new();
    for axis_max in 1.. {
        let limits = wgpu::Limits { max_compute_workgroups_per_dimension: axis_max, ..wgpu::Limits::default() };
        let app = App::new(limits);
        let bound = app.attention.bind(&app.device, &app.device_plan, app.io(), &app.workspace).map(|_| ());
        // The first kernel that does not fit is named.
        let Some((kernel, needed)) = groups.into_iter().find(|(_, groups)| *groups > axis_max.pow(3)) else {
            assert_eq!(bound, Ok(()));
            break;
        };
        let kernel = kernel.entry_point();
        assert_eq!(bound, Err(BindError::TooManyWorkgroups { kernel, needed, axis_max }));
        refused.push(kernel);
    }
    assert!(!refused.is_empty());
}

/// Recording takes no device, so it cannot make anything; and it is quick.
#[test]
fn recording_is_quick() {
    let app = App::new(wgpu::Limits::default());
    let call = app.attention.bind(&app.device, &app.device_plan, app.io(), &app.workspace).unwrap();
    let mut milliseconds: Vec<f64> = (0..15)
        .map(|_| {
            let mut encoder = app.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let start = Instant::now();
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                for _ in 0..1000 {
                    call.encode(&mut pass);
                }
            }
            // wgpu checks a pass where it ends.
            let _commands = encoder.finish();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    milliseconds.sort_by(f64::total_cmp);
    let median = milliseconds[milliseconds.len() / 2];
    say(&format!("encode: 1,000 calls of 3 dispatches in {median:.2} ms (median)"));
    // Hundreds of times what it takes: only that nothing large creeps in.
    assert!(median < 500.0, "{median} ms");
}

/// A whole prefill takes no scratch, and its plan grows with the prompt, not with its square.
#[test]
fn prefill_memory_grows_linearly() {
    let (device, ..) = device(wgpu::Limits::default());
    for facts in [AdapterFacts::PLAIN_GPU, AdapterFacts::PLAIN_CPU] {
        let config = config(HeadGeometry::new(8, 8, 64).unwrap(), Dtype::F16, 16, 512);
        let kernels = pollster::block_on(Kernels::new(
            &device,
            &config.kernels(Variants::base(&facts, config.layout.geometry())),
        ))
        .unwrap();
        let attention = Attention::with_kernels(kernels, &config).unwrap();
        let page_ids: Vec<u32> = (0..512).collect();
        let mut bytes = [1024_u32, 2048, 4096, 8192].map(|tokens| {
            let pages = tokens / 16;
            let plan = attention
                .plan(&Batch {
                    q_indptr: &[0, tokens],
                    page_indptr: &[0, pages],
                    page_ids: &page_ids[..pages as usize],
                    kv_len: &[tokens],
                })
                .unwrap();
            let (workspace, plan) = (plan.workspace_bytes(), plan.device_bytes());
            say(&format!("prefill of {tokens} tokens, 8 heads, {facts:?}: workspace {workspace}, plan {plan} bytes"));
            assert_eq!(workspace, 0);
            plan
        });
        // Less what a plan always has, doubling the tokens doubles the bytes.
        let fixed = 2 * bytes[0] - bytes[1];
        bytes.iter_mut().for_each(|bytes| *bytes -= fixed);
        // Eight places for 256 bytes of parameters, and a record.
        assert!(fixed < 8 * 256 + 100 && bytes.windows(2).all(|pair| pair[1] == 2 * pair[0]), "{fixed} + {bytes:?}");
    }
}

fn order(tensor: &'static str, index: usize, found: u32, previous: u32) -> BatchError {
    BatchError::Order { tensor, index, found, previous }
}

#[test]
fn batches_that_cannot_be_planned() {
    let (device, _, info) = device(wgpu::Limits::default());
    let attention = |config: &AttentionConfig| pollster::block_on(Attention::new(&device, &info, config)).unwrap();
    let small = attention(&config(HeadGeometry::new(2, 2, 8).unwrap(), Dtype::F16, 4, 3));
    let good = Batch { q_indptr: &[0, 1, 3], page_indptr: &[0, 2, 3], page_ids: &[2, 0, 1], kv_len: &[8, 3] };
    small.plan(&good).unwrap();
    let length = |tensor, found| BatchError::Length {
        tensor,
        found,
        needed: 3,
        why: "one more than there are sequences in `kv_len`",
    };
    for (batch, expected) in [
        (Batch { q_indptr: &[0, 1], ..good }, length("q_indptr", 2)),
        (Batch { q_indptr: &[], ..good }, length("q_indptr", 0)),
        (Batch { page_indptr: &[0, 2, 3, 3], ..good }, length("page_indptr", 4)),
        (Batch { q_indptr: &[1, 1, 3], ..good }, BatchError::Start { tensor: "q_indptr", found: 1 }),
        (Batch { q_indptr: &[0, 4, 3], ..good }, order("q_indptr", 2, 3, 4)),
        (Batch { page_indptr: &[0, 2, 1], ..good }, order("page_indptr", 2, 1, 2)),
        (
            Batch { page_indptr: &[0, 2, 2], kv_len: &[8, 0], ..good },
            BatchError::End { tensor: "page_indptr", found: 2, needed: 3 },
        ),
        (Batch { page_ids: &[2, 3, 1], ..good }, BatchError::PageId { index: 1, found: 3, page_count: 3 }),
        (
            Batch { kv_len: &[9, 3], ..good },
            BatchError::PastPages { seq: 0, found: 9, pages: 2, page_size: 4, capacity: 8 },
        ),
        (
            Batch { kv_len: &[8, u32::MAX], ..good },
            BatchError::PastPages { seq: 1, found: u32::MAX, pages: 1, page_size: 4, capacity: 4 },
        ),
    ] {
        assert_eq!(small.plan(&batch), Err(PlanError::Batch(expected.clone())));
        assert_eq!(AppendPlan::new(&small.config().layout, &batch), Err(AppendError::Batch(expected)));
    }

    // Scales that are no finite f32 in units of log2.
    for scale in [f64::NAN, f64::INFINITY, f64::MAX, -3e38] {
        let options = small.config().options.with_scale(scale);
        let scaled =
            Attention::with_kernels(small.kernels().clone(), &AttentionConfig { options, ..*small.config() }).unwrap();
        let error = scaled.plan(&good).unwrap_err();
        assert!(matches!(error, PlanError::Scale { found } if found.to_bits() == scale.to_bits()), "{error}");
    }

    // Keys and rows past 32 bits: one page of 2^31 - 1 tokens, twice in the table.
    let huge = config(HeadGeometry::new(1, 1, 8).unwrap(), Dtype::F16, i32::MAX as u32, 1);
    let huge = attention(&huge);
    let batch = Batch { q_indptr: &[0, 1], page_indptr: &[0, 2], page_ids: &[0, 0], kv_len: &[u32::MAX - 1] };
    assert_eq!(huge.plan(&batch), Err(PlanError::TooLong { seq: 0, q_len: 1, kv_len: u32::MAX - 1 }));
    let batch = Batch { q_indptr: &[0, 0, 7], page_indptr: &[0, 0, 2], kv_len: &[0, u32::MAX - 7], ..batch };
    assert_eq!(huge.plan(&batch), Err(PlanError::TooLong { seq: 1, q_len: 7, kv_len: u32::MAX - 7 }));

    // Rows whose elements pass 32-bit offsets: 2 vectors of f32 for each.
    let rows = 1_u32 << 31;
    let batch = Batch { q_indptr: &[0, rows], page_indptr: &[0, 0], page_ids: &[], kv_len: &[0] };
    let limit = u64::from(u32::MAX);
    assert_eq!(huge.plan(&batch), Err(PlanError::TooMany { what: "output vectors", needed: 1 << 32, limit }));

    // Partial states of a row: 4,096 splits and 1,024 KV heads, each of 65 vectors. No binding holds them.
    let wide = attention(&config(HeadGeometry::new(16_384, 1024, 256).unwrap(), Dtype::F16, 4096, 1));
    let table = [0; 256];
    let batch = Batch { q_indptr: &[0, 1], page_indptr: &[0, 256], page_ids: &table, kv_len: &[256 * 4096] };
    let needed = (256 * 4096 / u64::from(SPLIT_KEYS)) * 1024 * 65 * 16;
    let limit = (128 << 20) - 256;
    assert_eq!(wide.plan(&batch), Err(PlanError::Workspace { seq: 0, needed, limit }));
}

#[test]
fn appends_that_cannot_be_planned() {
    let layout_of =
        |page_size, page_count| layout(HeadGeometry::new(2, 2, 8).unwrap(), Dtype::F16, page_size, page_count);
    let small = layout_of(4, 3);
    let good = Batch { q_indptr: &[0, 1, 3], page_indptr: &[0, 2, 3], page_ids: &[2, 0, 1], kv_len: &[8, 3] };
    assert_eq!(AppendPlan::new(&small, &good).unwrap().tokens(), 3);
    assert_eq!(
        AppendPlan::new(&small, &Batch { q_indptr: &[0, 1, 5], ..good }),
        Err(AppendError::TooMany { seq: 1, new: 4, kv_len: 3 })
    );
    // Position 7 of the one is slot 3 of page 0; so is position 3 of the other.
    let shared = Batch { page_ids: &[2, 0, 0], kv_len: &[8, 4], ..good };
    assert_eq!(AppendPlan::new(&small, &shared), Err(AppendError::SameSlot { page: 0, slot: 3 }));
    // Sharing a page is no fault where only one writes to it, or both to slots of their own.
    AppendPlan::new(&small, &Batch { q_indptr: &[0, 1, 1], ..shared }).unwrap();
    AppendPlan::new(&small, &Batch { kv_len: &[8, 3], ..shared }).unwrap();

    // 2^31 - 1 heads of two vectors: the kernel counts up to a group short of 2^32.
    let heads = i32::MAX as u32;
    let wide = layout(HeadGeometry::new(heads, heads, 8).unwrap(), Dtype::F16, 1, 1);
    let batch = Batch { q_indptr: &[0, 1], page_indptr: &[0, 1], page_ids: &[0], kv_len: &[1] };
    let (needed, limit) = (u64::from(u32::MAX) - 1, u64::from(u32::MAX) - 64);
    assert_eq!(
        AppendPlan::new(&wide, &batch),
        Err(AppendError::TooLarge { what: "vectors of 16 bytes", needed, limit })
    );
}

/// What a bias needs bounds the plans with a bias, and no others.
#[test]
fn more_pairs_than_a_bias_can_have() {
    let app = App::new(wgpu::Limits::default());
    // 2^32 pairs, over one page again and again.
    let page_ids = vec![0; 1 << 12];
    let batch = Batch { q_indptr: &[0, 1 << 16], page_indptr: &[0, 1 << 12], page_ids: &page_ids, kv_len: &[1 << 16] };
    assert_eq!(app.attention.plan(&batch).unwrap().capacity().score_pairs, 1 << 32);
    let config = *app.attention.config();
    let (device, _, info) = device(wgpu::Limits::default());
    let with = |extras| {
        let config = AttentionConfig { extras, ..config };
        pollster::block_on(Attention::new(&device, &info, &config)).unwrap()
    };
    let bias = |per_head| Extras { bias: Some(Bias { dtype: Dtype::F16, per_head }), ..Extras::NONE };
    let half = Batch { q_indptr: &[0, 1 << 15], ..batch };
    assert!(with(bias(false)).plan(&half).is_ok());
    // Four heads with a bias each.
    for (per_head, batch) in [(false, &batch), (true, &half)] {
        assert!(matches!(with(bias(per_head)).plan(batch), Err(PlanError::TooMany { .. })));
    }
    // Capacities add up until nothing can be bound.
    let attention = with(bias(false));
    let plan = with_mixed_batch(|batch| attention.plan(batch)).unwrap();
    let capacity = PlanCapacity { score_pairs: u64::MAX, ..plan.capacity() };
    let plan = DevicePlan::with_capacity(&device, &attention, &capacity).unwrap();
    let io = AttentionIo { bias: Some(app.buffers[0].as_entire_buffer_binding()), ..app.io() };
    match attention.bind(&device, &plan, io, &app.workspace) {
        Err(BindError::TooLarge { needed, .. }) => assert_eq!(needed, u64::MAX),
        other => panic!("{other:?}"),
    }
}

/// A plan that takes another's place on the device: what does not fit is refused with both numbers, and nothing changes.
#[test]
fn plans_that_cannot_be_written() {
    let app = App::new(wgpu::Limits { max_compute_workgroups_per_dimension: 3, ..wgpu::Limits::default() });
    let groups: Vec<u32> = app.plan.workgroups().iter().map(|(_, groups)| *groups).collect();
    let empty = Batch { q_indptr: &[0], page_indptr: &[0], page_ids: &[], kv_len: &[] };
    let mut belt = wgpu::util::StagingBelt::new(app.device.clone(), 1 << 16);
    let mut encoder = app.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let capacity = app.plan.capacity();
    let room = |capacity: PlanCapacity| DevicePlan::with_capacity(&app.device, &app.attention, &capacity).unwrap();
    let short = |what, found, needed| Err(WriteError::Capacity { what, found, needed });
    for (less, expected) in [
        (PlanCapacity { words: capacity.words - 1, ..capacity }, short("words", capacity.words - 1, capacity.words)),
        (PlanCapacity { total_q: 40, ..capacity }, short("query rows", 40, 41)),
        (PlanCapacity { score_pairs: 0, ..capacity }, short("pairs of query row and key", 0, 40 * 40 + 300)),
        (
            PlanCapacity { workspace_bytes: 16, ..capacity },
            short("bytes of partial states", 16, app.plan.workspace_bytes()),
        ),
    ] {
        assert_eq!(room(less).write(&mut belt, &mut encoder, &app.plan), expected);
    }
    // Cut work needs blocks: one for each slice of a kernel that has several.
    let mut cut = app.plan.clone();
    cut.cut(|_| 1);
    let all: u32 = groups.iter().sum();
    let parts = groups.iter().filter(|groups| **groups > 1).sum::<u32>();
    assert_eq!((cut.slices().len() as u32, cut.capacity().blocks), (all, 1 + parts));
    let device_plan = room(capacity);
    assert_eq!(
        device_plan.write(&mut belt, &mut encoder, &cut),
        short("blocks of parameters", 1, u64::from(1 + parts))
    );
    let call = app.attention.bind(&app.device, &device_plan, app.io(), &app.workspace).unwrap();
    assert_eq!((call.slices(), call.workgroups()), (0, 0));
    device_plan.write(&mut belt, &mut encoder, &app.plan).unwrap();
    assert_eq!((call.slices(), call.workgroups()), (3, all));
    device_plan.write(&mut belt, &mut encoder, &app.attention.plan(&empty).unwrap()).unwrap();
    assert_eq!((call.slices(), call.workgroups()), (0, 0));

    // Another pool, and more workgroups than three axes hold.
    let config = *app.attention.config();
    let layout = layout(*config.layout.geometry(), Dtype::F16, 16, PAGE_COUNT + 1);
    let kernels = app.attention.kernels().clone();
    let other = Attention::with_kernels(kernels, &AttentionConfig { layout, ..config }).unwrap();
    let foreign = other.plan(&empty).unwrap();
    let [found, needed] = [layout, config.layout].map(Box::new);
    let error = Err(WriteError::Other(BindError::OtherLayout { found, needed }));
    assert_eq!(device_plan.write(&mut belt, &mut encoder, &foreign), error);
    // Other scores: the message has what differs, and no more.
    let config = AttentionConfig { options: config.options.with_causal(false), ..config };
    let other = Attention::with_kernels(app.attention.kernels().clone(), &config).unwrap();
    let error = device_plan.write(&mut belt, &mut encoder, &other.plan(&empty).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "the plan was made for other scores: causal is false, true is needed");
    let small = App::new(wgpu::Limits { max_compute_workgroups_per_dimension: 1, ..wgpu::Limits::default() });
    let mut cut = small.plan.clone();
    cut.cut(|_| 1);
    let device_plan = DevicePlan::with_capacity(&small.device, &small.attention, &cut.capacity()).unwrap();
    let mut belt = wgpu::util::StagingBelt::new(small.device.clone(), 1 << 16);
    let mut encoder = small.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let (kernel, needed) = small.plan.workgroups().into_iter().find(|(_, groups)| *groups > 1).unwrap();
    assert_eq!(
        device_plan.write(&mut belt, &mut encoder, &small.plan),
        Err(WriteError::TooManyWorkgroups { kernel: kernel.entry_point(), needed, axis_max: 1 })
    );
    device_plan.write(&mut belt, &mut encoder, &cut).unwrap();
    let call = small.attention.bind(&small.device, &device_plan, small.io(), &small.workspace).unwrap();
    call.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    belt.finish();
    small.queue.submit([encoder.finish()]);
}
