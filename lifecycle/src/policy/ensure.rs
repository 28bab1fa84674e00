//! Our rule in a bucket of Cloud Storage.
//!
//! Read, and write only where our rule is missing or another: with the bucket's metageneration as the condition, because
//! an update replaces the whole list. Who loses such a race (412) waits a little, each for another while, and reads
//! again; with fifty managers that start together one writes, and the others find the rule there.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use super::{Policy, rule};
use crate::gcs::{CallError, Client};

/// Attempts before it is given up; the pauses between them are less than a minute in all.
const ATTEMPTS: u32 = 12;

/// First pause, and the longest.
const PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How it ended. None of these is a reason to fail anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ensured {
    /// Our rule was there.
    Present,
    /// Our rule is there now.
    Written,
    /// The bucket has as many rules as it may: share one location among jobs, or raise the limit.
    AtLimit {
        /// Rules that are there.
        found: usize,
        /// As many as there may be.
        limit: usize,
    },
    /// This identity lacks a right.
    NotPermitted {
        /// Its name.
        permission: &'static str,
    },
}

/// Sees to it that our rule is in the bucket.
///
/// # Errors
/// The last failure, where the bucket is missing or does not answer as it should for all attempts.
pub async fn ensure(client: &Client, policy: &Policy) -> Result<Ensured, CallError> {
    let mut attempt = 0;
    loop {
        let failure = match once(client, policy).await {
            Ok(ensured) => return Ok(ensured),
            Err(failure) => failure,
        };
        attempt += 1;
        // 412: somebody else changed the bucket between our reading and our writing.
        let again = failure.status() == Some(412) || failure.is_transient();
        if !again || attempt == ATTEMPTS {
            return Err(failure);
        }
        tokio::time::sleep(jitter(attempt)).await;
    }
}

/// Our rules as they stand in the bucket, whatever their time to live. Takes `storage.buckets.get`.
///
/// # Errors
/// Where the call does not succeed.
pub async fn present(client: &Client) -> Result<Vec<String>, CallError> {
    let bucket = client.metadata().await?;
    rule::present(bucket.lifecycle.as_deref(), client.prefix())
        .map_err(|error| CallError::Unreadable(error.to_string()))
}

async fn once(client: &Client, policy: &Policy) -> Result<Ensured, CallError> {
    let bucket = match client.metadata().await {
        Ok(bucket) => bucket,
        Err(failure) => return denied(failure, "storage.buckets.get"),
    };
    let change = rule::change(bucket.lifecycle.as_deref(), client.prefix(), policy);
    match change.map_err(|error| CallError::Unreadable(error.to_string()))? {
        rule::Change::None => Ok(Ensured::Present),
        rule::Change::NoRoom { found } => Ok(Ensured::AtLimit {
            found,
            limit: policy.max_rules,
        }),
        rule::Change::To(lifecycle) => {
            match client
                .set_lifecycle(&lifecycle, &bucket.metageneration)
                .await
            {
                Ok(()) => Ok(Ensured::Written),
                Err(failure) => denied(failure, "storage.buckets.update"),
            }
        }
    }
}

fn denied(failure: CallError, permission: &'static str) -> Result<Ensured, CallError> {
    match failure.status() {
        Some(403) => Ok(Ensured::NotPermitted { permission }),
        _ => Err(failure),
    }
}

/// A pause somewhere between half and all of what doubles with each attempt.
fn jitter(attempt: u32) -> Duration {
    let whole = PAUSE
        .saturating_mul(1 << attempt.min(10))
        .min(LONGEST_PAUSE);
    // Seeded anew at each call.
    let random = (RandomState::new().hash_one(attempt) % 1000) as u32;
    whole / 2 + whole / 2000 * random
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_differ_and_end() {
        let pauses: std::collections::BTreeSet<_> = (0..20).map(|_| jitter(3)).collect();
        assert!(pauses.len() > 1);
        for attempt in 1..40 {
            assert!(
                (PAUSE / 2..=LONGEST_PAUSE).contains(&jitter(attempt)),
                "{attempt}"
            );
        }
    }
}
