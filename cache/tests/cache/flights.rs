//! Many who ask for one program at a time.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use waystation_cache::{Cache, Entry, Origin};

use crate::kit::{self, Compiler, LONG, ask};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixty_four_at_once_compile_and_publish_once() {
    let temp = tempfile::tempdir().unwrap();
    let cache = kit::cache(temp.path());
    let compiler = Compiler::default();
    let asking: Vec<_> = (0..64)
        .map(|_| {
            let (cache, compiler) = (cache.clone(), compiler.clone());
            tokio::spawn(async move { ask(&cache, &compiler, "a").await })
        })
        .collect();
    let mut compiled = 0;
    for asked in asking {
        compiled += usize::from(asked.await.unwrap() == Origin::Compiled);
    }
    cache.shutdown(LONG).await;
    assert_eq!((compiled, compiler.compiles()), (1, 1));
    let counts = cache.counters();
    assert_eq!(
        (counts.compiles, counts.memory_hits, counts.bucket_writes),
        (1, 63, 1)
    );
    assert_eq!(counts.bucket_misses, 1);
}

#[tokio::test]
async fn keys_do_not_wait_for_each_other() {
    let cache = Cache::open(kit::config(None));
    let stuck = kit::key("stuck");
    let waiting = cache.get_or_compile(&stuck, std::future::pending::<Result<Entry, ()>>);
    tokio::pin!(waiting);
    assert!(futures::poll!(&mut waiting).is_pending());
    assert_eq!(
        ask(&cache, &Compiler::default(), "a").await,
        Origin::Compiled
    );
}

#[tokio::test]
async fn a_leader_that_is_dropped_lets_another_lead() {
    let temp = tempfile::tempdir().unwrap();
    let cache = kit::cache(temp.path());
    let started = Arc::new(Notify::new());
    let leader = {
        let (cache, started) = (cache.clone(), Arc::clone(&started));
        tokio::spawn(async move {
            let compile = || async {
                started.notify_one();
                std::future::pending::<Result<Entry, ()>>().await
            };
            cache
                .get_or_compile(&kit::key("a"), compile)
                .await
                .map(|_| ())
        })
    };
    started.notified().await;
    let compiler = Compiler::default();
    let follower = {
        let (cache, compiler) = (cache.clone(), compiler.clone());
        tokio::spawn(async move { ask(&cache, &compiler, "a").await })
    };
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(compiler.compiles(), 0, "it waits while there is a leader");
    leader.abort();
    let origin = tokio::time::timeout(LONG, follower).await.unwrap().unwrap();
    assert_eq!(origin, Origin::Compiled);
    cache.shutdown(LONG).await;
    assert_eq!(cache.counters().bucket_writes, 1);
}

#[tokio::test]
async fn a_failed_compile_is_each_ones_own_and_not_kept() {
    let cache = Cache::open(kit::config(None));
    let fail = |text: &'static str| {
        let cache = cache.clone();
        async move {
            let compile = || async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                Err::<Entry, _>(text)
            };
            cache
                .get_or_compile(&kit::key("a"), compile)
                .await
                .unwrap_err()
        }
    };
    let failures = futures::future::join(fail("one"), fail("two")).await;
    assert_eq!(failures, ("one", "two"));
    assert_eq!(cache.counters().compile_failures, 2);
    assert_eq!(
        ask(&cache, &Compiler::default(), "a").await,
        Origin::Compiled
    );
}
