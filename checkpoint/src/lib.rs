//! Sharded arrays on a bucket: shardings, zarr, save and restore.
//!
//! | module | holds |
//! | --- | --- |
//! | [`sharding`] | which piece of a global array lies at which position of a device list |
//! | [`persistence`] | the JSON by which a client asks for arrays to be written and read |
//! | [`zarr`] | the formats on the bucket, zarr v2 and v3, bytes only |
//! | [`Engine`] | one process's limits; [`Engine::save`] and [`Engine::restore`] do the work |
//! | [`Saving`] | one save under way, in one of four [`Layout`]s |
//! | [`Checkpoint`] | an open checkpoint: its arrays in whatever format and place, chunk by chunk, and its other files |
//!
//! A worker reads a request with [`persistence::parse`], lays each array over its devices with [`Sharding`], and hands the
//! pieces it holds to [`Engine::save`], or the boxes its devices need to [`Engine::restore`]. Nothing here knows of
//! sessions or devices: bytes come in as host buffers and go out as such.
//!
//! ```
//! use waystation_checkpoint::persistence::{self, Request};
//! use waystation_checkpoint::{Config, Engine, IndexDomain, RestoreArray, SaveArray, Sharding};
//! use waystation_proto::xla::PrimitiveType;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let program = {
//! #     use base64::{Engine as _, prelude::BASE64_STANDARD};
//! #     format!(
//! #         r#"{{"persistenceWriteRequest": {{"b64_location": "{}", "b64_name": "dw==",
//! #         "b64_hlo_sharding_string": "CAMaAQRKAQRSAQA=", "shape": [10], "devices": {{"device_ids": [0, 1, 2, 3]}}}}}}"#,
//! #         BASE64_STANDARD.encode(folder.path().to_str().ok_or("path")?)
//! #     )
//! # };
//! let Request::Write(items) = persistence::parse(&program)? else { unreachable!() };
//! let item = &items[0]; // an array of 10 elements, cut in 4
//! let sharding = Sharding::new(&item.sharding, item.device_ids.len())?;
//! let domains = sharding.domains(&item.dims)?;
//!
//! // A save may be given all pieces that this process holds, or one at a time as they come from the devices: which chunk
//! // they make up does not depend on it. Of pieces that several positions hold, the first holder writes.
//! let engine = Engine::new(Config::default());
//! let array = SaveArray::sharded(&item.location, &item.name, PrimitiveType::U8, &item.dims, &sharding)?;
//! for (number, position) in sharding.first_holders().into_iter().enumerate() {
//!     let elements = vec![7; domains[position].num_elements().unwrap_or(0)];
//!     engine.save(&array, vec![(domains[position].clone(), elements.into())], number == 0).await?;
//! }
//!
//! // Any other cut of it can be read.
//! let array = RestoreArray {
//!     location: item.location.clone(),
//!     name: item.name.clone(),
//!     dtype: PrimitiveType::U8,
//!     dims: item.dims.clone(),
//! };
//! let half = IndexDomain { origin: vec![5], shape: vec![5] };
//! assert_eq!(engine.restore(&array, &[half]).await?[0], [7; 5][..]);
//! # Ok(())
//! # }
//! ```

mod checkpoint;
mod database;
mod engine;
mod error;
mod layout;
pub mod persistence;
mod restore;
mod save;
pub mod sharding;
pub mod strided;
pub mod zarr;

pub use checkpoint::{
    ArrayEntry, CHILD_PREFIX, Checkpoint, Checkpoints, Home, ObjectEntry, StoredArray,
};
pub use database::{Database, Objects};
pub use engine::{Buffer, Buffers, Config, Engine, Meeting, Room, Term, Together, Totals, within};
pub use error::{Error, Result};
pub use layout::Layout;
pub use restore::RestoreArray;
pub use save::{Cut, Elements, SaveArray, Saving, Share, Spread};
pub use sharding::{IndexDomain, Sharding};
