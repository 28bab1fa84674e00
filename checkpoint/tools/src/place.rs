//! A folder of a store: where a checkpoint, a step or an item lies.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use object_store::buffered::BufWriter;
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutPayload,
};
use waystation_lifecycle::bucket::{Bucket, Location};

use crate::{Error, Result};

/// The bytes of a part of a streamed upload.
const PART_BYTES: usize = 16 << 20;

/// A folder of an open store. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Place {
    store: Arc<dyn ObjectStore>,
    /// Where the store begins, if it is a folder of this machine.
    local: Option<PathBuf>,
    /// Below the store's beginning.
    prefix: String,
    /// For people.
    shown: String,
}

/// What lies directly in a folder.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    pub(crate) folders: Vec<String>,
    pub(crate) files: Vec<(String, u64)>,
}

impl Listing {
    pub(crate) fn has_file(&self, name: &str) -> bool {
        self.files.iter().any(|(file, _)| file == name)
    }
}

impl Place {
    /// Opens a location that is there already: `file://`, a path from the root, `gs://` or `s3://`.
    ///
    /// # Errors
    /// A location that cannot be used; a folder that is not there.
    pub async fn open(location: &str) -> Result<Place> {
        let parsed = parse(location)?;
        if let Location::File(path) = &parsed {
            let path = path.clone();
            let found = tokio::task::spawn_blocking(move || path.is_dir()).await?;
            if !found {
                return Err(Error::Unfit {
                    location: location.to_owned(),
                    reason: "there is no such folder".to_owned(),
                });
            }
        }
        Place::of(location, parsed).await
    }

    /// As [`Place::open`], but that a folder that is not there is made.
    ///
    /// # Errors
    /// A location that cannot be used.
    pub async fn create(location: &str) -> Result<Place> {
        Place::of(location, parse(location)?).await
    }

    async fn of(location: &str, parsed: Location) -> Result<Place> {
        let shown = parsed.to_string();
        let local = match &parsed {
            Location::File(path) => Some(path.clone()),
            _ => None,
        };
        let (root, prefix) = split(parsed);
        let opened = tokio::task::spawn_blocking(move || Bucket::open_own(&root)).await?;
        let bucket = opened.map_err(|source| Error::Location {
            location: location.to_owned(),
            source: Box::new(source),
        })?;
        Ok(Place {
            store: Arc::clone(bucket.store()),
            local,
            prefix,
            shown,
        })
    }

    /// A folder of a store that is open already.
    #[must_use]
    pub fn from_store(store: Arc<dyn ObjectStore>, prefix: &str, shown: &str) -> Place {
        Place {
            store,
            local: None,
            prefix: prefix.to_owned(),
            shown: shown.to_owned(),
        }
    }

    /// The folder of that name in this one; several names with `/` between them will do.
    ///
    /// # Errors
    /// A name that leads elsewhere.
    pub fn below(&self, name: &str) -> Result<Place> {
        if name.is_empty() {
            return Ok(self.clone());
        }
        Ok(Place {
            prefix: self.path(name)?.as_ref().to_owned(),
            shown: format!("{}/{name}", self.shown.trim_end_matches('/')),
            ..self.clone()
        })
    }

    /// Refuses to write into what is read.
    pub(crate) fn check_outside(&self, target: &str) -> Result<()> {
        let target_shown = parse(target)?.to_string();
        let inside = target_shown.strip_prefix(self.shown.trim_end_matches('/'));
        if inside.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
            return Err(Error::Asked(format!(
                "{target} lies in what is read from, {}; write to another location",
                self.shown
            )));
        }
        Ok(())
    }

    /// Where it is, for people.
    #[must_use]
    pub fn location(&self) -> &str {
        &self.shown
    }

    /// The folder on this machine, where it is one.
    #[must_use]
    pub fn local_path(&self) -> Option<PathBuf> {
        let root = self.local.as_ref()?;
        Some(if self.prefix.is_empty() {
            root.clone()
        } else {
            root.join(&self.prefix)
        })
    }

    /// The last part of its name.
    #[must_use]
    pub fn name(&self) -> &str {
        let shown = self.shown.trim_end_matches('/');
        shown.rsplit('/').next().unwrap_or(shown)
    }

    /// Names are taken as they are: Orbax and TensorStore do not encode them.
    fn path(&self, file: &str) -> Result<Path> {
        let full = if self.prefix.is_empty() {
            file.to_owned()
        } else {
            format!("{}/{file}", self.prefix)
        };
        Path::parse(full).map_err(|_| Error::Name {
            name: file.to_owned(),
            location: self.shown.clone(),
        })
    }

    fn own_path(&self) -> Result<Option<Path>> {
        if self.prefix.is_empty() {
            return Ok(None);
        }
        Path::parse(&self.prefix)
            .map(Some)
            .map_err(|_| Error::Name {
                name: self.prefix.clone(),
                location: self.shown.clone(),
            })
    }

    pub(crate) fn failed(
        &self,
        operation: &'static str,
        file: &str,
        source: object_store::Error,
    ) -> Error {
        Error::Storage {
            operation,
            object: file.to_owned(),
            location: self.shown.clone(),
            source: Box::new(source),
        }
    }

    pub(crate) fn malformed(&self, file: &str, reason: impl Into<String>) -> Error {
        Error::Malformed {
            object: file.to_owned(),
            location: self.shown.clone(),
            reason: reason.into(),
        }
    }

    /// To open a pipe is to wait for its writer, in a thread that nothing can call back.
    async fn check_regular(&self, file: &str) -> Result<()> {
        let Some(root) = &self.local else {
            return Ok(());
        };
        let path = root.join(self.path(file)?.as_ref());
        match tokio::fs::metadata(path).await {
            Ok(found) if !found.is_file() && !found.is_dir() => {
                Err(self.malformed(file, "it is no regular file"))
            }
            _ => Ok(()),
        }
    }

    /// An object of `most` bytes at most. `None` where there is none.
    pub(crate) async fn get(&self, file: &str, most: u64) -> Result<Option<Bytes>> {
        self.check_regular(file).await?;
        let found = match self.store.get(&self.path(file)?).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            // What is a folder is no object.
            Err(_) if self.is_folder(file).await => return Ok(None),
            Err(source) => return Err(self.failed("reading", file, source)),
        };
        let size = found.meta.size;
        if size > most {
            return Err(self.malformed(file, format!("{size} bytes, at most {most} are taken")));
        }
        let bytes = found.bytes().await;
        bytes
            .map(Some)
            .map_err(|source| self.failed("reading", file, source))
    }

    async fn is_folder(&self, file: &str) -> bool {
        match (&self.local, self.path(file)) {
            (Some(root), Ok(path)) => {
                let found = tokio::fs::metadata(root.join(path.as_ref())).await;
                found.is_ok_and(|found| found.is_dir())
            }
            _ => false,
        }
    }

    /// A range of an object: fewer bytes, or none, where it ends before; `None` where there is none.
    pub(crate) async fn range(&self, file: &str, range: Range<u64>) -> Result<Option<Bytes>> {
        self.check_regular(file).await?;
        let path = self.path(file)?;
        if range.is_empty() {
            return Ok(Some(Bytes::new()));
        }
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            ..GetOptions::default()
        };
        let read = match self.store.get_opts(&path, options).await {
            Ok(found) => found.bytes().await,
            Err(error) => Err(error),
        };
        match read {
            Ok(bytes) => Ok(Some(bytes)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            // Stores refuse a range that begins at or behind the end, in words of their own.
            Err(source) => match self.store.head(&path).await {
                Ok(meta) if meta.size <= range.start => Ok(Some(Bytes::new())),
                _ => Err(self.failed("reading", file, source)),
            },
        }
    }

    /// What is known of an object.
    pub(crate) async fn head(&self, file: &str) -> Result<Option<ObjectMeta>> {
        match self.store.head(&self.path(file)?).await {
            Ok(meta) => Ok(Some(meta)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(_) if self.is_folder(file).await => Ok(None),
            Err(source) => Err(self.failed("looking at", file, source)),
        }
    }

    /// All objects below, with their names from here.
    pub(crate) fn list(&self) -> impl Stream<Item = Result<(String, ObjectMeta)>> + Send + use<> {
        let place = self.clone();
        let path = match self.own_path() {
            Ok(path) => path,
            Err(error) => return futures::stream::once(async { Err(error) }).boxed(),
        };
        self.store
            .list(path.as_ref())
            .filter_map(move |found| {
                let listed = match found {
                    Err(source) => Some(Err(place.failed("listing", "the objects", source))),
                    Ok(meta) => place.relative(&meta.location).map(|name| Ok((name, meta))),
                };
                std::future::ready(listed)
            })
            .boxed()
    }

    fn relative(&self, path: &Path) -> Option<String> {
        let full = path.as_ref();
        let rest = if self.prefix.is_empty() {
            full
        } else {
            full.strip_prefix(self.prefix.as_str())?.strip_prefix('/')?
        };
        (!rest.is_empty()).then(|| rest.to_owned())
    }

    /// What lies directly here, sorted.
    pub(crate) async fn listing(&self) -> Result<Listing> {
        let found = self
            .store
            .list_with_delimiter(self.own_path()?.as_ref())
            .await
            .map_err(|source| self.failed("listing", "the folder", source))?;
        let mut listing = Listing {
            folders: found
                .common_prefixes
                .iter()
                .filter_map(|path| self.relative(path))
                .collect(),
            files: found
                .objects
                .iter()
                .filter_map(|meta| Some((self.relative(&meta.location)?, meta.size)))
                .collect(),
        };
        listing.folders.sort();
        listing.files.sort();
        Ok(listing)
    }

    /// The number of objects below, and their bytes.
    ///
    /// # Errors
    /// The store fails.
    pub async fn sum(&self) -> Result<(u64, u64)> {
        self.list()
            .try_fold((0u64, 0u64), |(count, bytes), (_, meta)| {
                std::future::ready(Ok((count + 1, bytes.saturating_add(meta.size))))
            })
            .await
    }

    /// Writes an object, in place of one of that name.
    pub(crate) async fn put(&self, file: &str, bytes: impl Into<PutPayload>) -> Result<()> {
        let put = self.store.put(&self.path(file)?, bytes.into()).await;
        put.map(drop)
            .map_err(|source| self.failed("writing", file, source))
    }

    /// A large object, written piece by piece. It is there once [`tokio::io::AsyncWriteExt::shutdown`] has returned.
    pub(crate) fn writer(&self, file: &str) -> Result<BufWriter> {
        let writer =
            BufWriter::with_capacity(Arc::clone(&self.store), self.path(file)?, PART_BYTES);
        Ok(writer.with_max_concurrency(2))
    }

    /// Removes an object; one that is gone already is as good.
    pub(crate) async fn delete(&self, file: &str) -> Result<()> {
        match self.store.delete(&self.path(file)?).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(self.failed("deleting", file, source)),
        }
    }

    /// An object as a stream of its bytes, with its size.
    pub(crate) async fn stream(
        &self,
        file: &str,
    ) -> Result<impl Stream<Item = Result<Bytes>> + Send + use<>> {
        self.check_regular(file).await?;
        let (place, name) = (self.clone(), file.to_owned());
        let found = self
            .store
            .get(&self.path(file)?)
            .await
            .map_err(|source| self.failed("reading", file, source))?;
        Ok(found
            .into_stream()
            .map_err(move |source| place.failed("reading", &name, source)))
    }
}

fn parse(location: &str) -> Result<Location> {
    let parsed = Location::parse(location).map_err(|source| Error::Location {
        location: location.to_owned(),
        source: Box::new(source),
    })?;
    if parsed.is_memory() {
        return Err(Error::Asked(
            "memory:// is another process's memory; give a bucket or a folder".to_owned(),
        ));
    }
    Ok(parsed)
}

/// A location's store (a whole bucket, or a folder) and the rest of it.
fn split(location: Location) -> (Location, String) {
    let whole = String::new();
    match location {
        Location::Gcs { bucket, prefix } => (
            Location::Gcs {
                bucket,
                prefix: whole,
            },
            prefix,
        ),
        Location::S3 { bucket, prefix } => (
            Location::S3 {
                bucket,
                prefix: whole,
            },
            prefix,
        ),
        other => (other, String::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_is_written_into_what_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let place = Place::open(path).await.unwrap();
        let uri = format!("file://{path}");
        for inside in ["", "/", "/20", "/a/b/"] {
            for root in [path, uri.as_str()] {
                let refused = place.check_outside(&format!("{root}{inside}"));
                let refused = refused.unwrap_err().to_string();
                assert!(refused.contains("another location"), "{refused}");
            }
        }
        let step = place.below("10").unwrap();
        for outside in [format!("{path}/20"), format!("{path}/100"), uri] {
            step.check_outside(&outside).unwrap();
        }
    }
}
