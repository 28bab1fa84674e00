//! Entries in a bucket that others share and nobody guards.
//!
//! * A key has [`SLOTS`] names. A reader takes slot 0. Where that is absent or bad, it lists the key's folder once and
//!   tries the others, newest first. So an absent key costs two requests, and a repaired one three. Where strangers' names
//!   make the list long, the slots are asked for by name.
//! * A writer creates the first slot that is free. Where a slot is taken it reads what is there: a good entry is as
//!   good as its own; a bad one is left lying, and the next slot taken. Nothing is ever written over, so the right to
//!   create is enough, repair included. Where the right to delete is there, rubbish is removed and its slot taken.
//! * An entry that is used and has reached half its age is created again in a free slot. The old one goes by its age,
//!   so that a slot is free again by the time the new one is old.
//! * An object that appears, changes or goes between two requests is a miss at worst.
//! * A write that timed out may have happened. The next attempt finds it, by the same rule.
//! * An object that the bucket does not give out is a bad one, and the bucket is well. Whether it is the object's or the
//!   bucket's, no answer says: a read is refused (403, and most others below 500) in the same words where one object may
//!   not be read and where none may. So a refusal is followed by the read of a name that nothing has: where the answer to
//!   that is "not found", reading is allowed and the refusal the object's. Everything else is the bucket's: no connection,
//!   no answer in time, 401, 429 and 5xx.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tracing::{debug, warn};
use waystation_lifecycle::bucket::layout::{self, SLOTS};
use waystation_lifecycle::bucket::{Bucket, Location, is_denied, is_no_object};

use super::{Found, Look, Put, Renewed, Terms, Tier, TierError, chain, is_refusal, within};
use crate::config::{Config, Renewal, WRITE_DEADLINE_SMALL, WRITTEN_PER_SECOND};
use crate::counters::Counters;
use crate::envelope::{Bad, Opened};
use crate::key::Key;
use crate::quiet::Quiet;
use crate::verify::Verifier;

/// Bad objects that are known to have been counted. Beyond that all are forgotten, and counted again when they are met.
const COUNTED: usize = 4096;

/// Names of a key's folder that are looked at: a page of a store's list, and far more than Waystation gives.
const LISTED: usize = 1000;

/// What is under a name.
struct Seen {
    /// When it was written, by the store's clock; by ours where the store does not say.
    written: SystemTime,
    size: u64,
    object: Result<Bytes, Bad>,
}

impl Seen {
    fn unreadable(error: &Error) -> Seen {
        Seen {
            written: SystemTime::now(),
            size: 0,
            object: Err(Bad::Unreadable(chain(error))),
        }
    }
}

/// What a slot holds.
enum Slot {
    Good(Box<Found>),
    Bad(SystemTime, Option<Refused>),
    Absent,
}

/// A bad object that is met for the first time.
struct Refused(Path, Bad);

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
        let (mut bad, mut refused) = (None, Vec::new());
        let first = layout::executable(key.digest(), 0);
        let mut found = self.read(key, &first).await?;
        let mut others = None;
        loop {
            match found {
                Slot::Good(good) => {
                    self.warn(&refused, "a good one in another slot is used");
                    return Ok(Look::Good(good));
                }
                Slot::Bad(written, new) => {
                    bad = bad.max(Some(written));
                    refused.extend(new);
                }
                Slot::Absent => {}
            }
            let others = match &mut others {
                Some(others) => others,
                None => others.insert(self.other_slots(key).await?.into_iter()),
            };
            found = match others.next() {
                Some(path) => self.read(key, &path).await?,
                None => break,
            };
        }
        self.warn(
            &refused,
            "no slot has a good one, and the program is compiled again",
        );
        Ok(bad.map_or(Look::Absent, Look::Bad))
    }

    /// Names of the slots behind the first that are taken, newest first.
    async fn other_slots(&self, key: &Key) -> Result<Vec<Path>, TierError> {
        let Some(mut slots) = self.slots(key).await? else {
            let names = (1..SLOTS).map(|slot| layout::executable(key.digest(), slot));
            return Ok(names.collect());
        };
        slots.retain(|(_, slot, _)| *slot > 0);
        slots.sort();
        Ok(slots.into_iter().rev().map(|(.., path)| path).collect())
    }

    /// Slots that are taken: since when, which, and the name. `None`: strangers have put there what makes the list endless
    /// or impossible. An object by its name is found all the same.
    async fn slots(&self, key: &Key) -> Result<Option<Vec<(SystemTime, u8, Path)>>, TierError> {
        let folder = layout::executable_folder(key.digest());
        let mut slots = Vec::new();
        let mut names = self.store().list(Some(&folder)).take(LISTED + 1);
        let mut seen = 0;
        while let Some(meta) = names.next().await {
            let meta = match meta {
                Ok(meta) => meta,
                Err(error) => {
                    let is_file = matches!(self.bucket.location(), Location::File(_));
                    if is_file && (is_no_object(&error) || is_denied(&error)) {
                        debug!(%key, error = %chain(&error), "a folder cannot be listed; its names are tried one by one");
                        return Ok(None);
                    }
                    return Err(error.into());
                }
            };
            seen += 1;
            // Whatever lies in folders below is none of ours.
            if let Some(slot) = layout::slot_of(&meta.location)
                && layout::executable(key.digest(), slot) == meta.location
            {
                slots.push((meta.last_modified.into(), slot, meta.location));
            }
        }
        let is_whole = seen <= LISTED || slots.len() >= usize::from(SLOTS);
        Ok(is_whole.then_some(slots))
    }

    /// What is under one name.
    async fn read(&self, key: &Key, path: &Path) -> Result<Slot, TierError> {
        let Some(seen) = self.fetch(path).await? else {
            return Ok(Slot::Absent);
        };
        let (written, size) = (seen.written, seen.size);
        let bad = match seen.object {
            Ok(object) => match self.verify(key, &object).await? {
                Ok(opened) => {
                    return Ok(Slot::Good(Box::new(Found {
                        opened,
                        object,
                        written: Some(written),
                    })));
                }
                Err(bad) => bad,
            },
            Err(bad) => bad,
        };
        Ok(Slot::Bad(written, self.refuse(path, written, size, bad)))
    }

    /// What is under a name. `None` where nothing is (any more).
    async fn fetch(&self, path: &Path) -> Result<Option<Seen>, TierError> {
        let found = match self.store().get(path).await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) if self.is_the_objects(&error).await => {
                return Ok(Some(Seen::unreadable(&error)));
            }
            Err(error) => return Err(error.into()),
        };
        // Before the body is taken in.
        let (written, bytes) = (found.meta.last_modified.into(), found.meta.size);
        let limit = self.verifier.limits().object;
        let object = if bytes > limit {
            Err(Bad::TooLarge { bytes, limit })
        } else {
            match found.bytes().await {
                Ok(object) => Ok(object),
                Err(Error::NotFound { .. }) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        };
        Ok(Some(Seen {
            written,
            size: bytes,
            object,
        }))
    }

    /// Whether a failed read says something of the object, and not of the bucket: see the module.
    async fn is_the_objects(&self, error: &Error) -> bool {
        if is_no_object(error) {
            return true;
        }
        if !is_refusal(error) {
            return false;
        }
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let nothing = layout::nothing(since.unwrap_or_default().as_nanos());
        matches!(
            self.store().get(&nothing).await,
            Ok(_) | Err(Error::NotFound { .. })
        )
    }

    async fn verify(&self, key: &Key, object: &Bytes) -> Result<Result<Opened, Bad>, TierError> {
        let checked = self.verifier.check(key.digest(), object).await;
        checked.ok_or(TierError::Stopped)
    }

    /// Counts a bad object. It is given back where it is met for the first time.
    fn refuse(&self, path: &Path, written: SystemTime, size: u64, bad: Bad) -> Option<Refused> {
        // Of what cannot be read the time is not known.
        let written = match bad {
            Bad::Unreadable(_) => SystemTime::UNIX_EPOCH,
            _ => written,
        };
        {
            let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
            if counted.len() >= COUNTED {
                counted.clear();
            }
            if !counted.insert((path.clone(), written, size)) {
                return None;
            }
        }
        self.counters.bad(&bad);
        Some(Refused(path.clone(), bad))
    }

    /// Names bad objects that were met for the first time, and says what becomes of the request.
    fn warn(&self, refused: &[Refused], outcome: &str) {
        for Refused(path, bad) in refused {
            if let Some(suppressed) = self.bad_warning.due() {
                warn!(
                    location = %self.bucket.location(), %path, reason = bad.reason(), error = %bad, suppressed,
                    "bad cache entry stepped over; {outcome}"
                );
            }
        }
    }

    async fn publish(&self, key: &Key, sealed: &Bytes) -> Result<Put, TierError> {
        for slot in 0..SLOTS {
            let path = layout::executable(key.digest(), slot);
            let refusal = match self.create(&path, sealed).await {
                Ok(true) => return Ok(Put::Created),
                Ok(false) => None,
                // Of that name alone, if something bears it.
                Err(TierError::Store(error)) if is_no_object(&error) || is_denied(&error) => {
                    Some(error)
                }
                Err(error) => return Err(error),
            };
            let Some(seen) = self.fetch(&path).await? else {
                match refusal {
                    Some(error) => return Err(error.into()),
                    // Swept in between? Then the next slot is as good.
                    None => continue,
                }
            };
            let bad = match seen.object {
                // Ours: an attempt before this one happened after all.
                Ok(object) if object == *sealed => return Ok(Put::Created),
                Ok(object) => match self.verify(key, &object).await? {
                    Ok(_) => return Ok(Put::Present),
                    Err(bad) => bad,
                },
                Err(bad) => bad,
            };
            let is_rubbish = bad.is_rubbish();
            let refused = self.refuse(&path, seen.written, seen.size, bad);
            self.warn(
                refused.as_slice(),
                "a good one is published in its place or beside it",
            );
            if is_rubbish && self.remove(&path).await && self.create(&path, sealed).await? {
                return Ok(Put::Created);
            }
        }
        Ok(Put::NoRoom)
    }

    /// Time for one attempt to write this.
    fn time_for(&self, object: &Bytes) -> Duration {
        let more = Duration::from_secs(object.len() as u64 / WRITTEN_PER_SECOND);
        self.write_deadline.min(WRITE_DEADLINE_SMALL + more)
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
        // Where they cannot be known, each name is tried: at worst one entry more is there.
        let slots = self.slots(key).await?.unwrap_or_default();
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
        for free in (0..SLOTS).filter(|free| slots.iter().all(|(_, slot, _)| slot != free)) {
            let path = layout::executable(key.digest(), free);
            if self.create(&path, &found.object).await? {
                return Ok(Renewed::Done);
            }
            // Taken by what the list did not show; or else somebody was quicker.
            match self.fetch(&path).await? {
                Some(seen) if seen.object.is_ok() && is_young(&seen.written) => {
                    return Ok(Renewed::Present);
                }
                _ => {}
            }
        }
        Ok(Renewed::NoRoom)
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
        within(self.time_for(sealed), self.publish(key, sealed)).await
    }

    async fn renew(&self, key: &Key, found: &Found, terms: &Terms) -> Result<Renewed, TierError> {
        within(
            self.time_for(&found.object),
            self.let_live(key, found, terms),
        )
        .await
    }
}
