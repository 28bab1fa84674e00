//! Entries in a folder of this machine, shared by all processes that are given it.
//!
//! The files are all there is to it. A file is written under another name and renamed, so a reader sees all of it or
//! none; what it reads it verifies ([`crate::envelope`]), so it does not matter who wrote it. Processes know nothing of
//! each other and take no locks. How much there is, and what was used last, the files say (`census.rs`). Only the
//! process that holds a lock keeps an index (`index.rs`), which saves it reading all of that at start.
//!
//! All of it happens on threads that may block, a bounded number of them. A folder that fails (full, read-only,
//! forbidden, hanging) is a miss, one warning a minute and a pause, like a bucket that does.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, sync::Mutex, sync::PoisonError};

use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

use super::{Found, Put, TierError, chain};
use crate::breaker::Breaker;
use crate::config::{Config, Mode};
use crate::counters::Counters;
use crate::key::Key;
use crate::quiet::Quiet;
use crate::verify::Verifier;

mod census;
mod fault;
mod folder;
mod history;
mod index;
mod store;
#[cfg(test)]
mod tests;

pub use history::{MAX_RECORD_BYTES, Miss};

use census::Bounds;
use store::{Settings, Store};

/// Threads that read at the same time, and that write.
const READERS: usize = 8;
const WRITERS: usize = 4;

/// Small things that may wait for a thread to be done on. Beyond that they are left.
const CHORES: usize = 256;

/// How often the folder is tended, and a process without the index asks for it.
const TEND_EVERY: Duration = Duration::from_secs(60);

/// Entries beyond this are evicted like bytes beyond the limit: a count of them must fit into memory.
const MAX_ENTRIES: u64 = 200_000;

/// The tier.
#[derive(Debug)]
pub(crate) struct Disk {
    store: Arc<Store>,
    counters: Arc<Counters>,
    reading: Side,
    writing: Side,
    /// False in a cache that only reads.
    writes: bool,
    read_deadline: Duration,
    write_deadline: Duration,
    tended: Mutex<Option<Instant>>,
    chores: Arc<Semaphore>,
    tasks: TaskTracker,
}

/// Reads or writes: they fail separately, on a disk that is full or read-only.
#[derive(Debug)]
struct Side {
    threads: Arc<Semaphore>,
    breaker: Breaker,
    warning: Quiet,
}

impl Disk {
    /// The tier over the folder that the configuration names, if it does. Looks at nothing yet.
    pub(crate) fn new(
        config: &Config,
        verifier: Verifier,
        counters: Arc<Counters>,
    ) -> Option<Disk> {
        let disk = config.disk.as_ref().filter(|_| config.mode != Mode::Off)?;
        let side = |threads| Side {
            threads: Arc::new(Semaphore::new(threads)),
            breaker: Breaker::new(config.backoff, config.backoff_max),
            warning: Quiet::default(),
        };
        let settings = Settings {
            folder: disk.folder.clone(),
            bounds: Bounds {
                bytes: disk.bytes,
                entries: MAX_ENTRIES,
            },
            verifier,
            index_retry: TEND_EVERY,
        };
        info!(folder = %disk.folder.display(), bytes = disk.bytes, "compiled programs are kept on disk");
        Some(Disk {
            store: Arc::new(Store::new(settings, Arc::clone(&counters))),
            counters,
            reading: side(READERS),
            writing: side(WRITERS),
            writes: config.mode == Mode::ReadWrite,
            read_deadline: disk.read_deadline,
            write_deadline: config.write_deadline,
            tended: Mutex::default(),
            chores: Arc::new(Semaphore::new(CHORES)),
            tasks: TaskTracker::new(),
        })
    }

    /// The entry of a key, verified. Whatever goes wrong is a miss. Cancel-safe.
    pub(crate) async fn get(&self, key: &Key) -> Option<Found> {
        self.tend();
        if !self.reading.breaker.allows() {
            return None;
        }
        let digest = *key.digest();
        let found = self
            .on_thread(&self.reading, self.read_deadline, move |store| {
                store.get(&digest)
            })
            .await;
        match found {
            Ok(found) => {
                self.reading.succeeded("disk cache can be read again");
                match &found {
                    Some(found) => {
                        self.counters.disk_hits.one();
                        self.counters.disk_read_bytes.add(found.opened.stored_bytes);
                        debug!(%key, bytes = found.opened.stored_bytes, "disk hit");
                    }
                    None => self.counters.disk_misses.one(),
                }
                found
            }
            Err(error) => {
                self.counters.disk_read_errors.one();
                self.reading.failed(
                    &error,
                    "disk cache cannot be read; programs come from elsewhere",
                );
                None
            }
        }
    }

    /// Keeps a sealed entry. For the background: it takes as long as the disk does.
    pub(crate) async fn put(&self, key: &Key, sealed: &Bytes) {
        if !self.writes {
            return;
        }
        self.tend();
        if !self.writing.breaker.allows() {
            self.counters.disk_write_errors.one();
            return;
        }
        let (digest, bytes, object) = (*key.digest(), sealed.len() as u64, sealed.clone());
        let put = self
            .on_thread(&self.writing, self.write_deadline, move |store| {
                store.put(&digest, &object)
            })
            .await;
        match put {
            Ok(put) => {
                self.writing.succeeded("disk cache can be written again");
                match put {
                    Put::Created => {
                        self.counters.disk_writes.one();
                        self.counters.disk_write_bytes.add(bytes);
                    }
                    Put::Present => self.counters.disk_writes_present.one(),
                    Put::NoRoom => {
                        self.counters.disk_no_room.one();
                        debug!(%key, bytes, "no room for an entry in the disk cache");
                    }
                }
            }
            Err(error) => {
                self.counters.disk_write_errors.one();
                self.writing.failed(
                    &error,
                    "disk cache cannot be written; programs are kept elsewhere",
                );
            }
        }
    }

    /// Keeps a record in the history of misses, behind the caller. Longer ones than [`MAX_RECORD_BYTES`] are not kept.
    pub(crate) fn record_miss(self: &Arc<Self>, record: Bytes) {
        self.behind(move |store| store.record_miss(&record));
    }

    /// False in a cache that only reads.
    pub(crate) fn writes(&self) -> bool {
        self.writes
    }

    pub(crate) fn folder(&self) -> &Path {
        self.store.folder()
    }

    /// True where this process has the index.
    pub(crate) fn has_index(&self) -> bool {
        self.store.has_index()
    }

    /// Tends the folder on another thread, if it is time to.
    pub(crate) fn tend(&self) {
        if !self.writes {
            return;
        }
        let mut tended = self.tended.lock().unwrap_or_else(PoisonError::into_inner);
        if tended.is_some_and(|last| last.elapsed() < TEND_EVERY) {
            return;
        }
        // Without a runtime there is no thread to do it on; the next one who asks has one.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let Ok(thread) = Arc::clone(&self.writing.threads).try_acquire_owned() else {
            return;
        };
        *tended = Some(Instant::now());
        let store = Arc::clone(&self.store);
        runtime.spawn_blocking(move || {
            let _thread = thread;
            if let Err(error) = store.tend() {
                debug!(error = %chain(&error), "disk cache not tended");
            }
        });
    }

    /// Waits for what nobody waits for, at most so long. Cancel-safe.
    pub(crate) async fn settle(&self, deadline: Duration) {
        self.tasks.close();
        let _ = tokio::time::timeout(deadline, self.tasks.wait()).await;
        self.tasks.reopen();
    }

    /// Does something small that nobody waits for.
    fn behind(self: &Arc<Self>, work: impl FnOnce(&Store) -> io::Result<()> + Send + 'static) {
        if !self.writes {
            return;
        }
        let Ok(place) = Arc::clone(&self.chores).try_acquire_owned() else {
            return;
        };
        let this = Arc::clone(self);
        self.tasks.spawn(async move {
            let _place = place;
            let done = this
                .on_thread(&this.writing, this.write_deadline, work)
                .await;
            if let Err(error) = done {
                debug!(error = %chain(&error), "disk cache not changed");
            }
        });
    }

    /// Does something on a thread that may block. One that hangs keeps its place, so that no more than a few do.
    async fn on_thread<T: Send + 'static>(
        &self,
        side: &Side,
        deadline: Duration,
        work: impl FnOnce(&Store) -> io::Result<T> + Send + 'static,
    ) -> Result<T, TierError> {
        let (threads, store) = (Arc::clone(&side.threads), Arc::clone(&self.store));
        let done = async move {
            let thread = threads
                .acquire_owned()
                .await
                .map_err(|_| TierError::Stopped)?;
            let work = move || {
                let _thread = thread;
                work(&store)
            };
            let done = tokio::task::spawn_blocking(work).await;
            done.map_err(|_| TierError::Stopped)?
                .map_err(TierError::Disk)
        };
        tokio::time::timeout(deadline, done)
            .await
            .unwrap_or(Err(TierError::NoAnswer { deadline }))
    }
}

impl Side {
    fn succeeded(&self, recovered: &str) {
        if self.breaker.succeeded() {
            info!("{recovered}");
        }
    }

    fn failed(&self, error: &TierError, what: &str) {
        self.breaker.failed(error.timed_out());
        if let Some(suppressed) = self.warning.due() {
            warn!(error = %chain(error), suppressed, "{what}");
        }
    }
}

/// The history of misses in a folder, newest first, for a process that does not use it as a cache. Blocks.
///
/// What only the index of a running process has is missing: the last megabyte is in the files.
pub fn recent_misses(folder: &Path, most: usize) -> Vec<Miss> {
    store::recent_misses(PathBuf::from(folder), most)
}
