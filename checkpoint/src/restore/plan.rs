//! Which chunks a restore reads, and where their elements go.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use crate::engine::Folder;
use crate::sharding::IndexDomain;
use crate::strided::{self, Side};
use crate::zarr::{self, ChunkIndex, Chunks, Metadata, Order, Shards};
use crate::{Error, Result};

/// A chunk may be this many times the array it belongs to, and no larger than that unless it is small: a small file must not
/// be able to claim all memory. Edge chunks are padded, to less than twice the array a dimension.
const MAX_PADDING: usize = 16;
/// A chunk of at most this many bytes is read whatever the array's size.
const SMALL_CHUNK_BYTES: usize = 256 << 20;

/// What a restore does, checked, and what it has read.
pub(super) struct Plan {
    pub(super) metadata: Metadata,
    /// The size of what is decoded as one, and its strides.
    pub(super) block_bytes: usize,
    block_strides: Vec<usize>,
    /// The distinct boxes wanted.
    boxes: Vec<Target>,
    /// For each domain asked for, the number of its box.
    slots: Vec<usize>,
}

/// A box wanted, and its elements as far as they have been read.
struct Target {
    domain: IndexDomain,
    len: usize,
    strides: Vec<usize>,
    /// The chunks that hold elements of it.
    chunks: Chunks,
    /// Empty until the first chunk comes.
    bytes: Mutex<Vec<u8>>,
}

/// Why a chunk could not be placed.
pub(super) enum Failure {
    Corrupt(zarr::Error),
    OutOfMemory(usize),
}

impl Plan {
    /// Checks the stored metadata and the domains against each other.
    pub(super) fn new(
        folder: &Folder,
        metadata: Metadata,
        domains: &[IndexDomain],
    ) -> Result<Self> {
        let bad = |reason: String| Error::BadRequest {
            array: folder.array(),
            reason,
        };
        let item_bytes = metadata.dtype.item_bytes();
        let lying = || Error::Metadata {
            array: folder.array(),
            location: folder.location(),
            object: folder.object(metadata.format.metadata_file()),
            source: zarr::Error::Malformed(format!(
                "chunks of {:?} for an array of {:?}",
                metadata.block(),
                metadata.grid.shape()
            )),
        };
        let (Some(block_bytes), Some(block_strides)) =
            (metadata.block_bytes(), metadata.block_strides())
        else {
            return Err(lying());
        };
        let array_bytes = crate::sharding::num_elements(metadata.grid.shape())
            .and_then(|n| n.checked_mul(item_bytes));
        if block_bytes
            > array_bytes
                .unwrap_or(0)
                .saturating_mul(MAX_PADDING)
                .max(SMALL_CHUNK_BYTES)
        {
            return Err(lying());
        }

        let mut boxes = Vec::new();
        let mut numbers: HashMap<&IndexDomain, usize> = HashMap::new();
        let mut slots = Vec::with_capacity(domains.len());
        for domain in domains {
            if let Some(&number) = numbers.get(domain) {
                slots.push(number);
                continue;
            }
            if !domain.lies_in(metadata.grid.shape()) {
                return Err(bad(format!(
                    "piece {domain:?} is not inside shape {:?}",
                    metadata.grid.shape()
                )));
            }
            let len = domain
                .num_elements()
                .and_then(|n| n.checked_mul(item_bytes));
            let strides = strided::row_major(&domain.shape, item_bytes);
            let (Some(len), Some(strides)) = (len, strides) else {
                return Err(bad(format!("piece {domain:?} is too large")));
            };
            numbers.insert(domain, boxes.len());
            slots.push(boxes.len());
            boxes.push(Target {
                domain: domain.clone(),
                len,
                strides,
                chunks: metadata.grid.chunks_of(domain),
                bytes: Mutex::new(Vec::new()),
            });
        }
        Ok(Self {
            metadata,
            block_bytes,
            block_strides,
            boxes,
            slots,
        })
    }

    /// The chunks that hold an element of some box, each once. Made as they are asked for: how many a grid has is for a
    /// stranger to say.
    pub(super) fn chunks(self: &Arc<Self>) -> impl Iterator<Item = ChunkIndex> + Send + use<> {
        let plan = Arc::clone(self);
        (0..plan.boxes.len()).flat_map(move |number| {
            let plan = Arc::clone(&plan);
            let chunks = plan.metadata.grid.chunks_of(&plan.boxes[number].domain);
            // A chunk belongs to the first box that it touches.
            chunks.filter(move |chunk| {
                !plan.boxes[..number]
                    .iter()
                    .any(|earlier| earlier.chunks.contains(chunk))
            })
        })
    }

    /// The elements of every domain asked for, after all chunks have been placed. To be called once.
    pub(super) fn take(&self) -> Vec<Bytes> {
        // Each chunk has been copied to every box it touches, so every box is full.
        let boxes: Vec<Bytes> = self
            .boxes
            .iter()
            .map(|target| Bytes::from(std::mem::take(&mut *lock(&target.bytes))))
            .collect();
        self.slots.iter().map(|&slot| boxes[slot].clone()).collect()
    }

    /// The inner chunks of a shard that hold an element of some box, each once, with what they hold of the array; made as
    /// they are asked for.
    pub(super) fn inner_chunks(
        self: &Arc<Self>,
        shards: &Shards,
        shard: &[i64],
    ) -> impl Iterator<Item = (ChunkIndex, IndexDomain)> + Send + use<> {
        let held = self.metadata.grid.domain(shard);
        let mut parts: Vec<Chunks> = Vec::new();
        for target in &self.boxes {
            if let Some(mut shared) = held.intersect(&target.domain) {
                for (index, origin) in shared.origin.iter_mut().zip(&held.origin) {
                    *index -= origin;
                }
                parts.push(shards.grid().chunks_of(&shared));
            }
        }
        let (grid, parts) = (shards.grid().clone(), Arc::new(parts));
        (0..parts.len()).flat_map(move |number| {
            let (grid, held, earlier) = (grid.clone(), held.clone(), Arc::clone(&parts));
            parts[number]
                .clone()
                .filter(move |inner| !earlier[..number].iter().any(|part| part.contains(inner)))
                .filter_map(move |inner| {
                    let mut domain = grid.domain(&inner);
                    for (index, origin) in domain.origin.iter_mut().zip(&held.origin) {
                        *index += origin;
                    }
                    // At the array's edge it holds less.
                    Some((inner, domain.intersect(&held)?))
                })
        })
    }

    /// Whether every element of a shard that lies in the array is wanted, by one box alone.
    pub(super) fn wants_all_of(&self, shard: &[i64]) -> bool {
        let held = self.metadata.grid.domain(shard);
        self.boxes
            .iter()
            .any(|target| held.intersect(&target.domain).as_ref() == Some(&held))
    }

    /// Decodes a block, which holds the box `held` of the array, and copies it to every box it touches.
    pub(super) fn place(
        &self,
        stored: Bytes,
        held: &IndexDomain,
    ) -> std::result::Result<(), Failure> {
        let dtype = self.metadata.dtype;
        let mut elements = self
            .metadata
            .codec
            .decode(stored, self.block_bytes)
            .map_err(Failure::Corrupt)?;
        if self.metadata.big_endian {
            dtype.swap_bytes(&mut elements);
        }
        dtype.clear_padding(&mut elements);

        let whole = held.shape == self.metadata.block() && self.metadata.order == Order::C;
        let mut moved = None;
        for target in &self.boxes {
            let Some(shared) = held.intersect(&target.domain) else {
                continue;
            };
            if whole && target.domain == *held {
                // Boxes are distinct, so there is one such at most: it takes the chunk as it is, after the others.
                moved = Some(target);
                continue;
            }
            let from: Vec<i64> = shared
                .origin
                .iter()
                .zip(&held.origin)
                .map(|(a, b)| a - b)
                .collect();
            let to: Vec<i64> = shared
                .origin
                .iter()
                .zip(&target.domain.origin)
                .map(|(a, b)| a - b)
                .collect();
            let mut bytes = lock(&target.bytes);
            if bytes.is_empty() {
                *bytes = strided::zeroed(target.len).ok_or(Failure::OutOfMemory(target.len))?;
            }
            strided::copy(
                &elements,
                &Side {
                    strides: &self.block_strides,
                    origin: &from,
                },
                &mut bytes,
                &Side {
                    strides: &target.strides,
                    origin: &to,
                },
                &shared.shape,
                dtype.item_bytes(),
            );
        }
        if let Some(target) = moved {
            *lock(&target.bytes) = elements;
        }
        Ok(())
    }
}

fn lock(bytes: &Mutex<Vec<u8>>) -> std::sync::MutexGuard<'_, Vec<u8>> {
    // A poisoned box belongs to a restore that has failed already.
    bytes.lock().unwrap_or_else(PoisonError::into_inner)
}
