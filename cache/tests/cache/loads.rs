//! Entries that end the process that loads them.

use std::path::Path;
use std::process::{Command, Stdio};

use waystation_cache::{Cache, Config, Origin};

use crate::kit::{self, Compiler, LONG, ask};

/// Tells the child where to work. Without it the child does nothing, so it may be run by hand.
const FOLDER: &str = "WAYSTATION_TEST_FOLDER";

fn cache(folder: &Path) -> Cache {
    Cache::open(Config {
        state_folder: Some(folder.join("state")),
        ..kit::config(Some(kit::folder(&folder.join("bucket"))))
    })
}

/// Gets the entry of "a" and dies in the middle of loading it, as when the plugin breaks off.
#[test]
#[ignore = "the other half of an_entry_that_ends_its_process_is_passed_over_by_the_next"]
fn dies_in_mid_load() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return;
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let cache = cache(folder.as_ref());
        let key = kit::key("a");
        let compile = async || Ok::<_, ()>(kit::entry("a"));
        let (entry, _) = cache.get_or_compile(&key, compile).await.unwrap();
        cache.flush(LONG).await;
        let _loading = cache.loading(&key, &entry).unwrap();
        std::process::abort();
    });
}

fn die(folder: &Path) {
    use std::os::unix::process::ExitStatusExt as _;
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "loads::dies_in_mid_load", "--ignored"])
        .env(FOLDER, folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(6), "{status}");
}

#[tokio::test]
async fn an_entry_that_ends_its_process_is_passed_over_by_the_next() {
    let temp = tempfile::tempdir().unwrap();
    let bucket = temp.path().join("bucket");
    let compiler = Compiler::default();
    let writer = kit::cache(&bucket);
    ask(&writer, &compiler, "a").await;
    assert_eq!(writer.shutdown(LONG).await, 0);
    die(temp.path());

    let next = cache(temp.path());
    assert_eq!(ask(&next, &compiler, "a").await, Origin::Compiled);
    let (entry, _) = next.get(&kit::key("a")).await.unwrap();
    drop(next.loading(&kit::key("a"), &entry).unwrap());
    assert_eq!(next.shutdown(LONG).await, 0);
    let counts = next.counters();
    assert_eq!((counts.bad_refused, counts.bucket_writes), (1, 1));
    assert_eq!(kit::files(&bucket).len(), 2, "published beside the first");

    // It is remembered, and so is what to load in its place.
    let third = cache(temp.path());
    assert_eq!(ask(&third, &compiler, "a").await, Origin::Bucket);
    assert_eq!(third.counters().bad_refused, 1);
    // Who has not died of it loads it.
    let other = kit::cache(&bucket);
    assert_eq!(ask(&other, &compiler, "a").await, Origin::Bucket);
    assert_eq!(other.counters().bad_entries, 0);
}

#[tokio::test]
async fn a_program_that_ends_the_process_however_it_came_is_given_up() {
    let temp = tempfile::tempdir().unwrap();
    // Compiled and loaded; then found in the bucket and loaded.
    die(temp.path());
    die(temp.path());
    let next = cache(temp.path());
    let compiler = Compiler::default();
    assert_eq!(ask(&next, &compiler, "a").await, Origin::Compiled);
    let (entry, _) = next.get(&kit::key("a")).await.unwrap();
    let fatal = next.loading(&kit::key("a"), &entry).unwrap_err();
    assert_eq!(fatal.times, 2);
    assert_eq!(next.admit(&kit::key("a")), Err(fatal));
    assert!(next.loading(&kit::key("b"), &kit::entry("b")).is_ok());
}
