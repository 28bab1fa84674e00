//! What can be wrong with a location, and with the bucket that it names.

use std::path::PathBuf;
use std::time::Duration;

/// A location that cannot be used. [`Error::is_usage`] tells a mistake in what the user wrote from a bucket that is not
/// well.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nothing was given.
    #[error(
        "the location is empty; give file:///path, gs://bucket/prefix, s3://bucket/prefix or memory://"
    )]
    Empty,
    /// The scheme is none of ours.
    #[error(
        "location '{location}' has the unknown scheme '{scheme}'; use file:///path, gs://bucket/prefix, \
         s3://bucket/prefix or memory://"
    )]
    UnknownScheme {
        /// As the user wrote it.
        location: String,
        /// What stands before the first ':'.
        scheme: String,
    },
    /// A path that does not begin with '/', with or without `file://`.
    #[error(
        "location '{location}' is a relative path; write it from the root, as in file:///path or /path"
    )]
    RelativePath {
        /// As the user wrote it.
        location: String,
    },
    /// A `file://` location with a host, a query or a fragment.
    #[error(
        "location '{location}' is no local path ({reason}); write file:///path with three slashes"
    )]
    NotLocal {
        /// As the user wrote it.
        location: String,
        /// What is in the way.
        reason: &'static str,
    },
    /// No bucket name after the scheme.
    #[error("location '{location}' names no bucket; write {scheme}://BUCKET/PREFIX")]
    EmptyBucket {
        /// As the user wrote it.
        location: String,
        /// `gs` or `s3`.
        scheme: &'static str,
    },
    /// A bucket name that no store accepts.
    #[error(
        "location '{location}' has the bucket name '{bucket}', and '{found}' cannot stand in one; use letters, digits, \
         '-', '_' and '.'"
    )]
    BadBucketName {
        /// As the user wrote it.
        location: String,
        /// The name.
        bucket: String,
        /// The first character that is not allowed.
        found: char,
    },
    /// A prefix with empty or dotted parts.
    #[error(
        "location '{location}' has a prefix that objects cannot have; leave out '//', '.' and '..' in it"
    )]
    BadPrefix {
        /// As the user wrote it.
        location: String,
        /// What `object_store` says of it.
        source: object_store::path::Error,
    },
    /// `memory://` followed by something.
    #[error(
        "location '{location}' has something after memory://, which has no parts; write memory://"
    )]
    MemoryWithPath {
        /// As the user wrote it.
        location: String,
    },
    /// The folder of a `file://` location is not there and cannot be made, or is no folder.
    #[error("folder '{}' cannot be used; make it, or give a location that this user may write to", path.display())]
    CannotCreate {
        /// The folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The client of a store cannot be made from the configuration and the environment.
    #[error(
        "no client for '{location}' can be made; look at the credentials and the store's environment variables"
    )]
    Client {
        /// The location.
        location: String,
        /// The store's reason.
        source: object_store::Error,
    },
    /// The store says that there is no such bucket.
    #[error("bucket of '{location}' does not exist; create it, or correct the name")]
    Missing {
        /// The location.
        location: String,
        /// The store's reason.
        source: object_store::Error,
    },
    /// The store says that we may not look into it.
    #[error(
        "bucket of '{location}' may not be listed; grant storage.objects.list (and get, create) to this identity"
    )]
    Denied {
        /// The location.
        location: String,
        /// The store's reason.
        source: object_store::Error,
    },
    /// No answer within the time allowed.
    #[error("bucket of '{location}' did not answer within {} s; look at the network and the endpoint", deadline.as_secs_f32())]
    NoAnswer {
        /// The location.
        location: String,
        /// How long was waited.
        deadline: Duration,
    },
    /// Any other failure of a request.
    #[error("bucket of '{location}' failed a request")]
    Request {
        /// The location.
        location: String,
        /// The store's reason.
        source: object_store::Error,
    },
}

impl Error {
    /// True where what the user wrote has to change (a worker refuses to start); false where the bucket is missing or
    /// unwell (one warning, and the job runs on memory).
    pub fn is_usage(&self) -> bool {
        !matches!(
            self,
            Error::Missing { .. }
                | Error::Denied { .. }
                | Error::NoAnswer { .. }
                | Error::Request { .. }
        )
    }
}

/// Whether a store refused for want of a right or of good credentials, so that asking again does not help. S3 deletes many
/// objects with one request, which succeeds, and refuses each of them in its answer's text.
pub fn is_denied(error: &object_store::Error) -> bool {
    use object_store::Error as Store;
    match error {
        Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => true,
        Store::Generic {
            store: "S3",
            source,
        } => source.to_string().contains("AccessDenied"),
        _ => false,
    }
}

/// Whether an error is one name's alone: in a folder anything may bear an object's name, and be no object (a FIFO, a
/// device, a symbolic link, a file where a folder is to be). It says nothing of other names.
pub fn is_no_object(error: &object_store::Error) -> bool {
    use super::folder::NoObject;
    matches!(error, object_store::Error::Generic { source, .. } if source.is::<NoObject>())
}
