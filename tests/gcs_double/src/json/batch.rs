//! Several requests in one `multipart/mixed` body, as gcsfs deletes.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::Bytes;

use super::upload::parts;
use crate::call::Call;
use crate::reply::{Refusal, Reply};
use crate::state::State;

pub(super) fn serve(state: &mut State, call: &Call) -> Result<Reply, Refusal> {
    let kind = call.header("content-type").unwrap_or_default();
    let boundary = kind.split("boundary=").nth(1).unwrap_or_default();
    let boundary = boundary
        .split(';')
        .next()
        .unwrap_or_default()
        .trim_matches(['"', '\'']);
    let mut answers = String::new();
    for (headers, request) in parts(&call.body, boundary) {
        let inner = inner(call, &request)
            .ok_or_else(|| Refusal::Invalid("a part of the batch is no request".to_owned()))?;
        // One inside another is not built, and would not end.
        let batch = inner.path.first().is_some_and(|first| first == "batch");
        let done = if batch || !super::serves(&inner) {
            Err(Refusal::NotBuilt("this in a batch".to_owned()))
        } else {
            super::serve(state, &inner)
        };
        let reply = done.unwrap_or_else(|refusal| refusal.json());
        let id = headers.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-id")
                .then(|| value.trim())
        });
        let id = id.unwrap_or_default().replace('<', "<response-");
        let (status, body) = (reply.status, String::from_utf8_lossy(&reply.body));
        answers += &format!(
            "--batch_double\r\nContent-Type: application/http\r\nContent-ID: {id}\r\n\r\n\
             HTTP/1.1 {status} {}\r\nContent-Type: application/json; charset=UTF-8\r\nContent-Length: {}\r\n\r\n{body}\r\n",
            if status < 300 { "OK" } else { "Refused" },
            body.len(),
        );
    }
    answers += "--batch_double--\r\n";
    Ok(Reply::new(200, answers).header("content-type", "multipart/mixed; boundary=batch_double"))
}

/// A request within a part: request line, headers, body.
fn inner(outer: &Call, text: &Bytes) -> Option<Call> {
    let whole = std::str::from_utf8(text).ok()?;
    let (head, body) = whole
        .split_once("\r\n\r\n")
        .or_else(|| whole.split_once("\n\n"))
        .unwrap_or((whole, ""));
    let mut lines = head.lines();
    let mut line = lines.next()?.split_whitespace();
    let (method, target) = (line.next()?, line.next()?);
    // Some clients write the whole address.
    let target = match target.split_once("://") {
        Some((_, rest)) => rest.split_once('/')?.1,
        None => target,
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut headers = HeaderMap::new();
    for name in ["host", "authorization"] {
        if let Some(value) = outer.headers.get(name) {
            headers.insert(name, value.clone());
        }
    }
    for line in lines {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        let name = HeaderName::from_bytes(name.trim().as_bytes());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_str(value.trim())) {
            headers.insert(name, value);
        }
    }
    Some(Call::new(
        method,
        path,
        query,
        headers,
        body.trim_end().to_owned().into(),
    ))
}
