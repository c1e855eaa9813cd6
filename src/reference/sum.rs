//! Sums that keep what rounding drops.

/// A sum as the unevaluated pair `high + low` (Knuth's two-sum; Higham 2002, section 4.3).
///
/// This is host code in IEEE arithmetic. A kernel could not do the same: WGSL lets sums be reassociated.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    high: f64,
    low: f64,
}

impl Sum {
    pub(crate) fn add(&mut self, x: f64) {
        let high = self.high + x;
        let part = high - self.high;
        self.low += (self.high - (high - part)) + (x - part);
        self.high = high;
    }

    /// Multiplies by `e^x` for `x <= 0`.
    ///
    /// The rounding error of the factor is about `2^-53 * min(1, |x|)`, so that over a chain of rescales it is in
    /// proportion to the whole distance that the maximum went, not to the number of its moves.
    pub(crate) fn scale_exp(&mut self, x: f64) {
        if x > -0.5 {
            // e^x = 1 + expm1(x), the two terms kept apart.
            let factor = x.exp_m1();
            let product = self.high * factor;
            let rest = self.high.mul_add(factor, -product) + self.low * factor;
            self.low += rest;
            self.add(product);
        } else {
            let factor = x.exp();
            let product = self.high * factor;
            self.low = self.low * factor + self.high.mul_add(factor, -product);
            self.high = product;
        }
    }

    pub(crate) fn value(self) -> f64 {
        self.high + self.low
    }
}
