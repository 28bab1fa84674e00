//! Entries in a bucket that others share and nobody guards.
//!
//! * A key has [`SLOTS`] names. A reader takes slot 0. Where that is absent or bad, it lists the key's folder once and
//!   tries the others, newest first. So an absent key costs two requests, and a repaired one three.
//! * A writer creates the first slot that is free. Where a slot is taken it reads what is there: a good entry is as
//!   good as its own; a bad one is left lying, and the next slot taken. Nothing is ever written over or deleted, so
//!   the right to create is enough, repair included.
//! * An object that appears, changes or goes between two requests is a miss at worst.
//! * A write that timed out may have happened. The next attempt finds it, by the same rule.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tracing::warn;
use waystation_lifecycle::bucket::Bucket;
use waystation_lifecycle::bucket::layout::{self, SLOTS};

use super::{Put, Tier, TierError};
use crate::config::Config;
use crate::counters::Counters;
use crate::envelope::{self, Bad, Limits, Opened};
use crate::key::Key;
use crate::quiet::Quiet;

/// Objects larger than this are verified on a thread that may block; smaller ones take less than a millisecond.
const INLINE_BYTES: usize = 256 << 10;

/// The tier over a [`Bucket`].
#[derive(Debug)]
pub struct BucketTier {
    bucket: Bucket,
    limits: Limits,
    read_deadline: Duration,
    write_deadline: Duration,
    counters: Arc<Counters>,
    bad_warning: Quiet,
}

/// What is under one name.
enum Slot {
    Absent,
    Bad,
    Good(Box<Opened>),
}

impl BucketTier {
    pub(crate) fn new(bucket: Bucket, config: &Config, counters: Arc<Counters>) -> BucketTier {
        BucketTier {
            bucket,
            limits: config.limits,
            read_deadline: config.read_deadline,
            write_deadline: config.write_deadline,
            counters,
            bad_warning: Quiet::default(),
        }
    }

    fn store(&self) -> &Arc<dyn ObjectStore> {
        self.bucket.store()
    }

    async fn look_up(&self, key: &Key) -> Result<Option<Opened>, TierError> {
        if let Slot::Good(opened) = self.read(key, &layout::executable(key.digest(), 0)).await? {
            return Ok(Some(*opened));
        }
        for path in self.other_slots(key).await? {
            if let Slot::Good(opened) = self.read(key, &path).await? {
                return Ok(Some(*opened));
            }
        }
        Ok(None)
    }

    /// Names of the slots behind the first that are taken, newest first.
    async fn other_slots(&self, key: &Key) -> Result<Vec<Path>, TierError> {
        let folder = layout::executable_folder(key.digest());
        let mut found = Vec::new();
        let mut names = self.store().list(Some(&folder));
        while let Some(meta) = names.try_next().await? {
            if layout::slot_of(&meta.location).is_some_and(|slot| slot > 0) {
                found.push((meta.last_modified, meta.location));
            }
            // Foreign names in the folder must not make this list long.
            if found.len() >= usize::from(SLOTS) {
                break;
            }
        }
        found.sort();
        Ok(found.into_iter().rev().map(|(_, path)| path).collect())
    }

    async fn read(&self, key: &Key, path: &Path) -> Result<Slot, TierError> {
        match self.fetch(path).await? {
            None => Ok(Slot::Absent),
            Some(Err(bad)) => Ok(self.refuse(path, &bad)),
            Some(Ok(object)) => match self.verify(key, object).await? {
                Ok(opened) => Ok(Slot::Good(Box::new(opened))),
                Err(bad) => Ok(self.refuse(path, &bad)),
            },
        }
    }

    /// The bytes under a name. `None` where there are none (any more).
    async fn fetch(&self, path: &Path) -> Result<Option<Result<Bytes, Bad>>, TierError> {
        let absent_or = |error| match error {
            Error::NotFound { .. } => Ok(None),
            error => Err(TierError::from(error)),
        };
        let found = match self.store().get(path).await {
            Ok(found) => found,
            Err(error) => return absent_or(error),
        };
        // Before the body is taken in.
        let stated = found.meta.size;
        if stated > self.limits.object {
            let limit = self.limits.object;
            return Ok(Some(Err(Bad::TooLarge {
                bytes: stated,
                limit,
            })));
        }
        match found.bytes().await {
            Ok(object) => Ok(Some(Ok(object))),
            Err(error) => absent_or(error),
        }
    }

    async fn verify(&self, key: &Key, object: Bytes) -> Result<Result<Opened, Bad>, TierError> {
        let (digest, limits) = (*key.digest(), self.limits);
        if object.len() <= INLINE_BYTES {
            return Ok(envelope::open(&digest, &object, &limits));
        }
        tokio::task::spawn_blocking(move || envelope::open(&digest, &object, &limits))
            .await
            .map_err(|_| TierError::Stopped)
    }

    fn refuse(&self, path: &Path, bad: &Bad) -> Slot {
        self.counters.bad_entries.one();
        if let Some(suppressed) = self.bad_warning.due() {
            warn!(
                location = %self.bucket.location(), %path, reason = bad.reason(), error = %bad, suppressed,
                "bad cache entry stepped over; the program is compiled again"
            );
        }
        Slot::Bad
    }

    async fn publish(&self, key: &Key, sealed: &Bytes) -> Result<Put, TierError> {
        for slot in 0..SLOTS {
            let path = layout::executable(key.digest(), slot);
            let payload = PutPayload::from_bytes(sealed.clone());
            let options = PutOptions::from(PutMode::Create);
            match self.store().put_opts(&path, payload, options).await {
                Ok(_) => return Ok(Put::Created),
                Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            match self.fetch(&path).await? {
                // Ours: an attempt before this one happened after all.
                Some(Ok(object)) if object == *sealed => return Ok(Put::Created),
                Some(Ok(object)) => match self.verify(key, object).await? {
                    Ok(_) => return Ok(Put::Present),
                    Err(bad) => {
                        self.refuse(&path, &bad);
                    }
                },
                Some(Err(bad)) => {
                    self.refuse(&path, &bad);
                }
                // Swept in between; the next slot is as good.
                None => {}
            }
        }
        Ok(Put::NoRoom)
    }
}

#[async_trait]
impl Tier for BucketTier {
    fn name(&self) -> &'static str {
        "bucket"
    }

    async fn get(&self, key: &Key) -> Result<Option<Opened>, TierError> {
        within(self.read_deadline, self.look_up(key)).await
    }

    async fn put(&self, key: &Key, sealed: &Bytes) -> Result<Put, TierError> {
        within(self.write_deadline, self.publish(key, sealed)).await
    }
}

async fn within<T>(
    deadline: Duration,
    work: impl Future<Output = Result<T, TierError>>,
) -> Result<T, TierError> {
    tokio::time::timeout(deadline, work)
        .await
        .unwrap_or(Err(TierError::NoAnswer { deadline }))
}
