//! Dumps on their way to a bucket, off every request's path: bounded in bytes, a few objects at a time, tried again when a
//! write fails. What has no room is left out, and said once a minute.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use object_store::{ObjectStore as _, PutMode, PutOptions, path::Path};
use tokio::sync::{OnceCell, Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use waystation_lifecycle::bucket::{Bucket, Location};

/// Bytes that may wait, in units for a semaphore's count.
const UNIT_BYTES: usize = 4096;
const WAITING_UNITS: u32 = 512 << 20 >> 12;

/// Objects written at the same time.
const AT_ONCE: usize = 4;

/// Writes of an object before it is given up, and the first pause between two.
const ATTEMPTS: u32 = 4;
const PAUSE: Duration = Duration::from_secs(1);

/// Locations that stay open. An operator names one.
const OPEN_BUCKETS: usize = 8;

/// Between two warnings.
const QUIET: Duration = Duration::from_secs(60);

type Opened = Arc<OnceCell<Option<Bucket>>>;

/// The queue.
#[derive(Debug)]
pub(super) struct Uploads {
    shared: Arc<Shared>,
    tasks: TaskTracker,
    stop: CancellationToken,
    room: Arc<Semaphore>,
}

#[derive(Debug)]
struct Shared {
    /// This process's folder below every location.
    place: String,
    buckets: Mutex<HashMap<String, Opened>>,
    at_once: Semaphore,
    warned: Mutex<Option<Instant>>,
}

impl Uploads {
    pub(super) fn new(place: String) -> Uploads {
        Uploads {
            shared: Arc::new(Shared {
                place,
                buckets: Mutex::default(),
                at_once: Semaphore::new(AT_ONCE),
                warned: Mutex::default(),
            }),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            room: Arc::new(Semaphore::new(WAITING_UNITS as usize)),
        }
    }

    /// Queues objects for a location. Returns at once; must be called on a tokio runtime.
    pub(super) fn send(&self, to: &str, objects: Vec<(String, Bytes)>) {
        let bytes: usize = objects.iter().map(|(_, bytes)| bytes.len()).sum();
        // More than the whole bound goes alone.
        let units = u32::try_from(bytes / UNIT_BYTES + objects.len())
            .unwrap_or(u32::MAX)
            .min(WAITING_UNITS);
        let room = Arc::clone(&self.room).try_acquire_many_owned(units);
        let Ok(room) = room else {
            self.shared.warn(to, "too many wait to be written");
            return;
        };
        let (shared, stop, to) = (Arc::clone(&self.shared), self.stop.clone(), to.to_owned());
        self.tasks.spawn(async move {
            let _room = room;
            let written = stop.run_until_cancelled(shared.write(&to, objects)).await;
            if written.is_none() {
                shared.warn(&to, "the worker stopped before they were written");
            }
        });
    }

    /// Waits until all is written, at most so long, and gives up the rest.
    pub(super) async fn finish(&self, deadline: Duration) {
        self.tasks.close();
        if tokio::time::timeout(deadline, self.tasks.wait())
            .await
            .is_err()
        {
            self.stop.cancel();
            self.tasks.wait().await;
        }
    }
}

impl Shared {
    async fn write(&self, to: &str, objects: Vec<(String, Bytes)>) {
        let Some(bucket) = self.bucket(to).await else {
            return;
        };
        for (name, bytes) in objects {
            let Ok(_turn) = self.at_once.acquire().await else {
                return;
            };
            let path = Path::from(format!("{}/{name}", self.place));
            if let Err(error) = put(&bucket, &path, &bytes).await {
                self.warn(to, &error.to_string());
            }
        }
    }

    /// The location's bucket, opened by the first who needs it.
    async fn bucket(&self, to: &str) -> Option<Bucket> {
        let opened = {
            let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
            if buckets.len() >= OPEN_BUCKETS && !buckets.contains_key(to) {
                buckets.clear();
            }
            Arc::clone(buckets.entry(to.to_owned()).or_default())
        };
        let open = async || {
            let location = to.to_owned();
            let opened = tokio::task::spawn_blocking(move || {
                Location::parse(&location).and_then(|location| Bucket::open(&location))
            });
            match opened.await {
                Ok(Ok(bucket)) => Some(bucket),
                Ok(Err(error)) => {
                    self.warn(to, &error.to_string());
                    None
                }
                Err(error) => {
                    self.warn(to, &error.to_string());
                    None
                }
            }
        };
        opened.get_or_init(open).await.clone()
    }

    fn warn(&self, to: &str, error: &str) {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.is_none_or(|at| at.elapsed() >= QUIET) {
            *warned = Some(Instant::now());
            tracing::warn!(to, error, "HLO dumps are left out");
        }
    }
}

async fn put(bucket: &Bucket, path: &Path, bytes: &Bytes) -> Result<(), object_store::Error> {
    let mut pause = PAUSE;
    for attempt in 1.. {
        let options = PutOptions::from(PutMode::Create);
        let put = bucket.store().put_opts(path, bytes.clone().into(), options);
        match put.await {
            // Of an attempt whose answer was lost, say.
            Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => break,
            Err(
                error @ (object_store::Error::PermissionDenied { .. }
                | object_store::Error::Unauthenticated { .. }),
            ) => return Err(error),
            Err(error) if attempt >= ATTEMPTS => return Err(error),
            Err(_) => tokio::time::sleep(pause).await,
        }
        pause *= 2;
    }
    Ok(())
}
