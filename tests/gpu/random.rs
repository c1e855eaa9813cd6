//! Random shapes, pages and values, shrunk to the smallest that still fails.

use paged_attention::Dtype::{Bf16, F16, F32};
use paged_attention_cases::{CaseSpec, Heads, PageOrder, Poison, Pool, Values};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

use crate::common::{Tally, gpu, judge, run_options, say};

/// Each takes pipelines of its own, so there are few; most are of other tests too.
fn pipelines() -> Vec<CaseSpec> {
    let spec = |heads, q, kv, out| CaseSpec::new("random", heads, []).dtypes(q, kv).out(out);
    vec![
        spec(Heads::new(2, 2, 64), F32, F32, F32),
        spec(Heads::new(4, 2, 64), F16, F16, F32),
        spec(Heads::new(4, 1, 64), Bf16, Bf16, F32),
        spec(Heads::new(6, 2, 64), F16, F16, F32),
        spec(Heads::new(4, 2, 64), F32, F16, F32),
        spec(Heads::new(4, 2, 64), F16, F32, F16),
        spec(Heads::new(2, 1, 59), Bf16, Bf16, F32),
        spec(Heads::new(2, 1, 128).with_v(64), F32, F32, F32),
        spec(Heads::new(8, 1, 64), F16, F16, F32),
        spec(Heads::new(4, 4, 128), F16, F16, F32),
        spec(Heads::new(2, 1, 3), F32, F32, F32),
        spec(Heads::new(2, 1, 17).with_v(250), F32, F32, F32),
    ]
}

fn lengths() -> impl Strategy<Value = (u32, u32)> {
    // Small numbers often, so that shrinking has little to do and edges are met; large ones sometimes.
    let q_len = prop_oneof![3 => Just(1_u32), 3 => 0_u32..20, 2 => 0_u32..140];
    let kv_len = prop_oneof![3 => 0_u32..40, 3 => 0_u32..300, 1 => 250_u32..1100];
    (q_len, kv_len)
}

fn pool() -> impl Strategy<Value = Pool> {
    let order = select(vec![PageOrder::InOrder, PageOrder::Reversed, PageOrder::Shuffled]);
    let poison = select(vec![Poison::Zero, Poison::NaN, Poison::Infinity, Poison::Mixed, Poison::Garbage]);
    let size = prop_oneof![select(vec![1_u32, 4, 8, 16, 32, 64, 128]), 1_u32..70];
    (size, 1_u32..4, order, poison, 0_u32..3).prop_map(|(page_size, times, order, poison, surplus)| Pool {
        page_size,
        times,
        order,
        poison,
        surplus,
        share: false,
        withhold: false,
    })
}

fn values() -> impl Strategy<Value = Values> {
    prop_oneof![
        6 => Just(Values::Normal),
        1 => Just(Values::Peaky),
        1 => Just(Values::OutlierChannels),
        1 => Just(Values::LoudFuture),
        1 => Just(Values::Offset),
        1 => (-2.5e5_f64..2.5e5).prop_map(|level| Values::EqualScores { level }),
        // Up to what f16 queries and keys can make.
        1 => (-2.0_f64..7.0).prop_map(|exponent| Values::Spread { score: 10_f64.powf(exponent) }),
    ]
}

fn case() -> impl Strategy<Value = CaseSpec> {
    let batch = prop::collection::vec(lengths(), 0..7);
    (select(pipelines()), batch, pool(), values(), any::<bool>(), any::<bool>(), 0_u64..1000).prop_map(
        |(pipeline, batch, pool, values, causal, contiguous, seed)| {
            let lengths = CaseSpec::new("", pipeline.heads, batch);
            let spec = pipeline.seqs(lengths.seqs).causal(causal).values(values).seed(seed);
            if contiguous { spec.contiguous(pool) } else { spec.paged(pool) }
        },
    )
}

/// `PROPTEST_CASES` sets how many, `PAGED_ATTENTION_SEED` (64 hexadecimal digits) repeats a run.
#[test]
fn random_cases() {
    let Some(gpu) = gpu() else { return };
    let seed = match std::env::var("PAGED_ATTENTION_SEED") {
        Ok(digits) => seed_from(&digits).expect("PAGED_ATTENTION_SEED is not 64 hexadecimal digits"),
        Err(_) => rand::random(),
    };
    let digits: String = seed.iter().map(|byte| format!("{byte:02x}")).collect();
    say(&format!("random: PAGED_ATTENTION_SEED={digits}"));
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    // A failure is kept as a case file; a list of seeds beside it would say less.
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 300, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));

    let mut tally = Tally::new("random");
    let seen = std::cell::RefCell::new(Vec::new());
    let result = runner.run(&case(), |spec| {
        let (case, output) = gpu.run_spec(&spec).map_err(TestCaseError::fail)?;
        let report = judge(&case, &output).map_err(TestCaseError::fail)?;
        seen.borrow_mut().push((report.max_bound_ratio, spec.to_string()));
        Ok(())
    });
    for (ratio, spec) in seen.into_inner() {
        tally.ratio(ratio, spec);
    }
    match result {
        Ok(()) => {}
        Err(TestError::Fail(why, spec)) => {
            let case = paged_attention_cases::build(&spec).ok();
            tally.fail(format!("{spec}, {:?}", run_options(&spec)), case.as_ref(), why);
        }
        Err(error) => tally.fail("proptest", None, error),
    }
    tally.finish();
}

fn seed_from(digits: &str) -> Option<[u8; 32]> {
    let mut seed = [0; 32];
    if digits.len() != 64 || !digits.is_ascii() {
        return None;
    }
    for (i, byte) in seed.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(seed)
}
