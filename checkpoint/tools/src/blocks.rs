//! Reading an array: the blocks that are compressed as one, and boxes of elements made of them.
//!
//! A block is a chunk; in a shard, an inner chunk. Blocks make up a grid of their own over the array, for inner chunks fill
//! their shards. A block that several boxes need is kept decoded for a while.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use tokio::sync::OnceCell;
use waystation_checkpoint::zarr::{self, ChunkIndex, Codec, Grid, Index, Metadata, Order};
use waystation_checkpoint::{IndexDomain, strided};

use crate::item::{Array, Item, join, unreadable};
use crate::memory::Memory;
use crate::objects::Shared;
use crate::{Error, Result};

/// Blocks of one box read at the same time, where memory allows.
const READS: u64 = 16;
/// Indexes of shards that are kept.
const KEPT_INDEXES: usize = 64;

/// An array that is open for reading.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) name: String,
    pub(crate) metadata: Metadata,
    /// The grid of blocks.
    pub(crate) grid: Grid,
    pub(crate) block_bytes: u64,
    block_strides: Vec<usize>,
    objects: Shared,
    location: String,
    memory: Memory,
    indexes: Mutex<HashMap<ChunkIndex, Arc<Index>>>,
    kept: Mutex<Kept>,
}

/// A block as it is stored and what it holds.
#[derive(Debug)]
pub(crate) struct Block {
    /// As it lies in the store.
    pub(crate) stored: Bytes,
    /// Its elements, little-endian, in the block's own order.
    pub(crate) elements: Bytes,
}

/// A decoded block, made by the first who needs it while the others wait.
type Cell = Arc<OnceCell<Bytes>>;

/// Decoded blocks, the least recently used of them dropped.
#[derive(Debug, Default)]
struct Kept {
    blocks: HashMap<ChunkIndex, (u64, Cell)>,
    clock: u64,
}

impl Kept {
    /// The block's place among `most`.
    fn cell(&mut self, index: ChunkIndex, most: usize) -> Cell {
        self.clock += 1;
        let clock = self.clock;
        if let Some((used, cell)) = self.blocks.get_mut(&index) {
            *used = clock;
            return Arc::clone(cell);
        }
        while self.blocks.len() >= most.max(1) {
            let oldest = self.blocks.iter().min_by_key(|(_, (used, _))| *used);
            let Some(oldest) = oldest.map(|(index, _)| index.clone()) else {
                break;
            };
            self.blocks.remove(&oldest);
        }
        let cell = Cell::default();
        self.blocks.insert(index, (clock, Arc::clone(&cell)));
        cell
    }
}

impl Reader {
    /// Opens an array of an item.
    ///
    /// # Errors
    /// Metadata that cannot be read; a chunk larger than memory.
    pub(crate) fn open(item: &Item, array: &Array, memory: &Memory) -> Result<Reader> {
        let Some(metadata) = array.metadata.clone() else {
            return Err(unreadable(item, array));
        };
        let location = item.place.location().to_owned();
        let blame = |source| Error::Array {
            array: array.name.clone(),
            location: location.clone(),
            object: metadata.format.metadata_file().to_owned(),
            source,
        };
        let impossible = || {
            blame(zarr::Error::Malformed(
                "its chunks cannot be laid out".to_owned(),
            ))
        };
        let grid = Grid::new(metadata.grid.shape(), metadata.block()).map_err(blame)?;
        let block_bytes = metadata.block_bytes().ok_or_else(impossible)? as u64;
        let block_strides = metadata.block_strides().ok_or_else(impossible)?;
        Ok(Reader {
            name: array.name.clone(),
            grid,
            block_bytes,
            block_strides,
            objects: Arc::clone(item.objects(array.layout.is_ocdbt())),
            location,
            memory: memory.clone(),
            indexes: Mutex::default(),
            kept: Mutex::default(),
            metadata,
        })
    }

    pub(crate) fn shape(&self) -> &[i64] {
        self.grid.shape()
    }

    pub(crate) fn item_bytes(&self) -> u64 {
        self.metadata.dtype.item_bytes() as u64
    }

    /// The most bytes that a block is stored in.
    fn most_stored(&self) -> u64 {
        let codec = self.metadata.codec;
        usize::try_from(self.block_bytes).map_or(u64::MAX, |len| codec.bound(len) as u64)
    }

    /// What reading one block takes.
    pub(crate) fn block_cost(&self) -> u64 {
        self.most_stored().saturating_add(self.block_bytes)
    }

    /// The memory to take before boxes of so many bytes are read with [`Reader::read`], and how many blocks may then be read
    /// at a time.
    pub(crate) fn cost(&self, box_bytes: u64) -> Result<(u64, usize)> {
        // A part is for what is kept.
        let total = self.memory.total() / 4 * 3;
        let least = box_bytes.saturating_add(self.block_cost());
        if least > total {
            return Err(Error::Memory {
                what: format!("array {:?}", self.name),
                location: self.location.clone(),
                bytes: least.saturating_add(least / 3),
                allowed: self.memory.total(),
            });
        }
        // Half of it, so that another box may be on its way.
        let room = (total / 2).saturating_sub(box_bytes);
        let reads = (room / self.block_cost().max(1)).clamp(1, READS);
        Ok((box_bytes + reads * self.block_cost(), reads as usize))
    }

    fn object(&self, file: &str) -> String {
        join(&self.name, file)
    }

    pub(crate) fn damaged(&self, object: String, source: zarr::Error) -> Error {
        Error::Array {
            array: self.name.clone(),
            location: self.location.clone(),
            object,
            source,
        }
    }

    fn missing(&self, object: String) -> Error {
        Error::MissingChunk {
            array: self.name.clone(),
            location: self.location.clone(),
            object,
        }
    }

    /// The object that a block lies in, its place in the grid of objects, and its place in the object.
    pub(crate) fn place(&self, block: &[i64]) -> (String, ChunkIndex, ChunkIndex) {
        let per: Vec<i64> = self
            .metadata
            .grid
            .chunks()
            .iter()
            .zip(self.grid.chunks())
            .map(|(object, block)| object / block)
            .collect();
        let object: ChunkIndex = block.iter().zip(&per).map(|(i, n)| i / n).collect();
        let inner = block.iter().zip(&per).map(|(i, n)| i % n).collect();
        (self.object(&self.metadata.keys.key(&object)), object, inner)
    }

    /// Reads and decodes a block.
    pub(crate) async fn block(&self, block: &[i64]) -> Result<Block> {
        let (object, shard, inner) = self.place(block);
        let stored = match &self.metadata.shards {
            None => {
                self.check_size(
                    &object,
                    self.objects.entry(&object).map(|entry| entry.len()),
                )?;
                let read = self.objects.get(&object, u64::MAX).await?;
                read.ok_or_else(|| self.missing(object.clone()))?
            }
            Some(_) => {
                let index = self.index(&object, shard).await?;
                let place = index
                    .place(&inner)
                    .map_err(|source| self.damaged(object.clone(), source))?;
                let name = || format!("{object}, inner chunk {inner:?}");
                let Some(place) = place else {
                    return Err(self.missing(name()));
                };
                self.check_size(&object, Some(place.end - place.start))?;
                let read = self.objects.range(&object, place).await?;
                read.ok_or_else(|| self.missing(name()))?
            }
        };
        let (codec, len) = (self.metadata.codec, self.block_bytes as usize);
        let (dtype, is_swapped) = (self.metadata.dtype, self.metadata.big_endian);
        if codec == Codec::Raw && !dtype.is_narrow() && !is_swapped && stored.len() == len {
            let elements = stored.clone();
            return Ok(Block { stored, elements });
        }
        let kept = stored.clone();
        let decoded = tokio::task::spawn_blocking(move || {
            let mut elements = codec.decode(kept, len)?;
            if is_swapped {
                dtype.swap_bytes(&mut elements);
            }
            dtype.clear_padding(&mut elements);
            Ok(Bytes::from(elements))
        });
        let elements = decoded
            .await?
            .map_err(|source| self.damaged(object, source))?;
        Ok(Block { stored, elements })
    }

    /// No more is read than a chunk can have.
    fn check_size(&self, object: &str, size: Option<u64>) -> Result<()> {
        match size {
            Some(size) if size > self.most_stored() => Err(self.damaged(
                object.to_owned(),
                zarr::Error::Malformed(format!(
                    "{size} bytes stored where a chunk has {}",
                    self.block_bytes
                )),
            )),
            _ => Ok(()),
        }
    }

    /// The index of a shard.
    async fn index(&self, object: &str, shard: ChunkIndex) -> Result<Arc<Index>> {
        let known = lock(&self.indexes).get(&shard).cloned();
        if let Some(index) = known {
            return Ok(index);
        }
        let Some(shards) = &self.metadata.shards else {
            return Err(self.missing(object.to_owned()));
        };
        let Some(size) = self.objects.entry(object).map(|entry| entry.len()) else {
            return Err(self.missing(object.to_owned()));
        };
        let range = usize::try_from(size)
            .ok()
            .and_then(|size| shards.index_range(size))
            .map_or(0..size, |range| range.start as u64..range.end as u64);
        let bytes = if range.end - range.start == shards.index_bytes() as u64 {
            self.objects.range(object, range).await?
        } else {
            Some(Bytes::new())
        };
        let bytes = bytes.ok_or_else(|| self.missing(object.to_owned()))?;
        let index = shards
            .read_index(bytes, size)
            .map_err(|source| self.damaged(object.to_owned(), source))?;
        let index = Arc::new(index);
        let mut indexes = lock(&self.indexes);
        if indexes.len() >= KEPT_INDEXES {
            indexes.clear();
        }
        indexes.insert(shard, Arc::clone(&index));
        Ok(index)
    }

    /// The elements of a box, dense, row-major. Whoever calls holds the memory that [`Reader::cost`] says.
    pub(crate) async fn read(&self, wanted: &IndexDomain, reads: usize) -> Result<Vec<u8>> {
        let item_bytes = self.metadata.dtype.item_bytes();
        let len = wanted
            .num_elements()
            .and_then(|elements| elements.checked_mul(item_bytes));
        let strides = strided::row_major(&wanted.shape, item_bytes);
        let (Some(len), Some(strides)) = (len, strides) else {
            return Err(Error::Asked(format!("{wanted:?} is too large")));
        };
        let Some(mut elements) = strided::zeroed(len) else {
            return Err(Error::Memory {
                what: format!("array {:?}", self.name),
                location: self.location.clone(),
                bytes: len as u64,
                allowed: self.memory.total(),
            });
        };
        let blocks = self.grid.chunks_of(wanted);
        let mut read = futures::stream::iter(blocks)
            .map(|block| async {
                let domain = self.grid.domain(&block);
                let kept = self.kept(block, &domain, wanted).await?;
                Ok::<_, Error>((domain, kept))
            })
            .buffer_unordered(reads);
        while let Some((domain, block)) = read.try_next().await? {
            let Some(shared) = domain.intersect(wanted) else {
                continue;
            };
            // An array that is one block is often asked for whole.
            if self.is_dense() && domain == *wanted && domain.shape == self.grid.chunks() {
                elements.copy_from_slice(&block);
                continue;
            }
            strided::copy(
                &block,
                &strided::Side {
                    strides: &self.block_strides,
                    origin: &difference(&shared.origin, &domain.origin),
                },
                &mut elements,
                &strided::Side {
                    strides: &strides,
                    origin: &difference(&shared.origin, &wanted.origin),
                },
                &shared.shape,
                item_bytes,
            );
        }
        Ok(elements)
    }

    async fn kept(
        &self,
        block: ChunkIndex,
        domain: &IndexDomain,
        wanted: &IndexDomain,
    ) -> Result<Bytes> {
        // Boxes do not overlap, so what this one has whole no other needs.
        let is_shared = domain.intersect(wanted).as_ref() != Some(domain);
        let most = (self.memory.total() / 4) / self.block_bytes.max(1);
        if !is_shared || most == 0 {
            return Ok(self.block(&block).await?.elements);
        }
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let cell = lock(&self.kept).cell(block.clone(), most);
        let made = cell.get_or_try_init(async || {
            let read = self.block(&block).await?;
            Ok::<_, Error>(read.elements)
        });
        made.await.cloned()
    }

    /// Whether a block's elements lie row-major.
    pub(crate) fn is_dense(&self) -> bool {
        self.metadata.order == Order::C
    }

    /// Whether what is stored of a block can be another array's, byte for byte.
    pub(crate) fn is_plain(&self) -> bool {
        self.is_dense() && !(self.metadata.big_endian && self.metadata.dtype.has_byte_order())
    }

    pub(crate) fn is_compressed(&self) -> bool {
        self.metadata.codec != Codec::Raw
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Both hold nothing that a panic could leave half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn difference(a: &[i64], b: &[i64]) -> Vec<i64> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

/// Boxes that make up an array in the order of its elements, each of so many elements at most, and where it can be ending
/// where a row of blocks does.
#[derive(Debug)]
pub(crate) struct Slabs {
    shape: Vec<i64>,
    /// The dimension that is cut; those before it are gone through one by one, those behind it are whole.
    cut: usize,
    extent: i64,
    next: Option<Vec<i64>>,
}

impl Slabs {
    pub(crate) fn new(shape: &[i64], blocks: &[i64], most_elements: u64) -> Slabs {
        let is_empty = shape.iter().any(|&dim| dim <= 0);
        let most = most_elements.max(1);
        // From the last dimension on, as many whole ones as fit.
        let mut cut = shape.len();
        let mut inner = 1u64;
        while cut > 0 {
            let with = inner.saturating_mul(u64::try_from(shape[cut - 1]).unwrap_or(0).max(1));
            if with > most {
                break;
            }
            inner = with;
            cut -= 1;
        }
        let (cut, extent) = if cut == 0 {
            (0, shape.first().copied().unwrap_or(1))
        } else {
            let d = cut - 1;
            let fits = i64::try_from(most / inner).unwrap_or(i64::MAX).max(1);
            let block = blocks.get(d).copied().unwrap_or(1).max(1);
            let aligned = if fits > block {
                fits / block * block
            } else {
                fits
            };
            (d, aligned.min(shape[d].max(1)))
        };
        Slabs {
            shape: shape.to_vec(),
            cut,
            extent: extent.max(1),
            next: (!is_empty).then(|| vec![0; shape.len()]),
        }
    }
}

impl Iterator for Slabs {
    type Item = IndexDomain;

    fn next(&mut self) -> Option<IndexDomain> {
        let origin = self.next.take()?;
        let mut extent = vec![1; origin.len()];
        for (d, extent) in extent.iter_mut().enumerate() {
            if d > self.cut {
                *extent = self.shape[d];
            } else if d == self.cut {
                *extent = self.extent.min(self.shape[d] - origin[d]);
            }
        }
        let mut following = origin.clone();
        for d in (0..following.len().min(self.cut + 1)).rev() {
            following[d] += if d == self.cut { self.extent } else { 1 };
            if following[d] < self.shape[d] {
                self.next = Some(following);
                break;
            }
            following[d] = 0;
        }
        Some(IndexDomain {
            origin,
            shape: extent,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_follow_the_order_of_elements() {
        for (shape, blocks, most) in [
            (&[5, 4, 3][..], &[2, 2, 2][..], 1u64),
            (&[5, 4, 3], &[2, 2, 2], 5),
            (&[5, 4, 3], &[2, 2, 2], 12),
            (&[5, 4, 3], &[2, 4, 3], 30),
            (&[5, 4, 3], &[2, 2, 2], 1000),
            (&[], &[], 1),
            (&[7], &[2], 3),
        ] {
            let mut next = 0;
            for slab in Slabs::new(shape, blocks, most) {
                assert!(slab.lies_in(shape));
                let elements = slab.num_elements().unwrap() as i64;
                assert!(elements as u64 <= most, "{shape:?} {most}: {slab:?}");
                let first = slab
                    .origin
                    .iter()
                    .zip(shape)
                    .fold(0, |flat, (i, dim)| flat * dim + i);
                assert_eq!(first, next, "{shape:?} {most}");
                next += elements;
            }
            assert_eq!(next, shape.iter().product::<i64>());
        }
        assert_eq!(Slabs::new(&[0, 3], &[1, 1], 10).count(), 0);
        // The cut is where blocks end.
        let first = Slabs::new(&[8, 2], &[2, 2], 7).next().unwrap();
        assert_eq!(first.shape, [2, 2]);
    }
}
