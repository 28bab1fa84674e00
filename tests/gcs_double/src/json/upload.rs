//! `objects.insert` in its three forms: media, multipart, and resumable in chunks.

use bytes::Bytes;
use serde_json::{Map, Value};

use super::objects::{describe, members, resource};
use crate::call::Call;
use crate::object::{About, Conditions};
use crate::reply::{Refusal, Reply};
use crate::state::{Session, State};

/// Chunks of a resumable upload but the last are multiples of this.
const CHUNK: usize = 256 << 10;

pub(super) fn serve(state: &mut State, call: &Call, bucket: &str) -> Result<Reply, Refusal> {
    if let Some(id) = call.param("upload_id") {
        return chunk(state, call, id);
    }
    match call.param("uploadType") {
        Some("media") => {
            let about = About {
                content_type: call.header("content-type").map(str::to_owned),
                ..About::default()
            };
            let name = call.param("name").unwrap_or_default();
            finish(
                state,
                call,
                bucket,
                name,
                call.body.clone(),
                about,
                &call.conditions("if")?,
            )
        }
        Some("multipart") => {
            let (said, kind, data) = related(call)?;
            let mut about = About {
                content_type: kind,
                ..About::default()
            };
            describe(&mut about, &said)?;
            let name = name(call, &said);
            finish(
                state,
                call,
                bucket,
                &name,
                data,
                about,
                &call.conditions("if")?,
            )
        }
        Some("resumable") => begin(state, call, bucket),
        other => Err(Refusal::Invalid(format!("Invalid upload type {other:?}"))),
    }
}

fn name(call: &Call, said: &Map<String, Value>) -> String {
    let named = said.get("name").and_then(Value::as_str);
    named.or(call.param("name")).unwrap_or_default().to_owned()
}

fn finish(
    state: &mut State,
    call: &Call,
    bucket: &str,
    name: &str,
    data: Bytes,
    about: About,
    conditions: &Conditions,
) -> Result<Reply, Refusal> {
    let now = state.now();
    let known = state.allowed_write(bucket, call.token(), name, conditions)?;
    let object = known.put(name, data, about, conditions, now)?;
    Ok(Reply::json(&resource(call, bucket, name, object)))
}

/// What is said of an object, the type of its bytes, and the bytes.
type Related = (Map<String, Value>, Option<String>, Bytes);

/// The two parts of `multipart/related`: what is said of the object, and its type and bytes.
fn related(call: &Call) -> Result<Related, Refusal> {
    let invalid = || Refusal::Invalid("the multipart body has not its two parts".to_owned());
    let kind = call.header("content-type").unwrap_or_default();
    let boundary = kind.split("boundary=").nth(1).ok_or_else(invalid)?;
    let boundary = boundary
        .split(';')
        .next()
        .unwrap_or_default()
        .trim_matches(['"', '\'']);
    let parts = parts(&call.body, boundary);
    let [said, data] = &parts[..] else {
        return Err(invalid());
    };
    let kind = said_type(&data.0);
    Ok((members(&said.1)?, kind, data.1.clone()))
}

fn said_type(headers: &str) -> Option<String> {
    let line = headers
        .lines()
        .find(|line| line.to_ascii_lowercase().starts_with("content-type:"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Headers and bytes of each part.
pub(super) fn parts(body: &Bytes, boundary: &str) -> Vec<(String, Bytes)> {
    let delimiter = format!("--{boundary}");
    let mut found = Vec::new();
    let mut at = find(body, delimiter.as_bytes(), 0);
    while let Some(start) = at {
        let start = start + delimiter.len();
        let next = find(body, format!("\n{delimiter}").as_bytes(), start);
        if let Some(end) = next {
            let part = body.slice(start..end);
            // A line end before the part and one behind it belong to the delimiters.
            let crlf = find(&part, b"\r\n\r\n", 0).map(|gap| (gap, gap + 4));
            let gap = crlf.or_else(|| find(&part, b"\n\n", 0).map(|gap| (gap, gap + 2)));
            if let Some((gap, data)) = gap {
                let headers = String::from_utf8_lossy(&part[..gap]).trim().to_owned();
                let end = if part.ends_with(b"\r") {
                    part.len() - 1
                } else {
                    part.len()
                };
                found.push((headers, part.slice(data.min(end)..end)));
            }
        }
        at = next.map(|next| next + 1);
    }
    found
}

fn find(body: &[u8], wanted: &[u8], from: usize) -> Option<usize> {
    let rest = body.get(from..)?;
    rest.windows(wanted.len())
        .position(|window| window == wanted)
        .map(|at| at + from)
}

fn begin(state: &mut State, call: &Call, bucket: &str) -> Result<Reply, Refusal> {
    let said = members(&call.body)?;
    let name = name(call, &said);
    let kind = call.header("x-upload-content-type").map(str::to_owned);
    let mut about = About {
        content_type: kind,
        ..About::default()
    };
    describe(&mut about, &said)?;
    let conditions = call.conditions("if")?;
    let known = state.allowed_write(bucket, call.token(), &name, &conditions)?;
    conditions.allow_write(known.objects.get(&name))?;
    let id = state.new_id("upload");
    let session = Session {
        bucket: bucket.to_owned(),
        name,
        about,
        conditions,
        data: Vec::new(),
    };
    state.sessions.insert(id.clone(), session);
    let base = &call.base;
    let location =
        format!("{base}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={id}");
    Ok(Reply::empty(200)
        .header("location", location)
        .header("x-guploader-uploadid", id))
}

/// Takes one chunk in, or tells how far it is.
fn chunk(state: &mut State, call: &Call, id: &str) -> Result<Reply, Refusal> {
    let gone = || Refusal::NoObject(format!("upload {id}"));
    if call.method == "DELETE" {
        state.sessions.remove(id).ok_or_else(gone)?;
        return Ok(Reply::empty(499));
    }
    let session = state.sessions.get_mut(id).ok_or_else(gone)?;
    let (range, total) = match call.header("content-range") {
        // Everything at once.
        None => (Some(0), Some(call.body.len())),
        Some(text) => content_range(text)?,
    };
    if let Some(first) = range {
        let last = total.is_some_and(|total| first + call.body.len() >= total);
        if first > session.data.len() || (!last && !call.body.len().is_multiple_of(CHUNK)) {
            return Err(Refusal::Invalid(
                "a chunk is out of place or of a bad size".to_owned(),
            ));
        }
        // What was sent again is skipped.
        let new = call
            .body
            .get(session.data.len() - first..)
            .unwrap_or_default();
        session.data.extend_from_slice(new);
    }
    let length = session.data.len();
    if total == Some(length) {
        let session = state.sessions.remove(id).ok_or_else(gone)?;
        let Session {
            bucket,
            name,
            about,
            conditions,
            data,
        } = session;
        return finish(state, call, &bucket, &name, data.into(), about, &conditions);
    }
    let reply = Reply::empty(308);
    Ok(match length.checked_sub(1) {
        Some(last) => reply.header("range", format!("bytes=0-{last}")),
        None => reply,
    })
}

/// `bytes 0-9/20`, `bytes 0-9/*`, `bytes */20`, `bytes */*`: first byte, and all in all.
fn content_range(text: &str) -> Result<(Option<usize>, Option<usize>), Refusal> {
    let invalid = || Refusal::Invalid(format!("Content-Range {text:?}"));
    let (range, total) = text
        .strip_prefix("bytes ")
        .and_then(|text| text.split_once('/'))
        .ok_or_else(invalid)?;
    let total = match total {
        "*" => None,
        total => Some(total.parse().map_err(|_| invalid())?),
    };
    let first = match range.split_once('-') {
        None => None,
        Some((first, _)) => Some(first.parse().map_err(|_| invalid())?),
    };
    Ok((first, total))
}
