//! What a location takes, done for as long as a process runs.

use std::time::Duration;

use tracing::{debug, info, warn};

use super::{Ensured, Policy, Renew, Swept, ensure, rule, sweep};
use crate::bucket::{Bucket, Location};
use crate::gcs::Client;

/// How often things are done. Take [`Pace::default`] and change what differs.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// After a failure; doubled with each further one.
    pub retry: Duration,
    /// The longest of these, and the pause after a refusal that only people can mend.
    pub longest_retry: Duration,
    /// Between two looks at a rule that is there: somebody may take it away.
    pub recheck: Duration,
    /// Between two sweeps.
    pub sweep: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        let hour = Duration::from_secs(3600);
        Pace {
            retry: hour / 60,
            longest_retry: hour,
            recheck: hour * 24,
            sweep: hour,
        }
    }
}

/// Sees to the retention of a location until it is dropped; returns where there is nothing to see to. Warns once of each
/// trouble, tries again by itself, and says when the trouble is over.
pub async fn keep(bucket: Bucket, policy: Policy, pace: Pace) {
    match (bucket.location(), bucket.google()) {
        (Location::Gcs { .. }, Some(client)) => keep_rule(&bucket, client, &policy, &pace).await,
        (Location::File(_) | Location::Memory, _) => keep_swept(&bucket, &policy, &pace).await,
        (Location::S3 { prefix, .. }, _) => warn!(
            location = %bucket.location(),
            rules = rule::for_s3(prefix, &policy).join(","),
            "lifecycle rules of S3 are not supported here: add these rules to the bucket yourself, or old entries stay"
        ),
        (Location::Gcs { .. }, None) => {}
    }
}

/// What was said last, so that it is said once.
#[derive(Default)]
struct Said {
    trouble: Option<String>,
    failures: u32,
}

impl Said {
    /// Whether this trouble is news.
    fn is_news(&mut self, trouble: &str) -> bool {
        self.failures = self.failures.saturating_add(1);
        if self.trouble.as_deref() == Some(trouble) {
            return false;
        }
        self.trouble = Some(trouble.to_owned());
        true
    }

    fn pause(&self, pace: &Pace) -> Duration {
        let doublings = self.failures.saturating_sub(1).min(20);
        pace.retry
            .saturating_mul(1 << doublings)
            .min(pace.longest_retry)
    }

    /// Whether there was trouble.
    fn is_over(&mut self) -> bool {
        std::mem::take(self).trouble.is_some()
    }
}

async fn keep_rule(bucket: &Bucket, client: &Client, policy: &Policy, pace: &Pace) {
    let location = bucket.location();
    let rules = || rule::for_gcs(client.prefix(), policy).join(",");
    if policy.ttl.is_rounded() {
        let (ttl, days) = (policy.ttl, policy.ttl.days());
        info!(%ttl, days, "Cloud Storage counts in days, so the TTL is rounded up");
    }
    let mut said = Said::default();
    loop {
        let pause = match ensure(client, policy).await {
            Ok(done @ (Ensured::Present | Ensured::Written)) => {
                if said.is_over() || done == Ensured::Written {
                    info!(%location, rules = rules(), "the bucket has the lifecycle rule of this location");
                }
                pace.recheck
            }
            Ok(Ensured::AtLimit { found, limit }) => {
                if said.is_news("limit") {
                    warn!(
                        %location, found, limit,
                        "the bucket has as many lifecycle rules as it may, so none was added and old entries stay: share \
                         one location among jobs, or raise --max_lifecycle_rules"
                    );
                }
                pace.longest_retry
            }
            Ok(Ensured::NotPermitted { permission }) => {
                if said.is_news(permission) {
                    warn!(
                        %location, permission, rules = rules(),
                        "no lifecycle rule can be added, so old entries stay: grant the permission, or add these rules \
                         yourself and start with --enable_gcs_olm=false"
                    );
                }
                pace.longest_retry
            }
            Err(error) => {
                // A trouble is the same whatever request met it first.
                if said.is_news("failed") {
                    warn!(
                        %location, error = chain(&error),
                        "the bucket's lifecycle rule cannot be seen to now, it is tried again"
                    );
                }
                said.pause(pace)
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn keep_swept(bucket: &Bucket, policy: &Policy, pace: &Pace) {
    let location = bucket.location();
    if policy.renew == Renew::CustomTime {
        warn!(%location, "only Cloud Storage has custom times: entries that are used are published again instead");
    }
    let mut said = Said::default();
    loop {
        let pause = match sweep(bucket, policy.ttl).await {
            Ok(Swept::Here { removed, whole }) => {
                if said.is_over() || removed > 0 {
                    info!(%location, removed, whole, "old entries were removed");
                }
                pace.sweep
            }
            Ok(Swept::Elsewhere) => {
                debug!(%location, "somebody else sweeps");
                said.is_over();
                pace.sweep
            }
            Err(error) => {
                if said.is_news("failed") {
                    warn!(
                        %location, error = chain(&error),
                        "old entries cannot be removed now, it is tried again"
                    );
                }
                said.pause(pace)
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// An error and what it comes from, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
