//! `objects.compose`, `rewrite` and `copy`.

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::objects::{describe, members, resource};
use crate::call::Call;
use crate::object::About;
use crate::reply::{Refusal, Reply};
use crate::state::State;

/// Sources of one composition at most.
const SOURCES: usize = 32;

pub(super) fn compose(
    state: &mut State,
    call: &Call,
    bucket: &str,
    to: &str,
) -> Result<Reply, Refusal> {
    let conditions = call.conditions("if")?;
    let body = members(&call.body)?;
    let sources = body.get("sourceObjects").and_then(Value::as_array);
    let sources = sources.filter(|list| !list.is_empty() && list.len() <= SOURCES);
    let sources =
        sources.ok_or_else(|| Refusal::Invalid(format!("compose takes 1 to {SOURCES} sources")))?;
    let known = state.allowed(bucket, call.token(), &["storage.objects.get"])?;
    let mut data = Vec::new();
    for source in sources {
        let object = known.get(source["name"].as_str().unwrap_or_default())?;
        let wanted = source["objectPreconditions"]["ifGenerationMatch"].as_str();
        let wanted = wanted
            .map(|text| crate::call::integer("ifGenerationMatch", text))
            .transpose()?;
        let wanted = wanted.or(source["objectPreconditions"]["ifGenerationMatch"].as_i64());
        if wanted.is_some_and(|wanted| wanted != object.generation) {
            return Err(Refusal::Precondition);
        }
        data.extend_from_slice(&object.data);
    }
    let mut about = About::default();
    if let Some(Value::Object(said)) = body.get("destination") {
        describe(&mut about, said)?;
    }
    let now = state.now();
    let known = state.allowed_write(bucket, call.token(), to, &conditions)?;
    known.put(to, data.into(), about, &conditions, now)?;
    if let Some(object) = known.objects.get_mut(to) {
        object.md5 = None;
    }
    Ok(Reply::json(&resource(call, bucket, to, known.get(to)?)))
}

/// Copies what is at `from`, with what is said of it unless the body says otherwise.
fn copied(
    state: &mut State,
    call: &Call,
    from: (&str, &str),
    to: (&str, &str),
) -> Result<(Value, usize), Refusal> {
    let conditions = call.conditions("if")?;
    let source_conditions = call.conditions("ifSource")?;
    let known = state.allowed(from.0, call.token(), &["storage.objects.get"])?;
    let object = known.get(from.1)?;
    source_conditions.allow_write(Some(object))?;
    let (data, about): (Bytes, About) = (object.data.clone(), object.about.clone());
    let said: Map<String, Value> = members(&call.body)?;
    let about = if said.is_empty() {
        about
    } else {
        let mut about = About::default();
        describe(&mut about, &said)?;
        about
    };
    let (now, length) = (state.now(), data.len());
    let known = state.allowed_write(to.0, call.token(), to.1, &conditions)?;
    let object = known.put(to.1, data, about, &conditions, now)?;
    Ok((resource(call, to.0, to.1, object), length))
}

pub(super) fn rewrite(
    state: &mut State,
    call: &Call,
    from: (&str, &str),
    to: (&str, &str),
) -> Result<Reply, Refusal> {
    let (resource, length) = copied(state, call, from, to)?;
    Ok(Reply::json(&json!({
        "kind": "storage#rewriteResponse",
        "totalBytesRewritten": length.to_string(),
        "objectSize": length.to_string(),
        "done": true,
        "resource": resource,
    })))
}

pub(super) fn copy(
    state: &mut State,
    call: &Call,
    from: (&str, &str),
    to: (&str, &str),
) -> Result<Reply, Refusal> {
    Ok(Reply::json(&copied(state, call, from, to)?.0))
}
