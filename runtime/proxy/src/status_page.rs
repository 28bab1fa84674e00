//! `GET /status`: the proxy's counters, each worker's, and their sums, as JSON. `GET /metrics`: for Prometheus. `GET /healthz` and
//! `GET /readyz`: for Kubernetes.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{Json, Router, extract::State, http::header, response::IntoResponse, routing::get};
use futures::future::join_all;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;
use waystation_cache::recording::{Recorded, Recorder};
use waystation_proto::waystation::worker::{ClientUse, WorkerStatus, WorkerStatusRequest};

use crate::{
    Error,
    cluster::ClusterWatch,
    counters::{Counters, Snapshot},
    link::Link,
    metrics,
    session::{Held, Usages},
};

/// A worker that does not answer within this time is shown without counters.
const WORKER_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Clone)]
struct Page {
    counters: Arc<Counters>,
    usages: Arc<Usages>,
    cluster: ClusterWatch,
    recorder: Option<Arc<Recorder>>,
}

/// The page.
#[derive(Serialize)]
struct Status {
    build: &'static str,
    ready: bool,
    progress: String,
    devices: usize,
    /// The accelerators that the devices stand in for.
    #[serde(skip_serializing_if = "Option::is_none")]
    simulated: Option<String>,
    /// Gauge: ops that wait in the proxy for workers to have room.
    queued_ops: usize,
    #[serde(flatten)]
    proxy: Snapshot,
    /// Compile requests, where they are recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded: Option<Recorded>,
    workers: Vec<Value>,
    clients: Vec<Client>,
    /// Sums of the workers' numbers.
    totals: Map<String, Value>,
}

/// What one client's session holds. One that is over is there until the workers have freed all it held.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Client {
    client: u64,
    connected: bool,
    arrays: u64,
    executables: u64,
    array_bytes: u64,
    shards: u64,
}

pub(crate) async fn serve(
    listener: std::net::TcpListener,
    counters: Arc<Counters>,
    usages: Arc<Usages>,
    cluster: ClusterWatch,
    recorder: Option<Arc<Recorder>>,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    listener.set_nonblocking(true).map_err(Error::Listener)?;
    let listener = tokio::net::TcpListener::from_std(listener).map_err(Error::Listener)?;
    let app = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/status", get(status))
        .route("/metrics", get(metrics))
        .with_state(Page {
            counters,
            usages,
            cluster,
            recorder,
        });
    axum::serve(listener, app)
        .with_graceful_shutdown(shutdown.cancelled_owned())
        .await
        .map_err(Error::StatusPage)
}

/// Whether clients may come: at once, for those that come before the workers wait for them. JobSets start the workers when the
/// head is ready, so that must not wait for workers.
async fn ready(State(page): State<Page>) -> String {
    format!("ready; {}\n", page.cluster.borrow().1)
}

async fn status(State(page): State<Page>) -> Json<Status> {
    let (cluster, progress) = page.cluster.borrow().clone();
    let links = cluster
        .as_ref()
        .map(|c| c.links.clone())
        .unwrap_or_default();
    let answers = join_all(links.iter().map(|link| worker(link))).await;
    let used = answers.iter().flat_map(|(_, used)| used);
    let clients = clients(&page.usages.held(), used);
    let workers: Vec<Value> = answers.into_iter().map(|(shown, _)| shown).collect();
    // Every number is there, whichever workers answer.
    let nothing = counters(&WorkerStatus::default());
    let mut totals: Map<_, _> = numbers(&nothing)
        .map(|(name, zero, _)| (name.clone(), zero.clone()))
        .collect();
    for worker in &workers {
        for (name, value, number) in numbers(worker) {
            let sum = totals.get(name).and_then(Value::as_f64).unwrap_or(0.0) + number;
            // Counts stay whole numbers in JSON.
            let whole = value.is_u64() && sum < 9e15;
            totals.insert(
                name.clone(),
                if whole { json!(sum as u64) } else { json!(sum) },
            );
        }
    }
    for group in ["cache", "checkpoints"] {
        let sums = json!(group_totals(&workers, group));
        totals.insert(group.to_owned(), sums);
    }
    Json(Status {
        build: waystation_proto::BUILD_ID,
        ready: cluster.is_some() && links.iter().all(|link| !link.is_dead()),
        progress,
        devices: cluster.as_ref().map_or(0, |c| c.devices.all.len()),
        simulated: cluster
            .as_ref()
            .filter(|c| !c.devices.simulated.is_empty())
            .map(|c| format!("SIMULATED {}", c.devices.simulated)),
        queued_ops: links.iter().map(|link| link.queued()).sum(),
        proxy: page.counters.snapshot(),
        recorded: page.recorder.as_ref().map(|recorder| recorder.counts()),
        workers,
        clients,
        totals,
    })
}

/// What all workers have counted in a group of counters, by name.
fn group_totals<'a>(workers: &'a [Value], group: &str) -> BTreeMap<&'a str, u64> {
    let mut totals = BTreeMap::new();
    for worker in workers {
        for (name, number) in worker[group].as_object().into_iter().flatten() {
            let total: &mut u64 = totals.entry(name.as_str()).or_default();
            *total = total.saturating_add(number.as_u64().unwrap_or(0));
        }
    }
    totals
}

/// The page for Prometheus.
async fn metrics(State(page): State<Page>) -> impl IntoResponse {
    let (cluster, _) = page.cluster.borrow().clone();
    let links = cluster
        .as_ref()
        .map(|c| c.links.clone())
        .unwrap_or_default();
    let answers = join_all(links.iter().map(|link| ask(link))).await;
    let workers: Vec<_> = links
        .iter()
        .zip(answers)
        .map(|(link, answer)| (&*link.name, answer.ok()))
        .collect();
    let proxy = serde_json::to_value(page.counters.snapshot()).unwrap_or_default();
    let recorded = page.recorder.as_ref().map(|recorder| recorder.counts());
    let text = metrics::page(&proxy, recorded, &workers);
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text)
}

/// A worker's status, or why there is none.
async fn ask(link: &Link) -> Result<WorkerStatus, String> {
    let mut data = link.data();
    let ask = data.get_status(WorkerStatusRequest {});
    match tokio::time::timeout(WORKER_TIMEOUT, ask).await {
        Ok(Ok(status)) => Ok(status.into_inner()),
        Ok(Err(e)) => Err(e.message().to_owned()),
        Err(_) => Err("no answer in time".to_owned()),
    }
}

/// A worker's numbers, and what clients hold there.
async fn worker(link: &Link) -> (Value, Vec<ClientUse>) {
    match ask(link).await {
        Ok(status) => (show(link, &status), status.clients),
        Err(error) => (json!({"name": &*link.name, "error": error}), Vec::new()),
    }
}

/// The sessions with what they hold here and at the workers.
fn clients<'a>(
    held: &BTreeMap<u64, Held>,
    used: impl IntoIterator<Item = &'a ClientUse>,
) -> Vec<Client> {
    let mut all: BTreeMap<u64, Client> = held
        .iter()
        .map(|(&client, held)| {
            let client = Client {
                client,
                connected: true,
                arrays: held.arrays,
                executables: held.executables,
                array_bytes: 0,
                shards: 0,
            };
            (client.client, client)
        })
        .collect();
    for used in used {
        let client = all.entry(used.client).or_insert(Client {
            client: used.client,
            connected: false,
            arrays: 0,
            executables: 0,
            array_bytes: 0,
            shards: 0,
        });
        client.array_bytes += used.array_bytes;
        client.shards += used.shards;
    }
    all.into_values().collect()
}

/// A worker's numbers and where it is.
fn show(link: &Link, status: &WorkerStatus) -> Value {
    let mut shown = counters(status);
    for (name, text) in [
        ("name", &*link.name),
        ("address", &*link.address),
        ("plugin_path", status.plugin_path.as_str()),
        ("platform", status.platform.as_str()),
        ("cache_location", status.cache_location.as_str()),
    ] {
        shown[name] = json!(text);
    }
    shown["cache"] = json!(status.cache);
    shown["checkpoints"] = json!(status.checkpoints);
    // By device: nothing to sum up.
    shown["device_memory"] = json!({
        "limit_bytes": status.device_memory_limit_bytes,
        "used_bytes": status.device_memory_bytes,
    });
    // Of a folder that workers may share.
    shown["disk_cache"] = json!({
        "bytes": status.disk_bytes,
        "has_index": status.disk_index,
    });
    shown
}

/// What the totals sum up.
fn counters(s: &WorkerStatus) -> Value {
    json!({
        "compiles": s.compiles,
        "memory_hits": s.memory_hits,
        "bucket_hits": s.bucket_hits,
        "bucket_misses": s.bucket_misses,
        "bucket_writes": s.bucket_writes,
        "bucket_bad_entries": s.bucket_bad_entries,
        "compile_seconds": s.compile_seconds,
        "load_seconds": s.load_seconds,
        "programs": s.programs,
        "program_seconds": s.program_seconds,
        "key_seconds": s.key_seconds,
        "array_bytes": s.array_bytes,
        "shards": s.shards,
        "executes": s.executes,
        "put_bytes": s.put_bytes,
        "fetched_bytes": s.fetched_bytes,
        "pulled_bytes": s.pulled_bytes,
        "saved_bytes": s.saved_bytes,
        "restored_bytes": s.restored_bytes,
        "executables": s.executables,
        "ffi_calls": s.ffi_calls,
        "watches": s.watches,
        "watch_seconds": s.watch_seconds,
        "reads": s.reads,
        "read_seconds": s.read_seconds,
        "compiler_deaths": s.compiler_deaths,
        "compiling_in_child": s.compiling_in_child,
        "disk_hits": s.disk_hits,
        "disk_misses": s.disk_misses,
        "disk_writes": s.disk_writes,
        "disk_evictions": s.disk_evictions,
        "disk_bad_entries": s.disk_bad_entries,
        "disk_errors": s.disk_errors,
        "segment_bytes": s.segment_bytes,
        "local_bytes": s.local_bytes,
        "cache_queue": s.cache_queue,
    })
}

/// The fields that are numbers.
fn numbers(worker: &Value) -> impl Iterator<Item = (&String, &Value, f64)> {
    let fields = worker.as_object().into_iter().flatten();
    fields.filter_map(|(name, value)| Some((name, value, value.as_f64()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_caches_count_is_summed_up_by_name() {
        let workers = [
            json!({"name": "a", "cache": {"compiles": 2, "claims": 1}}),
            json!({"name": "b", "error": "no answer in time"}),
            json!({"name": "c", "cache": {"compiles": 3}}),
        ];
        let expected = BTreeMap::from([("compiles", 5), ("claims", 1)]);
        assert_eq!(group_totals(&workers, "cache"), expected);
    }

    #[test]
    fn a_client_has_what_the_proxy_and_all_workers_hold_for_it() {
        let held = |arrays, executables| Held {
            arrays,
            executables,
        };
        let used = |client, array_bytes, shards| ClientUse {
            client,
            array_bytes,
            shards,
        };
        let here = BTreeMap::from([(3, held(2, 1)), (5, held(0, 0))]);
        let there = [used(3, 10, 1), used(3, 20, 2), used(4, 7, 1)];
        let shown: Vec<_> = clients(&here, &there)
            .into_iter()
            .map(|c| {
                (
                    c.client,
                    c.connected,
                    c.arrays,
                    c.executables,
                    c.array_bytes,
                    c.shards,
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                (3, true, 2, 1, 30, 3),
                (4, false, 0, 0, 7, 1),
                (5, true, 0, 0, 0, 0),
            ]
        );
    }
}
