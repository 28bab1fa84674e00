//! The objects of an item: files of its folder, or keys of its databases, each with its size.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt as _;
use waystation_ocdbt::{self as ocdbt, Database, Limits, Source, SourceError, Value};

use crate::place::Place;
use crate::tree::{CHILD_PREFIX, MANIFEST};
use crate::{Error, Result};

/// The most memory for names, with the small values that come with those of a database.
const MAX_LISTED_BYTES: u64 = 1 << 30;
/// What is counted for an object beside its name.
const ENTRY_BYTES: u64 = 96;
/// The most memory for decoded nodes of one database; they are read once, in order.
const KEPT_BYTES: usize = 1 << 20;

/// Objects by name.
#[derive(Debug, Clone)]
pub(crate) struct Objects {
    place: Place,
    entries: BTreeMap<String, Entry>,
    listed_bytes: u64,
}

/// Where one object is.
#[derive(Debug, Clone)]
pub(crate) enum Entry {
    /// A file of the folder, of that size.
    File(u64),
    /// A value of a database.
    Value(Value),
}

impl Entry {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Entry::File(len) => *len,
            Entry::Value(value) => value.length(),
        }
    }
}

impl Objects {
    pub(crate) fn none(place: &Place) -> Objects {
        Objects {
            place: place.clone(),
            entries: BTreeMap::new(),
            listed_bytes: 0,
        }
    }

    /// All files of a folder.
    pub(crate) async fn files(place: &Place) -> Result<Objects> {
        let mut objects = Objects::none(place);
        let mut found = std::pin::pin!(place.list());
        while let Some((name, meta)) = found.try_next().await? {
            objects.insert(name, Entry::File(meta.size))?;
        }
        Ok(objects)
    }

    pub(crate) fn insert(&mut self, name: String, entry: Entry) -> Result<()> {
        let inline = match &entry {
            Entry::Value(Value::Inline(bytes)) => bytes.len() as u64,
            _ => 0,
        };
        self.listed_bytes += name.len() as u64 + inline + ENTRY_BYTES;
        if self.listed_bytes > MAX_LISTED_BYTES {
            return Err(Error::Memory {
                what: "the list of objects".to_owned(),
                location: self.place.location().to_owned(),
                bytes: self.listed_bytes,
                allowed: MAX_LISTED_BYTES,
            });
        }
        self.entries.insert(name, entry);
        Ok(())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries
            .iter()
            .map(|(name, entry)| (name.as_str(), entry))
    }

    /// Those whose names begin so.
    pub(crate) fn below(&self, prefix: &str) -> impl Iterator<Item = (&str, &Entry)> + use<'_> {
        let prefix = prefix.to_owned();
        self.entries
            .range(prefix.clone()..)
            .map(|(name, entry)| (name.as_str(), entry))
            .take_while(move |(name, _)| name.starts_with(&prefix))
    }

    pub(crate) fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    pub(crate) fn into_values(self) -> BTreeMap<String, Value> {
        let values = self
            .entries
            .into_iter()
            .filter_map(|(name, entry)| match entry {
                Entry::Value(value) => Some((name, value)),
                Entry::File(_) => None,
            });
        values.collect()
    }

    /// The bytes of an object in a range, which ends no later than the object; `None` where there is no such object.
    pub(crate) async fn range(&self, name: &str, range: Range<u64>) -> Result<Option<Bytes>> {
        let Some(entry) = self.entries.get(name) else {
            return Ok(None);
        };
        let range = range.start.min(entry.len())..range.end.min(entry.len());
        let len = range.end - range.start;
        let bytes = match entry {
            Entry::File(_) => self.place.range(name, range).await?,
            Entry::Value(Value::Inline(bytes)) => {
                Some(bytes.slice(range.start as usize..range.end as usize))
            }
            Entry::Value(Value::Stored(location)) => {
                let begin = location.offset();
                let file = location.path();
                let read = self
                    .place
                    .range(file, begin + range.start..begin + range.end)
                    .await?;
                let Some(bytes) = read else {
                    return Err(self.place.malformed(
                        file,
                        format!("it is not there; the database has {name} in it"),
                    ));
                };
                if bytes.len() as u64 != len {
                    return Err(self.place.malformed(
                        file,
                        format!(
                            "it ends before {}, where the database has {name} in it",
                            begin + range.end
                        ),
                    ));
                }
                Some(bytes)
            }
        };
        match bytes {
            Some(bytes) if bytes.len() as u64 != len => {
                Err(self.place.malformed(name, "it changed while it was read"))
            }
            other => Ok(other),
        }
    }

    /// A whole object of `most` bytes at most.
    pub(crate) async fn get(&self, name: &str, most: u64) -> Result<Option<Bytes>> {
        match self.entries.get(name) {
            Some(entry) if entry.len() > most => Err(self.place.malformed(
                name,
                format!("{} bytes, at most {most} are taken", entry.len()),
            )),
            Some(entry) => self.range(name, 0..entry.len()).await,
            None => Ok(None),
        }
    }
}

/// The files of databases below a place.
#[derive(Debug, Clone)]
pub(crate) struct Files(Place);

impl Source for Files {
    async fn read(
        &self,
        path: &str,
        range: Range<u64>,
    ) -> std::result::Result<Option<Bytes>, SourceError> {
        self.0.range(path, range).await.map_err(Into::into)
    }
}

/// The databases of an item: the merged one, or those that processes wrote.
#[derive(Debug)]
pub(crate) struct Databases {
    place: Place,
    pub(crate) open: Vec<(String, Database<Files>)>,
}

impl Databases {
    /// Opens the database in the item's folder; where there is none, those in `children`.
    pub(crate) async fn open(place: &Place, merged: bool, children: &[String]) -> Result<Self> {
        let files = Files(place.clone());
        let limits = Limits {
            kept_bytes: KEPT_BYTES,
            ..Limits::default()
        };
        let folders: Vec<String> = if merged {
            vec![String::new()]
        } else {
            children.iter().map(|name| format!("{name}/")).collect()
        };
        let mut open = Vec::new();
        for folder in folders {
            let opened = match Database::open_under(files.clone(), &folder, limits).await {
                Err(ocdbt::Error::Numbered) => {
                    let generation = latest(&place.below(folder.trim_end_matches('/'))?).await?;
                    Database::open_generation(files.clone(), &folder, generation, limits).await
                }
                other => other,
            };
            let database = opened.map_err(|source| failed(place, source))?;
            open.push((folder, database));
        }
        Ok(Databases {
            place: place.clone(),
            open,
        })
    }

    /// All keys of all databases. A key of several must be the same in each.
    pub(crate) async fn objects(&self, odd: &mut Vec<String>) -> Result<Objects> {
        let mut objects = Objects::none(&self.place);
        for (folder, database) in &self.open {
            let mut list = database.list(b"");
            while let Some(entry) = list
                .next()
                .await
                .map_err(|source| failed(&self.place, source))?
            {
                let Ok(key) = String::from_utf8(entry.key.to_vec()) else {
                    odd.push(format!("{folder}{}", entry.key.escape_ascii()));
                    continue;
                };
                let before = objects.entry(&key);
                if let Some(Entry::Value(before)) = before
                    && (*before != entry.value || !matches!(before, Value::Inline(_)))
                {
                    return Err(self
                        .place
                        .malformed(folder, format!("another database has the key {key:?} too")));
                }
                objects.insert(key, Entry::Value(entry.value))?;
            }
        }
        Ok(objects)
    }
}

async fn latest(place: &Place) -> Result<u64> {
    let listing = place.listing().await?;
    listing
        .files
        .iter()
        .filter_map(|(name, _)| ocdbt::numbered_manifest_generation(name))
        .max()
        .ok_or_else(|| place.malformed(MANIFEST, "it speaks of numbered manifests, there is none"))
}

pub(crate) fn failed(place: &Place, source: ocdbt::Error) -> Error {
    Error::Database {
        location: place.location().to_owned(),
        source,
    }
}

/// Whether a file of an item is a manifest, by its name.
pub(crate) fn is_manifest(file: &str) -> bool {
    let name = in_child(file).unwrap_or(file);
    name == MANIFEST || ocdbt::numbered_manifest_generation(name).is_some()
}

/// Whether a file of an item is one of its databases', by its name: data files have 32 hexadecimal digits. Arrays, and other
/// people's files, may have names that begin like those of databases' folders.
pub(crate) fn is_of_database(file: &str) -> bool {
    let name = in_child(file).unwrap_or(file);
    let is_data = |(folder, name): (&str, &str)| {
        (folder == "d" || folder.starts_with("ocdbt_"))
            && name.len() == 32
            && name.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    is_manifest(file) || name.split_once('/').is_some_and(is_data)
}

fn in_child(file: &str) -> Option<&str> {
    let (folder, name) = file.split_once('/')?;
    folder.starts_with(CHILD_PREFIX).then_some(name)
}

/// Shared objects.
pub(crate) type Shared = Arc<Objects>;
