//! What a cache has done, as numbers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::envelope::Bad;

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

        impl Counts {
            /// Names and numbers, for pages that show all of them.
            pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
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
    /// Requests answered from disk.
    disk_hits,
    /// Requests that the disk was asked for and had no good entry for.
    disk_misses,
    /// Bytes of the entries that were read from disk and found good, as stored.
    disk_read_bytes,
    /// Look-ups that the disk failed or did not answer in time.
    disk_read_errors,
    /// Entries written to disk: what was compiled, and what came from the bucket.
    disk_writes,
    /// Bytes of the entries written to disk, as stored.
    disk_write_bytes,
    /// Entries that another process had written to disk first.
    disk_writes_present,
    /// Entries not written to disk because they do not fit in or something else bears their name.
    disk_no_room,
    /// Entries that the disk refused or was not asked to take because it had refused others shortly before.
    disk_write_errors,
    /// Entries that this process has removed from disk because the limit was reached.
    disk_evictions,
    /// Bytes of the entries removed.
    disk_evicted_bytes,
    /// Files refused on read and removed: truncated, flipped, foreign, of another key.
    disk_bad_entries,
    /// Not a count: bytes in the folder when this process last looked, those of all processes together.
    disk_bytes,
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
    /// Of the entries given up those whose key has bad objects in all its slots.
    bucket_writes_no_room,
    /// Times that the bucket asked for patience (429, 503) with a write, which is tried again.
    bucket_rate_limited,
    /// Bad objects removed, where the right to do so is there.
    bad_removed,
    /// Entries published again because they had reached half their age.
    renewals,
    /// Objects refused on read, for whatever reason, each once. The next eight are these by reason.
    bad_entries,
    /// Cut, with a bit flipped, or contradicting themselves.
    bad_corrupt,
    /// No entries of Waystation's.
    bad_foreign,
    /// Of another format of Waystation's.
    bad_format,
    /// Entries of another key.
    bad_wrong_key,
    /// Larger than the limits allow.
    bad_too_large,
    /// Without a signature of the key given, where one is asked for.
    bad_signature,
    /// Whole, and known not to load.
    bad_refused,
    /// Not given out by a bucket that gives out others, or no file at all.
    bad_unreadable,
    /// Programs that this process has claimed before it compiled them.
    claims,
    /// Programs that another process had claimed, so that this one waited.
    claim_waits,
    /// Waits of these that ended without an entry, so that this process compiled after all.
    claim_waits_in_vain,
    /// Microseconds of such waits.
    claim_wait_micros,
    /// Claims that could not be made or looked at, so that this process compiled at once.
    claim_errors,
    /// Compiled programs not published because their compile was quicker than the threshold.
    skipped_quick,
    /// Compiled programs not published because their entry is smaller than the threshold.
    skipped_small,
    /// Compiled programs not published because their entry is larger than the limit.
    skipped_large,
    /// Requests whose program could only be keyed on its raw bytes.
    key_fallbacks,
    /// Requests that were compiled and not kept: the program holds addresses of its process, or the plugin does not
    /// serialize executables. The next four are these by reason.
    uncacheable,
    /// Their program calls back into the Python process that sent it.
    uncacheable_callback,
    /// Their program is to be partitioned by a Python object of the process that sent it.
    uncacheable_partitioner,
    /// Their program does one of these in a part that is not understood.
    uncacheable_unread,
    /// The plugin does not serialize executables.
    uncacheable_plugin,
    /// Entries that the plugin refused to load ([`crate::Cache::reject`]).
    rejected,
    /// Microseconds of compiling that disk and bucket hits have saved, by the note of those who compiled.
    saved_micros,
}

impl Counters {
    /// Counts a request for a program that means something only in the process that sent it. `construct`: what it calls.
    pub(crate) fn uncacheable(&self, construct: &str) {
        self.uncacheable.one();
        // The names are the client's; a handful of reasons is what pages can show.
        if construct.contains("CustomSPMDPartitioning") {
            &self.uncacheable_partitioner
        } else if construct.contains("_python_") {
            &self.uncacheable_callback
        } else {
            &self.uncacheable_unread
        }
        .one();
    }

    /// Counts an object that was refused.
    pub(crate) fn bad(&self, bad: &Bad) {
        self.bad_entries.one();
        match bad {
            Bad::Foreign => &self.bad_foreign,
            Bad::UnknownFormat { .. } => &self.bad_format,
            Bad::WrongKey { .. } => &self.bad_wrong_key,
            Bad::TooLarge { .. } | Bad::SectionTooLarge { .. } => &self.bad_too_large,
            Bad::TooShort { .. }
            | Bad::Length { .. }
            | Bad::Checksum
            | Bad::Table(_)
            | Bad::Section { .. } => &self.bad_corrupt,
            Bad::Signature(_) => &self.bad_signature,
            Bad::Refused => &self.bad_refused,
            Bad::Unreadable(_) => &self.bad_unreadable,
        }
        .one();
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    // Relaxed: a counter orders nothing else.
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
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
