//! What may be tried beside the rule's choice.

use super::variant::{AdapterFacts, DecodeVariant, PrefillVariant, Variants};
use crate::geometry::{HeadGeometry, padded_dim};

/// Words of queries and accumulators that a lane may hold: past this everything spills.
const LANE_WORDS_MAX: u32 = 1024;

/// Variants to be measured on a device, the most promising first: the first ones are the choice that they vary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alternatives {
    /// Prefill kernels.
    pub prefill: Vec<PrefillVariant>,
    /// Decode kernels.
    pub decode: Vec<DecodeVariant>,
}

impl Alternatives {
    /// `chosen`; kernels that differ from it in one size; those for every other way to hand keys to the lanes that the
    /// device has.
    pub fn new(chosen: &Variants, facts: &AdapterFacts, geometry: &HeadGeometry) -> Self {
        let own = chosen.prefill;
        let row_words = padded_dim(geometry.head_dim()) + padded_dim(geometry.v_head_dim());
        let rule = Variants::candidates(facts, geometry);
        let rows = |rows_per_lane| PrefillVariant { rows_per_lane, ..own };
        let steps = |step_keys| PrefillVariant { step_keys, ..own };
        let lanes = |lanes| PrefillVariant { lanes, ..own };
        // What compiles quickly first: more of them are measured in the same time.
        let mut prefill = vec![own, rows(own.rows_per_lane.saturating_sub(1)), rows(own.rows_per_lane + 1)];
        prefill.extend([steps(own.step_keys / 2), steps(own.step_keys * 2)]);
        prefill.extend([lanes(own.lanes / 2), lanes(own.lanes * 2)]);
        prefill.extend(rule.iter().map(|variants| variants.prefill));
        let spills = |variant: &PrefillVariant| variant.rows_per_lane * row_words > LANE_WORDS_MAX;
        prefill.retain(|variant| *variant == own || (variant.check().is_ok() && !spills(variant)));

        let subgroups = rule.iter().map(|variants| variants.decode.subgroup()).filter(|subgroup| *subgroup > 0);
        let mut decode = vec![chosen.decode];
        for subgroup in subgroups {
            decode.extend([DecodeVariant::Streams { subgroup }, DecodeVariant::Exchange { subgroup }]);
        }
        decode.push(DecodeVariant::Workgroup);
        Self { prefill: distinct(prefill), decode: distinct(decode) }
    }
}

/// The first of each, in order.
fn distinct<T: PartialEq>(all: Vec<T>) -> Vec<T> {
    let mut distinct = Vec::with_capacity(all.len());
    for one in all {
        if !distinct.contains(&one) {
            distinct.push(one);
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::SUBGROUP_SIZES;

    #[test]
    fn the_choice_comes_first_and_every_way_is_there() {
        for facts in [AdapterFacts::PLAIN_GPU, AdapterFacts::PLAIN_CPU] {
            for size in SUBGROUP_SIZES.into_iter().map(Some).chain([None]) {
                for dim in [1, 64, 128, 256] {
                    let geometry = HeadGeometry::new(2, 1, dim).unwrap();
                    let facts = size.map_or(facts, |size| facts.with_subgroups(size));
                    let candidates = Variants::candidates(&facts, &geometry);
                    let Alternatives { prefill, decode } = Alternatives::new(&candidates[0], &facts, &geometry);
                    assert_eq!((prefill[0], decode[0]), (candidates[0].prefill, candidates[0].decode));
                    for variants in &candidates {
                        assert!(prefill.contains(&variants.prefill) && decode.contains(&variants.decode), "{variants}");
                    }
                    assert!(prefill.len() > candidates.len() + 2, "{prefill:?}");
                    assert_eq!(decode.len(), if size.is_some() { 3 } else { 1 });
                    for (i, variant) in prefill.iter().enumerate() {
                        assert_eq!(variant.check(), Ok(()));
                        assert!(!prefill[..i].contains(variant), "{variant} comes twice");
                    }
                }
            }
        }
    }
}
