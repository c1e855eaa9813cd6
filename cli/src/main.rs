//! The command `paged-attention`.
fn main() {}
