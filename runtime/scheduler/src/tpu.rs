//! What libtpu reads from its environment when a slice has several machines, or a job several slices. It builds the mesh of a
//! slice by itself from this, and Megascale, which is in it, moves what crosses slices. Pure; not tried on hardware.
//!
//! | variable | is | source |
//! | --- | --- | --- |
//! | `TPU_CHIPS_PER_PROCESS_BOUNDS` | chips of this machine, along x, y, z | JAX's `test_multiprocess` |
//! | `TPU_PROCESS_BOUNDS` | machines of the slice, along x, y, z | the same |
//! | `CLOUD_TPU_TASK_ID` | this one's number among them | the same |
//! | `TPU_PROCESS_ADDRESSES`, `TPU_PROCESS_PORT` | where they are, and this one's port | the same; port 8471 in Pathways' JobSets |
//! | `MEGASCALE_NUM_SLICES`, `MEGASCALE_SLICE_ID` | slices of the job, and which this is | JAX's `cloud_tpu_cluster`, xpk |
//! | `MEGASCALE_COORDINATOR_ADDRESS` | the first machine of the first slice | xpk's JobSets |

use waystation_scheduler::InstanceType;

/// Port at which the machines of a slice find each other.
const PORT: u16 = 8471;

/// One worker's place in a job on TPUs.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// What each slice is.
    pub(crate) instance: InstanceType,
    /// Slices of the job.
    pub(crate) slices: u32,
    /// This worker's slice.
    pub(crate) slice: u32,
    /// Its number there.
    pub(crate) task: u32,
}

/// How the machines of a job are named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Names {
    jobset: String,
    job: String,
}

impl Names {
    /// Those that a JobSet gives, when this process is in one that names its hosts.
    pub(crate) fn of_jobset(variable: impl Fn(&str) -> Option<String>) -> Option<Names> {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        Some(Names {
            jobset: given("JOBSET_NAME")?,
            job: given("REPLICATED_JOB_NAME")?,
        })
    }

    fn host(&self, slice: u32, task: u32) -> String {
        let Names { jobset, job } = self;
        format!("{jobset}-{job}-{slice}-{task}.{jobset}")
    }
}

/// The variables of a worker. Without names, those that take none: the machine's own environment has the others then, or
/// there is but one machine.
pub(crate) fn variables(place: &Place, names: Option<&Names>) -> Vec<(&'static str, String)> {
    let bounds = |sizes: [u32; 3]| sizes.map(|size| size.to_string()).join(",");
    let instance = &place.instance;
    let mut variables = vec![
        ("TPU_CHIPS_PER_PROCESS_BOUNDS", bounds(instance.host())),
        ("TPU_PROCESS_BOUNDS", bounds(instance.host_grid())),
        ("CLOUD_TPU_TASK_ID", place.task.to_string()),
    ];
    if let Some(names) = names {
        let mates = (0..instance.hosts()).map(|task| names.host(place.slice, task));
        let addresses: Vec<_> = mates.map(|host| format!("{host}:{PORT}")).collect();
        variables.push(("TPU_PROCESS_ADDRESSES", addresses.join(",")));
        variables.push(("TPU_PROCESS_PORT", PORT.to_string()));
    }
    if place.slices > 1 {
        variables.push(("MEGASCALE_NUM_SLICES", place.slices.to_string()));
        variables.push(("MEGASCALE_SLICE_ID", place.slice.to_string()));
        let first = names.map(|names| names.host(0, 0));
        variables.extend(first.map(|host| ("MEGASCALE_COORDINATOR_ADDRESS", host)));
    }
    variables
}

/// Those of `variables` that are to be set: what the environment says stays. But for Megascale's coordinator: Pathways'
/// JobSets name the head there, whose resource manager is one, and ours is not.
pub(crate) fn missing(
    variables: Vec<(&'static str, String)>,
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<(&'static str, String)> {
    let wanted = |(name, value): &(&'static str, String)| match variable(name) {
        None => true,
        Some(given) => *name == "MEGASCALE_COORDINATOR_ADDRESS" && given != *value,
    };
    variables.into_iter().filter(wanted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(instance: &str, slices: u32, slice: u32, task: u32) -> Place {
        Place {
            instance: instance.parse().unwrap(),
            slices,
            slice,
            task,
        }
    }

    fn jobset(name: &str) -> Option<String> {
        let value = match name {
            "JOBSET_NAME" => "train",
            "REPLICATED_JOB_NAME" => "pathways-worker",
            _ => return None,
        };
        Some(value.to_owned())
    }

    fn text(variables: &[(&'static str, String)]) -> Vec<String> {
        variables
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect()
    }

    #[test]
    fn one_machine_needs_no_addresses() {
        assert_eq!(
            text(&variables(&place("tpuv6e:2x2", 1, 0, 0), None)),
            [
                "TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1",
                "TPU_PROCESS_BOUNDS=1,1,1",
                "CLOUD_TPU_TASK_ID=0",
            ]
        );
    }

    #[test]
    fn the_machines_of_slices_find_each_other_by_the_names_of_the_jobset() {
        let names = Names::of_jobset(jobset).unwrap();
        assert_eq!(
            text(&variables(&place("tpuv5:2x2x2", 2, 1, 1), Some(&names))),
            [
                "TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1",
                "TPU_PROCESS_BOUNDS=1,1,2",
                "CLOUD_TPU_TASK_ID=1",
                "TPU_PROCESS_ADDRESSES=train-pathways-worker-1-0.train:8471,train-pathways-worker-1-1.train:8471",
                "TPU_PROCESS_PORT=8471",
                "MEGASCALE_NUM_SLICES=2",
                "MEGASCALE_SLICE_ID=1",
                "MEGASCALE_COORDINATOR_ADDRESS=train-pathways-worker-0-0.train",
            ]
        );
        assert_eq!(Names::of_jobset(|_| None), None);
        assert_eq!(Names::of_jobset(|_| Some(String::new())), None);
    }

    #[test]
    fn what_the_environment_says_stays_but_for_the_head_as_coordinator() {
        let names = Names::of_jobset(jobset).unwrap();
        let all = variables(&place("tpuv5:2x2x2", 2, 0, 0), Some(&names));
        let given = |name: &str| match name {
            "TPU_PROCESS_ADDRESSES" => Some("a:1,b:1".to_owned()),
            "MEGASCALE_NUM_SLICES" => Some("2".to_owned()),
            "MEGASCALE_COORDINATOR_ADDRESS" => Some("train-pathways-head-0-0.train".to_owned()),
            _ => None,
        };
        let left: Vec<_> = missing(all, given)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(
            left,
            [
                "TPU_CHIPS_PER_PROCESS_BOUNDS",
                "TPU_PROCESS_BOUNDS",
                "CLOUD_TPU_TASK_ID",
                "TPU_PROCESS_PORT",
                "MEGASCALE_SLICE_ID",
                "MEGASCALE_COORDINATOR_ADDRESS",
            ]
        );
    }
}
