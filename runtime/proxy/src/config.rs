//! What a proxy is told at start. Only the CLI reads the environment (D10).

use std::{
    net::TcpListener, os::unix::net::UnixListener, path::PathBuf, sync::Arc, time::Duration,
};

use tokio::sync::oneshot;
use waystation_cache::recording::Recorder;

/// Host buffers kept in memory before the rest goes to an unlinked file, in bytes.
pub const DEFAULT_HOST_BUFFER_MEMORY_BYTES: u64 = 2 << 30;

/// Sessions open at a time, unless told otherwise.
pub const DEFAULT_MAX_SESSIONS: usize = 4096;

/// Settings of one proxy process.
#[derive(Debug)]
pub struct Config {
    /// Bound socket for the IFRT proxy service.
    pub listener: TcpListener,
    /// A bound Unix socket on which the same service is served to processes of the same user (and root) on this machine.
    pub unix_listener: Option<UnixListener>,
    /// Bound socket for `GET /status`; `None` serves no status page.
    pub status_listener: Option<TcpListener>,
    /// `host:port` of the resource manager.
    pub resource_manager: String,
    /// Types of the slices that the proxy takes out of the resource manager's ("tpuv6e:2x2"), one each; empty: all it has.
    pub virtual_slices: Vec<String>,
    /// So many slices may be missing, at the start too; their devices are shown all the same.
    pub elastic_slices: u32,
    /// Upper bound, in bytes, of host buffers waiting in memory; what comes above it waits in an unlinked file.
    pub host_buffer_memory_bytes: u64,
    /// Sessions open at a time; more are refused.
    pub max_sessions: usize,
    /// After so long without a word from a client it is asked for one (an HTTP/2 ping, which gRPC answers by itself).
    pub keepalive_interval: Duration,
    /// A client that has not answered for so long is gone, and its session ends: its machine has vanished, or the network
    /// between. Long enough for a process that somebody has stopped to look at it.
    pub keepalive_timeout: Duration,
    /// Directory shared with clients that hand large host buffers over as files; `None` refuses them.
    pub large_transfer_directory: Option<PathBuf>,
    /// Hand bytes over in memory to workers on this machine, in place of sending them.
    pub local_transfers: bool,
    /// Gives memory that is free in this process back to the system; may block. Called after sessions have ended and when
    /// all is quiet.
    pub release_memory: fn(),
    /// What to do about recording compile requests, if they are to be recorded.
    pub recording: Option<Recording>,
    /// `--xla_*` flags of the environment, then of the command line, carried by each compile. The first worker's plugin is
    /// asked about them before a client is served.
    pub xla_flags: Vec<String>,
    /// Told when the plugin has taken the flags.
    pub flags_taken: Option<oneshot::Sender<()>>,
}

/// How compile requests are recorded.
#[derive(Debug, Clone)]
pub struct Recording {
    /// Stores them.
    pub recorder: Arc<Recorder>,
    /// Programs are recorded in place of being compiled, and none is executed.
    pub only: bool,
}

impl Config {
    /// A configuration with every limit at its default.
    pub fn new(listener: TcpListener, resource_manager: String) -> Self {
        Self {
            listener,
            unix_listener: None,
            status_listener: None,
            resource_manager,
            virtual_slices: Vec::new(),
            elastic_slices: 0,
            host_buffer_memory_bytes: DEFAULT_HOST_BUFFER_MEMORY_BYTES,
            max_sessions: DEFAULT_MAX_SESSIONS,
            keepalive_interval: Duration::from_secs(60),
            keepalive_timeout: Duration::from_secs(600),
            large_transfer_directory: None,
            local_transfers: true,
            release_memory: || {},
            recording: None,
            xla_flags: Vec::new(),
            flags_taken: None,
        }
    }
}
