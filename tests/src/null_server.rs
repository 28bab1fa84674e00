//! A bench part: the IFRT proxy front with nothing behind it.
//!
//! It speaks enough of the protocol for an unmodified JAX client to run the bench programs, under the proxy's own transport
//! settings, and computes nothing: stored bytes come back as they went in, computed arrays are zeros of the right size, and
//! an execution is acknowledged the moment it is read. What a client reaches against it is the ceiling that its own library
//! and gRPC set, so the bench divides by it. It is no server for anybody's work: results are wrong by design, programs that
//! are cut over devices have replicated results, and bad requests get little care.

mod program;
mod session;
mod store;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use prost::Message as _;
use tokio::{
    net::{TcpListener, UnixListener},
    sync::mpsc,
};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Server, server::TcpIncoming},
};
use waystation_proto::xla::ifrt::proxy::{
    GrpcGetVersionRequest, GrpcGetVersionResponse, GrpcHostBufferDeleteRequest,
    GrpcHostBufferDeleteResponse, GrpcHostBufferLookupRequest, GrpcHostBufferLookupResponse,
    GrpcHostBufferReadFromDiskRequest, GrpcHostBufferReadFromDiskResponse,
    GrpcHostBufferStoreMetadata, GrpcHostBufferStoreRequest, GrpcHostBufferStoreResponse,
    IfrtProxyVersion, IfrtRequest, IfrtResponse,
    grpc_ifrt_service_server::{GrpcIfrtService, GrpcIfrtServiceServer},
};

use self::{
    session::Session,
    store::{Buffers, Pool},
};

/// The proxy's HTTP/2 windows, in bytes: the ceiling is taken with the same.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// Replies queued towards the client before the session stops reading, as in the proxy.
const REPLY_QUEUE: usize = 1024;
/// Bytes a message of a lookup carries.
const FRAME_BYTES: usize = 1 << 20;
/// The newest versions spoken; every client of the bench has them in its range.
const PROTOCOL_VERSION: i32 = 25;
const SERDES_VERSION: i32 = 6;
/// Where the protocol puts a store's metadata.
const STORE_METADATA: &str = "ifrt-proxy-grpc-host-buffer-store-metadata-bin";

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds these locks can panic half-way through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves clients until the process ends.
///
/// # Errors
/// When the server cannot go on listening.
pub async fn serve(
    listener: TcpListener,
    unix_listener: Option<UnixListener>,
    devices: u16,
) -> Result<(), tonic::transport::Error> {
    let front = Front {
        devices: i32::from(devices),
        pool: Arc::default(),
        sessions: Mutex::default(),
        next_session: AtomicU64::new(1),
    };
    let service = GrpcIfrtServiceServer::new(front)
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX);
    let server = || {
        Server::builder()
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .add_service(service.clone())
    };
    let on_tcp = server().serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
    match unix_listener {
        None => on_tcp.await,
        Some(listener) => {
            let on_unix = server().serve_with_incoming(UnixListenerStream::new(listener));
            tokio::try_join!(on_tcp, on_unix).map(|_| ())
        }
    }
}

/// The service.
#[derive(Debug)]
struct Front {
    devices: i32,
    pool: Arc<Pool>,
    sessions: Mutex<HashMap<u64, Arc<Buffers>>>,
    next_session: AtomicU64,
}

impl Front {
    fn buffers(&self, session: u64) -> Result<Arc<Buffers>, Status> {
        lock(&self.sessions)
            .get(&session)
            .cloned()
            .ok_or_else(|| Status::invalid_argument(format!("unknown session {session}")))
    }
}

#[tonic::async_trait]
impl GrpcIfrtService for Front {
    type IfrtSessionStream = ReceiverStream<Result<IfrtResponse, Status>>;
    type HostBufferLookupStream = BoxStream<'static, Result<GrpcHostBufferLookupResponse, Status>>;

    async fn get_version(
        &self,
        request: Request<GrpcGetVersionRequest>,
    ) -> Result<Response<GrpcGetVersionResponse>, Status> {
        let max = request.into_inner().max_version.unwrap_or_default();
        Ok(Response::new(GrpcGetVersionResponse {
            version: Some(IfrtProxyVersion {
                protocol_version: max.protocol_version.min(PROTOCOL_VERSION),
                ifrt_serdes_version_number: max.ifrt_serdes_version_number.min(SERDES_VERSION),
            }),
        }))
    }

    async fn ifrt_session(
        &self,
        request: Request<Streaming<IfrtRequest>>,
    ) -> Result<Response<Self::IfrtSessionStream>, Status> {
        let id = self.next_session.fetch_add(1, Relaxed);
        let buffers = Arc::new(Buffers::new(Arc::clone(&self.pool)));
        // Kept until the process ends: a bench has a handful of clients.
        lock(&self.sessions).insert(id, Arc::clone(&buffers));
        let (replies, stream) = mpsc::channel(REPLY_QUEUE);
        let session = Session::new(id, self.devices, buffers, replies);
        tokio::spawn(session.run(request.into_inner()));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn host_buffer_store(
        &self,
        request: Request<Streaming<GrpcHostBufferStoreRequest>>,
    ) -> Result<Response<GrpcHostBufferStoreResponse>, Status> {
        let metadata = request
            .metadata()
            .get_bin(STORE_METADATA)
            .and_then(|value| value.to_bytes().ok())
            .ok_or_else(|| Status::invalid_argument(format!("no {STORE_METADATA}")))?;
        let metadata = GrpcHostBufferStoreMetadata::decode(metadata)
            .map_err(|e| Status::invalid_argument(format!("malformed {STORE_METADATA}: {e}")))?;
        let size = usize::try_from(metadata.buffer_size)
            .map_err(|_| Status::invalid_argument("a negative size"))?;
        let buffers = self.buffers(metadata.session_id)?;
        let mut contents = buffers.take(size);
        let mut chunks = request.into_inner();
        while let Some(chunk) = chunks.next().await {
            contents.extend(&chunk?.data);
        }
        buffers.stored(metadata.handle, contents);
        Ok(Response::new(GrpcHostBufferStoreResponse {}))
    }

    async fn host_buffer_lookup(
        &self,
        request: Request<GrpcHostBufferLookupRequest>,
    ) -> Result<Response<Self::HostBufferLookupStream>, Status> {
        let request = request.into_inner();
        let bytes = self
            .buffers(request.session_id)?
            .outgoing(request.handle)
            .ok_or_else(|| {
                Status::invalid_argument(format!("unknown host buffer {}", request.handle))
            })?;
        let frames = (0..bytes.len().div_ceil(FRAME_BYTES)).map(move |i| {
            let start = i * FRAME_BYTES;
            let data = bytes.slice(start..bytes.len().min(start + FRAME_BYTES));
            Ok(GrpcHostBufferLookupResponse { data })
        });
        Ok(Response::new(stream::iter(frames).boxed()))
    }

    async fn host_buffer_delete(
        &self,
        request: Request<GrpcHostBufferDeleteRequest>,
    ) -> Result<Response<GrpcHostBufferDeleteResponse>, Status> {
        let request = request.into_inner();
        self.buffers(request.session_id)?.delete(request.handle);
        Ok(Response::new(GrpcHostBufferDeleteResponse {}))
    }

    async fn host_buffer_read_from_disk(
        &self,
        _request: Request<GrpcHostBufferReadFromDiskRequest>,
    ) -> Result<Response<GrpcHostBufferReadFromDiskResponse>, Status> {
        Err(Status::unimplemented("the null server reads no files"))
    }
}
