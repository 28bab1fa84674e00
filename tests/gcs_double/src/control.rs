//! Orders from a test in another process: `POST /_double/WHAT` with JSON.

use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use crate::call::Call;
use crate::fault::Fault;
use crate::lifecycle::Rules;
use crate::reply::{Refusal, Reply};
use crate::state::State;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    bucket: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Advance {
    seconds: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Grant {
    bucket: String,
    #[serde(default)]
    token: Option<String>,
    /// None: everything.
    granted: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Lifecycle<'a> {
    bucket: String,
    #[serde(borrow)]
    lifecycle: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tokens {
    #[serde(default)]
    required: Option<bool>,
    #[serde(default)]
    lifetime_seconds: Option<u64>,
    #[serde(default)]
    revoke: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Limits {
    #[serde(default)]
    paced: Option<bool>,
    #[serde(default)]
    page: Option<usize>,
    #[serde(default)]
    latency_ms: Option<u64>,
}

pub(crate) fn serve(state: &mut State, call: &Call) -> Reply {
    obey(state, call).unwrap_or_else(|refusal| refusal.json())
}

fn obey(state: &mut State, call: &Call) -> Result<Reply, Refusal> {
    let what: Vec<_> = call.path.iter().skip(1).map(String::as_str).collect();
    let done = || Ok(Reply::json(&json!({})));
    match (call.method.as_str(), &what[..]) {
        ("GET", ["health"]) => done(),
        ("GET", ["log"]) => Ok(Reply::json(&state.log)),
        ("GET", ["state"]) => Ok(Reply::json(&summary(state))),
        ("POST", ["bucket"]) => {
            let named: Named = order(call)?;
            state.create_bucket(&named.bucket)?;
            done()
        }
        ("DELETE", ["bucket"]) => {
            let named: Named = order(call)?;
            state.bucket(&named.bucket)?;
            state.buckets.remove(&named.bucket);
            done()
        }
        ("POST", ["clock"]) => {
            let advance: Advance = order(call)?;
            state.advance(Duration::from_secs(advance.seconds));
            done()
        }
        ("POST", ["permissions"]) => {
            let grant: Grant = order(call)?;
            state
                .grants
                .set(&grant.bucket, grant.token.as_deref(), grant.granted);
            done()
        }
        ("POST", ["lifecycle"]) => {
            let seed: Lifecycle<'_> = order(call)?;
            seed_lifecycle(state, &seed.bucket, seed.lifecycle.map(ToOwned::to_owned))?;
            done()
        }
        ("POST", ["faults"]) => {
            let fault: Fault = order(call)?;
            state.faults.order(fault);
            done()
        }
        ("DELETE", ["faults"]) => {
            state.faults.clear();
            done()
        }
        ("POST", ["tokens"]) => {
            let tokens: Tokens = order(call)?;
            set_tokens(state, &tokens);
            done()
        }
        ("POST", ["limits"]) => {
            let limits: Limits = order(call)?;
            state.page = limits.page.or(state.page);
            let latency = limits.latency_ms.map(Duration::from_millis);
            state.latency = latency.unwrap_or(state.latency);
            for bucket in state.buckets.values_mut() {
                bucket.paced = limits.paced.unwrap_or(bucket.paced);
            }
            done()
        }
        _ => Err(Refusal::NotBuilt(format!("order {}", what.join("/")))),
    }
}

fn order<'a, T: Deserialize<'a>>(call: &'a Call) -> Result<T, Refusal> {
    serde_json::from_slice(&call.body).map_err(|error| Refusal::Invalid(error.to_string()))
}

fn set_tokens(state: &mut State, tokens: &Tokens) {
    let known = &mut state.tokens;
    known.required = tokens.required.unwrap_or(known.required);
    let lifetime = tokens.lifetime_seconds.map(Duration::from_secs);
    known.lifetime = lifetime.unwrap_or(known.lifetime);
    if tokens.revoke {
        known.revoke();
    }
}

pub(crate) fn seed_lifecycle(
    state: &mut State,
    bucket: &str,
    lifecycle: Option<Box<RawValue>>,
) -> Result<(), Refusal> {
    let now = state.now();
    let rules = lifecycle
        .as_deref()
        .map(|text| Rules::seed(text.get()))
        .unwrap_or_default();
    state.bucket(bucket)?.seed_lifecycle(lifecycle, rules, now);
    Ok(())
}

fn summary(state: &State) -> serde_json::Value {
    let buckets: serde_json::Map<_, _> = state
        .buckets
        .values()
        .map(|bucket| {
            let about = json!({
                "metageneration": bucket.metageneration,
                "lifecycle": bucket.lifecycle,
                "objects": bucket.objects.keys().collect::<Vec<_>>(),
            });
            (bucket.name.clone(), about)
        })
        .collect();
    json!({"buckets": buckets, "tokens_issued": state.tokens.issued(), "now": crate::clock::rfc3339(state.now())})
}
