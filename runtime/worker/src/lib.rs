//! A worker: one PJRT client, its arrays and executables, and the op stream that drives them.

pub mod program;
