//! Entries in a bucket that others share and nobody guards.
//!
//! * A key has [`SLOTS`] names. A reader takes slot 0. Where that is absent or bad, it lists the key's folder once and
//!   tries the others, newest first. So an absent key costs two requests, and a repaired one three.
//! * A writer creates the first slot that is free. Where a slot is taken it reads what is there: a good entry is as
//!   good as its own; a bad one is left lying, and the next slot taken. Nothing is ever written over, so the right to
//!   create is enough, repair included. Where the right to delete is there, rubbish is removed and its slot taken.
//! * An entry that is used and has reached half its age is created again in a free slot. The old one goes by its age,
//!   so that a slot is free again by the time the new one is old.
//! * An object that appears, changes or goes between two requests is a miss at worst.
//! * A write that timed out may have happened. The next attempt finds it, by the same rule.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{
    Error, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
};
use tracing::{debug, warn};
use waystation_lifecycle::bucket::layout::{self, SLOTS};
use waystation_lifecycle::bucket::{Bucket, Location};

use super::{Found, Look, Put, Renewed, Terms, Tier, TierError, chain, within};
use crate::config::{Config, Renewal};
use crate::counters::Counters;
use crate::envelope::{Bad, Opened};
use crate::key::Key;
use crate::quiet::Quiet;
use crate::verify::Verifier;

/// Bad objects that are known to have been counted. Beyond that all are forgotten, and counted again when they are met.
const COUNTED: usize = 4096;

/// The tier over a [`Bucket`].
#[derive(Debug)]
pub struct BucketTier {
    bucket: Bucket,
    verifier: Verifier,
    read_deadline: Duration,
    write_deadline: Duration,
    counters: Arc<Counters>,
    bad_warning: Quiet,
    /// Name, time and size of bad objects: a look-up meets them, and then who publishes in their place.
    counted: Mutex<HashSet<(Path, SystemTime, u64)>>,
    /// Cleared by the first removal that the store does not allow.
    may_remove: AtomicBool,
}

impl BucketTier {
    pub(crate) fn new(
        bucket: Bucket,
        verifier: Verifier,
        config: &Config,
        counters: Arc<Counters>,
    ) -> BucketTier {
        BucketTier {
            bucket,
            verifier,
            read_deadline: config.read_deadline,
            write_deadline: config.write_deadline,
            counters,
            bad_warning: Quiet::default(),
            counted: Mutex::default(),
            may_remove: AtomicBool::new(config.remove_bad),
        }
    }

    fn store(&self) -> &Arc<dyn ObjectStore> {
        self.bucket.store()
    }

    async fn look_up(&self, key: &Key) -> Result<Look, TierError> {
        let first = layout::executable(key.digest(), 0);
        let mut seen = self.read(key, &first).await?;
        if matches!(seen, Look::Good(_)) {
            return Ok(seen);
        }
        for path in self.other_slots(key).await? {
            seen = match (self.read(key, &path).await?, seen) {
                (good @ Look::Good(_), _) => return Ok(good),
                (Look::Bad(one), Look::Bad(other)) => Look::Bad(one.max(other)),
                (Look::Absent, seen) | (seen, _) => seen,
            };
        }
        Ok(seen)
    }

    /// Names of the slots behind the first that are taken, newest first.
    async fn other_slots(&self, key: &Key) -> Result<Vec<Path>, TierError> {
        let slots = match self.slots(key).await {
            Ok(slots) => slots,
            // Anybody may have put there what cannot be listed. A file by its name is found all the same.
            Err(error) if matches!(self.bucket.location(), Location::File(_)) => {
                debug!(%key, error = %chain(&error), "a folder cannot be listed; its names are tried one by one");
                let names = (1..SLOTS).map(|slot| layout::executable(key.digest(), slot));
                return Ok(names.collect());
            }
            Err(error) => return Err(error),
        };
        let mut found: Vec<_> = slots.into_iter().filter(|(_, slot, _)| *slot > 0).collect();
        found.sort();
        Ok(found.into_iter().rev().map(|(.., path)| path).collect())
    }

    /// Slots that are taken: since when, which, and the name.
    async fn slots(&self, key: &Key) -> Result<Vec<(SystemTime, u8, Path)>, TierError> {
        let folder = layout::executable_folder(key.digest());
        let mut slots = Vec::new();
        let mut names = self.store().list(Some(&folder));
        while let Some(meta) = names.try_next().await? {
            if let Some(slot) = layout::slot_of(&meta.location) {
                slots.push((meta.last_modified.into(), slot, meta.location));
            }
            // Foreign names below the folder must not make this list long.
            if slots.len() >= usize::from(SLOTS) {
                break;
            }
        }
        Ok(slots)
    }

    /// What is under one name.
    async fn read(&self, key: &Key, path: &Path) -> Result<Look, TierError> {
        let Some((meta, object)) = self.fetch(path).await? else {
            return Ok(Look::Absent);
        };
        let written = meta.last_modified.into();
        let size = meta.size;
        let opened = match object {
            Ok(object) => self.verify(key, &object).await?.map(|opened| Found {
                opened,
                object,
                written: Some(written),
            }),
            Err(bad) => Err(bad),
        };
        Ok(match opened {
            Ok(found) => Look::Good(Box::new(found)),
            Err(bad) => {
                self.refuse((path.clone(), written, size), &bad);
                Look::Bad(written)
            }
        })
    }

    /// What is under a name. `None` where nothing is (any more).
    async fn fetch(
        &self,
        path: &Path,
    ) -> Result<Option<(ObjectMeta, Result<Bytes, Bad>)>, TierError> {
        let absent_or = |error| match error {
            Error::NotFound { .. } => Ok(None),
            error => Err(TierError::from(error)),
        };
        let found = match self.store().get(path).await {
            Ok(found) => found,
            Err(error) => return absent_or(error),
        };
        // Before the body is taken in.
        let meta = found.meta.clone();
        let limit = self.verifier.limits().object;
        if meta.size > limit {
            let bytes = meta.size;
            return Ok(Some((meta, Err(Bad::TooLarge { bytes, limit }))));
        }
        match found.bytes().await {
            Ok(object) => Ok(Some((meta, Ok(object)))),
            Err(error) => absent_or(error),
        }
    }

    async fn verify(&self, key: &Key, object: &Bytes) -> Result<Result<Opened, Bad>, TierError> {
        let checked = self.verifier.check(key.digest(), object).await;
        checked.ok_or(TierError::Stopped)
    }

    /// Counts a bad object, once however often it is met.
    fn refuse(&self, object: (Path, SystemTime, u64), bad: &Bad) {
        let path = object.0.clone();
        {
            let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
            if counted.len() >= COUNTED {
                counted.clear();
            }
            if !counted.insert(object) {
                return;
            }
        }
        self.counters.bad(bad);
        if let Some(suppressed) = self.bad_warning.due() {
            warn!(
                location = %self.bucket.location(), %path, reason = bad.reason(), error = %bad, suppressed,
                "bad cache entry stepped over; the program is compiled again"
            );
        }
    }

    async fn publish(&self, key: &Key, sealed: &Bytes) -> Result<Put, TierError> {
        for slot in 0..SLOTS {
            let path = layout::executable(key.digest(), slot);
            if self.create(&path, sealed).await? {
                return Ok(Put::Created);
            }
            // Swept in between? Then the next slot is as good.
            let Some((meta, object)) = self.fetch(&path).await? else {
                continue;
            };
            let bad = match object {
                // Ours: an attempt before this one happened after all.
                Ok(object) if object == *sealed => return Ok(Put::Created),
                Ok(object) => match self.verify(key, &object).await? {
                    Ok(_) => return Ok(Put::Present),
                    Err(bad) => bad,
                },
                Err(bad) => bad,
            };
            let written = meta.last_modified.into();
            self.refuse((path.clone(), written, meta.size), &bad);
            if bad.is_rubbish() && self.remove(&path).await && self.create(&path, sealed).await? {
                return Ok(Put::Created);
            }
        }
        Ok(Put::NoRoom)
    }

    /// False where the name is taken.
    async fn create(&self, path: &Path, object: &Bytes) -> Result<bool, TierError> {
        let payload = PutPayload::from_bytes(object.clone());
        let options = PutOptions::from(PutMode::Create);
        match self.store().put_opts(path, payload, options).await {
            Ok(_) => Ok(true),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// True when a bad object is gone.
    async fn remove(&self, path: &Path) -> bool {
        if !self.may_remove.load(Relaxed) {
            return false;
        }
        match self.store().delete(path).await {
            Ok(()) => {
                self.counters.bad_removed.one();
                true
            }
            Err(error) => {
                let error = TierError::from(error);
                if error.is_permanent() {
                    self.may_remove.store(false, Relaxed);
                    debug!(error = %chain(&error), "bad entries are left where they are");
                }
                false
            }
        }
    }

    async fn let_live(
        &self,
        key: &Key,
        found: &Found,
        terms: &Terms,
    ) -> Result<Renewed, TierError> {
        let slots = self.slots(key).await?;
        if let Renewal::Touch(touch) = &terms.renewal {
            for (written, _, path) in slots {
                if Some(written) == found.written {
                    touch.touch(&path).await.map_err(TierError::Touch)?;
                    return Ok(Renewed::Done);
                }
            }
            return Ok(Renewed::Present);
        }
        let now = SystemTime::now();
        let is_young = |written: &SystemTime| {
            now.duration_since(*written).unwrap_or_default() <= terms.older_than
        };
        if slots.iter().any(|(written, ..)| is_young(written)) {
            return Ok(Renewed::Present);
        }
        let free = (0..SLOTS).find(|free| slots.iter().all(|(_, slot, _)| slot != free));
        let Some(free) = free else {
            return Ok(Renewed::NoRoom);
        };
        let path = layout::executable(key.digest(), free);
        Ok(match self.create(&path, &found.object).await? {
            true => Renewed::Done,
            false => Renewed::Present,
        })
    }
}

#[async_trait]
impl Tier for BucketTier {
    fn name(&self) -> &'static str {
        "bucket"
    }

    async fn get(&self, key: &Key) -> Result<Look, TierError> {
        within(self.read_deadline, self.look_up(key)).await
    }

    async fn put(&self, key: &Key, sealed: &Bytes) -> Result<Put, TierError> {
        within(self.write_deadline, self.publish(key, sealed)).await
    }

    async fn renew(&self, key: &Key, found: &Found, terms: &Terms) -> Result<Renewed, TierError> {
        within(self.write_deadline, self.let_live(key, found, terms)).await
    }
}
