//! A store that counts requests by object, and can be told to fail.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt as _, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use waystation_lifecycle::bucket::{Bucket, Location};

/// What was asked of the store.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) gets: HashMap<String, usize>,
    pub(crate) puts: HashMap<String, usize>,
    /// Bytes of objects that were asked for.
    pub(crate) bytes: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct Counting {
    inner: Arc<InMemory>,
    counts: Arc<Mutex<Counts>>,
    /// Writes of objects with this ending fail.
    fail_puts: Option<&'static str>,
    /// Requests never end.
    stalled: bool,
    /// Objects of which a part is read are written anew.
    restless: bool,
}

impl Counting {
    pub(crate) fn new() -> Self {
        Self {
            inner: Arc::default(),
            counts: Arc::default(),
            fail_puts: None,
            stalled: false,
            restless: false,
        }
    }

    /// The same objects, with failing writes.
    pub(crate) fn failing_puts(&self, ending: &'static str) -> Self {
        Self {
            fail_puts: Some(ending),
            ..self.clone()
        }
    }

    /// The same objects, written anew whenever a part of one is read.
    pub(crate) fn restless(&self) -> Self {
        Self {
            restless: true,
            ..self.clone()
        }
    }

    /// The same objects, without an answer.
    pub(crate) fn stalled(&self) -> Self {
        Self {
            stalled: true,
            ..self.clone()
        }
    }

    pub(crate) fn bucket(&self) -> Bucket {
        Bucket::from_store(Location::Memory, Arc::new(self.clone()))
    }

    /// Puts an object in another one's place.
    pub(crate) async fn overwrite(&self, path: &str, bytes: Vec<u8>) {
        let path = Path::from(path);
        self.inner.put(&path, bytes.into()).await.unwrap();
    }

    /// The requests since the last call.
    pub(crate) fn take(&self) -> Counts {
        std::mem::take(&mut *self.counts.lock().unwrap())
    }
}

impl fmt::Display for Counting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("counting")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Counting {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        if self.stalled {
            std::future::pending::<()>().await;
        }
        *self
            .counts
            .lock()
            .unwrap()
            .puts
            .entry(location.to_string())
            .or_default() += 1;
        if self
            .fail_puts
            .is_some_and(|ending| location.as_ref().ends_with(ending))
        {
            return Err(object_store::Error::Generic {
                store: "counting",
                source: "told to fail".into(),
            });
        }
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
        if self.stalled {
            std::future::pending::<()>().await;
        }
        *self
            .counts
            .lock()
            .unwrap()
            .gets
            .entry(location.to_string())
            .or_default() += 1;
        let is_part = options.range.is_some();
        let found = self.inner.get_opts(location, options).await?;
        if self.restless && is_part {
            let bytes = self.inner.get(location).await?.bytes().await?;
            self.inner.put(location, bytes.into()).await?;
        }
        self.counts.lock().unwrap().bytes += found.range.end - found.range.start;
        Ok(found)
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
