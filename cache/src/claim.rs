//! Who compiles, of all the processes that miss one program at the same time.
//!
//! Before a compile a process creates `claim/v1/<key>/<minute>` where nobody has. Who has the oldest claim that still
//! counts compiles; the others look for the entry, ever less often, for a bounded time, and then compile themselves. A
//! claim counts for as long as one would wait for it, from the time that the store gives it. So a claimant that dies
//! costs the others one wait, and clocks that differ cost a wait or a compile and nothing else. A claim of which nothing
//! comes (the compile fails, the entry is not kept, the process ends in order) is called over by a second object, so that
//! nobody waits for it.
//!
//! Nothing is written over or deleted: the rights to create and to list are enough, and claims go by the bucket's
//! lifecycle. Whatever else goes wrong, the process compiles at once.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{Error, PutMode, PutOptions, PutPayload};
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};
use waystation_lifecycle::bucket::Bucket;
use waystation_lifecycle::bucket::layout::{self, Claim, Digest};

use crate::breaker::Breaker;
use crate::config::Config;
use crate::counters::Counters;
use crate::key::Key;
use crate::quiet::Quiet;
use crate::tier::{TierError, chain, within};

/// Time for one question about claims, of two requests at most. What it decides is not worth a longer wait.
const DEADLINE: Duration = Duration::from_secs(5);

/// A claim counts so many times the last compile's time, where that is known.
const TIMES_LAST: u32 = 3;

/// What an entry says of its compile is not believed beyond this, as anyone may have written it: with [`TIMES_LAST`], ten
/// minutes' wait.
const BELIEVED: Duration = Duration::from_secs(200);

/// Keys and programs that are remembered. Beyond that all are forgotten, which costs a wait or two.
const REMEMBERED: usize = 65_536;

/// Objects of one key's folder that are looked at. There are two a minute of its compiles, for as long as claims are kept.
const LISTED: usize = 4096;

/// The claims of one process in one bucket. Clones share everything.
#[derive(Debug, Clone)]
pub(crate) struct Claims {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    bucket: Bucket,
    wait: Option<Duration>,
    writer: String,
    counters: Arc<Counters>,
    breaker: Breaker,
    warning: Quiet,
    held: Mutex<Claimed>,
    /// Claims that are being called over.
    tasks: TaskTracker,
    /// The minute of this process's last claim on a key. It waits for none of its own.
    ours: Mutex<HashMap<Digest, u64>>,
    /// How long the last compile of a program took, whatever its options, by the digest of the program alone.
    took: Mutex<HashMap<Digest, Took>>,
}

/// How long a compile took.
#[derive(Debug, Clone, Copy)]
enum Took {
    /// This process has seen it.
    Measured(Duration),
    /// An entry says so.
    Said(Duration),
}

impl Took {
    fn time(self) -> Duration {
        match self {
            Took::Measured(time) => time,
            Took::Said(time) => time.min(BELIEVED),
        }
    }
}

/// Claims that this process holds, by key and minute.
#[derive(Debug, Default)]
struct Claimed {
    claims: HashSet<(Digest, u64)>,
    /// The process ends, and makes no others.
    closed: bool,
}

/// What a process is to do that has missed an entry.
#[derive(Debug)]
pub(crate) enum Stake {
    /// Compile: the claim is held by nobody else. `contended`: others have claimed the key before, so that the entry
    /// may have come since the miss.
    Ours { claim: Held, contended: bool },
    /// Wait for the entry.
    Theirs,
    /// Compile: nothing can be known.
    Unknown,
}

/// Which claims count.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// Those not older than this.
    pub(crate) patience: Duration,
    /// Those made after this. By the store's clock.
    pub(crate) since: Option<SystemTime>,
}

impl Terms {
    fn counts_from(&self, at: SystemTime) -> bool {
        self.since.is_none_or(|since| at > since)
    }
}

/// Claims on a key, as listed.
#[derive(Debug, Default)]
struct Listed {
    claims: Vec<(SystemTime, u64)>,
    over: Vec<u64>,
}

impl Claims {
    /// `None` where nobody is to be waited for.
    pub(crate) fn new(bucket: Bucket, config: &Config, counters: Arc<Counters>) -> Option<Claims> {
        let is_off = config.claim_wait.is_some_and(|wait| wait.is_zero());
        (!is_off).then(|| Claims {
            inner: Arc::new(Inner {
                bucket,
                wait: config.claim_wait,
                writer: config.writer.clone(),
                counters,
                breaker: Breaker::new(config.backoff, config.backoff_max),
                warning: Quiet::default(),
                held: Mutex::default(),
                tasks: TaskTracker::new(),
                ours: Mutex::default(),
                took: Mutex::default(),
            }),
        })
    }

    /// How long an entry of this key is waited for.
    pub(crate) fn patience(&self, key: &Key) -> Duration {
        let known = || {
            let took = lock(&self.inner.took);
            Some(took.get(&program(key)?)?.time().saturating_mul(TIMES_LAST))
        };
        self.inner
            .wait
            .or_else(known)
            .unwrap_or(crate::config::CLAIM_WAIT)
    }

    /// Remembers how long this process took to compile a program.
    pub(crate) fn note_time(&self, key: &Key, time: Duration) {
        if let Some(program) = program(key) {
            remember(&self.inner.took, program, Took::Measured(time));
        }
    }

    /// Remembers how long an entry says that its program takes to compile, unless this process knows better.
    pub(crate) fn hear_time(&self, key: &Key, time: Duration) {
        let Some(program) = program(key) else {
            return;
        };
        let known = lock(&self.inner.took).get(&program).copied();
        if !matches!(known, Some(Took::Measured(_))) {
            remember(&self.inner.took, program, Took::Said(time));
        }
    }

    /// Claims a key, or finds that another has. Cancel-safe: a claim made by a call that is dropped counts until it is
    /// too old.
    pub(crate) async fn stake(&self, key: &Key, terms: Terms) -> Stake {
        let inner = &*self.inner;
        if lock(&inner.held).closed || !inner.breaker.allows() {
            return Stake::Unknown;
        }
        match within(DEADLINE, self.try_stake(key, terms)).await {
            Ok(stake) => {
                inner.breaker.succeeded();
                stake
            }
            Err(error) => {
                inner.failed(&error);
                Stake::Unknown
            }
        }
    }

    async fn try_stake(&self, key: &Key, terms: Terms) -> Result<Stake, TierError> {
        let inner = &*self.inner;
        let digest = key.digest();
        let now = minute(SystemTime::now());
        // The next minute's name is there for who comes when the claim of this minute counts no more.
        for minute in [now, now.saturating_add(1)] {
            let before = lock(&inner.ours).get(digest).copied();
            let made = inner.create(&layout::claim(digest, minute)).await?;
            if made {
                remember(&inner.ours, *digest, minute);
            }
            let listed = inner.list(digest).await?;
            let first = listed.first(terms, |claim| Some(claim) != before);
            if first.is_some_and(|first| !made || first != minute) {
                return Ok(Stake::Theirs);
            }
            if made || before == Some(minute) {
                let mut others = listed.claims.iter().filter(|(_, at)| *at != minute);
                return Ok(Stake::Ours {
                    claim: self.hold(*digest, minute),
                    contended: others.any(|(at, _)| terms.counts_from(*at)),
                });
            }
        }
        Ok(Stake::Unknown)
    }

    fn hold(&self, key: Digest, minute: u64) -> Held {
        let mut held = lock(&self.inner.held);
        if held.closed {
            // Made while the process has come to its end.
            self.call_over(&key, minute);
        } else {
            held.claims.insert((key, minute));
        }
        drop(held);
        Held {
            claims: self.clone(),
            key,
            minute,
        }
    }

    /// Calls over all that is held, and makes no more claims. Waits until it is done, at most so long.
    pub(crate) async fn shutdown(&self, deadline: Duration) {
        let inner = &self.inner;
        let left: Vec<_> = {
            let mut held = lock(&inner.held);
            held.closed = true;
            held.claims.drain().collect()
        };
        for (key, minute) in left {
            self.call_over(&key, minute);
        }
        inner.tasks.close();
        let _ = tokio::time::timeout(deadline, inner.tasks.wait()).await;
    }

    /// In the background.
    fn call_over(&self, key: &Digest, minute: u64) {
        // Without a runtime the process has ended, and the others' waits are bounded.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let inner = Arc::clone(&self.inner);
        let path = layout::claim_over(key, minute);
        let calling = async move {
            if let Err(error) = within(DEADLINE, inner.create(&path)).await {
                debug!(error = %chain(&error), "a claim could not be called over");
            }
        };
        self.inner.tasks.spawn_on(calling, &runtime);
    }

    /// True when nobody can be waited for any more: all others' claims that counted when the wait began are over.
    /// Anything that goes wrong is not known to be over.
    pub(crate) async fn are_over(&self, key: &Key, terms: Terms) -> bool {
        let inner = &*self.inner;
        let digest = key.digest();
        let ours = lock(&inner.ours).get(digest).copied();
        let listed = within(DEADLINE, inner.list(digest)).await;
        let terms = Terms {
            // Each was as old at most when the wait began.
            patience: terms.patience.saturating_mul(2),
            ..terms
        };
        listed.is_ok_and(|listed| listed.first(terms, |claim| Some(claim) != ours).is_none())
    }
}

impl Listed {
    /// The minute of the oldest claim of those asked for that counts.
    fn first(&self, terms: Terms, is_asked_for: impl Fn(u64) -> bool) -> Option<u64> {
        let now = SystemTime::now();
        let counts = |(at, minute): &&(SystemTime, u64)| {
            // A claim from the future is one from another clock, and young.
            let age = now.duration_since(*at).unwrap_or_default();
            age <= terms.patience
                && terms.counts_from(*at)
                && !self.over.contains(minute)
                && is_asked_for(*minute)
        };
        let first = self.claims.iter().filter(counts).min();
        first.map(|(_, minute)| *minute)
    }
}

impl Inner {
    /// False where the name is taken.
    async fn create(&self, path: &Path) -> Result<bool, TierError> {
        let payload = PutPayload::from(self.writer.clone().into_bytes());
        let options = PutOptions::from(PutMode::Create);
        match self.bucket.store().put_opts(path, payload, options).await {
            Ok(_) => Ok(true),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    async fn list(&self, digest: &Digest) -> Result<Listed, TierError> {
        let mut listed = Listed::default();
        let folder = layout::claims_folder(digest);
        let mut names = self.bucket.store().list(Some(&folder));
        let mut seen = 0;
        while let Some(meta) = names.try_next().await? {
            match layout::claim_of(&meta.location) {
                Some((minute, Claim::Made)) => {
                    listed.claims.push((meta.last_modified.into(), minute));
                }
                Some((minute, Claim::Over)) => listed.over.push(minute),
                None => {}
            }
            seen += 1;
            if seen >= LISTED {
                break;
            }
        }
        Ok(listed)
    }

    fn failed(&self, error: &TierError) {
        self.breaker.failed(error.timed_out());
        self.counters.claim_errors.one();
        if let Some(suppressed) = self.warning.due() {
            warn!(
                location = %self.bucket.location(), error = %chain(error), suppressed,
                "programs cannot be claimed in the bucket; jobs that start together may compile them twice"
            );
        }
    }
}

/// A claim of this process. Dropped before its entry is published, it is called over in the background.
#[derive(Debug)]
pub(crate) struct Held {
    claims: Claims,
    key: Digest,
    minute: u64,
}

impl Held {
    /// The entry is there for who waits for it.
    pub(crate) fn published(self) {
        self.let_go();
    }

    /// False where it was called over already.
    fn let_go(&self) -> bool {
        let mut held = lock(&self.claims.inner.held);
        held.claims.remove(&(self.key, self.minute))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.let_go() {
            self.claims.call_over(&self.key, self.minute);
        }
    }
}

/// Names the program whatever is done with it; `None` for a key that came without its parts.
fn program(key: &Key) -> Option<Digest> {
    let components = key.record().components();
    let program = components.iter().find(|(name, _)| name == "program");
    program.map(|(_, digest)| *digest)
}

fn minute(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs() / 60)
}

fn remember<T>(map: &Mutex<HashMap<Digest, T>>, key: Digest, value: T) {
    let mut map = lock(map);
    if map.len() >= REMEMBERED {
        map.clear();
    }
    map.insert(key, value);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
