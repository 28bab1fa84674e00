//! Helpers of the whole-system tests. The tests themselves lie in `tests/tests` (Rust) and `tests/python` (real JAX
//! clients against real processes).

pub mod abuse;
pub mod agreement;
pub mod cluster;
pub mod fuzz;
pub mod jaxlib;
pub mod null_server;
pub mod null_worker;
pub mod persist;
pub mod processes;
pub mod raw;
pub mod relay;
pub mod shards;
pub mod spanning;
