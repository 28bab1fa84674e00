//! The cache: memory, then the disk, then the bucket, then one compile among all who share it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tracing::{info, warn};

use crate::behind::{Answer, Behind, Turn};
use crate::config::{Config, Mode};
use crate::counters::{Counters, Counts};
use crate::entry::{Entry, Origin, Provenance};
use crate::flight::Flights;
use crate::history::Notes;
use crate::key::{Key, Treatment};
use crate::loads::{Fatal, Loading, Loads};
use crate::publish::Publisher;
use crate::tier::Found;
use crate::tier::disk::Disk;
use crate::tier::memory::Memory;
use crate::verify::{Refused, Verifier};

/// Writers' names are cut here, so that no setting makes entries grow.
const WRITER_BYTES: usize = 256;

/// How long the end of a process waits for its notes of loads to go.
const FORGIVEN_WITHIN: Duration = Duration::from_secs(1);

/// How long the end of a process waits for its claims to be called over.
const CALLED_OVER_WITHIN: Duration = Duration::from_secs(2);

/// How long [`Cache::flush`] waits for lines of the history.
const NOTES_WITHIN: Duration = Duration::from_secs(1);

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
    disk: Option<Arc<Disk>>,
    behind: Option<Behind>,
    /// Writes to disk where there is no bucket, whose publisher would.
    local: Option<Publisher>,
    counters: Arc<Counters>,
    writer: String,
    notes: Option<Notes>,
    refused: Arc<Refused>,
    loads: Loads,
    named: Mutex<HashSet<String>>,
}

impl Cache {
    /// Opens a cache. Asks nothing of the bucket; see [`waystation_lifecycle::bucket::Bucket::probe`] for that.
    pub fn open(mut config: Config) -> Cache {
        let counters = Arc::new(Counters::default());
        let refused = Arc::new(Refused::default());
        let loads = Loads::open(config.state_folder.as_deref());
        for (key, object) in loads.objects() {
            warn!(
                key = hex::encode(key),
                "an entry of this key has ended the worker that loaded it and is passed over"
            );
            refused.add(key, object);
        }
        let signing = config.signing.clone();
        if signing.as_ref().is_some_and(|key| !key.signs()) && config.mode == Mode::ReadWrite {
            info!("the signing key is a public one: entries are checked, and none are published");
            config.mode = Mode::ReadOnly;
        }
        let verifier = Verifier::new(config.limits, signing, Arc::clone(&refused));
        let bucket = config
            .location
            .take()
            .filter(|bucket| !bucket.location().is_memory());
        if config.mode == Mode::Off {
            info!("the cache is off: every program is compiled");
            config.memory_bytes = 0;
        } else if let Some(bucket) = &bucket {
            let (location, mode) = (bucket.location(), config.mode);
            info!(%location, ?mode, "compiled programs are shared through the bucket");
        } else if config.disk.is_some() {
            info!("no bucket given: compiled programs are shared on this machine only");
        } else {
            info!(
                "no bucket given: compiled programs stay in this process's memory; \
                 give a location to share them and to keep them"
            );
        }
        config
            .writer
            .truncate(config.writer.floor_char_boundary(WRITER_BYTES));
        let behind = bucket.filter(|_| config.mode != Mode::Off);
        let disk = Disk::new(&config, verifier.clone(), Arc::clone(&counters)).map(Arc::new);
        let notes = Notes::new(config.history.take(), disk.clone());
        let behind =
            behind.map(|bucket| Behind::new(bucket, verifier, disk.as_ref(), &config, &counters));
        let local = disk
            .clone()
            .filter(|disk| behind.is_none() && disk.writes());
        let local = local.map(|disk| {
            let location = disk.folder().display().to_string();
            Publisher::new(Some(disk), None, location, &config, Arc::clone(&counters))
        });
        if let Some(disk) = &disk {
            disk.tend();
        }
        Cache {
            inner: Arc::new(Inner {
                memory: Memory::new(config.memory_bytes, config.memory_entries),
                flights: Flights::default(),
                disk,
                behind,
                local,
                counters,
                writer: config.writer,
                notes,
                refused,
                loads,
                named: Mutex::default(),
            }),
        }
    }

    /// The entry of a key: from memory, from disk, from the bucket, or from `compile`, which is called at most once, and
    /// for all who ask at the same time only once as long as it succeeds. A compiled entry is published in the background.
    ///
    /// Waits for at most one look-up on disk and one in the bucket ([`Config::read_deadline`]) and, where another process
    /// has claimed the program, for what that one publishes ([`Config::claim_wait`]); never for a write of an entry. Where
    /// `compile` fails, each of those who wait calls its own in turn, so that each gets its own error.
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
        if let Treatment::Uncacheable { reason } = key.treatment() {
            inner.counters.uncacheable(reason);
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
        if let Some(entry) = inner.on_disk(key).await {
            inner.note(key, &entry, Origin::Disk);
            *landed = Some(Arc::clone(&entry));
            return Ok((entry, Origin::Disk));
        }
        let claim = match inner.seek(key).await {
            Turn::Found(found) => {
                let entry = inner.take_in(key, *found);
                inner.note(key, &entry, Origin::Bucket);
                *landed = Some(Arc::clone(&entry));
                return Ok((entry, Origin::Bucket));
            }
            Turn::Compile(claim) => claim,
        };
        // Dropped on any way out that publishes nothing, the claim tells those who wait for it.
        let (entry, time) = inner.compile(key, compile).await?;
        inner.note(key, &entry, Origin::Compiled);
        if entry.executable.is_empty() {
            // It would be of no use to anybody else, not even to those who wait.
            inner.counters.uncacheable.one();
            inner.counters.uncacheable_plugin.one();
            return Ok((entry, Origin::Compiled));
        }
        inner.memory.put(key.digest(), &entry);
        *landed = Some(Arc::clone(&entry));
        if let Some(behind) = &inner.behind {
            behind.publish(key, &entry, inner.provenance(key, time), claim);
        } else if let Some(local) = &inner.local {
            local.publish(key, &entry, inner.provenance(key, time), None);
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
        if let Some(entry) = inner.on_disk(key).await {
            *landed = Some(Arc::clone(&entry));
            return Some((entry, Origin::Disk));
        }
        let Answer::Hit(found) = inner.ask(key).await else {
            return None;
        };
        let entry = inner.take_in(key, *found);
        *landed = Some(Arc::clone(&entry));
        Some((entry, Origin::Bucket))
    }

    /// Keeps an entry that came some other way (from the worker that compiled it) in memory.
    pub fn keep(&self, key: &Key, entry: &Arc<Entry>) {
        if key.is_cacheable() && !entry.executable.is_empty() {
            self.inner.memory.put(key.digest(), entry);
        }
    }

    /// Says that the plugin refuses to load an entry of a key, whole as it is. It leaves memory, and where it came from
    /// it counts as a bad entry from now on: the next request finds another one, or compiles and publishes it beside.
    pub fn reject(&self, key: &Key, entry: &Entry) {
        let inner = &*self.inner;
        inner.counters.rejected.one();
        if let Some(object) = &entry.object {
            inner.refused.add(key.digest(), object);
        }
        inner.memory.remove(key.digest());
        inner.flights.forget(key.digest());
        warn!(%key, "the plugin refuses a cached executable; the program is compiled again");
    }

    /// To be called before an entry's executable is loaded; what comes back is dropped after. So an entry that ends the
    /// process is known, and passed over, when it starts again with the same [`Config::state_folder`]. Blocks for as long
    /// as it takes to make a file, a second at most.
    ///
    /// # Errors
    /// [`Fatal`] when the program has ended too many processes already.
    pub fn loading(&self, key: &Key, entry: &Entry) -> Result<Loading, Fatal> {
        self.inner.loads.begin(key.digest(), entry.object.as_ref())
    }

    /// Whether a program is to be compiled and loaded at all.
    ///
    /// # Errors
    /// [`Fatal`] when it has ended too many processes already.
    pub fn admit(&self, key: &Key) -> Result<(), Fatal> {
        self.inner.loads.check(key.digest())
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
            .map_or("memory", |behind| behind.location())
    }

    /// True where this process keeps the index of the folder on disk.
    pub fn has_disk_index(&self) -> bool {
        let disk = self.inner.disk.as_ref();
        disk.is_some_and(|disk| disk.has_index())
    }

    /// Bytes of decoded entries held in memory.
    pub fn memory_bytes(&self) -> u64 {
        self.inner.memory.bytes()
    }

    /// How many entries wait to be written.
    pub fn waiting(&self) -> usize {
        self.inner.publisher().map_or(0, Publisher::waiting)
    }

    /// Waits until everything compiled so far is published, at most so long. Returns how many entries still wait.
    ///
    /// Cancel-safe.
    pub async fn flush(&self, deadline: Duration) -> usize {
        let publisher = async {
            match self.inner.publisher() {
                Some(publisher) => publisher.flush(deadline).await,
                None => 0,
            }
        };
        let (left, ()) = futures::join!(publisher, self.inner.settle(deadline));
        left
    }

    /// Ends publication: takes no more entries, waits as [`Cache::flush`] does and cuts off the rest. Returns how many
    /// were cut off. What this process has claimed is called over then, for which it waits two seconds more at most.
    /// Look-ups and compiles go on working; a load that the end of the process breaks off from here on has not ended it.
    pub async fn shutdown(&self, deadline: Duration) -> usize {
        let publisher = async {
            let left = match self.inner.publisher() {
                Some(publisher) => publisher.shutdown(deadline).await,
                None => 0,
            };
            // What is claimed now will not be published. Who waits for it need not find that out by waiting.
            if let Some(behind) = &self.inner.behind {
                behind.give_up_claims(CALLED_OVER_WITHIN).await;
            }
            left
        };
        let (left, (), ()) = futures::join!(
            publisher,
            self.inner.settle(deadline),
            self.inner.loads.forgive(FORGIVEN_WITHIN),
        );
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
            Treatment::Raw { construct } | Treatment::Opaque { construct } => (construct, true),
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
            info!(%construct, "program keyed on bytes, wholly or in part: jobs share it only if they send the same ones");
        } else {
            info!(%construct, "program not cached: it calls into the process that sent it");
        }
    }

    /// Leaves a record of how a key was served, behind the caller.
    fn note(&self, key: &Key, entry: &Entry, origin: Origin) {
        if let Some(notes) = &self.notes {
            notes.take(key, &entry.info.name, origin);
        }
    }

    fn in_memory(&self, key: &Key) -> Option<Arc<Entry>> {
        let entry = self.memory.get(key.digest())?;
        self.counters.memory_hits.one();
        Some(entry)
    }

    fn publisher(&self) -> Option<&Publisher> {
        match &self.behind {
            Some(behind) => behind.publisher(),
            None => self.local.as_ref(),
        }
    }

    /// Asks the bucket, and counts a miss.
    async fn ask(&self, key: &Key) -> Answer {
        let Some(behind) = &self.behind else {
            return Answer::Unknown;
        };
        let answer = behind.ask(key).await;
        if matches!(answer, Answer::Miss(_)) {
            self.counters.bucket_misses.one();
        }
        answer
    }

    /// What the bucket has, or whose turn it is to compile what it has not.
    async fn seek(&self, key: &Key) -> Turn {
        match (self.ask(key).await, &self.behind) {
            (Answer::Hit(found), _) => Turn::Found(found),
            (Answer::Miss(bad), Some(behind)) => behind.turn(key, bad).await,
            _ => Turn::Compile(None),
        }
    }

    /// Waits for what the disk and the history are still to keep.
    async fn settle(&self, deadline: Duration) {
        let disk = async {
            if let Some(disk) = &self.disk {
                disk.settle(deadline).await;
            }
        };
        let notes = async {
            if let Some(notes) = &self.notes {
                notes.settle(deadline.min(NOTES_WITHIN)).await;
            }
        };
        futures::join!(disk, notes);
    }

    /// Asks the disk. Whatever goes wrong is a miss.
    async fn on_disk(&self, key: &Key) -> Option<Arc<Entry>> {
        let found = self.disk.as_ref()?.get(key).await?;
        let saved = found.opened.provenance.saved_micros();
        self.counters.saved_micros.add(saved);
        if let Some(behind) = &self.behind {
            behind.keep_alive(key, &found);
        }
        Some(self.take(key, found.opened.entry))
    }

    /// Keeps what the bucket had.
    fn take_in(&self, key: &Key, found: Found) -> Arc<Entry> {
        if let Some(publisher) = self.publisher() {
            publisher.fill_back(key, found.object);
        }
        self.take(key, found.opened.entry)
    }

    fn take(&self, key: &Key, mut entry: Entry) -> Arc<Entry> {
        // A name that others will be told is not taken from a file.
        entry.info.key = key.to_string();
        let entry = Arc::new(entry);
        self.memory.put(key.digest(), &entry);
        entry
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
