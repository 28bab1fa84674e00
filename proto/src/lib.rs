//! Wire contracts: the IFRT proxy service, XLA's data messages as far as they are used, and Waystation's own services.
//!
//! The `.proto` files under `protos/xla` are written here and agree with the public ones by field number, type and
//! label; a test holds them against the descriptors inside the installed jaxlib. Modules follow the proto packages.
//! No logic lives here.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
#![allow(rustdoc::all, reason = "generated code")]

/// The number of the protocol between proxy, resource manager and workers. Another number is refused (D11).
pub const LINK_VERSION: u32 = 1;

/// Names this build in messages and refusals.
pub const BUILD_ID: &str = concat!("waystation ", env!("CARGO_PKG_VERSION"));

/// The `FileDescriptorSet` of every message declared here.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Package `tensorflow` (TSL's status).
pub mod tensorflow {
    tonic::include_proto!("tensorflow");
    /// Package `tensorflow.error`.
    pub mod error {
        tonic::include_proto!("tensorflow.error");
    }
}

/// Package `xla`.
pub mod xla {
    tonic::include_proto!("xla");
    /// Package `xla.ifrt`.
    pub mod ifrt {
        tonic::include_proto!("xla.ifrt");
        /// Package `xla.ifrt.proto`.
        pub mod proto {
            tonic::include_proto!("xla.ifrt.proto");
        }
        /// Package `xla.ifrt.proxy`.
        pub mod proxy {
            tonic::include_proto!("xla.ifrt.proxy");
        }
    }
}

/// Package `ifrt_proxy_contrib_pathways`: the memory table of an out-of-memory status.
pub mod ifrt_proxy_contrib_pathways {
    tonic::include_proto!("ifrt_proxy_contrib_pathways");
}

/// Package `waystation`.
pub mod waystation {
    tonic::include_proto!("waystation");
    /// Package `waystation.compile`.
    pub mod compile {
        tonic::include_proto!("waystation.compile");
    }
    /// Package `waystation.recording`.
    pub mod recording {
        tonic::include_proto!("waystation.recording");
    }
    /// Package `waystation.worker`.
    pub mod worker {
        tonic::include_proto!("waystation.worker");
    }
    /// Package `waystation.group`.
    pub mod group {
        tonic::include_proto!("waystation.group");
    }
    /// Package `waystation.scheduler`.
    pub mod scheduler {
        tonic::include_proto!("waystation.scheduler");
    }
}
