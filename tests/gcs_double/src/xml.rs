//! The XML API, as far as `object_store` uses it: under `gs://`, and in S3's words under `s3://`.

mod multipart;

use crate::bucket::Listing;
use crate::call::{Call, decode};
use crate::clock::{parse_rfc3339, rfc3339};
use crate::json;
use crate::object::{About, Conditions, Object};
use crate::reply::{Refusal, Reply};
use crate::state::State;

/// Entries of a page at most.
const PAGE: usize = 1000;

pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

pub(crate) fn serve(state: &mut State, call: &Call) -> Result<Reply, Refusal> {
    let (bucket, rest) = call
        .path
        .split_first()
        .ok_or(Refusal::NoBucket(String::new()))?;
    let name = rest.join("/");
    let has = |param: &str| call.param(param).is_some();
    match call.method.as_str() {
        "GET" if name.is_empty() => list(state, call, bucket),
        "HEAD" if name.is_empty() => {
            state.allowed(bucket, call.token(), &["storage.buckets.get"])?;
            Ok(Reply::empty(200))
        }
        "GET" | "HEAD" => get(state, call, bucket, &name),
        "POST" if name.is_empty() && has("delete") => delete_all(state, call, bucket),
        "POST" if has("uploads") => multipart::begin(state, call, bucket, &name),
        "POST" if has("uploadId") => multipart::complete(state, call),
        "PUT" if has("uploadId") => multipart::part(state, call),
        "DELETE" if has("uploadId") => multipart::abort(state, call),
        "PUT" if call.header("x-goog-copy-source").is_some() => copy(state, call, bucket, &name),
        "PUT" => put(
            state,
            call,
            bucket,
            &name,
            call.body.clone(),
            about(call)?,
            &call.header_conditions()?,
        ),
        "DELETE" => {
            let conditions = call.header_conditions()?;
            let known = state.allowed(bucket, call.token(), &["storage.objects.delete"])?;
            let deleted = known.delete(&name, &conditions);
            // S3 says so of what was not there, too.
            if call.token().is_none() && matches!(deleted, Err(Refusal::NoObject(_))) {
                return Ok(Reply::empty(204));
            }
            deleted.map(|()| Reply::empty(204))
        }
        method => Err(Refusal::NotBuilt(format!("{method} in the XML API"))),
    }
}

fn get(state: &mut State, call: &Call, bucket: &str, name: &str) -> Result<Reply, Refusal> {
    let conditions = call.header_conditions()?;
    let known = state.allowed(bucket, call.token(), &["storage.objects.get"])?;
    let object = known.get(name)?;
    conditions.allow_read(object)?;
    let reply = json::bytes(call, object)?;
    Ok(match call.method.as_str() {
        // The length, and no body: what the server below takes from the header.
        "HEAD" => Reply {
            body: Default::default(),
            ..reply
        }
        .header("content-length", object.data.len()),
        _ => reply,
    })
}

/// What headers say of an object.
fn about(call: &Call) -> Result<About, Refusal> {
    let time = call.header("x-goog-custom-time").map(|text| {
        parse_rfc3339(text).ok_or_else(|| Refusal::Invalid(format!("custom time {text:?}")))
    });
    let metadata = call.headers.iter().filter_map(|(name, value)| {
        let name = name.as_str().strip_prefix("x-goog-meta-")?;
        Some((name.to_owned(), value.to_str().ok()?.to_owned()))
    });
    Ok(About {
        content_type: call.header("content-type").map(str::to_owned),
        custom_time: time.transpose()?,
        metadata: metadata.collect(),
    })
}

fn put(
    state: &mut State,
    call: &Call,
    bucket: &str,
    name: &str,
    data: bytes::Bytes,
    about: About,
    conditions: &Conditions,
) -> Result<Reply, Refusal> {
    let now = state.now();
    let known = state.allowed_write(bucket, call.token(), name, conditions)?;
    let object = known.put(name, data, about, conditions, now)?;
    Ok(written(Reply::empty(200), object))
}

fn written(reply: Reply, object: &Object) -> Reply {
    reply
        .header("etag", object.etag())
        .header("x-goog-generation", object.generation)
        .header("x-goog-metageneration", object.metageneration)
}

fn copy(state: &mut State, call: &Call, bucket: &str, name: &str) -> Result<Reply, Refusal> {
    let source = decode(call.header("x-goog-copy-source").unwrap_or_default());
    let (from, source) = source
        .trim_start_matches('/')
        .split_once('/')
        .unwrap_or_default();
    let known = state.allowed(from, call.token(), &["storage.objects.get"])?;
    let object = known.get(source)?;
    let (data, about) = (object.data.clone(), object.about.clone());
    let conditions = call.header_conditions()?;
    let done = put(state, call, bucket, name, data, about, &conditions)?;
    let now = rfc3339(state.now());
    let body = format!("<CopyObjectResult><LastModified>{now}</LastModified></CopyObjectResult>");
    Ok(Reply {
        headers: done.headers,
        ..Reply::xml(body)
    })
}

fn list(state: &mut State, call: &Call, bucket: &str) -> Result<Reply, Refusal> {
    let page = state.page.unwrap_or(PAGE);
    let known = state.allowed(bucket, call.token(), &["storage.objects.list"])?;
    let wanted = call
        .param("max-keys")
        .and_then(|count| count.parse().ok())
        .unwrap_or(PAGE);
    let found = known.list(&Listing {
        prefix: call.param("prefix").unwrap_or_default(),
        delimiter: call.param("delimiter").unwrap_or_default(),
        after: call
            .param("continuation-token")
            .or(call.param("start-after")),
        limit: page.min(wanted),
        ..Listing::default()
    });
    let mut xml = format!("<ListBucketResult><Name>{}</Name>", escape(bucket));
    for (name, object) in found
        .names
        .iter()
        .filter_map(|name| Some((name, known.objects.get(name)?)))
    {
        xml += &format!(
            "<Contents><Key>{}</Key><Generation>{}</Generation><MetaGeneration>{}</MetaGeneration>\
             <LastModified>{}</LastModified><ETag>{}</ETag><Size>{}</Size></Contents>",
            escape(name),
            object.generation,
            object.metageneration,
            rfc3339(object.updated),
            escape(&object.etag()),
            object.data.len(),
        );
    }
    for prefix in &found.prefixes {
        xml += &format!(
            "<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>",
            escape(prefix)
        );
    }
    if let Some(next) = &found.next {
        xml += &format!(
            "<NextContinuationToken>{}</NextContinuationToken>",
            escape(next)
        );
    }
    xml += &format!(
        "<IsTruncated>{}</IsTruncated></ListBucketResult>",
        found.next.is_some()
    );
    Ok(Reply::xml(xml))
}

/// S3's delete of many. Who may not is told so object by object, in an answer that says 200.
fn delete_all(state: &mut State, call: &Call, bucket: &str) -> Result<Reply, Refusal> {
    let denied = match state.allowed(bucket, call.token(), &["storage.objects.delete"]) {
        Err(Refusal::Forbidden(_)) => true,
        allowed => allowed.map(|_| false)?,
    };
    let body = String::from_utf8_lossy(&call.body);
    let mut xml = String::from("<DeleteResult>");
    for name in between(&body, "<Key>", "</Key>") {
        if denied {
            xml += &format!(
                "<Error><Key>{name}</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            );
            continue;
        }
        state.bucket(bucket)?.objects.remove(&unescape(name));
        xml += &format!("<Deleted><Key>{name}</Key></Deleted>");
    }
    Ok(Reply::xml(xml + "</DeleteResult>"))
}

fn between<'a>(text: &'a str, open: &'a str, close: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(open)
        .skip(1)
        .filter_map(move |rest| Some(rest.split_once(close)?.0))
}

fn unescape(text: &str) -> String {
    let text = text
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"");
    text.replace("&apos;", "'").replace("&amp;", "&")
}
