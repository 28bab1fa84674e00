//! The engine against stores of this process and of this machine: what comes back is what went in, on any grid; and what is
//! missing, damaged or lying is an error that says so.

#![allow(
    clippy::unwrap_used,
    reason = "a test's helpers fail as its assertions do"
)]

mod damage;
mod databases;
mod held;
mod layout;
mod memory;
mod round_trip;
mod saving;
mod shard_damage;
mod sharded;
mod shards;
mod store;
mod support;
mod together;
mod weather;
