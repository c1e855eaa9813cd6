//! Both contenders of the benches on small ragged batches that reach every branch of theirs.

use paged_attention_bench_kit::{Gpu, Judge, Paged, Paging, Problem, Selection, Unfused};
use paged_attention_cases::{CaseSpec, Heads};

#[test]
fn ragged_batches() {
    if std::env::var("PAGED_ATTENTION_SKIP_GPU").is_ok_and(|value| value == "1") {
        println!("SKIPPED: PAGED_ATTENTION_SKIP_GPU=1 is set");
        return;
    }
    let mut gpu = Gpu::open(std::env::var("PAGED_ATTENTION_ADAPTER").ok().as_deref())
        .unwrap_or_else(|error| panic!("{error}\nPAGED_ATTENTION_SKIP_GPU=1 leaves this test out"));
    let spec = |name: &str, heads, lengths: &[(u32, u32)]| CaseSpec::new(name, heads, lengths.iter().copied());
    let lengths = [(70, 131), (1, 5), (0, 9), (3, 0), (129, 129), (5, 3)];
    for spec in [
        spec("causal", Heads::new(6, 2, 80).with_v(72), &lengths).causal(true),
        spec("bidirectional", Heads::new(2, 2, 8), &[(65, 17), (2, 200)]),
        spec("decode", Heads::new(8, 2, 24).with_v(72), &[(1, 1), (1, 77), (1, 0), (1, 16)]).causal(true),
    ] {
        let problem = Problem::new(spec).unwrap();
        let judge = Judge::new(&problem).unwrap();
        let paged = Paged::new(&mut gpu, &problem, Paging::Scattered(16), Selection::Chosen).unwrap();
        paged.accuracy(&gpu, &judge, "paged").unwrap();
        assert!(paged.encode_us(&gpu) > 0.0);
        let unfused = Unfused::new(&gpu, &problem).unwrap();
        // Nothing has been computed yet.
        assert!(unfused.accuracy(&gpu, &judge).is_err());
        gpu.seconds(&|encoder| unfused.encode(encoder), 1).unwrap();
        unfused.accuracy(&gpu, &judge).unwrap();
    }
}
