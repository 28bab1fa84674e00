//! One compile for all who share a folder.

use std::time::Duration;

use waystation_cache::{Cache, Config, Origin};
use waystation_lifecycle::bucket::{Bucket, Location};

use crate::kit::{self, Compiler, LONG, ask};

#[tokio::test]
async fn the_second_process_compiles_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let compiler = Compiler::default();
    let first = kit::cache(temp.path());
    for program in ["a", "b"] {
        assert_eq!(ask(&first, &compiler, program).await, Origin::Compiled);
        assert_eq!(ask(&first, &compiler, program).await, Origin::Memory);
    }
    assert_eq!(first.shutdown(LONG).await, 0);
    let counts = first.counters();
    assert_eq!((counts.compiles, counts.memory_hits), (2, 2));
    assert_eq!((counts.bucket_misses, counts.bucket_writes), (2, 2));

    let second = kit::cache(temp.path());
    for program in ["a", "b"] {
        assert_eq!(ask(&second, &compiler, program).await, Origin::Bucket);
        assert_eq!(ask(&second, &compiler, program).await, Origin::Memory);
    }
    let counts = second.counters();
    assert_eq!((counts.compiles, counts.bucket_hits), (0, 2));
    assert!(counts.saved_micros >= 20_000, "what the first one took");
    assert_eq!(
        counts.bucket_read_bytes,
        first.counters().bucket_write_bytes
    );
    assert_eq!(compiler.compiles(), 2);
    assert_eq!(
        second.location(),
        format!("file://{}", temp.path().display())
    );
}

#[tokio::test]
async fn another_program_is_exactly_one_miss() {
    let temp = tempfile::tempdir().unwrap();
    let compiler = Compiler::default();
    let first = kit::cache(temp.path());
    ask(&first, &compiler, "a").await;
    first.flush(LONG).await;
    let second = kit::cache(temp.path());
    assert_eq!(ask(&second, &compiler, "a").await, Origin::Bucket);
    assert_eq!(ask(&second, &compiler, "a'").await, Origin::Compiled);
    let counts = second.counters();
    assert_eq!(
        (counts.bucket_hits, counts.bucket_misses, counts.compiles),
        (1, 1, 1)
    );
}

#[tokio::test]
async fn racing_processes_leave_one_good_entry() {
    let temp = tempfile::tempdir().unwrap();
    let compiler = Compiler::default();
    let caches: Vec<Cache> = (0..8).map(|_| kit::cache(temp.path())).collect();
    futures::future::join_all(caches.iter().map(|cache| ask(cache, &compiler, "a"))).await;
    let (mut writes, mut present) = (0, 0);
    for cache in &caches {
        assert_eq!(cache.shutdown(LONG).await, 0);
        writes += cache.counters().bucket_writes;
        present += cache.counters().bucket_writes_present;
        assert_eq!(cache.counters().bucket_write_errors, 0);
    }
    assert_eq!(writes, 1);
    // One that started later than the first one's publication has had a hit.
    assert_eq!(writes + present, compiler.compiles() as u64);
    assert_eq!(kit::files(temp.path()).len(), 1);
    assert_eq!(
        ask(&kit::cache(temp.path()), &compiler, "a").await,
        Origin::Bucket
    );
}

#[tokio::test]
async fn entries_lie_where_the_layout_says_and_nothing_else_does() {
    let temp = tempfile::tempdir().unwrap();
    let cache = kit::cache(temp.path());
    ask(&cache, &Compiler::default(), "a").await;
    cache.flush(LONG).await;
    let key = kit::key("a").to_string();
    let expected = temp
        .path()
        .join(format!("exe/v1/{}/{}/{key}/0", &key[..2], &key[2..4]));
    let claims = temp
        .path()
        .join(format!("claim/v1/{}/{}/{key}", &key[..2], &key[2..4]));
    let files = kit::all_files(temp.path());
    let [claim, entry] = &files[..] else {
        panic!("{files:?}");
    };
    assert_eq!(*entry, expected);
    assert_eq!(claim.parent(), Some(&*claims));
}

#[tokio::test]
async fn without_a_location_memory_is_all_there_is() {
    let memory = Bucket::open(&Location::Memory).unwrap();
    for location in [None, Some(memory)] {
        let compiler = Compiler::default();
        let cache = Cache::open(kit::config(location));
        assert_eq!(ask(&cache, &compiler, "a").await, Origin::Compiled);
        assert_eq!(ask(&cache, &compiler, "a").await, Origin::Memory);
        assert_eq!(cache.location(), "memory");
        assert_eq!(cache.shutdown(Duration::ZERO).await, 0);
        let counts = cache.counters();
        assert_eq!((counts.bucket_misses, counts.bucket_writes), (0, 0));
    }
}

#[tokio::test]
async fn memory_stays_within_its_bound_and_the_bucket_makes_up_for_it() {
    let temp = tempfile::tempdir().unwrap();
    let compiler = Compiler::default();
    let one = kit::entry("p00").memory_bytes();
    // The cache writes the key into the info, which costs some bytes more.
    let memory_bytes = 3 * (one + 200);
    let cache = Cache::open(Config {
        memory_bytes,
        ..kit::config(Some(kit::folder(temp.path())))
    });
    for i in 0..10 {
        ask(&cache, &compiler, &format!("p{i:02}")).await;
        assert!(cache.memory_bytes() <= memory_bytes);
    }
    cache.flush(LONG).await;
    assert_eq!(ask(&cache, &compiler, "p09").await, Origin::Memory);
    assert_eq!(ask(&cache, &compiler, "p00").await, Origin::Bucket);
    assert_eq!(compiler.compiles(), 10);
}

#[tokio::test]
async fn a_key_alone_finds_the_entry() {
    let temp = tempfile::tempdir().unwrap();
    let first = kit::cache(temp.path());
    ask(&first, &Compiler::default(), "a").await;
    first.flush(LONG).await;
    let second = kit::cache(temp.path());
    let text = kit::key("a").to_string();
    let key = waystation_cache::Key::parse(&text).unwrap();
    let (entry, origin) = second.get(&key).await.unwrap();
    assert_eq!((entry.info.name.as_str(), origin), ("a", Origin::Bucket));
    assert_eq!(second.get(&key).await.unwrap().1, Origin::Memory);
    assert!(second.get(&kit::key("b")).await.is_none());

    let third = Cache::open(kit::config(None));
    third.keep(&key, &entry);
    assert_eq!(third.get(&key).await.unwrap().1, Origin::Memory);
}

#[tokio::test]
async fn what_cannot_be_serialized_is_compiled_each_time_and_kept_nowhere() {
    let temp = tempfile::tempdir().unwrap();
    let cache = kit::cache(temp.path());
    for _ in 0..2 {
        let compile = async || {
            let executable = bytes::Bytes::new();
            Ok::<_, ()>(waystation_cache::Entry {
                executable,
                ..kit::entry("a")
            })
        };
        let (_, origin) = cache.get_or_compile(&kit::key("a"), compile).await.unwrap();
        assert_eq!(origin, Origin::Compiled);
    }
    cache.shutdown(LONG).await;
    let counts = cache.counters();
    assert_eq!(
        (counts.compiles, counts.uncacheable, counts.bucket_writes),
        (2, 2, 0)
    );
    assert_eq!(counts.uncacheable_plugin, 2);
    assert!(kit::files(temp.path()).is_empty());
}

#[tokio::test]
async fn a_program_that_calls_into_its_process_is_compiled_each_time() {
    let callback = include_bytes!("../../stablehlo/tests/golden/callback.mlirbc");
    let partitioner = include_bytes!("../../stablehlo/tests/golden/partitioner.mlirbc");
    // Another version of the container, of which nothing is read.
    let mut unread = callback.to_vec();
    unread[4] = 0x0f;
    let by_construct = |counts: waystation_cache::Counts| {
        [
            counts.uncacheable_callback,
            counts.uncacheable_partitioner,
            counts.uncacheable_unread,
            counts.uncacheable_plugin,
        ]
    };
    for (program, expected) in [
        (callback.as_slice(), [2, 0, 0, 0]),
        (partitioner.as_slice(), [0, 2, 0, 0]),
        (&unread, [0, 0, 2, 0]),
    ] {
        let key = waystation_cache::Key::of(&waystation_cache::KeyInputs {
            program,
            ..Default::default()
        });
        let temp = tempfile::tempdir().unwrap();
        let cache = kit::cache(temp.path());
        let compiler = Compiler::default();
        for _ in 0..2 {
            let (_, origin) = cache
                .get_or_compile(&key, || compiler.compile("a"))
                .await
                .unwrap();
            assert_eq!(origin, Origin::Compiled);
        }
        assert!(cache.get(&key).await.is_none());
        assert_eq!(cache.shutdown(LONG).await, 0);
        let counts = cache.counters();
        assert_eq!((counts.compiles, counts.uncacheable), (2, 2));
        assert_eq!(by_construct(counts), expected);
        assert_eq!((counts.bucket_misses, counts.bucket_writes), (0, 0));
        assert!(kit::files(temp.path()).is_empty());
    }
}

#[tokio::test]
async fn a_program_keyed_on_its_bytes_is_counted_once_a_request() {
    let cache = Cache::open(kit::config(None));
    let compiler = Compiler::default();
    // The names that these tests use for programs are no StableHLO.
    ask(&cache, &compiler, "a").await;
    ask(&cache, &compiler, "a").await;
    assert_eq!(cache.counters().key_fallbacks, 2);
}
