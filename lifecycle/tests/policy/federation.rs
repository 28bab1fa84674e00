//! A workload outside Google: its own token, exchanged for one of Google's that lives for a second.

use std::path::{Path as FilePath, PathBuf};
use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use serde_json::{Value, json};
use waystation_gcs_double::Double;
use waystation_lifecycle::bucket::{Bucket, Location};
use waystation_lifecycle::policy::{Ensured, Policy, ensure};

use super::start;

const WRITES: u32 = 8;

/// A credentials file of the type `external_account`.
fn credentials(folder: &FilePath, double: &Double, source: Value, impersonates: bool) -> PathBuf {
    let mut file = json!({
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": format!("{}/sts/v1/token", double.url()),
        "credential_source": source,
    });
    if impersonates {
        let account = "trainer@example.invalid:generateAccessToken";
        let url = format!(
            "{}/iam/v1/projects/-/serviceAccounts/{account}",
            double.url()
        );
        file["service_account_impersonation_url"] = json!(url);
    }
    let path = folder.join("credentials.json");
    std::fs::write(&path, file.to_string()).unwrap();
    path
}

fn open(double: &Double, variables: &[(&str, &FilePath)]) -> Bucket {
    let url = double.url();
    let mut all = vec![("GOOGLE_BASE_URL".into(), url.into())];
    all.extend(
        variables
            .iter()
            .map(|(name, path)| ((*name).into(), (*path).into())),
    );
    Bucket::open_with(&Location::parse("gs://bucket/p").unwrap(), all).unwrap()
}

async fn write(bucket: &Bucket, number: u32) -> object_store::Result<()> {
    let path = Path::from(format!("x/{number}"));
    let put = bucket.store().put(&path, PutPayload::from_static(b"x"));
    put.await.map(|_| ())
}

fn refused(double: &Double) -> usize {
    let log = double.log();
    log.iter()
        .filter(|logged| logged.status == Some(401))
        .count()
}

#[tokio::test]
async fn tokens_are_exchanged_and_renewed_before_they_expire() {
    for impersonates in [false, true] {
        let double = start().await;
        double.require_tokens(true, Duration::from_secs(1));
        let folder = tempfile::tempdir().unwrap();
        let subject = folder.path().join("subject");
        std::fs::write(&subject, "subject-1\n").unwrap();
        let file = credentials(
            folder.path(),
            &double,
            json!({"file": subject}),
            impersonates,
        );
        let bucket = open(&double, &[("GOOGLE_APPLICATION_CREDENTIALS", &file)]);
        // The bucket's own calls go by the same tokens.
        let ensured = ensure(bucket.google().unwrap(), &Policy::default()).await;
        assert_eq!(ensured.unwrap(), Ensured::Written);
        for number in 0..WRITES {
            write(&bucket, number).await.unwrap();
            // Twice the life of a token, all in all.
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        assert_eq!(double.names("bucket").len(), WRITES as usize);
        assert_eq!(
            refused(&double),
            0,
            "no request came with a token that had expired"
        );
        let least = if impersonates { 4 } else { 2 };
        assert!(
            double.tokens_issued() >= least,
            "{}",
            double.tokens_issued()
        );

        // The workload's own token is read anew; one that is refused is named, with who refuses it.
        std::fs::write(&subject, "somebody else's").unwrap();
        let mut next = WRITES..;
        let failure = loop {
            // As long as the last one is good it is used.
            if let Err(error) = write(&bucket, next.next().unwrap()).await {
                break error;
            }
        };
        let said = format!("{failure:?}");
        assert!(
            said.contains("invalid_grant") && said.contains("/sts/v1/token"),
            "{said}"
        );
        assert_eq!(refused(&double), 0);
        // Those who ask at the same time do not each ask anew, and all is well soon after it has been mended.
        let exchanges = || {
            let log = double.log();
            log.iter()
                .filter(|logged| logged.target.starts_with("/sts/"))
                .count()
        };
        let before = exchanges();
        let many = futures::future::join_all((0..20).map(|n| write(&bucket, 1000 + n))).await;
        assert!(many.iter().all(Result::is_err));
        assert!(
            exchanges() - before <= 2,
            "{} exchanges",
            exchanges() - before
        );
        std::fs::write(&subject, "subject-2").unwrap();
        let mended = async {
            while write(&bucket, next.next().unwrap()).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let mended = tokio::time::timeout(Duration::from_secs(30), mended).await;
        mended.expect("it is well again");
    }
}

#[tokio::test]
async fn the_file_of_gcloud_and_a_json_document_are_found() {
    let double = start().await;
    double.require_tokens(true, Duration::from_secs(60));
    let home = tempfile::tempdir().unwrap();
    let subject = home.path().join("subject.json");
    std::fs::write(&subject, r#"{"jwt": "subject-1"}"#).unwrap();
    let folder = home.path().join(".config/gcloud");
    std::fs::create_dir_all(&folder).unwrap();
    let format = json!({"type": "json", "subject_token_field_name": "jwt"});
    let source = json!({"file": subject, "format": format});
    let file = credentials(&folder, &double, source, false);
    std::fs::rename(file, folder.join("application_default_credentials.json")).unwrap();
    let bucket = open(&double, &[("HOME", home.path())]);
    write(&bucket, 0).await.unwrap();
    assert_eq!(double.tokens_issued(), 1);
}

#[tokio::test]
async fn what_is_not_built_is_the_users_to_change() {
    let double = start().await;
    let folder = tempfile::tempdir().unwrap();
    let file = credentials(folder.path(), &double, json!({"executable": {}}), false);
    let variables = [("GOOGLE_APPLICATION_CREDENTIALS".into(), file.clone().into())];
    let error = Bucket::open_with(&Location::parse("gs://b").unwrap(), variables).unwrap_err();
    assert!(error.is_usage());
    let said = format!("{error:?}");
    assert!(said.contains("neither file nor url"), "{said}");
    assert!(said.contains(&file.display().to_string()), "{said}");
}
