//! Bringing the service up on a bound listener.

use std::{net::TcpListener, sync::Arc, time::Duration};

use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::{Server, server::TcpIncoming};
use tracing::info;
use waystation_proto::waystation::{
    group::groups_server::GroupsServer, scheduler::resource_manager_server::ResourceManagerServer,
};

use crate::{
    InstanceType,
    accept::patient,
    cluster::{Cluster, Topology},
    group::{self, Groups},
    service::Service,
    state::State,
};

/// How long a silent worker counts as alive. Beats come each second; ten of them may be lost on a busy machine.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(10);

/// How long streams may take to end after the shutdown signal.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(3);

/// HTTP/2 windows, in bytes: tonic's defaults end sessions that have many small messages unread.
pub(crate) const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// As above, a stream.
pub(crate) const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// Longest request that is taken, in bytes. Thousands of devices with all that a plugin says of them take a few million.
const MAX_REQUEST_BYTES: usize = 64 << 20;

/// What a resource manager needs.
#[derive(Debug)]
pub struct Config {
    /// Bound; connections that come before [`serve`] runs wait in its backlog.
    pub listener: TcpListener,
    /// Slices of a full cluster, at least 1.
    pub expected_slices: u32,
    /// Workers of each slice; none: what `instance_type` says, or the first worker's `slice_tasks`.
    pub workers_per_slice: Option<u32>,
    /// What each slice is to be; none: as the first workers are.
    pub instance_type: Option<InstanceType>,
    /// How long a silent worker counts as alive.
    pub lease: Duration,
}

impl Config {
    /// One slice whose size its first worker tells, [`DEFAULT_LEASE`].
    pub fn new(listener: TcpListener) -> Config {
        Config {
            listener,
            expected_slices: 1,
            workers_per_slice: None,
            instance_type: None,
            lease: DEFAULT_LEASE,
        }
    }
}

/// Why the resource manager could not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The listener cannot be used.
    #[error("the resource manager's listener cannot be used")]
    Listener(#[source] std::io::Error),
    /// The instance type's devices cannot be spread over so many workers.
    #[error("slices of {instance_type} cannot have {workers} worker(s) each: {why}")]
    Topology {
        /// As given.
        instance_type: String,
        /// As given.
        workers: u32,
        /// What would be right.
        why: String,
    },
    /// The HTTP/2 server failed.
    #[error("the resource manager's server failed")]
    Server(#[source] tonic::transport::Error),
}

/// Runs the resource manager until `shutdown` is cancelled. Open streams are then ended with `UNAVAILABLE` and have three
/// seconds to close.
///
/// # Errors
/// When the listener cannot be registered with the runtime, or when the server fails.
pub async fn serve(config: Config, shutdown: CancellationToken) -> Result<(), Error> {
    config
        .listener
        .set_nonblocking(true)
        .map_err(Error::Listener)?;
    let listener = tokio::net::TcpListener::from_std(config.listener).map_err(Error::Listener)?;
    let address = listener.local_addr().map_err(Error::Listener)?;
    let tasks = TaskTracker::new();
    let topology = match &config.instance_type {
        Some(instance_type) => Some(topology(instance_type, config.workers_per_slice)?),
        None => None,
    };
    let workers = topology.as_ref().map(|topology| topology.hosts);
    let groups = group::Service::new(
        Groups::new(config.expected_slices, workers.or(config.workers_per_slice)),
        config.lease,
        shutdown.clone(),
        tasks.clone(),
    );
    let cluster = Cluster::new(config.expected_slices, config.workers_per_slice, topology);
    let state = State::new(cluster, config.lease);
    let service = Service {
        state: Arc::clone(&state),
        lease: config.lease,
        instance_type: config.instance_type.clone(),
        stop: shutdown.clone(),
        tasks: tasks.clone(),
    };
    let service = ResourceManagerServer::new(service)
        .max_decoding_message_size(MAX_REQUEST_BYTES)
        .max_encoding_message_size(usize::MAX);
    let instance_type = config.instance_type.map(|kind| kind.to_string());
    info!(%address, slices = config.expected_slices, instance_type, workers_per_slice = config.workers_per_slice, "resource manager ready");
    // A peer that vanished without closing its connection is found by HTTP/2 pings within the lease.
    let server = Server::builder()
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .http2_keepalive_interval(Some(config.lease / 2))
        .http2_keepalive_timeout(Some(config.lease / 2))
        .add_service(service)
        .add_service(GroupsServer::new(groups).max_decoding_message_size(group::MAX_MESSAGE_BYTES))
        .serve_with_incoming_shutdown(
            patient(TcpIncoming::from(listener).with_nodelay(Some(true))),
            shutdown.clone().cancelled_owned(),
        );
    let overdue = async {
        shutdown.cancelled().await;
        tokio::time::sleep(SHUTDOWN_GRACE).await;
    };
    let served = tokio::select! {
        served = server => served.map_err(Error::Server),
        () = overdue => {
            info!("streams were still open at the end of the grace period");
            Ok(())
        }
        () = state.keep_time() => Ok(()),
    };
    tasks.close();
    served?;
    info!("resource manager stopped");
    Ok(())
}

/// The workers of a slice. CPU devices may lie on any number of hosts that divides them; a TPU slice has its machines.
fn topology(instance_type: &InstanceType, workers: Option<u32>) -> Result<Topology, Error> {
    let hosts = workers.unwrap_or(instance_type.hosts());
    let wrong = |why: String| Error::Topology {
        instance_type: instance_type.to_string(),
        workers: hosts,
        why,
    };
    if !instance_type.is_cpu() && hosts != instance_type.hosts() {
        return Err(wrong(format!("it has {}", instance_type.hosts())));
    }
    if hosts == 0 || !instance_type.devices().is_multiple_of(hosts) {
        return Err(wrong(
            "give a number of workers that divides its devices".to_owned(),
        ));
    }
    Ok(Topology {
        name: instance_type.to_string(),
        hosts,
        devices_per_host: instance_type.devices() / hosts,
    })
}
