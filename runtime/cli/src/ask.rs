//! What a worker must hear from the resource manager before it makes any device.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use waystation_proto::waystation::scheduler::SchedulerStatus;
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
        status = until_answered(manager, &stop).await;
        Ok(())
    })?;
    Ok(status)
}

async fn until_answered(manager: &str, stop: &CancellationToken) -> Option<SchedulerStatus> {
    let mut said = String::new();
    loop {
        match client::status(manager).await {
            Ok(status) => return Some(status),
            Err(error) => {
                let error = chain(&error);
                if error != said {
                    tracing::warn!(error, "what the slices are is not known yet, asking again");
                    said = error;
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => return None,
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}
