//! Entries on their way to the tiers behind memory, off every request's path.
//!
//! A publication is a task: it seals the entry on a thread that may block, then writes it, a few at a time. It is
//! bounded in number and in bytes; beyond that, entries are dropped and counted. A failed write is tried again, ever
//! later; a few failures end it, but a bucket that asks for patience gets it. [`Publisher::shutdown`] waits until all is written or its time is over.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, debug, info_span, warn};

use crate::claim::Held;
use crate::config::Config;
use crate::counters::Counters;
use crate::entry::{Entry, Provenance};
use crate::envelope::{self, Limits, SealError};
use crate::key::Key;
use crate::quiet::Quiet;
use crate::sign::SigningKey;
use crate::tier::disk::Disk;
use crate::tier::{Found, Look, Put, Renewed, Terms, Tier, chain};

/// How long an entry waits for a bucket that asks for patience. The queue is bounded, so others may be dropped by then.
const BUSY: Duration = Duration::from_secs(900);

/// Bytes are accounted in units of this many, so that a semaphore's count holds them.
const UNIT_BYTES: u64 = 4096;

/// The queue.
#[derive(Debug)]
pub(crate) struct Publisher {
    shared: Arc<Shared>,
    tasks: TaskTracker,
    stop: CancellationToken,
    waiting: watch::Sender<usize>,
    places: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    byte_units: u32,
}

#[derive(Debug)]
struct Shared {
    disk: Option<Arc<Disk>>,
    /// The bucket, if there is one.
    tier: Option<Arc<dyn Tier>>,
    location: String,
    min_compile_time: Duration,
    limits: Limits,
    signing: Option<Arc<SigningKey>>,
    min_entry_bytes: u64,
    max_entry_bytes: u64,
    attempts: u32,
    backoff: Duration,
    backoff_max: Duration,
    uploads: Semaphore,
    counters: Arc<Counters>,
    warning: Quiet,
}

impl Publisher {
    pub(crate) fn new(
        disk: Option<Arc<Disk>>,
        tier: Option<Arc<dyn Tier>>,
        location: String,
        config: &Config,
        counters: Arc<Counters>,
    ) -> Publisher {
        let byte_units = u32::try_from(config.queue_bytes / UNIT_BYTES)
            .unwrap_or(u32::MAX)
            .clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize) as u32);
        Publisher {
            shared: Arc::new(Shared {
                disk,
                tier,
                location,
                min_compile_time: config.min_compile_time,
                limits: config.limits,
                signing: config.signing.clone(),
                min_entry_bytes: config.min_entry_bytes,
                max_entry_bytes: config.max_entry_bytes,
                attempts: config.write_attempts.max(1),
                backoff: config.backoff,
                backoff_max: config.backoff_max,
                uploads: Semaphore::new(config.uploads.max(1)),
                counters,
                warning: Quiet::default(),
            }),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            waiting: watch::Sender::new(0),
            places: Arc::new(Semaphore::new(config.queue_entries)),
            bytes: Arc::new(Semaphore::new(byte_units as usize)),
            byte_units,
        }
    }

    /// Queues an entry. Returns at once; must be called on a tokio runtime. `claim` tells who waits for the entry.
    pub(crate) fn publish(
        &self,
        key: &Key,
        entry: &Arc<Entry>,
        provenance: Provenance,
        claim: Option<Held>,
    ) {
        if provenance.compile_time() < self.shared.min_compile_time {
            self.shared.counters.skipped_quick.one();
            return;
        }
        let Some(place) = self.place(entry.memory_bytes()) else {
            self.shared
                .give_up(key, "the upload queue is full or closed");
            return;
        };
        let waiting = Waiting::new(self.waiting.clone());
        let (shared, stop) = (Arc::clone(&self.shared), self.stop.clone());
        let (key, entry) = (key.clone(), Arc::clone(entry));
        let span = info_span!("publish", %key);
        let work = async move {
            let _held = (place, waiting);
            let run = shared.run(&key, entry, provenance);
            match stop.run_until_cancelled(run).await {
                Some(true) => {
                    if let Some(claim) = claim {
                        claim.published();
                    }
                }
                // The claim is dropped, which calls it over.
                Some(false) => {}
                None => {
                    shared.give_up(&key, "the process stopped before it was written");
                }
            }
        };
        self.tasks.spawn(work.instrument(span));
    }

    /// Queues the renewal of an entry; if there is no room it waits for the next time. Returns at once; must be called on
    /// a tokio runtime.
    pub(crate) fn renew(&self, key: &Key, found: Found, terms: Terms) {
        let Some(tier) = self.shared.tier.clone() else {
            return;
        };
        let Some(place) = self.place(found.object.len() as u64) else {
            return;
        };
        let waiting = Waiting::new(self.waiting.clone());
        let (shared, stop, key) = (Arc::clone(&self.shared), self.stop.clone(), key.clone());
        let work = async move {
            let _held = (place, waiting);
            let Ok(_upload) = shared.uploads.acquire().await else {
                return;
            };
            let renewing = shared.renew(&*tier, &key, &found, &terms);
            stop.run_until_cancelled(renewing).await;
        };
        self.tasks.spawn(work);
    }

    /// Queues a look at an entry in the bucket that is used from elsewhere: an old one is renewed, and one that has gone is
    /// published again. As [`Publisher::renew`] otherwise.
    pub(crate) fn keep_alive(&self, key: &Key, object: Bytes, terms: Terms) {
        let Some(tier) = self.shared.tier.clone() else {
            return;
        };
        let Some(place) = self.place(object.len() as u64) else {
            return;
        };
        let waiting = Waiting::new(self.waiting.clone());
        let (shared, stop, key) = (Arc::clone(&self.shared), self.stop.clone(), key.clone());
        let look = async move {
            let _held = (place, waiting);
            let Ok(_upload) = shared.uploads.acquire().await else {
                return;
            };
            match tier.get(&key).await {
                Ok(Look::Good(found)) => {
                    let age = found
                        .written
                        .and_then(|at| SystemTime::now().duration_since(at).ok());
                    if age.is_some_and(|age| age > terms.older_than) {
                        shared.renew(&*tier, &key, &found, &terms).await;
                    }
                }
                Ok(Look::Bad(_) | Look::Absent) => {
                    shared.write(&*tier, &key, &object).await;
                }
                Err(error) => debug!(%key, error = %chain(&error), "an entry cannot be looked at"),
            }
        };
        self.tasks
            .spawn(async move { stop.run_until_cancelled(look).await });
    }

    /// Keeps an entry that was found in the bucket on disk, behind the caller, if there is a place in the queue for it.
    pub(crate) fn fill_back(&self, key: &Key, object: Bytes) {
        let Some(disk) = &self.shared.disk else {
            return;
        };
        let Some(place) = self.place(object.len() as u64) else {
            return;
        };
        let waiting = Waiting::new(self.waiting.clone());
        let (disk, stop, key) = (Arc::clone(disk), self.stop.clone(), key.clone());
        self.tasks.spawn(async move {
            let _held = (place, waiting);
            stop.run_until_cancelled(disk.put(&key, &object)).await
        });
    }

    /// Waits until the queue is empty, at most so long. Returns how many entries still wait.
    ///
    /// Cancel-safe.
    pub(crate) async fn flush(&self, deadline: Duration) -> usize {
        let mut waiting = self.waiting.subscribe();
        let empty = waiting.wait_for(|&waiting| waiting == 0);
        // The sender is ours, so only the time can end the wait otherwise.
        let _ = tokio::time::timeout(deadline, empty).await;
        *self.waiting.borrow()
    }

    /// How many entries wait.
    pub(crate) fn waiting(&self) -> usize {
        *self.waiting.borrow()
    }

    /// Takes no more, waits as [`Publisher::flush`] does, and cuts off the rest.
    pub(crate) async fn shutdown(&self, deadline: Duration) -> usize {
        self.places.close();
        let left = self.flush(deadline).await;
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        left
    }

    fn place(&self, bytes: u64) -> Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)> {
        let place = Arc::clone(&self.places).try_acquire_owned().ok()?;
        // An entry larger than the whole bound goes alone.
        let units = u32::try_from(bytes / UNIT_BYTES)
            .unwrap_or(u32::MAX)
            .clamp(1, self.byte_units);
        let bytes = Arc::clone(&self.bytes).try_acquire_many_owned(units).ok()?;
        Some((place, bytes))
    }
}

impl Shared {
    /// True when a good entry is in the bucket.
    async fn run(&self, key: &Key, entry: Arc<Entry>, provenance: Provenance) -> bool {
        let Ok(_upload) = self.uploads.acquire().await else {
            return false;
        };
        let (digest, limits, signing) = (*key.digest(), self.limits, self.signing.clone());
        let sealing = tokio::task::spawn_blocking(move || {
            envelope::seal_signed(&digest, &entry, &provenance, &limits, signing.as_deref())
        });
        let sealed = match sealing.await {
            Ok(Ok(sealed)) => sealed,
            Ok(Err(error @ SealError::TooLarge { .. })) => {
                debug!(%error, "entry not published");
                self.counters.skipped_large.one();
                return false;
            }
            Ok(Err(error)) => return self.give_up(key, &error.to_string()),
            Err(_) => return self.give_up(key, "the process stopped before it was sealed"),
        };
        let bytes = sealed.len() as u64;
        let skipped = if bytes < self.min_entry_bytes {
            &self.counters.skipped_small
        } else if bytes > self.max_entry_bytes {
            &self.counters.skipped_large
        } else {
            return self.keep(key, &sealed).await;
        };
        debug!(bytes, "entry not published for its size");
        skipped.one();
        false
    }

    async fn renew(&self, tier: &dyn Tier, key: &Key, found: &Found, terms: &Terms) {
        match tier.renew(key, found, terms).await {
            Ok(Renewed::Done) => {
                self.counters.renewals.one();
                debug!(%key, "an entry that is used has reached half its age and was renewed");
            }
            Ok(Renewed::Present) => {}
            Ok(Renewed::NoRoom) => {
                debug!(%key, "an entry cannot be renewed: all its slots are taken");
            }
            Err(error) => debug!(%key, error = %chain(&error), "an entry cannot be renewed"),
        }
    }

    /// Writes to both, neither waiting for the other.
    async fn keep(&self, key: &Key, sealed: &Bytes) -> bool {
        let disk = async {
            if let Some(disk) = &self.disk {
                disk.put(key, sealed).await;
            }
        };
        let bucket = async {
            match &self.tier {
                Some(tier) => self.write(&**tier, key, sealed).await,
                None => false,
            }
        };
        let ((), published) = futures::join!(disk, bucket);
        published
    }

    async fn write(&self, tier: &dyn Tier, key: &Key, sealed: &Bytes) -> bool {
        let mut pause = self.backoff;
        let mut attempt = 1;
        let begun = Instant::now();
        loop {
            let error = match tier.put(key, sealed).await {
                Ok(Put::Created) => {
                    self.counters.bucket_writes.one();
                    self.counters.bucket_write_bytes.add(sealed.len() as u64);
                    debug!(bytes = sealed.len(), "entry published");
                    return true;
                }
                Ok(Put::Present) => {
                    self.counters.bucket_writes_present.one();
                    return true;
                }
                Ok(Put::NoRoom) => {
                    self.counters.bucket_writes_no_room.one();
                    return self.give_up(key, "every slot of its key holds a bad object");
                }
                Err(error) => error,
            };
            if error.is_busy() && begun.elapsed() < BUSY {
                // Not lost, only late.
                self.counters.bucket_rate_limited.one();
            } else if attempt >= self.attempts || error.is_permanent() {
                return self.give_up(key, &chain(&error));
            } else {
                attempt += 1;
            }
            debug!(attempt, error = %chain(&error), "publishing failed, trying again");
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(self.backoff_max);
        }
    }

    fn give_up(&self, key: &Key, reason: &str) -> bool {
        self.counters.bucket_write_errors.one();
        if let Some(suppressed) = self.warning.due() {
            warn!(
                location = %self.location, %key, reason, suppressed,
                "compiled program not published; other processes will compile it themselves"
            );
        }
        false
    }
}

/// Counts itself among those that wait, for as long as it lives.
struct Waiting(watch::Sender<usize>);

impl Waiting {
    fn new(count: watch::Sender<usize>) -> Waiting {
        count.send_modify(|count| *count += 1);
        Waiting(count)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}
