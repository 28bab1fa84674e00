//! What an engine counts.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use waystation_lifecycle::bucket::Retries;

/// What an [`Engine`](crate::Engine) has done since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Totals {
    /// Objects written.
    pub writes: u64,
    /// Their bytes, as stored.
    pub written_bytes: u64,
    /// Objects and parts of objects read, metadata included.
    pub reads: u64,
    /// Their bytes, as stored.
    pub read_bytes: u64,
    /// Reads that were asked for a second time because they were slow.
    pub hedged_reads: u64,
    /// Requests to buckets that failed in a way for which they are sent again.
    pub retries: u64,
    /// Bytes of host memory taken now.
    pub host_memory_bytes: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    writes: AtomicU64,
    written_bytes: AtomicU64,
    reads: AtomicU64,
    read_bytes: AtomicU64,
    hedged_reads: AtomicU64,
    pub(super) retries: Retries,
}

impl Counters {
    pub(super) fn written(&self, bytes: u64) {
        self.writes.fetch_add(1, Relaxed);
        self.written_bytes.fetch_add(bytes, Relaxed);
    }

    pub(super) fn read(&self, bytes: u64) {
        self.reads.fetch_add(1, Relaxed);
        self.read_bytes.fetch_add(bytes, Relaxed);
    }

    pub(super) fn hedged(&self) {
        self.hedged_reads.fetch_add(1, Relaxed);
    }

    pub(super) fn totals(&self, host_memory_bytes: u64) -> Totals {
        Totals {
            writes: self.writes.load(Relaxed),
            written_bytes: self.written_bytes.load(Relaxed),
            reads: self.reads.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            hedged_reads: self.hedged_reads.load(Relaxed),
            retries: self.retries.count(),
            host_memory_bytes,
        }
    }
}
