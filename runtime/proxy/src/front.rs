//! The gRPC service that a JAX process dials.

mod waiting;

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, Mutex},
};

use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use waystation_proto::xla::ifrt::proxy::{
    GrpcGetVersionRequest, GrpcGetVersionResponse, GrpcHostBufferDeleteRequest,
    GrpcHostBufferDeleteResponse, GrpcHostBufferLookupRequest, GrpcHostBufferLookupResponse,
    GrpcHostBufferReadFromDiskRequest, GrpcHostBufferReadFromDiskResponse,
    GrpcHostBufferStoreMetadata, GrpcHostBufferStoreRequest, GrpcHostBufferStoreResponse,
    IfrtRequest, IfrtResponse, grpc_ifrt_service_server::GrpcIfrtService,
};

use self::waiting::{Never, Waiting};
use crate::lock::lock;
use crate::{
    counters::Counters,
    host_buffers::{HostBuffers, HostMemory},
    session::{ReplyStream, Session, Shared},
    status, version,
};

/// The host buffers of all sessions, by session id.
type Sessions = Arc<Mutex<HashMap<u64, Arc<HostBuffers>>>>;

/// The service. Clones share all they have.
#[derive(Clone, Debug)]
pub(crate) struct Front {
    pub(crate) shared: Arc<Shared>,
    memory: Arc<HostMemory>,
    sessions: Sessions,
    max_sessions: usize,
    shutdown: CancellationToken,
    session_ids: RandomState,
}

impl Front {
    pub(crate) fn new(
        shared: Arc<Shared>,
        memory: HostMemory,
        max_sessions: usize,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            shared,
            memory: Arc::new(memory),
            sessions: Sessions::default(),
            max_sessions,
            shutdown,
            session_ids: RandomState::new(),
        }
    }

    /// Registers a session under a number that another client cannot guess: it is all that guards its host buffers.
    fn open_session(&self, buffers: &Arc<HostBuffers>) -> Result<OpenSession, Status> {
        let mut sessions = lock(&self.sessions);
        if sessions.len() >= self.max_sessions {
            return Err(Status::resource_exhausted(format!(
                "this proxy serves {} sessions at a time (--max_sessions) and has no room for another one",
                self.max_sessions
            )));
        }
        let mut n = self.shared.ids.next();
        let id = loop {
            let id = self.session_ids.hash_one(n);
            if id != 0 && !sessions.contains_key(&id) {
                break id;
            }
            n += 1;
        };
        sessions.insert(id, Arc::clone(buffers));
        Counters::add(&self.shared.counters.sessions, 1);
        Counters::add(&self.shared.counters.sessions_total, 1);
        Ok(OpenSession {
            id,
            sessions: Arc::clone(&self.sessions),
            buffers: Arc::clone(buffers),
            counters: Arc::clone(&self.shared.counters),
        })
    }

    /// The host buffers of a session.
    pub(crate) fn buffers(&self, session: u64) -> Result<Arc<HostBuffers>, Status> {
        lock(&self.sessions)
            .get(&session)
            .cloned()
            .ok_or_else(|| Status::invalid_argument(format!("unknown session {session}")))
    }

    /// Opens a session; the workers are there.
    fn serve(&self, requests: Streaming<IfrtRequest>) -> Result<ReplyStream, Status> {
        let buffers = Arc::new(HostBuffers::new(Arc::clone(&self.memory)));
        let open = self.open_session(&buffers).inspect_err(|status| {
            tracing::warn!(reason = %status.message(), "client refused");
        })?;
        let (session, replies) = Session::new(Arc::clone(&self.shared), open.id, buffers);
        let shutdown = self.shutdown.clone();
        tracing::info!(session = open.id, "session opened");
        // Ends with the client's stream or the proxy; dropping the session then frees what it held.
        tokio::spawn(async move {
            tokio::select! {
                () = session.run(requests) => {}
                () = shutdown.cancelled() => {}
            }
            tracing::info!(session = open.id, "session closed");
            drop(open);
        });
        Ok(replies)
    }
}

/// A client that waits.
struct Early {
    front: Front,
    waiting: Waiting,
    requests: Streaming<IfrtRequest>,
}

/// What a client gets: notices for as long as it waits, then its session's replies.
enum Stage {
    Waiting(Box<Early>),
    Serving(ReplyStream),
    Over,
}

impl Stage {
    async fn next(self) -> Option<(Result<IfrtResponse, Status>, Stage)> {
        let mut replies = match self {
            Stage::Waiting(mut early) => {
                let told = tokio::select! {
                    () = early.front.shutdown.cancelled() => Err(Never),
                    told = early.waiting.next() => told,
                };
                let replies = match told {
                    Err(Never) => Err(Status::unavailable("the proxy is shutting down")),
                    Ok(Some(notice)) => return Some((Ok(notice), Stage::Waiting(early))),
                    Ok(None) => early.front.serve(early.requests),
                };
                match replies {
                    Ok(replies) => replies,
                    Err(status) => return Some((Err(status), Stage::Over)),
                }
            }
            Stage::Serving(replies) => replies,
            Stage::Over => return None,
        };
        let reply = replies.next().await?;
        Some((reply, Stage::Serving(replies)))
    }
}

/// A session's place in the table, given up when dropped.
struct OpenSession {
    id: u64,
    sessions: Sessions,
    buffers: Arc<HostBuffers>,
    counters: Arc<Counters>,
}

impl Drop for OpenSession {
    fn drop(&mut self) {
        lock(&self.sessions).remove(&self.id);
        // Calls of the data service may outlive the session.
        self.buffers.end();
        Counters::sub(&self.counters.sessions, 1);
    }
}

#[tonic::async_trait]
impl GrpcIfrtService for Front {
    type IfrtSessionStream = BoxStream<'static, Result<IfrtResponse, Status>>;
    type HostBufferLookupStream = BoxStream<'static, Result<GrpcHostBufferLookupResponse, Status>>;

    async fn get_version(
        &self,
        request: Request<GrpcGetVersionRequest>,
    ) -> Result<Response<GrpcGetVersionResponse>, Status> {
        let version = version::negotiate(request.get_ref()).inspect_err(|status| {
            tracing::warn!(reason = %status.message(), "client refused");
        })?;
        Ok(Response::new(GrpcGetVersionResponse {
            version: Some(version),
        }))
    }

    async fn ifrt_session(
        &self,
        request: Request<Streaming<IfrtRequest>>,
    ) -> Result<Response<Self::IfrtSessionStream>, Status> {
        let requests = request.into_inner();
        let cluster = self.shared.cluster.clone();
        let progress = {
            let state = cluster.borrow();
            state.0.is_none().then(|| state.1.clone())
        };
        if let Some(progress) = progress {
            tracing::info!(%progress, "a client waits for the workers");
            let first = Stage::Waiting(Box::new(Early {
                front: self.clone(),
                waiting: Waiting::new(cluster),
                requests,
            }));
            return Ok(Response::new(Box::pin(stream::unfold(first, Stage::next))));
        }
        Ok(Response::new(Box::pin(self.serve(requests)?)))
    }

    async fn host_buffer_store(
        &self,
        _request: Request<Streaming<GrpcHostBufferStoreRequest>>,
    ) -> Result<Response<GrpcHostBufferStoreResponse>, Status> {
        Err(served_before("HostBufferStore"))
    }

    async fn host_buffer_lookup(
        &self,
        _request: Request<GrpcHostBufferLookupRequest>,
    ) -> Result<Response<Self::HostBufferLookupStream>, Status> {
        Err(served_before("HostBufferLookup"))
    }

    async fn host_buffer_delete(
        &self,
        request: Request<GrpcHostBufferDeleteRequest>,
    ) -> Result<Response<GrpcHostBufferDeleteResponse>, Status> {
        let request = request.into_inner();
        self.buffers(request.session_id)?
            .delete(request.handle)
            .map_err(|e| status::to_tonic(&e))?;
        Ok(Response::new(GrpcHostBufferDeleteResponse {}))
    }

    async fn host_buffer_read_from_disk(
        &self,
        request: Request<GrpcHostBufferReadFromDiskRequest>,
    ) -> Result<Response<GrpcHostBufferReadFromDiskResponse>, Status> {
        let metadata = request.into_inner().metadata.unwrap_or_default();
        let size = buffer_size(&metadata)?;
        let buffers = self.buffers(metadata.session_id)?;
        let store = buffers
            .store(metadata.handle, size)
            .map_err(|e| status::to_tonic(&e))?;
        let transfers = Arc::clone(&self.shared.large_transfers);
        let taken =
            tokio::task::spawn_blocking(move || transfers.take(&buffers, metadata.handle, size));
        let taken = taken
            .await
            .unwrap_or_else(|e| Err(status::unavailable(format!("no file was taken: {e}"))));
        match taken {
            Ok(file) => store.adopt(file).map_err(|e| status::to_tonic(&e))?,
            // The client gives up its session after this, and shows this text.
            Err(status) => {
                tracing::warn!(reason = %status.message, "a large transfer failed");
                let shown = status::to_tonic(&status);
                store.fail(status);
                return Err(shown);
            }
        }
        Counters::add(&self.shared.counters.stored_bytes, size);
        Ok(Response::new(GrpcHostBufferReadFromDiskResponse {}))
    }
}

/// The calls that [`Bulk`](crate::bulk::Bulk) answers, which stands before this service.
fn served_before(call: &str) -> Status {
    Status::unimplemented(format!("{call} does not come here"))
}

/// The size that a client announces.
pub(crate) fn buffer_size(metadata: &GrpcHostBufferStoreMetadata) -> Result<u64, Status> {
    u64::try_from(metadata.buffer_size).map_err(|_| {
        Status::invalid_argument(format!("a host buffer of {} bytes", metadata.buffer_size))
    })
}
