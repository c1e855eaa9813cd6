//! Tables of measured variants, wishes for others than the rule's, and what becomes of those that fail.

use std::time::Duration;

use paged_attention::kernels::{Alternatives, KernelConfig, KernelId, Kernels, SourceEdit, Variants};
use paged_attention::{
    ChosenBy, Dtype, HeadGeometry, Modifiers, Output, Preference, RunError, RunOptions, Runner, SelfTestError, Timing,
    Tuning, TuningError,
};
use paged_attention_cases::{CaseSpec, Heads, Pool, build};

use crate::common::{Gpu, gpu, judge, run_options, say};

/// On a busy machine too.
const TIME_FOR_ALL: Duration = Duration::from_secs(60);

/// Small: every variant is a compilation.
const HEADS: Heads = Heads::new(4, 2, 8);

/// A prompt, and a decode of three splits.
fn spec() -> CaseSpec {
    CaseSpec::new("tuning", HEADS, [(40, 75), (1, 600)]).causal(true).paged(Pool::new(4))
}

fn config(heads: Heads, variants: Variants) -> KernelConfig {
    let (q, kv, out) = (Dtype::F32, Dtype::F32, Dtype::F32);
    KernelConfig {
        geometry: heads.geometry().unwrap(),
        q,
        kv: kv.into(),
        new_rows: kv.into(),
        out,
        modifiers: Modifiers::NONE,
        segments: std::num::NonZeroU32::MIN,
        variants,
    }
}

/// What the rule prefers, and a pair of others that the adapter can run.
fn rule_and_other(gpu: &Gpu) -> (Variants, Variants) {
    let geometry = HEADS.geometry().unwrap();
    let rule = Variants::candidates(&gpu.facts(), &geometry)[0];
    let others = Alternatives::new(&rule, &gpu.facts(), &geometry);
    // An adapter without subgroups has one decode kernel.
    (rule, Variants { prefill: others.prefill[1], decode: *others.decode.last().unwrap() })
}

/// A table with one entry, made as whoever edits one would.
fn table(runner: &Runner, shape: &KernelConfig, variants: Variants) -> Tuning {
    let empty = Tuning::new(runner.adapter_info());
    let Variants { prefill, decode } = variants;
    let text = format!("{empty}{}\n{prefill} run_ms=1 compile_ms=1\n{decode} run_ms=1 compile_ms=1\n", shape.shape());
    text.parse().unwrap()
}

fn run(runner: &mut Runner) -> Output {
    let case = build(&spec()).unwrap();
    let output = runner.run(&case, &run_options(&spec())).unwrap();
    judge(&case, &output).unwrap();
    output
}

/// The variants that a run reports are those that its choice says.
fn check_ran(output: &Output, variants: &Variants) {
    let choice = output.choice.as_ref().unwrap();
    assert_eq!(choice.variants, *variants, "{choice:?}");
    let names: Vec<&str> = output.kernels.iter().map(|used| used.kernel.as_str()).collect();
    assert_eq!(names, [&variants.prefill.to_string(), &variants.decode.to_string(), "merge"]);
}

fn insert(runner: &mut Runner, variants: Variants, edits: &[SourceEdit]) {
    let config = config(HEADS, variants);
    let kernels = pollster::block_on(Kernels::with_edits(runner.device(), &config, edits)).unwrap();
    runner.insert_kernels(kernels);
}

#[test]
fn a_table_is_used_and_said_to_be() {
    let Some(gpu) = gpu() else { return };
    let (rule, other) = rule_and_other(gpu);
    assert_ne!(rule, other);
    let mut runner = gpu.fresh_runner();
    let by_rule = run(&mut runner);
    check_ran(&by_rule, &rule);
    let choice = by_rule.choice.unwrap();
    assert_eq!((choice.by, choice.rule), (ChosenBy::Rule, rule));
    let merge_ms = choice.compile.merge_ms;
    assert!(merge_ms > 0.0);

    let tuning = table(&runner, &config(HEADS, rule), other);
    runner.prefer(Preference::Tuned(tuning.clone())).unwrap();
    let tuned = run(&mut runner);
    check_ran(&tuned, &other);
    let choice = tuned.choice.unwrap();
    assert_eq!((choice.by, choice.rule), (ChosenBy::Tuning, rule));
    assert!(choice.stepped_down.is_empty() && choice.compile.prefill_ms > 0.0, "{choice:?}");
    // The kernels without variants were not made again.
    assert_eq!(choice.compile.merge_ms, merge_ms);

    // The table says nothing of other shapes; and a wish for the rule is one.
    let wide = config(Heads::new(6, 2, 8), rule);
    assert_eq!(runner.choose(&wide).unwrap().by, ChosenBy::RuleUntuned);
    runner.prefer(Preference::Rule).unwrap();
    check_ran(&run(&mut runner), &rule);
    assert_eq!(tuning.variants(runner.adapter_info(), &wide.shape()), Ok(None));
    assert_eq!(tuning.variants(runner.adapter_info(), &config(HEADS, rule).shape()), Ok(Some(other)));
}

#[test]
fn a_table_of_another_adapter_is_refused_and_the_rule_stays() {
    let Some(gpu) = gpu() else { return };
    let (rule, other) = rule_and_other(gpu);
    let mut runner = gpu.fresh_runner();
    let own = table(&runner, &config(HEADS, rule), other).to_string();
    for field in ["version ", "adapter ", "backend ", "driver "] {
        let foreign: Tuning = own.replacen(field, &format!("{field}not "), 1).parse().unwrap();
        let error = runner.prefer(Preference::Tuned(foreign.clone())).unwrap_err();
        let TuningError::OtherKey { found, needed } = error else { panic!("{error}") };
        assert_eq!((*found, *needed), (foreign.key().clone(), Tuning::new(runner.adapter_info()).key().clone()));
    }
    let output = run(&mut runner);
    check_ran(&output, &rule);
    assert_eq!(output.choice.unwrap().by, ChosenBy::Rule);
}

/// What a table or a wish asks for computes wrong results: the rule's variants run, and the choice says why.
#[test]
fn preferred_variants_that_fail_are_stepped_down_from() {
    let Some(gpu) = gpu() else { return };
    let (rule, other) = rule_and_other(gpu);
    let quick = Variants::quick(&gpu.facts(), &HEADS.geometry().unwrap());
    assert_ne!(rule, quick);
    let wrong = [KernelId::Prefill, KernelId::Decode, KernelId::Merge].map(|kernel| SourceEdit {
        kernel,
        from: "const LN_2 = 0.6931471805599453;",
        to: "const LN_2 = 1.0;",
    });
    for (preferred, by) in [(other, ChosenBy::Tuning), (quick, ChosenBy::QuickCompile)] {
        for edits in [&wrong[..], &[]] {
            let mut runner = gpu.fresh_runner();
            insert(&mut runner, preferred, edits);
            let preference = match by {
                ChosenBy::Tuning => Preference::Tuned(table(&runner, &config(HEADS, rule), preferred)),
                _ => Preference::QuickCompile,
            };
            runner.prefer(preference).unwrap();
            let output = run(&mut runner);
            let choice = output.choice.clone().unwrap();
            if edits.is_empty() {
                check_ran(&output, &preferred);
                assert_eq!((choice.by, choice.rule, choice.stepped_down), (by, rule, vec![]));
                continue;
            }
            check_ran(&output, &rule);
            assert_eq!((choice.by, choice.rule), (ChosenBy::Rule, rule));
            let [(variants, why)] = &choice.stepped_down[..] else { panic!("{choice:?}") };
            assert_eq!(*variants, preferred);
            assert!(why.contains("the self-test's error is"), "{why}");
        }
    }
    // A table may name what the device cannot build.
    let mut runner = gpu.fresh_runner();
    let mut large = other;
    large.prefill.lanes = 1 << 20;
    runner.prefer(Preference::Tuned(table(&runner, &config(HEADS, rule), large))).unwrap();
    let choice = run(&mut runner).choice.unwrap();
    assert_eq!((choice.by, choice.variants), (ChosenBy::Rule, rule));
    assert!(choice.stepped_down[0].1.contains("max_compute_invocations_per_workgroup"), "{choice:?}");
}

/// The device finds something wrong with the first dispatch of the preferred kernels. That is theirs alone.
#[test]
fn errors_of_a_candidate_do_not_stay() {
    let Some(gpu) = gpu() else { return };
    let (rule, other) = rule_and_other(gpu);
    for kernel in KernelId::ALL {
        let mut runner = gpu.fresh_runner();
        // More words than the buffer has: known only when it is bound.
        let (from, to) = ("status: array<atomic<u32>, STATUS_WORDS>", "status: array<atomic<u32>, 4096>");
        insert(&mut runner, other, &[SourceEdit { kernel, from, to }]);
        let error = runner.kernels(&config(HEADS, other)).map(|_| ()).unwrap_err();
        assert!(matches!(error, RunError::Failed(_)), "{error}");

        runner.prefer(Preference::Tuned(table(&runner, &config(HEADS, rule), other))).unwrap();
        let output = run(&mut runner);
        check_ran(&output, &rule);
        let [(variants, why)] = &output.choice.as_ref().unwrap().stepped_down[..] else { panic!("{output:?}") };
        assert_eq!((*variants, why), (other, &error.to_string()));
    }
}

/// The rule's prefill is made slow, and then wrong as well: tuning takes another one, and says what was wrong.
#[test]
fn tuning_finds_what_is_faster_than_the_rule() {
    let Some(gpu) = gpu() else { return };
    let (rule, _) = rule_and_other(gpu);
    let mut runner = gpu.fresh_runner();
    let slow = SourceEdit {
        kernel: KernelId::Prefill,
        from: "fn report_done(lane: u32) {",
        to: "fn report_done(lane: u32) {
            for (var turn = 0u; turn < 3000u; turn++) { atomicOr(&workspace.status[STATUS_ERRORS], 0u); }",
    };
    insert(&mut runner, rule, &[slow]);
    let tuned = runner.tune(&config(HEADS, rule), TIME_FOR_ALL).unwrap();
    say(&format!("tuned:\n{}", tuned.entry));
    assert_eq!(tuned.rule.variants, rule);
    let variants = tuned.entry.variants();
    assert_ne!(variants.prefill, rule.prefill);
    let ms = |wanted| {
        let times = tuned.entry.prefill().iter().find(|timing| timing.variant == wanted);
        times.unwrap().run_ms
    };
    assert!(ms(rule.prefill) > 2.0 * ms(variants.prefill), "{}", tuned.entry);
    // Times of the kernel alone: the decode that was built beside the slow prefill is none the slower.
    assert!(tuned.entry.decode().iter().any(|timing| timing.variant == rule.decode));

    let mut table = Tuning::new(runner.adapter_info());
    table.insert(tuned.entry.clone());
    let table: Tuning = table.to_string().parse().unwrap();
    assert_eq!(table.entries(), [tuned.entry]);
    runner.prefer(Preference::Tuned(table)).unwrap();
    check_ran(&run(&mut runner), &variants);
}

/// A variant that computes nothing is the fastest of all, and is not taken: not where the self-test sees it, and not
/// where only the work that is timed is too much for it.
#[test]
fn tuning_leaves_out_what_is_wrong() {
    let Some(gpu) = gpu() else { return };
    let (rule, other) = rule_and_other(gpu);
    let edits = [
        SourceEdit {
            kernel: KernelId::Prefill,
            from: "if group >= params.prefill_groups {",
            to: "if group >= params.prefill_groups || params.prefill_groups > 50u {",
        },
        SourceEdit { kernel: KernelId::Decode, from: "if group >= params.decode_groups {", to: "if true {" },
    ];
    let mut runner = gpu.fresh_runner();
    // Tuning tries other prefills beside the rule's decode, and the other way round.
    let [wrong_prefill, wrong_decode] =
        [Variants { prefill: other.prefill, ..rule }, Variants { decode: other.decode, ..rule }];
    insert(&mut runner, wrong_prefill, &edits[..1]);
    let mut wrong = vec![wrong_prefill.prefill.to_string()];
    if wrong_decode != rule {
        insert(&mut runner, wrong_decode, &edits[1..]);
        wrong.push(wrong_decode.decode.to_string());
    }
    let tuned = runner.tune(&config(HEADS, rule), TIME_FOR_ALL).unwrap();
    let timed = tuned.entry.to_string();
    for name in &wrong {
        assert!(!timed.contains(name), "{timed}");
        let (_, why) = tuned.left_out.iter().find(|(left_out, _)| left_out == name).unwrap();
        assert!(why.contains("workgroups came to their end"), "{name}: {why}");
    }
    assert_eq!(tuned.left_out.len(), wrong.len(), "{:?}", tuned.left_out);
}

/// Without time there are two of each kernel, where there are two, and the rest is named.
#[test]
fn tuning_keeps_to_its_time() {
    let Some(gpu) = gpu() else { return };
    let (rule, _) = rule_and_other(gpu);
    let all = Alternatives::new(&rule, &gpu.facts(), &HEADS.geometry().unwrap());
    let tuned = gpu.fresh_runner().tune(&config(HEADS, rule), Duration::ZERO).unwrap();
    let (prefill, decode) = (tuned.entry.prefill().len(), tuned.entry.decode().len());
    assert_eq!((prefill, decode), (all.prefill.len().min(2), all.decode.len().min(2)));
    assert_eq!(tuned.left_out.len(), all.prefill.len() + all.decode.len() - prefill - decode);
    assert!(tuned.left_out.iter().all(|(_, why)| why == "no time was left"), "{:?}", tuned.left_out);
}

/// Latent attention has a shape of its own, which can be tuned too.
#[test]
fn tuning_of_latent_attention() {
    let Some(gpu) = gpu() else { return };
    let (rule, _) = rule_and_other(gpu);
    let geometry = HeadGeometry::latent(8, 16, 8).unwrap();
    let config = KernelConfig { geometry, variants: rule, ..config(HEADS, rule) };
    let tuned = gpu.fresh_runner().tune(&config, Duration::ZERO).unwrap();
    assert!(!tuned.entry.prefill().is_empty() && !tuned.entry.decode().is_empty());
    assert!(tuned.entry.to_string().starts_with(&config.shape().to_string()), "{}", tuned.entry);
}

fn slowest<V: Copy>(timings: &[Timing<V>]) -> V {
    timings.iter().max_by(|a, b| a.run_ms.total_cmp(&b.run_ms)).unwrap().variant
}

/// On the real kernels: what is chosen is not what was slowest, and no slower than that when both are run again. Other tests keep the
/// machine busy meanwhile, hence up to three tries.
#[test]
fn the_tuned_variants_are_no_slower_than_the_slowest() {
    let Some(gpu) = gpu() else { return };
    let (rule, _) = rule_and_other(gpu);
    let mut runner = gpu.fresh_runner();
    let mut slower = Vec::new();
    for _ in 0..3 {
        let tuned = runner.tune(&config(HEADS, rule), TIME_FOR_ALL).unwrap();
        say(&format!("tuned:\n{}left out: {:?}", tuned.entry, tuned.left_out));
        let chosen = tuned.entry.variants();
        let worst = Variants { prefill: slowest(tuned.entry.prefill()), decode: slowest(tuned.entry.decode()) };
        assert_ne!(chosen.prefill, worst.prefill, "{}", tuned.entry);
        assert!(chosen.decode != worst.decode || tuned.entry.decode().len() == 1, "{}", tuned.entry);
        slower.clear();
        for (what, lengths) in [("prefill", (600, 600)), ("decode", (1, 8000))] {
            let case = CaseSpec::new(what, HEADS, [lengths]).causal(true).paged(Pool::new(16).times(1));
            let case = build(&case).unwrap();
            let mut best_ms = [f64::INFINITY; 2];
            for round in 0..14 {
                let which = round % 2;
                let options = RunOptions { variants: Some([chosen, worst][which]), ..run_options(&spec()) };
                let output = runner.run(&case, &options).unwrap();
                best_ms[which] = best_ms[which].min(output.gpu_ms.unwrap_or(output.wall_ms));
            }
            let [chosen_ms, worst_ms] = best_ms;
            let both = format!("{what}: {chosen} takes {chosen_ms:.3} ms, {worst} {worst_ms:.3} ms");
            say(&both);
            slower.extend((chosen_ms > 1.1 * worst_ms).then_some(both));
        }
        if slower.is_empty() {
            return;
        }
    }
    panic!("{}", slower.join("\n"));
}

/// Where everything fails, tuning fails as choosing does.
#[test]
fn tuning_needs_a_variant_that_works() {
    let Some(gpu) = gpu() else { return };
    let mut runner = gpu.fresh_runner();
    let candidates = Variants::candidates(&gpu.facts(), &HEADS.geometry().unwrap());
    for variants in &candidates {
        let (from, to) = ("const LN_2 = 0.6931471805599453;", "const LN_2 = 1.0;");
        insert(
            &mut runner,
            *variants,
            &[KernelId::Prefill, KernelId::Decode, KernelId::Merge].map(|kernel| SourceEdit { kernel, from, to }),
        );
    }
    let error = runner.tune(&config(HEADS, candidates[0]), Duration::ZERO).unwrap_err();
    assert!(matches!(error, RunError::SelfTest(SelfTestError::Outside { .. })), "{error}");
}
