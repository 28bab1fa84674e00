//! The devices that a client sees, and the workers behind them.

mod follow;

use std::{collections::HashMap, sync::Arc};

use tokio::sync::watch;
use waystation_proto::waystation::scheduler::{AllottedWorker, worker_inventory};

pub(crate) use self::follow::{Follow, follow};
use crate::link::Link;

/// One device.
#[derive(Debug)]
pub(crate) struct Device {
    /// Global id, as clients know it.
    pub(crate) id: i32,
    /// Index into [`Cluster::links`].
    pub(crate) link: usize,
    /// Index among the worker's devices.
    pub(crate) ordinal: u32,
    /// The slice that the worker belongs to, counted among the proxy's.
    pub(crate) slice: u32,
    /// The worker's number in its slice.
    pub(crate) task: u32,
    /// What the plugin says of it.
    pub(crate) info: worker_inventory::Device,
}

/// The workers of one lease. Each change of a link makes a new cluster, which the sessions take over with their next request.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Shared by all clusters with these devices.
    pub(crate) devices: Arc<Devices>,
    /// One a place (slice, task), in order; of one without a worker it is dead.
    pub(crate) links: Vec<Arc<Link>>,
}

/// The devices of one place. Their ids are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DevicesAt {
    /// Counted among the proxy's.
    slice: u32,
    task: u32,
    first: i32,
    count: usize,
}

impl DevicesAt {
    /// Both cannot be devices of one cluster.
    fn conflicts(&self, other: &Self) -> bool {
        let end = |at: &Self| i64::from(at.first) + i64::try_from(at.count).unwrap_or(i64::MAX);
        let overlap = i64::from(self.first) < end(other) && i64::from(other.first) < end(self);
        (self.slice, self.task) == (other.slice, other.task) || overlap
    }
}

/// What clients see, whichever workers are there.
#[derive(Debug)]
pub(crate) struct Devices {
    /// As [`Cluster::links`].
    places: Vec<DevicesAt>,
    pub(crate) all: Vec<Device>,
    by_id: HashMap<i32, usize>,
    pub(crate) platform_name: String,
    pub(crate) platform_version: String,
    /// The accelerators that the devices stand in for; empty: they are what they are.
    pub(crate) simulated: String,
}

impl Devices {
    /// The devices of an allotment's places.
    fn new(workers: &[AllottedWorker]) -> Self {
        let mut all = Vec::new();
        for (index, worker) in workers.iter().enumerate() {
            let inventory = worker.inventory.clone().unwrap_or_default();
            let ids = device_ids(worker);
            for ((ordinal, id), info) in (0u32..).zip(ids).zip(inventory.devices) {
                all.push(Device {
                    id,
                    link: index,
                    ordinal,
                    slice: worker.virtual_slice,
                    task: worker.task,
                    info: renumber(info, ordinal, id),
                });
            }
        }
        let first = workers.first().and_then(|w| w.inventory.clone());
        let first = first.unwrap_or_default();
        let places = workers.iter().map(|worker| DevicesAt {
            slice: worker.virtual_slice,
            task: worker.task,
            first: worker.first_device_id,
            count: device_ids(worker).len(),
        });
        Self {
            places: places.collect(),
            by_id: all.iter().enumerate().map(|(i, d)| (d.id, i)).collect(),
            all,
            platform_name: first.platform_name,
            platform_version: first.platform_version,
            simulated: first.simulated,
        }
    }
}

impl Cluster {
    /// The same cluster with links for one client.
    pub(crate) fn for_client(&self, client: u64) -> Self {
        Self {
            devices: Arc::clone(&self.devices),
            links: self
                .links
                .iter()
                .map(|link| link.for_client(client))
                .collect(),
        }
    }

    /// A client's cluster as it is `now`: links whose connection has stayed are kept, and so are those of slices that are not
    /// in it any more. None when there are other devices in the place of the client's, of which it cannot be told.
    pub(crate) fn renewed(&self, now: &Cluster, client: u64) -> Option<Self> {
        let mut links = Vec::with_capacity(self.links.len());
        let places = self.devices.places.iter().zip(&self.links);
        for (index, (place, before)) in places.enumerate() {
            let there = &now.devices.places;
            // Where it was, except in a cluster that has grown or shrunk.
            let found = match there.get(index) == Some(place) {
                true => Some(index),
                false => there.iter().position(|other| other == place),
            };
            let link = match found.and_then(|index| now.links.get(index)) {
                Some(now) if !before.is_same_wire(now) => now.for_client(client),
                Some(_) => Arc::clone(before),
                None if there.iter().any(|other| other.conflicts(place)) => return None,
                None => Arc::clone(before),
            };
            links.push(link);
        }
        Some(Self {
            devices: Arc::clone(&self.devices),
            links,
        })
    }

    /// No worker of it is there.
    pub(crate) fn is_lost(&self) -> bool {
        self.links.iter().all(|link| link.is_dead())
    }

    /// The device with a global id.
    pub(crate) fn device(&self, id: i32) -> Option<&Device> {
        let devices = &self.devices;
        devices.by_id.get(&id).and_then(|&i| devices.all.get(i))
    }

    /// The worker that owns a device.
    pub(crate) fn link(&self, device: &Device) -> &Arc<Link> {
        // There is a link for each place of which there are devices.
        &self.links[device.link]
    }
}

fn device_ids(worker: &AllottedWorker) -> Vec<i32> {
    let inventory = worker.inventory.as_ref();
    let devices = inventory.map_or(0, |inventory| inventory.devices.len());
    (worker.first_device_id..).take(devices).collect()
}

/// A plugin numbers its own devices from 0; where the strings carry that number they get the global one.
fn renumber(
    mut device: worker_inventory::Device,
    ordinal: u32,
    id: i32,
) -> worker_inventory::Device {
    if i64::from(ordinal) != i64::from(id) {
        device.to_string = replace_number(&device.to_string, ordinal, id);
        device.debug_string = replace_number(&device.debug_string, ordinal, id);
    }
    device
}

/// Replaces each run of digits that reads `from`.
fn replace_number(text: &str, from: u32, to: i32) -> String {
    let (from, to) = (from.to_string(), to.to_string());
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let (before, digits) = rest.split_at(start);
        let end = digits
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(digits.len());
        out.push_str(before);
        out.push_str(if digits[..end] == from {
            &to
        } else {
            &digits[..end]
        });
        rest = &digits[end..];
    }
    out.push_str(rest);
    out
}

/// The newest cluster, `None` until the workers wanted are there, and how far it is.
pub(crate) type ClusterWatch = watch::Receiver<(Option<Arc<Cluster>>, String)>;

#[cfg(test)]
mod tests {
    use super::replace_number;

    #[test]
    fn the_local_number_becomes_the_global_one() {
        assert_eq!(replace_number("TFRT_CPU_3", 3, 11), "TFRT_CPU_11");
        assert_eq!(replace_number("CpuDevice(id=3)", 3, 11), "CpuDevice(id=11)");
        assert_eq!(
            replace_number("TFRT_CPU_13 of 3x", 3, 5),
            "TFRT_CPU_13 of 5x"
        );
    }
}
