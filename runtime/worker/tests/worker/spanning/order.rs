//! Which launch starts when, and what waits for what.

use waystation_proto::{
    tensorflow::error::Code,
    waystation::worker::{CancelPut, Compile, Execute, Load, Peers, Put, Start, op, peers::Peer},
    xla::PrimitiveType,
};

use super::pair::{BOTH, PLACES, Pair, SECRET, attach_as, launched, loaded, sums};
use crate::support::{Worker, failure, program, target};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_for_one_worker_holds_up_nothing_else() {
    let mut pair = Pair::start().await;
    pair.compile(50, "sum_over_both").await;
    pair.sessions[0]
        .compile(51, "add_one", &[0])
        .await
        .expect("it compiles");
    for (shard, number) in (10..18).zip(0_u8..) {
        let session = &pair.sessions[usize::from(number / 4)];
        let device = u32::from(number % 4);
        if shard == 17 {
            // Its bytes come later.
            session
                .send(op::Op::Put(Put {
                    transfer: 1,
                    dtype: PrimitiveType::F32 as i32,
                    dims: vec![2, 2],
                    targets: vec![target(shard, device)],
                    ..Put::default()
                }))
                .await;
            continue;
        }
        let bytes = f32::from(number + 1).to_le_bytes().repeat(4);
        session
            .put_bytes(shard, device, PrimitiveType::F32, &[2, 2], None, bytes)
            .await;
    }
    pair.execute(50, 1000, 10, 100).await;
    // Its own inputs are there, but it comes after the first.
    pair.put(20, 4, &[2, 2]).await;
    pair.execute(50, 1001, 20, 200).await;
    // The devices are not taken by either.
    pair.sessions[0].put(1, 0, &[1.0; 4]).await;
    for step in 0..50 {
        pair.sessions[0].execute(51, &[1 + step], 2 + step, 1).await;
    }
    assert_eq!(pair.sessions[0].read_f32(51).await, [51.0; 4]);
    let bytes = 8_f32.to_le_bytes().repeat(4);
    pair.sessions[1]
        .put_data(1, &bytes, 16, 16)
        .await
        .expect("taken");
    let found = pair.read(200).await;
    sums(&found);
    let found = pair.read(100).await;
    sums(&found);
    pair.stop().await;
}

/// A program within one worker may start before a launch of two that came earlier, and takes nothing over that this one reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launch_that_waits_for_another_worker_keeps_what_it_reads() {
    let mut pair = Pair::start().await;
    pair.compile(50, "sum_over_both").await;
    let local = pair.sessions[0].compile(51, "take_over_square", &[0]).await;
    assert_eq!(local.expect("it compiles").donated_parameters, [0]);
    pair.put(10, 4, &[2, 2]).await;
    pair.sessions[0].send(launched(50, 1000, 10, 100)).await;
    pair.sessions[0].execute(51, &[10], 200, 1).await;
    assert_eq!(pair.sessions[0].read_f32(200).await, [2.0; 4]);
    // The second worker has heard of nothing until now.
    pair.sessions[1].send(launched(50, 1000, 14, 100)).await;
    sums(&pair.read(100).await);
    pair.stop().await;
}

/// Launches that the proxy places later hold up no others, however many there are, and start in the order of their Start ops.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launch_without_a_place_lets_others_go_first() {
    let mut pair = Pair::start().await;
    pair.compile(50, "sum_over_both").await;
    pair.put(10, 4, &[2, 2]).await;
    pair.announce().await;
    let window = waystation_worker::Limits::default().queued_ops as u64;
    let last = window + 10;
    for launch in 1..=last {
        for (session, own) in pair.sessions.iter().zip([10, 14]) {
            let first = if launch == 1 && own == 10 { 20 } else { own };
            let later = Execute {
                executable: 50,
                launch,
                args: vec![first, own + 1, own + 2, own + 3],
                first_result: 100 * launch,
                num_results: 1,
                placed_later: true,
                ..Execute::default()
            };
            session.send(op::Op::Execute(later)).await;
        }
    }
    pair.execute(50, last + 1, 10, 10).await;
    sums(&pair.read(10).await);
    let bytes = 1_f32.to_le_bytes().repeat(4);
    let stored = pair.sessions[0].put_data(1, &bytes, 16, 16).await;
    stored.expect("taken");
    // Without the other worker it does not start. One that nobody knows is nothing.
    let start = |launch| op::Op::Start(Start { launch });
    pair.sessions[0].send(start(last)).await;
    pair.sessions[0].send(start(9999)).await;
    assert_eq!(pair.sessions[0].started().await, 9999);
    pair.sessions[1].send(start(last)).await;
    for launch in (1..last).rev() {
        for session in &pair.sessions {
            session.send(start(launch)).await;
        }
    }
    for session in &mut pair.sessions {
        for launch in (1..=last).rev() {
            assert_eq!(session.started().await, launch);
        }
    }
    for launch in [1, last] {
        sums(&pair.read(100 * launch).await);
    }
    pair.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_full_of_launches_hears_that_bytes_will_not_come() {
    let mut pair = Pair::start().await;
    pair.compile(50, "sum_over_both").await;
    pair.put(10, 4, &[2, 2]).await;
    pair.announce().await;
    // The first one waits for the bytes, and all others for the first one.
    let waits = op::Op::Execute(Execute {
        executable: 50,
        launch: 1,
        args: vec![20, 11, 12, 13],
        first_result: 100,
        num_results: 1,
        ..Execute::default()
    });
    pair.sessions[0].send(waits).await;
    pair.sessions[1].send(launched(50, 1, 14, 100)).await;
    let window = waystation_worker::Limits::default().queued_ops as u64;
    for launch in 2..window + 2 {
        pair.execute(50, launch, 10, 100 * launch).await;
    }
    let cancel = CancelPut {
        transfer: 1,
        status: Some(failure(Code::Cancelled, "nobody sends them")),
    };
    pair.sessions[0].send(op::Op::CancelPut(cancel)).await;
    sums(&pair.read(100 * (window + 1)).await);
    for status in pair.failures(100).await {
        assert!(status.message.contains("nobody sends them"), "{status:?}");
    }
    pair.stop().await;
}

/// The first worker has parts of two launches, one with the second and then one with the third. The third must not take its
/// devices for the later one while the second may still need something of it for the earlier one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_behind_one_that_waits_takes_no_devices_elsewhere() {
    let mut pair = Pair::start().await;
    let worker = Worker::start().await;
    let (mut third, peer) = attach_as(&worker, 1, 1, 12, SECRET).await;
    let peers: Vec<Peer> = pair.peers.iter().cloned().chain([peer]).collect();
    pair.tell(&peers).await;
    third.send(op::Op::Peers(Peers { peers })).await;
    let info = pair.compile(50, "sum_over_both").await;
    let places = PLACES.map(|process| if process == 9 { 12 } else { process });
    let (program, options) = program("sum_over_both");
    pair.sessions[0]
        .send(op::Op::Compile(Compile {
            request: 51,
            executable: 51,
            program,
            options,
            device_ids: BOTH.to_vec(),
            processes: places.to_vec(),
            ..Compile::default()
        }))
        .await;
    pair.sessions[0].compiled(51).await.expect("it compiles");
    let load = Load {
        request: 51,
        executable: 51,
        key: info.key.clone(),
        device_ids: BOTH.to_vec(),
        processes: places.to_vec(),
        from: pair.workers[0].address.clone(),
        from_epoch: 1,
        from_executable: 51,
        info: Some(info),
    };
    assert_eq!(loaded(&mut third, load).await, None);
    let own: Vec<i32> = (8..16).collect();
    let local = third.compile(52, "sum_of_all_on_8_to_15", &own);
    local.await.expect("it compiles");
    pair.put(10, 4, &[2, 2]).await;
    for (number, shard) in (4_u8..8).zip(14..) {
        let bytes = f32::from(number + 1).to_le_bytes().repeat(4);
        let device = u32::from(number - 4);
        third
            .put_bytes(shard, device, PrimitiveType::F32, &[2, 2], None, bytes)
            .await;
    }
    // A launch of both, to see that all are connected.
    pair.execute(50, 1000, 10, 100).await;
    sums(&pair.read(100).await);
    pair.sessions[0].send(launched(51, 1001, 10, 200)).await;
    third.send(launched(51, 1001, 14, 200)).await;
    for shard in 204..208 {
        third.read(shard).await.expect("it runs");
    }
    // The second worker has not heard of the earlier one yet.
    pair.sessions[0].send(launched(50, 1002, 10, 300)).await;
    pair.sessions[0].send(launched(51, 1003, 10, 400)).await;
    // It has been applied when this is read.
    pair.sessions[0].put(1, 0, &[1.0]).await;
    pair.sessions[0].read(1).await.expect("it is there");
    third.send(launched(51, 1003, 14, 400)).await;
    // One after the other, so that some of them would come behind it.
    let args: Vec<u64> = (600..608).collect();
    for (&arg, device) in args.iter().zip(0..) {
        third
            .put_bytes(arg, device, PrimitiveType::F32, &[2, 2], None, vec![0; 16])
            .await;
    }
    for round in 0..30 {
        let first = 2000 + 8 * round;
        third.execute(52, &args, first, 1).await;
        assert_eq!(third.read_f32(first).await, [0.0; 4]);
    }
    pair.sessions[1].send(launched(50, 1002, 14, 300)).await;
    sums(&pair.read(300).await);
    for shard in 404..408 {
        third.read(shard).await.expect("it runs");
    }
    drop(third);
    worker.stop().await;
    pair.stop().await;
}
