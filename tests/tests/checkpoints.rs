//! Checkpoints through sessions of the Rust client: what Orbax's own client cannot ask for, because its request to read has
//! no name for the type, the workers restore all the same.
//!
//! The checkpoints are made by real Orbax, by `tests/python/checkpoint_fixtures.py` with the Python of
//! `WAYSTATION_TEST_PYTHON`, else of `.venv` at the top of the repository.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use prost::Message as _;
use serde_json::{Value, json};
use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::xla::{
    OpSharding,
    ifrt::{Serialized, proxy::CompileRequest},
    op_sharding,
};
use waystation_tests::{cluster::Cluster, shards::shards};

/// Each layout's arrays by name, as `expected.json` lists them.
type Expected = BTreeMap<String, BTreeMap<String, Value>>;

const LAYOUTS: [&str; 4] = ["zarr2", "zarr2_ocdbt", "zarr3", "zarr3_ocdbt"];

fn fixtures(folder: &Path) -> Expected {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = std::env::var_os("WAYSTATION_TEST_PYTHON")
        .filter(|python| !python.is_empty())
        .map_or_else(|| root.join("../.venv/bin/python"), PathBuf::from);
    let output = Command::new(&python)
        .arg(root.join("python/checkpoint_fixtures.py"))
        .arg(folder)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}; run `make venv`", python.display()));
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let list = std::fs::read(folder.join("expected.json")).expect("a list of what they hold");
    serde_json::from_slice(&list).expect("JSON")
}

/// The name that XLA has for NumPy's type.
fn primitive(dtype: &str) -> String {
    let sign = |rest: &str| (if dtype.starts_with('u') { "U" } else { "S" }).to_owned() + rest;
    match dtype {
        "bool" => "PRED".to_owned(),
        "bfloat16" => "BF16".to_owned(),
        "complex64" => "C64".to_owned(),
        "complex128" => "C128".to_owned(),
        _ => match dtype.split_once("int") {
            Some((_, bits)) => sign(bits),
            // float16 is F16, float8_e4m3fn is F8E4M3FN.
            None => dtype
                .replacen("float", "F", 1)
                .replace('_', "")
                .to_ascii_uppercase(),
        },
    }
}

fn encoded(bytes: impl AsRef<[u8]>) -> String {
    BASE64_STANDARD.encode(bytes)
}

/// Reads arrays of one dimension, each cut in two.
fn read(location: &Path, arrays: &[(&String, &Value)], devices: [i32; 2]) -> Value {
    let halves = OpSharding {
        r#type: op_sharding::Type::Other as i32,
        tile_assignment_dimensions: vec![2],
        tile_assignment_devices: vec![0, 1],
        ..Default::default()
    };
    let items: Vec<Value> = arrays
        .iter()
        .map(|(name, about)| {
            let dtype = primitive(about["dtype"].as_str().expect("a name"));
            json!({
                "b64_location": encoded(location.to_str().expect("UTF-8")),
                "b64_name": encoded(name),
                "b64_hlo_sharding_string": encoded(halves.encode_to_vec()),
                "shape": {"xla_primitive_type_str": dtype, "dimensions": about["shape"]},
                "devices": {"device_ids": devices},
                "timeout": {"seconds": 60, "nanos": 0},
            })
        })
        .collect();
    json!({"bulk_persistence_read_request": {"read_requests": items}})
}

async fn compile(client: &Client, program: &Value) -> Result<u64, Error> {
    let serialized = |name: &str, data: Bytes| {
        Some(Serialized {
            type_name: format!("xla::ifrt::{name}"),
            data,
        })
    };
    let text = format!("__serialized_plugin_program {program}");
    let request = Request::CompileRequest(CompileRequest {
        program: serialized("PluginProgram", text.into()),
        compile_options: serialized("PluginCompileOptions", Bytes::new()),
        host_callbacks: Vec::new(),
    });
    match client.call(request).await? {
        Response::CompileResponse(compiled) => Ok(compiled.loaded_executable_handle),
        _ => Err(Error::WrongReply),
    }
}

/// As bytes, and without what lies above the bits of types below eight bits: nobody says what that is.
fn elements(bytes: impl IntoIterator<Item = u8>, dtype: &str) -> Vec<u8> {
    let bits = match dtype {
        "int2" | "uint2" => 0b11,
        "int4" | "uint4" | "float4_e2m1fn" => 0b1111,
        _ => 0xff,
    };
    bytes.into_iter().map(|byte| byte & bits).collect()
}

fn of_hex(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex"))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_type_that_orbax_stores_is_restored() {
    let folder = tempfile::tempdir().expect("a folder");
    let expected = fixtures(folder.path());
    let cluster = Cluster::start(2, 2).await;
    let client = cluster.client().await;
    let devices: Vec<i32> = client.init().all_devices.iter().map(|d| d.id).collect();
    let ends = [devices[0], devices[devices.len() - 1]];
    for layout in LAYOUTS {
        let arrays: Vec<_> = expected[layout]
            .iter()
            .filter(|(name, _)| name.starts_with("dtypes."))
            .collect();
        assert!(arrays.len() > 20, "{arrays:?}");
        let program = read(&folder.path().join(layout), &arrays, ends);
        let executable = compile(&client, &program).await.expect("understood");
        let results: Vec<u64> = arrays.iter().map(|_| client.handle()).collect();
        client
            .call(request::execute(executable, &[], &results, 0))
            .await
            .expect("started");
        for ((name, about), array) in arrays.into_iter().zip(results) {
            let dtype = about["dtype"].as_str().expect("a name");
            let found = shards(&client, array, 2)
                .await
                .unwrap_or_else(|error| panic!("{layout} {name}: {error}"))
                .concat();
            let wanted = of_hex(about["hex"].as_str().expect("hex"));
            assert_eq!(
                elements(found, dtype),
                elements(wanted, dtype),
                "{layout} {name}"
            );
        }
    }
}
