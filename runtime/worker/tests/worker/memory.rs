//! A limit on device memory: what does not fit fails, with a table of what is there, and nothing else does.

use prost::Message as _;
use waystation_proto::{
    ifrt_proxy_contrib_pathways::{ObjectStoreDumpProto, object_store_dump_proto::ResultStatusor},
    tensorflow::{StatusProto, error::Code},
    waystation::worker::{Copy, Execute, FetchDataRequest, Op, Put, Read, Target, op},
    xla::PrimitiveType,
};
use waystation_worker::Limits;

use crate::support::{SECRET, Session, Worker, target, user_context};

const LIMIT: usize = 1 << 20;

async fn limited(bytes: usize) -> Worker {
    let limits = Limits {
        device_memory_bytes: Some(bytes as u64),
        ..Limits::default()
    };
    Worker::start_with(waystation_cache::Config::default(), limits).await
}

async fn put_bytes(session: &Session, shard: u64, device: u32, bytes: usize) {
    let dims = [i64::try_from(bytes).expect("small")];
    let data = vec![1; bytes];
    session
        .put_bytes(shard, device, PrimitiveType::U8, &dims, None, data)
        .await;
}

fn is_out_of_memory(status: &StatusProto) -> bool {
    status.code == Code::ResourceExhausted as i32
        && status.message.contains("--device_memory_bytes")
}

/// Context, maker, shards and bytes of each row, and the device.
fn table(status: &StatusProto) -> (String, Vec<(u64, String, u64, u64)>) {
    let payload = status
        .payload
        .get("type.googleapis.com/ifrt_proxy_contrib_pathways.ObjectStoreDumpProto")
        .expect("a memory table");
    let dump = ObjectStoreDumpProto::decode(&payload[..]).expect("a message");
    let device = dump.device().to_owned();
    let Some(ResultStatusor::Dump(dump)) = dump.result_statusor else {
        panic!("no table: {dump:?}");
    };
    let mut rows = Vec::new();
    for context in dump.per_error_context {
        for row in &context.per_creator {
            rows.push((
                context.error_context_id(),
                row.creator().to_owned(),
                row.ready_obj_count() + row.not_ready_obj_count(),
                row.ready_total_size() + row.not_ready_total_size(),
            ));
        }
    }
    (device, rows)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_fit_fails_with_what_is_made_from_it_and_nothing_else() {
    let worker = limited(LIMIT).await;
    let mut session = worker.session(1).await;
    session.compile(50, "add_one", &[0]).await.unwrap();
    put_bytes(&session, 1, 0, LIMIT - 64).await;
    session.put(2, 0, &[1.0; 4]).await;
    session.put(3, 0, &[1.0; 16]).await;
    session.execute(50, &[3], 4, 1).await;
    let status = session.watch(&[3]).await.unwrap_err();
    assert!(is_out_of_memory(&status), "{status:?}");
    assert!(status.message.contains("device 0"), "{status:?}");
    assert_eq!(user_context(&status), Some("77"));
    assert_eq!(session.watch(&[4]).await.unwrap_err(), status);
    // A copy onto the device, and one of a shard that failed.
    for (source, shard, to) in [(1, 10, 0), (3, 11, 1)] {
        let copy = Copy {
            source,
            target: Some(target(shard, to)),
            user_context: 5,
        };
        session.send(op::Op::Copy(copy)).await;
        let status = session.watch(&[shard]).await.unwrap_err();
        assert!(is_out_of_memory(&status), "{status:?}");
    }
    // All else lives: other devices, what fits, what was there.
    put_bytes(&session, 5, 1, LIMIT).await;
    session.execute(50, &[2], 6, 1).await;
    session.watch(&[1, 2, 5]).await.unwrap();
    assert_eq!(session.read_f32(6).await, [2.0; 4]);
    let status = worker.status().await;
    assert_eq!(status.device_memory_limit_bytes, Some(LIMIT as u64));
    assert_eq!(
        status.device_memory_bytes[..2],
        [LIMIT as u64 - 32, LIMIT as u64]
    );
    // A dropped shard's room is there for the very next op.
    let next = Put {
        dtype: PrimitiveType::U8 as i32,
        dims: vec![LIMIT as i64 / 2],
        targets: vec![target(7, 0)],
        inline_data: Some(vec![1; LIMIT / 2].into()),
        ..Put::default()
    };
    session
        .send_op(Op {
            op: Some(op::Op::Put(next)),
            drops: vec![1],
            ..Op::default()
        })
        .await;
    session.watch(&[7]).await.unwrap();
    drop(session);
    worker
        .status_becomes(|status| status.device_memory_bytes.iter().all(|&bytes| bytes == 0))
        .await;
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_execution_needs_its_results_and_temporaries() {
    let worker = limited(LIMIT).await;
    let mut session = worker.session(1).await;
    let info = session.compile(50, "products", &[0]).await.unwrap();
    let stats = info.memory_stats.expect("the plugin states them");
    let temporaries = usize::try_from(stats.temp_size_in_bytes).expect("a size");
    let array = 64 * 64 * 4;
    assert!(temporaries >= array, "{stats:?}");
    let input = vec![0; array];
    session
        .put_bytes(1, 0, PrimitiveType::F32, &[64, 64], None, input)
        .await;
    // All but one byte of what argument, result and temporaries take.
    let room = 2 * array + temporaries;
    put_bytes(&session, 2, 0, LIMIT - room + 1).await;
    session.watch(&[1, 2]).await.unwrap();
    session.execute(50, &[1], 3, 1).await;
    let status = session.watch(&[3]).await.unwrap_err();
    assert!(is_out_of_memory(&status), "{status:?}");
    assert!(status.message.contains("temporaries"), "{status:?}");
    assert_eq!(user_context(&status), Some("99"));
    session.drop_shards(&[2, 3]).await;
    put_bytes(&session, 4, 0, LIMIT - room).await;
    session.execute(50, &[1], 5, 1).await;
    session.watch(&[4, 5]).await.unwrap();
    // The temporaries are free again.
    worker
        .status_becomes(|status| status.device_memory_bytes[0] == (LIMIT - temporaries) as u64)
        .await;
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn donated_inputs_give_their_bytes_to_the_results() {
    let worker = limited(LIMIT).await;
    let mut session = worker.session(1).await;
    session.compile(50, "take_over", &[0]).await.unwrap();
    put_bytes(&session, 1, 0, LIMIT - 4096).await;
    session.put(10, 0, &[0.0; 1024]).await;
    session.watch(&[1, 10]).await.unwrap();
    // Full to the last byte, and each step takes the last one's room.
    for step in 0..20 {
        session.execute(50, &[10 + step], 11 + step, 1).await;
    }
    session.watch(&[30]).await.unwrap();
    assert_eq!(worker.status().await.device_memory_bytes[0], LIMIT as u64);
    let kept = Execute {
        executable: 50,
        args: vec![30],
        first_result: 31,
        num_results: 1,
        non_donatable: vec![0],
        ..Execute::default()
    };
    session.send(op::Op::Execute(kept)).await;
    let status = session.watch(&[31]).await.unwrap_err();
    assert!(is_out_of_memory(&status), "{status:?}");
    assert_eq!(session.read_f32(30).await, [20.0; 1024]);
    worker.stop().await;
}

/// Three arrays fit, and each step needs two: however many steps are sent at once, none fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_fit_yet_waits_for_executions_in_flight() {
    let array = 4 << 18;
    let worker = limited(3 * array + (1 << 16)).await;
    let mut session = worker.session(1).await;
    let info = session.compile(50, "slow", &[0]).await.unwrap();
    let stats = info.memory_stats.expect("the plugin states them");
    assert!(stats.temp_size_in_bytes <= 1 << 20, "{stats:?}");
    let data = vec![0; array];
    session
        .put_bytes(100, 0, PrimitiveType::F32, &[1 << 18], None, data)
        .await;
    for step in 0..8 {
        session.execute(50, &[100 + step], 101 + step, 1).await;
        session.drop_shards(&[100 + step]).await;
    }
    session.watch(&[108]).await.unwrap();
    // The same for a put and a copy: the input of the step has been dropped, but the step still reads it.
    session.execute(50, &[108], 109, 1).await;
    session.drop_shards(&[108]).await;
    put_bytes(&session, 200, 0, 2 * array).await;
    session.watch(&[200, 109]).await.unwrap();
    worker.stop().await;
}

/// While it is sent it cannot be taken over, and there is no room for a second one. Others go on meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_array_that_is_being_sent_is_taken_over_when_it_has_been() {
    const ARRAY: usize = 4 << 20;
    let worker = limited(ARRAY + (1 << 16)).await;
    let mut session = worker.session(1).await;
    for (executable, name) in [(50, "take_over_large"), (51, "add_one")] {
        session.compile(executable, name, &[0]).await.unwrap();
    }
    let data = vec![0; ARRAY];
    session
        .put_bytes(100, 0, PrimitiveType::F32, &[1 << 20], None, data)
        .await;
    session.put(1, 0, &[1.0; 4]).await;
    for step in 0..6 {
        let (transfer, shard) = (1000 + step, 100 + step);
        let read = Read {
            transfer,
            shard,
            on_demand: true,
            ..Read::default()
        };
        session.send(op::Op::Read(read)).await;
        let request = FetchDataRequest {
            epoch: session.epoch,
            transfer,
            by_connection: true,
            secret: SECRET.to_vec().into(),
        };
        // In two of three cases it is under way, and in one nobody has asked for it yet.
        let mut taken = None;
        if step % 3 > 0 {
            let frames = session.client.fetch_data(request).await;
            let mut frames = frames.expect("a transfer").into_inner();
            frames.message().await.expect("a frame");
            taken = Some(frames);
        }
        session.execute(50, &[shard], shard + 1, 1).await;
        session.execute(51, &[1], 2 + step, 1).await;
        assert_eq!(session.read_f32(2 + step).await, [2.0; 4]);
        if step % 3 == 1 {
            // Its end is the call's.
            drop(taken.take());
        }
        session
            .send_op(Op {
                releases: vec![transfer],
                ..Op::default()
            })
            .await;
        drop(taken);
        session.watch(&[shard + 1]).await.unwrap();
    }
    assert_eq!(session.read_f32(106).await, vec![6.0; 1 << 20]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_memories_do_not_count() {
    let worker = limited(LIMIT).await;
    let mut session = worker.session(1).await;
    let put = Put {
        dtype: PrimitiveType::U8 as i32,
        dims: vec![4 * LIMIT as i64],
        targets: vec![Target {
            memory_kind: "pinned_host".to_owned(),
            ..target(1, 0)
        }],
        inline_data: Some(vec![1; 4 * LIMIT].into()),
        ..Put::default()
    };
    session.send(op::Op::Put(put)).await;
    session.watch(&[1]).await.unwrap();
    let status = worker.status().await;
    assert_eq!(status.device_memory_bytes[0], 0);
    assert_eq!(status.array_bytes, 4 * LIMIT as u64);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_table_names_the_clients_own_arrays_and_sums_up_others() {
    let worker = limited(LIMIT).await;
    let mut session = worker.session(1).await;
    session.compile(50, "take_over", &[0]).await.unwrap();
    let of_client = |client, shard: u64, device, bytes: usize, user_context| Op {
        op: Some(op::Op::Put(Put {
            transfer: shard,
            dtype: PrimitiveType::U8 as i32,
            dims: vec![bytes as i64],
            targets: vec![target(shard, device)],
            inline_data: Some(vec![1; bytes].into()),
            user_context,
            ..Put::default()
        })),
        client,
        ..Op::default()
    };
    for op in [
        of_client(7, 1, 0, 1000, 11),
        of_client(7, 2, 0, 2000, 12),
        of_client(7, 3, 0, 500, 11),
        of_client(7, 4, 1, 800, 13),
        of_client(8, 5, 0, 10_000, 11),
    ] {
        session.send_op(op).await;
    }
    let input = Put {
        transfer: 20,
        dtype: PrimitiveType::F32 as i32,
        dims: vec![1024],
        targets: vec![target(20, 0)],
        inline_data: Some(vec![0; 4096].into()),
        ..Put::default()
    };
    let execute = Execute {
        executable: 50,
        args: vec![20],
        first_result: 21,
        num_results: 1,
        user_context: 14,
        ..Execute::default()
    };
    for op in [op::Op::Put(input), op::Op::Execute(execute)] {
        session
            .send_op(Op {
                op: Some(op),
                client: 7,
                ..Op::default()
            })
            .await;
    }
    session.watch(&[1, 2, 3, 4, 5, 21]).await.unwrap();
    let used = worker.status().await.clients;
    let used: Vec<_> = used
        .iter()
        .map(|usage| (usage.client, usage.array_bytes, usage.shards))
        .collect();
    assert_eq!(used, [(7, 8396, 5), (8, 10_000, 1)]);

    session.send_op(of_client(7, 30, 0, LIMIT, 15)).await;
    let status = session.watch(&[30]).await.unwrap_err();
    assert_eq!(user_context(&status), Some("15"));
    let (device, rows) = table(&status);
    assert_eq!(device, "0 (cpu)");
    let row = |context, maker: &str, shards, bytes| (context, maker.to_owned(), shards, bytes);
    assert_eq!(
        rows,
        [
            row(14, "jit__lambda", 1, 4096),
            row(12, "device_put", 1, 2000),
            row(11, "device_put", 2, 1500),
            row(0, "other clients", 1, 10_000),
        ]
    );
    // The other client learns nothing but the sum.
    session.send_op(of_client(8, 31, 1, 2 * LIMIT, 16)).await;
    let (device, rows) = table(&session.watch(&[31]).await.unwrap_err());
    assert_eq!(device, "1 (cpu)");
    assert_eq!(rows, [row(0, "other clients", 1, 800)]);
    worker.stop().await;
}

/// The plugin's own out of memory comes while an execution runs, and those that were given its result fail with it, in any
/// order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cause_of_a_late_failure_is_named_however_soon_one_asks() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "too_large", &[0]).await.unwrap();
    session.compile(51, "pick_first", &[0]).await.unwrap();
    session.put(1, 0, &[1.0; 16]).await;
    session.put(2, 0, &[1.0; 1]).await;
    session
        .compile(52, "first_of_too_large", &[0])
        .await
        .unwrap();
    for round in 1..=20 {
        let base = round * 100;
        for (step, (executable, args)) in (0u64..).zip([
            (50, vec![1]),
            (52, vec![base]),
            (51, vec![base + 1, 2]),
            (51, vec![base + 2, 2]),
            (51, vec![base + 3, 2]),
        ]) {
            let execute = Execute {
                executable,
                args,
                first_result: base + step,
                num_results: 1,
                user_context: 1000 + step,
                ..Execute::default()
            };
            session.send(op::Op::Execute(execute)).await;
        }
        let read = session.start_read(base + 4).await;
        let watched = session.watch(&[base + 3]).await.unwrap_err();
        let read = session.end_read(read).await.unwrap_err();
        for status in [watched, read] {
            assert_eq!(status.code, Code::ResourceExhausted as i32, "{status:?}");
            assert_eq!(user_context(&status), Some("1000"), "{status:?}");
            let (device, rows) = table(&status);
            assert_eq!(device, "0 (cpu)");
            assert!(
                rows.contains(&(77, "device_put".to_owned(), 2, 68)),
                "{rows:?}"
            );
            // What has failed takes nothing.
            assert!(rows.iter().all(|row| row.3 < 1 << 40), "{rows:?}");
        }
    }
    worker.stop().await;
}
