//! What libtpu reads from its environment when a slice has several machines, or a job several slices. It builds the mesh of a
//! slice by itself from this, and Megascale, which is in it, moves what crosses slices. Pure; not tried on hardware.
//!
//! | variable | is | source |
//! | --- | --- | --- |
//! | `TPU_CHIPS_PER_PROCESS_BOUNDS` | chips of this machine, along x, y, z | JAX's `test_multiprocess` |
//! | `TPU_PROCESS_BOUNDS` | machines of the slice, along x, y, z | the same |
//! | `CLOUD_TPU_TASK_ID`, `TPU_WORKER_ID` | this one's number among them | the same; GKE's webhook |
//! | `TPU_PROCESS_ADDRESSES`, `TPU_PROCESS_PORT` | where they are, and this one's port | the same; port 8471 in Pathways' JobSets |
//! | `TPU_WORKER_HOSTNAMES` | their hosts | GKE's webhook |
//! | `MEGASCALE_NUM_SLICES`, `MEGASCALE_SLICE_ID` | slices of the job, and which this is | JAX's `cloud_tpu_cluster`, xpk |
//! | `MEGASCALE_COORDINATOR_ADDRESS` | the first machine of the first slice | xpk's JobSets |

use std::collections::BTreeSet;

use crate::{InstanceType, cluster::Place};

/// The variables, of which a worker takes no others from a resource manager.
pub const TPU_VARIABLES: [&str; 10] = [
    CHIPS,
    BOUNDS,
    TASK,
    WORKER,
    ADDRESSES,
    PORT_NAME,
    HOSTNAMES,
    NUM_SLICES,
    SLICE,
    COORDINATOR,
];
const CHIPS: &str = "TPU_CHIPS_PER_PROCESS_BOUNDS";
const BOUNDS: &str = "TPU_PROCESS_BOUNDS";
const TASK: &str = "CLOUD_TPU_TASK_ID";
const WORKER: &str = "TPU_WORKER_ID";
const ADDRESSES: &str = "TPU_PROCESS_ADDRESSES";
const PORT_NAME: &str = "TPU_PROCESS_PORT";
const HOSTNAMES: &str = "TPU_WORKER_HOSTNAMES";
const NUM_SLICES: &str = "MEGASCALE_NUM_SLICES";
const SLICE: &str = "MEGASCALE_SLICE_ID";
/// The one that Pathways' JobSets set to their head, where Pathways' own resource manager is the coordinator.
pub const MEGASCALE_COORDINATOR: &str = COORDINATOR;
const COORDINATOR: &str = "MEGASCALE_COORDINATOR_ADDRESS";

/// Port at which the machines of a slice find each other.
const PORT: u16 = 8471;

/// The host of a worker by the rules of JobSets, whose pods have such names.
pub(crate) fn jobset_host(jobset: &str, job: &str, place: Place) -> String {
    let Place { slice, task } = place;
    format!("{jobset}-{job}-{slice}-{task}.{jobset}")
}

/// What one worker is told.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Variables {
    pub(crate) set: Vec<(&'static str, String)>,
    /// Those that take hosts which are not known.
    pub(crate) lacking: Vec<&'static str>,
    /// Whose hosts.
    pub(crate) unknown: BTreeSet<Place>,
}

impl Variables {
    /// Sets a variable by the hosts of some workers, where all are known.
    fn set_by(
        &mut self,
        name: &'static str,
        places: impl Iterator<Item = Place>,
        host: &impl Fn(Place) -> Option<String>,
        suffix: &str,
    ) {
        let mut hosts = Vec::new();
        let mut all = true;
        for place in places {
            match host(place) {
                Some(host) => hosts.push(host + suffix),
                None => {
                    self.unknown.insert(place);
                    all = false;
                }
            }
        }
        match all {
            true => self.set.push((name, hosts.join(","))),
            false => self.lacking.push(name),
        }
    }
}

/// The variables of the worker at `place`, in a job of so many slices.
pub(crate) fn variables(
    instance: &InstanceType,
    slices: u32,
    place: Place,
    host: impl Fn(Place) -> Option<String>,
) -> Variables {
    let bounds = |sizes: [u32; 3]| sizes.map(|size| size.to_string()).join(",");
    let mut variables = Variables {
        set: vec![
            (CHIPS, bounds(instance.host())),
            (BOUNDS, bounds(instance.host_grid())),
            (TASK, place.task.to_string()),
            (WORKER, place.task.to_string()),
        ],
        ..Variables::default()
    };
    if instance.hosts() > 1 {
        let mates = || {
            (0..instance.hosts()).map(|task| Place {
                slice: place.slice,
                task,
            })
        };
        variables.set_by(ADDRESSES, mates(), &host, &format!(":{PORT}"));
        variables.set.push((PORT_NAME, PORT.to_string()));
        variables.set_by(HOSTNAMES, mates(), &host, "");
    }
    if slices > 1 {
        variables.set.push((NUM_SLICES, slices.to_string()));
        variables.set.push((SLICE, place.slice.to_string()));
        let first = Place { slice: 0, task: 0 };
        variables.set_by(COORDINATOR, std::iter::once(first), &host, "");
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(instance: &str, slices: u32, place: (u32, u32), absent: &[(u32, u32)]) -> Variables {
        let of = |(slice, task)| Place { slice, task };
        let host = |place: Place| {
            let is_absent = absent.iter().any(|&absent| of(absent) == place);
            (!is_absent).then(|| jobset_host("train", "pathways-worker", place))
        };
        variables(&instance.parse().unwrap(), slices, of(place), host)
    }

    fn text(variables: &Variables) -> Vec<String> {
        let set = variables.set.iter();
        set.map(|(name, value)| format!("{name}={value}")).collect()
    }

    #[test]
    fn one_machine_needs_no_addresses() {
        let told = told("tpuv6e:2x2", 1, (0, 0), &[(0, 0)]);
        assert_eq!(
            text(&told),
            [
                "TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1",
                "TPU_PROCESS_BOUNDS=1,1,1",
                "CLOUD_TPU_TASK_ID=0",
                "TPU_WORKER_ID=0",
            ]
        );
        assert!(told.lacking.is_empty());
    }

    #[test]
    fn machines_find_each_other_and_slices_their_coordinator() {
        let told = told("tpuv5:2x2x2", 2, (1, 1), &[]);
        assert_eq!(
            text(&told),
            [
                "TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1",
                "TPU_PROCESS_BOUNDS=1,1,2",
                "CLOUD_TPU_TASK_ID=1",
                "TPU_WORKER_ID=1",
                "TPU_PROCESS_ADDRESSES=train-pathways-worker-1-0.train:8471,train-pathways-worker-1-1.train:8471",
                "TPU_PROCESS_PORT=8471",
                "TPU_WORKER_HOSTNAMES=train-pathways-worker-1-0.train,train-pathways-worker-1-1.train",
                "MEGASCALE_NUM_SLICES=2",
                "MEGASCALE_SLICE_ID=1",
                "MEGASCALE_COORDINATOR_ADDRESS=train-pathways-worker-0-0.train",
            ]
        );
        let names = told.set.iter().map(|(name, _)| *name);
        assert_eq!(names.collect::<Vec<_>>(), TPU_VARIABLES);
    }

    #[test]
    fn what_takes_hosts_that_are_not_known_is_lacking() {
        let mates = told("tpuv5:2x2x2", 2, (1, 1), &[(1, 0), (0, 1)]);
        assert_eq!(mates.lacking, [ADDRESSES, HOSTNAMES]);
        assert_eq!(mates.unknown, [Place { slice: 1, task: 0 }].into());
        assert_eq!(mates.set.len(), TPU_VARIABLES.len() - 2);
        let coordinator = told("tpuv5:2x2x2", 2, (1, 1), &[(0, 0)]);
        assert_eq!(coordinator.lacking, [COORDINATOR]);
    }
}
