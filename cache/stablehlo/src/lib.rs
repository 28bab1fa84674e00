//! Reads what a JAX client sends to be compiled: the program, a StableHLO portable artifact (MLIR bytecode version 6, dialect
//! VHLO with parts of `sdy` and `builtin`), and its compile options at the level of the protobuf wire.
//!
//! Pure functions over bytes: no plugin, no I/O, no panics on bad input. What is not known is an error that names it.

pub mod compile_options;
pub mod signature;
pub mod wire;

#[expect(dead_code, reason = "the digest reads what the signature does not")]
mod artifact;
mod cursor;
mod error;
#[expect(dead_code, reason = "the digest reads what the signature does not")]
mod ir;
#[expect(dead_code, reason = "the digest reads what the signature does not")]
mod schema;

pub use error::Error;
pub use signature::{Signature, main_signature};
