//! One session with a server.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use bytes::{Bytes, BytesMut};
use prost::Message as _;
use tokio::{
    sync::{mpsc, oneshot},
    task::AbortHandle,
};
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::{
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    metadata::{BinaryMetadataValue, MetadataMap},
    transport::{Channel, Endpoint},
};
use waystation_proto::xla::ifrt::proxy::{
    GrpcGetVersionRequest, GrpcHostBufferDeleteRequest, GrpcHostBufferLookupRequest,
    GrpcHostBufferReadFromDiskRequest, GrpcHostBufferStoreMetadata, GrpcHostBufferStoreRequest,
    GrpcIfrtSessionMetadata, IfrtProxyVersion, IfrtRequest, IfrtResponse, InitRequest,
    InitResponse, RequestMetadata, ResponseMetadata,
    grpc_ifrt_service_client::GrpcIfrtServiceClient, ifrt_request::Request,
    ifrt_response::Response,
};

use crate::{Error, codec::Encoded};

/// Requests queued before [`Client::send`] waits.
const QUEUE: usize = 256;
/// As jaxlib chunks its stores, in bytes.
const CHUNK_BYTES: usize = 1 << 20;
const SESSION_METHOD: &str = "/xla.ifrt.proxy.GrpcIfrtService/IfrtSession";
const SESSION_METADATA: &str = "ifrt-proxy-grpc-ifrt-session-metadata-bin";
const STORE_METADATA: &str = "ifrt-proxy-grpc-host-buffer-store-metadata-bin";
/// What jaxlib 0.12.0.1 offers.
const OFFER: [IfrtProxyVersion; 2] = [
    IfrtProxyVersion {
        protocol_version: 16,
        ifrt_serdes_version_number: 2,
    },
    IfrtProxyVersion {
        protocol_version: 25,
        ifrt_serdes_version_number: 6,
    },
];

type Waiting = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<IfrtResponse>>>>>;

/// A session that is open. Dropped, it is cancelled as jaxlib does it, and the server frees what it held.
#[derive(Debug)]
pub struct Client {
    control: GrpcIfrtServiceClient<Channel>,
    data: GrpcIfrtServiceClient<Channel>,
    requests: mpsc::Sender<Bytes>,
    waiting: Waiting,
    next_op: AtomicU64,
    next_handle: AtomicU64,
    init: InitResponse,
    init_metadata: ResponseMetadata,
    reader: AbortHandle,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// An answer on its way.
#[derive(Debug)]
pub struct Pending(oneshot::Receiver<IfrtResponse>);

impl Pending {
    /// Waits for the answer.
    ///
    /// # Errors
    /// [`Error::Failed`] with the server's status, [`Error::SessionEnded`].
    pub async fn wait(self) -> Result<Response, Error> {
        let reply = self.reply().await?;
        let status = reply
            .response_metadata
            .and_then(|m| m.status)
            .unwrap_or_default();
        match reply.response {
            Some(response) => Ok(response),
            None if status.code != 0 => Err(Error::Failed(Box::new(status))),
            None => Err(Error::WrongReply),
        }
    }

    /// Waits for the reply as it was sent, metadata and all.
    ///
    /// # Errors
    /// [`Error::SessionEnded`].
    pub async fn reply(self) -> Result<IfrtResponse, Error> {
        self.0.await.map_err(|_| Error::SessionEnded)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds this lock can panic half-way through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn channel(address: &str) -> Result<Channel, Error> {
    let connect = async {
        Endpoint::from_shared(format!("http://{address}"))?
            .tcp_nodelay(true)
            .connect()
            .await
    };
    connect.await.map_err(|source| Error::Connect {
        address: address.to_owned(),
        source,
    })
}

fn service(channel: Channel) -> GrpcIfrtServiceClient<Channel> {
    GrpcIfrtServiceClient::new(channel)
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX)
}

fn refused(call: &'static str) -> impl Fn(tonic::Status) -> Error {
    move |status| Error::Call {
        call,
        status: Box::new(status),
    }
}

impl Client {
    /// Agrees on a version with the server at `host:port`, opens a session and asks for its devices.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub async fn connect(address: &str) -> Result<Self, Error> {
        let connection = channel(address).await?;
        let mut control = service(connection.clone());
        let data = service(channel(address).await?);
        let [min, max] = OFFER;
        let offer = GrpcGetVersionRequest {
            min_version: Some(min),
            max_version: Some(max),
        };
        let version = control
            .get_version(offer)
            .await
            .map_err(refused("GetVersion"))?
            .into_inner()
            .version
            .unwrap_or_default();
        let (requests, queue) = mpsc::channel(QUEUE);
        let mut open = tonic::Request::new(ReceiverStream::new(queue));
        let metadata = GrpcIfrtSessionMetadata {
            version: Some(version),
            initialization_data: None,
        };
        insert_bin(
            open.metadata_mut(),
            SESSION_METADATA,
            &metadata.encode_to_vec(),
        );
        // Not by the generated method: it takes only requests that are well formed.
        let mut session = Grpc::new(connection)
            .max_decoding_message_size(usize::MAX)
            .max_encoding_message_size(usize::MAX);
        session.ready().await.map_err(|source| Error::Connect {
            address: address.to_owned(),
            source,
        })?;
        let mut replies = session
            .streaming(open, PathAndQuery::from_static(SESSION_METHOD), Encoded)
            .await
            .map_err(refused("IfrtSession"))?
            .into_inner();
        let waiting: Waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        let table = Arc::clone(&waiting);
        let reader = tokio::spawn(async move {
            while let Some(Ok(reply)) = replies.next().await {
                let op_id = reply.response_metadata.as_ref().map_or(0, |m| m.op_id);
                if let Some(sender) = lock(&table)
                    .as_mut()
                    .and_then(|waiting| waiting.remove(&op_id))
                {
                    // Whoever asked may have stopped waiting.
                    let _ = sender.send(reply);
                }
            }
            // Everybody who still waits hears that the session has ended.
            lock(&table).take();
        })
        .abort_handle();
        let mut client = Self {
            control,
            data,
            requests,
            waiting,
            next_op: AtomicU64::new(1),
            next_handle: AtomicU64::new(1),
            init: InitResponse::default(),
            init_metadata: ResponseMetadata::default(),
            reader,
        };
        let init = client.send(Request::InitRequest(InitRequest {})).await;
        let reply = init.reply().await?;
        client.init_metadata = reply.response_metadata.unwrap_or_default();
        match reply.response {
            Some(Response::InitResponse(init)) => client.init = init,
            _ => return Err(Error::WrongReply),
        }
        Ok(client)
    }

    /// The devices and memories, as the server told them.
    pub fn init(&self) -> &InitResponse {
        &self.init
    }

    /// What came with [`Self::init`].
    pub fn init_metadata(&self) -> &ResponseMetadata {
        &self.init_metadata
    }

    /// The next unused client handle.
    pub fn handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Relaxed)
    }

    /// Sends a request; the answer comes through what is returned.
    pub async fn send(&self, request: Request) -> Pending {
        self.send_raw(Some(request), 0).await
    }

    /// Like [`Self::send`], with a user context, or with no request at all (as a newer protocol's would look).
    pub async fn send_raw(&self, request: Option<Request>, user_context_id: u64) -> Pending {
        let op_id = self.op_id();
        let message = IfrtRequest {
            request_metadata: Some(RequestMetadata {
                op_id,
                user_context_id,
            }),
            request,
        };
        self.send_encoded(op_id, message.encode_to_vec().into())
            .await
    }

    /// The next unused number of a request, for [`Self::send_encoded`].
    pub fn op_id(&self) -> u64 {
        self.next_op.fetch_add(1, Relaxed)
    }

    /// Sends bytes in a request's place, well formed or not. An answer to `op_id` comes through what is returned.
    pub async fn send_encoded(&self, op_id: u64, message: Bytes) -> Pending {
        let (sender, receiver) = oneshot::channel();
        if let Some(waiting) = lock(&self.waiting).as_mut() {
            waiting.insert(op_id, sender);
        }
        if self.requests.send(message).await.is_err() {
            lock(&self.waiting).take();
        }
        Pending(receiver)
    }

    /// False once the session's stream has ended.
    pub fn is_open(&self) -> bool {
        lock(&self.waiting).is_some()
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// [`Error::Failed`] with the server's status, [`Error::SessionEnded`].
    pub async fn call(&self, request: Request) -> Result<Response, Error> {
        self.send(request).await.wait().await
    }

    /// Stores a host buffer.
    ///
    /// # Errors
    /// The server's status.
    pub async fn store(&self, handle: u64, bytes: Bytes) -> Result<(), Error> {
        let size = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
        self.store_as(handle, size, bytes).await
    }

    /// Stores a host buffer whose announced size may lie.
    ///
    /// # Errors
    /// The server's status.
    pub async fn store_as(&self, handle: u64, buffer_size: i64, bytes: Bytes) -> Result<(), Error> {
        let chunks: Vec<_> = (0..bytes.len())
            .step_by(CHUNK_BYTES)
            .map(|at| GrpcHostBufferStoreRequest {
                data: bytes.slice(at..bytes.len().min(at + CHUNK_BYTES)),
            })
            .collect();
        let mut request = tonic::Request::new(tokio_stream::iter(chunks));
        let metadata = GrpcHostBufferStoreMetadata {
            session_id: self.init.session_id,
            handle,
            buffer_size,
        };
        insert_bin(
            request.metadata_mut(),
            STORE_METADATA,
            &metadata.encode_to_vec(),
        );
        self.data
            .clone()
            .host_buffer_store(request)
            .await
            .map_err(refused("HostBufferStore"))?;
        Ok(())
    }

    /// Announces a host buffer that lies in a file.
    ///
    /// # Errors
    /// The server's status.
    pub async fn read_from_disk(&self, handle: u64, buffer_size: i64) -> Result<(), Error> {
        let request = GrpcHostBufferReadFromDiskRequest {
            metadata: Some(GrpcHostBufferStoreMetadata {
                session_id: self.init.session_id,
                handle,
                buffer_size,
            }),
        };
        self.data
            .clone()
            .host_buffer_read_from_disk(request)
            .await
            .map_err(refused("HostBufferReadFromDisk"))?;
        Ok(())
    }

    /// Looks a host buffer up.
    ///
    /// # Errors
    /// The server's status.
    pub async fn lookup(&self, handle: u64) -> Result<Bytes, Error> {
        let request = GrpcHostBufferLookupRequest {
            session_id: self.init.session_id,
            handle,
        };
        let mut stream = self
            .data
            .clone()
            .host_buffer_lookup(request)
            .await
            .map_err(refused("HostBufferLookup"))?
            .into_inner();
        let mut bytes = BytesMut::new();
        while let Some(chunk) = stream.next().await {
            bytes.extend_from_slice(&chunk.map_err(refused("HostBufferLookup"))?.data);
        }
        Ok(bytes.freeze())
    }

    /// Deletes a host buffer.
    ///
    /// # Errors
    /// The server's status.
    pub async fn delete(&self, handle: u64) -> Result<(), Error> {
        let request = GrpcHostBufferDeleteRequest {
            session_id: self.init.session_id,
            handle,
        };
        self.data
            .clone()
            .host_buffer_delete(request)
            .await
            .map_err(refused("HostBufferDelete"))?;
        Ok(())
    }

    /// The service itself, for calls that this client has no method for.
    pub fn service(&self) -> GrpcIfrtServiceClient<Channel> {
        self.control.clone()
    }
}

fn insert_bin(map: &mut MetadataMap, key: &'static str, value: &[u8]) {
    map.insert_bin(key, BinaryMetadataValue::from_bytes(value));
}
