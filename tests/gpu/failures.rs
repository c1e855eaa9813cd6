//! A device that is lost, commands that never reach it or only in part: typed errors, nothing half done, and what can go
//! on goes on.

use paged_attention::kernels::{KernelId, Kernels, SourceEdit};
use paged_attention::{
    Append, AppendPlan, AppendSource, Attention, Batch, Call, Case, DevicePlan, Dtype, RunError, RunOptions, Status,
    StatusError, Workspace, wgpu,
};
use paged_attention_cases::{CaseSpec, Heads, Pool, build};

use crate::api::host::Guarded;
use crate::api::{Host, Layer, batch, host};
use crate::common::{CONFIGS, bits, difference, gpu, plain_options, run_options, say};

const LENGTHS: [(u32, u32); 3] = [(40, 90), (1, 600), (3, 20)];

fn spec() -> CaseSpec {
    let (dtype, heads) = CONFIGS[1];
    CaseSpec::new("failures", heads, LENGTHS).dtype(dtype).causal(true).paged(Pool::new(16)).seed(81)
}

#[test]
fn a_lost_device_is_said_to_be_lost() {
    let Some(gpu) = gpu() else { return };
    let (case, expected) = gpu.run_spec(&spec()).unwrap();
    let run = run_options(&spec());
    let variants = gpu.variants(|base| run.kernels(&case, base), case.geometry()).unwrap();
    let run = RunOptions { variants: Some(variants), ..run };
    let mut runner = gpu.fresh_runner();
    assert_eq!(difference(&runner.run(&case, &run).unwrap(), &expected), None);
    runner.device().destroy();
    let lost = |result: Result<(), RunError>| {
        assert!(matches!(result, Err(RunError::Lost(_))), "{result:?}");
    };
    // With pipelines that were made before, again, in many submits, and with others that are yet to be made.
    lost(runner.run(&case, &run).map(|_| ()));
    lost(runner.run(&case, &run).map(|_| ()));
    lost(runner.run(&case, &RunOptions { submit_work_max: Some(1), ..run.clone() }).map(|_| ()));
    let other = CaseSpec::new("failures/other", Heads::new(1, 1, 8), [(3, 9)]).paged(Pool::new(4));
    lost(runner.run(&build(&other).unwrap(), &run_options(&other)).map(|_| ()));
    // Another runner on the same adapter goes on.
    assert_eq!(difference(&gpu.fresh_runner().run(&case, &run).unwrap(), &expected), None);
}

/// The device goes in the middle of a call of many submits: the loss, and no part of a result.
#[test]
fn a_device_that_goes_between_the_submits_of_a_call() {
    let Some(gpu) = gpu() else { return };
    let (dtype, heads) = CONFIGS[1];
    let spec = CaseSpec::new("failures/submits", heads, [(600, 900), (1, 2000)]).dtype(dtype).causal(true).seed(83);
    let (case, expected) = gpu.run_spec(&spec).unwrap();
    let variants = gpu.variants(|base| run_options(&spec).kernels(&case, base), case.geometry()).unwrap();
    // A submit for every workgroup.
    let run = RunOptions { variants: Some(variants), submit_work_max: Some(1), ..run_options(&spec) };
    let mut share = 2;
    loop {
        let mut runner = gpu.fresh_runner();
        let whole = runner.run(&case, &run).unwrap();
        assert!(whole.submits > 20, "{} submits", whole.submits);
        assert_eq!(difference(&whole, &expected), None);
        let device = runner.device().clone();
        let result = std::thread::scope(|scope| {
            let running = scope.spawn(|| runner.run(&case, &run));
            std::thread::sleep(std::time::Duration::from_secs_f64(whole.wall_ms / 1e3 / f64::from(share)));
            device.destroy();
            running.join().unwrap()
        });
        match result {
            Err(RunError::Lost(_)) => break,
            // It was faster this time.
            Ok(output) => assert_eq!(difference(&output, &expected), None),
            Err(other) => panic!("{other}"),
        }
        assert!(share < 32, "the call always ends before the device does");
        share *= 2;
    }
    assert_eq!(difference(&gpu.fresh_runner().run(&case, &run).unwrap(), &expected), None);
}

/// A case's call, bound to a layer and a workspace of its own, with a slice for every workgroup.
fn call_in_slices<'a>(host: &'a Host, case: &'a Case) -> (Layer<'a>, Workspace, Call) {
    let layer = Layer::new(host, case, Dtype::F32);
    let attention = host.attention(&layer.config);
    let mut plan = attention.plan(&batch(case)).unwrap();
    plan.cut(|_| 1);
    let workspace = Workspace::new(&host.device, plan.workspace_bytes()).unwrap();
    let device_plan = DevicePlan::upload(&host.device, &plan).unwrap();
    let call = attention.bind(&host.device, &device_plan, layer.io(), &workspace).unwrap();
    (layer, workspace, call)
}

/// The same for an application: half of a call's slices reach the device, which then goes.
#[test]
fn an_application_whose_device_goes_between_slices() {
    let (Some(gpu), Some(shared)) = (gpu(), host()) else { return };
    let (case, expected) = gpu.run_spec(&spec()).unwrap();
    let lost = Host::open(gpu, shared.device.limits());
    for (host, goes) in [(&lost, true), (shared, false)] {
        let (layer, workspace, call) = call_in_slices(host, &case);
        let half = call.slices() / 2;
        host.submit(|pass| call.encode_slices(pass, 0..half));
        let found = half as u32;
        assert_eq!(host.status(&workspace), Status { completed: found, errors: 0 });
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let descriptor = wgpu::BufferDescriptor { label: None, size: 8, usage, mapped_at_creation: false };
        let readback = host.device.create_buffer(&descriptor);
        if goes {
            host.device.destroy();
        }
        host.submit(|pass| call.encode_slices(pass, half..usize::MAX));
        if goes {
            // Nothing can be read any more: no status that looks whole, and no half of a result.
            let mut encoder = host.encoder();
            encoder.copy_buffer_to_buffer(workspace.status(), 0, &readback, 0, 8);
            host.queue.submit([encoder.finish()]);
            let (sender, receiver) = std::sync::mpsc::channel();
            readback.map_async(wgpu::MapMode::Read, .., move |mapped| sender.send(mapped.is_ok()).unwrap());
            let _ = host.device.poll(wgpu::PollType::wait_indefinitely());
            assert_eq!(receiver.try_recv(), Ok(false));
        } else {
            host.status(&workspace).check(call.workgroups()).unwrap();
            let [out, lse] = layer.results(host);
            assert_eq!(bits("out", &out, &expected.out).or(bits("lse", &lse, &expected.lse)), None);
        }
    }
}

/// A driver without memory for the pages of a run: an error of that run alone. In a process of its own, which then may have
/// no more memory than it has.
#[cfg(target_os = "linux")]
#[test]
fn a_run_without_memory() {
    const CHILD: &str = "PAGED_ATTENTION_TEST_LITTLE_MEMORY";
    let Some(gpu) = gpu() else { return };
    let info = gpu.adapter().get_info();
    if (info.device_type, info.backend) != (wgpu::DeviceType::Cpu, wgpu::Backend::Vulkan) {
        say(
            "a_run_without_memory: left out, since only Vulkan in the memory of the process can be denied some and say so",
        );
        return;
    }
    if std::env::var_os(CHILD).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", "failures::a_run_without_memory"]).env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let passed = output.status.success() && text.contains("1 passed");
        assert!(passed, "{text}{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let small = CaseSpec::new("failures/memory", Heads::new(4, 2, 64), [(3, 9), (1, 300)]).dtype(Dtype::F16);
    let small = small.contiguous(Pool::new(16)).seed(82);
    let (case, options) = (build(&small).unwrap(), plain_options(16));
    let mut runner = gpu.fresh_runner();
    let expected = runner.run(&case, &options).unwrap();
    // Spare pages: of 16 tokens, 2 heads, keys and values of 64 dimensions in f16. All that WebGPU lets a binding have.
    let last = (128 << 20) / (16 * 2 * 2 * 64 * 2) - 1;
    let spare = RunOptions { page_ids: Some((0..19).chain([last]).collect()), ..options.clone() };
    assert_eq!(difference(&runner.run(&case, &spare).unwrap(), &expected), None);

    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let bytes = line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024 + (64 << 20);
    let limit = ["--pid", &std::process::id().to_string(), &format!("--as={bytes}")].map(str::to_owned);
    assert!(std::process::Command::new("prlimit").args(limit).status().unwrap().success());
    for _ in 0..2 {
        match runner.run(&case, &spare) {
            Err(RunError::OutOfMemory(missing)) => {
                assert_eq!((missing.buffer.as_str(), missing.bytes), ("kv pages", 128 << 20));
            }
            other => panic!("{:?}", other.map(|_| "a result")),
        }
        // The same runner has memory for what is small.
        assert_eq!(difference(&runner.run(&case, &options).unwrap(), &expected), None);
    }
}

/// The device goes while a call is bound and its plan is on the way: errors, or nothing, but no panic and no result.
#[test]
fn an_application_whose_device_goes() {
    let (Some(gpu), Some(shared)) = (gpu(), host()) else { return };
    let host = crate::api::Host::open(gpu, shared.device.limits());
    let case = build(&spec()).unwrap();
    let layer = Layer::new(&host, &case, Dtype::F32);
    let attention = host.attention(&layer.config);
    let plan = attention.plan(&batch(&case)).unwrap();
    let workspace = Workspace::new(&host.device, plan.workspace_bytes()).unwrap();
    let device_plan = DevicePlan::with_capacity(&host.device, &attention, &plan.capacity()).unwrap();
    let call = attention.bind(&host.device, &device_plan, layer.io(), &workspace).unwrap();
    let mut belt = wgpu::util::StagingBelt::new(host.device.clone(), 1 << 16);
    let mut encoder = host.encoder();
    device_plan.write(&mut belt, &mut encoder, &plan).unwrap();
    let readback = host.device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 16,
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    host.device.destroy();
    call.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    belt.finish();
    host.queue.submit([encoder.finish()]);
    belt.recall();
    // wgpu takes commands for a lost device and drops them: what tells is the loss callback, and the map that fails.
    let mut encoder = host.encoder();
    let again = device_plan.write(&mut belt, &mut encoder, &plan);
    let upload = DevicePlan::upload(&host.device, &plan).map(|_| ());
    assert!(upload.is_err() && again.is_ok(), "{upload:?}, {again:?}");
    call.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    belt.finish();
    host.queue.submit([encoder.finish()]);
    belt.recall();
    let (sender, receiver) = std::sync::mpsc::channel();
    readback.map_async(wgpu::MapMode::Read, .., move |mapped| sender.send(mapped.is_ok()).unwrap());
    let _ = host.device.poll(wgpu::PollType::wait_indefinitely());
    assert_eq!(receiver.try_recv(), Ok(false));
}

/// Command buffers that are dropped, or of which only some are submitted, leave a count that is short; the same call
/// submitted again is whole.
#[test]
fn commands_that_were_not_submitted() {
    let (Some(gpu), Some(host)) = (gpu(), host()) else { return };
    let (case, expected) = gpu.run_spec(&spec()).unwrap();
    let (layer, workspace, call) = call_in_slices(host, &case);
    let needed = call.workgroups();
    {
        let mut encoder = host.encoder();
        call.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    }
    assert_eq!(host.status(&workspace).check(needed), Err(StatusError::Incomplete { found: 0, needed }));
    assert!(layer.is_untouched(host));
    let some = call.slices() / 2;
    host.submit(|pass| call.encode_slices(pass, 0..some));
    let found = some as u32;
    assert_eq!(host.status(&workspace), Status { completed: found, errors: 0 });
    assert_eq!(host.status(&workspace).check(needed), Err(StatusError::Incomplete { found, needed }));
    // From the beginning again; the count goes on from where it was.
    let before = host.status(&workspace);
    host.submit(|pass| call.encode(pass));
    host.status(&workspace).check(found + needed).unwrap();
    host.status(&workspace).check_since(before, needed).unwrap();
    let [out, lse] = layer.results(host);
    assert_eq!(bits("out", &out, &expected.out).or(bits("lse", &lse, &expected.lse)), None);
}

/// A server's step, written into the same buffers each time.
struct Written<'a> {
    host: &'a Host,
    attention: &'a Attention,
    batch: Batch<'a>,
    plan: DevicePlan,
    append: Append,
    belt: wgpu::util::StagingBelt,
}

impl<'a> Written<'a> {
    /// With room for the plans of a step, or with these plans in it already.
    fn new(host: &'a Host, attention: &'a Attention, batch: Batch<'a>, uploaded: bool) -> Self {
        let (config, device) = (attention.config(), &host.device);
        let plan = attention.plan(&batch).unwrap();
        let append = AppendPlan::new(&config.layout, &batch).unwrap();
        let (plan, append) = if uploaded {
            (DevicePlan::upload(device, &plan).unwrap(), Append::upload(device, &append).unwrap())
        } else {
            (
                DevicePlan::with_capacity(device, attention, &plan.capacity()).unwrap(),
                Append::with_capacity(device, &config.layout, &config.new_rows, batch.total_q()).unwrap(),
            )
        };
        Self { host, attention, batch, plan, append, belt: wgpu::util::StagingBelt::new(device.clone(), 1 << 16) }
    }

    /// Writes the plans of a step; the commands are submitted, or given up.
    fn write(&mut self, arrives: bool) {
        let mut encoder = self.host.encoder();
        self.plan.write(&mut self.belt, &mut encoder, &self.attention.plan(&self.batch).unwrap()).unwrap();
        let append = AppendPlan::new(&self.attention.config().layout, &self.batch).unwrap();
        self.append.write(&mut self.belt, &mut encoder, &append).unwrap();
        self.belt.finish();
        if arrives {
            self.host.queue.submit([encoder.finish()]);
        } else {
            drop(encoder);
        }
        self.belt.recall();
    }

    /// A call of some kernels, over a layer of its own, and what it says of itself.
    fn call(&mut self, layer: &Layer<'_>, appends: bool, before: impl FnOnce(&mut Self)) -> Result<(), StatusError> {
        let (host, attention) = (self.host, self.attention);
        let layout = &attention.config().layout;
        let workspace = Workspace::new(&host.device, attention.plan(&self.batch).unwrap().workspace_bytes()).unwrap();
        let pages = Guarded::unwritten(host, layout.bytes());
        let rows = u64::from(self.batch.total_q() * layout.geometry().kv_heads());
        let rows = Guarded::unwritten(host, rows * u64::from(Dtype::F32.row_words(layout.geometry().head_dim())) * 4);
        let source =
            AppendSource { k: rows.binding(), v: rows.binding(), kv: vec![pages.binding()], head_scales: None };
        let append = self.append.bind(&host.device, attention.kernels(), source, &workspace).unwrap();
        let call = attention.bind(&host.device, &self.plan, layer.io(), &workspace).unwrap();
        let mut encoder = host.encoder();
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            if appends {
                append.encode(&mut pass);
            } else {
                call.encode(&mut pass);
            }
        }
        let needed = if appends { append.workgroups() } else { call.workgroups() };
        assert!(needed > 0);
        before(self);
        host.queue.submit([encoder.finish()]);
        host.status(&workspace).check(needed)
    }
}

/// The encoder of a plan's write is given up, and its calls are submitted all the same, over the plan before: of the same
/// numbers, so that no count tells. And calls are submitted after the write that comes behind them.
#[test]
fn a_plan_that_was_not_written() {
    let (Some(gpu), Some(host)) = (gpu(), host()) else { return };
    let (case, expected) = gpu.run_spec(&spec()).unwrap();
    let attention = host.attention(&Layer::new(host, &case, Dtype::F32).config);
    let unwritten = Err(StatusError::Unwritten { bits: 8 });
    for (appends, uploaded) in [(false, false), (false, true), (true, false), (true, true)] {
        for lost in [1, 2, 7] {
            let mut written = Written::new(host, &attention, batch(&case), uploaded);
            if !uploaded {
                written.write(true);
            }
            let layers = [0; 3].map(|_| Layer::new(host, &case, Dtype::F32));
            written.call(&layers[0], appends, |_| ()).unwrap();
            (0..lost).for_each(|_| written.write(false));
            assert_eq!(written.call(&layers[1], appends, |_| ()), unwritten, "{lost} lost");
            assert!(layers[1].is_untouched(host));
            // What is written anew is in order, whatever was lost before.
            written.write(true);
            written.call(&layers[2], appends, |_| ()).unwrap();
            if !appends {
                let [out, lse] = layers[2].results(host);
                assert_eq!(bits("out", &out, &expected.out).or(bits("lse", &lse, &expected.lse)), None);
            }
            // Recorded before the next write, submitted after it.
            assert_eq!(written.call(&layers[1], appends, |written| written.write(true)), unwritten);
        }
    }

    // Kernels that count workgroups which the plan has not would take such a call for a whole one.
    let mutants = [
        (KernelId::Prefill, "report_groups(params.prefill_groups);"),
        (KernelId::Decode, "report_groups(params.decode_groups);"),
        (KernelId::Merge, "report_groups(params.merge_groups);"),
        (KernelId::Append, "report_groups(params.groups);"),
    ];
    let edits = mutants.map(|(kernel, from)| SourceEdit { kernel, from, to: "report_done(lane);" });
    let kernels = pollster::block_on(Kernels::with_edits(&host.device, attention.kernels().config(), &edits)).unwrap();
    let attention = Attention::with_kernels(kernels, attention.config()).unwrap();
    for appends in [false, true] {
        let mut written = Written::new(host, &attention, batch(&case), false);
        let layer = Layer::new(host, &case, Dtype::F32);
        written.write(true);
        written.write(false);
        assert_eq!(written.call(&layer, appends, |_| ()), Ok(()), "nobody would notice");
    }
}
