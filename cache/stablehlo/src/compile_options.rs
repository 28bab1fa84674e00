//! The devices of a compile, from the client's options.
//!
//! The options are the bytes of an `xla.CompileOptionsProto` (xla/pjrt/proto/compile_options.proto). They go on to the plugin
//! with fields that we do not declare, so they are read at the level of the wire ([`crate::wire`]).

use crate::wire::{self, Message};

/// `CompileOptionsProto.executable_build_options`.
pub const EXECUTABLE_BUILD_OPTIONS: u32 = 3;
/// `CompileOptionsProto.env_option_overrides`, a map from option name to `OptionOverrideProto`.
pub const ENV_OPTION_OVERRIDES: u32 = 7;
/// `ExecutableBuildOptionsProto.debug_options`, an `xla.DebugOptions`.
pub const DEBUG_OPTIONS: u32 = 3;
/// `ExecutableBuildOptionsProto.num_replicas`.
pub const NUM_REPLICAS: u32 = 4;
/// `ExecutableBuildOptionsProto.num_partitions`.
pub const NUM_PARTITIONS: u32 = 5;
/// `ExecutableBuildOptionsProto.device_assignment`, an `xla.DeviceAssignmentProto`.
pub const DEVICE_ASSIGNMENT: u32 = 9;

const REPLICA_COUNT: u32 = 1;
const COMPUTATION_COUNT: u32 = 2;
const COMPUTATION_DEVICES: u32 = 3;
const REPLICA_DEVICE_IDS: u32 = 1;

/// The largest number of devices one program may ask for. Larger numbers are taken for damage before anything is allocated.
pub const MAX_DEVICES: u64 = 65_536;

/// Why a client's compile options do not say which devices a program runs on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bytes are not a `CompileOptionsProto`.
    #[error("compile options cannot be read: {part} is malformed")]
    Malformed {
        /// The message that is damaged.
        part: &'static str,
        /// What is wrong with it.
        source: wire::Error,
    },
    /// The device assignment contradicts itself or the counts beside it.
    #[error("device assignment of the compile options is inconsistent: {reason}")]
    Inconsistent {
        /// What does not agree, with the numbers.
        reason: String,
    },
}

/// Which devices run a program, in the order that shardings count them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAssignment {
    /// Replicas: whole copies of the program.
    pub num_replicas: u32,
    /// Partitions of each replica.
    pub num_partitions: u32,
    /// Device ids as the client counts them, replica-major: index = replica * num_partitions + partition.
    pub device_ids: Vec<i32>,
}

/// Reads the device assignment out of the bytes of an `xla.CompileOptionsProto`.
///
/// Options without an assignment get XLA's default one: devices 0, 1, ... for as many replicas and partitions as the options
/// name, each 1 when they name none.
///
/// # Errors
/// When the bytes are not such a message, when counts disagree, exceed [`MAX_DEVICES`], or when an id is negative, too large
/// or named twice.
pub fn device_assignment(options: &[u8]) -> Result<DeviceAssignment, Error> {
    let in_options = |source| Error::Malformed {
        part: "CompileOptionsProto",
        source,
    };
    let in_build = |source| Error::Malformed {
        part: "ExecutableBuildOptionsProto",
        source,
    };
    let options = Message::parse(options).map_err(in_options)?;
    let build = options
        .message(EXECUTABLE_BUILD_OPTIONS)
        .map_err(in_options)?
        .unwrap_or_default();
    let build = Message::parse(&build).map_err(in_build)?;
    let num_replicas = build.varint(NUM_REPLICAS).map_err(in_build)?;
    let num_partitions = build.varint(NUM_PARTITIONS).map_err(in_build)?;
    let assignment = build.message(DEVICE_ASSIGNMENT).map_err(in_build)?;
    let Some(assignment) = assignment.filter(|bytes| !bytes.is_empty()) else {
        // XLA's own readers take an absent count, which on the wire is 0, for 1.
        return default_assignment(
            num_replicas.unwrap_or(0).max(1),
            num_partitions.unwrap_or(0).max(1),
        );
    };
    let assignment = read_assignment(&assignment)?;
    for (name, asked, found) in [
        ("replicas", num_replicas, assignment.num_replicas),
        ("partitions", num_partitions, assignment.num_partitions),
    ] {
        let asked = asked.unwrap_or(0);
        if asked != 0 && asked != u64::from(found) {
            return Err(inconsistent(format!(
                "the options ask for {asked} {name}, the assignment has {found}"
            )));
        }
    }
    Ok(assignment)
}

/// The bytes of an `xla.DeviceAssignmentProto`.
pub fn encode_assignment(assignment: &DeviceAssignment) -> Vec<u8> {
    let mut message = Message::default();
    message.push_varint(REPLICA_COUNT, assignment.num_replicas.into());
    message.push_varint(COMPUTATION_COUNT, assignment.num_partitions.into());
    let partitions = assignment.num_partitions as usize;
    for partition in 0..partitions {
        let mut packed = Vec::new();
        for id in assignment
            .device_ids
            .iter()
            .skip(partition)
            .step_by(partitions)
        {
            wire::write_varint(&mut packed, i64::from(*id) as u64);
        }
        let mut computation = Message::default();
        computation.push_bytes(REPLICA_DEVICE_IDS, &packed);
        message.push_bytes(COMPUTATION_DEVICES, &computation.encode());
    }
    message.encode()
}

fn read_assignment(bytes: &[u8]) -> Result<DeviceAssignment, Error> {
    let malformed = |source| Error::Malformed {
        part: "DeviceAssignmentProto",
        source,
    };
    let message = Message::parse(bytes).map_err(malformed)?;
    let replicas = message
        .varint(REPLICA_COUNT)
        .map_err(malformed)?
        .unwrap_or(0);
    let partitions = message
        .varint(COMPUTATION_COUNT)
        .map_err(malformed)?
        .unwrap_or(0);
    let (num_replicas, num_partitions) = counts(replicas, partitions)?;
    let computations = message.repeated(COMPUTATION_DEVICES).map_err(malformed)?;
    if computations.len() as u64 != partitions {
        return Err(inconsistent(format!(
            "{partitions} computations, devices for {}",
            computations.len()
        )));
    }
    let mut device_ids = vec![0; (num_replicas * num_partitions) as usize];
    for (partition, computation) in computations.into_iter().enumerate() {
        let computation = Message::parse(computation).map_err(malformed)?;
        let ids = computation.varints(REPLICA_DEVICE_IDS).map_err(malformed)?;
        if ids.len() as u64 != replicas {
            return Err(inconsistent(format!(
                "{replicas} replicas, computation {partition} has {} devices",
                ids.len()
            )));
        }
        for (replica, id) in ids.into_iter().enumerate() {
            // The wire carries an int64 as its two's complement.
            let id = i32::try_from(id as i64).ok().filter(|id| *id >= 0);
            let id = id.ok_or_else(|| {
                inconsistent(format!(
                    "computation {partition} has a device id out of range"
                ))
            })?;
            device_ids[replica * num_partitions as usize + partition] = id;
        }
    }
    let mut sorted = device_ids.clone();
    sorted.sort_unstable();
    if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(inconsistent(format!("device {} is named twice", twice[0])));
    }
    Ok(DeviceAssignment {
        num_replicas,
        num_partitions,
        device_ids,
    })
}

fn default_assignment(replicas: u64, partitions: u64) -> Result<DeviceAssignment, Error> {
    let (num_replicas, num_partitions) = counts(replicas, partitions)?;
    let device_ids = (0..)
        .take((num_replicas * num_partitions) as usize)
        .collect();
    Ok(DeviceAssignment {
        num_replicas,
        num_partitions,
        device_ids,
    })
}

/// Both counts, once their product is known to be in bounds.
fn counts(replicas: u64, partitions: u64) -> Result<(u32, u32), Error> {
    let devices = replicas
        .checked_mul(partitions)
        .filter(|n| (1..=MAX_DEVICES).contains(n));
    if devices.is_none() {
        let limit = format!(
            "{replicas} replicas x {partitions} partitions is not between 1 and {MAX_DEVICES} devices"
        );
        return Err(inconsistent(limit));
    }
    Ok((replicas as u32, partitions as u32))
}

fn inconsistent(reason: String) -> Error {
    Error::Inconsistent { reason }
}

#[cfg(test)]
mod tests;
