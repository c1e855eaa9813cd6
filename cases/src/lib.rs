//! The case table that the tests, benches and command of `paged-attention` share.
