//! A bucket that does not always answer well.

use std::time::Duration;

use waystation_checkpoint::IndexDomain;
use waystation_gcs_double::{Double, Fault, Kind};
use waystation_lifecycle::bucket::{Bucket, Location, Retries};

use crate::support::{Array, boxes, engine, to_restore, to_save};

const DIMS: [i64; 2] = [64, 4];

fn open(double: &Double, retries: &Retries) -> Bucket {
    let variables = double.variables().into_iter();
    let variables = variables.map(|(a, b)| (a.into(), b.into()));
    let location = Location::parse("gs://bucket/step").unwrap();
    Bucket::open_own_with(&location, variables, retries).unwrap()
}

#[tokio::test]
async fn what_fails_for_a_while_is_sent_again_and_counted() {
    let (double, retries) = (
        Double::start(&["bucket"]).await.unwrap(),
        Retries::default(),
    );
    let bucket = open(&double, &retries);
    let array = Array::new(&DIMS);
    let (engine, whole) = (engine(), IndexDomain::whole(&DIMS));
    for fault in [
        Fault::of(Kind::Status(429)).on("PUT").times(3),
        Fault::of(Kind::Status(503)).on("PUT").times(2),
    ] {
        double.fault(fault);
    }
    let save = to_save("here", "w", &DIMS, &[4, 4]);
    let pieces = array.pieces(&boxes(&DIMS, &[4, 4]));
    engine.save_to(&bucket, &save, pieces, true).await.unwrap();
    assert_eq!(retries.count(), 5);
    assert_eq!(double.names("bucket").len(), 17);
    for fault in [
        Fault::of(Kind::Status(500)).on("GET").times(3),
        Fault::of(Kind::CutBody).on("GET").times(2),
    ] {
        double.fault(fault);
    }
    let asked = to_restore("here", "w", &DIMS);
    let found = engine
        .restore_from(&bucket, &asked, std::slice::from_ref(&whole))
        .await;
    assert_eq!(found.unwrap()[0], array.part(&whole));
    assert!(retries.count() >= 8, "{}", retries.count());
}

#[tokio::test]
async fn a_read_without_an_answer_is_asked_for_again() {
    let (double, retries) = (
        Double::start(&["bucket"]).await.unwrap(),
        Retries::default(),
    );
    let bucket = open(&double, &retries);
    let array = Array::new(&DIMS);
    let (engine, whole) = (engine(), IndexDomain::whole(&DIMS));
    let save = to_save("here", "w", &DIMS, &[4, 4]);
    let pieces = array.pieces(&boxes(&DIMS, &[4, 4]));
    engine.save_to(&bucket, &save, pieces, true).await.unwrap();
    let asked = to_restore("here", "w", &DIMS);
    let restore = || engine.restore_from(&bucket, &asked, std::slice::from_ref(&whole));
    // It is known then what is usual.
    restore().await.unwrap();
    double.fault(Fault::of(Kind::Silence).on("GET").at("F7%2E0").times(1));
    double.fault(Fault::of(Kind::Silence).on("GET").at("F9%2E0").times(1));
    // The HTTP client itself would wait for two minutes.
    let found = tokio::time::timeout(Duration::from_secs(60), restore()).await;
    assert_eq!(found.unwrap().unwrap()[0], array.part(&whole));
    assert_eq!(engine.totals().hedged_reads, 2);
}
