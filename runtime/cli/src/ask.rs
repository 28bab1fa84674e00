//! What a worker must hear from the resource manager before it makes any device.

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;
use waystation_proto::waystation::scheduler::{IntroduceReply, IntroduceRequest, SchedulerStatus};
use waystation_scheduler::client;

use crate::{
    error::{Failure, chain},
    lifetime,
};

/// Between two tries.
const PAUSE: Duration = Duration::from_millis(500);
/// How often the same reason is said again.
const REMINDER: Duration = Duration::from_secs(60);

/// Asks the resource manager at `manager` until it answers; none when the process was told to end meanwhile. Must not be
/// called within a runtime.
///
/// # Errors
/// When the resource manager refuses for good, or when there is no runtime to be had.
pub(crate) fn status(
    manager: &str,
    parent_stdin: bool,
) -> Result<Option<SchedulerStatus>, Failure> {
    let mut status = None;
    lifetime::run(parent_stdin, async |stop| {
        let ask = async || client::status(manager).await.map_err(Unanswered::from);
        status = until_answered(&stop, ask).await?;
        Ok(())
    })?;
    Ok(status)
}

/// As [`status`], with a worker's introduction; asks again while `lacks` something, which it names. The resource manager hears that,
/// and tells who waits for slices.
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
        let waits = AtomicBool::new(false);
        let ask = async || {
            let request = IntroduceRequest {
                waits: waits.load(Relaxed),
                ..request.clone()
            };
            let reply = client::introduce(manager, request).await?;
            match lacks(&reply) {
                None => Ok(reply),
                Some(what) => {
                    waits.store(true, Relaxed);
                    Err(Unanswered::Yet(format!(
                        "not all hosts are known: waiting for {what}"
                    )))
                }
            }
        };
        answer = until_answered(&stop, ask).await?;
        Ok(())
    })?;
    Ok(answer)
}

/// Why there is no answer.
enum Unanswered {
    /// There may be one later.
    Yet(String),
    /// Asked again, the resource manager would say the same.
    Refused(String),
}

impl From<client::Error> for Unanswered {
    fn from(error: client::Error) -> Unanswered {
        let text = chain(&error);
        match error.is_final() {
            true => Unanswered::Refused(text),
            false => Unanswered::Yet(text),
        }
    }
}

async fn until_answered<T>(
    stop: &CancellationToken,
    ask: impl AsyncFn() -> Result<T, Unanswered>,
) -> Result<Option<T>, Failure> {
    let start = Instant::now();
    let mut said = (String::new(), start);
    loop {
        match ask().await {
            Ok(answer) => return Ok(Some(answer)),
            Err(Unanswered::Refused(error)) => return Err(Failure::usage(error)),
            Err(Unanswered::Yet(error)) if error != said.0 || said.1.elapsed() > REMINDER => {
                let since = start.elapsed();
                tracing::warn!(
                    error,
                    ?since,
                    "what the slices are is not known yet, asking again"
                );
                said = (error, Instant::now());
            }
            Err(Unanswered::Yet(_)) => {}
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(None),
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_refusal_that_stays_ends_the_worker() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let manager = listener.local_addr().unwrap().to_string();
        let config = waystation_scheduler::Config {
            instance_type: Some("tpuv6e:2x2".parse().unwrap()),
            ..waystation_scheduler::Config::new(listener)
        };
        let stop = CancellationToken::new();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let served = runtime.spawn(waystation_scheduler::serve(config, stop.clone()));
        let asks = |request| introduce(&manager, request, false, |_| None);
        let request = IntroduceRequest {
            link_version: waystation_proto::LINK_VERSION,
            slice: 9,
            ..IntroduceRequest::default()
        };
        let refused = asks(request.clone()).expect_err("there is no such slice");
        assert_eq!(refused.status, crate::error::USAGE);
        assert!(refused.message.contains("no slice 9"), "{refused}");
        let other = IntroduceRequest {
            link_version: 0,
            ..request
        };
        let refused = asks(other).expect_err("another link version");
        assert!(refused.message.contains("link version 0"), "{refused}");
        stop.cancel();
        runtime.block_on(served).unwrap().unwrap();
    }
}
