//! Saves into OCDBT databases: what is written, how often, and what is there when it fails.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::throttle::{ThrottleConfig, ThrottledStore};
use waystation_checkpoint::{
    Checkpoint, Config, Engine, Error, Home, IndexDomain, Layout, SaveArray, Saving, Sharding,
    zarr::Codec, zarr::DType,
};
use waystation_lifecycle::bucket::{Bucket, Location};
use waystation_proto::tensorflow::error::Code;
use waystation_proto::xla::{OpSharding, PrimitiveType};

use crate::store::Counting;
use crate::support::{Array, boxes, engine_of, to_restore, to_save};

const DIMS: [i64; 2] = [6, 400];

async fn save(saving: &Saving, location: &str, name: &str) -> Array {
    let array = Array::new(&DIMS);
    let mut to_save = to_save(location, name, &DIMS, &[2, 400]);
    to_save.codec = Some(Codec::Raw);
    let pieces = array.pieces(&boxes(&DIMS, &[2, 400]));
    saving.save(&to_save, pieces, true).await.unwrap();
    array
}

async fn check(checkpoint: &Checkpoint, name: &str, home: Home) {
    let array = Array::new(&DIMS);
    let whole = IndexDomain::whole(&DIMS);
    let asked = to_restore("here", name, &DIMS);
    let found = checkpoint.restore(&asked, std::slice::from_ref(&whole));
    assert_eq!(found.await.unwrap()[0], array.part(&whole), "{name}");
    assert_eq!(checkpoint.array(name).await.unwrap().home(), home, "{name}");
}

async fn open(engine: &Engine, store: &Counting) -> Checkpoint {
    let bucket = store.bucket();
    engine.open_checkpoint_in(&bucket, "here").await.unwrap()
}

fn engine(process: &str, budget: usize) -> Engine {
    Engine::new(Config {
        format: Layout::OcdbtZarr2,
        process: process.to_owned(),
        host_memory_bytes: budget,
        ..Config::default()
    })
}

#[tokio::test]
async fn a_save_of_many_arrays_is_one_database_whose_manifest_is_written_once() {
    for layout in [Layout::OcdbtZarr2, Layout::OcdbtZarr3] {
        let store = Counting::new();
        let engine = Engine::new(Config {
            format: layout,
            ..Config::default()
        });
        let saving = engine.saving_in(&store.bucket(), "here");
        let names: Vec<String> = (0..50).rev().map(|number| format!("w.{number}")).collect();
        for name in &names {
            save(&saving, "here", name).await;
        }
        // Nothing is written before there is enough of it.
        assert!(store.take().puts.is_empty());
        saving.finish().await.unwrap();
        let puts = store.take().puts;
        assert_eq!(puts["ocdbt.process_w0/manifest.ocdbt"], 1);
        // The values in one file, the tree in another.
        assert_eq!(puts.len(), 3, "{puts:?}");
        assert!(puts.values().all(|&count| count == 1));
        let checkpoint = open(&engine, &store).await;
        for name in &names {
            check(&checkpoint, name, Home::Children).await;
        }
        let child = &checkpoint.children().await.unwrap()[0];
        assert_eq!((child.folder(), child.keys()), ("ocdbt.process_w0/", 200));
        child.opened().check(1000).await.unwrap();
    }
}

#[tokio::test]
async fn small_arrays_that_are_restored_at_once_come_by_few_requests() {
    let store = Counting::new();
    let engine = engine("w0", 1 << 30);
    let saving = engine.saving_in(&store.bucket(), "here");
    for number in 0..100 {
        save(&saving, "here", &format!("w.{number}")).await;
    }
    saving.finish().await.unwrap();
    store.take();
    let checkpoint = open(&engine, &store).await;
    let names: Vec<String> = (0..100).map(|number| format!("w.{number}")).collect();
    let checks = names
        .iter()
        .map(|name| check(&checkpoint, name, Home::Children));
    futures::future::join_all(checks).await;
    let counts = store.take();
    // The tree, and 300 chunks of 1,600 bytes in one data file.
    let data = counts.gets.iter().filter(|(name, _)| name.contains("/d/"));
    let total: usize = data.map(|(_, count)| count).sum();
    assert!(total < 5, "{:?}", counts.gets);
    assert!(counts.bytes < 500_000, "{}", counts.bytes);
    // Of two arrays that lie apart nothing between is read.
    let checkpoint = open(&engine, &store).await;
    tokio::join!(
        check(&checkpoint, "w.3", Home::Children),
        check(&checkpoint, "w.90", Home::Children)
    );
    let counts = store.take();
    assert!(counts.bytes < 40_000, "{}", counts.bytes);
    // Who no longer waits keeps nobody waiting.
    let checkpoint = open(&engine, &store).await;
    checkpoint.array("w.5").await.unwrap();
    let whole = [IndexDomain::whole(&DIMS)];
    let asked = to_restore("here", "w.5", &DIMS);
    let gone = checkpoint.restore(&asked, &whole);
    let stays = check(&checkpoint, "w.6", Home::Children);
    let gone = tokio::time::timeout(std::time::Duration::from_micros(100), gone);
    let (_, ()) = tokio::join!(gone, stays);
}

#[tokio::test]
async fn values_leave_before_the_end_when_there_are_enough_or_one_is_large() {
    let store = Counting::new();
    // A thirty-second is 32 KiB, a database gathers half of that, and 4 KiB are written alone.
    let engine = engine("w0", 1 << 20);
    let saving = engine.saving_in(&store.bucket(), "here");
    for number in 0..30 {
        save(&saving, "here", &format!("w.{number}")).await;
    }
    // 30 times 3 chunks of 1,600 bytes: 11 of them make a file.
    let puts = store.take().puts;
    assert_eq!(puts.len(), 8, "{puts:?}");
    let large = Array::new(&[3000]);
    let whole = IndexDomain::whole(&[3000]);
    let mut to_save = to_save("here", "large", &[3000], &[3000]);
    to_save.codec = Some(Codec::Raw);
    saving
        .save(&to_save, large.pieces(std::slice::from_ref(&whole)), true)
        .await
        .unwrap();
    assert_eq!(store.take().puts.len(), 1);
    saving.finish().await.unwrap();
    // What is left, the tree, the manifest.
    assert_eq!(store.take().puts.len(), 3);
    let opened = open(&engine, &store).await;
    check(&opened, "w.29", Home::Children).await;
    let asked = to_restore("here", "large", &[3000]);
    let found = opened.restore(&asked, std::slice::from_ref(&whole));
    assert_eq!(found.await.unwrap()[0], large.part(&whole));

    // All databases together gather no more than that, too, and what is dropped no longer counts.
    let savings: Vec<_> = (0..8)
        .map(|_| engine.saving_in(&store.bucket(), "here"))
        .collect();
    for saving in &savings {
        for number in 0..2 {
            save(saving, "here", &format!("w.{number}")).await;
        }
    }
    // 48 chunks, of which 20 are gathered at most.
    let puts = store.take().puts.len();
    assert!((5..48).contains(&puts), "{puts}");
    drop(savings);
    let saving = engine.saving_in(&store.bucket(), "here");
    for number in 0..3 {
        save(&saving, "here", &format!("w.{number}")).await;
    }
    assert!(store.take().puts.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_slow_store_does_not_make_small_files_of_what_is_gathered() {
    let store = Counting::new();
    let slow = ThrottledStore::new(
        store.clone(),
        ThrottleConfig {
            wait_put_per_call: Duration::from_millis(30),
            ..ThrottleConfig::default()
        },
    );
    let bucket = Bucket::from_store(Location::Memory, Arc::new(slow));
    let engine = engine("w0", 1 << 20);
    let saving = engine.saving_in(&bucket, "here");
    let names: Vec<String> = (0..200).map(|number| format!("w.{number}")).collect();
    futures::future::join_all(names.iter().map(|name| save(&saving, "here", name))).await;
    saving.finish().await.unwrap();
    // 600 chunks of 1,600 bytes, of which 11 make a file.
    let puts = store.take().puts.len();
    assert!((50..80).contains(&puts), "{puts}");
    let checkpoint = open(&engine, &store).await;
    for name in &names {
        check(&checkpoint, name, Home::Children).await;
    }
}

#[tokio::test]
async fn what_was_not_written_is_in_no_manifest() {
    let store = Counting::new();
    let engine = engine("w0", 1 << 20);
    // Data files end in a hexadecimal digit.
    for ending in ["0", "8", "f", "manifest.ocdbt"] {
        let failing = store.failing_puts(ending);
        let mut failed = false;
        while !failed {
            let saving = engine.saving_in(&failing.bucket(), "here");
            let mut to_save = to_save("here", "large", &[3000], &[3000]);
            to_save.codec = Some(Codec::Raw);
            let pieces = Array::new(&[3000]).pieces(&[IndexDomain::whole(&[3000])]);
            let saved = saving.save(&to_save, pieces, true).await;
            let finished = saving.finish().await;
            failed = saved.is_err() || finished.is_err();
            if saved.is_err() {
                let error = finished.unwrap_err();
                assert!(error.to_string().contains("not written"), "{error}");
            }
            let puts = store.take().puts;
            let manifest = puts.keys().any(|name| name.ends_with("manifest.ocdbt"));
            assert_eq!(manifest, saved.is_ok() && (!failed || ending.len() > 1));
        }
    }
}

#[tokio::test]
async fn requests_of_one_save_make_databases_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    let (first, second) = (engine("w0", 1 << 20), engine("w1", 1 << 20));
    for (number, engine) in [&first, &first, &second, &first].into_iter().enumerate() {
        let saving = engine.saving();
        save(&saving, location, &format!("w.{number}")).await;
        saving.finish().await.unwrap();
    }
    let mut names: Vec<_> = std::fs::read_dir(location)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let expected = ["w0", "w0n1", "w0n2", "w1"].map(|id| format!("ocdbt.process_{id}"));
    assert_eq!(names, expected);
    // Nothing is written without a key.
    let saving = first.saving();
    let nothing = to_save(location, "nothing", &DIMS, &DIMS);
    saving.save(&nothing, Vec::new(), false).await.unwrap();
    saving.finish().await.unwrap();
    assert_eq!(std::fs::read_dir(location).unwrap().count(), 4);

    assert_eq!(first.merge_children(location).await.unwrap(), 16);
    let checkpoint = second.open_checkpoint(location).await.unwrap();
    for number in 0..4 {
        check(&checkpoint, &format!("w.{number}"), Home::Merged).await;
    }
}

#[tokio::test]
async fn an_array_saved_twice_is_refused_by_the_merge() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    for process in ["w0", "w1"] {
        let saving = engine(process, 1 << 20).saving();
        save(&saving, location, "w").await;
        saving.finish().await.unwrap();
    }
    let error = engine("w0", 1 << 20)
        .merge_children(location)
        .await
        .unwrap_err();
    assert!(error.report().contains("w/0.0"), "{}", error.report());
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(!Path::new(location).join("manifest.ocdbt").exists());
    // In one database a key is written once, too.
    let saving = engine("w2", 1 << 20).saving();
    save(&saving, location, "w").await;
    save(&saving, location, "w").await;
    let error = saving.finish().await.unwrap_err();
    assert!(matches!(error, Error::Database { .. }), "{error}");
}

#[tokio::test]
async fn a_mixture_is_mended_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    // Orbax' own leaves in a database that is merged, an array beside it.
    let saving = engine("0", 1 << 20).saving();
    save(&saving, location, "step").await;
    save(&saving, location, "old").await;
    saving.finish().await.unwrap();
    engine("0", 1 << 20).merge_children(location).await.unwrap();
    let plain = engine_of(Layout::Zarr3).saving();
    save(&plain, location, "w").await;
    plain.finish().await.unwrap();
    let engine = engine("w0", 1 << 20);
    let checkpoint = engine.open_checkpoint(location).await.unwrap();
    check(&checkpoint, "w", Home::Objects).await;

    let mending = engine.saving_whole(Layout::OcdbtZarr2);
    let kept = mending
        .take_over(&checkpoint, |key| !key.starts_with("old/"))
        .await
        .unwrap();
    assert_eq!(kept, 4);
    save(&mending, location, "w").await;
    mending.finish().await.unwrap();
    let checkpoint = engine.open_checkpoint(location).await.unwrap();
    for name in ["step", "w"] {
        check(&checkpoint, name, Home::Merged).await;
    }
    let error = checkpoint.array("old").await.unwrap_err();
    assert!(matches!(error, Error::MissingArray { .. }), "{error}");
    checkpoint
        .merged()
        .unwrap()
        .opened()
        .check(100)
        .await
        .unwrap();
}

#[tokio::test]
async fn all_layouts_hold_scalars_and_arrays_without_elements() {
    for layout in Layout::ALL {
        let folder = tempfile::tempdir().unwrap();
        let location = folder.path().to_str().unwrap();
        let engine = engine_of(layout);
        let saving = engine.saving();
        for (name, dims) in [("", &[][..]), ("empty", &[0, 3])] {
            let array = Array::new(dims);
            let pieces = array.pieces(&[IndexDomain::whole(dims)]);
            let to_save = to_save(location, name, dims, dims);
            saving.save(&to_save, pieces, true).await.unwrap();
        }
        saving.finish().await.unwrap();
        let checkpoint = engine.open_checkpoint(location).await.unwrap();
        for (name, dims) in [("", &[][..]), ("empty", &[0, 3])] {
            let whole = [IndexDomain::whole(dims)];
            let found = checkpoint
                .restore(&to_restore(location, name, dims), &whole)
                .await
                .unwrap();
            assert_eq!(
                found[0],
                Array::new(dims).part(&whole[0]),
                "{layout} {name}"
            );
            let array = checkpoint.array(name).await.unwrap();
            assert_eq!(array.metadata().format, layout.format());
            assert_eq!(array.home() == Home::Objects, !layout.is_ocdbt());
        }
        assert_eq!(checkpoint.arrays().await.unwrap().len(), 2);
    }
}

#[test]
fn types_that_tensorstore_has_no_name_for_are_refused_before_anything_is_written() {
    let sharding = Sharding::new(&OpSharding::default(), 1).unwrap();
    let sharded = |dtype| SaveArray::sharded("/c", "params.w", dtype, &[8], &sharding);
    for dtype in [PrimitiveType::U4, PrimitiveType::U2, PrimitiveType::F8e4m3] {
        let error = sharded(dtype).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        let text = error.to_string();
        assert!(
            text.contains("\"params.w\"") && text.contains(dtype.as_str_name()),
            "{text}"
        );
    }
    for dtype in DType::all() {
        sharded(dtype.primitive()).unwrap();
    }
}
