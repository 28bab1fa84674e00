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

/// Watches one worker from its first report to its death. The worker is dead when its stream ends or fails, when it
/// stays silent for `lease`, or when the resource manager stops; the last two it is told, with a status.
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
        let hello = first_report(&mut reports, lease).await?;
        let place = (hello.slice, hello.task);
        let address = hello.address.clone();
        if hello.build_id != waystation_proto::BUILD_ID {
            warn!(worker = %hello.build_id, ours = waystation_proto::BUILD_ID, "worker of another build with the same link version");
        }
        let seated = state.join(hello).map_err(|refusal| {
            warn!(slice = place.0, task = place.1, %address, %refusal, "worker refused");
            Status::failed_precondition(refusal.to_string())
        })?;
        info!(slice = place.0, task = place.1, %address, progress = state.progress(), "worker joined");
        let death = serve_seated(&state, &seated, &mut reports, &orders, lease).await;
        // No other death has this code.
        let leaving = death.code() == Code::Aborted;
        seated.leave(death.message(), leaving);
        warn!(slice = place.0, task = place.1, %address, reason = death.message(), progress = state.progress(), "worker gone");
        Err::<(), Status>(death)
    };
    let status = tokio::select! {
        ended = ended => ended.err(),
        () = stop.cancelled() => Some(Status::unavailable("the resource manager is shutting down")),
    };
    if let Some(status) = status {
        // A worker that is gone does not hear it. There is room for an order and a farewell: this never waits.
        let _ = orders.try_send(Err(status));
    }
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
            first_device_id = &mut order, if !ordered => {
                ordered = true;
                if orders.send(Ok(WorkerOrder { first_device_id })).await.is_err() {
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
