//! Saving: the pieces of one array that this process holds, to the chunks they make up.
//!
//! The chunk grid of an array is chosen once for all who write it; by default it is the nominal shard shape
//! ([`SaveArray::sharded`]), so that every piece is one chunk and no two processes write one object. Pieces may also cover
//! several whole chunks. A chunk that runs over the array's edge is padded with zeros. The metadata is the same whoever
//! writes it; one process is told to.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use waystation_lifecycle::bucket::Bucket;
use waystation_proto::xla::PrimitiveType;

use crate::engine::{Engine, Folder, Purpose};
use crate::sharding::{IndexDomain, Sharding};
use crate::strided::{self, Side};
use crate::zarr::{ChunkIndex, Codec, DType, Grid, METADATA_FILE, Metadata};
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
    /// How chunks are compressed.
    pub codec: Codec,
}

impl SaveArray {
    /// An array with one chunk a shard, compressed as Orbax does.
    ///
    /// # Errors
    /// Dimensions that do not fit the sharding.
    pub fn sharded(
        location: &str,
        name: &str,
        dtype: PrimitiveType,
        dims: &[i64],
        sharding: &Sharding,
    ) -> Result<Self> {
        Ok(Self {
            location: location.to_owned(),
            name: name.to_owned(),
            dtype,
            dims: dims.to_vec(),
            chunks: sharding.shard_dims(dims)?,
            codec: Codec::ORBAX,
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
        let plan = Plan::new(array, pieces, writes_metadata)?;
        let folder = self
            .open(&array.location, &array.name, Purpose::Write)
            .await?;
        self.write(folder, plan).await
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
        let plan = Plan::new(array, pieces, writes_metadata)?;
        let folder = Folder::new(bucket, Default::default(), &array.name, &array.location)?;
        self.write(folder, plan).await
    }

    async fn write(&self, folder: Folder, plan: Plan) -> Result<u64> {
        let plan = Arc::new(plan);
        let jobs = plan.jobs();
        let job = {
            let (engine, plan) = (self.clone(), Arc::clone(&plan));
            move |job| {
                let (engine, plan, folder) = (engine.clone(), Arc::clone(&plan), folder.clone());
                async move {
                    match job {
                        Job::Metadata => {
                            engine
                                .put(&folder, METADATA_FILE, plan.encoded.clone().into())
                                .await
                        }
                        Job::Chunk { piece, chunk } => {
                            engine.write_chunk(&folder, plan, piece, chunk).await
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
        folder: &Folder,
        plan: Arc<Plan>,
        piece: usize,
        chunk: ChunkIndex,
    ) -> Result<u64> {
        let file = Grid::key(&chunk, plan.metadata.separator);
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
        let _room = self.stage(staged).await;
        let encoded = {
            let plan = Arc::clone(&plan);
            self.compute(move || plan.encode(piece, &chunk)).await
        };
        let encoded = encoded.map_err(|source| folder.cut_off("compressing", &file, source))?;
        let encoded = encoded.map_err(|bytes| Error::OutOfMemory {
            array: folder.array(),
            bytes,
            purpose: "compressing a chunk",
        })?;
        self.put(folder, &file, encoded).await
    }
}

/// What a save does, checked.
struct Plan {
    metadata: Metadata,
    /// The metadata file.
    encoded: Vec<u8>,
    writes_metadata: bool,
    chunk_bytes: usize,
    chunk_strides: Vec<usize>,
    pieces: Vec<(IndexDomain, Bytes)>,
}

enum Job {
    Metadata,
    Chunk { piece: usize, chunk: ChunkIndex },
}

impl Plan {
    fn new(
        array: &SaveArray,
        pieces: Vec<(IndexDomain, Bytes)>,
        writes_metadata: bool,
    ) -> Result<Self> {
        let bad = |reason: String| Error::BadRequest {
            array: array.name.clone(),
            reason,
        };
        let Some(dtype) = DType::of(array.dtype) else {
            return Err(Error::UnstorableDType {
                array: array.name.clone(),
                dtype: array.dtype,
            });
        };
        let metadata = Metadata::new(&array.dims, &array.chunks, dtype, array.codec)
            .map_err(|e| bad(e.to_string()))?;
        let encoded = metadata.encode().map_err(|e| bad(e.to_string()))?;
        let (Some(chunk_bytes), Some(chunk_strides)) =
            (metadata.chunk_bytes(), metadata.chunk_strides())
        else {
            return Err(bad(format!("chunks {:?} are too large", array.chunks)));
        };
        let pieces: Vec<_> = pieces
            .into_iter()
            .filter(|(domain, _)| !domain.is_empty())
            .collect();
        let mut origins = HashSet::with_capacity(pieces.len());
        for (domain, bytes) in &pieces {
            check_piece(domain, bytes.len(), &metadata).map_err(&bad)?;
            if !origins.insert(&domain.origin) {
                return Err(bad(format!("two pieces at {:?}", domain.origin)));
            }
        }
        Ok(Self {
            metadata,
            encoded,
            writes_metadata,
            chunk_bytes,
            chunk_strides,
            pieces,
        })
    }

    fn jobs(self: &Arc<Self>) -> impl Iterator<Item = Job> + Send + use<> {
        let plan = Arc::clone(self);
        let metadata = plan.writes_metadata.then_some(Job::Metadata);
        let chunks = (0..plan.pieces.len()).flat_map(move |piece| {
            let chunks = plan.metadata.grid.chunks_of(&plan.pieces[piece].0);
            chunks.map(move |chunk| Job::Chunk { piece, chunk })
        });
        metadata.into_iter().chain(chunks)
    }

    /// Whether a piece is exactly one whole chunk, whose elements are stored as they are.
    fn is_whole_chunk(&self, piece: usize) -> bool {
        self.pieces[piece].0.shape == self.metadata.grid.chunks()
            && !self.metadata.dtype.is_narrow()
    }

    /// The stored bytes of a chunk. Fails with the number of bytes that could not be had.
    fn encode(&self, piece: usize, chunk: &[i64]) -> std::result::Result<Bytes, usize> {
        let (domain, bytes) = &self.pieces[piece];
        let dtype = self.metadata.dtype;
        let encode = |elements: Bytes| match self.metadata.codec {
            Codec::Raw => Ok(elements),
            codec => codec
                .encode(&elements)
                .map(Bytes::from)
                .map_err(|_| codec.bound(elements.len())),
        };
        if self.is_whole_chunk(piece) {
            return encode(bytes.clone());
        }
        let mut elements = zeroed(self.chunk_bytes).ok_or(self.chunk_bytes)?;
        let part = self.metadata.grid.domain(chunk);
        let within: Vec<i64> = part
            .origin
            .iter()
            .zip(&domain.origin)
            .map(|(a, b)| a - b)
            .collect();
        let piece_strides =
            strided::row_major(&domain.shape, dtype.item_bytes()).ok_or(self.chunk_bytes)?;
        strided::copy(
            bytes,
            &Side {
                strides: &piece_strides,
                origin: &within,
            },
            &mut elements,
            &Side {
                strides: &self.chunk_strides,
                origin: &vec![0; within.len()],
            },
            &part.shape,
            dtype.item_bytes(),
        );
        dtype.clear_padding(&mut elements);
        encode(elements.into())
    }
}

fn check_piece(
    domain: &IndexDomain,
    bytes: usize,
    metadata: &Metadata,
) -> std::result::Result<(), String> {
    let grid = &metadata.grid;
    if !domain.lies_in(grid.shape()) {
        return Err(format!(
            "piece {domain:?} is not inside shape {:?}",
            grid.shape()
        ));
    }
    let expected = domain
        .num_elements()
        .and_then(|n| n.checked_mul(metadata.dtype.item_bytes()));
    if expected != Some(bytes) {
        return Err(format!(
            "piece {domain:?} of {} has {bytes} bytes",
            metadata.dtype.primitive().as_str_name()
        ));
    }
    for (d, &chunk) in grid.chunks().iter().enumerate() {
        let end = domain.origin[d] + domain.shape[d];
        if domain.origin[d] % chunk != 0 || (end % chunk != 0 && end != grid.shape()[d]) {
            return Err(format!(
                "piece {domain:?} does not begin and end at chunks of {:?}",
                grid.chunks()
            ));
        }
    }
    Ok(())
}

/// Zeros, or `None` when there is no memory for them.
pub(crate) fn zeroed(len: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).ok()?;
    bytes.resize(len, 0);
    Some(bytes)
}
