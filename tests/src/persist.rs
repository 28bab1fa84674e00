//! Saves and restores as Orbax asks for them.

use std::path::Path;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use prost::Message as _;
use serde_json::json;
use waystation_client::{Client, Request, Response};
use waystation_proto::xla::{
    OpSharding,
    ifrt::{Serialized, proxy::CompileRequest},
    op_sharding,
};

/// A persistence program over arrays of four elements, cut over the devices 0 to 3, one for each name: a `read`, or a write.
///
/// # Panics
/// When the proxy does not take it.
pub async fn persist(client: &Client, folder: &Path, names: &[&str], read: bool) -> u64 {
    let encoded = |bytes: &[u8]| BASE64_STANDARD.encode(bytes);
    let quarters = OpSharding {
        r#type: op_sharding::Type::Other as i32,
        tile_assignment_dimensions: vec![4],
        tile_assignment_devices: vec![0, 1, 2, 3],
        ..Default::default()
    };
    let shape = match read {
        true => json!({"xla_primitive_type_str": "F32", "dimensions": [4]}),
        false => json!([4]),
    };
    let item = |name: &&str| {
        json!({
            "b64_location": encoded(folder.as_os_str().as_encoded_bytes()),
            "b64_name": encoded(name.as_bytes()),
            "b64_hlo_sharding_string": encoded(&quarters.encode_to_vec()),
            "shape": shape,
            "devices": {"device_ids": [0, 1, 2, 3]},
            "timeout": {"seconds": 600, "nanos": 0},
        })
    };
    let items: Vec<_> = names.iter().map(item).collect();
    let text = match read {
        true => json!({"bulk_persistence_read_request": {"read_requests": items}}),
        false => json!({"bulk_persistence_write_request": {"write_requests": items}}),
    };
    let serialized = |name: &str, data: String| {
        Some(Serialized {
            type_name: format!("xla::ifrt::{name}"),
            data: data.into(),
        })
    };
    let text = format!("__serialized_plugin_program {text}");
    let request = Request::CompileRequest(CompileRequest {
        program: serialized("PluginProgram", text),
        compile_options: serialized("PluginCompileOptions", String::new()),
        host_callbacks: Vec::new(),
    });
    match client.call(request).await.expect("understood") {
        Response::CompileResponse(compiled) => compiled.loaded_executable_handle,
        other => panic!("{other:?}"),
    }
}
