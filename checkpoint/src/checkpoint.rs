//! An open checkpoint: the arrays in it, wherever they are, and the files beside them.
//!
//! The files of an array (`w/.zarray` and `w/0.0`, `w/zarr.json` and `w/c/0/0`) are found in three places, looked into in
//! this order, array by array, for a checkpoint may be a mixture:
//!
//! 1. the checkpoint's own OCDBT database, `manifest.ocdbt`, which Orbax makes of those that its processes write;
//! 2. objects below the location;
//! 3. where there is no such database, those of the processes, `ocdbt.process_*/manifest.ocdbt`, each of which holds a part.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio::sync::OnceCell;
use waystation_lifecycle::bucket::Bucket;
use waystation_ocdbt::MANIFEST_NAME;

use crate::database::Database;
use crate::engine::{Engine, Files, Folder, Purpose, Root, Term};
use crate::persistence::check_name;
use crate::restore::RestoreArray;
use crate::sharding::IndexDomain;
use crate::zarr::{self, Chunks, Format, MAX_METADATA_BYTES, Metadata};
use crate::{Error, Result};

/// What the folders of the processes' databases begin with.
pub const CHILD_PREFIX: &str = "ocdbt.process_";

/// The most databases of processes.
const MAX_CHILDREN: usize = 1 << 16;

/// A checkpoint that is open for reading. Cheap to clone.
///
/// It reads databases as they were when it was opened, so it is to be opened anew for each request: between two of them a
/// checkpoint may have been written over. The nodes of its databases are read once and kept, up to 256 MiB of them.
///
/// ```no_run
/// # async fn show(engine: &waystation_checkpoint::Engine) -> waystation_checkpoint::Result<()> {
/// let checkpoint = engine.open_checkpoint("gs://bucket/run/100/default").await?;
/// for found in checkpoint.arrays().await? {
///     let array = checkpoint.array(&found.name).await?;
///     println!("{} {:?} in {}", found.name, array.metadata().grid.shape(), array.home());
///     for chunk in array.chunks() {
///         println!("  {} {:?} bytes", array.chunk_key(&chunk), array.chunk_size(&chunk).await?);
///         array.check_chunk(&chunk).await?;
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Checkpoint {
    engine: Engine,
    opened: Arc<Opened>,
}

#[derive(Debug)]
struct Opened {
    root: Root,
    merged: Option<Arc<[Arc<Database>]>>,
    children: OnceCell<Children>,
}

#[derive(Debug)]
struct Children {
    opened: Arc<[Arc<Database>]>,
    /// Folders without a manifest.
    unfinished: Vec<String>,
}

/// Where the files of an array are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Home {
    /// In the checkpoint's own OCDBT database.
    Merged,
    /// Objects below the location.
    Objects,
    /// In the OCDBT databases of the processes that wrote it, which have not been merged.
    Children,
}

impl fmt::Display for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Merged => MANIFEST_NAME,
            Self::Objects => "objects",
            Self::Children => "ocdbt.process_*",
        })
    }
}

/// An array in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrayEntry {
    /// Its path below the checkpoint. Of a hostile database it may be one that [`Checkpoint::array`] does not take.
    pub name: String,
    /// By the name of its metadata file.
    pub format: Format,
    /// Where it is.
    pub home: Home,
}

/// An object of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectEntry {
    /// Its path below the checkpoint.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

impl Engine {
    /// Opens a checkpoint (an item of a step, in Orbax' terms): reads its manifest, if it has one.
    ///
    /// # Errors
    /// A location that cannot be used or is not there; a manifest that cannot be read.
    pub async fn open_checkpoint(&self, location: &str) -> Result<Checkpoint> {
        let root = self.open_root(location, Purpose::Read).await?;
        self.checkpoint_at(root).await
    }

    /// As [`Engine::open_checkpoint`], at the root of an open bucket; the location is used for messages only.
    ///
    /// # Errors
    /// As [`Engine::open_checkpoint`].
    pub async fn open_checkpoint_in(&self, bucket: &Bucket, location: &str) -> Result<Checkpoint> {
        let root = Root::new(bucket, Default::default(), location);
        self.checkpoint_at(root).await
    }

    async fn checkpoint_at(&self, root: Root) -> Result<Checkpoint> {
        let merged = Database::open(self, &root, "", 1).await?;
        Ok(Checkpoint {
            engine: self.clone(),
            opened: Arc::new(Opened {
                root,
                merged: merged.map(|database| [Arc::new(database)].into()),
                children: OnceCell::new(),
            }),
        })
    }
}

impl Checkpoint {
    /// The location, as it was given.
    #[must_use]
    pub fn location(&self) -> String {
        self.opened.root.location()
    }

    /// The engine it was opened with.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The checkpoint's own database, `manifest.ocdbt`, if it has one.
    #[must_use]
    pub fn merged(&self) -> Option<&Arc<Database>> {
        self.opened.merged.as_ref()?.first()
    }

    /// The databases of the processes that wrote it, by name. In a merged checkpoint they are still there, for the merged
    /// database refers to their data.
    ///
    /// # Errors
    /// A failed listing; a manifest that cannot be read.
    pub async fn children(&self) -> Result<&[Arc<Database>]> {
        Ok(&self.opened_children().await?.opened)
    }

    /// The folders of processes (`ocdbt.process_1/`) that have no manifest: what they hold was never finished.
    ///
    /// # Errors
    /// As [`Checkpoint::children`].
    pub async fn unfinished_children(&self) -> Result<&[String]> {
        Ok(&self.opened_children().await?.unfinished)
    }

    /// The databases that arrays are looked for in: the checkpoint's own, or else those of processes.
    pub(crate) async fn databases(&self) -> Result<Arc<[Arc<Database>]>> {
        match &self.opened.merged {
            Some(merged) => Ok(Arc::clone(merged)),
            None => Ok(Arc::clone(&self.opened_children().await?.opened)),
        }
    }

    pub(crate) fn root(&self) -> &Root {
        &self.opened.root
    }

    async fn opened_children(&self) -> Result<&Children> {
        let open = || self.open_children();
        self.opened.children.get_or_try_init(open).await
    }

    async fn open_children(&self) -> Result<Children> {
        let root = &self.opened.root;
        let mut folders = self.engine.list_names(root, "").await?;
        folders.retain(|name| name.starts_with(CHILD_PREFIX));
        folders.sort_unstable();
        folders.dedup();
        if folders.len() > MAX_CHILDREN {
            return Err(Error::TooMany {
                what: "OCDBT databases",
                location: root.location(),
                most: MAX_CHILDREN,
            });
        }
        let count = folders.len();
        let opened: Vec<_> = stream::iter(folders)
            .map(async |name| {
                let folder = format!("{name}/");
                let database = Database::open(&self.engine, root, &folder, count).await?;
                if let Some(database) = &database {
                    // Brings the root node, while others bring theirs.
                    database.find(&self.engine, root, "").await?;
                }
                Ok::<_, Error>((folder, database))
            })
            .buffered(self.engine.width())
            .try_collect()
            .await?;
        let mut children = Vec::with_capacity(opened.len());
        let mut unfinished = Vec::new();
        for (folder, database) in opened {
            match database {
                Some(database) => children.push(Arc::new(database)),
                None => unfinished.push(folder),
            }
        }
        Ok(Children {
            opened: children.into(),
            unfinished,
        })
    }

    /// All arrays, by name: of the zarr metadata files that there are, whatever else says that they should be.
    ///
    /// # Errors
    /// A failed listing; a database that cannot be read.
    pub async fn arrays(&self) -> Result<Vec<ArrayEntry>> {
        let mut found: BTreeMap<String, (Home, Format)> = BTreeMap::new();
        let mut add = |path: &str, home| {
            if let Some((name, format)) = array_of(path) {
                let rank = (home, format);
                let known = found.entry(name.to_owned()).or_insert(rank);
                // In one place, `.zarray` comes first.
                if rank.0 < known.0 || (rank.0 == known.0 && format == Format::Zarr2) {
                    *known = rank;
                }
            }
        };
        let mut objects = self.objects();
        while let Some(object) = objects.try_next().await? {
            add(&object.path, Home::Objects);
        }
        let databases = self.databases().await?;
        let home = match &self.opened.merged {
            Some(_) => Home::Merged,
            None => Home::Children,
        };
        for database in databases.iter() {
            let mut keys = database.opened().list(&[]);
            while let Some(entry) = keys
                .next()
                .await
                .map_err(|source| database.failed(&self.opened.root, source))?
            {
                add(&String::from_utf8_lossy(&entry.key), home);
            }
        }
        Ok(found
            .into_iter()
            .map(|(name, (home, format))| ArrayEntry { name, format, home })
            .collect())
    }

    /// All objects, in no order: the files of plain arrays, of databases, and those beside them.
    pub fn objects(&self) -> BoxStream<'static, Result<ObjectEntry>> {
        let listed = self.engine.list_objects(&self.opened.root);
        listed
            .map_ok(|(path, bytes)| ObjectEntry { path, bytes })
            .boxed()
    }

    /// Reads a file beside the arrays (`_METADATA`, `commit_success.txt`), of `most` bytes at most.
    ///
    /// # Errors
    /// A path that leaves the checkpoint; a larger file; a failed read.
    pub async fn read_file(&self, path: &str, most: usize) -> Result<Option<Bytes>> {
        let root = &self.opened.root;
        if path.is_empty() || check_name(path).is_err() {
            return Err(Error::BadRequest {
                array: String::new(),
                reason: format!("{path:?} is no path of a file in {}", root.location()),
            });
        }
        match self
            .engine
            .get_object(root, path, most, Term::Passing)
            .await?
        {
            None => Ok(None),
            Some(Ok(bytes)) => Ok(Some(bytes)),
            Some(Err(size)) => Err(Error::oversized(root, path, size, most)),
        }
    }

    /// Finds an array and reads its metadata.
    ///
    /// # Errors
    /// [`Error::MissingArray`]; metadata that cannot be read; a failed read.
    pub async fn array(&self, name: &str) -> Result<StoredArray> {
        let root = &self.opened.root;
        if let Some(merged) = &self.opened.merged {
            let files = Files::Keys(Arc::clone(merged));
            let folder = Folder::new(root.clone(), name, files)?;
            if let Some(metadata) = self.engine.read_metadata(&folder).await? {
                return Ok(self.stored(folder, metadata, Home::Merged));
            }
        }
        let folder = Folder::new(root.clone(), name, Files::Objects)?;
        if let Some(metadata) = self.engine.read_metadata(&folder).await? {
            return Ok(self.stored(folder, metadata, Home::Objects));
        }
        let mut also = String::new();
        match &self.opened.merged {
            Some(merged) => {
                let keys = merged.iter().map(|database| database.keys()).sum::<u64>();
                also.push_str(&format!(
                    "; nor is it one of the {keys} keys of the database {MANIFEST_NAME}"
                ));
            }
            None => {
                let children = self.opened_children().await?;
                let files = Files::Keys(Arc::clone(&children.opened));
                let folder = Folder::new(root.clone(), name, files)?;
                if let Some(metadata) = self.engine.read_metadata(&folder).await? {
                    return Ok(self.stored(folder, metadata, Home::Children));
                }
                also.push_str(&format!("; there is no database {MANIFEST_NAME}"));
                if !children.opened.is_empty() {
                    also.push_str(&format!(
                        ", and it is in none of the {} databases of processes",
                        children.opened.len()
                    ));
                }
                if let Some(folder) = children.unfinished.first() {
                    also.push_str(&format!(", of which {folder} is not finished"));
                }
            }
        }
        let [first, second] = Format::ALL.map(|format| folder.object(format.metadata_file()));
        Err(Error::MissingArray {
            array: name.to_owned(),
            location: root.location(),
            looked_for: format!("there is no object {first} and no {second}{also}"),
        })
    }

    fn stored(&self, folder: Folder, metadata: Metadata, home: Home) -> StoredArray {
        StoredArray {
            engine: self.engine.clone(),
            folder,
            metadata,
            home,
        }
    }

    /// As [`Engine::restore`]; the array's location is not looked at.
    ///
    /// # Errors
    /// As [`Engine::restore`].
    pub async fn restore(
        &self,
        array: &RestoreArray,
        domains: &[IndexDomain],
    ) -> Result<Vec<Bytes>> {
        let stored = self.array(&array.name).await?;
        stored.check(array)?;
        stored.restore(domains).await
    }
}

impl Engine {
    /// The metadata in an array's folder; `None` when there is none.
    async fn read_metadata(&self, folder: &Folder) -> Result<Option<Metadata>> {
        for format in Format::ALL {
            let file = format.metadata_file();
            let invalid = |source| Error::Metadata {
                array: folder.array(),
                location: folder.location(),
                object: folder.object(file),
                source,
            };
            match self
                .get(folder, file, MAX_METADATA_BYTES, Term::Passing)
                .await?
            {
                Some(Ok(bytes)) => {
                    return Metadata::decode(format, &bytes).map_err(invalid).map(Some);
                }
                Some(Err(size)) => {
                    let reason = format!("{size} bytes of metadata");
                    return Err(invalid(zarr::Error::Malformed(reason)));
                }
                None => {}
            }
        }
        Ok(None)
    }
}

/// An array of an open checkpoint.
#[derive(Debug, Clone)]
pub struct StoredArray {
    pub(crate) engine: Engine,
    pub(crate) folder: Folder,
    pub(crate) metadata: Metadata,
    home: Home,
}

impl StoredArray {
    /// Its path below the checkpoint.
    #[must_use]
    pub fn name(&self) -> String {
        self.folder.array()
    }

    /// Shape, element type, chunks.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Where its files are.
    #[must_use]
    pub fn home(&self) -> Home {
        self.home
    }

    /// Every chunk that it must have, in row-major order. How many there are is for its metadata to say, and may be absurd.
    #[must_use]
    pub fn chunks(&self) -> Chunks {
        let grid = &self.metadata.grid;
        grid.chunks_of(&IndexDomain::whole(grid.shape()))
    }

    /// The path below the checkpoint of a chunk: of the object, or the key.
    #[must_use]
    pub fn chunk_key(&self, chunk: &[i64]) -> String {
        self.folder.object(&self.metadata.keys.key(chunk))
    }

    /// How many bytes of a chunk are stored; `None` when it is missing.
    ///
    /// # Errors
    /// A failed request; a database that cannot be read.
    pub async fn chunk_size(&self, chunk: &[i64]) -> Result<Option<u64>> {
        let file = self.metadata.keys.key(chunk);
        self.engine.size(&self.folder, &file).await
    }

    /// Reads and decodes a chunk (a shard with all that is in it), as a restore does.
    ///
    /// # Errors
    /// [`Error::MissingChunk`], [`Error::CorruptChunk`] and those of [`StoredArray::restore`].
    pub async fn check_chunk(&self, chunk: &[i64]) -> Result<()> {
        let domain = self.metadata.grid.domain(chunk);
        self.restore(&[domain]).await.map(|_| ())
    }
}

/// The name of the array whose metadata file a path is, and the format that the file is of.
fn array_of(path: &str) -> Option<(&str, Format)> {
    let (name, file) = path.rsplit_once('/').unwrap_or(("", path));
    let format = Format::ALL
        .into_iter()
        .find(|format| format.metadata_file() == file)?;
    Some((name, format))
}

/// The checkpoints that one request reads from, each opened once, when it is first asked for. Cheap to clone.
///
/// To be dropped with the request: see [`Checkpoint`].
#[derive(Debug, Clone)]
pub struct Checkpoints {
    engine: Engine,
    opened: Arc<Mutex<HashMap<String, Arc<OnceCell<Checkpoint>>>>>,
}

/// Checkpoints held open at once. A request reads one or two; the bound is for clients that make up locations.
const MAX_OPEN: usize = 8;

impl Checkpoints {
    /// None so far.
    #[must_use]
    pub fn new(engine: &Engine) -> Self {
        Self {
            engine: engine.clone(),
            opened: Arc::default(),
        }
    }

    /// The checkpoint at a location.
    ///
    /// # Errors
    /// As [`Engine::open_checkpoint`]; who asks again tries again.
    pub async fn at(&self, location: &str) -> Result<Checkpoint> {
        let cell = {
            // A map of cells is whole after any panic.
            let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
            if !opened.contains_key(location) && opened.len() >= MAX_OPEN {
                opened.clear();
            }
            Arc::clone(opened.entry(location.to_owned()).or_default())
        };
        let open = || self.engine.open_checkpoint(location);
        cell.get_or_try_init(open).await.cloned()
    }

    /// As [`Engine::restore`].
    ///
    /// # Errors
    /// As [`Engine::restore`].
    pub async fn restore(
        &self,
        array: &RestoreArray,
        domains: &[IndexDomain],
    ) -> Result<Vec<Bytes>> {
        self.at(&array.location)
            .await?
            .restore(array, domains)
            .await
    }
}
