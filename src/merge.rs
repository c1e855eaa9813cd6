//! Merging of results over parts of the keys.

use std::fmt::Debug;

use thiserror::Error;

/// The attention of some rows over a part of their keys: what a call returns, or what is left of several.
///
/// A row that has seen no key is empty: its log-sum-exp is `-inf`, and its output counts as 0.
#[derive(Clone, Debug, PartialEq)]
pub struct States<T> {
    /// Outputs `[rows, dim]`; for a call's result `[total_q, q_heads, v_head_dim]`.
    pub out: Vec<T>,
    /// Log-sum-exp `[rows]`, natural logarithm.
    pub lse: Vec<T>,
}

/// `f32` or `f64`.
pub trait Real: Copy + Debug + Into<f64> + private::Sealed {
    /// The nearest number.
    fn nearest(value: f64) -> Self;
}

impl Real for f32 {
    fn nearest(value: f64) -> Self {
        value as Self
    }
}

impl Real for f64 {
    fn nearest(value: f64) -> Self {
        value
    }
}

mod private {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// States that cannot be merged. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum MergeError {
    /// The outputs are no whole rows.
    #[error("{out} outputs are no whole number of elements for each of {lse} rows")]
    Rows {
        /// Elements of `out`.
        out: usize,
        /// Elements of `lse`.
        lse: usize,
    },
    /// The two states are of different sizes.
    #[error("the other states have {found:?} outputs and rows; {needed:?} are needed")]
    Length {
        /// Elements of the other's `out` and `lse`.
        found: (usize, usize),
        /// Elements of these.
        needed: (usize, usize),
    },
    /// A log-sum-exp that no row can have: infinite or not a number.
    #[error(
        "the log-sum-exp of row {row} is {found}; a finite number is needed, or -inf for a row that has seen no key"
    )]
    Lse {
        /// The row.
        row: usize,
        /// Its log-sum-exp.
        found: f64,
    },
}

impl<T: Real> States<T> {
    /// Rows that have seen no key: merging them changes nothing.
    pub fn empty(rows: usize, dim: usize) -> Self {
        Self { out: vec![T::nearest(0.0); rows * dim], lse: vec![T::nearest(f64::NEG_INFINITY); rows] }
    }

    /// Takes in the states of the same rows over other keys:
    ///
    /// ```text
    /// lse' = ln(e^lse + e^lse_other),   out' = (e^lse out + e^lse_other out_other) / e^lse'
    /// ```
    ///
    /// in f64, each result rounded once. Merging is commutative to the bit, and associative but for that rounding. A key, and
    /// a sink, must have been counted in one of the two at most.
    ///
    /// # Errors
    /// [`MergeError`].
    pub fn merge(&mut self, other: &Self) -> Result<(), MergeError> {
        let sizes = |states: &Self| (states.out.len(), states.lse.len());
        let (rows, needed) = (self.lse.len(), sizes(self));
        if sizes(other) != needed {
            return Err(MergeError::Length { found: sizes(other), needed });
        }
        if !self.out.len().is_multiple_of(rows.max(1)) || (rows == 0 && !self.out.is_empty()) {
            return Err(MergeError::Rows { out: self.out.len(), lse: rows });
        }
        for states in [&*self, other] {
            let lse = states.lse.iter().map(|lse| (*lse).into()).enumerate();
            if let Some((row, found)) = { lse }.find(|(_, lse): &(usize, f64)| lse.is_nan() || *lse == f64::INFINITY) {
                return Err(MergeError::Lse { row, found });
            }
        }
        let dim = (self.out.len() / rows.max(1)).max(1);
        let outs = self.out.chunks_exact_mut(dim).zip(other.out.chunks_exact(dim));
        // Without outputs there are still sums.
        let mut outs = outs.map(Some).chain(std::iter::repeat_with(|| None));
        for (lse, other_lse) in self.lse.iter_mut().zip(&other.lse) {
            let (a, b): (f64, f64) = ((*lse).into(), (*other_lse).into());
            let m = a.max(b);
            // Two empty rows make an empty one; -inf - -inf is never formed.
            let weight = |lse: f64| if lse == f64::NEG_INFINITY { 0.0 } else { (lse - m).exp() };
            let (a, b) = (weight(a), weight(b));
            let sum = a + b;
            if let Some((out, other_out)) = outs.next().flatten() {
                for (x, y) in out.iter_mut().zip(other_out) {
                    // What an empty row holds does not matter.
                    let part = |weight: f64, x: f64| if weight > 0.0 { weight * x } else { 0.0 };
                    let total = part(a, (*x).into()) + part(b, (*y).into());
                    *x = T::nearest(if sum > 0.0 { total / sum } else { 0.0 });
                }
            }
            *lse = T::nearest(if sum > 0.0 { m + sum.ln() } else { f64::NEG_INFINITY });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use rand::rngs::StdRng;
    use rand::seq::SliceRandom;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::reference::{OnlineRow, online_row};

    const DIM: usize = 5;

    /// The state of one row over some keys.
    fn state(scores: &[f64], values: &[f32]) -> States<f64> {
        let OnlineRow { out, lse } = online_row(scores, values, DIM, NonZeroUsize::MIN, None);
        States { out, lse: vec![lse] }
    }

    fn narrowed(states: &States<f64>) -> States<f32> {
        let narrow = |values: &[f64]| values.iter().map(|x| *x as f32).collect();
        States { out: narrow(&states.out), lse: narrow(&states.lse) }
    }

    fn distance<T: Real>(a: &States<T>, b: &States<f64>) -> f64 {
        let pairs = a.out.iter().zip(&b.out).chain(a.lse.iter().zip(&b.lse));
        pairs.map(|(a, b)| ((*a).into() - b).abs()).fold(0.0, f64::max)
    }

    /// Any partition of the keys, empty parts included, merged in any order, is the whole.
    #[test]
    fn partitions_in_any_order_make_the_whole() {
        for (seed, parts) in [1, 2, 3, 5, 17, 97].into_iter().cycle().take(60).enumerate() {
            let mut rng = StdRng::seed_from_u64(seed as u64);
            let keys = rng.random_range(1..300);
            let range = [0.1, 10.0, 700.0][seed % 3];
            let scores: Vec<f64> = (0..keys).map(|_| rng.random_range(-range..range)).collect();
            let values: Vec<f32> = (0..keys * DIM).map(|_| rng.random_range(-1.0..1.0)).collect();
            let whole = state(&scores, &values);
            let mut of_part: Vec<(Vec<f64>, Vec<f32>)> = vec![Default::default(); parts];
            for (score, value) in scores.iter().zip(values.chunks(DIM)) {
                let part = &mut of_part[rng.random_range(0..parts)];
                part.0.push(*score);
                part.1.extend(value);
            }
            let mut states: Vec<_> = of_part.iter().map(|(scores, values)| state(scores, values)).collect();
            states.shuffle(&mut rng);
            let (mut merged, mut rough) = (States::empty(1, DIM), States::<f32>::empty(1, DIM));
            for part in &states {
                merged.merge(part).unwrap();
                rough.merge(&narrowed(part)).unwrap();
            }
            assert!(distance(&merged, &whole) < 1e-12, "seed {seed}: {merged:?} is not {whole:?}");
            // A rounding of the sum, of up to 700, moves weights by 2^-15.
            let allowed = parts as f64 * if range > 100.0 { 1e-4 } else { 2e-6 };
            assert!(distance(&rough, &whole) < allowed, "seed {seed}: {rough:?} is not {whole:?}");
        }
    }

    #[test]
    fn one_row_of_two_merged() {
        // Weights 1/4 and 3/4.
        let mut a = States { out: vec![4.0, 0.0, 7.0], lse: vec![0.0, f64::NEG_INFINITY, 2.0] };
        let b = States { out: vec![8.0, 5.0, 9.0], lse: vec![3.0_f64.ln(), 1.5, f64::NEG_INFINITY] };
        let mut swapped = b.clone();
        swapped.merge(&a).unwrap();
        a.merge(&b).unwrap();
        assert!((a.out[0] - 7.0).abs() < 1e-15 && (a.lse[0] - 4.0_f64.ln()).abs() < 1e-15, "{a:?}");
        assert_eq!((&a.out[1..], &a.lse[1..]), (&[5.0, 7.0][..], &[1.5, 2.0][..]));
        assert_eq!(a, swapped);
        // Sums far apart, and as large as they get.
        let mut far = States { out: vec![1.0_f32, 1.0], lse: vec![-3e38, 3e38] };
        far.merge(&States { out: vec![2.0, 3.0], lse: vec![3e38, 3e38] }).unwrap();
        assert_eq!(far, States { out: vec![2.0, 2.0], lse: vec![3e38, 3e38] });
    }

    #[test]
    fn empty_with_empty_stays_empty() {
        let mut empty = States::<f32>::empty(2, 3);
        // Whatever lies in an output that counts for nothing.
        empty.merge(&States { out: vec![f32::NAN; 6], lse: vec![f32::NEG_INFINITY; 2] }).unwrap();
        assert_eq!(empty, States::empty(2, 3));
        let mut none = States::<f64>::empty(0, 8);
        none.merge(&States::empty(0, 8)).unwrap();
        let mut sums_only = States { out: Vec::new(), lse: vec![0.0_f64, 1.0] };
        sums_only.merge(&sums_only.clone()).unwrap();
        assert_eq!(sums_only.lse, [2.0_f64.ln(), 1.0 + 2.0_f64.ln()]);
    }

    #[test]
    fn what_cannot_be_merged_changes_nothing() {
        let good = States { out: vec![1.0_f32, 2.0], lse: vec![0.0, 1.0] };
        for bad in [f32::NAN, f32::INFINITY] {
            let other = States { out: vec![0.0; 2], lse: vec![0.0, bad] };
            for (into, from) in [(&good, &other), (&other, &good)] {
                let mut merged = into.clone();
                let error = merged.merge(from).unwrap_err();
                assert!(matches!(error, MergeError::Lse { row: 1, found } if found.is_nan() || found > 0.0), "{error}");
                assert_eq!((merged.out, merged.lse[0]), (into.out.clone(), into.lse[0]));
            }
        }
        let mut merged = good.clone();
        let error = merged.merge(&States::empty(2, 3)).unwrap_err();
        assert_eq!(error, MergeError::Length { found: (6, 2), needed: (2, 2) });
        assert_eq!(merged, good);
        let mut odd = States { out: vec![0.0_f32; 5], lse: vec![0.0; 2] };
        assert_eq!(odd.merge(&odd.clone()), Err(MergeError::Rows { out: 5, lse: 2 }));
        let mut odd = States { out: vec![0.0_f32; 5], lse: Vec::new() };
        assert_eq!(odd.merge(&odd.clone()), Err(MergeError::Rows { out: 5, lse: 0 }));
    }
}
