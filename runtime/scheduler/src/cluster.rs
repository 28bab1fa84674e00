//! Who is in which place, and which device ids follow from that. Pure: no clock, no network.
//!
//! A place is a (slice, task). All slices are alike: the devices of a task's worker are those that the instance type says,
//! or, without one, those of the first worker seen in that task of any slice. Device ids are contiguous in the order of
//! places, so the ids of a place never change while the resource manager lives, whichever slices are there. But where the size
//! of a slice was learned from workers, it is learned anew from the first one that comes when all have gone.

mod refusal;

use std::collections::{BTreeMap, BTreeSet};

use waystation_proto::waystation::scheduler::{
    AllottedWorker, Hello, WorkerInventory, allotted_worker::Presence,
};

pub(crate) use self::refusal::Refusal;
use crate::holds::Says;

/// Places of which a refusal is remembered; a worker's word must not make them without end.
const MAX_REFUSALS: usize = 1024;
/// Longest reason kept: it may repeat what the worker says.
const MAX_REFUSAL_CHARS: usize = 1024;

/// Identifies one registration; a worker that comes back gets another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member(u64);

/// A worker's position in the cluster. The order of places is the order of device ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) slice: u32,
    pub(crate) task: u32,
}

/// Under which name a worker is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Host<'a> {
    Unknown,
    /// As it has said itself.
    Introduced(&'a str),
    /// By the address of its service, after a restart of the resource manager.
    Registered(&'a str),
}

/// What a slice is to consist of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Topology {
    /// As messages name it: "tpuv6e:4x4".
    pub(crate) name: String,
    /// Workers of a slice.
    pub(crate) hosts: u32,
    /// Devices of each.
    pub(crate) devices_per_host: u32,
}

/// The worker that is in a place now.
#[derive(Debug)]
struct Live {
    member: Member,
    hello: Hello,
    /// Of the proxy that it serves, as it says.
    lease_epoch: u64,
    /// The greatest that it has served.
    last_epoch: u64,
    /// Its stream has ended, and why. It may come back within a lease.
    missed: Option<String>,
}

/// One place that has been seen.
#[derive(Debug)]
struct Seat {
    live: Option<Live>,
    /// Of the worker that was here last.
    inventory: WorkerInventory,
    /// Why that one is gone.
    reason: String,
    /// It has said that it would end.
    leaving: bool,
}

/// What a worker has said of its host.
#[derive(Debug)]
struct Introduced {
    host: String,
    /// Whose it is, once that one has registered.
    member: Option<Member>,
    /// It has said that it does not start before it knows the hosts of these.
    waits_for: BTreeSet<Place>,
}

/// All places of a cluster.
#[derive(Debug)]
pub(crate) struct Cluster {
    slices: u32,
    topology: Option<Topology>,
    /// Learned from the first worker when not configured.
    workers_per_slice: Option<u32>,
    /// It is not to be learned.
    is_configured: bool,
    /// Devices by task, as far as known.
    devices: BTreeMap<u32, u32>,
    seats: BTreeMap<Place, Seat>,
    /// The hosts of workers that have introduced themselves; they may not have registered yet.
    hosts: BTreeMap<Place, Introduced>,
    /// Why the last worker that wanted a place was refused, until one is seated there.
    refusals: BTreeMap<Place, String>,
    /// A worker has been with a resource manager before it came to this one.
    again: bool,
    next_member: u64,
}

impl Cluster {
    /// A cluster of `slices` slices; without `workers_per_slice` and `topology` the first worker's `slice_tasks` decides.
    pub(crate) fn new(
        slices: u32,
        workers_per_slice: Option<u32>,
        topology: Option<Topology>,
    ) -> Cluster {
        let devices = topology
            .iter()
            .flat_map(|topology| (0..topology.hosts).map(|task| (task, topology.devices_per_host)));
        let workers_per_slice = topology.as_ref().map(|t| t.hosts).or(workers_per_slice);
        Cluster {
            slices,
            workers_per_slice,
            is_configured: workers_per_slice.is_some(),
            devices: devices.collect(),
            topology,
            seats: BTreeMap::new(),
            hosts: BTreeMap::new(),
            refusals: BTreeMap::new(),
            again: false,
            next_member: 0,
        }
    }

    /// A worker says under which name others reach it, before it can register. The caller has looked at its place.
    pub(crate) fn introduce(&mut self, place: Place, host: String) {
        let waits_for = match self.hosts.remove(&place) {
            Some(before) if before.member.is_none() => before.waits_for,
            _ => BTreeSet::new(),
        };
        let introduced = Introduced {
            host,
            member: None,
            waits_for,
        };
        self.hosts.insert(place, introduced);
    }

    /// A worker that has introduced itself does not start before it knows the hosts of others; true when that is news.
    pub(crate) fn waits(&mut self, place: Place, others: BTreeSet<Place>) -> bool {
        let introduced = self.hosts.get_mut(&place);
        introduced.is_some_and(|introduced| {
            let before = std::mem::replace(&mut introduced.waits_for, others);
            before != introduced.waits_for
        })
    }

    /// The name under which others reach a worker that has introduced itself, or registered.
    pub(crate) fn host(&self, place: Place) -> Host<'_> {
        if let Some(introduced) = self.hosts.get(&place) {
            return Host::Introduced(&introduced.host);
        }
        let live = self.seats.get(&place).and_then(|seat| seat.live.as_ref());
        let address = live.map(|live| live.hello.address.as_str());
        let host = address.and_then(|address| address.rsplit_once(':'));
        host.map_or(Host::Unknown, |(host, _)| Host::Registered(host))
    }

    /// Seats a worker, or says why not. A refused worker changes nothing.
    pub(crate) fn join(&mut self, hello: Hello) -> Result<Member, Refusal> {
        let place = Place {
            slice: hello.slice,
            task: hello.task,
        };
        let devices = match self.check(place, &hello) {
            Err(Refusal::SliceTasks { .. }) if self.may_be_another() => {
                let anew = Cluster {
                    again: self.again,
                    next_member: self.next_member,
                    refusals: self.refusals.clone(),
                    ..Cluster::new(self.slices, None, None)
                };
                let devices = anew.check(place, &hello)?;
                let hosts = std::mem::take(&mut self.hosts);
                *self = Cluster { hosts, ..anew };
                devices
            }
            checked => checked?,
        };
        let member = Member(self.next_member);
        self.next_member += 1;
        self.workers_per_slice
            .get_or_insert(hello.slice_tasks.max(1));
        self.devices.entry(place.task).or_insert(devices);
        self.again |= hello.again || hello.lease_epoch != 0;
        let seat = Seat {
            inventory: hello.inventory.clone().unwrap_or_default(),
            reason: String::new(),
            leaving: false,
            live: Some(Live {
                member,
                lease_epoch: hello.lease_epoch,
                last_epoch: hello.last_epoch.max(hello.lease_epoch),
                missed: None,
                hello,
            }),
        };
        self.seats.insert(place, seat);
        self.refusals.remove(&place);
        if let Some(introduced) = self.hosts.get_mut(&place) {
            introduced.member = Some(member);
            introduced.waits_for.clear();
        }
        Ok(member)
    }

    /// Remembers why a worker was refused, where its place has none; true when that is news.
    pub(crate) fn note(&mut self, place: Place, refusal: &Refusal) -> bool {
        let seat = self.seats.get(&place);
        let is_taken = seat.is_some_and(|seat| seat.live.is_some());
        let is_full = self.refusals.len() >= MAX_REFUSALS && !self.refusals.contains_key(&place);
        if is_taken || is_full {
            return false;
        }
        let refusal = refusal
            .to_string()
            .chars()
            .take(MAX_REFUSAL_CHARS)
            .collect();
        self.refusals.insert(place, refusal).as_ref() != self.refusals.get(&place)
    }

    /// The places for which a worker was refused and none has come since, and why.
    pub(crate) fn refusals(&self) -> impl Iterator<Item = (Place, &str)> {
        let refusals = self.refusals.iter();
        refusals.map(|(place, why)| (*place, why.as_str()))
    }

    /// Nobody is there, nor was it said what slices are to be: the workers that made the cluster what it is are gone.
    fn may_be_another(&self) -> bool {
        !self.is_configured && self.seats.values().all(|seat| seat.live.is_none())
    }

    /// The member's stream has ended without its goodbye: it counts as there until it leaves, though others may take its place.
    /// False when another has done so.
    pub(crate) fn miss(&mut self, member: Member, reason: &str) -> bool {
        let mut live = self.seats.values_mut().filter_map(|s| s.live.as_mut());
        let live = live.find(|live| live.member == member);
        let is_there = live.map(|live| live.missed = Some(reason.to_owned()));
        is_there.is_some()
    }

    /// Frees the member's place, and forgets its host, unless another worker has introduced itself there meanwhile. `leaving`: as
    /// it has said itself. False for a member that has left already.
    pub(crate) fn leave(&mut self, member: Member, reason: &str, leaving: bool) -> bool {
        self.hosts
            .retain(|_, introduced| introduced.member != Some(member));
        for seat in self.seats.values_mut() {
            if seat.live.take_if(|live| live.member == member).is_some() {
                reason.clone_into(&mut seat.reason);
                seat.leaving = leaving;
                return true;
            }
        }
        false
    }

    /// What a worker says of the proxy that it serves; true when that is news.
    pub(crate) fn serves(&mut self, member: Member, lease_epoch: u64) -> bool {
        let mut live = self.seats.values_mut().filter_map(|s| s.live.as_mut());
        let live = live.find(|live| live.member == member);
        live.is_some_and(|live| {
            live.last_epoch = live.last_epoch.max(lease_epoch);
            std::mem::replace(&mut live.lease_epoch, lease_epoch) != lease_epoch
        })
    }

    /// Whether a worker has been with a resource manager before it came to this one.
    pub(crate) fn again(&self) -> bool {
        self.again
    }

    /// The member's first device id, once the devices before its own are known.
    pub(crate) fn first_device_id(&self, member: Member) -> Option<i32> {
        let mut seats = self.seats.iter();
        let (place, _) = seats.find(|(_, seat)| {
            let live = seat.live.as_ref();
            live.is_some_and(|live| live.member == member)
        })?;
        self.first_id(*place)
    }

    /// Every place of `slices` whose devices are known, with or without a worker. The first of `slices` is the proxy's
    /// slice 0.
    pub(crate) fn places(&self, slices: &[u32]) -> Vec<AllottedWorker> {
        let tasks = self.workers_per_slice.unwrap_or(0);
        let places = (0..).zip(slices).flat_map(|(virtual_slice, &slice)| {
            (0..tasks).map(move |task| (virtual_slice, Place { slice, task }))
        });
        places
            .filter_map(|(virtual_slice, place)| self.place(place, virtual_slice))
            .collect()
    }

    fn place(&self, place: Place, virtual_slice: u32) -> Option<AllottedWorker> {
        let seat = self.seats.get(&place);
        let live = seat.and_then(|seat| seat.live.as_ref());
        let missed = live.and_then(|live| live.missed.as_ref());
        let presence = match (seat, live) {
            (_, Some(_)) if missed.is_some() => Presence::Missed,
            (_, Some(_)) => Presence::Here,
            (None, _) => Presence::NotSeen,
            (Some(seat), None) if seat.leaving => Presence::Leaving,
            (Some(_), None) => Presence::Gone,
        };
        let mut alike = self.seats.iter();
        let inventory = match seat {
            Some(seat) => &seat.inventory,
            None => {
                &alike
                    .find(|(other, _)| other.task == place.task)?
                    .1
                    .inventory
            }
        };
        Some(AllottedWorker {
            address: live.map_or_else(String::new, |live| live.hello.address.clone()),
            slice: place.slice,
            task: place.task,
            first_device_id: self.first_id(place)?,
            inventory: Some(inventory.clone()),
            presence: presence.into(),
            reason: missed
                .or(seat.map(|seat| &seat.reason))
                .cloned()
                .unwrap_or_default(),
            virtual_slice,
        })
    }

    /// Workers of a full cluster; unknown until the size of a slice is.
    pub(crate) fn expected(&self) -> Option<u32> {
        self.workers_per_slice
            .map(|tasks| self.slices.saturating_mul(tasks))
    }

    /// Slices of a full cluster.
    pub(crate) fn slices(&self) -> u32 {
        self.slices
    }

    /// The slices all of whose workers are alive.
    pub(crate) fn whole(&self) -> Vec<u32> {
        self.whole_of(|live| live.missed.is_none())
    }

    /// The slices all of whose workers are alive or may be.
    pub(crate) fn complete(&self) -> Vec<u32> {
        self.whole_of(|_| true)
    }

    fn whole_of(&self, counts: impl Fn(&Live) -> bool) -> Vec<u32> {
        let mut workers = BTreeMap::<u32, u32>::new();
        for (place, seat) in &self.seats {
            if seat.live.as_ref().is_some_and(&counts) {
                *workers.entry(place.slice).or_default() += 1;
            }
        }
        let tasks = self.workers_per_slice;
        let whole = workers.into_iter().filter(|(_, n)| Some(*n) == tasks);
        whole.map(|(slice, _)| slice).collect()
    }

    /// The lease epochs that live workers say they serve, by slice; the greatest where they differ.
    pub(crate) fn epochs(&self) -> BTreeMap<u32, u64> {
        self.greatest(|live| live.lease_epoch)
    }

    /// The greatest lease epochs that live workers have served, by slice.
    pub(crate) fn last_epochs(&self) -> BTreeMap<u32, u64> {
        self.greatest(|live| live.last_epoch)
    }

    /// What live workers say of their lease epochs.
    pub(crate) fn says(&self) -> BTreeMap<Place, Says> {
        let mut says = BTreeMap::new();
        for (place, seat) in &self.seats {
            if let Some(live) = &seat.live {
                let (serves, last) = (live.lease_epoch, live.last_epoch);
                says.insert(*place, Says { serves, last });
            }
        }
        says
    }

    fn greatest(&self, of: impl Fn(&Live) -> u64) -> BTreeMap<u32, u64> {
        let mut epochs = BTreeMap::new();
        for (place, seat) in &self.seats {
            let epoch = seat.live.as_ref().map_or(0, &of);
            if epoch != 0 {
                let known = epochs.entry(place.slice).or_insert(epoch);
                *known = epoch.max(*known);
            }
        }
        epochs
    }

    /// "1 of 2 slices (3 of 4 workers)", of some slices. Workers that have been missed for less than a lease are counted.
    pub(crate) fn progress(&self, slices: &[u32]) -> String {
        let Some(tasks) = self.workers_per_slice else {
            return format!("no worker yet of {} slice(s)", slices.len());
        };
        let whole = self.complete();
        let whole = whole.iter().filter(|slice| slices.contains(slice)).count();
        let live = self.seats.iter().filter_map(|(place, seat)| {
            let live = seat.live.as_ref();
            live.filter(|_| slices.contains(&place.slice))
        });
        let missed = live.clone().filter(|live| live.missed.is_some()).count();
        let expected = slices.len() as u64 * u64::from(tasks);
        let mut workers = format!("{} of {expected} workers", live.count());
        if missed > 0 {
            workers.push_str(&format!(", {missed} of them not heard of"));
        }
        if let Some(waiting) = self.waiting(slices) {
            workers.push_str(&format!(", {waiting}"));
        }
        let progress = match slices.len() {
            1 => workers,
            all => format!("{whole} of {all} slices ({workers})"),
        };
        let mut refusals = self.refusals.iter();
        let wanted = |place: &Place| slices.contains(&place.slice) && place.task < tasks;
        match refusals.find(|(place, _)| wanted(place)) {
            Some((Place { slice, task }, why)) => {
                format!("{progress}; a worker for slice {slice} task {task} was refused: {why}")
            }
            None => progress,
        }
    }

    /// Says that workers of some slices wait for the hosts of others: "2 more wait for the host of slice 0 task 0".
    fn waiting(&self, slices: &[u32]) -> Option<String> {
        let mut count = 0;
        let mut missing = BTreeSet::<&Place>::new();
        for (place, introduced) in &self.hosts {
            let others = introduced.waits_for.iter();
            let unknown = others.filter(|other| self.host(**other) == Host::Unknown);
            if slices.contains(&place.slice) && unknown.clone().next().is_some() {
                count += 1;
                missing.extend(unknown);
            }
        }
        let first = missing.first()?;
        let (wait, more) = (if count == 1 { "waits" } else { "wait" }, missing.len() - 1);
        let mut text = format!(
            "{count} more {wait} for the host of slice {} task {}",
            first.slice, first.task
        );
        if more > 0 {
            text.push_str(&format!(" and {more} more"));
        }
        Some(text)
    }

    /// The first device id of a place, once the devices before it are known.
    fn first_id(&self, place: Place) -> Option<i32> {
        let sum = |tasks: u32| -> Option<u64> {
            let counts = (0..tasks).map(|task| self.devices.get(&task).copied().map(u64::from));
            counts.sum()
        };
        let slices_before = match place.slice {
            0 => 0,
            slices => sum(self.workers_per_slice?)? * u64::from(slices),
        };
        i32::try_from(slices_before + sum(place.task)?).ok()
    }
}

#[cfg(test)]
mod tests;
