//! The few calls of Cloud Storage that `object_store` does not have: a bucket's lifecycle, which rights one has, and an
//! object's custom time. Its JSON API, with the credentials and the endpoint that the bucket was opened with.
//!
//! Each call is made once and ends within [`DEADLINE`], credentials included. Who calls decides on another attempt, by
//! [`CallError::is_transient`].

use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use object_store::gcp::GcpCredentialProvider;
use reqwest::{Method, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use url::Url;

/// One call, from the credentials to the last byte.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// Google's own endpoint.
const ENDPOINT: &str = "https://storage.googleapis.com";

/// An answer of more bytes is none of Cloud Storage: fifty rules take a few kilobytes.
const ANSWER_BYTES: usize = 4 << 20;

/// As much of a refusal as a message shows.
const REASON_BYTES: usize = 300;

/// A call that did not succeed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// There is no token to be had.
    #[error("no credentials for Cloud Storage can be had")]
    Credentials(#[source] object_store::Error),
    /// The request was not answered.
    #[error("Cloud Storage does not answer")]
    Transport(#[source] reqwest::Error),
    /// No answer within [`DEADLINE`].
    #[error("Cloud Storage did not answer within {} s", DEADLINE.as_secs())]
    NoAnswer,
    /// The answer is a refusal.
    #[error("Cloud Storage refused ({status}): {reason}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// What it says, cut.
        reason: String,
    },
    /// The answer cannot be understood.
    #[error("Cloud Storage's answer cannot be understood: {0}")]
    Unreadable(String),
}

impl CallError {
    /// Whether the same call may succeed later: no answer, a rate limit, a fault of the server.
    pub fn is_transient(&self) -> bool {
        match self {
            CallError::Transport(_) | CallError::NoAnswer | CallError::Credentials(_) => true,
            CallError::Refused { status, .. } => matches!(status, 408 | 429 | 500..=599),
            CallError::Unreadable(_) => false,
        }
    }

    /// The status of a refusal.
    pub fn status(&self) -> Option<u16> {
        match self {
            CallError::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// A bucket of Cloud Storage.
#[derive(Debug, Clone)]
pub struct Client {
    bucket: String,
    prefix: String,
    endpoint: Url,
    /// None: requests are not signed.
    credentials: Option<GcpCredentialProvider>,
    http: reqwest::Client,
}

/// What was read of a bucket.
#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    /// Counts changes; a condition of the next one.
    pub(crate) metageneration: String,
    /// As it was sent, byte for byte.
    #[serde(default)]
    pub(crate) lifecycle: Option<Box<RawValue>>,
}

impl Client {
    /// `prefix`: the location's below the bucket. `endpoint`: None is Google's.
    pub(crate) fn new(
        bucket: &str,
        prefix: &str,
        endpoint: Option<&str>,
        credentials: Option<GcpCredentialProvider>,
    ) -> Option<Client> {
        let http = reqwest::Client::builder()
            .connect_timeout(DEADLINE / 2)
            .timeout(DEADLINE)
            .redirect(reqwest::redirect::Policy::none())
            .build();
        Some(Client {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
            endpoint: Url::parse(endpoint.unwrap_or(ENDPOINT)).ok()?,
            credentials,
            http: http.ok()?,
        })
    }

    /// The bucket's name.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The location's prefix: empty, or without slashes at its ends.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(crate) async fn metadata(&self) -> Result<Metadata, CallError> {
        let mut url = self.url(&[]);
        url.query_pairs_mut()
            .append_pair("fields", "lifecycle,metageneration");
        read(&self.call(Method::GET, url, None).await?)
    }

    /// Replaces the lifecycle, where the bucket is as it was when `metageneration` was read.
    pub(crate) async fn set_lifecycle(
        &self,
        lifecycle: &RawValue,
        metageneration: &str,
    ) -> Result<(), CallError> {
        let mut url = self.url(&[]);
        url.query_pairs_mut()
            .append_pair("ifMetagenerationMatch", metageneration)
            .append_pair("fields", "metageneration");
        let body = format!("{{\"lifecycle\":{}}}", lifecycle.get());
        self.call(Method::PATCH, url, Some(body)).await?;
        Ok(())
    }

    /// Which of these permissions this identity has on the bucket. Asks for none itself.
    ///
    /// # Errors
    /// Where the call does not succeed; 404 where there is no such bucket.
    pub async fn granted(&self, permissions: &[&str]) -> Result<Vec<String>, CallError> {
        #[derive(Deserialize)]
        struct Granted {
            /// Absent when there are none.
            #[serde(default)]
            permissions: Vec<String>,
        }
        let mut url = self.url(&["iam", "testPermissions"]);
        url.query_pairs_mut().extend_pairs(
            permissions
                .iter()
                .map(|permission| ("permissions", permission)),
        );
        let granted: Granted = read(&self.call(Method::GET, url, None).await?)?;
        Ok(granted.permissions)
    }

    /// Sets an object's custom time, from which `daysSinceCustomTime` counts. It can only go forward. Takes
    /// `storage.objects.get` and `update`.
    ///
    /// # Errors
    /// Where the call does not succeed; 404 where the object is gone.
    pub async fn set_custom_time(
        &self,
        path: &object_store::path::Path,
        time: SystemTime,
    ) -> Result<(), CallError> {
        let name = match self.prefix.as_str() {
            "" => path.to_string(),
            prefix => format!("{prefix}/{path}"),
        };
        let mut url = self.url(&["o", &name]);
        url.query_pairs_mut()
            .append_pair("fields", "metageneration");
        let time = chrono::DateTime::<chrono::Utc>::from(time);
        let time = time.to_rfc3339_opts(chrono::SecondsFormat::Millis, true);
        let body = format!("{{\"customTime\":\"{time}\"}}");
        self.call(Method::PATCH, url, Some(body)).await?;
        Ok(())
    }

    fn url(&self, rest: &[&str]) -> Url {
        let mut url = self.endpoint.clone();
        // Fails for addresses without a host only, and those were no endpoint.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty()
                .extend(["storage", "v1", "b", &self.bucket])
                .extend(rest);
        }
        url
    }

    async fn call(
        &self,
        method: Method,
        url: Url,
        body: Option<String>,
    ) -> Result<BytesMut, CallError> {
        let called = tokio::time::timeout(DEADLINE, self.call_without_end(method, url, body));
        called.await.unwrap_or(Err(CallError::NoAnswer))
    }

    async fn call_without_end(
        &self,
        method: Method,
        url: Url,
        body: Option<String>,
    ) -> Result<BytesMut, CallError> {
        let mut request = self.http.request(method, url);
        if let Some(credentials) = &self.credentials {
            let credential = credentials
                .get_credential()
                .await
                .map_err(CallError::Credentials)?;
            if !credential.bearer.is_empty() {
                request = request.bearer_auth(&credential.bearer);
            }
        }
        if let Some(body) = body {
            request = request
                .header("content-type", "application/json")
                .body(body);
        }
        let mut response = request.send().await.map_err(CallError::Transport)?;
        let status = response.status();
        let mut answer = BytesMut::new();
        while let Some(chunk) = response.chunk().await.map_err(CallError::Transport)? {
            if answer.len() + chunk.len() > ANSWER_BYTES {
                return Err(CallError::Unreadable(format!(
                    "more than {ANSWER_BYTES} bytes"
                )));
            }
            answer.extend_from_slice(&chunk);
        }
        if status.is_success() {
            Ok(answer)
        } else {
            Err(refused(status, &answer))
        }
    }
}

fn read<T: DeserializeOwned>(answer: &[u8]) -> Result<T, CallError> {
    serde_json::from_slice(answer).map_err(|error| CallError::Unreadable(error.to_string()))
}

fn refused(status: StatusCode, answer: &[u8]) -> CallError {
    #[derive(Deserialize)]
    struct Answer {
        error: Reason,
    }
    #[derive(Deserialize)]
    struct Reason {
        message: String,
    }
    let reason = match serde_json::from_slice::<Answer>(answer) {
        Ok(answer) => answer.error.message,
        Err(_) => String::from_utf8_lossy(answer).into_owned(),
    };
    let one_line = reason.split_whitespace().collect::<Vec<_>>().join(" ");
    CallError::Refused {
        status: status.as_u16(),
        reason: one_line.chars().take(REASON_BYTES).collect(),
    }
}
