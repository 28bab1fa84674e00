//! `--simulate=cpu` (`WAYSTATION_SIMULATE`): CPU devices in the places of the accelerators that a cluster is asked for.
//!
//! What a cluster shall consist of is known to the resource manager alone (`--instance_type`); so a worker that simulates
//! asks it before it makes any device.

use waystation_pjrt::OptionValue;
use waystation_scheduler::InstanceType;
use waystation_worker::Simulated;

use crate::{ask, error::Failure};

/// What takes the places of accelerators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Simulate {
    /// CPU devices.
    Cpu,
}

/// Says so in the log of a part.
pub(crate) fn announce(simulate: Option<Simulate>) {
    if simulate.is_some() {
        tracing::warn!("SIMULATED: CPU devices take the places of the accelerators asked for");
    }
}

/// What the compiler flags of TPUs alone begin with; a CPU plugin has none of them.
const TPU_FLAGS: [&str; 3] = ["--xla_tpu_", "--xla_jf_", "--xla_sc_"];

/// The compiler flags without those of TPUs, where these are simulated: a launcher's are to be tried as they are. Each is named in
/// the log.
pub(crate) fn known_flags(simulate: Option<Simulate>, mut flags: Vec<String>) -> Vec<String> {
    if simulate.is_some() {
        flags.retain(|flag| {
            let is_known = !TPU_FLAGS.iter().any(|prefix| flag.starts_with(prefix));
            if !is_known {
                tracing::warn!("SIMULATED: {flag} has no effect: CPU devices have no such flag");
            }
            is_known
        });
    }
    flags
}

/// A worker's part of what is simulated.
#[derive(Debug)]
pub(crate) struct Part {
    /// CPU devices to make.
    pub(crate) devices: u32,
    /// What they are to show; none where CPU devices are what was asked for.
    pub(crate) simulated: Option<Simulated>,
}

impl Part {
    /// The part of one worker.
    ///
    /// # Errors
    /// [`Failure::usage`] when the slice has no such worker.
    fn of(instance: &InstanceType, task: u32) -> Result<Part, Failure> {
        let devices = instance.devices_per_host();
        let places = (0..devices).map(|device| instance.place(task, device));
        let places: Option<Vec<_>> = places.collect();
        let places = places.ok_or_else(|| {
            Failure::usage(format!(
                "--task is {task}, and a slice {instance} has {} machine(s): give a smaller one",
                instance.hosts()
            ))
        })?;
        let attributes = places.into_iter().map(|place| {
            let coords = place.coords.map(i64::from).to_vec();
            let core = i64::from(place.core_on_chip);
            vec![
                ("coords".to_owned(), OptionValue::Int64List(coords)),
                ("core_on_chip".to_owned(), OptionValue::Int64(core)),
            ]
        });
        Ok(Part {
            devices,
            simulated: (!instance.is_cpu()).then(|| Simulated {
                instance_type: instance.to_string(),
                attributes: attributes.collect(),
            }),
        })
    }
}

/// The part of a worker, by what the resource manager was told; none when the process was told to end before that was heard.
///
/// # Errors
/// [`Failure::usage`] when nobody said what the slices are, or when they have no such worker.
pub(crate) fn part(manager: &str, task: u32, parent_stdin: bool) -> Result<Option<Part>, Failure> {
    let Some(status) = ask::status(manager, parent_stdin)? else {
        return Ok(None);
    };
    Part::of(&read(&status.instance_type)?, task).map(Some)
}

fn read(asked: &str) -> Result<InstanceType, Failure> {
    if asked.is_empty() {
        return Err(Failure::usage(
            "--simulate: nobody said what the slices are: give the resource manager --instance_type, as in tpuv6e:4x4",
        ));
    }
    asked
        .parse()
        .map_err(|error| Failure::usage(format!("--simulate: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_tpus_are_left_out_where_they_are_simulated() {
        let given = ["--xla_tpu_x=true", "--xla_dump_to=/d", "--xla_sc_y=1"];
        let flags = || given.map(str::to_owned).to_vec();
        assert_eq!(known_flags(None, flags()), given);
        assert_eq!(
            known_flags(Some(Simulate::Cpu), flags()),
            ["--xla_dump_to=/d"]
        );
    }

    #[test]
    fn a_worker_shows_the_devices_of_its_machine() {
        let part = Part::of(&read("tpuv6e:4x4").unwrap(), 3).unwrap();
        assert_eq!(part.devices, 4);
        let simulated = part.simulated.unwrap();
        assert_eq!(simulated.instance_type, "tpuv6e:4x4");
        let first = &simulated.attributes[0];
        assert!(
            matches!(&first[0], (name, OptionValue::Int64List(at)) if name == "coords" && *at == [2, 2, 0]),
            "{first:?}"
        );
        let failure = Part::of(&read("tpuv6e:4x4").unwrap(), 4).unwrap_err();
        assert!(failure.message.contains("4 machine(s)"), "{failure}");
    }

    #[test]
    fn cpu_devices_stand_in_for_nothing() {
        let part = Part::of(&read("cpu:3").unwrap(), 0).unwrap();
        assert_eq!(part.devices, 3);
        assert!(part.simulated.is_none());
    }

    #[test]
    fn an_unknown_type_is_the_users_to_mend() {
        for asked in ["", "tpuv9:2x2"] {
            assert_eq!(read(asked).unwrap_err().status, crate::error::USAGE);
        }
    }
}
