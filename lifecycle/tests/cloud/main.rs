//! `gs://` and `s3://` as they are opened, against the test double of Cloud Storage, which speaks as much of both as is
//! used.
//!
//! The double proves no more than that our side asks for what the documents say. No emulator that can be had from a
//! package registry serves the XML API of Cloud Storage for writes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use waystation_gcs_double::{Double, Fault, Kind};
use waystation_lifecycle::bucket::{Bucket, Error, Location, PROBE_DEADLINE, conformance};

const SCHEMES: [&str; 2] = ["gs", "s3"];

/// A double with a bucket named "bucket", whose lists come in pages of two.
async fn start() -> Double {
    let double = Double::start(&["bucket"]).await.unwrap();
    double.page(2);
    double
}

/// Opens a location of the double, as the command line would with its variables set.
fn open(double: &Double, location: &str) -> Bucket {
    let mut variables = double.variables();
    variables.push((
        "GOOGLE_CLOUD_PROJECT".to_owned(),
        "not the store's".to_owned(),
    ));
    let location = Location::parse(location).unwrap();
    let variables = variables.into_iter().map(|(a, b)| (a.into(), b.into()));
    Bucket::open_with(&location, variables).unwrap()
}

#[tokio::test]
async fn both_clouds_conform_with_and_without_a_prefix() {
    let double = start().await;
    // The schemes write the same names one after the other, on a quick machine more than once a second.
    double.pace("bucket", false);
    for scheme in SCHEMES {
        for prefix in ["", "/team/a"] {
            let bucket = open(&double, &format!("{scheme}://bucket{prefix}"));
            bucket.probe(PROBE_DEADLINE).await.unwrap();
            conformance::run(&bucket).await;
            assert!(double.names("bucket").is_empty());
        }
    }
}

/// The variable of Google's own client libraries, in both spellings.
#[tokio::test]
async fn an_emulator_is_found_as_google_s_libraries_find_it() {
    let double = start().await;
    double.pace("bucket", false);
    let location = Location::parse("gs://bucket/a").unwrap();
    let nowhere = "http://127.0.0.1:1";
    for host in [
        double.url(),
        double.url() + "/",
        double.address().to_string(),
    ] {
        let variables = [("STORAGE_EMULATOR_HOST".into(), host.into())];
        let bucket = Bucket::open_with(&location, variables).unwrap();
        bucket.probe(PROBE_DEADLINE).await.unwrap();
        conformance::run(&bucket).await;
        assert!(bucket.google().is_some());
    }
    let both = [
        ("STORAGE_EMULATOR_HOST", nowhere.to_owned()),
        ("GOOGLE_BASE_URL", double.url()),
        ("GOOGLE_BEARER_TOKEN", "token".to_owned()),
    ];
    let variables = both.map(|(name, value)| (name.into(), value.into()));
    let bucket = Bucket::open_with(&location, variables).unwrap();
    bucket.probe(PROBE_DEADLINE).await.unwrap();
}

#[tokio::test]
async fn objects_lie_below_the_prefix_and_other_prefixes_do_not_see_them() {
    let double = start().await;
    for scheme in SCHEMES {
        let one = open(&double, &format!("{scheme}://bucket/{scheme}/one"));
        let two = open(&double, &format!("{scheme}://bucket/{scheme}/two"));
        let name = Path::from("exe/v1/x");
        one.store()
            .put(&name, PutPayload::from_static(b"x"))
            .await
            .unwrap();
        assert!(
            double
                .names("bucket")
                .contains(&format!("{scheme}/one/exe/v1/x"))
        );
        assert!(one.store().get(&name).await.is_ok());
        assert!(two.store().get(&name).await.is_err());
    }
}

#[tokio::test]
async fn a_storm_of_refusals_is_sat_out() {
    let double = start().await;
    // Only the refusals that are ordered.
    double.pace("bucket", false);
    for scheme in SCHEMES {
        let bucket = open(&double, &format!("{scheme}://bucket"));
        let name = Path::from("x");
        for status in [429, 503] {
            double.fault(Fault::of(Kind::Status(status)).times(2));
            let put = bucket.store().put(&name, PutPayload::from_static(b"x"));
            put.await.unwrap();
            double.fault(Fault::of(Kind::Status(status)).times(2));
            bucket.store().get(&name).await.unwrap();
        }
    }
}

#[tokio::test]
async fn what_is_wrong_with_a_bucket_is_told_apart() {
    let double = start().await;
    for scheme in SCHEMES {
        let gone = open(&double, &format!("{scheme}://elsewhere/p"));
        let error = gone.probe(PROBE_DEADLINE).await.unwrap_err();
        assert!(matches!(error, Error::Missing { .. }), "{scheme}: {error}");

        let bucket = open(&double, &format!("{scheme}://bucket/p"));
        double.fault(Fault::of(Kind::Status(403)));
        let error = bucket.probe(PROBE_DEADLINE).await.unwrap_err();
        assert!(matches!(error, Error::Denied { .. }), "{scheme}: {error}");
        // Refusals for longer than anybody waits.
        double.clear_faults();
        double.fault(Fault::of(Kind::Status(503)));
        let error = bucket.probe(Duration::from_millis(300)).await.unwrap_err();
        assert!(matches!(error, Error::NoAnswer { .. }), "{scheme}: {error}");
        double.clear_faults();
        bucket.probe(PROBE_DEADLINE).await.unwrap();
    }
}
