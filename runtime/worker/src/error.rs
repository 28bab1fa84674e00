//! Why a worker does not run.

use std::{io, path::PathBuf};

/// A worker that could not start, or that stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The plugin cannot be loaded.
    #[error("the PJRT plugin {path} cannot be used; check --pjrt_plugin")]
    Plugin {
        /// The plugin's file.
        path: PathBuf,
        /// What the binding says.
        source: waystation_pjrt::Error,
    },
    /// The plugin's client cannot be created.
    #[error(
        "the client of the PJRT plugin {path} cannot be created; check the plugin's options and its devices"
    )]
    Client {
        /// The plugin's file.
        path: PathBuf,
        /// What the plugin says.
        source: waystation_pjrt::Error,
    },
    /// The workers of the slice are not one client of the plugin.
    #[error("the workers of the slice are not, or no more, one client of their plugin: {why}")]
    Group {
        /// Why not.
        why: String,
    },
    /// The plugin has no devices.
    #[error("the PJRT plugin {path} shows no devices")]
    NoDevices {
        /// The plugin's file.
        path: PathBuf,
    },
    /// The plugin's file cannot be read for its digest.
    #[error("the PJRT plugin {path} cannot be read")]
    Digest {
        /// The plugin's file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A variable names a file, which the plugin would read whenever it likes.
    #[error("{variable} names a file of flags; a worker has to be given the flags themselves")]
    FlagFile {
        /// The variable.
        variable: String,
    },
    /// The listener cannot be used.
    #[error("the worker's listener cannot be used")]
    Listener(#[source] io::Error),
    /// A compile child was not started by a worker.
    #[error("a compile child is started by a worker; stdin is not its socket")]
    Link(#[source] io::Error),
    /// A thread could not be started or has died.
    #[error("the dispatch thread {what}")]
    Dispatch {
        /// What happened to it.
        what: String,
    },
    /// The gRPC server failed.
    #[error("the worker's gRPC server failed")]
    Server(#[source] tonic::transport::Error),
}

/// An error with its causes on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
