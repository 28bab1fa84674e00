//! What a cache has done, as numbers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one cache since it was opened, read at one moment (each by itself, not all at once).
        #[derive(Debug, Default, Clone, Copy, PartialEq, Eq, serde::Serialize)]
        #[non_exhaustive]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The live side of [`Counts`].
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
        }

        impl Counters {
            pub(crate) fn read(&self) -> Counts {
                Counts { $($name: self.$name.get(),)* }
            }
        }
    };
}

counters! {
    /// Programs compiled because no tier had them, successfully.
    compiles,
    /// Compiles that failed with the compiler's error.
    compile_failures,
    /// Microseconds spent in compiles, failed ones included.
    compile_micros,
    /// Requests answered from memory, or by the flight of another request for the same key.
    memory_hits,
    /// Requests answered from the bucket.
    bucket_hits,
    /// Requests that the bucket was asked for and had no good entry for.
    bucket_misses,
    /// Bytes of the entries that were read and found good, as stored.
    bucket_read_bytes,
    /// Look-ups that the bucket failed or did not answer in time.
    bucket_read_errors,
    /// Look-ups not made because the bucket failed shortly before.
    bucket_reads_skipped,
    /// Entries written to the bucket.
    bucket_writes,
    /// Bytes of the entries written, as stored.
    bucket_write_bytes,
    /// Entries that another writer had published first.
    bucket_writes_present,
    /// Entries given up: the bucket failed every attempt, has only bad entries in the key's slots, or the queue was full.
    bucket_write_errors,
    /// Objects refused on read: truncated, flipped, foreign, of another key, of an unknown format, too large.
    bad_entries,
    /// Requests whose program could only be keyed on its raw bytes.
    key_fallbacks,
    /// Requests that were compiled and not kept: the program holds addresses of its process, or the plugin does not
    /// serialize executables.
    uncacheable,
    /// Entries that the plugin refused to load ([`crate::Cache::reject`]).
    rejected,
    /// Microseconds of compiling that bucket hits have saved, by the note of those who compiled.
    saved_micros,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    // Relaxed: a counter orders nothing else.
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn one(&self) {
        self.add(1);
    }

    pub(crate) fn time(&self, time: Duration) {
        self.add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
