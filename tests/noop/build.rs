//! Kernels that a device cannot have, and what those need that every device has.

use super::*;

/// What makes kernels can be awaited on any thread: servers hand their futures to an executor.
#[test]
fn futures_that_move_between_threads() {
    fn moves<T: Send>(future: T) -> T {
        future
    }
    let (device, _queue, info) = device(wgpu::Limits::default());
    let config = config(HeadGeometry::new(2, 1, 8).unwrap(), Dtype::F32, 4, 2);
    pollster::block_on(moves(Attention::new(&device, &info, &config))).unwrap();
    pollster::block_on(moves(KvStore::new(&device, &config.layout, 1, 0))).unwrap();
}

/// Sizes of a variant that the kernels cannot have.
#[test]
fn variants_that_cannot_be_built() {
    let (device, ..) = device(wgpu::Limits::default());
    let geometry = HeadGeometry::new(4, 2, 20).unwrap();
    let good = base(&geometry);
    let PrefillVariant { split_keys, .. } = good.prefill;
    for (prefill, decode) in [
        (PrefillVariant { rows_per_lane: 0, ..good.prefill }, good.decode),
        (PrefillVariant { lanes: 0, ..good.prefill }, good.decode),
        (PrefillVariant { lanes: 20, subgroup: 8, ..good.prefill }, good.decode),
        (PrefillVariant { subgroup: 5, ..good.prefill }, good.decode),
        (PrefillVariant { step_keys: 0, ..good.prefill }, good.decode),
        (PrefillVariant { step_keys: 3, split_keys, ..good.prefill }, good.decode),
        (good.prefill, DecodeVariant::Streams { subgroup: 0 }),
        (good.prefill, DecodeVariant::Exchange { subgroup: 7 }),
    ] {
        let variants = Variants { prefill, decode };
        let config = kernels_of(geometry, (Dtype::F32, Dtype::F32, Dtype::F32), variants);
        let error = pollster::block_on(Kernels::new(&device, &config)).unwrap_err();
        assert!(matches!(error, BuildError::Variants { .. }), "{error}");
    }
    let variants = Variants { decode: DecodeVariant::Exchange { subgroup: 8 }, ..good };
    let config = kernels_of(geometry, (Dtype::F32, Dtype::F32, Dtype::F32), variants);
    let error = pollster::block_on(Kernels::new(&device, &config)).unwrap_err();
    assert_eq!(error, BuildError::Subgroups { kernel: "decode", subgroup: 8 });
}

#[test]
fn kernels_that_cannot_be_built() {
    let geometry = HeadGeometry::new(4, 2, 20).unwrap();
    let kernel_config = kernels_of(geometry, (Dtype::F16, Dtype::F16, Dtype::F32), base(&geometry));
    let build = |limits, config: &KernelConfig| pollster::block_on(Kernels::new(&device(limits).0, config)).map(|_| ());
    let default = wgpu::Limits::default;
    assert_eq!(build(default(), &kernel_config), Ok(()));
    let bf16 = KernelConfig { out: Dtype::Bf16, ..kernel_config };
    assert_eq!(build(default(), &bf16), Err(BuildError::OutDtype { found: Dtype::Bf16 }));
    let modifiers = Modifiers { bias: Some(Dtype::Bf16), ..kernel_config.modifiers };
    let bf16 = KernelConfig { modifiers, ..kernel_config };
    assert_eq!(build(default(), &bf16), Err(BuildError::BiasDtype { found: Dtype::Bf16 }));

    let decode_bytes = KernelId::Decode.workgroup_bytes(&kernel_config);
    for (limits, kernel, limit, found, needed) in [
        (
            wgpu::Limits { max_compute_workgroup_storage_size: decode_bytes - 1, ..default() },
            "decode",
            "max_compute_workgroup_storage_size",
            decode_bytes - 1,
            decode_bytes,
        ),
        (
            wgpu::Limits { max_compute_invocations_per_workgroup: 63, ..default() },
            "prefill",
            "max_compute_invocations_per_workgroup",
            63,
            64,
        ),
        (
            wgpu::Limits { max_compute_workgroup_size_x: 32, ..default() },
            "prefill",
            "max_compute_workgroup_size_x",
            32,
            64,
        ),
        (
            wgpu::Limits { max_storage_buffers_per_shader_stage: 5, ..default() },
            "prefill",
            "max_storage_buffers_per_shader_stage",
            5,
            6,
        ),
    ] {
        let (found, needed) = (found.into(), needed.into());
        assert_eq!(build(limits, &kernel_config), Err(BuildError::Limit { kernel, limit, found, needed }));
    }
    // Exactly what is needed.
    let enough = wgpu::Limits {
        max_compute_workgroup_storage_size: decode_bytes,
        max_compute_invocations_per_workgroup: 64,
        max_compute_workgroup_size_x: 64,
        max_storage_buffers_per_shader_stage: 6,
        ..default()
    };
    assert_eq!(build(enough, &kernel_config), Ok(()));

    // Kernels of another configuration; head counts of the same ratio are the same configuration.
    let (device, ..) = device(default());
    let kernels = pollster::block_on(Kernels::new(&device, &kernel_config)).unwrap();
    let with = |config: &AttentionConfig| Attention::with_kernels(kernels.clone(), config).map(|_| ());
    let same = config(HeadGeometry::new(16, 8, 20).unwrap(), Dtype::F16, 3, 7);
    assert_eq!(with(&same), Ok(()));
    for other in [
        AttentionConfig { q: Dtype::F32, ..same },
        AttentionConfig { out: Dtype::F16, ..same },
        config(HeadGeometry::new(16, 16, 20).unwrap(), Dtype::F16, 3, 7),
        config(HeadGeometry::new(16, 8, 24).unwrap(), Dtype::F16, 3, 7),
        config(HeadGeometry::with_v_head_dim(16, 8, 20, 24).unwrap(), Dtype::F16, 3, 7),
        AttentionConfig { new_rows: Dtype::F32.into(), ..same },
        AttentionConfig { options: same.options.with_window(Some(4), None), ..same },
        AttentionConfig { extras: Extras { sinks: true, ..Extras::NONE }, ..same },
    ] {
        let needed = Box::new(other.kernels(kernel_config.variants));
        // Found and needed must not read the same.
        assert_ne!(kernel_config.to_string(), needed.to_string());
        assert_eq!(with(&other), Err(BuildError::OtherConfig { found: Box::new(kernel_config), needed }));
    }
}

/// The shapes of kernels at the ends of what is supported, made with WebGPU's default limits and no feature; then one
/// application that appends and attends, of which wgpu validates every command.
#[test]
fn base_kernels_need_default_limits_and_no_features() {
    let (device, _, info) = device(wgpu::Limits::default());
    assert!(device.features().is_empty());
    for facts in [AdapterFacts::PLAIN_GPU, AdapterFacts::PLAIN_CPU] {
        for (q_heads, kv_heads, head_dim, v_head_dim) in
            [(2, 2, 64, 64), (8, 1, 128, 128), (9, 1, 59, 111), (71, 1, 256, 256), (1, 1, 1, 256), (64, 8, 256, 1)]
        {
            for (q, kv, out) in [
                (Dtype::F32, Dtype::F32, Dtype::F32),
                (Dtype::F16, Dtype::F16, Dtype::F16),
                (Dtype::Bf16, Dtype::F16, Dtype::F32),
            ] {
                let geometry = HeadGeometry::with_v_head_dim(q_heads, kv_heads, head_dim, v_head_dim).unwrap();
                let variants = Variants::base(&facts, &geometry);
                let config = kernels_of(geometry, (q, kv, out), variants);
                pollster::block_on(Kernels::new(&device, &config)).unwrap();
            }
        }
    }
    assert_eq!(info.backend, wgpu::Backend::Noop);

    let app = App::new(wgpu::Limits::default());
    let layout = app.attention.config().layout;
    let plan = with_mixed_batch(|batch| AppendPlan::new(&layout, batch)).unwrap();
    let append = Append::upload(&app.device, &plan).unwrap();
    let new_rows = [(); 2].map(|()| storage(&app.device, 41 * 2 * 3 * 16));
    let [k, v] = new_rows.each_ref().map(|buffer| buffer.as_entire_buffer_binding());
    let source = AppendSource { k, v, kv: vec![app.buffers[1].as_entire_buffer_binding()], head_scales: None };
    let append = append.bind(&app.device, app.attention.kernels(), source, &app.workspace).unwrap();
    let call = app.attention.bind(&app.device, &app.device_plan, app.io(), &app.workspace).unwrap();
    let mut encoder = app.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        append.encode(&mut pass);
        call.encode(&mut pass);
    }
    app.queue.submit([encoder.finish()]);
}

/// A shader that the device refuses is an error of the build alone, with the kernel's name.
#[test]
fn pipelines_that_are_refused() {
    let (device, ..) = device(wgpu::Limits::default());
    let geometry = HeadGeometry::new(4, 2, 20).unwrap();
    let config = kernels_of(geometry, (Dtype::F16, Dtype::F16, Dtype::F32), base(&geometry));
    for kernel in KernelId::ALL {
        let edits = [SourceEdit { kernel, from: "report_done(lane);", to: "report_done(lane, 1u);" }];
        match pollster::block_on(Kernels::with_edits(&device, &config, &edits)) {
            Err(BuildError::Pipeline { kernel: found, message }) => {
                assert_eq!(found, kernel.entry_point());
                assert!(message.contains("report_done"), "{message}");
            }
            other => panic!("{other:?}"),
        }
        pollster::block_on(Kernels::new(&device, &config)).unwrap();
    }
}
