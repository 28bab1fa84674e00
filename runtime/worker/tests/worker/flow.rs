//! Sessions, and what happens when too much comes at once.

use std::time::Duration;

use waystation_proto::{
    tensorflow::error::Code,
    waystation::worker::{CancelPut, ClientEnded, Execute, Op, Put, Watch, op, reply},
    xla::PrimitiveType,
};
use waystation_worker::Limits;

use crate::support::{PATIENCE, Session, Worker, target};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_session_frees_all_it_held() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "add_one", &[0]).await.unwrap();
    session
        .put_bytes(1, 0, PrimitiveType::U8, &[1 << 20], None, vec![1; 1 << 20])
        .await;
    // Work that never ends: its bytes do not come.
    let put = Put {
        transfer: 9,
        dtype: PrimitiveType::F32 as i32,
        dims: vec![4],
        targets: vec![target(2, 0)],
        ..Put::default()
    };
    session.send(op::Op::Put(put)).await;
    session.execute(50, &[2], 3, 1).await;
    session.watch(&[1]).await.unwrap();
    assert!(worker.status().await.array_bytes >= 1 << 20);
    drop(session);
    let status = worker
        .status_becomes(|status| status.array_bytes == 0)
        .await;
    assert_eq!((status.shards, status.executables), (0, 0));
    // The same lease number may come again: nobody holds it.
    let mut session = worker.session(1).await;
    session.put(1, 0, &[1.0]).await;
    assert_eq!(session.read_f32(1).await, [1.0]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newer_lease_ends_the_older_one() {
    let worker = Worker::start().await;
    let mut old = worker.session(5).await;
    old.put(1, 0, &[1.0; 1000]).await;
    old.watch(&[1]).await.unwrap();
    let refused = Session::open(&worker, 5)
        .await
        .err()
        .expect("the lease is held");
    assert_eq!(
        refused.code(),
        tonic::Code::FailedPrecondition,
        "{refused:?}"
    );
    let mut new = worker.session(6).await;
    assert!(old.ended().await);
    let status = new.read(1).await.unwrap_err();
    assert_eq!(
        status.code,
        Code::InvalidArgument as i32,
        "the old lease's shards are gone"
    );
    assert_eq!(worker.status().await.array_bytes, 0);
    // The older one does not come back when the newer has ended: its proxy has lost the slice.
    new.put(1, 0, &[1.0; 1000]).await;
    new.watch(&[1]).await.unwrap();
    drop(new);
    worker
        .status_becomes(|status| status.array_bytes == 0)
        .await;
    let refused = Session::open(&worker, 5).await.err().expect("it is over");
    assert_eq!(
        refused.code(),
        tonic::Code::FailedPrecondition,
        "{refused:?}"
    );
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_begins_with_attach() {
    let worker = Worker::start().await;
    let mut client = worker.client.clone();
    let first = Op {
        op: Some(op::Op::Put(Put::default())),
        ..Op::default()
    };
    let refused = client
        .session(tokio_stream::iter([first]))
        .await
        .expect_err("refused");
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    let mut session = worker.session(1).await;
    // An op that this build does not know is passed over.
    session.send_op(Op::default()).await;
    session.put(1, 0, &[1.0]).await;
    assert_eq!(session.read_f32(1).await, [1.0]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_executions_is_taken_at_the_worker_s_pace() {
    const COUNT: u64 = 25_000;
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "add_one", &[0]).await.unwrap();
    session.put(100, 0, &[0.0; 4]).await;
    for step in 0..COUNT {
        session.execute(50, &[100 + step], 101 + step, 1).await;
        session.drop_shards(&[100 + step]).await;
        if step % 1000 == 0 {
            // Each step drops its input: but for ops under way there is one shard.
            let shards = worker.status().await.shards;
            assert!(shards < 3000, "{shards} shards after {step} steps");
        }
    }
    assert_eq!(session.read_f32(100 + COUNT).await, [COUNT as f32; 4]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_waits_on_much_leaves_room_for_others() {
    let limits = Limits {
        waiting_ops: 8,
        ..Limits::default()
    };
    let worker = Worker::start_with(waystation_cache::Config::default(), limits).await;
    let mut session = worker.session(1).await;
    // Bytes that do not come.
    let put = Put {
        transfer: 9,
        dtype: PrimitiveType::F32 as i32,
        dims: vec![4],
        targets: vec![target(1, 0)],
        ..Put::default()
    };
    session.send(op::Op::Put(put)).await;
    let wait = async |client: u64, number: u64| {
        let watch = Watch {
            watch: number,
            shards: vec![1],
        };
        let op = Op {
            op: Some(op::Op::Watch(watch)),
            client,
            ..Op::default()
        };
        session.send_op(op).await;
    };
    // Half of the room, then half of what is left, and so on.
    for (client, waiting) in [(1, 4), (2, 2), (3, 1)] {
        for number in 0..=waiting {
            wait(client, client * 100 + number).await;
        }
    }
    for refused in [104, 202, 301] {
        let done = session
            .reply(|reply| match reply {
                reply::Reply::WatchDone(done) => Some(done.clone()),
                _ => None,
            })
            .await;
        let status = done.status.expect("refused");
        assert_eq!(
            (done.watch, status.code),
            (refused, Code::ResourceExhausted as i32),
            "{status:?}"
        );
    }
    // Those that wait no longer are not counted any more.
    session
        .send(op::Op::CancelPut(CancelPut {
            transfer: 9,
            ..CancelPut::default()
        }))
        .await;
    for _ in 0..7 {
        let done = session
            .reply(|reply| match reply {
                reply::Reply::WatchDone(done) => Some(done.clone()),
                _ => None,
            })
            .await;
        assert_ne!(
            done.status.expect("cancelled").code,
            Code::ResourceExhausted as i32
        );
    }
    assert!(session.watch(&[1]).await.is_err());
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn launches_of_a_client_that_has_ended_do_not_begin() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "add_one", &[0]).await.unwrap();
    session.put(2, 0, &[2.0; 4]).await;
    let put = Put {
        transfer: 9,
        dtype: PrimitiveType::F32 as i32,
        dims: vec![4],
        targets: vec![target(1, 0)],
        ..Put::default()
    };
    session.send(op::Op::Put(put)).await;
    let send = async |client: u64, op: op::Op| {
        let op = Op {
            op: Some(op),
            client,
            ..Op::default()
        };
        session.send_op(op).await;
    };
    let execute = |arg: u64, result: u64| {
        op::Op::Execute(Execute {
            executable: 50,
            launch: result,
            args: vec![arg],
            first_result: result,
            num_results: 1,
            ..Execute::default()
        })
    };
    send(5, execute(1, 10)).await;
    send(6, execute(1, 11)).await;
    send(5, op::Op::ClientEnded(ClientEnded {})).await;
    // What comes behind.
    send(5, execute(2, 12)).await;
    send(6, execute(2, 13)).await;
    let bytes: Vec<u8> = [1.0f32; 4].iter().flat_map(|v| v.to_le_bytes()).collect();
    session.put_data(9, &bytes, 16, 16).await.unwrap();
    for dropped in [10, 12] {
        let status = session.watch(&[dropped]).await.unwrap_err();
        assert_eq!(status.code, Code::Cancelled as i32, "{status:?}");
    }
    assert_eq!(session.read_f32(11).await, [2.0; 4]);
    assert_eq!(session.read_f32(13).await, [3.0; 4]);
    assert_eq!(worker.status().await.executes, 2);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_behind_stops_reading_its_stream() {
    let limits = Limits {
        queued_ops: 8,
        launches_in_flight: 2,
        ..Limits::default()
    };
    let worker = Worker::start_with(waystation_cache::Config::default(), limits).await;
    let mut session = worker.session(1).await;
    session.compile(50, "slow", &[0]).await.unwrap();
    session
        .put_bytes(
            100,
            0,
            PrimitiveType::F32,
            &[1 << 18],
            None,
            vec![0; 1 << 20],
        )
        .await;
    for step in 0..40 {
        session.execute(50, &[100 + step], 101 + step, 1).await;
    }
    // All 40 were sent; only those that fit its bounds were taken: a result is counted when its execution is launched.
    tokio::time::sleep(Duration::from_millis(20)).await;
    let status = worker.status().await;
    assert!(status.executes < 40, "{status:?}");
    let done = tokio::time::timeout(PATIENCE, session.watch(&[140])).await;
    done.expect("in time").unwrap();
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn executions_that_wait_for_bytes_do_not_stop_the_stream() {
    // Many more executions than permits wait for a put whose end is behind them in the stream.
    let limits = Limits {
        queued_ops: 8,
        ..Limits::default()
    };
    let worker = Worker::start_with(waystation_cache::Config::default(), limits).await;
    let mut session = worker.session(1).await;
    session.compile(50, "add_one", &[0]).await.unwrap();
    let put = Put {
        transfer: 9,
        dtype: PrimitiveType::F32 as i32,
        dims: vec![4],
        targets: vec![target(100, 0)],
        ..Put::default()
    };
    session.send(op::Op::Put(put)).await;
    for step in 0..100 {
        session.execute(50, &[100 + step], 101 + step, 1).await;
    }
    session.put(1, 0, &[3.0]).await;
    assert_eq!(session.read_f32(1).await, [3.0]);
    session.put_data(9, &[0; 16], 16, 16).await.unwrap();
    assert_eq!(session.read_f32(200).await, [100.0; 4]);
    worker.stop().await;
}
