//! A worker: one PJRT client, its arrays and executables, and the op stream that drives them.
//!
//! ```text
//! proxy --Session--> service --ops, one permit each--> dispatch thread: session (table, waits, launches) --> plugin
//!       <--replies-- outbox <-----------------------------'   ^                                             |
//!       --PutData, FetchData--> service --jobs--------------->|<-- compiler (cache, plugin), peers, events <'
//!                                                                     '--> compile child, another process
//! ```
//!
//! Parts of launches that span workers go to the plugin by a thread for each device, and their data by threads of their own.
//!
//! Where the plugin has collectives of its own, such parts go to it by one thread, and the *group* of the slice's workers lives and
//! dies with its client.
//!
//! One *dispatch thread* owns everything that ops change: the shard table, the executables and what waits for what. So ops
//! take effect in stream order without locks. It calls the plugin itself and never waits for bytes, compiles, executions
//! or the network; those end as jobs in its queue. Back-pressure: an op holds a permit until it is dispatched; the proxy sends no
//! more ops than there are permits, and is told of those that are free again.

mod child;
mod collective;
mod collectives;
mod compiler;
mod config;
mod core;
mod counters;
mod data;
mod dispatch;
mod dtype;
mod dump;
mod error;
pub mod fault;
mod geometry;
mod group;
mod heap;
mod hlo;
mod holder;
mod host;
mod incoming;
mod join;
mod layout;
mod lease;
mod ledger;
mod linalg;
mod make;
mod manager;
mod outbox;
mod peers;
mod persist;
mod plugin;
pub mod program;
mod region;
mod register;
mod report;
mod segments;
mod serve;
mod service;
mod session;
mod slabs;
mod spanning;
mod status;
mod table;
mod text;
mod topology;
mod usage;
mod warm;
mod wide;
mod window;
mod writing;

pub use child::compile_child;
pub use config::{CompileChild, Config, Limits, Simulated};
pub use error::Error;
pub use serve::serve;
pub use warm::{Warmed, Warmer, WarmerConfig};
