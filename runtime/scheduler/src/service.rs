//! The gRPC adapter: decode, call, encode.

use std::{net::SocketAddr, pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, stream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status, Streaming};
use tracing::info;
use waystation_proto::waystation::scheduler::{
    AllotRequest, Allotment, GetLeaseReply, GetLeaseRequest, GiveBackReply, GiveBackRequest,
    IntroduceReply, IntroduceRequest, SchedulerStatus, SchedulerStatusRequest, WorkerOrder,
    WorkerReport, introduce_reply::Variable, resource_manager_server::ResourceManager,
};

use crate::{
    InstanceType,
    holds::Wish,
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
    pub(crate) lease: Duration,
    /// What each slice is, where that was told.
    pub(crate) instance_type: Option<InstanceType>,
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
        let peer = request.remote_addr();
        let request = request.into_inner();
        check_version("proxy", request.link_version, &request.build_id)?;
        let wish = self.wish(request, peer)?;
        info!(proxy = %wish.proxy, slices = wish.slices, elastic = wish.elastic, "proxy asks for slices");
        let allotments = Allotments {
            changes: self.state.changes(),
            claimed: self.state.claim(wish),
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
                    None => Some((Err(Status::aborted("a newer stream of this proxy holds the slices, or it has given them back")), None)),
                },
            }
        });
        Ok(Response::new(Box::pin(replies)))
    }

    async fn give_back(
        &self,
        request: Request<GiveBackRequest>,
    ) -> Result<Response<GiveBackReply>, Status> {
        self.state.give_back(request.into_inner().instance);
        Ok(Response::new(GiveBackReply {}))
    }

    async fn introduce(
        &self,
        request: Request<IntroduceRequest>,
    ) -> Result<Response<IntroduceReply>, Status> {
        let request = request.into_inner();
        check_version("worker", request.link_version, &request.build_id)?;
        // Without an instance type the machine's own environment has all there is.
        let Some(instance) = self.instance_type.as_ref().filter(|kind| !kind.is_cpu()) else {
            return Ok(Response::new(IntroduceReply::default()));
        };
        let told = self.state.introduce(instance, request);
        let told = told.map_err(Status::invalid_argument)?;
        let unknown = told.unknown.iter();
        let unknown = unknown.map(|place| format!("slice {} task {}", place.slice, place.task));
        let variable = |(name, value): (&str, String)| Variable {
            name: name.to_owned(),
            value,
        };
        Ok(Response::new(IntroduceReply {
            waiting_for: unknown.collect::<Vec<_>>().join(", "),
            variables: told.set.into_iter().map(variable).collect(),
            lacking: told.lacking.into_iter().map(str::to_owned).collect(),
        }))
    }

    async fn get_lease(
        &self,
        _: Request<GetLeaseRequest>,
    ) -> Result<Response<GetLeaseReply>, Status> {
        let lease_ms = u32::try_from(self.lease.as_millis()).unwrap_or(u32::MAX);
        Ok(Response::new(GetLeaseReply { lease_ms }))
    }

    async fn get_status(
        &self,
        _: Request<SchedulerStatusRequest>,
    ) -> Result<Response<SchedulerStatus>, Status> {
        Ok(Response::new(SchedulerStatus {
            instance_type: self
                .instance_type
                .as_ref()
                .map_or_else(String::new, ToString::to_string),
            ..self.state.status()
        }))
    }
}

impl Service {
    /// What a proxy asks for, where this cluster could ever give it.
    fn wish(&self, request: AllotRequest, peer: Option<SocketAddr>) -> Result<Wish, Status> {
        let slices = self.state.slices();
        let wanted = u32::try_from(request.virtual_slices.len()).unwrap_or(u32::MAX);
        if wanted > slices {
            return Err(Status::invalid_argument(format!(
                "--virtual_slices names {wanted} slices, and this resource manager has {slices} (--instance_count)"
            )));
        }
        for asked in &request.virtual_slices {
            let asked: InstanceType = asked
                .parse()
                .map_err(|error| Status::invalid_argument(format!("--virtual_slices: {error}")))?;
            if let Some(ours) = &self.instance_type
                && !ours.is_same(&asked)
            {
                return Err(Status::invalid_argument(format!(
                    "--virtual_slices asks for {asked}, and this resource manager has slices of {ours} (--instance_type)"
                )));
            }
        }
        let proxy: String = request.proxy.chars().take(MAX_PROXY_NAME_CHARS).collect();
        Ok(Wish {
            proxy: named(proxy, peer),
            instance: request.instance,
            slices: (wanted > 0).then_some(wanted),
            kind: request
                .virtual_slices
                .into_iter()
                .next()
                .unwrap_or_default(),
            ticket: request.ticket,
            elastic: request.elastic_slices,
            resume: request.resume_epoch,
            resume_slices: request.resume_slices,
        })
    }
}

fn check_version(who: &str, link_version: u32, build_id: &str) -> Result<(), Status> {
    if link_version == waystation_proto::LINK_VERSION {
        return Ok(());
    }
    Err(Status::failed_precondition(format!(
        "the {who} speaks link version {link_version} ({build_id}), the resource manager link version {} ({}): run both from \
         the same release",
        waystation_proto::LINK_VERSION,
        waystation_proto::BUILD_ID
    )))
}

/// The name of a proxy: where it listens. One that listens on all addresses is where it comes from.
fn named(proxy: String, peer: Option<SocketAddr>) -> String {
    match (proxy.parse::<SocketAddr>(), peer) {
        (Ok(listens), Some(peer)) if listens.ip().is_unspecified() => {
            SocketAddr::new(peer.ip().to_canonical(), listens.port()).to_string()
        }
        _ => proxy,
    }
}

/// A proxy's view. Dropped by tonic when the proxy's connection ends.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_that_listens_everywhere_is_named_by_where_it_comes_from() {
        let peer = Some("[::ffff:10.0.0.7]:40000".parse().expect("an address"));
        for (listens, name) in [
            ("0.0.0.0:29000", "10.0.0.7:29000"),
            ("[::]:29000", "10.0.0.7:29000"),
            ("10.0.0.8:29000", "10.0.0.8:29000"),
            ("train", "train"),
        ] {
            assert_eq!(named(listens.to_owned(), peer), name);
        }
    }
}
