//! What the folder held when a process last looked, and the history of misses, in a `sled` database.
//!
//! It saves the process that has it a look at every file when it starts, and nothing else: all that is in it but the
//! history is read from the files where it is missing. So it may be lost at any time. It belongs to the process that
//! holds the lock beside it, and goes to another one when that ends, however it ends.
//!
//! `sled` may fail on a damaged database in any way, a panic among them. So it is opened by a thread that may die or
//! hang, each call is a contained one, and after the first failure the database is removed and begun anew.

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{self, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use sled::{Batch, Db, IVec};
use tracing::{debug, info};
use waystation_lifecycle::bucket::layout::Digest;

use super::census::{Census, Change};
use super::folder::{FILE_MODE, Folder, Seen};
use super::history::{Miss, MissId};

/// How long opening may take. It reads what it has; an index of 100,000 entries opens in a fraction of a second.
const OPEN_DEADLINE: Duration = Duration::from_secs(10);

/// Memory for its pages.
const CACHE_BYTES: u64 = 8 << 20;

/// How often it writes, at most, what it was told. What a kill costs is read from the files.
const FLUSH_MS: u64 = 2000;

/// A database larger than this has gone wrong; it is begun anew.
const MAX_BYTES: u64 = 256 << 20;

/// Misses that are kept.
const MAX_MISSES: usize = 4096;

const ENTRY: u8 = b'e';
const STAMP: u8 = b's';
const MISS: u8 = b'm';

/// The index, in the process that owns it.
#[derive(Debug)]
pub(super) struct Index {
    database: Database,
    misses: usize,
    /// Last, so that it is given up when the database is closed.
    _lock: File,
}

/// An open database, of which nothing gets out but answers and errors.
#[derive(Debug)]
struct Database {
    /// `None` only while it is being dropped.
    db: Option<Db>,
}

/// Why there is no index here.
#[derive(Debug, thiserror::Error)]
pub(super) enum Closed {
    #[error("another process has it")]
    Held,
    #[error("its lock cannot be taken")]
    Lock(#[source] io::Error),
    #[error("{0}")]
    Broken(String),
}

impl Index {
    /// Takes the index, if no process has it, and begins it anew if it is of no use.
    pub(super) fn open(folder: &Folder) -> Result<(Index, Census), Closed> {
        let lock = lock(folder)?;
        let path = path(folder);
        let opened = match open_database(&path) {
            Err(Closed::Broken(reason)) => {
                info!(
                    reason,
                    "the index of the disk cache is of no use and is made anew"
                );
                discard(&path).map_err(|error| Closed::Broken(error.to_string()))?;
                open_database(&path)
            }
            opened => opened,
        };
        let (database, misses, census) = opened?;
        let index = Index {
            database,
            misses,
            _lock: lock,
        };
        Ok((index, census))
    }

    /// Removes it, after it has failed.
    pub(super) fn discard(self, folder: &Folder) {
        let Index {
            database, _lock, ..
        } = self;
        drop(database);
        if let Err(error) = discard(&path(folder)) {
            debug!(%error, "the index of the disk cache cannot be removed");
        }
    }

    /// Notes what has changed.
    pub(super) fn save(&self, changes: &[Change]) -> Result<(), Closed> {
        for change in changes {
            // The time of the folder together with what was in it then, or not at all.
            let mut batch = Batch::default();
            for (key, seen) in &change.put {
                batch.insert(name(ENTRY, key), entry_value(*seen));
            }
            for key in &change.gone {
                batch.remove(name(ENTRY, key));
            }
            match change.stamp {
                Some(stamp) => batch.insert(name(STAMP, &[change.shard]), &stamp.to_be_bytes()),
                None => batch.remove(name(STAMP, &[change.shard])),
            }
            super::fault::point("index not yet written");
            self.database.contained(|db| db.apply_batch(batch))?;
        }
        Ok(())
    }

    /// Keeps a miss, unless it is kept already or older than all of as many as are kept.
    pub(super) fn record(&mut self, id: MissId, record: &[u8]) -> Result<(), Closed> {
        let (name, full) = (miss_name(id), self.misses >= MAX_MISSES);
        let added = self.database.contained(|db| {
            if db.contains_key(&name)? {
                return Ok(0);
            }
            let oldest = db.scan_prefix([MISS]).keys().next().transpose()?;
            match oldest.filter(|_| full) {
                Some(oldest) if *oldest > *name => Ok(0),
                Some(oldest) => {
                    db.remove(oldest)?;
                    db.insert(&*name, record)?;
                    Ok(0)
                }
                None => {
                    db.insert(&*name, record)?;
                    Ok(1)
                }
            }
        })?;
        self.misses += added;
        Ok(())
    }

    /// The misses kept, newest first.
    pub(super) fn recent(&self, most: usize) -> Result<Vec<(MissId, Miss)>, Closed> {
        self.database.contained(|db| {
            let mut found = Vec::new();
            for item in db.scan_prefix([MISS]).rev().take(most) {
                let (name, record) = item?;
                if let Some(id) = miss_id(&name) {
                    found.push((id, Miss::new(id, record.to_vec())));
                }
            }
            Ok(found)
        })
    }
}

impl Database {
    fn contained<T>(&self, work: impl FnOnce(&Db) -> sled::Result<T>) -> Result<T, Closed> {
        match &self.db {
            Some(db) => contain(|| work(db)),
            None => Err(Closed::Broken("it is closed".to_owned())),
        }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let db = self.db.take();
        let _ = contain(|| {
            if let Some(db) = &db {
                db.flush()?;
            }
            drop(db);
            Ok(())
        });
    }
}

fn path(folder: &Folder) -> PathBuf {
    folder.path().join("index")
}

/// The lock. Held as long as its file is open, and so no longer than its process lives.
fn lock(folder: &Folder) -> Result<File, Closed> {
    let root = folder.make_root().map_err(Closed::Lock)?;
    let flags =
        OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = fs::openat(&root, "index.lock", flags, Mode::from_raw_mode(FILE_MODE))
        .map_err(|error| Closed::Lock(error.into()))?;
    match fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(File::from(file)),
        Err(Errno::WOULDBLOCK) => Err(Closed::Held),
        Err(error) => Err(Closed::Lock(error.into())),
    }
}

/// Looks at the database from outside.
fn check(path: &Path) -> Result<(), Closed> {
    let broken = |error: io::Error| Closed::Broken(error.to_string());
    let found = match path.symlink_metadata() {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(broken(error)),
    };
    if !found.is_dir() {
        return Err(Closed::Broken("it is no folder".to_owned()));
    }
    let mut bytes = 0;
    for item in path.read_dir().map_err(broken)? {
        let item = item.map_err(broken)?;
        let meta = item.metadata().map_err(broken)?;
        if !meta.is_file() && !meta.is_dir() {
            return Err(Closed::Broken("there is something else in it".to_owned()));
        }
        bytes += meta.len();
    }
    if bytes > MAX_BYTES {
        return Err(Closed::Broken(format!("it has {bytes} bytes")));
    }
    Ok(())
}

fn discard(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(found) if found.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Opens the database and reads it, on a thread of its own, whose end is not waited for longer than [`OPEN_DEADLINE`].
fn open_database(path: &Path) -> Result<(Database, usize, Census), Closed> {
    check(path)?;
    let config = sled::Config::new()
        .path(path)
        .cache_capacity(CACHE_BYTES)
        .flush_every_ms(Some(FLUSH_MS))
        .mode(sled::Mode::LowSpace);
    let (answer, opened) = mpsc::sync_channel(1);
    let open = move || {
        let opened = contain(|| config.open()).and_then(|db| {
            let database = Database { db: Some(db) };
            let census = database.contained(load)?;
            let misses = database.contained(count_misses)?;
            Ok((database, misses, census))
        });
        // Where nobody waits any more it is closed again.
        let _ = answer.send(opened);
    };
    std::thread::Builder::new()
        .name("cache-index".to_owned())
        .spawn(open)
        .map_err(|error| Closed::Broken(error.to_string()))?;
    match opened.recv_timeout(OPEN_DEADLINE) {
        Ok(opened) => opened,
        Err(_) => Err(Closed::Broken(format!(
            "it does not open within {} s",
            OPEN_DEADLINE.as_secs()
        ))),
    }
}

fn count_misses(db: &Db) -> sled::Result<usize> {
    let mut misses = db.scan_prefix([MISS]).keys();
    misses.try_fold(0, |count, miss| miss.map(|_| count + 1))
}

fn load(db: &Db) -> sled::Result<Census> {
    let damaged = || sled::Error::Unsupported("a record of another form".to_owned());
    let mut stamps = Vec::new();
    for item in db.scan_prefix([STAMP]) {
        let (name, value) = item?;
        let (Some(&[shard]), Ok(stamp)) = (name.get(1..), <[u8; 8]>::try_from(&*value)) else {
            return Err(damaged());
        };
        stamps.push((shard, i64::from_be_bytes(stamp)));
    }
    let mut entries = Vec::new();
    for item in db.scan_prefix([ENTRY]) {
        let (name, value) = item?;
        let key = name.get(1..).and_then(|key| Digest::try_from(key).ok());
        match (key, seen_value(&value)) {
            (Some(key), Some(seen)) => entries.push((key, seen)),
            _ => return Err(damaged()),
        }
    }
    Ok(Census::from_index(stamps, entries))
}

/// Runs what may panic.
fn contain<T>(work: impl FnOnce() -> sled::Result<T>) -> Result<T, Closed> {
    // Nothing that a panic leaves behind is looked at again: the database is dropped.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Closed::Broken(error.to_string())),
        Err(panic) => {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(Closed::Broken(said.unwrap_or("it panicked").to_owned()))
        }
    }
}

fn name(kind: u8, rest: &[u8]) -> Vec<u8> {
    [&[kind], rest].concat()
}

fn entry_value(seen: Seen) -> Vec<u8> {
    [seen.bytes.to_be_bytes(), seen.used.to_be_bytes()].concat()
}

fn seen_value(value: &[u8]) -> Option<Seen> {
    let (bytes, used) = value.split_first_chunk()?;
    Some(Seen {
        bytes: u64::from_be_bytes(*bytes),
        used: i64::from_be_bytes(used.try_into().ok()?),
    })
}

fn miss_name((unix_ms, mark): MissId) -> Vec<u8> {
    name(MISS, &[unix_ms.to_be_bytes(), mark].concat())
}

fn miss_id(name: &IVec) -> Option<MissId> {
    let (unix_ms, mark) = name.get(1..)?.split_first_chunk()?;
    Some((u64::from_be_bytes(*unix_ms), mark.try_into().ok()?))
}
