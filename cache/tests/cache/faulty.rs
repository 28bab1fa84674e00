//! A store that misbehaves on order. Everything not ordered goes to the store inside.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// What goes wrong with one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The request fails and has not happened.
    Fails,
    /// The request is not allowed.
    Denied,
    /// The store asks for patience, in the words of its client.
    Busy,
    /// No answer ever comes, and it has not happened.
    Hangs,
    /// It has happened, and is reported as failed.
    HappensAndFails,
    /// It has happened, and no answer ever comes.
    HappensAndHangs,
    /// The body ends early, as if it were whole (reads).
    Truncates,
    /// The body breaks off with an error (reads).
    Breaks,
    /// The object goes away between answer and body (reads).
    Vanishes,
}

/// The wrapper.
#[derive(Debug)]
pub(crate) struct Faulty {
    inner: Arc<dyn ObjectStore>,
    reads: Mutex<VecDeque<Fault>>,
    writes: Mutex<VecDeque<Fault>>,
    claims: Mutex<VecDeque<Fault>>,
    pub(crate) deny_deletes: AtomicBool,
    pub(crate) delete_count: AtomicUsize,
    pub(crate) read_count: AtomicUsize,
    pub(crate) write_count: AtomicUsize,
}

impl Faulty {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>) -> Faulty {
        Faulty {
            inner,
            reads: Mutex::default(),
            writes: Mutex::default(),
            claims: Mutex::default(),
            deny_deletes: AtomicBool::new(false),
            delete_count: AtomicUsize::new(0),
            read_count: AtomicUsize::new(0),
            write_count: AtomicUsize::new(0),
        }
    }

    /// The next reads (of an object's bytes) go wrong so.
    pub(crate) fn break_reads(&self, faults: impl IntoIterator<Item = Fault>) {
        self.reads.lock().unwrap().extend(faults);
    }

    /// The next writes of claims go wrong so.
    pub(crate) fn break_claims(&self, faults: impl IntoIterator<Item = Fault>) {
        self.claims.lock().unwrap().extend(faults);
    }

    /// The next writes of entries go wrong so.
    pub(crate) fn break_writes(&self, faults: impl IntoIterator<Item = Fault>) {
        self.writes.lock().unwrap().extend(faults);
    }
}

impl std::fmt::Display for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "faulty {}", self.inner)
    }
}

fn failed() -> Error {
    Error::Generic {
        store: "faulty",
        source: "ordered".into(),
    }
}

/// As `object_store` 0.14 says it.
fn busy() -> Error {
    let said = "Error performing PUT http://x in 1s, after 5 retries - \
                Server returned non-2xx status code: 429 Too Many Requests: ";
    Error::Generic {
        store: "faulty",
        source: said.into(),
    }
}

fn denied(path: &Path) -> Error {
    Error::PermissionDenied {
        path: path.to_string(),
        source: "ordered".into(),
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let queue = if location.as_ref().starts_with("claim/") {
            &self.claims
        } else {
            self.write_count.fetch_add(1, Ordering::SeqCst);
            &self.writes
        };
        let fault = queue.lock().unwrap().pop_front();
        match fault {
            None => self.inner.put_opts(location, payload, opts).await,
            Some(Fault::Denied) => Err(denied(location)),
            Some(Fault::Busy) => Err(busy()),
            Some(Fault::Hangs) => std::future::pending().await,
            Some(Fault::HappensAndFails) => {
                self.inner.put_opts(location, payload, opts).await?;
                Err(failed())
            }
            Some(Fault::HappensAndHangs) => {
                self.inner.put_opts(location, payload, opts).await?;
                std::future::pending().await
            }
            Some(_) => Err(failed()),
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.read_count.fetch_add(1, Ordering::SeqCst);
        let fault = self.reads.lock().unwrap().pop_front();
        let body = match fault {
            None => return self.inner.get_opts(location, options).await,
            Some(Fault::Denied) => return Err(denied(location)),
            Some(Fault::Busy) => return Err(busy()),
            Some(Fault::Hangs) => return std::future::pending().await,
            Some(Fault::Truncates | Fault::Breaks | Fault::Vanishes) => {
                self.inner.get_opts(location, options).await?
            }
            Some(_) => return Err(failed()),
        };
        let (meta, range, attributes, extensions) = (
            body.meta.clone(),
            body.range.clone(),
            body.attributes.clone(),
            body.extensions.clone(),
        );
        let bytes = body.bytes().await?;
        let half = bytes.slice(..bytes.len() / 2);
        let parts = match fault {
            Some(Fault::Truncates) => vec![Ok(half)],
            Some(Fault::Breaks) => vec![Ok(half), Err(failed())],
            _ => vec![Err(Error::NotFound {
                path: location.to_string(),
                source: "ordered".into(),
            })],
        };
        Ok(GetResult {
            payload: GetResultPayload::Stream(futures::stream::iter(parts).boxed()),
            meta,
            range,
            attributes,
            extensions,
        })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.delete_count.fetch_add(1, Ordering::SeqCst);
        if self.deny_deletes.load(Ordering::SeqCst) {
            return locations.map(|location| Err(denied(&location?))).boxed();
        }
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
