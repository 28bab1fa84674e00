//! What lies on a disk after a save, and which locations are taken.

use waystation_checkpoint::{Error, IndexDomain};
use waystation_proto::tensorflow::error::Code;

use crate::support::{Array, boxes, engine, to_restore, to_save};

#[tokio::test]
async fn names_become_folders_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let step = folder.path().join("step 1/item.tmp");
    let (location, dims) = (step.to_str().unwrap(), [4, 2]);
    let array = Array::new(&dims);
    for name in ["params.w", "odd/na me.a%2Fb", "ü#1.~{x}", ""] {
        let save = to_save(location, name, &dims, &[2, 2]);
        engine()
            .save(&save, array.pieces(&boxes(&dims, &[2, 2])), true)
            .await
            .unwrap();
        for file in [".zarray", "0.0", "1.0"] {
            assert!(step.join(name).join(file).is_file(), "{name} {file}");
        }
        let whole = [IndexDomain::whole(&dims)];
        let found = engine()
            .restore(&to_restore(location, name, &dims), &whole)
            .await
            .unwrap();
        assert_eq!(found[0], array.part(&whole[0]));
        // The same place by URL.
        let url = format!("file://{}", location.replace(' ', "%20"));
        engine()
            .restore(&to_restore(&url, name, &dims), &whole)
            .await
            .unwrap();
    }
    let metadata = engine().metadata(location, "params.w").await.unwrap();
    assert_eq!(
        (metadata.grid.shape(), metadata.grid.chunks()),
        (&[4, 2][..], &[2, 2][..])
    );
    // No staging files are left.
    let names: Vec<_> = std::fs::read_dir(step.join("params.w"))
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[tokio::test]
async fn a_second_save_writes_over_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let (location, dims) = (folder.path().to_str().unwrap(), [4, 2]);
    let array = Array::new(&dims);
    for chunks in [[1, 1], [4, 2]] {
        let save = to_save(location, "w", &dims, &chunks);
        engine()
            .save(&save, array.pieces(&boxes(&dims, &chunks)), true)
            .await
            .unwrap();
    }
    let whole = [IndexDomain::whole(&dims)];
    let found = engine()
        .restore(&to_restore(location, "w", &dims), &whole)
        .await
        .unwrap();
    assert_eq!(found[0], array.part(&whole[0]));
}

#[tokio::test]
async fn locations_that_cannot_hold_a_checkpoint_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let dims = [2];
    let whole = [IndexDomain::whole(&dims)];
    let array = Array::new(&dims);
    for location in [
        "memory://",
        "relative/path",
        "ftp://host/x",
        "gs://",
        "",
        file.to_str().unwrap(),
    ] {
        let error = engine()
            .save(
                &to_save(location, "w", &dims, &dims),
                array.pieces(&whole),
                true,
            )
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{location}: {error}");
        assert!(
            error.report().len() > error.to_string().len()
                || matches!(error, Error::UnusableLocation { .. })
        );
    }
    // Restoring makes no folder.
    let absent = folder.path().join("absent");
    let error = engine()
        .restore(&to_restore(absent.to_str().unwrap(), "w", &dims), &whole)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::UnusableLocation { .. }), "{error}");
    assert!(!absent.exists());
    for name in ["../w", "/w", "a//b", "a/./b"] {
        let error = engine()
            .save(
                &to_save(folder.path().to_str().unwrap(), name, &dims, &dims),
                array.pieces(&whole),
                true,
            )
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{name}: {error}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}
