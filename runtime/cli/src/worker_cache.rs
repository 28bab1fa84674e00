//! All that a worker is told of its compile cache, but for how long entries live: a worker's flags, and those of commands
//! that start workers.

use std::{ffi::OsString, path::PathBuf};

use waystation_cache::{Config, config::Disk};
use waystation_lifecycle::bucket::Bucket;

use crate::{
    cache_args::CacheArgs,
    disk_cache::{self, DiskArgs},
    error::Failure,
    sharing::SharingArgs,
};

/// Where compiled programs are kept, and how.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct WorkerCacheArgs {
    /// Bucket for compiled programs: gs://BUCKET/PREFIX, s3://..., file:///PATH or memory:// [default: memory://]
    #[arg(long = "gcs_scratch_location", value_name = "LOCATION")]
    pub(crate) gcs_scratch_location: Option<String>,
    #[command(flatten)]
    pub(crate) disk: DiskArgs,
    #[command(flatten)]
    pub(crate) cache: CacheArgs,
    #[command(flatten)]
    pub(crate) sharing: SharingArgs,
}

impl WorkerCacheArgs {
    /// A worker's cache, over the bucket and the folder that are meant. `state_dir`: where notes are kept when no flag
    /// says so.
    ///
    /// # Errors
    /// [`Failure::usage`] for a file without a signing key.
    pub(crate) fn config(
        &self,
        bucket: Option<Bucket>,
        disk: Option<Disk>,
        state_dir: Option<PathBuf>,
    ) -> Result<Config, Failure> {
        let config = self.cache.config(bucket, disk);
        self.sharing.apply(config, state_dir)
    }

    /// These flags for a worker's command line, `location` and `disk` as they have been understood here. `state_dir` as in
    /// [`WorkerCacheArgs::config`].
    pub(crate) fn flags(
        &self,
        location: Option<&str>,
        disk: Option<&Disk>,
        state_dir: PathBuf,
    ) -> Vec<OsString> {
        let location =
            location.map(|location| OsString::from(format!("--gcs_scratch_location={location}")));
        let mut flags: Vec<_> = location.into_iter().collect();
        flags.extend(disk.into_iter().flat_map(disk_cache::flags));
        flags.extend(self.cache.arguments());
        flags.extend(self.sharing.flags(state_dir));
        flags
    }
}
