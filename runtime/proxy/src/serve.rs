//! Brings a proxy up and takes it down.

use std::{sync::Arc, time::Duration};

use tokio::{
    net::{TcpListener, UnixListener, UnixStream},
    sync::oneshot,
};
use tokio_stream::{Stream, StreamExt as _, wrappers::UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Server, server::TcpIncoming};
use waystation_scheduler::patient;

use crate::{
    Config, Error,
    bulk::Bulk,
    cluster::{self, Follow},
    counters::Counters,
    flags::{Flags, Verdict},
    front::Front,
    host_buffers::HostMemory,
    large_transfers::LargeTransfers,
    link::{CONNECTION_WINDOW_BYTES, Gang, Ids, STREAM_WINDOW_BYTES},
    quiet,
    session::{Descriptions, Shared, Usages},
    status_page,
};

/// Part of the bound on host buffers, in bytes, for those that are not counted yet or any more: in the transport's windows
/// and in the frames towards a worker. A quarter of a small bound.
const UNDER_WAY_BYTES: u64 = 64 << 20;

/// Frames of HTTP/2 that clients may send, in bytes. Each is handed on by itself: in the usual 16 KiB the bytes of an array
/// cost a wake-up every few of them.
const MAX_FRAME_BYTES: u32 = 1 << 20;

/// How long the end waits for recordings that are on their way to their bucket.
const RECORDING_GRACE: Duration = Duration::from_secs(5);

/// Serves until the token is cancelled. Clients that come before the workers wait for them.
///
/// # Errors
/// When a socket cannot be used or a server stops by itself.
pub async fn serve(config: Config, shutdown: CancellationToken) -> Result<(), Error> {
    config
        .listener
        .set_nonblocking(true)
        .map_err(Error::Listener)?;
    let listener = TcpListener::from_std(config.listener).map_err(Error::Listener)?;
    let address = listener.local_addr().map_err(Error::Listener)?;
    let counters = Arc::new(Counters::default());
    let usages = Arc::new(Usages::default());
    let ids = Arc::new(Ids::new());
    let (sender, verdict) = oneshot::channel();
    let (cluster, followed) = cluster::follow(Follow {
        resource_manager: config.resource_manager,
        proxy: address.to_string(),
        virtual_slices: config.virtual_slices,
        elastic_slices: config.elastic_slices,
        gang: Gang::new().map_err(Error::Random)?,
        ids: Arc::clone(&ids),
        flags: Flags::new(config.xla_flags.clone()),
        verdict: sender,
        local_transfers: config.local_transfers,
        shutdown: shutdown.clone(),
    });
    let recording = config.recording.as_ref();
    let recorder = recording.map(|recording| Arc::clone(&recording.recorder));
    let status_page = config.status_listener.map(|listener| {
        tokio::spawn(status_page::serve(
            listener,
            Arc::clone(&counters),
            Arc::clone(&usages),
            cluster.clone(),
            recorder.clone(),
            shutdown.clone(),
        ))
    });
    let shared = Arc::new(Shared {
        cluster,
        counters: Arc::clone(&counters),
        ids,
        usages,
        xla_flags: config.xla_flags,
        recording: config.recording,
        large_transfers: Arc::new(LargeTransfers::new(config.large_transfer_directory)),
        descriptions: Descriptions::default(),
    });
    tokio::spawn(quiet::watch(
        Arc::clone(&counters),
        config.release_memory,
        shutdown.clone(),
    ));
    let bound = config.host_buffer_memory_bytes;
    let memory = HostMemory::new(bound - UNDER_WAY_BYTES.min(bound / 4), counters);
    let front = Front::new(shared, memory, config.max_sessions, shutdown.clone());
    let service = Bulk::before(front);
    tracing::info!(%address, "proxy listens");
    let server = || {
        Server::builder()
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .max_frame_size(MAX_FRAME_BYTES)
            .http2_keepalive_interval(Some(config.keepalive_interval))
            .http2_keepalive_timeout(Some(config.keepalive_timeout))
            .add_service(service.clone())
    };
    let on_tcp = server().serve_with_incoming_shutdown(
        patient(TcpIncoming::from(listener).with_nodelay(Some(true))),
        shutdown.clone().cancelled_owned(),
    );
    let on_unix = match config.unix_listener {
        None => None,
        Some(listener) => Some(server().serve_with_incoming_shutdown(
            patient(own_users(listener).map_err(Error::Listener)?),
            shutdown.clone().cancelled_owned(),
        )),
    };
    let served = async {
        match on_unix {
            None => on_tcp.await,
            Some(on_unix) => tokio::try_join!(on_tcp, on_unix).map(|_| ()),
        }
        .map_err(Error::Server)
    };
    let refused = async {
        match verdict.await {
            Ok(Verdict::Refused(why)) => return Error::Flags(why),
            Ok(Verdict::Taken) => {
                if let Some(taken) = config.flags_taken {
                    // Whoever asked may have lost interest.
                    let _ = taken.send(());
                }
            }
            Err(_) => {}
        }
        std::future::pending().await
    };
    tokio::select! {
        served = served => served?,
        refused = refused => return Err(refused),
    }
    if let Some(recorder) = recorder {
        recorder.finish(RECORDING_GRACE).await;
    }
    // Has said goodbye then. A server that has ended by itself leaves it to the lease.
    if shutdown.is_cancelled() {
        let _ = followed.await;
    }
    match status_page {
        Some(task) => task.await.unwrap_or(Ok(())),
        None => Ok(()),
    }
}

/// The connections of processes of this process's user and of root. An abstract socket has no file whose rights would keep
/// others out.
fn own_users(
    listener: std::os::unix::net::UnixListener,
) -> std::io::Result<impl Stream<Item = std::io::Result<UnixStream>>> {
    listener.set_nonblocking(true)?;
    let own = rustix::process::geteuid().as_raw();
    let connections = UnixListenerStream::new(UnixListener::from_std(listener)?);
    Ok(connections.filter(move |connection| match connection {
        Ok(stream) => stream
            .peer_cred()
            .is_ok_and(|peer| peer.uid() == own || peer.uid() == 0),
        Err(_) => true,
    }))
}
