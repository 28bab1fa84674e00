//! The disk tier as one thread sees it. Everything here may block.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use rustix::io::Errno;
use tracing::{info, warn};
use waystation_lifecycle::bucket::layout::Digest;

use super::census::{Bounds, Census, Change};
use super::folder::{Content, Folder, footprint};
use super::history::{self, Miss};
use super::index::{Closed, Index};
use crate::counters::Counters;
use crate::envelope::Bad;
use crate::quiet::Quiet;
use crate::tier::{Found, Put, chain};
use crate::verify::Verifier;

/// Bad files that are remembered. Beyond that all are forgotten, and counted again.
const COUNTED: usize = 65_536;

/// How the store behaves.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) folder: PathBuf,
    pub(super) bounds: Bounds,
    pub(super) verifier: Verifier,
    /// How often a process without the index asks for it.
    pub(super) index_retry: Duration,
}

/// The folder with all that this process knows of it.
#[derive(Debug)]
pub(super) struct Store {
    folder: Folder,
    settings: Settings,
    counters: Arc<Counters>,
    state: Mutex<State>,
    has_index: AtomicBool,
    bad_warning: Quiet,
    /// Bad files that are still there, by key, and what tells each from the next.
    counted: Mutex<HashMap<Digest, (u64, u64, i64)>>,
}

#[derive(Debug)]
struct State {
    census: Census,
    index: Option<Index>,
    asked: Option<Instant>,
    said: bool,
}

impl Store {
    pub(super) fn new(settings: Settings, counters: Arc<Counters>) -> Store {
        Store {
            folder: Folder::new(settings.folder.clone()),
            settings,
            counters,
            state: Mutex::new(State {
                census: Census::new(),
                index: None,
                asked: None,
                said: false,
            }),
            has_index: AtomicBool::new(false),
            bad_warning: Quiet::default(),
            counted: Mutex::default(),
        }
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The entry of a key, verified. A bad one is counted and removed.
    pub(super) fn get(&self, key: &Digest) -> io::Result<Option<Found>> {
        let (object, read) = match self
            .folder
            .read(key, self.settings.verifier.limits().object)?
        {
            Content::Absent => return Ok(None),
            Content::Odd => {
                self.refuse(key, "no file that an entry could be");
                return Ok(None);
            }
            Content::File(object, read) => (object, read),
        };
        match self.settings.verifier.check_blocking(key, &object) {
            Ok(opened) => {
                // Whoever may only read does without.
                let _ = self.folder.touch(&read);
                Ok(Some(Found {
                    opened,
                    object,
                    written: None,
                }))
            }
            Err(bad) => {
                self.refuse(key, &bad.to_string());
                // Another build's entry, or another key's, may be of use to it; it goes when this one writes its own.
                if !matches!(bad, Bad::UnknownFormat { .. } | Bad::Signature(_))
                    && self.folder.remove_read(key, &read).unwrap_or(false)
                {
                    // Its number may be the next one's.
                    self.counted().remove(key);
                }
                Ok(None)
            }
        }
    }

    /// Keeps an entry, unless a good one is there. What else is there is replaced.
    pub(super) fn put(&self, key: &Digest, sealed: &Bytes) -> io::Result<Put> {
        let bytes = sealed.len() as u64;
        if footprint(bytes) > self.settings.bounds.bytes {
            return Ok(Put::NoRoom);
        }
        if self.get(key)?.is_some() {
            return Ok(Put::Present);
        }
        let temporary = match self.folder.begin(key, bytes) {
            Ok(temporary) => temporary,
            Err(error) if is_in_the_way(&error) => return Ok(Put::NoRoom),
            Err(error) => return Err(error),
        };
        if !self.make_room(self.settings.bounds)? {
            return Ok(Put::NoRoom);
        }
        match temporary.keep(key, sealed) {
            Ok(()) => {}
            Err(error) if is_full(&error) => {
                // The disk holds less than the limit allows, or others fill it: what is there gives way.
                self.shrink()?;
                return Err(error);
            }
            Err(error) if is_in_the_way(&error) => return Ok(Put::NoRoom),
            Err(error) => return Err(error),
        }
        // So that the index and the count have it; what fails here is found again at the next write.
        let mut state = self.lock();
        // There is something to keep an index of, perhaps for the first time.
        self.ask_for_index(&mut state, self.settings.index_retry);
        let _ = self.look(&mut state);
        Ok(Put::Created)
    }

    /// What is to be done now and then: takes the index if it is free, removes what killed writers have left, and sees
    /// that the bounds hold, which they may not when they have been lowered.
    pub(super) fn tend(&self) -> io::Result<()> {
        if self.folder.root()?.is_none() {
            return Ok(());
        }
        let mut state = self.lock();
        self.ask_for_index(&mut state, self.settings.index_retry);
        self.look(&mut state)?;
        state.census.sweep(&self.folder, SystemTime::now());
        self.counters.disk_bytes.set(state.census.bytes());
        drop(state);
        self.make_room(self.settings.bounds)?;
        let mut state = self.lock();
        if let Some(index) = &mut state.index {
            let mut kept = Ok(());
            for (id, miss) in history::read(&self.folder) {
                kept = kept.and_then(|()| index.record(id, &miss.record));
            }
            self.keep_index(&mut state, kept);
        }
        Ok(())
    }

    /// True where this process has the index.
    pub(super) fn has_index(&self) -> bool {
        self.has_index.load(Ordering::Relaxed)
    }

    /// Keeps a record in the history.
    pub(super) fn record_miss(&self, record: &[u8]) -> io::Result<()> {
        if record.len() > history::MAX_RECORD_BYTES {
            return Err(Errno::FBIG.into());
        }
        let id = history::id_now(record);
        history::append(&self.folder, id, record)?;
        let mut state = self.lock();
        if let Some(index) = &mut state.index {
            let kept = index.record(id, record);
            self.keep_index(&mut state, kept);
        }
        Ok(())
    }

    /// The last records of the history, newest first, those of the index that this process has among them.
    #[cfg(test)]
    pub(super) fn recent_misses(&self, most: usize) -> Vec<Miss> {
        let mut found = history::read(&self.folder);
        let mut state = self.lock();
        if let Some(index) = &state.index {
            match index.recent(most) {
                Ok(kept) => found.extend(kept),
                Err(closed) => self.keep_index(&mut state, Err(closed)),
            }
        }
        found.into_values().rev().take(most).collect()
    }

    /// Frees a tenth of what the folder takes.
    pub(super) fn shrink(&self) -> io::Result<()> {
        let bytes = self.lock().census.bytes().saturating_sub(1);
        self.make_room(Bounds {
            bytes,
            ..self.settings.bounds
        })?;
        Ok(())
    }

    /// True where all that is in the folder is within the bounds now.
    fn make_room(&self, bounds: Bounds) -> io::Result<bool> {
        let mut state = self.lock();
        self.look(&mut state)?;
        let mut changes = Vec::new();
        let State { census, .. } = &mut *state;
        let made = census.make_room(&self.folder, bounds, SystemTime::now(), &mut changes);
        self.save(&mut state, &changes);
        self.counters.disk_bytes.set(state.census.bytes());
        let room = made?;
        self.counters.disk_evictions.add(room.evicted);
        self.counters.disk_evicted_bytes.add(room.evicted_bytes);
        if room.evicted > 0 {
            // Its owner may be gone, and whoever evicts is at work now.
            self.ask_for_index(
                &mut state,
                self.settings.index_retry.min(Duration::from_secs(1)),
            );
        }
        Ok(room.enough)
    }

    /// Sees what has changed in the folder.
    fn look(&self, state: &mut State) -> io::Result<()> {
        let changes = state.census.refresh(&self.folder, SystemTime::now())?;
        self.save(state, &changes);
        Ok(())
    }

    fn save(&self, state: &mut State, changes: &[Change]) {
        if let Some(index) = &state.index {
            let kept = index.save(changes);
            self.keep_index(state, kept);
        }
    }

    /// Removes the index if it has failed. It is asked for again later, and then begun anew.
    fn keep_index(&self, state: &mut State, kept: Result<(), Closed>) {
        if let Err(error) = kept {
            if let Some(index) = state.index.take() {
                index.discard(&self.folder);
            }
            self.has_index.store(false, Ordering::Relaxed);
            warn!(folder = %self.folder.path().display(), %error, "the index of the disk cache has failed; the files alone serve");
        }
    }

    fn ask_for_index(&self, state: &mut State, every: Duration) {
        let due = state.asked.is_none_or(|asked| asked.elapsed() >= every);
        if state.index.is_some() || !due {
            return;
        }
        state.asked = Some(Instant::now());
        let folder = self.folder.path().display();
        match Index::open(&self.folder) {
            Ok((index, census)) => {
                state.census = census;
                state.index = Some(index);
                self.has_index.store(true, Ordering::Relaxed);
                if state.said {
                    info!(%folder, "this process keeps the index of the disk cache now");
                }
                // What it cannot list now it will list later.
                let _ = self.look(state);
            }
            Err(closed) if !state.said => {
                info!(%folder, reason = %chain(&closed), "the disk cache works without its index, from the files alone");
                state.said = true;
            }
            Err(_) => {}
        }
    }

    /// Counts what is under a key's name, once however often it is met.
    fn refuse(&self, key: &Digest, reason: &str) {
        if let Some(mark) = self.folder.mark(key) {
            let mut counted = self.counted();
            if counted.len() >= COUNTED {
                counted.clear();
            }
            if counted.insert(*key, mark) == Some(mark) {
                return;
            }
        }
        self.counters.disk_bad_entries.one();
        if let Some(suppressed) = self.bad_warning.due() {
            warn!(
                folder = %self.folder.path().display(), key = hex::encode(key), reason, suppressed,
                "bad entry of the disk cache stepped over"
            );
        }
    }

    fn counted(&self) -> MutexGuard<'_, HashMap<Digest, (u64, u64, i64)>> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The history of a folder, for a process that does not use it as a cache.
pub(super) fn recent_misses(folder: PathBuf, most: usize) -> Vec<Miss> {
    let folder = Folder::new(folder);
    let mut found = history::read(&folder);
    // Only where there is one, and nobody has it.
    if folder.path().join("index").is_dir()
        && let Ok((index, _)) = Index::open(&folder)
        && let Ok(kept) = index.recent(most)
    {
        found.extend(kept);
    }
    found.into_values().rev().take(most).collect()
}

/// True where the disk, or the user's share of it, has no room.
fn is_full(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::NOSPC | Errno::DQUOT))
}

/// True where a folder of somebody's bears the key's name, or something else that of its shard.
fn is_in_the_way(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(
        errno,
        Some(Errno::ISDIR | Errno::NOTEMPTY | Errno::EXIST | Errno::LOOP)
    )
}
