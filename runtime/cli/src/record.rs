//! The flags by which compile requests are recorded: a proxy's, and those of commands that start one.

use std::{ffi::OsString, sync::Arc};

use clap::ArgAction;
use waystation_cache::recording::Recorder;
use waystation_lifecycle::bucket::Bucket;
use waystation_proxy::Recording;

use crate::{argv::parse_bool, error::Failure, location};

/// What is recorded, and where.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub(crate) struct RecordArgs {
    /// Store each compile request here, for `cache warm`: gs://BUCKET/PREFIX, s3://..., or file:///PATH [default: none]
    #[arg(long = "record_programs", value_name = "LOCATION")]
    pub(crate) record_programs: Option<String>,
    /// Only record: answer each compile once it is stored, compile nothing and refuse to execute
    #[arg(long = "record_only", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", hide_default_value = true, value_parser = parse_bool, action = ArgAction::Set,
          requires = "record_programs")]
    pub(crate) record_only: bool,
}

impl RecordArgs {
    /// Opens the location, if one is given.
    ///
    /// # Errors
    /// [`Failure::usage`] for one that cannot be written to.
    async fn open(&self) -> Result<Option<Bucket>, Failure> {
        let Some(text) = &self.record_programs else {
            return Ok(None);
        };
        let bucket = location::for_writing("--record_programs", text).await?;
        Ok(Some(bucket))
    }

    /// A proxy's part.
    ///
    /// # Errors
    /// [`Failure::usage`] for a location that cannot be written to.
    pub(crate) async fn recording(&self) -> Result<Option<Recording>, Failure> {
        let bucket = self.open().await?;
        Ok(bucket.map(|bucket| Recording {
            recorder: Arc::new(Recorder::start(bucket)),
            only: self.record_only,
        }))
    }

    /// The same, with a location that was looked at and that other processes understand.
    ///
    /// # Errors
    /// As [`RecordArgs::recording`].
    pub(crate) async fn checked(&self) -> Result<RecordArgs, Failure> {
        let bucket = self.open().await?;
        Ok(RecordArgs {
            record_programs: bucket.map(|bucket| bucket.location().to_string()),
            record_only: self.record_only,
        })
    }

    /// These flags for a proxy's command line.
    pub(crate) fn flags(&self) -> Vec<OsString> {
        let location = self.record_programs.as_ref();
        let location = location.map(|location| format!("--record_programs={location}").into());
        let only = self.record_only.then(|| "--record_only".into());
        location.into_iter().chain(only).collect()
    }
}
