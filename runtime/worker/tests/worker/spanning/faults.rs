//! Workers that are lost, or do not know each other.

use std::time::Duration;

use waystation_proto::{
    tensorflow::error::Code,
    waystation::worker::{Load, Peers, Pull, op, peers::Peer},
    xla::PrimitiveType,
};

use super::pair::{BOTH, PLACES, Pair, SECRET, attach, compiled, launched, loaded, sums};
use crate::support::{Worker, target};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_worker_fails_what_it_has_a_part_in_and_another_takes_its_place() {
    let mut pair = Pair::start().await;
    pair.compile(50, "sum_over_both").await;
    pair.put(10, 4, &[2, 2]).await;
    pair.execute(50, 999, 10, 900).await;
    sums(&pair.read(900).await);
    // Only the first worker hears of this one, and waits for the second.
    pair.sessions[0].send(launched(50, 1000, 10, 100)).await;
    let Pair {
        workers,
        sessions: [first, second],
        peers,
    } = pair;
    drop(second);
    let [one, two] = workers;
    let peers_now = vec![peers[0].clone()];
    first.send(op::Op::Peers(Peers { peers: peers_now })).await;
    let mut first = first;
    let status = first.read(100).await.expect_err("lost");
    assert_eq!(status.code, Code::DataLoss as i32, "{status:?}");
    assert!(status.message.contains("slice 0 task 1"), "{status:?}");
    first.send(launched(50, 1001, 10, 200)).await;
    let status = first.read(200).await.expect_err("lost");
    assert_eq!(status.code, Code::DataLoss as i32, "{status:?}");
    // Another life of it.
    let (second, peer) = attach(&two, 2, 1, SECRET).await;
    let mut pair = Pair {
        workers: [one, two],
        sessions: [first, second],
        peers: [peers[0].clone(), peer],
    };
    pair.tell(&pair.peers).await;
    pair.compile(60, "sum_over_both").await;
    for (number, shard) in (4_u8..8).zip(14..) {
        let bytes = f32::from(number + 1).to_le_bytes().repeat(4);
        let device = u32::from(number - 4);
        pair.sessions[1]
            .put_bytes(shard, device, PrimitiveType::F32, &[2, 2], None, bytes)
            .await;
    }
    pair.execute(60, 1002, 10, 300).await;
    sums(&pair.read(300).await);
    pair.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_another_secret_takes_no_part() {
    let mut pair = Pair::with([8; 32]).await;
    // Nor does it get the program of the other one.
    let mut infos = Vec::new();
    for session in &mut pair.sessions {
        session.send(compiled(50, "sum_over_both")).await;
        infos.push(session.compiled(50).await.expect("it compiles"));
    }
    let load = Load {
        request: 51,
        executable: 51,
        key: infos[0].key.clone(),
        device_ids: BOTH.to_vec(),
        processes: PLACES.to_vec(),
        from: pair.workers[0].address.clone(),
        from_epoch: 1,
        from_executable: 50,
        info: infos.pop(),
    };
    let refused = loaded(&mut pair.sessions[1], load).await.expect("refused");
    assert_eq!(refused.code, Code::PermissionDenied as i32, "{refused:?}");
    pair.put(10, 4, &[2, 2]).await;
    pair.execute(50, 1000, 10, 100).await;
    let early = tokio::time::timeout(Duration::from_millis(300), pair.sessions[0].read(100)).await;
    assert!(early.is_err(), "{early:?}");
    pair.tell(&[]).await;
    let status = pair.sessions[0].read(101).await.expect_err("no connection");
    assert_eq!(status.code, Code::DataLoss as i32, "{status:?}");
    pair.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_full_of_launches_hears_that_their_worker_is_lost() {
    let mut pair = Pair::start().await;
    pair.compile(50, "sum_over_both").await;
    pair.put(10, 4, &[2, 2]).await;
    // The second worker never hears of them. They take the whole window; nothing more of the stream would be read.
    let window = waystation_worker::Limits::default().queued_ops as u64;
    let results: Vec<u64> = (0..window).map(|step| 1000 + 100 * step).collect();
    for (&result, launch) in results.iter().zip(1..) {
        pair.sessions[0]
            .send(launched(50, launch, 10, result))
            .await;
    }
    let peers = vec![pair.peers[0].clone()];
    pair.sessions[0].send(op::Op::Peers(Peers { peers })).await;
    for result in results {
        let status = pair.sessions[0].read(result).await.expect_err("lost");
        assert_eq!(status.code, Code::DataLoss as i32, "{status:?}");
    }
    pair.stop().await;
}

/// One that hangs, or whose network is cut, does not end the connections that are to it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_fetched_from_a_worker_ends_when_it_is_lost() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let worker = Worker::start().await;
    let (mut session, _) = attach(&worker, 1, 0, SECRET).await;
    let peer = Peer {
        process: 9,
        address: "127.0.0.1:1".to_owned(),
        life: 1,
        name: "slice 3 task 2".to_owned(),
        data_address: silent.local_addr().expect("an address").to_string(),
    };
    let from = peer.data_address.clone();
    session
        .send(op::Op::Peers(Peers { peers: vec![peer] }))
        .await;
    session
        .send(op::Op::Pull(Pull {
            transfer: 5,
            from,
            from_epoch: 1,
            dtype: PrimitiveType::U8 as i32,
            dims: vec![4 << 20],
            target: Some(target(1, 1)),
            request: 40,
            ..Pull::default()
        }))
        .await;
    let _connection = silent.accept().await.expect("the fetch");
    session.send(op::Op::Peers(Peers::default())).await;
    let lost = session.answer(40).await.expect_err("nothing came");
    assert_eq!(lost.code, Code::DataLoss as i32, "{}", lost.message);
    assert!(lost.message.contains("slice 3 task 2"), "{}", lost.message);
    let failed = session.watch(&[1]).await.expect_err("it did not come");
    assert_eq!(failed.code, Code::DataLoss as i32);
    worker.stop().await;
}
