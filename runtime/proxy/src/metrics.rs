//! `GET /metrics`: numbers of the proxy and its workers in Prometheus' text format.

mod checkpoints;

use std::fmt::{Display, Write as _};

use serde_json::Value;
use waystation_cache::recording::Recorded;
use waystation_proto::waystation::worker::WorkerStatus;

/// What the page is.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Metric, help, label, and for each of the label's values the cache's counter.
type Labelled = (
    &'static str,
    &'static str,
    &'static str,
    &'static [(&'static str, &'static str)],
);

/// The cache's numbers that differ by one label.
const BY_LABEL: &[Labelled] = &[
    (
        "waystation_cache_hits_total",
        "Compile requests answered without a compile, by where the executable was",
        "tier",
        &[
            ("memory", "memory_hits"),
            ("disk", "disk_hits"),
            ("bucket", "bucket_hits"),
        ],
    ),
    (
        "waystation_cache_misses_total",
        "Look-ups without a good entry, by where",
        "tier",
        &[("disk", "disk_misses"), ("bucket", "bucket_misses")],
    ),
    (
        "waystation_cache_rejected_total",
        "Objects of the bucket refused on read, and entries that the plugin does not load, by reason",
        "reason",
        &[
            ("corrupt", "bad_corrupt"),
            ("foreign", "bad_foreign"),
            ("format", "bad_format"),
            ("wrong_key", "bad_wrong_key"),
            ("too_large", "bad_too_large"),
            ("signature", "bad_signature"),
            ("refused", "bad_refused"),
            ("unreadable", "bad_unreadable"),
            ("does_not_load", "rejected"),
        ],
    ),
    (
        "waystation_cache_not_kept_total",
        "Compiled programs that are not kept, by reason",
        "reason",
        &[
            ("uncacheable", "uncacheable"),
            ("too_quick", "skipped_quick"),
            ("too_small", "skipped_small"),
            ("too_large", "skipped_large"),
            ("no_room", "bucket_writes_no_room"),
        ],
    ),
    (
        "waystation_cache_uncacheable_total",
        "Requests whose program cannot be kept, by what is in the way",
        "construct",
        &[
            ("python_callback", "uncacheable_callback"),
            ("custom_partitioner", "uncacheable_partitioner"),
            ("not_understood", "uncacheable_unread"),
            ("plugin", "uncacheable_plugin"),
        ],
    ),
    (
        "waystation_cache_read_bytes_total",
        "Bytes of good entries read, by where",
        "tier",
        &[("disk", "disk_read_bytes"), ("bucket", "bucket_read_bytes")],
    ),
    (
        "waystation_cache_written_bytes_total",
        "Bytes of entries written, by where",
        "tier",
        &[
            ("disk", "disk_write_bytes"),
            ("bucket", "bucket_write_bytes"),
        ],
    ),
    (
        "waystation_cache_written_total",
        "Entries written, by where",
        "tier",
        &[("disk", "disk_writes"), ("bucket", "bucket_writes")],
    ),
    (
        "waystation_cache_errors_total",
        "Reads and writes of entries that failed, by what they were",
        "operation",
        &[
            ("disk_read", "disk_read_errors"),
            ("disk_write", "disk_write_errors"),
            ("bucket_read", "bucket_read_errors"),
            ("bucket_write", "bucket_write_errors"),
        ],
    ),
];

/// The cache's numbers that stand alone: metric, help, counter.
const ALONE: &[(&str, &str, &str)] = &[
    (
        "waystation_cache_rate_limited_total",
        "Writes that the bucket has put off (429, 503)",
        "bucket_rate_limited",
    ),
    (
        "waystation_cache_renewals_total",
        "Entries published again because they had reached half their age",
        "renewals",
    ),
    (
        "waystation_cache_key_fallbacks_total",
        "Requests whose program could only be keyed on its bytes",
        "key_fallbacks",
    ),
];

/// A number of a worker's status.
type Number = fn(&WorkerStatus) -> f64;

/// Other numbers of a worker: metric, type, help, value.
#[expect(
    clippy::cast_precision_loss,
    reason = "Prometheus has nothing but doubles"
)]
const OF_WORKERS: &[(&str, &str, &str, Number)] = &[
    (
        "waystation_compiles_total",
        "counter",
        "Programs compiled",
        |s| s.compiles as f64,
    ),
    (
        "waystation_compile_seconds_total",
        "counter",
        "Time in the plugin's compiles",
        |s| s.compile_seconds,
    ),
    (
        "waystation_load_seconds_total",
        "counter",
        "Time in the plugin's loads of executables",
        |s| s.load_seconds,
    ),
    (
        "waystation_programs_total",
        "counter",
        "Requests for programs answered",
        |s| s.programs as f64,
    ),
    (
        "waystation_program_seconds_total",
        "counter",
        "Time in requests for programs: key, cache, compile and load",
        |s| s.program_seconds,
    ),
    (
        "waystation_key_seconds_total",
        "counter",
        "Time in the keys of programs",
        |s| s.key_seconds,
    ),
    (
        "waystation_cache_saved_seconds_total",
        "counter",
        "Compile time that hits on disk and in the bucket have saved",
        |s| s.cache.get("saved_micros").copied().unwrap_or_default() as f64 / 1e6,
    ),
    (
        "waystation_cache_queue",
        "gauge",
        "Entries that wait to be written",
        |s| s.cache_queue as f64,
    ),
    ("waystation_executes_total", "counter", "Executions", |s| {
        s.executes as f64
    }),
    (
        "waystation_executables",
        "gauge",
        "Executables loaded",
        |s| s.executables as f64,
    ),
    (
        "waystation_array_bytes",
        "gauge",
        "Bytes of arrays on devices",
        |s| s.array_bytes as f64,
    ),
];

/// Recordings by what came of them: label value and number.
fn by_end(recorded: &Recorded) -> [(&'static str, u64); 5] {
    [
        ("stored", recorded.stored),
        ("present", recorded.present),
        ("uncacheable", recorded.uncacheable),
        ("dropped", recorded.dropped),
        ("failed", recorded.failed),
    ]
}

/// The page. `proxy`: the proxy's own counters by name; a worker that has not answered has no status.
pub(crate) fn page(
    proxy: &Value,
    recorded: Option<Recorded>,
    workers: &[(&str, Option<WorkerStatus>)],
) -> String {
    let mut page = Page::default();
    for (name, counter, help) in [
        ("requests_total", "requests", "Requests on session streams"),
        (
            "compile_requests_total",
            "compile_requests",
            "Compile requests",
        ),
        (
            "sessions_total",
            "sessions_total",
            "Sessions since the start",
        ),
    ] {
        page.metric(&format!("waystation_{name}"), "counter", help);
        page.sample(&[], proxy[counter].as_u64().unwrap_or_default());
    }
    page.metric("waystation_sessions", "gauge", "Sessions open");
    page.sample(&[], proxy["sessions"].as_u64().unwrap_or_default());
    if let Some(recorded) = recorded {
        page.metric(
            "waystation_recorded_programs_total",
            "counter",
            "Compile requests to record, by what came of them",
        );
        for (end, count) in by_end(&recorded) {
            page.sample(&[("result", end)], count);
        }
    }
    page.metric(
        "waystation_worker_up",
        "gauge",
        "Whether the worker has answered",
    );
    for (name, status) in workers {
        page.sample(&[("worker", name)], u8::from(status.is_some()));
    }
    let answered: Vec<_> = workers
        .iter()
        .filter_map(|(name, status)| Some((*name, status.as_ref()?)))
        .collect();
    for (metric, help, label, values) in BY_LABEL {
        page.metric(metric, "counter", help);
        for (worker, status) in &answered {
            for (value, counter) in *values {
                let count = status.cache.get(*counter).copied().unwrap_or_default();
                page.sample(&[("worker", worker), (label, value)], count);
            }
        }
    }
    for (metric, help, counter) in ALONE {
        page.metric(metric, "counter", help);
        for (worker, status) in &answered {
            let count = status.cache.get(*counter).copied().unwrap_or_default();
            page.sample(&[("worker", worker)], count);
        }
    }
    for (metric, kind, help, number) in OF_WORKERS {
        page.metric(metric, kind, help);
        for (worker, status) in &answered {
            page.sample(&[("worker", worker)], number(status));
        }
    }
    for (metric, kind, help, number) in checkpoints::NUMBERS {
        page.metric(metric, kind, help);
        for (worker, status) in &answered {
            page.sample(&[("worker", worker)], number(&status.checkpoints));
        }
    }
    page.text
}

#[derive(Default)]
struct Page {
    text: String,
    metric: String,
}

impl Page {
    // Writing to a String does not fail.
    fn metric(&mut self, name: &str, kind: &str, help: &str) {
        name.clone_into(&mut self.metric);
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.text += &self.metric;
        for (at, (name, value)) in labels.iter().enumerate() {
            let before = if at == 0 { "{" } else { "," };
            let value = value
                .replace('\\', "\\\\")
                .replace('"', "\\\"")
                .replace('\n', "\\n");
            let _ = write!(self.text, "{before}{name}=\"{value}\"");
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use waystation_cache::Counts;

    use super::*;

    #[test]
    fn every_number_has_its_metric_and_label() {
        let status = WorkerStatus {
            compiles: 3,
            cache_queue: 2,
            cache: [
                ("bucket_hits", 5),
                ("bad_corrupt", 1),
                ("uncacheable_callback", 7),
                ("saved_micros", 2_500_000),
            ]
            .map(|(name, count)| (name.to_owned(), count))
            .into(),
            checkpoints: [("saves", 6), ("save_micros", 1_500_000)]
                .map(|(name, count)| (name.to_owned(), count))
                .into(),
            ..WorkerStatus::default()
        };
        let recorded = Recorded {
            stored: 4,
            ..Recorded::default()
        };
        let proxy =
            json!({"requests": 9, "compile_requests": 8, "sessions": 1, "sessions_total": 2});
        let page = page(
            &proxy,
            Some(recorded),
            &[("a \"b\"", Some(status)), ("gone", None)],
        );
        for line in [
            "waystation_requests_total 9",
            "waystation_recorded_programs_total{result=\"stored\"} 4",
            "waystation_worker_up{worker=\"a \\\"b\\\"\"} 1",
            "waystation_worker_up{worker=\"gone\"} 0",
            "waystation_cache_hits_total{worker=\"a \\\"b\\\"\",tier=\"bucket\"} 5",
            "waystation_cache_hits_total{worker=\"a \\\"b\\\"\",tier=\"disk\"} 0",
            "waystation_cache_rejected_total{worker=\"a \\\"b\\\"\",reason=\"corrupt\"} 1",
            "waystation_cache_uncacheable_total{worker=\"a \\\"b\\\"\",construct=\"python_callback\"} 7",
            "waystation_cache_saved_seconds_total{worker=\"a \\\"b\\\"\"} 2.5",
            "waystation_cache_queue{worker=\"a \\\"b\\\"\"} 2",
            "waystation_compiles_total{worker=\"a \\\"b\\\"\"} 3",
            "waystation_checkpoint_saves_total{worker=\"a \\\"b\\\"\"} 6",
            "waystation_checkpoint_save_seconds_total{worker=\"a \\\"b\\\"\"} 1.5",
            "waystation_checkpoint_reads_total{worker=\"a \\\"b\\\"\"} 0",
            "# TYPE waystation_cache_queue gauge",
        ] {
            assert!(page.lines().any(|found| found == line), "{line}\n{page}");
        }
    }

    #[test]
    fn the_cache_has_all_the_counters_that_are_shown() {
        let known: Vec<_> = Counts::default().all().map(|(name, _)| name).collect();
        let labelled = BY_LABEL.iter().flat_map(|(_, _, _, values)| *values);
        let shown = labelled
            .map(|(_, counter)| *counter)
            .chain(ALONE.iter().map(|(_, _, counter)| *counter))
            .chain(["saved_micros"]);
        for counter in shown {
            assert!(known.contains(&counter), "{counter}");
        }
    }
}
