//! Several processes that save together.

use std::path::Path;
use std::time::Duration;

use waystation_checkpoint::{Error, Together};
use waystation_proto::tensorflow::error::Code;

use crate::support::engine;

fn together(place: usize) -> Together {
    Together {
        nonce: "5eed".to_owned(),
        place,
        names: ["slice 0 task 0", "slice 0 task 1", "slice 0 task 2"]
            .map(str::to_owned)
            .to_vec(),
    }
}

fn names(folder: &Path) -> Vec<std::ffi::OsString> {
    let entries = folder.read_dir().unwrap();
    entries.map(|entry| entry.unwrap().file_name()).collect()
}

#[tokio::test]
async fn those_who_share_a_folder_meet_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let step = folder.path().join("step");
    let location = format!("file://{}", step.display());
    // The last one comes when the first has been looking for a while; each has its own engine, as processes have.
    let one = async |place: usize| {
        for _ in 0..place * 100 {
            tokio::task::yield_now().await;
        }
        let meeting = engine().meet(&location, &together(place)).await.unwrap();
        meeting.unwrap().part().await;
    };
    tokio::join!(one(0), one(1), one(2));
    assert_eq!(names(&step), [""; 0]);
}

#[tokio::test]
async fn a_folder_that_one_does_not_share_is_refused() {
    let (shared, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(shared.path().join("theirs"), b"x").unwrap();
    let engine = engine();
    let one = |folder: &Path, place| {
        let (engine, location) = (engine.clone(), folder.display().to_string());
        async move {
            let patience = Duration::from_millis(200);
            engine
                .meet_within(&location, &together(place), patience)
                .await
        }
    };
    let (a, b, c) = tokio::join!(
        one(shared.path(), 0),
        one(shared.path(), 1),
        one(other.path(), 2)
    );
    for (refused, missing) in [
        (a, "slice 0 task 2"),
        (b, "slice 0 task 2"),
        (c, "slice 0 task 0, slice 0 task 1"),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        let Error::NotShared { missing: of, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(of, missing);
    }
    assert_eq!(names(shared.path()), ["theirs"]);
    assert_eq!(names(other.path()), [""; 0]);
}

#[tokio::test]
async fn buckets_are_shared_by_nature_and_nonsense_is_refused() {
    let engine = engine();
    let meeting = engine.meet("gs://bucket/step", &together(0)).await;
    assert!(meeting.unwrap().is_none());
    for bad in [
        Together {
            nonce: "../x".to_owned(),
            ..together(0)
        },
        Together {
            nonce: String::new(),
            ..together(0)
        },
        together(3),
    ] {
        engine.meet("/nowhere", &bad).await.unwrap_err();
    }
}
