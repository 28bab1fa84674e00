//! What an object has to pass before anybody uses it: the envelope's checks, and not being one that has failed already.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use waystation_lifecycle::bucket::layout::Digest;

use crate::envelope::{self, Bad, Limits, Opened};
use crate::sign::SigningKey;

/// Objects larger than this are verified on a thread that may block; smaller ones take less than a millisecond.
const INLINE_BYTES: usize = 256 << 10;

/// Objects that are remembered: far more than a process meets. Beyond that all are forgotten, which costs each one
/// failed load again.
const REFUSED_OBJECTS: usize = 65_536;

/// Checks objects. All tiers of a cache share one.
#[derive(Debug, Clone)]
pub struct Verifier {
    limits: Limits,
    signing: Option<Arc<SigningKey>>,
    refused: Arc<Refused>,
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
        if object.len() <= INLINE_BYTES {
            return Some(self.open(key, object));
        }
        let (this, key, object) = (self.clone(), *key, object.clone());
        tokio::task::spawn_blocking(move || this.open(&key, &object))
            .await
            .ok()
    }
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
