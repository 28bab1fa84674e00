//! The cache on the test double of Cloud Storage, whose lifecycle rules act.

use std::time::Duration;

use waystation_cache::{Cache, Config, Origin};
use waystation_gcs_double::{Double, Fault, Kind};
use waystation_lifecycle::bucket::{Bucket, Location};
use waystation_lifecycle::policy::{self, Ensured, Policy};

use crate::kit::{self, Compiler, LONG, ask};

const DAY: Duration = Duration::from_secs(24 * 3600);

async fn start() -> (Double, Bucket) {
    let double = Double::start(&["bucket"]).await.unwrap();
    // Days are seconds here.
    double.pace("bucket", false);
    let bucket = open(&double, "gs://bucket/team");
    (double, bucket)
}

fn open(double: &Double, location: &str) -> Bucket {
    let variables = double.variables().into_iter();
    let variables = variables.map(|(a, b)| (a.into(), b.into()));
    Bucket::open_with(&Location::parse(location).unwrap(), variables).unwrap()
}

/// A process of its own, with nothing in its memory.
async fn uses(bucket: &Bucket, program: &str) -> Origin {
    let cache = Cache::open(kit::config(Some(bucket.clone())));
    let origin = ask(&cache, &Compiler::default(), program).await;
    assert_eq!(cache.flush(LONG).await, 0);
    origin
}

#[tokio::test]
async fn under_the_rule_that_we_set_what_is_used_lives_and_the_rest_goes() {
    let (double, bucket) = start().await;
    let ensured = policy::ensure(bucket.google().unwrap(), &Policy::default()).await;
    assert_eq!(ensured.unwrap(), Ensured::Written);
    for program in ["hot", "cold"] {
        assert_eq!(uses(&bucket, program).await, Origin::Compiled);
    }
    for day in (0..90).step_by(3) {
        assert_eq!(uses(&bucket, "hot").await, Origin::Bucket, "day {day}");
        double.age(DAY * 3);
    }
    let left = double.names("bucket");
    assert!(
        left.len() <= 4,
        "the hot one's slots, and no claim: {left:?}"
    );
    assert_eq!(uses(&bucket, "cold").await, Origin::Compiled);
}

#[tokio::test]
async fn rights_to_read_and_create_are_enough_and_a_damaged_entry_is_repaired_with_them() {
    let (double, bucket) = start().await;
    let rights = [
        "storage.objects.get",
        "storage.objects.list",
        "storage.objects.create",
    ];
    double.grant("bucket", None, Some(&rights));
    assert_eq!(uses(&bucket, "a").await, Origin::Compiled);
    assert_eq!(uses(&bucket, "a").await, Origin::Bucket);
    let entries = || {
        let names = double.names("bucket").into_iter();
        names
            .filter(|name| name.starts_with("team/exe/"))
            .collect::<Vec<_>>()
    };
    for damaged in 1..4 {
        let newest = entries().pop().unwrap();
        double.put("bucket", &newest, "rubbish");
        assert_eq!(uses(&bucket, "a").await, Origin::Compiled);
        assert_eq!(uses(&bucket, "a").await, Origin::Bucket);
        assert_eq!(entries().len(), damaged + 1);
    }
    let denied = double
        .log()
        .into_iter()
        .filter(|logged| logged.status == Some(403));
    assert!(denied.count() <= 3, "one attempt to remove for a process");
}

#[tokio::test]
async fn who_may_not_delete_on_s3_asks_once() {
    let (double, _) = start().await;
    let bucket = open(&double, "s3://bucket/team");
    let rights = [
        "storage.objects.get",
        "storage.objects.list",
        "storage.objects.create",
    ];
    double.grant("bucket", None, Some(&rights));
    let programs = ["a", "b", "c"];
    for program in programs {
        assert_eq!(uses(&bucket, program).await, Origin::Compiled);
    }
    for name in double.names("bucket") {
        if name.starts_with("team/exe/") {
            double.put("bucket", &name, "rubbish");
        }
    }
    let cache = Cache::open(Config {
        remove_bad: true,
        ..kit::config(Some(bucket.clone()))
    });
    for program in programs {
        let compiler = Compiler::default();
        assert_eq!(ask(&cache, &compiler, program).await, Origin::Compiled);
        assert_eq!(cache.flush(LONG).await, 0);
    }
    // S3 says so in the text of an answer that is a success.
    let asked = double
        .log()
        .into_iter()
        .filter(|logged| logged.method == "POST" && logged.target.ends_with("?delete"));
    assert_eq!(asked.count(), 1);
    assert_eq!(cache.counters().bad_removed, 0);
}

#[tokio::test]
async fn what_is_cut_or_refused_on_the_way_is_a_miss_and_no_more() {
    let (double, bucket) = start().await;
    assert_eq!(uses(&bucket, "a").await, Origin::Compiled);
    for kind in [Kind::Status(403), Kind::Status(401), Kind::Status(404)] {
        double.fault(Fault::of(kind));
        let cache = Cache::open(kit::config(Some(bucket.clone())));
        assert_eq!(
            ask(&cache, &Compiler::default(), "a").await,
            Origin::Compiled,
            "{kind:?}"
        );
        double.clear_faults();
        assert_eq!(uses(&bucket, "a").await, Origin::Bucket, "after {kind:?}");
    }
    // What was cut is asked for again from where it broke off.
    double.fault(Fault::of(Kind::CutBody).on("GET").at("exe").times(1));
    assert_eq!(uses(&bucket, "a").await, Origin::Bucket);
}

#[tokio::test]
async fn an_object_that_is_not_given_out_is_a_bad_one_and_the_bucket_is_well() {
    let programs = ["a", "b", "c", "d", "e"];
    // Not allowed for one object; encrypted with somebody's key; archived.
    for status in [403, 400, 409] {
        let (double, bucket) = start().await;
        for program in programs {
            assert_eq!(uses(&bucket, program).await, Origin::Compiled);
        }
        for program in &programs[..3] {
            let place = format!("{}%2F0", kit::key(program));
            double.fault(Fault::of(Kind::Status(status)).on("GET").at(&place));
            let place = format!("{}/0", kit::key(program));
            double.fault(Fault::of(Kind::Status(status)).on("GET").at(&place));
        }
        let cache = Cache::open(kit::config(Some(bucket.clone())));
        for program in programs {
            ask(&cache, &Compiler::default(), program).await;
        }
        assert_eq!(cache.shutdown(LONG).await, 0);
        let counts = cache.counters();
        let bad = (counts.bad_entries, counts.bad_unreadable);
        assert_eq!(bad, (3, 3), "{status}: {counts:?}");
        let reads = (counts.bucket_read_errors, counts.bucket_reads_skipped);
        assert_eq!(reads, (0, 0), "{status}");
        let hits = (counts.bucket_hits, counts.bucket_writes);
        assert_eq!(hits, (2, 3), "{status}: published beside");
        for program in programs {
            assert_eq!(uses(&bucket, program).await, Origin::Bucket, "{status}");
        }
    }
}

#[tokio::test]
async fn where_no_object_may_be_read_it_is_the_bucket_that_refuses() {
    let (double, bucket) = start().await;
    let programs = ["a", "b", "c", "d"];
    for program in &programs[..2] {
        assert_eq!(uses(&bucket, program).await, Origin::Compiled);
    }
    let before = double.names("bucket").len();
    double.grant("bucket", None, Some(&["storage.objects.list"]));
    let mut config = kit::config(Some(bucket.clone()));
    (config.backoff, config.backoff_max) = (LONG, LONG);
    let cache = Cache::open(config);
    for program in programs {
        let origin = ask(&cache, &Compiler::default(), program).await;
        assert_eq!(origin, Origin::Compiled);
    }
    let counts = cache.counters();
    let reads = (counts.bucket_read_errors, counts.bucket_reads_skipped);
    assert_eq!((reads, counts.bad_entries), ((2, 2), 0), "{counts:?}");
    assert_eq!(double.names("bucket").len(), before);
}
