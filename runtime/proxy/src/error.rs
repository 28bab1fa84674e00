//! Errors that end a proxy. What goes wrong in a request is a status ([`crate::status`]), not one of these.

/// Why a proxy could not start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A socket given by the caller could not be used.
    #[error("could not use the listening socket")]
    Listener(#[source] std::io::Error),
    /// The gRPC server ended with an error.
    #[error("the gRPC server stopped")]
    Server(#[source] tonic::transport::Error),
    /// The plugin does not take the compiler flags that this proxy was given.
    #[error("{0}")]
    Flags(String),
    /// The status page's server ended with an error.
    #[error("the status page stopped")]
    StatusPage(#[source] std::io::Error),
    /// The system gives no random numbers.
    #[error("the system gives no random numbers")]
    Random(#[source] std::io::Error),
}
