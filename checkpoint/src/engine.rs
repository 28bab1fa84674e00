//! What saves and restores share: the limits of one process, and the opening of locations.
//!
//! # Contract
//! - One [`Engine`] a process; clones share its limits. Whatever runs at once, no more than
//!   [`Config::host_memory_bytes`] are taken for pieces on their way and chunks in flight (what is larger than its share is
//!   let through alone), no more than [`Config::requests`] requests to the store are open, and no more than
//!   [`Config::threads`] chunks are compressed or decompressed at a time. Compressing takes a sixteenth beside that, values
//!   gathered for OCDBT a thirty-second, indexes of shards [`INDEX_MEMORY_BYTES`], nodes of OCDBT trees [`NODE_MEMORY_BYTES`] while they are read, and those that are
//!   kept what the open [`Checkpoint`](crate::Checkpoint) says. The bytes that a caller hands in without [`Room`], and those it gets back, are not
//!   counted.
//! - A save that has returned is durable: objects are whole or absent, and on `file://` file and directory are synced.
//! - A save or restore that fails or is dropped stops soon and leaves whole objects behind, never halves. Nothing is
//!   deleted: what is not committed is the client's (Orbax's) to remove or to write over.
//! - Retries are the store's (see `waystation_lifecycle::bucket`), with a few more for what its client gives up at once; a
//!   failed request here has been retried where that helps.
//!   A read from a bucket that takes much longer than others like it is asked for once more, and the first answer counts.

mod again;
mod buffers;
mod counters;
mod folder;
mod hedge;
mod memory;
mod objects;
mod together;

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use waystation_lifecycle::bucket::Bucket;

pub(crate) use self::buffers::filled;
#[cfg(test)]
pub(crate) use self::buffers::heap;
pub use self::buffers::{Buffer, Buffers, Term};
use self::counters::Counters;
pub use self::counters::Totals;
pub(crate) use self::folder::{Files, Folder, Purpose, Root};
use self::hedge::Pace;
use self::memory::Memory;
pub use self::memory::Room;
pub(crate) use self::objects::Part;
pub use self::together::{Meeting, Together};
use crate::database::Gathered;
use crate::{Error, Layout, Result};

/// The most bytes held for indexes of shards that are being read by part: four of the largest that there can be.
const INDEX_MEMORY_BYTES: usize = 64 << 20;

/// The most bytes for nodes of OCDBT trees that are being read: five of the largest that Orbax writes, or many of the size
/// that others write.
const NODE_MEMORY_BYTES: usize = 512 << 20;

/// Indexes and nodes are counted in units of this many bytes.
const INDEX_UNIT: usize = 4096;

/// Locations that are remembered, with the databases that were written there. The requests of one save come close together.
const MAX_NAMED: usize = 1024;

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
    /// What saves write. Restores find the layout by themselves.
    pub format: Layout,
    /// What tells the process from the others that save with it, letters and digits: its OCDBT databases are named by it.
    pub process: String,
    /// Where memory for what is read, compressed and decoded comes from; `None`: the heap.
    pub buffers: Option<Arc<dyn Buffers>>,
}

impl Default for Config {
    /// 1 GiB of memory; 256 requests, which make 8,000 objects a second of 30 ms each; a thread a core; half an hour for an
    /// object, in which 2 GB come at 1 MB/s; zarr v2.
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            host_memory_bytes: 1 << 30,
            requests: 256,
            threads,
            read_timeout: Duration::from_secs(1800),
            format: Layout::default(),
            process: "w0".to_owned(),
            buffers: None,
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
    /// Beside both, for the same reason.
    nodes: Semaphore,
    requests: Semaphore,
    threads: Arc<Semaphore>,
    /// Clients of cloud buckets, by scheme and bucket name: making one reads credentials and opens connections.
    buckets: Mutex<HashMap<String, Bucket>>,
    gathered: Gathered,
    /// The locations that were written to last, and how many databases at each.
    named: Mutex<VecDeque<(String, u64)>>,
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
                nodes: Semaphore::new(NODE_MEMORY_BYTES / INDEX_UNIT),
                requests: Semaphore::new(config.requests.clamp(1, Semaphore::MAX_PERMITS)),
                threads: Arc::new(Semaphore::new(
                    config.threads.clamp(1, Semaphore::MAX_PERMITS),
                )),
                buckets: Mutex::new(HashMap::new()),
                gathered: Gathered::new(config.host_memory_bytes),
                named: Mutex::default(),
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

    /// Waits for room to read a node of a tree of at most `bytes`, as [`Engine::hold_index`].
    pub(crate) async fn hold_nodes(&self, bytes: usize) -> Option<SemaphorePermit<'_>> {
        let units = bytes.min(NODE_MEMORY_BYTES).div_ceil(INDEX_UNIT);
        let units = u32::try_from(units).ok()?.max(1);
        self.shared.nodes.acquire_many(units).await.ok()
    }

    /// What saves write.
    pub(crate) fn layout(&self) -> Layout {
        self.shared.config.format
    }

    /// Memory for what is read, compressed or decoded.
    pub(crate) fn buffer(&self, len: usize, term: Term) -> Option<Box<dyn Buffer>> {
        match &self.shared.config.buffers {
            Some(buffers) => buffers.take(len, term),
            None => buffers::heap(len),
        }
    }

    /// What is gathered of small values, all databases together.
    pub(crate) fn gathered(&self) -> &Gathered {
        &self.shared.gathered
    }

    /// What this process calls the next database at a location: a save may come as several requests, each of which writes
    /// one.
    pub(crate) fn process(&self, location: &str) -> String {
        let process: String = {
            let given = self.shared.config.process.chars();
            given.filter(char::is_ascii_alphanumeric).collect()
        };
        // Whole after any panic.
        let named = self.shared.named.lock();
        let mut named = named.unwrap_or_else(PoisonError::into_inner);
        let known = named.iter().position(|(known, _)| known == location);
        let count = known.and_then(|at| named.remove(at)).map_or(0, |(_, n)| n);
        if named.len() == MAX_NAMED {
            named.pop_front();
        }
        named.push_back((location.to_owned(), count + 1));
        match count {
            0 => process,
            number => format!("{process}n{number}"),
        }
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
