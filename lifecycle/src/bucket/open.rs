//! Opening a location.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, ObjectStoreExt, RetryConfig};

use super::folder::Folder;
use super::own::Own;
use super::retries::{Counting, Retries};
use super::{Error, Location, layout};
use crate::federation::Federation;
use crate::gcs;

/// How long [`Bucket::probe`] is given where the caller has no better figure: a start-up must not hang for a dead
/// bucket past 10 s, and this leaves the rest of start-up some of them.
pub const PROBE_DEADLINE: Duration = Duration::from_secs(8);

/// Time to a TCP and TLS connection. A store in the same cloud answers within milliseconds.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time without a byte from the store. The HTTP client counts the sending of a request's body in, so this also bounds an
/// upload: 2 GB at 20 MB/s get through. There is no limit on a whole download, and who needs an answer sooner (a cache
/// look-up) has a deadline of its own.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

/// Requests that fail with 429, 5xx or a broken connection are sent again this often, 100 ms to 2 s apart.
const RETRIES: usize = 5;

/// As [`RETRIES`], for what a job waits for: the time is what ends it.
const PATIENT_RETRIES: usize = 1000;

/// No request is sent again later than this after it was first sent: long enough for one that has timed out, and less
/// than the five minutes after which a token may have expired.
const RETRY_TIMEOUT: Duration = Duration::from_secs(240);

/// An open location. Clones share the client.
#[derive(Debug, Clone)]
pub struct Bucket {
    location: Location,
    store: Arc<dyn ObjectStore>,
    google: Option<gcs::Client>,
}

impl Bucket {
    /// Opens a location. Paths given to [`Bucket::store`] are relative to it, whatever the scheme.
    ///
    /// * `file://`: the folder is made where it is missing, now and not later. A write is complete, synced to the disk and
    ///   visible as a whole when it returns, as in a cloud store. Objects are files; a create that must not write over is a
    ///   link. Symbolic links below the location are not followed: see [`Bucket::open_own`].
    /// * `gs://`: credentials are found as Google's own tools find them (a service account file, application default
    ///   credentials, workload identity federation among them, the metadata server), and the `GOOGLE_*` variables that `object_store` knows are obeyed.
    ///   With `STORAGE_EMULATOR_HOST` requests go there, without these credentials.
    /// * `s3://`: credentials and endpoint from the `AWS_*` variables or the instance.
    /// * `memory://`: an empty store of its own at each call.
    ///
    /// Nothing is asked over the network. A few files may be read and a folder made, so call it while starting, or
    /// from a thread that may block.
    ///
    /// # Errors
    /// [`Error::CannotCreate`] and [`Error::Client`], both for the user to correct.
    pub fn open(location: &Location) -> Result<Bucket, Error> {
        // Not a setting of ours: what the cloud's own tools on this machine go by.
        Bucket::open_with(location, std::env::vars_os())
    }

    /// [`Bucket::open`] with other variables than those of the process's environment.
    ///
    /// # Errors
    /// As [`Bucket::open`].
    pub fn open_with(
        location: &Location,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Bucket, Error> {
        Bucket::open_for(location, variables, Use::default())
    }

    fn open_for(
        location: &Location,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
        is_for: Use,
    ) -> Result<Bucket, Error> {
        let variables = variables.into_iter().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        let client_error = |source| Error::Client {
            location: location.to_string(),
            source,
        };
        let mut google = None;
        let store: Arc<dyn ObjectStore> = match location {
            Location::File(path) => {
                let unusable = |source| Error::CannotCreate {
                    path: path.clone(),
                    source,
                };
                std::fs::create_dir_all(path).map_err(unusable)?;
                if !std::fs::metadata(path).map_err(unusable)?.is_dir() {
                    return Err(unusable(std::io::ErrorKind::NotADirectory.into()));
                }
                Arc::new(Folder::open(path.clone()).map_err(unusable)?)
            }
            Location::Memory => Arc::new(InMemory::new()),
            Location::Gcs { bucket, prefix } => {
                install_tls();
                let opened = gcs(bucket, variables, is_for).map_err(client_error)?;
                let (store, endpoint) = opened;
                let credentials = endpoint.signed.then(|| Arc::clone(store.credentials()));
                google = gcs::Client::new(bucket, prefix, endpoint.url.as_deref(), credentials);
                below(store, prefix)
            }
            Location::S3 { bucket, prefix } => {
                install_tls();
                below(s3(bucket, variables, is_for).map_err(client_error)?, prefix)
            }
        };
        Ok(Bucket {
            google,
            ..Bucket::from_store(location.clone(), store)
        })
    }

    /// [`Bucket::open`] for what nobody else writes to, and its owner may have spread over several disks (checkpoints): in
    /// a folder, symbolic links are followed.
    ///
    /// # Errors
    /// As [`Bucket::open`].
    pub fn open_own(location: &Location) -> Result<Bucket, Error> {
        Bucket::open_own_with(location, std::env::vars_os(), &Retries::default())
    }

    /// [`Bucket::open_own`] with other variables than those of the process's environment. Requests that fail are counted in
    /// `retries`. They are sent again for longer than those of [`Bucket::open`]: nobody goes on without them.
    ///
    /// # Errors
    /// As [`Bucket::open`].
    pub fn open_own_with(
        location: &Location,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
        retries: &Retries,
    ) -> Result<Bucket, Error> {
        let is_for = Use {
            retry: patient(),
            retries: retries.clone(),
        };
        let bucket = Bucket::open_for(location, variables, is_for)?;
        let Location::File(path) = location else {
            return Ok(bucket);
        };
        let store = Own::open(path).map_err(|source| Error::Client {
            location: location.to_string(),
            source,
        })?;
        Ok(bucket.with_store(Arc::new(store)))
    }

    /// A bucket over a store that is rooted at the location already: a layer around another store, or a test's.
    pub fn from_store(location: Location, store: Arc<dyn ObjectStore>) -> Bucket {
        Bucket {
            location,
            store,
            google: None,
        }
    }

    /// The same bucket, with a layer around its store.
    pub(super) fn with_store(self, store: Arc<dyn ObjectStore>) -> Bucket {
        Bucket { store, ..self }
    }

    /// Where it is.
    pub fn location(&self) -> &Location {
        &self.location
    }

    /// The objects, named relative to the location.
    pub fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// The calls of Cloud Storage that [`Bucket::store`] does not have. None for other schemes, and behind
    /// [`Bucket::from_store`].
    pub fn google(&self) -> Option<&gcs::Client> {
        self.google.as_ref()
    }

    /// Asks the store for the first name below the location, to learn whether it is there.
    ///
    /// An empty bucket is well. Cancel-safe.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Denied`], [`Error::NoAnswer`] or [`Error::Request`]: none of them the fault of a
    /// job, which is to warn once and go on without a bucket.
    pub async fn probe(&self, deadline: Duration) -> Result<(), Error> {
        let asked = async {
            match &self.location {
                // Listing a folder that is gone is an empty list to `object_store`, so look at the folder itself.
                Location::File(path) => self.probe_folder(path).await,
                _ => self.probe_store().await,
            }
        };
        tokio::time::timeout(deadline, asked)
            .await
            .unwrap_or_else(|_| {
                Err(Error::NoAnswer {
                    location: self.location.to_string(),
                    deadline,
                })
            })
    }

    async fn probe_folder(&self, path: &std::path::Path) -> Result<(), Error> {
        match tokio::fs::metadata(path).await {
            Ok(_) => Ok(()),
            Err(error) => Err(Error::Missing {
                location: self.location.to_string(),
                source: object_store::Error::NotFound {
                    path: path.display().to_string(),
                    source: error.into(),
                },
            }),
        }
    }

    async fn probe_store(&self) -> Result<(), Error> {
        use object_store::Error as Store;
        let Some(Err(failure)) = self.store.list(None).next().await else {
            return Ok(());
        };
        let location = self.location.to_string();
        // A failed list does not say why in a form that can be told apart. A read does; and of a bucket that cannot be
        // listed "not found" is said only where the bucket itself is not there.
        let read = self.store.get(&Path::from(layout::EXECUTABLES.path)).await;
        Err(match read {
            Err(source @ Store::NotFound { .. }) => Error::Missing { location, source },
            Err(source @ (Store::PermissionDenied { .. } | Store::Unauthenticated { .. })) => {
                Error::Denied { location, source }
            }
            Ok(_) | Err(_) => Error::Request {
                location,
                source: failure,
            },
        })
    }
}

/// What a client is for.
struct Use {
    retry: RetryConfig,
    retries: Retries,
}

impl Default for Use {
    fn default() -> Self {
        Self {
            retry: retry(),
            retries: Retries::default(),
        }
    }
}

/// Where requests go, and whether with credentials.
struct Endpoint {
    /// `None`: Google's.
    url: Option<String>,
    signed: bool,
}

/// Where gcloud leaves credentials, below the home directory.
const GCLOUD_FILE: &str = ".config/gcloud/application_default_credentials.json";

/// Where Google's client libraries find an emulator: a URL, or HOST:PORT.
const EMULATOR: &str = "STORAGE_EMULATOR_HOST";

/// Ours first, so that the variables win.
fn gcs(
    bucket: &str,
    variables: impl Iterator<Item = (String, String)>,
    is_for: Use,
) -> object_store::Result<(GoogleCloudStorage, Endpoint)> {
    let mut builder = GoogleCloudStorageBuilder::new()
        // The metadata server and emulators have no TLS; Google's own endpoint is never asked without it.
        .with_client_options(client_options().with_allow_http(true))
        .with_retry(is_for.retry)
        .with_http_connector(Counting(is_for.retries));
    let mut home = None;
    let mut emulator = None;
    for (name, value) in variables {
        match name.as_str() {
            "HOME" => {
                home = Some(PathBuf::from(value));
                continue;
            }
            EMULATOR => {
                emulator = Some(value).filter(|host| !host.is_empty());
                continue;
            }
            _ => {}
        }
        let name = name.to_ascii_lowercase();
        if !name.starts_with("google_") && name != "service_account" {
            continue;
        }
        // Many variables of that name are not the store's.
        if let Ok(key) = name.parse() {
            builder = builder.with_config(key, value);
        }
    }
    let has = |builder: &GoogleCloudStorageBuilder, key| builder.get_config_value(&key).is_some();
    if let Some(host) = emulator.filter(|_| !has(&builder, GoogleConfigKey::BaseUrl)) {
        let url = if host.contains("://") {
            host
        } else {
            format!("http://{host}")
        };
        builder = builder.with_config(GoogleConfigKey::BaseUrl, url.trim_end_matches('/'));
        // Nobody's credentials are an emulator's to see, unless the token is one for it. The store asks for some in any case.
        if !has(&builder, GoogleConfigKey::BearerToken) {
            builder = builder.with_config(GoogleConfigKey::BearerToken, "emulator");
        }
    }
    // What the store goes by where neither a token nor a service account is given; this type it does not know.
    let given = |key| builder.get_config_value(&key);
    let others = [
        GoogleConfigKey::BearerToken,
        GoogleConfigKey::ServiceAccount,
        GoogleConfigKey::ServiceAccountKey,
    ];
    if !others.into_iter().any(|key| given(key).is_some()) {
        let file = given(GoogleConfigKey::ApplicationCredentials).map(PathBuf::from);
        let file = file.or_else(|| Some(home?.join(GCLOUD_FILE)));
        let found = file.map(|file| Federation::read(&file));
        if let Some(federation) = found.transpose()?.flatten() {
            builder = builder.with_credentials(Arc::new(federation));
        }
    }
    let unsigned = builder.get_config_value(&GoogleConfigKey::SkipSignature);
    let endpoint = Endpoint {
        url: builder.get_config_value(&GoogleConfigKey::BaseUrl),
        signed: unsigned.as_deref() != Some("true"),
    };
    Ok((builder.with_bucket_name(bucket).build()?, endpoint))
}

/// As [`gcs`]. Plain HTTP takes `AWS_ALLOW_HTTP=true`.
fn s3(
    bucket: &str,
    variables: impl Iterator<Item = (String, String)>,
    is_for: Use,
) -> object_store::Result<impl ObjectStore> {
    let mut builder = AmazonS3Builder::new()
        .with_client_options(client_options())
        .with_retry(is_for.retry)
        .with_http_connector(Counting(is_for.retries));
    for (name, value) in variables {
        let name = name.to_ascii_lowercase();
        if !name.starts_with("aws_") {
            continue;
        }
        if let Ok(key) = name.parse() {
            builder = builder.with_config(key, value);
        }
    }
    builder.with_bucket_name(bucket).build()
}

fn below<S: ObjectStore>(store: S, prefix: &str) -> Arc<dyn ObjectStore> {
    if prefix.is_empty() {
        Arc::new(store)
    } else {
        Arc::new(PrefixStore::new(store, Path::from(prefix)))
    }
}

fn client_options() -> ClientOptions {
    ClientOptions::new()
        .with_connect_timeout(CONNECT_TIMEOUT)
        .with_read_timeout(READ_TIMEOUT)
        .with_timeout_disabled()
}

/// As [`retry`], up to 10 s apart, as long as [`RETRY_TIMEOUT`] lasts: some 30 times.
fn patient() -> RetryConfig {
    let mut patient = retry();
    patient.backoff.max_backoff = Duration::from_secs(10);
    patient.max_retries = PATIENT_RETRIES;
    patient
}

fn retry() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(2),
            base: 2.0,
        },
        max_retries: RETRIES,
        retry_timeout: RETRY_TIMEOUT,
    }
}

/// Makes `ring` the process's TLS provider. The HTTP client is built without one of its own, because its default needs
/// more to build than a C compiler.
fn install_tls() {
    // An error means that a provider is there already, which serves as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::conformance;

    #[tokio::test]
    async fn a_folder_is_made_and_conforms() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("a/b");
        let bucket = Bucket::open(&Location::File(path.clone())).unwrap();
        assert!(path.is_dir());
        bucket.probe(PROBE_DEADLINE).await.unwrap();
        conformance::run(&bucket).await;
        std::fs::remove_dir_all(&path).unwrap();
        let gone = bucket.probe(PROBE_DEADLINE).await.unwrap_err();
        assert!(matches!(gone, Error::Missing { .. }), "{gone}");
        assert!(!gone.is_usage());
    }

    #[tokio::test]
    async fn links_are_followed_in_what_is_ones_own() {
        let (temp, disk) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::os::unix::fs::symlink(disk.path(), temp.path().join("a")).unwrap();
        std::fs::write(disk.path().join("0"), b"x").unwrap();
        let (path, location) = (Path::from("a/0"), Location::File(temp.path().to_owned()));
        let own = Bucket::open_own(&location).unwrap();
        own.store().get(&path).await.unwrap();
        conformance::run(&own).await;
        let shared = Bucket::open(&location).unwrap();
        shared.store().get(&path).await.unwrap_err();
    }

    #[tokio::test]
    async fn memory_conforms_and_is_not_shared() {
        let bucket = Bucket::open(&Location::Memory).unwrap();
        bucket.probe(PROBE_DEADLINE).await.unwrap();
        conformance::run(&bucket).await;
    }

    #[tokio::test]
    async fn a_prefix_conforms() {
        let store = below(InMemory::new(), "team/a");
        let bucket = Bucket::from_store(Location::Memory, store);
        conformance::run(&bucket).await;
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_the_users_to_correct() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("file");
        std::fs::write(&file, b"x").unwrap();
        for path in [file.clone(), file.join("below")] {
            let error = Bucket::open(&Location::File(path.clone())).unwrap_err();
            assert!(matches!(error, Error::CannotCreate { .. }), "{error}");
            assert!(error.is_usage());
            assert!(error.to_string().contains(&path.display().to_string()));
        }
    }

    /// An S3 location at a local endpoint.
    fn at(endpoint: std::net::SocketAddr) -> Bucket {
        let endpoint = format!("http://{endpoint}");
        let variables = [
            ("AWS_ENDPOINT", endpoint.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ACCESS_KEY_ID", "x"),
            ("AWS_SECRET_ACCESS_KEY", "x"),
        ];
        let location = Location::parse("s3://b/p").unwrap();
        Bucket::open_with(&location, variables.map(|(a, b)| (a.into(), b.into()))).unwrap()
    }

    /// Answers every request with one status.
    fn answering(status: &'static str) -> std::net::SocketAddr {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let mut connection = connection.unwrap();
                let mut request = Vec::new();
                let mut byte = [0];
                while !request.ends_with(b"\r\n\r\n") && connection.read(&mut byte).unwrap() > 0 {
                    request.push(byte[0]);
                }
                let answer =
                    format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                // The client may have gone.
                let _ = connection.write_all(answer.as_bytes());
            }
        });
        address
    }

    #[tokio::test]
    async fn a_store_that_does_not_answer_is_given_up() {
        // It never accepts: the probe must end by its own deadline.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let bucket = at(listener.local_addr().unwrap());
        let error = bucket.probe(Duration::from_millis(200)).await.unwrap_err();
        assert!(matches!(error, Error::NoAnswer { .. }), "{error}");
        assert!(!error.is_usage());
        assert!(error.to_string().contains("s3://b/p"));
    }

    #[tokio::test]
    async fn a_store_that_refuses_is_told_apart() {
        let probe = async |status| {
            at(answering(status))
                .probe(PROBE_DEADLINE)
                .await
                .unwrap_err()
        };
        let missing = probe("404 Not Found").await;
        assert!(matches!(missing, Error::Missing { .. }), "{missing}");
        let denied = probe("403 Forbidden").await;
        assert!(matches!(denied, Error::Denied { .. }), "{denied}");
        let ill = probe("500 Internal Server Error").await;
        assert!(matches!(ill, Error::Request { .. }), "{ill}");
        for error in [missing, denied, ill] {
            assert!(!error.is_usage());
            assert!(error.to_string().contains("s3://b/p"));
        }
    }

    #[test]
    fn cloud_locations_open_without_a_network() {
        for text in ["gs://b/p", "s3://b/p", "gs://b"] {
            let location = Location::parse(text).unwrap();
            let bucket = Bucket::open(&location).unwrap();
            assert_eq!(bucket.location().to_string(), text);
        }
    }
}
