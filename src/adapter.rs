//! Which adapter to use: never a software one before a real one.
