//! Programs that another worker has left in the bucket.

use waystation_cache::envelope;
use waystation_lifecycle::bucket::{Bucket, Location, layout};
use waystation_proto::xla::PrimitiveType;
use waystation_worker::Limits;

use crate::support::Worker;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_worker_finds_the_program_in_the_bucket() {
    let folder = tempfile::tempdir().unwrap();
    let location = Location::parse(&format!("file://{}", folder.path().display())).unwrap();
    let cache = || waystation_cache::Config {
        location: Some(Bucket::open(&location).unwrap()),
        ..waystation_cache::Config::default()
    };
    let devices: Vec<i32> = (0..8).collect();
    let first = Worker::start_with(cache(), Limits::default()).await;
    let mut session = first.session(1).await;
    let info = session.compile(50, "sum_of_all", &devices).await.unwrap();
    session.compile(51, "add_one", &[0]).await.unwrap();
    let status = first.status().await;
    assert_eq!(
        (status.compiles, status.bucket_hits, status.bucket_misses),
        (2, 0, 2),
        "{status:?}"
    );
    first.stop().await;

    let second = Worker::start_with(cache(), Limits::default()).await;
    let mut session = second.session(1).await;
    assert_eq!(
        session.compile(60, "sum_of_all", &devices).await.unwrap(),
        info
    );
    // The same program for another device is the same entry.
    session.compile(61, "add_one_on_3", &[3]).await.unwrap();
    let status = second.status().await;
    assert_eq!((status.compiles, status.bucket_hits), (0, 2), "{status:?}");
    for device in 0..8 {
        session
            .put_bytes(
                10 + u64::from(device),
                device,
                PrimitiveType::F32,
                &[2, 2],
                None,
                vec![0; 16],
            )
            .await;
    }
    let args: Vec<u64> = (10..18).collect();
    session.execute(60, &args, 100, 1).await;
    assert_eq!(session.read_f32(107).await, [0.0; 4]);
    session.put(1, 3, &[1.0; 4]).await;
    session.execute(61, &[1], 2, 1).await;
    assert_eq!(session.read_f32(2).await, [2.0; 4]);
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_entry_that_does_not_load_is_compiled_anew_and_counted_once() {
    let folder = tempfile::tempdir().unwrap();
    let location = Location::parse(&format!("file://{}", folder.path().display())).unwrap();
    let cache = || waystation_cache::Config {
        location: Some(Bucket::open(&location).unwrap()),
        ..waystation_cache::Config::default()
    };
    let first = Worker::start_with(cache(), Limits::default()).await;
    let mut session = first.session(1).await;
    let info = session.compile(50, "add_one", &[0]).await.unwrap();
    first.stop().await;

    // Whole, and of no use.
    let mut key: layout::Digest = [0; 32];
    for (at, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&info.key[2 * at..2 * at + 2], 16).unwrap();
    }
    let file = folder.path().join(layout::executable(&key, 0).as_ref());
    let limits = envelope::Limits::default();
    let mut opened = envelope::open(&key, &std::fs::read(&file).unwrap().into(), &limits).unwrap();
    opened.entry.executable = b"no executable".as_slice().into();
    let sealed = envelope::seal(&key, &opened.entry, &opened.provenance, &limits).unwrap();
    std::fs::write(&file, sealed).unwrap();

    let second = Worker::start_with(cache(), Limits::default()).await;
    let mut session = second.session(1).await;
    session.compile(50, "add_one", &[0]).await.unwrap();
    session.put(1, 0, &[1.0; 4]).await;
    session.execute(50, &[1], 10, 1).await;
    assert_eq!(session.read_f32(10).await, [2.0; 4]);
    let status = second.status().await;
    assert_eq!(
        (status.compiles, status.bucket_bad_entries),
        (1, 1),
        "{status:?}"
    );
    second.stop().await;
    assert!(file.with_file_name("1").exists(), "published beside it");
}
