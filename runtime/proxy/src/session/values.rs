//! Readiness: futures, and arrays whose work has ended.

use std::sync::Arc;

use futures::future::try_join_all;
use waystation_proto::{
    waystation::worker::{Watch, op},
    xla::ifrt::proxy::{
        CheckFutureRequest, CheckFutureResponse, CheckValueReadyRequest, CheckValueReadyResponse,
        LoadedExecutableFetchExecuteResultRequest, LoadedExecutableFetchExecuteResultResponse,
        ifrt_response::Response,
    },
};

use super::{Future, Handled, Outcome, Session, lock};
use crate::{link::Link, status, strings::Coming};

impl Session {
    /// Answers when the future is there. A future is asked for once.
    pub(super) fn check_future(&mut self, request: &CheckFutureRequest) -> Handled {
        self.take_future(request.future_handle, || {
            Response::CheckFutureResponse(CheckFutureResponse {})
        })
    }

    /// Answers when an execution has ended.
    pub(super) fn fetch_execute_result(
        &mut self,
        request: &LoadedExecutableFetchExecuteResultRequest,
    ) -> Handled {
        self.take_future(request.result_status_handle, || {
            Response::LoadedExecutableFetchExecuteResultResponse(
                LoadedExecutableFetchExecuteResultResponse::default(),
            )
        })
    }

    fn take_future(&mut self, handle: u64, response: fn() -> Response) -> Handled {
        match lock(&self.tables.futures).remove(&handle) {
            None => Err(status::invalid_argument(format!(
                "unknown future handle {handle}"
            ))),
            Some(Future::Ready(result)) => result.map(|()| Outcome::Now(response())),
            Some(Future::Pending(future)) => Ok(Outcome::Later(Box::pin(async move {
                future.await.map(|()| response())
            }))),
        }
    }

    /// Answers when all the arrays are ready, or with the first failure.
    pub(super) async fn check_value_ready(&mut self, request: &CheckValueReadyRequest) -> Handled {
        let mut by_link: Vec<(Arc<Link>, Vec<u64>)> = Vec::new();
        let mut strings = Vec::new();
        for &handle in &request.value_handles {
            for shard in &self.array(handle)?.shards {
                if let Ok(coming) = shard.strings() {
                    strings.push(coming.clone());
                    continue;
                }
                match by_link
                    .iter_mut()
                    .find(|(link, _)| Arc::ptr_eq(link, &shard.link))
                {
                    Some((_, shards)) => shards.push(shard.id),
                    None => by_link.push((Arc::clone(&shard.link), vec![shard.id])),
                }
            }
        }
        let mut answers = Vec::with_capacity(by_link.len());
        for (link, shards) in by_link {
            let watch = self.shared.ids.next();
            answers.push(
                link.call(watch, op::Op::Watch(Watch { watch, shards }))
                    .await,
            );
        }
        Ok(Outcome::Later(Box::pin(async move {
            try_join_all(answers.into_iter().map(|answer| answer.wait())).await?;
            try_join_all(strings.iter().map(Coming::wait)).await?;
            Ok(Response::CheckValueReadyResponse(
                CheckValueReadyResponse {},
            ))
        })))
    }
}
