//! Readiness: futures, and arrays whose work has ended.

use std::{borrow::Cow, sync::Arc, time::Instant};

use futures::future::{Either, try_join_all};
use waystation_proto::{
    waystation::worker::{Watch, op},
    xla::ifrt::proxy::{
        CheckFutureRequest, CheckFutureResponse, CheckValueReadyRequest, CheckValueReadyResponse,
        LoadedExecutableFetchExecuteResultRequest, LoadedExecutableFetchExecuteResultResponse,
        ifrt_response::Response,
    },
};

use super::{Future as Promised, Handled, Outcome, Session, UserContext, lock};
use crate::{
    array::{Array, Shard},
    link::{self, Answer, Link},
    status::{self, Status},
    strings::Coming,
};

impl Session {
    /// Answers when the future is there. A future is asked for once.
    pub(super) fn check_future(
        &mut self,
        context: &UserContext,
        request: &CheckFutureRequest,
    ) -> Handled {
        self.take_future(context, request.future_handle, || {
            Response::CheckFutureResponse(CheckFutureResponse {})
        })
    }

    /// Answers when an execution has ended.
    pub(super) fn fetch_execute_result(
        &mut self,
        context: &UserContext,
        request: &LoadedExecutableFetchExecuteResultRequest,
    ) -> Handled {
        self.take_future(context, request.result_status_handle, || {
            Response::LoadedExecutableFetchExecuteResultResponse(
                LoadedExecutableFetchExecuteResultResponse::default(),
            )
        })
    }

    fn take_future(
        &mut self,
        context: &UserContext,
        handle: u64,
        response: fn() -> Response,
    ) -> Handled {
        match lock(&self.tables.futures).remove(&handle) {
            None => Err(status::invalid_argument(format!(
                "unknown future handle {handle}"
            ))),
            Some(Promised::Ready(Ok(()))) => Ok(Outcome::Now(response())),
            Some(Promised::Ready(Err(failure))) => {
                context.depends_on(&failure.context);
                Err(Status::clone(&failure.status))
            }
            Some(Promised::Pending {
                result,
                context: made_by,
            }) => {
                context.depends_on(&made_by);
                Ok(Outcome::Later(Box::pin(async move {
                    result.await.map(|()| response())
                })))
            }
            Some(Promised::Deletion) => Ok(Outcome::Unnumbered(response())),
        }
    }

    /// Answers when all the arrays are ready, or with the first failure.
    pub(super) async fn check_value_ready(
        &mut self,
        context: &UserContext,
        request: &CheckValueReadyRequest,
    ) -> Handled {
        let mut watched = Watched::default();
        for &handle in &request.value_handles {
            watched.add(&self.array(context, handle)?.shards);
        }
        let since = Instant::now();
        let counters = Arc::clone(&self.shared.counters);
        let ready = match self.foresight.waits(&watched.at_workers()) {
            Some(mut ends) => {
                // A piece is there when its worker's part has ended.
                ends.retain(|end| watched.by_link.iter().any(|(link, _)| end.is_from(link)));
                Either::Left(link::all(ends))
            }
            None => Either::Right(self.watch(watched).await),
        };
        Ok(Outcome::Later(Box::pin(async move {
            ready.await?;
            counters.waits_link.add(since);
            Ok(Response::CheckValueReadyResponse(
                CheckValueReadyResponse {},
            ))
        })))
    }

    /// Has the workers tell when shards are ready. They have been told when this returns; what is returned waits.
    async fn watch(
        &self,
        watched: Watched,
    ) -> impl Future<Output = Result<(), Status>> + Send + use<> {
        let mut answers = Vec::with_capacity(watched.by_link.len());
        for (link, shards) in watched.by_link {
            let watch = self.shared.ids.next();
            answers.push(
                link.call(watch, op::Op::Watch(Watch { watch, shards }))
                    .await,
            );
        }
        async move {
            try_join_all(answers.into_iter().map(Answer::wait)).await?;
            try_join_all(watched.strings.iter().map(Coming::wait))
                .await
                .map(|_| ())
        }
    }

    /// When the arrays are ready, or the first failure. The workers have been asked when this returns.
    pub(super) async fn ready(
        &self,
        arrays: &[Array],
    ) -> impl Future<Output = Result<(), Status>> + Send + use<> {
        let mut watched = Watched::default();
        for array in arrays {
            watched.add(&array.shards);
        }
        self.watch(watched).await
    }

    /// Every so often in a chain of requests, learns how the work of one ended: see [`super::user_context`].
    pub(super) async fn settle_now_and_then(&mut self, context: &UserContext, made: &[Array]) {
        if !context.wants_watch() {
            return;
        }
        let ready = self.ready(made).await;
        let context = context.clone();
        self.tasks
            .spawn(async move { context.settled(&ready.await) });
    }
}

/// Shards by the worker that holds them, and those that are here.
#[derive(Default)]
struct Watched {
    by_link: Vec<(Arc<Link>, Vec<u64>)>,
    strings: Vec<Coming>,
}

impl Watched {
    /// All of it, if workers have all of it.
    fn at_workers(&self) -> Cow<'_, [u64]> {
        match self.by_link.as_slice() {
            _ if !self.strings.is_empty() => Cow::default(),
            [(_, shards)] => Cow::Borrowed(shards),
            several => several
                .iter()
                .flat_map(|(_, shards)| shards)
                .copied()
                .collect(),
        }
    }

    fn add(&mut self, shards: &[Arc<Shard>]) {
        for shard in shards {
            if let Ok(coming) = shard.strings() {
                self.strings.push(coming.clone());
                continue;
            }
            let known = self
                .by_link
                .iter_mut()
                .find(|(link, _)| Arc::ptr_eq(link, &shard.link));
            match known {
                Some((_, ids)) => ids.push(shard.id),
                None => self.by_link.push((Arc::clone(&shard.link), vec![shard.id])),
            }
        }
    }
}
