//! Programs that no client has sent: MLIR bytecode in files, as `jax.export` makes it, with the compile options beside.

use std::{fs, path::PathBuf};

use serde::Deserialize;
use waystation_proto::{
    waystation::recording::Recording,
    xla::{CompileOptionsProto, ExecutableBuildOptionsProto},
};

use crate::error::Failure;

/// First bytes of MLIR bytecode.
const MAGIC: &[u8] = b"ML\xefR";

/// How such a file's name ends.
const ENDING: &str = "mlirbc";

/// Larger files are not read.
const MAX_BYTES: u64 = 2 << 30;

/// Files of one folder.
const MAX_FILES: usize = 100_000;

/// `NAME.json`: what a client would say beside a program.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Options {
    num_replicas: u32,
    num_partitions: u32,
    /// Indices among a worker's devices, in logical order.
    devices: Vec<u32>,
    use_spmd_partitioning: bool,
    use_shardy_partitioner: bool,
    xla_flags: Vec<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            num_replicas: 1,
            num_partitions: 1,
            devices: Vec::new(),
            use_spmd_partitioning: true,
            use_shardy_partitioner: true,
            xla_flags: Vec::new(),
        }
    }
}

/// The files that a location names, where it is a file or a folder with such in it. `None`: it is something else.
pub(super) fn files(location: &str) -> Result<Option<Vec<PathBuf>>, Failure> {
    let path = location.strip_prefix("file://").unwrap_or(location);
    let path = PathBuf::from(path);
    if path.is_file() {
        return Ok(Some(vec![path]));
    }
    // A folder of recordings has other things in it.
    let Ok(entries) = fs::read_dir(&path) else {
        return Ok(None);
    };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| Failure::because("the folder cannot be read", &error))?;
        if entry.path().extension().is_some_and(|end| end == ENDING) {
            files.push(entry.path());
        }
        if files.len() > MAX_FILES {
            return Err(Failure::usage(format!(
                "{location} has more than {MAX_FILES} programs: split it"
            )));
        }
    }
    files.sort();
    Ok((!files.is_empty()).then_some(files))
}

/// One program with its options.
pub(super) fn read(path: &std::path::Path) -> Result<Recording, String> {
    let cannot = |error: std::io::Error| format!("it cannot be read: {error}");
    if fs::metadata(path).map_err(cannot)?.len() > MAX_BYTES {
        return Err(format!("it has more than {MAX_BYTES} bytes"));
    }
    let program = fs::read(path).map_err(cannot)?;
    if !program.starts_with(MAGIC) {
        return Err(if std::str::from_utf8(&program).is_ok() {
            "it is text: a program's text has no one bytecode, and so no key that a job would ask for; give what \
             Exported.mlir_module_serialized holds"
                .to_owned()
        } else {
            "it is no MLIR bytecode".to_owned()
        });
    }
    let beside = path.with_extension("json");
    let options = match fs::read(&beside) {
        Ok(text) => serde_json::from_slice(&text)
            .map_err(|error| format!("{}: {error}", beside.display()))?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Options::default(),
        Err(error) => return Err(format!("{}: {error}", beside.display())),
    };
    recording(program, options)
}

fn recording(program: Vec<u8>, options: Options) -> Result<Recording, String> {
    let (replicas, partitions) = (options.num_replicas, options.num_partitions);
    let wanted = replicas.checked_mul(partitions).filter(|&all| all > 0);
    let wanted = wanted
        .filter(|&all| all <= 4096)
        .ok_or("num_replicas times num_partitions is no number of devices")?;
    let devices = if options.devices.is_empty() {
        (0..wanted).collect()
    } else {
        options.devices
    };
    if devices.len() != wanted as usize {
        return Err(format!(
            "its options name {} devices for {replicas} replicas and {partitions} partitions",
            devices.len()
        ));
    }
    let ids = devices
        .iter()
        .map(|&device| i32::try_from(device).map_err(|_| "a device's number is too large"))
        .collect::<Result<_, _>>()?;
    // Without an assignment: the worker's part of it gives it that of the ids.
    let compile_options = CompileOptionsProto {
        executable_build_options: Some(ExecutableBuildOptionsProto {
            device_ordinal: -1,
            num_replicas: i64::from(replicas),
            num_partitions: i64::from(partitions),
            use_spmd_partitioning: options.use_spmd_partitioning,
            use_shardy_partitioner: options.use_shardy_partitioner,
            ..Default::default()
        }),
        ..Default::default()
    };
    Ok(Recording {
        program: program.into(),
        compile_options: prost::Message::encode_to_vec(&compile_options).into(),
        device_ids: ids,
        device_ordinals: devices,
        workers: Vec::new(),
        xla_flags: options.xla_flags,
    })
}
