//! Caches that only read, that do nothing, and that leave some entries alone.

use std::time::Duration;

use waystation_cache::{Cache, Config, Mode, Origin};

use crate::kit::{self, Compiler, LONG, ask};

#[tokio::test]
async fn a_cache_that_only_reads_writes_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let compiler = Compiler::default();
    let writer = kit::cache(temp.path());
    ask(&writer, &compiler, "a").await;
    writer.flush(LONG).await;
    let files = kit::all_files(temp.path());
    let reader = Cache::open(Config {
        mode: Mode::ReadOnly,
        ..kit::config(Some(kit::folder(temp.path())))
    });
    assert_eq!(ask(&reader, &compiler, "a").await, Origin::Bucket);
    assert_eq!(ask(&reader, &compiler, "b").await, Origin::Compiled);
    assert_eq!(ask(&reader, &compiler, "b").await, Origin::Memory);
    assert_eq!(reader.shutdown(LONG).await, 0);
    assert_eq!(kit::all_files(temp.path()), files);
    let counts = reader.counters();
    assert_eq!((counts.bucket_writes, counts.claims), (0, 0));
}

#[tokio::test]
async fn a_cache_that_is_off_compiles_each_time() {
    let temp = tempfile::tempdir().unwrap();
    let cache = Cache::open(Config {
        mode: Mode::Off,
        ..kit::config(Some(kit::folder(temp.path())))
    });
    let compiler = Compiler::default();
    for _ in 0..2 {
        assert_eq!(ask(&cache, &compiler, "a").await, Origin::Compiled);
    }
    assert_eq!(cache.shutdown(LONG).await, 0);
    assert!(kit::all_files(temp.path()).is_empty());
    assert_eq!(cache.counters().bucket_misses, 0);
}

#[tokio::test]
async fn what_is_not_worth_keeping_is_skipped_and_counted() {
    let narrow: [fn(&mut Config); 4] = [
        |c| c.min_compile_time = Duration::from_secs(60),
        |c| c.min_entry_bytes = 1 << 20,
        |c| c.max_entry_bytes = 100,
        |c| c.limits.executable = 100,
    ];
    let mut skipped = Vec::new();
    for narrow in narrow {
        let temp = tempfile::tempdir().unwrap();
        let mut config = kit::config(Some(kit::folder(temp.path())));
        narrow(&mut config);
        let cache = Cache::open(config);
        let compiler = Compiler::default();
        assert_eq!(ask(&cache, &compiler, "a").await, Origin::Compiled);
        assert_eq!(ask(&cache, &compiler, "a").await, Origin::Memory);
        assert_eq!(cache.shutdown(LONG).await, 0);
        assert!(kit::files(temp.path()).is_empty());
        let counts = cache.counters();
        assert_eq!((counts.bucket_writes, counts.bucket_write_errors), (0, 0));
        skipped.push((
            counts.skipped_quick,
            counts.skipped_small,
            counts.skipped_large,
        ));
    }
    assert_eq!(skipped, [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 1)]);
}
