//! One array on its way from one layout to another.

use std::sync::Arc;

use bytes::Bytes;
use waystation_checkpoint::zarr::{self, ChunkIndex, Codec, Format, Metadata, Shards};
use waystation_checkpoint::{IndexDomain, strided};

use super::{Compression, Options};
use crate::blocks::Reader;
use crate::item::{Array, Item, join};
use crate::memory::Memory;
use crate::sink::{Left, Sink};
use crate::values::Cast;
use crate::{Error, Result};
use waystation_checkpoint::Layout;

/// How one array is converted.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) reader: Reader,
    pub(super) metadata: Metadata,
    cast: Option<Cast>,
    /// Whether chunks are the same, byte for byte, but for what stands around them.
    is_verbatim: bool,
}

impl Plan {
    pub(super) fn new(
        item: &Item,
        array: &Array,
        layout: Layout,
        options: &Options,
        memory: &Memory,
    ) -> Result<Plan> {
        let reader = Reader::open(item, array, memory)?;
        let from = reader.metadata.dtype;
        let (dtype, cast) = Cast::asked(&options.casts, item, &array.name, from)?;
        let format = layout.format();
        let codec = match options.compression {
            None if reader.is_compressed() => format.orbax_codec(),
            None | Some(Compression::None) => Codec::Raw,
            Some(Compression::Zstd(level)) => Codec::Zstd { level },
        };
        let shape = reader.shape();
        let item_bytes = dtype.item_bytes() as u64;
        let chunks = match options.chunk_bytes {
            None => reader.grid.chunks().to_vec(),
            Some(most) => cut(shape, item_bytes, most),
        };
        let metadata = Metadata::new(format, shape, &chunks, dtype, codec)
            .map_err(|source| reader.damaged("the new chunks".to_owned(), source))?;
        let is_verbatim = cast.is_none()
            && options.compression.is_none()
            && reader.is_plain()
            && metadata.block() == reader.grid.chunks();
        Ok(Plan {
            reader,
            metadata,
            cast,
            is_verbatim,
        })
    }

    /// The metadata file: its key and its bytes.
    pub(super) fn metadata_file(&self) -> Result<(String, Vec<u8>)> {
        let bytes = self
            .metadata
            .encode()
            .map_err(|source| self.reader.damaged("the new metadata".to_owned(), source))?;
        let file = self.metadata.format.metadata_file();
        Ok((join(&self.reader.name, file), bytes))
    }

    /// The new chunks, in the order of the blocks that they begin in: so of chunks that a block is cut into, none needs it
    /// again after others.
    pub(super) fn chunks(&self) -> impl Iterator<Item = ChunkIndex> + use<'_> {
        let blocks = &self.reader.grid;
        let chunks = self.metadata.grid.chunks();
        blocks
            .chunks_of(&IndexDomain::whole(blocks.shape()))
            .flat_map(move |block| {
                let domain = blocks.domain(&block);
                let ends = domain.origin.iter().zip(&domain.shape);
                let ranges = ends.zip(chunks).map(|((&origin, &extent), &chunk)| {
                    let first = up(origin, chunk);
                    (first, up(origin + extent, chunk) - first)
                });
                let (origin, shape): (Vec<i64>, Vec<i64>) = ranges.unzip();
                Indices::new(origin, shape)
            })
    }

    fn chunk_bytes(&self) -> Result<u64> {
        let bytes = self.metadata.block_bytes();
        bytes.map(|bytes| bytes as u64).ok_or_else(|| {
            Error::Asked(format!(
                "the new chunks of {:?} are too large",
                self.reader.name
            ))
        })
    }

    /// Writes one chunk; returns the bytes of its elements and whether it was there already.
    pub(super) async fn write(
        &self,
        chunk: ChunkIndex,
        sink: &Sink,
        memory: &Memory,
    ) -> Result<(u64, bool)> {
        let key = join(&self.reader.name, &self.metadata.keys.key(&chunk));
        let domain = self.metadata.grid.domain(&chunk);
        let box_bytes = crate::item::elements(&domain.shape)
            .unwrap_or(0)
            .saturating_mul(self.reader.item_bytes());
        let chunk_bytes = self.chunk_bytes()?;
        // The box, the chunk with its padding, and the chunk compressed.
        let around = if self.is_verbatim {
            chunk_bytes
        } else {
            box_bytes + 3 * chunk_bytes
        };
        let (cost, reads) = self.reader.cost(around)?;
        let _room = memory.take(cost).await;
        if self.is_left(&key, chunk_bytes, sink).await? {
            return Ok((box_bytes, true));
        }
        let stored = if self.is_verbatim {
            // Decoded, for what is damaged is not to be passed on.
            self.framed(self.reader.block(&chunk).await?.stored)
        } else {
            let elements = self.reader.read(&domain, reads).await?;
            self.encoded(elements, domain, chunk).await?
        };
        let is_new = sink.put(&key, stored).await?;
        Ok((box_bytes, !is_new))
    }

    async fn is_left(&self, key: &str, chunk_bytes: u64, sink: &Sink) -> Result<bool> {
        let len = usize::try_from(chunk_bytes).unwrap_or(usize::MAX);
        let index = self.metadata.shards.as_ref().map_or(0, Shards::index_bytes);
        let most = self.metadata.codec.bound(len).saturating_add(index);
        Ok(match sink.left(key, most as u64).await? {
            Left::None => false,
            Left::Known => true,
            Left::Read(stored) => {
                let metadata = self.metadata.clone();
                tokio::task::spawn_blocking(move || is_whole(&metadata, stored, len)).await?
            }
        })
    }

    async fn encoded(
        &self,
        elements: Vec<u8>,
        domain: IndexDomain,
        chunk: ChunkIndex,
    ) -> Result<Bytes> {
        let (metadata, cast) = (self.metadata.clone(), self.cast);
        let encoded = tokio::task::spawn_blocking(move || {
            let elements = match cast {
                Some(cast) => cast.apply(&elements),
                None => elements,
            };
            metadata.codec.encode(padded(&metadata, elements, &domain)?)
        });
        let encoded = encoded.await?.map_err(|source| {
            let key = self.metadata.keys.key(&chunk);
            self.reader.damaged(key, source)
        })?;
        Ok(self.framed(encoded))
    }

    /// What is stored of a chunk, with its index where it is a shard of its own.
    fn framed(&self, stored: Bytes) -> Bytes {
        if self.metadata.shards.is_none() {
            return stored;
        }
        let index = Shards::index_of_one(stored.len());
        [&stored[..], &index[..]].concat().into()
    }
}

/// How many times `by` is needed to reach `value`, neither of them negative.
fn up(value: i64, by: i64) -> i64 {
    value / by + i64::from(value % by != 0)
}

/// All indices of a box, row-major.
struct Indices {
    origin: Vec<i64>,
    shape: Vec<i64>,
    next: Option<Vec<i64>>,
}

impl Indices {
    fn new(origin: Vec<i64>, shape: Vec<i64>) -> Indices {
        let is_empty = shape.iter().any(|&extent| extent <= 0);
        Indices {
            next: (!is_empty).then(|| origin.clone()),
            origin,
            shape,
        }
    }
}

impl Iterator for Indices {
    type Item = ChunkIndex;

    fn next(&mut self) -> Option<ChunkIndex> {
        let index = self.next.take()?;
        let mut following = index.clone();
        for d in (0..following.len()).rev() {
            following[d] += 1;
            if following[d] < self.origin[d] + self.shape[d] {
                self.next = Some(following);
                break;
            }
            following[d] = self.origin[d];
        }
        Some(index)
    }
}

/// Whether an object holds a chunk.
fn is_whole(metadata: &Metadata, stored: Bytes, len: usize) -> bool {
    let stored = match &metadata.shards {
        None => stored,
        Some(shards) => {
            let size = stored.len();
            let Some(index) = shards.index_range(size).map(|range| stored.slice(range)) else {
                return false;
            };
            let origin = vec![0; shards.grid().shape().len()];
            let index = shards.read_index(index, size as u64);
            match index.and_then(|index| index.place(&origin)) {
                Ok(Some(place)) => stored.slice(place.start as usize..place.end as usize),
                _ => return false,
            }
        }
    };
    metadata.codec.decode(stored, len).is_ok()
}

/// A chunk at the edge has elements beyond it, which are zeros.
fn padded(
    metadata: &Metadata,
    elements: Vec<u8>,
    domain: &IndexDomain,
) -> std::result::Result<Bytes, zarr::Error> {
    if domain.shape == metadata.block() {
        return Ok(elements.into());
    }
    let item_bytes = metadata.dtype.item_bytes();
    let no_room = || zarr::Error::Malformed("no memory for a chunk".to_owned());
    let mut chunk = metadata
        .block_bytes()
        .and_then(strided::zeroed)
        .ok_or_else(no_room)?;
    let from = strided::row_major(&domain.shape, item_bytes).ok_or_else(no_room)?;
    let to = metadata.block_strides().ok_or_else(no_room)?;
    let origin = vec![0; domain.shape.len()];
    strided::copy(
        &elements,
        &strided::Side {
            strides: &from,
            origin: &origin,
        },
        &mut chunk,
        &strided::Side {
            strides: &to,
            origin: &origin,
        },
        &domain.shape,
        item_bytes,
    );
    Ok(chunk.into())
}

/// Chunks of so many bytes at most: the whole array, its longest extent halved until it fits.
fn cut(shape: &[i64], item_bytes: u64, most: u64) -> Vec<i64> {
    let mut chunks: Vec<i64> = shape.iter().map(|&dim| dim.max(1)).collect();
    loop {
        let bytes = crate::item::elements(&chunks)
            .and_then(|elements| elements.checked_mul(item_bytes))
            .unwrap_or(u64::MAX);
        if bytes <= most {
            return chunks;
        }
        let Some(longest) = chunks.iter_mut().max() else {
            return chunks;
        };
        if *longest <= 1 {
            return chunks;
        }
        *longest = (*longest + 1) / 2;
    }
}

/// Which version of zarr most arrays have.
pub(super) fn prevailing<'a>(arrays: impl Iterator<Item = &'a Array>, otherwise: Format) -> Format {
    let (mut v2, mut v3) = (0u64, 0u64);
    for array in arrays {
        match array.layout.format() {
            Format::Zarr2 => v2 += 1,
            Format::Zarr3 => v3 += 1,
        }
    }
    match v2.cmp(&v3) {
        std::cmp::Ordering::Greater => Format::Zarr2,
        std::cmp::Ordering::Less => Format::Zarr3,
        std::cmp::Ordering::Equal => otherwise,
    }
}

/// Shared by all that write.
pub(super) type SharedPlan = Arc<Plan>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_cut_until_they_fit() {
        assert_eq!(cut(&[8, 6], 4, 1000), [8, 6]);
        assert_eq!(cut(&[8, 6], 4, 100), [4, 6]);
        assert_eq!(cut(&[7, 1], 4, 8), [2, 1]);
        assert_eq!(cut(&[0, 3], 4, 4), [1, 1]);
        assert_eq!(cut(&[], 8, 1), Vec::<i64>::new());
        assert_eq!(cut(&[4], 8, 1), [1]);
    }
}
