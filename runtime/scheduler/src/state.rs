//! Cluster and holds behind one lock, with a signal at each change.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::sync::watch;
use waystation_proto::waystation::scheduler::{Allotment, Hello, SchedulerStatus};

use crate::{
    cluster::{Cluster, Member, Refusal},
    holds::{Claim, Hold, Holds},
};

/// Shared by all handlers. The lock is held for short, pure steps only, never over an await.
#[derive(Debug)]
pub(crate) struct State {
    inner: Mutex<Inner>,
    changes: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    cluster: Cluster,
    holds: Holds,
}

impl State {
    pub(crate) fn new(cluster: Cluster) -> Arc<State> {
        Arc::new(State {
            inner: Mutex::new(Inner {
                cluster,
                holds: Holds::default(),
            }),
            changes: watch::Sender::new(0),
        })
    }

    /// Changes of membership or holds. Several may be seen as one.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Seats a worker until the returned guard drops.
    pub(crate) fn join(self: &Arc<Self>, hello: Hello) -> Result<Seated, Refusal> {
        let member = self.lock().cluster.join(hello)?;
        self.changed();
        Ok(Seated {
            state: Arc::clone(self),
            member,
        })
    }

    /// Queues a proxy until the returned guard drops. `resume`: the epoch that it held before, or 0.
    pub(crate) fn claim(self: &Arc<Self>, proxy: String, resume: u64) -> Claimed {
        let claim = self.lock().holds.claim(proxy, resume, now_ms());
        self.changed();
        Claimed {
            state: Arc::clone(self),
            claim,
        }
    }

    pub(crate) fn status(&self) -> SchedulerStatus {
        let inner = self.lock();
        SchedulerStatus {
            expected_workers: inner.cluster.expected().unwrap_or(0),
            workers: inner.cluster.workers(),
            progress: inner.cluster.progress(),
            ..SchedulerStatus::default()
        }
    }

    /// "1 of 2 workers".
    pub(crate) fn progress(&self) -> String {
        self.lock().cluster.progress()
    }

    /// Name of the proxy that has the workers.
    pub(crate) fn holder(&self) -> Option<String> {
        self.lock().holds.holder().map(str::to_owned)
    }

    fn changed(&self) {
        self.changes
            .send_modify(|version| *version = version.wrapping_add(1));
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic while it was held would be a bug of ours; every step leaves the state usable, so the others go on.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A worker's seat; dropping it is the worker's death.
#[derive(Debug)]
pub(crate) struct Seated {
    state: Arc<State>,
    member: Member,
}

impl Seated {
    /// The worker's first device id, once it is known.
    pub(crate) fn first_device_id(&self) -> Option<i32> {
        self.state.lock().cluster.first_device_id(self.member)
    }
}

impl Drop for Seated {
    fn drop(&mut self) {
        self.state.lock().cluster.leave(self.member);
        self.state.changed();
    }
}

/// A proxy's claim; dropping it gives the workers back.
#[derive(Debug)]
pub(crate) struct Claimed {
    state: Arc<State>,
    claim: Claim,
}

impl Claimed {
    /// What the proxy may use now; none when a newer stream of it took this one's place.
    pub(crate) fn allotment(&self) -> Option<Allotment> {
        let inner = self.state.lock();
        Some(match inner.holds.get(self.claim)? {
            Hold::Held { epoch } => Allotment {
                complete: inner.cluster.is_complete(),
                progress: inner.cluster.progress(),
                epoch,
                workers: inner.cluster.workers(),
            },
            Hold::Waiting { holder, ahead } => Allotment {
                progress: match ahead {
                    0 => format!("waiting for the workers: proxy {holder} holds them"),
                    _ => format!(
                        "waiting for the workers: proxy {holder} holds them, {ahead} more before this one"
                    ),
                },
                ..Allotment::default()
            },
        })
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        self.state.lock().holds.release(self.claim, now_ms());
        self.state.changed();
    }
}

fn now_ms() -> u64 {
    // Before 1970 the clock is of no use; epochs then count from 1 and still grow while this process lives.
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1)
}
