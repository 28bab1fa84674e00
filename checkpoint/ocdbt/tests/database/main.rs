//! Databases in memory: built and read back, damaged, hostile, mutated at random.

#![allow(
    clippy::unwrap_used,
    reason = "a test's helpers fail as its assertions do"
)]

mod building;
mod damage;
mod fuzz;
mod hostile;
mod merging;
mod reading;
mod support;
