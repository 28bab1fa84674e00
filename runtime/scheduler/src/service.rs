//! The gRPC adapter: decode, call, encode.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, stream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status, Streaming};
use tracing::info;
use waystation_proto::waystation::scheduler::{
    AllotRequest, Allotment, SchedulerStatus, SchedulerStatusRequest, WorkerOrder, WorkerReport,
    resource_manager_server::ResourceManager,
};

use crate::{
    life,
    state::{Claimed, State},
};

/// An order and a farewell: the watching task never waits for a worker that does not read.
const ORDERS: usize = 2;

/// Longest proxy name kept; it is shown to others.
const MAX_PROXY_NAME_CHARS: usize = 128;

#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) state: Arc<State>,
    pub(crate) instance_type: Option<String>,
    pub(crate) lease: Duration,
    pub(crate) stop: CancellationToken,
    pub(crate) tasks: TaskTracker,
}

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl ResourceManager for Service {
    type RegisterStream = ReceiverStream<Result<WorkerOrder, Status>>;
    type AllotStream = Replies<Allotment>;

    async fn register(
        &self,
        request: Request<Streaming<WorkerReport>>,
    ) -> Result<Response<Self::RegisterStream>, Status> {
        let (orders, outbound) = mpsc::channel(ORDERS);
        // A task of its own, because beats must be read whether or not the worker reads its orders.
        self.tasks.spawn(life::watch(
            Arc::clone(&self.state),
            request.into_inner(),
            orders,
            self.lease,
            self.stop.clone(),
        ));
        Ok(Response::new(ReceiverStream::new(outbound)))
    }

    async fn allot(
        &self,
        request: Request<AllotRequest>,
    ) -> Result<Response<Self::AllotStream>, Status> {
        let request = request.into_inner();
        if request.link_version != waystation_proto::LINK_VERSION {
            return Err(Status::failed_precondition(format!(
                "the proxy speaks link version {} ({}), the resource manager link version {} ({}): run both from the \
                 same release",
                request.link_version,
                request.build_id,
                waystation_proto::LINK_VERSION,
                waystation_proto::BUILD_ID
            )));
        }
        let proxy: String = request.proxy.chars().take(MAX_PROXY_NAME_CHARS).collect();
        info!(%proxy, holder = self.state.holder(), "proxy asks for the workers");
        let allotments = Allotments {
            changes: self.state.changes(),
            claimed: self.state.claim(proxy, request.resume_epoch),
            last: None,
        };
        let stop = self.stop.clone();
        let replies = stream::unfold(Some((allotments, stop)), |open| async move {
            let (mut allotments, stop) = open?;
            tokio::select! {
                // First, so that a proxy is not told that the workers are gone when it is the resource manager that goes.
                biased;
                () = stop.cancelled() => {
                    Some((Err(Status::unavailable("the resource manager is shutting down")), None))
                }
                next = allotments.next() => match next {
                    Some(next) => Some((Ok(next), Some((allotments, stop)))),
                    None => Some((Err(Status::aborted("a newer stream of this proxy holds the workers")), None)),
                },
            }
        });
        Ok(Response::new(Box::pin(replies)))
    }

    async fn get_status(
        &self,
        _: Request<SchedulerStatusRequest>,
    ) -> Result<Response<SchedulerStatus>, Status> {
        Ok(Response::new(SchedulerStatus {
            instance_type: self.instance_type.clone().unwrap_or_default(),
            ..self.state.status()
        }))
    }
}

/// A proxy's view. Dropped by tonic when the proxy's connection ends, which gives the workers back.
struct Allotments {
    changes: tokio::sync::watch::Receiver<u64>,
    claimed: Claimed,
    last: Option<Allotment>,
}

impl Allotments {
    /// The first allotment at once, then each one that differs from the one before; none at the end.
    async fn next(&mut self) -> Option<Allotment> {
        loop {
            self.changes.mark_unchanged();
            let now = self.claimed.allotment()?;
            if self.last.as_ref() != Some(&now) {
                self.last = Some(now.clone());
                return Some(now);
            }
            if self.changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}
