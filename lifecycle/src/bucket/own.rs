//! A folder of one's own as a store: symbolic links are followed, and names that no object can have are passed over in lists.
//!
//! All but the lists is `object_store`'s. Its lists end at the first such name, or at a link that leads back to a folder above
//! it: one odd file would hide all the others.

use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use object_store::local::LocalFileSystem;
use object_store::path::{Path, PathPart};
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};
use tokio::sync::mpsc;

use super::folder::{is_half, pass_over};

/// Names that are read before somebody asks for them.
const AHEAD: usize = 1024;

/// Folders below a listed one that are looked into.
const DEPTH: usize = 128;

/// See the module.
#[derive(Debug)]
pub(super) struct Own {
    inner: LocalFileSystem,
    root: PathBuf,
    has_warned: Arc<AtomicBool>,
}

impl Own {
    /// The folder is there.
    pub(super) fn open(root: &FilePath) -> Result<Own> {
        let inner = LocalFileSystem::new_with_prefix(root)?;
        Ok(Own {
            inner: inner.with_fsync(true),
            root: root.to_owned(),
            has_warned: Arc::default(),
        })
    }

    fn walk(&self, prefix: Option<&Path>) -> Walk {
        let place = prefix.cloned().unwrap_or_default();
        Walk {
            root: self.root.clone(),
            folder: self.root.join(place.as_ref()),
            place,
            has_warned: Arc::clone(&self.has_warned),
        }
    }
}

/// A folder to list.
struct Walk {
    root: PathBuf,
    folder: PathBuf,
    /// Its name in the store.
    place: Path,
    has_warned: Arc<AtomicBool>,
}

/// What lies in a folder.
struct Entry {
    path: PathBuf,
    place: Path,
    metadata: Metadata,
}

impl Walk {
    /// The folders from the root to the one that is listed.
    fn above(&self) -> Vec<(u64, u64)> {
        let below = self.folder.ancestors();
        let folders = below.take_while(|folder| folder.starts_with(&self.root));
        let found = folders.filter_map(|folder| fs::metadata(folder).ok());
        found.map(|found| (found.dev(), found.ino())).collect()
    }

    /// What lies in a folder itself: files and folders, without what is there no more. A folder that is none is empty.
    fn entries(&self, folder: &FilePath, place: &Path) -> Result<Vec<Entry>> {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if is_gone(&error) => return Ok(Vec::new()),
            Err(error) => return Err(failed(folder, error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| failed(folder, error))?;
            let path = entry.path();
            let name = entry.file_name();
            let part = name.to_str().and_then(|name| PathPart::parse(name).ok());
            let Some(part) = part else {
                self.pass_over(&path);
                continue;
            };
            match fs::metadata(&path) {
                Ok(metadata) => found.push(Entry {
                    place: place.clone().join(part),
                    path,
                    metadata,
                }),
                // A link that leads nowhere, or in a circle.
                Err(_) if path.is_symlink() => {}
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(failed(&path, error)),
            }
        }
        Ok(found)
    }

    /// Gives `take` all files below a folder, until it has enough; whether it has not. `above`: the folders that lead here.
    fn files(
        &self,
        folder: &FilePath,
        place: &Path,
        above: &mut Vec<(u64, u64)>,
        take: &mut dyn FnMut(Result<ObjectMeta>) -> bool,
    ) -> bool {
        let entries = match self.entries(folder, place) {
            Ok(entries) => entries,
            Err(error) => return take(Err(error)),
        };
        for Entry {
            path,
            place,
            metadata,
        } in entries
        {
            let goes_on = if metadata.is_dir() {
                let key = (metadata.dev(), metadata.ino());
                if above.len() > DEPTH || above.contains(&key) {
                    self.pass_over(&path);
                    continue;
                }
                above.push(key);
                let goes_on = self.files(&path, &place, above, take);
                above.pop();
                goes_on
            } else {
                !is_object(&place, &metadata) || take(Ok(meta(place, &metadata)))
            };
            if !goes_on {
                return false;
            }
        }
        true
    }

    fn pass_over(&self, path: &FilePath) {
        pass_over(&path.to_string_lossy(), &self.has_warned);
    }
}

fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory)
}

/// A regular file that is not being written.
fn is_object(place: &Path, metadata: &Metadata) -> bool {
    metadata.is_file() && !place.filename().is_none_or(is_half)
}

fn meta(place: Path, metadata: &Metadata) -> ObjectMeta {
    ObjectMeta {
        location: place,
        last_modified: metadata.modified().map(Into::into).unwrap_or_default(),
        size: metadata.len(),
        e_tag: None,
        version: None,
    }
}

fn failed(path: &FilePath, source: io::Error) -> Error {
    Error::Generic {
        store: "folder",
        source: format!("{}: {source}", path.display()).into(),
    }
}

impl fmt::Display for Own {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Own({})", self.root.display())
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl ObjectStore for Own {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.inner.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let walk = self.walk(prefix);
        let (sender, receiver) = mpsc::channel(AHEAD);
        // Ends when nobody listens any more.
        tokio::task::spawn_blocking(move || {
            let mut above = walk.above();
            let mut take = |found| sender.blocking_send(found).is_ok();
            walk.files(&walk.folder, &walk.place, &mut above, &mut take);
        });
        let next = async |mut receiver: mpsc::Receiver<_>| Some((receiver.recv().await?, receiver));
        stream::unfold(receiver, next).boxed()
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let offset = offset.clone();
        let is_behind = move |found: &Result<ObjectMeta>| match found {
            Ok(meta) => meta.location > offset,
            Err(_) => true,
        };
        let listed = self.list(prefix);
        listed
            .filter(move |found| std::future::ready(is_behind(found)))
            .boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let walk = self.walk(prefix);
        let entries = tokio::task::spawn_blocking(move || walk.entries(&walk.folder, &walk.place));
        let entries = entries
            .await
            .map_err(|source| Error::JoinError { source })??;
        let (folders, files): (Vec<Entry>, Vec<Entry>) = entries
            .into_iter()
            .partition(|entry| entry.metadata.is_dir());
        let mut common_prefixes: Vec<Path> = folders.into_iter().map(|entry| entry.place).collect();
        common_prefixes.sort_unstable();
        let objects = files
            .into_iter()
            .filter(|entry| is_object(&entry.place, &entry.metadata))
            .map(|entry| meta(entry.place, &entry.metadata));
        Ok(ListResult {
            common_prefixes,
            objects: objects.collect(),
            extensions: Default::default(),
        })
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.inner.rename_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::symlink;

    use futures::TryStreamExt as _;
    use object_store::ObjectStoreExt as _;

    use super::*;

    #[tokio::test]
    async fn what_is_odd_hides_nothing_else() {
        let (temp, disk) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let own = Own::open(temp.path()).unwrap();
        for name in ["w/0", "w/a b/%41", "_METADATA"] {
            own.put(&Path::parse(name).unwrap(), "x".into())
                .await
                .unwrap();
        }
        let below = |name: &str| temp.path().join(name);
        for folder in ["", "w"] {
            fs::write(below(folder).join(OsStr::from_bytes(b"\xff")), b"odd").unwrap();
            fs::write(below(folder).join("new\nline"), b"odd").unwrap();
        }
        fs::write(below("w/1#17"), b"half").unwrap();
        fs::write(disk.path().join("0"), b"x").unwrap();
        symlink(disk.path(), below("elsewhere")).unwrap();
        symlink(temp.path(), below("w/back")).unwrap();
        symlink("circle", below("circle")).unwrap();
        symlink("/no/such", below("w/nowhere")).unwrap();
        let names = async |prefix: Option<&Path>| -> Vec<String> {
            let listed = own.list(prefix).map_ok(|meta| meta.location.into());
            let mut names: Vec<String> = listed.try_collect().await.unwrap();
            names.sort();
            names
        };
        let all = ["_METADATA", "elsewhere/0", "w/0", "w/a b/%41"];
        assert_eq!(names(None).await, all);
        assert_eq!(names(Some(&Path::from("w"))).await, all[2..]);
        assert_eq!(names(Some(&Path::from("w/0"))).await, [""; 0]);
        assert_eq!(names(Some(&Path::from("none"))).await, [""; 0]);
        for name in all {
            own.get(&Path::parse(name).unwrap()).await.unwrap();
        }
        let behind = own.list_with_offset(None, &Path::from("elsewhere/0"));
        assert_eq!(behind.count().await, 2);
        let top = own.list_with_delimiter(None).await.unwrap();
        let folders: Vec<&str> = top.common_prefixes.iter().map(AsRef::as_ref).collect();
        assert_eq!(folders, ["elsewhere", "w"]);
        assert_eq!(top.objects.len(), 1);
        let w = own.list_with_delimiter(Some(&Path::from("w"))).await;
        let w = w.unwrap();
        assert_eq!((w.common_prefixes.len(), w.objects.len()), (2, 1));
        assert_eq!(w.objects[0].location.as_ref(), "w/0");
    }
}
