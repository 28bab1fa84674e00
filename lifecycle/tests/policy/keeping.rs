//! The task that a resource manager runs: one warning for each trouble, and recovery by itself.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;
use waystation_gcs_double::{Double, Fault, Kind};
use waystation_lifecycle::bucket::{Bucket, Location, layout};
use waystation_lifecycle::policy::{Pace, Policy, keep, rule};

use super::{open, start};

/// Log lines of this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Log;

    fn make_writer(&'a self) -> Log {
        self.clone()
    }
}

impl Log {
    fn start() -> (Log, tracing::subscriber::DefaultGuard) {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(log.clone())
            .with_ansi(false)
            .with_max_level(tracing::Level::INFO)
            .finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    fn warnings(&self) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines()
            .filter(|line| line.contains("WARN"))
            .map(str::to_owned)
            .collect()
    }
}

/// As a day of hours, in milliseconds.
fn fast() -> Pace {
    let short = Duration::from_millis(20);
    Pace {
        retry: short,
        longest_retry: short,
        recheck: short,
        sweep: short,
    }
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..3000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}

/// Runs the task through a trouble and out of it. Returns the warnings.
async fn through(
    double: &Double,
    begin: impl FnOnce(&Double),
    end: impl FnOnce(&Double),
) -> Vec<String> {
    let (log, _guard) = Log::start();
    begin(double);
    let bucket = open(double, "gs://bucket/team/a");
    let asked = double.log().len();
    let task = keep(bucket, Policy::default(), fast());
    let test = async {
        // So often that a warning for each attempt would be seen.
        until("asked again and again", || double.log().len() > asked + 30).await;
        assert_eq!(log.warnings().len(), 1, "{:#?}", log.warnings());
        end(double);
        until("the rule is there", || {
            let lifecycle = double.lifecycle("bucket").unwrap_or_default();
            lifecycle.contains(&rule::for_gcs("team/a", &Policy::default())[0])
        })
        .await;
    };
    tokio::select! {
        () = task => panic!("the task has ended"),
        () = test => {}
    }
    log.warnings()
}

#[tokio::test]
async fn a_right_that_is_missing_is_one_warning_and_granting_it_mends_it() {
    let double = start().await;
    let take = |double: &Double| double.grant("bucket", None, Some(&["storage.buckets.get"]));
    let warnings = through(&double, take, |double| double.grant("bucket", None, None)).await;
    assert!(
        warnings[0].contains("storage.buckets.update"),
        "{warnings:?}"
    );
    assert!(
        warnings[0].contains("matchesPrefix"),
        "the rule to set by hand: {warnings:?}"
    );
}

#[tokio::test]
async fn a_full_bucket_is_one_warning_that_says_what_to_do() {
    let double = start().await;
    let theirs = r#"{"action":{"type":"Delete"},"condition":{"age":7}}"#;
    let fill = |double: &Double| {
        let full = format!(r#"{{"rule":[{}]}}"#, vec![theirs; 50].join(","));
        double.seed_lifecycle("bucket", &full).unwrap();
    };
    let free = |double: &Double| double.seed_lifecycle("bucket", "{}").unwrap();
    let warnings = through(&double, fill, free).await;
    assert!(warnings[0].contains("share one location"), "{warnings:?}");
}

#[tokio::test]
async fn a_bucket_that_is_missing_is_one_warning_until_it_is_made() {
    let double = start().await;
    let remove = |double: &Double| double.remove_bucket("bucket");
    let warnings = through(&double, remove, |double| double.create_bucket("bucket")).await;
    assert!(warnings[0].contains("404"), "{warnings:?}");
}

#[tokio::test]
async fn credentials_that_are_no_good_are_one_warning() {
    let double = start().await;
    let expire = |double: &Double| double.fault(Fault::of(Kind::Status(401)));
    let warnings = through(&double, expire, Double::clear_faults).await;
    assert!(warnings[0].contains("401"), "{warnings:?}");
}

#[tokio::test]
async fn a_folder_is_swept_and_a_bucket_of_s3_is_the_users() {
    let (log, _guard) = Log::start();
    let temp = tempfile::tempdir().unwrap();
    let entry = temp.path().join(layout::executable(&[7; 32], 0).as_ref());
    std::fs::create_dir_all(entry.parent().unwrap()).unwrap();
    let file = std::fs::File::create(&entry).unwrap();
    let old = std::time::SystemTime::now() - Duration::from_secs(31 * 24 * 3600);
    file.set_modified(old).unwrap();
    let bucket = Bucket::open(&Location::File(temp.path().to_owned())).unwrap();
    tokio::select! {
        () = keep(bucket, Policy::default(), fast()) => panic!("the task has ended"),
        () = until("the old entry is gone", || !entry.exists()) => {}
    }
    assert!(log.warnings().is_empty());
    let double = start().await;
    // Ends at once: there is nothing to see to.
    keep(open(&double, "s3://bucket/p"), Policy::default(), fast()).await;
    let warnings = log.warnings();
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].contains("not supported here"), "{warnings:?}");
    assert!(
        warnings[0].contains(r#"\"Filter\":{\"Prefix\":\"p/exe/v1/\"}"#)
            || warnings[0].contains(r#""Filter":{"Prefix":"p/exe/v1/"}"#),
        "{warnings:?}"
    );
    assert!(double.log().is_empty());
}
