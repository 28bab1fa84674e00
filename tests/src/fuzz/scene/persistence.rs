//! Plugin programs that write an array to a bucket and read it back, and what can be wrong in them.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use prost::Message as _;
use serde_json::{Value, json};
use waystation_client::Request;
use waystation_proto::xla::ifrt::{Serialized, proxy::CompileRequest};

use super::parts::cut;
use crate::fuzz::{
    folders::{FIFO, FILE, Folders, LINK, LOOP},
    mutate::EDGES,
    random::Random,
};

/// The type by which clients tell such a program from XLA's.
pub(super) const PLUGIN_PROGRAM: &str = "xla::ifrt::PluginProgram";
/// What jaxlib puts before the text.
const PREFIX: &str = "__serialized_plugin_program ";
/// The most times that an element of a list is repeated.
const MAX_COPIES: usize = 2000;
/// Everything in a program that may be replaced as text.
const TEXTS: [&str; 8] = [
    "",
    "=",
    "%%%",
    "gA==",
    "F32",
    "TUPLE",
    "no type",
    "\u{1f980}\0",
];

fn encoded(text: &str) -> Value {
    BASE64_STANDARD.encode(text).into()
}

fn item(location: &str, name: &str, shape: Value, device: i32) -> Value {
    json!({
        "b64_location": encoded(location),
        "b64_name": encoded(name),
        "b64_hlo_sharding_string": "",
        "shape": shape,
        "devices": {"device_ids": [device]},
        "timeout": {"seconds": 5, "nanos": 0},
    })
}

/// Writes four f32.
pub(super) fn write(location: &str, name: &str, device: i32) -> Value {
    json!({"persistenceWriteRequest": item(location, name, json!([4]), device)})
}

/// Reads four f32.
pub(super) fn read(location: &str, name: &str, device: i32) -> Value {
    let shape = json!({"xla_primitive_type_str": "F32", "dimensions": [4]});
    json!({"persistenceReadRequest": item(location, name, shape, device)})
}

/// The request to compile a program.
pub(super) fn compile(program: &Value) -> Request {
    Request::CompileRequest(CompileRequest {
        program: Some(Serialized {
            type_name: PLUGIN_PROGRAM.to_owned(),
            data: format!("{PREFIX}{program}").into(),
        }),
        compile_options: Some(Serialized {
            type_name: "xla::ifrt::PluginCompileOptions".to_owned(),
            data: Bytes::new(),
        }),
        host_callbacks: Vec::new(),
    })
}

/// Changes a program in one to three places. Where it writes stays below the folders, or where nothing can be written.
pub(super) fn damage(program: &mut Value, folders: &Folders, random: &mut Random) {
    for _ in 0..=random.below(3) {
        change(program, folders, random);
    }
}

fn change(value: &mut Value, folders: &Folders, random: &mut Random) {
    match value {
        Value::Object(members) => {
            let keys: Vec<String> = members.keys().cloned().collect();
            if keys.is_empty() {
                return;
            }
            let key = random.pick(&keys).as_str();
            match (key, random.below(12)) {
                (_, 0) => {
                    members.remove(key);
                }
                (_, 1) => {
                    let member = members.get(key).cloned().unwrap_or_default();
                    let other = random.pick(&keys);
                    if other != "b64_location" {
                        members.insert(other.clone(), member);
                    }
                }
                ("b64_location", _) => {
                    members.insert(key.to_owned(), encoded(&location(folders, random)));
                }
                ("b64_name", _) => {
                    members.insert(key.to_owned(), encoded(&name(random)));
                }
                ("b64_hlo_sharding_string", _) => {
                    members.insert(key.to_owned(), sharding(random));
                }
                _ => {
                    if let Some(member) = members.get_mut(key) {
                        change(member, folders, random);
                    }
                }
            }
        }
        Value::Array(elements) => match random.below(6) {
            0 => elements.clear(),
            1 => {
                let element = elements.first().cloned().unwrap_or_default();
                let copies = 1 + random.below(MAX_COPIES);
                elements.extend(std::iter::repeat_n(element, copies));
            }
            2 => elements.push(Value::Null),
            _ => {
                let place = random.below(elements.len());
                match elements.get_mut(place) {
                    Some(element) => change(element, folders, random),
                    None => elements.push(json!(random.pick(&EDGES))),
                }
            }
        },
        Value::Number(_) => {
            *value = match random.below(8) {
                0 => json!(0.5),
                1 => json!(u64::MAX),
                _ => json!(random.pick(&EDGES)),
            };
        }
        _ => *value = json!(random.pick(&TEXTS)),
    }
}

/// A place to write to or read from: dots, links, pipes, what is no folder, what nobody serves.
fn location(folders: &Folders, random: &mut Random) -> String {
    let bucket = folders.bucket().display().to_string();
    match random.below(16) {
        0 => format!("file://{bucket}/../bucket/./below"),
        1 => format!("{bucket}/../outside"),
        2 => format!("{bucket}/%2e%2e/outside"),
        3 => format!("{bucket}/{LINK}"),
        4 => format!("{bucket}/{LOOP}"),
        5 => format!("{bucket}/{FILE}"),
        6 => format!("{bucket}/{FIFO}/0"),
        7 => format!("{bucket}{}", "/deep".repeat(2000)),
        8 => format!("{bucket}/{}", "long".repeat(100)),
        9 => "relative/path".to_owned(),
        10 => format!("file://host{bucket}"),
        11 => "ftp://nobody/there".to_owned(),
        12 => "memory://".to_owned(),
        13 => "/dev/null".to_owned(),
        14 => format!("{bucket}\0/cut"),
        _ => String::new(),
    }
}

/// The name of an array below a location.
fn name(random: &mut Random) -> String {
    let names = [
        "",
        "..",
        ".",
        "a/../../b",
        "../outside/secret",
        "/etc/passwd",
        "a//b",
        "a/",
        "a\0b",
        "a\nb",
        FIFO,
        LINK,
        "link/secret",
        LOOP,
        FILE,
        "file/below",
        "array",
        "array/.zarray",
        "%2e%2e/up",
        "\\..\\up",
    ];
    match random.below(names.len() + 2) {
        0 => "n".repeat(300),
        1 => "n/".repeat(3000) + "n",
        n => names[n - 2].to_owned(),
    }
}

fn sharding(random: &mut Random) -> Value {
    let mut proto = cut();
    match random.below(5) {
        0 => proto.tile_assignment_dimensions = vec![*random.pick(&EDGES)],
        1 => proto.tile_assignment_dimensions = vec![1 << 20, 1 << 20, 1 << 20],
        2 => proto.iota_reshape_dims = vec![*random.pick(&EDGES); 3],
        3 => proto.tile_assignment_devices = vec![*random.pick(&EDGES); 2],
        _ => {}
    }
    BASE64_STANDARD.encode(proto.encode_to_vec()).into()
}
