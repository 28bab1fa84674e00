//! What a client hears while it waits for its workers.
//!
//! jaxlib waits for the answer to its first request, however long that takes, and shows nothing. An attempt that fails it makes
//! again, but only until its own time for connecting is over, which the server does not know: so none is failed here.
//! A reply that answers no request it writes to its log as an error, with all that is in it, and goes on; that one is seen
//! without any setting. So it is what is sent.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use waystation_proto::xla::ifrt::proxy::{IfrtResponse, ResponseMetadata};

use crate::{cluster::ClusterWatch, status};

/// How long a client waits before it is told anything: workers that are just starting are no news.
const PATIENCE: Duration = Duration::from_secs(3);
/// Between two notices at least.
const PAUSE: Duration = Duration::from_secs(5);
/// When nothing changes, as a sign of life.
const REMINDER: Duration = Duration::from_secs(60);

/// No request has this number: jaxlib counts its own from the other end.
const NO_REQUEST: u64 = u64::MAX;

/// One client that waits.
pub(super) struct Waiting {
    cluster: ClusterWatch,
    /// Not before it is the client told of a change.
    earliest: Instant,
    told: String,
}

/// The proxy ends before there are any workers.
pub(super) struct Never;

impl Waiting {
    pub(super) fn new(cluster: ClusterWatch) -> Self {
        Self {
            cluster,
            earliest: Instant::now() + PATIENCE,
            told: String::new(),
        }
    }

    /// What to tell the client next; none when it need not wait any more.
    pub(super) async fn next(&mut self) -> Result<Option<IfrtResponse>, Never> {
        loop {
            let progress = {
                let state = self.cluster.borrow_and_update();
                if state.0.is_some() {
                    return Ok(None);
                }
                state.1.clone()
            };
            let at = match progress == self.told {
                true => self.earliest + (REMINDER - PAUSE),
                false => self.earliest,
            };
            tokio::select! {
                biased;
                changed = self.cluster.changed() => changed.map_err(|_| Never)?,
                () = sleep_until(at) => {
                    self.earliest = Instant::now() + PAUSE;
                    let notice = notice(&progress);
                    self.told = progress;
                    return Ok(Some(notice));
                }
            }
        }
    }
}

fn notice(progress: &str) -> IfrtResponse {
    let text = format!("no error, the client goes on waiting for its workers: {progress}");
    IfrtResponse {
        response_metadata: Some(ResponseMetadata {
            op_id: NO_REQUEST,
            status: Some(status::unavailable(text)),
            ..ResponseMetadata::default()
        }),
        response: None,
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;

    use super::*;

    fn text(notice: Option<IfrtResponse>) -> String {
        let metadata = notice.expect("a notice").response_metadata;
        metadata.and_then(|m| m.status).expect("a status").message
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_is_told_of_changes_now_and_then() {
        let (sender, cluster) = watch::channel((None, "0 of 2".to_owned()));
        let start = Instant::now();
        let mut waiting = Waiting::new(cluster);
        let mut next = async || {
            let notice = waiting.next().await.unwrap_or_else(|Never| panic!());
            (text(notice), start.elapsed().as_secs())
        };
        let said = |progress: &str| {
            format!("no error, the client goes on waiting for its workers: {progress}")
        };
        assert_eq!(next().await, (said("0 of 2"), 3));
        for progress in ["1 of 2", "0 of 2", "1 of 2"] {
            sender.send_modify(|state| state.1 = progress.to_owned());
        }
        assert_eq!(next().await, (said("1 of 2"), 8));
        assert_eq!(next().await, (said("1 of 2"), 68));
        drop(sender);
        assert!(waiting.next().await.is_err());
    }
}
