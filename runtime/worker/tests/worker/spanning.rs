//! Programs whose devices lie on two workers.

use std::time::Duration;

use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::{
        ExecutableInfo,
        worker::{
            Attach, CancelPut, Compile, Execute, Fail, FetchExecutableRequest, Load, Peers,
            ProgramText, Pull, Put, Start, Unload, op, peers::Peer, reply,
        },
    },
    xla::PrimitiveType,
};

use crate::support::{Session, Worker, failure, program, target, user_context};

/// Devices 0 to 7 are the first worker's, 8 to 15 the second's; four of each run the programs.
const BOTH: [i32; 8] = [0, 1, 2, 3, 8, 9, 10, 11];
const PLACES: [u32; 8] = [4, 4, 4, 4, 9, 9, 9, 9];
const SECRET: [u8; 32] = [7; 32];

/// Two workers that know each other, with a session each.
struct Pair {
    workers: [Worker; 2],
    sessions: [Session; 2],
    peers: [Peer; 2],
}

async fn attach(worker: &Worker, epoch: u64, index: i32, secret: [u8; 32]) -> (Session, Peer) {
    let process = if index == 0 { 4 } else { 9 };
    attach_as(worker, epoch, index, process, secret).await
}

async fn attach_as(
    worker: &Worker,
    epoch: u64,
    index: i32,
    process: u32,
    secret: [u8; 32],
) -> (Session, Peer) {
    let attach = Attach {
        epoch,
        device_ids: (8 * index..8 * (index + 1)).collect(),
        process,
        collectives_secret: secret.to_vec().into(),
        ..Attach::default()
    };
    let (session, attached) = Session::attach(worker, attach).await.expect("a session");
    assert_eq!(attached.cannot_span, "");
    let peer = Peer {
        process,
        address: attached.collectives_address,
        life: epoch,
        name: format!("slice 0 task {index}"),
        ..Peer::default()
    };
    (session, peer)
}

impl Pair {
    async fn start() -> Pair {
        Pair::with(SECRET).await
    }

    /// The second worker has that secret.
    async fn with(secret: [u8; 32]) -> Pair {
        let workers = [Worker::start().await, Worker::start().await];
        let (first, first_peer) = attach(&workers[0], 1, 0, SECRET).await;
        let (second, second_peer) = attach(&workers[1], 1, 1, secret).await;
        let pair = Pair {
            workers,
            sessions: [first, second],
            peers: [first_peer, second_peer],
        };
        pair.tell(&pair.peers).await;
        pair
    }

    async fn tell(&self, peers: &[Peer]) {
        for session in &self.sessions {
            let peers = peers.to_vec();
            session.send(op::Op::Peers(Peers { peers })).await;
        }
    }

    /// Has the first worker expect the bytes of transfer 1, shard 20, on its first device.
    async fn announce(&self) {
        let put = Put {
            transfer: 1,
            dtype: PrimitiveType::F32 as i32,
            dims: vec![2, 2],
            targets: vec![target(20, 0)],
            ..Put::default()
        };
        self.sessions[0].send(op::Op::Put(put)).await;
    }

    /// Compiles on the first worker and loads on the second.
    async fn compile(&mut self, executable: u64, name: &str) -> ExecutableInfo {
        let devices = BOTH;
        self.compile_on(executable, name, &devices, &PLACES).await
    }

    async fn compile_on(
        &mut self,
        executable: u64,
        name: &str,
        devices: &[i32],
        places: &[u32],
    ) -> ExecutableInfo {
        let (program, options) = program(name);
        let from = usize::from(places[0] == 9);
        let [first, second] = &mut self.sessions;
        let (compiler, other) = if from == 0 {
            (first, second)
        } else {
            (second, first)
        };
        compiler
            .send(op::Op::Compile(Compile {
                request: executable,
                executable,
                program,
                options,
                device_ids: devices.to_vec(),
                processes: places.to_vec(),
                ..Compile::default()
            }))
            .await;
        let info = compiler.compiled(executable).await.expect("it compiles");
        let load = Load {
            request: executable,
            executable,
            key: info.key.clone(),
            device_ids: devices.to_vec(),
            processes: places.to_vec(),
            from: self.workers[from].address.clone(),
            from_epoch: compiler.epoch,
            from_executable: executable,
            info: Some(info.clone()),
        };
        assert_eq!(loaded(other, load).await, None);
        info
    }

    /// Puts shards `first` and so on, one a device, each of `len` elements of a value: the number of the shard, counted from 1.
    async fn put(&self, first: u64, len: usize, dims: &[i64]) {
        for (number, shard) in (0_u8..8).zip(first..) {
            let device = u32::from(number % 4);
            let value = f32::from(number + 1).to_le_bytes();
            let session = &self.sessions[usize::from(number / 4)];
            session
                .put_bytes(
                    shard,
                    device,
                    PrimitiveType::F32,
                    dims,
                    None,
                    value.repeat(len),
                )
                .await;
        }
    }

    /// Launches a program of one argument and one result on all of shards `arg` and so on.
    async fn execute(&self, executable: u64, launch: u64, arg: u64, result: u64) {
        for (session, own) in self.sessions.iter().zip([arg, arg + 4]) {
            session
                .send(launched(executable, launch, own, result))
                .await;
        }
    }

    /// Reads the results, one a device.
    async fn read(&mut self, first: u64) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        for shard in first..first + 8 {
            let session = &mut self.sessions[usize::from(shard >= first + 4)];
            all.push(session.read_f32(shard).await);
        }
        all
    }

    /// How the results fail, one a device.
    async fn failures(&mut self, first: u64) -> Vec<StatusProto> {
        let mut all = Vec::new();
        for shard in first..first + 8 {
            let session = &mut self.sessions[usize::from(shard >= first + 4)];
            all.push(session.read(shard).await.expect_err("a failure"));
        }
        all
    }

    async fn stop(self) {
        drop(self.sessions);
        for worker in self.workers {
            worker.stop().await;
        }
    }
}

/// Has a worker load a program. How it fails, if it does.
async fn loaded(session: &mut Session, load: Load) -> Option<StatusProto> {
    let executable = load.request;
    session.send(op::Op::Load(load)).await;
    session
        .reply(|reply| match reply {
            reply::Reply::CompileDone(done) if done.request == executable => {
                assert_eq!(done.info, None);
                Some(done.status.clone())
            }
            _ => None,
        })
        .await
}

/// Compiles a program on the devices of both.
fn compiled(executable: u64, name: &str) -> op::Op {
    let (program, options) = program(name);
    op::Op::Compile(Compile {
        request: executable,
        executable,
        program,
        options,
        device_ids: BOTH.to_vec(),
        processes: PLACES.to_vec(),
        ..Compile::default()
    })
}

fn launched(executable: u64, launch: u64, arg: u64, result: u64) -> op::Op {
    op::Op::Execute(Execute {
        executable,
        launch,
        args: (arg..arg + 4).collect(),
        first_result: result,
        num_results: 1,
        user_context: 99,
        ..Execute::default()
    })
}

/// Shards of four elements: each the number of its device, and the sum of all.
fn sums(found: &[Vec<f32>]) {
    for (value, found) in (1_u8..).zip(found) {
        let wanted = f32::from(value) + 4.0 * 36.0;
        assert_eq!(found, &vec![wanted; 4]);
    }
}

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
