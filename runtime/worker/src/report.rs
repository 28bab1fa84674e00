//! What `GetStatus` answers.

use std::collections::HashMap;

use waystation_proto::waystation::worker::WorkerStatus;

use crate::{
    core::Core,
    counters::{self, Persists},
};

/// The parts of a status that never change.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) plugin_path: String,
    pub(crate) platform: String,
    pub(crate) cache_location: String,
}

impl Report {
    /// The counters now.
    pub(crate) fn status(&self, core: &Core) -> WorkerStatus {
        let ours = &core.counters;
        let cache = core.compiler.cache().counters();
        WorkerStatus {
            compiles: counters::get(&ours.compiles),
            memory_hits: cache.memory_hits + counters::get(&ours.shared_loads),
            bucket_hits: cache.bucket_hits,
            bucket_misses: cache.bucket_misses,
            bucket_writes: cache.bucket_writes,
            bucket_bad_entries: cache.bad_entries,
            compile_seconds: counters::seconds(&ours.compile_nanos),
            load_seconds: counters::seconds(&ours.load_nanos),
            array_bytes: counters::get(&ours.array_bytes),
            shards: counters::get(&ours.shards),
            executes: counters::get(&ours.executes),
            put_bytes: counters::get(&ours.put_bytes),
            fetched_bytes: counters::get(&ours.fetched_bytes),
            pulled_bytes: counters::get(&ours.pulled_bytes),
            saved_bytes: counters::get(&ours.saved_bytes),
            restored_bytes: counters::get(&ours.restored_bytes),
            plugin_path: self.plugin_path.clone(),
            platform: self.platform.clone(),
            executables: counters::get(&ours.executables),
            cache_location: self.cache_location.clone(),
            ffi_calls: waystation_pjrt::ffi::calls(),
            clients: core.clients.report(),
            device_memory_bytes: core.ledger.used(),
            device_memory_limit_bytes: core.ledger.limit(),
            watches: counters::get(&ours.watches),
            watch_seconds: counters::seconds(&ours.watch_nanos),
            reads: counters::get(&ours.reads),
            read_seconds: counters::seconds(&ours.read_nanos),
            compiler_deaths: counters::get(&ours.compiler_deaths),
            compiling_in_child: counters::get(&ours.compiling_in_child),
            disk_hits: cache.disk_hits,
            disk_misses: cache.disk_misses,
            disk_writes: cache.disk_writes,
            disk_evictions: cache.disk_evictions,
            disk_bad_entries: cache.disk_bad_entries,
            disk_errors: cache.disk_read_errors + cache.disk_write_errors,
            disk_bytes: cache.disk_bytes,
            disk_index: core.compiler.cache().has_disk_index(),
            segment_bytes: core.segments.bytes(),
            local_bytes: core.segments.moved(),
            programs: counters::get(&ours.programs),
            program_seconds: counters::seconds(&ours.program_nanos),
            key_seconds: counters::seconds(&ours.key_nanos),
            checkpoints: checkpoints(core),
            cache: cache
                .all()
                .chain([("hlo_texts_left_out", core.compiler.texts_left_out())])
                .map(|(name, number)| (name.to_owned(), number))
                .collect(),
            cache_queue: core.compiler.cache().waiting() as u64,
        }
    }
}

/// What saves and restores count.
fn checkpoints(core: &Core) -> HashMap<String, u64> {
    let (ours, totals) = (&core.counters, core.checkpoints.totals());
    let micros = |persists: &Persists| counters::get(&persists.nanos) / 1000;
    [
        ("saves", counters::get(&ours.saves.good)),
        ("saves_failed", counters::get(&ours.saves.failed)),
        ("save_micros", micros(&ours.saves)),
        ("saved_bytes", counters::get(&ours.saved_bytes)),
        ("restores", counters::get(&ours.restores.good)),
        ("restores_failed", counters::get(&ours.restores.failed)),
        ("restore_micros", micros(&ours.restores)),
        ("restored_bytes", counters::get(&ours.restored_bytes)),
        ("writes", totals.writes),
        ("written_bytes", totals.written_bytes),
        ("reads", totals.reads),
        ("read_bytes", totals.read_bytes),
        ("retries", totals.retries),
        ("hedged_reads", totals.hedged_reads),
        ("host_memory_bytes", totals.host_memory_bytes),
    ]
    .map(|(name, number)| (name.to_owned(), number))
    .into()
}
