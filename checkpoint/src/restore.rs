//! Restoring: boxes of one array from whatever chunks hold them.
//!
//! The reader takes any chunk grid: the writer may have been Waystation, Orbax or TensorStore, on another mesh. What is
//! stored is checked against what is asked for before a chunk is read. Every chunk that holds an element of some box is
//! read and decoded once, however many boxes need it; no other chunk is touched.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use waystation_lifecycle::bucket::Bucket;
use waystation_proto::xla::PrimitiveType;

use crate::engine::{Engine, Folder, Purpose};
use crate::save::zeroed;
use crate::sharding::IndexDomain;
use crate::strided::{self, Side};
use crate::zarr::{
    self, ChunkIndex, DType, Grid, MAX_METADATA_BYTES, METADATA_FILE, Metadata, Order,
};
use crate::{Error, Result};

/// The most chunks of one array read by one call. More would be a hostile grid, or one that no store could serve.
const MAX_CHUNKS: u64 = 1 << 22;
/// A chunk may be this many times the array it belongs to, and no larger than that unless it is small: a small file must not
/// be able to claim all memory. Edge chunks are padded, to less than twice the array a dimension.
const MAX_PADDING: usize = 16;
/// A chunk of at most this many bytes is read whatever the array's size.
const SMALL_CHUNK_BYTES: usize = 256 << 20;

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
        let folder = self
            .open(&array.location, &array.name, Purpose::Read)
            .await?;
        self.read(folder, array, domains).await
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
        let folder = Folder::new(bucket, Default::default(), &array.name, &array.location)?;
        self.read(folder, array, domains).await
    }

    /// Reads the metadata of an array: its shape, chunks and element type as stored.
    ///
    /// # Errors
    /// The array is missing or its metadata is not zarr v2; a read failed.
    pub async fn metadata(&self, location: &str, name: &str) -> Result<Metadata> {
        let folder = self.open(location, name, Purpose::Read).await?;
        self.read_metadata(&folder).await
    }

    async fn read_metadata(&self, folder: &Folder) -> Result<Metadata> {
        let invalid = |source| Error::Metadata {
            array: folder.array(),
            location: folder.location(),
            object: folder.object(METADATA_FILE),
            source,
        };
        match self.get(folder, METADATA_FILE, MAX_METADATA_BYTES).await? {
            Some(Ok(bytes)) => Metadata::decode(&bytes).map_err(invalid),
            Some(Err(size)) => Err(invalid(zarr::Error::Malformed(format!(
                "{size} bytes of metadata"
            )))),
            None => Err(self.missing_array(folder).await),
        }
    }

    /// Why there is no metadata file: a format that is not read here is worth its own words.
    async fn missing_array(&self, folder: &Folder) -> Error {
        let unread = |format, advice| Error::UnreadFormat {
            array: folder.array(),
            location: folder.location(),
            format,
            advice,
        };
        if self.exists(folder, "zarr.json", false).await {
            return unread("zarr v3", "use_zarr3=False");
        }
        if self.exists(folder, "manifest.ocdbt", true).await {
            return unread("OCDBT", "use_ocdbt=False");
        }
        Error::MissingArray {
            array: folder.array(),
            location: folder.location(),
            object: folder.object(METADATA_FILE),
            hint: "",
        }
    }

    async fn read(
        &self,
        folder: Folder,
        array: &RestoreArray,
        domains: &[IndexDomain],
    ) -> Result<Vec<Bytes>> {
        let metadata = self.read_metadata(&folder).await?;
        check_stored(&folder, array, &metadata)?;
        let (plan, slots) = Plan::new(&folder, metadata, domains)?;
        let plan = Arc::new(plan);

        let job = {
            let (engine, plan) = (self.clone(), Arc::clone(&plan));
            move |chunk| {
                let (engine, plan, folder) = (engine.clone(), Arc::clone(&plan), folder.clone());
                async move { engine.read_chunk(&folder, plan, chunk).await }
            }
        };
        stream::iter(plan.chunks.clone())
            .map(job)
            .buffer_unordered(self.width())
            .try_collect::<()>()
            .await?;

        // Each chunk has been copied to every box it touches, so every box is full.
        let boxes: Vec<Bytes> = plan
            .boxes
            .iter()
            .map(|target| Bytes::from(std::mem::take(&mut *lock(&target.bytes))))
            .collect();
        Ok(slots.into_iter().map(|slot| boxes[slot].clone()).collect())
    }

    async fn read_chunk(&self, folder: &Folder, plan: Arc<Plan>, chunk: ChunkIndex) -> Result<()> {
        let file = Grid::key(&chunk, plan.metadata.separator);
        let corrupt = |source| Error::CorruptChunk {
            array: folder.array(),
            location: folder.location(),
            object: folder.object(&file),
            source,
        };
        let most = plan.metadata.codec.bound(plan.chunk_bytes);
        let _room = self.stage(most.saturating_add(plan.chunk_bytes)).await;
        let stored = match self.get(folder, &file, most).await? {
            Some(Ok(stored)) => stored,
            Some(Err(size)) => {
                return Err(corrupt(zarr::Error::Malformed(format!(
                    "{size} bytes stored where a chunk has {}",
                    plan.chunk_bytes
                ))));
            }
            None => {
                return Err(Error::MissingChunk {
                    array: folder.array(),
                    location: folder.location(),
                    object: folder.object(&file),
                });
            }
        };
        let placed = {
            let plan = Arc::clone(&plan);
            self.compute(move || plan.place(&stored, &chunk)).await
        };
        match placed.map_err(|source| folder.cut_off("decoding", &file, source))? {
            Ok(()) => Ok(()),
            Err(Failure::Corrupt(source)) => Err(corrupt(source)),
            Err(Failure::OutOfMemory(bytes)) => Err(Error::OutOfMemory {
                array: folder.array(),
                bytes,
                purpose: "its elements",
            }),
        }
    }
}

/// What a restore does, checked, and what it has read.
struct Plan {
    metadata: Metadata,
    chunk_bytes: usize,
    chunk_strides: Vec<usize>,
    /// The distinct boxes wanted.
    boxes: Vec<Target>,
    /// The chunks that hold an element of some box.
    chunks: BTreeSet<ChunkIndex>,
}

/// A box wanted, and its elements as far as they have been read.
struct Target {
    domain: IndexDomain,
    len: usize,
    strides: Vec<usize>,
    /// Empty until the first chunk comes.
    bytes: Mutex<Vec<u8>>,
}

enum Failure {
    Corrupt(zarr::Error),
    OutOfMemory(usize),
}

impl Plan {
    /// Also gives for each of `domains` the number of its box.
    fn new(
        folder: &Folder,
        metadata: Metadata,
        domains: &[IndexDomain],
    ) -> Result<(Self, Vec<usize>)> {
        let bad = |reason: String| Error::BadRequest {
            array: folder.array(),
            reason,
        };
        let item_bytes = metadata.dtype.item_bytes();
        let lying = || Error::Metadata {
            array: folder.array(),
            location: folder.location(),
            object: folder.object(METADATA_FILE),
            source: zarr::Error::Malformed(format!(
                "chunks of {:?} for an array of {:?}",
                metadata.grid.chunks(),
                metadata.grid.shape()
            )),
        };
        let (Some(chunk_bytes), Some(chunk_strides)) =
            (metadata.chunk_bytes(), metadata.chunk_strides())
        else {
            return Err(lying());
        };
        let array_bytes = crate::sharding::num_elements(metadata.grid.shape())
            .and_then(|n| n.checked_mul(item_bytes));
        if chunk_bytes
            > array_bytes
                .unwrap_or(0)
                .saturating_mul(MAX_PADDING)
                .max(SMALL_CHUNK_BYTES)
        {
            return Err(lying());
        }

        let mut boxes = Vec::new();
        let mut chunks = BTreeSet::new();
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
            let wanted = metadata
                .grid
                .num_chunks_of(domain)
                .saturating_add(chunks.len() as u64);
            if wanted > MAX_CHUNKS {
                return Err(bad(format!(
                    "it is stored in {wanted} chunks or more, at most {MAX_CHUNKS} are read at once"
                )));
            }
            chunks.extend(metadata.grid.chunks_of(domain));
            numbers.insert(domain, boxes.len());
            slots.push(boxes.len());
            boxes.push(Target {
                domain: domain.clone(),
                len,
                strides,
                bytes: Mutex::new(Vec::new()),
            });
        }
        Ok((
            Self {
                metadata,
                chunk_bytes,
                chunk_strides,
                boxes,
                chunks,
            },
            slots,
        ))
    }

    /// Decodes a chunk and copies it to every box it touches.
    fn place(&self, stored: &[u8], chunk: &[i64]) -> std::result::Result<(), Failure> {
        let dtype = self.metadata.dtype;
        let mut elements = self
            .metadata
            .codec
            .decode(stored, self.chunk_bytes)
            .map_err(Failure::Corrupt)?;
        if self.metadata.big_endian {
            dtype.swap_bytes(&mut elements);
        }
        dtype.clear_padding(&mut elements);

        let held = self.metadata.grid.domain(chunk);
        let whole = held.shape == self.metadata.grid.chunks() && self.metadata.order == Order::C;
        let mut moved = None;
        for target in &self.boxes {
            let Some(shared) = held.intersect(&target.domain) else {
                continue;
            };
            if whole && target.domain == held {
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
                *bytes = zeroed(target.len).ok_or(Failure::OutOfMemory(target.len))?;
            }
            strided::copy(
                &elements,
                &Side {
                    strides: &self.chunk_strides,
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

fn lock(bytes: &Mutex<Vec<u8>>) -> std::sync::MutexGuard<'_, Vec<u8>> {
    // A poisoned box belongs to a restore that has failed already.
    bytes.lock().unwrap_or_else(PoisonError::into_inner)
}
