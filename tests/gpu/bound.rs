//! The bound means something: near enough to real errors to notice a wrong kernel.

use paged_attention_cases::{CaseSpec, Heads};

use crate::common::{CONFIGS, Tally, gpu};

/// N(0, 1), d 64, 64 keys, over a thousand elements: measured over bound lies between 0.003 and 1.
#[test]
fn the_bound_is_neither_broken_nor_idle() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("bound");
    for (dtype, heads) in CONFIGS {
        let Heads { q_heads, head_dim, .. } = heads;
        for (kernel, lengths) in [("prefill", vec![(64, 64)]), ("decode", vec![(1, 64); 24])] {
            let spec = CaseSpec::new(format!("bound/{kernel}"), heads, lengths).dtype(dtype).seed(21);
            let elements: u32 = spec.seqs.iter().map(|s| s.q_len * q_heads * head_dim).sum();
            assert!(elements >= 1000, "{spec}: {elements} elements");
            let Some((case, output)) = tally.check(gpu, &spec) else { continue };
            let report = crate::common::judge(&case, &output).unwrap();
            for (tensor, ratio) in [("out", report.max_bound_ratio_out), ("lse", report.max_bound_ratio_lse)] {
                if !(0.003..1.0).contains(&ratio) {
                    tally.fail(&spec, Some(&case), format!("{tensor}: measured/bound is {ratio:.5}"));
                }
            }
        }
    }
    tally.finish();
}
