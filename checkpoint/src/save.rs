//! Saving: the pieces of one array that this process holds, to the chunks they make up.
//!
//! What is written is zarr v2 or v3, as objects or in an OCDBT database, as [`Config::format`](crate::Config::format) says; in
//! v3 every chunk is a shard of one.
//! The chunk grid of an array is chosen once for all who write it; by default it is the nominal shard shape
//! ([`SaveArray::sharded`]) or a part of that, so that every piece is one chunk or several and no two processes write one
//! object. A chunk that runs over the array's edge is padded with zeros. The metadata is the same whoever
//! writes it; one process is told to.

mod cut;
mod elements;
mod held;
mod plan;
mod saving;
mod spread;

use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use waystation_lifecycle::bucket::Bucket;
use waystation_proto::xla::PrimitiveType;

pub use self::cut::Cut;
pub use self::elements::Elements;
use self::plan::{Job, Plan};
pub use self::saving::Saving;
use self::saving::Target;
pub use self::spread::{Share, Spread};
use crate::engine::{Engine, Room};
use crate::sharding::{IndexDomain, Sharding};
use crate::zarr::{ChunkIndex, Codec, DType};
use crate::{Error, Result};

/// An array to save, as all who hold a piece of it know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveArray {
    /// The checkpoint: an absolute path, or a `file://`, `gs://` or `s3://` URL.
    pub location: String,
    /// The path of the array below the location; see [`crate::persistence`] for what is taken.
    pub name: String,
    /// The element type.
    pub dtype: PrimitiveType,
    /// The global dimensions, in elements.
    pub dims: Vec<i64>,
    /// The shape of a chunk, in elements; a 0 becomes 1.
    pub chunks: Vec<i64>,
    /// How chunks are compressed; `None` is as Orbax does in the engine's format.
    pub codec: Option<Codec>,
}

impl SaveArray {
    /// An array with one chunk a shard, or several where shards are large, compressed as Orbax does.
    ///
    /// # Errors
    /// [`Error::UnstorableDType`]; dimensions that do not fit the sharding.
    pub fn sharded(
        location: &str,
        name: &str,
        dtype: PrimitiveType,
        dims: &[i64],
        sharding: &Sharding,
    ) -> Result<Self> {
        let Some(known) = DType::of(dtype) else {
            return Err(Error::UnstorableDType {
                array: name.to_owned(),
                dtype,
            });
        };
        Ok(Self {
            location: location.to_owned(),
            name: name.to_owned(),
            dtype,
            dims: dims.to_vec(),
            chunks: cut::chunks_of(
                &sharding.shard_dims(dims)?,
                sharding.tiles(),
                known.item_bytes(),
            ),
            codec: None,
        })
    }
}

impl Engine {
    /// Writes pieces of an array, and its metadata when `writes_metadata` is set. Returns the number of bytes stored.
    ///
    /// A piece is a box of the array and its elements, dense, row-major, little-endian, one byte an element for types
    /// narrower than that. It begins at a chunk's first element and ends at a chunk's last or at the array's edge. Empty
    /// pieces are passed over.
    ///
    /// When it returns, everything is durable. When it fails or is dropped, any part may have been written.
    ///
    /// # Errors
    /// [`Error::UnstorableDType`]; [`Error::BadRequest`] for pieces that do not fit; locations that cannot be used; failed
    /// writes.
    pub async fn save(
        &self,
        array: &SaveArray,
        pieces: Vec<(IndexDomain, Bytes)>,
        writes_metadata: bool,
    ) -> Result<u64> {
        let saving = self.saving();
        let bytes = saving.save(array, pieces, writes_metadata).await?;
        saving.finish().await?;
        Ok(bytes)
    }

    /// As [`Engine::save`], to an open bucket; the array's location is used for messages only.
    ///
    /// # Errors
    /// As [`Engine::save`].
    pub async fn save_to(
        &self,
        bucket: &Bucket,
        array: &SaveArray,
        pieces: Vec<(IndexDomain, Bytes)>,
        writes_metadata: bool,
    ) -> Result<u64> {
        let saving = self.saving_in(bucket, &array.location);
        let bytes = saving.save(array, pieces, writes_metadata).await?;
        saving.finish().await?;
        Ok(bytes)
    }

    /// `room`: what the plan's pieces hold, where the caller's bytes are counted.
    async fn write(&self, target: Target, plan: Plan, room: Option<Arc<Room>>) -> Result<u64> {
        let plan = Arc::new(plan);
        let jobs = plan.jobs();
        let job = {
            let (engine, plan) = (self.clone(), Arc::clone(&plan));
            move |job| {
                let (engine, plan, target) = (engine.clone(), Arc::clone(&plan), target.clone());
                let room = room.clone();
                async move {
                    match job {
                        Job::Metadata => {
                            let file = plan.metadata.format.metadata_file();
                            let encoded = plan.encoded.clone().into();
                            target.put(&engine, file, encoded).await
                        }
                        Job::Chunk { piece, chunk } => {
                            engine.write_chunk(&target, plan, piece, chunk, room).await
                        }
                    }
                }
            }
        };
        stream::iter(jobs)
            .map(job)
            .buffer_unordered(self.width())
            .try_fold(0u64, async |sum, bytes| Ok(sum.saturating_add(bytes)))
            .await
    }

    async fn write_chunk(
        &self,
        target: &Target,
        plan: Arc<Plan>,
        piece: usize,
        chunk: ChunkIndex,
        piece_room: Option<Arc<Room>>,
    ) -> Result<u64> {
        let folder = &target.folder;
        let file = plan.metadata.keys.key(&chunk);
        // Room for the chunk cut out of its piece, where that is not the same, and for the chunk as stored.
        let cut = if plan.is_whole_chunk(piece) {
            0
        } else {
            plan.chunk_bytes
        };
        let staged = plan
            .metadata
            .codec
            .bound(plan.chunk_bytes)
            .saturating_add(cut);
        let room = match &piece_room {
            Some(_) => self.scratch(staged).await,
            None => self.stage(staged).await,
        };
        let room = Arc::new((room, piece_room));
        let encoded = {
            // Held by the work too, which goes on when this future is dropped.
            let (plan, room) = (Arc::clone(&plan), Arc::clone(&room));
            self.compute(move || {
                let _room = room;
                plan.encode(piece, &chunk)
            })
            .await
        };
        let encoded = encoded.map_err(|source| folder.cut_off("compressing", &file, source))?;
        let encoded = encoded.map_err(|bytes| Error::OutOfMemory {
            array: folder.array(),
            bytes,
            purpose: "compressing a chunk",
        })?;
        target.put(self, &file, encoded).await
    }
}
