//! How programs of two workers are compiled, loaded and run.

use waystation_proto::{
    tensorflow::error::Code,
    waystation::worker::{Fail, FetchExecutableRequest, Load, ProgramText, Unload, op},
};

use super::pair::{BOTH, PLACES, Pair, SECRET, launched, loaded, sums};
use crate::support::{failure, user_context};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_add_up() {
    let mut pair = Pair::start().await;
    let info = pair.compile(50, "sum_over_both").await;
    assert_eq!((info.num_replicas, info.num_partitions), (1, 8));
    let sharding = info.results[0].sharding.as_ref().expect("a sharding");
    assert_eq!(sharding.tile_assignment_dimensions, [8, 1], "{info:?}");
    assert_eq!(info.results[0].dims, [16, 2]);
    pair.put(10, 4, &[2, 2]).await;
    pair.execute(50, 1000, 10, 100).await;
    let found = pair.read(100).await;
    sums(&found);
    // A worker has its own shards of the result, and no others.
    let status = pair.sessions[0].read(104).await.expect_err("elsewhere");
    assert_eq!(status.code, Code::InvalidArgument as i32);
    // The text is known where the program was compiled.
    pair.sessions[0]
        .send(op::Op::ProgramText(ProgramText {
            request: 7,
            executable: 50,
        }))
        .await;
    let text = pair.sessions[0].answer(7).await.expect("a text").text;
    assert!(text.contains("HloModule"), "{text}");
    assert_eq!(pair.workers[0].status().await.compiles, 1);
    assert_eq!(pair.workers[1].status().await.compiles, 0);
    pair.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn donated_arrays_are_gone_on_both_workers() {
    let mut pair = Pair::start().await;
    let info = pair.compile(50, "take_over_both").await;
    assert_eq!(info.donated_parameters, [0]);
    pair.put(10, 1024, &[1, 1024]).await;
    // Each takes over what the one before has made.
    for step in 0..20 {
        let arg = 10 + 100 * step;
        pair.execute(50, 1000 + step, arg, arg + 100).await;
    }
    let found = pair.read(2010).await;
    for (value, found) in (1_u8..).zip(found) {
        assert_eq!(found, [f32::from(value) + 20.0; 1024]);
    }
    for status in pair.failures(1910).await {
        assert!(status.message.contains("donated"), "{status:?}");
    }
    pair.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_time_and_elsewhere_it_is_in_the_cache() {
    let mut pair = Pair::start().await;
    let first = pair.compile(50, "take_over_both").await;
    let turned: Vec<i32> = BOTH.iter().rev().copied().collect();
    let places: Vec<u32> = PLACES.iter().rev().copied().collect();
    let second = pair
        .compile_on(51, "take_over_both_turned", &turned, &places)
        .await;
    assert_eq!(first.key, second.key);
    let status = [
        pair.workers[0].status().await,
        pair.workers[1].status().await,
    ];
    // The second worker was asked for what it had only loaded before.
    assert_eq!((status[0].compiles, status[1].compiles), (1, 0));
    // It knows by now what it is.
    let ask = ProgramText {
        request: 7,
        executable: 51,
    };
    pair.sessions[1].send(op::Op::ProgramText(ask)).await;
    let text = pair.sessions[1].answer(7).await.expect("a text").text;
    assert!(text.contains("HloModule"), "{text}");
    pair.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_input_fails_the_launch_on_both_workers() {
    let mut pair = Pair::start().await;
    pair.compile(50, "sum_over_both").await;
    pair.put(10, 4, &[2, 2]).await;
    let fault = failure(Code::ResourceExhausted, "no room for this one");
    pair.sessions[1]
        .send(op::Op::Fail(Fail {
            shards: vec![15],
            status: Some(fault.clone()),
        }))
        .await;
    pair.execute(50, 1000, 10, 100).await;
    let failures = pair.failures(100).await;
    for status in &failures[..4] {
        assert_eq!(status.code, Code::ResourceExhausted as i32);
        assert_eq!(
            status.message,
            // Both of these workers were started as the first of their slice.
            "on the worker of slice 0 task 0: no room for this one"
        );
        assert_eq!(user_context(status), Some("99"));
    }
    assert!(failures[4..].iter().all(|status| *status == fault));
    // An executable that one of them has not.
    pair.sessions[1]
        .send(op::Op::Unload(Unload { executable: 50 }))
        .await;
    pair.put(20, 4, &[2, 2]).await;
    pair.sessions[0].send(launched(50, 1001, 20, 200)).await;
    pair.sessions[1].send(launched(50, 1001, 24, 200)).await;
    let status = pair.sessions[0].read(200).await.expect_err("refused");
    assert!(status.message.contains("unknown"), "{status:?}");
    // Others are as they were.
    pair.compile(51, "sum_over_both").await;
    pair.execute(51, 1002, 20, 300).await;
    let found = pair.read(300).await;
    sums(&found);
    pair.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_placement_that_one_worker_refuses_fails_the_launch_on_the_others() {
    let mut pair = Pair::start().await;
    let info = pair.compile(50, "sum_over_both").await;
    let mut devices = BOTH;
    devices[7] = 99;
    let load = Load {
        request: 51,
        executable: 51,
        key: info.key.clone(),
        device_ids: devices.to_vec(),
        processes: PLACES.to_vec(),
        from: pair.workers[0].address.clone(),
        from_epoch: 1,
        from_executable: 50,
        info: Some(info),
    };
    let refused = loaded(&mut pair.sessions[1], load).await.expect("refused");
    assert!(refused.message.contains("device 99"), "{refused:?}");
    pair.put(10, 4, &[2, 2]).await;
    pair.sessions[0].send(launched(50, 1000, 10, 100)).await;
    pair.sessions[1].send(launched(51, 1000, 14, 100)).await;
    let status = pair.sessions[0].read(100).await.expect_err("refused");
    assert!(status.message.contains("device 99"), "{status:?}");
    pair.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn executables_go_to_their_lease_only() {
    let mut pair = Pair::start().await;
    pair.compile(50, "sum_over_both").await;
    pair.sessions[0]
        .compile(51, "add_one", &[0])
        .await
        .expect("it compiles");
    let mut client = pair.workers[0].client.clone();
    let known = || SECRET.to_vec().into();
    for (epoch, executable) in [(2, 50), (1, 77), (1, 51)] {
        let secret = known();
        let request = FetchExecutableRequest {
            epoch,
            executable,
            secret,
        };
        let refused = client.fetch_executable(request).await.expect_err("refused");
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    }
    // Strangers do not even learn which there are.
    for (executable, secret) in [(50, vec![]), (77, vec![]), (50, vec![8; 32])] {
        let request = FetchExecutableRequest {
            epoch: 1,
            executable,
            secret: secret.into(),
        };
        let refused = client.fetch_executable(request).await.expect_err("refused");
        assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused}");
    }
    let request = FetchExecutableRequest {
        epoch: 1,
        executable: 50,
        secret: known(),
    };
    let frames = client.fetch_executable(request).await.expect("frames");
    let first = frames
        .into_inner()
        .message()
        .await
        .expect("one")
        .expect("one");
    let header = first.header.expect("a header");
    assert!(header.size_bytes > 0 && header.digest.len() == 32);
    assert!(header.platform.iter().any(|fact| fact.name == "plugin"));
    pair.stop().await;
}
