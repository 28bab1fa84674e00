//! Ninety days of the double's clock under our rules, which act up to a day late.

use std::time::{Duration, SystemTime};

use object_store::path::Path;
use object_store::{PutMode, PutOptions, PutPayload};
use waystation_gcs_double::Double;
use waystation_lifecycle::bucket::{Bucket, layout};
use waystation_lifecycle::policy::{Policy, Renew, ensure};

use super::{open, start};

const DAY: Duration = Duration::from_secs(24 * 3600);

const HOT: layout::Digest = [1; 32];
const COLD: layout::Digest = [2; 32];

async fn begin(policy: &Policy) -> (Double, Bucket) {
    let double = start().await;
    // What happens within a second here would take days.
    double.pace("bucket", false);
    let bucket = open(&double, "gs://bucket/team/a");
    ensure(bucket.google().unwrap(), policy).await.unwrap();
    for key in [&HOT, &COLD] {
        put(&bucket, key, 0).await.unwrap();
    }
    double.put("bucket", "team/a/programs/v1/x", "recorded");
    double.put("bucket", "somebody/else", "theirs");
    (double, bucket)
}

async fn put(bucket: &Bucket, key: &layout::Digest, slot: u8) -> object_store::Result<()> {
    let create = PutOptions::from(PutMode::Create);
    let payload = PutPayload::from_static(b"entry");
    bucket
        .store()
        .put_opts(&layout::executable(key, slot), payload, create)
        .await
        .map(|_| ())
}

fn slots(double: &Double, key: &layout::Digest) -> Vec<String> {
    let folder = format!("team/a/{}/", layout::executable_folder(key));
    double
        .names("bucket")
        .into_iter()
        .filter(|name| name.starts_with(&folder))
        .collect()
}

fn others_stay(double: &Double) {
    for name in ["team/a/programs/v1/x", "somebody/else"] {
        assert!(
            double.names("bucket").iter().any(|known| known == name),
            "{name}"
        );
    }
}

/// As the cache renews: what is older than half its TTL is published in the next free slot, when it is used.
#[tokio::test]
async fn what_is_published_again_lives_and_what_is_not_goes() {
    let policy = Policy {
        ttl: "7d".parse().unwrap(),
        ..Policy::default()
    };
    let (double, bucket) = begin(&policy).await;
    let mut published = 0;
    for day in 1..=90_u64 {
        double.advance(DAY);
        assert!(!slots(&double, &HOT).is_empty(), "day {day}");
        match day {
            0..7 => assert_eq!(slots(&double, &COLD).len(), 1, "day {day}"),
            // A day late at most.
            7 => {}
            _ => assert!(slots(&double, &COLD).is_empty(), "day {day}"),
        }
        if day - published >= 4 {
            let mut slot = 0;
            while put(&bucket, &HOT, slot).await.is_err() {
                slot += 1;
                assert!(slot < layout::SLOTS, "day {day}: no slot is free");
            }
            published = day;
        }
    }
    others_stay(&double);
}

#[tokio::test]
async fn what_gets_a_new_custom_time_lives_to_four_times_its_ttl() {
    let policy = Policy {
        ttl: "30d".parse().unwrap(),
        renew: Renew::CustomTime,
        max_rules: 50,
    };
    let (double, bucket) = begin(&policy).await;
    let client = bucket.google().unwrap();
    let begun = SystemTime::now();
    let mark = async |key, day: u32| {
        let path: Path = layout::executable(key, 0);
        client
            .set_custom_time(&path, begun + DAY * day)
            .await
            .unwrap();
    };
    mark(&HOT, 0).await;
    mark(&COLD, 0).await;
    for day in 1..=119_u32 {
        double.advance(DAY);
        assert_eq!(slots(&double, &HOT).len(), 1, "day {day}");
        if day % 15 == 0 {
            mark(&HOT, day).await;
        }
        if day > 31 {
            assert!(slots(&double, &COLD).is_empty(), "day {day}");
        }
    }
    double.advance(DAY * 2);
    assert!(
        slots(&double, &HOT).is_empty(),
        "the second rule is the end of all"
    );
    others_stay(&double);
}
