//! Reads what a JAX client sends to be compiled: its compile options at the level of the protobuf wire.
//!
//! Pure functions over bytes: no plugin, no I/O, no panics on bad input.

pub mod compile_options;
pub mod wire;
