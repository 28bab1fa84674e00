//! Arrays whose files are keys of OCDBT databases: the checkpoint's own, those of processes, and mixtures with objects.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures::TryStreamExt as _;
use object_store::{ObjectStoreExt as _, path::Path};
use waystation_checkpoint::zarr::Format;
use waystation_checkpoint::{Checkpoint, Checkpoints, Error, Home, IndexDomain};
use waystation_ocdbt::{Builder, Config as OcdbtConfig};
use waystation_proto::tensorflow::error::Code;

use crate::sharded::{Layout, get, put};
use crate::store::Counting;
use crate::support::{Array, boxes, domain, engine, engine_of, to_restore, to_save};

const DIMS: [i64; 2] = [6, 40];

/// Takes objects out of a store and puts them into a database in `folder`; values of more than 40 bytes out of line, and
/// nodes so small that there are several levels.
async fn into_database(store: &Counting, folder: &str, takes: impl Fn(&str) -> bool) {
    let bucket = store.bucket();
    let all: Vec<_> = bucket.store().list(None).try_collect().await.unwrap();
    let mut pairs = BTreeMap::new();
    for object in all {
        let name = object.location.to_string();
        if takes(&name) && !name.starts_with("d/") && !name.contains("ocdbt") {
            pairs.insert(name.clone(), get(store, &name).await);
            bucket.store().delete(&object.location).await.unwrap();
        }
    }
    assert!(!pairs.is_empty());
    let config = OcdbtConfig {
        max_inline_value_bytes: 40,
        max_decoded_node_bytes: 300,
        ..OcdbtConfig::orbax([1; 16])
    };
    let mut number = folder.bytes().map(u32::from).sum::<u32>() as u8;
    let random = move || {
        number = number.wrapping_add(1);
        [number; 16]
    };
    let mut builder = Builder::new(config, random).unwrap();
    for (key, value) in pairs {
        builder.put(key.into(), value.into()).unwrap();
    }
    let built = builder.finish(0).unwrap();
    for file in &built.files {
        let name = format!("{folder}{}", file.file.path());
        put(store, &name, file.parts.concat()).await;
    }
    put(
        store,
        &format!("{folder}manifest.ocdbt"),
        built.manifest.to_vec(),
    )
    .await;
    store.take();
}

async fn save(store: &Counting, format: Format, name: &str) -> Array {
    let array = Array::new(&DIMS);
    engine_of(format)
        .save_to(
            &store.bucket(),
            &to_save("here", name, &DIMS, &[2, 20]),
            array.pieces(&boxes(&DIMS, &[2, 20])),
            true,
        )
        .await
        .unwrap();
    array
}

async fn open(store: &Counting) -> Checkpoint {
    let opened = engine().open_checkpoint_in(&store.bucket(), "here").await;
    opened.unwrap()
}

async fn restored(checkpoint: &Checkpoint, name: &str) -> Result<Bytes, Error> {
    let array = to_restore("here", name, &DIMS);
    let mut found = checkpoint
        .restore(&array, &[IndexDomain::whole(&DIMS)])
        .await?;
    Ok(found.remove(0))
}

#[tokio::test]
async fn arrays_come_out_of_the_checkpoint_s_own_database() {
    for format in Format::ALL {
        let store = Counting::new();
        let array = save(&store, format, "w").await;
        save(&store, format, "a/b.c").await;
        into_database(&store, "", |_| true).await;
        let checkpoint = open(&store).await;
        let whole = array.part(&IndexDomain::whole(&DIMS));
        assert_eq!(restored(&checkpoint, "w").await.unwrap(), whole);
        assert_eq!(restored(&checkpoint, "a/b.c").await.unwrap(), whole);
        let found = checkpoint.arrays().await.unwrap();
        let names: Vec<_> = found
            .iter()
            .map(|array| (&array.name[..], array.format, array.home))
            .collect();
        assert_eq!(
            names,
            [("a/b.c", format, Home::Merged), ("w", format, Home::Merged)]
        );
        // The manifest once, every node once, each of twelve chunks by one range; nothing else is asked for.
        let gets = store.take().gets;
        assert_eq!(gets["manifest.ocdbt"], 1);
        assert!(
            gets.keys()
                .all(|name| name.starts_with("d/") || name == "manifest.ocdbt"),
            "{gets:?}"
        );

        let stored = checkpoint.array("w").await.unwrap();
        let chunks: Vec<_> = stored.chunks().collect();
        assert_eq!(chunks.len(), 6);
        for chunk in &chunks {
            assert!(stored.chunk_size(chunk).await.unwrap().unwrap() > 40);
            stored.check_chunk(chunk).await.unwrap();
        }
        let last = format.metadata_file().len() > 8;
        assert_eq!(
            stored.chunk_key(&chunks[5]),
            if last { "w/c/2/1" } else { "w/2.1" }
        );
    }
}

#[tokio::test]
async fn what_processes_wrote_and_nobody_merged_is_read_together() {
    let store = Counting::new();
    let array = save(&store, Format::Zarr2, "w").await;
    into_database(&store, "ocdbt.process_0/", |name| {
        name == "w/.zarray" || name.ends_with(".0")
    })
    .await;
    into_database(&store, "ocdbt.process_w1/", |_| true).await;
    // A process that did not finish.
    put(&store, "ocdbt.process_2/d/00", vec![1; 10]).await;
    let checkpoint = open(&store).await;
    assert_eq!(
        restored(&checkpoint, "w").await.unwrap(),
        array.part(&IndexDomain::whole(&DIMS))
    );
    assert_eq!(checkpoint.array("w").await.unwrap().home(), Home::Children);
    assert_eq!(checkpoint.arrays().await.unwrap().len(), 1);
    assert_eq!(
        checkpoint.unfinished_children().await.unwrap(),
        ["ocdbt.process_2/"]
    );
    let error = restored(&checkpoint, "x").await.unwrap_err().to_string();
    for part in [
        "x/.zarray",
        "x/zarr.json",
        "no database manifest.ocdbt",
        "none of the 2 databases",
        "ocdbt.process_2/ is not finished",
    ] {
        assert!(error.contains(part), "{error}");
    }

    // With a database of its own, what was not merged into it is not part of the checkpoint.
    save(&store, Format::Zarr2, "other").await;
    into_database(&store, "", |name| name.starts_with("other")).await;
    let error = restored(&open(&store).await, "w").await.unwrap_err();
    assert!(matches!(error, Error::MissingArray { .. }), "{error}");
}

#[tokio::test]
async fn arrays_lie_beside_a_database_that_does_not_have_them() {
    let store = Counting::new();
    let array = save(&store, Format::Zarr2, "step").await;
    into_database(&store, "", |_| true).await;
    save(&store, Format::Zarr2, "w").await;
    save(&store, Format::Zarr3, "v").await;
    let checkpoint = open(&store).await;
    let whole = array.part(&IndexDomain::whole(&DIMS));
    for (name, home) in [
        ("step", Home::Merged),
        ("v", Home::Objects),
        ("w", Home::Objects),
    ] {
        assert_eq!(restored(&checkpoint, name).await.unwrap(), whole, "{name}");
        assert_eq!(checkpoint.array(name).await.unwrap().home(), home);
    }
    let homes: Vec<_> = checkpoint
        .arrays()
        .await
        .unwrap()
        .iter()
        .map(|found| found.home)
        .collect();
    assert_eq!(homes, [Home::Merged, Home::Objects, Home::Objects]);
    let error = restored(&checkpoint, "x").await.unwrap_err();
    assert!(
        error.to_string().contains("7 keys of the database"),
        "{error}"
    );
    assert_eq!(error.code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn an_inner_chunk_of_a_shard_is_read_by_a_range_of_its_value() {
    let dims = [64, 1000];
    for index_at_start in [false, true] {
        let (store, array) = (Counting::new(), Array::new(&dims));
        let layout = Layout {
            index_at_start,
            compressed: false,
            ..Layout::new(&[64, 1000], &[8, 100])
        };
        layout.write(&store, &array).await;
        into_database(&store, "", |_| true).await;
        let checkpoint = open(&store).await;
        let wanted = domain(&[8, 300], &[8, 200]);
        let found = checkpoint
            .restore(
                &to_restore("here", "w", &dims),
                std::slice::from_ref(&wanted),
            )
            .await
            .unwrap();
        assert_eq!(found[0], array.part(&wanted));
        // Two inner chunks of 1,600 bytes, the index of 80, manifest and node.
        let read = store.take().bytes;
        assert!((4500..6500).contains(&read), "{read}");
    }
}

#[tokio::test]
async fn many_arrays_share_one_opened_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    let array = Array::new(&DIMS);
    let checkpoints = Checkpoints::new(&engine());
    for name in ["a", "b"] {
        engine()
            .save(
                &to_save(location, name, &DIMS, &[6, 40]),
                array.pieces(&[IndexDomain::whole(&DIMS)]),
                true,
            )
            .await
            .unwrap();
    }
    let whole = IndexDomain::whole(&DIMS);
    let read = async |checkpoints: &Checkpoints, name| {
        let asked = to_restore(location, name, &DIMS);
        let found = checkpoints.restore(&asked, std::slice::from_ref(&whole));
        found.await.map(|mut found| found.remove(0))
    };
    assert_eq!(read(&checkpoints, "a").await.unwrap(), array.part(&whole));
    // What appears later is not looked at by who has opened it, and is by who opens it anew.
    std::fs::write(folder.path().join("manifest.ocdbt"), b"x").unwrap();
    assert_eq!(read(&checkpoints, "b").await.unwrap(), array.part(&whole));
    let error = read(&Checkpoints::new(&engine()), "b").await.unwrap_err();
    assert!(matches!(error, Error::Database { .. }), "{error}");
}

#[tokio::test]
async fn damage_to_a_database_is_an_error_that_says_where() {
    let store = Counting::new();
    save(&store, Format::Zarr2, "w").await;
    into_database(&store, "", |_| true).await;
    let bucket = store.bucket();
    let all: Vec<_> = bucket
        .store()
        .list(Some(&Path::from("d")))
        .try_collect()
        .await
        .unwrap();
    assert_eq!(all.len(), 1);
    let data = all[0].location.to_string();
    let whole = get(&store, &data).await;
    // The file is gone; ends before the nodes; has other bytes.
    let checkpoint = open(&store).await;
    bucket.store().delete(&all[0].location).await.unwrap();
    for damaged in [None, Some(whole[..10].to_vec()), Some(vec![7; whole.len()])] {
        if let Some(damaged) = damaged {
            put(&store, &data, damaged).await;
        }
        let error = restored(&checkpoint, "w").await.unwrap_err();
        assert!(matches!(error, Error::Database { .. }), "{error}");
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.report().contains(&data), "{}", error.report());
        assert!(
            error.report().contains("manifest.ocdbt"),
            "{}",
            error.report()
        );
    }
    // A bit of a chunk: OCDBT has no checksum of values, the frame has.
    let mut flipped = whole.clone();
    let frame = whole
        .windows(4)
        .position(|bytes| bytes == [0x28, 0xb5, 0x2f, 0xfd]);
    flipped[frame.unwrap() + 20] ^= 4;
    put(&store, &data, flipped).await;
    let error = restored(&open(&store).await, "w").await.unwrap_err();
    assert!(matches!(error, Error::CorruptChunk { .. }), "{error}");
    put(&store, &data, whole).await;
    restored(&open(&store).await, "w").await.unwrap();
}

#[tokio::test]
async fn keys_that_lead_out_of_a_checkpoint_are_no_arrays() {
    let store = Counting::new();
    let hostile = [
        "../w/.zarray",
        "/w/.zarray",
        "a/\u{1}/.zarray",
        "a//b/.zarray",
    ];
    let mut builder = Builder::new(OcdbtConfig::orbax([1; 16]), || [2; 16]).unwrap();
    for key in hostile {
        builder.put(key.into(), "{}".into()).unwrap();
    }
    let built = builder.finish(0).unwrap();
    for file in &built.files {
        put(&store, file.file.path(), file.parts.concat()).await;
    }
    put(&store, "manifest.ocdbt", built.manifest.to_vec()).await;
    let checkpoint = open(&store).await;
    let found = checkpoint.arrays().await.unwrap();
    assert_eq!(found.len(), hostile.len());
    for array in found {
        let error = checkpoint.array(&array.name).await.unwrap_err();
        assert!(matches!(error, Error::BadRequest { .. }), "{error}");
    }
    for path in ["", "../x", "/etc/passwd", "a//b"] {
        let error = checkpoint.read_file(path, 10).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    }
    let error = checkpoint.read_file("manifest.ocdbt", 10).await;
    assert!(matches!(error, Err(Error::Oversized { .. })));
    assert_eq!(checkpoint.read_file("none", 10).await.unwrap(), None);
}
