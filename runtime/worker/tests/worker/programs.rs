//! Programs: compile, execute, donate, fail, share, and what is known of them.

use waystation_lifecycle::bucket::{Bucket, Location};
use waystation_proto::{
    tensorflow::error::Code,
    waystation::worker::{CostAnalysis, Execute, ProgramText, Put, Unload, op},
    xla::PrimitiveType,
};
use waystation_worker::Limits;

use crate::support::{Worker, floats, target, user_context};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_of_executions_needs_no_waiting() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    // Nothing here waits for the compile or for the bytes: they come in the end.
    session.start_compile(50, "add_one", &[0]).await;
    let put = Put {
        transfer: 1,
        dtype: PrimitiveType::F32 as i32,
        dims: vec![4],
        targets: vec![target(100, 0)],
        ..Put::default()
    };
    session.send(op::Op::Put(put)).await;
    for step in 0..100 {
        session.execute(50, &[100 + step], 101 + step, 1).await;
        session.drop_shards(&[100 + step]).await;
    }
    let info = session.compiled(50).await.unwrap();
    assert_eq!(
        (
            info.parameters.len(),
            info.results.len(),
            info.num_partitions
        ),
        (1, 1, 1),
        "{info:?}"
    );
    session.put_data(1, &[0; 16], 16, 16).await.unwrap();
    assert_eq!(session.read_f32(200).await, [100.0; 4]);
    let status = worker.status().await;
    assert_eq!(
        (status.executes, status.compiles, status.shards),
        (100, 1, 1)
    );
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_devices_add_up() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    let devices: Vec<i32> = (0..8).collect();
    let info = session.compile(50, "sum_of_all", &devices).await.unwrap();
    assert_eq!(info.num_partitions, 8);
    for device in 0..8 {
        let value = f64::from(device) as f32;
        let bytes = [value; 4]
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        session
            .put_bytes(
                10 + u64::from(device),
                device,
                PrimitiveType::F32,
                &[2, 2],
                None,
                bytes,
            )
            .await;
    }
    let args: Vec<u64> = (10..18).collect();
    session.execute(50, &args, 100, 1).await;
    for device in 0..8 {
        // 4 elements on each device: 4 * (0 + ... + 7) = 112.
        assert_eq!(
            session.read_f32(100 + device).await,
            [device as f32 + 112.0; 4],
            "device {device}"
        );
    }
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_results_come_in_order() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "two_results", &[0]).await.unwrap();
    session.put(1, 0, &[1.5, 2.5]).await;
    session.put(2, 0, &[10.0, 20.0]).await;
    session
        .send(op::Op::Execute(Execute {
            watch: 7,
            ..execute(50, &[1, 2], 10, 2)
        }))
        .await;
    session.watched(7).await.unwrap();
    assert_eq!(session.read_f32(10).await, [11.5, 22.5]);
    assert_eq!(session.read(11).await.unwrap(), [1, 0, 0, 0, 2, 0, 0, 0]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn global_ids_and_local_devices_differ() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "add_one_on_3", &[3]).await.unwrap();
    session.put(1, 3, &[1.0; 4]).await;
    session.execute(50, &[1], 10, 1).await;
    assert_eq!(session.read_f32(10).await, [2.0; 4]);
    // A device of another worker, in a program that is not said to span workers.
    let status = session.compile(51, "add_one", &[8]).await.unwrap_err();
    assert!(
        status.code == Code::InvalidArgument as i32 && status.message.contains('8'),
        "{status:?}"
    );
    session.execute(51, &[1], 11, 1).await;
    assert_eq!(session.read(11).await.unwrap_err(), status);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn donated_arrays_are_gone_and_readers_still_get_them() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    let info = session.compile(50, "take_over", &[0]).await.unwrap();
    assert_eq!(info.donated_parameters, [0]);
    session.compile(51, "add_one", &[0]).await.unwrap();
    session.put(1, 0, &[1.0; 1024]).await;
    // A read that is under way when the array is taken over.
    let read = session.start_read(1).await;
    session.execute(50, &[1], 2, 1).await;
    session.execute(50, &[2], 3, 1).await;
    assert_eq!(session.end_read(read).await.unwrap().len(), 4096);
    assert_eq!(session.read_f32(3).await, [3.0; 1024]);
    for shard in [1, 2] {
        let status = session.read(shard).await.unwrap_err();
        assert_eq!(status.code, Code::InvalidArgument as i32);
        assert!(status.message.contains("deleted or donated"), "{status:?}");
    }
    worker.status_becomes(|status| status.shards == 1).await;
    // What the client keeps stays.
    session
        .send(op::Op::Execute(Execute {
            non_donatable: vec![0],
            ..execute(50, &[3], 4, 1)
        }))
        .await;
    assert_eq!(session.read_f32(3).await, [3.0; 1024]);
    assert_eq!(session.read_f32(4).await, [4.0; 1024]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_step_of_a_large_donated_array_can_be_read() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "take_over_large", &[0]).await.unwrap();
    session
        .put_bytes(
            100,
            0,
            PrimitiveType::F32,
            &[1 << 20],
            None,
            vec![0; 4 << 20],
        )
        .await;
    let mut reads = Vec::new();
    for step in 0..20 {
        reads.push(session.start_read(100 + step).await);
        session.execute(50, &[100 + step], 101 + step, 1).await;
    }
    for (step, read) in (0..).zip(reads) {
        let values = floats(&session.end_read(read).await.unwrap());
        assert_eq!(values.len(), 1 << 20);
        assert!(
            values.iter().all(|&value| value == f64::from(step) as f32),
            "step {step}"
        );
    }
    worker.status_becomes(|status| status.shards == 1).await;
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_earlier_op_that_waits_keeps_its_donated_input() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "take_over", &[0]).await.unwrap();
    session.compile(51, "slow", &[0]).await.unwrap();
    // A long computation, whose result the device has not yet, is read and taken over at once.
    session
        .put_bytes(1, 0, PrimitiveType::F32, &[1 << 18], None, vec![0; 1 << 20])
        .await;
    session.execute(51, &[1], 2, 1).await;
    let read = session.start_read(2).await;
    session.put(3, 0, &[5.0; 1024]).await;
    session.execute(50, &[3], 4, 1).await;
    assert_eq!(session.read_f32(4).await, [6.0; 1024]);
    let slow = session.end_read(read).await.unwrap();
    assert_eq!(slow.len(), 1 << 20);
    assert_ne!(&slow[..4], [0; 4]);
    // This execution waits for bytes; a later one takes over what it reads.
    session.start_compile(52, "pick_first", &[0]).await;
    // As does one that waits for its compile.
    session.put(12, 0, &[7.0; 1024]).await;
    session.put(13, 0, &[1.0]).await;
    session.execute(52, &[12, 13], 22, 1).await;
    session.execute(50, &[12], 23, 1).await;
    assert_eq!(session.read_f32(23).await, [8.0; 1024]);
    assert_eq!(session.read_f32(22).await, [8.0; 1024]);
    session.compiled(52).await.unwrap();
    session.put(10, 0, &[7.0; 1024]).await;
    let put = Put {
        transfer: 9,
        dtype: PrimitiveType::F32 as i32,
        dims: vec![1],
        targets: vec![target(11, 0)],
        ..Put::default()
    };
    session.send(op::Op::Put(put)).await;
    session.execute(52, &[10, 11], 20, 1).await;
    session.execute(50, &[10], 21, 1).await;
    assert_eq!(session.read_f32(21).await, [8.0; 1024]);
    session
        .put_data(9, &1.0f32.to_le_bytes(), 4, 4)
        .await
        .unwrap();
    assert_eq!(session.read_f32(20).await, [8.0; 1024]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_that_do_not_compile_say_why() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    let status = session.compile(50, "unknown_call", &[0]).await.unwrap_err();
    assert!(
        status.message.contains("no_such_target"),
        "XLA's own words: {status:?}"
    );
    session.put(1, 0, &[1.0; 4]).await;
    session.execute(50, &[1], 10, 1).await;
    assert_eq!(session.read(10).await.unwrap_err(), status);
    // The worker goes on.
    session.compile(51, "add_one", &[0]).await.unwrap();
    session.execute(51, &[1], 11, 1).await;
    assert_eq!(session.read_f32(11).await, [2.0; 4]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_executions_fail_with_their_reason() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "add_one", &[0]).await.unwrap();
    session.put(1, 0, &[1.0; 4]).await;
    session.put(2, 0, &[1.0; 5]).await;
    session.execute(50, &[1], 10, 2).await;
    session.execute(50, &[1, 1], 20, 1).await;
    session.execute(50, &[999], 30, 1).await;
    for (shard, words) in [
        (10, "1 results"),
        (11, "1 results"),
        (20, "1 arguments"),
        (30, "shard 999"),
    ] {
        let status = session.read(shard).await.unwrap_err();
        assert_eq!(status.code, Code::InvalidArgument as i32, "{status:?}");
        assert!(status.message.contains(words), "{status:?}");
    }
    // What the plugin refuses is its own error, with the request it belongs to.
    session.execute(50, &[2], 40, 1).await;
    let status = session.read(40).await.unwrap_err();
    assert_eq!(user_context(&status), Some("99"), "{status:?}");
    session
        .send(op::Op::Unload(Unload { executable: 50 }))
        .await;
    session
        .send(op::Op::Execute(Execute {
            watch: 5,
            ..execute(50, &[1], 50, 1)
        }))
        .await;
    let status = session.watched(5).await.unwrap_err();
    assert!(status.message.contains("executable 50"), "{status:?}");
    worker
        .status_becomes(|status| status.executables == 0)
        .await;
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_fails_at_run_time_fails_what_depends_on_it() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "too_large", &[0]).await.unwrap();
    session.compile(51, "add_one", &[0]).await.unwrap();
    session.put(1, 0, &[1.0; 16]).await;
    session.put(2, 0, &[1.0; 4]).await;
    session
        .send(op::Op::Execute(Execute {
            watch: 5,
            ..execute(50, &[1], 10, 1)
        }))
        .await;
    session.execute(51, &[10], 11, 1).await;
    let status = session.watched(5).await.unwrap_err();
    assert_eq!(
        status.code,
        Code::ResourceExhausted as i32,
        "the plugin's own code: {status:?}"
    );
    // The request that failed is named, not the one that needed its result.
    assert_eq!(user_context(&status), Some("98"), "{status:?}");
    assert_eq!(session.read(11).await.unwrap_err(), status);
    assert_eq!(session.watch(&[2, 11]).await.unwrap_err(), status);
    session.execute(51, &[2], 12, 1).await;
    assert_eq!(session.read_f32(12).await, [2.0; 4]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_equal_program_is_shared() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "add_one", &[0]).await.unwrap();
    let again = session.compile(51, "add_one", &[0]).await.unwrap();
    assert_eq!(again.key.len(), 64, "{again:?}");
    let status = worker.status().await;
    assert_eq!(
        (status.compiles, status.memory_hits, status.executables),
        (1, 1, 1)
    );
    session
        .send(op::Op::Unload(Unload { executable: 50 }))
        .await;
    session.put(1, 0, &[1.0; 4]).await;
    session.execute(51, &[1], 10, 1).await;
    assert_eq!(session.read_f32(10).await, [2.0; 4]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_text_is_xla_s_own() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    let devices: Vec<i32> = (0..8).collect();
    session.compile(50, "sum_of_all", &devices).await.unwrap();
    session
        .send(op::Op::ProgramText(ProgramText {
            request: 1,
            executable: 50,
        }))
        .await;
    let text = session.answer(1).await.unwrap().text;
    assert!(
        text.starts_with("HloModule") && text.contains("all-reduce"),
        "{text}"
    );
    session
        .send(op::Op::ProgramText(ProgramText {
            request: 2,
            executable: 51,
        }))
        .await;
    assert_eq!(
        session.answer(2).await.unwrap_err().code,
        Code::InvalidArgument as i32
    );
    worker.stop().await;
}

/// The CPU plugin does not analyse costs: these are counted here, once, and stand in the entry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_s_cost_is_known_to_each_worker_that_finds_it() {
    let folder = tempfile::tempdir().unwrap();
    let location = Location::parse(&format!("file://{}", folder.path().display())).unwrap();
    for compiles in [1, 0] {
        let cache = waystation_cache::Config {
            location: Some(Bucket::open(&location).unwrap()),
            ..waystation_cache::Config::default()
        };
        let worker = Worker::start_with(cache, Limits::default()).await;
        let mut session = worker.session(1).await;
        session.compile(50, "product", &[0]).await.unwrap();
        session
            .send(op::Op::CostAnalysis(CostAnalysis {
                request: 1,
                executable: 50,
            }))
            .await;
        let numbers = session.answer(1).await.unwrap().numbers;
        assert_eq!(numbers["flops"], f64::from(2 * 64 * 32 * 16), "{numbers:?}");
        let bytes = f64::from(4 * (64 * 32 + 32 * 16 + 64 * 16));
        assert!(numbers["bytes accessed"] >= bytes, "{numbers:?}");
        assert_eq!(worker.status().await.compiles, compiles);
        worker.stop().await;
    }
}

fn execute(executable: u64, args: &[u64], first_result: u64, num_results: u32) -> Execute {
    Execute {
        executable,
        launch: first_result,
        args: args.to_vec(),
        first_result,
        num_results,
        user_context: 98,
        ..Execute::default()
    }
}
