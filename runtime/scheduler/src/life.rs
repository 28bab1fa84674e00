//! One worker's registration: Hello, its order, beats, and its death.

use std::{sync::Arc, time::Duration};

use futures::{Stream, StreamExt as _};
use tokio::{sync::mpsc, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use tracing::{info, warn};
use waystation_proto::waystation::scheduler::{
    Hello, WorkerOrder, WorkerReport, worker_report::Report,
};

use crate::state::{Seated, State};

/// What is sent to the worker.
pub(crate) type Orders = mpsc::Sender<Result<WorkerOrder, Status>>;

/// Watches one worker from its first report to its death. Its stream is over when it ends or fails, when the worker stays
/// silent for `lease`, or when the resource manager stops; the last two it is told, with a status. Unless it has said goodbye it
/// may be back: it counts as there for another `lease`, as it does for a proxy that has a connection to it.
pub(crate) async fn watch<S>(
    state: Arc<State>,
    mut reports: S,
    orders: Orders,
    lease: Duration,
    stop: CancellationToken,
) where
    S: Stream<Item = Result<WorkerReport, Status>> + Unpin,
{
    let ended = async {
        match seat(&state, &mut reports, lease).await {
            Err(refused) => (refused, None),
            Ok((seated, name)) => {
                let death = serve_seated(&state, &seated, &mut reports, &orders, lease).await;
                (death, Some((seated, name)))
            }
        }
    };
    let (death, seated) = tokio::select! {
        ended = ended => ended,
        () = stop.cancelled() => (Status::unavailable("the resource manager is shutting down"), None),
    };
    let reason = death.message().to_owned();
    // No other death has this code.
    let leaving = death.code() == Code::Aborted;
    let seated = match seated {
        Some((seated, worker)) if leaving => {
            seated.leave(&reason, true);
            warn!(%worker, reason, progress = state.progress(), "worker gone");
            None
        }
        missed => missed.filter(|(seated, _)| seated.miss(&reason)),
    };
    // A worker that is gone does not hear it. There is room for an order and a farewell: this never waits.
    let _ = orders.try_send(Err(death));
    drop((orders, reports));
    let Some((seated, worker)) = seated else {
        return;
    };
    warn!(%worker, reason, progress = state.progress(), "worker not heard of");
    tokio::select! {
        () = stop.cancelled() => {}
        () = tokio::time::sleep(lease) => if seated.leave(&reason, false) {
            warn!(%worker, reason, progress = state.progress(), "worker gone");
        }
    }
}

/// Waits for a worker's Hello and seats it; names it.
async fn seat<S>(
    state: &Arc<State>,
    reports: &mut S,
    lease: Duration,
) -> Result<(Seated, String), Status>
where
    S: Stream<Item = Result<WorkerReport, Status>> + Unpin,
{
    let hello = first_report(reports, lease).await?;
    let name = format!(
        "slice {} task {} at {}",
        hello.slice, hello.task, hello.address
    );
    if hello.build_id != waystation_proto::BUILD_ID {
        warn!(worker = %hello.build_id, ours = waystation_proto::BUILD_ID, "worker of another build with the same link version");
    }
    let seated = state.join(hello).map_err(|refusal| {
        warn!(worker = %name, %refusal, "worker refused");
        Status::failed_precondition(refusal.to_string())
    })?;
    info!(worker = %name, progress = state.progress(), "worker joined");
    Ok((seated, name))
}

async fn first_report<S>(reports: &mut S, lease: Duration) -> Result<Hello, Status>
where
    S: Stream<Item = Result<WorkerReport, Status>> + Unpin,
{
    match timeout(lease, reports.next()).await {
        Err(_) => Err(Status::invalid_argument(format!(
            "no Hello came within {lease:?}"
        ))),
        Ok(None) => Err(Status::invalid_argument(
            "the stream ended before its Hello",
        )),
        Ok(Some(Err(status))) => Err(status),
        Ok(Some(Ok(WorkerReport {
            report: Some(Report::Hello(hello)),
        }))) => Ok(hello),
        Ok(Some(Ok(_))) => Err(Status::invalid_argument(
            "the first report of a worker must be its Hello",
        )),
    }
}

/// Sends the order when the ids are known and reads beats; returns the reason of the worker's death.
async fn serve_seated<S>(
    state: &State,
    seated: &Seated,
    reports: &mut S,
    orders: &Orders,
    lease: Duration,
) -> Status
where
    S: Stream<Item = Result<WorkerReport, Status>> + Unpin,
{
    let order = async {
        let mut changes = state.changes();
        loop {
            if let Some(first_device_id) = seated.first_device_id() {
                return first_device_id;
            }
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let mut order = std::pin::pin!(order);
    let mut ordered = false;
    let mut deadline = tokio::time::Instant::now() + lease;
    loop {
        tokio::select! {
            // What has come is read before a deadline is looked at: this process may have been paused.
            biased;
            first_device_id = &mut order, if !ordered => {
                ordered = true;
                let lease_ms = u32::try_from(lease.as_millis()).unwrap_or(u32::MAX);
                let order = WorkerOrder { first_device_id, lease_ms };
                if orders.send(Ok(order)).await.is_err() {
                    return Status::cancelled("its stream to the resource manager ended");
                }
            }
            report = reports.next() => match report {
                None => return Status::cancelled("its stream to the resource manager ended"),
                Some(Err(status)) => return status,
                Some(Ok(WorkerReport { report: Some(Report::Hello(_)) })) => {
                    return Status::invalid_argument("a worker says Hello once a stream");
                }
                Some(Ok(WorkerReport { report: Some(Report::Leaving(_)) })) => {
                    return Status::aborted("it has been told to end");
                }
                Some(Ok(WorkerReport { report: Some(Report::Beat(beat)) })) => {
                    seated.serves(beat.lease_epoch);
                    deadline = tokio::time::Instant::now() + lease;
                }
                // A report of a newer build.
                Some(Ok(WorkerReport { report: None })) => deadline = tokio::time::Instant::now() + lease,
            },
            () = tokio::time::sleep_until(deadline) => {
                return Status::unavailable(format!("no beat from it for {lease:?}"));
            }
        }
    }
}

#[cfg(test)]
mod tests;
