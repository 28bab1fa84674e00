//! Cluster and holds behind one lock, with a signal at each change.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use waystation_proto::waystation::scheduler::{
    Allotment, AllottedWorker, Hello, IntroduceRequest, SchedulerStatus,
    allotted_worker::Presence,
    scheduler_status::{Proxy, Refused},
};

use crate::{
    InstanceType,
    cluster::{Cluster, Host, Member, Place, Refusal},
    holds::{Claim, Hold, Holds, Now, View, Wish},
    tpu::{self, Variables},
};

/// Longest name of a host kept; it is shown to others.
const MAX_HOST_CHARS: usize = 256;

/// Shared by all handlers. The lock is held for short, pure steps only, never over an await.
#[derive(Debug)]
pub(crate) struct State {
    inner: Mutex<Inner>,
    changes: watch::Sender<u64>,
    lease: Duration,
    started: Instant,
}

#[derive(Debug)]
struct Inner {
    cluster: Cluster,
    holds: Holds,
}

impl Inner {
    fn view(&self) -> View {
        View {
            whole: self.cluster.whole(),
            epochs: self.cluster.epochs(),
            last: self.cluster.last_epochs(),
            workers: self.cluster.says(),
            again: self.cluster.again(),
        }
    }

    fn all(&self) -> Vec<u32> {
        (0..self.cluster.slices()).collect()
    }
}

impl State {
    pub(crate) fn new(cluster: Cluster, lease: Duration) -> Arc<State> {
        Arc::new(State {
            inner: Mutex::new(Inner {
                holds: Holds::new(cluster.slices(), lease),
                cluster,
            }),
            changes: watch::Sender::new(0),
            lease,
            started: Instant::now(),
        })
    }

    /// Ends what ends with time. Runs until it is dropped.
    pub(crate) async fn keep_time(&self) {
        let mut changes = self.changes();
        loop {
            changes.mark_unchanged();
            let next = self.lock().holds.next_change(self.now());
            let next = next.map(|up| self.started + up);
            tokio::select! {
                () = async { sleep_until(next.unwrap_or(self.started)).await }, if next.is_some() => {
                    self.members_changed();
                }
                // The sender lives as long as this.
                _ = changes.changed() => {}
            }
        }
    }

    /// Changes of membership or holds. Several may be seen as one.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Seats a worker until the returned guard drops.
    pub(crate) fn join(self: &Arc<Self>, hello: Hello) -> Result<Seated, Refusal> {
        let place = Place {
            slice: hello.slice,
            task: hello.task,
        };
        let joined = {
            let mut inner = self.lock();
            let joined = inner.cluster.join(hello);
            joined.map_err(|refusal| (inner.cluster.note(place, &refusal), refusal))
        };
        let member = match joined {
            Ok(member) => member,
            Err((news, refusal)) => {
                if news {
                    self.changed();
                }
                return Err(refusal);
            }
        };
        self.members_changed();
        Ok(Seated {
            state: Arc::clone(self),
            member,
        })
    }

    /// What libtpu is to find in the environment of the worker that introduces itself.
    ///
    /// # Errors
    /// In words, when there is no such place.
    pub(crate) fn introduce(
        &self,
        instance: &InstanceType,
        request: IntroduceRequest,
    ) -> Result<Variables, String> {
        let place = Place {
            slice: request.slice,
            task: request.task,
        };
        let mut inner = self.lock();
        let slices = inner.cluster.slices();
        if place.slice >= slices || place.task >= instance.hosts() {
            return Err(format!(
                "there is no slice {} task {}: {slices} slice(s) of {instance} have {} worker(s) each, numbered from 0",
                place.slice,
                place.task,
                instance.hosts()
            ));
        }
        let host = request.host.chars().take(MAX_HOST_CHARS).collect();
        inner.cluster.introduce(place, host);
        let by_jobset = |place| {
            let named = !request.jobset.is_empty() && !request.replicated_job.is_empty();
            named.then(|| tpu::jobset_host(&request.jobset, &request.replicated_job, place))
        };
        let host = |place| match inner.cluster.host(place) {
            Host::Introduced(host) => Some(host.to_owned()),
            Host::Registered(host) => by_jobset(place).or_else(|| Some(host.to_owned())),
            Host::Unknown => by_jobset(place),
        };
        let variables = tpu::variables(instance, slices, place, host);
        let others = match request.waits {
            true => variables.unknown.clone(),
            false => BTreeSet::new(),
        };
        let is_news = inner.cluster.waits(place, others);
        drop(inner);
        // Who waits for slices is to know for what those wait.
        if is_news {
            self.changed();
        }
        Ok(variables)
    }

    /// Queues a proxy until the returned guard drops.
    pub(crate) fn claim(self: &Arc<Self>, wish: Wish) -> Claimed {
        let claim = {
            let mut inner = self.lock();
            let view = inner.view();
            inner.holds.claim(wish, &view, self.now())
        };
        self.changed();
        Claimed {
            state: Arc::clone(self),
            claim,
        }
    }

    /// A proxy says goodbye.
    pub(crate) fn give_back(&self, instance: u64) {
        {
            let mut inner = self.lock();
            let view = inner.view();
            inner.holds.give_back(instance, &view, self.now());
        }
        self.changed();
    }

    pub(crate) fn status(&self) -> SchedulerStatus {
        let inner = self.lock();
        let all = inner.all();
        let here = |worker: &AllottedWorker| worker.presence() == Presence::Here;
        let proxies = inner.holds.all(&inner.view(), self.now()).into_iter();
        SchedulerStatus {
            expected_workers: inner.cluster.expected().unwrap_or(0),
            workers: inner
                .cluster
                .places(&all)
                .into_iter()
                .filter(here)
                .collect(),
            progress: inner.cluster.progress(&all),
            proxies: proxies
                .map(|(name, hold)| match hold {
                    Hold::Held { slices, .. } => Proxy {
                        name,
                        progress: inner.cluster.progress(&slices),
                        slices,
                    },
                    Hold::Expecting => Proxy {
                        name,
                        progress: inner.cluster.progress(&all),
                        slices: Vec::new(),
                    },
                    Hold::Waiting(progress) => Proxy {
                        name,
                        progress,
                        slices: Vec::new(),
                    },
                })
                .collect(),
            refused: inner
                .cluster
                .refusals()
                .map(|(place, reason)| Refused {
                    slice: place.slice,
                    task: place.task,
                    reason: reason.to_owned(),
                })
                .collect(),
            ..SchedulerStatus::default()
        }
    }

    /// "1 of 2 slices (3 of 4 workers)".
    pub(crate) fn progress(&self) -> String {
        let inner = self.lock();
        inner.cluster.progress(&inner.all())
    }

    /// Slices of a full cluster.
    pub(crate) fn slices(&self) -> u32 {
        self.lock().cluster.slices()
    }

    fn members_changed(&self) {
        {
            let mut inner = self.lock();
            let view = inner.view();
            inner.holds.grant(&view, self.now());
        }
        self.changed();
    }

    fn now(&self) -> Now {
        // Before 1970 the clock is of no use; epochs then count from 1 and still grow while this process lives.
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Now {
            unix_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1),
            up: self.started.elapsed(),
        }
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

    /// What the worker says of the proxy that it serves.
    pub(crate) fn serves(&self, lease_epoch: u64) {
        let news = self.state.lock().cluster.serves(self.member, lease_epoch);
        if news {
            self.state.members_changed();
        }
    }

    /// The worker's stream has ended without a goodbye: it counts as there until the seat is given up. False when another
    /// worker has taken the place.
    pub(crate) fn miss(&self, reason: &str) -> bool {
        let seated = self.state.lock().cluster.miss(self.member, reason);
        self.state.members_changed();
        seated
    }

    /// Gives the seat up, and says why; `leaving`: as the worker has said itself. False when another worker has taken the place.
    pub(crate) fn leave(self, reason: &str, leaving: bool) -> bool {
        self.end(reason, leaving)
    }

    fn end(&self, reason: &str, leaving: bool) -> bool {
        let mut inner = self.state.lock();
        let was_seated = inner.cluster.leave(self.member, reason, leaving);
        drop(inner);
        if was_seated {
            self.state.members_changed();
        }
        was_seated
    }
}

impl Drop for Seated {
    fn drop(&mut self) {
        self.end("its registration was dropped", false);
    }
}

/// A proxy's claim, for as long as its stream lasts; dropping it without a goodbye leaves the slices to it for a lease.
#[derive(Debug)]
pub(crate) struct Claimed {
    state: Arc<State>,
    claim: Claim,
}

impl Claimed {
    /// What the proxy may use now; none when a newer stream of it took this one's place.
    pub(crate) fn allotment(&self) -> Option<Allotment> {
        let inner = self.state.lock();
        let view = inner.view();
        let lease_ms = u32::try_from(self.state.lease.as_millis()).unwrap_or(u32::MAX);
        let now = self.state.now();
        let (ticket, hold) = inner.holds.get(self.claim, &view, now)?;
        let waiting = |progress| Allotment {
            progress,
            lease_ms,
            ticket,
            ..Allotment::default()
        };
        Some(match hold {
            Hold::Held {
                epoch,
                slices,
                needed,
            } => {
                let complete = inner.cluster.complete();
                let complete = slices.iter().filter(|slice| complete.contains(slice));
                Allotment {
                    complete: complete.count() >= needed as usize,
                    progress: inner.cluster.progress(&slices),
                    epoch,
                    workers: inner.cluster.places(&slices),
                    slices,
                    lease_ms,
                    ticket,
                }
            }
            Hold::Expecting => waiting(inner.cluster.progress(&inner.all())),
            Hold::Waiting(progress) => waiting(progress),
        })
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        {
            let mut inner = self.state.lock();
            let view = inner.view();
            let now = self.state.now();
            inner.holds.broke(self.claim, &view, now);
        }
        self.state.changed();
    }
}
