//! Sharded arrays on a bucket: shardings, zarr, save and restore.
//!
//! | module | holds |
//! | --- | --- |
//! | [`sharding`] | which piece of a global array lies at which position of a device list |
//! | [`persistence`] | the JSON by which a client asks for arrays to be written and read |
//! | [`zarr`] | the format on the bucket, bytes only |
//! | [`Engine`] | one process's limits; [`Engine::save`] and [`Engine::restore`] do the work |
//!
//! A worker reads a request with [`persistence::parse`], lays each array over its devices with [`Sharding`], and hands the
//! pieces it holds to [`Engine::save`], or the boxes its devices need to [`Engine::restore`]. Nothing here knows of
//! sessions or devices: bytes come in as host buffers and go out as such.

mod engine;
mod error;
pub mod persistence;
mod restore;
mod save;
pub mod sharding;
mod strided;
pub mod zarr;

pub use engine::{Config, Engine, within};
pub use error::{Error, Result};
pub use restore::RestoreArray;
pub use save::SaveArray;
pub use sharding::{IndexDomain, Sharding};
