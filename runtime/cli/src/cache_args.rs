//! The compile cache's flags: a worker's, and those of commands that start workers.

use std::{ffi::OsString, path::PathBuf, sync::Arc};

use clap::ArgAction;
use waystation_cache::{
    Config,
    config::Disk,
    history::{File, History},
};
use waystation_lifecycle::bucket::Bucket;

use crate::{argv::parse_bool, history};

/// How workers keep compiled programs, beside where.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub(crate) struct CacheArgs {
    /// Keep XLA's text of each program in its cache entry, for program text and --xla_dump_to on hits
    #[arg(long = "cache_keep_hlo_text", num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub(crate) cache_keep_hlo_text: bool,
    /// File in which to note what the keys of compiled programs are made of, for `cache why-miss`
    /// [default: waystation-history in the user's folder for caches]
    #[arg(long = "cache_history", value_name = "FILE|none")]
    pub(crate) cache_history: Option<PathBuf>,
}

impl CacheArgs {
    /// A worker's cache.
    pub(crate) fn config(&self, location: Option<Bucket>, disk: Option<Disk>) -> Config {
        let history = history::file(self.cache_history.clone());
        Config {
            location,
            disk,
            keep_hlo_text: self.cache_keep_hlo_text,
            history: history.map(|file| Arc::new(File::new(file)) as Arc<dyn History>),
            ..Config::default()
        }
    }

    /// The same flags for a worker.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let keep = format!("--cache_keep_hlo_text={}", self.cache_keep_hlo_text);
        let history = self.cache_history.as_ref().map(|file| {
            let mut flag = OsString::from("--cache_history=");
            flag.push(file);
            flag
        });
        std::iter::once(keep.into()).chain(history).collect()
    }
}
