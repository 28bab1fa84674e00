//! One compile by the plugin, described and serialized: in the worker, or in its compile child.

use std::time::{Duration, Instant};

use waystation_collectives::rewrite::rewrite;
use waystation_pjrt::{Client, LoadedExecutable, MemoryStats, ffi::Failure};
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::ExecutableInfo,
    xla::CompiledMemoryStatsProto,
};
use waystation_stablehlo::wire::Message;

use crate::{
    program::{self, PluginFacts},
    status,
    wide::Wide,
};

/// StableHLO portable artifacts go to the plugin under this name.
const FORMAT: &str = "mlir";

/// `HloModuleProtoWithConfig.config`, an `xla.HloModuleConfigProto`.
const MODULE_CONFIG: u32 = 2;
/// `HloModuleConfigProto.debug_options`.
const CONFIG_DEBUG_OPTIONS: u32 = 14;

/// Replicas and partitions.
pub(crate) type Shape = (u32, u32);

/// What a compile gives.
pub(crate) struct Made {
    pub(crate) executable: LoadedExecutable,
    pub(crate) info: ExecutableInfo,
    /// The plugin's error where it does not serialize this executable.
    pub(crate) serialized: Result<Vec<u8>, StatusProto>,
    /// Time in the plugin's compile.
    pub(crate) took: Duration,
}

/// Compiles. Blocks.
pub(crate) fn make(
    client: &Client,
    program: &[u8],
    options: &[u8],
    shape: Shape,
) -> Result<Made, StatusProto> {
    let begun = Instant::now();
    let executable = compile(client, program, options)?;
    let took = begun.elapsed();
    let optimized = executable.optimized_program().map_err(failed)?;
    let info = program::describe(program, &optimized, &facts(client, &executable, shape))
        .map_err(|error| undescribed(&error))?;
    let serialized = serialize(&executable, options);
    Ok(Made {
        executable,
        info,
        serialized,
        took,
    })
}

/// Compiles a program over several workers: on a client of as many devices as it has partitions in all replicas, with its
/// collectives becoming calls of our target. What comes out runs a partition on any one device. Blocks.
pub(crate) fn make_spanning(
    wide: &Wide,
    program: &[u8],
    options: &[u8],
    shape: Shape,
) -> Result<Made, StatusProto> {
    let client = wide.client(shape)?;
    let begun = Instant::now();
    // What is serialized says of itself that it has one partition, so all that concerns the whole is taken from here.
    let mut module = Vec::new();
    let executable = compile_spanning(&client, program, options, shape, |seen| {
        module = seen.to_vec();
    })?;
    let took = begun.elapsed();
    let facts = PluginFacts {
        // The plugin forgets these when the module is changed; the program says them too.
        result_memory_kinds: Vec::new(),
        ..facts(&client, &executable, shape)
    };
    let info = program::describe_unscheduled(program, &module, &facts)
        .map_err(|error| undescribed(&error))?;
    let serialized = serialize(&executable, options);
    Ok(Made {
        executable,
        info,
        serialized,
        took,
    })
}

fn serialize(executable: &LoadedExecutable, options: &[u8]) -> Result<Vec<u8>, StatusProto> {
    let serialized = executable.serialize().map_err(failed)?;
    Ok(program::without_dump(serialized, options))
}

/// Only the plugin's part of it; `see` gets the module before its collectives are replaced. Blocks.
pub(crate) fn compile_spanning(
    wide: &Client,
    program: &[u8],
    options: &[u8],
    shape: Shape,
    mut see: impl FnMut(&[u8]),
) -> Result<LoadedExecutable, StatusProto> {
    let (replicas, partitions) = shape;
    let change = |module: &[u8]| {
        see(module);
        let rewritten = rewrite(module, replicas, partitions).map_err(|refusal| {
            Failure::new(waystation_pjrt::Code::Unimplemented, refusal.to_string())
        })?;
        Ok(rewritten.map(|rewritten| rewritten.module))
    };
    wide.compile_transformed(program, FORMAT, options, change)
        .map_err(failed)
}

fn undescribed(error: &program::Error) -> StatusProto {
    status::of(
        Code::FailedPrecondition,
        format!("the compiled program cannot be described: {error}"),
    )
}

/// Only the plugin's part of it. Blocks.
pub(crate) fn compile(
    client: &Client,
    program: &[u8],
    options: &[u8],
) -> Result<LoadedExecutable, StatusProto> {
    client.compile(program, FORMAT, options).map_err(failed)
}

/// Compiles and says with which debug options the plugin has done it, the bytes of an `xla.DebugOptions`. Empty where the
/// plugin does not say. Blocks.
pub(crate) fn probe(
    client: &Client,
    program: &[u8],
    options: &[u8],
) -> Result<Vec<u8>, StatusProto> {
    let executable = compile(client, program, options)?;
    let Ok(optimized) = executable.optimized_program() else {
        return Ok(Vec::new());
    };
    let find = || {
        let module = Message::parse(&optimized).ok()?;
        let config = module.message(MODULE_CONFIG).ok()??;
        let config = Message::parse(&config).ok()?;
        Some(config.message(CONFIG_DEBUG_OPTIONS).ok()??.into_owned())
    };
    Ok(find().unwrap_or_default())
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn failed(error: waystation_pjrt::Error) -> StatusProto {
    status::of_plugin(&error, 0)
}

/// The kind of the devices' default memory; empty where the plugin names none.
pub(crate) fn default_memory_kind(client: &Client) -> &str {
    let device = client.devices().first();
    device
        .and_then(|device| device.memories().get(device.default_memory()))
        .map_or("", |memory| memory.kind())
}

/// What the plugin says about an executable; what it does not say stays empty.
fn facts(client: &Client, executable: &LoadedExecutable, shape: (u32, u32)) -> PluginFacts {
    PluginFacts {
        name: executable.name().to_owned(),
        fingerprint: executable.fingerprint().unwrap_or_default(),
        num_replicas: shape.0,
        num_partitions: shape.1,
        default_memory_kind: default_memory_kind(client).to_owned(),
        result_memory_kinds: executable.output_memory_kinds().unwrap_or_default(),
        memory_stats: executable
            .memory_stats()
            .ok()
            .map(|stats| memory_stats(&stats)),
        generated_code_bytes: executable.generated_code_bytes().unwrap_or(-1),
    }
}

fn memory_stats(stats: &MemoryStats) -> CompiledMemoryStatsProto {
    CompiledMemoryStatsProto {
        generated_code_size_in_bytes: stats.generated_code_size_in_bytes,
        argument_size_in_bytes: stats.argument_size_in_bytes,
        output_size_in_bytes: stats.output_size_in_bytes,
        alias_size_in_bytes: stats.alias_size_in_bytes,
        temp_size_in_bytes: stats.temp_size_in_bytes,
        peak_memory_in_bytes: stats.peak_memory_in_bytes,
        total_size_in_bytes: stats.total_size_in_bytes,
        total_allocation_bytes: stats.total_allocation_bytes,
        indefinite_allocations: stats.indefinite_allocations,
        peak_unpadded_heap_bytes: stats.peak_unpadded_heap_bytes,
        host_generated_code_size_in_bytes: stats.host_generated_code_size_in_bytes,
        host_argument_size_in_bytes: stats.host_argument_size_in_bytes,
        host_output_size_in_bytes: stats.host_output_size_in_bytes,
        host_alias_size_in_bytes: stats.host_alias_size_in_bytes,
        host_temp_size_in_bytes: stats.host_temp_size_in_bytes,
        serialized_buffer_assignment: Vec::new(),
    }
}
