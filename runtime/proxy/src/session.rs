//! One client's session.
//!
//! Requests take effect on the session's tables in the order of the stream, in one task. What cannot be answered at once
//! (a compile, a copy to the host, readiness) has been sent to the workers in order by then and is awaited in a task of its
//! own; replies may come in any order. At the stream's end everything the session held is dropped: shards, executables,
//! transfers and waiting host buffers are released at the workers by their `Drop`.

mod arrays;
mod bitcast;
mod compiled;
mod copies;
mod descriptions;
mod execute;
mod foresight;
mod init;
mod minted;
mod placement;
mod plugin_program;
mod programs;
mod record_only;
mod remap;
mod replies;
mod reshard;
mod reshard_program;
mod strings;
mod upload;
mod usage;
mod user_context;
mod values;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use futures::future::BoxFuture;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};
use tokio_stream::StreamExt as _;
use waystation_proto::xla::ifrt::proxy::{
    IfrtRequest, ifrt_request::Request, ifrt_response::Response,
};

pub(crate) use self::{
    copies::{ReleaseAtEnd, transferred},
    replies::ReplyStream,
    user_context::UserContext,
};
use self::{
    minted::Minted,
    replies::{Numbered, Replies},
    user_context::Destroyed,
};
use crate::lock::lock;
use crate::{
    array::{Array, Failure, Value},
    cluster::{Cluster, ClusterWatch},
    config::Recording,
    counters::{Counters, Times},
    host_buffers::HostBuffers,
    large_transfers::LargeTransfers,
    link::{Answer, Ids},
    status::{self, Status},
};

pub(crate) use self::{
    descriptions::Descriptions,
    usage::{Held, Usages},
};

/// The lowest handle that a server may mint; the client's own start at 1.
const FIRST_SERVER_HANDLE: u64 = 1 << 48;
/// Requests of one session that may be awaited at a time; beyond it the session stops reading.
const MAX_AWAITED: u32 = 1 << 14;

/// What all sessions of a proxy share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) cluster: ClusterWatch,
    pub(crate) counters: Arc<Counters>,
    pub(crate) ids: Arc<Ids>,
    pub(crate) usages: Arc<Usages>,
    pub(crate) xla_flags: Vec<String>,
    pub(crate) recording: Option<Recording>,
    pub(crate) large_transfers: Arc<LargeTransfers>,
    pub(crate) descriptions: Descriptions,
}

/// How a request is answered.
#[allow(
    clippy::large_enum_variant,
    reason = "one at a time lies on the stack; a box would be an allocation a request"
)]
enum Outcome {
    /// At once.
    Now(Response),
    /// At once, with a reply that jaxlib does not count.
    Unnumbered(Response),
    /// When the work is done.
    Later(BoxFuture<'static, Result<Response, Status>>),
}

/// What a handler gives back.
type Handled = Result<Outcome, Status>;

/// A value that comes later: asked for once.
enum Future {
    Ready(Result<(), Failure>),
    Pending {
        result: BoxFuture<'static, Result<(), Status>>,
        /// The request whose result it is.
        context: UserContext,
    },
    /// Of a DeleteArray: it is there. jaxlib does not count the reply to its CheckFuture.
    Deletion,
}

/// Tables that tasks of the session write to as well.
#[derive(Default)]
struct Tables {
    programs: Mutex<HashMap<u64, programs::Program>>,
    futures: Mutex<HashMap<u64, Future>>,
}

impl std::fmt::Debug for Tables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tables").finish_non_exhaustive()
    }
}

/// One client.
pub(crate) struct Session {
    shared: Arc<Shared>,
    /// The client's secret.
    id: u64,
    /// Names the session towards workers.
    number: u64,
    cluster: Option<Arc<Cluster>>,
    clusters: ClusterWatch,
    /// There are other devices now in the place of the client's, as said here.
    replaced: Option<String>,
    values: HashMap<u64, Value>,
    host_buffers: Arc<HostBuffers>,
    tables: Arc<Tables>,
    usage: usage::Usage,
    foresight: foresight::Foresight<Vec<Answer>>,
    next_handle: Arc<AtomicU64>,
    replies: Arc<Replies>,
    destroyed: Arc<Destroyed>,
    tasks: JoinSet<()>,
    awaited: Arc<Semaphore>,
    /// Whether the client has been told of saves that it cannot restore.
    warned_of_saves: bool,
}

impl Session {
    pub(crate) fn new(
        shared: Arc<Shared>,
        id: u64,
        host_buffers: Arc<HostBuffers>,
    ) -> (Self, ReplyStream) {
        let destroyed = Arc::new(Destroyed::default());
        let number = shared.ids.next();
        let tables = Arc::new(Tables::default());
        let (replies, stream) = Replies::new(Arc::clone(&destroyed));
        let session = Self {
            number,
            clusters: shared.cluster.clone(),
            usage: shared.usages.open(number, &tables),
            tables,
            shared,
            id,
            cluster: None,
            replaced: None,
            values: HashMap::new(),
            host_buffers,
            foresight: foresight::Foresight::default(),
            next_handle: Arc::new(AtomicU64::new(FIRST_SERVER_HANDLE)),
            replies: Arc::new(replies),
            destroyed,
            tasks: JoinSet::new(),
            awaited: Arc::new(Semaphore::new(MAX_AWAITED as usize)),
            warned_of_saves: false,
        };
        (session, stream)
    }

    /// Serves the stream to its end.
    pub(crate) async fn run(mut self, mut requests: tonic::Streaming<IfrtRequest>) {
        let replies = Arc::clone(&self.replies);
        loop {
            let request = tokio::select! {
                // Ended tasks are taken out as they end, so that the set does not grow.
                Some(_) = self.tasks.join_next(), if !self.tasks.is_empty() => continue,
                () = self.replies.closed() => break,
                request = requests.next() => request,
            };
            match request {
                Some(Ok(request)) => {
                    tokio::select! {
                        biased;
                        () = self.serve(request) => {}
                        // What the request waits for (a place among those awaited) may never come; the client's end must.
                        () = replies.closed() => break,
                    }
                    self.usage.arrays(self.values.len());
                }
                Some(Err(error)) => {
                    tracing::info!(session = self.id, %error, "session stream ended");
                    // Of a message that does not decode the client is told; else it is gone.
                    replies.break_off(status::malformed(error));
                    break;
                }
                None => break,
            }
        }
    }

    async fn serve(&mut self, request: IfrtRequest) {
        Counters::add(&self.shared.counters.requests, 1);
        self.renew_cluster();
        let metadata = request.request_metadata.unwrap_or_default();
        let op_id = metadata.op_id;
        // Lives until the reply is sent: what an error names must not be reported as destroyed before it.
        let context = self.destroyed.used(metadata.user_context_id);
        let since = Instant::now();
        let Some(request) = request.request else {
            let status = status::unimplemented(
                "a request that this Waystation does not know (a newer protocol's)",
            );
            self.replies.send(op_id, Numbered::No, Err(status)).await;
            return;
        };
        let minted = Minted::of(&request);
        let timed = timed(&request);
        let named = names_its_line(&request);
        let places = places(&request);
        let verdict = self.host_buffers.verdict().cloned();
        if let Some(reason) = verdict.or_else(|| self.outlived()) {
            self.bind_failure(minted, &reason, &context);
            self.replies.send(op_id, Numbered::No, Err(reason)).await;
            return;
        }
        if let Err(status) = self.check_free(&minted) {
            self.replies.send(op_id, Numbered::No, Err(status)).await;
            return;
        }
        match self.handle(&context, request).await {
            Ok(Outcome::Now(response)) => {
                let numbered = match &response {
                    Response::InitResponse(_) => Numbered::Last,
                    _ => Numbered::Yes,
                };
                self.replies.send(op_id, numbered, Ok(response)).await;
            }
            Ok(Outcome::Unnumbered(response)) => {
                self.replies.send(op_id, Numbered::No, Ok(response)).await;
            }
            Ok(Outcome::Later(work)) => {
                // Waiting for a place here stops the reading of the stream: the bound on what a session has in flight.
                let place = Arc::clone(&self.awaited)
                    .acquire_many_owned(places)
                    .await
                    .ok();
                let work = match timed {
                    Some(times) => self.time(work, times, since),
                    None => work,
                };
                self.answer_later(op_id, context.clone(), named, work, place);
            }
            Err(status) => {
                let status = if named {
                    status::with_user_context(status, context.id())
                } else {
                    status
                };
                context.settled(&Err(status.clone()));
                self.bind_failure(minted, &status, &context);
                self.replies.send(op_id, Numbered::No, Err(status)).await;
            }
        }
    }

    /// Counts how long `work` took, when it has succeeded.
    fn time(
        &self,
        work: BoxFuture<'static, Result<Response, Status>>,
        times: fn(&Counters) -> &Times,
        since: Instant,
    ) -> BoxFuture<'static, Result<Response, Status>> {
        let counters = Arc::clone(&self.shared.counters);
        Box::pin(async move {
            let response = work.await?;
            times(&counters).add(since);
            Ok(response)
        })
    }

    fn answer_later(
        &mut self,
        op_id: u64,
        context: UserContext,
        named: bool,
        work: BoxFuture<'static, Result<Response, Status>>,
        place: Option<OwnedSemaphorePermit>,
    ) {
        let replies = Arc::clone(&self.replies);
        self.tasks.spawn(async move {
            let result = work.await.map_err(|status| {
                if named {
                    status::with_user_context(status, context.id())
                } else {
                    status
                }
            });
            replies.send(op_id, Numbered::Yes, result).await;
            drop((context, place));
        });
    }

    async fn handle(&mut self, context: &UserContext, request: Request) -> Handled {
        match request {
            Request::InitRequest(_) => self.init(),
            Request::CheckFutureRequest(r) => self.check_future(context, &r),
            Request::CheckValueReadyRequest(r) => self.check_value_ready(context, &r).await,
            Request::MakeArrayFromHostBufferRequest(r) => self.make_array(context, r).await,
            Request::MakeArraysFromHostBufferShardsRequest(r) => self.make_arrays(context, r).await,
            Request::MakeErrorArraysRequest(r) => self.make_error_arrays(context, r),
            Request::AssembleArrayFromSingleDeviceArraysRequest(r) => self.assemble(context, &r),
            Request::DisassembleIntoSingleDeviceArraysRequest(r) => self.disassemble(context, &r),
            Request::FullyReplicatedShardRequest(r) => self.fully_replicated_shard(context, &r),
            Request::RemapArraysRequest(r) => self.remap(context, r),
            Request::ReshardArraysRequest(r) => self.reshard_arrays(context, r).await,
            Request::BitcastArraysRequest(r) => self.bitcast_arrays(context, r).await,
            Request::CopyArraysRequest(r) => self.copy_arrays(context, r).await,
            Request::CopyToHostBufferRequest(r) => self.copy_to_host(context, r).await,
            Request::DeleteArrayRequest(r) => self.delete_arrays(&r),
            Request::DestructArrayRequest(r) => self.destruct_arrays(&r),
            Request::IsArrayDeletedRequest(r) => self.is_array_deleted(&r),
            Request::CompileRequest(r) => self.compile(r).await,
            Request::LoadedExecutableMetadataRequest(r) => self.metadata(&r),
            Request::LoadedExecutableExecuteRequest(r) => self.execute(context, r).await,
            Request::LoadedExecutableFetchExecuteResultRequest(r) => {
                self.fetch_execute_result(context, &r)
            }
            Request::LoadedExecutableCostAnalysisRequest(r) => {
                self.cost_analysis(context, &r).await
            }
            Request::LoadedExecutableHumanReadableProgramTextRequest(r) => {
                self.program_text(&r).await
            }
            Request::LoadedExecutableDeleteRequest(r) => self.delete_program(&r),
            Request::LoadedExecutableIsDeletedRequest(r) => self.is_program_deleted(&r),
            Request::LoadedExecutableDestructRequest(r) => self.destruct_program(&r),
            Request::GetDefaultDeviceAssignmentRequest(r) => self.default_device_assignment(&r),
            Request::GetDefaultLayoutRequest(r) => self.default_layout(r).await,
            Request::LoadedExecutableMpmdMetadataRequest(_) => {
                Err(not_served("LoadedExecutableMpmdMetadata"))
            }
            Request::LoadedExecutableMpmdCostAnalysisRequest(_) => {
                Err(not_served("LoadedExecutableMpmdCostAnalysis"))
            }
            Request::LoadedHostCallbackPollRequest(_) => Err(not_served("LoadedHostCallbackPoll")),
            Request::LoadedHostCallbackReturnRequest(_) => {
                Err(not_served("LoadedHostCallbackReturn"))
            }
        }
    }

    /// The devices; fails before InitRequest.
    fn cluster(&self) -> Result<&Arc<Cluster>, Status> {
        self.cluster.as_ref().ok_or_else(|| {
            status::failed_precondition("the first request of a session must be InitRequest")
        })
    }

    /// An array for a request to use. Whatever the array may fail with, the request may.
    fn array(&self, context: &UserContext, handle: u64) -> Result<&Array, Status> {
        match self.values.get(&handle) {
            None => Err(status::invalid_argument(format!(
                "unknown array handle {handle}"
            ))),
            Some(Err(failure)) => {
                context.depends_on(&failure.context);
                Err(Status::clone(&failure.status))
            }
            Some(Ok(array)) if array.deleted => Err(status::invalid_argument(format!(
                "array {handle} has been deleted or donated"
            ))),
            Some(Ok(array)) => {
                for shard in &array.shards {
                    context.depends_on(&shard.context);
                }
                // A worker that has come back to the place knows nothing of it.
                match array.shards.iter().find_map(|shard| shard.lost()) {
                    Some(lost) => Err(lost),
                    None => Ok(array),
                }
            }
        }
    }

    /// Puts a new array down under the client's handle, or under one minted here where it gave none.
    fn insert(&mut self, handle: Option<u64>, value: Value) -> Result<u64, Status> {
        let handle = match handle {
            Some(handle) if handle != 0 => {
                if self.values.contains_key(&handle) {
                    return Err(status::invalid_argument(format!(
                        "array handle {handle} is in use"
                    )));
                }
                handle
            }
            _ => self.mint(),
        };
        self.values.insert(handle, value);
        Ok(handle)
    }

    fn mint(&self) -> u64 {
        self.next_handle.fetch_add(1, Relaxed)
    }

    /// A future that is there already.
    fn ready_future(&self) -> u64 {
        self.future(Future::Ready(Ok(())))
    }

    fn future(&self, future: Future) -> u64 {
        let handle = self.mint();
        lock(&self.tables.futures).insert(handle, future);
        handle
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Its launches are nobody's from here on.
        let links = self.cluster.iter().flat_map(|cluster| &cluster.links);
        links.for_each(|link| link.end_client());
    }
}

fn not_served(request: &str) -> Status {
    status::unimplemented(format!("{request} is not served by this Waystation"))
}

/// The places among those awaited that a request takes. Its answer is held until the client takes it, and a program's text
/// may have any length.
fn places(request: &Request) -> u32 {
    match request {
        Request::LoadedExecutableHumanReadableProgramTextRequest(_) => MAX_AWAITED / 4,
        _ => 1,
    }
}

/// Whether an error of the request names the Python line that asked. The client waits for these in the call itself: the
/// exception is raised at that line, and jaxlib would show the name as it is.
fn names_its_line(request: &Request) -> bool {
    !matches!(
        request,
        Request::CompileRequest(_)
            | Request::GetDefaultLayoutRequest(_)
            | Request::GetDefaultDeviceAssignmentRequest(_)
            | Request::LoadedExecutableMetadataRequest(_)
            | Request::LoadedExecutableHumanReadableProgramTextRequest(_)
    )
}

/// The requests that a client waits for while it runs: where their time is counted.
fn timed(request: &Request) -> Option<fn(&Counters) -> &Times> {
    match request {
        Request::CheckValueReadyRequest(_) => Some(|counters| &counters.waits),
        Request::CopyToHostBufferRequest(_) => Some(|counters| &counters.read),
        _ => None,
    }
}
