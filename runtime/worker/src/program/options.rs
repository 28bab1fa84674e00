//! A client's compile options, made fit for this worker's plugin and for the cache key.
//!
//! The options are the bytes of an `xla.CompileOptionsProto`. They are changed field by field on the wire, so that whatever is
//! not named here reaches the plugin byte for byte.

use std::{borrow::Cow, collections::BTreeMap};

use waystation_cache::harmless;
use waystation_stablehlo::{
    compile_options::{
        self, DEBUG_OPTIONS, DEVICE_ASSIGNMENT, DeviceAssignment, ENV_OPTION_OVERRIDES,
        EXECUTABLE_BUILD_OPTIONS, NUM_PARTITIONS, NUM_REPLICAS,
    },
    wire::{Message, Value},
};

use super::{
    Error,
    dump::{self, Dump},
    flags::{Defaults, Override},
};

/// `CompileOptionsProto.compile_portable_executable`.
const COMPILE_PORTABLE_EXECUTABLE: u32 = 4;

/// Fields of `CompileOptionsProto` and of `ExecutableBuildOptionsProto` for which zero, or nothing, means the same as being
/// absent (proto3 fields without presence).
const PLAIN_OPTIONS: [u32; 6] = [2, 4, 5, 6, 9, 10];
const PLAIN_BUILD_OPTIONS: [u32; 12] = [6, 7, 8, 10, 11, 14, 15, 19, 22, 23, 24, 25];

/// The debug options of a client that reach the compiler, by number and name, with the value that says nothing.
///
/// A client sends all debug options with every program, with the defaults of its own XLA and what its `XLA_FLAGS` make of
/// them. Those are for a compiler in the client's process: the worker's has defaults of its own, which may be another
/// version's, and an operator's flags. So they are dropped but for what JAX itself sets by its configuration.
const ALLOWED: [(u32, &str, Usual); 3] = [
    // `jax_disable_most_optimizations` sets these two.
    (31, "xla_backend_optimization_level", Usual::Number(3)),
    (73, "xla_llvm_disable_expensive_passes", Usual::Truth(false)),
    // `jax_compiler_enable_remat_pass=False` adds a pass.
    (30, "xla_disable_hlo_passes", Usual::Nothing),
];

#[derive(Debug, Clone, Copy)]
enum Usual {
    Number(i64),
    Truth(bool),
    /// No words in a list.
    Nothing,
}

/// A compile's options for their readers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// For the plugin: its own device ids, without the client's debug options and paths, with the proxy's flags.
    pub plugin_options: Vec<u8>,
    /// For the cache key: of the devices only their number, no flags, nothing spelled out that would mean the same if it
    /// were not, and in one order.
    pub key_options: Vec<u8>,
    /// What is to be dumped where.
    pub dump: Option<Dump>,
    /// Whole copies of the program.
    pub num_replicas: u32,
    /// Partitions of each copy.
    pub num_partitions: u32,
    flags: Vec<Override>,
}

impl Prepared {
    /// True when there are flags at all, for [`Prepared::key_flags`].
    pub fn has_flags(&self) -> bool {
        !self.flags.is_empty()
    }

    /// For the cache key: names and values of the flags that come with the program, without those that leave no trace and
    /// without what the plugin does anyway, as far as that is known.
    pub fn key_flags(&self, defaults: Option<&Defaults>) -> Vec<(String, String)> {
        self.flags
            .iter()
            .filter(|flag| harmless::why(&flag.name).is_none())
            .filter(|flag| defaults.is_none_or(|defaults| !defaults.has(flag)))
            .map(Override::canonical)
            .collect()
    }
}

/// Makes a client's options fit for this worker.
///
/// `device_ids` are the global ids of the program's devices in logical order, as the compile request names them; `local` gives
/// the plugin's id of a global one. Options without a device assignment are given one of `device_ids`. `xla_flags` are the
/// proxy's ("--xla_..."), of which the last of a name counts. The program's own compiler options win over them, and they over
/// what is left of the client's debug options.
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

    let debug = part(&build, DEBUG_OPTIONS, "debug_options")?.into_owned();
    let (flags, dumps) = merged(allowed(&debug)?, xla_flags, &message)?;
    build.remove(DEBUG_OPTIONS);
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
    message.remove(ENV_OPTION_OVERRIDES);
    let mut for_plugin = message.clone();
    for flag in &flags {
        for_plugin.push_bytes(ENV_OPTION_OVERRIDES, &flag.encode());
    }

    build.set_bytes(DEVICE_ASSIGNMENT, &shape_only(&assignment));
    build.set_varint(NUM_REPLICAS, num_replicas.into());
    build.set_varint(NUM_PARTITIONS, num_partitions.into());
    normalise(&mut build, &PLAIN_BUILD_OPTIONS);
    message.set_bytes(EXECUTABLE_BUILD_OPTIONS, &build.encode());
    normalise(&mut message, &PLAIN_OPTIONS);
    Ok(Prepared {
        plugin_options: for_plugin.encode(),
        key_options: message.encode(),
        dump: dump::requested(dumps),
        num_replicas,
        num_partitions,
        flags,
    })
}

/// What of a client's debug options is heard.
fn allowed(debug: &[u8]) -> Result<Vec<Override>, Error> {
    let debug = read("DebugOptions", debug)?;
    let malformed = |source| Error::Options {
        part: "DebugOptions",
        source,
    };
    let mut heard = Vec::new();
    for (number, name, usual) in ALLOWED {
        match usual {
            Usual::Number(usual) => {
                let found = debug.varint(number).map_err(malformed)?;
                let found = found.map(|number| number as i64);
                let unusual = found.filter(|found| *found != usual);
                heard.extend(unusual.map(|found| Override::number(name, found)));
            }
            Usual::Truth(usual) => {
                let found = debug.varint(number).map_err(malformed)?;
                let unusual = found.map(|bit| bit != 0).filter(|found| *found != usual);
                heard.extend(unusual.map(|found| Override::truth(name, found)));
            }
            Usual::Nothing => {
                let words = debug.repeated(number).map_err(malformed)?;
                let words: Vec<_> = words
                    .iter()
                    .map(|word| String::from_utf8_lossy(word))
                    .collect();
                if !words.is_empty() {
                    heard.push(Override::text(name, words.join(",")));
                }
            }
        }
    }
    Ok(heard)
}

/// The flags of a program by the sources' rank, each name once, sorted; and, apart, the proxy's dump options.
fn merged(
    heard: Vec<Override>,
    xla_flags: &[String],
    message: &Message<'_>,
) -> Result<(Vec<Override>, Vec<Override>), Error> {
    let mut flags: BTreeMap<String, Override> = BTreeMap::new();
    let mut dumps: BTreeMap<String, Override> = BTreeMap::new();
    flags.extend(heard.into_iter().map(|flag| (flag.name.clone(), flag)));
    for flag in xla_flags {
        let flag = Override::parse(flag)?;
        let into = if dump::is_dump(&flag.name) {
            &mut dumps
        } else {
            &mut flags
        };
        into.insert(flag.name.clone(), flag);
    }
    let entries = message.repeated(ENV_OPTION_OVERRIDES);
    for entry in entries.map_err(|source| Error::Options {
        part: "env_option_overrides",
        source,
    })? {
        let flag = Override::decode(entry)?;
        if dump::is_client_path(&flag.name) {
            tracing::debug!(flag = flag.name, "a client may not name files of a worker");
        } else {
            flags.insert(flag.name.clone(), flag);
        }
    }
    Ok((flags.into_values().collect(), dumps.into_values().collect()))
}

/// Takes out what means nothing, and puts the fields into one order.
fn normalise(message: &mut Message<'_>, plain: &[u32]) {
    let mut silent: Vec<u32> = Vec::new();
    for &number in plain {
        let says_something = |value| !matches!(value, Value::Varint(0) | Value::Bytes([]));
        // Of several occurrences the last one counts; then all are left as they are.
        let mut occurrences = message.fields().filter(|(field, _)| *field == number);
        if let (Some((_, value)), None) = (occurrences.next(), occurrences.next())
            && !says_something(value)
        {
            silent.push(number);
        }
    }
    for number in silent {
        message.remove(number);
    }
    message.sort_by_number();
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
    let found = message
        .message(number)
        .map_err(|source| Error::Options { part, source })?;
    Ok(found.unwrap_or_default())
}

#[cfg(test)]
mod tests;
