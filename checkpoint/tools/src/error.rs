//! What can go wrong, beside what `verify` finds, which is its result.

use waystation_checkpoint::zarr;
use waystation_lifecycle::bucket;

/// An error of this crate. The text names what failed and on what.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A location that cannot be used.
    #[error("location {location:?} cannot be used")]
    Location {
        /// As the user wrote it.
        location: String,
        /// Why.
        source: Box<bucket::Error>,
    },
    /// A location that holds nothing, or not what is needed.
    #[error("{location}: {reason}")]
    Unfit {
        /// The location.
        location: String,
        /// What is wrong with it, and often what to write instead.
        reason: String,
    },
    /// What was asked contradicts itself or the checkpoint.
    #[error("{0}")]
    Asked(String),
    /// A request to the store failed.
    #[error("{operation} {object} in {location} failed")]
    Storage {
        /// What was being done.
        operation: &'static str,
        /// The object.
        object: String,
        /// Where.
        location: String,
        /// The store's reason.
        source: Box<object_store::Error>,
    },
    /// A name that no object can have, or that leads out of the checkpoint.
    #[error("{name:?} in {location} is no name of an object")]
    Name {
        /// The name.
        name: String,
        /// Where it was found.
        location: String,
    },
    /// A file that cannot be read for what it should be.
    #[error("{object} in {location}: {reason}")]
    Malformed {
        /// The file.
        object: String,
        /// Where.
        location: String,
        /// What is wrong.
        reason: String,
    },
    /// An array, or a chunk of it, is not what its metadata says.
    #[error("array {array:?} in {location}: {object}")]
    Array {
        /// The array.
        array: String,
        /// The checkpoint.
        location: String,
        /// The metadata file or the chunk.
        object: String,
        /// What is wrong.
        source: zarr::Error,
    },
    /// A chunk is not there; it does not stand for zeros.
    #[error("array {array:?} in {location} is incomplete: there is no chunk {object}")]
    MissingChunk {
        /// The array.
        array: String,
        /// The checkpoint.
        location: String,
        /// The chunk.
        object: String,
    },
    /// An OCDBT database that cannot be read or written.
    #[error("the database in {location} cannot be used")]
    Database {
        /// The checkpoint.
        location: String,
        /// Why.
        source: waystation_ocdbt::Error,
    },
    /// More memory than is allowed.
    #[error(
        "{what} in {location} needs {bytes} bytes of memory, {allowed} are allowed; allow more with --memory"
    )]
    Memory {
        /// What needs it.
        what: String,
        /// The checkpoint.
        location: String,
        /// How much.
        bytes: u64,
        /// The bound.
        allowed: u64,
    },
    /// A file of this machine cannot be read or written.
    #[error("{operation} {path} failed")]
    File {
        /// What was being done.
        operation: &'static str,
        /// The file.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A task stopped unexpectedly.
    #[error("the work was cut off")]
    CutOff(#[from] tokio::task::JoinError),
}

impl Error {
    /// Whether another command line would help, rather than another checkpoint or store.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Location { source, .. } => source.is_usage(),
            Self::Asked(_) | Self::Unfit { .. } | Self::Memory { .. } => true,
            _ => false,
        }
    }

    /// The text with that of every source, on one line.
    #[must_use]
    pub fn report(&self) -> String {
        report(self)
    }
}

/// A text with that of every source, each thing said once.
pub(crate) fn report(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        source = error.source();
    }
    text.replace(char::is_control, " ")
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
