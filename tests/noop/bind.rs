//! What cannot be bound: buffers, parts and plans that do not belong together.

use super::*;

#[test]
fn buffers_that_are_too_small() {
    let app = App::new(wgpu::Limits::default());
    app.attention.bind(&app.device, &app.device_plan, app.io(), &app.workspace).unwrap();
    for (name, needed) in NAMES.into_iter().zip(NEEDED) {
        let large = storage(&app.device, needed + 512);
        // By the binding's size, by what is left of the buffer, and past its end.
        assert_eq!(app.bind(name, binding(&large, 256, needed - 4)), too_small(name, needed - 4, needed));
        let rest = wgpu::BufferBinding { buffer: &large, offset: 768, size: None };
        assert_eq!(app.bind(name, rest), too_small(name, needed - 256, needed));
        assert_eq!(app.bind(name, binding(&large, 1 << 40, needed)), too_small(name, 0, needed));
        // Exactly enough, at the start and at an offset.
        assert_eq!(app.bind(name, binding(&large, 0, needed)), Ok(()));
        assert_eq!(app.bind(name, binding(&large, 512, needed)), Ok(()));
    }
    // 2 splits of 2 KV heads and 2 rows, each a state of 7 vectors.
    let needed = app.plan.workspace_bytes();
    assert_eq!(needed, 2 * 2 * 2 * 7 * 16);
    for bytes in [0, 16, needed - 16] {
        let workspace = Workspace::new(&app.device, bytes).unwrap();
        let error = app.attention.bind(&app.device, &app.device_plan, app.io(), &workspace).map(|_| ());
        // The status words come before the states.
        assert_eq!(error, too_small("workspace", 256 + bytes.max(16), 256 + needed));
    }
    let roomy = Workspace::new(&app.device, 10 * needed).unwrap();
    app.attention.bind(&app.device, &app.device_plan, app.io(), &roomy).unwrap();
}

/// A caller may bind a large arena from an offset on, or say a size that is no multiple of 4 or ends past the buffer:
/// what counts is that the bytes needed are there.
#[test]
fn bindings_that_hold_more_than_needed() {
    let app = App::new(wgpu::Limits { max_storage_buffer_binding_size: 1 << 17, ..wgpu::Limits::default() });
    for (name, needed) in NAMES.into_iter().zip(NEEDED) {
        let odd = storage(&app.device, 512 + needed + 3);
        for size in [needed + 1, needed + 3, needed + 100, u64::MAX] {
            assert_eq!(app.bind(name, binding(&odd, 512, size)), Ok(()), "{name}, {size}");
        }
        assert_eq!(app.bind(name, wgpu::BufferBinding { buffer: &odd, offset: 512, size: None }), Ok(()));
        let arena = storage(&app.device, 1 << 20);
        assert_eq!(app.bind(name, wgpu::BufferBinding { buffer: &arena, offset: 256, size: None }), Ok(()));
    }
}

/// What the documentation of `AttentionIo` says of one buffer for several tensors: what is bound, wgpu takes.
#[test]
fn tensors_that_share_a_buffer() {
    let app = App::new(wgpu::Limits::default());
    let [q, kv, out, lse] = NEEDED;
    let arena = storage(&app.device, 1 << 20);
    let record = |io: AttentionIo<'_>| {
        let call = app.attention.bind(&app.device, &app.device_plan, io, &app.workspace)?;
        // An error that no scope catches is a panic.
        let mut encoder = app.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        call.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
        let _commands = encoder.finish();
        Ok(())
    };
    let part = |place: u64, size| binding(&arena, place << 18, size);
    assert_eq!(record(AttentionIo { q: part(0, q), kv: vec![part(1, kv)], ..app.io() }), Ok(()));
    assert_eq!(record(AttentionIo { out: part(0, out), lse: part(1, lse), ..app.io() }), Ok(()));
    let refused = |written, read| Err(BindError::ReadAndWritten { written, read });
    assert_eq!(record(AttentionIo { q: part(0, q), out: part(1, out), ..app.io() }), refused("out", "q"));
    assert_eq!(record(AttentionIo { kv: vec![part(0, kv)], lse: part(1, lse), ..app.io() }), refused("lse", "kv"));
}

/// A part of another device is refused by name, by attention, appends and copies of pages.
#[test]
fn parts_of_another_device() {
    let app = App::new(wgpu::Limits::default());
    let (device, _queue) = pollster::block_on(app.adapter.request_device(&wgpu::DeviceDescriptor::default())).unwrap();
    let other = |part| BindError::OtherDevice { part };
    let workspace = Workspace::new(&device, app.plan.workspace_bytes()).unwrap();
    let plan = DevicePlan::upload(&device, &app.plan).unwrap();
    let bind = |device, plan, workspace| app.attention.bind(device, plan, app.io(), workspace).map(|_| ());
    assert_eq!(bind(&app.device, &app.device_plan, &workspace), Err(other("workspace")));
    assert_eq!(bind(&app.device, &plan, &app.workspace), Err(other("plan")));
    assert_eq!(bind(&device, &plan, &workspace), Err(other("kernels")));

    let layout = app.attention.config().layout;
    let append = with_mixed_batch(|batch| AppendPlan::new(&layout, batch)).unwrap();
    let append = Append::upload(&device, &append).unwrap();
    let buffer = storage(&device, 1 << 20);
    let all = buffer.as_entire_buffer_binding();
    let source = AppendSource { k: all.clone(), v: all.clone(), kv: vec![all], head_scales: None };
    let error = append.bind(&device, app.attention.kernels(), source, &workspace).map(|_| ());
    assert_eq!(error, Err(other("kernels")));

    let mut store = pollster::block_on(KvStore::new(&device, &layout, 1, 0)).unwrap();
    let error = store.copies(&device, &[], &app.workspace).map(|_| ());
    assert_eq!(error, Err(CopyError::Bind(other("workspace"))));
    let error = store.copies(&app.device, &[], &app.workspace).map(|_| ());
    assert_eq!(error, Err(CopyError::Bind(other("store"))));
}

/// Bytes of what is written belong to nobody else, in one buffer or not.
#[test]
fn tensors_that_overlap() {
    let app = App::new(wgpu::Limits::default());
    let [q, kv, out, lse] = NEEDED;
    let arena = storage(&app.device, 1 << 20);
    let bind = |io| app.attention.bind(&app.device, &app.device_plan, io, &app.workspace).map(|_| ());
    let both = |offset| AttentionIo { out: binding(&arena, 0, out), lse: binding(&arena, offset, lse), ..app.io() };
    let touching = out.next_multiple_of(256);
    assert_eq!(bind(both(touching)), Ok(()));
    assert_eq!(bind(both(touching - 256)), Err(BindError::Overlap { written: "out", other: "lse" }));
    let alone = AttentionIo { kv: vec![binding(&arena, 0, kv)], out: binding(&arena, 256, out), ..app.io() };
    assert_eq!(bind(alone), Err(BindError::ReadAndWritten { written: "out", read: "kv" }));
    // What is read alone may be the same.
    let read = AttentionIo { q: binding(&arena, 0, q), kv: vec![binding(&arena, 0, kv)], ..app.io() };
    assert_eq!(bind(read), Ok(()));
}

/// A plan is for the kernels that made it, a buffer for the use that it was made for, a workspace within limits.
#[test]
fn parts_that_do_not_belong_together() {
    let app = App::new(wgpu::Limits::default());
    let config = *app.attention.config();
    let geometry = *config.layout.geometry();
    let own = app.attention.kernels().config().variants;
    let all = [AdapterFacts::PLAIN_GPU, AdapterFacts::PLAIN_CPU].map(|facts| Variants::base(&facts, &geometry));
    let variants = all.into_iter().find(|variants| *variants != own).unwrap();
    let kernels = pollster::block_on(Kernels::new(&app.device, &config.kernels(variants))).unwrap();
    let other = Attention::with_kernels(kernels, &config).unwrap();
    let error = other.bind(&app.device, &app.device_plan, app.io(), &app.workspace).map(|_| ());
    assert_eq!(error, Err(BindError::OtherKernels));
    // Scores that the plan was not made for, and the other way round.
    let with = |extras| AttentionConfig { extras, ..config };
    let scored = |options| AttentionConfig { options, ..config };
    let mut other_scale = config.options;
    other_scale.scale = 0.5;
    for config in [
        with(Extras { shared_prefixes: true, ..Extras::NONE }),
        with(Extras { mask: true, ..Extras::NONE }),
        with(Extras { bias: Some(Bias { dtype: Dtype::F32, per_head: true }), ..Extras::NONE }),
        with(Extras { alibi_slopes: true, ..Extras::NONE }),
        with(Extras { sinks: true, ..Extras::NONE }),
        scored(config.options.with_window(Some(3), None)),
        scored(config.options.with_softcap(Some(5.0))),
        scored(config.options.with_causal(false)),
        scored(other_scale),
    ] {
        let extras = config.extras;
        let kernels = pollster::block_on(Kernels::new(&app.device, &config.kernels(own))).unwrap();
        let other = Attention::with_kernels(kernels, &config).unwrap();
        let bind =
            |attention: &Attention, plan| attention.bind(&app.device, plan, app.io(), &app.workspace).map(|_| ());
        let other_scores = |found: &AttentionConfig, needed: &AttentionConfig| {
            let [found, needed] = [found, needed].map(|config| Box::new((config.options, config.extras)));
            Err(BindError::OtherScores { found, needed })
        };
        assert_eq!(bind(&other, &app.device_plan), other_scores(app.attention.config(), &config));
        let batch = Batch { q_indptr: &[0], page_indptr: &[0], page_ids: &[], kv_len: &[] };
        let plan = if extras.mask { other.plan_masked(&batch, &[]) } else { other.plan(&batch) };
        let plan = DevicePlan::upload(&app.device, &plan.unwrap()).unwrap();
        assert_eq!(bind(&app.attention, &plan), other_scores(&config, app.attention.config()));
    }
    let batch = Batch { q_indptr: &[0], page_indptr: &[0], page_ids: &[], kv_len: &[] };
    assert_eq!(app.attention.plan_shared(&batch, &[], None), Err(PlanError::SharedPrefixesGiven));

    let usage = wgpu::BufferUsages::COPY_DST;
    let descriptor = wgpu::BufferDescriptor { label: None, size: 1 << 20, usage, mapped_at_creation: false };
    let copy_only = app.device.create_buffer(&descriptor);
    for buffer in NAMES {
        let error = app.bind(buffer, copy_only.as_entire_buffer_binding());
        assert_eq!(error, Err(BindError::Usage { buffer, found: usage, needed: wgpu::BufferUsages::STORAGE }));
    }

    let found = 1 << 27;
    let error = Workspace::new(&app.device, found + 16).map(|_| ());
    assert_eq!(error, Err(BindError::TooLarge { buffer: "workspace", found, needed: found + 16 + 256 }));
}

#[test]
fn bindings_that_the_device_does_not_allow() {
    // All of it fits but the pages; the buffers themselves may be larger than a binding.
    let [q, kv, ..] = NEEDED;
    let limits = wgpu::Limits { max_storage_buffer_binding_size: kv - 4, ..wgpu::Limits::default() };
    let app = App::new(limits.clone());
    let error = app.attention.bind(&app.device, &app.device_plan, app.io(), &app.workspace).map(|_| ());
    assert_eq!(error, Err(BindError::TooLarge { buffer: "kv", found: kv - 4, needed: kv }));
    let config = app.attention.config();
    assert_eq!(
        config.layout.create_buffer(&app.device).map(|_| ()),
        Err(LayoutError::Binding { needed: kv, found: kv - 4 })
    );
    let small = App::new(wgpu::Limits { max_storage_buffer_binding_size: 4096, ..limits });
    let error = small.attention.bind(&small.device, &small.device_plan, small.io(), &small.workspace).map(|_| ());
    assert_eq!(error, Err(BindError::TooLarge { buffer: "q", found: 4096, needed: q }));
    // A buffer limit below the binding limit counts as well.
    let limits = wgpu::Limits { max_buffer_size: kv - 16, ..wgpu::Limits::default() };
    assert_eq!(
        config.layout.create_buffer(&device(limits).0).map(|_| ()),
        Err(LayoutError::Binding { needed: kv, found: kv - 16 })
    );
}

#[test]
fn offsets_that_are_not_aligned() {
    for alignment in [256, 32] {
        let limits = wgpu::Limits { min_storage_buffer_offset_alignment: alignment, ..wgpu::Limits::default() };
        let app = App::new(limits);
        for (name, needed) in NAMES.into_iter().zip(NEEDED) {
            let large = storage(&app.device, needed + 512);
            let unaligned = |found| Err(BindError::Unaligned { buffer: name, found, needed: alignment.into() });
            for offset in [4, 16, 31, 257, 300] {
                assert_eq!(app.bind(name, binding(&large, offset, needed)), unaligned(offset));
            }
            let expected = if alignment == 32 { Ok(()) } else { unaligned(32) };
            assert_eq!(app.bind(name, binding(&large, 32, needed)), expected);
        }
    }
}

#[test]
fn a_plan_for_another_pool() {
    let app = App::new(wgpu::Limits::default());
    let geometry = *app.attention.config().layout.geometry();
    for layout in [
        layout(geometry, Dtype::F16, 16, PAGE_COUNT + 1),
        layout(geometry, Dtype::F16, 8, PAGE_COUNT),
        // Twice the heads in the same group: the same pipelines, another pool.
        layout(HeadGeometry::new(8, 4, 20).unwrap(), Dtype::F16, 16, PAGE_COUNT),
    ] {
        let config = AttentionConfig { layout, ..*app.attention.config() };
        let other = Attention::with_kernels(app.attention.kernels().clone(), &config).unwrap();
        let error = other.bind(&app.device, &app.device_plan, app.io(), &app.workspace).map(|_| ());
        let [found, needed] = [app.attention.config().layout, layout].map(Box::new);
        assert_ne!(found.to_string(), needed.to_string());
        assert_eq!(error, Err(BindError::OtherLayout { found, needed }));
    }
}

#[test]
fn appends_that_cannot_be_bound() {
    let app = App::new(wgpu::Limits::default());
    let layout = app.attention.config().layout;
    // The 41 last tokens; 3 vectors per key row and per value row, 2 heads.
    let plan = with_mixed_batch(|batch| AppendPlan::new(&layout, batch)).unwrap();
    assert_eq!(plan.tokens(), 41);
    let append = Append::upload(&app.device, &plan).unwrap();
    let needed = [("k", 41 * 2 * 3 * 16), ("v", 41 * 2 * 3 * 16), ("kv", NEEDED[1])];
    let buffers = needed.map(|(_, bytes)| storage(&app.device, bytes + 256));
    let bind = |name: &str, with: wgpu::BufferBinding<'_>| {
        let [mut k, mut v, mut kv] = buffers.each_ref().map(|buffer| buffer.as_entire_buffer_binding());
        match name {
            "k" => k = with,
            "v" => v = with,
            _ => kv = with,
        }
        append.bind(
            &app.device,
            app.attention.kernels(),
            AppendSource { k, v, kv: vec![kv], head_scales: None },
            &app.workspace,
        )
    };
    for ((name, needed), buffer) in needed.into_iter().zip(&buffers) {
        let error = |with| bind(name, with).map(|_| ());
        assert_eq!(error(binding(buffer, 0, needed)), Ok(()));
        assert_eq!(error(binding(buffer, 256, u64::MAX)), Ok(()));
        assert_eq!(error(binding(buffer, 0, needed - 16)), too_small(name, needed - 16, needed));
        assert_eq!(error(binding(buffer, 512, needed)), too_small(name, needed - 256, needed));
        let unaligned = Err(BindError::Unaligned { buffer: name, found: 16, needed: 256 });
        assert_eq!(error(binding(buffer, 16, needed)), unaligned);
    }
    // 41 tokens * 2 heads * 6 vectors over 64 lanes.
    let groups = (41_u32 * 2 * 6).div_ceil(64);
    assert_eq!(bind("k", binding(&buffers[0], 0, needed[0].1)).unwrap().workgroups(), groups);
    let small = App::new(wgpu::Limits { max_compute_workgroups_per_dimension: 1, ..wgpu::Limits::default() });
    let append = Append::upload(&small.device, &plan).unwrap();
    let buffers = needed.map(|(_, bytes)| storage(&small.device, bytes));
    let [k, v, kv] = buffers.each_ref().map(|buffer| buffer.as_entire_buffer_binding());
    let source = AppendSource { k, v, kv: vec![kv], head_scales: None };
    assert_eq!(
        append.bind(&small.device, small.attention.kernels(), source, &small.workspace).map(|_| ()),
        Err(BindError::TooManyWorkgroups { kernel: "append", needed: groups, axis_max: 1 })
    );
}
