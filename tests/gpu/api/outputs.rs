//! What a call writes: every owned element of its results, and nothing else.

use paged_attention::Dtype::{F16, F32};
use paged_attention::kernels::{KernelId, SourceEdit};
use paged_attention::{Attention, AttentionIo, BindError, DevicePlan, Kernels, PageSize, Workspace, wgpu};
use paged_attention_cases::{CaseSpec, Heads, Pool, build};

use super::host::{Guarded, Host, Layer, batch, host};
use crate::common::{CONFIGS, Tally, bits, gpu, judge, run_options};

/// A prompt, a chunk, decodes in one split and in three, short rows, rows without keys, keys without rows.
const LENGTHS: [(u32, u32); 8] = [(40, 60), (1, 600), (3, 20), (1, 0), (0, 5), (20, 7), (2, 256), (33, 33)];

fn specs() -> Vec<CaseSpec> {
    let spec = |heads| CaseSpec::new("api/outputs", heads, LENGTHS).paged(Pool::new(5)).causal(true).seed(41);
    let padded = spec(Heads::new(2, 1, 20).with_v(12)).dtypes(F32, F16).out(F16);
    let mut specs: Vec<_> = CONFIGS.map(|(dtype, heads)| spec(heads).dtype(dtype)).to_vec();
    specs.extend([padded.clone(), padded.clone().causal(false).paged(Pool::new(64))]);
    // Kernel by kernel: prefill only, decode only, decode and merge, no row at all.
    for lengths in [vec![(50, 50); 2], vec![(1, 30); 3], vec![(1, 700)], vec![(0, 3)], vec![]] {
        specs.push(CaseSpec { seqs: CaseSpec::new("", padded.heads, lengths).seqs, ..padded.clone() });
    }
    specs
}

/// Plans, binds and records one layer by itself.
fn run(host: &Host, layer: &Layer<'_>, plan: &DevicePlan, workspace: &Workspace) {
    let attention = host.attention(&layer.config);
    let call = attention.bind(&host.device, plan, layer.io(), workspace).unwrap();
    host.submit(|pass| call.encode(pass));
    host.status(workspace).check(call.workgroups()).unwrap();
}

#[test]
fn results_are_written_and_nothing_else() {
    let (Some(gpu), Some(host)) = (gpu(), host()) else { return };
    let mut tally = Tally::new("api/outputs");
    for spec in specs() {
        let (case, expected) = gpu.run_spec(&spec).unwrap();
        match judge(&case, &expected) {
            Ok(report) => tally.ratio(report.max_bound_ratio, &spec),
            Err(why) => tally.fail(&spec, Some(&case), why),
        }
        let layer = Layer::new(host, &case, spec.out);
        let plan = host.attention(&layer.config).plan(&batch(&case)).unwrap();
        let workspace = Workspace::new(&host.device, plan.workspace_bytes()).unwrap();
        run(host, &layer, &DevicePlan::upload(&host.device, &plan).unwrap(), &workspace);
        let [out, lse] = layer.results(host);
        tally.same(&spec, &case, bits("out", &out, &expected.out).or(bits("lse", &lse, &expected.lse)));
    }
    tally.finish();
}

/// Both results in one buffer, and bindings that reach to the end of theirs.
#[test]
fn results_side_by_side_in_one_buffer() {
    let (Some(gpu), Some(host)) = (gpu(), host()) else { return };
    let spec = &specs()[0];
    let (case, expected) = gpu.run_spec(spec).unwrap();
    let layer = Layer::new(host, &case, spec.out);
    let attention = host.attention(&layer.config);
    let plan = attention.plan(&batch(&case)).unwrap();
    let workspace = Workspace::new(&host.device, plan.workspace_bytes()).unwrap();
    let (out_bytes, lse_bytes) = (4 * expected.out.len() as u64, 4 * expected.lse.len() as u64);
    let alignment = u64::from(host.device.limits().min_storage_buffer_offset_alignment);
    let lse_offset = out_bytes.next_multiple_of(alignment);
    let both = host.buffer(&vec![0x77; (lse_offset + lse_bytes + 64) as usize]);
    let io = AttentionIo {
        out: wgpu::BufferBinding { buffer: &both, offset: 0, size: None },
        lse: wgpu::BufferBinding { buffer: &both, offset: lse_offset, size: None },
        ..layer.io()
    };
    let plan = DevicePlan::upload(&host.device, &plan).unwrap();
    let call = attention.bind(&host.device, &plan, io, &workspace).unwrap();
    host.submit(|pass| call.encode(pass));
    let bytes = host.read(&both);
    let part = |from: u64, to: u64| bytes[from as usize..to as usize].to_vec();
    assert_eq!(bits("out", &super::host::owned(F32, &part(0, out_bytes), 64), &expected.out), None);
    let lse = super::host::owned(F32, &part(lse_offset, lse_offset + lse_bytes), 1);
    assert_eq!(bits("lse", &lse, &expected.lse), None);
    for gap in [part(out_bytes, lse_offset), part(lse_offset + lse_bytes, bytes.len() as u64)] {
        assert!(gap.iter().all(|byte| *byte == 0x77));
    }
}

/// The classes of refusals have tests that need no adapter; here their having no effect is read back.
#[test]
fn a_refused_call_has_no_effect() {
    let Some(host) = host() else { return };
    let spec = &specs()[0];
    let case = build(spec).unwrap();
    assert!(run_options(spec).page_ids.is_none());
    let layer = Layer::new(host, &case, spec.out);
    let attention = host.attention(&layer.config);
    let plan = attention.plan(&batch(&case)).unwrap();
    let device_plan = DevicePlan::upload(&host.device, &plan).unwrap();
    let workspace = Workspace::new(&host.device, plan.workspace_bytes()).unwrap();
    let small = Guarded::unwritten(host, 32);

    let mut refused = Vec::new();
    let mut bind = |io: AttentionIo<'_>, workspace: &Workspace| {
        refused.push(attention.bind(&host.device, &device_plan, io, workspace).unwrap_err());
    };
    bind(AttentionIo { out: small.binding(), ..layer.io() }, &workspace);
    bind(AttentionIo { lse: small.binding(), ..layer.io() }, &workspace);
    bind(layer.io(), &Workspace::new(&host.device, 0).unwrap());
    let io = layer.io();
    bind(AttentionIo { out: wgpu::BufferBinding { offset: io.out.offset + 16, ..io.out }, ..io }, &workspace);
    let layout = &layer.config.layout;
    let layout = layout.with_pages(PageSize::new(6).unwrap(), layout.page_count());
    let other = host.attention(&paged_attention::AttentionConfig { layout: layout.unwrap(), ..layer.config });
    refused.push(other.bind(&host.device, &device_plan, layer.io(), &workspace).unwrap_err());
    assert!(
        matches!(
            refused[..],
            [
                BindError::TooSmall { buffer: "out", found: 32, .. },
                BindError::TooSmall { buffer: "lse", found: 32, .. },
                BindError::TooSmall { buffer: "workspace", found: 272, .. },
                BindError::Unaligned { buffer: "out", .. },
                BindError::OtherLayout { .. },
            ]
        ),
        "{refused:?}"
    );

    host.submit(|_| {});
    assert!(layer.is_untouched(host));
    assert_eq!(host.status(&workspace), paged_attention::Status::default());
    // After the refusals the same objects still serve.
    run(host, &layer, &device_plan, &workspace);
    assert!(!layer.is_untouched(host));
}

/// What a kernel leaves out stays NaN.
#[test]
fn an_element_that_is_not_written_is_noticed() {
    let (Some(gpu), Some(host)) = (gpu(), host()) else { return };
    let spec = CaseSpec::new("api/unwritten", Heads::new(2, 1, 8).with_v(16), LENGTHS).paged(Pool::new(5)).seed(42);
    let (case, expected) = gpu.run_spec(&spec).unwrap();
    let layer = Layer::new(host, &case, spec.out);
    let attention = host.attention(&layer.config);
    let plan = attention.plan(&batch(&case)).unwrap();
    let plan = DevicePlan::upload(&host.device, &plan).unwrap();
    for (kernel, from, to) in [
        (KernelId::Prefill, "lse[query] = end.lse;", ""),
        (KernelId::Prefill, "store_out(query, 1u,", "store_out(query, 0u,"),
        (KernelId::Decode, "store_out(query, chunk, scaled", "store_out(query, 0u, scaled"),
        (KernelId::Merge, "        if chunk == 0u {", "if chunk == 2u {"),
    ] {
        let edits = [SourceEdit { kernel, from, to }];
        let config = attention.kernels().config();
        let kernels = pollster::block_on(Kernels::with_edits(&host.device, config, &edits)).unwrap();
        let mutant = Attention::with_kernels(kernels, &layer.config).unwrap();
        let layer = Layer::new(host, &case, spec.out);
        let workspace = Workspace::new(&host.device, 1 << 16).unwrap();
        let call = mutant.bind(&host.device, &plan, layer.io(), &workspace).unwrap();
        host.submit(|pass| call.encode(pass));
        let [out, lse] = layer.results(host);
        let left_out = |found: &[f32]| found.iter().filter(|x| x.is_nan()).count();
        assert!(left_out(&out) + left_out(&lse) > 0, "nobody notices {edits:?}");
    }
    let workspace = Workspace::new(&host.device, 1 << 16).unwrap();
    run(host, &layer, &plan, &workspace);
    let [out, lse] = layer.results(host);
    assert_eq!(bits("out", &out, &expected.out).or(bits("lse", &lse, &expected.lse)), None);
}
