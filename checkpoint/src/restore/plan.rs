//! Which chunks a restore reads, and where their elements go.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use crate::engine::{Buffer, Engine, Folder, Term, filled};
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
    engine: Engine,
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
    elements: Mutex<Filling>,
}

/// The elements of a box.
#[derive(Default)]
enum Filling {
    /// No chunk has come, or there are none to come.
    #[default]
    Nothing,
    /// Chunks are copied to it.
    Partly(Box<dyn Buffer>),
    /// One chunk that is just the box.
    Whole(Bytes),
}

/// Why a chunk could not be placed.
pub(super) enum Failure {
    Corrupt(zarr::Error),
    OutOfMemory(usize),
}

impl Plan {
    /// Checks the stored metadata and the domains against each other.
    pub(super) fn new(
        engine: &Engine,
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
                elements: Mutex::default(),
            });
        }
        Ok(Self {
            engine: engine.clone(),
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
            .map(
                |target| match std::mem::take(&mut *lock(&target.elements)) {
                    Filling::Nothing => Bytes::new(),
                    Filling::Partly(buffer) => filled(buffer, target.len),
                    Filling::Whole(elements) => elements,
                },
            )
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

    /// How long the stored bytes of a block that holds `held` are wanted: they may be the elements of a box as they are.
    pub(super) fn term(&self, held: &IndexDomain) -> Term {
        let as_is = self.metadata.codec == Codec::Raw
            && !self.metadata.big_endian
            && !self.metadata.dtype.is_narrow();
        match self.taker(held) {
            Some(_) if as_is => Term::Lasting,
            _ => Term::Passing,
        }
    }

    /// The box that takes a decoded block as it is. Boxes are distinct, so there is one such at most.
    fn taker(&self, held: &IndexDomain) -> Option<&Target> {
        if held.shape != self.metadata.block() || self.metadata.order != Order::C {
            return None;
        }
        self.boxes.iter().find(|target| target.domain == *held)
    }

    /// Decodes a block, which holds the box `held` of the array, and copies it to every box it touches.
    pub(super) fn place(
        &self,
        stored: Bytes,
        held: &IndexDomain,
    ) -> std::result::Result<(), Failure> {
        let Metadata { codec, .. } = self.metadata;
        codec
            .check(&stored, self.block_bytes)
            .map_err(Failure::Corrupt)?;
        let taker = self.taker(held);
        let elements = if codec == Codec::Raw {
            self.as_native(stored)
        } else {
            let term = taker.map_or(Term::Passing, |_| Term::Lasting);
            let mut buffer = self.buffer(self.block_bytes, term)?;
            let elements: &mut [u8] = (*buffer).as_mut();
            codec
                .decode_to(&stored, elements)
                .map_err(Failure::Corrupt)?;
            self.make_native(elements);
            filled(buffer, self.block_bytes)
        };
        self.arrange(&elements, 0, held, taker)?;
        if let Some(target) = taker {
            *lock(&target.elements) = Filling::Whole(elements);
        }
        Ok(())
    }

    /// As [`Plan::place`], of the bytes from `start` on that are wanted of a block ([`Plan::part_wanted`]).
    pub(super) fn place_part(
        &self,
        stored: Bytes,
        start: usize,
        held: &IndexDomain,
    ) -> std::result::Result<(), Failure> {
        self.arrange(&self.as_native(stored), start, held, None)
    }

    fn as_native(&self, stored: Bytes) -> Bytes {
        if !self.metadata.big_endian && !self.metadata.dtype.is_narrow() {
            return stored;
        }
        let mut elements = Vec::from(stored);
        self.make_native(&mut elements);
        elements.into()
    }

    fn make_native(&self, elements: &mut [u8]) {
        let dtype = self.metadata.dtype;
        if self.metadata.big_endian {
            dtype.swap_bytes(elements);
        }
        dtype.clear_padding(elements);
    }

    fn buffer(&self, len: usize, term: Term) -> std::result::Result<Box<dyn Buffer>, Failure> {
        let buffer = self.engine.buffer(len, term);
        buffer.ok_or(Failure::OutOfMemory(len))
    }

    /// Copies elements of a block, those from byte `start` on, to every box but one.
    fn arrange(
        &self,
        elements: &[u8],
        start: usize,
        held: &IndexDomain,
        but: Option<&Target>,
    ) -> std::result::Result<(), Failure> {
        for target in &self.boxes {
            let Some(shared) = held.intersect(&target.domain) else {
                continue;
            };
            if but.is_some_and(|other| std::ptr::eq(other, target)) {
                continue;
            }
            let from = self.offset(&shared.origin, held) - start;
            let to: Vec<i64> = shared
                .origin
                .iter()
                .zip(&target.domain.origin)
                .map(|(a, b)| a - b)
                .collect();
            let mut filling = lock(&target.elements);
            if let Filling::Nothing = *filling {
                *filling = Filling::Partly(self.buffer(target.len, Term::Lasting)?);
            }
            let Filling::Partly(buffer) = &mut *filling else {
                // A block that is just this box has been placed, which no other touches.
                continue;
            };
            strided::copy(
                &elements[from..],
                &Side {
                    strides: &self.block_strides,
                    origin: &vec![0; to.len()],
                },
                (**buffer).as_mut(),
                &Side {
                    strides: &target.strides,
                    origin: &to,
                },
                &shared.shape,
                self.metadata.dtype.item_bytes(),
            );
        }
        Ok(())
    }
}

fn lock(filling: &Mutex<Filling>) -> std::sync::MutexGuard<'_, Filling> {
    // A poisoned box belongs to a restore that has failed already.
    filling.lock().unwrap_or_else(PoisonError::into_inner)
}
