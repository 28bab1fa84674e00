//! Programs that span workers, where several clients share them: whatever they send, nothing gets stuck and nothing goes wrong
//! for those that have no part in it.
//!
//! `WAYSTATION_SOAK=1` (set by `make soak`) runs it at full length.

use std::time::Duration;

use bytes::Bytes;
use waystation_client::{Client, Error, Request, request};
use waystation_proto::xla::ifrt::proxy::{
    CheckFutureRequest, CopyArraysRequest, DisassembleIntoSingleDeviceArraysRequest,
    LoadedExecutableDestructRequest, LoadedExecutableExecuteRequest,
};
use waystation_tests::{
    cluster::Cluster,
    persist::persist,
    spanning::{
        ADD_ONE, MEAN_AND_ONE, announce, compile, execute, floats, forget, in_time, put, ready,
        values,
    },
};

const INVALID_ARGUMENT: Option<i32> = Some(3);
const DATA_LOSS: Option<i32> = Some(15);

fn rounds(many: usize, few: usize) -> usize {
    match std::env::var_os("WAYSTATION_SOAK") {
        Some(_) => many,
        None => few,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_over_two_workers_runs_wherever_its_partitions_lie() {
    let cluster = Cluster::start(2, 2).await;
    let client = cluster.client().await;
    for devices in [[0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]] {
        let program = compile(&client, MEAN_AND_ONE, &devices)
            .await
            .expect("compiles");
        let mut array = put(&client, [1.0, 2.0, 3.0, 6.0], &devices).await;
        for _ in 0..10 {
            array = execute(&client, program, array).await;
        }
        let found = in_time(values(&client, array)).await.expect("there");
        assert_eq!(found, [13.0; 4], "{devices:?}");
        let unload = LoadedExecutableDestructRequest {
            loaded_executable_handle: program,
            ..Default::default()
        };
        let unload = Request::LoadedExecutableDestructRequest(unload);
        client.call(unload).await.expect("known");
    }
}

/// One client's rounds: launches in a row, with work of its own on one worker's devices in between, which gives the other client's
/// launches every chance to come before its own on one worker and behind them on the other.
async fn share(client: Client, devices: [i32; 4], busy: i32, rounds: usize) {
    let program = compile(&client, MEAN_AND_ONE, &devices)
        .await
        .expect("compiles");
    let local = compile(&client, ADD_ONE, &[busy]).await.expect("compiles");
    let own = client.handle();
    client.store(own, floats(&[0.0; 4])).await.expect("stored");
    let made = request::make_array(own, &[4], &[busy], None);
    client.call(made).await.expect("made");
    let mut array = put(&client, [0.0; 4], &devices).await;
    let mut own = own;
    for round in 1..=rounds {
        let next = execute(&client, program, array).await;
        forget(&client, std::mem::replace(&mut array, next)).await;
        for _ in 0..round % 4 {
            let next = execute(&client, local, own).await;
            forget(&client, std::mem::replace(&mut own, next)).await;
        }
        if round % 97 == 0 {
            // Now and then all of it goes to the other worker's devices and back.
            for order in [[devices[3], devices[2], devices[1], devices[0]], devices] {
                let moved = client.handle();
                let request = CopyArraysRequest {
                    array_handles: vec![array],
                    device_ids: order.to_vec(),
                    result_handles: vec![moved],
                    ..Default::default()
                };
                drop(client.send(Request::CopyArraysRequest(request)).await);
                forget(&client, std::mem::replace(&mut array, moved)).await;
            }
        }
        if round % 50 == 0 {
            in_time(ready(&client, array)).await.expect("ready");
        }
    }
    let found = in_time(values(&client, array)).await.expect("there");
    assert_eq!(found, [rounds as f32; 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_clients_share_two_workers_and_nothing_gets_stuck() {
    let rounds = rounds(10_000, 500);
    let cluster = Cluster::start(2, 2).await;
    let (one, two) = (cluster.client().await, cluster.client().await);
    let one = tokio::spawn(share(one, [0, 1, 2, 3], 0, rounds));
    let two = tokio::spawn(share(two, [3, 1, 2, 0], 3, rounds));
    one.await.expect("no panic");
    two.await.expect("no panic");
    cluster.wait_until_empty(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_input_that_fails_on_one_worker_fails_the_launch_on_all_and_no_other() {
    let cluster = Cluster::start(2, 2).await;
    let (client, other) = (cluster.client().await, cluster.client().await);
    let all = [0, 1, 2, 3];
    let program = compile(&client, MEAN_AND_ONE, &all)
        .await
        .expect("compiles");
    let theirs = compile(&other, MEAN_AND_ONE, &all).await.expect("compiles");
    for broken in 0..4 {
        let (array, pieces) = announce(&client, &all).await;
        let result = execute(&client, program, array).await;
        let after = execute(&client, program, result).await;
        let sound = put(&other, [1.0, 2.0, 3.0, 6.0], &all).await;
        let sound = execute(&other, theirs, sound).await;
        for (position, piece) in pieces.into_iter().enumerate() {
            // Too many bytes for one of the shards.
            let bytes = vec![1.0; if position == broken { 2 } else { 1 }];
            client.store(piece, floats(&bytes)).await.expect("stored");
        }
        for failed in [result, after] {
            for position in 0..4 {
                let error = in_time(piece_of(&client, failed, position)).await;
                let error = error.expect_err("failed");
                assert_eq!(
                    error.code(),
                    INVALID_ARGUMENT,
                    "{broken} {position}: {error}"
                );
                // The cause is told on the worker that was not the cause, too.
                let error = error.to_string();
                assert!(
                    error.contains("8 bytes came"),
                    "{broken} {position}: {error}"
                );
            }
        }
        let found = in_time(values(&other, sound)).await.expect("not theirs");
        assert_eq!(found, [4.0; 4]);
    }
    let array = put(&client, [1.0, 2.0, 3.0, 6.0], &all).await;
    let array = execute(&client, program, array).await;
    assert_eq!(
        in_time(values(&client, array)).await.expect("there"),
        [4.0; 4]
    );
}

/// What a client never sends holds up its own launches and nobody else's, over the same workers or within one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_is_slow_to_send_holds_up_no_other() {
    let cluster = Cluster::start(2, 2).await;
    let (slow, other) = (cluster.client().await, cluster.client().await);
    let all = [0, 1, 2, 3];
    let theirs = compile(&slow, MEAN_AND_ONE, &all).await.expect("compiles");
    let program = compile(&other, MEAN_AND_ONE, &all).await.expect("compiles");
    let local = compile(&other, ADD_ONE, &[3]).await.expect("compiles");
    let (mut waiting, pieces) = announce(&slow, &all).await;
    // Sent at once, and behind those that wait.
    let sound = put(&slow, [1.0, 2.0, 3.0, 6.0], &all).await;
    for _ in 0..100 {
        waiting = execute(&slow, theirs, waiting).await;
    }
    let sound = execute(&slow, theirs, sound).await;
    let mut array = put(&other, [1.0, 2.0, 3.0, 6.0], &all).await;
    let mut own = other.handle();
    other.store(own, floats(&[0.0; 4])).await.expect("stored");
    let made = request::make_array(own, &[4], &[3], None);
    other.call(made).await.expect("made");
    let goes_on = async {
        for round in 1..=20_u8 {
            array = execute(&other, program, array).await;
            own = execute(&other, local, own).await;
            let found = values(&other, array).await.expect("there");
            assert_eq!(found, [f32::from(round) + 3.0; 4]);
        }
        ready(&other, own).await.expect("ready");
    };
    let limit = Duration::from_secs(120);
    let gone_on = tokio::time::timeout(limit, goes_on).await;
    gone_on.expect("the other client is held up");
    for (piece, value) in pieces.into_iter().zip([1.0, 2.0, 3.0, 6.0]) {
        slow.store(piece, floats(&[value])).await.expect("stored");
    }
    let found = in_time(values(&slow, waiting)).await.expect("there");
    assert_eq!(found, [103.0; 4]);
    let found = in_time(values(&slow, sound)).await.expect("there");
    assert_eq!(found, [4.0; 4]);
}

/// An array's shards as arrays of their own.
async fn split(client: &Client, array: u64) -> Result<Vec<u64>, Error> {
    let handles: Vec<u64> = (0..4).map(|_| client.handle()).collect();
    let request = DisassembleIntoSingleDeviceArraysRequest {
        array_handle: array,
        result_handles: handles.clone(),
        ..Default::default()
    };
    client
        .call(Request::DisassembleIntoSingleDeviceArraysRequest(request))
        .await?;
    Ok(handles)
}

async fn fetch(client: &Client, piece: u64) -> Result<Bytes, Error> {
    let buffer = client.handle();
    client.call(request::copy_to_host(piece, buffer)).await?;
    client.lookup(buffer).await
}

/// One of an array's shards.
async fn piece_of(client: &Client, array: u64, position: usize) -> Result<Bytes, Error> {
    let pieces = split(client, array).await?;
    fetch(client, pieces[position]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_vanish_amid_launches_hold_up_nobody() {
    let cluster = Cluster::start(2, 2).await;
    let all = [0, 1, 2, 3];
    let stays = cluster.client().await;
    let program = compile(&stays, MEAN_AND_ONE, &all).await.expect("compiles");
    let mut array = put(&stays, [0.0; 4], &all).await;
    let rounds = rounds(200, 20);
    for round in 0..rounds {
        let goes = cluster.client().await;
        let theirs = compile(&goes, MEAN_AND_ONE, &all).await.expect("compiles");
        // With every second one, bytes are still to come.
        let mut chain = match round % 2 {
            0 => put(&goes, [0.0; 4], &all).await,
            _ => announce(&goes, &all).await.0,
        };
        for _ in 0..10 {
            chain = execute(&goes, theirs, chain).await;
        }
        array = execute(&stays, program, array).await;
        drop(goes);
        array = execute(&stays, program, array).await;
        in_time(ready(&stays, array)).await.expect("ready");
    }
    let found = in_time(values(&stays, array)).await.expect("there");
    assert_eq!(found, [2.0 * rounds as f32; 4]);
    drop(stays);
    cluster.wait_until_empty(Duration::from_secs(10)).await;
}

/// Waits until a device can be used (again).
async fn serves(client: &Client, device: i32) {
    loop {
        let probe = client.handle();
        client.store(probe, floats(&[1.0])).await.expect("stored");
        let made = request::make_array(probe, &[1], &[device], None);
        client.call(made).await.expect("known devices");
        match ready(client, probe).await {
            Ok(_) => return,
            Err(error) => assert_eq!(error.code(), DATA_LOSS, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_worker_fails_what_it_takes_part_in_and_nothing_else_until_another_comes() {
    let mut cluster = Cluster::start(2, 2).await;
    let client = cluster.client().await;
    let all = [0, 1, 2, 3];
    let program = compile(&client, MEAN_AND_ONE, &all)
        .await
        .expect("compiles");
    let local = compile(&client, ADD_ONE, &[1]).await.expect("compiles");
    let mut array = put(&client, [0.0; 4], &all).await;
    for _ in 0..50 {
        array = execute(&client, program, array).await;
    }
    in_time(ready(&client, array)).await.expect("ready");
    let (pending, pieces) = announce(&client, &all).await;
    let under_way = execute(&client, program, pending).await;
    let under_way = split(&client, under_way).await.expect("known");
    let kept = split(&client, array).await.expect("known");
    cluster.lose(1);
    for piece in &pieces[..2] {
        client.store(*piece, floats(&[1.0])).await.expect("stored");
    }
    let lost = |error: Error, what: &str| {
        assert_eq!(error.code(), DATA_LOSS, "{what}: {error}");
        assert!(
            error.to_string().contains("slice 0 task 1"),
            "{what}: {error}"
        );
    };
    // Its parts on the worker that lives, too.
    for piece in under_way {
        let error = in_time(fetch(&client, piece)).await;
        lost(error.expect_err("lost"), "under way");
    }
    let later = execute(&client, program, array).await;
    lost(
        in_time(ready(&client, later)).await.expect_err("lost"),
        "later",
    );
    // What lies on the other worker is there, and it goes on.
    let quarter = in_time(fetch(&client, kept[0])).await.expect("there");
    assert_eq!(quarter, floats(&[50.0]));
    let own = client.handle();
    client.store(own, floats(&[1.0; 4])).await.expect("stored");
    let made = request::make_array(own, &[4], &[1], None);
    client.call(made).await.expect("made");
    let own = execute(&client, local, own).await;
    in_time(ready(&client, own)).await.expect("it goes on");

    // In its place comes another one, which gets the programs anew when they are asked for.
    cluster.replace(1);
    in_time(serves(&client, 2)).await;
    let whole = put(&client, [1.0, 2.0, 3.0, 6.0], &all).await;
    let once = execute(&client, program, whole).await;
    let twice = execute(&client, program, once).await;
    let found = in_time(values(&client, twice)).await.expect("there");
    assert_eq!(found, [5.0; 4]);
    // What the lost one held is lost.
    let error = in_time(fetch(&client, kept[3])).await;
    lost(error.expect_err("lost"), "held by the one before");
    let quarter = in_time(fetch(&client, kept[0])).await.expect("there");
    assert_eq!(quarter, floats(&[50.0]));
}

/// Whatever is under way when a worker goes, of however many clients: it ends well or as lost, and all goes on with the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_go_amid_launches_leave_nothing_stuck() {
    let mut cluster = Cluster::start(2, 2).await;
    let all = [0, 1, 2, 3];
    let mut clients = Vec::new();
    for _ in 0..3 {
        let client = cluster.client().await;
        let program = compile(&client, MEAN_AND_ONE, &all)
            .await
            .expect("compiles");
        clients.push((client, program));
    }
    for round in 0..rounds(50, 4) {
        let goes = round % 2;
        let started: Vec<u64> = {
            let mut started = Vec::new();
            for (client, program) in &clients {
                let mut array = put(client, [0.0; 4], &all).await;
                for _ in 0..20 {
                    array = execute(client, *program, array).await;
                }
                started.push(array);
            }
            started
        };
        // At another moment in each round.
        tokio::time::sleep(Duration::from_millis(round as u64 % 7)).await;
        cluster.lose(goes);
        for ((client, program), mut array) in clients.iter().zip(started) {
            for _ in 0..20 {
                array = execute(client, *program, array).await;
            }
            match in_time(ready(client, array)).await {
                Ok(_) => {}
                Err(error) => assert_eq!(error.code(), DATA_LOSS, "round {round}: {error}"),
            }
        }
        cluster.replace(goes);
        for (client, program) in &clients {
            in_time(async {
                serves(client, 0).await;
                serves(client, 2).await;
                let array = put(client, [1.0, 2.0, 3.0, 6.0], &all).await;
                let array = execute(client, *program, array).await;
                let found = values(client, array).await.expect("it goes on");
                assert_eq!(found, [4.0; 4], "round {round}");
            })
            .await;
        }
    }
}

/// A launch that takes over an array waits for the save of it, and so for all that the client saves with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_of_what_a_client_is_slow_to_send_holds_up_no_other_client() {
    let folder = tempfile::tempdir().expect("a folder");
    let cluster = Cluster::start(2, 2).await;
    let (slow, other) = (cluster.client().await, cluster.client().await);
    let all = [0, 1, 2, 3];
    let takes = MEAN_AND_ONE.replacen(
        "%arg0: tensor<4xf32> {",
        "%arg0: tensor<4xf32> {tf.aliasing_output = 0 : i32, ",
        1,
    );
    let takes = compile(&slow, &takes, &all).await.expect("compiles");
    let program = compile(&other, MEAN_AND_ONE, &all).await.expect("compiles");
    let there = put(&slow, [1.0, 2.0, 3.0, 6.0], &all).await;
    in_time(ready(&slow, there)).await.expect("ready");
    let (late, pieces) = announce(&slow, &all).await;
    let save = persist(&slow, folder.path(), &["there", "late"], false).await;
    let saved = request::execute(save, &[there, late], &[], 1);
    slow.call(saved).await.expect("begun");
    let taken = execute(&slow, takes, there).await;
    // It is sent, for answers come in order.
    let other_array = put(&slow, [0.0; 4], &all).await;
    in_time(ready(&slow, other_array)).await.expect("ready");
    let mut array = put(&other, [1.0, 2.0, 3.0, 6.0], &all).await;
    for round in 1..=20_u8 {
        array = execute(&other, program, array).await;
        let found = in_time(values(&other, array)).await.expect("there");
        assert_eq!(found, [f32::from(round) + 3.0; 4]);
    }
    for (piece, value) in pieces.into_iter().zip([1.0, 2.0, 3.0, 6.0]) {
        slow.store(piece, floats(&[value])).await.expect("stored");
    }
    let found = in_time(values(&slow, taken)).await.expect("there");
    assert_eq!(found, [4.0; 4]);
}

/// Who restores may ask for the end of that, and then never look.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn launches_go_on_after_a_restore_whose_end_nobody_looks_at() {
    let folder = tempfile::tempdir().expect("a folder");
    let cluster = Cluster::start(2, 2).await;
    let client = cluster.client().await;
    let all = [0, 1, 2, 3];
    let program = compile(&client, MEAN_AND_ONE, &all)
        .await
        .expect("compiles");
    let array = put(&client, [1.0, 2.0, 3.0, 6.0], &all).await;
    let with_status = |program, args: &[u64], results: &[u64]| {
        let mut request = request::execute(program, args, results, 1);
        if let Request::LoadedExecutableExecuteRequest(execute) = &mut request {
            execute.result_status_handle = client.handle();
            let options = execute.execute_options.get_or_insert_default();
            options.fill_status = true;
        }
        request
    };
    let save = persist(&client, folder.path(), &["array"], false).await;
    let asked = with_status(save, &[array], &[]);
    let Request::LoadedExecutableExecuteRequest(LoadedExecutableExecuteRequest {
        result_status_handle: end,
        ..
    }) = asked
    else {
        panic!("an execution");
    };
    client.call(asked).await.expect("begun");
    let end = Request::CheckFutureRequest(CheckFutureRequest { future_handle: end });
    in_time(client.call(end)).await.expect("saved");
    let restore = persist(&client, folder.path(), &["array"], true).await;
    let restored = client.handle();
    let asked = with_status(restore, &[], &[restored]);
    client.call(asked).await.expect("begun");
    let result = execute(&client, program, restored).await;
    let found = in_time(values(&client, result)).await.expect("there");
    assert_eq!(found, [4.0; 4]);
}
