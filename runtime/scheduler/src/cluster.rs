//! Who is in which place, and which device ids follow from that. Pure: no clock, no network.
//!
//! A place is a (slice, task). All slices are alike: the devices of a task's worker are those that the instance type says,
//! or, without one, those of the first worker seen in that task of any slice. Device ids are contiguous in the order of
//! places, so the ids of a place never change while the resource manager lives, whichever slices are there.

mod refusal;

use std::collections::BTreeMap;

use waystation_proto::waystation::scheduler::{
    AllottedWorker, Hello, WorkerInventory, allotted_worker::Presence,
};

pub(crate) use self::refusal::Refusal;

/// Identifies one registration; a worker that comes back gets another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member(u64);

/// A worker's position in the cluster. The order of places is the order of device ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) slice: u32,
    pub(crate) task: u32,
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

/// All places of a cluster.
#[derive(Debug)]
pub(crate) struct Cluster {
    slices: u32,
    topology: Option<Topology>,
    /// Learned from the first worker when not configured.
    workers_per_slice: Option<u32>,
    /// Devices by task, as far as known.
    devices: BTreeMap<u32, u32>,
    seats: BTreeMap<Place, Seat>,
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
        Cluster {
            slices,
            workers_per_slice: topology.as_ref().map(|t| t.hosts).or(workers_per_slice),
            devices: devices.collect(),
            topology,
            seats: BTreeMap::new(),
            next_member: 0,
        }
    }

    /// Seats a worker, or says why not. A refused worker changes nothing.
    pub(crate) fn join(&mut self, hello: Hello) -> Result<Member, Refusal> {
        let place = Place {
            slice: hello.slice,
            task: hello.task,
        };
        let devices = self.check(place, &hello)?;
        let member = Member(self.next_member);
        self.next_member += 1;
        self.workers_per_slice
            .get_or_insert(hello.slice_tasks.max(1));
        self.devices.entry(place.task).or_insert(devices);
        let seat = Seat {
            inventory: hello.inventory.clone().unwrap_or_default(),
            reason: String::new(),
            leaving: false,
            live: Some(Live {
                member,
                lease_epoch: hello.lease_epoch,
                hello,
            }),
        };
        self.seats.insert(place, seat);
        Ok(member)
    }

    /// Frees the member's place; `leaving`: as it has said itself. A member that has left already is ignored.
    pub(crate) fn leave(&mut self, member: Member, reason: &str, leaving: bool) {
        for seat in self.seats.values_mut() {
            if seat.live.take_if(|live| live.member == member).is_some() {
                reason.clone_into(&mut seat.reason);
                seat.leaving = leaving;
            }
        }
    }

    /// What a worker says of the proxy that it serves; true when that is news.
    pub(crate) fn serves(&mut self, member: Member, lease_epoch: u64) -> bool {
        let mut live = self.seats.values_mut().filter_map(|s| s.live.as_mut());
        let live = live.find(|live| live.member == member);
        live.is_some_and(|live| {
            std::mem::replace(&mut live.lease_epoch, lease_epoch) != lease_epoch
        })
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
        let presence = match (seat, live) {
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
            reason: seat.map_or_else(String::new, |seat| seat.reason.clone()),
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
        let mut workers = BTreeMap::<u32, u32>::new();
        let live = self.seats.iter().filter(|(_, seat)| seat.live.is_some());
        for (place, _) in live {
            *workers.entry(place.slice).or_default() += 1;
        }
        let tasks = self.workers_per_slice;
        let whole = workers.into_iter().filter(|(_, n)| Some(*n) == tasks);
        whole.map(|(slice, _)| slice).collect()
    }

    /// The lease epochs that live workers say they serve, by slice; the greatest where they differ.
    pub(crate) fn epochs(&self) -> BTreeMap<u32, u64> {
        let mut epochs = BTreeMap::new();
        for (place, seat) in &self.seats {
            let epoch = seat.live.as_ref().map_or(0, |live| live.lease_epoch);
            if epoch != 0 {
                let known = epochs.entry(place.slice).or_insert(epoch);
                *known = epoch.max(*known);
            }
        }
        epochs
    }

    /// "1 of 2 slices (3 of 4 workers)", of some slices.
    pub(crate) fn progress(&self, slices: &[u32]) -> String {
        let Some(tasks) = self.workers_per_slice else {
            return format!("no worker yet of {} slice(s)", slices.len());
        };
        let whole = self.whole();
        let whole = whole.iter().filter(|slice| slices.contains(slice)).count();
        let live = self
            .seats
            .iter()
            .filter(|(place, seat)| seat.live.is_some() && slices.contains(&place.slice));
        let expected = slices.len() as u64 * u64::from(tasks);
        let workers = format!("{} of {expected} workers", live.count());
        match slices.len() {
            1 => workers,
            all => format!("{whole} of {all} slices ({workers})"),
        }
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
