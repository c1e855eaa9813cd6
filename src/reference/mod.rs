//! Float64 attention that shares nothing with the kernels.
