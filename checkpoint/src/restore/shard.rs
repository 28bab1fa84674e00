//! Reading chunks out of shards.
//!
//! A shard that is wanted whole is read by one request when it holds one chunk, as Orbax writes them, or is small. Of any
//! other the index is read, then each chunk by a range of its own.

use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::GetRange;

use super::Chunk;
use super::plan::{Failure, Plan};
use crate::engine::{Engine, Folder, Part};
use crate::sharding::IndexDomain;
use crate::zarr::{self, ChunkIndex, Index, Shards};
use crate::{Error, Result};

/// A shard of several chunks is read at once up to this many bytes, which come in about the time of one more round trip.
const SMALL_SHARD_BYTES: usize = 4 << 20;

impl Engine {
    pub(super) async fn read_shard(
        &self,
        folder: &Folder,
        plan: Arc<Plan>,
        shard: ChunkIndex,
    ) -> Result<()> {
        let Some(shards) = plan.metadata.shards.clone() else {
            return Ok(());
        };
        let at = Chunk::new(folder, plan.metadata.keys.key(&shard), None);
        let most = plan
            .metadata
            .codec
            .bound(plan.block_bytes)
            .saturating_mul(shards.grid().count())
            .saturating_add(shards.index_bytes());
        let is_single = shards.grid().count() == 1;
        if is_single || (most <= SMALL_SHARD_BYTES && plan.wants_all_of(&shard)) {
            let room = self.stage(most.saturating_add(plan.block_bytes)).await;
            let term = plan.term(&plan.metadata.grid.domain(&shard));
            match self.get(folder, &at.file, most, term).await? {
                Some(Ok(stored)) => {
                    let placed = self
                        .compute(move || {
                            let _room = room;
                            place_all(&plan, &shards, &shard, stored)
                        })
                        .await;
                    return at.all_placed(placed);
                }
                None => return Err(at.missing()),
                // There may be gaps between chunks: whoever rewrites one may leave the old one where it was.
                Some(Err(_)) => {}
            }
        }
        self.read_parts(&at, plan, shards, shard).await
    }

    async fn read_parts(
        &self,
        at: &Chunk<'_>,
        plan: Arc<Plan>,
        shards: Shards,
        shard: ChunkIndex,
    ) -> Result<()> {
        let len = shards.index_bytes();
        let _room = self.hold_index(len).await;
        let range = if shards.index_at_start {
            GetRange::Bounded(0..len as u64)
        } else {
            GetRange::Suffix(len as u64)
        };
        let part = match self.get_part(at.folder, &at.file, range, len).await {
            Ok(Some(part)) => part,
            Ok(None) => return Err(at.missing()),
            // Stores refuse a range of an empty object, in words of their own.
            Err(error) => match self.size(at.folder, &at.file).await {
                Ok(Some(size)) if size < len as u64 => Part {
                    bytes: None,
                    size,
                    tag: None,
                },
                _ => return Err(error),
            },
        };
        let (size, tag) = (part.size, part.tag);
        let index = shards
            .read_index(part.bytes.unwrap_or_default(), size)
            .map_err(|source| at.corrupt(source))?;
        let source = Source {
            engine: self,
            folder: at.folder,
            file: &at.file,
            index: &index,
            size,
            tag: tag.as_deref(),
        };
        stream::iter(plan.inner_chunks(&shards, &shard))
            .map(|(inner, held)| source.read(Arc::clone(&plan), inner, held))
            .buffer_unordered(self.width())
            .try_collect::<()>()
            .await
    }
}

/// An open shard.
struct Source<'a> {
    engine: &'a Engine,
    folder: &'a Folder,
    file: &'a str,
    index: &'a Index,
    size: u64,
    tag: Option<&'a str>,
}

impl Source<'_> {
    async fn read(&self, plan: Arc<Plan>, inner: ChunkIndex, held: IndexDomain) -> Result<()> {
        let at = Chunk::new(self.folder, self.file.to_owned(), Some(inner.clone()));
        let place = self
            .index
            .place(&inner)
            .map_err(|source| at.corrupt(source))?;
        let Some(place) = place else {
            return Err(at.missing());
        };
        let most = plan.metadata.codec.bound(plan.block_bytes);
        let len = place.end - place.start;
        let Some(len) = usize::try_from(len).ok().filter(|&len| len <= most) else {
            return Err(at.wrong_size(len, plan.block_bytes));
        };
        let room = self
            .engine
            .stage(len.saturating_add(plan.block_bytes))
            .await;
        let stored = if place.is_empty() {
            // No store has a range of no bytes.
            Bytes::new()
        } else {
            let range = GetRange::Bounded(place);
            let read = self.engine.get_part(self.folder, self.file, range, len);
            match read.await? {
                None => return Err(at.missing()),
                Some(part) => self.unchanged(&at, part, len)?,
            }
        };
        let placed = self
            .engine
            .compute(move || {
                let _room = room;
                plan.place(stored, &held)
            })
            .await;
        at.placed(placed)
    }

    /// The bytes of a part of the shard that the index is of.
    fn unchanged(&self, at: &Chunk<'_>, part: Part, len: usize) -> Result<Bytes> {
        match part.bytes {
            Some(bytes)
                if bytes.len() == len
                    && part.size == self.size
                    && part.tag.as_deref() == self.tag =>
            {
                Ok(bytes)
            }
            _ => Err(at.corrupt(zarr::Error::Malformed(
                "the shard changed while it was read".to_owned(),
            ))),
        }
    }
}

/// Why a shard could not be placed, and at which inner chunk.
type ShardFailure = (Option<ChunkIndex>, ShardFault);

enum ShardFault {
    Absent,
    Failed(Failure),
}

/// Decodes what is wanted of a shard that has been read whole.
fn place_all(
    plan: &Arc<Plan>,
    shards: &Shards,
    shard: &[i64],
    stored: Bytes,
) -> std::result::Result<(), ShardFailure> {
    let corrupt = |inner, source| (inner, ShardFault::Failed(Failure::Corrupt(source)));
    let size = stored.len();
    let index = shards
        .index_range(size)
        .map(|range| Bytes::copy_from_slice(&stored[range]))
        .unwrap_or_default();
    let index = shards
        .read_index(index, size as u64)
        .map_err(|source| corrupt(None, source))?;
    let is_single = shards.grid().count() == 1;
    for (inner, held) in plan.inner_chunks(shards, shard) {
        let name = (!is_single).then(|| inner.clone());
        let place = match index.place(&inner) {
            Ok(Some(place)) => place,
            Ok(None) => return Err((name, ShardFault::Absent)),
            Err(source) => return Err(corrupt(name, source)),
        };
        // Places lie in the object, which is in memory.
        let (start, end) = (place.start as usize, place.end as usize);
        let part = stored.slice(start..end);
        plan.place(part, &held)
            .map_err(|failure| (name, ShardFault::Failed(failure)))?;
    }
    Ok(())
}

impl Chunk<'_> {
    fn all_placed(
        self,
        placed: std::result::Result<std::result::Result<(), ShardFailure>, tokio::task::JoinError>,
    ) -> Result<()> {
        match placed {
            Err(source) => self.placed(Err(source)),
            Ok(Ok(())) => Ok(()),
            Ok(Err((inner, fault))) => {
                let at = Chunk { inner, ..self };
                match fault {
                    ShardFault::Absent => Err::<(), Error>(at.missing()),
                    ShardFault::Failed(failure) => at.placed(Ok(Err(failure))),
                }
            }
        }
    }
}
