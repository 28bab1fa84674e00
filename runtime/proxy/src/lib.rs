//! The IFRT proxy server: what a JAX process talks to.
//!
//! One request's way: `front` (gRPC) -> `session` (one client: handles, order, asynchronous replies) ->
//! `link` (the op stream to a worker). The proxy holds metadata only (D4): shapes, shardings and which worker holds
//! which shard. Bytes pass through in frames (`bulk`): host buffers that wait for their array are kept up to a memory bound
//! and beyond it in an unlinked file (`host_buffers`), fetches are relayed and never kept.

mod array;
mod bulk;
mod cluster;
mod config;
mod convert;
mod counters;
mod error;
mod flags;
mod front;
mod host_buffers;
mod large_transfers;
mod layout;
mod link;
mod local;
mod lock;
mod lookup;
mod metrics;
mod needs;
mod quiet;
mod serve;
mod session;
mod status;
mod status_page;
mod strings;
mod until;
mod version;

pub use config::{Config, DEFAULT_HOST_BUFFER_MEMORY_BYTES, DEFAULT_MAX_SESSIONS, Recording};
pub use error::Error;
pub use serve::serve;
pub use version::JAXLIB;
