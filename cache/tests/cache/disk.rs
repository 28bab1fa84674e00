//! The folder between memory and the bucket.

use std::path::Path;

use waystation_cache::config::{Disk, Mode};
use waystation_cache::{Cache, Config, Origin};
use waystation_lifecycle::bucket::Bucket;

use crate::kit::{self, Compiler, LONG, ask};

fn config(disk: &Path, bucket: Option<Bucket>) -> Config {
    Config {
        disk: Some(Disk {
            read_deadline: LONG,
            ..Disk::new(disk)
        }),
        ..kit::config(bucket)
    }
}

async fn end(cache: Cache) {
    assert_eq!(cache.shutdown(LONG).await, 0);
}

/// Files of entries, whatever else lies in the folder.
fn entries(disk: &Path) -> Vec<std::path::PathBuf> {
    let is_entry =
        |path: &std::path::PathBuf| path.file_name().is_some_and(|name| name.len() == 64);
    kit::files(disk).into_iter().filter(is_entry).collect()
}

#[tokio::test]
async fn without_a_bucket_the_next_process_finds_it_on_disk() {
    let temp = tempfile::tempdir().unwrap();
    let compiler = Compiler::default();
    let first = Cache::open(config(temp.path(), None));
    assert_eq!(ask(&first, &compiler, "a").await, Origin::Compiled);
    assert_eq!(ask(&first, &compiler, "a").await, Origin::Memory);
    assert_eq!(first.flush(LONG).await, 0);
    let counts = first.counters();
    assert_eq!((counts.disk_misses, counts.disk_writes), (1, 1));
    assert_eq!((counts.bucket_writes, counts.bucket_write_errors), (0, 0));
    end(first).await;
    let second = Cache::open(config(temp.path(), None));
    assert_eq!(ask(&second, &compiler, "a").await, Origin::Disk);
    assert_eq!(ask(&second, &compiler, "a").await, Origin::Memory);
    assert_eq!(second.get(&kit::key("b")).await, None);
    let counts = second.counters();
    assert_eq!((counts.disk_hits, counts.disk_writes), (1, 0));
    assert!(counts.disk_read_bytes > 0 && counts.saved_micros >= 10_000);
    let third = Cache::open(config(temp.path(), None));
    assert_eq!(third.get(&kit::key("a")).await.unwrap().1, Origin::Disk);
    assert_eq!(compiler.compiles(), 1);
}

#[tokio::test]
async fn what_is_compiled_goes_to_both_and_what_the_bucket_has_goes_to_disk() {
    let temp = tempfile::tempdir().unwrap();
    let [bucket, here, there] = ["bucket", "here", "there"].map(|name| temp.path().join(name));
    let compiler = Compiler::default();
    let first = Cache::open(config(&here, Some(kit::folder(&bucket))));
    ask(&first, &compiler, "a").await;
    end(first).await;
    let [in_bucket, on_disk] = [kit::files(&bucket), entries(&here)];
    assert_eq!((in_bucket.len(), on_disk.len()), (1, 1));
    assert_eq!(
        std::fs::read(&in_bucket[0]).unwrap(),
        std::fs::read(&on_disk[0]).unwrap()
    );
    // Another machine, which is asked once.
    for origin in [Origin::Bucket, Origin::Disk] {
        let cache = Cache::open(config(&there, Some(kit::folder(&bucket))));
        assert_eq!(ask(&cache, &compiler, "a").await, origin);
        end(cache).await;
    }
    // The bucket is not needed any more.
    std::fs::remove_dir_all(&bucket).unwrap();
    let last = Cache::open(config(&there, Some(kit::folder(&bucket))));
    assert_eq!(ask(&last, &compiler, "a").await, Origin::Disk);
    assert_eq!(compiler.compiles(), 1);
}

#[tokio::test]
async fn a_bad_file_is_repaired_from_the_bucket() {
    let temp = tempfile::tempdir().unwrap();
    let [bucket, disk] = ["bucket", "disk"].map(|name| temp.path().join(name));
    let compiler = Compiler::default();
    let open = || Cache::open(config(&disk, Some(kit::folder(&bucket))));
    let first = open();
    ask(&first, &compiler, "a").await;
    end(first).await;
    std::fs::write(&entries(&disk)[0], b"nothing of ours").unwrap();
    let second = open();
    assert_eq!(ask(&second, &compiler, "a").await, Origin::Bucket);
    assert_eq!(second.flush(LONG).await, 0);
    let counts = second.counters();
    assert_eq!((counts.disk_bad_entries, counts.disk_writes), (1, 1));
    let third = open();
    assert_eq!(ask(&third, &compiler, "a").await, Origin::Disk);
    assert_eq!(compiler.compiles(), 1);
}

#[tokio::test]
async fn an_entry_that_does_not_load_is_replaced() {
    let temp = tempfile::tempdir().unwrap();
    let compiler = Compiler::default();
    let first = Cache::open(config(temp.path(), None));
    ask(&first, &compiler, "a").await;
    end(first).await;
    let second = Cache::open(config(temp.path(), None));
    let (entry, origin) = second.get(&kit::key("a")).await.unwrap();
    assert_eq!(origin, Origin::Disk);
    second.reject(&kit::key("a"), &entry);
    assert_eq!(ask(&second, &compiler, "a").await, Origin::Compiled);
    end(second).await;
    let third = Cache::open(config(temp.path(), None));
    let (again, origin) = third.get(&kit::key("a")).await.unwrap();
    assert_eq!(origin, Origin::Disk);
    assert_ne!(again.object, entry.object, "it is the second compile's");
}

#[tokio::test]
async fn a_folder_that_cannot_be_used_costs_nothing_but_its_use() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("file");
    std::fs::write(&file, b"").unwrap();
    let compiler = Compiler::default();
    let bucket = temp.path().join("bucket");
    let cache = Cache::open(config(&file.join("disk"), Some(kit::folder(&bucket))));
    for program in ["a", "b", "c", "d"] {
        assert_eq!(ask(&cache, &compiler, program).await, Origin::Compiled);
        cache.flush(LONG).await;
    }
    let counts = cache.counters();
    assert_eq!((counts.bucket_writes, counts.disk_writes), (4, 0));
    assert!(counts.disk_read_errors > 0);
    assert_eq!(counts.disk_write_errors, 4);
    // Mended, it is used again, after the pause that config() sets.
    std::fs::remove_file(&file).unwrap();
    let mut number = 0;
    while cache.counters().disk_writes == 0 {
        number += 1;
        assert!(number < 1000, "it stays broken");
        ask(&cache, &compiler, &format!("p{number}")).await;
        cache.flush(LONG).await;
    }
    end(cache).await;
}

#[tokio::test]
async fn a_cache_that_only_reads_writes_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let [bucket, disk, other] = ["bucket", "disk", "other"].map(|name| temp.path().join(name));
    let compiler = Compiler::default();
    let first = Cache::open(config(&disk, Some(kit::folder(&bucket))));
    ask(&first, &compiler, "a").await;
    end(first).await;
    let read_only = |disk: &Path| Config {
        mode: Mode::ReadOnly,
        ..config(disk, Some(kit::folder(&bucket)))
    };
    let second = Cache::open(read_only(&disk));
    assert_eq!(ask(&second, &compiler, "a").await, Origin::Disk);
    assert_eq!(ask(&second, &compiler, "b").await, Origin::Compiled);
    end(second).await;
    assert_eq!(entries(&disk).len(), 1);
    let third = Cache::open(read_only(&other));
    assert_eq!(ask(&third, &compiler, "a").await, Origin::Bucket);
    end(third).await;
    assert!(!other.exists());
    let off = Cache::open(Config {
        mode: Mode::Off,
        ..config(&disk, None)
    });
    assert_eq!(ask(&off, &compiler, "a").await, Origin::Compiled);
}

#[tokio::test]
async fn what_was_compiled_and_loaded_is_noted_in_the_folder() {
    let temp = tempfile::tempdir().unwrap();
    let origins = || {
        let records = waystation_cache::history::of_folder(temp.path());
        let notes = records.iter().map(|record| serde_json::from_slice(record));
        let notes: Vec<waystation_cache::history::Note> = notes.map(Result::unwrap).collect();
        notes
            .into_iter()
            .map(|note| note.origin)
            .collect::<Vec<_>>()
    };
    let compiler = Compiler::default();
    let cache = Cache::open(config(temp.path(), None));
    for program in ["a", "b", "a"] {
        ask(&cache, &compiler, program).await;
        cache.flush(LONG).await;
    }
    assert_eq!(origins(), ["compiled", "compiled"]);
    end(cache).await;
    let next = Cache::open(config(temp.path(), None));
    ask(&next, &compiler, "a").await;
    end(next).await;
    assert_eq!(origins(), ["compiled", "compiled", "disk"]);
}

#[tokio::test]
async fn an_entry_that_is_used_from_disk_lives_on_in_the_bucket() {
    let temp = tempfile::tempdir().unwrap();
    let [bucket, disk] = ["bucket", "disk"].map(|name| temp.path().join(name));
    let compiler = Compiler::default();
    let open = |ttl| {
        Cache::open(Config {
            ttl,
            ..config(&disk, Some(kit::folder(&bucket)))
        })
    };
    let first = open(LONG);
    ask(&first, &compiler, "a").await;
    end(first).await;
    let [object] = kit::files(&bucket).try_into().unwrap();
    let bytes = std::fs::read(&object).unwrap();
    let uses = async |ttl| {
        let cache = open(ttl);
        assert_eq!(ask(&cache, &compiler, "a").await, Origin::Disk);
        cache.flush(LONG).await;
        let counts = cache.counters();
        end(cache).await;
        (counts.renewals, counts.bucket_writes)
    };
    // Young: the bucket is not asked.
    std::fs::remove_file(&object).unwrap();
    assert_eq!(uses(LONG * 1000).await, (0, 0));
    assert!(kit::files(&bucket).is_empty());
    // Old, and gone from the bucket.
    let old = std::time::Duration::ZERO;
    assert_eq!(uses(old).await, (0, 1));
    assert_eq!(std::fs::read(&object).unwrap(), bytes);
    // Old, and there.
    assert_eq!(uses(old).await, (1, 0));
    assert_eq!(kit::files(&bucket).len(), 2);
    assert_eq!(compiler.compiles(), 1);
}
