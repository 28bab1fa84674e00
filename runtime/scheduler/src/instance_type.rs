//! What an instance type means: `cpu:4`, or a type of TPU slices as Pathways' launchers write it, `tpuv6e:4x4`. Pure.
//!
//! Public facts, and where they stand:
//!
//! | fact | source |
//! | --- | --- |
//! | names, and how many chips a machine has | `pathwaysutils.experimental.gke.jobset`, google/pathways-job, xpk |
//! | machines a topology takes; shapes of machines (2x2, 2x2x1, 2x4) | Cloud TPU documentation, pages v4, v5p, v5e, v6e, tpu7x |
//! | TensorCores a chip | the same pages; xpk's `system_characteristics` |
//! | devices a chip: one, its cores together, before tpu7x, which has two | Cloud TPU documentation, page tpu7x; JAX's `mesh_utils` |
//! | order of devices and of machines: x first, then y, then z | what JAX shows on these machines |

use std::{fmt, str::FromStr};

/// Most devices of one slice. The largest slices that one can have are some ten thousand chips.
const MAX_DEVICES: u64 = 1 << 17;

/// What one slice of a cluster is made of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InstanceType {
    family: Family,
    /// Chips along x, y, z. CPU devices lie along x.
    topology: [u32; 3],
    /// Chips of one machine, along x, y, z; divides the topology.
    host: [u32; 3],
    /// As it was given, for messages.
    text: String,
}

/// Where a device lies in its slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePlace {
    /// Of its chip: x, y, z. Two-dimensional slices have z 0.
    pub coords: [u32; 3],
    /// Its number on the chip.
    pub core_on_chip: u32,
}

/// What the part before the colon says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Family {
    name: &'static str,
    /// Chips of a full machine.
    host: [u32; 3],
    /// Devices that a chip shows.
    devices_per_chip: u32,
    /// TensorCores of a chip.
    cores_per_chip: u32,
}

const CPU: &str = "cpu";

/// `1t` is the machine type with eight chips, which are one slice.
const TPUS: [Family; 8] = [
    tpu("tpuv4", [2, 2, 1], 1, 2),
    tpu("tpuv5", [2, 2, 1], 1, 2),
    tpu("tpuv5e", [2, 2, 1], 1, 1),
    tpu("tpuv5lite", [2, 2, 1], 1, 1),
    tpu("tpuv5e1t", [2, 4, 1], 1, 1),
    tpu("tpuv6e", [2, 2, 1], 1, 1),
    tpu("tpuv6e1t", [2, 4, 1], 1, 1),
    tpu("tpu7x", [2, 2, 1], 2, 2),
];

const fn tpu(
    name: &'static str,
    host: [u32; 3],
    devices_per_chip: u32,
    cores_per_chip: u32,
) -> Family {
    Family {
        name,
        host,
        devices_per_chip,
        cores_per_chip,
    }
}

/// Why a text is no instance type.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InstanceTypeError {
    /// No colon.
    #[error("{text:?} is no instance type: write TYPE:TOPOLOGY, as in tpuv6e:4x4 or cpu:4")]
    NoTopology {
        /// As given.
        text: String,
    },
    /// A type that we have no facts of.
    #[error(
        "{family:?} is no known type: cpu, tpuv4, tpuv5 (which is v5p), tpuv5e, tpuv5lite, tpuv5e1t, tpuv6e, tpuv6e1t and \
         tpu7x are"
    )]
    UnknownType {
        /// The part before the colon.
        family: String,
    },
    /// Not numbers of chips with x between them.
    #[error("{topology:?} is no topology: write chips along each axis, as in 4x4 or 2x2x2")]
    Topology {
        /// The part behind the colon.
        topology: String,
    },
    /// Not a number of devices.
    #[error("{count:?} is no number of CPU devices: write cpu:4 for a slice of four")]
    CpuCount {
        /// The part behind the colon.
        count: String,
    },
    /// More than any slice has.
    #[error("{text} would have more than {MAX_DEVICES} devices, and no slice has that many")]
    TooLarge {
        /// As given.
        text: String,
    },
    /// Some machine would have a part of its chips in it.
    #[error(
        "{text} cannot be made of whole machines: one has {}x{}x{} chips, and the topology is no multiple of that", host[0],
        host[1], host[2]
    )]
    Machines {
        /// As given.
        text: String,
        /// Chips of a machine, along x, y, z.
        host: [u32; 3],
    },
}

impl InstanceType {
    /// Whether both mean the same slices: some types have two names.
    pub fn is_same(&self, other: &InstanceType) -> bool {
        let family = |of: &InstanceType| match of.family.name {
            "tpuv5lite" => "tpuv5e",
            name => name,
        };
        family(self) == family(other) && self.topology == other.topology && self.host == other.host
    }

    /// Whether these are CPU devices.
    pub fn is_cpu(&self) -> bool {
        self.family.name == CPU
    }

    /// Chips of a slice; the devices of a CPU slice.
    pub fn chips(&self) -> u32 {
        self.topology.iter().product()
    }

    /// TensorCores of a chip; 1 for CPU.
    pub fn cores_per_chip(&self) -> u32 {
        self.family.cores_per_chip
    }

    /// Machines of a slice, which is one worker each.
    pub fn hosts(&self) -> u32 {
        self.host_grid().iter().product()
    }

    /// Devices that a machine's worker shows.
    pub fn devices_per_host(&self) -> u32 {
        self.host.iter().product::<u32>() * self.family.devices_per_chip
    }

    /// Devices of a slice.
    pub fn devices(&self) -> u32 {
        self.hosts() * self.devices_per_host()
    }

    /// Where a machine's device lies; none when the slice has no such machine or the machine no such device.
    pub fn place(&self, task: u32, device: u32) -> Option<DevicePlace> {
        if task >= self.hosts() || device >= self.devices_per_host() {
            return None;
        }
        let corner = unravel(task, self.host_grid());
        let inside = unravel(device / self.family.devices_per_chip, self.host);
        let axes = [0, 1, 2];
        Some(DevicePlace {
            coords: axes.map(|axis| corner[axis] * self.host[axis] + inside[axis]),
            core_on_chip: device % self.family.devices_per_chip,
        })
    }

    /// Chips of a machine, along x, y, z.
    pub fn host(&self) -> [u32; 3] {
        self.host
    }

    /// Machines of a slice, along x, y, z.
    pub fn host_grid(&self) -> [u32; 3] {
        [0, 1, 2].map(|axis| self.topology[axis] / self.host[axis])
    }
}

/// The position with a number, the first axis running fastest.
fn unravel(number: u32, sizes: [u32; 3]) -> [u32; 3] {
    let [x, y, _] = sizes;
    [number % x, number / x % y, number / (x * y)]
}

impl FromStr for InstanceType {
    type Err = InstanceTypeError;

    fn from_str(text: &str) -> Result<InstanceType, InstanceTypeError> {
        let no_topology = || InstanceTypeError::NoTopology {
            text: text.to_owned(),
        };
        let (name, topology) = text.split_once(':').ok_or_else(no_topology)?;
        if name == CPU {
            return cpu(text, topology);
        }
        let family = TPUS.iter().find(|family| family.name == name);
        let family = *family.ok_or_else(|| InstanceTypeError::UnknownType {
            family: name.to_owned(),
        })?;
        let sizes = sizes(topology)?;
        check_size(text, sizes, family.devices_per_chip)?;
        // A slice smaller than a machine is that part of one.
        let chips: u32 = sizes.iter().product();
        let fits = [0, 1, 2]
            .iter()
            .all(|&axis| sizes[axis] <= family.host[axis]);
        let host = if fits && chips < family.host.iter().product() {
            sizes
        } else {
            family.host
        };
        if (0..3).any(|axis| !sizes[axis].is_multiple_of(host[axis])) {
            return Err(InstanceTypeError::Machines {
                text: text.to_owned(),
                host,
            });
        }
        Ok(InstanceType {
            family,
            topology: sizes,
            host,
            text: text.to_owned(),
        })
    }
}

impl fmt::Display for InstanceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// `cpu:4`: one machine with four devices.
fn cpu(text: &str, count: &str) -> Result<InstanceType, InstanceTypeError> {
    let wrong = || InstanceTypeError::CpuCount {
        count: count.to_owned(),
    };
    let devices = number(count).ok_or_else(wrong)?;
    let topology = [devices, 1, 1];
    check_size(text, topology, 1)?;
    Ok(InstanceType {
        family: tpu(CPU, topology, 1, 1),
        topology,
        host: topology,
        text: text.to_owned(),
    })
}

/// Chips along x, y, z; missing axes are 1.
fn sizes(topology: &str) -> Result<[u32; 3], InstanceTypeError> {
    let wrong = || InstanceTypeError::Topology {
        topology: topology.to_owned(),
    };
    let axes: Option<Vec<u32>> = topology.split('x').map(number).collect();
    match axes.ok_or_else(wrong)?[..] {
        [x, y] => Ok([x, y, 1]),
        [x, y, z] => Ok([x, y, z]),
        _ => Err(wrong()),
    }
}

/// A number from 1 in plain digits.
fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| digits && *number > 0)
}

fn check_size(text: &str, sizes: [u32; 3], devices_per_chip: u32) -> Result<(), InstanceTypeError> {
    let factors = sizes.into_iter().chain([devices_per_chip]);
    let devices = factors.fold(1_u64, |product, factor| {
        product.saturating_mul(u64::from(factor))
    });
    if devices > MAX_DEVICES {
        return Err(InstanceTypeError::TooLarge {
            text: text.to_owned(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn read(text: &str) -> InstanceType {
        text.parse().unwrap()
    }

    #[test]
    fn machines_and_devices_are_as_in_the_public_tables() {
        // Type, chips, machines, devices a machine.
        let table = [
            ("cpu:4", 4, 1, 4),
            ("tpuv4:2x2x1", 4, 1, 4),
            ("tpuv4:4x4x8", 128, 32, 4),
            ("tpuv5:2x2x1", 4, 1, 4),
            ("tpuv5:2x2", 4, 1, 4),
            ("tpuv5:2x2x2", 8, 2, 4),
            ("tpuv5:16x20x28", 8960, 2240, 4),
            ("tpuv5e:2x2", 4, 1, 4),
            ("tpuv5lite:4x4", 16, 4, 4),
            ("tpuv5e:16x16", 256, 64, 4),
            ("tpuv5e1t:2x4", 8, 1, 8),
            ("tpuv6e:1x1", 1, 1, 1),
            ("tpuv6e:2x2", 4, 1, 4),
            ("tpuv6e:2x4", 8, 2, 4),
            ("tpuv6e:8x16", 128, 32, 4),
            ("tpuv6e:2x2x2", 8, 2, 4),
            ("tpuv6e1t:2x4", 8, 1, 8),
            ("tpu7x:1x1x1", 1, 1, 2),
            ("tpu7x:2x2x1", 4, 1, 8),
            ("tpu7x:2x2x4", 16, 4, 8),
        ];
        for (text, chips, hosts, devices) in table {
            let instance = read(text);
            assert_eq!(instance.chips(), chips, "{text}");
            assert_eq!(instance.hosts(), hosts, "{text}");
            assert_eq!(instance.devices_per_host(), devices, "{text}");
            assert_eq!(instance.devices(), hosts * devices, "{text}");
            assert_eq!(instance.to_string(), text);
            assert_eq!(instance.is_cpu(), text.starts_with("cpu"));
        }
        assert_eq!(read("tpuv4:2x2x1").cores_per_chip(), 2);
        assert_eq!(read("tpuv6e:2x2").cores_per_chip(), 1);
    }

    #[test]
    fn a_machine_is_a_block_of_the_topology() {
        let coords = |text: &str, task: u32| -> Vec<[u32; 3]> {
            let instance = read(text);
            let devices = 0..instance.devices_per_host();
            devices
                .map(|device| instance.place(task, device).unwrap().coords)
                .collect()
        };
        assert_eq!(
            coords("tpuv6e:4x4", 1),
            [[2, 0, 0], [3, 0, 0], [2, 1, 0], [3, 1, 0]]
        );
        assert_eq!(
            coords("tpuv6e:4x4", 2),
            [[0, 2, 0], [1, 2, 0], [0, 3, 0], [1, 3, 0]]
        );
        assert_eq!(
            coords("tpuv5:2x2x2", 1),
            [[0, 0, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1]]
        );
        assert_eq!(coords("tpuv5e1t:2x4", 0)[7], [1, 3, 0]);
    }

    #[test]
    fn every_device_has_a_place_of_its_own() {
        for text in [
            "cpu:3",
            "tpuv6e:4x8",
            "tpuv5:2x4x4",
            "tpu7x:2x2x2",
            "tpuv6e1t:2x4",
        ] {
            let instance = read(text);
            let mut places = BTreeSet::new();
            for task in 0..instance.hosts() {
                for device in 0..instance.devices_per_host() {
                    let place = instance.place(task, device).unwrap();
                    places.insert((place.coords, place.core_on_chip));
                }
                assert_eq!(instance.place(task, instance.devices_per_host()), None);
            }
            assert_eq!(places.len(), instance.devices() as usize, "{text}");
            assert_eq!(instance.place(instance.hosts(), 0), None);
        }
        let place = read("tpu7x:2x2x1").place(0, 3).unwrap();
        assert_eq!((place.coords, place.core_on_chip), ([1, 0, 0], 1));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        use InstanceTypeError as E;
        let refused = |text: &str| text.parse::<InstanceType>().unwrap_err();
        for text in ["", "tpuv6e", "tpuv6e-8"] {
            assert!(matches!(refused(text), E::NoTopology { .. }), "{text}");
        }
        for text in ["tpuv3:4x4", "TPUv6e:2x2", ":2x2", "tpuv5p:2x2x1"] {
            assert!(matches!(refused(text), E::UnknownType { .. }), "{text}");
        }
        for text in [
            "tpuv6e:",
            "tpuv6e:4",
            "tpuv6e:2x",
            "tpuv6e:2x2x2x2",
            "tpuv6e:0x4",
            "tpuv6e:-2x2",
            "tpuv6e:+2x2",
            "tpuv6e:2X2",
            "tpuv6e:99999999999x1",
        ] {
            assert!(matches!(refused(text), E::Topology { .. }), "{text}");
        }
        for text in ["cpu:", "cpu:0", "cpu:2x2", "cpu:x"] {
            assert!(matches!(refused(text), E::CpuCount { .. }), "{text}");
        }
        for text in [
            "tpuv6e:4294967295x4294967295",
            "tpuv5:64x64x64",
            "cpu:4294967295",
        ] {
            assert!(matches!(refused(text), E::TooLarge { .. }), "{text}");
        }
        for text in ["tpuv6e:3x4", "tpuv5:3x3x3", "tpuv6e:1x8", "tpuv5e1t:4x2"] {
            assert!(matches!(refused(text), E::Machines { .. }), "{text}");
        }
    }
}
