//! What stands behind memory: the bucket, whom it is asked for, and who compiles what it does not have.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use tracing::{debug, info, warn};
use waystation_lifecycle::bucket::Bucket;
use waystation_lifecycle::bucket::layout::Digest;

use crate::breaker::Breaker;
use crate::claim::{self, Claims, Held, Stake};
use crate::config::{Config, Mode, Renewal};
use crate::counters::Counters;
use crate::entry::{Entry, Provenance};
use crate::key::Key;
use crate::publish::Publisher;
use crate::quiet::Quiet;
use crate::tier::bucket::BucketTier;
use crate::tier::disk::Disk;
use crate::tier::{Found, Look, Terms, Tier, chain};
use crate::verify::Verifier;

/// First pause between two looks for an entry that another process compiles; each further one is twice as long.
const FIRST_LOOK: Duration = Duration::from_millis(200);

/// Longest pause between two such looks.
const LAST_LOOK: Duration = Duration::from_secs(5);

/// A process renews an entry no more often than this, unless entries live so briefly that it has to.
const RENEWED_AGAIN: Duration = Duration::from_secs(24 * 3600);

/// Keys for which that is remembered. Beyond that all are forgotten, which costs a listing each.
const RENEWED_KEYS: usize = 65_536;

/// The bucket as a cache uses it.
#[derive(Debug)]
pub(crate) struct Behind {
    tier: Arc<dyn Tier>,
    /// None in a cache that only reads.
    publisher: Option<Publisher>,
    claims: Option<Claims>,
    breaker: Breaker,
    counters: Arc<Counters>,
    location: String,
    renewal: Terms,
    /// When entries were last renewed, or found to need it, by this process.
    renewed: Mutex<HashMap<Digest, Instant>>,
    warning: Quiet,
}

/// What the bucket says to a key.
#[derive(Debug)]
pub(crate) enum Answer {
    /// A good entry.
    Hit(Box<Found>),
    /// It has none. When the last of the bad objects in its place was written, if there are any.
    Miss(Option<SystemTime>),
    /// It was not asked, or does not say.
    Unknown,
}

/// What is to be done after a miss.
#[derive(Debug)]
pub(crate) enum Turn {
    /// Another process has compiled it.
    Found(Box<Found>),
    /// Compile; who waits for the outcome is told through the claim.
    Compile(Option<Held>),
}

impl Behind {
    pub(crate) fn new(
        bucket: Bucket,
        verifier: Verifier,
        disk: Option<&Arc<Disk>>,
        config: &Config,
        counters: &Arc<Counters>,
    ) -> Behind {
        let location = bucket.location().to_string();
        let counters = Arc::clone(counters);
        let claims = match config.mode {
            Mode::ReadWrite => Claims::new(bucket.clone(), config, Arc::clone(&counters)),
            Mode::ReadOnly | Mode::Off => None,
        };
        let tier: Arc<dyn Tier> = Arc::new(BucketTier::new(
            bucket,
            verifier,
            config,
            Arc::clone(&counters),
        ));
        let publisher = (config.mode == Mode::ReadWrite).then(|| {
            let (tier, counters) = (Arc::clone(&tier), Arc::clone(&counters));
            Publisher::new(
                disk.cloned(),
                Some(tier),
                location.clone(),
                config,
                counters,
            )
        });
        Behind {
            tier,
            publisher,
            claims,
            breaker: Breaker::new(config.backoff, config.backoff_max),
            counters,
            location,
            renewal: Terms {
                older_than: config.ttl / 2,
                renewal: config.renewal.clone(),
            },
            renewed: Mutex::default(),
            warning: Quiet::default(),
        }
    }

    pub(crate) fn location(&self) -> &str {
        &self.location
    }

    /// Gives up what this process has claimed. Waits at most so long.
    pub(crate) async fn give_up_claims(&self, deadline: Duration) {
        if let Some(claims) = &self.claims {
            claims.shutdown(deadline).await;
        }
    }

    pub(crate) fn publisher(&self) -> Option<&Publisher> {
        self.publisher.as_ref()
    }

    /// Asks the bucket. Whatever goes wrong is no answer.
    pub(crate) async fn ask(&self, key: &Key) -> Answer {
        if !self.breaker.allows() {
            self.counters.bucket_reads_skipped.one();
            return Answer::Unknown;
        }
        let found = match self.tier.get(key).await {
            Ok(found) => found,
            Err(error) => {
                self.breaker.failed(error.timed_out());
                self.counters.bucket_read_errors.one();
                if let Some(suppressed) = self.warning.due() {
                    warn!(
                        location = %self.location, error = %chain(&error), suppressed,
                        "bucket look-up failed; programs are compiled instead until it recovers"
                    );
                }
                return Answer::Unknown;
            }
        };
        if self.breaker.succeeded() {
            info!(location = %self.location, "bucket answers again");
        }
        let found = match found {
            Look::Good(found) => found,
            Look::Bad(written) => return Answer::Miss(Some(written)),
            Look::Absent => return Answer::Miss(None),
        };
        let (counters, provenance) = (&self.counters, &found.opened.provenance);
        counters.bucket_hits.one();
        counters.bucket_read_bytes.add(found.opened.stored_bytes);
        counters.saved_micros.add(provenance.saved_micros());
        if let Some(claims) = &self.claims {
            claims.hear_time(key, provenance.compile_time());
        }
        debug!(%key, bytes = found.opened.stored_bytes, writer = provenance.writer, "bucket hit");
        self.renew(key, &found);
        Answer::Hit(found)
    }

    /// Queues the renewal of an entry that is old, once a day.
    fn renew(&self, key: &Key, found: &Found) {
        let Some(publisher) = &self.publisher else {
            return;
        };
        let age = found
            .written
            .and_then(|at| SystemTime::now().duration_since(at).ok());
        if self.is_due(key, age) {
            publisher.renew(key, found.clone(), self.renewal.clone());
        }
    }

    /// Sees behind the caller that an entry that was found on disk and is old lives on in the bucket, once a day.
    pub(crate) fn keep_alive(&self, key: &Key, found: &Found) {
        let Some(publisher) = &self.publisher else {
            return;
        };
        // When it came to the bucket last only the bucket knows.
        let made = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(
            found.opened.provenance.created_unix_ms,
        ));
        let age = made.and_then(|at| SystemTime::now().duration_since(at).ok());
        if self.is_due(key, age) {
            publisher.keep_alive(key, found.object.clone(), self.renewal.clone());
        }
    }

    /// True where an entry of this age is to be renewed, once a day.
    fn is_due(&self, key: &Key, age: Option<Duration>) -> bool {
        let is_old = age.is_some_and(|age| age > self.renewal.older_than);
        if !is_old || matches!(self.renewal.renewal, Renewal::Never) {
            return false;
        }
        let again = RENEWED_AGAIN.min(self.renewal.older_than / 2);
        let mut renewed = self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
        let last = renewed.get(key.digest());
        if last.is_some_and(|last| last.elapsed() < again) {
            return false;
        }
        if renewed.len() >= RENEWED_KEYS {
            renewed.clear();
        }
        renewed.insert(*key.digest(), Instant::now());
        true
    }

    /// After a miss: this process's turn to compile, or what another one has compiled meanwhile. Waits for the other no
    /// longer than [`Config::claim_wait`] says. `bad`: as in [`Answer::Miss`]; what was claimed before that has come, and
    /// is of no use.
    pub(crate) async fn turn(&self, key: &Key, bad: Option<SystemTime>) -> Turn {
        let Some(claims) = &self.claims else {
            return Turn::Compile(None);
        };
        let terms = claim::Terms {
            patience: claims.patience(key),
            since: bad,
        };
        match claims.stake(key, terms).await {
            Stake::Unknown => Turn::Compile(None),
            Stake::Ours { claim, contended } => {
                self.counters.claims.one();
                if contended && let Answer::Hit(found) = self.ask(key).await {
                    claim.published();
                    return Turn::Found(found);
                }
                Turn::Compile(Some(claim))
            }
            Stake::Theirs => {
                debug!(%key, "another process compiles this program");
                let begun = Instant::now();
                self.counters.claim_waits.one();
                let found = self.wait(claims, key, terms).await;
                self.counters.claim_wait_micros.time(begun.elapsed());
                match found {
                    Some(found) => Turn::Found(found),
                    None => {
                        self.counters.claim_waits_in_vain.one();
                        Turn::Compile(None)
                    }
                }
            }
        }
    }

    async fn wait(&self, claims: &Claims, key: &Key, terms: claim::Terms) -> Option<Box<Found>> {
        let patience = terms.patience;
        let begun = Instant::now();
        let mut pause = FIRST_LOOK;
        loop {
            let left = patience.saturating_sub(begun.elapsed());
            tokio::time::sleep(pause.min(left)).await;
            match self.ask(key).await {
                Answer::Hit(found) => return Some(found),
                Answer::Miss(_) => {}
                Answer::Unknown => return None,
            }
            if begun.elapsed() >= patience || claims.are_over(key, terms).await {
                return None;
            }
            pause = pause.saturating_mul(2).min(LAST_LOOK);
        }
    }

    /// Publishes what was compiled, behind the caller, if it is worth it.
    pub(crate) fn publish(
        &self,
        key: &Key,
        entry: &Arc<Entry>,
        provenance: Provenance,
        claim: Option<Held>,
    ) {
        if let Some(claims) = &self.claims {
            claims.note_time(key, provenance.compile_time());
        }
        if let Some(publisher) = &self.publisher {
            publisher.publish(key, entry, provenance, claim);
        }
    }
}
