//! What a compile takes and what its result says: the client's options made fit for this worker's plugin, and the description
//! of a compiled program that goes back to the proxy and into the cache entry.
//!
//! Pure functions over bytes; nothing here calls the plugin.

mod cost;
mod describe;
mod dump;
mod error;
mod flags;
mod known;
mod options;
mod sharding;

pub use describe::{PluginFacts, describe, describe_unscheduled};
pub use dump::{Dump, with_dump, without_dump};
pub use error::Error;
pub use flags::Defaults;
pub(crate) use known::similar;
pub use options::{Prepared, prepare};
