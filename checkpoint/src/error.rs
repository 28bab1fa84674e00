//! What can go wrong, and the status code that each case has for the client.

use waystation_proto::tensorflow::error::Code;

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
}

impl Error {
    /// The absl status code a client is told. Never `NOT_FOUND`, `INTERNAL`, `DEADLINE_EXCEEDED` or `DATA_LOSS`: clients
    /// of Pathways take those for a lost slice.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::MalformedSharding(_) | Self::BadPluginProgram { .. } => Code::InvalidArgument,
            Self::UnsupportedSharding { .. } | Self::UnsupportedPluginProgram { .. } => {
                Code::Unimplemented
            }
        }
    }
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
