//! A folder as a store, in which others may have put anything.
//!
//! `object_store` ends a listing at the first file whose name no object can have (one that is not UTF-8, say), so that one
//! such file hides all that comes after it. Here it is passed over: no object is meant by it.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use async_trait::async_trait;
use bytes::Bytes;
use futures::executor::block_on_stream;
use futures::stream::{self, BoxStream, StreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};
use tokio::sync::mpsc;
use tracing::{debug, warn};

/// Names that are read before somebody asks for them.
const AHEAD: usize = 1024;

/// See the module.
#[derive(Debug)]
pub(super) struct Folder {
    store: Arc<LocalFileSystem>,
    has_warned: Arc<AtomicBool>,
}

impl Folder {
    pub(super) fn new(store: LocalFileSystem) -> Folder {
        Folder {
            store: Arc::new(store),
            has_warned: Arc::default(),
        }
    }

    /// Lists on a thread of its own. There the store's list is its walk through the folders, which goes on after a bad
    /// name; within a runtime it is cut at the first error.
    fn walk(
        &self,
        list: impl FnOnce(&LocalFileSystem) -> BoxStream<'static, Result<ObjectMeta>> + Send + 'static,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let (sender, receiver) = mpsc::channel(AHEAD);
        let (store, has_warned) = (Arc::clone(&self.store), Arc::clone(&self.has_warned));
        let thread = std::thread::Builder::new().name("list".to_owned());
        let started = thread.spawn(move || {
            for found in block_on_stream(list(&store)) {
                if let Err(Error::InvalidPath { source }) = &found {
                    pass_over(source, &has_warned);
                } else if sender.blocking_send(found).is_err() {
                    return;
                }
            }
        });
        if let Err(error) = started {
            return stream::once(async { Err(no_thread(error)) }).boxed();
        }
        let next = async |mut receiver: mpsc::Receiver<_>| Some((receiver.recv().await?, receiver));
        stream::unfold(receiver, next).boxed()
    }
}

fn pass_over(name: &object_store::path::Error, has_warned: &AtomicBool) {
    // Names are strangers'.
    let name = name.to_string().replace(char::is_control, "?");
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
        self.store.fmt(f)
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
        self.store.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.store.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.store.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let prefix = prefix.cloned();
        self.walk(move |store| store.list(prefix.as_ref()))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let (prefix, offset) = (prefix.cloned(), offset.clone());
        self.walk(move |store| store.list_with_offset(prefix.as_ref(), &offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.store.rename_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    use futures::TryStreamExt as _;

    use super::*;
    use crate::bucket::{Bucket, Location};

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
