//! The zarr v2 format as TensorStore and Orbax write it: bytes to values and back, and nothing of storage.
//!
//! An array is a folder with the metadata file `.zarray` ([`Metadata`]) and one file a chunk, named by its place in the
//! chunk grid ([`Grid`]): `0.1`, or `0` for an array of rank 0. A chunk holds the elements of its whole box in
//! little-endian row-major order, padded where it runs over the edge of the array, in one zstd frame or as they are
//! ([`Codec`]). Unlike elsewhere in zarr, an absent chunk does not stand for zeros: Orbax writes every chunk and takes a
//! missing one for an error, and so do we.
//!
//! This is ours rather than the `zarrs` crate's because the part of v2 that Orbax uses is small, while the file must come
//! out as TensorStore demands it, member by member, with element types (`bfloat16`, the fp8 kinds, `int4`) that plain
//! zarr v2 does not name.

mod codec;
mod dtype;
mod grid;
mod metadata;

pub use self::codec::{Codec, ZSTD_LEVEL};
pub use self::dtype::DType;
pub use self::grid::{ChunkIndex, Chunks, Grid};
pub use self::metadata::{MAX_METADATA_BYTES, METADATA_FILE, Metadata, Order};

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
