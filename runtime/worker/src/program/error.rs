//! Why a program's options or its description cannot be used.

use waystation_stablehlo::{compile_options, wire};

/// Why a program's options or its description cannot be used. Each is the request's fault, or the plugin's where it says so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The client's options name no usable device assignment.
    #[error(transparent)]
    Devices(#[from] compile_options::Error),
    /// A part of the options is not the message it should be.
    #[error("compile options cannot be read: {part} is malformed")]
    Options {
        /// The message that is damaged.
        part: &'static str,
        /// What is wrong with it.
        source: wire::Error,
    },
    /// The compile request names other devices than its options.
    #[error("compile request is for devices {request:?}, its options are for {options:?}")]
    OtherDevices {
        /// Global ids in the request.
        request: Vec<i32>,
        /// Global ids in the options.
        options: Vec<i32>,
    },
    /// A device belongs to no device of this worker's plugin.
    #[error("device {id} is not one of this worker's")]
    NotLocal {
        /// Global device id.
        id: i32,
    },
    /// An XLA flag of the proxy's command line is not one.
    #[error("`{flag}` is not an XLA flag; write --xla_NAME=VALUE")]
    Flag {
        /// The flag as it was given.
        flag: String,
    },
    /// A dump directory cannot be named in the options.
    #[error("dump directory `{directory}` is not UTF-8")]
    DumpDirectory {
        /// The directory, with what is not UTF-8 replaced.
        directory: String,
    },
    /// The plugin's optimized program is not an `xla.HloModuleProtoWithConfig`.
    #[error("plugin gave an optimized program that cannot be read")]
    Optimized(#[from] prost::DecodeError),
    /// The plugin's optimized program lacks what a description needs.
    #[error("plugin gave an optimized program without {what}")]
    Incomplete {
        /// What is missing.
        what: &'static str,
    },
}
