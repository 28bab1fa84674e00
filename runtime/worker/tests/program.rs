//! Real programs and a real client's options, prepared, compiled by a real plugin and described.
//!
//! The plugin is `lammps-jax-pjrt-cpu` of the Python environment of `WAYSTATION_TEST_PYTHON`, or else of `.venv` at the top
//! of the repository.

use std::path::Path;

use waystation_pjrt::{Client, LoadedExecutable, OptionValue, Plugin, discover};
use waystation_proto::{
    waystation::{ExecutableInfo, executable_info::Value},
    xla::{OpSharding, PrimitiveType, op_sharding::Type},
};
use waystation_worker::program::{PluginFacts, describe, prepare, with_dump};

macro_rules! golden {
    ($name:literal) => {
        include_bytes!(concat!("../../../cache/stablehlo/tests/golden/", $name)).as_slice()
    };
}

fn client() -> Client {
    let python = std::env::var_os("WAYSTATION_TEST_PYTHON").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/python"),
        Into::into,
    );
    let library =
        discover::resolve("lammps-jax-pjrt-cpu", Some(&python)).expect("the plugin is installed");
    let plugin = Plugin::load(&library).expect("the plugin loads");
    let options = [("cpu_device_count".to_owned(), OptionValue::Int64(8))];
    Client::create(&plugin, &options).expect("a client")
}

/// Compiles with HLO dumped into `dump`; the plugin's devices have the same ids as the client's.
fn compile(
    client: &Client,
    program: &[u8],
    options: &[u8],
    ids: &[i32],
    dump: &Path,
) -> (LoadedExecutable, ExecutableInfo) {
    let local = |id: i32| {
        client
            .devices()
            .iter()
            .any(|device| device.id() == id)
            .then_some(id)
    };
    let prepared = prepare(
        options,
        ids,
        local,
        &["--xla_cpu_enable_fast_min_max=true".to_owned()],
    )
    .expect("prepared");
    let options = with_dump(&prepared.plugin_options, dump, None).expect("options");
    let executable = client.compile(program, "mlir", &options).expect("compiled");
    let facts = PluginFacts {
        name: executable.name().to_owned(),
        num_replicas: prepared.num_replicas,
        num_partitions: prepared.num_partitions,
        default_memory_kind: "device".to_owned(),
        result_memory_kinds: executable.output_memory_kinds().unwrap_or_default(),
        ..Default::default()
    };
    let optimized = executable.optimized_program().expect("a module");
    let info = describe(program, &optimized, &facts).expect("described");
    (executable, info)
}

fn types(values: &[Value]) -> Vec<(PrimitiveType, &[i64])> {
    values
        .iter()
        .map(|value| (value.dtype(), value.dims.as_slice()))
        .collect()
}

fn sharding(value: &Value) -> OpSharding {
    value.sharding.clone().expect("always there")
}

/// A mesh's options of a client that dumps to a directory of its own.
fn options_with_dump(directory: &str) -> Vec<u8> {
    const RECORDED: &str = "/home/one/dump";
    assert_eq!(directory.len(), RECORDED.len(), "lengths around it stay");
    let mut options = golden!("mesh.options").to_vec();
    let place = options
        .windows(RECORDED.len())
        .position(|window| window == RECORDED.as_bytes())
        .expect("the recorded directory");
    options[place..place + directory.len()].copy_from_slice(directory.as_bytes());
    options
}

fn dumped(directory: &Path) -> Vec<String> {
    let files = std::fs::read_dir(directory).expect("the directory");
    files
        .map(|file| {
            file.expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect()
}

#[test]
fn a_partitioned_program_is_described_in_global_shapes() {
    let client = client();
    let dump = tempfile::tempdir().expect("a directory");
    let elsewhere = format!("/tmp/w{:08}", std::process::id());
    let ids = [7, 6, 5, 4, 3, 2, 1, 0];
    let (executable, info) = compile(
        &client,
        golden!("sharded.mlirbc"),
        &options_with_dump(&elsewhere),
        &ids,
        dump.path(),
    );
    assert_eq!(executable.device_ids(), ids, "in the client's order");
    assert_eq!(
        (info.name.as_str(), info.num_replicas, info.num_partitions),
        ("jit__lambda", 1, 8)
    );
    let (bf16, f32) = (PrimitiveType::Bf16, PrimitiveType::F32);
    assert_eq!(types(&info.parameters), [(bf16, &[8, 12][..]), (f32, &[6])]);
    assert_eq!(
        types(&info.results),
        [(bf16, &[8, 12][..]), (bf16, &[5, 12])]
    );
    assert_eq!(
        sharding(&info.parameters[0]).tile_assignment_dimensions,
        [2, 4]
    );
    assert_eq!(sharding(&info.parameters[1]).r#type(), Type::Replicated);
    assert_eq!(
        sharding(&info.results[0]).tile_assignment_dimensions,
        [2, 1, 4]
    );
    assert_eq!(info.donated_parameters, [0]);
    let layout = info.results[0].layout.as_ref().expect("a layout");
    assert_eq!(layout.minor_to_major, [1, 0]);
    assert!(
        info.results
            .iter()
            .all(|result| !result.memory_kind.is_empty())
    );

    // The plugin's own output shapes are one device's: they must be pieces of the global ones.
    let pieces = executable.output_dims().expect("dims");
    assert_eq!(pieces[0], [4, 12]);
    let files = dumped(dump.path());
    assert!(
        files
            .iter()
            .any(|file| file.ends_with("after_optimizations.txt")),
        "{files:?}"
    );
    assert!(
        !Path::new(&elsewhere).exists(),
        "the client's own dump directory is not the worker's"
    );
}

#[test]
fn a_single_device_program_with_donation() {
    let client = client();
    let dump = tempfile::tempdir().expect("a directory");
    let (executable, info) = compile(
        &client,
        golden!("donated.mlirbc"),
        golden!("single.options"),
        &[2],
        dump.path(),
    );
    assert_eq!(executable.device_ids(), [2]);
    let (f32, s8) = (PrimitiveType::F32, PrimitiveType::S8);
    assert_eq!(
        types(&info.parameters),
        [(f32, &[4, 8][..]), (f32, &[]), (s8, &[3])]
    );
    assert_eq!(types(&info.results), [(f32, &[4, 8][..]), (s8, &[3])]);
    assert_eq!(info.donated_parameters, [0, 2]);
    assert!(
        info.results
            .iter()
            .all(|result| sharding(result) == OpSharding::default())
    );
}

#[test]
fn a_program_without_values() {
    let client = client();
    let dump = tempfile::tempdir().expect("a directory");
    let (executable, info) = compile(
        &client,
        golden!("nothing.mlirbc"),
        golden!("single.options"),
        &[2],
        dump.path(),
    );
    assert_eq!(executable.num_outputs(), 0);
    assert_eq!((info.parameters.len(), info.results.len()), (0, 0));
}

#[test]
fn arguments_that_are_kept_though_unused_are_described() {
    let client = client();
    let dump = tempfile::tempdir().expect("a directory");
    let (_, info) = compile(
        &client,
        golden!("kept_unused.mlirbc"),
        golden!("single.options"),
        &[2],
        dump.path(),
    );
    assert_eq!(
        types(&info.parameters),
        [(PrimitiveType::F32, &[3][..]), (PrimitiveType::S8, &[4])]
    );
    assert_eq!(types(&info.results), [(PrimitiveType::S8, &[4][..])]);
}

#[test]
fn a_flag_that_the_plugin_lacks_is_its_error() {
    let client = client();
    let flags = ["--xla_no_such_option=1".to_owned()];
    let prepared = prepare(golden!("single.options"), &[2], Some, &flags).expect("prepared");
    let refused = client.compile(golden!("nothing.mlirbc"), "mlir", &prepared.plugin_options);
    let message = refused.expect_err("refused").to_string();
    assert!(message.contains("xla_no_such_option"), "{message}");
}

#[test]
fn the_key_of_a_real_clients_options_is_free_of_its_devices_and_dumps() {
    let other = |id: i32| {
        prepare(golden!("single.options"), &[2], move |_| Some(id), &[]).expect("prepared")
    };
    assert_eq!(other(5).key_options, other(0).key_options);
    assert_ne!(other(5).plugin_options, other(0).plugin_options);
    let path = b"/home/one";
    for bytes in [other(5).key_options, other(5).plugin_options] {
        assert!(!bytes.windows(path.len()).any(|window| window == path));
    }
    assert!(
        golden!("single.options")
            .windows(path.len())
            .any(|window| window == path),
        "the client did name one"
    );
}
