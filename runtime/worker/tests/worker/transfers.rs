//! The data service: bytes that stream in and out, and between workers.

use std::time::Duration;

use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::worker::{CancelPut, FetchDataRequest, Op, Pull, Put, Read, Region, Strides, op},
    xla::PrimitiveType,
};
use waystation_worker::Limits;

use crate::support::{SECRET, Session, Worker, failure, target, user_context};

/// Neither a multiple of a frame nor of an alignment.
const LARGE: usize = (3 << 20) + 5;

fn pattern(len: usize) -> Vec<u8> {
    (0..len)
        .map(|index| (index * 7 + index / 251) as u8)
        .collect()
}

async fn expect_bytes(session: &Session, transfer: u64, shard: u64, len: usize) {
    session
        .send(op::Op::Put(Put {
            transfer,
            dtype: PrimitiveType::U8 as i32,
            dims: vec![len as i64],
            targets: vec![target(shard, 0)],
            user_context: 5,
            ..Put::default()
        }))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_arrays_stream_in_and_out() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    let bytes = pattern(LARGE);
    // The op first, then its bytes.
    expect_bytes(&session, 1, 10, LARGE).await;
    session
        .put_data(1, &bytes, 1 << 20, LARGE as u64)
        .await
        .unwrap();
    assert_eq!(session.read(10).await.unwrap(), bytes);
    // The bytes first, in small frames.
    session
        .put_data(2, &bytes, 100_000, LARGE as u64)
        .await
        .unwrap();
    expect_bytes(&session, 2, 11, LARGE).await;
    assert_eq!(session.read(11).await.unwrap(), bytes);
    // A transfer may be fetched until it is released, and before its shard is there.
    let early = session.mint();
    let mut other = worker.client.clone();
    let fetch = tokio::spawn(async move {
        let mut frames = other
            .fetch_data(FetchDataRequest {
                epoch: 1,
                transfer: early,
                by_connection: false,
                secret: SECRET.to_vec().into(),
            })
            .await
            .unwrap()
            .into_inner();
        let mut data = Vec::new();
        while let Some(frame) = frames.message().await.unwrap() {
            data.extend_from_slice(&frame.data);
        }
        data
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    session
        .send(op::Op::Read(Read {
            transfer: early,
            shard: 10,
            byte_strides: None,
            notify: false,
            ..Read::default()
        }))
        .await;
    session.drop_shards(&[10, 11]).await;
    assert_eq!(fetch.await.unwrap(), bytes);
    assert_eq!(session.fetch(early).await.unwrap(), bytes);
    let status = worker.status().await;
    assert_eq!(
        (status.put_bytes, status.fetched_bytes),
        (2 * LARGE as u64, 3 * LARGE as u64)
    );
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn regions_are_read_on_demand_and_forgotten() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.put(10, 0, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]).await;
    let region = |offset: i64, size: i64| Region {
        offset: vec![offset],
        size: vec![size],
    };
    let on_demand = |transfer, regions| {
        op::Op::Read(Read {
            transfer,
            shard: 10,
            regions,
            on_demand: true,
            ..Read::default()
        })
    };
    let (fetched, released, outside) = (session.mint(), session.mint(), session.mint());
    let two = vec![region(4, 2), region(1, 1)];
    session.send(on_demand(fetched, two.clone())).await;
    session.send(on_demand(released, two)).await;
    session.send(on_demand(outside, vec![region(5, 2)])).await;
    session.drop_shards(&[10]).await;
    let status = session.fetch(outside).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status:?}");
    assert_eq!(worker.status().await.shards, 1, "kept for the fetches");
    let expected: Vec<u8> = [4.0f32, 5.0, 1.0]
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .collect();
    assert_eq!(session.fetch(fetched).await.unwrap(), expected);
    session
        .send_op(Op {
            releases: vec![released],
            ..Op::default()
        })
        .await;
    // Something behind it, so that the release has been applied.
    session.put(11, 0, &[1.0]).await;
    session.watch(&[11]).await.unwrap();
    assert_eq!(worker.status().await.shards, 1, "that of the last put");
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn released_and_unknown_transfers_are_not_served() {
    let limits = Limits {
        early_fetch_wait: Duration::from_millis(200),
        ..Limits::default()
    };
    let worker = Worker::start_with(waystation_cache::Config::default(), limits).await;
    let mut session = worker.session(1).await;
    session.put(10, 0, &[1.0]).await;
    let transfer = session.start_read(10).await;
    session.end_read(transfer).await.unwrap();
    assert_eq!(session.fetch(transfer).await.unwrap().len(), 4);
    session
        .send_op(Op {
            releases: vec![transfer, 12345],
            ..Op::default()
        })
        .await;
    session.watch(&[10]).await.unwrap();
    let status = session.fetch(transfer).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status:?}");
    // Another lease's transfers are not this one's.
    let status = session
        .client
        .fetch_data(FetchDataRequest {
            epoch: 9,
            transfer,
            by_connection: false,
            secret: SECRET.to_vec().into(),
        })
        .await
        .unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status:?}");
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strides_asked_for_are_honoured() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session
        .put_bytes(
            1,
            0,
            PrimitiveType::U8,
            &[2, 3],
            None,
            vec![1, 2, 3, 4, 5, 6],
        )
        .await;
    let strides = |strides: &[i64]| {
        Some(Strides {
            strides: strides.to_vec(),
        })
    };
    session
        .send(op::Op::Read(Read {
            transfer: 20,
            shard: 1,
            byte_strides: strides(&[1, 2]),
            notify: true,
            ..Read::default()
        }))
        .await;
    assert_eq!(session.end_read(20).await.unwrap(), [1, 4, 2, 5, 3, 6]);
    session
        .send(op::Op::Read(Read {
            transfer: 21,
            shard: 1,
            byte_strides: strides(&[1]),
            notify: true,
            ..Read::default()
        }))
        .await;
    assert_eq!(
        session.end_read(21).await.unwrap_err().code,
        Code::InvalidArgument as i32
    );
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lying_transfers_fail_their_put_alone() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    let bytes = pattern(1000);
    for transfer in 1..=3 {
        expect_bytes(&session, transfer, 10 + transfer, 1000).await;
    }
    session.put(20, 0, &[4.0]).await;
    session.watch(&[20]).await.unwrap();
    // Another size than the op's; more than announced; less than announced.
    assert!(session.put_data(1, &bytes[..500], 100, 500).await.is_err());
    assert!(
        session
            .put_data(2, &[&bytes[..], &bytes[..]].concat(), 100, 1000)
            .await
            .is_err()
    );
    assert!(session.put_data(3, &bytes[..999], 100, 1000).await.is_err());
    for shard in 11..=13 {
        let status = session.read(shard).await.unwrap_err();
        assert_eq!(
            (status.code, user_context(&status)),
            (Code::InvalidArgument as i32, Some("5")),
            "{shard}: {status:?}"
        );
    }
    // An absurd size is refused before memory is asked for.
    assert!(session.put_data(4, &[], 1, u64::MAX).await.is_err());
    assert_eq!(session.read_f32(20).await, [4.0]);
    worker.stop().await;
}

/// A sender that says that it gives up may have its reasons told by the op stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_given_up_waits_for_the_op_that_says_why() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    expect_bytes(&session, 1, 11, 1000).await;
    let status = session.give_up(1, &pattern(500), 1000).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Cancelled, "{status:?}");
    session
        .send(op::Op::CancelPut(CancelPut {
            transfer: 1,
            status: Some(StatusProto {
                code: Code::FailedPrecondition as i32,
                ..StatusProto::default()
            }),
        }))
        .await;
    let status = session.read(11).await.unwrap_err();
    assert_eq!(status.code, Code::FailedPrecondition as i32, "{status:?}");
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_bytes_are_bounded() {
    let limits = Limits {
        early_put_bytes: 1500,
        early_fetch_wait: std::time::Duration::from_millis(200),
        ..Limits::default()
    };
    let worker = Worker::start_with(waystation_cache::Config::default(), limits).await;
    let mut session = worker.session(1).await;
    let bytes = pattern(1000);
    session.put_data(1, &bytes, 100, 1000).await.unwrap();
    let status = session.put_data(2, &bytes, 100, 1000).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status:?}");
    expect_bytes(&session, 1, 11, 1000).await;
    assert_eq!(session.read(11).await.unwrap(), bytes);
    // The op has taken the bytes: there is room again.
    session.put_data(3, &bytes, 100, 1000).await.unwrap();
    worker.stop().await;
}

/// Bytes and ops come over two connections: a large put that is ahead of its op must wait for it, not fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_beyond_the_bound_wait_for_their_op() {
    let limits = Limits {
        early_put_bytes: 500,
        ..Limits::default()
    };
    let worker = Worker::start_with(waystation_cache::Config::default(), limits).await;
    let mut session = worker.session(1).await;
    let bytes = pattern(1000);
    let late_op = async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        expect_bytes(&session, 1, 11, 1000).await;
    };
    let (put, ()) = tokio::join!(session.put_data(1, &bytes, 100, 1000), late_op);
    put.unwrap();
    assert_eq!(session.read(11).await.unwrap(), bytes);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_put_fails_its_shards() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "add_one", &[0]).await.unwrap();
    let put = Put {
        transfer: 1,
        dtype: PrimitiveType::F32 as i32,
        dims: vec![4],
        targets: vec![target(10, 0)],
        ..Put::default()
    };
    session.send(op::Op::Put(put)).await;
    session.execute(50, &[10], 11, 1).await;
    let cancelled = failure(Code::Cancelled, "the client is gone");
    session
        .send(op::Op::CancelPut(CancelPut {
            transfer: 1,
            status: Some(cancelled.clone()),
        }))
        .await;
    assert_eq!(session.watch(&[11]).await.unwrap_err(), cancelled);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_pull_from_each_other() {
    let (from, to) = (Worker::start().await, Worker::start().await);
    let (source, mut sink) = (from.session(3).await, to.session(8).await);
    let bytes = pattern(LARGE);
    source
        .put_bytes(
            1,
            2,
            PrimitiveType::U8,
            &[LARGE as i64],
            None,
            bytes.clone(),
        )
        .await;
    let pull = Pull {
        transfer: 30,
        from: from.address.clone(),
        from_epoch: 3,
        dtype: PrimitiveType::U8 as i32,
        dims: vec![LARGE as i64],
        target: Some(target(2, 6)),
        user_context: 4,
        request: 40,
    };
    // The pull before the read that it is about.
    sink.send(op::Op::Pull(pull.clone())).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    source
        .send(op::Op::Read(Read {
            transfer: 30,
            shard: 1,
            byte_strides: None,
            notify: false,
            ..Read::default()
        }))
        .await;
    sink.answer(40).await.unwrap();
    assert_eq!(sink.read(2).await.unwrap(), bytes);
    assert_eq!(to.status().await.pulled_bytes, LARGE as u64);
    // A failed read fails the pull with the read's own status.
    source
        .send(op::Op::Read(Read {
            transfer: 31,
            shard: 99,
            byte_strides: None,
            notify: false,
            ..Read::default()
        }))
        .await;
    sink.send(op::Op::Pull(Pull {
        transfer: 31,
        target: Some(target(3, 6)),
        request: 41,
        ..pull.clone()
    }))
    .await;
    let status = sink.answer(41).await.unwrap_err();
    assert!(status.message.contains("shard 99"), "{status:?}");
    assert_eq!(sink.read(3).await.unwrap_err(), status);
    // Another size than the source has.
    sink.send(op::Op::Pull(Pull {
        dims: vec![5],
        target: Some(target(4, 6)),
        request: 42,
        ..pull.clone()
    }))
    .await;
    assert_eq!(
        sink.answer(42).await.unwrap_err().code,
        Code::InvalidArgument as i32
    );
    // A worker that is gone.
    from.stop().await;
    sink.send(op::Op::Pull(Pull {
        target: Some(target(5, 6)),
        request: 43,
        ..pull
    }))
    .await;
    let status = sink.answer(43).await.unwrap_err();
    assert_eq!(
        (status.code, user_context(&status)),
        (Code::DataLoss as i32, Some("4")),
        "{status:?}"
    );
    assert_eq!(sink.read(5).await.unwrap_err().code, Code::DataLoss as i32);
    to.stop().await;
}
