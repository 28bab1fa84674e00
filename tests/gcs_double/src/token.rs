//! Bearer tokens: handed out by the metadata server and the token endpoint, and good for a while.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use crate::clock::Time;
use crate::reply::Refusal;

#[derive(Debug)]
pub(crate) struct Tokens {
    /// Whether a request needs a good one.
    pub(crate) required: bool,
    pub(crate) lifetime: Duration,
    issued: BTreeMap<String, Time>,
    count: u64,
}

impl Default for Tokens {
    fn default() -> Tokens {
        Tokens {
            required: false,
            lifetime: Duration::from_secs(3600),
            issued: BTreeMap::new(),
            count: 0,
        }
    }
}

impl Tokens {
    /// What a token endpoint answers.
    pub(crate) fn issue(&mut self, now: Time) -> Value {
        self.count += 1;
        let token = format!("double-token-{}", self.count);
        self.issued.insert(token.clone(), now + self.lifetime);
        json!({"access_token": token, "expires_in": self.lifetime.as_secs(), "token_type": "Bearer"})
    }

    pub(crate) fn issued(&self) -> u64 {
        self.count
    }

    /// Everything that was handed out is worth nothing from now on.
    pub(crate) fn revoke(&mut self) {
        self.issued.clear();
    }

    /// Whether a token is one of those that were handed out, and still good.
    pub(crate) fn is_issued(&self, token: Option<&str>, now: Time) -> bool {
        let ends = token.and_then(|token| self.issued.get(token));
        ends.is_some_and(|ends| now < *ends)
    }

    pub(crate) fn check(&self, token: Option<&str>, now: Time) -> Result<(), Refusal> {
        if !self.required {
            return Ok(());
        }
        let good = self.is_issued(token, now)
            || token
                .and_then(signed)
                .is_some_and(|ends| now.timestamp() < ends);
        if good {
            Ok(())
        } else {
            Err(Refusal::Unauthorized)
        }
    }
}

/// The end of a service account's own token, which names it. The signature is not looked at.
fn signed(token: &str) -> Option<i64> {
    let mut parts = token.split('.');
    let (_, claims, _) = (parts.next()?, parts.next()?, parts.next()?);
    let claims: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).ok()?).ok()?;
    claims.get("exp")?.as_i64()
}
