//! The command as its users meet it: through its arguments, streams, files and exit status.

mod accepted;
mod gpu;
mod places;
mod refused_files;
mod refused_tensors;
mod support;
