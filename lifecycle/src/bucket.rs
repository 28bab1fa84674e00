//! A bucket: the place that compiled executables, claims, recorded programs and dumps live in.
//!
//! The way is [`Location::parse`] (pure; refuses what cannot be meant), then [`Bucket::open`] (makes the client; for
//! `file://` makes the folder), then, where a dead bucket must be known at once, [`Bucket::probe`]. The first two
//! fail for mistakes that the user has to correct ([`Error::is_usage`]); the last fails for the weather, and the
//! caller goes on without a bucket.

mod error;
mod folder;
mod gate;
pub mod layout;
mod location;
mod open;
mod own;
mod retries;

#[cfg(any(test, feature = "testing"))]
pub mod conformance;

pub use error::{Error, is_denied, is_no_object};
pub(crate) use folder::enter;
pub use gate::GATE_INTERVAL;
pub use location::Location;
pub use open::{Bucket, PROBE_DEADLINE};
pub use retries::Retries;
