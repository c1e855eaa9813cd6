//! A window costs what it lets rows see: pages outside are neither looked up nor read.

use std::collections::HashSet;
use std::time::Instant;

use paged_attention::kernels::{KernelId, Kernels, SourceEdit};
use paged_attention::{
    Attention, Call, Case, DevicePlan, Dtype, KvSource, NO_PAGE, RunError, RunOptions, StatusError, Tensor, Workspace,
    wgpu,
};
use paged_attention_cases::{CaseSpec, Heads, Modifiers, Pool, build};

use crate::api::host::{Guarded, Host, Layer, batch, host, pool_bytes};
use crate::common::{Tally, bits, difference, gpu, run_options, say};

const KEYS: u32 = 16_384;
const WINDOW: u32 = 256;

/// Decodes and a prompt over many pages of 16, with a window that begins inside a page, a step and a split.
fn spec(heads: Heads, lengths: &[(u32, u32)]) -> CaseSpec {
    let window = Modifiers { window_left: Some(WINDOW), ..Modifiers::NONE };
    CaseSpec::new("windows", heads, lengths.iter().copied())
        .dtype(Dtype::F16)
        .causal(true)
        .paged(Pool::new(16).times(1))
        .modified(window)
        .seed(81)
}

/// The pool's tensors with NaN in all pages but those that `seen` still names.
fn poisoned(case: &Case, seen: &[u32]) -> [Tensor; 2] {
    let KvSource::Paged { k_pages, v_pages, .. } = case.kv() else { panic!("not paged") };
    let seen: HashSet<u32> = seen.iter().copied().collect();
    [k_pages, v_pages].map(|pages| {
        let page: usize = pages.shape()[1..].iter().product();
        let mut values = pages.to_f32();
        for (_, values) in (0..).zip(values.chunks_mut(page)).filter(|(id, _)| !seen.contains(id)) {
            values.fill(f32::NAN);
        }
        Tensor::from_f32(pages.dtype(), pages.shape(), &values).unwrap()
    })
}

/// `case` over other pages.
fn over(case: &Case, [k_pages, v_pages]: [Tensor; 2], ids: &[u32]) -> Case {
    let KvSource::Paged { page_indptr, kv_len, .. } = case.kv() else { panic!("not paged") };
    let (page_indptr, kv_len) = (page_indptr.clone(), kv_len.clone());
    let kv = KvSource::Paged { k_pages, v_pages, page_indptr, page_ids: ids.to_vec(), kv_len };
    Case::new(*case.geometry(), *case.options(), case.q().clone(), case.q_indptr().to_vec(), kv).unwrap()
}

/// In every variant, the same bits where the pages outside hold NaN and are not in the table; and where they hold NaN and are.
#[test]
fn pages_outside_the_window_are_not_read() {
    let (Some(gpu), Some(host)) = (gpu(), host()) else { return };
    let mut tally = Tally::new("windows");
    let spec = spec(Heads::new(4, 2, 16), &[(1, KEYS), (300, 5_000), (5, 2_222), (1, 100)]);
    let whole = build(&spec).unwrap();
    let KvSource::Paged { page_ids: all, .. } = whole.kv() else { panic!("not paged") };
    let withheld = build(&spec.clone().paged(Pool::new(16).times(1).withheld())).unwrap();
    let KvSource::Paged { page_ids: seen, .. } = withheld.kv() else { panic!("not paged") };
    let missing = seen.iter().filter(|id| **id == NO_PAGE).count();
    // A decode sees 17 pages, a prompt of 300 rows 36.
    assert!(missing > all.len() * 9 / 10, "{missing} of {} pages lie outside", all.len());
    let absent = over(&whole, poisoned(&whole, seen), seen);
    for variants in gpu.every_variant(whole.geometry()) {
        let options = RunOptions { variants: Some(variants), ..run_options(&spec) };
        let Some(expected) = tally.check_case(gpu, format!("whole, {variants}"), &whole, &options) else { continue };
        let output = gpu.run(&absent, &options).unwrap();
        tally.same(format!("withheld and poisoned, {variants}"), &absent, difference(&output, &expected));
        // The host refuses NaN in slots of a table, so this is recorded by hand.
        let layer = Layer::new(host, &whole, Dtype::F32);
        let kernels = pollster::block_on(Kernels::new(&host.device, &layer.config.kernels(variants))).unwrap();
        let attention = Attention::with_kernels(kernels, &layer.config).unwrap();
        let [k_pages, v_pages] = poisoned(&whole, seen);
        let kv = Guarded::new(host, &pool_bytes(&layer.config.layout, &k_pages, &v_pages));
        let plan = attention.plan(&batch(&whole)).unwrap();
        let workspace = Workspace::new(&host.device, plan.workspace_bytes()).unwrap();
        let io = paged_attention::AttentionIo { kv: vec![kv.binding()], ..layer.io() };
        let device_plan = DevicePlan::upload(&host.device, &plan).unwrap();
        let call = attention.bind(&host.device, &device_plan, io, &workspace).unwrap();
        host.submit(|pass| call.encode(pass));
        host.status(&workspace).check(call.workgroups()).unwrap();
        let [out, lse] = layer.results(host);
        let differ = bits("out", &out, &expected.out).or(bits("lse", &lse, &expected.lse));
        tally.same(format!("in the table and poisoned, {variants}"), &whole, differ);
        // A kernel that begins at its sequence's or split's first key is noticed: it meets pages that are not there.
        for (kernel, from, to) in [
            (KernelId::Prefill, "let key_begin = item.key_begin;", "let key_begin = 0u;"),
            (KernelId::Decode, "let first = item.key_begin - split_begin;", "let first = 0u;"),
        ] {
            let mut runner = gpu.fresh_runner();
            let config = options.kernels(&absent, variants);
            let edits = [SourceEdit { kernel, from, to }];
            let mutant = pollster::block_on(Kernels::with_edits(runner.device(), &config, &edits)).unwrap();
            runner.insert_kernels(mutant);
            let error = runner.run(&absent, &options).unwrap_err();
            assert!(matches!(error, RunError::Status(StatusError::PageId { .. })), "{error}");
            tally.held();
        }
    }
    tally.finish();
}

/// A window of 256 keys and none over 16,384 keys, on the application's device.
struct Pair<'a> {
    attention: [Attention; 2],
    plans: [paged_attention::Plan; 2],
    layers: [Layer<'a>; 2],
}

/// Shapes of which both are made: decodes, and a chunk of a prompt.
const SHAPES: [(&str, &[(u32, u32)]); 2] = [("decode", &[(1, KEYS); 4]), ("prefill", &[(512, KEYS)])];

impl<'a> Pair<'a> {
    fn cases(heads: Heads, lengths: &[(u32, u32)]) -> [Case; 2] {
        let spec = spec(heads, lengths);
        [spec.clone(), spec.modified(Modifiers::NONE)].map(|spec| build(&spec).unwrap())
    }

    fn new(host: &Host, cases: &'a [Case; 2]) -> Self {
        let layers = cases.each_ref().map(|case| Layer::new(host, case, Dtype::F32));
        let attention = layers.each_ref().map(|layer| host.attention(&layer.config));
        let plans = [0, 1].map(|i| attention[i].plan(&batch(&cases[i])).unwrap());
        Self { attention, plans, layers }
    }
}

/// By count of what the work items read.
#[test]
fn a_window_of_256_reads_less_than_a_twentieth_of_16384_keys() {
    let Some(host) = host() else { return };
    for (name, lengths) in SHAPES {
        let cases = Pair::cases(Heads::new(4, 2, 16), lengths);
        let pair = Pair::new(host, &cases);
        let [window, none] = pair.plans.each_ref().map(|plan| plan.kv_bytes_read());
        say(&format!("windows, {name}: {window} bytes of keys and values read, {none} without a window"));
        assert!(window * 20 < none, "{name}: {window} of {none} bytes");
        let groups =
            pair.plans.each_ref().map(|plan| plan.workgroups().iter().map(|(_, n)| u64::from(*n)).sum::<u64>());
        assert!(groups[0] <= groups[1], "{name}: {groups:?} workgroups");
    }
}

/// In time: rounds of both, one after the other in alternating order. On a machine that is busy with other work a single round
/// says little, so the upper quartile of the ratios counts.
#[test]
#[ignore = "timing: `ci/lanes window`"]
fn a_window_of_256_takes_less_than_a_twentieth_of_the_time() {
    const ROUNDS: usize = 20;
    let (Some(gpu), Some(_)) = (gpu(), host()) else { return };
    // Pools of a decode's keys are larger than what an application gets by default.
    let host = Host::open(gpu, gpu.adapter().limits());
    for (name, lengths) in SHAPES {
        let cases = Pair::cases(Heads::new(8, 2, 128), lengths);
        let pair = Pair::new(&host, &cases);
        let workspaces =
            pair.plans.each_ref().map(|plan| Workspace::new(&host.device, plan.workspace_bytes()).unwrap());
        let calls: [Call; 2] = [0, 1].map(|i| {
            let plan = DevicePlan::upload(&host.device, &pair.plans[i]).unwrap();
            pair.attention[i].bind(&host.device, &plan, pair.layers[i].io(), &workspaces[i]).unwrap()
        });
        // As many calls in a submit as it takes for neither to be all submission.
        let repeats = [32, 1];
        let seconds = |i: usize| {
            let start = Instant::now();
            host.submit(|pass| (0..repeats[i]).for_each(|_| calls[i].encode(pass)));
            host.device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
            start.elapsed().as_secs_f64() / f64::from(repeats[i])
        };
        // Once to warm up.
        let _ = [0, 1].map(seconds);
        let mut rounds: Vec<[f64; 2]> = (0..ROUNDS)
            .map(|round| {
                if round % 2 == 0 {
                    [0, 1].map(seconds)
                } else {
                    let [none, window] = [1, 0].map(seconds);
                    [window, none]
                }
            })
            .collect();
        let quartiles = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            [1, 2, 3].map(|quarter| values[quarter * (values.len() - 1) / 4])
        };
        let ratios = quartiles(rounds.iter().map(|[window, none]| window / none).collect());
        let [window, none] = [0, 1].map(|i| quartiles(rounds.iter_mut().map(|round| 1e3 * round[i]).collect()));
        say(&format!(
            "windows, {name}: {window:.3?} ms, without a window {none:.3?} ms, ratios {ratios:.4?} (quartiles of {ROUNDS})"
        ));
        assert!(ratios[2] < 0.05, "{name}: {ratios:?}");
    }
}
