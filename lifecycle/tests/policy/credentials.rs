//! Tokens of a machine's metadata server, which live for a second.
//!
//! `object_store` finds that server by the environment of the process, so the client is a process of its own.

use std::process::Stdio;
use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use waystation_lifecycle::bucket::{Bucket, Location};
use waystation_lifecycle::policy::{Ensured, Policy, ensure};

use super::start;

const WRITES: u32 = 8;

#[tokio::test]
async fn tokens_are_renewed_before_they_expire() {
    let double = start().await;
    double.require_tokens(true, Duration::from_secs(1));
    let home = tempfile::tempdir().unwrap();
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "credentials::client", "--ignored", "--nocapture"])
        .env("GCE_METADATA_HOST", double.address().to_string())
        .env("GOOGLE_BASE_URL", double.url())
        .env("HOME", home.path())
        .env_remove("GOOGLE_APPLICATION_CREDENTIALS")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = child.await.unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    assert_eq!(double.names("bucket").len(), WRITES as usize);
    assert!(double.lifecycle("bucket").is_some());
    let refused = double
        .log()
        .into_iter()
        .filter(|logged| logged.status == Some(401));
    assert_eq!(
        refused.count(),
        0,
        "no request came with a token that had expired"
    );
    assert!(double.tokens_issued() >= 2, "{}", double.tokens_issued());
}

#[tokio::test]
#[ignore = "the client of the test above"]
async fn client() {
    let bucket = Bucket::open(&Location::parse("gs://bucket/p").unwrap()).unwrap();
    let ensured = ensure(bucket.google().unwrap(), &Policy::default())
        .await
        .unwrap();
    assert_eq!(ensured, Ensured::Written);
    for write in 0..WRITES {
        let path = Path::from(format!("x/{write}"));
        bucket
            .store()
            .put(&path, PutPayload::from_static(b"x"))
            .await
            .unwrap();
        // Twice the life of a token, all in all.
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}
