//! Uploads in parts, as `object_store` sends large objects.

use std::collections::BTreeMap;

use super::{about, between, escape, put, written};
use crate::call::Call;
use crate::hash;
use crate::object::Conditions;
use crate::reply::{Refusal, Reply};
use crate::state::State;

pub(super) fn begin(
    state: &mut State,
    call: &Call,
    bucket: &str,
    name: &str,
) -> Result<Reply, Refusal> {
    state.allowed(bucket, call.token(), &["storage.objects.create"])?;
    let id = state.new_id("parts");
    state.multiparts.insert(
        id.clone(),
        (bucket.to_owned(), name.to_owned(), BTreeMap::new()),
    );
    Ok(Reply::xml(format!(
        "<InitiateMultipartUploadResult><Bucket>{}</Bucket><Key>{}</Key><UploadId>{id}</UploadId>\
         </InitiateMultipartUploadResult>",
        escape(bucket),
        escape(name),
    )))
}

fn id(call: &Call) -> String {
    call.param("uploadId").unwrap_or_default().to_owned()
}

fn gone(call: &Call) -> Refusal {
    Refusal::NoObject(format!("upload {}", id(call)))
}

pub(super) fn part(state: &mut State, call: &Call) -> Result<Reply, Refusal> {
    let number = call
        .param("partNumber")
        .and_then(|number| number.parse().ok());
    let number = number.ok_or_else(|| Refusal::Invalid("a part needs its number".to_owned()))?;
    let (_, _, parts) = state
        .multiparts
        .get_mut(&id(call))
        .ok_or_else(|| gone(call))?;
    let etag = format!("\"{}\"", hash::hex(&hash::md5(&call.body)));
    parts.insert(number, call.body.clone());
    Ok(Reply::empty(200).header("etag", etag))
}

pub(super) fn abort(state: &mut State, call: &Call) -> Result<Reply, Refusal> {
    state
        .multiparts
        .remove(&id(call))
        .ok_or_else(|| gone(call))?;
    Ok(Reply::empty(204))
}

pub(super) fn complete(state: &mut State, call: &Call) -> Result<Reply, Refusal> {
    let upload = state.multiparts.get(&id(call)).ok_or_else(|| gone(call))?;
    let (bucket, name, parts) = upload.clone();
    let body = String::from_utf8_lossy(&call.body);
    let mut data = Vec::new();
    for number in between(&body, "<PartNumber>", "</PartNumber>") {
        let part = number
            .trim()
            .parse()
            .ok()
            .and_then(|number: u32| parts.get(&number));
        data.extend_from_slice(part.ok_or_else(|| Refusal::Invalid("InvalidPart".to_owned()))?);
    }
    // The API knows no condition here.
    let conditions = Conditions::default();
    put(
        state,
        call,
        &bucket,
        &name,
        data.into(),
        about(call)?,
        &conditions,
    )?;
    state.multiparts.remove(&id(call));
    let object = state.bucket(&bucket)?.get(&name)?;
    let reply = Reply::xml(format!(
        "<CompleteMultipartUploadResult><ETag>{}</ETag></CompleteMultipartUploadResult>",
        escape(&object.etag()),
    ));
    Ok(written(reply, object))
}
