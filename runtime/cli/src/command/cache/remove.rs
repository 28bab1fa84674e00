//! `cache rm` and `cache gc`: what removes entries. Both need the right to delete, which workers do without.

use std::time::{Duration, SystemTime};

use clap::ArgAction;
use futures::StreamExt as _;
use object_store::{ObjectStore as _, ObjectStoreExt as _, path::Path};
use serde_json::json;
use waystation_cache::survey::Listed;
use waystation_lifecycle::bucket::{
    Bucket, Location, is_denied,
    layout::{self, Digest},
};

use super::{
    Place,
    show::{Gaps, age, key_prefix, one_key, size},
};
use crate::{argv::parse_bool, duration::parse_duration, error::Failure, output};

/// Objects removed at the same time.
const REMOVALS: usize = 16;

/// Remove one program's entries
#[derive(Debug, clap::Args)]
pub(crate) struct RemoveArgs {
    #[command(flatten)]
    place: Place,
    /// The key, or as many of its first digits as tell it from others
    #[arg(value_name = "KEY")]
    key: String,
}

/// Remove old entries, where no rule of the bucket does
#[derive(Debug, clap::Args)]
pub(crate) struct CollectArgs {
    #[command(flatten)]
    place: Place,
    /// Entries written that long ago or longer, as in 12h, 30d; 0s is all
    #[arg(long = "older_than", value_name = "AGE", value_parser = parse_age)]
    older_than: Duration,
    /// Only say what would go
    #[arg(long = "dry_run", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    dry_run: bool,
}

pub(super) async fn remove(args: &RemoveArgs) -> Result<u8, Failure> {
    let prefix = key_prefix(&args.key)?;
    if args.key.is_empty() {
        return Err(Failure::usage("name the key, or its first digits"));
    }
    let bucket = args.place.open().await?;
    let objects = one_key(&bucket, &prefix).await?;
    let mut bytes = 0;
    for object in &objects {
        delete(&bucket, &object.meta.location).await?;
        bytes += object.meta.size;
    }
    if let Some(object) = objects.first() {
        delete_claims(&bucket, object.key.digest()).await?;
    }
    let key = objects
        .first()
        .map(|object| object.key.to_string())
        .unwrap_or_default();
    output::print(&if args.place.json {
        format!(
            "{:#}",
            json!({"key": key, "removed": objects.len(), "bytes": bytes})
        )
    } else {
        format!("{key}: {} removed, {}", objects.len(), size(bytes))
    })?;
    Ok(0)
}

pub(super) async fn collect(args: &CollectArgs) -> Result<u8, Failure> {
    let bucket = args.place.open().await?;
    let (now, oldest) = (SystemTime::now(), args.older_than.as_secs());
    let (mut removed, mut bytes, mut kept) = (0u64, 0u64, 0u64);
    let all = key_prefix("")?;
    let gaps = Gaps::default();
    let removals = gaps
        .pass_over(&bucket, &all)
        .map(|listed| {
            let bucket = &bucket;
            async move {
                let object = match listed {
                    // Whose they are is not known.
                    Listed::Foreign(_) => return Ok(None),
                    Listed::Entry(object) => object,
                };
                let goes = age(&object, now) >= oldest;
                if goes && !args.dry_run {
                    delete(bucket, &object.meta.location).await?;
                }
                Ok::<_, Failure>(Some((goes, object.meta.size)))
            }
        })
        .buffer_unordered(REMOVALS);
    let mut removals = std::pin::pin!(removals);
    while let Some(one) = removals.next().await {
        match one? {
            Some((true, size)) => {
                removed += 1;
                bytes += size;
            }
            Some((false, _)) => kept += 1,
            None => {}
        }
    }
    output::print(&if args.place.json {
        let report =
            json!({"removed": removed, "bytes": bytes, "kept": kept, "dry_run": args.dry_run});
        format!("{report:#}")
    } else {
        let would = if args.dry_run { "would be " } else { "" };
        format!("{removed} {would}removed, {}; {kept} kept", size(bytes))
    })?;
    gaps.end(0)
}

/// Removes the claims on a key: who compiles it next would wait for an entry that came of them and is gone.
async fn delete_claims(bucket: &Bucket, key: &Digest) -> Result<(), Failure> {
    let mut claims = bucket.store().list(Some(&layout::claims_folder(key)));
    while let Some(claim) = claims.next().await {
        let claim =
            claim.map_err(|error| Failure::because("the claims on it cannot be listed", &error))?;
        if layout::claim_of(&claim.location).is_some() {
            delete(bucket, &claim.location).await?;
        }
    }
    Ok(())
}

async fn delete(bucket: &Bucket, path: &Path) -> Result<(), Failure> {
    use object_store::Error;
    match bucket.store().delete(path).await {
        // Somebody was quicker.
        Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
        Err(error) if is_denied(&error) => {
            let right = match bucket.location() {
                Location::S3 { .. } => "s3:DeleteObject",
                Location::Gcs { .. } => "storage.objects.delete",
                _ => "the right to delete",
            };
            Err(Failure::usage(format!(
                "{} does not let this identity delete: grant it {right}, or leave old entries to a lifecycle rule",
                bucket.location()
            )))
        }
        Err(error) => Err(Failure::because("an entry cannot be removed", &error)),
    }
}

/// A duration with its unit: what is removed does not come back.
fn parse_age(text: &str) -> Result<Duration, String> {
    if text.trim().ends_with(|c: char| c.is_ascii_digit()) {
        return Err(format!("{text:?} has no unit: write 30d or 12h"));
    }
    parse_duration(text)
}
