//! Our rule in a bucket that is others' too.

use std::time::{Duration, SystemTime};

use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use waystation_gcs_double::{Fault, Kind};
use waystation_lifecycle::policy::{Ensured, Policy, RIGHTS, Renew, ensure, rights, rule};

use super::{client, open, start};

/// Rules of others, in the spellings that programs and people use, one with a condition that nobody knows yet.
fn foreign(count: usize) -> Vec<String> {
    let rule = |number: usize| {
        match number % 4 {
        0 => format!(r#"{{"action":{{"type":"Delete"}},"condition":{{"age":{number},"matchesPrefix":["t{number}/"]}}}}"#),
        1 => format!(r#"{{ "condition" : {{ "age" : {number} , "isLive":false}},"action":{{"type" : "Delete"}} }}"#),
        2 => r#"{"action":{"storageClass":"NEARLINE","type":"SetStorageClass"},"condition":{"age":1e2,"numNewerVersions":3}}"#.to_owned(),
        _ => format!(r#"{{"action":{{"type":"Delete"}},"condition":{{"daysOfTomorrow":[{number}.50]}},"note":"\u00fc"}}"#),
    }
    };
    (0..count).map(rule).collect()
}

fn lifecycle(rules: &[String]) -> String {
    format!(r#"{{"rule":[{}]}}"#, rules.join(","))
}

#[tokio::test]
async fn an_empty_bucket_gets_the_rule_once() {
    let double = start().await;
    let (client, policy) = (client(&double), Policy::default());
    assert_eq!(ensure(&client, &policy).await.unwrap(), Ensured::Written);
    // The whole request, against the fields that Cloud Storage documents.
    let snapshot = r#"{"lifecycle":{"rule":[{"action":{"type":"Delete"},"condition":{"age":30,"matchesPrefix":["team/a/exe/v1/","team/a/claim/v1/"]}}]}}"#;
    assert_eq!(double.patches(), [snapshot]);
    assert_eq!(ensure(&client, &policy).await.unwrap(), Ensured::Present);
    assert_eq!(
        double.patches().len(),
        1,
        "read first, and write only when it is missing"
    );
    let patch = double
        .log()
        .into_iter()
        .find(|logged| logged.method == "PATCH")
        .unwrap();
    assert!(
        patch.target.contains("ifMetagenerationMatch=1"),
        "{}",
        patch.target
    );
}

#[tokio::test]
async fn forty_nine_rules_of_others_stay_byte_for_byte() {
    let double = start().await;
    let theirs = foreign(49);
    double
        .seed_lifecycle("bucket", &lifecycle(&theirs))
        .unwrap();
    let policy = Policy::default();
    assert_eq!(
        ensure(&client(&double), &policy).await.unwrap(),
        Ensured::Written
    );
    let mut all = theirs;
    all.extend(rule::for_gcs("team/a", &policy));
    assert_eq!(double.lifecycle("bucket").unwrap(), lifecycle(&all));
}

#[tokio::test]
async fn with_fifty_rules_nothing_is_written() {
    let double = start().await;
    let theirs = lifecycle(&foreign(50));
    double.seed_lifecycle("bucket", &theirs).unwrap();
    let ensured = ensure(&client(&double), &Policy::default()).await.unwrap();
    assert_eq!(
        ensured,
        Ensured::AtLimit {
            found: 50,
            limit: 50
        }
    );
    assert_eq!(double.lifecycle("bucket").unwrap(), theirs);
    assert!(double.patches().is_empty());
    let more = Policy {
        max_rules: 51,
        ..Policy::default()
    };
    assert_eq!(
        ensure(&client(&double), &more).await.unwrap(),
        Ensured::Written
    );
}

#[tokio::test]
async fn without_a_right_it_is_named() {
    let double = start().await;
    for (granted, missing) in [
        (&["storage.buckets.get"][..], "storage.buckets.update"),
        (&["storage.buckets.update"], "storage.buckets.get"),
        (&[], "storage.buckets.get"),
    ] {
        double.grant("bucket", None, Some(granted));
        let ensured = ensure(&client(&double), &Policy::default()).await.unwrap();
        assert_eq!(
            ensured,
            Ensured::NotPermitted {
                permission: missing
            }
        );
        assert_eq!(double.lifecycle("bucket"), None);
    }
    double.grant("bucket", None, None);
    assert_eq!(
        ensure(&client(&double), &Policy::default()).await.unwrap(),
        Ensured::Written
    );
}

#[tokio::test]
async fn fifty_managers_at_once_write_one_rule() {
    let double = start().await;
    let theirs = foreign(20);
    double
        .seed_lifecycle("bucket", &lifecycle(&theirs))
        .unwrap();
    let policy = Policy::default();
    // Each with a client of its own, as processes have.
    let clients: Vec<_> = (0..50).map(|_| client(&double)).collect();
    let all = clients.iter().map(|client| ensure(client, &policy));
    let all = futures::future::try_join_all(all).await.unwrap();
    let written = all
        .iter()
        .filter(|ensured| **ensured == Ensured::Written)
        .count();
    assert_eq!(written, 1);
    assert!(
        all.iter()
            .all(|ensured| matches!(ensured, Ensured::Written | Ensured::Present))
    );
    let mut wanted = theirs;
    wanted.extend(rule::for_gcs("team/a", &policy));
    assert_eq!(double.lifecycle("bucket").unwrap(), lifecycle(&wanted));
}

#[tokio::test]
async fn ten_locations_of_one_bucket_that_start_together_all_get_their_rule() {
    let double = start().await;
    // Real buckets take one update a second; here it is the lost updates that count.
    double.pace("bucket", false);
    let policy = Policy::default();
    let all = (0..10).map(|team| {
        let bucket = open(&double, &format!("gs://bucket/team{team}"));
        async move { ensure(bucket.google().unwrap(), &policy).await }
    });
    let all = futures::future::try_join_all(all).await.unwrap();
    assert!(all.iter().all(|ensured| *ensured == Ensured::Written));
    let lifecycle = double.lifecycle("bucket").unwrap();
    for team in 0..10 {
        assert!(lifecycle.contains(&rule::for_gcs(&format!("team{team}"), &policy)[0]));
    }
}

#[tokio::test]
async fn failures_are_sat_out_and_lasting_ones_told() {
    let double = start().await;
    let client = client(&double);
    // The reading twice, then the writing twice.
    double.fault(Fault::of(Kind::Status(503)).times(1));
    double.fault(Fault::of(Kind::CutBody).on("GET").times(1));
    double.fault(Fault::of(Kind::Status(429)).on("PATCH").times(1));
    double.fault(Fault::of(Kind::LoseAnswer).on("PATCH").times(1));
    // A write whose answer is lost has happened, and is found at the next look.
    let ensured = ensure(&client, &Policy::default()).await.unwrap();
    assert!(matches!(ensured, Ensured::Written | Ensured::Present));
    assert!(double.lifecycle("bucket").is_some());
    double.clear_faults();
    double.fault(Fault::of(Kind::Status(404)));
    let error = ensure(&client, &Policy::default()).await.unwrap_err();
    assert_eq!(error.status(), Some(404));
    double.clear_faults();
    double.fault(Fault::of(Kind::Status(401)));
    let error = ensure(&client, &Policy::default()).await.unwrap_err();
    assert_eq!(error.status(), Some(401));
}

#[tokio::test]
async fn another_ttl_takes_the_place_of_the_old_one() {
    let double = start().await;
    double.pace("bucket", false);
    let theirs = foreign(3);
    double
        .seed_lifecycle("bucket", &lifecycle(&theirs))
        .unwrap();
    let custom = Policy {
        renew: Renew::CustomTime,
        ttl: "7d".parse().unwrap(),
        max_rules: 50,
    };
    for policy in [
        Policy::default(),
        custom,
        Policy {
            ttl: "36h".parse().unwrap(),
            ..custom
        },
    ] {
        assert_eq!(
            ensure(&client(&double), &policy).await.unwrap(),
            Ensured::Written
        );
        let mut wanted = theirs.clone();
        wanted.extend(rule::for_gcs("team/a", &policy));
        assert_eq!(double.lifecycle("bucket").unwrap(), lifecycle(&wanted));
    }
}

#[tokio::test]
async fn rights_are_told_one_by_one() {
    let double = start().await;
    let client = client(&double);
    assert!(rights(&client).await.unwrap().iter().all(|(_, has)| *has));
    for right in RIGHTS {
        let others: Vec<_> = RIGHTS
            .iter()
            .map(|other| other.name)
            .filter(|name| *name != right.name)
            .collect();
        double.grant("bucket", Some("token"), Some(&others));
        for (found, has) in rights(&client).await.unwrap() {
            assert_eq!(has, found != right, "{}", found.name);
        }
    }
    double.grant("bucket", Some("token"), Some(&[]));
    assert!(rights(&client).await.unwrap().iter().all(|(_, has)| !has));
    double.remove_bucket("bucket");
    assert_eq!(rights(&client).await.unwrap_err().status(), Some(404));
}

#[tokio::test]
async fn a_custom_time_is_set_below_the_prefix_and_takes_its_right() {
    let double = start().await;
    double.pace("bucket", false);
    let bucket = open(&double, "gs://bucket/team/a");
    let client = bucket.google().unwrap();
    let path = Path::from("exe/v1/x");
    let gone = client
        .set_custom_time(&path, SystemTime::now())
        .await
        .unwrap_err();
    assert_eq!(gone.status(), Some(404));
    bucket
        .store()
        .put(&path, PutPayload::from_static(b"x"))
        .await
        .unwrap();
    let now = SystemTime::now();
    client.set_custom_time(&path, now).await.unwrap();
    client
        .set_custom_time(&path, now + Duration::from_secs(60))
        .await
        .unwrap();
    let back = client.set_custom_time(&path, now).await.unwrap_err();
    assert_eq!(back.status(), Some(400));
    double.grant("bucket", None, Some(&["storage.objects.get"]));
    let denied = client
        .set_custom_time(&path, now + Duration::from_secs(90))
        .await
        .unwrap_err();
    assert_eq!(denied.status(), Some(403));
    assert!(!denied.is_transient());
}
