//! What saves and restores share: the limits of one process, and the opening of locations.
//!
//! # Contract
//! - One [`Engine`] a process; clones share its limits. Whatever runs at once, no more than
//!   [`Config::host_memory_bytes`] are taken for pieces on their way and chunks in flight (what is larger than its share is
//!   let through alone), no more than [`Config::requests`] requests to the store are open, and no more than
//!   [`Config::threads`] chunks are compressed or decompressed at a time. Compressing takes a sixteenth beside that, indexes
//!   of shards [`INDEX_MEMORY_BYTES`]. The bytes that a caller hands in without [`Room`], and those it gets back, are not
//!   counted.
//! - A save that has returned is durable: objects are whole or absent, and on `file://` file and directory are synced.
//! - A save or restore that fails or is dropped stops soon and leaves whole objects behind, never halves. Nothing is
//!   deleted: what is not committed is the client's (Orbax's) to remove or to write over.
//! - Retries are the store's (see `waystation_lifecycle::bucket`); a failed request here has been retried where that helps.
//!   A read from a bucket that takes much longer than others like it is asked for once more, and the first answer counts.

mod counters;
mod folder;
mod hedge;
mod memory;

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use object_store::{GetOptions, GetRange, ObjectStoreExt as _, PutPayload};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use waystation_lifecycle::bucket::Bucket;

use self::counters::Counters;
pub use self::counters::Totals;
pub(crate) use self::folder::{Folder, Purpose};
use self::hedge::Pace;
use self::memory::Memory;
pub use self::memory::Room;
use crate::zarr::Format;
use crate::{Error, Result};

/// The most bytes held for indexes of shards that are being read by part: four of the largest that there can be.
const INDEX_MEMORY_BYTES: usize = 64 << 20;

/// Indexes are counted in units of this many bytes.
const INDEX_UNIT: usize = 4096;

/// The limits of an [`Engine`].
#[derive(Debug, Clone)]
pub struct Config {
    /// The most bytes of host memory for pieces and chunks on their way, beside the arrays themselves.
    pub host_memory_bytes: usize,
    /// The most requests open to stores at once.
    pub requests: usize,
    /// The most chunks compressed or decompressed at once.
    pub threads: usize,
    /// The longest that one object may take to come, whatever the client's own patience. The HTTP client ends requests
    /// without a byte; a file system that hangs does not end by itself.
    pub read_timeout: Duration,
    /// What saves write. Restores find the format by themselves.
    pub format: Format,
}

impl Default for Config {
    /// 1 GiB of memory; 128 requests, which make 4,000 objects a second of 30 ms each; a thread a core; half an hour for an
    /// object, in which 2 GB come at 1 MB/s; zarr v2.
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            host_memory_bytes: 1 << 30,
            requests: 128,
            threads,
            read_timeout: Duration::from_secs(1800),
            format: Format::default(),
        }
    }
}

/// Saves and restores arrays. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: Config,
    memory: Memory,
    /// Beside `memory`: who holds an index waits for room to stage its chunks, so the two must not be one.
    indexes: Arc<Semaphore>,
    requests: Semaphore,
    threads: Arc<Semaphore>,
    /// Clients of cloud buckets, by scheme and bucket name: making one reads credentials and opens connections.
    buckets: Mutex<HashMap<String, Bucket>>,
    counters: Counters,
    pace: Pace,
}

impl Engine {
    /// An engine with these limits; zeros count as one.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            shared: Arc::new(Shared {
                memory: Memory::new(config.host_memory_bytes),
                indexes: Arc::new(Semaphore::new(INDEX_MEMORY_BYTES / INDEX_UNIT)),
                requests: Semaphore::new(config.requests.clamp(1, Semaphore::MAX_PERMITS)),
                threads: Arc::new(Semaphore::new(
                    config.threads.clamp(1, Semaphore::MAX_PERMITS),
                )),
                buckets: Mutex::new(HashMap::new()),
                counters: Counters::default(),
                pace: Pace::default(),
                config,
            }),
        }
    }

    /// How many chunks of one array are worth having in flight.
    pub(crate) fn width(&self) -> usize {
        self.shared.config.requests.max(1)
    }

    /// What has been done since the start.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.shared.counters.totals(self.shared.memory.used())
    }

    /// Waits for room for bytes on their way to [`Engine::save_held`], in the order of asking; more than the budget gets all
    /// of it. Cancel-safe.
    pub async fn room_for_piece(&self, bytes: usize) -> Room {
        self.shared.memory.piece(bytes).await
    }

    /// Waits for room for what a restore will give, before it is asked for; more than is there for that gets all of it.
    /// Cancel-safe.
    pub async fn room_for_boxes(&self, bytes: usize) -> Room {
        self.shared.memory.boxes(bytes).await
    }

    /// Waits for room to stage a chunk of `bytes`. Cancel-safe. The room is given back when it is dropped.
    pub(crate) async fn stage(&self, bytes: usize) -> Room {
        self.shared.memory.chunk(bytes).await
    }

    /// Waits for room for what is made of a piece that has room already.
    pub(crate) async fn scratch(&self, bytes: usize) -> Room {
        self.shared.memory.scratch(bytes).await
    }

    /// Waits for room to hold the index of a shard, as [`Engine::stage`]. Not to be called with staged bytes in hand.
    pub(crate) async fn hold_index(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let units = u32::try_from(
            bytes
                .div_ceil(INDEX_UNIT)
                .min(INDEX_MEMORY_BYTES / INDEX_UNIT),
        );
        Arc::clone(&self.shared.indexes)
            .acquire_many_owned(units.ok()?.max(1))
            .await
            .ok()
    }

    /// What saves write.
    pub(crate) fn format(&self) -> Format {
        self.shared.config.format
    }

    /// Runs CPU work on a blocking thread, when one of the engine's is free. Dropping the future does not stop work begun.
    pub(crate) async fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> std::result::Result<T, tokio::task::JoinError> {
        let permit = Arc::clone(&self.shared.threads).acquire_owned().await.ok();
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        })
        .await
    }

    /// Writes an object, replacing one of that name.
    pub(crate) async fn put(&self, folder: &Folder, file: &str, bytes: PutPayload) -> Result<u64> {
        let size = bytes.content_length() as u64;
        let path = folder.path(file)?;
        let _permit = self.shared.requests.acquire().await;
        match folder.store.put(&path, bytes).await {
            Ok(_) => {
                self.shared.counters.written(size);
                Ok(size)
            }
            Err(source) => Err(folder.storage("writing", file, source)),
        }
    }

    /// Reads an object of at most `most` bytes. `None` when there is none; `Some(Err(size))` when it is larger.
    pub(crate) async fn get(
        &self,
        folder: &Folder,
        file: &str,
        most: usize,
    ) -> Result<Option<std::result::Result<Bytes, u64>>> {
        let read = self.read_object(folder, file, GetOptions::default(), most);
        Ok(match read.await? {
            Some(Part {
                bytes: None, size, ..
            }) => Some(Err(size)),
            Some(Part {
                bytes: Some(bytes), ..
            }) => Some(Ok(bytes)),
            None => None,
        })
    }

    /// Reads a range of an object, of `len` bytes at most. `None` when there is no object.
    pub(crate) async fn get_part(
        &self,
        folder: &Folder,
        file: &str,
        range: GetRange,
        len: usize,
    ) -> Result<Option<Part>> {
        let options = GetOptions {
            range: Some(range),
            ..GetOptions::default()
        };
        self.read_object(folder, file, options, len).await
    }

    async fn read_object(
        &self,
        folder: &Folder,
        file: &str,
        options: GetOptions,
        most: usize,
    ) -> Result<Option<Part>> {
        let path = folder.path(file)?;
        let permit = self.shared.requests.acquire().await;
        let after = self.shared.config.read_timeout;
        let read = async {
            folder.check_regular(file).await?;
            let once = || async {
                let found = match folder.store.get_opts(&path, options.clone()).await {
                    Ok(found) => found,
                    Err(object_store::Error::NotFound { .. }) => return Ok(None),
                    Err(source) => return Err(folder.storage("reading", file, source)),
                };
                let (size, tag) = (found.meta.size, found.meta.e_tag.clone());
                let len = found.range.end.saturating_sub(found.range.start);
                let bytes = if usize::try_from(len).map_or(true, |len| len > most) {
                    None
                } else {
                    let bytes = found.bytes().await;
                    Some(bytes.map_err(|source| folder.storage("reading", file, source))?)
                };
                Ok(Some(Part { bytes, size, tag }))
            };
            if folder.is_local() {
                return once().await;
            }
            let pace = &self.shared.pace;
            let spare = || {
                let request = self.shared.requests.try_acquire().ok()?;
                let room = self.shared.memory.try_chunk(most)?;
                self.shared.counters.hedged();
                Some((request, room))
            };
            pace.read(most, once, spare).await
        };
        let read = tokio::time::timeout(after, read).await;
        drop(permit);
        let Ok(read) = read else {
            return Err(folder.stuck(file, after));
        };
        if let Ok(Some(Part {
            bytes: Some(bytes), ..
        })) = &read
        {
            self.shared.counters.read(bytes.len() as u64);
        }
        read
    }

    /// Whether there is an object `file` beside the array, at the checkpoint's own level when `top` is set.
    pub(crate) async fn exists(&self, folder: &Folder, file: &str, top: bool) -> bool {
        let path = if top {
            Ok(folder.prefix.clone().join(file))
        } else {
            folder.path(file)
        };
        match path {
            Ok(path) => folder.store.head(&path).await.is_ok(),
            Err(_) => false,
        }
    }

    /// The size of an object, if it can be had.
    pub(crate) async fn size(&self, folder: &Folder, file: &str) -> Option<u64> {
        let path = folder.path(file).ok()?;
        let _permit = self.shared.requests.acquire().await;
        let asked = tokio::time::timeout(self.shared.config.read_timeout, folder.store.head(&path));
        Some(asked.await.ok()?.ok()?.size)
    }
}

/// What was read of an object.
#[derive(Debug)]
pub(crate) struct Part {
    /// `None` when there are more than was allowed.
    pub(crate) bytes: Option<Bytes>,
    /// The size of the whole object.
    pub(crate) size: u64,
    /// What changes when the object does, where the store says.
    pub(crate) tag: Option<String>,
}

/// Runs `work` for at most `timeout` (for ever when `None`). Work that is cut off stops as the engine's contract says.
///
/// # Errors
/// [`Error::TimedOut`] when time is up, else those of `work`.
pub async fn within<T>(
    timeout: Option<Duration>,
    operation: &'static str,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    match timeout {
        None => work.await,
        Some(after) => match tokio::time::timeout(after, work).await {
            Ok(result) => result,
            Err(_) => Err(Error::TimedOut { operation, after }),
        },
    }
}
