//! The proxy's side of one worker: its op stream, the replies that come back, and its data service.
//!
//! Order: ops reach the worker in the order in which they are sent here. Clean-up (shards nobody refers to any more,
//! transfers to release) is queued by `Drop` code, which cannot wait, and sent by a task of its own: whatever used the
//! thing was sent before it was dropped, so the clean-up always comes after it. The op queue is bounded; when the worker
//! does not keep up, `send` waits, the session stops reading its client, and HTTP/2's windows slow the client down.
//!
//! A lost worker ends the link: every reply that is awaited, and every later request, fails with DATA_LOSS.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::sync::{Notify, mpsc, oneshot};
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::transport::{Channel, Endpoint};
use waystation_proto::{
    BUILD_ID, LINK_VERSION,
    waystation::worker::{
        Attach, CancelPut, Drop as DropShards, Op, Release, Reply, Unload, op, reply,
        worker_client::WorkerClient,
    },
};

use crate::status::{self, Status};

/// Ops queued towards one worker before senders wait. Enough for a burst of small requests; a client that floods is
/// slowed, not served from memory.
const OP_QUEUE: usize = 1024;
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

/// What `Drop` code leaves to be sent.
#[derive(Debug)]
enum Cleanup {
    Shard(u64),
    Transfer(u64),
    Executable(u64),
    Put(u64),
}

#[derive(Debug)]
struct Pending {
    waiting: HashMap<u64, oneshot::Sender<Result<reply::Reply, Status>>>,
    dead: Option<Status>,
}

/// One worker, as its lease's epoch sees it.
#[derive(Debug)]
pub(crate) struct Link {
    /// Names the worker in messages: "slice 0 task 1 at host:port".
    pub(crate) name: String,
    /// The worker's `host:port`.
    pub(crate) address: String,
    /// The lease under which all messages go.
    pub(crate) epoch: u64,
    ops: mpsc::Sender<Op>,
    data: WorkerClient<Channel>,
    pending: Mutex<Pending>,
    cleanup: Mutex<Vec<Cleanup>>,
    cleanup_waits: Notify,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds these locks can panic half-way through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A channel to a worker with the settings all our links use.
fn endpoint(address: &str) -> Result<Endpoint, Status> {
    Ok(Endpoint::from_shared(format!("http://{address}"))
        .map_err(|e| {
            status::invalid_argument(format!("worker address '{address}' is not host:port: {e}"))
        })?
        .tcp_nodelay(true)
        .connect_timeout(CONNECT_TIMEOUT)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES))
}

fn client(channel: Channel) -> WorkerClient<Channel> {
    WorkerClient::new(channel)
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX)
}

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
    ) -> Result<Arc<Self>, Status> {
        let lost = |e: tonic::transport::Error| status::worker_lost(&name, &e.to_string());
        // Bulk data has its own connection, so that it never shares flow control with small ops.
        let control = endpoint(&address)?.connect().await.map_err(lost)?;
        let data = endpoint(&address)?.connect().await.map_err(lost)?;
        let (ops, queue) = mpsc::channel(OP_QUEUE);
        let attach = Op {
            op: Some(op::Op::Attach(Attach {
                epoch,
                link_version: LINK_VERSION,
                build_id: BUILD_ID.to_owned(),
                device_ids,
            })),
        };
        if ops.try_send(attach).is_err() {
            return Err(status::worker_lost(&name, "its op queue is closed"));
        }
        let mut replies = client(control)
            .session(ReceiverStream::new(queue))
            .await
            .map_err(|e| status::from_worker(&name, &e))?
            .into_inner();
        match replies.next().await {
            Some(Ok(Reply {
                reply: Some(reply::Reply::Attached(_)),
            })) => {}
            Some(Ok(_)) => {
                return Err(status::worker_lost(
                    &name,
                    "it did not answer the attach first",
                ));
            }
            Some(Err(e)) => return Err(status::from_worker(&name, &e)),
            None => return Err(status::worker_lost(&name, "it closed the op stream")),
        }
        let link = Arc::new(Self {
            name,
            address,
            epoch,
            ops,
            data: client(data),
            pending: Mutex::new(Pending {
                waiting: HashMap::new(),
                dead: None,
            }),
            cleanup: Mutex::new(Vec::new()),
            cleanup_waits: Notify::new(),
        });
        // Both tasks hold the link weakly or end with the stream, so a dropped link ends them.
        let reader = Arc::downgrade(&link);
        tokio::spawn(async move {
            let why = loop {
                match replies.next().await {
                    Some(Ok(reply)) => match reader.upgrade() {
                        Some(link) => link.deliver(reply),
                        None => return,
                    },
                    Some(Err(e)) => break e.message().to_owned(),
                    None => break "it closed the op stream".to_owned(),
                }
            };
            if let Some(link) = reader.upgrade() {
                tracing::warn!(worker = %link.name, %why, "worker lost");
                link.die(&why);
            }
        });
        let janitor = Arc::downgrade(&link);
        tokio::spawn(async move {
            loop {
                let Some(link) = janitor.upgrade() else {
                    return;
                };
                let wait =
                    tokio::time::timeout(Duration::from_secs(1), link.cleanup_waits.notified());
                // Woken up now and then to see whether the link is still wanted.
                let _ = wait.await;
                if !link.clean_up().await {
                    return;
                }
            }
        });
        Ok(link)
    }

    /// Sends an op; waits while the queue is full. A lost worker swallows it: what depends on it fails when asked for.
    pub(crate) async fn send(&self, op: op::Op) {
        // The receiver lives as long as the call; a closed queue means a dead link, which `deliver`'s task reports.
        let _ = self.ops.send(Op { op: Some(op) }).await;
    }

    /// Sends an op that is answered under `id`. The answer's own status is looked at here: `Ok` is a good answer.
    ///
    /// The op is in the queue when this returns; the answer comes through the receiver.
    pub(crate) async fn call(&self, id: u64, op: op::Op) -> Answer {
        let (sender, receiver) = oneshot::channel();
        {
            let mut pending = lock(&self.pending);
            match &pending.dead {
                Some(status) => {
                    let _ = sender.send(Err(status.clone()));
                }
                None => {
                    pending.waiting.insert(id, sender);
                }
            }
        }
        self.send(op).await;
        Answer { receiver }
    }

    /// The worker's data service.
    pub(crate) fn data(&self) -> WorkerClient<Channel> {
        self.data.clone()
    }

    /// True once the worker is lost.
    pub(crate) fn is_dead(&self) -> bool {
        lock(&self.pending).dead.is_some()
    }

    /// Forgets a shard. Never waits.
    pub(crate) fn drop_shard(&self, shard: u64) {
        self.queue_cleanup(Cleanup::Shard(shard));
    }

    /// Lets the worker forget the bytes of a transfer. Never waits.
    pub(crate) fn release(&self, transfer: u64) {
        self.queue_cleanup(Cleanup::Transfer(transfer));
    }

    /// Unloads an executable. Never waits.
    pub(crate) fn unload(&self, executable: u64) {
        self.queue_cleanup(Cleanup::Executable(executable));
    }

    /// Tells the worker that the bytes of a put will not come. Never waits.
    pub(crate) fn cancel_put(&self, transfer: u64) {
        self.queue_cleanup(Cleanup::Put(transfer));
    }

    fn queue_cleanup(&self, cleanup: Cleanup) {
        lock(&self.cleanup).push(cleanup);
        self.cleanup_waits.notify_one();
    }

    /// Sends what was queued. False when the link is dead.
    async fn clean_up(&self) -> bool {
        let queued = std::mem::take(&mut *lock(&self.cleanup));
        let (mut shards, mut transfers) = (Vec::new(), Vec::new());
        for cleanup in queued {
            match cleanup {
                Cleanup::Shard(id) => shards.push(id),
                Cleanup::Transfer(id) => transfers.push(id),
                Cleanup::Executable(executable) => {
                    self.send(op::Op::Unload(Unload { executable })).await
                }
                Cleanup::Put(transfer) => {
                    self.send(op::Op::CancelPut(CancelPut {
                        transfer,
                        status: Some(status::failed_precondition(
                            "the client went away before the array's bytes came",
                        )),
                    }))
                    .await;
                }
            }
        }
        if !shards.is_empty() {
            self.send(op::Op::Drop(DropShards { shards })).await;
        }
        if !transfers.is_empty() {
            self.send(op::Op::Release(Release { transfers })).await;
        }
        !self.is_dead()
    }

    fn deliver(&self, reply: Reply) {
        let (id, result) = match reply.reply {
            Some(reply) => match split(reply) {
                Some(answer) => answer,
                None => return,
            },
            None => return,
        };
        if let Some(sender) = lock(&self.pending).waiting.remove(&id) {
            // Nobody may be waiting any more: a session that ended.
            let _ = sender.send(result);
        }
    }

    fn die(&self, why: &str) {
        let status = status::worker_lost(&self.name, why);
        let waiting = {
            let mut pending = lock(&self.pending);
            pending.dead = Some(status.clone());
            std::mem::take(&mut pending.waiting)
        };
        for (_, sender) in waiting {
            let _ = sender.send(Err(status.clone()));
        }
    }
}

/// The number and outcome of a reply; `None` for an `Attached` that comes twice.
fn split(reply: reply::Reply) -> Option<(u64, Result<reply::Reply, Status>)> {
    let (id, status) = match &reply {
        reply::Reply::Attached(_) => return None,
        reply::Reply::CompileDone(done) => (done.request, done.status.clone()),
        reply::Reply::WatchDone(done) => (done.watch, done.status.clone()),
        reply::Reply::ReadDone(done) => (done.transfer, done.status.clone()),
        reply::Reply::Answer(done) => (done.request, done.status.clone()),
    };
    Some((id, status::check(status).map(|()| reply)))
}

/// An answer on its way.
#[derive(Debug)]
pub(crate) struct Answer {
    receiver: oneshot::Receiver<Result<reply::Reply, Status>>,
}

impl Answer {
    /// Waits for it. Cancel-safe: a dropped wait loses only the answer.
    pub(crate) async fn wait(self) -> Result<reply::Reply, Status> {
        self.receiver
            .await
            .unwrap_or_else(|_| Err(status::unavailable("the link to the worker was closed")))
    }
}
