//! How long the bucket keeps what is in it: the flags, and the task that sees to it.

use std::{ffi::OsString, sync::Arc, time::SystemTime};

use async_trait::async_trait;
use clap::ArgAction;
use object_store::path::Path;
use tracing::warn;
use waystation_cache::config::{Renewal, Touch};
use waystation_lifecycle::{
    bucket::{Bucket, Location},
    gcs,
    policy::{self, MAX_RULES, Pace, Policy, Renew, Ttl},
};

use crate::{
    argv::parse_bool,
    error::{Failure, chain},
    sharing::CacheMode,
};

/// Flags of every part that has to do with the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub(crate) struct TtlArgs {
    /// How long the bucket keeps compiled programs that nobody uses, as in 30d or 12h; Cloud Storage rounds up to days
    #[arg(long = "cache_ttl", value_name = "TIME", default_value_t = Ttl::default())]
    pub(crate) cache_ttl: Ttl,
    /// How programs in use live longer: published again before their age is over, or by custom-time, which takes the
    /// permission storage.objects.update
    #[arg(
        long = "cache_ttl_renew",
        value_name = "age|custom-time",
        default_value = "age",
        hide_possible_values = true,
        value_enum
    )]
    pub(crate) cache_ttl_renew: RenewBy,
}

/// Flags of `resource-manager`, `run` and `up`.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub(crate) struct RetentionArgs {
    #[command(flatten)]
    pub(crate) ttl: TtlArgs,
    /// Add a lifecycle rule to the bucket, or remove what is old from a folder; false leaves both alone
    #[arg(long = "enable_gcs_olm", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", hide_default_value = true, value_parser = parse_bool, action = ArgAction::Set)]
    pub(crate) enable_gcs_olm: bool,
    /// Lifecycle rules, everybody's counted, that the bucket may have with that one
    #[arg(long = "max_lifecycle_rules", value_name = "N", default_value_t = MAX_RULES as u16,
          value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) max_lifecycle_rules: u16,
}

/// What a rule goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum RenewBy {
    /// An object's age.
    Age,
    /// Its custom time.
    CustomTime,
}

impl TtlArgs {
    /// As a child process takes them.
    pub(crate) fn arguments(&self) -> [OsString; 2] {
        let renew = match self.cache_ttl_renew {
            RenewBy::Age => "age",
            RenewBy::CustomTime => "custom-time",
        };
        [
            format!("--cache_ttl={}", self.cache_ttl).into(),
            format!("--cache_ttl_renew={renew}").into(),
        ]
    }

    /// A worker's part: entries in use are renewed when half of their time is over, as the bucket counts it.
    pub(crate) fn apply(&self, config: &mut waystation_cache::Config) {
        let cloud = config.location.as_ref().is_some_and(|bucket| {
            matches!(
                bucket.location(),
                Location::Gcs { .. } | Location::S3 { .. }
            )
        });
        config.ttl = if cloud {
            self.cache_ttl.in_days()
        } else {
            self.cache_ttl.duration()
        };
        let google = config.location.as_ref().and_then(Bucket::google);
        config.renewal = match (self.cache_ttl_renew, google) {
            (RenewBy::CustomTime, Some(client)) => {
                Renewal::Touch(Arc::new(CustomTime(client.clone())))
            }
            _ => Renewal::Publish,
        };
    }
}

/// Moves an object's custom time on.
#[derive(Debug)]
struct CustomTime(gcs::Client);

#[async_trait]
impl Touch for CustomTime {
    async fn touch(&self, path: &Path) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(self.0.set_custom_time(path, SystemTime::now()).await?)
    }
}

impl RetentionArgs {
    fn policy(&self) -> Policy {
        Policy {
            ttl: self.ttl.cache_ttl,
            renew: match self.ttl.cache_ttl_renew {
                RenewBy::Age => Renew::Publish,
                RenewBy::CustomTime => Renew::CustomTime,
            },
            max_rules: usize::from(self.max_lifecycle_rules),
        }
    }
}

/// What a resource manager sees to.
#[derive(Debug)]
pub(crate) struct Retention {
    location: Location,
    policy: Policy,
}

impl Retention {
    /// None where there is nothing to see to.
    ///
    /// # Errors
    /// [`Failure::usage`] when the user has to write another location.
    pub(crate) fn new(
        location: Option<&str>,
        mode: CacheMode,
        args: &RetentionArgs,
    ) -> Result<Option<Retention>, Failure> {
        let Some(text) = location else {
            return Ok(None);
        };
        let location = Location::parse(text).map_err(|error| {
            Failure::usage(format!("--gcs_scratch_location: {}", chain(&error)))
        })?;
        let policy = args.policy();
        let wanted = args.enable_gcs_olm && mode == CacheMode::ReadWrite && !location.is_memory();
        Ok(wanted.then_some(Retention { location, policy }))
    }

    /// Sees to it until it is dropped. Nothing waits for it, and what does not work is a warning.
    pub(crate) async fn keep(self) {
        let Retention { location, policy } = self;
        // Opening looks at the local disk, which may hang where it is a network's.
        let opened = tokio::task::spawn_blocking(move || Bucket::open(&location)).await;
        match opened {
            Ok(Ok(bucket)) => policy::keep(bucket, policy, Pace::default()).await,
            Ok(Err(error)) => {
                warn!(
                    error = chain(&error),
                    "the bucket cannot be opened, nobody removes what is old in it"
                );
            }
            Err(error) => warn!(error = chain(&error), "the bucket cannot be opened"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(enable_gcs_olm: bool) -> RetentionArgs {
        RetentionArgs {
            ttl: TtlArgs {
                cache_ttl: "36h".parse().unwrap(),
                cache_ttl_renew: RenewBy::CustomTime,
            },
            enable_gcs_olm,
            max_lifecycle_rules: 7,
        }
    }

    #[test]
    fn a_location_is_seen_to_unless_it_is_memory_or_not_wanted() {
        let new =
            |location, enabled| Retention::new(location, CacheMode::ReadWrite, &args(enabled));
        for mode in [CacheMode::ReadOnly, CacheMode::Off] {
            let left_alone = Retention::new(Some("gs://b/p"), mode, &args(true));
            assert!(left_alone.unwrap().is_none(), "{mode:?}");
        }
        let retention = new(Some("gs://b/p"), true).unwrap().unwrap();
        assert_eq!(retention.policy.max_rules, 7);
        assert_eq!(retention.policy.renew, Renew::CustomTime);
        assert!(new(Some("gs://b/p"), false).unwrap().is_none());
        assert!(new(Some("memory://"), true).unwrap().is_none());
        assert!(new(None, true).unwrap().is_none());
        let failure = new(Some("ftp://x"), false).unwrap_err();
        assert_eq!(failure.status, crate::error::USAGE);
    }

    #[test]
    fn a_worker_renews_in_the_middle_of_the_time_that_its_bucket_counts() {
        const HOUR: u64 = 3600;
        for (location, hours, touches) in [
            (None, 36, false),
            (Some("gs://b/p"), 48, true),
            (Some("s3://b/p"), 48, false),
            (Some("memory://"), 36, false),
        ] {
            let open = |text| Bucket::open(&Location::parse(text).unwrap()).unwrap();
            let mut config = waystation_cache::Config {
                location: location.map(open),
                ..waystation_cache::Config::default()
            };
            args(true).ttl.apply(&mut config);
            assert_eq!(config.ttl.as_secs(), hours * HOUR, "{location:?}");
            let touch = matches!(config.renewal, Renewal::Touch(_));
            assert_eq!(touch, touches, "{location:?}");
        }
    }
}
