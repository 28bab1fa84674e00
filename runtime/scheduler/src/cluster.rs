//! Who is in which place, and which device ids follow from that. Pure: no clock, no network.
//!
//! A place is a (slice, task). Device ids are contiguous in the order of places: a worker's first id is the sum of the
//! device counts of all places before its own. A place keeps the count it was first seen with, so the ids of a place
//! never change while the resource manager lives; a worker gets its ids once every place before its own has been seen.

use std::collections::BTreeMap;

use waystation_proto::waystation::scheduler::{AllottedWorker, Hello};

/// Identifies one registration; a worker that comes back gets another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member(u64);

/// A worker's position in the cluster. The order of places is the order of device ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) slice: u32,
    pub(crate) task: u32,
}

/// Why a worker may not join.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Refusal {
    #[error(
        "the worker speaks link version {theirs} ({their_build}), the resource manager link version {ours} \
         ({our_build}): run both from the same release"
    )]
    LinkVersion {
        theirs: u32,
        their_build: String,
        ours: u32,
        our_build: &'static str,
    },
    #[error(
        "slice {slice} does not exist: this cluster has {slices} slice(s), numbered from 0; give the resource manager \
         --slices={needed} or the worker a smaller --slice"
    )]
    NoSuchSlice {
        slice: u32,
        slices: u32,
        needed: u64,
    },
    #[error(
        "task {task} does not exist: a slice has {tasks} worker(s), numbered from 0; check the worker's --task and --slice_tasks"
    )]
    NoSuchTask { task: u32, tasks: u32 },
    #[error(
        "the worker says its slice has {theirs} worker(s), the cluster counts {ours} a slice: give every worker the same \
         --slice_tasks"
    )]
    SliceTasks { theirs: u32, ours: u32 },
    #[error(
        "slice {} task {} is taken by the live worker at {address}: give this worker another --slice or --task, or stop \
         that one",
        place.slice, place.task
    )]
    Taken { place: Place, address: String },
    #[error(
        "the worker at {address} has no devices: check its --pjrt_plugin and --devices_per_worker"
    )]
    NoDevices { address: String },
    #[error(
        "slice {} task {} had {before} device(s) and comes back with {now}: device ids would change under the clients; \
         start it with the same devices, or restart the resource manager",
        place.slice, place.task
    )]
    DeviceCount {
        place: Place,
        before: i32,
        now: usize,
    },
    #[error(
        "the worker's platform is {theirs:?}, the other workers' is {ours:?}: give every worker the same --pjrt_plugin"
    )]
    Platform { theirs: String, ours: String },
    #[error("the cluster would have more devices than a 32-bit device id can name")]
    TooManyDevices,
}

/// One place that has been seen.
#[derive(Debug)]
struct Seat {
    /// Devices of the first worker seen here.
    devices: i32,
    /// The worker here now.
    live: Option<(Member, Hello)>,
}

/// All places of a cluster.
#[derive(Debug)]
pub(crate) struct Cluster {
    slices: u32,
    /// Learned from the first worker when not configured.
    workers_per_slice: Option<u32>,
    seats: BTreeMap<Place, Seat>,
    next_member: u64,
}

impl Cluster {
    /// A cluster of `slices` slices; without `workers_per_slice` the first worker's `slice_tasks` decides.
    pub(crate) fn new(slices: u32, workers_per_slice: Option<u32>) -> Cluster {
        Cluster {
            slices,
            workers_per_slice,
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
        check_version(&hello)?;
        self.check_place(&hello)?;
        let devices = self.check_devices(place, &hello)?;
        let member = Member(self.next_member);
        self.next_member += 1;
        self.workers_per_slice
            .get_or_insert(hello.slice_tasks.max(1));
        let seat = self.seats.entry(place).or_insert(Seat {
            devices,
            live: None,
        });
        seat.live = Some((member, hello));
        Ok(member)
    }

    /// Frees the member's place. A member that has left already is ignored.
    pub(crate) fn leave(&mut self, member: Member) {
        for seat in self.seats.values_mut() {
            seat.live.take_if(|(seated, _)| *seated == member);
        }
    }

    /// The member's first device id, once every place before its own has been seen.
    pub(crate) fn first_device_id(&self, member: Member) -> Option<i32> {
        self.ids()
            .find(|(_, (seated, _), _)| *seated == member)
            .map(|(_, _, first)| first)
    }

    /// The live workers that have device ids, in order of place.
    pub(crate) fn workers(&self) -> Vec<AllottedWorker> {
        self.ids()
            .map(|(place, (_, hello), first)| AllottedWorker {
                address: hello.address.clone(),
                slice: place.slice,
                task: place.task,
                first_device_id: first,
                inventory: hello.inventory.clone(),
            })
            .collect()
    }

    /// Workers of a full cluster; unknown until the size of a slice is.
    pub(crate) fn expected(&self) -> Option<u32> {
        self.workers_per_slice
            .map(|tasks| self.slices.saturating_mul(tasks))
    }

    /// Workers alive now.
    pub(crate) fn live(&self) -> usize {
        self.seats
            .values()
            .filter(|seat| seat.live.is_some())
            .count()
    }

    /// Whether every expected worker is alive.
    pub(crate) fn is_complete(&self) -> bool {
        self.expected()
            .is_some_and(|expected| self.live() == expected as usize)
    }

    /// "1 of 2 workers".
    pub(crate) fn progress(&self) -> String {
        match self.expected() {
            Some(expected) => format!("{} of {expected} workers", self.live()),
            None => format!("no worker yet of {} slice(s)", self.slices),
        }
    }

    /// Live members with their first ids, as far as ids follow without a gap.
    fn ids(&self) -> impl Iterator<Item = (Place, &(Member, Hello), i32)> {
        let mut next = Some((Place { slice: 0, task: 0 }, 0_i32));
        self.seats
            .iter()
            .map_while(move |(&place, seat)| {
                // A place that nobody has seen yet ends the run: its device count is not known.
                let (expected, first) = next.filter(|(expected, _)| *expected == place)?;
                next = first
                    .checked_add(seat.devices)
                    .map(|id| (self.after(expected), id));
                Some((place, seat, first))
            })
            .filter_map(|(place, seat, first)| Some((place, seat.live.as_ref()?, first)))
    }

    /// The place that follows.
    fn after(&self, place: Place) -> Place {
        if place.task.saturating_add(1) < self.workers_per_slice.unwrap_or(1) {
            Place {
                slice: place.slice,
                task: place.task + 1,
            }
        } else {
            Place {
                slice: place.slice.saturating_add(1),
                task: 0,
            }
        }
    }

    fn check_place(&self, hello: &Hello) -> Result<(), Refusal> {
        let theirs = hello.slice_tasks.max(1);
        let ours = self.workers_per_slice.unwrap_or(theirs);
        if hello.slice >= self.slices {
            return Err(Refusal::NoSuchSlice {
                slice: hello.slice,
                slices: self.slices,
                needed: u64::from(hello.slice) + 1,
            });
        }
        // A worker that was not told the size of its slice says 0.
        if hello.slice_tasks != 0 && theirs != ours {
            return Err(Refusal::SliceTasks { theirs, ours });
        }
        if hello.task >= ours {
            return Err(Refusal::NoSuchTask {
                task: hello.task,
                tasks: ours,
            });
        }
        Ok(())
    }

    fn check_devices(&self, place: Place, hello: &Hello) -> Result<i32, Refusal> {
        let inventory = hello.inventory.as_ref();
        let count = inventory.map_or(0, |inventory| inventory.devices.len());
        let platform = inventory.map_or("", |inventory| inventory.platform_name.as_str());
        if count == 0 {
            return Err(Refusal::NoDevices {
                address: hello.address.clone(),
            });
        }
        let devices = i32::try_from(count).map_err(|_| Refusal::TooManyDevices)?;
        match self.seats.get(&place) {
            Some(Seat {
                live: Some((_, other)),
                ..
            }) => {
                return Err(Refusal::Taken {
                    place,
                    address: other.address.clone(),
                });
            }
            Some(seat) if seat.devices != devices => {
                return Err(Refusal::DeviceCount {
                    place,
                    before: seat.devices,
                    now: count,
                });
            }
            Some(_) => {}
            None => {
                let seen: i64 = self
                    .seats
                    .values()
                    .map(|seat| i64::from(seat.devices))
                    .sum();
                if seen + i64::from(devices) > i64::from(i32::MAX) {
                    return Err(Refusal::TooManyDevices);
                }
            }
        }
        let others = self.seats.values().filter_map(|seat| seat.live.as_ref());
        for ours in others.filter_map(|(_, other)| other.inventory.as_ref()) {
            if ours.platform_name != platform {
                return Err(Refusal::Platform {
                    theirs: platform.to_owned(),
                    ours: ours.platform_name.clone(),
                });
            }
        }
        Ok(devices)
    }
}

fn check_version(hello: &Hello) -> Result<(), Refusal> {
    if hello.link_version == waystation_proto::LINK_VERSION {
        return Ok(());
    }
    Err(Refusal::LinkVersion {
        theirs: hello.link_version,
        their_build: hello.build_id.clone(),
        ours: waystation_proto::LINK_VERSION,
        our_build: waystation_proto::BUILD_ID,
    })
}

#[cfg(test)]
mod tests;
