//! What is kept and for how long, against the test double of Cloud Storage.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod aging;
mod credentials;
mod federation;
mod keeping;
mod rules;

use waystation_gcs_double::Double;
use waystation_lifecycle::bucket::{Bucket, Location};
use waystation_lifecycle::gcs::Client;

/// A double with a bucket named "bucket".
async fn start() -> Double {
    Double::start(&["bucket"]).await.unwrap()
}

fn open(double: &Double, location: &str) -> Bucket {
    let variables = double
        .variables()
        .into_iter()
        .map(|(a, b)| (a.into(), b.into()));
    Bucket::open_with(&Location::parse(location).unwrap(), variables).unwrap()
}

fn client(double: &Double) -> Client {
    open(double, "gs://bucket/team/a").google().unwrap().clone()
}
