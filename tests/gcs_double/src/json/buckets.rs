//! `buckets.insert`, `get`, `patch` and `testIamPermissions`.

use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use crate::bucket::Bucket;
use crate::call::Call;
use crate::clock::rfc3339;
use crate::reply::{Refusal, Reply};
use crate::state::State;

/// The resource, as far as it is asked for.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Resource<'a> {
    kind: &'static str,
    id: &'a str,
    self_link: String,
    name: &'a str,
    project_number: &'static str,
    #[serde(with = "as_text")]
    metageneration: i64,
    location: &'static str,
    location_type: &'static str,
    storage_class: &'static str,
    etag: String,
    time_created: String,
    updated: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    lifecycle: Option<&'a RawValue>,
}

mod as_text {
    pub(super) fn serialize<S: serde::Serializer>(value: &i64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }
}

fn resource(call: &Call, bucket: &Bucket) -> Reply {
    let name = &bucket.name;
    let resource = Resource {
        kind: "storage#bucket",
        id: name,
        self_link: format!("{}/storage/v1/b/{name}", call.base),
        name,
        project_number: "0",
        metageneration: bucket.metageneration,
        location: "US-CENTRAL1",
        location_type: "region",
        storage_class: "STANDARD",
        etag: format!("M{}", bucket.metageneration),
        time_created: rfc3339(bucket.created),
        updated: rfc3339(bucket.updated),
        lifecycle: bucket.lifecycle.as_deref(),
    };
    match call.param("fields") {
        None => Reply::json(&resource),
        Some(fields) => chosen(&resource, fields),
    }
}

/// Top-level members by name; what is below a name comes whole.
fn chosen(resource: &Resource<'_>, fields: &str) -> Reply {
    let text = serde_json::to_string(resource).unwrap_or_default();
    let all: std::collections::BTreeMap<String, Box<RawValue>> =
        serde_json::from_str(&text).unwrap_or_default();
    let wanted = |name: &str| {
        fields
            .split(',')
            .any(|field| field.split(['/', '(']).next() == Some(name))
    };
    Reply::json(
        &all.into_iter()
            .filter(|(name, _)| wanted(name))
            .collect::<std::collections::BTreeMap<_, _>>(),
    )
}

pub(super) fn insert(state: &mut State, call: &Call) -> Result<Reply, Refusal> {
    #[derive(Deserialize)]
    struct New {
        name: String,
    }
    let new: New = read(&call.body)?;
    state
        .grants
        .check(&new.name, call.token(), "storage.buckets.create")?;
    let bucket = state.create_bucket(&new.name)?;
    Ok(resource(call, bucket))
}

pub(super) fn get(state: &mut State, call: &Call, name: &str) -> Result<Reply, Refusal> {
    let conditions = call.conditions("if")?;
    let bucket = state.allowed(name, call.token(), &["storage.buckets.get"])?;
    if conditions.metageneration_not == Some(bucket.metageneration) {
        return Err(Refusal::NotModified);
    }
    allow(&conditions, bucket)?;
    Ok(resource(call, bucket))
}

pub(super) fn patch(state: &mut State, call: &Call, name: &str) -> Result<Reply, Refusal> {
    let text = std::str::from_utf8(&call.body).unwrap_or_default();
    state.patches.push(text.to_owned());
    let conditions = call.conditions("if")?;
    let rights = ["storage.buckets.get", "storage.buckets.update"];
    let now = state.now();
    let bucket = state.allowed(name, call.token(), &rights)?;
    allow(&conditions, bucket)?;
    let members: std::collections::BTreeMap<String, Box<RawValue>> = read(&call.body)?;
    for (member, value) in members {
        match member.as_str() {
            "lifecycle" if value.get() == "null" => bucket.set_lifecycle(None, now)?,
            "lifecycle" => bucket.set_lifecycle(Some(value), now)?,
            other => return Err(Refusal::NotBuilt(format!("bucket member {other}"))),
        }
    }
    Ok(resource(call, bucket))
}

fn allow(conditions: &crate::object::Conditions, bucket: &Bucket) -> Result<(), Refusal> {
    let current = bucket.metageneration;
    let good = conditions
        .metageneration
        .is_none_or(|wanted| wanted == current)
        && conditions
            .metageneration_not
            .is_none_or(|wanted| wanted != current);
    if good {
        Ok(())
    } else {
        Err(Refusal::Precondition)
    }
}

/// Asks for no permission itself; what is not granted is left out, and `permissions` too when nothing is.
pub(super) fn test_permissions(
    state: &mut State,
    call: &Call,
    name: &str,
) -> Result<Reply, Refusal> {
    state.bucket(name)?;
    let granted: Vec<_> = call
        .params("permissions")
        .filter(|permission| state.grants.has(name, call.token(), permission))
        .collect();
    let kind = "storage#testIamPermissionsResponse";
    Ok(Reply::json(&if granted.is_empty() {
        json!({"kind": kind})
    } else {
        json!({"kind": kind, "permissions": granted})
    }))
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body).map_err(|error| Refusal::Invalid(error.to_string()))
}
