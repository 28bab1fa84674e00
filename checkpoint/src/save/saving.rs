//! One save: what a process writes in answer to one request.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use object_store::PutPayload;
use tokio::sync::OnceCell;
use waystation_lifecycle::bucket::Bucket;

use super::SaveArray;
use crate::checkpoint::{CHILD_PREFIX, Checkpoint};
use crate::database::Writer;
use crate::engine::{Engine, Files, Folder, Purpose, Root};
use crate::sharding::IndexDomain;
use crate::zarr::Format;
use crate::{Error, Layout, Result};

/// A save under way: all that a process writes in answer to one request, to one location or several. Cheap to clone.
///
/// In a layout with OCDBT each location gets one database, whose keys are there when [`Saving::finish`] has returned and not
/// before. In other layouts an array is there when its metadata is, so that is to be written last.
///
/// ```
/// use waystation_checkpoint::{Config, Engine, IndexDomain, Layout, SaveArray};
/// use waystation_proto::xla::PrimitiveType;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let location = folder.path().to_str().ok_or("path")?;
/// let config = Config { format: Layout::OcdbtZarr2, process: "w0".to_owned(), ..Config::default() };
/// let engine = Engine::new(config);
/// let saving = engine.saving();
/// for name in ["a", "b"] {
///     let array = SaveArray {
///         location: location.to_owned(),
///         name: name.to_owned(),
///         dtype: PrimitiveType::U8,
///         dims: vec![4],
///         chunks: vec![4],
///         codec: None,
///     };
///     let whole = IndexDomain::whole(&[4]);
///     saving.save(&array, vec![(whole, vec![1, 2, 3, 4].into())], true).await?;
/// }
/// saving.finish().await?;
/// assert!(folder.path().join("ocdbt.process_w0/manifest.ocdbt").is_file());
/// // As Orbax does when all have saved.
/// assert_eq!(engine.merge_children(location).await?, 4);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Saving {
    pub(super) engine: Engine,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    layout: Layout,
    database: Placement,
    /// Where everything goes, whatever an array says.
    bucket: Option<Root>,
    places: Mutex<HashMap<String, Arc<OnceCell<Place>>>>,
}

/// Where a database goes below a location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placement {
    /// Into a folder of this process, for Orbax to merge.
    Child,
    /// At the location itself.
    Merged,
}

#[derive(Debug, Clone)]
struct Place {
    root: Root,
    database: Option<Arc<Writer>>,
}

/// Where an array is written.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) folder: Folder,
    database: Option<Arc<Writer>>,
}

impl Target {
    /// Writes a file of the array.
    pub(super) async fn put(&self, engine: &Engine, file: &str, bytes: PutPayload) -> Result<u64> {
        let object = self.folder.object(file);
        match &self.database {
            None => engine.put(&self.folder.root, &object, bytes).await,
            Some(database) => database.put(object, bytes).await,
        }
    }
}

impl Engine {
    /// Begins a save in the engine's layout. With OCDBT, each location gets a database in a folder of its own,
    /// `ocdbt.process_` and [`Config::process`](crate::Config::process), which Orbax merges into that of the checkpoint; if
    /// the engine has written to that location before, `n1` and so on follow.
    #[must_use]
    pub fn saving(&self) -> Saving {
        Saving::new(self, self.layout(), Placement::Child, None)
    }

    /// As [`Engine::saving`], into an open bucket; the arrays' locations are used for messages only.
    #[must_use]
    pub fn saving_in(&self, bucket: &Bucket, location: &str) -> Saving {
        let root = Root::new(bucket, Default::default(), location);
        Saving::new(self, self.layout(), Placement::Child, Some(root))
    }

    /// Begins a save of a whole checkpoint by this process alone: with OCDBT, the database is that of the checkpoint, which
    /// needs no merge. What databases there have already is to be taken over ([`Saving::take_over`]), for there is but one.
    #[must_use]
    pub fn saving_whole(&self, layout: Layout) -> Saving {
        Saving::new(self, layout, Placement::Merged, None)
    }
}

impl Saving {
    fn new(engine: &Engine, layout: Layout, database: Placement, bucket: Option<Root>) -> Self {
        Self {
            engine: engine.clone(),
            shared: Arc::new(Shared {
                layout,
                database,
                bucket,
                places: Mutex::default(),
            }),
        }
    }

    pub(super) fn format(&self) -> Format {
        self.shared.layout.format()
    }

    async fn place(&self, location: &str) -> Result<Place> {
        let cell = {
            let mut places = self.places();
            Arc::clone(places.entry(location.to_owned()).or_default())
        };
        let open = || async {
            let root = match &self.shared.bucket {
                Some(root) => root.clone(),
                None => self.engine.open_root(location, Purpose::Write).await?,
            };
            let database = self.shared.layout.is_ocdbt().then(|| {
                let folder = match self.shared.database {
                    Placement::Merged => String::new(),
                    Placement::Child => {
                        let process = self.engine.process(location);
                        format!("{CHILD_PREFIX}{process}/")
                    }
                };
                Writer::new(&self.engine, root.clone(), folder).map(Arc::new)
            });
            let database = database.transpose()?;
            Ok::<_, Error>(Place { root, database })
        };
        cell.get_or_try_init(open).await.cloned()
    }

    fn places(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<OnceCell<Place>>>> {
        // A map of cells is whole after any panic.
        let places = &self.shared.places;
        places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where an array goes.
    pub(super) async fn target(&self, array: &SaveArray) -> Result<Target> {
        let place = self.place(&array.location).await?;
        Ok(Target {
            folder: Folder::new(place.root, &array.name, Files::Objects)?,
            database: place.database,
        })
    }

    /// Takes keys of the checkpoint's databases over into the one that is written at its location, without their data:
    /// those of the checkpoint's own, if there is one, else of its processes'. `keeps` is asked for each key. Returns how
    /// many were kept. In a layout without OCDBT there is nothing to take over.
    ///
    /// # Errors
    /// A database that cannot be read; a location that cannot be used.
    pub async fn take_over(
        &self,
        checkpoint: &Checkpoint,
        keeps: impl Fn(&str) -> bool,
    ) -> Result<u64> {
        let place = self.place(&checkpoint.location()).await?;
        let (Some(writer), Placement::Merged) = (place.database, self.shared.database) else {
            return Ok(0);
        };
        let mut kept = 0;
        let mut seen = std::collections::HashSet::new();
        let databases = checkpoint.databases().await?;
        for database in databases.iter() {
            let mut list = database.opened().list(&[]);
            let failed = |source| database.failed(checkpoint.root(), source);
            while let Some(entry) = list.next().await.map_err(failed)? {
                // Of several processes' values of a key the first counts, as for readers.
                let is_new = databases.len() == 1 || seen.insert(entry.key.clone());
                if is_new && keeps(&String::from_utf8_lossy(&entry.key)) {
                    writer.put_value(entry.key, entry.value);
                    kept += 1;
                }
            }
        }
        Ok(kept)
    }

    /// Writes pieces of an array, as [`Engine::save`].
    ///
    /// # Errors
    /// As [`Engine::save`].
    pub async fn save(
        &self,
        array: &SaveArray,
        pieces: Vec<(IndexDomain, Bytes)>,
        writes_metadata: bool,
    ) -> Result<u64> {
        let plan = super::Plan::new(self.format(), array, pieces, writes_metadata)?;
        let target = self.target(array).await?;
        if writes_metadata && array.dims.contains(&0) && self.shared.layout == Layout::OcdbtZarr2 {
            // An array without elements has no chunk, and Orbax takes one whose only key is the metadata for half-written
            // when it merges. So it gets a key beyond its edge, which nobody reads.
            let first = vec![0; array.dims.len()];
            let file = plan.metadata.keys.key(&first);
            target.put(&self.engine, &file, PutPayload::new()).await?;
        }
        self.engine.write(target, plan, None).await
    }

    /// Makes the databases complete, when all else has been written: the rest of their values, their trees, and when all
    /// that is durable their manifests, each once. Does nothing in a layout without OCDBT. To be called once.
    ///
    /// # Errors
    /// Failed writes. Something that was to be written before and was not: then there is no manifest, and for a reader no
    /// database.
    pub async fn finish(&self) -> Result<()> {
        let places: Vec<_> = self.places().values().cloned().collect();
        let databases = places
            .iter()
            .filter_map(|place| place.get()?.database.as_ref());
        futures::future::try_join_all(databases.map(|database| database.finish())).await?;
        Ok(())
    }
}
