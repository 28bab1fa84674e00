//! `--instance_type` and `--simulate` of `run` and `up`.

use std::ffi::OsString;

use waystation_scheduler::InstanceType;

use crate::{error::Failure, simulate::Simulate};

/// What the slices are.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct ShapeArgs {
    /// What each slice is, in place of --workers: cpu:DEVICES, or a type of TPU slices such as tpuv6e:4x4
    #[arg(long = "instance_type", value_name = "TYPE:TOPOLOGY")]
    pub(crate) instance_type: Option<InstanceType>,
    /// Let CPU devices take the places of the accelerators that --instance_type asks for
    #[arg(
        long = "simulate",
        value_name = "cpu",
        hide_possible_values = true,
        requires = "instance_type",
        value_enum
    )]
    pub(crate) simulate: Option<Simulate>,
}

impl ShapeArgs {
    /// Workers of each slice. `given`: by --workers, 1 when it was not.
    ///
    /// # Errors
    /// [`Failure::usage`] when the two are at odds.
    pub(super) fn workers(&self, given: u32) -> Result<u32, Failure> {
        let Some(instance) = &self.instance_type else {
            return Ok(given);
        };
        let hosts = instance.hosts();
        if given != 1 && given != hosts {
            return Err(Failure::usage(format!(
                "a slice {instance} has {hosts} machine(s), and --workers is {given}: leave --workers out"
            )));
        }
        Ok(hosts)
    }

    /// Devices to tell a worker to make. A worker that simulates hears of them from the resource manager.
    ///
    /// # Errors
    /// [`Failure::usage`] when --devices_per_worker is at odds with the type.
    pub(super) fn devices_per_worker(&self, given: Option<u32>) -> Result<Option<u32>, Failure> {
        let Some(instance) = &self.instance_type else {
            return Ok(given);
        };
        let devices = instance.devices_per_host();
        match given {
            Some(given) if given != devices => Err(Failure::usage(format!(
                "a machine of a slice {instance} has {devices} device(s), and --devices_per_worker is {given}: leave it out"
            ))),
            _ => Ok(instance.is_cpu().then_some(devices)),
        }
    }

    /// The resource manager's flag.
    pub(super) fn manager(&self) -> Option<OsString> {
        let instance = self.instance_type.as_ref()?;
        Some(format!("--instance_type={instance}").into())
    }

    /// Every part's flag.
    pub(super) fn everyone(&self) -> Option<OsString> {
        self.simulate.map(|_| "--simulate=cpu".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(instance: &str) -> ShapeArgs {
        ShapeArgs {
            instance_type: Some(instance.parse().unwrap()),
            simulate: Some(Simulate::Cpu),
        }
    }

    #[test]
    fn a_type_says_how_many_workers_and_devices_there_are() {
        assert_eq!(ShapeArgs::default().workers(3), Ok(3));
        assert_eq!(
            ShapeArgs::default().devices_per_worker(Some(3)),
            Ok(Some(3))
        );
        let slice = shape("tpuv6e:4x4");
        assert_eq!(slice.workers(1), Ok(4));
        assert_eq!(slice.workers(4), Ok(4));
        assert_eq!(slice.devices_per_worker(Some(4)), Ok(None));
        assert_eq!(shape("cpu:3").devices_per_worker(None), Ok(Some(3)));
        for failure in [
            slice.workers(3).unwrap_err(),
            slice.devices_per_worker(Some(8)).unwrap_err(),
        ] {
            assert!(failure.message.contains("leave"), "{failure}");
        }
    }

    #[test]
    fn the_parts_are_told() {
        assert_eq!(
            shape("cpu:3").manager(),
            Some("--instance_type=cpu:3".into())
        );
        assert_eq!(shape("cpu:3").everyone(), Some("--simulate=cpu".into()));
        assert_eq!(ShapeArgs::default().everyone(), None);
    }
}
