//! Reads what a JAX client sends to be compiled: the program, a StableHLO portable artifact (MLIR bytecode version 6, dialect
//! VHLO with parts of `sdy` and `builtin`), and its compile options at the level of the protobuf wire.
//!
//! Pure functions over bytes: no plugin, no I/O, no panics on bad input. What is not known is an error that names it.

pub mod compile_options;
pub mod digest;
pub mod signature;
pub mod wire;

mod artifact;
mod cursor;
mod error;
mod ir;
mod schema;
mod sizes;

pub use digest::{Identity, Refusal, digest, identity};
pub use error::Error;
pub use signature::{Signature, main_signature};
pub use sizes::oversized_array;
