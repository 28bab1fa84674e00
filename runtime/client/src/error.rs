//! What can go wrong between a client and its server.

use waystation_proto::tensorflow::StatusProto;

/// Why a request has no answer, or a bad one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server could not be reached.
    #[error("could not connect to {address}")]
    Connect {
        /// The server's `host:port`.
        address: String,
        /// What the transport says.
        #[source]
        source: tonic::transport::Error,
    },
    /// A call outside the session failed, or the session could not be opened.
    #[error("the server refused {call}: {} ({:?})", status.message(), status.code())]
    Call {
        /// The gRPC method.
        call: &'static str,
        /// The server's status.
        status: Box<tonic::Status>,
    },
    /// The request failed.
    #[error("request failed with code {}: {}", .0.code, .0.message)]
    Failed(Box<StatusProto>),
    /// The session's stream ended before the answer came.
    #[error("the session ended before the answer came")]
    SessionEnded,
    /// The answer has another type than the request asks for.
    #[error("the server answered with another kind of reply")]
    WrongReply,
}

impl Error {
    /// The absl code of a failed request or call; `None` where the failure has none.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Failed(status) => Some(status.code),
            Self::Call { status, .. } => Some(status.code() as i32),
            _ => None,
        }
    }
}
