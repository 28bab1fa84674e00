//! Writing an item: objects into its folder, or keys into a database of it.
//!
//! A database is written in two steps: values go to data files as they come, with a note beside each finished file of what
//! is in it; the tree and the manifest come last. Whoever begins again after an interruption finds the notes, and writes
//! only what is in none.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use object_store::buffered::BufWriter;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::Mutex;
use waystation_ocdbt::{Builder, Built, Config, DataFile, Location, Value};

use crate::objects::failed;
use crate::place::Place;
use crate::{Error, Result};

/// The folder of the notes, below the item; gone once the manifest is there.
pub(crate) const NOTES: &str = "waystation-parts";
/// A data file is finished when it has so many bytes: what an interruption may cost.
const FILE_BYTES: u64 = 256 << 20;
/// The longest note that is read.
const MAX_NOTE_BYTES: u64 = 256 << 20;

/// What counts of what an earlier run may have left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resume {
    /// All that is whole: the place is known to be that run's.
    Whole,
    /// What is just what would be written: it may be somebody else's.
    Same,
}

/// Where the objects of arrays go.
#[derive(Debug)]
pub(crate) enum Sink {
    /// Files of a folder, with those that are there.
    Files(Place, BTreeMap<String, u64>, Resume),
    /// A database in a folder.
    Database(Box<Database>),
}

impl Sink {
    /// Into a folder.
    pub(crate) async fn files(place: &Place, resume: Resume) -> Result<Sink> {
        use futures::TryStreamExt as _;
        let left = place
            .list()
            .map_ok(|(name, meta)| (name, meta.size))
            .try_collect()
            .await?;
        Ok(Sink::Files(place.clone(), left, resume))
    }

    /// Into a database that has the keys `kept` already.
    pub(crate) async fn database(
        place: &Place,
        kept: BTreeMap<String, Value>,
        resume: Resume,
    ) -> Result<Sink> {
        let database = Database::new(place, kept, resume).await?;
        Ok(Sink::Database(Box::new(database)))
    }

    /// An object that an earlier run has left, of `most` bytes at most; of a database, one that is known to be whole.
    pub(crate) async fn left(&self, key: &str, most: u64) -> Result<Left> {
        match self {
            Sink::Files(_, _, Resume::Same) => Ok(Left::None),
            Sink::Files(place, left, Resume::Whole) => match left.get(key) {
                Some(size) if *size <= most => {
                    Ok(place.get(key, most).await?.map_or(Left::None, Left::Read))
                }
                _ => Ok(Left::None),
            },
            Sink::Database(database)
                if database.resume == Resume::Whole && database.done.contains_key(key) =>
            {
                Ok(Left::Known)
            }
            Sink::Database(_) => Ok(Left::None),
        }
    }

    /// Writes an object; false where the same is there already.
    pub(crate) async fn put(&self, key: &str, bytes: Bytes) -> Result<bool> {
        match self {
            Sink::Files(place, left, resume) => {
                let len = bytes.len() as u64;
                if *resume == Resume::Same
                    && left.get(key) == Some(&len)
                    && place.get(key, len).await?.is_some_and(|left| left == bytes)
                {
                    return Ok(false);
                }
                place.put(key, bytes).await.map(|()| true)
            }
            Sink::Database(database) => database.put(key, bytes).await,
        }
    }

    /// Makes a database readable.
    pub(crate) async fn finish(self) -> Result<()> {
        match self {
            Sink::Files(..) => Ok(()),
            Sink::Database(database) => database.finish().await,
        }
    }
}

/// What an earlier run has left of an object.
#[derive(Debug)]
pub(crate) enum Left {
    None,
    /// It is there; whether it is whole is for its reader to see.
    Read(Bytes),
    /// It is there and whole.
    Known,
}

/// A database that is being written.
#[derive(Debug)]
pub(crate) struct Database {
    place: Place,
    config: Config,
    /// Keys that are kept as they are.
    kept: BTreeMap<String, Value>,
    /// Keys of finished files that an earlier run has left, with the CRC-32C of the values.
    done: BTreeMap<String, (Value, u32)>,
    resume: Resume,
    file_bytes: u64,
    new: Mutex<New>,
}

#[derive(Debug, Default)]
struct New {
    values: BTreeMap<String, Value>,
    open: Option<Open>,
    notes: Vec<String>,
}

struct Open {
    file: Arc<DataFile>,
    writer: BufWriter,
    note: Note,
    len: u64,
}

impl std::fmt::Debug for Open {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Open")
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

/// What is in a finished data file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Note {
    file: String,
    /// Key, offset, length, CRC-32C.
    values: Vec<(String, u64, u64, u32)>,
}

impl Database {
    async fn new(place: &Place, kept: BTreeMap<String, Value>, resume: Resume) -> Result<Database> {
        let notes = place.below(NOTES)?;
        let mut done = BTreeMap::new();
        let mut found = Vec::new();
        for (name, _) in notes.listing().await?.files {
            let note = notes.get(&name, MAX_NOTE_BYTES).await?.unwrap_or_default();
            if let Ok(note) = serde_json::from_slice::<Note>(&note) {
                done.extend(left(place, &note).await?);
            }
            found.push(name);
        }
        Ok(Database {
            place: place.clone(),
            config: Config::orbax(random()),
            kept,
            done,
            resume,
            file_bytes: FILE_BYTES,
            new: Mutex::new(New {
                notes: found,
                ..New::default()
            }),
        })
    }

    async fn put(&self, key: &str, bytes: Bytes) -> Result<bool> {
        let mut new = self.new.lock().await;
        let len = bytes.len() as u64;
        if len <= u64::from(self.config.max_inline_value_bytes) {
            new.values.insert(key.to_owned(), Value::Inline(bytes));
            return Ok(true);
        }
        let crc = crc32c(&bytes);
        if let Some((value, left)) = self.done.get(key)
            && (value.length(), *left) == (len, crc)
        {
            new.values.insert(key.to_owned(), value.clone());
            return Ok(false);
        }
        let mut open = match new.open.take() {
            Some(open) => open,
            None => {
                let file = DataFile::random(random());
                Open {
                    writer: self.place.writer(file.path())?,
                    note: Note {
                        file: file.path().to_owned(),
                        values: Vec::new(),
                    },
                    file: Arc::new(file),
                    len: 0,
                }
            }
        };
        let location = Location::new(Arc::clone(&open.file), open.len, len)
            .map_err(|source| failed(&self.place, source))?;
        open.writer
            .put(bytes)
            .await
            .map_err(|source| self.place.failed("writing", open.file.path(), source))?;
        open.note.values.push((key.to_owned(), open.len, len, crc));
        open.len += len;
        new.values.insert(key.to_owned(), Value::Stored(location));
        if open.len >= self.file_bytes {
            let note = self.close(open).await?;
            new.notes.push(note);
        } else {
            new.open = Some(open);
        }
        Ok(true)
    }

    /// Finishes a data file and notes what is in it; returns the note's name.
    async fn close(&self, mut open: Open) -> Result<String> {
        let ended = open.writer.shutdown().await;
        ended.map_err(|source| Error::Storage {
            operation: "writing",
            object: open.file.path().to_owned(),
            location: self.place.location().to_owned(),
            source: Box::new(object_store::Error::Generic {
                store: "data file",
                source: Box::new(source),
            }),
        })?;
        let name = format!(
            "{}.json",
            open.file.path().rsplit('/').next().unwrap_or_default()
        );
        let note = serde_json::to_vec(&open.note)
            .map_err(|error| self.place.malformed(&name, error.to_string()))?;
        self.place
            .below(NOTES)?
            .put(&name, Bytes::from(note))
            .await?;
        Ok(name)
    }

    async fn finish(self) -> Result<()> {
        let Database {
            ref place,
            ref config,
            ..
        } = self;
        let mut new = std::mem::take(&mut *self.new.lock().await);
        if let Some(open) = new.open.take() {
            let note = self.close(open).await?;
            new.notes.push(note);
        }
        let mut values = self.kept.clone();
        if self.resume == Resume::Whole {
            let done = self.done.iter();
            values.extend(done.map(|(key, (value, _))| (key.clone(), value.clone())));
        }
        values.extend(new.values);
        write(place, config.clone(), values).await?;
        let notes = place.below(NOTES)?;
        for name in &new.notes {
            notes.delete(name).await?;
        }
        remove_empty(&notes).await;
        Ok(())
    }
}

/// Writes the tree and, last, the manifest of a database whose values lie in files already.
pub(crate) async fn write(
    place: &Place,
    config: Config,
    values: BTreeMap<String, Value>,
) -> Result<()> {
    let blame = |source| failed(place, source);
    let mut builder = Builder::new(config, random).map_err(blame)?;
    for (key, value) in values {
        builder.put_value(key.into(), value).map_err(blame)?;
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(0));
    let Built {
        files, manifest, ..
    } = builder.finish(now).map_err(blame)?;
    for file in files {
        let parts: object_store::PutPayload = file.parts.into_iter().collect();
        place.put(file.file.path(), parts).await?;
    }
    place.put(Built::MANIFEST, manifest).await
}

/// What a note says, as far as it is so.
async fn left(place: &Place, note: &Note) -> Result<Vec<(String, (Value, u32))>> {
    let Some((base, name)) = note.file.split_once('/') else {
        return Ok(Vec::new());
    };
    if base != "d" {
        return Ok(Vec::new());
    }
    let Ok(file) = DataFile::new("", &format!("d/{name}")) else {
        return Ok(Vec::new());
    };
    let file = Arc::new(file);
    let mut found = Vec::new();
    for (key, offset, len, crc) in &note.values {
        let Ok(location) = Location::new(Arc::clone(&file), *offset, *len) else {
            continue;
        };
        let read = place.range(file.path(), location.range()).await?;
        if read.is_some_and(|bytes| bytes.len() as u64 == *len && crc32c(&bytes) == *crc) {
            found.push((key.clone(), (Value::Stored(location), *crc)));
        }
    }
    Ok(found)
}

async fn remove_empty(place: &Place) {
    if let Some(path) = place.local_path() {
        // Nothing is lost when it stays.
        let _ = tokio::fs::remove_dir(path).await;
    }
}

fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

pub(crate) fn random() -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) if count > 0 => filled += count,
            // Interrupted. The system has random bytes ever after its start.
            _ => std::thread::yield_now(),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;
    use crate::objects::Databases;

    async fn database(place: &Place) -> Database {
        let mut database = Database::new(place, BTreeMap::new(), Resume::Whole)
            .await
            .unwrap();
        database.file_bytes = 5000;
        database
    }

    #[tokio::test]
    async fn what_was_finished_before_an_interruption_is_not_written_again() {
        let place = Place::from_store(Arc::new(InMemory::new()), "item", "memory:///item");
        let value = |number: u8| Bytes::from(vec![number; 2000]);
        let first = database(&place).await;
        for number in 0..5 {
            first
                .put(&format!("w/{number}"), value(number))
                .await
                .unwrap();
        }
        first.put("w/.zarray", "{}".into()).await.unwrap();
        // Three values are in a finished file, two in one that is not.
        drop(first);
        let again = database(&place).await;
        let sink = Sink::Database(Box::new(again));
        for number in 0..5 {
            let key = format!("w/{number}");
            let is_left = matches!(sink.left(&key, 0).await.unwrap(), Left::Known);
            assert_eq!(is_left, number < 3, "{number}");
            if !is_left {
                sink.put(&key, value(number)).await.unwrap();
            }
        }
        sink.put("w/.zarray", "{}".into()).await.unwrap();
        sink.finish().await.unwrap();
        let open = Databases::open(&place, true, &[]).await.unwrap();
        let objects = open.objects(&mut Vec::new()).await.unwrap();
        for number in 0..5 {
            let read = objects.get(&format!("w/{number}"), 2000).await.unwrap();
            assert_eq!(read.unwrap(), value(number));
        }
        assert!(
            place
                .below(NOTES)
                .unwrap()
                .listing()
                .await
                .unwrap()
                .files
                .is_empty()
        );
    }

    #[tokio::test]
    async fn in_place_what_is_left_counts_where_it_is_the_same() {
        let place = Place::from_store(Arc::new(InMemory::new()), "item", "memory:///item");
        for (key, left) in [("w/0", [7; 2000]), ("w/1", [8; 2000])] {
            place.put(key, left.to_vec()).await.unwrap();
        }
        let files = Sink::files(&place, Resume::Same).await.unwrap();
        let open = async || {
            let open = Database::new(&place, BTreeMap::new(), Resume::Same);
            let mut open = open.await.unwrap();
            open.file_bytes = 2000;
            open
        };
        let first = open().await;
        for (key, left) in [("w/0", [7; 2000]), ("w/1", [8; 2000]), ("gone", [9; 2000])] {
            assert!(first.put(key, left.to_vec().into()).await.unwrap());
        }
        drop(first);
        let database = Sink::Database(Box::new(open().await));
        for sink in [&files, &database] {
            assert!(matches!(sink.left("w/0", 2000).await.unwrap(), Left::None));
            for (key, is_new) in [("w/0", false), ("w/1", true), ("w/2", true)] {
                let put = sink.put(key, vec![7; 2000].into()).await.unwrap();
                assert_eq!(put, is_new, "{key}");
            }
        }
        database.finish().await.unwrap();
        let open = Databases::open(&place, true, &[]).await.unwrap();
        let objects = open.objects(&mut Vec::new()).await.unwrap();
        assert_eq!(
            objects.iter().count(),
            3,
            "and nothing of what is no longer wanted"
        );
        for key in ["w/0", "w/1", "w/2"] {
            assert_eq!(
                objects.get(key, 2000).await.unwrap().unwrap(),
                [7; 2000][..]
            );
            assert_eq!(place.get(key, 2000).await.unwrap().unwrap(), [7; 2000][..]);
        }
    }

    #[tokio::test]
    async fn a_note_of_what_is_not_so_counts_for_nothing() {
        let place = Place::from_store(Arc::new(InMemory::new()), "item", "memory:///item");
        place.put("d/0", vec![7; 10]).await.unwrap();
        let notes = place.below(NOTES).unwrap();
        for (name, note) in [
            ("crc", r#"{"file":"d/0","values":[["w/0",0,10,1]]}"#),
            ("long", r#"{"file":"d/0","values":[["w/0",5,10,1]]}"#),
            ("elsewhere", r#"{"file":"e/0","values":[["w/0",0,10,1]]}"#),
            ("up", r#"{"file":"d/../x","values":[["w/0",0,10,1]]}"#),
            ("none", r#"{"file":"d/1","values":[["w/0",0,10,1]]}"#),
            (
                "huge",
                r#"{"file":"d/0","values":[["w/0",18446744073709551615,10,1]]}"#,
            ),
            ("broken", "{"),
        ] {
            notes.put(name, note.as_bytes().to_vec()).await.unwrap();
        }
        assert!(database(&place).await.done.is_empty());
    }
}
