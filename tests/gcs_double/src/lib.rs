//! A test double of Google Cloud Storage, for what no emulator does.
//!
//! It is a double and no emulator: it proves that our side asks for what the documents say, and survives what they say
//! can happen. It serves the XML API (which the `object_store` crate speaks, and S3's variant of it) and the JSON API
//! (which TensorStore, gcsfs and our own bucket calls speak) over one store in memory, and adds
//!
//! * preconditions on every verb, of objects and of buckets (412);
//! * lifecycle rules, validated, and executed under a clock that tests move, up to 24 hours late;
//! * permissions that say no (403), by token or for all; tokens that expire (401), with a metadata server to get more;
//! * rate limits: one write a second to one object name, one update a second to one bucket (429);
//! * faults on order: statuses, silence, answers cut in mid-body, lost after the deed, or late; latency of all answers.
//!
//! | module | holds |
//! | --- | --- |
//! | `state` | everything that is known: buckets, clock, tokens, grants, faults, limits |
//! | `bucket` | one bucket and its objects, without any HTTP |
//! | `lifecycle` | what rules may say, and when they strike |
//! | `call`, `reply` | a request as the APIs see it; answers and refusals |
//! | `json`, `xml` | the two APIs |
//! | `control` | `/_double/...`, by which a test in another process gives orders |
//! | `serve` | the way of a request: fault, credentials, API |
//!
//! In process: [`Double::start`], and methods for the orders. As a process: `gcs_double --port 0 --ready_file F`.

mod bucket;
mod call;
mod clock;
mod control;
mod double;
mod fault;
mod hash;
mod json;
mod lifecycle;
mod object;
mod permission;
mod reply;
mod serve;
mod state;
mod token;
mod xml;

pub use double::Double;
pub use fault::{Fault, Kind};
pub use permission::ALL_PERMISSIONS;
pub use state::Logged;
