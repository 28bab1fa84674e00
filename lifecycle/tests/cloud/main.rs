//! `gs://` and `s3://` as they are opened, against a server of our own that speaks as much of both as is used.
//!
//! The server is a double, and proves no more than that our side asks for what the documents say. No emulator that can
//! be had from a package registry serves the XML API of Cloud Storage for writes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod double;

use std::time::Duration;

use double::Double;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use waystation_lifecycle::bucket::{Bucket, Error, Location, PROBE_DEADLINE, conformance};

const SCHEMES: [&str; 2] = ["gs", "s3"];

/// Opens a location of the double, as the command line would with these variables set.
fn open(double: &Double, location: &str) -> Bucket {
    let endpoint = format!("http://{}", double.address);
    let variables = [
        ("GOOGLE_BASE_URL", endpoint.as_str()),
        ("GOOGLE_BEARER_TOKEN", "token"),
        ("AWS_ENDPOINT", endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("GOOGLE_CLOUD_PROJECT", "not the store's"),
    ];
    let location = Location::parse(location).unwrap();
    Bucket::open_with(&location, variables.map(|(a, b)| (a.into(), b.into()))).unwrap()
}

#[tokio::test]
async fn both_clouds_conform_with_and_without_a_prefix() {
    let double = Double::start().await;
    for scheme in SCHEMES {
        for prefix in ["", "/team/a"] {
            let bucket = open(&double, &format!("{scheme}://bucket{prefix}"));
            bucket.probe(PROBE_DEADLINE).await.unwrap();
            conformance::run(&bucket).await;
            assert!(double.names().is_empty());
        }
    }
}

#[tokio::test]
async fn objects_lie_below_the_prefix_and_other_prefixes_do_not_see_them() {
    let double = Double::start().await;
    for scheme in SCHEMES {
        let one = open(&double, &format!("{scheme}://bucket/{scheme}/one"));
        let two = open(&double, &format!("{scheme}://bucket/{scheme}/two"));
        let name = Path::from("exe/v1/x");
        one.store()
            .put(&name, PutPayload::from_static(b"x"))
            .await
            .unwrap();
        assert!(double.names().contains(&format!("{scheme}/one/exe/v1/x")));
        assert!(one.store().get(&name).await.is_ok());
        assert!(two.store().get(&name).await.is_err());
    }
}

#[tokio::test]
async fn a_storm_of_refusals_is_sat_out() {
    let double = Double::start().await;
    for scheme in SCHEMES {
        let bucket = open(&double, &format!("{scheme}://bucket"));
        let name = Path::from("x");
        for status in [429, 503] {
            double.fail_next(2, status);
            let put = bucket.store().put(&name, PutPayload::from_static(b"x"));
            put.await.unwrap();
            double.fail_next(2, status);
            bucket.store().get(&name).await.unwrap();
        }
    }
}

#[tokio::test]
async fn what_is_wrong_with_a_bucket_is_told_apart() {
    let double = Double::start().await;
    for scheme in SCHEMES {
        let gone = open(&double, &format!("{scheme}://elsewhere/p"));
        let error = gone.probe(PROBE_DEADLINE).await.unwrap_err();
        assert!(matches!(error, Error::Missing { .. }), "{scheme}: {error}");

        let bucket = open(&double, &format!("{scheme}://bucket/p"));
        double.fail_next(usize::MAX, 403);
        let error = bucket.probe(PROBE_DEADLINE).await.unwrap_err();
        assert!(matches!(error, Error::Denied { .. }), "{scheme}: {error}");
        // Refusals for longer than anybody waits.
        double.fail_next(usize::MAX, 503);
        let error = bucket.probe(Duration::from_millis(300)).await.unwrap_err();
        assert!(matches!(error, Error::NoAnswer { .. }), "{scheme}: {error}");
        double.fail_next(0, 503);
        bucket.probe(PROBE_DEADLINE).await.unwrap();
    }
}
