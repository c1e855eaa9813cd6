//! Lengths of a kernel's rounding chains: what the error bound needs to know of it.

/// The longest chains of dependent roundings in one sequence's rows.
///
/// The error bound ([`crate::reference::bound`]) is a function of the data and of these counts; they come from
/// the plan, since a split or a tile shortens a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chains {
    /// Roundings on the longest path through a dot product `q . k`, scaling excluded.
    pub dot: u32,
    /// Keys that one online-softmax step takes in: key `j` belongs to step `j / step_keys`, counted from
    /// position 0. The running maximum can move once per step.
    pub step_keys: u32,
    /// Roundings on the longest path from a weight or a weighted value to its final sum, rescaling steps
    /// included.
    pub accumulate: u32,
}
