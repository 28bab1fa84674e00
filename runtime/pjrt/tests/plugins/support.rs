//! Plugins, clients, programs and compile options for the tests.

use prost::Message;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use waystation_pjrt::{
    AlignedBytes, Buffer, Client, Code, ElementType, Error, ExecuteOptions, HostBytes,
    LoadedExecutable, OptionValue, Plugin, discover,
};
use waystation_proto::xla;

/// Devices of every client here.
pub(crate) const DEVICES: usize = 8;

/// The plugins of the test environment, newest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Which {
    /// `lammps-jax-pjrt-cpu` 0.11.2: API 0.115; refuses options that it does not know.
    Lammps,
    /// `fastatomstruct-xla-cpu` 2026.6.23: API 0.106; ignores options that it does not know.
    FastAtomStruct,
    /// `xla-cpu-pjrt` 0.0.1: API 0.81; ignores options that it does not know.
    XlaCpuPjrt,
}

impl Which {
    pub(crate) fn package(self) -> &'static str {
        match self {
            Self::Lammps => "lammps-jax-pjrt-cpu",
            Self::FastAtomStruct => "fastatomstruct-xla-cpu",
            Self::XlaCpuPjrt => "xla-cpu-pjrt",
        }
    }

    pub(crate) fn plugin(self) -> Arc<Plugin> {
        let python = python();
        let library = discover::resolve(self.package(), Some(&python)).unwrap_or_else(|error| {
            panic!(
                "{error}\nThe tests need three CPU plugins. Install {} into {}, or set WAYSTATION_TEST_PYTHON to an \
                 interpreter that has it.",
                self.package(),
                python.display()
            )
        });
        Plugin::load(&library).expect("the plugin loads")
    }

    /// A client of its own.
    pub(crate) fn new_client(self) -> Client {
        let count = i64::try_from(DEVICES).expect("few");
        let options = [("cpu_device_count".to_owned(), OptionValue::Int64(count))];
        Client::create(&self.plugin(), &options).expect("a client")
    }

    /// A client that the tests of a plugin share.
    pub(crate) fn client(self) -> Client {
        static CLIENTS: Mutex<Option<HashMap<Which, Client>>> = Mutex::new(None);
        // A test that panicked in here has said why; the next one is to say it too.
        let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
        clients
            .get_or_insert_default()
            .entry(self)
            .or_insert_with(|| self.new_client())
            .clone()
    }
}

/// The interpreter whose environment has the plugins; a relative path starts at the top of the repository.
fn python() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match std::env::var_os("WAYSTATION_TEST_PYTHON") {
        Some(python) => root.join(python),
        None => root.join(".venv/bin/python"),
    }
}

/// Compile options for one replica on each of `devices`.
pub(crate) fn options(devices: &[i64]) -> Vec<u8> {
    let replicas = i64::try_from(devices.len()).expect("few");
    let assignment = xla::DeviceAssignmentProto {
        replica_count: i32::try_from(replicas).expect("few"),
        computation_count: 1,
        computation_devices: vec![xla::device_assignment_proto::ComputationDevice {
            replica_device_ids: devices.to_vec(),
        }],
    };
    xla::CompileOptionsProto {
        executable_build_options: Some(xla::ExecutableBuildOptionsProto {
            device_ordinal: -1,
            num_replicas: replicas,
            num_partitions: 1,
            device_assignment: Some(assignment),
            ..Default::default()
        }),
        ..Default::default()
    }
    .encode_to_vec()
}

/// Compiles StableHLO text for one replica on each of `devices`.
pub(crate) fn compile(
    client: &Client,
    program: &str,
    devices: &[i64],
) -> Result<LoadedExecutable, Error> {
    client.compile(program.as_bytes(), "mlir", &options(devices))
}

/// `main(a, b) = a + b` on four floats; with `donate`, the first argument's memory becomes the result's.
pub(crate) fn add(donate: bool) -> String {
    let alias = if donate {
        "{tf.aliasing_output = 0 : i32}"
    } else {
        ""
    };
    format!(
        "module @add {{
           func.func public @main(%a: tensor<4xf32> {alias}, %b: tensor<4xf32>) -> tensor<4xf32> {{
             %0 = stablehlo.add %a, %b : tensor<4xf32>
             return %0 : tensor<4xf32>
           }}
         }}"
    )
}

/// The sum over `count` replicas of two floats each.
pub(crate) fn all_reduce(count: usize) -> String {
    let group: Vec<_> = (0..count).map(|replica| replica.to_string()).collect();
    let group = group.join(", ");
    format!(
        "module @total attributes {{mhlo.num_replicas = {count} : i32, mhlo.num_partitions = 1 : i32}} {{
           func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> {{
             %0 = \"stablehlo.all_reduce\"(%x) <{{
                    replica_groups = dense<[[{group}]]> : tensor<1x{count}xi64>}}> ({{
               ^bb0(%a: tensor<f32>, %b: tensor<f32>):
                 %s = stablehlo.add %a, %b : tensor<f32>
                 stablehlo.return %s : tensor<f32>
             }}) : (tensor<2xf32>) -> tensor<2xf32>
             return %0 : tensor<2xf32>
           }}
         }}"
    )
}

/// Thirty products of 256 by 256 floats, one after the other: long enough to be seen under way.
pub(crate) const SLOW: &str = "module @slow {
  func.func public @main(%x: tensor<256x256xf32>) -> tensor<256x256xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %end = stablehlo.constant dense<30> : tensor<i32>
    %r:2 = stablehlo.while(%i = %zero, %acc = %x) : tensor<i32>, tensor<256x256xf32>
    cond {
      %more = stablehlo.compare LT, %i, %end : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    } do {
      %next = stablehlo.add %i, %one : tensor<i32>
      %d = stablehlo.dot_general %acc, %x, contracting_dims = [1] x [0]
         : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
      stablehlo.return %next, %d : tensor<i32>, tensor<256x256xf32>
    }
    return %r#1 : tensor<256x256xf32>
  }
}";

/// `bytes` in memory that plugins may use in place.
pub(crate) fn aligned(bytes: &[u8]) -> HostBytes {
    let mut block = AlignedBytes::zeroed(bytes.len()).expect("memory");
    block.copy_from_slice(bytes);
    Arc::new(block)
}

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

pub(crate) fn floats_of(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|four| f32::from_le_bytes(four.try_into().expect("four bytes")))
        .collect()
}

/// A vector of floats on a device's default memory.
pub(crate) fn put(client: &Client, device: usize, values: &[f32]) -> Buffer {
    let device = &client.devices()[device];
    let memory = &device.memories()[device.default_memory()];
    let dims = [i64::try_from(values.len()).expect("few")];
    client
        .buffer_from_host(
            aligned(&bytes_of(values)),
            ElementType::F32,
            &dims,
            None,
            memory,
        )
        .expect("a buffer")
}

/// The bytes of a buffer.
pub(crate) fn fetch(buffer: &Buffer) -> Result<Vec<u8>, Error> {
    let dst = AlignedBytes::zeroed(buffer.host_bytes()?)?;
    let bytes = futures::executor::block_on(buffer.to_host(dst)?)?;
    Ok(bytes.to_vec())
}

pub(crate) fn fetch_floats(buffer: &Buffer) -> Vec<f32> {
    floats_of(&fetch(buffer).expect("the bytes"))
}

/// Runs on one device and waits.
pub(crate) fn run(executable: &LoadedExecutable, args: &[&Buffer]) -> Vec<Buffer> {
    let execution = executable
        .execute(&[args.to_vec()], &ExecuteOptions::default())
        .expect("it starts");
    for done in execution.done {
        done.wait().expect("it runs");
    }
    execution.outputs.into_iter().next().expect("one device")
}

/// The code of a failure.
pub(crate) fn code<T>(result: Result<T, Error>) -> Option<Code> {
    result.err().map(|error| error.code())
}
