//! The numbers of saves and restores.

use std::collections::HashMap;

/// A number of a worker by the names of its counters.
type Number = fn(&HashMap<String, u64>) -> f64;

#[expect(
    clippy::cast_precision_loss,
    reason = "Prometheus has nothing but doubles"
)]
fn count(counted: &HashMap<String, u64>, name: &str) -> f64 {
    counted.get(name).copied().unwrap_or_default() as f64
}

/// Metric, type, help, value.
pub(super) const NUMBERS: &[(&str, &str, &str, Number)] = &[
    (
        "waystation_checkpoint_saves_total",
        "counter",
        "Saves that have ended well",
        |c| count(c, "saves"),
    ),
    (
        "waystation_checkpoint_saves_failed_total",
        "counter",
        "Saves that have failed",
        |c| count(c, "saves_failed"),
    ),
    (
        "waystation_checkpoint_save_seconds_total",
        "counter",
        "Time that saves have taken, from their arrays being there to all being durable",
        |c| count(c, "save_micros") / 1e6,
    ),
    (
        "waystation_checkpoint_saved_bytes_total",
        "counter",
        "Bytes of array elements saved",
        |c| count(c, "saved_bytes"),
    ),
    (
        "waystation_checkpoint_restores_total",
        "counter",
        "Restores that have ended well",
        |c| count(c, "restores"),
    ),
    (
        "waystation_checkpoint_restores_failed_total",
        "counter",
        "Restores of which an array has failed",
        |c| count(c, "restores_failed"),
    ),
    (
        "waystation_checkpoint_restore_seconds_total",
        "counter",
        "Time that restores have taken",
        |c| count(c, "restore_micros") / 1e6,
    ),
    (
        "waystation_checkpoint_restored_bytes_total",
        "counter",
        "Bytes of array elements restored to devices, copies included",
        |c| count(c, "restored_bytes"),
    ),
    (
        "waystation_checkpoint_writes_total",
        "counter",
        "Objects written",
        |c| count(c, "writes"),
    ),
    (
        "waystation_checkpoint_written_bytes_total",
        "counter",
        "Bytes of objects written, as stored",
        |c| count(c, "written_bytes"),
    ),
    (
        "waystation_checkpoint_reads_total",
        "counter",
        "Objects and parts of objects read",
        |c| count(c, "reads"),
    ),
    (
        "waystation_checkpoint_read_bytes_total",
        "counter",
        "Bytes read, as stored",
        |c| count(c, "read_bytes"),
    ),
    (
        "waystation_checkpoint_retries_total",
        "counter",
        "Requests to buckets that failed in a way for which they are sent again",
        |c| count(c, "retries"),
    ),
    (
        "waystation_checkpoint_hedged_reads_total",
        "counter",
        "Reads asked for a second time because they were slow",
        |c| count(c, "hedged_reads"),
    ),
    (
        "waystation_checkpoint_host_memory_bytes",
        "gauge",
        "Bytes of --checkpoint_host_memory in use",
        |c| count(c, "host_memory_bytes"),
    ),
];
