//! `GET /status`: the proxy's counters, each worker's, and their sums, as JSON.

use std::{sync::Arc, time::Duration};

use axum::{Json, Router, extract::State, routing::get};
use futures::future::join_all;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;
use waystation_proto::waystation::worker::{WorkerStatus, WorkerStatusRequest};

use crate::{
    Error,
    cluster::ClusterWatch,
    counters::{Counters, Snapshot},
    link::Link,
};

/// A worker that does not answer within this time is shown without counters.
const WORKER_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Clone)]
struct Page {
    counters: Arc<Counters>,
    cluster: ClusterWatch,
}

/// The page.
#[derive(Serialize)]
struct Status {
    build: &'static str,
    ready: bool,
    progress: String,
    devices: usize,
    #[serde(flatten)]
    proxy: Snapshot,
    workers: Vec<Value>,
    /// Sums of the workers' numbers.
    totals: Map<String, Value>,
}

pub(crate) async fn serve(
    listener: std::net::TcpListener,
    counters: Arc<Counters>,
    cluster: ClusterWatch,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    listener.set_nonblocking(true).map_err(Error::Listener)?;
    let listener = tokio::net::TcpListener::from_std(listener).map_err(Error::Listener)?;
    let app = Router::new()
        .route("/status", get(status))
        .with_state(Page { counters, cluster });
    axum::serve(listener, app)
        .with_graceful_shutdown(shutdown.cancelled_owned())
        .await
        .map_err(Error::StatusPage)
}

async fn status(State(page): State<Page>) -> Json<Status> {
    let (cluster, progress) = page.cluster.borrow().clone();
    let links = cluster
        .as_ref()
        .map(|c| c.links.clone())
        .unwrap_or_default();
    let workers = join_all(links.iter().map(|link| worker(link))).await;
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
    Json(Status {
        build: waystation_proto::BUILD_ID,
        ready: cluster.is_some() && links.iter().all(|link| !link.is_dead()),
        progress,
        devices: cluster.as_ref().map_or(0, |c| c.devices.len()),
        proxy: page.counters.snapshot(),
        workers,
        totals,
    })
}

async fn worker(link: &Link) -> Value {
    let mut data = link.data();
    let ask = data.get_status(WorkerStatusRequest {});
    match tokio::time::timeout(WORKER_TIMEOUT, ask).await {
        Ok(Ok(status)) => show(link, &status.into_inner()),
        Ok(Err(e)) => json!({"name": &*link.name, "error": e.message()}),
        Err(_) => json!({"name": &*link.name, "error": "no answer in time"}),
    }
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
    })
}

/// The fields that are numbers.
fn numbers(worker: &Value) -> impl Iterator<Item = (&String, &Value, f64)> {
    let fields = worker.as_object().into_iter().flatten();
    fields.filter_map(|(name, value)| Some((name, value, value.as_f64()?)))
}
