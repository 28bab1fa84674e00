//! The JSON of the persistence programs, field by field.

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;
use std::collections::BTreeMap;

use super::{bad, shown};
use crate::Result;

#[derive(Deserialize)]
pub(super) struct BulkWrite {
    pub(super) write_requests: Vec<Write>,
}

#[derive(Deserialize)]
pub(super) struct BulkRead {
    pub(super) read_requests: Vec<Read>,
}

pub(super) type Write = Item<Vec<i64>>;
pub(super) type Read = Item<Shape>;

// One struct with a generic shape rather than serde's `flatten`, which would hold the device ids of a large request in a
// form many times their size.
#[derive(Deserialize)]
pub(super) struct Item<S> {
    pub(super) b64_location: String,
    pub(super) b64_name: String,
    pub(super) b64_hlo_sharding_string: String,
    pub(super) shape: S,
    pub(super) devices: Devices,
    pub(super) timeout: Option<Timeout>,
}

#[derive(Deserialize)]
pub(super) struct Shape {
    pub(super) xla_primitive_type_str: String,
    pub(super) dimensions: Vec<i64>,
}

#[derive(Deserialize)]
pub(super) struct Devices {
    pub(super) device_ids: Vec<i32>,
}

#[derive(Deserialize)]
pub(super) struct Timeout {
    #[serde(default)]
    pub(super) seconds: i64,
    #[serde(default)]
    pub(super) nanos: i64,
}

/// The one member of the program's object: its name and its text.
pub(super) fn open(program: &str) -> Result<(String, &RawValue)> {
    // An object of more than a handful of members is no program; the map is dropped with its borrowed texts.
    let members: BTreeMap<String, &RawValue> = match serde_json::from_str(program) {
        Ok(members) => members,
        Err(error) => return bad(format!("not a JSON object: {error}")),
    };
    let count = members.len();
    let mut members = members.into_iter();
    match (members.next(), count) {
        (Some(member), 1) => Ok(member),
        (Some((first, _)), _) => bad(format!(
            "{count} requests in one program, {:?} among them",
            shown(&first)
        )),
        (None, _) => bad("no request in it".to_owned()),
    }
}

/// The value of the member `member`.
pub(super) fn decode<T: DeserializeOwned>(member: &str, body: &RawValue) -> Result<T> {
    serde_json::from_str(body.get()).or_else(|error| bad(format!("{member}: {error}")))
}
