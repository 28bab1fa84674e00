//! The cache: memory, then the bucket, then one compile.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tracing::{debug, info, warn};
use waystation_lifecycle::bucket::layout::Digest;

use crate::breaker::Breaker;
use crate::config::Config;
use crate::counters::{Counters, Counts};
use crate::entry::{Entry, Origin, Provenance};
use crate::flight::Flights;
use crate::key::{Key, Treatment};
use crate::publish::Publisher;
use crate::quiet::Quiet;
use crate::tier::bucket::BucketTier;
use crate::tier::memory::Memory;
use crate::tier::{Tier, chain};

/// Writers' names are cut here, so that no setting makes entries grow.
const WRITER_BYTES: usize = 256;

/// Keys remembered as refused by the plugin: far more than a process meets. Beyond that all are forgotten, which costs
/// each one failed load again.
const REJECTED_KEYS: usize = 65_536;

/// Constructs that a log line has named. Each is named once, and this many at most.
const NAMED_CONSTRUCTS: usize = 64;

/// The cache of one process. Clones share everything.
///
/// Must be used on a tokio runtime with time enabled.
#[derive(Debug, Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    memory: Memory,
    flights: Flights,
    behind: Option<Behind>,
    counters: Arc<Counters>,
    writer: String,
    rejected: Mutex<HashSet<Digest>>,
    named: Mutex<HashSet<String>>,
}

/// What stands behind memory.
#[derive(Debug)]
struct Behind {
    tier: Arc<dyn Tier>,
    publisher: Publisher,
    breaker: Breaker,
    location: String,
    warning: Quiet,
}

impl Cache {
    /// Opens a cache. Asks nothing of the bucket; see [`waystation_lifecycle::bucket::Bucket::probe`] for that.
    pub fn open(mut config: Config) -> Cache {
        let counters = Arc::new(Counters::default());
        let bucket = config
            .location
            .take()
            .filter(|bucket| !bucket.location().is_memory());
        let behind = bucket.map(|bucket| {
            let location = bucket.location().to_string();
            info!(%location, "compiled programs are shared through the bucket");
            let tier: Arc<dyn Tier> =
                Arc::new(BucketTier::new(bucket, &config, Arc::clone(&counters)));
            let publisher = Publisher::new(
                Arc::clone(&tier),
                location.clone(),
                &config,
                Arc::clone(&counters),
            );
            Behind {
                tier,
                publisher,
                breaker: Breaker::new(config.backoff, config.backoff_max),
                location,
                warning: Quiet::default(),
            }
        });
        if behind.is_none() {
            info!(
                "no bucket given: compiled programs stay in this process's memory; \
                 give a location to share them and to keep them"
            );
        }
        let mut writer = config.writer;
        writer.truncate(writer.floor_char_boundary(WRITER_BYTES));
        Cache {
            inner: Arc::new(Inner {
                memory: Memory::new(config.memory_bytes),
                flights: Flights::default(),
                behind,
                counters,
                writer,
                rejected: Mutex::default(),
                named: Mutex::default(),
            }),
        }
    }

    /// The entry of a key: from memory, from the bucket, or from `compile`, which is called at most once, and for all
    /// who ask at the same time only once as long as it succeeds. A compiled entry is published in the background.
    ///
    /// Waits for at most one look-up in the bucket ([`Config::read_deadline`]), and never for a write. Where `compile`
    /// fails, each of those who wait calls its own in turn, so that each gets its own error.
    ///
    /// Cancel-safe: dropped while it leads, it lets the next in line lead.
    ///
    /// # Errors
    /// Only what `compile` returns.
    pub async fn get_or_compile<F, R, E>(
        &self,
        key: &Key,
        compile: F,
    ) -> Result<(Arc<Entry>, Origin), E>
    where
        F: FnOnce() -> R,
        R: Future<Output = Result<Entry, E>>,
    {
        let inner = &*self.inner;
        inner.note_treatment(key);
        if !key.is_cacheable() {
            inner.counters.uncacheable.one();
            let (entry, _) = inner.compile(key, compile).await?;
            return Ok((entry, Origin::Compiled));
        }
        if let Some(entry) = inner.in_memory(key) {
            return Ok((entry, Origin::Memory));
        }
        let seat = inner.flights.board(key.digest());
        let mut landed = seat.lead().await;
        if let Some(entry) = &*landed {
            inner.counters.memory_hits.one();
            return Ok((Arc::clone(entry), Origin::Memory));
        }
        // The one before may have ended, its seat and all, between the look above and boarding.
        if let Some(entry) = inner.in_memory(key) {
            return Ok((entry, Origin::Memory));
        }
        if let Some(entry) = inner.in_bucket(key).await {
            *landed = Some(Arc::clone(&entry));
            return Ok((entry, Origin::Bucket));
        }
        let (entry, time) = inner.compile(key, compile).await?;
        if entry.executable.is_empty() {
            // It would be of no use to anybody else, not even to those who wait.
            inner.counters.uncacheable.one();
            return Ok((entry, Origin::Compiled));
        }
        inner.memory.put(key.digest(), &entry);
        *landed = Some(Arc::clone(&entry));
        if let Some(behind) = &inner.behind {
            let provenance = inner.provenance(key, time);
            behind.publisher.publish(key, &entry, provenance);
        }
        Ok((entry, Origin::Compiled))
    }

    /// The entry of a key, if memory or the bucket has it. For who was told of a key and has no program.
    ///
    /// Waits for at most one look-up in the bucket, or for a compile of the same key that is under way. Cancel-safe.
    pub async fn get(&self, key: &Key) -> Option<(Arc<Entry>, Origin)> {
        let inner = &*self.inner;
        if !key.is_cacheable() {
            return None;
        }
        if let Some(entry) = inner.in_memory(key) {
            return Some((entry, Origin::Memory));
        }
        let seat = inner.flights.board(key.digest());
        let mut landed = seat.lead().await;
        if let Some(entry) = &*landed {
            inner.counters.memory_hits.one();
            return Some((Arc::clone(entry), Origin::Memory));
        }
        if let Some(entry) = inner.in_memory(key) {
            return Some((entry, Origin::Memory));
        }
        let entry = inner.in_bucket(key).await?;
        *landed = Some(Arc::clone(&entry));
        Some((entry, Origin::Bucket))
    }

    /// Keeps an entry that came some other way (from the worker that compiled it) in memory.
    pub fn keep(&self, key: &Key, entry: &Arc<Entry>) {
        if key.is_cacheable() && !entry.executable.is_empty() {
            self.inner.memory.put(key.digest(), entry);
        }
    }

    /// Says that the plugin refuses to load a key's entry, whole as it is. It leaves memory, and the bucket is not
    /// asked for this key again: the next request compiles, and what it compiles is kept in memory.
    pub fn reject(&self, key: &Key) {
        let inner = &*self.inner;
        inner.counters.rejected.one();
        let mut rejected = inner
            .rejected
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if rejected.len() >= REJECTED_KEYS {
            rejected.clear();
        }
        rejected.insert(*key.digest());
        drop(rejected);
        inner.memory.remove(key.digest());
        inner.flights.forget(key.digest());
        warn!(%key, "the plugin refuses a cached executable; the program is compiled again");
    }

    /// The counters, now.
    pub fn counters(&self) -> Counts {
        self.inner.counters.read()
    }

    /// Where entries are kept beyond this process: the location, or "memory".
    pub fn location(&self) -> &str {
        self.inner
            .behind
            .as_ref()
            .map_or("memory", |behind| &behind.location)
    }

    /// Bytes of decoded entries held in memory.
    pub fn memory_bytes(&self) -> u64 {
        self.inner.memory.bytes()
    }

    /// Waits until everything compiled so far is published, at most so long. Returns how many entries still wait.
    ///
    /// Cancel-safe.
    pub async fn flush(&self, deadline: Duration) -> usize {
        match &self.inner.behind {
            Some(behind) => behind.publisher.flush(deadline).await,
            None => 0,
        }
    }

    /// Ends publication: takes no more entries, waits as [`Cache::flush`] does and cuts off the rest. Returns how many
    /// were cut off. Look-ups and compiles go on working.
    pub async fn shutdown(&self, deadline: Duration) -> usize {
        let Some(behind) = &self.inner.behind else {
            return 0;
        };
        let left = behind.publisher.shutdown(deadline).await;
        if left > 0 {
            warn!(
                left,
                "compiled programs not published before the process stopped"
            );
        }
        left
    }
}

impl Inner {
    /// Counts and names what could not be keyed by structure.
    fn note_treatment(&self, key: &Key) {
        let (construct, raw) = match key.treatment() {
            Treatment::Structural => return,
            Treatment::Raw { construct } => (construct, true),
            Treatment::Uncacheable { reason } => (reason, false),
        };
        if raw {
            self.counters.key_fallbacks.one();
        }
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        if named.len() >= NAMED_CONSTRUCTS || !named.insert(construct.clone()) {
            return;
        }
        drop(named);
        if raw {
            info!(%construct, "program keyed on its bytes: jobs share it only if they send the same bytes");
        } else {
            info!(%construct, "program not cached: it calls into the process that sent it");
        }
    }

    fn in_memory(&self, key: &Key) -> Option<Arc<Entry>> {
        let entry = self.memory.get(key.digest())?;
        self.counters.memory_hits.one();
        Some(entry)
    }

    /// Asks the bucket. Whatever goes wrong is a miss.
    async fn in_bucket(&self, key: &Key) -> Option<Arc<Entry>> {
        let behind = self.behind.as_ref()?;
        if self.is_rejected(key) {
            return None;
        }
        if !behind.breaker.allows() {
            self.counters.bucket_reads_skipped.one();
            return None;
        }
        let answer = behind.tier.get(key).await;
        match &answer {
            Ok(_) => {
                if behind.breaker.succeeded() {
                    info!(location = %behind.location, "bucket answers again");
                }
            }
            Err(error) => {
                behind.breaker.failed(error.timed_out());
                self.counters.bucket_read_errors.one();
                if let Some(suppressed) = behind.warning.due() {
                    warn!(
                        location = %behind.location, error = %chain(error), suppressed,
                        "bucket look-up failed; programs are compiled instead until it recovers"
                    );
                }
            }
        }
        let Some(opened) = answer.ok()? else {
            self.counters.bucket_misses.one();
            debug!(%key, "bucket miss");
            return None;
        };
        self.counters.bucket_hits.one();
        self.counters.bucket_read_bytes.add(opened.stored_bytes);
        self.counters
            .saved_micros
            .add(opened.provenance.compile_micros);
        debug!(%key, bytes = opened.stored_bytes, writer = opened.provenance.writer, "bucket hit");
        let mut entry = opened.entry;
        // A name that others will be told is not taken from a file.
        entry.info.key = key.to_string();
        let entry = Arc::new(entry);
        self.memory.put(key.digest(), &entry);
        Some(entry)
    }

    async fn compile<F, R, E>(&self, key: &Key, compile: F) -> Result<(Arc<Entry>, Duration), E>
    where
        F: FnOnce() -> R,
        R: Future<Output = Result<Entry, E>>,
    {
        let start = Instant::now();
        let compiled = compile().await;
        let time = start.elapsed();
        self.counters.compile_micros.time(time);
        let mut entry = compiled.inspect_err(|_| self.counters.compile_failures.one())?;
        self.counters.compiles.one();
        if entry.info.key.is_empty() {
            entry.info.key = key.to_string();
        }
        Ok((Arc::new(entry), time))
    }

    fn is_rejected(&self, key: &Key) -> bool {
        self.rejected
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(key.digest())
    }

    fn provenance(&self, key: &Key, compile_time: Duration) -> Provenance {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        Provenance {
            writer: self.writer.clone(),
            created_unix_ms: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |time| micros(time) / 1000),
            compile_micros: micros(compile_time),
            components: key
                .record()
                .components()
                .iter()
                .map(|(name, digest)| (name.clone(), hex::encode(digest)))
                .collect(),
        }
    }
}
