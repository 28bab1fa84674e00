//! The proxy's side of one worker: its op stream, the replies that come back, and its data service.
//!
//! A *wire* is the connection, shared by all sessions; a *link* is one session's use of it, with a lane of its own in the
//! op queue ([`queue`]). Ops of one session reach the worker in the order in which they are sent here; those of several
//! sessions take turns. When the worker does not keep up, `send` waits, the session stops reading its client, and HTTP/2's
//! windows slow the client down.
//!
//! A lost worker ends the wire: every reply that is awaited, and every later request, fails with DATA_LOSS. So does every later
//! request to one that says it is to end; what was asked for before is still waited for. A place without a worker has a link
//! whose wire was never alive.

mod gang;
mod queue;
mod turns;
mod wire;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::{Notify, oneshot};
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use waystation_proto::{
    BUILD_ID, LINK_VERSION,
    waystation::worker::{
        Attach, Cancel, CancelPut, Reply, Unload, op, peers::Peer, reply,
        worker_client::WorkerClient,
    },
};

pub(crate) use self::gang::{Gang, launch_together};
use self::{
    queue::{Lane, Ops, Queue},
    wire::Wire,
};
use crate::local::LocalMemory;
use crate::lock::lock;
use crate::needs::Unmet;
use crate::status::{self, Status};

/// HTTP/2 windows, in bytes. Small unread messages kill a session with default windows: h2 charges each small frame
/// against half the connection window, so the connection window must be many times the stream window.
pub(crate) const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
pub(crate) const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// Frames of bulk data, in bytes.
pub(crate) const FRAME_BYTES: usize = 1 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Numbers that are never used twice: shards, transfers, requests, executables, watches.
#[derive(Debug)]
pub(crate) struct Ids(AtomicU64);

impl Ids {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(1))
    }

    /// One number.
    pub(crate) fn next(&self) -> u64 {
        self.block(1)
    }

    /// The first of `n` consecutive numbers.
    pub(crate) fn block(&self, n: u64) -> u64 {
        self.0.fetch_add(n, Relaxed)
    }
}

/// One session's way to one worker, as its lease's epoch sees it.
#[derive(Debug)]
pub(crate) struct Link {
    /// Names the worker in messages: "slice 0 task 1 at host:port".
    pub(crate) name: Arc<str>,
    /// The worker's `host:port`.
    pub(crate) address: Arc<str>,
    /// The lease under which all messages go.
    pub(crate) epoch: u64,
    wire: Arc<Wire>,
    lane: Arc<Lane>,
}

/// How a proxy dials its workers.
#[derive(Clone, Debug)]
pub(crate) struct Dial {
    /// How long a silent worker counts as alive.
    pub(crate) lease: Duration,
    /// Whether bytes may go through memory where the worker is on this machine.
    pub(crate) local_transfers: bool,
    /// Told when a worker is lost.
    pub(crate) deaths: Arc<Notify>,
}

/// A channel to a worker with the settings all our links use. A worker that has hung, or is cut off, does not answer pings.
fn endpoint(address: &str, lease: Duration) -> Result<Endpoint, Status> {
    Ok(Endpoint::from_shared(format!("http://{address}"))
        .map_err(|e| {
            status::invalid_argument(format!("worker address '{address}' is not host:port: {e}"))
        })?
        .tcp_nodelay(true)
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(lease / 2)
        .keep_alive_timeout(lease / 2)
        .keep_alive_while_idle(true)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES))
}

fn client(channel: Channel) -> WorkerClient<Channel> {
    WorkerClient::new(channel)
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX)
}

/// The lane of a wire's first link, which serves the proxy itself.
const OWN_LANE: u64 = 0;

impl Link {
    /// Dials a worker and takes it over under `epoch`: whatever an older epoch held there is freed.
    ///
    /// # Errors
    /// DATA_LOSS when it cannot be reached; the worker's own status when it refuses.
    pub(crate) async fn connect(
        name: String,
        address: String,
        epoch: u64,
        device_ids: Vec<i32>,
        attempt: u64,
        gang: &Arc<Gang>,
        dial: Dial,
    ) -> Result<Arc<Self>, Status> {
        let lost = |e: tonic::transport::Error| status::worker_lost(&name, &e.to_string());
        // Bulk data has its own connection, so that it never shares flow control with small ops.
        let endpoint = endpoint(&address, dial.lease)?;
        let control = endpoint.connect().await.map_err(lost)?;
        let data = endpoint.connect().await.map_err(lost)?;
        let process = gang.next_process();
        let queue = Queue::new(Arc::clone(gang));
        let attach = op::Op::Attach(Attach {
            epoch,
            link_version: LINK_VERSION,
            build_id: BUILD_ID.to_owned(),
            device_ids,
            attempt,
            process,
            collectives_secret: gang.secret(),
            lease_ms: u32::try_from(dial.lease.as_millis()).unwrap_or(u32::MAX),
        });
        let mut replies = client(control)
            .session(Ops::new(&queue, attach))
            .await
            .map_err(|e| status::from_worker(&name, &e))?
            .into_inner();
        let attached = match replies.next().await {
            // Without a window nothing would ever leave.
            Some(Ok(Reply {
                reply: Some(reply::Reply::Attached(attached)),
            })) => {
                queue.credit(attached.window.max(1));
                attached
            }
            Some(Ok(_)) => {
                return Err(status::worker_lost(
                    &name,
                    "it did not answer the attach first",
                ));
            }
            Some(Err(e)) => return Err(status::from_worker(&name, &e)),
            None => return Err(status::worker_lost(&name, "it closed the op stream")),
        };
        let local = attached
            .local_memory
            .filter(|_| dial.local_transfers)
            .and_then(|announced| match LocalMemory::reach(&announced) {
                Ok(local) => Some(Arc::new(local)),
                Err(why) => {
                    tracing::info!(worker = %name, %why, "bytes go to the worker by its data service");
                    None
                }
            });
        let cannot_span = if attached.collectives_address.is_empty() {
            Some(attached.cannot_span)
        } else {
            let peer = Peer {
                process,
                address: attached.collectives_address,
                life: u64::from(process),
                name: name.clone(),
                data_address: address.clone(),
            };
            gang.join(peer, &queue);
            None
        };
        let wire = Arc::new(Wire {
            queue: Arc::clone(&queue),
            data: client(data),
            local: Mutex::new(local),
            pending: Mutex::default(),
            dead: AtomicBool::new(false),
            given_away: AtomicBool::new(false),
            gone: CancellationToken::new(),
            deaths: dial.deaths,
            gang: Arc::clone(gang),
            process,
            cannot_span,
        });
        tokio::spawn(queue::sweep(queue));
        // Holds the wire weakly, or ends with the stream: a dropped wire ends the task.
        let reader = Arc::downgrade(&wire);
        let worker = name.clone();
        tokio::spawn(async move {
            let why = loop {
                match replies.next().await {
                    Some(Ok(reply)) => match reader.upgrade() {
                        Some(wire) => wire.deliver(&worker, reply),
                        None => return,
                    },
                    Some(Err(e)) => break format!("its connection broke: {}", e.message()),
                    None => break "it closed the op stream".to_owned(),
                }
            };
            if let Some(wire) = reader.upgrade() {
                tracing::warn!(worker, %why, "worker lost");
                wire.die(&worker, &why);
            }
        });
        Ok(Arc::new(Self {
            name: name.into(),
            address: address.into(),
            epoch,
            lane: Lane::open(&wire.queue, OWN_LANE).into(),
            wire,
        }))
    }

    /// The link of a place that has no worker: everything fails with DATA_LOSS.
    ///
    /// # Errors
    /// None that can come.
    pub(crate) fn to_nobody(
        name: String,
        epoch: u64,
        why: &str,
        gang: &Arc<Gang>,
        dial: Dial,
    ) -> Result<Arc<Self>, Status> {
        let queue = Queue::new(Arc::clone(gang));
        // Nobody listens there; nothing is dialled before it is asked for.
        let data = endpoint("127.0.0.1:0", dial.lease)?.connect_lazy();
        let wire = Arc::new(Wire {
            queue,
            data: client(data),
            local: Mutex::default(),
            pending: Mutex::default(),
            dead: AtomicBool::new(false),
            given_away: AtomicBool::new(false),
            gone: CancellationToken::new(),
            deaths: dial.deaths,
            gang: Arc::clone(gang),
            process: gang.next_process(),
            cannot_span: None,
        });
        wire.die(&name, why);
        Ok(Arc::new(Self {
            name: name.into(),
            address: "".into(),
            epoch,
            lane: Lane::open(&wire.queue, OWN_LANE).into(),
            wire,
        }))
    }

    /// Another session's link over the same wire, under the session's number.
    pub(crate) fn for_client(&self, client: u64) -> Arc<Self> {
        Arc::new(Self {
            name: Arc::clone(&self.name),
            address: Arc::clone(&self.address),
            epoch: self.epoch,
            lane: Lane::open(&self.wire.queue, client).into(),
            wire: Arc::clone(&self.wire),
        })
    }

    /// Sends an op; waits while the lane is full. A lost worker swallows it: what depends on it fails when asked for.
    pub(crate) async fn send(&self, op: op::Op) {
        let room = self.lane.room().await;
        self.lane.send(op, room);
    }

    /// Sends an op that is answered under `id`. The answer's own status is looked at here: `Ok` is a good answer.
    ///
    /// The op is in the queue when this returns; the answer comes through the receiver.
    pub(crate) async fn call(&self, id: u64, op: op::Op) -> Answer {
        // First of all: a caller that stops waiting for it leaves nothing behind.
        let room = self.lane.room().await;
        let answer = self.expect(id);
        self.lane.send(op, room);
        answer
    }

    /// Like [`Self::call`], of a save. `copied` is dropped when it has copied what it writes, or has ended.
    pub(crate) async fn save(&self, id: u64, op: op::Op, copied: Unmet) -> Answer {
        let room = self.lane.room().await;
        let answer = self.expect(id);
        let mut pending = lock(&self.wire.pending);
        if pending.dead.is_none() {
            pending.copying.insert(id, copied);
        }
        drop(pending);
        self.lane.send(op, room);
        answer
    }

    /// The answer that will come under `id`.
    fn expect(&self, id: u64) -> Answer {
        let (sender, receiver) = oneshot::channel();
        let mut pending = lock(&self.wire.pending);
        match &pending.dead {
            Some(status) => {
                let _ = sender.send(Err(status.clone()));
            }
            None => {
                pending.waiting.insert(id, sender);
            }
        }
        Answer {
            receiver,
            process: self.wire.process,
        }
    }

    /// The worker's number among those of programs that span workers.
    pub(crate) fn process(&self) -> u32 {
        self.wire.process
    }

    /// Why the worker takes no part in programs that span workers, where it does not.
    pub(crate) fn cannot_span(&self) -> Option<&str> {
        self.wire.cannot_span.as_deref()
    }

    /// What the worker asks for from who brings bytes or wants some.
    pub(crate) fn secret(&self) -> Bytes {
        self.wire.gang.secret()
    }

    /// The worker's data service.
    pub(crate) fn data(&self) -> WorkerClient<Channel> {
        self.wire.data.clone()
    }

    /// The worker's memory, where this process can reach it.
    pub(crate) fn local(&self) -> Option<Arc<LocalMemory>> {
        lock(&self.wire.local).clone()
    }

    /// Ops of all sessions that wait in the proxy for this worker.
    pub(crate) fn queued(&self) -> usize {
        self.wire.queue.len()
    }

    /// True once the worker is lost.
    pub(crate) fn is_dead(&self) -> bool {
        self.wire.dead.load(Relaxed)
    }

    /// The worker has said that another lease than the link's has it now.
    pub(crate) fn is_given_away(&self) -> bool {
        self.wire.given_away.load(Relaxed)
    }

    /// Waits until the worker is lost.
    pub(crate) fn gone(&self) -> impl Future<Output = ()> + Send + use<> {
        self.wire.gone.clone().cancelled_owned()
    }

    /// Why the worker is lost, once it is: what requests fail with.
    pub(crate) fn lost(&self) -> Option<Status> {
        if !self.is_dead() {
            return None;
        }
        lock(&self.wire.pending).dead.clone()
    }

    /// The worker is lost, as the resource manager says.
    pub(crate) fn lose(&self, why: &str) {
        self.wire.die(&self.name, why);
    }

    /// The worker has been told to end, as the resource manager says: what was asked for before is waited for.
    pub(crate) fn leave(&self) {
        self.wire.leave(&self.name);
    }

    /// Whether both are ways over one connection.
    pub(crate) fn is_same_wire(&self, other: &Link) -> bool {
        Arc::ptr_eq(&self.wire, &other.wire)
    }

    /// Forgets a shard. Never waits.
    pub(crate) fn drop_shard(&self, shard: u64) {
        self.lane.drop_shard(shard);
    }

    /// Lets the worker forget the bytes of a transfer. Never waits.
    pub(crate) fn release(&self, transfer: u64) {
        self.lane.release(transfer);
    }

    /// Unloads an executable. Never waits.
    pub(crate) fn unload(&self, executable: u64) {
        self.lane.push(op::Op::Unload(Unload { executable }));
    }

    /// Tells the worker that the link's session has ended. Never waits.
    pub(crate) fn end_client(&self) {
        self.lane.end();
    }

    /// Tells the worker that nobody waits for what it does under `request`. Never waits.
    pub(crate) fn cancel(&self, request: u64) {
        self.lane.cancel(op::Op::Cancel(Cancel { request }));
    }

    /// Tells the worker that the bytes of a put will not come, and why. Never waits.
    pub(crate) fn cancel_put(&self, transfer: u64, status: Status) {
        let cancel = op::Op::CancelPut(CancelPut {
            transfer,
            status: Some(status),
        });
        self.lane.cancel(cancel);
    }
}

/// An answer on its way.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The worker's number.
    process: u32,
    receiver: oneshot::Receiver<Result<reply::Reply, Status>>,
}

impl Answer {
    /// Whether it comes over the link's connection.
    pub(crate) fn is_from(&self, link: &Link) -> bool {
        self.process == link.wire.process
    }

    /// Waits for it. Cancel-safe: a dropped wait loses only the answer.
    pub(crate) async fn wait(self) -> Result<reply::Reply, Status> {
        self.receiver
            .await
            .unwrap_or_else(|_| Err(status::unavailable("the link to the worker was closed")))
    }
}

/// Waits for several. All have come when this returns.
///
/// # Errors
/// The first one's that has failed; a lost worker's before others', which may fail because of that one.
pub(crate) async fn all(answers: Vec<Answer>) -> Result<(), Status> {
    let answers = futures::future::join_all(answers.into_iter().map(Answer::wait)).await;
    let mut failures: Vec<Status> = answers.into_iter().filter_map(Result::err).collect();
    let lost = failures.iter().position(status::is_worker_lost);
    match failures.is_empty() {
        true => Ok(()),
        false => Err(failures.swap_remove(lost.unwrap_or(0))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lost_worker_is_told_before_what_fails_because_of_it() {
        let answers = |statuses: &[Option<Status>]| {
            let answer = |status: &Option<Status>| {
                let (sender, receiver) = oneshot::channel();
                let good = reply::Reply::Answer(Default::default());
                let _ = sender.send(status.clone().map_or(Ok(good), Err));
                Answer {
                    process: 0,
                    receiver,
                }
            };
            statuses.iter().map(answer).collect::<Vec<_>>()
        };
        let unknown = Some(status::invalid_argument("no such executable".to_owned()));
        let other = Some(status::invalid_argument("another".to_owned()));
        let lost = Some(status::worker_lost("slice 0 task 1", "it is cut off"));
        assert_eq!(all(answers(&[None, None])).await, Ok(()));
        let first = all(answers(&[None, unknown.clone(), other])).await;
        assert_eq!(first.err(), unknown);
        let found = all(answers(&[unknown, None, lost.clone()])).await;
        assert_eq!(found.err(), lost);
    }
}
