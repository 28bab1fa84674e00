//! What the worker counts. Written by the dispatch thread and its helpers, read by `GetStatus`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Counters of the process since its start; `compiling_in_child`, `array_bytes`, `shards` and `executables`
/// are gauges.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) compiles: AtomicU64,
    pub(crate) compile_nanos: AtomicU64,
    /// Requests for programs, answered.
    pub(crate) programs: AtomicU64,
    pub(crate) program_nanos: AtomicU64,
    /// What of that went into keys.
    pub(crate) key_nanos: AtomicU64,
    /// Compiles whose process ended under them.
    pub(crate) compiler_deaths: AtomicU64,
    pub(crate) compiling_in_child: AtomicU64,
    pub(crate) load_nanos: AtomicU64,
    pub(crate) array_bytes: AtomicU64,
    pub(crate) shards: AtomicU64,
    pub(crate) executes: AtomicU64,
    pub(crate) put_bytes: AtomicU64,
    pub(crate) fetched_bytes: AtomicU64,
    pub(crate) pulled_bytes: AtomicU64,
    pub(crate) saved_bytes: AtomicU64,
    pub(crate) restored_bytes: AtomicU64,
    pub(crate) saves: Persists,
    pub(crate) restores: Persists,
    pub(crate) executables: AtomicU64,
    pub(crate) watches: AtomicU64,
    pub(crate) watch_nanos: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) read_nanos: AtomicU64,
    /// Loads that found the same program for the same devices already in the process.
    pub(crate) shared_loads: AtomicU64,
}

/// Saves or restores that have ended.
#[derive(Debug, Default)]
pub(crate) struct Persists {
    pub(crate) good: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) nanos: AtomicU64,
}

impl Persists {
    /// One more has ended.
    pub(crate) fn ended(&self, begun: Instant, is_good: bool) {
        add(if is_good { &self.good } else { &self.failed }, 1);
        add_time(&self.nanos, begun.elapsed());
    }
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Relaxed);
}

/// Takes from a gauge.
pub(crate) fn sub(gauge: &AtomicU64, amount: u64) {
    gauge.fetch_sub(amount, Relaxed);
}

/// Adds a time to a counter of nanoseconds.
pub(crate) fn add_time(counter: &AtomicU64, time: Duration) {
    add(counter, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
}

/// The value now.
pub(crate) fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

/// A counter of nanoseconds in seconds.
#[expect(
    clippy::cast_precision_loss,
    reason = "a figure for people; 2^53 ns is 104 days"
)]
pub(crate) fn seconds(counter: &AtomicU64) -> f64 {
    get(counter) as f64 / 1e9
}
