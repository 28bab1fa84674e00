//! `--gcs_scratch_location`, looked at before anything starts.

use tracing::warn;
use waystation_lifecycle::bucket::{Bucket, GATE_INTERVAL, Location, PROBE_DEADLINE};

use crate::error::{Failure, chain};

/// Opens the location and asks whether it is there. None: no location, or `memory://`. A bucket that is missing or does
/// not answer is one warning; it is asked again from time to time, and used once it is well.
///
/// # Errors
/// [`Failure::usage`] when the user has to write another location.
pub(crate) async fn open(location: Option<&str>) -> Result<Option<Bucket>, Failure> {
    Ok(open_and_ask(location).await?.map(|opened| match opened {
        Opened::Well(bucket) => bucket,
        Opened::Unwell(bucket) => bucket.when_well(GATE_INTERVAL),
    }))
}

/// A bucket as it was found.
pub(crate) enum Opened {
    Well(Bucket),
    /// This was said.
    Unwell(Bucket),
}

/// [`open`], for who has to know how the bucket was found.
///
/// # Errors
/// As [`open`].
pub(crate) async fn open_and_ask(location: Option<&str>) -> Result<Option<Opened>, Failure> {
    let Some(bucket) = make(location).await? else {
        return Ok(None);
    };
    match bucket.probe(PROBE_DEADLINE).await {
        Ok(()) => Ok(Some(Opened::Well(bucket))),
        Err(error) if error.is_usage() => Err(usage(error)),
        Err(error) => {
            warn!(
                error = chain(&error),
                "the bucket cannot be used now, compiled programs are kept in memory only until it can"
            );
            Ok(Some(Opened::Unwell(bucket)))
        }
    }
}

/// [`open`] for a bucket that somebody has found unwell just now, and said so.
///
/// # Errors
/// As [`open`].
pub(crate) async fn open_unwell(location: Option<&str>) -> Result<Option<Bucket>, Failure> {
    let bucket = make(location).await?;
    Ok(bucket.map(|bucket| bucket.when_well(GATE_INTERVAL)))
}

fn usage(error: waystation_lifecycle::bucket::Error) -> Failure {
    Failure::usage(format!("--gcs_scratch_location: {}", chain(&error)))
}

async fn make(location: Option<&str>) -> Result<Option<Bucket>, Failure> {
    let Some(text) = location else {
        return Ok(None);
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
    Ok(Some(bucket))
}

/// Opens a location that a command cannot do without.
///
/// # Errors
/// [`Failure::usage`] when the user has to write another location, or make the folder or bucket; else what ails the bucket.
pub(crate) async fn required(flag: &str, text: &str) -> Result<Bucket, Failure> {
    if let Ok(Location::File(path)) = Location::parse(text)
        && !path.is_dir()
    {
        // Opening would make it.
        return Err(Failure::usage(format!(
            "{flag}: there is no folder {}",
            path.display()
        )));
    }
    to_fill(flag, text).await
}

/// [`required`], but that a folder is made where it is missing.
///
/// # Errors
/// As [`required`].
pub(crate) async fn to_fill(flag: &str, text: &str) -> Result<Bucket, Failure> {
    let usage = |error: waystation_lifecycle::bucket::Error| {
        Failure::usage(format!("{flag}: {}", chain(&error)))
    };
    let location = Location::parse(text).map_err(usage)?;
    if location.is_memory() {
        return Err(Failure::usage(format!(
            "{flag}: memory:// is another process's memory; give a bucket or a folder"
        )));
    }
    let bucket = opened(flag, location).await?;
    match bucket.probe(PROBE_DEADLINE).await {
        Ok(()) => Ok(bucket),
        Err(error) if error.is_usage() => Err(usage(error)),
        Err(error) => Err(Failure::internal(format!("{flag}: {}", chain(&error)))),
    }
}

/// Opens a location that is only written to, and that nothing depends on. Asks nothing of the bucket.
///
/// # Errors
/// [`Failure::usage`] when the user has to write another location.
pub(crate) async fn for_writing(flag: &str, text: &str) -> Result<Bucket, Failure> {
    let location = Location::parse(text)
        .map_err(|error| Failure::usage(format!("{flag}: {}", chain(&error))))?;
    if location.is_memory() {
        return Err(Failure::usage(format!(
            "{flag}: nobody could read memory://; give a bucket or a folder"
        )));
    }
    opened(flag, location).await
}

async fn opened(flag: &str, location: Location) -> Result<Bucket, Failure> {
    // Opening looks at the local disk, which may hang where it is a network's.
    let opened = tokio::task::spawn_blocking(move || Bucket::open(&location)).await;
    opened
        .map_err(|error| Failure::because("the location cannot be opened", &error))?
        .map_err(|error| Failure::usage(format!("{flag}: {}", chain(&error))))
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
        let filled = folder.path().join("c/d");
        let text = format!("file://{}", filled.display());
        let failure = required("--flag", &text).await.unwrap_err();
        assert!(failure.message.contains("no folder"), "{failure}");
        to_fill("--flag", &text).await.unwrap();
        required("--flag", &text).await.unwrap();
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
