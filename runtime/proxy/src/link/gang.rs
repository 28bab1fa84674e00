//! What a proxy's workers are to each other, for programs that span them.
//!
//! A device starts launches one after the other, and one that waits for another worker's part holds up what comes behind it
//! there. So all workers must get the launches that they share in one order. A launch that spans workers is put into the
//! queues of all of them at one go, under one lock ([`launch_together`]), and each queue lets such launches leave in that
//! order ([`Order`]), whichever clients' lanes they lie in. Either all queues have a launch or none has.
//!
//! A launch that waits for what may be long in coming (bytes that a client has not sent, a restore) would hold up those of all other
//! clients behind it. So its parts go to the workers without a place in that order, and get it, all at one go, when nothing more is
//! needed from outside ([`Needs`]). A client's launches keep their own order: what comes behind such a one is placed later, too.
//! However many it has, only a few of them have their place and have not started: other clients' launches are placed behind those,
//! and not behind all that one client has sent ahead.
//!
//! Workers reach each other by what they are told here: a number, an address, and a secret that all of them share.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;
use waystation_proto::waystation::worker::{Execute, Peers, Start, op, peers::Peer};

use super::{
    Answer, Link,
    queue::{Lane, Queue, Room},
    turns::Turn,
};
use crate::{lock::lock, needs::Needs};

/// Launches that span workers and are queued towards one of them. More wait with their sessions, which take turns: a client
/// that executes now and then does not wait for all that a busy one has sent.
pub(super) const GANG_PLACES: usize = 16;

/// Launches of one client that wait to be placed.
pub(super) const LATER_PLACES: usize = 1 << 13;

/// Launches of one client that were placed later and have not started on all their workers. The worker's window does not bound them:
/// their ops are gone by then.
const PLACED: usize = GANG_PLACES;

/// All workers of a proxy.
pub(crate) struct Gang {
    /// The next launch's number (D2).
    launches: AtomicU64,
    /// Held while a launch is put into several queues. Launches that are to be placed later, by client, in its order.
    order: Mutex<Later>,
    processes: AtomicU32,
    secret: Bytes,
    members: Mutex<Members>,
}

impl std::fmt::Debug for Gang {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the secret.
        f.debug_struct("Gang").finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Later {
    /// Only those that have such launches.
    clients: HashMap<u64, Backlog>,
    /// Those that have their place, by number, until all their workers have started them.
    placed: HashMap<u64, Placed>,
}

/// A client's launches that are placed later.
#[derive(Debug, Default)]
struct Backlog {
    unplaced: VecDeque<Unplaced>,
    /// How many have their place and have not started.
    placed: usize,
}

#[derive(Debug)]
struct Placed {
    client: u64,
    /// Those of the workers that have not started it.
    queues: Vec<Arc<Queue>>,
}

impl Later {
    /// Takes out a launch that waits for no worker any more.
    fn started(&mut self, launch: u64) -> Option<u64> {
        let client = self.placed.remove(&launch)?.client;
        if let Some(backlog) = self.clients.get_mut(&client) {
            backlog.placed -= 1;
        }
        Some(client)
    }
}

/// A launch whose parts have no place in the order yet.
#[derive(Debug)]
struct Unplaced {
    launch: u64,
    lanes: Vec<(Arc<Lane>, Place)>,
    needs: Needs,
    /// The needs will tell.
    told: bool,
}

impl Unplaced {
    /// Whether one of its workers is lost, with which it fails.
    fn is_lost(&self) -> bool {
        self.lanes.iter().any(|(lane, _)| lane.is_closed())
    }
}

#[derive(Debug, Default)]
struct Members {
    /// By number.
    living: BTreeMap<u32, Member>,
    /// Not all have been told who is there.
    changed: bool,
}

#[derive(Debug)]
struct Member {
    peer: Peer,
    queue: Arc<Queue>,
}

impl Gang {
    /// # Errors
    /// When the system gives no random numbers.
    pub(crate) fn new() -> std::io::Result<Arc<Self>> {
        let mut secret = [0; 32];
        let mut rest = secret.as_mut_slice();
        while !rest.is_empty() {
            let got = rustix::rand::getrandom(&mut *rest, rustix::rand::GetRandomFlags::empty())?;
            rest = rest.split_at_mut(got).1;
        }
        Ok(Arc::new(Self {
            launches: AtomicU64::new(1),
            order: Mutex::default(),
            processes: AtomicU32::new(0),
            secret: Bytes::copy_from_slice(&secret),
            members: Mutex::default(),
        }))
    }

    pub(super) fn next_launch(&self) -> u64 {
        self.launches.fetch_add(1, Relaxed)
    }

    /// A number for a worker, never given twice: what was meant for one that is gone reaches no other.
    pub(super) fn next_process(&self) -> u32 {
        self.processes.fetch_add(1, Relaxed)
    }

    /// Numbers a client's launch and puts its parts into their queues.
    fn send<'a>(
        self: &Arc<Self>,
        client: u64,
        needs: Needs,
        parts: impl Iterator<Item = ((&'a Arc<Lane>, Execute), (Room, Place))>,
    ) {
        let mut order = lock(&self.order);
        let launch = self.next_launch();
        let waits = order.clients.contains_key(&client);
        if !waits && needs.are_met() {
            for ((lane, part), (room, place)) in parts {
                lane.send_together(op::Op::Execute(Execute { launch, ..part }), room, place);
            }
            return;
        }
        let mut lanes = Vec::new();
        for ((lane, part), (room, place)) in parts {
            let part = Execute {
                launch,
                placed_later: true,
                ..part
            };
            lane.send(op::Op::Execute(part), room);
            lanes.push((Arc::clone(lane), place));
        }
        let backlog = order.clients.entry(client).or_default();
        backlog.unplaced.push_back(Unplaced {
            launch,
            lanes,
            needs,
            told: false,
        });
        self.place(order, client);
    }

    /// Whether a launch of the client that is sent now is placed later.
    fn places_later(&self, client: u64, needs: &Needs) -> bool {
        !needs.are_met() || lock(&self.order).clients.contains_key(&client)
    }

    /// One more thing that a launch needs is there.
    fn met(self: &Arc<Self>, client: u64, launch: u64) {
        let mut order = lock(&self.order);
        let backlog = order.clients.get_mut(&client);
        let first = backlog.and_then(|backlog| backlog.unplaced.front_mut());
        // Others have gone since, if a worker of theirs was lost.
        if let Some(first) = first.filter(|first| first.launch == launch) {
            first.told = false;
            self.place(order, client);
        }
    }

    /// A worker has started its part of a launch that was placed later, or will not.
    pub(super) fn started(self: &Arc<Self>, queue: &Arc<Queue>, launch: u64) {
        let mut order = lock(&self.order);
        let Some(placed) = order.placed.get_mut(&launch) else {
            return;
        };
        placed.queues.retain(|other| !Arc::ptr_eq(other, queue));
        if placed.queues.is_empty()
            && let Some(client) = order.started(launch)
        {
            self.place(order, client);
        }
    }

    /// Places the client's launches, up to the first one that needs something still, and no more than may have their place.
    fn place(self: &Arc<Self>, mut order: MutexGuard<'_, Later>, client: u64) {
        let mut placed = Vec::new();
        let later = &mut *order;
        while let Some(backlog) = later.clients.get_mut(&client) {
            let Some(first) = backlog.unplaced.front_mut() else {
                if backlog.placed == 0 {
                    later.clients.remove(&client);
                }
                break;
            };
            if backlog.placed >= PLACED {
                break;
            }
            if !first.is_lost() {
                if !first.told {
                    let (gang, launch) = (Arc::clone(self), first.launch);
                    let then = move || gang.met(client, launch);
                    first.told = first.needs.when_one_is_met(then);
                }
                if first.told {
                    break;
                }
            }
            let Some(first) = backlog.unplaced.pop_front() else {
                break;
            };
            let launch = first.launch;
            let mut queues = Vec::new();
            for (lane, place) in first.lanes {
                lane.send_together(op::Op::Start(Start { launch }), Room::none(), place);
                // One that is lost from now on is found by `lost`.
                if !lane.is_closed() {
                    queues.push(Arc::clone(lane.queue()));
                }
                placed.push(lane);
            }
            if !queues.is_empty() {
                backlog.placed += 1;
                later.placed.insert(launch, Placed { client, queues });
            }
        }
        drop(order);
        // Their sessions may be over, and lanes go with them.
        drop(placed);
    }

    pub(super) fn secret(&self) -> Bytes {
        self.secret.clone()
    }

    /// A worker takes part from now on. The others hear of it by [`Self::tell`].
    pub(super) fn join(&self, peer: Peer, queue: &Arc<Queue>) {
        let (process, queue) = (peer.process, Arc::clone(queue));
        let mut members = lock(&self.members);
        members.living.insert(process, Member { peer, queue });
        members.changed = true;
    }

    /// A worker is gone, and its queue closed; the others are told at once.
    pub(super) fn leave(self: &Arc<Self>, process: u32) {
        {
            let mut members = lock(&self.members);
            if members.living.remove(&process).is_none() {
                return;
            }
            members.changed = true;
        }
        self.tell();
        self.lost();
    }

    /// No launch waits for a worker whose queue is closed any more.
    fn lost(self: &Arc<Self>) {
        let clients: Vec<u64> = {
            let mut order = lock(&self.order);
            let mut ended = Vec::new();
            for (launch, placed) in &mut order.placed {
                placed.queues.retain(|queue| !queue.is_closed());
                if placed.queues.is_empty() {
                    ended.push(*launch);
                }
            }
            for launch in ended {
                order.started(launch);
            }
            order.clients.keys().copied().collect()
        };
        for client in clients {
            self.place(lock(&self.order), client);
        }
    }

    /// Tells every worker who the others are, if that has changed.
    pub(crate) fn tell(&self) {
        // Under the lock, so that no older word comes after a newer one.
        let mut members = lock(&self.members);
        if !std::mem::take(&mut members.changed) {
            return;
        }
        for (process, member) in &members.living {
            let others = members.living.iter().filter(|(other, _)| *other != process);
            member.queue.tell(Peers {
                peers: others.map(|(_, other)| other.peer.clone()).collect(),
            });
        }
    }
}

/// Sends the parts of one launch to its workers, in one order with all others. What comes back tells the end of each part
/// that is watched. Nothing is sent where the caller goes before there is room for all parts. `needs` are those of the inputs.
pub(crate) async fn launch_together(
    mut parts: Vec<(Arc<Link>, Execute)>,
    needs: Needs,
) -> Vec<Answer> {
    let Some((link, _)) = parts.first() else {
        return Vec::new();
    };
    let (gang, client) = (Arc::clone(&link.wire.gang), link.lane.number());
    // Whoever has a place and waits for the next one waits for a greater number's: nobody waits in a circle.
    parts.sort_by_key(|(link, _)| link.wire.process);
    let later = gang.places_later(client, &needs);
    let rooms = rooms(parts.iter().map(|(link, _)| &link.lane), later).await;
    let watched = parts.iter().filter(|(_, part)| part.watch != 0);
    let answers = watched
        .map(|(link, part)| link.expect(part.watch))
        .collect();
    let parts = parts.iter_mut();
    gang.send(
        client,
        needs,
        parts
            .map(|(link, part)| (&link.lane, std::mem::take(part)))
            .zip(rooms),
    );
    answers
}

/// Waits for room in each of the lanes, and for a place among the launches.
async fn rooms(lanes: impl Iterator<Item = &Arc<Lane>>, later: bool) -> Vec<(Room, Place)> {
    let mut rooms = Vec::new();
    for lane in lanes {
        rooms.push((lane.room().await, lane.place_together(later).await));
    }
    rooms
}

/// A launch's place among those queued that span workers, given back when it leaves.
#[derive(Debug)]
pub(super) struct Place(
    #[expect(dead_code, reason = "held")] pub(super) Option<OwnedSemaphorePermit>,
);

/// The order in which launches that span workers leave one queue.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The lane of each, in order. Those of one lane leave in its own order anyway.
    lanes: VecDeque<u64>,
    /// Turns of lanes whose next op is such a launch, and not the next one.
    waiting: HashMap<u64, Turn>,
}

impl Order {
    /// A launch has been put into a lane.
    pub(super) fn join(&mut self, lane: u64) {
        self.lanes.push_back(lane);
    }

    /// Whether the next launch is in the lane.
    pub(super) fn is_next(&self, lane: u64) -> bool {
        self.lanes.front() == Some(&lane)
    }

    /// The lane has its turn when the launch is the next one.
    pub(super) fn wait(&mut self, turn: Turn) {
        self.waiting.insert(turn.lane, turn);
    }

    /// The next launch has left. The turn that waited for it.
    pub(super) fn left(&mut self) -> Option<Turn> {
        self.lanes.pop_front();
        self.waiting.remove(self.lanes.front()?)
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests;
