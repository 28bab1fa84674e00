//! Bytes that go to those alone whose lease it is, and no longer than it lasts.

use tokio::{
    io::AsyncReadExt as _,
    net::{TcpListener, TcpStream},
};
use waystation_proto::{
    waystation::worker::{
        DataFrame, DataHeader, FetchDataRequest, LocalPut, Pull, Put, Read, local_put::Step, op,
    },
    xla::PrimitiveType,
};

use crate::support::{SECRET, Session, Worker, target};

const LARGE: usize = 8 << 20;

/// Has a worker keep the bytes of a shard for who fetches transfer 30.
async fn offer(session: &Session, len: usize) {
    let dims = [len as i64];
    session
        .put_bytes(10, 0, PrimitiveType::U8, &dims, None, vec![3; len])
        .await;
    let read = Read {
        transfer: 30,
        shard: 10,
        ..Read::default()
    };
    session.send(op::Op::Read(read)).await;
}

fn fetch(secret: &[u8]) -> FetchDataRequest {
    FetchDataRequest {
        epoch: 1,
        transfer: 30,
        by_connection: true,
        secret: secret.to_vec().into(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_get_no_bytes_and_bring_none() {
    let worker = Worker::start().await;
    let session = worker.session(1).await;
    offer(&session, 16).await;
    let put = Put {
        transfer: 40,
        dtype: PrimitiveType::U8 as i32,
        dims: vec![16],
        targets: vec![target(11, 0)],
        ..Put::default()
    };
    session.send(op::Op::Put(put)).await;
    let mut client = worker.client.clone();
    for secret in [&[][..], &[8; 32], &SECRET[..31]] {
        let mut refused = vec![client.fetch_data(fetch(secret)).await.map(|_| ())];
        let header = DataHeader {
            epoch: 1,
            transfer: 40,
            size_bytes: 16,
            secret: secret.to_vec().into(),
            ..DataHeader::default()
        };
        let local = LocalPut {
            step: Some(Step::Header(header.clone())),
        };
        let frame = DataFrame {
            header: Some(header),
            data: vec![9; 16].into(),
            given_up: false,
        };
        let put = client.put_data(tokio_stream::iter([frame])).await;
        refused.push(put.map(|_| ()));
        let put = client.put_local(tokio_stream::iter([local])).await;
        refused.push(put.map(|_| ()));
        for refused in refused {
            let code = refused.expect_err("a stranger").code();
            assert_eq!(code, tonic::Code::PermissionDenied);
        }
    }
    let frames = client.fetch_data(fetch(&SECRET)).await.expect("known");
    let frame = frames.into_inner().message().await.expect("a frame");
    assert_eq!(frame.expect("a frame").data, vec![3; 16]);
    let mut session = session;
    session.put_data(40, &[5; 16], 16, 16).await.expect("known");
    assert_eq!(session.read(11).await.expect("bytes"), [5; 16]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_sent_for_a_lease_ends_with_it() {
    let worker = Worker::start().await;
    let session = worker.session(1).await;
    offer(&session, LARGE).await;
    let mut client = worker.client.clone();
    let frames = client.fetch_data(fetch(&SECRET)).await.expect("known");
    let mut frames = frames.into_inner();
    let first = frames.message().await.expect("a frame").expect("a frame");
    assert!(!first.header.expect("a header").ticket.is_empty());
    // The bytes are there, and nobody takes them.
    let _next = worker.session(2).await;
    let end = frames.message().await.expect_err("the lease has ended");
    assert_eq!(end.code(), tonic::Code::Unavailable, "{end:?}");
    worker.status_becomes(|status| status.shards == 0).await;
    worker.stop().await;
}

/// What another worker says to a fetch: that the bytes are to be had by connections of their own.
fn says_ticket(len: usize) -> DataFrame {
    DataFrame {
        header: Some(DataHeader {
            size_bytes: len as u64,
            ticket: vec![7; 32].into(),
            ..DataHeader::default()
        }),
        ..DataFrame::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_fetched_for_a_lease_ends_with_it() {
    let worker = Worker::start().await;
    let session = worker.session(1).await;
    let (plain, mut connections) = tokio::sync::mpsc::channel::<TcpStream>(8);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let from = listener.local_addr().expect("an address").to_string();
    crate::moves::serve(listener, vec![says_ticket(LARGE)], plain);
    session
        .send(op::Op::Pull(Pull {
            transfer: 5,
            from,
            from_epoch: 3,
            dtype: PrimitiveType::U8 as i32,
            dims: vec![LARGE as i64],
            target: Some(target(1, 1)),
            request: 40,
            ..Pull::default()
        }))
        .await;
    // It is asked for bytes, and sends none.
    let mut asked = connections.recv().await.expect("a connection");
    let mut request = [0; 56];
    asked.read_exact(&mut request).await.expect("a request");
    drop(session);
    let end = tokio::time::timeout(crate::support::PATIENCE, asked.read(&mut request)).await;
    assert!(matches!(end.expect("an end"), Ok(0) | Err(_)));
    worker.stop().await;
}
