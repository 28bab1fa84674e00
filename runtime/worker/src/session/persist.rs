//! SaveArrays and RestoreArrays: shards straight between devices and a bucket.
//!
//! The session takes hold of the shards in stream order, and a task moves them under the one budget of host bytes that the
//! checkpoint engine keeps. It ends with the session, or when the proxy says that nobody waits for it.

mod restore;
mod save;

use std::{collections::HashMap, rc::Rc, time::Duration};

use tokio_util::sync::CancellationToken;
use waystation_proto::tensorflow::{StatusProto, error::Code};

use super::Session;
use crate::{
    status,
    table::{Shard, Slot},
};

/// Arrays or parts of arrays that one save or restore has under way at the same time, other bounds apart: thousands of
/// small ones shall take a few round trips.
const IN_FLIGHT: usize = 4096;

/// Saves and restores under way.
#[derive(Default)]
pub(super) struct Persists {
    /// The shards that are not read yet, by save and piece.
    held: HashMap<(u64, usize), Held>,
    /// The request of each save, and how many of its shards are not read yet.
    unread: HashMap<u64, (u64, usize)>,
    /// By request.
    under_way: HashMap<u64, CancellationToken>,
}

/// A shard that a save has not read yet.
struct Held {
    slot: Rc<Slot>,
    shard: Rc<Shard>,
    /// Reads that have not ended.
    left: usize,
}

impl Drop for Persists {
    fn drop(&mut self) {
        for token in self.under_way.values() {
            token.cancel();
        }
    }
}

impl Session {
    /// Nobody waits any more for a save or restore.
    pub(super) fn cancel(&mut self, request: u64) {
        if let Some(token) = self.persists.under_way.get(&request) {
            token.cancel();
        }
    }

    /// Notes a request that can be cancelled until it is answered.
    fn under_way(&mut self, request: u64) -> CancellationToken {
        let token = CancellationToken::new();
        self.persists.under_way.insert(request, token.clone());
        token
    }
}

fn timeout(timeout_ms: u64) -> Option<Duration> {
    (timeout_ms != 0).then(|| Duration::from_millis(timeout_ms))
}

/// Runs `work` for at most so long (0 sets no limit), or until nobody waits for it.
async fn limited(
    timeout_ms: u64,
    cancelled: &CancellationToken,
    what: &str,
    work: impl Future<Output = Result<(), StatusProto>>,
) -> Result<(), StatusProto> {
    let work = async {
        tokio::select! {
            () = cancelled.cancelled() => Err(session_over()),
            result = work => result,
        }
    };
    let Some(after) = timeout(timeout_ms) else {
        return work.await;
    };
    match tokio::time::timeout(after, work).await {
        Ok(result) => result,
        Err(_) => Err(status::of(
            Code::Unavailable,
            format!(
                "{what} took longer than the {} s allowed",
                after.as_secs_f32()
            ),
        )),
    }
}

fn session_over() -> StatusProto {
    status::of(
        Code::Cancelled,
        "the session has ended, or nobody waits for this",
    )
}
