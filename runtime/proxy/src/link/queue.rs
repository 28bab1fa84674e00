//! The ops towards one worker: each session has a lane of its own, and the lanes take turns.
//!
//! No more ops are on the way than the worker has room for (its *window*), and each lane holds a bounded number more. So
//! what one session's op waits for is at most the window and one op of each other session, however many ops those have: a
//! client that floods fills its own lane, is then not read any further, and is slowed by HTTP/2's windows.
//!
//! Clean-up (shards nobody refers to any more, transfers to release) is left by `Drop` code, which cannot wait. It rides on
//! the lane's next op, or alone when there is none: whatever used the thing was queued in the same lane before, and a
//! later op finds the room that it had taken.

use std::{
    collections::{HashMap, VecDeque},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::Stream;
use waystation_proto::waystation::worker::{Op, op};

/// Ops of one session queued towards one worker before the session waits: a burst of small requests.
const LANE_OPS: usize = 64;
/// Ids of one kind that ride on one op: freeing a million arrays must not hold up the worker at one go.
const CLEANUP_IDS: usize = 4096;

/// See the module.
#[derive(Debug)]
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    /// The proxy's sequence of launches (D2): an execution gets its number when it leaves.
    launches: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Inner {
    lanes: HashMap<u64, Waiting>,
    /// The lanes that have something to send, each once, the next one first.
    turns: VecDeque<u64>,
    /// Ops that may leave before the worker has taken others.
    credit: u64,
    writer: Option<Waker>,
    closed: bool,
}

/// What a lane has to send.
#[derive(Debug, Default)]
struct Waiting {
    ops: VecDeque<(Op, Option<OwnedSemaphorePermit>)>,
    drops: Vec<u64>,
    releases: Vec<u64>,
    /// Its session is over: the lane goes when it is empty.
    left: bool,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.ops.is_empty() && self.drops.is_empty() && self.releases.is_empty()
    }

    /// The clean-up so far as an op of its own, as much of it as one op takes.
    fn cleanup(&mut self) -> Op {
        Op {
            drops: some(&mut self.drops),
            releases: some(&mut self.releases),
            ..Op::default()
        }
    }
}

fn some(ids: &mut Vec<u64>) -> Vec<u64> {
    if ids.len() <= CLEANUP_IDS {
        return std::mem::take(ids);
    }
    ids.split_off(ids.len() - CLEANUP_IDS)
}

impl Queue {
    /// Nothing leaves it before [`Self::credit`].
    pub(super) fn new(launches: Arc<AtomicU64>) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::new(Inner {
                lanes: HashMap::new(),
                turns: VecDeque::new(),
                credit: 0,
                writer: None,
                closed: false,
            }),
            launches,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing that holds this lock can panic half-way through a change.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a lane and wakes the writer if the lane has something to send now.
    fn change(&self, lane: u64, change: impl FnOnce(&mut Waiting)) {
        let mut inner = self.lock();
        if inner.closed {
            return;
        }
        let waiting = inner.lanes.entry(lane).or_default();
        let idle = waiting.is_empty();
        change(waiting);
        let (busy, gone) = (!waiting.is_empty(), waiting.left && waiting.is_empty());
        if gone {
            inner.lanes.remove(&lane);
        }
        let writer = if idle && busy {
            inner.turns.push_back(lane);
            inner.wake()
        } else {
            None
        };
        drop(inner);
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// Ops that wait here.
    pub(super) fn len(&self) -> usize {
        let inner = self.lock();
        inner.lanes.values().map(|waiting| waiting.ops.len()).sum()
    }

    /// The worker has room for so many more ops.
    pub(super) fn credit(&self, ops: u32) {
        let writer = {
            let mut inner = self.lock();
            inner.credit = inner.credit.saturating_add(u64::from(ops));
            inner.wake()
        };
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// Ends the stream. What is queued is gone, and what comes later as well.
    pub(super) fn close(&self) {
        let (lanes, writer) = {
            let mut inner = self.lock();
            inner.closed = true;
            inner.turns.clear();
            (std::mem::take(&mut inner.lanes), inner.writer.take())
        };
        // With the queued ops go their permits: senders that wait find the lane closed.
        drop(lanes);
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// The next op, in turn.
    fn pop(&self, inner: &mut Inner) -> Option<Op> {
        if inner.credit == 0 {
            return None;
        }
        loop {
            let lane = inner.turns.pop_front()?;
            let Some(waiting) = inner.lanes.get_mut(&lane) else {
                continue;
            };
            let mut op = match waiting.ops.pop_front() {
                Some((op, _room)) => op,
                None => waiting.cleanup(),
            };
            if !waiting.is_empty() {
                inner.turns.push_back(lane);
            } else if waiting.left {
                inner.lanes.remove(&lane);
            }
            inner.credit -= 1;
            op.client = lane;
            if let Some(op::Op::Execute(execute)) = &mut op.op {
                execute.launch = self.launches.fetch_add(1, Relaxed);
            }
            return Some(op);
        }
    }
}

impl Inner {
    /// The writer, when there is something for it to do.
    fn wake(&mut self) -> Option<Waker> {
        if self.credit > 0 && !self.turns.is_empty() {
            self.writer.take()
        } else {
            None
        }
    }
}

/// One session's way into a queue.
#[derive(Debug)]
pub(super) struct Lane {
    queue: Arc<Queue>,
    number: u64,
    room: Arc<Semaphore>,
}

impl Lane {
    /// Numbers are never used twice.
    pub(super) fn open(queue: &Arc<Queue>, number: u64) -> Self {
        Self {
            queue: Arc::clone(queue),
            number,
            room: Arc::new(Semaphore::new(LANE_OPS)),
        }
    }

    /// Queues an op; waits while the lane is full. A closed queue swallows it.
    pub(super) async fn send(&self, op: op::Op) {
        let room = Arc::clone(&self.room).acquire_owned().await.ok();
        self.queue.change(self.number, |waiting| {
            while waiting.drops.len() > CLEANUP_IDS || waiting.releases.len() > CLEANUP_IDS {
                let op = waiting.cleanup();
                waiting.ops.push_back((op, None));
            }
            let op = Op {
                op: Some(op),
                ..waiting.cleanup()
            };
            waiting.ops.push_back((op, room));
        });
    }

    /// Has the worker forget a shard. Never waits.
    pub(super) fn drop_shard(&self, shard: u64) {
        self.queue
            .change(self.number, |waiting| waiting.drops.push(shard));
    }

    /// Has the worker forget the bytes of a transfer. Never waits.
    pub(super) fn release(&self, transfer: u64) {
        self.queue
            .change(self.number, |waiting| waiting.releases.push(transfer));
    }

    /// Queues an op that `Drop` code leaves. Never waits: there are no more of them than of the things that they end.
    pub(super) fn push(&self, op: op::Op) {
        let op = Op {
            op: Some(op),
            ..Op::default()
        };
        self.queue
            .change(self.number, |waiting| waiting.ops.push_back((op, None)));
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.queue
            .change(self.number, |waiting| waiting.left = true);
    }
}

/// The op stream of a worker. Dropped (the connection is gone), it closes the queue.
#[derive(Debug)]
pub(super) struct Ops {
    queue: Arc<Queue>,
    /// Leaves before all others, without credit.
    first: Option<Op>,
}

impl Ops {
    pub(super) fn new(queue: &Arc<Queue>, first: op::Op) -> Self {
        let first = Op {
            op: Some(first),
            ..Op::default()
        };
        Self {
            queue: Arc::clone(queue),
            first: Some(first),
        }
    }
}

impl Stream for Ops {
    type Item = Op;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Op>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(first));
        }
        let mut inner = self.queue.lock();
        if inner.closed {
            return Poll::Ready(None);
        }
        match self.queue.pop(&mut inner) {
            Some(op) => Poll::Ready(Some(op)),
            None => {
                inner.writer = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Ops {
    fn drop(&mut self) {
        self.queue.close();
    }
}

#[cfg(test)]
mod tests;
