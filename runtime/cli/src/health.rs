//! `--status_port` of resource manager and worker: what Kubernetes asks them. The proxy has a page of its own.
//!
//! | path | answer |
//! | --- | --- |
//! | `/healthz` | 200 while the process turns |
//! | `/readyz` | 200 once the part answers at its own service, before that 503 with the reason |
//! | `/status` | resource manager: who is there, as JSON |

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    time::Duration,
};

use axum::{Json, Router, extract::State, http::StatusCode, response::IntoResponse, routing::get};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use waystation_proto::waystation::{
    scheduler::{
        AllottedWorker, SchedulerStatus,
        scheduler_status::{Proxy, Refused},
    },
    worker::{WorkerStatusRequest, worker_client::WorkerClient},
};
use waystation_scheduler::client;

use crate::{args::RoleArgs, error::Failure, error::chain, listen};

/// A part that does not answer itself within this time is not ready.
const DEADLINE: Duration = Duration::from_secs(2);

/// Whose page it is; each asks the service at its own address.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    /// `resource-manager`.
    ResourceManager(SocketAddr),
    /// `worker`.
    Worker(SocketAddr),
}

/// Binds the page's port, where one is asked for, and adds its address to those of the ready file.
///
/// # Errors
/// [`Failure::usage`] when the port cannot be had.
pub(crate) fn bind(
    role: &RoleArgs,
    addresses: &mut Vec<SocketAddr>,
) -> Result<Option<TcpListener>, Failure> {
    let Some(port) = role.status_port else {
        return Ok(None);
    };
    let listener = listen::bind(role.bind_address, port, "--status_port")?;
    addresses.push(listen::address(&listener)?);
    Ok(Some(listener))
}

/// Serves the page, beside the part itself, until `stop`.
///
/// # Errors
/// When the listener cannot be used.
pub(crate) fn start(
    listener: Option<TcpListener>,
    part: Part,
    stop: CancellationToken,
) -> Result<(), Failure> {
    let Some(listener) = listener else {
        return Ok(());
    };
    let unusable = |error| Failure::because("the status page's listener cannot be used", &error);
    listener.set_nonblocking(true).map_err(unusable)?;
    let listener = tokio::net::TcpListener::from_std(listener).map_err(unusable)?;
    let mut app = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready));
    if matches!(part, Part::ResourceManager(_)) {
        app = app.route("/status", get(status));
    }
    let app = app.with_state(part);
    tokio::spawn(async move {
        let served = axum::serve(listener, app).with_graceful_shutdown(stop.cancelled_owned());
        if let Err(error) = served.await {
            tracing::warn!(%error, "the status page has ended");
        }
    });
    Ok(())
}

async fn ready(State(part): State<Part>) -> impl IntoResponse {
    let asked = async {
        match part {
            Part::ResourceManager(address) => client::status(&own(address).to_string())
                .await
                .map(|_| ())
                .map_err(|error| chain(&error)),
            Part::Worker(address) => answers(address).await,
        }
    };
    match tokio::time::timeout(DEADLINE, asked).await {
        Ok(Ok(())) => (StatusCode::OK, "ready\n".to_owned()),
        Ok(Err(reason)) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
        Err(_) => (
            StatusCode::SERVICE_UNAVAILABLE,
            "the service does not answer yet\n".to_owned(),
        ),
    }
}

async fn answers(address: SocketAddr) -> Result<(), String> {
    let url = format!("http://{}", own(address));
    let client = WorkerClient::connect(url).await;
    let mut client = client.map_err(|error| chain(&error))?;
    let answer = client.get_status(WorkerStatusRequest {}).await;
    answer.map(|_| ()).map_err(|error| chain(&error))
}

async fn status(State(part): State<Part>) -> impl IntoResponse {
    let (Part::ResourceManager(address) | Part::Worker(address)) = part;
    match client::status(&own(address).to_string()).await {
        Ok(status) => (StatusCode::OK, Json(show(&status))),
        Err(error) => (
            StatusCode::SERVICE_UNAVAILABLE,
            Json(json!({"error": chain(&error)})),
        ),
    }
}

fn show(status: &SchedulerStatus) -> Value {
    json!({
        "build": waystation_proto::BUILD_ID,
        "progress": status.progress,
        "expected_workers": status.expected_workers,
        "instance_type": status.instance_type,
        "workers": status.workers.iter().map(worker).collect::<Vec<_>>(),
        "proxies": status.proxies.iter().map(proxy).collect::<Vec<_>>(),
        "refused": status.refused.iter().map(refused).collect::<Vec<_>>(),
    })
}

fn proxy(proxy: &Proxy) -> Value {
    json!({"name": proxy.name, "slices": proxy.slices, "progress": proxy.progress})
}

fn refused(refused: &Refused) -> Value {
    json!({"slice": refused.slice, "task": refused.task, "reason": refused.reason})
}

fn worker(worker: &AllottedWorker) -> Value {
    let inventory = worker.inventory.as_ref();
    let mut shown = json!({
        "address": worker.address,
        "slice": worker.slice,
        "task": worker.task,
        "first_device_id": worker.first_device_id,
        "devices": inventory.map_or(0, |inventory| inventory.devices.len()),
    });
    if let Some(simulated) = inventory.map(|inventory| &inventory.simulated)
        && !simulated.is_empty()
    {
        shown["simulated"] = json!(format!("SIMULATED {simulated}"));
    }
    shown
}

/// The address under which this process reaches its own listener.
fn own(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_on_all_addresses_is_asked_on_the_loopback() {
        for (bound, asked) in [
            ("0.0.0.0:7", "127.0.0.1:7"),
            ("[::]:7", "[::1]:7"),
            ("10.0.0.3:7", "10.0.0.3:7"),
        ] {
            assert_eq!(own(bound.parse().unwrap()).to_string(), asked);
        }
    }
}
