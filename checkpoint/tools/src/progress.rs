//! How far a long piece of work is, for whoever shows it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters that the work moves on and others read.
#[derive(Debug, Default)]
pub struct Progress {
    total_bytes: AtomicU64,
    done_bytes: AtomicU64,
    done_objects: AtomicU64,
}

/// The counters at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Done {
    /// The bytes there are, as far as known.
    pub total_bytes: u64,
    /// The bytes that are done.
    pub bytes: u64,
    /// The objects that are done.
    pub objects: u64,
}

impl Progress {
    /// The counters now.
    #[must_use]
    pub fn now(&self) -> Done {
        Done {
            total_bytes: self.total_bytes.load(Ordering::Relaxed),
            bytes: self.done_bytes.load(Ordering::Relaxed),
            objects: self.done_objects.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn expect(&self, bytes: u64) {
        self.total_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn did(&self, objects: u64, bytes: u64) {
        self.done_objects.fetch_add(objects, Ordering::Relaxed);
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}
