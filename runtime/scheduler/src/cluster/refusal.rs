//! Which workers may not join, and why.

use waystation_proto::waystation::scheduler::{Hello, WorkerInventory};

use super::{Cluster, Place};

/// More workers than any slice has. Each place costs work with every change, so a worker's word must not make them without end.
const MAX_TASKS: u32 = 1 << 16;
/// Workers of all slices: each has a device, whose id has 32 bits.
const MAX_WORKERS: u64 = i32::MAX as u64;

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
         --instance_count={needed} or the worker a smaller --slice"
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
        "the worker says --slice_tasks={theirs}: a slice may have {MAX_TASKS} worker(s), and with {slices} slice(s) the cluster \
         {MAX_WORKERS}: give every worker the number of workers in its slice"
    )]
    TooManyTasks { theirs: u32, slices: u32 },
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
        "wrong topology: the resource manager expects slices of {expected}, which are {hosts} worker(s) with {devices} \
         device(s) each; found a worker at {address} with {found} device(s), one of {found_hosts}: give the resource manager \
         another --instance_type, or the worker other devices"
    )]
    Topology {
        expected: String,
        hosts: u32,
        devices: u32,
        address: String,
        found: usize,
        found_hosts: String,
    },
    #[error(
        "wrong topology: task {} of a slice has {expected} device(s), as the first worker seen there; found {found} in slice \
         {}: all slices are alike, and device ids must not change; start it with the same devices, or restart the \
         resource manager",
        place.task, place.slice
    )]
    DeviceCount {
        place: Place,
        expected: u32,
        found: usize,
    },
    #[error(
        "the worker's platform is {theirs:?}, the other workers' is {ours:?}: give every worker the same --pjrt_plugin"
    )]
    Platform { theirs: String, ours: String },
    #[error(
        "wrong plugin build: the worker at {mate} has {expected}; found {found} at {address}: give every worker the same \
         plugin file"
    )]
    Plugin {
        mate: String,
        expected: String,
        address: String,
        found: String,
    },
    #[error(
        "wrong waystation build: the worker at {mate} is {expected}; found {found} at {address}: run the same release \
         everywhere"
    )]
    Build {
        mate: String,
        expected: String,
        address: String,
        found: String,
    },
    #[error(
        "wrong processor: programs are compiled for all workers, and the one at {mate} differs from that at {address}: \
         {difference}; use machines of one kind"
    )]
    Processor {
        mate: String,
        address: String,
        difference: String,
    },
    #[error("the cluster would have more devices than a 32-bit device id can name")]
    TooManyDevices,
}

impl Cluster {
    /// The worker's devices, when it may join.
    pub(super) fn check(&self, place: Place, hello: &Hello) -> Result<u32, Refusal> {
        check_version(hello)?;
        self.check_topology(hello)?;
        self.check_place(hello)?;
        let devices = self.check_devices(place, hello)?;
        let others = self.seats.iter().filter(|(other, _)| **other != place);
        let mates = others.filter_map(|(_, seat)| seat.live.as_ref());
        // Those that are missed too: a proxy may still use them.
        for mate in mates {
            check_alike(&mate.hello, hello)?;
        }
        Ok(devices)
    }

    fn check_topology(&self, hello: &Hello) -> Result<(), Refusal> {
        let Some(topology) = &self.topology else {
            return Ok(());
        };
        let found = devices_of(hello);
        let right = found == topology.devices_per_host as usize
            // A worker that was not told the size of its slice says 0.
            && (hello.slice_tasks == 0 || hello.slice_tasks == topology.hosts);
        if right {
            return Ok(());
        }
        Err(Refusal::Topology {
            expected: topology.name.clone(),
            hosts: topology.hosts,
            devices: topology.devices_per_host,
            address: hello.address.clone(),
            found,
            found_hosts: match hello.slice_tasks {
                0 => "an unknown number".to_owned(),
                tasks => tasks.to_string(),
            },
        })
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
        // What the cluster has is the operator's, or was looked at before.
        let workers = u64::from(theirs) * u64::from(self.slices);
        if self.workers_per_slice.is_none() && (theirs > MAX_TASKS || workers > MAX_WORKERS) {
            return Err(Refusal::TooManyTasks {
                theirs,
                slices: self.slices,
            });
        }
        if hello.task >= ours {
            return Err(Refusal::NoSuchTask {
                task: hello.task,
                tasks: ours,
            });
        }
        Ok(())
    }

    fn check_devices(&self, place: Place, hello: &Hello) -> Result<u32, Refusal> {
        let found = devices_of(hello);
        if found == 0 {
            return Err(Refusal::NoDevices {
                address: hello.address.clone(),
            });
        }
        let seated = self.seats.get(&place).and_then(|seat| seat.live.as_ref());
        // One that registers again while its broken stream counts as alive takes its own place.
        let other = seated.filter(|other| other.hello.address != hello.address);
        if let Some(other) = other.filter(|other| other.missed.is_none()) {
            return Err(Refusal::Taken {
                place,
                address: other.hello.address.clone(),
            });
        }
        let devices = u32::try_from(found).map_err(|_| Refusal::TooManyDevices)?;
        match self.devices.get(&place.task) {
            Some(&expected) if expected != devices => Err(Refusal::DeviceCount {
                place,
                expected,
                found,
            }),
            Some(_) => Ok(devices),
            None => {
                let known: u64 = self.devices.values().copied().map(u64::from).sum();
                let all = (known + u64::from(devices)).saturating_mul(u64::from(self.slices));
                // i32::MAX, as a number of 64 bits without sign.
                if all > u64::from(u32::MAX / 2) {
                    return Err(Refusal::TooManyDevices);
                }
                Ok(devices)
            }
        }
    }
}

fn devices_of(hello: &Hello) -> usize {
    let inventory = hello.inventory.as_ref();
    inventory.map_or(0, |inventory| inventory.devices.len())
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

/// Workers of one cluster run each other's programs.
fn check_alike(mate: &Hello, hello: &Hello) -> Result<(), Refusal> {
    let empty = WorkerInventory::default();
    let ours = mate.inventory.as_ref().unwrap_or(&empty);
    let theirs = hello.inventory.as_ref().unwrap_or(&empty);
    if ours.platform_name != theirs.platform_name {
        return Err(Refusal::Platform {
            theirs: theirs.platform_name.clone(),
            ours: ours.platform_name.clone(),
        });
    }
    let (mate_address, address) = (mate.address.clone(), hello.address.clone());
    if mate.build_id != hello.build_id {
        return Err(Refusal::Build {
            mate: mate_address,
            expected: mate.build_id.clone(),
            address,
            found: hello.build_id.clone(),
        });
    }
    let same = (&ours.plugin_digest, &ours.platform_version)
        == (&theirs.plugin_digest, &theirs.platform_version);
    if !same {
        return Err(Refusal::Plugin {
            mate: mate_address,
            expected: plugin(ours),
            address,
            found: plugin(theirs),
        });
    }
    if mate.cpu_features != hello.cpu_features {
        return Err(Refusal::Processor {
            difference: difference(&mate.cpu_features, &hello.cpu_features),
            mate: mate_address,
            address,
        });
    }
    Ok(())
}

/// "cpu 0.12 (plugin sha256 0123456789ab)".
fn plugin(inventory: &WorkerInventory) -> String {
    let digest: String = inventory.plugin_digest.chars().take(12).collect();
    format!(
        "{} {} (plugin sha256 {digest})",
        inventory.platform_name, inventory.platform_version
    )
}

/// "the first alone has avx512f, the second alone amx".
fn difference(mate: &str, other: &str) -> String {
    let only = |of: &str, without: &str| {
        let known: Vec<&str> = without.split(',').collect();
        let only: Vec<&str> = of.split(',').filter(|f| !known.contains(f)).collect();
        match only.is_empty() {
            true => "nothing".to_owned(),
            false => only.join(","),
        }
    };
    format!(
        "the first alone has {}, the second alone {}",
        only(mate, other),
        only(other, mate)
    )
}
