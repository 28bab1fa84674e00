//! What can go wrong, and the status code that each case has for the client.

use std::io::ErrorKind;
use std::time::Duration;

use waystation_proto::tensorflow::error::Code;
use waystation_proto::xla::PrimitiveType;

use crate::zarr;

/// An error of this crate. The text names what failed and on what; [`Error::code`] is what a client is told.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bytes or the fields of a sharding contradict themselves or the array they are for.
    #[error("malformed sharding: {0}")]
    MalformedSharding(String),
    /// A sharding that is well formed but does not say which piece of an array a device holds.
    #[error(
        "a sharding of kind {kind} cannot be laid out over devices; use a tiled or a replicated sharding"
    )]
    UnsupportedSharding {
        /// The kind as XLA names it (`TUPLE`, `MANUAL`, ...).
        kind: &'static str,
    },
    /// A plugin program that is no persistence program.
    #[error("Bad PluginProgram: {request:?} is not served")]
    UnsupportedPluginProgram {
        /// The name of the request in the program (`profileRequest`, `reshardRequest`, ...).
        request: String,
    },
    /// A persistence program that is malformed.
    #[error("Bad PluginProgram: {reason}")]
    BadPluginProgram {
        /// Which request and which item of it, and what is wrong.
        reason: String,
    },
    /// An element type that TensorStore has no name for.
    #[error("array {array:?} of {} cannot be stored by TensorStore, hence not by Orbax; cast it before saving", dtype.as_str_name())]
    UnstorableDType {
        /// The name of the array.
        array: String,
        /// Its element type.
        dtype: PrimitiveType,
    },
    /// A request about an array that contradicts itself.
    #[error("array {array:?}: {reason}")]
    BadRequest {
        /// The name of the array.
        array: String,
        /// What does not fit.
        reason: String,
    },
    /// A location that cannot be used.
    #[error("checkpoint location {location:?} cannot be used")]
    Location {
        /// As the client named it.
        location: String,
        /// Why.
        source: Box<waystation_lifecycle::bucket::Error>,
    },
    /// A location that would not hold what is written.
    #[error("checkpoint location {location:?} {reason}")]
    UnusableLocation {
        /// As the client named it.
        location: String,
        /// Why.
        reason: &'static str,
    },
    /// There is no array of that name.
    #[error("array {array:?} is not in checkpoint {location}: {looked_for}")]
    MissingArray {
        /// The name of the array.
        array: String,
        /// The checkpoint.
        location: String,
        /// What was looked for, and where.
        looked_for: String,
    },
    /// An OCDBT database cannot be read, or refers to what is not there.
    #[error("the OCDBT database {database} in checkpoint {location} is damaged or not read here")]
    Database {
        /// The path of its manifest below the checkpoint.
        database: String,
        /// The checkpoint.
        location: String,
        /// Why.
        source: Box<waystation_ocdbt::Error>,
    },
    /// A file that is larger than any such file is.
    #[error("{object} in {location} has {size} bytes, at most {most} are read")]
    Oversized {
        /// The object.
        object: String,
        /// The checkpoint.
        location: String,
        /// Its size.
        size: u64,
        /// The most that is read.
        most: u64,
    },
    /// More of something than any checkpoint has.
    #[error("there are more than {most} {what} in {location}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// The checkpoint.
        location: String,
        /// The most taken.
        most: usize,
    },
    /// The metadata of an array cannot be read.
    #[error("array {array:?} in checkpoint {location} has unreadable metadata ({object})")]
    Metadata {
        /// The name of the array.
        array: String,
        /// The checkpoint.
        location: String,
        /// The metadata file.
        object: String,
        /// Why.
        source: zarr::Error,
    },
    /// What is stored has another shape than what is asked for.
    #[error(
        "array {array:?} in checkpoint {location} has shape {stored:?}, asked for is {asked:?}"
    )]
    ShapeMismatch {
        /// The name of the array.
        array: String,
        /// The checkpoint.
        location: String,
        /// The shape in the metadata.
        stored: Vec<i64>,
        /// The shape in the request.
        asked: Vec<i64>,
    },
    /// What is stored has another element type than what is asked for.
    #[error("array {array:?} in checkpoint {location} is of {}, asked for is {}", stored.as_str_name(), asked.as_str_name())]
    DTypeMismatch {
        /// The name of the array.
        array: String,
        /// The checkpoint.
        location: String,
        /// The element type in the metadata.
        stored: PrimitiveType,
        /// The element type in the request.
        asked: PrimitiveType,
    },
    /// A chunk is not there. It does not stand for zeros: Orbax writes every chunk.
    #[error("array {array:?} in checkpoint {location} is incomplete: there is no chunk {object}")]
    MissingChunk {
        /// The name of the array.
        array: String,
        /// The checkpoint.
        location: String,
        /// The object that was looked for, or that is a shard without it.
        object: String,
    },
    /// A chunk does not hold what its array's metadata promises.
    #[error("array {array:?} in checkpoint {location} has the damaged chunk {object}")]
    CorruptChunk {
        /// The name of the array.
        array: String,
        /// The checkpoint.
        location: String,
        /// The object, and in a shard of several chunks which of them.
        object: String,
        /// What is wrong with it.
        source: zarr::Error,
    },
    /// More memory than there is or than is allowed.
    #[error(
        "array {array:?} needs {bytes} bytes of host memory for {purpose}, which is not to be had"
    )]
    OutOfMemory {
        /// The name of the array.
        array: String,
        /// How much was asked for.
        bytes: usize,
        /// What for.
        purpose: &'static str,
    },
    /// A request to the store failed, after such retries as it allows.
    #[error("{operation} {object} in {location} failed")]
    Storage {
        /// `reading`, `writing` and the like.
        operation: &'static str,
        /// The object.
        object: String,
        /// The checkpoint.
        location: String,
        /// The store's reason.
        source: Box<object_store::Error>,
    },
    /// The store was too slow for the time the client gives.
    #[error("{operation} took longer than the {} s that the client waits", after.as_secs_f64())]
    TimedOut {
        /// What was being done.
        operation: &'static str,
        /// The time given.
        after: Duration,
    },
    /// One object took longer to come than any should.
    #[error("reading {object} in {location} was given up after {} s", after.as_secs_f64())]
    Stuck {
        /// The object.
        object: String,
        /// The checkpoint.
        location: String,
        /// The time given.
        after: Duration,
    },
    /// Processes that save together do not see the same folder.
    #[error("{location} is not shared: {here} has not seen there within {} s what was left by {missing}", after.as_secs_f64())]
    NotShared {
        /// The checkpoint.
        location: String,
        /// The process that looked.
        here: String,
        /// Those whose files it does not see.
        missing: String,
        /// How long it looked.
        after: Duration,
    },
    /// A pipe, socket or device lies where an object should be.
    #[error("{object} in {location} is no regular file")]
    NoRegularFile {
        /// The object.
        object: String,
        /// The checkpoint.
        location: String,
    },
    /// A part of the work stopped unexpectedly, by a bug or because the process is ending.
    #[error("{operation} {object} in {location} was cut off")]
    CutOff {
        /// What was being done.
        operation: &'static str,
        /// The object.
        object: String,
        /// The checkpoint.
        location: String,
        /// The reason.
        source: tokio::task::JoinError,
    },
}

impl Error {
    /// The absl status code a client is told. Never `NOT_FOUND`, `INTERNAL`, `DEADLINE_EXCEEDED` or `DATA_LOSS`: clients
    /// of Pathways take those for a lost slice.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::MalformedSharding(_)
            | Self::BadPluginProgram { .. }
            | Self::UnstorableDType { .. }
            | Self::BadRequest { .. }
            | Self::UnusableLocation { .. } => Code::InvalidArgument,
            Self::UnsupportedSharding { .. }
            | Self::UnsupportedPluginProgram { .. }
            | Self::Metadata {
                source: zarr::Error::Unsupported(_),
                ..
            } => Code::Unimplemented,
            Self::MissingArray { .. }
            | Self::Database { .. }
            | Self::Oversized { .. }
            | Self::TooMany { .. }
            | Self::Metadata { .. }
            | Self::ShapeMismatch { .. }
            | Self::DTypeMismatch { .. }
            | Self::MissingChunk { .. }
            | Self::NoRegularFile { .. }
            | Self::NotShared { .. }
            | Self::CorruptChunk { .. } => Code::FailedPrecondition,
            Self::OutOfMemory { .. } => Code::ResourceExhausted,
            Self::Location { source, .. } if source.is_usage() => Code::InvalidArgument,
            Self::Location { .. } | Self::TimedOut { .. } | Self::Stuck { .. } => Code::Unavailable,
            Self::Storage { source, .. } => storage_code(source),
            Self::CutOff { .. } => Code::Aborted,
        }
    }

    /// The text with that of every source, for where only one line can be shown.
    #[must_use]
    pub fn report(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            let next = error.to_string();
            // Some sources print their own source too.
            if !text.ends_with(&next) {
                text.push_str(": ");
                text.push_str(&next);
            }
            source = error.source();
        }
        text
    }
}

/// What a failed request to a store means for the client. A missing object is not known here to be a missing chunk: it is
/// what a writer meets when the bucket is gone.
fn storage_code(error: &object_store::Error) -> Code {
    match error {
        object_store::Error::NotFound { .. } => return Code::FailedPrecondition,
        object_store::Error::PermissionDenied { .. } => return Code::PermissionDenied,
        object_store::Error::Unauthenticated { .. } => return Code::Unauthenticated,
        object_store::Error::InvalidPath { .. } => return Code::InvalidArgument,
        _ => {}
    }
    // A local store wraps what the system said.
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return match io.kind() {
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                    Code::ResourceExhausted
                }
                ErrorKind::PermissionDenied => Code::PermissionDenied,
                ErrorKind::NotADirectory
                | ErrorKind::IsADirectory
                | ErrorKind::ReadOnlyFilesystem => Code::FailedPrecondition,
                ErrorKind::InvalidFilename => Code::InvalidArgument,
                _ => Code::Unavailable,
            };
        }
        source = error.source();
    }
    Code::Unavailable
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(source: object_store::Error) -> Error {
        Error::Storage {
            operation: "writing",
            object: "w/0.0".to_owned(),
            location: "/c".to_owned(),
            source: Box::new(source),
        }
    }

    fn system(kind: ErrorKind) -> Error {
        storage(object_store::Error::Generic {
            store: "LocalFileSystem",
            source: Box::new(std::io::Error::from(kind)),
        })
    }

    #[test]
    fn what_the_system_says_decides_the_code() {
        for (kind, code) in [
            (ErrorKind::StorageFull, Code::ResourceExhausted),
            (ErrorKind::QuotaExceeded, Code::ResourceExhausted),
            (ErrorKind::PermissionDenied, Code::PermissionDenied),
            (ErrorKind::ReadOnlyFilesystem, Code::FailedPrecondition),
            (ErrorKind::NotADirectory, Code::FailedPrecondition),
            (ErrorKind::InvalidFilename, Code::InvalidArgument),
            (ErrorKind::ConnectionReset, Code::Unavailable),
            (ErrorKind::TimedOut, Code::Unavailable),
        ] {
            assert_eq!(system(kind).code(), code, "{kind:?}");
        }
        let denied = object_store::Error::PermissionDenied {
            path: "w".to_owned(),
            source: "no".into(),
        };
        assert_eq!(storage(denied).code(), Code::PermissionDenied);
        let gone = object_store::Error::NotFound {
            path: "w".to_owned(),
            source: "no".into(),
        };
        assert_eq!(storage(gone).code(), Code::FailedPrecondition);
    }

    #[test]
    fn a_report_says_each_thing_once() {
        let report = system(ErrorKind::StorageFull).report();
        assert!(
            report.starts_with("writing w/0.0 in /c failed: "),
            "{report}"
        );
        assert_eq!(report.matches("no storage space").count(), 1, "{report}");
    }
}
