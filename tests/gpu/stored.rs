//! Keys and values that pages hold in another form than they came in: rotated, rounded, quantised.

use paged_attention::{Dtype, KvDtype, KvDtypes, RowOrder, RunOptions};
use paged_attention_cases::{CaseSpec, Heads, Pool, Values, build};

use crate::common::{Tally, gpu, run_options};

/// Prompts, a short chunk, decodes of one split and of several.
const MIXED: [(u32, u32); 7] = [(40, 70), (1, 600), (33, 33), (3, 90), (1, 1), (1, 45), (0, 20)];

/// Types that differ, and the type that new rows have.
const PAIRS: [(KvDtype, KvDtype, Dtype); 6] = [
    (KvDtype::Int8, KvDtype::Int8, Dtype::F32),
    (KvDtype::Fp8, KvDtype::Fp8, Dtype::F16),
    (KvDtype::Int8, KvDtype::F16, Dtype::F16),
    (KvDtype::Bf16, KvDtype::Int8, Dtype::F32),
    (KvDtype::Fp8, KvDtype::Int8, Dtype::Bf16),
    (KvDtype::F16, KvDtype::F32, Dtype::Bf16),
];

#[test]
fn every_type_in_every_variant() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("stored");
    // Every pair of types, and rows that end inside a word.
    let ragged = Heads::new(3, 3, 21).with_v(59);
    let whole = PAIRS.map(|pair| (Heads::new(4, 2, 64), pair));
    for (heads, (k, v, new)) in whole.into_iter().chain([(ragged, PAIRS[0]), (ragged, PAIRS[1])]) {
        let kv = Some(KvDtypes { k, v });
        for values in [Values::Normal, Values::OutlierChannels] {
            let spec = CaseSpec::new(format!("stored/{k}-{v}"), heads, MIXED)
                .dtypes(Dtype::F32, new)
                .causal(true)
                .values(values)
                .seed(71);
            for (spec, order) in [
                (spec.clone().contiguous(Pool::new(16)), RowOrder::HeadSlot),
                (spec.clone().paged(Pool::new(5)), RowOrder::SlotHead),
            ] {
                let case = build(&spec).unwrap();
                for variants in gpu.every_variant(case.geometry()) {
                    let options = RunOptions { kv, order, variants: Some(variants), ..run_options(&spec) };
                    tally.check_case(gpu, format!("{spec}, {order:?}, {variants:?}"), &case, &options);
                }
            }
        }
    }
    tally.finish();
}
