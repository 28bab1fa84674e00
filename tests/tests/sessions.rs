//! Sessions that no jaxlib would open: what the proxy and the workers do with handles nobody knows, sizes that lie, bytes
//! that come early, late or never, and clients that vanish.

use std::time::Duration;

use bytes::Bytes;
use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::xla::ifrt::proxy::{
    CheckFutureRequest, CheckValueReadyRequest, CopyArraysRequest, DestructArrayRequest,
    DisassembleIntoSingleDeviceArraysRequest, GetDefaultDeviceAssignmentRequest,
    IsArrayDeletedRequest, LoadedExecutableMetadataRequest,
};
use waystation_tests::cluster::Cluster;

const INVALID_ARGUMENT: Option<i32> = Some(3);
const UNIMPLEMENTED: Option<i32> = Some(12);

/// y = x + x over four f32.
const DOUBLE: &[u8] =
    b"module @jit_double { func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %arg0, %arg0 : tensor<4xf32>
  return %0 : tensor<4xf32> } }";

fn floats(values: &[f32]) -> Bytes {
    values
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .collect::<Vec<_>>()
        .into()
}

async fn put(client: &Client, values: &[f32]) -> u64 {
    let handle = client.handle();
    client.store(handle, floats(values)).await.expect("stored");
    let dims = [i64::try_from(values.len()).expect("small")];
    client
        .call(request::make_array(handle, &dims, &[0], None))
        .await
        .expect("made");
    handle
}

async fn fetch(client: &Client, array: u64) -> Result<Vec<f32>, Error> {
    let buffer = client.handle();
    client.call(request::copy_to_host(array, buffer)).await?;
    let bytes = client.lookup(buffer).await?;
    client.delete(buffer).await?;
    Ok(bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect())
}

async fn ready(client: &Client, array: u64) -> Result<Response, Error> {
    client
        .call(Request::CheckValueReadyRequest(CheckValueReadyRequest {
            value_handles: vec![array],
        }))
        .await
}

/// Whatever went before, the session must still do this.
async fn still_works(client: &Client) {
    let array = put(client, &[1.0, 2.0, 3.0]).await;
    assert_eq!(
        fetch(client, array).await.expect("fetched"),
        vec![1.0, 2.0, 3.0]
    );
}

async fn compile(client: &Client, program: &[u8], devices: &[i32]) -> Result<u64, Error> {
    match client.call(request::compile(program, devices)).await? {
        Response::CompileResponse(compiled) => Ok(compiled.loaded_executable_handle),
        _ => Err(Error::WrongReply),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_handles_get_a_status_and_the_session_goes_on() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let unknown = 777;
    let requests = [
        request::copy_to_host(unknown, 5),
        request::execute(unknown, &[], &[], 1),
        Request::CheckFutureRequest(CheckFutureRequest {
            future_handle: unknown,
        }),
        Request::CheckValueReadyRequest(CheckValueReadyRequest {
            value_handles: vec![unknown],
        }),
        Request::DestructArrayRequest(DestructArrayRequest {
            array_handle: vec![unknown],
        }),
        Request::IsArrayDeletedRequest(IsArrayDeletedRequest {
            array_handle: unknown,
        }),
        Request::LoadedExecutableMetadataRequest(LoadedExecutableMetadataRequest {
            loaded_executable_handle: unknown,
        }),
        Request::DisassembleIntoSingleDeviceArraysRequest(
            DisassembleIntoSingleDeviceArraysRequest {
                array_handle: unknown,
                ..Default::default()
            },
        ),
        Request::GetDefaultDeviceAssignmentRequest(GetDefaultDeviceAssignmentRequest {
            num_replicas: u64::MAX,
            num_partitions: 3,
        }),
        request::make_array(9, &[2], &[99], None),
    ];
    for request in requests {
        let shown = format!("{request:?}");
        let error = client.call(request).await.expect_err(&shown);
        assert_eq!(error.code(), INVALID_ARGUMENT, "{shown}: {error}");
    }
    assert_eq!(
        client
            .lookup(unknown)
            .await
            .expect_err("unknown buffer")
            .code(),
        INVALID_ARGUMENT
    );
    assert_eq!(
        client
            .delete(unknown)
            .await
            .expect_err("unknown buffer")
            .code(),
        INVALID_ARGUMENT
    );
    still_works(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_served_says_so_and_fails_its_results() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let array = put(&client, &[1.0]).await;
    let result = client.handle();
    let mpmd = [
        (
            "LoadedExecutableMpmdMetadata",
            Request::LoadedExecutableMpmdMetadataRequest(Default::default()),
        ),
        (
            "LoadedExecutableMpmdCostAnalysis",
            Request::LoadedExecutableMpmdCostAnalysisRequest(Default::default()),
        ),
        (
            "LoadedHostCallbackPoll",
            Request::LoadedHostCallbackPollRequest(Default::default()),
        ),
        (
            "LoadedHostCallbackReturn",
            Request::LoadedHostCallbackReturnRequest(Default::default()),
        ),
    ];
    for (name, request) in mpmd {
        let error = client.call(request).await.expect_err("not served");
        assert_eq!(error.code(), UNIMPLEMENTED, "{name}");
        assert!(error.to_string().contains(name), "{error}");
    }
    let copy = Request::CopyArraysRequest(CopyArraysRequest {
        array_handles: vec![array],
        result_handles: vec![result],
        device_ids: vec![99],
        ..Default::default()
    });
    let error = client.call(copy).await.expect_err("no such device");
    assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
    // The client uses the result without waiting for the reply: it must find the failure, not an unknown handle.
    assert_eq!(
        fetch(&client, result).await.expect_err("failed").code(),
        INVALID_ARGUMENT
    );
    let newer = client
        .send_raw(None, 0)
        .await
        .wait()
        .await
        .expect_err("a newer protocol's request");
    assert_eq!(newer.code(), UNIMPLEMENTED);
    still_works(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sizes_shapes_and_strides_that_lie_fail_their_array_only() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let stored = |n: u64| n;
    // Announced sizes.
    for (size, bytes) in [(8, 4), (4, 8), (-1, 4), (i64::MAX, 4)] {
        let handle = client.handle();
        let error = client
            .store_as(stored(handle), size, Bytes::from(vec![0; bytes]))
            .await
            .expect_err("lies");
        assert_eq!(
            error.code(),
            INVALID_ARGUMENT,
            "size {size} with {bytes} bytes: {error}"
        );
    }
    // Shapes and strides that do not fit the bytes, or no memory at all.
    let cases: [(&[i64], Option<Vec<i64>>); 8] = [
        (&[3], None),
        (&[1], None),
        (&[-2], None),
        (&[1 << 40, 1 << 40], None),
        (&[2], Some(vec![i64::MAX])),
        (&[2], Some(vec![-4])),
        (&[2], Some(vec![4, 4])),
        (&[2], Some(vec![64])),
    ];
    for (dims, strides) in cases {
        let handle = client.handle();
        client
            .store(handle, floats(&[1.0, 2.0]))
            .await
            .expect("stored");
        let shown = format!("dims {dims:?} strides {strides:?}");
        let made = client
            .call(request::make_array(handle, dims, &[0], strides))
            .await;
        let error = match made {
            Err(error) => error,
            Ok(_) => ready(&client, handle).await.expect_err(&shown),
        };
        assert_eq!(error.code(), INVALID_ARGUMENT, "{shown}: {error}");
    }
    still_works(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handles_in_use_are_not_given_twice() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let array = put(&client, &[1.0, 2.0]).await;
    client
        .store(array, floats(&[3.0, 4.0]))
        .await
        .expect("its buffer has been consumed");
    let error = client
        .call(request::make_array(array, &[2], &[0], None))
        .await
        .expect_err("in use");
    assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
    let handle = client.handle();
    client.store(handle, floats(&[1.0])).await.expect("stored");
    assert_eq!(
        client
            .store(handle, floats(&[1.0]))
            .await
            .expect_err("twice")
            .code(),
        INVALID_ARGUMENT
    );
    still_works(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_array_may_come_before_its_bytes() {
    let cluster = Cluster::start(2, 1).await;
    let client = cluster.client().await;
    let handle = client.handle();
    client
        .call(request::make_array(handle, &[2], &[0, 1], None))
        .await
        .expect("pending");
    let one = client.handle();
    let two = client.handle();
    let disassemble = Request::DisassembleIntoSingleDeviceArraysRequest(
        DisassembleIntoSingleDeviceArraysRequest {
            array_handle: handle,
            result_handles: vec![one, two],
            ..Default::default()
        },
    );
    client
        .call(disassemble)
        .await
        .expect("pending arrays can be taken apart");
    let waiting = client.send(request::copy_to_host(two, 1000)).await;
    client
        .store(handle, floats(&[5.0, 6.0]))
        .await
        .expect("stored");
    waiting
        .wait()
        .await
        .expect("the copy ends once the bytes are there");
    assert_eq!(
        client.lookup(1000).await.expect("there"),
        floats(&[5.0, 6.0])
    );
    assert_eq!(fetch(&client, one).await.expect("there"), vec![5.0, 6.0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn big_buffers_arrive_whole() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let values: Vec<f32> = (0..3_000_001u32).map(|i| i as f32).collect();
    let array = put(&client, &values).await;
    assert!(
        fetch(&client, array).await.expect("fetched") == values,
        "the bytes differ"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_fail_with_the_compilers_message_and_failures_reach_what_depends_on_them() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let error = compile(&client, b"this is no module", &[0])
        .await
        .expect_err("no module");
    assert!(error.code().is_some_and(|code| code != 0), "{error}");

    let program = compile(&client, DOUBLE, &[0]).await.expect("compiles");
    let array = put(&client, &[1.0, 2.0, 3.0, 4.0]).await;
    let Response::LoadedExecutableExecuteResponse(first) = client
        .call(request::execute(program, &[array], &[], 1))
        .await
        .expect("executes")
    else {
        panic!("another reply");
    };
    assert_eq!(first.outputs.len(), 1);
    assert_eq!(
        fetch(&client, first.outputs[0].array_handle)
            .await
            .expect("result"),
        vec![2.0, 4.0, 6.0, 8.0]
    );

    // An array whose bytes never come right: its dependents fail with the same status, others do not.
    let bad = client.handle();
    client.store(bad, floats(&[1.0])).await.expect("stored");
    client
        .call(request::make_array(bad, &[4], &[0], None))
        .await
        .expect("the lie is found at the worker");
    let (from_bad, from_from_bad, good) = (client.handle(), client.handle(), client.handle());
    client
        .send(request::execute(program, &[bad], &[from_bad], 2))
        .await;
    client
        .send(request::execute(program, &[from_bad], &[from_from_bad], 3))
        .await;
    client
        .send(request::execute(program, &[array], &[good], 4))
        .await;
    assert_eq!(
        fetch(&client, from_from_bad)
            .await
            .expect_err("poisoned")
            .code(),
        INVALID_ARGUMENT
    );
    assert_eq!(
        fetch(&client, good).await.expect("independent"),
        vec![2.0, 4.0, 6.0, 8.0]
    );

    let too_few = client
        .call(request::execute(program, &[], &[], 5))
        .await
        .expect_err("no argument");
    assert_eq!(too_few.code(), INVALID_ARGUMENT);
    still_works(&client).await;
}

/// A client that waits for each result will most likely wait for the next: the worker tells of that unasked, the good ends
/// and the bad ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_waits_for_each_execution_has_the_worker_asked_once() {
    let cluster = Cluster::start(1, 1).await;
    let client = cluster.client().await;
    let program = compile(&client, DOUBLE, &[0]).await.expect("compiles");
    let mut array = put(&client, &[1.0; 4]).await;
    for _ in 0..5 {
        let result = client.handle();
        client
            .call(request::execute(program, &[array], &[result], 1))
            .await
            .expect("accepted");
        ready(&client, result).await.expect("ready");
        array = result;
    }
    assert_eq!(fetch(&client, array).await.expect("fetched"), vec![32.0; 4]);
    let status = cluster.status().await;
    assert_eq!(status["waits"]["count"], 5, "{status}");
    assert_eq!(status["totals"]["watches"], 1, "{status}");

    // Its bytes come after the execution, and are too few.
    let (late, result) = (client.handle(), client.handle());
    client
        .call(request::make_array(late, &[4], &[0], None))
        .await
        .expect("made, whatever its bytes are");
    client
        .call(request::execute(program, &[late], &[result], 1))
        .await
        .expect("accepted");
    client
        .store(late, floats(&[1.0]))
        .await
        .expect("too few, but stored");
    for _ in ["told", "asked for"] {
        let error = ready(&client, result).await.expect_err("failed");
        assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
    }
    still_works(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_vanish_leave_nothing_behind() {
    let cluster = Cluster::start(2, 1).await;
    for round in 0..20u64 {
        let client = cluster.client().await;
        let values = vec![1.0; 4096];
        let array = put(&client, &values).await;
        // A put that never gets its bytes, and one whose bytes no array asks for.
        client
            .send(request::make_array(5000, &[1 << 20], &[1], None))
            .await;
        client.store(5001, floats(&values)).await.expect("stored");
        if round % 2 == 0 {
            let program = compile(&client, DOUBLE, &[0]).await.expect("compiles");
            let small = put(&client, &[1.0; 4]).await;
            client
                .send(request::execute(program, &[small], &[6000], 1))
                .await;
        } else {
            assert_eq!(fetch(&client, array).await.expect("there").len(), 4096);
        }
        drop(client);
    }
    cluster.wait_until_empty(Duration::from_secs(5)).await;
    still_works(&cluster.client().await).await;
}
