//! Content-addressed cache of XLA executables: a compile is first a question to memory, then to disk, then to
//! the bucket.
//!
//! ```text
//! KeyInputs --> Key --> Cache::get_or_compile --> memory --> bucket --> claim --> compile once, publish in the background
//!                        |  one flight per key   |           |          |  one process of all that share the bucket
//!                        flight.rs               tier/memory tier/bucket claim.rs
//! ```
//!
//! Three promises decide everything here:
//! * Never a wrong executable. A [`Key`] holds all that an executable depends on, and an entry is verified to the last
//!   bit ([`envelope`]) before anyone sees it.
//! * Never a failed job. Whatever storage does is a miss, a counter and at most one warning a minute.
//! * Never a wait for an upload. Entries are published behind the caller; [`Cache::shutdown`] waits for them.

mod behind;
mod breaker;
mod cache;
mod claim;
mod clerk;
pub mod config;
mod counters;
mod entry;
pub mod envelope;
mod flight;
pub mod harmless;
pub mod history;
mod key;
mod loads;
pub mod platform;
mod publish;
mod quiet;
pub mod recording;
pub mod sign;
pub mod survey;
pub mod tier;
pub mod verify;

pub use cache::Cache;
pub use config::{Config, Mode};
pub use counters::Counts;
pub use entry::{Entry, Origin, Provenance};
pub use envelope::Text;
pub use key::{Key, KeyInputs, RULES, Record, Treatment};
pub use loads::{Fatal, Loading};
