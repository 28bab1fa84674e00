//! Entries that are used do not die of their age.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use object_store::path::Path as ObjectPath;
use waystation_cache::config::{Renewal, Touch};
use waystation_cache::{Cache, Config, Origin};

use crate::kit::{self, Compiler, LONG, ask};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Makes files older by so many days.
fn age(path: &Path, days: u32) {
    for file in kit::files(path) {
        let file = std::fs::File::options().write(true).open(file).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.set_modified(modified - days * DAY).unwrap();
    }
}

/// What a lifecycle rule of thirty days does.
fn sweep(path: &Path) {
    for file in kit::files(path) {
        let modified = std::fs::metadata(&file).unwrap().modified().unwrap();
        if SystemTime::now()
            .duration_since(modified)
            .unwrap_or_default()
            >= 30 * DAY
        {
            std::fs::remove_file(file).unwrap();
        }
    }
}

async fn uses(cache: &Cache, program: &str) -> Origin {
    let origin = ask(cache, &Compiler::default(), program).await;
    assert_eq!(cache.flush(LONG).await, 0);
    origin
}

fn slots(path: &Path) -> Vec<PathBuf> {
    let name = |file: PathBuf| file.file_name().unwrap().into();
    kit::files(path).into_iter().map(name).collect()
}

#[tokio::test]
async fn an_old_entry_that_is_used_is_published_again() {
    let temp = tempfile::tempdir().unwrap();
    uses(&kit::cache(temp.path()), "a").await;
    age(temp.path(), 14);
    let young = kit::cache(temp.path());
    assert_eq!(uses(&young, "a").await, Origin::Bucket);
    assert_eq!(young.counters().renewals, 0);
    age(temp.path(), 2);
    let caches = [(); 3].map(|()| kit::cache(temp.path()));
    let mut renewals = 0;
    for cache in &caches {
        assert_eq!(uses(cache, "a").await, Origin::Bucket);
        renewals += cache.counters().renewals;
    }
    assert_eq!(renewals, 1, "one for all");
    assert_eq!(slots(temp.path()), [Path::new("0"), Path::new("1")]);
    let objects: Vec<_> = kit::files(temp.path())
        .into_iter()
        .map(|file| std::fs::read(file).unwrap())
        .collect();
    assert_eq!(objects[0], objects[1], "the same object");
    assert_eq!(caches[0].counters().bucket_writes, 0);
}

#[tokio::test]
async fn a_hot_entry_outlives_its_age_many_times_and_a_cold_one_does_not() {
    let temp = tempfile::tempdir().unwrap();
    for program in ["hot", "cold"] {
        uses(&kit::cache(temp.path()), program).await;
    }
    for day in (0..90).step_by(3) {
        // A process a time, with no memory of the ones before.
        assert_eq!(
            uses(&kit::cache(temp.path()), "hot").await,
            Origin::Bucket,
            "day {day}"
        );
        age(temp.path(), 3);
        sweep(temp.path());
        assert!(kit::files(temp.path()).len() <= 4);
    }
    assert_eq!(
        uses(&kit::cache(temp.path()), "cold").await,
        Origin::Compiled
    );
}

#[tokio::test]
async fn once_a_day_and_not_by_who_only_reads_or_is_told_not_to() {
    let temp = tempfile::tempdir().unwrap();
    uses(&kit::cache(temp.path()), "a").await;
    age(temp.path(), 20);
    for config in [
        Config {
            mode: waystation_cache::Mode::ReadOnly,
            ..kit::config(Some(kit::folder(temp.path())))
        },
        Config {
            renewal: Renewal::Never,
            ..kit::config(Some(kit::folder(temp.path())))
        },
    ] {
        let cache = Cache::open(config);
        assert_eq!(uses(&cache, "a").await, Origin::Bucket);
        assert_eq!(slots(temp.path()), [Path::new("0")]);
    }
    // Memory keeps nothing, so that each request is a look into the bucket.
    let cache = Cache::open(Config {
        memory_bytes: 0,
        ..kit::config(Some(kit::folder(temp.path())))
    });
    for _ in 0..3 {
        assert_eq!(uses(&cache, "a").await, Origin::Bucket);
        age(temp.path(), 20);
    }
    assert_eq!(cache.counters().renewals, 1);
    assert_eq!(slots(temp.path()), [Path::new("0"), Path::new("1")]);
}

#[derive(Debug, Default)]
struct Touched(Mutex<Vec<String>>);

#[async_trait::async_trait]
impl Touch for Touched {
    async fn touch(
        &self,
        path: &ObjectPath,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.0.lock().unwrap().push(path.to_string());
        Ok(())
    }
}

#[tokio::test]
async fn where_the_store_goes_by_use_the_entry_is_marked() {
    let temp = tempfile::tempdir().unwrap();
    uses(&kit::cache(temp.path()), "a").await;
    age(temp.path(), 20);
    let touched = Arc::new(Touched::default());
    let cache = Cache::open(Config {
        renewal: Renewal::Touch(Arc::clone(&touched) as _),
        ..kit::config(Some(kit::folder(temp.path())))
    });
    assert_eq!(uses(&cache, "a").await, Origin::Bucket);
    let path = waystation_lifecycle::bucket::layout::executable(kit::key("a").digest(), 0);
    assert_eq!(*touched.0.lock().unwrap(), [path.to_string()]);
    assert_eq!(slots(temp.path()), [Path::new("0")]);
    assert_eq!(cache.counters().renewals, 1);
}
