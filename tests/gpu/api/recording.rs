//! Many calls: plans side by side, layers of one plan, one workspace for all, one count of what came to its end.

use std::time::Instant;

use paged_attention::{Case, Output, Status, StatusError, Workspace, wgpu};
use paged_attention::{DevicePlan, Plan};
use paged_attention_cases::{CaseSpec, Pool};

use super::host::{Host, Layer, batch, host};
use crate::common::{CONFIGS, Gpu, bits, gpu};

/// How calls are recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Recorded {
    /// All into one pass.
    OnePass,
    /// Each into a pass of its own, in one encoder.
    OneEncoder,
    /// Each submitted by itself, with nothing waited for.
    ManySubmits,
}

/// Two batches over the same kind of pool; the second has more of everything, and partial states where the first has
/// none.
const BATCHES: [&[(u32, u32)]; 2] = [&[(30, 40), (1, 20), (2, 9)], &[(1, 700), (50, 50), (3, 300), (20, 90), (1, 513)]];

struct Step {
    plan: Plan,
    device_plan: DevicePlan,
    layers: Vec<(Case, Output)>,
}

/// The same lengths and pages with other values: the layers of one step.
fn step(gpu: &Gpu, host: &Host, lengths: &[(u32, u32)], layers: u64) -> Step {
    let (dtype, heads) = CONFIGS[1];
    let spec = CaseSpec::new("api/recording", heads, lengths.iter().copied()).dtype(dtype).causal(true);
    // In order: the seed must not move the pages.
    let spec = spec.paged(Pool { order: paged_attention_cases::PageOrder::Reversed, ..Pool::new(8) });
    let layers: Vec<_> = (0..layers).map(|seed| gpu.run_spec(&spec.clone().seed(seed)).unwrap()).collect();
    let case = &layers[0].0;
    let attention = host.attention(&Layer::new(host, case, spec.out).config);
    let plan = attention.plan(&batch(case)).unwrap();
    let device_plan = DevicePlan::upload(&host.device, &plan).unwrap();
    Step { plan, device_plan, layers }
}

#[test]
fn plans_and_layers_side_by_side() {
    let (Some(gpu), Some(host)) = (gpu(), host()) else { return };
    let steps = BATCHES.map(|lengths| step(gpu, host, lengths, 3));
    assert_eq!(steps[0].plan.workspace_bytes(), 0);
    assert!(steps[1].plan.workspace_bytes() > 0);
    for recorded in [Recorded::OnePass, Recorded::OneEncoder, Recorded::ManySubmits] {
        // Layer by layer, the two steps in turn; partial states of all calls in the same workspace.
        let order: Vec<(&Step, &Case, &Output)> = (0..3)
            .flat_map(|layer| steps.each_ref().map(|step| (step, &step.layers[layer].0, &step.layers[layer].1)))
            .collect();
        let layers: Vec<_> =
            order.iter().map(|(_, case, _)| Layer::new(host, case, paged_attention::Dtype::F32)).collect();
        let workspace = Workspace::new(&host.device, steps[1].plan.workspace_bytes()).unwrap();
        let attentions: Vec<_> = layers.iter().map(|layer| host.attention(&layer.config)).collect();
        let calls: Vec<_> = order
            .iter()
            .zip(layers.iter().zip(&attentions))
            .map(|((step, ..), (layer, attention))| {
                attention.bind(&host.device, &step.device_plan, layer.io(), &workspace).unwrap()
            })
            .collect();
        match recorded {
            Recorded::OnePass => host.submit(|pass| calls.iter().for_each(|call| call.encode(pass))),
            Recorded::OneEncoder => {
                let mut encoder = host.encoder();
                for call in &calls {
                    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                    call.encode(&mut pass);
                }
                host.queue.submit([encoder.finish()]);
            }
            Recorded::ManySubmits => {
                calls.iter().for_each(|call| host.submit(|pass| call.encode(pass)));
            }
        }
        let workgroups: u32 = calls.iter().map(paged_attention::Call::workgroups).sum();
        host.status(&workspace).check(workgroups).unwrap();
        for (i, ((_, _, expected), layer)) in order.iter().zip(&layers).enumerate() {
            let [out, lse] = layer.results(host);
            let difference = bits("out", &out, &expected.out).or(bits("lse", &lse, &expected.lse));
            assert_eq!(difference, None, "{recorded:?}, call {i}");
        }
    }
}

/// A call is recorded any number of times, and the status adds up over submits for as long as the workspace lives.
#[test]
fn status_adds_up() {
    let (Some(gpu), Some(host)) = (gpu(), host()) else { return };
    let step = step(gpu, host, BATCHES[1], 1);
    let (case, expected) = &step.layers[0];
    let layer = Layer::new(host, case, paged_attention::Dtype::F32);
    let attention = host.attention(&layer.config);
    let workspace = Workspace::new(&host.device, step.plan.workspace_bytes()).unwrap();
    let call = attention.bind(&host.device, &step.device_plan, layer.io(), &workspace).unwrap();
    let groups = call.workgroups();
    assert_eq!(groups, step.plan.workgroups().iter().map(|(_, groups)| groups).sum::<u32>());
    assert_eq!(host.status(&workspace), Status::default());
    let mut calls = 0;
    for repeats in [1, 3, 2] {
        for _ in 0..repeats {
            host.submit(|pass| call.encode(pass));
            host.submit(|pass| (0..2).for_each(|_| call.encode(pass)));
            calls += 3;
        }
        let status = host.status(&workspace);
        assert_eq!(status, Status { completed: calls * groups, errors: 0 });
        status.check(calls * groups).unwrap();
        // One call too many or too few is not taken for success.
        for counted in [calls - 1, calls + 1] {
            let error = StatusError::Incomplete { found: calls * groups, needed: counted * groups };
            assert_eq!(status.check(counted * groups), Err(error));
        }
    }
    let [out, lse] = layer.results(host);
    assert_eq!(bits("out", &out, &expected.out).or(bits("lse", &lse, &expected.lse)), None);
}

#[test]
fn recording_is_quick() {
    let (Some(gpu), Some(host)) = (gpu(), host()) else { return };
    let step = step(gpu, host, BATCHES[1], 1);
    let layer = Layer::new(host, &step.layers[0].0, paged_attention::Dtype::F32);
    let attention = host.attention(&layer.config);
    let workspace = Workspace::new(&host.device, step.plan.workspace_bytes()).unwrap();
    let call = attention.bind(&host.device, &step.device_plan, layer.io(), &workspace).unwrap();
    let mut milliseconds: Vec<f64> = (0..15)
        .map(|_| {
            let mut encoder = host.encoder();
            let start = Instant::now();
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                (0..1000).for_each(|_| call.encode(&mut pass));
            }
            let _commands = encoder.finish();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    milliseconds.sort_by(f64::total_cmp);
    let median = milliseconds[milliseconds.len() / 2];
    crate::common::say(&format!("api/recording: 1,000 calls of 3 dispatches encoded in {median:.2} ms (median of 15)"));
    // A pipeline or a bind group made per call would take longer.
    assert!(median < 1000.0, "{median} ms");
}

/// wgpu counts what its backend has made. Binding makes one bind group, so that the counting is seen to work; recording,
/// whose pass and command buffer are the caller's, makes nothing.
#[test]
fn recording_creates_nothing() {
    let (Some(gpu), Some(shared)) = (gpu(), host()) else { return };
    // Other tests make things on the shared device at the same time.
    let host = &Host::open(gpu, shared.device.limits());
    let step = step(gpu, host, BATCHES[1], 1);
    let layer = Layer::new(host, &step.layers[0].0, paged_attention::Dtype::F32);
    let attention = host.attention(&layer.config);
    let workspace = Workspace::new(&host.device, step.plan.workspace_bytes()).unwrap();
    // Encoders are kept for reuse, and so is what they allocate.
    host.submit(|_| {});
    host.device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    let made = || {
        let counters = host.device.get_internal_counters().hal;
        [
            counters.buffers.read(),
            counters.bind_groups.read(),
            counters.bind_group_layouts.read(),
            counters.pipeline_layouts.read(),
            counters.compute_pipelines.read(),
            counters.shader_modules.read(),
            counters.textures.read(),
            counters.samplers.read(),
            counters.query_sets.read(),
            counters.memory_allocations.read(),
        ]
    };
    let before = made();
    let call = attention.bind(&host.device, &step.device_plan, layer.io(), &workspace).unwrap();
    let bound = made();
    let mut one_more = before;
    one_more[1] += 1;
    assert_eq!(bound, one_more);
    let mut encoder = host.encoder();
    {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        (0..1000).for_each(|_| call.encode(&mut pass));
    }
    let _commands = encoder.finish();
    assert_eq!(made(), bound);
}
