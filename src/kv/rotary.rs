//! Rotary position embedding: keys are rotated on their way into the pages.

use thiserror::Error;

/// Which elements of a row are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// Neighbours: `(0, 1), (2, 3), ..` (GPT-J, and RoFormer's own).
    Interleaved,
    /// An element of the first half with one of the second: `(0, dims / 2), (1, dims / 2 + 1), ..` (GPT-NeoX, Llama).
    HalfSplit,
}

/// The elements that a rotation moves: what kernels are built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RotaryShape {
    /// Which elements belong together.
    pub pairing: Pairing,
    /// The first element that is rotated.
    pub first: u32,
    /// How many are: an even number.
    pub dims: u32,
}

/// The largest base, factor and magnitude: 2^60.
const NUMBER_MAX: f64 = 1_152_921_504_606_846_976.0;

/// The smallest.
const NUMBER_MIN: f64 = 1.0 / NUMBER_MAX;

/// A rotation that cannot be made.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum RotaryError {
    /// The rotated elements are no pairs, none, or not all in a key row.
    #[error("elements {first} to {} are to be rotated; an even number of the {head_dim} of a key row is needed",
        u64::from(*first) + u64::from(*dims))]
    Dims {
        /// The first element.
        first: u32,
        /// How many.
        dims: u32,
        /// Elements of a key row.
        head_dim: u32,
    },
    /// A number is outside the supported range.
    #[error("{name} is {found}; {NUMBER_MIN:e} to {NUMBER_MAX:e} is supported")]
    Range {
        /// What the number is.
        name: &'static str,
        /// The number found.
        found: f64,
    },
    /// There must be a frequency factor for every pair.
    #[error("there are {found} frequency factors; one for each of {needed} pairs is needed")]
    Factors {
        /// Factors found.
        found: usize,
        /// Pairs.
        needed: usize,
    },
    /// There must be a position for every new token.
    #[error("there are {found} positions; one for each of {needed} new tokens is needed")]
    Positions {
        /// Positions found.
        found: usize,
        /// Tokens.
        needed: usize,
    },
}

/// A rotary position embedding (Su et al., "RoFormer", 2021).
///
/// Pair `i` of a row at position `p` is turned by the angle `p * f_i`, with `f_i = base^(-2i / dims)`:
///
/// ```text
/// (a, b) -> magnitude * (a cos - b sin, a sin + b cos)
/// ```
///
/// Angles, sines and cosines are made on the host in float64, since WGSL's own may be off by `2^-11`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    shape: RotaryShape,
    /// `[dims / 2]`, radians per position.
    frequencies: Vec<f64>,
    magnitude: f64,
}

impl Rotary {
    /// Rotates the first `dims` elements of a row: all of them where `dims` is the head dimension.
    ///
    /// # Errors
    /// [`RotaryError::Dims`] if `dims` is 0 or odd; [`RotaryError::Range`].
    pub fn new(pairing: Pairing, dims: u32, base: f64) -> Result<Self, RotaryError> {
        if dims == 0 || !dims.is_multiple_of(2) {
            return Err(RotaryError::Dims { first: 0, dims, head_dim: dims });
        }
        let base = in_range("the base", base)?;
        let frequencies = (0..dims / 2).map(|pair| base.powf(-2.0 * f64::from(pair) / f64::from(dims))).collect();
        Ok(Self { shape: RotaryShape { pairing, first: 0, dims }, frequencies, magnitude: 1.0 })
    }

    /// The same for elements from `first` on, as in the keys of latent attention, whose last elements are rotated.
    #[must_use]
    pub fn from_element(mut self, first: u32) -> Self {
        self.shape.first = first;
        self
    }

    /// The same with all positions divided by `factor`: linear scaling, or position interpolation.
    ///
    /// # Errors
    /// [`RotaryError::Range`].
    pub fn with_linear_scaling(mut self, factor: f64) -> Result<Self, RotaryError> {
        let factor = in_range("the scaling factor", factor)?;
        self.frequencies.iter_mut().for_each(|frequency| *frequency /= factor);
        Ok(self)
    }

    /// The same with each frequency divided by a factor of its own, `[dims / 2]`: what Llama 3, YaRN and LongRoPE scale by.
    ///
    /// # Errors
    /// [`RotaryError::Factors`] or [`RotaryError::Range`].
    pub fn with_frequency_factors(mut self, factors: &[f64]) -> Result<Self, RotaryError> {
        if factors.len() != self.frequencies.len() {
            return Err(RotaryError::Factors { found: factors.len(), needed: self.frequencies.len() });
        }
        for (frequency, factor) in self.frequencies.iter_mut().zip(factors) {
            *frequency /= in_range("a frequency factor", *factor)?;
        }
        Ok(self)
    }

    /// The same with rotated elements multiplied by `magnitude`, as YaRN does.
    ///
    /// # Errors
    /// [`RotaryError::Range`].
    pub fn with_magnitude(self, magnitude: f64) -> Result<Self, RotaryError> {
        Ok(Self { magnitude: in_range("the magnitude", magnitude)?, ..self })
    }

    /// A rotation of that shape, of customary frequencies.
    pub(crate) fn example(shape: RotaryShape) -> Result<Self, RotaryError> {
        Ok(Self::new(shape.pairing, shape.dims, 10_000.0)?.from_element(shape.first))
    }

    /// What is rotated with what.
    pub fn shape(&self) -> RotaryShape {
        self.shape
    }

    /// Radians per position of each pair, `[dims / 2]`.
    pub fn frequencies(&self) -> &[f64] {
        &self.frequencies
    }

    /// The factor of rotated elements.
    pub fn magnitude(&self) -> f64 {
        self.magnitude
    }

    /// `magnitude * (cos, sin)` of each pair at a position.
    pub(crate) fn turns(&self, position: u32) -> impl Iterator<Item = [f64; 2]> {
        self.frequencies.iter().map(move |frequency| {
            let (sin, cos) = (f64::from(position) * frequency).sin_cos();
            [self.magnitude * cos, self.magnitude * sin]
        })
    }
}

impl RotaryShape {
    /// Checks that a key row has the elements.
    ///
    /// # Errors
    /// [`RotaryError::Dims`].
    pub(crate) fn check(&self, head_dim: u32) -> Result<(), RotaryError> {
        let Self { first, dims, .. } = *self;
        let fits = first.checked_add(dims).is_some_and(|end| end <= head_dim);
        if dims == 0 || !dims.is_multiple_of(2) || !fits {
            return Err(RotaryError::Dims { first, dims, head_dim });
        }
        Ok(())
    }

    /// The elements of each pair.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = [usize; 2]> {
        let (first, half) = (self.first as usize, self.dims as usize / 2);
        let pairing = self.pairing;
        (0..half).map(move |pair| match pairing {
            Pairing::Interleaved => [first + 2 * pair, first + 2 * pair + 1],
            Pairing::HalfSplit => [first + pair, first + pair + half],
        })
    }
}

fn in_range(name: &'static str, found: f64) -> Result<f64, RotaryError> {
    if (NUMBER_MIN..=NUMBER_MAX).contains(&found) { Ok(found) } else { Err(RotaryError::Range { name, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_rotated_is_refused() {
        let new = |dims, base| Rotary::new(Pairing::Interleaved, dims, base).map(|_| ());
        for dims in [0, 7] {
            assert_eq!(new(dims, 1e4), Err(RotaryError::Dims { first: 0, dims, head_dim: dims }));
        }
        for base in [0.0, -1.0, 1e-30, 1e30, f64::INFINITY] {
            assert_eq!(new(8, base), Err(RotaryError::Range { name: "the base", found: base }));
        }
        assert!(matches!(new(8, f64::NAN), Err(RotaryError::Range { name: "the base", .. })));
        let rotary = Rotary::new(Pairing::HalfSplit, 8, 1e4).unwrap();
        assert!(matches!(rotary.clone().with_linear_scaling(0.0), Err(RotaryError::Range { .. })));
        assert!(matches!(rotary.clone().with_magnitude(f64::NAN), Err(RotaryError::Range { .. })));
        assert_eq!(rotary.clone().with_frequency_factors(&[1.0; 3]), Err(RotaryError::Factors { found: 3, needed: 4 }));
        assert!(matches!(
            rotary.clone().with_frequency_factors(&[1.0, 2.0, -1.0, 1.0]),
            Err(RotaryError::Range { .. })
        ));
        assert_eq!(rotary.shape().check(8), Ok(()));
        for (first, head_dim) in [(0, 7), (1, 8), (u32::MAX, 8)] {
            let shape = rotary.clone().from_element(first).shape();
            assert_eq!(shape.check(head_dim), Err(RotaryError::Dims { first, dims: 8, head_dim }));
        }
    }

    #[test]
    fn frequencies_and_their_scaling() {
        let rotary = Rotary::new(Pairing::HalfSplit, 8, 10_000.0).unwrap();
        let close = |found: &[f64], expected: [f64; 4]| {
            let near = |(found, expected): (&f64, &f64)| (found - expected).abs() < 1e-15;
            assert!(found.iter().zip(&expected).all(near), "{found:?} against {expected:?}");
        };
        close(rotary.frequencies(), [1.0, 0.1, 0.01, 0.001]);
        close(rotary.clone().with_linear_scaling(4.0).unwrap().frequencies(), [0.25, 0.025, 0.0025, 0.00025]);
        let factors = [1.0, 1.0, 2.0, 8.0];
        close(rotary.clone().with_frequency_factors(&factors).unwrap().frequencies(), [1.0, 0.1, 0.005, 0.000125]);
        let turns: Vec<[f64; 2]> = rotary.with_magnitude(2.0).unwrap().turns(3).collect();
        assert_eq!(turns[0], [2.0 * 3.0_f64.cos(), 2.0 * 3.0_f64.sin()]);
        assert_eq!(turns.len(), 4);
    }

    #[test]
    fn elements_of_pairs() {
        let shape = |pairing| RotaryShape { pairing, first: 3, dims: 6 };
        let pairs = |pairing| shape(pairing).pairs().collect::<Vec<_>>();
        assert_eq!(pairs(Pairing::Interleaved), [[3, 4], [5, 6], [7, 8]]);
        assert_eq!(pairs(Pairing::HalfSplit), [[3, 6], [4, 7], [5, 8]]);
    }
}
