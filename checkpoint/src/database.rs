//! OCDBT databases in a bucket, read and written under the engine's limits.
//!
//! The values of the keys are the files of arrays (`w/.zarray`, `w/0.0`); small ones lie in the tree, others in data files,
//! of which ranges are read. A database is read as it was when it was opened: data files are never changed, and a manifest
//! that is written over later is not looked at again.

mod batch;
mod writer;

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use object_store::GetRange;
use waystation_ocdbt::{
    Error as OcdbtError, Limits, Location, MANIFEST_NAME, Source, SourceError, Value,
    numbered_manifest_generation,
};

use self::batch::Batches;
pub(crate) use self::writer::{Gathered, Writer};
use crate::engine::{Engine, Part, Root, Term};
use crate::{Error, Result};

/// What the nodes of a tree that are kept between reads may take, all databases of a checkpoint together.
pub(crate) const KEPT_BYTES: usize = 256 << 20;
/// The least that one of many databases keeps: what a thousand keys take.
const LEAST_KEPT_BYTES: usize = 1 << 20;
/// A node may be that large, decoded: Orbax' have 100 MB at most.
const MAX_NODE_BYTES: usize = 128 << 20;
/// The room to take for a node of a database that says that its own are smaller than this.
const LEAST_NODE_BYTES: usize = 8 << 20;

/// An open OCDBT database of a checkpoint.
#[derive(Debug)]
pub struct Database {
    folder: String,
    opened: waystation_ocdbt::Database<Objects>,
    batches: Batches,
}

/// The files of a checkpoint's databases, as objects below its location.
#[derive(Debug, Clone)]
pub struct Objects {
    engine: Engine,
    root: Root,
}

impl Source for Objects {
    async fn read(
        &self,
        path: &str,
        range: Range<u64>,
    ) -> std::result::Result<Option<Bytes>, SourceError> {
        Ok(self
            .engine
            .read_range(&self.root, path, range, Term::Passing)
            .await?)
    }

    async fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> std::result::Result<T, SourceError> {
        Ok(self.engine.compute(work).await?)
    }
}

impl Database {
    /// Opens the database in `folder` of the root, which is empty or ends in `/`; one of `of` databases that are read
    /// together. `None` when there is no manifest.
    pub(crate) async fn open(
        engine: &Engine,
        root: &Root,
        folder: &str,
        of: usize,
    ) -> Result<Option<Self>> {
        let limits = Limits {
            node_bytes: MAX_NODE_BYTES,
            kept_bytes: (KEPT_BYTES / of.max(1)).max(LEAST_KEPT_BYTES),
            list_bytes: 2 * MAX_NODE_BYTES,
            ..Limits::default()
        };
        let objects = Objects {
            engine: engine.clone(),
            root: root.clone(),
        };
        let manifest = format!("{folder}{MANIFEST_NAME}");
        let opened = waystation_ocdbt::Database::open_under(objects.clone(), folder, limits).await;
        let opened = match opened {
            Err(OcdbtError::Missing { path }) if path == manifest => return Ok(None),
            Err(OcdbtError::Numbered) => {
                let names = engine.list_names(root, folder).await?;
                let latest = names
                    .iter()
                    .filter_map(|name| numbered_manifest_generation(name))
                    .max();
                match latest {
                    None => Err(OcdbtError::Numbered),
                    Some(generation) => {
                        waystation_ocdbt::Database::open_generation(
                            objects, folder, generation, limits,
                        )
                        .await
                    }
                }
            }
            opened => opened,
        };
        let opened = opened.map_err(|source| failed(root, folder, source))?;
        Ok(Some(Self {
            folder: folder.to_owned(),
            opened,
            batches: Batches::default(),
        }))
    }

    /// Where it is below the checkpoint: empty for the checkpoint's own, else `ocdbt.process_0/` and the like.
    #[must_use]
    pub fn folder(&self) -> &str {
        &self.folder
    }

    /// The database: its version and statistics, its keys, the check of its nodes. Reads through it keep to the engine's
    /// limits, but for the nodes' memory ([`Limits`]).
    #[must_use]
    pub fn opened(&self) -> &waystation_ocdbt::Database<Objects> {
        &self.opened
    }

    /// How many keys it has, by its own count.
    #[must_use]
    pub fn keys(&self) -> u64 {
        let root = self.opened.version().root.as_ref();
        root.map_or(0, |root| root.statistics.keys)
    }

    /// An error of this database as one of its checkpoint.
    pub(crate) fn failed(&self, root: &Root, source: OcdbtError) -> Error {
        failed(root, &self.folder, source)
    }

    /// The largest node that there can be.
    fn node_bytes(&self) -> usize {
        let said = self.opened.config().max_decoded_node_bytes as usize;
        said.clamp(LEAST_NODE_BYTES, MAX_NODE_BYTES)
    }

    /// The value of a key, or where it is.
    pub(crate) async fn find(
        &self,
        engine: &Engine,
        root: &Root,
        key: &str,
    ) -> Result<Option<Value>> {
        let _room = engine.hold_nodes(self.node_bytes()).await;
        let found = self.opened.get(key.as_bytes()).await;
        found.map_err(|source| self.failed(root, source))
    }

    async fn value(
        &self,
        engine: &Engine,
        root: &Root,
        value: &Value,
        term: Term,
    ) -> Result<Bytes> {
        if let Value::Stored(location) = value {
            let read = if Batches::takes(root, location) {
                self.batches.read(engine, root, location).await
            } else if term == Term::Lasting {
                let range = location.range();
                let read = engine.read_range(root, location.path(), range.clone(), term);
                let whole = |bytes: &Bytes| bytes.len() as u64 == range.end - range.start;
                read.await?.filter(whole)
            } else {
                None
            };
            if let Some(bytes) = read {
                return Ok(bytes);
            }
            // What is wrong is said by who knows the format.
        }
        let read = self.opened.value(value, u64::MAX).await;
        read.map_err(|source| self.failed(root, source))
    }
}

impl Engine {
    /// The first of the databases that has a key, and its value.
    async fn find_key<'a>(
        &self,
        root: &Root,
        databases: &'a [Arc<Database>],
        key: &str,
    ) -> Result<Option<(&'a Database, Value)>> {
        for database in databases {
            if let Some(value) = database.find(self, root, key).await? {
                return Ok(Some((database, value)));
            }
        }
        Ok(None)
    }

    /// As [`Engine::get`], of a key.
    pub(crate) async fn get_key(
        &self,
        root: &Root,
        databases: &[Arc<Database>],
        key: &str,
        most: usize,
        term: Term,
    ) -> Result<Option<std::result::Result<Bytes, u64>>> {
        let Some((database, value)) = self.find_key(root, databases, key).await? else {
            return Ok(None);
        };
        if value.length() > most as u64 {
            return Ok(Some(Err(value.length())));
        }
        let read = database.value(self, root, &value, term);
        Ok(Some(Ok(read.await?)))
    }

    /// As [`Engine::get_part`], of a key.
    pub(crate) async fn get_key_part(
        &self,
        root: &Root,
        databases: &[Arc<Database>],
        key: &str,
        range: GetRange,
        most: usize,
    ) -> Result<Option<Part>> {
        let Some((database, value)) = self.find_key(root, databases, key).await? else {
            return Ok(None);
        };
        let size = value.length();
        let range = match range {
            GetRange::Bounded(range) => range.start.min(size)..range.end.min(size),
            GetRange::Offset(start) => start.min(size)..size,
            GetRange::Suffix(len) => size.saturating_sub(len)..size,
        };
        let len = range.end.saturating_sub(range.start);
        let bytes = if len > most as u64 {
            None
        } else {
            let part = match value {
                // No longer than the value, which is in memory.
                Value::Inline(bytes) => Value::Inline(
                    bytes.slice(range.start as usize..range.end.max(range.start) as usize),
                ),
                Value::Stored(location) => {
                    let file = Arc::clone(location.file());
                    let part = Location::new(file, location.offset() + range.start, len);
                    Value::Stored(part.map_err(|source| database.failed(root, source))?)
                }
            };
            Some(database.value(self, root, &part, Term::Passing).await?)
        };
        Ok(Some(Part {
            bytes,
            size,
            // What is referred to does not change.
            tag: None,
        }))
    }

    /// The size of the value of a key.
    pub(crate) async fn key_size(
        &self,
        root: &Root,
        databases: &[Arc<Database>],
        key: &str,
    ) -> Result<Option<u64>> {
        let found = self.find_key(root, databases, key).await?;
        Ok(found.map(|(_, value)| value.length()))
    }
}

/// What went wrong in a database: a read of ours that failed says it best itself.
fn failed(root: &Root, folder: &str, source: OcdbtError) -> Error {
    let source = match source {
        OcdbtError::Source { path, source } => match source.downcast::<Error>() {
            Ok(error) => return *error,
            Err(source) => OcdbtError::Source { path, source },
        },
        source => source,
    };
    Error::Database {
        database: format!("{folder}{MANIFEST_NAME}"),
        location: root.location(),
        source: Box::new(source),
    }
}
