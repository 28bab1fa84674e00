//! A folder as a store, in which others may have put anything.
//!
//! Objects are regular files, and nothing else is one: what is a symbolic link, or lies behind one, what would hang its
//! reader (a FIFO) or has no end (a device) is refused at once where its name is asked for ([`NoObject`], an error that
//! says nothing of other names), and passed over in lists. So is, with a warning, a file whose name no object can have;
//! it must not hide those that come after it. Writes are on disk when they return, and seen as a whole or not at all.

mod tree;

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Error, Extensions, GetOptions, GetResult, GetResultPayload,
    ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};
use tokio::sync::mpsc;
use tracing::{debug, warn};

use self::tree::Tree;

pub(crate) use self::tree::enter;
pub(in crate::bucket) use self::tree::{NoObject, is_half};

/// Names that are read before somebody asks for them.
const AHEAD: usize = 1024;

/// Removals at a time.
const REMOVALS: usize = 10;

/// See the module.
#[derive(Debug)]
pub(super) struct Folder {
    tree: Arc<Tree>,
    has_warned: Arc<AtomicBool>,
}

impl Folder {
    /// The folder is there.
    pub(super) fn open(root: PathBuf) -> io::Result<Folder> {
        Ok(Folder {
            tree: Arc::new(Tree::open(root)?),
            has_warned: Arc::default(),
        })
    }

    /// Works in the folder on a thread that may block.
    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tree) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let tree = Arc::clone(&self.tree);
        let done = tokio::task::spawn_blocking(move || work(&tree)).await;
        done.map_err(|source| Error::JoinError { source })?
    }

    /// Lists on a thread of its own. It ends when nobody listens any more.
    fn walk(
        &self,
        prefix: Option<&Path>,
        is_asked_for: impl Fn(&Path) -> bool + Send + 'static,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let (sender, receiver) = mpsc::channel(AHEAD);
        let (tree, has_warned) = (Arc::clone(&self.tree), Arc::clone(&self.has_warned));
        let prefix = prefix.cloned().unwrap_or_default();
        let thread = std::thread::Builder::new().name("list".to_owned());
        let started = thread.spawn(move || {
            let mut take = |found: Result<ObjectMeta>| match &found {
                Ok(meta) if !is_asked_for(&meta.location) => !sender.is_closed(),
                _ => sender.blocking_send(found).is_ok(),
            };
            tree.list(&prefix, &mut take, &|name| pass_over(name, &has_warned));
        });
        if let Err(error) = started {
            return stream::once(async { Err(no_thread(error)) }).boxed();
        }
        let next = async |mut receiver: mpsc::Receiver<_>| Some((receiver.recv().await?, receiver));
        stream::unfold(receiver, next).boxed()
    }

    /// For what nobody here asks of a folder.
    fn lacks<T>(&self, operation: &str) -> Result<T> {
        Err(Error::NotImplemented {
            operation: operation.to_owned(),
            implementer: self.to_string(),
        })
    }
}

/// Says that a file is passed over, the first time loudly.
pub(super) fn pass_over(name: &str, has_warned: &AtomicBool) {
    // Names are strangers'.
    let name = name.replace(char::is_control, "?");
    if has_warned.swap(true, Relaxed) {
        debug!(name, "a file that is no object is passed over");
    } else {
        warn!(
            name,
            "a file in the location is passed over: no object can have such a name"
        );
    }
}

fn no_thread(error: io::Error) -> Error {
    Error::Generic {
        store: "folder",
        source: error.into(),
    }
}

impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Folder({})", self.tree.root().display())
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl ObjectStore for Folder {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let over = match options.mode {
            PutMode::Overwrite => true,
            PutMode::Create => false,
            PutMode::Update(_) => return self.lacks("an update of what is there"),
        };
        if !options.attributes.is_empty() {
            return self.lacks("attributes of an object");
        }
        let location = location.clone();
        let work = self.work(move |tree| tree.write(&location, &payload, over));
        Ok(PutResult {
            e_tag: Some(work.await?),
            version: None,
            extensions: Extensions::default(),
        })
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.lacks("an upload in parts")
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let path = location.clone();
        let (file, meta) = self.work(move |tree| tree.read(&path)).await?;
        options.check_preconditions(&meta)?;
        let range = match options.range {
            Some(range) => range.as_range(meta.size).map_err(|source| Error::Generic {
                store: "folder",
                source: source.into(),
            })?,
            None => 0..meta.size,
        };
        Ok(GetResult {
            // The path is for messages.
            payload: GetResultPayload::File(file, self.tree.root().join(location.as_ref())),
            meta,
            range,
            attributes: Attributes::default(),
            extensions: Extensions::default(),
        })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let mut found = Vec::with_capacity(ranges.len());
        for range in ranges {
            found.push(self.get_range(location, range.clone()).await?);
        }
        Ok(found)
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let tree = Arc::clone(&self.tree);
        let remove = move |location: Result<Path>| {
            let tree = Arc::clone(&tree);
            async move {
                let location = location?;
                let work = move || tree.remove(&location).map(|()| location);
                let done = tokio::task::spawn_blocking(work).await;
                done.map_err(|source| Error::JoinError { source })?
            }
        };
        locations.map(remove).buffered(REMOVALS).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.walk(prefix, |_| true)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let offset = offset.clone();
        self.walk(prefix, move |path| *path > offset)
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        self.lacks("a list of one level")
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        self.lacks("a copy")
    }

    async fn rename_opts(&self, _: &Path, _: &Path, _: RenameOptions) -> Result<()> {
        self.lacks("another name for an object")
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    use futures::TryStreamExt as _;

    use super::*;
    use crate::bucket::{Bucket, Location, is_no_object};

    fn open(path: &std::path::Path) -> Bucket {
        Bucket::open(&Location::File(path.to_owned())).unwrap()
    }

    async fn put(bucket: &Bucket, path: &Path) -> Result<PutResult> {
        let (payload, create) = (PutPayload::from_static(b"ours"), PutMode::Create.into());
        bucket.store().put_opts(path, payload, create).await
    }

    async fn names(bucket: &Bucket) -> Vec<String> {
        let names = bucket.store().list(None).map_ok(|meta| meta.location);
        let mut names: Vec<_> = names.map_ok(String::from).try_collect().await.unwrap();
        names.sort();
        names
    }

    #[tokio::test]
    async fn what_links_lead_to_is_neither_read_nor_written_nor_removed() {
        let path = Path::from("exe/v1/ab/0");
        // A link at each height, to what lies there in somebody else's folder.
        for height in ["exe", "exe/v1", "exe/v1/ab", "exe/v1/ab/0"] {
            for over in [PutMode::Create, PutMode::Overwrite] {
                let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
                let object = theirs.path().join(path.as_ref());
                std::fs::create_dir_all(object.parent().unwrap()).unwrap();
                std::fs::write(&object, b"theirs").unwrap();
                let link = ours.path().join(height);
                std::fs::create_dir_all(link.parent().unwrap()).unwrap();
                std::os::unix::fs::symlink(theirs.path().join(height), &link).unwrap();
                let bucket = open(ours.path());
                let store = bucket.store();
                let read = store.get(&path).await.unwrap_err();
                assert!(is_no_object(&read), "{read:?}");
                assert!(store.get_range(&path, 0..1).await.is_err());
                assert_eq!(names(&bucket).await, [""; 0]);
                let payload = PutPayload::from_static(b"ours");
                let is_new = over == PutMode::Create;
                let written = store.put_opts(&path, payload, over.into()).await;
                if height == path.as_ref() && !is_new {
                    // The link itself is written over.
                    written.unwrap();
                    assert_eq!(names(&bucket).await, [path.as_ref()]);
                } else {
                    let refused = written.unwrap_err();
                    let is_taken = matches!(refused, Error::AlreadyExists { .. });
                    assert!(is_taken || is_no_object(&refused), "{refused:?}");
                    assert!(link.is_symlink());
                }
                let _ = store.delete(&path).await;
                assert_eq!(std::fs::read(&object).unwrap(), b"theirs");
                let all = std::fs::read_dir(object.parent().unwrap()).unwrap();
                assert_eq!(all.count(), 1);
            }
        }
    }

    #[tokio::test]
    async fn the_location_itself_may_be_a_link() {
        let temp = tempfile::tempdir().unwrap();
        let (folder, link) = (temp.path().join("folder"), temp.path().join("link"));
        std::fs::create_dir(&folder).unwrap();
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        put(&open(&link), &Path::from("a/b")).await.unwrap();
        assert_eq!(names(&open(&folder)).await, ["a/b"]);
    }

    #[tokio::test]
    async fn what_is_no_regular_file_is_refused_at_once() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let temp = tempfile::tempdir().unwrap();
        let bucket = open(temp.path());
        put(&bucket, &Path::from("k/good")).await.unwrap();
        let below = |name: &str| temp.path().join("k").join(name);
        mknodat(CWD, below("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(below("socket")).unwrap();
        std::fs::create_dir(below("folder")).unwrap();
        for (name, to) in [
            ("loop", "loop"),
            ("zero", "/dev/zero"),
            ("nowhere", "/no/x"),
        ] {
            std::os::unix::fs::symlink(to, below(name)).unwrap();
        }
        for name in [
            "fifo", "socket", "folder", "loop", "zero", "nowhere", "good/0",
        ] {
            let path = Path::from(format!("k/{name}"));
            let error = bucket.store().get(&path).await.unwrap_err();
            assert!(is_no_object(&error), "{name}: {error:?}");
            put(&bucket, &path).await.unwrap_err();
        }
        assert_eq!(names(&bucket).await, ["k/good"]);
    }

    #[tokio::test]
    async fn a_folder_that_is_gone_is_not_made_again() {
        let temp = tempfile::tempdir().unwrap();
        let (root, path) = (temp.path().join("share"), Path::from("a/b"));
        let bucket = open(&root);
        std::fs::remove_dir(&root).unwrap();
        for file_there in [false, true] {
            if file_there {
                std::fs::write(&root, b"x").unwrap();
            }
            let store = bucket.store();
            let errors = [
                put(&bucket, &path).await.unwrap_err(),
                store.get(&path).await.unwrap_err(),
                store.delete(&path).await.unwrap_err(),
                store.list(None).next().await.unwrap().unwrap_err(),
            ];
            for error in errors {
                let is_of_all = matches!(error, Error::Generic { .. }) && !is_no_object(&error);
                assert!(is_of_all, "{error:?}");
            }
            assert!(!root.is_dir());
        }
        std::fs::remove_file(&root).unwrap();
        std::fs::create_dir(&root).unwrap();
        put(&bucket, &path).await.unwrap();
    }

    #[tokio::test]
    async fn what_was_a_mount_point_and_is_none_is_gone() {
        // Linux has a file system there.
        let (temp, mount) = (tempfile::tempdir().unwrap(), "/dev/shm");
        let (root, beneath) = (temp.path().join("share"), temp.path().join("beneath"));
        std::os::unix::fs::symlink(mount, &root).unwrap();
        std::fs::create_dir(&beneath).unwrap();
        let bucket = open(&root);
        std::fs::remove_file(&root).unwrap();
        std::os::unix::fs::symlink(&beneath, &root).unwrap();
        let error = put(&bucket, &Path::from("a")).await.unwrap_err();
        assert!(error.to_string().contains("mount point"), "{error:?}");
        assert_eq!(beneath.read_dir().unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_file_of_no_time_is_listed() {
        let temp = tempfile::tempdir().unwrap();
        let bucket = open(temp.path());
        put(&bucket, &Path::from("a")).await.unwrap();
        let file = std::fs::File::open(temp.path().join("a")).unwrap();
        for at in [u32::MAX.into(), i64::MAX as u64 / 2] {
            let at = std::time::Duration::from_secs(at);
            // Some file systems take less.
            let _ = file.set_modified(std::time::UNIX_EPOCH + at);
            assert_eq!(names(&bucket).await, ["a"]);
        }
    }

    #[tokio::test]
    async fn a_name_that_no_object_can_have_hides_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let bucket = Bucket::open(&Location::File(temp.path().to_owned())).unwrap();
        let folder = temp.path().join("exe/v1");
        // A folder is listed in no order: among so many some come behind the odd one.
        for number in 0..200 {
            for place in [format!("{number}"), format!("odd-{number}/file")] {
                let path = folder.join(place);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, b"x").unwrap();
            }
            let mut odd = format!("odd-{number}/").into_bytes();
            odd.extend(b"\xff\n");
            std::fs::write(folder.join(OsStr::from_bytes(&odd)), b"x").unwrap();
        }
        std::fs::write(folder.join(OsStr::from_bytes(b"\xff")), b"x").unwrap();
        let prefix = Path::from("exe/v1");
        let all: Vec<_> = bucket
            .store()
            .list(Some(&prefix))
            .try_collect()
            .await
            .unwrap();
        assert_eq!(all.len(), 400);
        let offset = Path::from("exe/v1/odd-");
        let rest = bucket.store().list_with_offset(Some(&prefix), &offset);
        let rest: Vec<_> = rest.try_collect().await.unwrap();
        assert_eq!(rest.len(), 200);
    }

    #[tokio::test]
    async fn who_stops_listening_stops_the_list() {
        let temp = tempfile::tempdir().unwrap();
        let bucket = Bucket::open(&Location::File(temp.path().to_owned())).unwrap();
        for number in 0..2 * AHEAD {
            std::fs::write(temp.path().join(number.to_string()), b"x").unwrap();
        }
        for _ in 0..3 {
            let mut list = bucket.store().list(None);
            assert!(list.next().await.unwrap().is_ok());
        }
        assert_eq!(bucket.store().list(None).count().await, 2 * AHEAD);
    }
}
