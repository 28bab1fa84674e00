//! Arrays straight between devices and a bucket.

use std::path::Path;

use waystation_proto::{
    tensorflow::error::Code,
    waystation::worker::{
        ArrayFile, Cancel, Fail, Put, RestoreArrays, SaveArrays, op, reply, restore_arrays,
        save_arrays::{self, Share, Together},
    },
    xla::{OpSharding, PrimitiveType, op_sharding::Type},
};
use waystation_worker::Limits;

use crate::support::{PATIENCE, Session, Worker, failure, floats, target, user_context};

const ROWS: i64 = 16;
const COLUMNS: i64 = 64;

/// The first dimension over `rows`, the second over `columns`, the rest of eight devices with copies.
fn over(rows: i64, columns: i64) -> OpSharding {
    let copies = 8 / (rows * columns);
    OpSharding {
        r#type: Type::Other as i32,
        tile_assignment_dimensions: if copies > 1 {
            vec![rows, columns, copies]
        } else {
            vec![rows, columns]
        },
        iota_reshape_dims: vec![8],
        iota_transpose_perm: vec![0],
        replicate_on_last_tile_dim: copies > 1,
        ..OpSharding::default()
    }
}

fn file(folder: &Path, name: &str, sharding: OpSharding) -> Option<ArrayFile> {
    Some(ArrayFile {
        location: folder.display().to_string(),
        name: name.to_owned(),
        dims: vec![ROWS, COLUMNS],
        sharding: Some(sharding),
        device_ids: (0..8).collect(),
        dtype: PrimitiveType::F32 as i32,
    })
}

/// Element (i, j) of the array that all tests save.
fn value(i: i64, j: i64) -> f32 {
    (i * COLUMNS + j) as f32
}

/// The shard at a position of `over(rows, columns)`.
fn shard(rows: i64, columns: i64, position: i64) -> Vec<f32> {
    let tile = position / (8 / (rows * columns));
    let (height, width) = (ROWS / rows, COLUMNS / columns);
    let (top, left) = (tile / columns * height, tile % columns * width);
    (top..top + height)
        .flat_map(|i| (left..left + width).map(move |j| value(i, j)))
        .collect()
}

/// Puts the array cut as `over(rows, columns)`, as shards from `first` on.
async fn put(session: &Session, first: u64, rows: i64, columns: i64) {
    for position in 0..8u32 {
        let values = shard(rows, columns, i64::from(position));
        let bytes = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let dims = [ROWS / rows, COLUMNS / columns];
        let id = first + u64::from(position);
        session
            .put_bytes(id, position, PrimitiveType::F32, &dims, None, bytes)
            .await;
    }
}

fn save(
    request: u64,
    file: Option<ArrayFile>,
    first: u64,
    positions: std::ops::Range<u32>,
) -> op::Op {
    op::Op::SaveArrays(save_of(request, file, first, positions))
}

/// Of equal shards the first position writes all.
fn save_of(
    request: u64,
    file: Option<ArrayFile>,
    first: u64,
    positions: std::ops::Range<u32>,
) -> SaveArrays {
    let sharding = file.as_ref().and_then(|file| file.sharding.as_ref());
    let copies = match sharding {
        Some(OpSharding {
            replicate_on_last_tile_dim: true,
            tile_assignment_dimensions: dims,
            ..
        }) => u32::try_from(dims[dims.len() - 1]).expect("few copies"),
        _ => 1,
    };
    let share = |position| Share {
        part: 0,
        parts: u32::from(position % copies == 0),
    };
    let item = save_arrays::Item {
        file,
        shards: positions
            .clone()
            .map(|position| first + u64::from(position))
            .collect(),
        writes_metadata: positions.start == 0,
        shares: positions.clone().map(share).collect(),
        positions: positions.collect(),
    };
    SaveArrays {
        request,
        items: vec![item],
        timeout_ms: 60_000,
        user_context: 6,
        together: None,
    }
}

fn restore(request: u64, files: Vec<Option<ArrayFile>>, first: u64) -> op::Op {
    let item = |(number, file): (u64, _)| restore_arrays::Item {
        file,
        targets: (0..8u32)
            .map(|device| target(first + number * 8 + u64::from(device), device))
            .collect(),
        positions: (0..8).collect(),
    };
    let items = (0u64..).zip(files).map(item).collect();
    op::Op::RestoreArrays(RestoreArrays {
        request,
        items,
        timeout_ms: 60_000,
        user_context: 7,
    })
}

/// Also where it has nothing to write, for another holder does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_says_when_its_arrays_may_be_taken_over() {
    let folder = tempfile::tempdir().expect("a folder");
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    let file = file(folder.path(), "w", over(4, 2));
    put(&session, 100, 4, 2).await;
    for (request, parts) in [(41, 1), (42, 0)] {
        let mut op = save_of(request, file.clone(), 100, 0..8);
        for share in &mut op.items[0].shares {
            share.parts = parts;
        }
        session.send(op::Op::SaveArrays(op)).await;
        let copied = session.reply(|reply| match reply {
            reply::Reply::Copied(copied) => Some(copied.request),
            _ => None,
        });
        assert_eq!(copied.await, request);
        session.answer(request).await.expect("saved");
    }
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_array_comes_back_under_another_sharding() {
    let folder = tempfile::tempdir().unwrap();
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    put(&session, 100, 4, 1).await;
    session
        .send(save(
            1,
            file(folder.path(), "params.w", over(4, 1)),
            100,
            0..8,
        ))
        .await;
    // The arrays may go while they are being written.
    session.drop_shards(&(100..108).collect::<Vec<_>>()).await;
    session.answer(1).await.unwrap();
    let status = worker.status().await;
    assert_eq!(
        status.saved_bytes,
        (ROWS * COLUMNS * 4) as u64,
        "each piece once, not its copies"
    );
    assert_eq!(status.fetched_bytes, 0);
    assert!(folder.path().join("params.w/.zarray").exists());

    let cut = file(folder.path(), "params.w", over(2, 4));
    session.send(restore(2, vec![cut], 200)).await;
    session
        .watch(&(200..208).collect::<Vec<_>>())
        .await
        .unwrap();
    session.answer(2).await.unwrap();
    for position in 0..8 {
        let bytes = session.read(200 + position).await.unwrap();
        assert_eq!(
            floats(&bytes),
            shard(2, 4, position as i64),
            "position {position}"
        );
    }
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_write_one_array() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (Worker::start().await, Worker::start().await);
    let (mut left, mut right) = (first.session(1).await, second.session(1).await);
    put(&left, 100, 8, 1).await;
    put(&right, 100, 8, 1).await;
    left.send(save(1, file(folder.path(), "w", over(8, 1)), 100, 0..5))
        .await;
    right
        .send(save(1, file(folder.path(), "w", over(8, 1)), 100, 5..8))
        .await;
    left.answer(1).await.unwrap();
    right.answer(1).await.unwrap();
    left.send(restore(2, vec![file(folder.path(), "w", over(1, 1))], 200))
        .await;
    let whole = left.read(207).await.unwrap();
    assert_eq!(floats(&whole), shard(1, 1, 0));
    first.stop().await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_behind_a_save_does_not_change_what_is_saved() {
    let folder = tempfile::tempdir().unwrap();
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    session.compile(50, "take_over", &[0]).await.unwrap();
    let file = |name: &str| {
        Some(ArrayFile {
            location: folder.path().display().to_string(),
            name: name.to_owned(),
            dims: vec![1024],
            sharding: Some(OpSharding::default()),
            device_ids: vec![0],
            dtype: 0,
        })
    };
    session.put(10, 0, &[1.0; 1024]).await;
    for step in 0..20 {
        session
            .send(save(
                1 + step,
                file(&format!("step{step}")),
                10 + step,
                0..1,
            ))
            .await;
        session.execute(50, &[10 + step], 11 + step, 1).await;
    }
    for step in 0..20 {
        session.answer(1 + step).await.unwrap();
        let file = file(&format!("step{step}")).map(|file| ArrayFile {
            dtype: PrimitiveType::F32 as i32,
            ..file
        });
        let item = restore_arrays::Item {
            file,
            targets: vec![target(500 + step, 3)],
            positions: vec![0],
        };
        let op = RestoreArrays {
            request: 100 + step,
            items: vec![item],
            ..RestoreArrays::default()
        };
        session.send(op::Op::RestoreArrays(op)).await;
        assert_eq!(
            session.read_f32(500 + step).await,
            [1.0 + step as f32; 1024]
        );
    }
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_saved_or_restored_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    // One good array and one that is missing: the good one is there all the same.
    put(&session, 100, 8, 1).await;
    session
        .send(save(1, file(folder.path(), "good", over(8, 1)), 100, 0..8))
        .await;
    session.answer(1).await.unwrap();
    let files = vec![
        file(folder.path(), "missing", over(8, 1)),
        file(folder.path(), "good", over(8, 1)),
    ];
    session.send(restore(2, files, 200)).await;
    let status = session.answer(2).await.unwrap_err();
    assert_eq!(status.code, Code::FailedPrecondition as i32, "{status:?}");
    assert_eq!(user_context(&status), Some("7"));
    assert_eq!(session.read(200).await.unwrap_err(), status);
    assert_eq!(floats(&session.read(208).await.unwrap()), shard(8, 1, 0));
    // A shard that has failed fails the save with its own status.
    let lost = failure(Code::DataLoss, "slice 1 is gone");
    session
        .send(op::Op::Fail(Fail {
            shards: vec![101],
            status: Some(lost.clone()),
        }))
        .await;
    session
        .send(save(3, file(folder.path(), "lost", over(8, 1)), 100, 0..8))
        .await;
    assert_eq!(session.answer(3).await.unwrap_err(), lost);
    // Shards of another shape than the sharding gives them.
    session
        .send(save(4, file(folder.path(), "shape", over(4, 2)), 102, 0..4))
        .await;
    let status = session.answer(4).await.unwrap_err();
    assert_eq!(
        (status.code, user_context(&status)),
        (Code::InvalidArgument as i32, Some("6")),
        "{status:?}"
    );
    // A location that cannot be used.
    let nowhere = file(Path::new("/proc/no/such/place"), "w", over(8, 1));
    session
        .put_bytes(101, 1, PrimitiveType::F32, &[2, 64], None, vec![0; 512])
        .await;
    session.send(save(5, nowhere, 100, 0..8)).await;
    let status = session.answer(5).await.unwrap_err();
    for part in [
        "slice 0 task 0",
        "array 'w'",
        "device",
        "/proc/no/such/place",
    ] {
        assert!(status.message.contains(part), "{status:?}");
    }
    assert!(
        ![0, Code::NotFound as i32, Code::Internal as i32].contains(&status.code),
        "{status:?}"
    );
    // A save waits for bytes that are under way, and no longer than it may.
    let put = Put {
        transfer: 9,
        dtype: PrimitiveType::F32 as i32,
        dims: vec![2, 64],
        targets: vec![target(300, 0)],
        ..Put::default()
    };
    session.send(op::Op::Put(put)).await;
    let item = save_arrays::Item {
        file: file(folder.path(), "late", over(8, 1)),
        shards: vec![300],
        positions: vec![0],
        shares: vec![Share { part: 0, parts: 1 }],
        writes_metadata: true,
    };
    session
        .send(op::Op::SaveArrays(SaveArrays {
            request: 6,
            items: vec![item],
            ..SaveArrays::default()
        }))
        .await;
    session.put_data(9, &[0; 512], 512, 512).await.unwrap();
    session.answer(6).await.unwrap();
    assert!(folder.path().join("late/.zarray").exists());
    worker.stop().await;
}

/// One array of a row on device 0.
fn row(folder: &Path, name: &str, len: i64) -> Option<ArrayFile> {
    Some(ArrayFile {
        location: folder.display().to_string(),
        name: name.to_owned(),
        dims: vec![len],
        sharding: Some(OpSharding::default()),
        device_ids: vec![0],
        dtype: PrimitiveType::F32 as i32,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_takes_a_saved_array_over_waits_for_the_copy_and_needs_no_second_one() {
    let folder = tempfile::tempdir().unwrap();
    let limits = Limits {
        // An array, and the half of another one.
        device_memory_bytes: Some(6 << 20),
        ..Limits::default()
    };
    let worker = Worker::start_with(waystation_cache::Config::default(), limits).await;
    let mut session = worker.session(1).await;
    session.compile(50, "take_over_large", &[0]).await.unwrap();
    session.put(10, 0, &[1.0; 1 << 20]).await;
    let steps = 6;
    for step in 0..steps {
        let file = row(folder.path(), &format!("step{step}"), 1 << 20);
        session.send(save(1 + step, file, 10 + step, 0..1)).await;
        session.execute(50, &[10 + step], 11 + step, 1).await;
    }
    for step in 0..steps {
        session.answer(1 + step).await.unwrap();
    }
    let last = session.read_f32(10 + steps).await;
    assert!(last.iter().all(|&value| value == 1.0 + steps as f32));
    session.drop_shards(&[10 + steps]).await;
    for step in 0..steps {
        let item = restore_arrays::Item {
            file: row(folder.path(), &format!("step{step}"), 1 << 20),
            targets: vec![target(100, 0)],
            positions: vec![0],
        };
        let op = RestoreArrays {
            request: 50 + step,
            items: vec![item],
            ..RestoreArrays::default()
        };
        session.send(op::Op::RestoreArrays(op)).await;
        let found = session.read_f32(100).await;
        assert!(found.iter().all(|&value| value == 1.0 + step as f32));
        session.drop_shards(&[100]).await;
    }
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_shard_goes_in_chunks_and_parts_through_a_small_budget() {
    let folder = tempfile::tempdir().unwrap();
    let limits = Limits {
        // Less than a chunk.
        checkpoint_host_memory: 8 << 20,
        ..Limits::default()
    };
    let worker = Worker::start_with(waystation_cache::Config::default(), limits).await;
    let mut session = worker.session(1).await;
    // 72 MiB: two chunks.
    let len = 18 << 20;
    let values: Vec<f32> = (0..len).map(|i| (i * 7 % 1013) as f32).collect();
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    let dims = [len as i64];
    session
        .put_bytes(10, 0, PrimitiveType::F32, &dims, None, bytes.collect())
        .await;
    let file = row(folder.path(), "w", len as i64);
    session.send(save(1, file.clone(), 10, 0..1)).await;
    session.answer(1).await.unwrap();
    for chunk in ["0", "1"] {
        assert!(folder.path().join("w").join(chunk).exists());
    }
    assert!(!folder.path().join("w/2").exists());
    let item = restore_arrays::Item {
        file,
        targets: vec![target(100, 3)],
        positions: vec![0],
    };
    let op = RestoreArrays {
        request: 2,
        items: vec![item],
        ..RestoreArrays::default()
    };
    session.send(op::Op::RestoreArrays(op)).await;
    session.answer(2).await.unwrap();
    assert!(session.read_f32(100).await == values);
    let counted = worker.status().await.checkpoints;
    for (name, number) in [("saves", 1), ("restores", 1), ("writes", 3), ("reads", 3)] {
        assert_eq!(counted[name], number, "{counted:?}");
    }
    assert_eq!(counted["saved_bytes"], 4 * len as u64);
    assert_eq!(counted["read_bytes"], counted["written_bytes"]);
    assert_eq!(counted["host_memory_bytes"], 0);
    worker.stop().await;
}

fn together(op: SaveArrays, place: u32) -> op::Op {
    op::Op::SaveArrays(SaveArrays {
        together: Some(Together {
            nonce: "5eed".to_owned(),
            place,
            names: vec!["left".to_owned(), "right".to_owned()],
        }),
        ..op
    })
}

fn names(folder: &Path) -> Vec<String> {
    let entries = folder.read_dir().expect("a folder");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("an entry").file_name())
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_save_together_see_the_same_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (Worker::start().await, Worker::start().await);
    let (mut left, mut right) = (first.session(1).await, second.session(1).await);
    put(&left, 100, 8, 1).await;
    put(&right, 100, 8, 1).await;
    let of = |positions| save_of(1, file(folder.path(), "w", over(8, 1)), 100, positions);
    left.send(together(of(0..5), 0)).await;
    right.send(together(of(5..8), 1)).await;
    left.answer(1).await.unwrap();
    right.answer(1).await.unwrap();
    assert_eq!(names(folder.path()), ["w"]);
    assert_eq!(names(&folder.path().join("w")).len(), 9);
    first.stop().await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_while_another_worker_is_not_seen_and_a_save_can_be_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    put(&session, 100, 8, 1).await;
    let of = |request| save_of(request, file(folder.path(), "w", over(8, 1)), 100, 0..5);
    session.send(together(of(1), 0)).await;
    until(|| names(folder.path()).len() == 1).await;
    session.send(op::Op::Cancel(Cancel { request: 1 })).await;
    let status = session.answer(1).await.unwrap_err();
    assert_eq!(status.code, Code::Cancelled as i32, "{status:?}");
    until(|| names(folder.path()).is_empty()).await;
    // The session's end does the same.
    session.send(together(of(2), 0)).await;
    until(|| names(folder.path()).len() == 1).await;
    drop(session);
    until(|| names(folder.path()).is_empty()).await;
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_saves_do_not_write_one_array_at_the_same_time() {
    let folder = tempfile::tempdir().unwrap();
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    put(&session, 100, 8, 1).await;
    let of = |request, name| save_of(request, file(folder.path(), name, over(8, 1)), 100, 0..5);
    // Waits for another worker.
    session.send(together(of(1, "w"), 0)).await;
    until(|| names(folder.path()).len() == 1).await;
    session.send(op::Op::SaveArrays(of(2, "w"))).await;
    let status = session.answer(2).await.unwrap_err();
    assert_eq!(status.code, Code::FailedPrecondition as i32, "{status:?}");
    assert!(
        status.message.contains("'w': another save is writing it"),
        "{status:?}"
    );
    session.send(op::Op::SaveArrays(of(3, "v"))).await;
    session.answer(3).await.unwrap();
    session.send(op::Op::Cancel(Cancel { request: 1 })).await;
    session.answer(1).await.unwrap_err();
    session.send(op::Op::SaveArrays(of(4, "w"))).await;
    session.answer(4).await.unwrap();
    worker.stop().await;
}

async fn until(met: impl Fn() -> bool) {
    let wait = async {
        while !met() {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait)
        .await
        .expect("it comes about");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_under_way_ends_well_though_the_worker_is_told_to_stop() {
    let folder = tempfile::tempdir().unwrap();
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    put(&session, 100, 8, 1).await;
    let of = |request| save_of(request, file(folder.path(), "w", over(8, 1)), 100, 0..8);
    session.send(together(of(1), 0)).await;
    until(|| names(folder.path()).len() == 1).await;
    let stopping = tokio::spawn(worker.stop());
    // The other worker comes only now.
    for name in ["1", "1-seen"] {
        std::fs::write(folder.path().join(format!(".waystation-5eed-{name}")), b"").unwrap();
    }
    session.answer(1).await.unwrap();
    assert!(folder.path().join("w/.zarray").exists());
    stopping.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_that_does_not_end_in_time_fails_when_the_worker_stops() {
    let folder = tempfile::tempdir().unwrap();
    let limits = Limits {
        grace: std::time::Duration::from_millis(200),
        ..Limits::default()
    };
    let worker = Worker::start_with(waystation_cache::Config::default(), limits).await;
    let mut session = worker.session(1).await;
    put(&session, 100, 8, 1).await;
    let of = |request| save_of(request, file(folder.path(), "w", over(8, 1)), 100, 0..8);
    session.send(together(of(1), 0)).await;
    until(|| names(folder.path()).len() == 1).await;
    worker.stop().await;
    // The stream breaks, which the proxy takes for a lost worker.
    assert!(session.ended().await);
    until(|| names(folder.path()).is_empty()).await;
}
