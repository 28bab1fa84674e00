//! Shards: put, read, copy, bitcast, fail, drop.

use waystation_proto::{
    tensorflow::error::Code,
    waystation::worker::{Bitcast, Copy, DefaultLayout, Fail, Put, op},
    xla::PrimitiveType,
};

use crate::support::{Worker, failure, floats, target, user_context};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_arrays_go_there_and_come_back() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.put(10, 0, &[1.0, 2.0, 3.0]).await;
    session
        .put_bytes(11, 7, PrimitiveType::Bf16, &[2, 0], None, Vec::new())
        .await;
    session
        .put_bytes(12, 3, PrimitiveType::Pred, &[], None, vec![1])
        .await;
    session
        .put_bytes(13, 3, PrimitiveType::S4, &[3], None, vec![7, 0xff, 1])
        .await;
    session.watch(&[10, 11, 12, 13]).await.unwrap();
    assert_eq!(session.read_f32(10).await, [1.0, 2.0, 3.0]);
    assert_eq!(session.read(11).await.unwrap(), b"");
    assert_eq!(session.read(12).await.unwrap(), [1]);
    let four_bits = session.read(13).await.unwrap();
    assert_eq!(
        four_bits.iter().map(|byte| byte & 0xf).collect::<Vec<_>>(),
        [7, 15, 1]
    );
    let status = worker.status().await;
    assert_eq!(status.shards, 4);
    assert!(status.array_bytes >= 12, "{status:?}");
    session.drop_shards(&[10, 11, 12, 13, 999]).await;
    worker
        .status_becomes(|status| status.shards == 0 && status.array_bytes == 0)
        .await;
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_put_fills_several_devices() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    let targets = (0..8)
        .map(|device| target(100 + u64::from(device), device))
        .collect();
    let put = Put {
        transfer: 5,
        dtype: PrimitiveType::S32 as i32,
        dims: vec![2],
        targets,
        ..Put::default()
    };
    session
        .send(op::Op::Put(Put {
            inline_data: Some(vec![1, 0, 0, 0, 2, 0, 0, 0].into()),
            ..put
        }))
        .await;
    for shard in 100..108 {
        assert_eq!(session.read(shard).await.unwrap(), [1, 0, 0, 0, 2, 0, 0, 0]);
    }
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strided_bytes_become_dense() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    // A 2 x 3 array in Fortran order.
    session
        .put_bytes(
            1,
            0,
            PrimitiveType::U8,
            &[2, 3],
            Some(&[1, 2]),
            vec![1, 4, 2, 5, 3, 6],
        )
        .await;
    assert_eq!(session.read(1).await.unwrap(), [1, 2, 3, 4, 5, 6]);
    // Every second column of rows of 512 values, large enough that a task does it.
    let rows = 256;
    let region: Vec<f32> = (0..rows * 512 - 1).map(|index| index as f32).collect();
    let bytes = region
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    session
        .put_bytes(
            2,
            1,
            PrimitiveType::F32,
            &[rows, 256],
            Some(&[2048, 8]),
            bytes,
        )
        .await;
    let dense = floats(&session.read(2).await.unwrap());
    let expected: Vec<f32> = (0..rows * 256)
        .map(|index| ((index / 256) * 512 + (index % 256) * 2) as f32)
        .collect();
    assert_eq!(dense, expected);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lying_puts_fail_alone() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session
        .put_bytes(1, 0, PrimitiveType::F32, &[4], None, vec![0; 15])
        .await;
    session
        .put_bytes(
            2,
            0,
            PrimitiveType::F32,
            &[i64::MAX, i64::MAX],
            None,
            vec![0; 16],
        )
        .await;
    session
        .put_bytes(3, 0, PrimitiveType::F32, &[-4], None, vec![0; 16])
        .await;
    session
        .put_bytes(
            4,
            0,
            PrimitiveType::F32,
            &[1 << 20, 1 << 20],
            Some(&[1, 1]),
            vec![0; 16],
        )
        .await;
    session
        .put_bytes(5, 0, PrimitiveType::F32, &[2, 2], Some(&[8]), vec![0; 16])
        .await;
    session
        .put_bytes(6, 99, PrimitiveType::F32, &[4], None, vec![0; 16])
        .await;
    session.put(7, 0, &[5.0]).await;
    for shard in 1..7 {
        let status = session.read(shard).await.unwrap_err();
        assert_eq!(
            status.code,
            Code::InvalidArgument as i32,
            "shard {shard}: {status:?}"
        );
        assert_eq!(user_context(&status), Some("77"), "shard {shard}");
    }
    assert_eq!(session.read_f32(7).await, [5.0]);
    let unknown = session.read(8).await.unwrap_err();
    assert!(
        unknown.code == Code::InvalidArgument as i32 && unknown.message.contains("shard 8"),
        "{unknown:?}"
    );
    let token = Put {
        transfer: 9,
        dtype: PrimitiveType::Token as i32,
        targets: vec![target(9, 0)],
        ..Put::default()
    };
    session
        .send(op::Op::Put(Put {
            inline_data: Some(vec![].into()),
            ..token
        }))
        .await;
    assert_eq!(
        session.read(9).await.unwrap_err().code,
        Code::Unimplemented as i32
    );
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_and_bitcasts_are_new_shards() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.put(1, 0, &[1.0, 2.0]).await;
    session
        .send(op::Op::Copy(Copy {
            source: 1,
            target: Some(target(2, 5)),
            user_context: 0,
        }))
        .await;
    session
        .send(op::Op::Copy(Copy {
            source: 1,
            target: Some(target(3, 0)),
            user_context: 0,
        }))
        .await;
    let cast = Bitcast {
        source: 2,
        target: Some(target(4, 5)),
        dtype: PrimitiveType::U16 as i32,
        dims: vec![2, 2],
        user_context: 3,
    };
    session.send(op::Op::Bitcast(cast.clone())).await;
    session
        .send(op::Op::Bitcast(Bitcast {
            target: Some(target(5, 5)),
            dims: vec![2],
            ..cast
        }))
        .await;
    session.drop_shards(&[1]).await;
    assert_eq!(session.read_f32(2).await, [1.0, 2.0]);
    assert_eq!(session.read_f32(3).await, [1.0, 2.0]);
    assert_eq!(floats(&session.read(4).await.unwrap()), [1.0, 2.0]);
    let status = session.read(5).await.unwrap_err();
    assert_eq!(
        (status.code, user_context(&status)),
        (Code::InvalidArgument as i32, Some("3"))
    );
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_reaches_what_depends_on_it_and_nothing_else() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "add_one", &[0]).await.unwrap();
    let mut lost = failure(Code::DataLoss, "slice 1 is gone");
    lost.payload
        .insert("a payload".to_owned(), b"bytes".to_vec());
    session
        .send(op::Op::Fail(Fail {
            shards: vec![1],
            status: Some(lost.clone()),
        }))
        .await;
    session.put(2, 0, &[0.0; 4]).await;
    session.execute(50, &[1], 10, 1).await;
    session.execute(50, &[10], 11, 1).await;
    session.execute(50, &[2], 12, 1).await;
    session
        .send(op::Op::Copy(Copy {
            source: 11,
            target: Some(target(13, 1)),
            user_context: 0,
        }))
        .await;
    for shard in [1, 10, 11, 13] {
        assert_eq!(
            session.read(shard).await.unwrap_err(),
            lost,
            "shard {shard}"
        );
        assert_eq!(
            session.watch(&[2, shard]).await.unwrap_err(),
            lost,
            "shard {shard}"
        );
    }
    assert_eq!(session.read_f32(12).await, [1.0; 4]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layouts_are_the_plugin_s() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    let ask = DefaultLayout {
        request: 1,
        dtype: PrimitiveType::F32 as i32,
        dims: vec![2, 3],
        device: 0,
        memory_kind: String::new(),
    };
    session.send(op::Op::DefaultLayout(ask.clone())).await;
    assert_eq!(session.answer(1).await.unwrap().text, "{1,0}");
    session
        .send(op::Op::DefaultLayout(DefaultLayout {
            request: 2,
            memory_kind: "no such".to_owned(),
            ..ask
        }))
        .await;
    assert_eq!(
        session.answer(2).await.unwrap_err().code,
        Code::InvalidArgument as i32
    );
    worker.stop().await;
}
