//! Restoring: boxes of one array from whatever chunks hold them.
//!
//! The reader takes zarr v2 and v3, which it tells apart by the metadata file (`.zarray` before `zarr.json`), with any chunk
//! grid, as objects or in OCDBT databases (see [`Checkpoint`]): the writer may have been Waystation, Orbax or TensorStore, on
//! another mesh. What is stored is checked against what
//! is asked for before a chunk is read. Every chunk that holds an element of some box is read and decoded once, however many
//! boxes need it; no other chunk is touched, in a shard as elsewhere.

mod plan;
mod shard;

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::GetRange;
use waystation_lifecycle::bucket::Bucket;
use waystation_proto::xla::PrimitiveType;

use self::plan::{Failure, Plan};
use crate::checkpoint::{Checkpoint, StoredArray};
use crate::engine::{Engine, Folder};
use crate::sharding::IndexDomain;
use crate::zarr::{self, ChunkIndex, DType, Metadata};
use crate::{Error, Result};

/// An array to restore, as the client asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoreArray {
    /// The checkpoint: an absolute path, or a `file://`, `gs://` or `s3://` URL.
    pub location: String,
    /// The path of the array below the location; see [`crate::persistence`] for what is taken.
    pub name: String,
    /// The element type it must have.
    pub dtype: PrimitiveType,
    /// The global dimensions it must have, in elements.
    pub dims: Vec<i64>,
}

impl Engine {
    /// Reads boxes of an array: for each of `domains`, in order, its elements, dense, row-major, little-endian, one byte an
    /// element for types narrower than that (with zeros in the bits beyond the value). Equal domains share their bytes.
    ///
    /// Cancel-safe: it only reads.
    ///
    /// # Errors
    /// The array is missing, of another shape or type, in a format not read here, incomplete or damaged; a box is not inside
    /// it; a read failed.
    pub async fn restore(
        &self,
        array: &RestoreArray,
        domains: &[IndexDomain],
    ) -> Result<Vec<Bytes>> {
        let checkpoint = self.open_checkpoint(&array.location).await?;
        checkpoint.restore(array, domains).await
    }

    /// As [`Engine::restore`], from an open bucket; the array's location is used for messages only.
    ///
    /// # Errors
    /// As [`Engine::restore`].
    pub async fn restore_from(
        &self,
        bucket: &Bucket,
        array: &RestoreArray,
        domains: &[IndexDomain],
    ) -> Result<Vec<Bytes>> {
        let checkpoint: Checkpoint = self.open_checkpoint_in(bucket, &array.location).await?;
        checkpoint.restore(array, domains).await
    }

    /// Reads the metadata of an array: its shape, chunks and element type as stored.
    ///
    /// # Errors
    /// The array is missing or its metadata is unreadable; a read failed.
    pub async fn metadata(&self, location: &str, name: &str) -> Result<Metadata> {
        let checkpoint = self.open_checkpoint(location).await?;
        Ok(checkpoint.array(name).await?.metadata)
    }

    async fn read_chunk(&self, folder: &Folder, plan: Arc<Plan>, chunk: ChunkIndex) -> Result<()> {
        if plan.metadata.shards.is_some() {
            return self.read_shard(folder, plan, chunk).await;
        }
        let at = Chunk::new(folder, plan.metadata.keys.key(&chunk), None);
        let held = plan.metadata.grid.domain(&chunk);
        if let Some(wanted) = plan.part_wanted(&held) {
            return self.read_part(&at, plan, &held, wanted).await;
        }
        let most = plan.metadata.codec.bound(plan.block_bytes);
        let room = self.stage(most.saturating_add(plan.block_bytes)).await;
        let stored = match self.get(folder, &at.file, most, plan.term(&held)).await? {
            Some(Ok(stored)) => stored,
            Some(Err(size)) => return Err(at.wrong_size(size, plan.block_bytes)),
            None => return Err(at.missing()),
        };
        let placed = self
            .compute(move || {
                let _room = room;
                plan.place(stored, &held)
            })
            .await;
        at.placed(placed)
    }

    /// Reads what is wanted of a chunk that is stored as it is.
    async fn read_part(
        &self,
        at: &Chunk<'_>,
        plan: Arc<Plan>,
        held: &IndexDomain,
        wanted: Range<usize>,
    ) -> Result<()> {
        let (start, len) = (wanted.start, wanted.len());
        let room = self.stage(len).await;
        let range = GetRange::Bounded(wanted.start as u64..wanted.end as u64);
        let part = match self.get_part(at.folder, &at.file, range, len).await {
            Ok(Some(part)) => part,
            Ok(None) => return Err(at.missing()),
            // Stores refuse a range behind the end, in words of their own.
            Err(error) => match self.size(at.folder, &at.file).await? {
                Some(size) if size < wanted.end as u64 => {
                    return Err(at.wrong_size(size, plan.block_bytes));
                }
                _ => return Err(error),
            },
        };
        let stored = match part.bytes {
            Some(stored) if stored.len() == len && part.size == plan.block_bytes as u64 => stored,
            _ => return Err(at.wrong_size(part.size, plan.block_bytes)),
        };
        let held = held.clone();
        let placed = self
            .compute(move || {
                let _room = room;
                plan.place_part(stored, start, &held)
            })
            .await;
        at.placed(placed)
    }
}

impl StoredArray {
    /// Reads boxes of the array, as [`Engine::restore`].
    ///
    /// # Errors
    /// The array is incomplete or damaged; a box is not inside it; a read failed.
    pub async fn restore(&self, domains: &[IndexDomain]) -> Result<Vec<Bytes>> {
        let plan = Plan::new(&self.engine, &self.folder, self.metadata.clone(), domains);
        let plan = Arc::new(plan?);
        let job = {
            let (engine, plan) = (self.engine.clone(), Arc::clone(&plan));
            let folder = self.folder.clone();
            move |chunk| {
                let (engine, plan, folder) = (engine.clone(), Arc::clone(&plan), folder.clone());
                async move { engine.read_chunk(&folder, plan, chunk).await }
            }
        };
        stream::iter(plan.chunks())
            .map(job)
            .buffer_unordered(self.engine.width())
            .try_collect::<()>()
            .await?;
        Ok(plan.take())
    }

    /// Holds what is stored against what is asked for.
    pub(crate) fn check(&self, array: &RestoreArray) -> Result<()> {
        check_stored(&self.folder, array, &self.metadata)
    }
}

/// A chunk being read, for messages.
struct Chunk<'a> {
    folder: &'a Folder,
    /// The object.
    file: String,
    /// Its place in the shard that the object is, if it is one of several there.
    inner: Option<ChunkIndex>,
}

impl<'a> Chunk<'a> {
    fn new(folder: &'a Folder, file: String, inner: Option<ChunkIndex>) -> Self {
        Self {
            folder,
            file,
            inner,
        }
    }

    fn object(&self) -> String {
        let object = self.folder.object(&self.file);
        match &self.inner {
            Some(inner) => format!("{object}, inner chunk {inner:?}"),
            None => object,
        }
    }

    fn missing(&self) -> Error {
        Error::MissingChunk {
            array: self.folder.array(),
            location: self.folder.location(),
            object: self.object(),
        }
    }

    fn corrupt(&self, source: zarr::Error) -> Error {
        Error::CorruptChunk {
            array: self.folder.array(),
            location: self.folder.location(),
            object: self.object(),
            source,
        }
    }

    fn wrong_size(&self, size: u64, block_bytes: usize) -> Error {
        self.corrupt(zarr::Error::Malformed(format!(
            "{size} bytes stored where a chunk has {block_bytes}"
        )))
    }

    fn placed(
        &self,
        placed: std::result::Result<std::result::Result<(), Failure>, tokio::task::JoinError>,
    ) -> Result<()> {
        match placed.map_err(|source| self.folder.cut_off("decoding", &self.file, source))? {
            Ok(()) => Ok(()),
            Err(Failure::Corrupt(source)) => Err(self.corrupt(source)),
            Err(Failure::OutOfMemory(bytes)) => Err(Error::OutOfMemory {
                array: self.folder.array(),
                bytes,
                purpose: "its elements",
            }),
        }
    }
}

fn check_stored(folder: &Folder, array: &RestoreArray, metadata: &Metadata) -> Result<()> {
    let stored = metadata.grid.shape();
    if stored != array.dims {
        return Err(Error::ShapeMismatch {
            array: folder.array(),
            location: folder.location(),
            stored: stored.to_vec(),
            asked: array.dims.clone(),
        });
    }
    if DType::of(array.dtype) != Some(metadata.dtype) {
        return Err(Error::DTypeMismatch {
            array: folder.array(),
            location: folder.location(),
            stored: metadata.dtype.primitive(),
            asked: array.dtype,
        });
    }
    Ok(())
}
