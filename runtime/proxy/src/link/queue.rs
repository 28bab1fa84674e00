//! The ops towards one worker: each session has a lane of its own, and the lanes take turns.
//!
//! No more ops are on the way than the worker has room for (its *window*), and each lane holds a bounded number more. A
//! client that floods fills its own lane, is then not read any further, and is slowed by HTTP/2's windows. It goes on when
//! half of its lane has left: a client's requests are then read, sent on and answered many at a time, whatever others do.
//!
//! Who has sent little goes first ([`turns`](super::turns)). While several lanes have something to send, the busy ones have
//! three quarters of the window: so there is room for who goes first. With less the worker runs dry more often, with more
//! there is more on the way before it.
//!
//! Clean-up (shards nobody refers to any more, transfers to release) is left by `Drop` code, which cannot wait. It rides on
//! the lane's next op: whatever used the thing was queued in the same lane before, and a later op finds the room that it
//! had taken. Where no op comes soon, [`sweep`] sends it alone. A client that drops one array a step so costs no
//! message for it.
//!
//! Word of who the other workers are takes no credit and leaves before all else: the worker's window may be full of launches
//! that wait for a worker which is lost. Only the last word counts, so no more than one waits here. So does word that bytes will
//! not come, or that nobody waits for a save: launches may wait for those, too. It leaves as soon as what it is about has. That a client has ended
//! leaves at once: its launches may be what the window is full of.
//!
//! Launches that span workers leave in one order, the same from all queues ([`gang`](super::gang)). A lane whose next op is
//! such a launch, and not the next one, waits without a turn; the lane that has the next one has its turns like any other,
//! so that it comes to it. Lanes without such launches hear nothing of all this.

use std::{
    collections::{HashMap, VecDeque},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_stream::Stream;
use waystation_proto::waystation::worker::{ClientEnded, Op, Peers, op};

use super::{
    gang::{GANG_PLACES, Gang, LATER_PLACES, Order, Place},
    turns::Turns,
};

/// Ops of one session queued towards one worker before the session waits: a burst of small requests.
const LANE_OPS: usize = 128;
/// Ops in a lane that was full when its session goes on.
const REFILL_OPS: usize = LANE_OPS / 2;
/// Ids of one kind that ride on one op: freeing a million arrays must not hold up the worker at one go.
const CLEANUP_IDS: usize = 4096;
/// How long clean-up waits for an op to ride on.
const RIDE_WAIT: Duration = Duration::from_millis(1);

/// See the module.
#[derive(Debug)]
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    /// Has the proxy's sequence of launches (D2): an execution on one worker gets its number when it leaves.
    gang: Arc<Gang>,
    /// Places for launches that span workers.
    places: Arc<Semaphore>,
    /// There is clean-up, or the queue is closed.
    left_behind: Notify,
}

#[derive(Debug)]
struct Inner {
    lanes: HashMap<u64, Waiting>,
    turns: Turns,
    order: Order,
    /// The last word of the other workers, where it has not left.
    peers: Option<Peers>,
    /// Cancellations of what has left.
    cancels: VecDeque<Op>,
    /// [`Queue::left_behind`] has been told, and no sweep has been since.
    sweep_due: bool,
    /// Ops that may leave before the worker has taken others.
    credit: u64,
    /// All that the worker has room for.
    window: u64,
    writer: Option<Waker>,
    closed: bool,
}

#[derive(Debug)]
struct Queued {
    op: Op,
    /// The op's place in the lane, where it has taken one.
    room: Option<OwnedSemaphorePermit>,
    /// Of a launch that spans workers.
    together: Option<Place>,
    /// The op's cancellation, which follows it.
    cancel: Option<Op>,
}

impl Queued {
    fn new(op: Op, room: Option<OwnedSemaphorePermit>) -> Self {
        Self {
            op,
            room,
            together: None,
            cancel: None,
        }
    }
}

/// What a lane has to send.
#[derive(Debug, Default)]
struct Waiting {
    ops: VecDeque<Queued>,
    drops: Vec<u64>,
    releases: Vec<u64>,
    /// Places of ops that have left, kept while the lane is to empty further before its session goes on.
    free: Option<OwnedSemaphorePermit>,
    /// It is among the turns, or its turn is among those that wait for a launch.
    in_turn: bool,
    /// Its session is over: the lane goes when it is empty.
    left: bool,
}

impl Waiting {
    fn has_cleanup(&self) -> bool {
        !self.drops.is_empty() || !self.releases.is_empty()
    }

    fn is_over(&self) -> bool {
        self.left && !self.in_turn && self.ops.is_empty() && !self.has_cleanup()
    }

    /// Whether the next op is a launch that spans workers.
    fn is_at_launch(&self) -> bool {
        self.ops.front().is_some_and(|op| op.together.is_some())
    }

    /// The next op, and its cancellation; frees its place, and those of others before it.
    fn pop(&mut self) -> Option<(Op, Option<Op>)> {
        let Queued {
            op, room, cancel, ..
        } = self.ops.pop_front()?;
        match (&mut self.free, room) {
            (Some(free), Some(room)) => free.merge(room),
            (free, Some(room)) => *free = Some(room),
            (_, None) => {}
        }
        if self.ops.len() <= REFILL_OPS {
            self.free = None;
        }
        Some((op, cancel))
    }

    /// Puts an op down behind the others, with the clean-up so far.
    fn push(&mut self, op: op::Op, room: Option<OwnedSemaphorePermit>, together: Option<Place>) {
        while self.drops.len() > CLEANUP_IDS || self.releases.len() > CLEANUP_IDS {
            let op = self.cleanup();
            self.ops.push_back(Queued::new(op, None));
        }
        let op = Op {
            op: Some(op),
            ..self.cleanup()
        };
        self.ops.push_back(Queued {
            together,
            ..Queued::new(op, room)
        });
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
    pub(super) fn new(gang: Arc<Gang>) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::new(Inner {
                lanes: HashMap::new(),
                turns: Turns::default(),
                order: Order::default(),
                peers: None,
                cancels: VecDeque::new(),
                sweep_due: false,
                credit: 0,
                window: 0,
                writer: None,
                closed: false,
            }),
            gang,
            places: Arc::new(Semaphore::new(GANG_PLACES)),
            left_behind: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing that holds this lock can panic half-way through a change.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a lane and wakes the writer if the lane has something to send now.
    fn change(&self, lane: u64, change: impl FnOnce(&mut Waiting)) {
        self.change_with_order(lane, |waiting, _| change(waiting));
    }

    fn change_with_order(&self, lane: u64, change: impl FnOnce(&mut Waiting, &mut Order)) {
        let mut inner = self.lock();
        if inner.closed {
            return;
        }
        let Inner { lanes, order, .. } = &mut *inner;
        let waiting = lanes.entry(lane).or_default();
        change(waiting, order);
        let (busy, over) = (!waiting.ops.is_empty(), waiting.is_over());
        let sweep = waiting.has_cleanup() && !inner.sweep_due;
        inner.sweep_due |= sweep;
        if over {
            inner.lanes.remove(&lane);
        }
        let writer = if busy {
            inner.take_turn(lane);
            inner.wake()
        } else {
            None
        };
        drop(inner);
        if sweep {
            self.left_behind.notify_one();
        }
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// Has the clean-up of lanes without ops take its turn.
    pub(super) fn send_cleanup(&self) {
        let writer = {
            let mut inner = self.lock();
            inner.sweep_due = false;
            let lanes: Vec<u64> = inner
                .lanes
                .iter()
                .filter(|(_, waiting)| waiting.has_cleanup())
                .map(|(lane, _)| *lane)
                .collect();
            for lane in lanes {
                inner.take_turn(lane);
            }
            inner.wake()
        };
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// Tells the worker of the others, in place of an older word that has not left. Never waits.
    pub(super) fn tell(&self, peers: Peers) {
        let writer = {
            let mut inner = self.lock();
            if inner.closed {
                return;
            }
            inner.peers = Some(peers);
            inner.wake()
        };
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// Cancels an op of a lane, queued or gone before. Never waits: there are no more cancellations than such ops.
    pub(super) fn cancel(&self, lane: u64, cancel: op::Op) {
        let writer = {
            let mut inner = self.lock();
            if inner.closed {
                return;
            }
            let waiting = inner.lanes.get_mut(&lane);
            let mut queued = waiting.into_iter().flat_map(|waiting| &mut waiting.ops);
            let about = queued.find(|queued| is_about(&cancel, &queued.op));
            let cancel = Op {
                op: Some(cancel),
                client: lane,
                ..Op::default()
            };
            match about {
                Some(about) => about.cancel = Some(cancel),
                None => inner.cancels.push_back(cancel),
            }
            inner.wake()
        };
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// Whether the worker is lost.
    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Ops that wait here.
    pub(super) fn len(&self) -> usize {
        let inner = self.lock();
        let lanes = inner.lanes.values().map(|waiting| waiting.ops.len());
        lanes.sum::<usize>() + usize::from(inner.peers.is_some()) + inner.cancels.len()
    }

    /// Lanes that are open or have something to send.
    #[cfg(test)]
    pub(super) fn lanes(&self) -> usize {
        self.lock().lanes.len()
    }

    /// The worker has room for so many more ops.
    pub(super) fn credit(&self, ops: u32) {
        let writer = {
            let mut inner = self.lock();
            inner.credit = inner.credit.saturating_add(u64::from(ops));
            // First comes all there is, and never more than has left later.
            inner.window = inner.window.max(inner.credit);
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
            inner.order.clear();
            inner.peers = None;
            inner.cancels.clear();
            (std::mem::take(&mut inner.lanes), inner.writer.take())
        };
        // With the queued ops go their permits: senders that wait find the lane closed.
        drop(lanes);
        self.left_behind.notify_one();
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// The next op.
    fn pop(&self, inner: &mut Inner) -> Option<Op> {
        if let Some(peers) = inner.peers.take() {
            // From no client.
            return Some(Op {
                op: Some(op::Op::Peers(peers)),
                ..Op::default()
            });
        }
        if let Some(cancel) = inner.cancels.pop_front() {
            return Some(cancel);
        }
        if inner.credit == 0 {
            return None;
        }
        loop {
            let round = inner.round_may_send();
            let turn = inner.turns.take(round)?;
            let Some(waiting) = inner.lanes.get_mut(&turn.lane) else {
                continue;
            };
            let lane = turn.lane;
            let together = waiting.is_at_launch();
            if together && !inner.order.is_next(lane) {
                inner.order.wait(turn);
                continue;
            }
            let op = match waiting.pop() {
                Some((op, cancel)) => {
                    inner.cancels.extend(cancel);
                    Some(op)
                }
                None if waiting.has_cleanup() => Some(waiting.cleanup()),
                // An op took along what the turn was for.
                None => None,
            };
            // Clean-up that is left here may still ride, unless the sweep has passed or is at it.
            let swept = op.as_ref().is_some_and(|op| op.op.is_none()) || !inner.sweep_due;
            let more = !waiting.ops.is_empty() || (waiting.has_cleanup() && swept);
            if more {
                inner.turns.go_on(turn);
            } else {
                waiting.in_turn = false;
                if waiting.is_over() {
                    inner.lanes.remove(&lane);
                }
            }
            let Some(mut op) = op else { continue };
            if together && let Some(turn) = inner.order.left() {
                inner.turns.resume(turn);
            }
            inner.credit -= 1;
            op.client = lane;
            // Those that span workers have one.
            if let Some(op::Op::Execute(execute)) = &mut op.op
                && execute.launch == 0
            {
                execute.launch = self.gang.next_launch();
            }
            return Some(op);
        }
    }
}

impl Inner {
    /// Puts a lane among the turns, unless it is there.
    fn take_turn(&mut self, lane: u64) {
        if let Some(waiting) = self.lanes.get_mut(&lane)
            && !std::mem::replace(&mut waiting.in_turn, true)
        {
            self.turns.join(lane);
        }
    }

    /// Whether lanes that do not go first may send, by what is on the way.
    fn round_may_send(&self) -> bool {
        let share = match self.turns.several() {
            true => self.window - self.window / 4,
            false => self.window,
        };
        self.window - self.credit < share
    }

    /// The writer, when there is something for it to do.
    fn wake(&mut self) -> Option<Waker> {
        let lanes = self.credit > 0 && self.turns.any(self.round_may_send());
        if lanes || self.peers.is_some() || !self.cancels.is_empty() {
            self.writer.take()
        } else {
            None
        }
    }
}

/// Whether a cancellation is that of an op.
fn is_about(cancel: &op::Op, queued: &Op) -> bool {
    match (cancel, &queued.op) {
        (op::Op::CancelPut(cancel), Some(op::Op::Put(put))) => cancel.transfer == put.transfer,
        (op::Op::Cancel(cancel), Some(op::Op::SaveArrays(save))) => cancel.request == save.request,
        (op::Op::Cancel(cancel), Some(op::Op::RestoreArrays(restore))) => {
            cancel.request == restore.request
        }
        _ => false,
    }
}

/// Sends the clean-up that no op takes along, until the queue is closed.
pub(super) async fn sweep(queue: Arc<Queue>) {
    loop {
        queue.left_behind.notified().await;
        if queue.lock().closed {
            return;
        }
        tokio::time::sleep(RIDE_WAIT).await;
        queue.send_cleanup();
    }
}

/// A place in a lane.
#[derive(Debug)]
pub(super) struct Room(Option<OwnedSemaphorePermit>);

impl Room {
    /// For what comes in any number only as other ops have.
    pub(super) fn none() -> Self {
        Self(None)
    }
}

/// One session's way into a queue.
#[derive(Debug)]
pub(super) struct Lane {
    queue: Arc<Queue>,
    number: u64,
    room: Arc<Semaphore>,
    /// Places for launches that are placed later.
    later: Arc<Semaphore>,
}

impl Lane {
    /// Numbers are never used twice.
    pub(super) fn open(queue: &Arc<Queue>, number: u64) -> Self {
        Self {
            queue: Arc::clone(queue),
            number,
            room: Arc::new(Semaphore::new(LANE_OPS)),
            later: Arc::new(Semaphore::new(LATER_PLACES)),
        }
    }

    /// Waits while the lane is full.
    pub(super) async fn room(&self) -> Room {
        // The semaphore is never closed.
        Room(Arc::clone(&self.room).acquire_owned().await.ok())
    }

    /// Waits for a place in the queue among the launches that span workers, or among the client's own that are placed `later`.
    pub(super) async fn place_together(&self, later: bool) -> Place {
        let places = match later {
            true => &self.later,
            false => &self.queue.places,
        };
        // The semaphore is never closed.
        Place(Arc::clone(places).acquire_owned().await.ok())
    }

    /// Queues an op. A closed queue swallows it.
    pub(super) fn send(&self, op: op::Op, Room(room): Room) {
        self.queue
            .change(self.number, |waiting| waiting.push(op, room, None));
    }

    /// Whether the worker is lost.
    pub(super) fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }

    /// The queue that it leads into.
    pub(super) fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    /// The session's.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Queues what places a part of a launch that spans workers, behind those queued before in whatever lane. A closed queue
    /// swallows it.
    pub(super) fn send_together(&self, part: op::Op, Room(room): Room, place: Place) {
        let number = self.number;
        self.queue.change_with_order(number, |waiting, order| {
            waiting.push(part, room, Some(place));
            order.join(number);
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

    /// Tells the worker that the session has ended. Never waits; ops that are queued may leave later.
    pub(super) fn end(&self) {
        self.cancel(op::Op::ClientEnded(ClientEnded {}));
    }

    /// Cancels an op of this lane, see [`Queue::cancel`].
    pub(super) fn cancel(&self, cancel: op::Op) {
        self.queue.cancel(self.number, cancel);
    }

    /// Queues an op that `Drop` code leaves. Never waits: there are no more of them than of the things that they end.
    pub(super) fn push(&self, op: op::Op) {
        let op = Op {
            op: Some(op),
            ..Op::default()
        };
        self.queue.change(self.number, |waiting| {
            waiting.ops.push_back(Queued::new(op, None))
        });
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
