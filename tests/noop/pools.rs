//! Pools in segments, stores, copies of pages, and memory that is not there.

use super::*;

/// 22 pages in segments of 9, 9 and 4: each has a binding of its own, with its own size.
#[test]
fn pools_in_segments() {
    let app = App::new(wgpu::Limits::default());
    let page_bytes = NEEDED[1] / u64::from(PAGE_COUNT);
    let config = *app.attention.config();
    let limits = wgpu::Limits { max_storage_buffer_binding_size: 10 * page_bytes - 1, ..wgpu::Limits::default() };
    let segmented = AttentionConfig { layout: config.layout.within(&limits).unwrap(), ..config };
    let bytes = [9, 9, 4].map(|pages| pages * page_bytes);
    assert_eq!(segmented.layout.segment_bytes().collect::<Vec<u64>>(), bytes);

    // Kernels, plans and calls are for one number of segments.
    let variants = app.attention.kernels().config().variants;
    let needed = Box::new(segmented.kernels(variants));
    let found = Box::new(*app.attention.kernels().config());
    assert_eq!(
        Attention::with_kernels(app.attention.kernels().clone(), &segmented).map(|_| ()),
        Err(BuildError::OtherConfig { found, needed })
    );
    let attention = pollster::block_on(Attention::with_variants(&app.device, &segmented, variants)).unwrap();
    let bind = |plan: &DevicePlan, kv: Vec<wgpu::BufferBinding<'_>>| {
        let io = AttentionIo { kv, ..app.io() };
        attention.bind(&app.device, plan, io, &app.workspace).map(|_| ())
    };
    let whole = app.buffers[1].as_entire_buffer_binding();
    assert_eq!(
        bind(&app.device_plan, vec![whole.clone()]),
        Err(BindError::OtherLayout { found: Box::new(config.layout), needed: Box::new(segmented.layout) })
    );
    let plan = with_mixed_batch(|batch| attention.plan(batch)).unwrap();
    let plan = DevicePlan::upload(&app.device, &plan).unwrap();
    for given in [0, 1, 2, 4] {
        let error = Err(BindError::Segments { found: given, needed: 3 });
        assert_eq!(bind(&plan, vec![whole.clone(); given]), error);
    }
    let buffers = segmented.layout.create_segments(&app.device).unwrap();
    assert_eq!(buffers.iter().map(wgpu::Buffer::size).collect::<Vec<u64>>(), bytes);
    let segments = || buffers.iter().map(wgpu::Buffer::as_entire_buffer_binding).collect::<Vec<_>>();
    assert_eq!(bind(&plan, segments()), Ok(()));
    let mut short = segments();
    short.swap(1, 2);
    assert_eq!(bind(&plan, short), too_small("kv", bytes[2], bytes[1]));
    let small = device(wgpu::Limits { max_buffer_size: bytes[0] - 4, ..wgpu::Limits::default() }).0;
    let error = LayoutError::Binding { needed: bytes[0], found: bytes[0] - 4 };
    assert_eq!(segmented.layout.create_segments(&small).map(|_| ()), Err(error));

    // Appends as well, which write to the segments.
    let append = with_mixed_batch(|batch| AppendPlan::new(&segmented.layout, batch)).unwrap();
    let append = Append::upload(&app.device, &append).unwrap();
    let rows = storage(&app.device, 41 * 2 * 3 * 16);
    let bind = |kernels: &Kernels, kv: Vec<wgpu::BufferBinding<'_>>| {
        let rows = rows.as_entire_buffer_binding();
        let source = AppendSource { k: rows.clone(), v: rows, kv, head_scales: None };
        append.bind(&app.device, kernels, source, &app.workspace).map(|_| ())
    };
    assert_eq!(bind(attention.kernels(), segments()), Ok(()));
    let (found, needed) = (Box::new(*app.attention.kernels().config()), Box::new(segmented.layout));
    assert_eq!(bind(app.attention.kernels(), segments()), Err(BindError::OtherPages { found, needed }));
    let error = Err(BindError::Segments { found: 1, needed: 3 });
    assert_eq!(bind(attention.kernels(), vec![whole]), error);
    let twice = vec![segments()[0].clone(), segments()[0].clone(), segments()[2].clone()];
    assert_eq!(bind(attention.kernels(), twice), Err(BindError::Overlap { written: "kv", other: "kv" }));
}

#[test]
fn more_segments_than_bindings() {
    let geometry = HeadGeometry::new(4, 2, 20).unwrap();
    let plain = kernels_of(geometry, (Dtype::F16, Dtype::F16, Dtype::F32), base(&geometry));
    let heads = Modifiers { alibi: true, ..Modifiers::NONE };
    let all = Modifiers { bias: Some(Dtype::F32), ..heads };
    for (modifiers, fit) in [(Modifiers::NONE, 3), (heads, 2), (all, 1)] {
        let build = |segments: u32, storage_buffers: u32| {
            let limits =
                wgpu::Limits { max_storage_buffers_per_shader_stage: storage_buffers, ..wgpu::Limits::default() };
            let config = KernelConfig { modifiers, segments: NonZeroU32::new(segments).unwrap(), ..plain };
            let built = pollster::block_on(Kernels::new(&device(limits).0, &config))?;
            Ok((built.config().segments.get(), built.config().modifiers.grouped))
        };
        assert_eq!(build(fit, 8), Ok((fit, false)));
        for segments in [fit + 1, 40, u32::MAX] {
            assert_eq!(build(segments, 8), Ok((fit, true)));
        }
        // Not even one segment has a binding.
        let (kernel, limit, found) = ("prefill", "max_storage_buffers_per_shader_stage", 8 - fit);
        let error = BuildError::Limit { kernel, limit, found: found.into(), needed: u64::from(found) + 1 };
        assert_eq!(build(2, found), Err(error));
    }
}

#[test]
fn pools_that_cannot_be_addressed() {
    let geometry = HeadGeometry::new(8, 8, 128).unwrap();
    let pool = |page_size, page_count| {
        KvLayout::new(geometry, Dtype::F16, PageSize::new(page_size).unwrap(), page_count).map(|layout| layout.bytes())
    };
    // A page of 16 tokens: 8 heads, keys and values of 16 vectors.
    let (page_bytes, limit) = (16 * 8 * 2 * 16 * 16, u64::from(u32::MAX) * 16);
    assert_eq!(pool(16, 1_048_575), Ok(1_048_575 * page_bytes));
    let needed = 1_048_576 * u128::from(page_bytes);
    assert_eq!(pool(16, 1_048_576), Err(LayoutError::TooLarge { page_count: 1_048_576, page_bytes, needed, limit }));
    let page_bytes = u64::from(u32::MAX) * 4096;
    let needed = u128::from(u32::MAX) * u128::from(page_bytes);
    let error = LayoutError::TooLarge { page_count: u32::MAX, page_bytes, needed, limit };
    assert_eq!(pool(u32::MAX, u32::MAX), Err(error));
}

/// Pages of 4 slots and 2 heads, keys and values of 24 elements in f16.
const PAGE_BYTES: u64 = 4 * 2 * 2 * 24 * 2;

fn store(device: &wgpu::Device, pages: u32, layers: u32, slots: u32) -> Result<KvStore, StoreError> {
    let layout = layout(HeadGeometry::new(4, 2, 20).unwrap(), Dtype::F16, 4, pages);
    assert_eq!(layout.page_bytes(), PAGE_BYTES);
    pollster::block_on(KvStore::new(device, &layout, layers, slots))
}

#[test]
fn stores_have_the_bytes_that_are_counted() {
    let (device, ..) = device(wgpu::Limits::default());
    for (pages, layers, slots) in [(7, 3, 5), (1, 1, 0), (7, 0, 2), (20, 32, 1)] {
        let made = store(&device, pages, layers, slots).unwrap();
        let of_layers = |count: u32| u64::from(count) * u64::from(layers) * PAGE_BYTES;
        assert_eq!((made.bytes(), made.host_bytes(), made.layers()), (of_layers(pages), of_layers(slots), layers));
        for layer in 0..layers {
            let segments = made.pages(layer).unwrap();
            let sizes: Vec<_> = segments.iter().map(|pages| (pages.offset, pages.buffer.size())).collect();
            assert_eq!(sizes, [(0, made.layout().bytes())]);
        }
        let none = StoreError::Layer { found: layers, layers };
        assert_eq!(made.pages(layers).err(), Some(none.clone()));
        assert_eq!(none.to_string(), format!("layer {layers} was asked for; there are {layers}"));
    }
    // An empty binding is not allowed, so a store without pages has a vector per layer.
    assert_eq!(store(&device, 0, 3, 0).unwrap().bytes(), 3 * 16);
}

#[test]
fn stores_that_cannot_be() {
    let limits = wgpu::Limits { max_storage_buffer_binding_size: 8 * PAGE_BYTES, ..wgpu::Limits::default() };
    let (small, ..) = device(limits);
    assert!(store(&small, 8, 2, 0).is_ok());
    let refused = LayoutError::Binding { needed: 9 * PAGE_BYTES, found: 8 * PAGE_BYTES };
    assert_eq!(store(&small, 9, 2, 0).err(), Some(StoreError::Layout(refused)));
    // More than an address space has: of host slots, and of pages where the device's limits leave it to the driver.
    let needed = u128::from(u32::MAX) * u128::from(u32::MAX) * u128::from(PAGE_BYTES);
    let error = store(&small, 0, u32::MAX, u32::MAX).err();
    assert_eq!(error, Some(StoreError::HostMemory { needed }));
    let kernel_limits = wgpu::Limits { max_storage_buffers_per_shader_stage: 2, ..wgpu::Limits::default() };
    let (few, ..) = device(kernel_limits);
    let limit =
        BuildError::Limit { kernel: "copy_pages", limit: "max_storage_buffers_per_shader_stage", found: 2, needed: 3 };
    assert_eq!(store(&few, 1, 1, 0).err(), Some(StoreError::Build(limit)));
}

/// Each list is refused with the numbers, and a list that is right goes through afterwards.
#[test]
fn copies_that_are_refused() {
    let limits = wgpu::Limits {
        max_buffer_size: 10 * PAGE_BYTES,
        max_storage_buffer_binding_size: 10 * PAGE_BYTES,
        max_compute_workgroups_per_dimension: 1,
        ..wgpu::Limits::default()
    };
    let (device, queue, _) = device(limits);
    let mut store = store(&device, 10, 2, 6).unwrap();
    let workspace = Workspace::new(&device, 0).unwrap();
    let on_device = |from, to| PageCopy::OnDevice { from, to };
    let to_host = |page, slot| PageCopy::ToHost { page, slot };
    let to_device = |slot, page| PageCopy::ToDevice { slot, page };
    let page = |found| CopyError::Page { found, page_count: 10 };
    let slot = |found| CopyError::Slot { found, slot_count: 6 };
    for (list, error) in [
        (vec![on_device(10, 1)], page(10)),
        (vec![on_device(1, u32::MAX)], page(u32::MAX)),
        (vec![on_device(0, 1), to_host(11, 0)], page(11)),
        (vec![to_device(0, 12)], page(12)),
        (vec![on_device(0, 1), on_device(3, 3), on_device(4, 5)], CopyError::ToItself { page: 3 }),
        (vec![to_host(0, 6)], slot(6)),
        (vec![to_host(0, 1), to_device(7, 0)], slot(7)),
        (vec![to_device(1, 0)], CopyError::Empty { slot: 1, awaited: false }),
        (vec![to_host(0, 1), to_device(1, 0)], CopyError::Empty { slot: 1, awaited: true }),
        (
            (0..6).map(|page| to_host(page, page)).collect(),
            CopyError::TooLarge {
                direction: "to the host",
                pages: 6,
                needed: 12 * u128::from(PAGE_BYTES),
                found: 10 * PAGE_BYTES,
            },
        ),
        // A page takes one workgroup.
        (
            vec![on_device(0, 1), on_device(0, 2)],
            CopyError::Bind(BindError::TooManyWorkgroups { kernel: "copy_pages", needed: 2, axis_max: 1 }),
        ),
    ] {
        let found = store.copies(&device, &list, &workspace);
        assert_eq!(found.err(), Some(error.clone()), "{list:?}");
        assert!(!error.to_string().contains('{'), "{error}");
    }
    assert_eq!(
        CopyError::Empty { slot: 1, awaited: true }.to_string(),
        "host slot 1 is to be read, and what is copied has not reached it"
    );

    // No refusal has left anything behind: slot 1 still holds nothing, and five pages go there and back.
    let list: Vec<_> = (0..5).map(|page| to_host(page, page)).chain([on_device(0, 9)]).collect();
    let copies = store.copies(&device, &list, &workspace).unwrap();
    assert_eq!(copies.workgroups(), 2);
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let arriving = copies.encode(&mut encoder).unwrap();
    queue.submit([encoder.finish()]);
    assert_eq!(arriving.buffer().size(), 10 * PAGE_BYTES);
    assert!(matches!(store.receive(&arriving), Err(CopyError::NotMapped { .. })));
    arriving.buffer().map_async(wgpu::MapMode::Read, .., |mapped| mapped.unwrap());
    device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    assert_eq!(store.receive(&arriving), Ok(5));
    let list: Vec<_> = (0..5).map(|slot| to_device(slot, 9 - slot)).collect();
    let copies = store.copies(&device, &list, &workspace).unwrap();
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    assert!(copies.encode(&mut encoder).is_none());
    queue.submit([encoder.finish()]);
    // Nothing to do is nothing to record.
    let nothing = store.copies(&device, &[], &workspace).unwrap();
    assert_eq!(nothing.workgroups(), 0);
    assert!(nothing.encode(&mut device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default())).is_none());
}

/// In a process that may have 3 GB, since wgpu knows of no device with less memory than its limits.
#[cfg(unix)]
#[test]
fn memory_that_is_not_there() {
    let run = "ulimit -v 3000000 && exec \"$0\" --exact --ignored pools::out_of_memory";
    let child = std::process::Command::new("sh").arg("-c").arg(run).arg(std::env::current_exe().unwrap()).output();
    let output = child.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

/// More than the process may have: an error of the call alone, which reaches no handler (here one that panics), and the
/// device goes on.
#[test]
#[ignore = "run by `memory_that_is_not_there` with little memory"]
fn out_of_memory() {
    let bytes = 4_000_000_000;
    let limit = 4_294_967_292;
    let limits =
        wgpu::Limits { max_buffer_size: limit, max_storage_buffer_binding_size: limit, ..wgpu::Limits::default() };
    let app = App::new(limits);
    match Workspace::new(&app.device, bytes) {
        Err(BindError::OutOfMemory(OutOfMemory { buffer, bytes: found, .. })) => {
            assert_eq!((buffer.as_str(), found), ("attention workspace", bytes + 256));
        }
        other => panic!("{other:?}"),
    }
    let capacity = PlanCapacity { words: bytes / 4, ..app.plan.capacity() };
    let error = DevicePlan::with_capacity(&app.device, &app.attention, &capacity).map(|_| ()).unwrap_err();
    // Eight places for parameters.
    assert_eq!(error.bytes, bytes + 8 * 256);
    let config = app.attention.config();
    // 2 heads, keys and values of 48 bytes.
    let pool = layout(*config.layout.geometry(), Dtype::F16, 16, (bytes / (16 * 2 * 2 * 48)) as u32);
    match pool.create_buffer(&app.device) {
        Err(LayoutError::OutOfMemory(OutOfMemory { bytes, .. })) => assert_eq!(bytes, pool.bytes()),
        other => panic!("{other:?}"),
    }
    // The same device, with what it has memory for.
    let capacity = app.plan.capacity();
    let plan = DevicePlan::with_capacity(&app.device, &app.attention, &capacity).unwrap();
    let workspace = Workspace::new(&app.device, capacity.workspace_bytes).unwrap();
    app.attention.bind(&app.device, &plan, app.io(), &workspace).unwrap();
    // More than a buffer may have is refused before it is asked for.
    let capacity = PlanCapacity { words: 1 << 59, ..capacity };
    let error = DevicePlan::with_capacity(&app.device, &app.attention, &capacity).map(|_| ()).unwrap_err();
    assert!(error.message.contains("the device allows"), "{error}");
}
