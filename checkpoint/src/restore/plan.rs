//! Which chunks a restore reads, and where their elements go.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use crate::engine::Folder;
use crate::sharding::IndexDomain;
use crate::strided::{self, Side};
use crate::zarr::{self, ChunkIndex, Chunks, Codec, Metadata, Order, Shards};
use crate::{Error, Result};

/// A chunk may be this many times the array it belongs to, and no larger than that unless it is small: a small file must not
/// be able to claim all memory. Edge chunks are padded, to less than twice the array a dimension.
const MAX_PADDING: usize = 16;
/// A chunk of at most this many bytes is read whatever the array's size.
const SMALL_CHUNK_BYTES: usize = 256 << 20;

/// A chunk of fewer bytes is read whole: the rest comes in about the time of the request.
const SMALL_READ_BYTES: usize = 64 << 10;

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

    /// The bytes of a block that are wanted, where a part of it can be read and is much less than all.
    pub(super) fn part_wanted(&self, held: &IndexDomain) -> Option<Range<usize>> {
        if self.metadata.codec != Codec::Raw || self.block_bytes < SMALL_READ_BYTES {
            return None;
        }
        let item_bytes = self.metadata.dtype.item_bytes();
        let mut wanted: Option<Range<usize>> = None;
        for target in &self.boxes {
            let Some(shared) = held.intersect(&target.domain) else {
                continue;
            };
            let start = self.offset(&shared.origin, held);
            let last = shared.origin.iter().zip(&shared.shape);
            let last: Vec<i64> = last.map(|(origin, shape)| origin + shape - 1).collect();
            let end = self.offset(&last, held) + item_bytes;
            wanted = Some(match wanted {
                None => start..end,
                Some(other) => other.start.min(start)..other.end.max(end),
            });
        }
        wanted.filter(|wanted| wanted.len() <= self.block_bytes / 4 * 3)
    }

    /// Where an element of the array lies in the block that holds `held`.
    fn offset(&self, element: &[i64], held: &IndexDomain) -> usize {
        let within = element.iter().zip(&held.origin).map(|(a, b)| a - b);
        // It lies in the block, whose size has been counted.
        within
            .zip(&self.block_strides)
            .map(|(index, stride)| usize::try_from(index).unwrap_or(0) * stride)
            .sum()
    }

    /// Decodes a block, which holds the box `held` of the array, and copies it to every box it touches.
    pub(super) fn place(
        &self,
        stored: Bytes,
        held: &IndexDomain,
    ) -> std::result::Result<(), Failure> {
        let elements = self
            .metadata
            .codec
            .decode(stored, self.block_bytes)
            .map_err(Failure::Corrupt)?;
        self.arrange(elements, 0, held)
    }

    /// As [`Plan::place`], of the bytes from `start` on that are wanted of a block ([`Plan::part_wanted`]).
    pub(super) fn place_part(
        &self,
        stored: Bytes,
        start: usize,
        held: &IndexDomain,
    ) -> std::result::Result<(), Failure> {
        self.arrange(stored.into(), start, held)
    }

    fn arrange(
        &self,
        mut elements: Vec<u8>,
        start: usize,
        held: &IndexDomain,
    ) -> std::result::Result<(), Failure> {
        let dtype = self.metadata.dtype;
        if self.metadata.big_endian {
            dtype.swap_bytes(&mut elements);
        }
        dtype.clear_padding(&mut elements);

        let whole = elements.len() == self.block_bytes
            && held.shape == self.metadata.block()
            && self.metadata.order == Order::C;
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
            let from = self.offset(&shared.origin, held) - start;
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
                &elements[from..],
                &Side {
                    strides: &self.block_strides,
                    origin: &vec![0; to.len()],
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
