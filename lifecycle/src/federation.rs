//! Workload identity federation: tokens for a workload outside Google, which `object_store` does not know how to get.
//!
//! A credentials file of the type `external_account` (<https://google.aip.dev/auth/4117>) says where the workload's own token
//! is, in a file or behind an address, and where it is exchanged for one of Google's; and, where a service account is to be
//! impersonated, where that one is exchanged again. Tokens are renewed when half of their life is over, five minutes before its
//! end at the earliest; where that fails the old one is used for as long as it is good.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use bytes::BytesMut;
use object_store::CredentialProvider;
use object_store::gcp::GcpCredential;
use reqwest::{RequestBuilder, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tracing::warn;
use url::Url;

/// What a token is asked for.
const SCOPE: &str = "https://www.googleapis.com/auth/cloud-platform";

/// One request of an exchange, to the last byte.
const DEADLINE: Duration = Duration::from_secs(10);

/// A credentials file, a token and an answer are no larger than this.
const MOST_BYTES: usize = 256 << 10;

/// So long before its end a token is renewed, unless it lives shorter.
const EARLY: Duration = Duration::from_secs(300);

/// What a request may take to get where its token is looked at.
const ON_THE_WAY: Duration = Duration::from_secs(10);

/// No token is believed to live longer.
const LONGEST: Duration = Duration::from_secs(12 * 3600);

/// After a renewal that failed the token is kept for so long before the next attempt.
const AGAIN: Duration = Duration::from_secs(5);

/// For so long nobody else asks after an exchange that has failed: those who have waited for it would wait as long, one
/// after the other.
const PATIENCE: Duration = Duration::from_secs(1);

/// As much of a refusal as a message shows.
const REASON_BYTES: usize = 300;

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("credentials file '{}' of type external_account cannot be understood: {reason}", path.display())]
    File { path: PathBuf, reason: String },
    #[error("the workload's own token cannot be read from '{from}': {reason}")]
    Subject { from: String, reason: String },
    #[error("no answer of '{url}'")]
    Transport {
        url: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("'{url}' refuses a token ({status}): {reason}")]
    Refused {
        url: String,
        status: StatusCode,
        reason: String,
    },
    #[error("'{url}' answers something that is no token: {reason}")]
    Unreadable { url: String, reason: String },
    #[error("{said} (a moment ago)")]
    JustNow { said: String },
}

impl From<Error> for object_store::Error {
    fn from(error: Error) -> object_store::Error {
        object_store::Error::Generic {
            store: "GCS",
            source: Box::new(error),
        }
    }
}

/// The file, as far as it is used.
#[derive(Deserialize)]
struct File {
    audience: String,
    subject_token_type: String,
    token_url: String,
    credential_source: Value,
    #[serde(default)]
    service_account_impersonation_url: Option<String>,
    #[serde(default)]
    workforce_pool_user_project: Option<String>,
}

/// Where the workload's own token is.
#[derive(Debug, Clone, PartialEq)]
enum Place {
    File(PathBuf),
    Url(Url, Vec<(String, String)>),
}

/// A source of tokens.
pub(crate) struct Federation {
    audience: String,
    subject_token_type: String,
    token_url: Url,
    place: Place,
    /// The member of a JSON document that the token is in; `None`: the text is the token.
    field: Option<String>,
    impersonation_url: Option<Url>,
    user_project: Option<String>,
    http: reqwest::Client,
    known: Mutex<Known>,
}

// Shows no token.
impl std::fmt::Debug for Federation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Federation")
            .field("audience", &self.audience)
            .finish_non_exhaustive()
    }
}

/// What the last exchanges have come to.
#[derive(Default)]
struct Known {
    token: Option<Token>,
    /// When the last exchange failed, and what was said.
    failed: Option<(Instant, String)>,
}

struct Token {
    credential: Arc<GcpCredential>,
    renewed_from: Instant,
    ends: Instant,
}

/// What an exchange gives.
struct Granted {
    token: String,
    lifetime: Duration,
}

impl Federation {
    /// The source that a credentials file describes. `None`: the file is of another type, or is none.
    ///
    /// # Errors
    /// [`Error::File`] for what cannot be meant, or is not built.
    pub(crate) fn read(path: &Path) -> Result<Option<Federation>, Error> {
        use std::io::Read as _;
        let mut text = Vec::new();
        // Whoever reads it next says what ails it.
        let Ok(file) = std::fs::File::open(path) else {
            return Ok(None);
        };
        let read = file.take(MOST_BYTES as u64 + 1).read_to_end(&mut text);
        let parsed = read.ok().and_then(|_| serde_json::from_slice(&text).ok());
        let Some(parsed): Option<Value> = parsed else {
            return Ok(None);
        };
        if parsed.get("type").and_then(Value::as_str) != Some("external_account") {
            return Ok(None);
        }
        Federation::of(parsed)
            .map(Some)
            .map_err(|reason| Error::File {
                path: path.to_owned(),
                reason,
            })
    }

    fn of(parsed: Value) -> Result<Federation, String> {
        let file: File = serde_json::from_value(parsed).map_err(|error| error.to_string())?;
        let (place, field) = source(&file.credential_source)?;
        let token_url = private(&file.token_url)?;
        let impersonation_url = file.service_account_impersonation_url;
        let impersonation_url = impersonation_url.map(|url| private(&url)).transpose()?;
        let http = reqwest::Client::builder()
            .connect_timeout(DEADLINE / 2)
            .timeout(DEADLINE)
            .redirect(reqwest::redirect::Policy::none())
            .build();
        Ok(Federation {
            audience: file.audience,
            subject_token_type: file.subject_token_type,
            token_url,
            place,
            field,
            impersonation_url,
            user_project: file.workforce_pool_user_project,
            http: http.map_err(|error| error.to_string())?,
            known: Mutex::default(),
        })
    }

    async fn granted(&self) -> Result<Granted, Error> {
        let subject = self.subject().await?;
        let exchanged = self.exchange(&subject).await?;
        match &self.impersonation_url {
            None => Ok(exchanged),
            Some(url) => self.impersonate(url, &exchanged.token).await,
        }
    }

    /// The workload's own token, which whoever looks after it renews: read anew each time.
    async fn subject(&self) -> Result<String, Error> {
        let failed = |from: String, reason: String| Error::Subject { from, reason };
        let (from, text) = match &self.place {
            Place::File(path) => {
                let from = path.display().to_string();
                let read = read_file(path).await;
                let text = read.map_err(|error| failed(from.clone(), error.to_string()))?;
                (from, text)
            }
            Place::Url(url, headers) => {
                let mut request = self.http.get(url.clone());
                for (name, value) in headers {
                    request = request.header(name, value);
                }
                (url.to_string(), answer(url, request).await?)
            }
        };
        let token = match &self.field {
            None => String::from_utf8(text).ok(),
            Some(field) => serde_json::from_slice::<Value>(&text)
                .ok()
                .and_then(|parsed| Some(parsed.get(field)?.as_str()?.to_owned())),
        };
        let token = token.map(|token| token.trim().to_owned());
        token.filter(|token| !token.is_empty()).ok_or_else(|| {
            let what = self.field.as_deref().unwrap_or("text");
            failed(from, format!("there is no {what} in it"))
        })
    }

    async fn exchange(&self, subject: &str) -> Result<Granted, Error> {
        #[derive(Deserialize)]
        struct Answer {
            access_token: String,
            expires_in: u64,
        }
        let request = self.http.post(self.token_url.clone());
        let request = request
            .header("content-type", "application/x-www-form-urlencoded")
            .body(self.form(subject));
        let answer: Answer = parsed(&self.token_url, &answer(&self.token_url, request).await?)?;
        Ok(Granted {
            token: answer.access_token,
            lifetime: Duration::from_secs(answer.expires_in),
        })
    }

    fn form(&self, subject: &str) -> String {
        let mut form = url::form_urlencoded::Serializer::new(String::new());
        form.extend_pairs([
            (
                "grant_type",
                "urn:ietf:params:oauth:grant-type:token-exchange",
            ),
            (
                "requested_token_type",
                "urn:ietf:params:oauth:token-type:access_token",
            ),
            ("audience", &self.audience),
            ("scope", SCOPE),
            ("subject_token_type", &self.subject_token_type),
            ("subject_token", subject),
        ]);
        if let Some(project) = &self.user_project {
            let options = json!({"userProject": project}).to_string();
            form.append_pair("options", &options);
        }
        form.finish()
    }

    async fn impersonate(&self, url: &Url, token: &str) -> Result<Granted, Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Answer {
            access_token: String,
            expire_time: chrono::DateTime<chrono::Utc>,
        }
        let request = self.http.post(url.clone());
        let request = request
            .bearer_auth(token)
            .header("content-type", "application/json")
            .body(json!({"scope": [SCOPE]}).to_string());
        let answer: Answer = parsed(url, &answer(url, request).await?)?;
        let ends = SystemTime::from(answer.expire_time);
        Ok(Granted {
            token: answer.access_token,
            lifetime: ends.duration_since(SystemTime::now()).unwrap_or_default(),
        })
    }
}

#[async_trait]
impl CredentialProvider for Federation {
    type Credential = GcpCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<GcpCredential>> {
        // One exchange at a time; the others wait for it.
        let mut known = self.known.lock().await;
        if let Some(token) = &known.token
            && Instant::now() < token.renewed_from
        {
            return Ok(Arc::clone(&token.credential));
        }
        if let Some((when, said)) = &known.failed
            && when.elapsed() < PATIENCE
        {
            let said = said.clone();
            return Err(Error::JustNow { said }.into());
        }
        // From before the request: the token may be as old as that.
        let asked = Instant::now();
        match self.granted().await {
            Ok(granted) => {
                let token = Token::of(granted, asked);
                let credential = Arc::clone(&token.credential);
                *known = Known {
                    token: Some(token),
                    failed: None,
                };
                Ok(credential)
            }
            Err(error) => match &mut known.token {
                Some(token) if Instant::now() < token.ends => {
                    warn!(%error, "a token is not renewed, the old one is used");
                    token.renewed_from = (Instant::now() + AGAIN).min(token.ends);
                    Ok(Arc::clone(&token.credential))
                }
                _ => {
                    known.failed = Some((Instant::now(), error.to_string()));
                    Err(error.into())
                }
            },
        }
    }
}

impl Token {
    fn of(granted: Granted, asked: Instant) -> Token {
        let lifetime = granted.lifetime.min(LONGEST);
        Token {
            credential: Arc::new(GcpCredential {
                bearer: granted.token,
            }),
            renewed_from: asked + (lifetime - EARLY.min(lifetime / 2)),
            ends: asked + (lifetime - ON_THE_WAY.min(lifetime / 10)),
        }
    }
}

/// Place and format of the workload's own token.
fn source(source: &Value) -> Result<(Place, Option<String>), String> {
    let text = |value: &Value, name: &str| Some(value.get(name)?.as_str()?.to_owned());
    let place = if let Some(file) = text(source, "file") {
        Place::File(PathBuf::from(file))
    } else if source.get("environment_id").is_some() {
        return Err("credential_source of AWS is not built, only file and url are".to_owned());
    } else if let Some(url) = text(source, "url") {
        let url = Url::parse(&url).map_err(|error| format!("credential_source.url: {error}"))?;
        let headers = source.get("headers").and_then(Value::as_object);
        let headers = headers.into_iter().flatten();
        let headers =
            headers.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())));
        Place::Url(url, headers.collect())
    } else {
        return Err("credential_source is neither file nor url, and no other is built".to_owned());
    };
    let Some(format) = source.get("format") else {
        return Ok((place, None));
    };
    match text(format, "type").as_deref() {
        None | Some("text") => Ok((place, None)),
        Some("json") => match text(format, "subject_token_field_name") {
            Some(field) => Ok((place, Some(field))),
            None => Err("credential_source.format names no subject_token_field_name".to_owned()),
        },
        Some(other) => Err(format!("credential_source.format.type is '{other}'")),
    }
}

/// An address on the way to which nobody can read along.
fn private(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| format!("'{text}': {error}"))?;
    let loopback = match url.host() {
        Some(url::Host::Ipv4(address)) => address.is_loopback(),
        Some(url::Host::Ipv6(address)) => address.is_loopback(),
        Some(url::Host::Domain(name)) => name == "localhost",
        None => false,
    };
    if url.scheme() == "https" || loopback {
        Ok(url)
    } else {
        Err(format!("tokens would go to '{url}' in the clear"))
    }
}

async fn read_file(path: &Path) -> std::io::Result<Vec<u8>> {
    use tokio::io::AsyncReadExt as _;
    let mut text = Vec::new();
    let file = tokio::fs::File::open(path).await?;
    file.take(MOST_BYTES as u64).read_to_end(&mut text).await?;
    Ok(text)
}

async fn answer(url: &Url, request: RequestBuilder) -> Result<Vec<u8>, Error> {
    let url = url.to_string();
    let transport = |source| Error::Transport {
        url: url.clone(),
        // It names the address once more.
        source: reqwest::Error::without_url(source),
    };
    let mut response = request.send().await.map_err(transport)?;
    let status = response.status();
    let mut text = BytesMut::new();
    while let Some(chunk) = response.chunk().await.map_err(transport)? {
        if text.len() + chunk.len() > MOST_BYTES {
            let reason = format!("more than {MOST_BYTES} bytes");
            return Err(Error::Unreadable { url, reason });
        }
        text.extend_from_slice(&chunk);
    }
    if status.is_success() {
        return Ok(text.to_vec());
    }
    let said = String::from_utf8_lossy(&text);
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    let reason = said.chars().take(REASON_BYTES).collect();
    Err(Error::Refused {
        url,
        status,
        reason,
    })
}

fn parsed<T: serde::de::DeserializeOwned>(url: &Url, text: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(text).map_err(|error| Error::Unreadable {
        url: url.to_string(),
        // Where, and not what: it may hold a token.
        reason: format!("line {}, column {}", error.line(), error.column()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(source: Value) -> Value {
        json!({
            "type": "external_account",
            "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": "https://sts.googleapis.com/v1/token",
            "credential_source": source,
        })
    }

    #[test]
    fn the_documented_forms_are_understood() {
        // Whoever has done so before has done as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let text = Federation::of(file(json!({"file": "/token"}))).unwrap();
        assert_eq!(text.place, Place::File("/token".into()));
        assert_eq!(text.field, None);
        let from_url = Federation::of(file(json!({
            "url": "http://169.254.169.254/token", "headers": {"Metadata": "True"},
            "format": {"type": "json", "subject_token_field_name": "access_token"},
        })));
        let from_url = from_url.unwrap();
        let headers = vec![("Metadata".to_owned(), "True".to_owned())];
        let url = Url::parse("http://169.254.169.254/token").unwrap();
        assert_eq!(from_url.place, Place::Url(url, headers));
        assert_eq!(from_url.field.as_deref(), Some("access_token"));
        assert!(!format!("{from_url:?}").contains("169"));
    }

    #[test]
    fn what_is_not_built_or_not_safe_is_named() {
        for (source, words) in [
            (json!({"environment_id": "aws1", "url": "http://x"}), "AWS"),
            (
                json!({"executable": {"command": "x"}}),
                "neither file nor url",
            ),
            (
                json!({"file": "/t", "format": {"type": "json"}}),
                "subject_token_field_name",
            ),
            (json!({"file": "/t", "format": {"type": "yaml"}}), "yaml"),
        ] {
            let refused = Federation::of(file(source)).unwrap_err();
            assert!(refused.contains(words), "{refused}");
        }
        let mut plain = file(json!({"file": "/token"}));
        plain["token_url"] = json!("http://sts.example/v1/token");
        assert!(Federation::of(plain).unwrap_err().contains("in the clear"));
        let mut bare = file(json!({"file": "/token"}));
        bare.as_object_mut().unwrap().remove("audience");
        assert!(Federation::of(bare).unwrap_err().contains("audience"));
    }
}
