//! The zarr formats, versions 2 and 3, as TensorStore and Orbax write them: bytes to values and back, and nothing of storage.
//!
//! An array is a folder with a metadata file ([`Metadata`]), `.zarray` or `zarr.json`, and one file a chunk of the chunk
//! grid ([`Grid`]), named by its place there ([`Keys`]): `0.1` or `c/0/1`. A chunk holds the elements of its whole box in
//! row-major order, padded where it runs over the edge of the array, in one zstd frame or as they are ([`Codec`]). In
//! version 3 a file may be a shard: chunks one behind the other, with an index ([`Shards`]); Orbax writes shards of one.
//! Unlike elsewhere in zarr, an absent chunk does not stand for a fill value: Orbax writes every chunk and takes a missing
//! one for an error, and so do we.
//!
//! This is ours rather than the `zarrs` crate's (0.23, well kept, MIT or Apache-2.0). Of both versions Orbax uses a small
//! part, and that part has to be met more strictly than `zarrs` does: it fills absent chunks, in shards too, it allocates
//! what the metadata says, and the files we write must come out as TensorStore demands them, member by member, with
//! element types (`bfloat16`, the fp8 kinds, `int4`) that plain zarr v2 does not name.

mod codec;
mod dtype;
mod grid;
mod keys;
mod metadata;
mod shards;
mod v2;
mod v3;

pub use self::codec::Codec;
pub(crate) use self::codec::PART_BYTES;
pub use self::dtype::DType;
pub use self::grid::{ChunkIndex, Chunks, Grid};
pub use self::keys::Keys;
pub use self::metadata::{Format, MAX_METADATA_BYTES, Metadata, Order};
pub use self::shards::{Index, MAX_INNER_CHUNKS, Shards};

/// Bytes that are not what the format says, or a part of the format that is not read here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It contradicts the format or itself.
    #[error("{0}")]
    Malformed(String),
    /// It may be good zarr, but is not read by Waystation.
    #[error("{0} is not supported")]
    Unsupported(String),
}

/// A result of format code.
pub type Result<T> = std::result::Result<T, Error>;

fn malformed<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Malformed(what.into()))
}
