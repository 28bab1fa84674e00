//! A bucket that fails, hangs and lies: never a failed job, never a long wait, and recovery by itself.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use waystation_cache::config::WRITE_DEADLINE_SMALL;
use waystation_cache::{Cache, Config, Origin};
use waystation_lifecycle::bucket::{Bucket, Location};

use crate::faulty::{Fault, Faulty};
use crate::kit::{self, Compiler, LONG, ask};

fn faulty(path: &Path) -> (Arc<Faulty>, Config) {
    let inside = kit::folder(path);
    let store = Arc::new(Faulty::new(Arc::clone(inside.store())));
    let location = Location::parse("gs://bucket/prefix").unwrap();
    let bucket = Bucket::from_store(location, Arc::clone(&store) as _);
    (store, kit::config(Some(bucket)))
}

async fn fill(path: &Path, programs: &[&str]) {
    let cache = kit::cache(path);
    for program in programs {
        ask(&cache, &Compiler::default(), program).await;
    }
    assert_eq!(cache.shutdown(LONG).await, 0);
}

#[tokio::test]
async fn a_failing_read_is_a_compile() {
    // Where a read is denied it is asked whether any is allowed.
    for (fault, times) in [(Fault::Fails, 1), (Fault::Denied, 2), (Fault::Breaks, 1)] {
        let temp = tempfile::tempdir().unwrap();
        fill(temp.path(), &["a", "b"]).await;
        let (store, config) = faulty(temp.path());
        let cache = Cache::open(config);
        store.break_reads(vec![fault; times]);
        let compiler = Compiler::default();
        assert_eq!(
            ask(&cache, &compiler, "a").await,
            Origin::Compiled,
            "{fault:?}"
        );
        assert_eq!(
            ask(&cache, &compiler, "b").await,
            Origin::Bucket,
            "{fault:?}"
        );
        let counts = cache.counters();
        assert_eq!((counts.bucket_read_errors, counts.bucket_misses), (1, 0));
        cache.shutdown(LONG).await;
        assert_eq!(
            cache.counters().bucket_writes_present,
            1,
            "the entry is there"
        );
    }
}

#[tokio::test]
async fn a_truncated_read_is_a_bad_entry_and_a_vanishing_one_a_miss() {
    for (fault, bad) in [(Fault::Truncates, 1), (Fault::Vanishes, 0)] {
        // The claim of who has filled the bucket is young, and in the second case it may yet be published again.
        let claim_wait = Some(Duration::ZERO);
        let temp = tempfile::tempdir().unwrap();
        fill(temp.path(), &["a"]).await;
        let (store, config) = faulty(temp.path());
        let cache = Cache::open(Config {
            claim_wait,
            ..config
        });
        store.break_reads([fault]);
        let compiler = Compiler::default();
        assert_eq!(
            ask(&cache, &compiler, "a").await,
            Origin::Compiled,
            "{fault:?}"
        );
        let counts = cache.counters();
        assert_eq!(
            (counts.bad_entries, counts.bucket_misses),
            (bad, 1),
            "{fault:?}"
        );
        assert_eq!(counts.bucket_read_errors, 0, "{fault:?}");
    }
}

#[tokio::test]
async fn a_hanging_bucket_costs_one_deadline_and_recovers() {
    let temp = tempfile::tempdir().unwrap();
    let programs = ["a", "b", "c", "d", "e"];
    fill(temp.path(), &programs).await;
    let (store, config) = faulty(temp.path());
    let pause = Duration::from_secs(2);
    let cache = Cache::open(Config {
        read_deadline: Duration::from_millis(100),
        backoff: pause,
        backoff_max: pause,
        ..config
    });
    store.break_reads([Fault::Hangs]);
    let compiler = Compiler::default();
    for program in &programs[..4] {
        assert_eq!(ask(&cache, &compiler, program).await, Origin::Compiled);
    }
    let counts = cache.counters();
    assert_eq!(
        (counts.bucket_read_errors, counts.bucket_reads_skipped),
        (1, 3)
    );
    tokio::time::sleep(pause).await;
    assert_eq!(
        ask(&cache, &compiler, "e").await,
        Origin::Bucket,
        "it is asked again"
    );
}

#[tokio::test]
async fn a_write_is_tried_again_until_it_is_done() {
    let cases: [&[Fault]; 5] = [
        &[Fault::Fails, Fault::Fails, Fault::Fails],
        &[Fault::Hangs],
        &[Fault::HappensAndFails],
        &[Fault::HappensAndHangs],
        &[Fault::Fails, Fault::HappensAndFails],
    ];
    for faults in cases {
        let temp = tempfile::tempdir().unwrap();
        let (store, config) = faulty(temp.path());
        let cache = Cache::open(Config {
            write_deadline: Duration::from_millis(500),
            ..config
        });
        store.break_writes(faults.iter().copied());
        let compiler = Compiler::default();
        ask(&cache, &compiler, "a").await;
        assert_eq!(cache.shutdown(LONG).await, 0);
        let counts = cache.counters();
        assert_eq!(
            (counts.bucket_writes, counts.bucket_write_errors),
            (1, 0),
            "{faults:?}"
        );
        assert_eq!(kit::files(temp.path()).len(), 1, "{faults:?}");
        assert_eq!(
            ask(&kit::cache(temp.path()), &compiler, "a").await,
            Origin::Bucket
        );
    }
}

#[tokio::test(start_paused = true)]
async fn writes_that_are_never_answered_hold_up_others_no_longer_than_small_ones_take() {
    let temp = tempfile::tempdir().unwrap();
    let (store, config) = faulty(temp.path());
    let uploads = config.uploads;
    let cache = Cache::open(Config {
        write_deadline: Config::default().write_deadline,
        ..config
    });
    store.break_writes(vec![Fault::Hangs; uploads]);
    let compiler = Compiler::default();
    let programs: Vec<_> = (0..=uploads).map(|i| format!("program {i}")).collect();
    for program in &programs {
        ask(&cache, &compiler, program).await;
    }
    assert_eq!(cache.flush(2 * WRITE_DEADLINE_SMALL).await, 0);
    let counts = cache.counters();
    assert_eq!(counts.bucket_writes, programs.len() as u64);
    assert_eq!(counts.bucket_write_errors, 0);
}

#[tokio::test]
async fn a_write_that_keeps_failing_is_given_up_and_the_next_one_tried() {
    let temp = tempfile::tempdir().unwrap();
    let (store, config) = faulty(temp.path());
    let attempts = config.write_attempts as usize;
    let cache = Cache::open(config);
    store.break_writes(vec![Fault::Fails; attempts]);
    let compiler = Compiler::default();
    ask(&cache, &compiler, "a").await;
    assert_eq!(cache.flush(LONG).await, 0);
    assert_eq!(cache.counters().bucket_write_errors, 1);
    assert_eq!(store.write_count.load(Ordering::SeqCst), attempts);
    ask(&cache, &compiler, "b").await;
    assert_eq!(cache.flush(LONG).await, 0);
    assert_eq!(cache.counters().bucket_writes, 1);
}

#[tokio::test]
async fn a_write_that_is_asked_to_wait_is_not_lost() {
    let temp = tempfile::tempdir().unwrap();
    let (store, config) = faulty(temp.path());
    let storm = 5 * config.write_attempts as usize;
    let cache = Cache::open(config);
    store.break_writes(vec![Fault::Busy; storm]);
    ask(&cache, &Compiler::default(), "a").await;
    assert_eq!(cache.flush(LONG).await, 0);
    let counts = cache.counters();
    assert_eq!(counts.bucket_rate_limited, storm as u64);
    assert_eq!((counts.bucket_writes, counts.bucket_write_errors), (1, 0));
}

#[tokio::test]
async fn rubbish_is_removed_where_that_is_allowed_and_asked_for_once_where_not() {
    for is_allowed in [true, false] {
        let temp = tempfile::tempdir().unwrap();
        let programs = ["a", "b", "c"];
        fill(temp.path(), &programs).await;
        for file in kit::files(temp.path()) {
            std::fs::write(file, b"rubbish").unwrap();
        }
        let (store, config) = faulty(temp.path());
        store.deny_deletes.store(!is_allowed, Ordering::SeqCst);
        let cache = Cache::open(Config {
            remove_bad: true,
            ..config
        });
        let compiler = Compiler::default();
        for program in programs {
            assert_eq!(ask(&cache, &compiler, program).await, Origin::Compiled);
            assert_eq!(cache.flush(LONG).await, 0);
        }
        let counts = cache.counters();
        assert_eq!((counts.bucket_writes, counts.bucket_write_errors), (3, 0));
        let (removed, asked, files) = if is_allowed { (3, 3, 3) } else { (0, 1, 6) };
        assert_eq!(counts.bad_removed, removed);
        assert_eq!(store.delete_count.load(Ordering::SeqCst), asked);
        assert_eq!(kit::files(temp.path()).len(), files);
        let next = kit::cache(temp.path());
        for program in programs {
            assert_eq!(ask(&next, &compiler, program).await, Origin::Bucket);
        }
    }
}

#[tokio::test]
async fn a_write_that_is_not_allowed_is_not_repeated() {
    let temp = tempfile::tempdir().unwrap();
    let (store, config) = faulty(temp.path());
    let cache = Cache::open(config);
    store.break_writes([Fault::Denied]);
    ask(&cache, &Compiler::default(), "a").await;
    assert_eq!(cache.flush(LONG).await, 0);
    assert_eq!(cache.counters().bucket_write_errors, 1);
    assert_eq!(store.write_count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_request_never_waits_for_a_write() {
    let temp = tempfile::tempdir().unwrap();
    let (store, config) = faulty(temp.path());
    let cache = Cache::open(config);
    store.break_writes([Fault::Hangs]);
    let start = Instant::now();
    ask(&cache, &Compiler::default(), "a").await;
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(
        cache.flush(Duration::from_millis(50)).await,
        1,
        "it still waits"
    );
    let left = cache.shutdown(Duration::from_millis(50)).await;
    assert_eq!(left, 1, "and is cut off in the end");
    assert_eq!(cache.counters().bucket_write_errors, 1);
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn the_queue_is_bounded_in_number_and_in_bytes() {
    let narrow: [fn(&mut Config); 2] = [|c| c.queue_entries = 2, |c| c.queue_bytes = 2 * 4096];
    for narrow in narrow {
        let temp = tempfile::tempdir().unwrap();
        let (store, mut config) = faulty(temp.path());
        narrow(&mut config);
        let cache = Cache::open(config);
        store.break_writes(vec![Fault::Hangs; 10]);
        let compiler = Compiler::default();
        for i in 0..5 {
            ask(&cache, &compiler, &format!("p{i}")).await;
        }
        assert_eq!(
            cache.counters().bucket_write_errors,
            3,
            "two wait, three are dropped"
        );
        assert_eq!(cache.shutdown(Duration::ZERO).await, 2);
    }
}

#[tokio::test]
async fn after_shutdown_requests_are_still_served() {
    let temp = tempfile::tempdir().unwrap();
    let cache = kit::cache(temp.path());
    let compiler = Compiler::default();
    ask(&cache, &compiler, "a").await;
    assert_eq!(cache.shutdown(LONG).await, 0);
    assert_eq!(ask(&cache, &compiler, "b").await, Origin::Compiled);
    assert_eq!(cache.shutdown(LONG).await, 0, "twice does no harm");
    assert_eq!(kit::files(temp.path()).len(), 1, "b came too late");
}

#[tokio::test]
async fn a_folder_that_goes_is_an_error_and_not_made_and_comes_back() {
    let temp = tempfile::tempdir().unwrap();
    let (share, away) = (temp.path().join("share"), temp.path().join("away"));
    std::fs::create_dir(&share).unwrap();
    fill(&share, &["a", "b", "c", "d"]).await;
    let cache = kit::cache(&share);
    let compiler = Compiler::default();
    std::fs::rename(&share, &away).unwrap();
    for program in ["a", "b"] {
        assert_eq!(ask(&cache, &compiler, program).await, Origin::Compiled);
    }
    assert_eq!(cache.flush(LONG).await, 0);
    assert!(!share.exists());
    let counts = cache.counters();
    assert_eq!((counts.bucket_read_errors, counts.bucket_misses), (2, 0));
    assert_eq!(counts.bucket_write_errors, 2);
    std::fs::rename(&away, &share).unwrap();
    for program in ["c", "d"] {
        let key = kit::key(program);
        let asked = Instant::now();
        while cache.get(&key).await.is_none() {
            assert!(asked.elapsed() < LONG, "it is asked again");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
