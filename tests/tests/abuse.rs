//! Clients that break off, lie, flood and never listen, against a proxy and workers in this process.
//! `runtime/cli/tests/abuse.rs` does the same to processes and looks at their memory and files.

use std::time::Duration;

use bytes::Bytes;
use tokio_stream::StreamExt as _;
use waystation_client::{Client, Error, Request, request};
use waystation_proto::xla::ifrt::proxy::{
    CheckValueReadyRequest, GrpcHostBufferLookupRequest, MakeErrorArraysRequest,
};
use waystation_tests::{
    abuse::{self, open_store},
    cluster::Cluster,
    fuzz::Witness,
};

const INVALID_ARGUMENT: i32 = 3;
const FAILED_PRECONDITION: i32 = 9;
const UNAVAILABLE: i32 = 14;

fn code<T: std::fmt::Debug>(result: Result<T, Error>) -> i32 {
    result
        .expect_err("refused")
        .code()
        .expect("a status of the server")
}

async fn put(client: &Client, bytes: usize) -> u64 {
    let handle = client.handle();
    client
        .store(handle, Bytes::from(vec![0; bytes]))
        .await
        .expect("stored");
    let dims = [i64::try_from(bytes / 4).expect("small")];
    client
        .call(request::make_array(handle, &dims, &[0], None))
        .await
        .expect("made");
    handle
}

async fn ready(client: &Client, array: u64) -> Result<(), Error> {
    client
        .call(Request::CheckValueReadyRequest(CheckValueReadyRequest {
            value_handles: vec![array],
        }))
        .await
        .map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_clients_are_told_and_leave_nothing_behind() {
    let cluster = Cluster::start(1, 2).await;
    let witness = Witness::start(&cluster.proxy).await.expect("a witness");
    abuse::versions(&cluster.client().await).await;
    abuse::headers(&cluster.proxy).await;
    abuse::claims(&cluster.proxy).await;
    abuse::resets(&cluster.proxy, 200).await;
    abuse::never_used(&cluster.proxy, 20).await;
    abuse::broken_streams(&cluster.proxy).await;
    abuse::broken_stores(&cluster.proxy).await;
    abuse::raw_messages(&cluster.proxy).await;
    abuse::come_and_go(&cluster.proxy, 20).await;
    witness.more(1).await;
    witness.end().await.expect("every result of the witness");
    cluster.wait_until_empty(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_data_channel_may_run_ahead_and_must_not_lie() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    // A lookup that does not wait for the copy finds nothing, and spoils nothing.
    let array = put(&client, 16).await;
    let buffer = client.handle();
    assert_eq!(code(client.lookup(buffer).await), INVALID_ARGUMENT);
    let copy = client.send(request::copy_to_host(array, buffer)).await;
    copy.wait().await.expect("copied");
    assert_eq!(client.lookup(buffer).await.expect("there").len(), 16);
    // A buffer that holds fetched bytes takes no others, and serves no array.
    assert_eq!(
        code(client.store(buffer, Bytes::from_static(&[0; 16])).await),
        INVALID_ARGUMENT
    );
    let make = request::make_array(buffer, &[4], &[0], None);
    assert_eq!(code(client.call(make).await), INVALID_ARGUMENT);
    client.delete(buffer).await.expect("deleted");
    assert_eq!(code(client.lookup(buffer).await), INVALID_ARGUMENT);

    // Two stores of one buffer at a time: whichever comes second is refused, and the other goes on.
    let handle = client.handle();
    let (bytes, slow) = open_store(&client, handle, 8);
    bytes
        .send(Bytes::from_static(&[1; 4]))
        .await
        .expect("the call takes its first bytes");
    let quick = client.store(handle, Bytes::from_static(&[1; 8])).await;
    // Where this one was refused, its call is over.
    let _ = bytes.send(Bytes::from_static(&[1; 4])).await;
    drop(bytes);
    let slow = slow.await.expect("no panic");
    match (quick, slow) {
        (Ok(()), Err(refused)) => assert_eq!(refused.code() as i32, INVALID_ARGUMENT),
        (Err(refused), Ok(())) => assert_eq!(refused.code(), Some(INVALID_ARGUMENT)),
        both => panic!("{both:?}"),
    }
    client
        .call(request::make_array(handle, &[2], &[0], None))
        .await
        .expect("made");
    ready(&client, handle).await.expect("one store's bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_buffer_deleted_in_the_middle_of_its_store_fails_its_array_only() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let handle = client.handle();
    client
        .call(request::make_array(handle, &[1 << 20], &[0], None))
        .await
        .expect("its bytes may come later");
    let (bytes, call) = open_store(&client, handle, 4 << 20);
    bytes
        .send(Bytes::from(vec![0; 1 << 20]))
        .await
        .expect("the store is open");
    client.delete(handle).await.expect("deleted");
    assert_eq!(code(ready(&client, handle).await), FAILED_PRECONDITION);
    drop(bytes);
    let _ = call.await.expect("no panic");
    let array = put(&client, 16).await;
    ready(&client, array).await.expect("others are well");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_array_fails_with_what_became_of_its_bytes() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    // Too few for what the store says, and a store that its client breaks off.
    let short = client.handle();
    client
        .call(request::make_array(short, &[1 << 20], &[0], None))
        .await
        .expect("its bytes may come later");
    let stored = client
        .store_as(short, 4 << 20, Bytes::from(vec![0; 1 << 20]))
        .await;
    assert_eq!(code(stored), INVALID_ARGUMENT);
    let error = ready(&client, short).await.expect_err("its bytes lied");
    assert_eq!(error.code(), Some(INVALID_ARGUMENT), "{error}");
    assert!(error.to_string().contains("1048576 came"), "{error}");

    let broken = client.handle();
    client
        .call(request::make_array(broken, &[1 << 20], &[0], None))
        .await
        .expect("its bytes may come later");
    let (bytes, call) = open_store(&client, broken, 4 << 20);
    bytes
        .send(Bytes::from(vec![0; 1 << 20]))
        .await
        .expect("the store is open");
    bytes
        .send(Bytes::from(vec![0; 1 << 20]))
        .await
        .expect("the store has begun");
    call.abort();
    let error = ready(&client, broken).await.expect_err("broken off");
    // Where the reset is taken for an end, too few bytes have come.
    let codes = [Some(UNAVAILABLE), Some(INVALID_ARGUMENT)];
    assert!(codes.contains(&error.code()), "{error}");
    assert!(error.to_string().contains("host buffer"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_ends_with_its_session_though_its_connection_stays() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let size = 64 << 20;
    let array = put(&client, size).await;
    let buffer = client.handle();
    client
        .call(request::copy_to_host(array, buffer))
        .await
        .expect("copied");
    let mut service = client.service();
    let lookup = GrpcHostBufferLookupRequest {
        session_id: client.init().session_id,
        handle: buffer,
    };
    let mut frames = service
        .host_buffer_lookup(lookup)
        .await
        .expect("there")
        .into_inner();
    let first = frames.next().await.expect("frames").expect("frames");
    drop(client);
    cluster.wait_until_empty(Duration::from_secs(10)).await;
    let mut received = first.data.len();
    let error = loop {
        match frames.next().await {
            Some(Ok(frame)) => received += frame.data.len(),
            Some(Err(error)) => break error,
            None => panic!("all {received} bytes came"),
        }
    };
    assert_eq!(error.code() as i32, UNAVAILABLE, "{error}");
    assert!(received < size);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_full_of_waiting_requests_ends_with_its_client() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    put(&client, 4096).await;
    let never = client.handle();
    client
        .call(request::make_array(never, &[4], &[0], None))
        .await
        .expect("its bytes may come later");
    // More than may be awaited at a time.
    for buffer in 0..(1 << 14) + 10 {
        client
            .send(request::copy_to_host(never, 1_000_000 + buffer))
            .await;
    }
    drop(client);
    cluster.wait_until_empty(Duration::from_secs(20)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handles_in_use_keep_their_arrays() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let array = put(&client, 16).await;
    let take = Request::MakeErrorArraysRequest(MakeErrorArraysRequest {
        error: Some(waystation_proto::tensorflow::StatusProto {
            code: 8,
            ..Default::default()
        }),
        array_specs: vec![Default::default()],
        array_handles: vec![array],
    });
    assert_eq!(code(client.call(take).await), INVALID_ARGUMENT);
    ready(&client, array).await.expect("still the first one");
}
