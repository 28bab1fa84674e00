//! `--gcs_scratch_location`, looked at before anything starts.

use tracing::warn;
use waystation_lifecycle::bucket::{Bucket, Location, PROBE_DEADLINE};

use crate::error::{Failure, chain};

/// Opens the location and asks whether it is there. None: no location, `memory://`, or a bucket that is missing or does
/// not answer, which is one warning.
///
/// # Errors
/// [`Failure::usage`] when the user has to write another location.
pub(crate) async fn open(location: Option<&str>) -> Result<Option<Bucket>, Failure> {
    let Some(text) = location else {
        return Ok(None);
    };
    let usage = |error: waystation_lifecycle::bucket::Error| {
        Failure::usage(format!("--gcs_scratch_location: {}", chain(&error)))
    };
    let location = Location::parse(text).map_err(usage)?;
    if location.is_memory() {
        return Ok(None);
    }
    // Opening looks at the local disk, which may hang where it is a network's.
    let opened = tokio::task::spawn_blocking(move || Bucket::open(&location)).await;
    let bucket = opened
        .map_err(|error| Failure::because("the location cannot be opened", &error))?
        .map_err(usage)?;
    match bucket.probe(PROBE_DEADLINE).await {
        Ok(()) => Ok(Some(bucket)),
        Err(error) if error.is_usage() => Err(usage(error)),
        Err(error) => {
            warn!(
                error = chain(&error),
                "the bucket cannot be used, compiled programs are kept in memory only"
            );
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::USAGE;

    #[tokio::test]
    async fn bad_locations_are_the_users_to_mend() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let below_a_file = format!("file://{}/x", file.display());
        for text in ["ftp://x/y", "gs://", "relative/path", "", &below_a_file] {
            let failure = open(Some(text)).await.expect_err(text);
            assert_eq!(failure.status, USAGE, "{text}");
            assert!(!failure.message.contains('\n'), "{failure}");
            assert!(
                failure.message.starts_with("--gcs_scratch_location: "),
                "{failure}"
            );
        }
    }

    #[tokio::test]
    async fn memory_is_no_location_and_a_folder_is_made() {
        assert!(open(None).await.unwrap().is_none());
        assert!(open(Some("memory://")).await.unwrap().is_none());
        let folder = tempfile::tempdir().unwrap();
        let new = folder.path().join("a/b");
        let text = format!("file://{}", new.display());
        assert_eq!(
            open(Some(&text))
                .await
                .unwrap()
                .unwrap()
                .location()
                .to_string(),
            text
        );
        assert!(new.is_dir());
    }
}
