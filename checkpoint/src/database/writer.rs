//! Writing a database: values as they come, in any order and by many at once; the tree and the manifest last, once.
//!
//! A value that fills a data file alone is written as one, at once. Smaller ones are gathered, and written together when
//! they are enough. Those that fit into the tree stay in memory, with the keys, until the end. So there are never more
//! objects than an array a folder would have, and many small arrays make few.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use object_store::PutPayload;
use tokio::sync::Notify;
use waystation_ocdbt::{
    Builder, Built, Config, DataFile, Error as OcdbtError, Location, MANIFEST_NAME, Value,
};

use super::{Database, failed};
use crate::engine::{Engine, Root};
use crate::{Error, Result};

/// What is gathered of small values is written when a database has this much of it. When all together have [`Gathered`]'s
/// limit, those that come wait for what is being written.
const GATHER_BYTES: usize = 16 << 20;
/// A value from this part of that on is written alone.
const ALONE: usize = 4;

/// Bytes gathered by all databases that an engine writes.
#[derive(Debug)]
pub(crate) struct Gathered {
    bytes: AtomicUsize,
    /// A database gathers this much at most.
    one: usize,
    /// All together do, but for one value each.
    all: usize,
}

impl Gathered {
    /// For an engine with a budget of so many bytes, of which it is a thirty-second at most.
    pub(crate) fn new(budget: usize) -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            one: (budget / 64).min(GATHER_BYTES),
            all: budget / 32,
        }
    }

    /// Takes room for so many bytes, if there is any.
    fn reserve(&self, bytes: usize) -> bool {
        let taken = self.bytes.fetch_add(bytes, Relaxed) + bytes;
        if taken > self.all {
            self.release(bytes);
        }
        taken <= self.all
    }

    fn release(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Relaxed);
    }
}

/// A database that is being written, in a folder of a checkpoint.
#[derive(Debug)]
pub(crate) struct Writer {
    engine: Engine,
    root: Root,
    /// Empty, or ends in `/`.
    folder: String,
    config: Config,
    state: Mutex<State>,
    /// Told whenever gathered values have been written, or could not be.
    written: Notify,
}

#[derive(Debug, Default)]
struct State {
    entries: Vec<(Bytes, Value)>,
    gathering: Option<Gathering>,
    /// Files of gathered values on their way.
    being_written: usize,
    /// Writes that have begun and not ended well. Until all have, no manifest may refer to what they write.
    unwritten: usize,
    finished: bool,
}

impl State {
    /// What has been gathered is to be written now. Counted from here on, so that no manifest is written before it.
    fn begin(&mut self) {
        self.unwritten += 1;
        self.being_written += 1;
    }
}

/// What came of a value.
enum Step {
    /// It waits for others.
    Kept,
    /// With it, there is enough to be written.
    Full(Gathering),
    /// There is no room yet.
    Wait,
}

/// A data file that is not written yet.
#[derive(Debug)]
struct Gathering {
    file: Arc<DataFile>,
    parts: Vec<Bytes>,
    bytes: usize,
}

impl Writer {
    pub(crate) fn new(engine: &Engine, root: Root, folder: String) -> Result<Self> {
        let uuid = random(&root)?;
        Ok(Self {
            engine: engine.clone(),
            root,
            folder,
            config: Config::orbax(uuid),
            state: Mutex::default(),
            written: Notify::new(),
        })
    }

    /// Adds a key, which nobody else adds. Returns the size of its value.
    pub(crate) async fn put(&self, key: String, value: PutPayload) -> Result<u64> {
        let key = Bytes::from(key);
        let size = value.content_length();
        if size <= self.config.max_inline_value_bytes as usize {
            let value = Value::Inline(compact(&value));
            self.lock().entries.push((key, value));
            return Ok(size as u64);
        }
        let limits = self.engine.gathered();
        if size >= limits.one / ALONE {
            let file = Arc::new(DataFile::random(random(&self.root)?));
            self.write(&file, value).await?;
            let value = self.location(&file, 0, size)?;
            self.lock().entries.push((key, value));
            return Ok(size as u64);
        }
        self.gather(key, compact(&value)).await?;
        Ok(size as u64)
    }

    /// Adds a small value to those that are written together.
    async fn gather(&self, key: Bytes, value: Bytes) -> Result<()> {
        // Not asked for with the lock in hand.
        let fresh = Arc::new(DataFile::random(random(&self.root)?));
        loop {
            // Before the look, so that no file that is written meanwhile goes unnoticed.
            let written = self.written.notified();
            match self.try_gather(&key, &value, &fresh)? {
                Step::Kept => return Ok(()),
                Step::Full(full) => return self.write_gathered(full).await,
                Step::Wait => written.await,
            }
        }
    }

    fn try_gather(&self, key: &Bytes, value: &Bytes, fresh: &Arc<DataFile>) -> Result<Step> {
        let limits = self.engine.gathered();
        let mut state = self.lock();
        let is_room = limits.reserve(value.len());
        if !is_room && state.being_written > 0 {
            // What is on its way makes room.
            return Ok(Step::Wait);
        }
        if !is_room {
            // Other databases have it all, and may be waiting for us: this one gives up its own.
            limits.bytes.fetch_add(value.len(), Relaxed);
        }
        let gathering = state.gathering.get_or_insert_with(|| Gathering {
            file: Arc::clone(fresh),
            parts: Vec::new(),
            bytes: 0,
        });
        let place = self.location(&gathering.file, gathering.bytes, value.len())?;
        gathering.parts.push(value.clone());
        gathering.bytes += value.len();
        let is_full = !is_room || gathering.bytes >= limits.one;
        state.entries.push((key.clone(), place));
        Ok(match state.gathering.take() {
            Some(full) if is_full => {
                state.begin();
                Step::Full(full)
            }
            gathering => {
                state.gathering = gathering;
                Step::Kept
            }
        })
    }

    /// Adds a value that is in the checkpoint already: in a tree, or in a data file by its path from the database's folder.
    pub(crate) fn put_value(&self, key: Bytes, value: Value) {
        self.lock().entries.push((key, value));
    }

    /// Writes what has been gathered, which has been begun already.
    async fn write_gathered(&self, full: Gathering) -> Result<()> {
        {
            let _being_written = BeingWritten(self, full.bytes);
            let payload = full.parts.into_iter().collect();
            self.put_file(&full.file, payload).await?;
        }
        self.lock().unwritten -= 1;
        Ok(())
    }

    async fn write(&self, file: &DataFile, payload: PutPayload) -> Result<()> {
        self.lock().unwritten += 1;
        self.put_file(file, payload).await?;
        self.lock().unwritten -= 1;
        Ok(())
    }

    async fn put_file(&self, file: &DataFile, payload: PutPayload) -> Result<()> {
        let object = format!("{}{}", self.folder, file.path());
        self.engine.put(&self.root, &object, payload).await?;
        Ok(())
    }

    fn location(&self, file: &Arc<DataFile>, at: usize, size: usize) -> Result<Value> {
        let location = Location::new(Arc::clone(file), at as u64, size as u64);
        Ok(Value::Stored(location.map_err(|source| {
            failed(&self.root, &self.folder, source)
        })?))
    }

    /// Writes what is left, the tree, and when all that is durable the manifest. Without keys nothing is written. To be
    /// called once, when every [`Writer::put`] has ended well.
    pub(crate) async fn finish(&self) -> Result<()> {
        let bad = |reason: String| Error::BadRequest {
            array: String::new(),
            reason: format!("{}{MANIFEST_NAME}: {reason}", self.folder),
        };
        let (left, mut entries) = {
            let mut state = self.lock();
            if std::mem::replace(&mut state.finished, true) {
                return Err(bad("it is finished already".to_owned()));
            }
            let left = state.gathering.take();
            if left.is_some() {
                state.begin();
            }
            (left, std::mem::take(&mut state.entries))
        };
        if let Some(left) = left {
            self.write_gathered(left).await?;
        }
        let unwritten = self.lock().unwritten;
        if unwritten > 0 {
            return Err(bad(format!("{unwritten} of its files were not written")));
        }
        if entries.is_empty() {
            return Ok(());
        }
        let config = self.config.clone();
        // A file for the nodes is all that is made of it; more of them for trees beyond 2 GiB.
        let random = random_source(&self.root)?;
        let built = self
            .engine
            .compute(move || {
                entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
                let mut builder = Builder::new(config, random)?;
                for (key, value) in entries {
                    builder.put_value(key, value)?;
                }
                builder.finish(now())
            })
            .await;
        let built = built.map_err(|source| Error::CutOff {
            operation: "building",
            object: format!("{}{MANIFEST_NAME}", self.folder),
            location: self.root.location(),
            source,
        })?;
        let built = built.map_err(|source| failed(&self.root, &self.folder, source))?;
        self.write_built(built).await
    }

    async fn write_built(&self, built: Built) -> Result<()> {
        for file in built.files {
            let payload = file.parts.into_iter().collect();
            self.put_file(&file.file, payload).await?;
        }
        let manifest = format!("{}{MANIFEST_NAME}", self.folder);
        let payload = PutPayload::from_bytes(built.manifest);
        self.engine.put(&self.root, &manifest, payload).await?;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Whoever holds it runs nothing that panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(left) = state.gathering.take() {
            self.engine.gathered().release(left.bytes);
        }
    }
}

/// Gathered bytes on their way, which are let go of whatever becomes of them.
struct BeingWritten<'a>(&'a Writer, usize);

impl Drop for BeingWritten<'_> {
    fn drop(&mut self) {
        self.0.engine.gathered().release(self.1);
        self.0.lock().being_written -= 1;
        self.0.written.notify_waiters();
    }
}

impl Engine {
    /// Makes the databases of processes into the checkpoint's own, as Orbax does when it finishes a save: small values are
    /// copied, others referred to where they are, so the databases must stay. What the checkpoint's own database has
    /// already is kept. Returns the number of keys; 0 where there is nothing to merge, and nothing is written then.
    ///
    /// # Errors
    /// A location that cannot be used; a database that cannot be read; a key with two values; failed writes.
    pub async fn merge_children(&self, location: &str) -> Result<u64> {
        let checkpoint = self.open_checkpoint(location).await?;
        let children = checkpoint.children().await?;
        if children.is_empty() {
            return Ok(0);
        }
        let root = checkpoint.root().clone();
        let config = Config::orbax(random(&root)?);
        let mut builder = Builder::new(config, random_source(&root)?)
            .map_err(|source| failed(&root, "", source))?;
        let databases = checkpoint.merged().into_iter().chain(children);
        let opened = databases.map(|database| Database::opened(database));
        let merged = waystation_ocdbt::merge(opened, &mut builder).await;
        let merged = merged.map_err(|source| failed(&root, "", source))?;
        let built = self.compute(move || builder.finish(now())).await;
        let built = built.map_err(|source| Error::CutOff {
            operation: "building",
            object: MANIFEST_NAME.to_owned(),
            location: location.to_owned(),
            source,
        })?;
        let built = built.map_err(|source| failed(&root, "", source))?;
        let writer = Writer::new(self, root, String::new())?;
        writer.write_built(built).await?;
        Ok(merged.keys)
    }
}

/// A copy that takes no more memory than it has bytes: a compressor's output lies in a buffer for the worst case, which a
/// small value would keep.
fn compact(value: &PutPayload) -> Bytes {
    let mut copy = Vec::with_capacity(value.content_length());
    for part in value.iter() {
        copy.extend_from_slice(part);
    }
    copy.into()
}

/// The time of a commit.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    })
}

fn random(root: &Root) -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                let path = "random numbers".to_owned();
                let source = OcdbtError::Source {
                    path,
                    source: std::io::Error::from(error).into(),
                };
                return Err(failed(root, "", source));
            }
        }
    }
    Ok(bytes)
}

/// Numbers for a few files: one that is random, counted on.
fn random_source(root: &Root) -> Result<impl FnMut() -> [u8; 16] + Send + 'static> {
    let mut next = u128::from_le_bytes(random(root)?);
    Ok(move || {
        next = next.wrapping_add(1);
        next.to_le_bytes()
    })
}
