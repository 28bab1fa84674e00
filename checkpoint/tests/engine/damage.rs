//! Wrong requests, missing and damaged objects, failing stores.

use std::time::Duration;

use bytes::Bytes;
use object_store::{ObjectStoreExt as _, PutPayload, path::Path};
use waystation_checkpoint::{Config, Engine, Error, IndexDomain, within};
use waystation_lifecycle::bucket::{Bucket, Location};
use waystation_proto::tensorflow::error::Code;
use waystation_proto::xla::PrimitiveType;

use crate::store::Counting;
use crate::support::{Array, boxes, domain, engine, to_restore, to_save};

const DIMS: [i64; 2] = [4, 4];

async fn saved() -> (Counting, Array) {
    let (store, array) = (Counting::new(), Array::new(&DIMS));
    let pieces = array.pieces(&boxes(&DIMS, &[2, 4]));
    engine()
        .save_to(
            &store.bucket(),
            &to_save("here", "w", &DIMS, &[2, 4]),
            pieces,
            true,
        )
        .await
        .unwrap();
    (store, array)
}

async fn restored(bucket: &Bucket) -> Result<Vec<Bytes>, Error> {
    engine()
        .restore_from(
            bucket,
            &to_restore("here", "w", &DIMS),
            &[IndexDomain::whole(&DIMS)],
        )
        .await
}

async fn replace(bucket: &Bucket, name: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>) {
    let path = Path::parse(name).unwrap();
    let bytes = bucket
        .store()
        .get(&path)
        .await
        .unwrap()
        .bytes()
        .await
        .unwrap();
    bucket
        .store()
        .put(&path, PutPayload::from(change(bytes.to_vec())))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_missing_chunk_is_no_zeros() {
    let (store, array) = saved().await;
    store
        .bucket()
        .store()
        .delete(&Path::parse("w/1.0").unwrap())
        .await
        .unwrap();
    let error = restored(&store.bucket()).await.unwrap_err();
    assert!(
        matches!(&error, Error::MissingChunk { object, .. } if object == "w/1.0"),
        "{error}"
    );
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(
        error.to_string().contains("\"w\"") && error.to_string().contains("here"),
        "{error}"
    );
    // Who does not need it does not miss it.
    let other = [domain(&[0, 0], &[2, 4])];
    let found = engine()
        .restore_from(&store.bucket(), &to_restore("here", "w", &DIMS), &other)
        .await
        .unwrap();
    assert_eq!(found[0], array.part(&other[0]));
}

#[tokio::test]
async fn damaged_chunks_are_named() {
    for damage in [
        (|bytes| bytes[..bytes.len() - 1].to_vec()) as fn(Vec<u8>) -> Vec<u8>,
        |_| Vec::new(),
        |bytes| [bytes.clone(), bytes].concat(),
        |_| vec![0; 1 << 20],
        |_| zstd::bulk::compress(&[1; 15], 1).unwrap(),
        |_| zstd::bulk::compress(&[1; 17], 1).unwrap(),
        |mut bytes| {
            bytes[0] ^= 1;
            bytes
        },
    ] {
        let (store, _) = saved().await;
        replace(&store.bucket(), "w/1.0", damage).await;
        let error = restored(&store.bucket()).await.unwrap_err();
        assert!(
            matches!(&error, Error::CorruptChunk { object, .. } if object == "w/1.0"),
            "{error}"
        );
        assert_eq!(error.code(), Code::FailedPrecondition);
    }
}

#[tokio::test]
async fn another_shape_or_type_is_named_with_both() {
    let (store, _) = saved().await;
    let whole = [domain(&[0], &[16])];
    let error = engine()
        .restore_from(&store.bucket(), &to_restore("here", "w", &[16]), &whole)
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("[4, 4]") && error.to_string().contains("[16]"),
        "{error}"
    );
    assert_eq!(error.code(), Code::FailedPrecondition);

    let mut asked = to_restore("here", "w", &DIMS);
    asked.dtype = PrimitiveType::F32;
    let error = engine()
        .restore_from(&store.bucket(), &asked, &[IndexDomain::whole(&DIMS)])
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("BF16") && error.to_string().contains("F32"),
        "{error}"
    );
    assert_eq!(error.code(), Code::FailedPrecondition);
    // Nothing but the metadata was read.
    let read = store.take().gets;
    let metadata = ["manifest.ocdbt", "w/.zarray"];
    assert!(
        read.keys().all(|name| metadata.contains(&&name[..])),
        "{read:?}"
    );
}

#[tokio::test]
async fn absent_arrays_and_broken_databases_are_told_apart() {
    let store = Counting::new();
    let error = restored(&store.bucket()).await.unwrap_err();
    assert!(
        matches!(&error, Error::MissingArray { looked_for, .. } if looked_for.contains("w/.zarray")
            && looked_for.contains("w/zarr.json") && looked_for.contains("no database manifest.ocdbt")),
        "{error}"
    );
    assert_eq!(error.code(), Code::FailedPrecondition);
    let bucket = store.bucket();
    let manifest = Path::parse("manifest.ocdbt").unwrap();
    bucket
        .store()
        .put(&manifest, PutPayload::from_static(b"x"))
        .await
        .unwrap();
    let error = restored(&bucket).await.unwrap_err();
    assert!(error.to_string().contains("manifest.ocdbt"), "{error}");
    assert_eq!(error.code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn lying_metadata_is_an_error_within_bounds() {
    for (from, to, code) in [
        (
            r#""chunks":[2,4]"#,
            r#""chunks":[1073741824,1073741824]"#,
            Code::FailedPrecondition,
        ),
        (
            r#""chunks":[2,4]"#,
            r#""chunks":[9223372036854775807,1]"#,
            Code::FailedPrecondition,
        ),
        (
            r#""chunks":[2,4]"#,
            r#""chunks":[2,5]"#,
            Code::FailedPrecondition,
        ),
        (
            r#""shape":[4,4]"#,
            r#""shape":[4,9223372036854775807]"#,
            Code::FailedPrecondition,
        ),
        (r#""id":"zstd""#, r#""id":"blosc""#, Code::Unimplemented),
        ("{", "[", Code::FailedPrecondition),
    ] {
        let (store, _) = saved().await;
        replace(&store.bucket(), "w/.zarray", |bytes| {
            let text = String::from_utf8(bytes).unwrap();
            assert!(text.contains(from), "{from}");
            text.replacen(from, to, 1).into_bytes()
        })
        .await;
        let error = restored(&store.bucket()).await.unwrap_err();
        assert_eq!(error.code(), code, "{to}: {}", error.report());
    }
}

#[tokio::test]
async fn a_grid_of_endless_chunks_costs_one_missing_chunk() {
    let store = Counting::new();
    let dims = [1 << 40];
    engine()
        .save_to(
            &store.bucket(),
            &to_save("here", "w", &dims, &[1]),
            Vec::new(),
            true,
        )
        .await
        .unwrap();
    let asked = [domain(&[0], &[1 << 30])];
    let error = engine()
        .restore_from(&store.bucket(), &to_restore("here", "w", &dims), &asked)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::MissingChunk { .. }), "{error}");
}

#[tokio::test]
async fn pieces_that_do_not_fit_are_refused_before_a_byte_is_written() {
    let (store, array) = (Counting::new(), Array::new(&DIMS));
    let good = domain(&[0, 0], &[2, 4]);
    for pieces in [
        vec![(good.clone(), Bytes::from_static(b"short"))],
        vec![(domain(&[1, 0], &[2, 4]), array.part(&good))],
        vec![(
            domain(&[0, 0], &[1, 4]),
            array.part(&domain(&[0, 0], &[1, 4])),
        )],
        vec![(domain(&[4, 0], &[2, 4]), array.part(&good))],
        vec![(domain(&[0], &[8]), array.part(&good))],
        vec![(domain(&[-2, 0], &[2, 4]), array.part(&good))],
        vec![
            (good.clone(), array.part(&good)),
            (good.clone(), array.part(&good)),
        ],
    ] {
        let save = to_save("here", "w", &DIMS, &[2, 4]);
        let error = engine()
            .save_to(&store.bucket(), &save, pieces, true)
            .await
            .unwrap_err();
        assert!(matches!(error, Error::BadRequest { .. }), "{error}");
        assert_eq!(error.code(), Code::InvalidArgument);
    }
    let mut save = to_save("here", "w", &DIMS, &[2, 4]);
    save.dtype = PrimitiveType::U4;
    let error = engine()
        .save_to(&store.bucket(), &save, Vec::new(), true)
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("U4") && error.to_string().contains("\"w\""),
        "{error}"
    );
    assert!(store.take().puts.is_empty());
    let outside = [domain(&[0, 0], &[5, 4])];
    let (store, _) = saved().await;
    let error = engine()
        .restore_from(&store.bucket(), &to_restore("here", "w", &DIMS), &outside)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::BadRequest { .. }), "{error}");
}

#[tokio::test]
async fn a_failed_write_fails_the_save_and_names_the_object() {
    let (store, array) = saved().await;
    for ending in ["/1.0", "/.zarray"] {
        let bucket = store.failing_puts(ending).bucket();
        let pieces = array.pieces(&boxes(&DIMS, &[2, 4]));
        let error = engine()
            .save_to(&bucket, &to_save("here", "w", &DIMS, &[2, 4]), pieces, true)
            .await
            .unwrap_err();
        assert!(error.to_string().contains(ending), "{error}");
        assert!(
            error.report().contains("told to fail"),
            "{}",
            error.report()
        );
        assert_eq!(error.code(), Code::Unavailable);
    }
}

#[tokio::test]
async fn what_is_no_regular_file_is_refused_and_not_waited_for() {
    let (folder, array) = (tempfile::tempdir().unwrap(), Array::new(&DIMS));
    let location = Location::File(folder.path().to_owned());
    let bucket = Bucket::open(&location).unwrap();
    let save = to_save("here", "w", &DIMS, &[2, 4]);
    for object in ["w/0.0", "w/.zarray"] {
        let pieces = array.pieces(&boxes(&DIMS, &[2, 4]));
        engine()
            .save_to(&bucket, &save, pieces, true)
            .await
            .unwrap();
        assert!(restored(&bucket).await.is_ok());
        let path = folder.path().join(object);
        std::fs::remove_file(&path).unwrap();
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let error = restored(&bucket).await.unwrap_err();
        assert!(matches!(error, Error::NoRegularFile { .. }), "{error}");
        assert!(error.to_string().contains(object), "{error}");
        assert_eq!(error.code(), Code::FailedPrecondition);
    }
}

#[tokio::test]
async fn an_object_that_never_comes_is_given_up() {
    let (store, _) = saved().await;
    let engine = Engine::new(Config {
        read_timeout: Duration::from_millis(20),
        ..Config::default()
    });
    let asked = [IndexDomain::whole(&DIMS)];
    let restore = to_restore("here", "w", &DIMS);
    let error = engine
        .restore_from(&store.stalled().bucket(), &restore, &asked)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Stuck { .. }), "{error}");
    assert!(error.to_string().contains("manifest.ocdbt"), "{error}");
    assert_eq!(error.code(), Code::Unavailable);
}

#[tokio::test]
async fn a_store_without_an_answer_costs_the_time_given_and_no_more() {
    let (store, array) = saved().await;
    let (bucket, timeout) = (store.stalled().bucket(), Some(Duration::from_millis(20)));
    let engine = engine();
    let save = to_save("here", "w", &DIMS, &[2, 4]);
    let work = engine.save_to(&bucket, &save, array.pieces(&boxes(&DIMS, &[2, 4])), true);
    let error = within(timeout, "saving", work).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    assert_eq!(error.code(), Code::Unavailable);
    // What it held has been given back: the same engine goes on.
    for _ in 0..20 {
        let asked = to_restore("here", "w", &DIMS);
        let work = engine.restore_from(&bucket, &asked, &[]);
        assert!(
            within(Some(Duration::from_millis(1)), "restoring", work)
                .await
                .is_err()
        );
    }
    let asked = [IndexDomain::whole(&DIMS)];
    let found = engine
        .restore_from(&store.bucket(), &to_restore("here", "w", &DIMS), &asked)
        .await
        .unwrap();
    assert_eq!(found[0], array.part(&asked[0]));
}
