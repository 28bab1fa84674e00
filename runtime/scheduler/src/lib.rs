//! The resource manager: workers register, are watched, and give a proxy its devices.
//!
//! It is off the dispatch path and off the data path: a proxy asks it once for the cluster's workers and then talks to
//! them itself. It keeps no state on disk. Device ids depend only on the workers' places (slice, task) and device
//! counts, so a restarted resource manager gives the same ids again, and lease epochs start from the clock, so they keep
//! growing across restarts.
//!
//! | file | holds |
//! | --- | --- |
//! | `cluster` | who is in which place, who may be, and which device ids follow from that (pure) |
//! | `instance_type` | what `tpuv6e:4x4` means: machines, devices, their places (pure) |
//! | `tpu` | what libtpu is told of its slice and of others (pure) |
//! | `holds` | which proxy has which slices, who waits, lease epochs (pure) |
//! | `state` | the two behind one lock, with a change signal |
//! | `group` | the workers of a slice that a plugin joins to one client, and the key-value store that they share |
//! | `life` | one worker's registration, from Hello to its death |
//! | `service` | the gRPC adapter |
//! | `accept` | what servers that many may dial do when they cannot accept a connection |
//! | `client` | the other side, for proxies and the command line |

mod accept;
pub mod client;
mod cluster;
mod group;
mod holds;
mod instance_type;
mod life;
mod serve;
mod service;
mod state;
mod tpu;

pub use accept::patient;
pub use instance_type::{DevicePlace, InstanceType, InstanceTypeError};
pub use serve::{Config, DEFAULT_LEASE, Error, serve};
pub use tpu::{MEGASCALE_COORDINATOR, TPU_VARIABLES};
