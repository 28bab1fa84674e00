//! Sharded arrays on a bucket: shardings, zarr, save and restore.
//!
//! A sharding ([`sharding`]) says which piece of a global array lies at which position of a device list;
//! the persistence programs ([`persistence`]) are how a client asks for arrays to be written and read.

mod error;
pub mod persistence;
pub mod sharding;

pub use error::{Error, Result};
