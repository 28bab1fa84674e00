//! `objects.get`, `list`, `patch` and `delete`, and the bytes.

use serde_json::{Map, Value, json};

use crate::bucket::Listing;
use crate::call::Call;
use crate::clock::{self, rfc3339};
use crate::hash;
use crate::object::{About, Object};
use crate::reply::{Refusal, Reply};
use crate::state::State;

/// Entries of a page at most.
const PAGE: usize = 1000;

pub(super) fn resource(call: &Call, bucket: &str, name: &str, object: &Object) -> Value {
    let coded: String = url::form_urlencoded::byte_serialize(name.as_bytes()).collect();
    let coded = coded.replace('+', "%20");
    let base = &call.base;
    let mut resource = json!({
        "kind": "storage#object",
        "id": format!("{bucket}/{name}/{}", object.generation),
        "selfLink": format!("{base}/storage/v1/b/{bucket}/o/{coded}"),
        "mediaLink": format!(
            "{base}/download/storage/v1/b/{bucket}/o/{coded}?generation={}&alt=media", object.generation
        ),
        "name": name,
        "bucket": bucket,
        "generation": object.generation.to_string(),
        "metageneration": object.metageneration.to_string(),
        "storageClass": "STANDARD",
        "size": object.data.len().to_string(),
        "crc32c": hash::crc32c_text(object.crc32c),
        "etag": format!("G{}M{}", object.generation, object.metageneration),
        "timeCreated": rfc3339(object.created),
        "updated": rfc3339(object.updated),
        "timeStorageClassUpdated": rfc3339(object.created),
    });
    if let Some(md5) = &object.md5 {
        resource["md5Hash"] = hash::md5_text(md5).into();
    }
    if let Some(kind) = &object.about.content_type {
        resource["contentType"] = kind.as_str().into();
    }
    if let Some(time) = object.about.custom_time {
        resource["customTime"] = rfc3339(time).into();
    }
    if !object.about.metadata.is_empty() {
        resource["metadata"] = json!(object.about.metadata);
    }
    resource
}

/// What a writer says of an object, taken into `about`. A member that is null is taken out.
pub(super) fn describe(about: &mut About, members: &Map<String, Value>) -> Result<(), Refusal> {
    let invalid = |name: &str, value: &Value| Refusal::Invalid(format!("{name} cannot be {value}"));
    for (name, value) in members {
        match (name.as_str(), value) {
            ("contentType", Value::Null) => about.content_type = None,
            ("contentType", Value::String(kind)) => about.content_type = Some(kind.clone()),
            ("customTime", Value::Null) => about.custom_time = None,
            ("customTime", Value::String(text)) => {
                let time = clock::parse_rfc3339(text).ok_or_else(|| invalid(name, value))?;
                about.custom_time = Some(time);
            }
            ("metadata", Value::Null) => about.metadata.clear(),
            ("metadata", Value::Object(pairs)) => {
                for (key, value) in pairs {
                    match value {
                        Value::Null => about.metadata.remove(key),
                        Value::String(text) => about.metadata.insert(key.clone(), text.clone()),
                        _ => return Err(invalid(key, value)),
                    };
                }
            }
            // Told by who knows it already, or nothing that the double keeps.
            ("name" | "bucket" | "kind" | "id" | "size" | "md5Hash" | "crc32c" | "acl", _) => {}
            (
                "cacheControl" | "contentEncoding" | "contentDisposition" | "contentLanguage",
                Value::Null,
            ) => {}
            _ => return Err(Refusal::NotBuilt(format!("object member {name}"))),
        }
    }
    Ok(())
}

/// The object that a call may read: the right, the generation and the conditions are looked at.
fn readable<'a>(
    state: &'a mut State,
    call: &Call,
    bucket: &str,
    name: &str,
) -> Result<&'a Object, Refusal> {
    let conditions = call.conditions("if")?;
    let known = state.allowed(bucket, call.token(), &["storage.objects.get"])?;
    let object = known.get(name)?;
    of_generation(call, name, object)?;
    conditions.allow_read(object)?;
    Ok(object)
}

pub(super) fn get(
    state: &mut State,
    call: &Call,
    bucket: &str,
    name: &str,
) -> Result<Reply, Refusal> {
    let object = readable(state, call, bucket, name)?;
    Ok(Reply::json(&resource(call, bucket, name, object)))
}

pub(super) fn media(
    state: &mut State,
    call: &Call,
    bucket: &str,
    name: &str,
) -> Result<Reply, Refusal> {
    bytes(call, readable(state, call, bucket, name)?)
}

/// The body of an object, or the part of it that is asked for, with the headers of both APIs.
pub(crate) fn bytes(call: &Call, object: &Object) -> Result<Reply, Refusal> {
    let length = object.data.len();
    let range = call.range(length)?;
    let reply = match range {
        None => Reply::new(200, object.data.clone()),
        Some((first, end)) => Reply::new(206, object.data.slice(first..end)).header(
            "content-range",
            format!("bytes {first}-{}/{length}", end - 1),
        ),
    };
    let kind = object
        .about
        .content_type
        .as_deref()
        .unwrap_or("application/octet-stream");
    let md5 = object
        .md5
        .as_ref()
        .map(|md5| format!(",md5={}", hash::md5_text(md5)));
    let reply = reply
        .header("content-type", kind)
        .header("accept-ranges", "bytes")
        .header("etag", object.etag())
        .header("last-modified", clock::http_date(object.updated))
        .header("x-goog-generation", object.generation)
        .header("x-goog-metageneration", object.metageneration)
        .header("x-goog-stored-content-length", length)
        .header("x-goog-stored-content-encoding", "identity")
        .header(
            "x-goog-hash",
            format!(
                "crc32c={}{}",
                hash::crc32c_text(object.crc32c),
                md5.unwrap_or_default()
            ),
        );
    Ok(match object.about.custom_time {
        Some(time) => reply.header("x-goog-custom-time", rfc3339(time)),
        None => reply,
    })
}

fn of_generation(call: &Call, name: &str, object: &Object) -> Result<(), Refusal> {
    match call.param("generation") {
        Some(text) if crate::call::integer("generation", text)? != object.generation => {
            Err(Refusal::NoObject(name.to_owned()))
        }
        _ => Ok(()),
    }
}

pub(super) fn list(state: &mut State, call: &Call, bucket: &str) -> Result<Reply, Refusal> {
    let page = state.page.unwrap_or(PAGE);
    let known = state.allowed(bucket, call.token(), &["storage.objects.list"])?;
    if call.param("matchGlob").is_some() {
        return Err(Refusal::NotBuilt("matchGlob".to_owned()));
    }
    let wanted = call
        .param("maxResults")
        .and_then(|count| count.parse().ok())
        .unwrap_or(PAGE);
    let found = known.list(&Listing {
        prefix: call.param("prefix").unwrap_or_default(),
        delimiter: call.param("delimiter").unwrap_or_default(),
        after: call.param("pageToken"),
        start: call.param("startOffset"),
        end: call.param("endOffset"),
        limit: page.min(wanted),
    });
    let mut reply = json!({"kind": "storage#objects"});
    let items = found
        .names
        .iter()
        .filter_map(|name| Some((name, known.objects.get(name)?)));
    let items: Vec<_> = items
        .map(|(name, object)| resource(call, bucket, name, object))
        .collect();
    if !items.is_empty() {
        reply["items"] = items.into();
    }
    if !found.prefixes.is_empty() {
        reply["prefixes"] = json!(found.prefixes);
    }
    if let Some(next) = found.next {
        reply["nextPageToken"] = next.into();
    }
    Ok(Reply::json(&reply))
}

pub(super) fn patch(
    state: &mut State,
    call: &Call,
    bucket: &str,
    name: &str,
) -> Result<Reply, Refusal> {
    let conditions = call.conditions("if")?;
    let now = state.now();
    let rights = ["storage.objects.get", "storage.objects.update"];
    let known = state.allowed(bucket, call.token(), &rights)?;
    let members = members(&call.body)?;
    let object = known.describe(name, &conditions, now, |about| describe(about, &members))?;
    Ok(Reply::json(&resource(call, bucket, name, object)))
}

pub(super) fn members(body: &[u8]) -> Result<Map<String, Value>, Refusal> {
    if body.is_empty() {
        return Ok(Map::new());
    }
    serde_json::from_slice(body).map_err(|error| Refusal::Invalid(error.to_string()))
}

pub(super) fn delete(
    state: &mut State,
    call: &Call,
    bucket: &str,
    name: &str,
) -> Result<Reply, Refusal> {
    let conditions = call.conditions("if")?;
    let known = state.allowed(bucket, call.token(), &["storage.objects.delete"])?;
    of_generation(call, name, known.get(name)?)?;
    known.delete(name, &conditions)?;
    Ok(Reply::empty(204))
}
