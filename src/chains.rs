//! Lengths of a kernel's rounding chains: what the error bound needs to know of it.

use std::ops::Range;

/// The longest chains of dependent roundings in one sequence's rows.
///
/// The error bound ([`crate::reference::bound`]) is a function of the data and of these counts; they come from
/// the plan, since a split or a tile shortens a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chains {
    /// Roundings on the longest path through a dot product `q . k`, scaling excluded.
    pub dot: u32,
    /// Keys that one online-softmax step takes in: key `j` belongs to step `j / step_keys`, counted from
    /// position 0. The running maximum can move once per step.
    pub step_keys: u32,
    /// Roundings on the longest path from a weight or a weighted value to its final sum, rescaling steps
    /// included.
    pub accumulate: u32,
    /// Whether keys or values have scales, by which scores or weights are multiplied: stored elements may then be up to 448,
    /// and products with them be lost below `2^-126`.
    pub scaled: bool,
    /// The keys in the order in which they are gone through, as ranges of positions that begin at multiples of `step_keys`;
    /// together they are `0 .. kv_len`. Empty where keys come in the order of their positions.
    pub order: Vec<Range<u32>>,
}

impl Chains {
    /// The same where keys or values may have scales: a factor for each score and each weight, and one rounding for the
    /// product of element and scale that the reference takes for the number stored.
    pub(crate) fn scaled(self, scaled: bool) -> Self {
        let more = if scaled { 2 } else { 0 };
        Self { dot: self.dot + more, accumulate: self.accumulate + more, scaled, ..self }
    }

    /// The same for keys in an order of their own. Steps are made so small that none lies in two ranges.
    pub(crate) fn in_order(self, order: Vec<Range<u32>>) -> Self {
        let step_keys = order.iter().fold(self.step_keys, |keys, range| gcd(keys, range.start));
        Self { step_keys, order, ..self }
    }
}

/// The greatest common divisor; of 0 and a number, the number.
pub(crate) fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
