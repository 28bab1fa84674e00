//! Stores compile requests, behind those who make them or while they wait.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use object_store::{PutMode, PutOptions, PutPayload};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tracing::warn;
use waystation_lifecycle::bucket::Bucket;
use waystation_lifecycle::bucket::layout::{self, Digest};
use waystation_proto::waystation::recording::Recording;

use super::{name, seal};
use crate::counters::Counter;
use crate::quiet::Quiet;
use crate::tier::chain;

/// Requests that wait to be stored; beyond that they are dropped.
const QUEUE: usize = 1024;

/// Bytes of such requests, in units of [`UNIT_BYTES`].
const QUEUE_UNITS: u32 = 1 << 18;
const UNIT_BYTES: u64 = 4096;

/// Requests stored at the same time.
const WRITES: usize = 8;

/// One write, with all its attempts.
const WRITE_DEADLINE: Duration = Duration::from_secs(120);

/// Names that this process has stored. Beyond that all are forgotten, which costs each a write that finds it there.
const REMEMBERED: usize = 65_536;

/// Stores compile requests behind those who make them.
#[derive(Debug)]
pub struct Recorder {
    /// `None` when it is finished.
    sender: Mutex<Option<mpsc::Sender<Queued>>>,
    room: Arc<Semaphore>,
    shared: Arc<Shared>,
    task: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Queued {
    recording: Recording,
    _room: OwnedSemaphorePermit,
}

#[derive(Debug)]
struct Shared {
    bucket: Bucket,
    stored: Counter,
    present: Counter,
    uncacheable: Counter,
    dropped: Counter,
    failed: Counter,
    seen: Mutex<HashSet<Digest>>,
    warning: Quiet,
}

/// What a [`Recorder`] has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Recorded {
    /// Requests stored.
    pub stored: u64,
    /// Requests that were stored already.
    pub present: u64,
    /// Requests whose program calls into its client, which are not stored.
    pub uncacheable: u64,
    /// Requests dropped because too many waited.
    pub dropped: u64,
    /// Requests that the bucket did not take.
    pub failed: u64,
}

impl Recorder {
    /// Begins. Asks nothing of the bucket. Must be called on a tokio runtime.
    pub fn start(bucket: Bucket) -> Recorder {
        let (sender, mut receiver) = mpsc::channel::<Queued>(QUEUE);
        let shared = Arc::new(Shared {
            bucket,
            stored: Counter::default(),
            present: Counter::default(),
            uncacheable: Counter::default(),
            dropped: Counter::default(),
            failed: Counter::default(),
            seen: Mutex::default(),
            warning: Quiet::default(),
        });
        let storing = Arc::clone(&shared);
        let queue = futures::stream::poll_fn(move |context| receiver.poll_recv(context));
        let task = tokio::spawn(queue.for_each_concurrent(WRITES, move |queued| {
            let shared = Arc::clone(&storing);
            async move {
                // Counted, and warned of, where it happens.
                let _ = shared.store(queued.recording).await;
            }
        }));
        Recorder {
            sender: Mutex::new(Some(sender)),
            room: Arc::new(Semaphore::new(QUEUE_UNITS as usize)),
            shared,
            task: Mutex::new(Some(task)),
        }
    }

    /// Queues a request. Never waits; where there is no room the request is dropped and counted.
    pub fn record(&self, recording: Recording) {
        let bytes = recording.program.len() as u64 + recording.compile_options.len() as u64;
        let units = u32::try_from(bytes / UNIT_BYTES + 1).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.room).try_acquire_many_owned(units.min(QUEUE_UNITS));
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let queued = match (room, &*sender) {
            (Ok(room), Some(sender)) => sender
                .try_send(Queued {
                    recording,
                    _room: room,
                })
                .is_ok(),
            _ => false,
        };
        if !queued {
            self.shared.dropped.one();
        }
    }

    /// Stores a request before it returns. One that is stored already, by whomever, is none to write.
    ///
    /// # Errors
    /// When it is not stored.
    pub async fn record_now(&self, recording: Recording) -> Result<(), NotRecorded> {
        self.shared.store(recording).await
    }

    /// The counters, now.
    pub fn counts(&self) -> Recorded {
        let shared = &self.shared;
        Recorded {
            stored: shared.stored.get(),
            present: shared.present.get(),
            uncacheable: shared.uncacheable.get(),
            dropped: shared.dropped.get(),
            failed: shared.failed.get(),
        }
    }

    /// Takes no more and waits until all is stored, at most so long.
    pub async fn finish(&self, deadline: Duration) {
        let lock = |task: &Mutex<Option<JoinHandle<()>>>| {
            task.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        drop(
            self.sender
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        if let Some(mut task) = lock(&self.task)
            && tokio::time::timeout(deadline, &mut task).await.is_err()
        {
            task.abort();
            warn!("some compile requests were not recorded before the process stopped");
        }
    }
}

/// Why a request was not recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotRecorded {
    /// Its program calls into the process that made it, which nobody else can compile.
    #[error("the program calls into the process that made it, so nobody else can compile it")]
    Uncacheable,
    /// The bucket did not take it.
    #[error("{location} did not take it: {reason}")]
    Failed {
        /// The bucket.
        location: String,
        /// What it said.
        reason: String,
    },
}

impl Shared {
    /// Stores a request and counts what came of it.
    async fn store(&self, recording: Recording) -> Result<(), NotRecorded> {
        let naming = recording.clone();
        let named = tokio::task::spawn_blocking(move || name(&naming)).await;
        let named = named.map_err(|error| self.failed(&error.to_string()))?;
        let Some(name) = named else {
            self.uncacheable.one();
            return Err(NotRecorded::Uncacheable);
        };
        if self.seen().contains(&name) {
            self.present.one();
            return Ok(());
        }
        let created = self.create(name, recording).await;
        created.map_err(|reason| self.failed(&reason))?;
        let mut seen = self.seen();
        if seen.len() >= REMEMBERED {
            seen.clear();
        }
        seen.insert(name);
        Ok(())
    }

    async fn create(&self, name: Digest, recording: Recording) -> Result<(), String> {
        let sealed = tokio::task::spawn_blocking(move || seal(&recording)).await;
        let sealed = sealed.map_err(|error| error.to_string())?;
        let sealed = sealed.map_err(|error| error.to_string())?;
        let path = layout::program(&name);
        let payload = PutPayload::from_bytes(sealed);
        let options = PutOptions::from(PutMode::Create);
        let put = self.bucket.store().put_opts(&path, payload, options);
        match tokio::time::timeout(WRITE_DEADLINE, put).await {
            Ok(Ok(_)) => self.stored.one(),
            Ok(Err(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. },
            )) => self.present.one(),
            Ok(Err(error)) => return Err(chain(&error)),
            Err(_) => return Err("it does not answer".to_owned()),
        }
        Ok(())
    }

    fn seen(&self) -> MutexGuard<'_, HashSet<Digest>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, reason: &str) -> NotRecorded {
        self.failed.one();
        if let Some(suppressed) = self.warning.due() {
            warn!(location = %self.bucket.location(), reason, suppressed, "a compile request is not recorded");
        }
        NotRecorded::Failed {
            location: self.bucket.location().to_string(),
            reason: reason.to_owned(),
        }
    }
}
