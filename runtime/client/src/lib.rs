//! A small IFRT proxy client: the wire protocol and nothing above it.
//!
//! Real clients are jaxlib's (C++). This one scripts single requests, so that tests and probes can say things that jaxlib
//! never would: handles nobody knows, sizes that lie, data before its request. [`Client`] is the session; [`request`]
//! builds the requests that need more than a line.

mod codec;
mod error;
pub mod request;
mod session;

pub use error::Error;
pub use session::{Client, Pending};
pub use waystation_proto::xla::ifrt::proxy::{ifrt_request::Request, ifrt_response::Response};
