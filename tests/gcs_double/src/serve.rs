//! The way of a request: an ordered fault, credentials, the API that it is for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State as Shared};
use axum::http::Response;
use bytes::Bytes;
use futures::StreamExt as _;
use serde_json::json;

use crate::call::Call;
use crate::clock::rfc3339;
use crate::fault::Kind;
use crate::reply::{Refusal, Reply};
use crate::state::{Logged, State};
use crate::{control, json, xml};

/// Bodies of more bytes are refused.
const BODY: usize = 1 << 30;

#[derive(Debug, Clone, Default)]
pub(crate) struct Server(Arc<Mutex<State>>);

impl Server {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) async fn serve(Shared(server): Shared<Server>, request: Request) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let method = parts.method.as_str().to_owned();
    let target = parts
        .uri
        .path_and_query()
        .map_or("", |target| target.as_str())
        .to_owned();
    let Ok(body) = to_bytes(body, BODY).await else {
        return Reply::empty(400).into_response();
    };
    let (path, query) = (parts.uri.path(), parts.uri.query().unwrap_or_default());
    let call = Call::new(&method, path, query, parts.headers, body);
    if call.path.first().is_some_and(|first| first == "_double") {
        return control::serve(&mut server.state(), &call).into_response();
    }
    let (fault, latency, reply) = {
        let mut state = server.state();
        let fault = state.faults.strike(&method, &target);
        let reply = match fault {
            Some(Kind::Silence) => None,
            Some(Kind::Status(status)) => Some(refuse(&call, &Refusal::Ordered(status))),
            _ => Some(answer(&mut state, &call)),
        };
        let told = reply.as_ref().filter(|_| fault != Some(Kind::LoseAnswer));
        let status = told.map(|reply| reply.status);
        state.record(Logged {
            method,
            target,
            status,
        });
        (fault, state.latency, reply)
    };
    let late = match fault {
        Some(Kind::Slow(milliseconds)) => Duration::from_millis(milliseconds),
        _ => Duration::ZERO,
    };
    if !(late + latency).is_zero() {
        tokio::time::sleep(late + latency).await;
    }
    let Some(reply) = reply else {
        return std::future::pending().await;
    };
    match fault {
        // The head waits for the body's first bytes, and is gone with them.
        Some(Kind::LoseAnswer) => Reply::new(200, " ".repeat(1000)).with_body(|_| {
            Body::from_stream(futures::stream::once(async {
                Err::<Bytes, _>(std::io::Error::other("ordered"))
            }))
        }),
        Some(Kind::CutBody) => {
            let half = reply.body.len() / 2;
            broken(reply, half)
        }
        _ => reply.into_response(),
    }
}

/// An answer whose body ends before its stated length: the server closes the connection.
fn broken(reply: Reply, bytes: usize) -> Response<Body> {
    let reply = if reply
        .headers
        .iter()
        .any(|(name, _)| *name == "content-length")
    {
        reply
    } else {
        let length = reply.body.len().max(1);
        reply.header("content-length", length)
    };
    reply.with_body(|body| {
        let sent = futures::stream::iter([Ok(body.slice(..bytes))]);
        let cut = futures::stream::once(async {
            // What was sent must leave before the connection breaks.
            tokio::task::yield_now().await;
            Err::<Bytes, _>(std::io::Error::other("ordered"))
        });
        Body::from_stream(sent.chain(cut))
    })
}

fn answer(state: &mut State, call: &Call) -> Reply {
    if let Some(reply) = metadata(state, call) {
        return reply;
    }
    let now = state.now();
    if let Err(refusal) = state.tokens.check(call.token(), now) {
        return refuse(call, &refusal);
    }
    let done = if json::serves(call) {
        json::serve(state, call)
    } else {
        xml::serve(state, call)
    };
    done.unwrap_or_else(|refusal| refuse(call, &refusal))
}

fn refuse(call: &Call, refusal: &Refusal) -> Reply {
    let media = call.param("alt") == Some("media");
    if json::serves(call) && !media {
        refusal.json()
    } else {
        refusal.xml()
    }
}

/// The exchange of a workload's own token, any that begins with "subject", for one of Google's.
fn exchange(state: &mut State, call: &Call) -> Reply {
    let form: BTreeMap<_, _> = url::form_urlencoded::parse(&call.body).collect();
    let has = |name: &str, text: &str| form.get(name).is_some_and(|value| value.starts_with(text));
    let good = call.method == "POST"
        && has(
            "grant_type",
            "urn:ietf:params:oauth:grant-type:token-exchange",
        )
        && has(
            "requested_token_type",
            "urn:ietf:params:oauth:token-type:access_token",
        )
        && has("subject_token_type", "urn:ietf:params:oauth:token-type:")
        && has("audience", "//iam.googleapis.com/")
        && has("scope", "https://www.googleapis.com/auth/");
    let refused = |error: &str| Reply::json(&json!({"error": error})).status(400);
    match (good, has("subject_token", "subject")) {
        (false, _) => refused("invalid_request"),
        (true, false) => refused("invalid_grant"),
        (true, true) => {
            let now = state.now();
            Reply::json(&state.tokens.issue(now))
        }
    }
}

/// A service account's token for a good one of somebody else.
fn impersonate(state: &mut State, call: &Call, account: &str) -> Result<Reply, Refusal> {
    let now = state.now();
    let asked = account.ends_with(":generateAccessToken") && call.method == "POST";
    if !asked || !String::from_utf8_lossy(&call.body).contains("\"scope\"") {
        return Err(Refusal::Invalid("no request for a token".to_owned()));
    }
    if !state.tokens.is_issued(call.token(), now) {
        return Err(Refusal::Unauthorized);
    }
    let issued = state.tokens.issue(now);
    let ends = rfc3339(now + state.tokens.lifetime);
    Ok(Reply::json(
        &json!({"accessToken": issued["access_token"], "expireTime": ends}),
    ))
}

/// The metadata server of a machine, the token endpoint of service accounts, and those of federated identities.
fn metadata(state: &mut State, call: &Call) -> Option<Reply> {
    let path: Vec<_> = call.path.iter().map(String::as_str).collect();
    let now = state.now();
    match path[..] {
        ["token"] if call.method == "POST" => Some(Reply::json(&state.tokens.issue(now))),
        ["sts", "v1", "token"] => Some(exchange(state, call)),
        ["iam", "v1", "projects", "-", "serviceAccounts", account] => {
            Some(impersonate(state, call, account).unwrap_or_else(|refusal| refusal.json()))
        }
        [
            "computeMetadata",
            "v1",
            "instance",
            "service-accounts",
            _,
            ref what @ ..,
        ] => {
            if call.header("metadata-flavor") != Some("Google") {
                return Some(Reply::new(403, "Missing Metadata-Flavor:Google header."));
            }
            let reply = match what {
                ["token"] => Reply::json(&state.tokens.issue(now)),
                ["email"] => Reply::new(200, "double@example.invalid"),
                _ => Reply::json(&serde_json::json!({
                    "aliases": ["default"], "email": "double@example.invalid",
                    "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
                })),
            };
            Some(reply.header("metadata-flavor", "Google"))
        }
        ["computeMetadata", ..] => Some(Reply::new(200, "ok").header("metadata-flavor", "Google")),
        _ => None,
    }
}
