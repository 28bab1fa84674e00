//! The plugin, and programs compiled for four partitions with their collectives replaced.

use crate::glue;
use crate::programs::Program;
use prost::Message;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use waystation_collectives::{Kind, TARGET, rewrite};
use waystation_pjrt::ffi::Failure;
use waystation_pjrt::{Client, Code, Error, OptionValue, Plugin, discover};
use waystation_proto::xla;

/// The interpreter whose environment has the plugin and JAX; a relative path starts at the top of the repository.
pub(crate) fn python() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match std::env::var_os("WAYSTATION_TEST_PYTHON") {
        Some(python) => root.join(python),
        None => root.join(".venv/bin/python"),
    }
}

/// The newest plugin, with the target registered.
pub(crate) fn plugin() -> Arc<Plugin> {
    let library = discover::resolve("lammps-jax-pjrt-cpu", Some(&python())).expect("the plugin");
    let plugin = Plugin::load(&library).expect("it loads");
    plugin
        .register_async_ffi::<glue::Collective>(TARGET, "Host")
        .expect("it takes targets");
    plugin
}

/// A client of `devices` devices.
pub(crate) fn wide(plugin: &Arc<Plugin>, devices: i64) -> Client {
    let options = [("cpu_device_count".to_owned(), OptionValue::Int64(devices))];
    Client::create(plugin, &options).expect("a client")
}

/// What workers load.
#[derive(Debug)]
pub(crate) struct Artifact {
    pub(crate) bytes: Vec<u8>,
    pub(crate) kinds: Vec<Kind>,
}

/// Compiles for `partitions` partitions, and replaces the collectives on the way.
pub(crate) fn hooked(client: &Client, text: &str, partitions: u32) -> Result<Artifact, Error> {
    let devices = (0..i64::from(partitions))
        .map(|device| xla::device_assignment_proto::ComputationDevice {
            replica_device_ids: vec![device],
        })
        .collect();
    let options = xla::CompileOptionsProto {
        executable_build_options: Some(xla::ExecutableBuildOptionsProto {
            device_ordinal: -1,
            num_replicas: 1,
            num_partitions: i64::from(partitions),
            use_spmd_partitioning: true,
            use_shardy_partitioner: true,
            device_assignment: Some(xla::DeviceAssignmentProto {
                replica_count: 1,
                computation_count: i32::try_from(partitions).expect("few"),
                computation_devices: devices,
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let mut kinds = Vec::new();
    let executable = client.compile_transformed(
        text.as_bytes(),
        "mlir",
        &options.encode_to_vec(),
        |module| {
            let rewritten = rewrite::rewrite(module, 1, partitions)
                .map_err(|refusal| Failure::new(Code::Unimplemented, refusal.to_string()))?;
            Ok(rewritten.map(|rewritten| {
                kinds = rewritten.kinds;
                rewritten.module
            }))
        },
    )?;
    Ok(Artifact {
        bytes: executable.serialize()?,
        kinds,
    })
}

pub(crate) fn compile(program: &Program) -> Artifact {
    hooked(&wide(&plugin(), 4), &program.text, 4)
        .unwrap_or_else(|error| panic!("{}: {error}", program.name))
}

/// Options under which an executable is loaded for any device.
pub(crate) fn portable() -> Vec<u8> {
    xla::CompileOptionsProto {
        executable_build_options: Some(xla::ExecutableBuildOptionsProto {
            device_ordinal: -1,
            num_replicas: 1,
            num_partitions: 1,
            ..Default::default()
        }),
        compile_portable_executable: true,
        ..Default::default()
    }
    .encode_to_vec()
}
