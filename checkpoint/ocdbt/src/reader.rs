//! Reading a database: one version of it, by key, in order, or by prefix.

mod check;
mod kept;
mod list;
mod visit;

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

pub use check::Report;
pub use list::{Entry, List};

use crate::config::{Config, ManifestKind};
use crate::envelope;
use crate::error::{Error, Result, SourceError, at_most};
use crate::files::DataFile;
use crate::limits::Limits;
use crate::manifest::{MANIFEST_NAME, Manifest, numbered_manifest_name};
use crate::node::{Node, Value};
use crate::reference::Location;
use crate::version::Version;
use kept::Kept;

/// Where the files of a database are.
pub trait Source: Send + Sync {
    /// The bytes in `range` of the file at `path`, which is from the root of the database: fewer, or none, where the file
    /// ends before; `None` where there is no such file.
    fn read(
        &self,
        path: &str,
        range: Range<u64>,
    ) -> impl Future<Output = Result<Option<Bytes>, SourceError>> + Send;

    /// Does what takes a processor a while: to decode a node, which may have 100 MB. A source of which many tasks read
    /// does it elsewhere than on their threads; by default it is done here and now.
    fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Result<T, SourceError>> + Send {
        let done = work();
        async { Ok(done) }
    }
}

impl<S: Source> Source for &S {
    fn read(
        &self,
        path: &str,
        range: Range<u64>,
    ) -> impl Future<Output = Result<Option<Bytes>, SourceError>> + Send {
        (**self).read(path, range)
    }

    fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Result<T, SourceError>> + Send {
        (**self).compute(work)
    }
}

impl<S: Source> Source for Arc<S> {
    fn read(
        &self,
        path: &str,
        range: Range<u64>,
    ) -> impl Future<Output = Result<Option<Bytes>, SourceError>> + Send {
        (**self).read(path, range)
    }

    fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Result<T, SourceError>> + Send {
        (**self).compute(work)
    }
}

/// The latest version of a database.
#[derive(Debug)]
pub struct Database<S> {
    source: S,
    limits: Limits,
    config: Config,
    version: Version,
    kept: Kept,
}

impl<S: Source> Database<S> {
    /// Opens the database at the root of a source.
    ///
    /// # Errors
    /// No manifest, one that cannot be read, or [`Error::Numbered`].
    pub async fn open(source: S, limits: Limits) -> Result<Self> {
        Self::open_under(source, "", limits).await
    }

    /// Opens the database in a folder of the source, whose path ends in `/` (or is empty). All locations in it are from the
    /// root of the source, with the folder as their base path, so that they can be taken over into a database there.
    ///
    /// # Errors
    /// As [`Database::open`].
    pub async fn open_under(source: S, folder: &str, limits: Limits) -> Result<Self> {
        let manifest = manifest(&source, folder, MANIFEST_NAME, &limits).await?;
        Self::of(source, manifest, limits)
    }

    /// Opens a version of a database with numbered manifests; [`numbered_manifest_generation`] finds the latest of a
    /// listing.
    ///
    /// [`numbered_manifest_generation`]: crate::numbered_manifest_generation
    ///
    /// # Errors
    /// As [`Database::open`].
    pub async fn open_generation(
        source: S,
        folder: &str,
        generation: u64,
        limits: Limits,
    ) -> Result<Self> {
        let name = numbered_manifest_name(generation);
        let manifest = manifest(&source, folder, &name, &limits).await?;
        Self::of(source, manifest, limits)
    }

    fn of(source: S, mut manifest: Manifest, limits: Limits) -> Result<Self> {
        if manifest.config.manifest_kind == ManifestKind::Numbered {
            return Err(Error::Numbered);
        }
        // A manifest without a version does not decode.
        let version = manifest.versions.pop().ok_or(Error::Numbered)?;
        at_most(
            "height of the root",
            version.root_height.into(),
            limits.height.into(),
        )?;
        Ok(Self {
            source,
            limits,
            config: manifest.config,
            version,
            kept: Kept::new(limits.kept_bytes),
        })
    }

    /// How the database is written.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The version that is read.
    #[must_use]
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// The value of a key. Reads one node of each height, as far as they are not kept.
    ///
    /// # Errors
    /// A node on the way that cannot be read.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Value>> {
        let Some(mut visit) = self.root().await? else {
            return Ok(None);
        };
        loop {
            if visit.is_leaf() {
                return Ok(visit.find(key).cloned());
            }
            let Some(index) = visit.child_with(key) else {
                return Ok(None);
            };
            visit = self.child(&visit, index).await?;
        }
    }

    /// All keys with a prefix, in order.
    #[must_use]
    pub fn list(&self, prefix: &[u8]) -> List<'_, S> {
        List::new(self, prefix.to_vec(), list::after_prefix(prefix))
    }

    /// All keys from `start` on that are less than `end`, in order.
    #[must_use]
    pub fn range(&self, start: &[u8], end: Option<&[u8]>) -> List<'_, S> {
        List::new(self, start.to_vec(), end.map(<[u8]>::to_vec))
    }

    /// The bytes of a value; a value out of line may have `limit` bytes at most. Nothing tells whether they are those that
    /// were written: OCDBT has no checksum of them.
    ///
    /// # Errors
    /// A file that cannot be read, is not there, or ends early.
    pub async fn value(&self, value: &Value, limit: u64) -> Result<Bytes> {
        match value {
            Value::Inline(bytes) => Ok(bytes.clone()),
            Value::Stored(location) => {
                at_most("length of a value", location.length(), limit)
                    .map_err(|error| location.blame(error))?;
                if location.length() == 0 {
                    // Stores refuse to read nothing.
                    return Ok(Bytes::new());
                }
                self.fetch(location).await
            }
        }
    }

    async fn fetch(&self, location: &Location) -> Result<Bytes> {
        let range = location.range();
        let bytes = read(&self.source, location.path(), range).await?;
        if bytes.len() as u64 != location.length() {
            return Err(Error::CutShort {
                path: location.path().into(),
                offset: location.offset(),
                length: location.length(),
                found: bytes.len() as u64,
            });
        }
        Ok(bytes)
    }

    async fn load(&self, location: &Location) -> Result<Node> {
        let limit = self.limits.node_bytes(self.config.max_decoded_node_bytes);
        let most = envelope::most_sealed(limit);
        at_most("length of a node", location.length(), most)
            .map_err(|error| location.blame(error))?;
        let sealed = self.fetch(location).await?;
        let file = Arc::clone(location.file());
        let decoded = self
            .source
            .compute(move || Node::decode(&sealed, file.base(), limit));
        let decoded = decoded.await.map_err(|source| Error::Source {
            path: location.path().into(),
            source,
        })?;
        decoded.map_err(|error| location.blame(error))
    }
}

async fn read<S: Source>(source: &S, path: &str, range: Range<u64>) -> Result<Bytes> {
    match source.read(path, range).await {
        Ok(Some(bytes)) => Ok(bytes),
        Ok(None) => Err(Error::Missing { path: path.into() }),
        Err(source) => Err(Error::Source {
            path: path.into(),
            source,
        }),
    }
}

async fn manifest<S: Source>(
    source: &S,
    folder: &str,
    name: &str,
    limits: &Limits,
) -> Result<Manifest> {
    let file = DataFile::new(folder, name)?;
    // One more than allowed, to tell a manifest of that size from the start of a larger one.
    let most = limits.manifest_bytes as u64;
    let sealed = read(source, file.path(), 0..most + 1).await?;
    let within = at_most("length of the manifest", sealed.len() as u64, most);
    within
        .and_then(|_| Manifest::decode(&sealed, folder, limits.manifest_bytes))
        .map_err(|error| Error::In {
            path: file.path().into(),
            offset: 0,
            length: sealed.len() as u64,
            source: Box::new(error),
        })
}
