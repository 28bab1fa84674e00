//! The connection with one worker, from its attach to its death.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use waystation_proto::waystation::worker::{Reply, reply, worker_client::WorkerClient};

use super::{gang::Gang, queue::Queue};
use crate::local::LocalMemory;
use crate::lock::lock;
use crate::needs::Unmet;
use crate::status::{self, Status};

/// How long the op stream of a worker that leaves stays open after the last answer: bytes are fetched after it.
const LINGER: Duration = Duration::from_millis(300);

#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) waiting: HashMap<u64, oneshot::Sender<Result<reply::Reply, Status>>>,
    /// What waits for saves to have copied what they write, by request.
    pub(super) copying: HashMap<u64, Unmet>,
    /// What requests fail with.
    pub(super) dead: Option<Status>,
}

/// The connection with one worker.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) queue: Arc<Queue>,
    pub(super) data: WorkerClient<Channel>,
    /// The worker's memory, where this process can reach it, until it is lost: old programs and arrays keep the wire.
    pub(super) local: Mutex<Option<Arc<LocalMemory>>>,
    pub(super) pending: Mutex<Pending>,
    /// Whether `pending` says so.
    pub(super) dead: AtomicBool,
    /// Another lease has the worker, as it says itself.
    pub(super) given_away: AtomicBool,
    /// Cancelled at the same time.
    pub(super) gone: CancellationToken,
    /// Told of the death.
    pub(super) deaths: Arc<Notify>,
    pub(super) gang: Arc<Gang>,
    /// The worker's number in the gang.
    pub(super) process: u32,
    /// Why the worker takes no part in programs that span workers.
    pub(super) cannot_span: Option<String>,
}

impl Drop for Wire {
    fn drop(&mut self) {
        // Ends the stream, and the worker's session with it.
        self.queue.close();
        // Then, for what waits for this worker is looked for by its queue.
        self.gang.leave(self.process);
    }
}

impl Wire {
    pub(super) fn deliver(self: &Arc<Self>, name: &str, reply: Reply) {
        let (id, result) = match reply.reply {
            Some(reply::Reply::Taken(taken)) => {
                self.queue.credit(taken.ops);
                return;
            }
            Some(reply::Reply::Started(started)) => {
                self.gang.started(&self.queue, started.launch);
                return;
            }
            Some(reply::Reply::Copied(copied)) => {
                let copied = lock(&self.pending).copying.remove(&copied.request);
                // Outside the lock: launches may have waited for it.
                drop(copied);
                return;
            }
            Some(reply::Reply::Leaving(_)) => {
                self.leave(name);
                return;
            }
            Some(reply::Reply::Ended(ended)) => {
                tracing::warn!(worker = %name, why = ended.why, "worker lost");
                self.given_away.store(ended.given_away, Relaxed);
                self.die(name, &ended.why);
                return;
            }
            Some(reply) => match split(reply) {
                Some(answer) => answer,
                None => return,
            },
            None => return,
        };
        let (sender, copied) = {
            let mut pending = lock(&self.pending);
            (pending.waiting.remove(&id), pending.copying.remove(&id))
        };
        // As above: it has ended without a word of that.
        drop(copied);
        if let Some(sender) = sender {
            // Nobody may be waiting any more: a session that ended.
            let _ = sender.send(result);
            if self.dead.load(Relaxed) {
                self.end_when_drained();
            }
        }
    }

    pub(super) fn leave(self: &Arc<Self>, name: &str) {
        if !self.dead.load(Relaxed) {
            tracing::info!(worker = %name, "the worker has been told to end");
            self.refuse(status::worker_lost(name, "it has been told to end"));
            self.end_when_drained();
        }
    }

    /// Later requests fail; the first reason stays.
    fn refuse(&self, status: Status) {
        lock(&self.pending).dead.get_or_insert(status);
        self.dead.store(true, Relaxed);
        self.gone.cancel();
        self.deaths.notify_one();
    }

    /// Ends the op stream of a worker that leaves, when nothing of it is waited for, and what was read has been asked for.
    fn end_when_drained(self: &Arc<Self>) {
        let is_drained = |wire: &Wire| lock(&wire.pending).waiting.is_empty();
        if !is_drained(self) {
            return;
        }
        let wire = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(LINGER).await;
            if let Some(wire) = wire.upgrade().filter(|wire| is_drained(wire)) {
                wire.queue.close();
            }
        });
    }

    pub(super) fn die(&self, name: &str, why: &str) {
        self.refuse(status::worker_lost(name, why));
        let (waiting, copying, status) = {
            let mut pending = lock(&self.pending);
            let waiting = std::mem::take(&mut pending.waiting);
            let copying = std::mem::take(&mut pending.copying);
            (waiting, copying, pending.dead.clone())
        };
        drop(copying);
        let status = status.unwrap_or_else(|| status::worker_lost(name, why));
        for (_, sender) in waiting {
            let _ = sender.send(Err(status.clone()));
        }
        *lock(&self.local) = None;
        // A worker that is alive after all frees what it has.
        self.queue.close();
        self.gang.leave(self.process);
    }
}

/// The number and outcome of a reply; `None` for one that answers nothing.
fn split(reply: reply::Reply) -> Option<(u64, Result<reply::Reply, Status>)> {
    let (id, status) = match &reply {
        reply::Reply::Attached(_)
        | reply::Reply::Taken(_)
        | reply::Reply::Started(_)
        | reply::Reply::Copied(_)
        | reply::Reply::Leaving(_)
        | reply::Reply::Ended(_) => return None,
        reply::Reply::CompileDone(done) => (done.request, done.status.clone()),
        reply::Reply::WatchDone(done) => (done.watch, done.status.clone()),
        reply::Reply::ReadDone(done) => (done.transfer, done.status.clone()),
        reply::Reply::Answer(done) => (done.request, done.status.clone()),
    };
    Some((id, status::check(status).map(|()| reply)))
}
