//! The workers of a slice whose plugin joins them to one client: who has come, and what they share.
//!
//! A group forms when all workers of its slice have come. It is that set of processes and no other: when one of them has gone,
//! the group is gone for all, with its store, and a new one forms when all have come again. A worker whose stream breaks has a
//! lease to come back. A resource manager that starts anew knows nothing of groups; their workers bring them back, each with
//! what it had put.

mod service;
mod store;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

pub(crate) use self::service::Service;
use self::store::{Entry, Store};

/// A request with the longest key and value that are kept, and some more, so that longer ones are told why not.
pub(crate) const MAX_MESSAGE_BYTES: usize = 24 << 20;

/// Workers of one group at most.
const MAX_WORKERS: u32 = 65_536;

/// What a member knows of its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Not all have come.
    Gathering,
    /// All have.
    Formed,
    /// Why it is no more.
    Gone(String),
}

/// Who asks to be in a group.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) slice: u32,
    pub(crate) task: u32,
    /// Workers of the slice as the worker knows it; 0: it does not.
    pub(crate) tasks: u32,
    /// For messages.
    pub(crate) address: String,
    /// The group that it is of already, or 0.
    pub(crate) resume: u64,
}

/// Why a worker is in no group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// It cannot be as it says.
    #[error("{0}")]
    Wrong(String),
    /// The group that it goes on with is no more.
    #[error("{0}")]
    Gone(String),
    /// Another one is in its place, or was a moment ago.
    #[error("task {task} of slice {slice} is taken by the worker at {address}")]
    Taken {
        slice: u32,
        task: u32,
        address: String,
    },
}

/// Why the store did not do what was asked of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StoreError {
    /// No such group.
    #[error("group {0} is no more: one of its workers has gone, or has not come back")]
    Gone(u64),
    /// The key has a value.
    #[error("the key has a value already")]
    Exists,
    /// Beyond a bound.
    #[error("{0}")]
    Full(String),
}

/// What there is of a key.
#[derive(Debug)]
pub(crate) struct Look {
    pub(crate) value: Option<bytes::Bytes>,
    /// Not when a worker that has yet to come back may have put it.
    pub(crate) is_whole: bool,
    /// Of what is put after this.
    pub(crate) news: watch::Receiver<u64>,
}

#[derive(Debug)]
struct Seat {
    /// Tells a worker that came back from its earlier stream.
    serial: u64,
    here: bool,
    address: String,
    /// It has named the group: it had heard that it had formed.
    knows: bool,
}

#[derive(Debug)]
struct Group {
    id: u64,
    nodes: u32,
    seats: BTreeMap<u32, Seat>,
    store: Store,
    phase: watch::Sender<Phase>,
    /// Of puts.
    news: watch::Sender<u64>,
}

impl Group {
    fn new(id: u64, nodes: u32, phase: Phase) -> Group {
        Group {
            id,
            nodes,
            seats: BTreeMap::new(),
            store: Store::default(),
            phase: watch::Sender::new(phase),
            news: watch::Sender::new(0),
        }
    }

    /// Whether a worker of a slice of `nodes`, as it says, may go on with this group, or end it by being a new one.
    fn admits(&self, who: &Candidate, nodes: u32) -> Result<(), Refusal> {
        if who.resume == self.id {
            return Ok(());
        }
        if who.resume != 0 {
            return Err(Refusal::Gone(format!(
                "slice {} has another group than {}, with other workers",
                who.slice, who.resume
            )));
        }
        // Two workers of one place, or of two minds about the slice, must not end each other's groups in turn.
        let seat = self.seats.get(&who.task);
        if let Some(seat) = seat.filter(|seat| seat.here) {
            return Err(Refusal::Taken {
                slice: who.slice,
                task: who.task,
                address: seat.address.clone(),
            });
        }
        let mut others = self.seats.values().filter(|seat| seat.here);
        match others.next() {
            Some(other) if nodes != self.nodes => Err(Refusal::Wrong(format!(
                "the worker says that its slice has {nodes} worker(s), and the one at {} that it has {} (--slice_tasks)",
                other.address, self.nodes
            ))),
            _ => Ok(()),
        }
    }

    /// Whether this is a worker of the group whose stream broke before it heard that the group had formed. One that starts anew at
    /// the same address is as good, since nobody has heard of the one before.
    fn awaits(&self, who: &Candidate) -> bool {
        let seat = self.seats.get(&who.task);
        seat.is_some_and(|seat| !seat.knows && seat.address == who.address)
            && !self.store.has_of(who.task)
    }

    /// All its workers have come, or have come back: what the store does not have nobody has put.
    fn is_whole(&self) -> bool {
        u32::try_from(self.seats.len()) == Ok(self.nodes)
    }

    fn is_formed(&self) -> bool {
        *self.phase.borrow() == Phase::Formed
    }

    fn end(self, why: String) {
        self.phase.send_replace(Phase::Gone(why));
    }
}

/// All groups of a cluster; at most one a slice.
#[derive(Debug)]
pub(crate) struct Groups {
    slices: u32,
    /// Workers of each slice, where that was told.
    workers: Option<u32>,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    groups: BTreeMap<u32, Group>,
    last_id: u64,
    last_serial: u64,
}

/// A worker's part in a group, until it is dropped.
#[derive(Debug)]
pub(crate) struct Member {
    groups: Arc<Groups>,
    slice: u32,
    task: u32,
    serial: u64,
    pub(crate) id: u64,
    pub(crate) nodes: u32,
    pub(crate) phase: watch::Receiver<Phase>,
}

/// A member that has left a group that had formed. The group is gone with it unless it comes back.
#[derive(Debug)]
pub(crate) struct Absent {
    slice: u32,
    task: u32,
    serial: u64,
}

impl Groups {
    pub(crate) fn new(slices: u32, workers: Option<u32>) -> Arc<Groups> {
        Arc::new(Groups {
            slices,
            workers,
            inner: Mutex::default(),
        })
    }

    /// Takes a worker in. `now_ms`: Unix time in milliseconds; ids start from it, so that they go on growing when the resource
    /// manager starts anew.
    pub(crate) fn join(self: &Arc<Self>, who: Candidate, now_ms: u64) -> Result<Member, Refusal> {
        let nodes = self.nodes(&who)?;
        let mut inner = self.lock();
        let inner = &mut *inner;
        if let Some(known) = inner.groups.get(&who.slice) {
            known.admits(&who, nodes)?;
        }
        let known = inner.groups.remove(&who.slice);
        let group = match known {
            Some(group) if who.resume == group.id => group,
            Some(group) if group.nodes == nodes && (!group.is_formed() || group.awaits(&who)) => {
                group
            }
            Some(group) => {
                group.end(format!(
                    "its task {} has started anew, at {}",
                    who.task, who.address
                ));
                inner.new_group(nodes, now_ms)
            }
            None if who.resume != 0 => {
                inner.last_id = inner.last_id.max(who.resume);
                Group::new(who.resume, nodes, Phase::Formed)
            }
            None => inner.new_group(nodes, now_ms),
        };
        inner.last_serial += 1;
        let mut group = group;
        group.seats.insert(
            who.task,
            Seat {
                serial: inner.last_serial,
                here: true,
                address: who.address,
                knows: who.resume != 0,
            },
        );
        if group.is_whole() {
            group.phase.send_if_modified(|phase| {
                let forms = *phase == Phase::Gathering;
                if forms {
                    *phase = Phase::Formed;
                }
                forms
            });
        }
        let member = Member {
            groups: Arc::clone(self),
            slice: who.slice,
            task: who.task,
            serial: inner.last_serial,
            id: group.id,
            nodes: group.nodes,
            phase: group.phase.subscribe(),
        };
        inner.groups.insert(who.slice, group);
        Ok(member)
    }

    /// Workers of the candidate's slice.
    fn nodes(&self, who: &Candidate) -> Result<u32, Refusal> {
        // As at registration.
        let nodes = self.workers.unwrap_or(who.tasks.max(1));
        let wrong = |why: String| Err(Refusal::Wrong(why));
        if who.slice >= self.slices {
            return wrong(format!(
                "there is no slice {}, only {} (--instance_count)",
                who.slice, self.slices
            ));
        }
        if who.tasks != 0 && who.tasks != nodes {
            return wrong(format!(
                "the worker says that its slice has {} worker(s), and the resource manager that it has {nodes}",
                who.tasks
            ));
        }
        if nodes > MAX_WORKERS || who.task >= nodes {
            return wrong(format!(
                "task {} of a slice of {nodes} worker(s), of at most {MAX_WORKERS} (--slice_tasks)",
                who.task
            ));
        }
        Ok(nodes)
    }

    /// Ends the group of a worker that has not come back. Says which it was.
    pub(crate) fn expire(&self, absent: &Absent) -> Option<u64> {
        let mut inner = self.lock();
        let group = inner.groups.get(&absent.slice)?;
        let seat = group.seats.get(&absent.task)?;
        if seat.serial != absent.serial || seat.here {
            return None;
        }
        let why = format!("its task {} at {} has gone", absent.task, seat.address);
        let group = inner.groups.remove(&absent.slice)?;
        let id = group.id;
        group.end(why);
        Some(id)
    }

    /// Ends the group of a worker that says it is to end.
    pub(crate) fn leave(&self, id: u64, task: u32, reason: &str) -> Result<(), StoreError> {
        let mut inner = self.lock();
        let mut groups = inner.groups.iter();
        let has = |group: &Group| group.id == id && group.seats.contains_key(&task);
        let found = groups.find(|(_, group)| has(group));
        let slice = found.map(|(slice, _)| *slice).ok_or(StoreError::Gone(id))?;
        let Some(group) = inner.groups.remove(&slice) else {
            return Err(StoreError::Gone(id));
        };
        let address = group.seats.get(&task).map(|seat| seat.address.clone());
        group.end(format!(
            "its task {task} at {} has left: {reason}",
            address.unwrap_or_default()
        ));
        Ok(())
    }

    /// Ends a group that its workers have brought back, and not all of them.
    pub(crate) fn expire_incomplete(&self, id: u64) -> bool {
        let mut inner = self.lock();
        let mut groups = inner.groups.iter();
        let found = groups.find(|(_, group)| group.id == id && !group.is_whole());
        let Some(slice) = found.map(|(slice, _)| *slice) else {
            return false;
        };
        if let Some(group) = inner.groups.remove(&slice) {
            let why =
                "not all of its workers have come back to a resource manager that started anew";
            group.end(why.to_owned());
        }
        true
    }

    /// Who has come, of how many, for logs.
    pub(crate) fn progress(&self, slice: u32) -> String {
        let inner = self.lock();
        inner.groups.get(&slice).map_or_else(String::new, |group| {
            let here = group.seats.values().filter(|seat| seat.here).count();
            format!("{here} of {} workers", group.nodes)
        })
    }

    /// Stores a value.
    pub(crate) fn put(&self, id: u64, key: &[u8], entry: Entry) -> Result<(), StoreError> {
        let mut inner = self.lock();
        let group = inner.group(id)?;
        group.store.put(key, entry)?;
        group.news.send_modify(|news| *news = news.wrapping_add(1));
        Ok(())
    }

    /// Looks for the value of a key.
    pub(crate) fn get(&self, id: u64, key: &[u8]) -> Result<Look, StoreError> {
        let mut inner = self.lock();
        let group = inner.group(id)?;
        Ok(Look {
            value: group.store.get(key)?,
            is_whole: group.is_whole(),
            news: group.news.subscribe(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every step leaves the state usable.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn new_group(&mut self, nodes: u32, now_ms: u64) -> Group {
        self.last_id = now_ms.max(self.last_id.saturating_add(1));
        Group::new(self.last_id, nodes, Phase::Gathering)
    }

    fn group(&mut self, id: u64) -> Result<&mut Group, StoreError> {
        let mut groups = self.groups.values_mut();
        groups
            .find(|group| group.id == id)
            .ok_or(StoreError::Gone(id))
    }
}

impl Member {
    /// Gives the part up. What comes back may still be kept from being missed.
    fn leave(&self) -> Option<Absent> {
        let mut inner = self.groups.lock();
        let group = inner.groups.get_mut(&self.slice)?;
        let formed = group.is_formed();
        let seat = group.seats.get_mut(&self.task)?;
        if seat.serial != self.serial {
            // A later stream of the worker has taken its place.
            return None;
        }
        if formed {
            seat.here = false;
            return Some(Absent {
                slice: self.slice,
                task: self.task,
                serial: self.serial,
            });
        }
        group.seats.remove(&self.task);
        if group.seats.is_empty() {
            inner.groups.remove(&self.slice);
        }
        None
    }
}

#[cfg(test)]
mod tests;
