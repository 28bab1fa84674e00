//! A client's compile options, made fit for this worker's plugin and for the cache key.
//!
//! The options are the bytes of an `xla.CompileOptionsProto`. They are changed field by field on the wire, so that whatever is
//! not named here reaches the plugin byte for byte.

use std::borrow::Cow;

use waystation_stablehlo::{
    compile_options::{
        self, DEBUG_OPTIONS, DEVICE_ASSIGNMENT, DeviceAssignment, ENV_OPTION_OVERRIDES,
        EXECUTABLE_BUILD_OPTIONS,
    },
    wire::Message,
};

use super::{
    Error, dump,
    flags::{self, Override},
};

/// `CompileOptionsProto.compile_portable_executable`.
const COMPILE_PORTABLE_EXECUTABLE: u32 = 4;
/// The map fields of `xla.DebugOptions`.
const DEBUG_MAPS: [u32; 3] = [
    357, // xla_gpu_analytical_latency_estimator_options
    474, // xla_gpu_experimental_cost_model_gemm_tiling_options
    500, // xla_backend_extra_options
];

/// A compile's options for their two readers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// For the plugin: its own device ids, without the client's dump options and paths, with the proxy's flags.
    pub plugin_options: Vec<u8>,
    /// For the cache key: the same, but of the devices only their number, nothing about dumps, and in one order.
    pub key_options: Vec<u8>,
    /// Whole copies of the program.
    pub num_replicas: u32,
    /// Partitions of each copy.
    pub num_partitions: u32,
}

/// Makes a client's options fit for this worker.
///
/// `device_ids` are the global ids of the program's devices in logical order, as the compile request names them; `local` gives
/// the plugin's id of a global one. `xla_flags` are the proxy's ("--xla_..."); they win over the client's. Options without
/// a device assignment are given one of `device_ids`.
///
/// # Errors
/// When the options cannot be read, when request and options name different devices, when a device is not this worker's, or
/// when a flag is none of XLA's.
pub fn prepare(
    options: &[u8],
    device_ids: &[i32],
    local: impl Fn(i32) -> Option<i32>,
    xla_flags: &[String],
) -> Result<Prepared, Error> {
    let DeviceAssignment {
        num_replicas,
        num_partitions,
        device_ids: named,
    } = compile_options::device_assignment(options)?;
    let mut message = read("CompileOptionsProto", options)?;
    let build = part(
        &message,
        EXECUTABLE_BUILD_OPTIONS,
        "executable_build_options",
    )?
    .into_owned();
    let mut build = read("ExecutableBuildOptionsProto", &build)?;
    let has_assignment = !part(&build, DEVICE_ASSIGNMENT, "device_assignment")?.is_empty();
    if named.len() != device_ids.len() || (has_assignment && named != device_ids) {
        return Err(Error::OtherDevices {
            request: device_ids.to_vec(),
            options: named,
        });
    }
    let local_ids = device_ids
        .iter()
        .map(|id| local(*id).ok_or(Error::NotLocal { id: *id }));
    let local_ids = local_ids.collect::<Result<Vec<_>, _>>()?;
    // A client that sends none gets XLA's defaults. An empty message would not mean that: it sets every option to zero.
    let debug = message_of(&build, DEBUG_OPTIONS, "debug_options")?.map(Cow::into_owned);
    let mut debug = debug
        .as_deref()
        .map(|bytes| read("DebugOptions", bytes))
        .transpose()?;

    if let Some(debug) = &mut debug {
        dump::strip_client(debug);
        build.set_bytes(DEBUG_OPTIONS, &debug.encode());
    }
    let assignment = DeviceAssignment {
        num_replicas,
        num_partitions,
        device_ids: local_ids,
    };
    build.set_bytes(
        DEVICE_ASSIGNMENT,
        &compile_options::encode_assignment(&assignment),
    );
    message.set_bytes(EXECUTABLE_BUILD_OPTIONS, &build.encode());
    // XLA refuses a portable executable with a device assignment, and our programs always have one.
    message.remove(COMPILE_PORTABLE_EXECUTABLE);
    override_options(&mut message, xla_flags)?;
    let plugin_options = message.encode();

    if let Some(debug) = &mut debug {
        dump::strip_for_key(debug);
        for map in DEBUG_MAPS {
            debug.sort_occurrences(map, flags::map_key);
        }
        debug.sort_by_number();
        build.set_bytes(DEBUG_OPTIONS, &debug.encode());
    }
    build.set_bytes(DEVICE_ASSIGNMENT, &shape_only(&assignment));
    build.sort_by_number();
    message.set_bytes(EXECUTABLE_BUILD_OPTIONS, &build.encode());
    dump::retain_overrides(&mut message, |name| !dump::is_dump(name))?;
    message.sort_occurrences(ENV_OPTION_OVERRIDES, flags::map_key);
    message.sort_by_number();
    Ok(Prepared {
        plugin_options,
        key_options: message.encode(),
        num_replicas,
        num_partitions,
    })
}

/// The overrides: the client's without paths, the proxy's over them.
fn override_options(message: &mut Message<'_>, xla_flags: &[String]) -> Result<(), Error> {
    let mut overrides: Vec<Override> = Vec::new();
    for flag in xla_flags {
        let parsed = Override::parse(flag)?;
        // Of a flag given twice the last counts.
        overrides.retain(|other| other.name != parsed.name);
        overrides.push(parsed);
    }
    dump::retain_overrides(message, |name| {
        !dump::is_client_path(name) && overrides.iter().all(|other| other.name.as_bytes() != name)
    })?;
    for entry in overrides {
        message.push_bytes(ENV_OPTION_OVERRIDES, &entry.encode());
    }
    Ok(())
}

/// An assignment that says how many devices there are and not which.
fn shape_only(assignment: &DeviceAssignment) -> Vec<u8> {
    let device_ids = (0..).take(assignment.device_ids.len()).collect();
    compile_options::encode_assignment(&DeviceAssignment {
        device_ids,
        ..assignment.clone()
    })
}

pub(super) fn read<'a>(part: &'static str, bytes: &'a [u8]) -> Result<Message<'a>, Error> {
    Message::parse(bytes).map_err(|source| Error::Options { part, source })
}

/// The bytes of a message field, empty when it is absent.
pub(super) fn part<'m>(
    message: &'m Message<'_>,
    number: u32,
    part: &'static str,
) -> Result<Cow<'m, [u8]>, Error> {
    Ok(message_of(message, number, part)?.unwrap_or_default())
}

/// A submessage, where it is there.
pub(super) fn message_of<'m>(
    message: &'m Message<'_>,
    number: u32,
    part: &'static str,
) -> Result<Option<Cow<'m, [u8]>>, Error> {
    message
        .message(number)
        .map_err(|source| Error::Options { part, source })
}

#[cfg(test)]
mod tests;
