//! What a worker must hear from the resource manager before it makes any device.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use waystation_proto::waystation::scheduler::{IntroduceReply, IntroduceRequest, SchedulerStatus};
use waystation_scheduler::client;

use crate::{
    error::{Failure, chain},
    lifetime,
};

/// Between two tries.
const PAUSE: Duration = Duration::from_millis(500);

/// Asks the resource manager at `manager` until it answers; none when the process was told to end meanwhile. Must not be
/// called within a runtime.
///
/// # Errors
/// When there is no runtime to be had.
pub(crate) fn status(
    manager: &str,
    parent_stdin: bool,
) -> Result<Option<SchedulerStatus>, Failure> {
    let mut status = None;
    lifetime::run(parent_stdin, async |stop| {
        let ask = async || client::status(manager).await.map_err(|error| chain(&error));
        status = until_answered(&stop, ask).await;
        Ok(())
    })?;
    Ok(status)
}

/// As [`status`], with a worker's introduction; asks again while `lacks` something, which it names.
///
/// # Errors
/// As [`status`].
pub(crate) fn introduce(
    manager: &str,
    request: IntroduceRequest,
    parent_stdin: bool,
    lacks: impl Fn(&IntroduceReply) -> Option<String>,
) -> Result<Option<IntroduceReply>, Failure> {
    let mut answer = None;
    lifetime::run(parent_stdin, async |stop| {
        let ask = async || {
            let reply = client::introduce(manager, request.clone()).await;
            let reply = reply.map_err(|error| chain(&error))?;
            match lacks(&reply) {
                None => Ok(reply),
                Some(what) => Err(format!("not all hosts are known: waiting for {what}")),
            }
        };
        answer = until_answered(&stop, ask).await;
        Ok(())
    })?;
    Ok(answer)
}

async fn until_answered<T>(
    stop: &CancellationToken,
    ask: impl AsyncFn() -> Result<T, String>,
) -> Option<T> {
    let mut said = String::new();
    loop {
        match ask().await {
            Ok(answer) => return Some(answer),
            Err(error) if error != said => {
                tracing::warn!(error, "what the slices are is not known yet, asking again");
                said = error;
            }
            Err(_) => {}
        }
        tokio::select! {
            () = stop.cancelled() => return None,
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}
