//! A bucket that was not well when it was opened, until it is.
//!
//! Without this a job would either wait for a dead bucket at every look-up, or never use one that came back. The gate
//! fails every request at once and without the network, while one task asks from time to time; after the first good
//! answer the bucket is as it would have been.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};
use tracing::info;

use super::{Bucket, PROBE_DEADLINE};

/// Between two questions whether a bucket is well.
pub const GATE_INTERVAL: Duration = Duration::from_secs(30);

impl Bucket {
    /// This bucket after a failed [`Bucket::probe`]: requests fail at once until it is found well, which is asked every
    /// `interval`. Must be called within a tokio runtime; the task ends with the last clone of what is returned.
    pub fn when_well(self, interval: Duration) -> Bucket {
        let gate = Arc::new(Gate {
            store: Arc::clone(self.store()),
            open: AtomicBool::new(false),
        });
        tokio::spawn(watch(self.clone(), Arc::downgrade(&gate), interval));
        self.with_store(gate)
    }
}

async fn watch(bucket: Bucket, gate: Weak<Gate>, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        if gate.strong_count() == 0 {
            return;
        }
        if bucket.probe(PROBE_DEADLINE).await.is_ok() {
            info!(location = %bucket.location(), "the bucket can be used now");
            if let Some(gate) = gate.upgrade() {
                gate.open.store(true, Ordering::Release);
            }
            return;
        }
    }
}

#[derive(Debug)]
struct Gate {
    store: Arc<dyn ObjectStore>,
    open: AtomicBool,
}

/// What requests get meanwhile.
#[derive(Debug, thiserror::Error)]
#[error("the bucket was not well when this process started, and has not been since")]
struct NotWell;

impl Gate {
    fn pass(&self) -> Result<&Arc<dyn ObjectStore>> {
        if self.open.load(Ordering::Acquire) {
            Ok(&self.store)
        } else {
            Err(Error::Generic {
                store: "gate",
                source: NotWell.into(),
            })
        }
    }

    fn pass_stream<T: Send + 'static>(
        &self,
        stream: impl FnOnce(&Arc<dyn ObjectStore>) -> BoxStream<'static, Result<T>>,
    ) -> BoxStream<'static, Result<T>> {
        match self.pass() {
            Ok(store) => stream(store),
            Err(error) => stream::once(async { Err(error) }).boxed(),
        }
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gate({})", self.store)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl ObjectStore for Gate {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.pass()?.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.pass()?.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.pass()?.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.pass()?.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.pass_stream(|store| store.delete_stream(locations))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.pass_stream(|store| store.list(prefix))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.pass_stream(|store| store.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.pass()?.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.pass()?.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.pass()?.rename_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::{Location, conformance};
    use object_store::ObjectStoreExt;

    #[tokio::test(start_paused = true)]
    async fn requests_fail_at_once_until_the_bucket_is_there() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("bucket");
        let bucket = Bucket::open(&Location::File(path.clone())).unwrap();
        std::fs::remove_dir(&path).unwrap();
        bucket.probe(PROBE_DEADLINE).await.unwrap_err();
        let gated = bucket.when_well(GATE_INTERVAL);
        let put = || {
            let payload = PutPayload::from_static(b"x");
            let (name, store) = (Path::from("x"), Arc::clone(gated.store()));
            async move { store.put(&name, payload).await }
        };
        for _ in 0..3 {
            let error = put().await.unwrap_err();
            assert!(error.to_string().contains("not well"), "{error}");
            assert!(gated.store().list(None).next().await.unwrap().is_err());
            tokio::time::sleep(GATE_INTERVAL).await;
        }
        assert!(!path.exists(), "nothing has touched the folder");
        std::fs::create_dir(&path).unwrap();
        while put().await.is_err() {
            tokio::time::sleep(GATE_INTERVAL).await;
        }
        gated.store().delete(&Path::from("x")).await.unwrap();
        conformance::run(&gated).await;
    }
}
