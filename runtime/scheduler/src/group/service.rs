//! The gRPC adapter of groups and their stores.

use std::{
    pin::Pin,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use futures::{Stream, stream};
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status};
use tracing::{info, warn};
use waystation_proto::waystation::group::{
    GatherRequest, Gathered, GetReply, GetRequest, LeaveReply, LeaveRequest, PutReply, PutRequest,
    groups_server,
};

use super::{Candidate, Entry, Groups, Member, Phase, Refusal, StoreError};

/// A request for a value is answered after so long; who waits longer asks again.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Of all requests that wait for a value: 65,536 with short keys. Each worker asks for all others' at once.
const WAITING_BYTES: usize = 256 << 20;

/// What one takes beside its key.
const WAITING_EACH_BYTES: u32 = 4 << 10;

/// Longest address kept; it is shown to others.
const MAX_ADDRESS_CHARS: usize = 256;

/// Longest reason passed on.
const MAX_REASON_CHARS: usize = 4096;

/// See the module.
#[derive(Debug)]
pub(crate) struct Service {
    groups: Arc<Groups>,
    /// How long a worker whose stream broke may take to come back.
    lease: Duration,
    /// Bytes that requests that wait may yet take.
    waiting: Semaphore,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Service {
    pub(crate) fn new(
        groups: Arc<Groups>,
        lease: Duration,
        stop: CancellationToken,
        tasks: TaskTracker,
    ) -> Service {
        Service {
            groups,
            lease,
            waiting: Semaphore::new(WAITING_BYTES),
            stop,
            tasks,
        }
    }
}

/// A member's stream. Dropped by tonic when the worker's connection ends.
struct Gathering {
    member: Member,
    phase: watch::Receiver<Phase>,
    told: bool,
    lease: Duration,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Gathering {
    /// The group when it has formed, then why it ends.
    async fn next(&mut self) -> Result<Gathered, Status> {
        loop {
            let phase = self.phase.borrow_and_update().clone();
            match phase {
                Phase::Formed if !self.told => {
                    self.told = true;
                    return Ok(Gathered {
                        group: self.member.id,
                        nodes: self.member.nodes,
                    });
                }
                Phase::Formed | Phase::Gathering => {}
                Phase::Gone(why) => {
                    return Err(Status::aborted(format!(
                        "the group of this worker's slice is no more: {why}"
                    )));
                }
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => {
                    return Err(Status::unavailable("the resource manager is shutting down"));
                }
                changed = self.phase.changed() => if changed.is_err() && !matches!(*self.phase.borrow(), Phase::Gone(_)) {
                    return Err(Status::aborted("the group of this worker's slice is no more"));
                },
            }
        }
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        if self.stop.is_cancelled() {
            return;
        }
        let Some(absent) = self.member.leave() else {
            return;
        };
        let groups = Arc::clone(&self.member.groups);
        let expire = move || {
            if let Some(group) = groups.expire(&absent) {
                warn!(
                    group,
                    slice = absent.slice,
                    task = absent.task,
                    "a worker of a group has gone, and the group with it"
                );
            }
        };
        in_a_lease(&self.tasks, self.lease, &self.stop, expire);
    }
}

/// Looks again when who is missed has had the time to come back.
fn in_a_lease(
    tasks: &TaskTracker,
    lease: Duration,
    stop: &CancellationToken,
    look: impl FnOnce() + Send + 'static,
) {
    let stop = stop.clone();
    tasks.spawn(async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(lease) => look(),
        }
    });
}

#[tonic::async_trait]
impl groups_server::Groups for Service {
    type GatherStream = Pin<Box<dyn Stream<Item = Result<Gathered, Status>> + Send>>;

    async fn gather(
        &self,
        request: Request<GatherRequest>,
    ) -> Result<Response<Self::GatherStream>, Status> {
        let request = request.into_inner();
        if request.link_version != waystation_proto::LINK_VERSION {
            return Err(Status::failed_precondition(format!(
                "the worker speaks link version {} ({}), the resource manager link version {} ({}): run both from the \
                 same release",
                request.link_version,
                request.build_id,
                waystation_proto::LINK_VERSION,
                waystation_proto::BUILD_ID
            )));
        }
        let who = Candidate {
            slice: request.slice,
            task: request.task,
            tasks: request.slice_tasks,
            address: request.address.chars().take(MAX_ADDRESS_CHARS).collect(),
            resume: request.resume,
        };
        let member = self.groups.join(who, now_ms()).map_err(refused)?;
        if request.resume != 0 {
            let (groups, id) = (Arc::clone(&self.groups), member.id);
            let expire = move || {
                if groups.expire_incomplete(id) {
                    warn!(group = id, "not all workers of a group have come back");
                }
            };
            in_a_lease(&self.tasks, self.lease, &self.stop, expire);
        }
        let progress = self.groups.progress(request.slice);
        info!(group = member.id, slice = request.slice, task = request.task, %progress, "worker of a group");
        let gathering = Gathering {
            phase: member.phase.clone(),
            member,
            told: false,
            lease: self.lease,
            stop: self.stop.clone(),
            tasks: self.tasks.clone(),
        };
        let replies = stream::unfold(Some(gathering), |open| async move {
            let mut gathering = open?;
            let next = gathering.next().await;
            let goes_on = next.is_ok();
            Some((next, goes_on.then_some(gathering)))
        });
        Ok(Response::new(Box::pin(replies)))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetReply>, Status> {
        let GetRequest {
            group,
            mut key,
            wait_ms,
        } = request.into_inner();
        let wait = Duration::from_millis(wait_ms.into()).min(LONGEST_WAIT);
        let deadline = Instant::now() + wait;
        let mut place = None;
        loop {
            let look = self.groups.get(group, &key).map_err(unable)?;
            let late = Instant::now() >= deadline;
            match look.value {
                None if late && !look.is_whole => {
                    return Err(Status::unavailable(
                        "nobody has put the key, but not all workers of the group have come back yet",
                    ));
                }
                None if !late => {}
                value => return Ok(Response::new(GetReply { value })),
            }
            if place.is_none() {
                let bytes = u32::try_from(key.len()).unwrap_or(u32::MAX);
                let bytes = bytes.saturating_add(WAITING_EACH_BYTES);
                let taken = self.waiting.try_acquire_many(bytes);
                place = Some(taken.map_err(|_| {
                    Status::resource_exhausted("too many requests wait for values of groups")
                })?);
                // The message that it came in may be larger.
                key = Bytes::copy_from_slice(&key);
            }
            let mut news = look.news;
            tokio::select! {
                () = self.stop.cancelled() => {
                    return Err(Status::unavailable("the resource manager is shutting down"));
                }
                // Time that is up and an end of the group are found above.
                _ = timeout_at(deadline, news.changed()) => {}
            }
        }
    }

    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let PutRequest {
            group,
            key,
            value,
            task,
            number,
        } = request.into_inner();
        let entry = Entry {
            value,
            task,
            number,
        };
        self.groups.put(group, &key, entry).map_err(unable)?;
        Ok(Response::new(PutReply {}))
    }

    async fn leave(&self, request: Request<LeaveRequest>) -> Result<Response<LeaveReply>, Status> {
        let LeaveRequest {
            group,
            task,
            reason,
        } = request.into_inner();
        let reason: String = reason.chars().take(MAX_REASON_CHARS).collect();
        self.groups.leave(group, task, &reason).map_err(unable)?;
        warn!(group, task, reason, "a worker has left its group");
        Ok(Response::new(LeaveReply {}))
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn refused(refusal: Refusal) -> Status {
    match refusal {
        Refusal::Wrong(_) => Status::failed_precondition(refusal.to_string()),
        Refusal::Gone(_) => Status::aborted(refusal.to_string()),
        Refusal::Taken { .. } => Status::unavailable(refusal.to_string()),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unable(error: StoreError) -> Status {
    let message = error.to_string();
    match error {
        StoreError::Gone(_) => Status::aborted(message),
        StoreError::Exists => Status::already_exists(message),
        StoreError::Full(_) => Status::resource_exhausted(message),
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1)
}
