//! When the server tells a client that it is done with a user context: once for each use, in numbered replies without a gap, and
//! not before the last thing that can fail in its name is gone. A jaxlib that is told too often ends its process; this ledger
//! keeps the same books and says so.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use bytes::Bytes;
use waystation_client::{Client, Request, Response, request};
use waystation_proto::{
    tensorflow::StatusProto,
    xla::ifrt::proxy::{
        CheckFutureRequest, CheckValueReadyRequest, DeleteArrayRequest, DestructArrayRequest,
        GetDefaultDeviceAssignmentRequest, IsArrayDeletedRequest,
    },
};
use waystation_tests::cluster::Cluster;

/// y = x + x over four f32.
const DOUBLE: &[u8] =
    b"module @jit_double { func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %arg0, %arg0 : tensor<4xf32>
  return %0 : tensor<4xf32> } }";

/// A client, and what jaxlib would have noted about its requests.
struct Ledger {
    client: Client,
    /// References by id, as jaxlib counts them.
    held: BTreeMap<u64, u32>,
    /// Replies by number.
    numbered: BTreeMap<i64, Vec<u64>>,
    next: u64,
}

impl Ledger {
    fn new(client: Client) -> Self {
        Self {
            client,
            held: BTreeMap::new(),
            numbered: BTreeMap::new(),
            next: 1000,
        }
    }

    /// An id that no request has used.
    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    async fn call_as(&mut self, context: u64, request: Request) -> Result<Response, StatusProto> {
        if context != 0 {
            *self.held.entry(context).or_default() += 1;
        }
        let reply = self.client.send_raw(Some(request), context).await;
        let reply = reply.reply().await.expect("the session goes on");
        let metadata = reply.response_metadata.expect("every reply has metadata");
        let ids = metadata.destroyed_user_context_ids;
        let Some(response) = reply.response else {
            assert_eq!(
                (metadata.seq_num, ids),
                (0, vec![]),
                "an error has no number"
            );
            return Err(metadata.status.expect("a status in place of the body"));
        };
        if matches!(
            response,
            Response::DeleteArrayResponse(_) | Response::DestructArrayResponse(_)
        ) {
            assert_eq!(
                (metadata.seq_num, ids),
                (0, vec![]),
                "not counted: {response:?}"
            );
            return Ok(response);
        }
        for id in &ids {
            let held = self.held.get_mut(id).filter(|held| **held > 0);
            *held.unwrap_or_else(|| panic!("{id} is reported once too often")) -= 1;
        }
        let twice = self.numbered.insert(metadata.seq_num, ids);
        assert!(twice.is_none(), "number {} comes twice", metadata.seq_num);
        Ok(response)
    }

    /// With an id of its own.
    async fn call(&mut self, request: Request) -> Result<Response, StatusProto> {
        let context = self.fresh();
        self.call_as(context, request).await
    }

    async fn put_as(&mut self, context: u64, values: &[f32]) -> u64 {
        let handle = self.client.handle();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let stored = self.client.store(handle, Bytes::from(bytes)).await;
        stored.expect("stored");
        let made = self
            .call_as(context, request::make_array(handle, &[4], &[0], None))
            .await;
        made.expect("made, whatever its bytes are");
        handle
    }

    async fn program(&mut self) -> u64 {
        match self.call(request::compile(DOUBLE, &[0])).await {
            Ok(Response::CompileResponse(compiled)) => compiled.loaded_executable_handle,
            other => panic!("{other:?}"),
        }
    }

    async fn execute(&mut self, program: u64, arg: u64) -> u64 {
        let result = self.client.handle();
        self.call(request::execute(program, &[arg], &[result], 1))
            .await
            .expect("accepted");
        result
    }

    async fn destruct(&mut self, handles: &[u64]) {
        let request = DestructArrayRequest {
            array_handle: handles.to_vec(),
        };
        self.call_as(0, Request::DestructArrayRequest(request))
            .await
            .expect("known handles");
    }

    async fn ready(&mut self, handle: u64) -> Result<Response, StatusProto> {
        let request = CheckValueReadyRequest {
            value_handles: vec![handle],
        };
        self.call(Request::CheckValueReadyRequest(request)).await
    }

    /// A numbered request without a context.
    async fn poll(&mut self) {
        let request = GetDefaultDeviceAssignmentRequest {
            num_replicas: 1,
            num_partitions: 1,
        };
        self.call_as(0, Request::GetDefaultDeviceAssignmentRequest(request))
            .await
            .expect("answered");
    }

    fn outstanding(&self) -> u32 {
        self.held.values().sum()
    }

    /// Sends requests until no more than `most` uses are outstanding.
    async fn wait_for(&mut self, most: u32) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            self.poll().await;
            if self.outstanding() <= most {
                return;
            }
            assert!(Instant::now() < deadline, "not reported: {:?}", self.held);
        }
    }

    fn check_numbers(&self) {
        let numbers: Vec<i64> = self.numbered.keys().copied().collect();
        let expected: Vec<i64> = (0..).take(numbers.len()).collect();
        assert_eq!(numbers, expected);
    }
}

fn named(status: &StatusProto) -> String {
    let id = status.payload.get("type.googleapis.com/ifrt.UserContext");
    String::from_utf8_lossy(id.map(|id| &id[..]).unwrap_or_default()).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_use_is_reported_once_and_numbers_have_no_gap() {
    let cluster = Cluster::start(1, 1).await;
    let mut ledger = Ledger::new(cluster.client().await);
    let program = ledger.program().await;
    // One line of Python that runs again and again: the same id.
    let mut last = ledger.put_as(7, &[1.0; 4]).await;
    for step in 0..2000u32 {
        let next = ledger.execute(program, last).await;
        match step % 3 {
            0 => ledger.destruct(&[last]).await,
            1 => {
                let request = DeleteArrayRequest {
                    array_handle: vec![last],
                };
                let reply = ledger
                    .call_as(0, Request::DeleteArrayRequest(request))
                    .await;
                let Ok(Response::DeleteArrayResponse(deleted)) = reply else {
                    panic!("{reply:?}");
                };
                // jaxlib asks for this one past its bookkeeping.
                let request = Request::CheckFutureRequest(CheckFutureRequest {
                    future_handle: deleted.deletion_future_handle,
                });
                let reply = ledger
                    .client
                    .send(request)
                    .await
                    .reply()
                    .await
                    .expect("there");
                let metadata = reply.response_metadata.expect("metadata");
                assert!(reply.response.is_some());
                assert_eq!(
                    (metadata.seq_num, metadata.destroyed_user_context_ids),
                    (0, vec![])
                );
                ledger.destruct(&[last]).await;
            }
            _ => {
                let failed = ledger.execute_unknown(last).await;
                ledger.destruct(&[last]).await;
                ledger.ready(failed).await.expect_err("it failed");
                ledger.destruct(&[failed]).await;
            }
        }
        last = next;
    }
    // Chains are cut behind work that has ended: what is outstanding does not grow with the number of steps.
    ledger.wait_for(600).await;
    ledger.ready(last).await.expect("all went well");
    ledger.destruct(&[last]).await;
    ledger.wait_for(0).await;
    ledger.check_numbers();
}

impl Ledger {
    /// Refused at once; its result is bound to the failure.
    async fn execute_unknown(&mut self, arg: u64) -> u64 {
        let result = self.client.handle();
        self.call(request::execute(1 << 60, &[arg], &[result], 1))
            .await
            .expect_err("no such program");
        result
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_waits_for_the_reply_that_jaxlib_keeps() {
    let cluster = Cluster::start(1, 1).await;
    let client = cluster.client().await;
    let metadata = client.init_metadata();
    assert_eq!(
        (metadata.seq_num, &metadata.destroyed_user_context_ids),
        (i64::MAX, &vec![])
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_failure_can_still_be_named() {
    let cluster = Cluster::start(1, 1).await;
    let mut ledger = Ledger::new(cluster.client().await);
    let program = ledger.program().await;
    let cause = 555;
    // Too few bytes: found by the worker, when the request has long been answered.
    let mut last = ledger.put_as(cause, &[1.0]).await;
    for _ in 0..1000 {
        let next = ledger.execute(program, last).await;
        ledger.destruct(&[last]).await;
        last = next;
    }
    // Of a failed chain the cause alone is kept.
    ledger.wait_for(600).await;
    assert_eq!(ledger.held[&cause], 1, "what it made fails still");
    let status = ledger.ready(last).await.expect_err("poisoned");
    assert_eq!(named(&status), cause.to_string());
    ledger.destruct(&[last]).await;
    ledger.wait_for(0).await;
    ledger.check_numbers();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_under_way_keeps_what_it_may_name() {
    let cluster = Cluster::start(1, 1).await;
    let mut ledger = Ledger::new(cluster.client().await);
    let cause = 555;
    let handle = ledger.client.handle();
    *ledger.held.entry(cause).or_default() += 1;
    let making = request::make_array(handle, &[4], &[0], None);
    let made = ledger
        .client
        .send_raw(Some(making), cause)
        .await
        .reply()
        .await;
    let number = made
        .expect("there")
        .response_metadata
        .expect("metadata")
        .seq_num;
    ledger.numbered.insert(number, Vec::new());
    // Two ask for the array whose bytes have not come; then the client forgets it.
    let ready = Request::CheckValueReadyRequest(CheckValueReadyRequest {
        value_handles: vec![handle],
    });
    let ready = ledger.client.send_raw(Some(ready), 0).await;
    let read = ledger
        .client
        .send_raw(Some(request::copy_to_host(handle, 9000)), 0)
        .await;
    ledger.destruct(&[handle]).await;
    for _ in 0..20 {
        ledger.poll().await;
    }
    assert_eq!(ledger.held[&cause], 1);
    ledger
        .client
        .store(handle, Bytes::from_static(&[0; 4]))
        .await
        .expect("too few, but stored");
    for waiting in [ready, read] {
        let reply = waiting.reply().await.expect("there");
        let status = reply
            .response_metadata
            .expect("metadata")
            .status
            .expect("failed");
        assert_eq!(named(&status), cause.to_string(), "{status:?}");
    }
    ledger.wait_for(0).await;
    ledger.check_numbers();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_that_are_bound_to_results_keep_their_context() {
    let cluster = Cluster::start(1, 1).await;
    let mut ledger = Ledger::new(cluster.client().await);
    let program = ledger.program().await;
    let good = ledger.put_as(7, &[1.0; 4]).await;
    let first = ledger.execute_unknown(good).await;
    let cause = ledger.next;
    // Each result fails with the one before; all but the last are forgotten.
    let mut last = first;
    for _ in 0..1000 {
        let next = ledger.client.handle();
        let status = ledger
            .call(request::execute(program, &[last], &[next], 1))
            .await
            .expect_err("poisoned");
        assert_eq!(named(&status), cause.to_string());
        ledger.destruct(&[last]).await;
        last = next;
    }
    ledger.poll().await;
    // The put, the failed one, and the last.
    ledger.wait_for(3).await;
    assert_eq!(ledger.held[&cause], 1);
    let deleted = Request::IsArrayDeletedRequest(IsArrayDeletedRequest { array_handle: last });
    ledger.call_as(0, deleted).await.expect("known");
    ledger.destruct(&[last, good]).await;
    ledger.wait_for(0).await;
    ledger.check_numbers();
}
