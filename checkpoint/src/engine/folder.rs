//! Opening locations, and the folder of an array there.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use object_store::ObjectStore;
use object_store::path::Path;
use waystation_lifecycle::bucket::{Bucket, Location};

use super::Engine;
use crate::database::Database;
use crate::persistence::check_name;
use crate::{Error, Result};

/// Open buckets remembered. A job uses one or two; the bound is for clients that make up names.
const MAX_OPEN_BUCKETS: usize = 64;

/// Whether a location is to be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Read,
    Write,
}

/// An open location: a checkpoint's place in a store.
#[derive(Debug, Clone)]
pub(crate) struct Root {
    pub(super) store: Arc<dyn ObjectStore>,
    /// The checkpoint's prefix in the store.
    prefix: Path,
    /// The checkpoint, for messages.
    location: Arc<str>,
    /// Where the store is, if it is a folder of this machine.
    local: Option<PathBuf>,
}

/// The folder of one array in a checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct Folder {
    pub(crate) root: Root,
    pub(crate) files: Files,
    /// The array's path below the root.
    name: String,
}

/// What the files of an array are.
#[derive(Debug, Clone)]
pub(crate) enum Files {
    /// Objects of the store.
    Objects,
    /// Keys, each of one of these databases.
    Keys(Arc<[Arc<Database>]>),
}

impl Engine {
    /// Opens a location, as a client named it.
    pub(crate) async fn open_root(&self, location: &str, purpose: Purpose) -> Result<Root> {
        let parsed = Location::parse(location).map_err(|source| Error::Location {
            location: location.to_owned(),
            source: Box::new(source),
        })?;
        let (root, prefix) = split(parsed);
        if let Location::Memory = root {
            return Err(Error::UnusableLocation {
                location: location.to_owned(),
                reason: "is forgotten at once; use a file://, gs:// or s3:// location",
            });
        }
        if purpose == Purpose::Read
            && let Location::File(path) = &root
            && !is_dir(path.clone()).await
        {
            return Err(Error::UnusableLocation {
                location: location.to_owned(),
                reason: "is no directory of this host",
            });
        }
        let bucket = self.bucket(location, root).await?;
        Ok(Root::new(&bucket, prefix, location))
    }

    async fn bucket(&self, location: &str, root: Location) -> Result<Bucket> {
        // Folders are cheap to open and come and go; only clients of cloud stores are kept.
        let key = (!matches!(root, Location::File(_))).then(|| root.to_string());
        if let Some(key) = &key
            && let Some(bucket) = self.buckets().get(key)
        {
            return Ok(bucket.clone());
        }
        let retries = self.shared.counters.retries.clone();
        let open = move || Bucket::open_own_with(&root, std::env::vars_os(), &retries);
        let opened = tokio::task::spawn_blocking(open).await;
        let bucket = opened
            .map_err(|source| Error::CutOff {
                operation: "opening",
                object: "the checkpoint".to_owned(),
                location: location.to_owned(),
                source,
            })?
            .map_err(|source| Error::Location {
                location: location.to_owned(),
                source: Box::new(source),
            })?;
        if let Some(key) = key {
            let mut buckets = self.buckets();
            if buckets.len() >= MAX_OPEN_BUCKETS {
                buckets.clear();
            }
            buckets.insert(key, bucket.clone());
        }
        Ok(bucket)
    }

    fn buckets(&self) -> std::sync::MutexGuard<'_, HashMap<String, Bucket>> {
        // A map of clients is whole after any panic.
        self.shared
            .buckets
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Root {
    /// What is below `prefix` of an open bucket.
    pub(crate) fn new(bucket: &Bucket, prefix: Path, location: &str) -> Self {
        let local = match bucket.location() {
            Location::File(path) => Some(path.clone()),
            _ => None,
        };
        Self {
            local,
            store: Arc::clone(bucket.store()),
            prefix,
            location: location.into(),
        }
    }

    /// The checkpoint, for messages.
    pub(crate) fn location(&self) -> String {
        self.location.as_ref().to_owned()
    }

    /// Whether it is on this machine's file system.
    pub(crate) fn is_local(&self) -> bool {
        self.local.is_some()
    }

    /// The checkpoint's prefix in the store.
    pub(super) fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// The path in the store of an object of the checkpoint.
    pub(super) fn path(&self, object: &str) -> Result<Path> {
        // Taken as they are: names are not encoded, for Orbax and TensorStore do not encode them.
        let parsed = if self.prefix.as_ref().is_empty() {
            Path::parse(object)
        } else {
            Path::parse(format!("{}/{object}", self.prefix))
        };
        parsed.map_err(|source| {
            self.storage(
                "naming",
                object,
                object_store::Error::InvalidPath { source },
            )
        })
    }

    /// Refuses what is there but is no regular file: to open a FIFO is to wait for its writer, in a thread that nothing
    /// can call back. What is not there is for the store to say.
    pub(super) async fn check_regular(&self, object: &str) -> Result<()> {
        let Some(root) = &self.local else {
            return Ok(());
        };
        let path = root.join(self.path(object)?.as_ref());
        match tokio::fs::metadata(path).await {
            Ok(found) if !found.is_file() && !found.is_dir() => Err(Error::NoRegularFile {
                object: object.to_owned(),
                location: self.location(),
            }),
            _ => Ok(()),
        }
    }

    pub(super) fn stuck(&self, object: &str, after: Duration) -> Error {
        Error::Stuck {
            object: object.to_owned(),
            location: self.location(),
            after,
        }
    }

    pub(crate) fn storage(
        &self,
        operation: &'static str,
        object: &str,
        source: object_store::Error,
    ) -> Error {
        Error::Storage {
            operation,
            object: object.to_owned(),
            location: self.location(),
            source: Box::new(source),
        }
    }
}

impl Folder {
    /// The folder of array `name`, whose files are `files`.
    pub(crate) fn new(root: Root, name: &str, files: Files) -> Result<Self> {
        check_name(name).map_err(|reason| Error::BadRequest {
            array: name.to_owned(),
            reason: format!("the name {reason}"),
        })?;
        Ok(Self {
            root,
            files,
            name: name.to_owned(),
        })
    }

    /// The array's name.
    pub(crate) fn array(&self) -> String {
        self.name.clone()
    }

    /// The checkpoint, for messages.
    pub(crate) fn location(&self) -> String {
        self.root.location()
    }

    /// The path of a file of the array below the checkpoint: the object, or the key.
    pub(crate) fn object(&self, file: &str) -> String {
        if self.name.is_empty() {
            file.to_owned()
        } else {
            format!("{}/{file}", self.name)
        }
    }

    pub(crate) fn cut_off(
        &self,
        operation: &'static str,
        file: &str,
        source: tokio::task::JoinError,
    ) -> Error {
        Error::CutOff {
            operation,
            object: self.object(file),
            location: self.location(),
            source,
        }
    }
}

/// A location's store (a whole bucket, or a folder) and what is left of it as a prefix.
fn split(location: Location) -> (Location, Path) {
    let empty = String::new();
    match location {
        // The prefix has been parsed as a path by `Location`.
        Location::Gcs { bucket, prefix } => (
            Location::Gcs {
                bucket,
                prefix: empty,
            },
            Path::parse(prefix).unwrap_or_default(),
        ),
        Location::S3 { bucket, prefix } => (
            Location::S3 {
                bucket,
                prefix: empty,
            },
            Path::parse(prefix).unwrap_or_default(),
        ),
        other => (other, Path::default()),
    }
}

async fn is_dir(path: PathBuf) -> bool {
    tokio::fs::metadata(path)
        .await
        .is_ok_and(|metadata| metadata.is_dir())
}
