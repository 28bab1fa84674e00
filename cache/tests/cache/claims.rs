//! Several processes that miss one program at the same time.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::ObjectStoreExt as _;
use object_store::memory::InMemory;
use waystation_cache::{Cache, Config, Entry, Origin};
use waystation_lifecycle::bucket::{Bucket, Location, layout};

use crate::faulty::{Fault, Faulty};
use crate::kit::{self, Compiler, LONG, ask};

/// Longer than any test waits: who waits so long for an entry waits for ever.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// Tells a child where to work. Without it the child does nothing, so it may be run by hand.
const FOLDER: &str = "WAYSTATION_TEST_FOLDER";

/// What a child is called, which names its files.
const NAME: &str = "WAYSTATION_TEST_NAME";

fn cache(path: &Path, wait: Duration) -> Cache {
    Cache::open(Config {
        claim_wait: Some(wait),
        ..kit::config(Some(kit::folder(path)))
    })
}

fn child(test: &str, folder: &Path, name: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored"])
        .env(FOLDER, folder)
        .env(NAME, name)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn told() -> Option<(PathBuf, String)> {
    Some((std::env::var_os(FOLDER)?.into(), std::env::var(NAME).ok()?))
}

async fn appears(path: &Path) {
    let there = async {
        while !path.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, there).await.unwrap();
}

/// Sixteen requests for one program, once all children are up.
#[test]
#[ignore = "the other half of four_processes_compile_and_upload_once"]
fn asks_sixteen_times() {
    let Some((folder, name)) = told() else {
        return;
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let cache = cache(&folder.join("bucket"), FOR_EVER);
        std::fs::write(folder.join(format!("up-{name}")), b"").unwrap();
        appears(&folder.join("go")).await;
        let compiler = Compiler::default();
        futures::future::join_all((0..16).map(|_| ask(&cache, &compiler, "a"))).await;
        assert_eq!(cache.shutdown(LONG).await, 0);
        let counts = cache.counters();
        let text = format!("{} {}", compiler.compiles(), counts.bucket_writes);
        std::fs::write(folder.join(format!("did-{name}")), text).unwrap();
    });
}

#[tokio::test]
async fn four_processes_compile_and_upload_once() {
    let temp = tempfile::tempdir().unwrap();
    let names = ["0", "1", "2", "3"];
    let mut children = names.map(|name| child("claims::asks_sixteen_times", temp.path(), name));
    for name in names {
        appears(&temp.path().join(format!("up-{name}"))).await;
    }
    std::fs::write(temp.path().join("go"), b"").unwrap();
    let (mut compiles, mut writes) = (0, 0);
    for (child, name) in children.iter_mut().zip(names) {
        assert!(child.wait().unwrap().success(), "child {name}");
        let did = std::fs::read_to_string(temp.path().join(format!("did-{name}"))).unwrap();
        let (compiled, wrote) = did.split_once(' ').unwrap();
        compiles += compiled.parse::<u64>().unwrap();
        writes += wrote.parse::<u64>().unwrap();
    }
    assert_eq!((compiles, writes), (1, 1));
}

/// Compiles for ever.
#[test]
#[ignore = "the other half of a_killed_claimant_costs_one_wait"]
fn compiles_for_ever() {
    let Some((folder, _)) = told() else {
        return;
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let cache = cache(&folder.join("bucket"), FOR_EVER);
        let compile = || async {
            std::fs::write(folder.join("compiling"), b"").unwrap();
            std::future::pending::<Result<Entry, ()>>().await
        };
        let _ = cache.get_or_compile(&kit::key("a"), compile).await;
    });
}

#[tokio::test]
async fn a_killed_claimant_costs_one_wait() {
    let temp = tempfile::tempdir().unwrap();
    let mut claimant = child("claims::compiles_for_ever", temp.path(), "claimant");
    appears(&temp.path().join("compiling")).await;
    let cache = cache(&temp.path().join("bucket"), Duration::from_secs(1));
    let asking = {
        let (cache, compiler) = (cache.clone(), Compiler::default());
        tokio::spawn(async move { ask(&cache, &compiler, "a").await })
    };
    // SIGKILL, while the other waits.
    claimant.kill().unwrap();
    claimant.wait().unwrap();
    let origin = tokio::time::timeout(LONG, asking).await.unwrap().unwrap();
    assert_eq!(origin, Origin::Compiled);
    assert_eq!(cache.shutdown(LONG).await, 0);
    let counts = cache.counters();
    assert_eq!((counts.claim_waits, counts.claim_waits_in_vain), (1, 1));
    assert_eq!(counts.bucket_writes, 1);
}

#[tokio::test]
async fn who_waits_gets_what_the_claimant_publishes() {
    let temp = tempfile::tempdir().unwrap();
    let first = cache(temp.path(), FOR_EVER);
    let second = cache(temp.path(), FOR_EVER);
    let (go, gone) = tokio::sync::oneshot::channel();
    let claimant = {
        let first = first.clone();
        tokio::spawn(async move {
            let compile = || async {
                gone.await.unwrap();
                Ok::<_, ()>(kit::entry("a"))
            };
            first
                .get_or_compile(&kit::key("a"), compile)
                .await
                .unwrap()
                .1
        })
    };
    let compiler = Compiler::default();
    while first.counters().claims == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let waiting = {
        let (second, compiler) = (second.clone(), compiler.clone());
        tokio::spawn(async move { ask(&second, &compiler, "a").await })
    };
    while second.counters().claim_waits == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    go.send(()).unwrap();
    assert_eq!(claimant.await.unwrap(), Origin::Compiled);
    assert_eq!(waiting.await.unwrap(), Origin::Bucket);
    assert_eq!(compiler.compiles(), 0);
    let counts = second.counters();
    assert_eq!((counts.claim_waits_in_vain, counts.claims), (0, 0));
    assert_eq!((counts.bucket_misses, counts.bucket_hits), (1, 1));
}

/// A claimant that publishes nothing, for three reasons; who comes then does not wait for it.
#[tokio::test]
async fn a_claim_of_which_nothing_comes_is_called_over() {
    for what in ["fails", "is dropped", "is too quick"] {
        let temp = tempfile::tempdir().unwrap();
        let claimant = Cache::open(Config {
            min_compile_time: FOR_EVER,
            ..kit::config(Some(kit::folder(temp.path())))
        });
        let key = kit::key("a");
        match what {
            "fails" => {
                let compile = async || Err::<Entry, _>("no");
                claimant.get_or_compile(&key, compile).await.unwrap_err();
            }
            "is dropped" => {
                let compile = std::future::pending::<Result<Entry, ()>>;
                let asking = claimant.get_or_compile(&key, compile);
                tokio::time::timeout(Duration::from_millis(300), asking)
                    .await
                    .unwrap_err();
            }
            _ => {
                ask(&claimant, &Compiler::default(), "a").await;
                assert_eq!(claimant.counters().skipped_quick, 1);
                assert!(kit::files(temp.path()).is_empty());
            }
        }
        assert_eq!(claimant.counters().claims, 1, "{what}");
        let other = cache(temp.path(), FOR_EVER);
        let compiler = Compiler::default();
        let asking = ask(&other, &compiler, "a");
        let origin = tokio::time::timeout(LONG, asking).await.unwrap();
        assert_eq!(origin, Origin::Compiled, "{what}");
        assert_eq!(other.shutdown(LONG).await, 0);
        assert_eq!(other.counters().bucket_writes, 1, "{what}");
    }
}

#[tokio::test]
async fn who_ends_in_order_in_mid_compile_lets_the_others_go_on() {
    let temp = tempfile::tempdir().unwrap();
    let claimant = cache(temp.path(), FOR_EVER);
    let compile = std::future::pending::<Result<Entry, ()>>;
    // As a worker's compile that is not waited for: it is not dropped before the runtime is.
    let compiling = {
        let claimant = claimant.clone();
        tokio::spawn(async move { claimant.get_or_compile(&kit::key("a"), compile).await })
    };
    while claimant.counters().claims == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let other = cache(temp.path(), FOR_EVER);
    let asking = {
        let (other, compiler) = (other.clone(), Compiler::default());
        tokio::spawn(async move { ask(&other, &compiler, "a").await })
    };
    while other.counters().claim_waits == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(claimant.shutdown(LONG).await, 0);
    let origin = tokio::time::timeout(LONG, asking).await.unwrap().unwrap();
    assert_eq!(origin, Origin::Compiled);
    assert!(!compiling.is_finished());
    // It claims nothing any more.
    let compiler = Compiler::default();
    assert_eq!(ask(&claimant, &compiler, "b").await, Origin::Compiled);
    assert_eq!(claimant.counters().claims, 1);
}

#[tokio::test]
async fn nobody_waits_for_a_claim_of_its_own() {
    let temp = tempfile::tempdir().unwrap();
    let cache = cache(temp.path(), FOR_EVER);
    let compiler = Compiler::default();
    let key = kit::key("a");
    ask(&cache, &compiler, "a").await;
    cache.flush(LONG).await;
    for file in kit::files(temp.path()) {
        std::fs::remove_file(file).unwrap();
    }
    let (entry, _) = cache.get(&key).await.unwrap();
    cache.reject(&key, &entry);
    let asking = ask(&cache, &compiler, "a");
    let origin = tokio::time::timeout(LONG, asking).await.unwrap();
    assert_eq!(origin, Origin::Compiled);
    let counts = cache.counters();
    assert_eq!((counts.claims, counts.claim_waits), (2, 0));
}

#[tokio::test]
async fn an_old_claim_is_passed_over_and_the_next_one_made_beside_it() {
    let temp = tempfile::tempdir().unwrap();
    let bucket = temp.path().join("bucket");
    let now = SystemTime::now();
    let minute = now
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs()
        / 60;
    let wait = Duration::from_secs(20);
    // Left by one who died in this minute; and by another, should the minute end under this test.
    for minute in [minute, minute + 1] {
        let path = bucket.join(layout::claim(kit::key("a").digest(), minute).as_ref());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, b"").unwrap();
        let times = std::fs::FileTimes::new().set_modified(now - 2 * wait);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_times(times).unwrap();
        if minute % 2 == 0 {
            // Without it the second minute's name is free.
            std::fs::remove_file(&path).unwrap();
        }
    }
    let cache = cache(&bucket, wait);
    assert_eq!(
        ask(&cache, &Compiler::default(), "a").await,
        Origin::Compiled
    );
    let counts = cache.counters();
    assert_eq!((counts.claims, counts.claim_waits), (1, 0));
    assert_eq!(counts.claim_errors, 0);
}

fn over_memory() -> (Arc<Faulty>, Config) {
    let store = Arc::new(Faulty::new(Arc::new(InMemory::new())));
    let location = Location::parse("gs://bucket/prefix").unwrap();
    let bucket = Bucket::from_store(location, Arc::clone(&store) as _);
    (store, kit::config(Some(bucket)))
}

#[tokio::test]
async fn claims_that_cannot_be_made_hold_nobody_up_and_recover() {
    for fault in [Fault::Denied, Fault::Fails, Fault::HappensAndFails] {
        let (store, config) = over_memory();
        let cache = Cache::open(config);
        store.break_claims([fault; 2]);
        let compiler = Compiler::default();
        for program in ["a", "b"] {
            ask(&cache, &compiler, program).await;
        }
        let counts = cache.counters();
        assert_eq!((counts.claim_errors, counts.claims), (2, 0), "{fault:?}");
        // Left alone for some milliseconds now.
        let recovers = async {
            for number in 0.. {
                ask(&cache, &compiler, &format!("p{number}")).await;
                if cache.counters().claims > 0 {
                    break;
                }
            }
        };
        tokio::time::timeout(LONG, recovers).await.unwrap();
        assert_eq!(cache.shutdown(LONG).await, 0);
        let counts = cache.counters();
        assert_eq!(counts.bucket_writes, compiler.compiles() as u64);
        assert_eq!(counts.claim_errors, 2, "{fault:?}");
    }
}

/// What was claimed is there, and bad: nobody waits for it, but for who compiles it again.
#[tokio::test]
async fn a_bad_entry_is_compiled_again_by_one() {
    let temp = tempfile::tempdir().unwrap();
    let first = cache(temp.path(), FOR_EVER);
    ask(&first, &Compiler::default(), "a").await;
    first.flush(LONG).await;
    // No store's clock is finer than this.
    tokio::time::sleep(Duration::from_millis(20)).await;
    std::fs::write(&kit::files(temp.path())[0], b"rubbish").unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    let compiler = Compiler::default();
    let others = [(); 3].map(|()| cache(temp.path(), FOR_EVER));
    let asking = others.iter().map(|other| ask(other, &compiler, "a"));
    let asking = futures::future::join_all(asking);
    tokio::time::timeout(LONG, asking).await.unwrap();
    assert_eq!(compiler.compiles(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_hangs_is_given_up() {
    let (store, config) = over_memory();
    let cache = Cache::open(config);
    store.break_claims([Fault::Hangs]);
    let begun = tokio::time::Instant::now();
    ask(&cache, &Compiler::default(), "a").await;
    assert!(begun.elapsed() < Duration::from_secs(6), "virtual time");
    assert_eq!(cache.counters().claim_errors, 1);
}

#[tokio::test(start_paused = true)]
async fn the_wait_is_three_times_the_last_compile_where_that_is_known() {
    let (_, config) = over_memory();
    let bucket = config.location.clone();
    let claimant = Cache::open(Config {
        claim_wait: None,
        ..config
    });
    let compile = std::future::pending::<Result<Entry, ()>>;
    let (one, two) = (key_of("step", "o1"), key_of("step", "o2"));
    let asking = [
        claimant.get_or_compile(&one, compile),
        claimant.get_or_compile(&two, compile),
    ];
    let mut asking = asking.map(Box::pin);
    for asking in &mut asking {
        tokio::time::timeout(Duration::from_millis(1), asking)
            .await
            .unwrap_err();
    }
    let other = Cache::open(Config {
        claim_wait: None,
        ..kit::config(bucket)
    });
    let waited = async |key| {
        let begun = tokio::time::Instant::now();
        let compile = async || Ok::<_, ()>(kit::entry("step"));
        other.get_or_compile(key, compile).await.unwrap();
        begun.elapsed()
    };
    let first = waited(&one).await;
    assert!(first >= waystation_cache::config::CLAIM_WAIT, "{first:?}");
    // The same program with other options, and its compile took next to nothing.
    let second = waited(&two).await;
    assert!(second < Duration::from_secs(1), "{second:?}");
    let counts = other.counters();
    assert_eq!((counts.claim_waits, counts.claim_waits_in_vain), (1, 1));
}

/// Anyone who may write to the bucket can say so.
#[tokio::test(start_paused = true)]
async fn an_entry_that_says_it_took_for_ever_makes_nobody_wait_for_ever() {
    let (_, config) = over_memory();
    let bucket = config.location.clone().unwrap();
    let (one, two) = (key_of("step", "o1"), key_of("step", "o2"));
    let provenance = waystation_cache::Provenance {
        compile_micros: u64::MAX,
        ..Default::default()
    };
    let (entry, limits) = (kit::entry("step"), Default::default());
    let forged = waystation_cache::envelope::seal(one.digest(), &entry, &provenance, &limits);
    let path = layout::executable(one.digest(), 0);
    let put = bucket.store().put(&path, forged.unwrap().into());
    put.await.unwrap();
    let claimant = Cache::open(config);
    let compile = std::future::pending::<Result<Entry, ()>>;
    let mut asking = Box::pin(claimant.get_or_compile(&two, compile));
    let begun = tokio::time::timeout(Duration::from_millis(1), &mut asking).await;
    begun.unwrap_err();
    let other = Cache::open(Config {
        claim_wait: None,
        ..kit::config(Some(bucket))
    });
    let compile = async || Ok::<_, ()>(kit::entry("step"));
    let (_, origin) = other.get_or_compile(&one, compile).await.unwrap();
    assert_eq!(origin, Origin::Bucket);
    assert_eq!(other.counters().saved_micros, 3_600_000_000);
    let waiting = tokio::time::timeout(
        Duration::from_secs(700),
        other.get_or_compile(&two, compile),
    );
    let (_, origin) = waiting.await.expect("within ten minutes").unwrap();
    assert_eq!(origin, Origin::Compiled);
    assert_eq!(other.counters().claim_waits_in_vain, 1);
}

fn key_of(program: &str, options: &str) -> waystation_cache::Key {
    waystation_cache::Key::of(&waystation_cache::KeyInputs {
        program: program.as_bytes(),
        environment: &[("XLA_FLAGS".to_owned(), options.to_owned())],
        ..Default::default()
    })
}
