//! What is said of an array, whichever version of the format says it.

use super::{Codec, DType, Grid, Keys, Result, Shards, malformed, v2, v3};

/// The longest metadata file read, in bytes. Real ones have a few hundred.
pub const MAX_METADATA_BYTES: usize = 1 << 20;

/// A version of the format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// Version 2, which Pathways' clients of Orbax expect.
    #[default]
    Zarr2,
    /// Version 3, as Orbax writes it with `use_zarr3=True`: shards of one chunk.
    Zarr3,
}

impl Format {
    /// Both, in the order in which a reader looks for them.
    pub const ALL: [Format; 2] = [Format::Zarr2, Format::Zarr3];

    /// The name of the metadata file in the array's folder.
    #[must_use]
    pub fn metadata_file(self) -> &'static str {
        match self {
            Format::Zarr2 => ".zarray",
            Format::Zarr3 => "zarr.json",
        }
    }

    /// The codec that Orbax uses.
    #[must_use]
    pub fn orbax_codec(self) -> Codec {
        match self {
            Format::Zarr2 => Codec::Zstd { level: 1 },
            Format::Zarr3 => Codec::Zstd { level: 3 },
        }
    }
}

/// The order of elements inside a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Row-major: the last index runs fastest.
    C,
    /// Column-major: the first index runs fastest.
    F,
}

/// What the metadata file of an array says. Of the fill value nothing is kept, for an absent chunk is an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata {
    /// The version of the format.
    pub format: Format,
    /// Shape and chunks; each chunk of this grid is an object.
    pub grid: Grid,
    /// The element type.
    pub dtype: DType,
    /// Whether elements are stored with the most significant byte first.
    pub big_endian: bool,
    /// How chunks are compressed.
    pub codec: Codec,
    /// The order of elements inside a chunk.
    pub order: Order,
    /// How the objects are named.
    pub keys: Keys,
    /// How an object is cut into chunks; `None` when it is one.
    pub shards: Option<Shards>,
}

impl Metadata {
    /// The metadata of an array as Waystation writes it, which is as Orbax does: row-major, little-endian; in version 3, one
    /// inner chunk a shard.
    ///
    /// `chunks` is in elements; an extent of 0, which the format does not have, becomes 1.
    ///
    /// # Errors
    /// As [`Grid::new`].
    pub fn new(
        format: Format,
        shape: &[i64],
        chunks: &[i64],
        dtype: DType,
        codec: Codec,
    ) -> Result<Self> {
        let chunks: Vec<i64> = chunks
            .iter()
            .map(|&extent| if extent == 0 { 1 } else { extent })
            .collect();
        let grid = Grid::new(shape, &chunks)?;
        let (keys, shards) = match format {
            Format::Zarr2 => (Keys::V2, None),
            Format::Zarr3 => (Keys::V3, Some(Shards::new(&chunks, &chunks)?)),
        };
        Ok(Self {
            format,
            grid,
            dtype,
            big_endian: false,
            codec,
            order: Order::C,
            keys,
            shards,
        })
    }

    /// The bytes of the file, as TensorStore writes it: compact JSON without a newline.
    ///
    /// # Errors
    /// What the version of the format has no words for; none for metadata that came from [`Metadata::new`] or
    /// [`Metadata::decode`].
    pub fn encode(&self) -> Result<Vec<u8>> {
        match self.format {
            Format::Zarr2 => v2::encode(self),
            Format::Zarr3 => v3::encode(self),
        }
    }

    /// Reads the file.
    ///
    /// # Errors
    /// [`Error::Malformed`](super::Error::Malformed) for what TensorStore would refuse too;
    /// [`Error::Unsupported`](super::Error::Unsupported) for other codecs, filters, grids and element types.
    pub fn decode(format: Format, bytes: &[u8]) -> Result<Self> {
        if bytes.len() > MAX_METADATA_BYTES {
            return malformed(format!(
                "{} bytes of metadata, at most {MAX_METADATA_BYTES} are taken",
                bytes.len()
            ));
        }
        match format {
            Format::Zarr2 => v2::decode(bytes),
            Format::Zarr3 => v3::decode(bytes),
        }
    }

    /// The shape of what is compressed as one: a chunk, in a shard an inner chunk.
    #[must_use]
    pub fn block(&self) -> &[i64] {
        match &self.shards {
            Some(shards) => shards.grid().chunks(),
            None => self.grid.chunks(),
        }
    }

    /// The size of a decoded block in bytes; `None` when it cannot be counted.
    #[must_use]
    pub fn block_bytes(&self) -> Option<usize> {
        crate::sharding::num_elements(self.block())?.checked_mul(self.dtype.item_bytes())
    }

    /// The strides of a block, in bytes, one a dimension; `None` when they cannot be counted.
    #[must_use]
    pub fn block_strides(&self) -> Option<Vec<usize>> {
        let block = self.block();
        match self.order {
            Order::C => crate::strided::row_major(block, self.dtype.item_bytes()),
            Order::F => {
                let mirrored: Vec<i64> = block.iter().rev().copied().collect();
                let mut strides = crate::strided::row_major(&mirrored, self.dtype.item_bytes())?;
                strides.reverse();
                Some(strides)
            }
        }
    }
}
