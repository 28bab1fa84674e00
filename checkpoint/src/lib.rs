//! Sharded arrays on a bucket: shardings, zarr, save and restore.
//!
//! A sharding ([`sharding`]) says which piece of a global array lies at which position of a device list.

mod error;
pub mod sharding;

pub use error::{Error, Result};
