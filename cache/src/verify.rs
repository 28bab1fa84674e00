//! What an object has to pass before anybody uses it: the envelope's checks, and not being one that has failed already.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use waystation_lifecycle::bucket::layout::Digest;

use crate::envelope::{self, Bad, Limits, Opened};
use crate::sign::SigningKey;

/// Objects that are larger than this, as stored or decoded, are verified on a thread that may block; smaller ones take less
/// than a millisecond.
const INLINE_BYTES: u64 = 256 << 10;

/// Bytes that objects may be, decoded, while they are verified, all that are at one time together; a larger one has it to
/// itself. In [`ROOM_UNIT`]s.
const ROOM_UNITS: u32 = 1024;
const ROOM_UNIT: u64 = 1 << 20;

/// Objects that are remembered: far more than a process meets. Beyond that all are forgotten, which costs each one
/// failed load again.
const REFUSED_OBJECTS: usize = 65_536;

/// Checks objects. All tiers of a cache share one.
#[derive(Debug, Clone)]
pub struct Verifier {
    limits: Limits,
    signing: Option<Arc<SigningKey>>,
    refused: Arc<Refused>,
    room: Arc<Semaphore>,
}

impl Verifier {
    pub(crate) fn new(
        limits: Limits,
        signing: Option<Arc<SigningKey>>,
        refused: Arc<Refused>,
    ) -> Verifier {
        Verifier {
            limits,
            signing,
            refused,
            room: Arc::new(Semaphore::new(ROOM_UNITS as usize)),
        }
    }

    /// What an object may hold.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Opens the object found under a key's name. Takes time in proportion to it, see [`envelope::open`].
    ///
    /// # Errors
    /// Why the object is not to be used. It is a miss.
    pub fn open(&self, key: &Digest, object: &Bytes) -> Result<Opened, Bad> {
        let opened = envelope::open_signed(key, object, &self.limits, self.signing.as_deref())?;
        if self.refused.contains(key, &opened.checksum) {
            return Err(Bad::Refused);
        }
        Ok(opened)
    }

    /// [`Verifier::open`] without blocking the caller's thread for long. `None` when the runtime is going down.
    pub async fn check(&self, key: &Digest, object: &Bytes) -> Option<Result<Opened, Bad>> {
        let bytes = work(object);
        if bytes <= INLINE_BYTES {
            return Some(self.open(key, object));
        }
        let room = Arc::clone(&self.room).acquire_many_owned(units(bytes));
        let room = room.await.ok()?;
        let (this, key, object) = (self.clone(), *key, object.clone());
        let opening = move || {
            let _room = room;
            this.open(&key, &object)
        };
        tokio::task::spawn_blocking(opening).await.ok()
    }

    /// [`Verifier::check`] for a thread that may block.
    pub(crate) fn check_blocking(&self, key: &Digest, object: &Bytes) -> Result<Opened, Bad> {
        let bytes = work(object);
        let _room = match Handle::try_current() {
            Ok(runtime) if bytes > INLINE_BYTES => {
                runtime.block_on(self.room.acquire_many(units(bytes))).ok()
            }
            _ => None,
        };
        self.open(key, object)
    }
}

/// Bytes that verifying an object goes through.
fn work(object: &Bytes) -> u64 {
    envelope::stated_bytes(object).max(object.len() as u64)
}

fn units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(ROOM_UNIT))
        .unwrap_or(ROOM_UNITS)
        .min(ROOM_UNITS)
}

/// Entries that are whole and of no use: the plugin does not load them, or a process that loaded one has not lived.
#[derive(Debug, Default)]
pub(crate) struct Refused(Mutex<HashSet<(Digest, Digest)>>);

impl Refused {
    /// `checksum`: the object's.
    pub(crate) fn add(&self, key: &Digest, checksum: &Digest) {
        let mut refused = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.len() >= REFUSED_OBJECTS {
            refused.clear();
        }
        refused.insert((*key, *checksum));
    }

    fn contains(&self, key: &Digest, checksum: &Digest) -> bool {
        let refused = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        refused.contains(&(*key, *checksum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{Entry, Provenance};

    const KEY: Digest = [3; 32];

    fn sealed(executable: Vec<u8>) -> Bytes {
        let entry = Entry {
            info: Default::default(),
            executable: executable.into(),
            text: None,
            object: None,
        };
        envelope::seal(&KEY, &entry, &Provenance::default(), &Limits::default()).unwrap()
    }

    #[tokio::test]
    async fn what_is_small_only_as_stored_is_decoded_elsewhere() {
        let verifier = Verifier::new(Limits::default(), None, Arc::default());
        // What is decoded elsewhere takes of the room; there is none for now.
        let all = verifier.room.acquire_many(ROOM_UNITS).await.unwrap();
        let small = sealed(vec![1; 1000]);
        let checked = verifier.check(&KEY, &small);
        assert!(futures::poll!(std::pin::pin!(checked)).is_ready());
        let large = sealed(vec![0; 8 << 20]);
        assert!(large.len() < 10_000, "{}", large.len());
        let mut checked = std::pin::pin!(verifier.check(&KEY, &large));
        assert!(futures::poll!(&mut checked).is_pending());
        drop(all);
        assert_eq!(
            checked.await.unwrap().unwrap().entry.executable.len(),
            8 << 20
        );
        assert_eq!(verifier.room.available_permits(), ROOM_UNITS as usize);
    }

    #[test]
    fn all_that_is_decoded_at_a_time_has_a_bound() {
        assert_eq!((units(1), units(ROOM_UNIT + 1)), (1, 2));
        assert_eq!(units(3 << 30), ROOM_UNITS);
        assert_eq!(units(u64::MAX), ROOM_UNITS);
    }
}
