//! Counters of one proxy process, shown by the status page.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Instant,
};

use serde::Serialize;

/// Monotonic counts since the start, gauges named so.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Bytes of host buffers that clients stored.
    pub(crate) stored_bytes: AtomicU64,
    /// Bytes of array contents that clients looked up.
    pub(crate) fetched_bytes: AtomicU64,
    /// Gauge: host-buffer bytes waiting in memory.
    pub(crate) host_buffer_memory_bytes: AtomicU64,
    /// Host-buffer bytes that went to a temporary file.
    pub(crate) host_buffer_spilled_bytes: AtomicU64,
    /// Gauge.
    pub(crate) sessions: AtomicU64,
    /// Sessions since the start.
    pub(crate) sessions_total: AtomicU64,
    /// Requests on session streams.
    pub(crate) requests: AtomicU64,
    /// Executes forwarded to workers.
    pub(crate) executes: AtomicU64,
    /// Compile requests.
    pub(crate) compile_requests: AtomicU64,
    /// CheckValueReady, from the stream to the reply.
    pub(crate) waits: Times,
    /// The part of it from the op to the worker to the worker's answer.
    pub(crate) waits_link: Times,
    /// CopyToHostBuffer, from the stream to the reply.
    pub(crate) read: Times,
    /// The part of it from the op to the worker to the worker's answer.
    pub(crate) read_link: Times,
}

/// How often something was done, and how long it took in all.
#[derive(Debug, Default)]
pub(crate) struct Times {
    count: AtomicU64,
    nanos: AtomicU64,
}

impl Times {
    /// Counts one that began then and ends now.
    pub(crate) fn add(&self, since: Instant) {
        Counters::add(&self.count, 1);
        let nanos = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Counters::add(&self.nanos, nanos);
    }

    fn snapshot(&self) -> TimesSnapshot {
        TimesSnapshot {
            count: self.count.load(Relaxed),
            nanos: self.nanos.load(Relaxed),
        }
    }
}

/// [`Times`] as the page shows them.
#[derive(Debug, Serialize)]
pub(crate) struct TimesSnapshot {
    count: u64,
    nanos: u64,
}

/// What `GET /status` shows of the counters.
#[derive(Debug, Serialize)]
pub(crate) struct Snapshot {
    stored_bytes: u64,
    fetched_bytes: u64,
    host_buffer_memory_bytes: u64,
    host_buffer_spilled_bytes: u64,
    sessions: u64,
    sessions_total: u64,
    requests: u64,
    executes: u64,
    compile_requests: u64,
    waits: TimesSnapshot,
    waits_link: TimesSnapshot,
    read: TimesSnapshot,
    read_link: TimesSnapshot,
}

impl Counters {
    /// Adds to a counter.
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Relaxed);
    }

    /// Takes from a gauge.
    pub(crate) fn sub(gauge: &AtomicU64, n: u64) {
        gauge.fetch_sub(n, Relaxed);
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        Snapshot {
            stored_bytes: get(&self.stored_bytes),
            fetched_bytes: get(&self.fetched_bytes),
            host_buffer_memory_bytes: get(&self.host_buffer_memory_bytes),
            host_buffer_spilled_bytes: get(&self.host_buffer_spilled_bytes),
            sessions: get(&self.sessions),
            sessions_total: get(&self.sessions_total),
            requests: get(&self.requests),
            executes: get(&self.executes),
            compile_requests: get(&self.compile_requests),
            waits: self.waits.snapshot(),
            waits_link: self.waits_link.snapshot(),
            read: self.read.snapshot(),
            read_link: self.read_link.snapshot(),
        }
    }
}
