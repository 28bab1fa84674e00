//! Requests to the store: files of arrays, whether they are objects or keys of a database, and other objects beside them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::{
    GetOptions, GetRange, GetResult, GetResultPayload, ObjectMeta, ObjectStoreExt as _, PutPayload,
};

use super::{Buffer, Engine, Files, Folder, Root, Term, filled};
use crate::{Error, Result};

/// Less is read into the heap.
const LARGE_READ_BYTES: usize = 128 << 10;

/// What is written to a file by one call at most. Of larger ones the system makes larger pages of its cache, for which it has
/// to look further: 2 MiB at a time took three to five times the CPU time, on a virtual machine whose host backs them late.
const WRITE_BYTES: usize = 256 << 10;

/// What was read of an object.
#[derive(Debug)]
pub(crate) struct Part {
    /// `None` when there are more than was allowed.
    pub(crate) bytes: Option<Bytes>,
    /// The size of the whole object.
    pub(crate) size: u64,
    /// What changes when the object does, where the store says.
    pub(crate) tag: Option<String>,
}

impl Engine {
    /// Writes an object, replacing one of that name.
    pub(crate) async fn put(&self, root: &Root, object: &str, bytes: PutPayload) -> Result<u64> {
        let size = bytes.content_length() as u64;
        let path = root.path(object)?;
        let bytes = if root.is_local() { cut(&bytes) } else { bytes };
        let _permit = self.shared.requests.acquire().await;
        let put = || root.store.put(&path, bytes.clone());
        match self.persistently(root, put).await {
            Ok(_) => {
                self.shared.counters.written(size);
                Ok(size)
            }
            Err(source) => Err(root.storage("writing", object, source)),
        }
    }

    /// Reads a file of an array of at most `most` bytes, into memory for such a term. `None` when there is none;
    /// `Some(Err(size))` when it is larger.
    pub(crate) async fn get(
        &self,
        folder: &Folder,
        file: &str,
        most: usize,
        term: Term,
    ) -> Result<Option<std::result::Result<Bytes, u64>>> {
        let object = folder.object(file);
        match &folder.files {
            Files::Objects => self.get_object(&folder.root, &object, most, term).await,
            Files::Keys(databases) => {
                let read = self.get_key(&folder.root, databases, &object, most, term);
                read.await
            }
        }
    }

    /// As [`Engine::get`], of any object of the checkpoint.
    pub(crate) async fn get_object(
        &self,
        root: &Root,
        object: &str,
        most: usize,
        term: Term,
    ) -> Result<Option<std::result::Result<Bytes, u64>>> {
        let read = self.read_object(root, object, GetOptions::default(), (most, term));
        Ok(match read.await? {
            Some(Part {
                bytes: None, size, ..
            }) => Some(Err(size)),
            Some(Part {
                bytes: Some(bytes), ..
            }) => Some(Ok(bytes)),
            None => None,
        })
    }

    /// Reads a range of a file of an array, of `len` bytes at most. `None` when there is no such file.
    pub(crate) async fn get_part(
        &self,
        folder: &Folder,
        file: &str,
        range: GetRange,
        len: usize,
    ) -> Result<Option<Part>> {
        let object = folder.object(file);
        match &folder.files {
            Files::Objects => {
                let options = GetOptions {
                    range: Some(range),
                    ..GetOptions::default()
                };
                let limits = (len, Term::Passing);
                self.read_object(&folder.root, &object, options, limits)
                    .await
            }
            Files::Keys(databases) => {
                let read = self.get_key_part(&folder.root, databases, &object, range, len);
                read.await
            }
        }
    }

    /// The bytes in a range of an object: fewer, or none, where it ends before. `None` when there is no object.
    pub(crate) async fn read_range(
        &self,
        root: &Root,
        object: &str,
        range: Range<u64>,
        term: Term,
    ) -> Result<Option<Bytes>> {
        let len = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        let start = range.start;
        let options = GetOptions {
            range: Some(GetRange::Bounded(range)),
            ..GetOptions::default()
        };
        match self.read_object(root, object, options, (len, term)).await {
            Ok(part) => Ok(part.map(|part| part.bytes.unwrap_or_default())),
            // Stores refuse a range behind the end, in words of their own. All have this one; of another error nothing more is
            // asked, for that may take as long as the first.
            Err(error) if error.report().to_lowercase().contains("range") => {
                match self.object_size(root, object).await {
                    Ok(Some(size)) if size <= start => Ok(Some(Bytes::new())),
                    _ => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    async fn read_object(
        &self,
        root: &Root,
        object: &str,
        options: GetOptions,
        (most, term): (usize, Term),
    ) -> Result<Option<Part>> {
        let path = root.path(object)?;
        let permit = self.shared.requests.acquire().await;
        let after = self.shared.config.read_timeout;
        let read = async {
            root.check_regular(object).await?;
            let get = || async {
                let found = match root.store.get_opts(&path, options.clone()).await {
                    Ok(found) => found,
                    Err(object_store::Error::NotFound { .. }) => return Ok(None),
                    Err(source) => return Err(source),
                };
                let (size, tag) = (found.meta.size, found.meta.e_tag.clone());
                let len = found.range.end.saturating_sub(found.range.start);
                let bytes = match usize::try_from(len) {
                    Ok(len) if len < LARGE_READ_BYTES.min(most) => Some(found.bytes().await?),
                    Ok(len) if len <= most => Some(self.read_body(found, len, term).await?),
                    _ => None,
                };
                Ok(Some(Part { bytes, size, tag }))
            };
            let once = || async {
                let read = self.persistently(root, get).await;
                read.map_err(|source| root.storage("reading", object, source))
            };
            if root.is_local() {
                return once().await;
            }
            let pace = &self.shared.pace;
            let spare = || {
                let request = self.shared.requests.try_acquire().ok()?;
                let room = self.shared.memory.try_chunk(most)?;
                self.shared.counters.hedged();
                Some((request, room))
            };
            pace.read(most, once, spare).await
        };
        let read = tokio::time::timeout(after, read).await;
        drop(permit);
        let Ok(read) = read else {
            return Err(root.stuck(object, after));
        };
        if let Ok(Some(Part {
            bytes: Some(bytes), ..
        })) = &read
        {
            self.shared.counters.read(bytes.len() as u64);
        }
        read
    }

    /// The `len` bytes of a large answer, or fewer where it ends before.
    async fn read_body(
        &self,
        found: GetResult,
        len: usize,
        term: Term,
    ) -> object_store::Result<Bytes> {
        let start = found.range.start;
        let mut parts = match found.payload {
            GetResultPayload::File(file, _) => {
                let engine = self.clone();
                let read = tokio::task::spawn_blocking(move || {
                    let mut buffer = engine.body(len, term)?;
                    let read = read_at(&file, (*buffer).as_mut(), start).map_err(generic)?;
                    Ok(filled(buffer, read))
                });
                return read.await.map_err(generic)?;
            }
            GetResultPayload::Stream(parts) => parts,
        };
        let mut buffer = self.body(len, term)?;
        let mut read = 0;
        while let Some(part) = parts.try_next().await? {
            let Some(room) = (*buffer).as_mut().get_mut(read..read + part.len()) else {
                return Err(generic(format!("more than the {len} bytes announced")));
            };
            room.copy_from_slice(&part);
            read += part.len();
        }
        Ok(filled(buffer, read))
    }

    fn body(&self, len: usize, term: Term) -> object_store::Result<Box<dyn Buffer>> {
        let buffer = self.buffer(len, term);
        buffer.ok_or_else(|| generic(format!("no memory for {len} bytes")))
    }

    /// The size of a file of an array; `None` when there is no such file.
    pub(crate) async fn size(&self, folder: &Folder, file: &str) -> Result<Option<u64>> {
        let object = folder.object(file);
        match &folder.files {
            Files::Objects => self.object_size(&folder.root, &object).await,
            Files::Keys(databases) => self.key_size(&folder.root, databases, &object).await,
        }
    }

    async fn object_size(&self, root: &Root, object: &str) -> Result<Option<u64>> {
        let path = root.path(object)?;
        let _permit = self.shared.requests.acquire().await;
        let after = self.shared.config.read_timeout;
        match tokio::time::timeout(after, root.store.head(&path)).await {
            Ok(Ok(found)) => Ok(Some(found.size)),
            Ok(Err(object_store::Error::NotFound { .. })) => Ok(None),
            Ok(Err(source)) => Err(root.storage("reading", object, source)),
            Err(_) => Err(root.stuck(object, after)),
        }
    }

    /// The names of files and folders in a folder of the checkpoint, which is empty or ends in `/`. Names only.
    pub(crate) async fn list_names(&self, root: &Root, folder: &str) -> Result<Vec<String>> {
        let path = match folder.strip_suffix('/') {
            Some(folder) => root.path(folder)?,
            None => root.prefix().clone(),
        };
        let _permit = self.shared.requests.acquire().await;
        let after = self.shared.config.read_timeout;
        let listed = root.store.list_with_delimiter(Some(&path));
        let listed = match tokio::time::timeout(after, listed).await {
            Ok(Ok(listed)) => listed,
            Ok(Err(source)) => return Err(root.storage("listing", folder, source)),
            Err(_) => return Err(root.stuck(folder, after)),
        };
        let objects = listed.objects.iter().map(|object| &object.location);
        let all = objects.chain(&listed.common_prefixes);
        Ok(all
            .filter_map(|path| path.filename().map(str::to_owned))
            .collect())
    }

    /// All objects of a checkpoint, by their paths below it, in no order.
    pub(crate) fn list_objects(&self, root: &Root) -> BoxStream<'static, Result<(String, u64)>> {
        let own = root.clone();
        let listed = root.store.list(Some(root.prefix()));
        let named = move |listed: object_store::Result<ObjectMeta>| match listed {
            Err(source) => Some(Err(own.storage("listing", "", source))),
            Ok(found) => {
                let parts = found.location.prefix_match(own.prefix())?;
                let parts: Vec<_> = parts.map(|part| part.as_ref().to_owned()).collect();
                Some(Ok((parts.join("/"), found.size)))
            }
        };
        listed
            .filter_map(move |listed| std::future::ready(named(listed)))
            .boxed()
    }
}

fn generic(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> object_store::Error {
    object_store::Error::Generic {
        store: "checkpoint",
        source: source.into(),
    }
}

/// The same bytes in parts of at most [`WRITE_BYTES`].
fn cut(payload: &PutPayload) -> PutPayload {
    let cut_one = |part: &Bytes| {
        let part = part.clone();
        let starts = (0..part.len()).step_by(WRITE_BYTES);
        starts.map(move |at| part.slice(at..part.len().min(at + WRITE_BYTES)))
    };
    payload.iter().flat_map(cut_one).collect()
}

/// Fills a buffer from a place in a file on; how much of it, where the file ends before.
fn read_at(file: &File, buffer: &mut [u8], start: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match file.read_at(&mut buffer[read..], start + read as u64) {
            Ok(0) => break,
            Ok(count) => read += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

impl Error {
    /// An object that is larger than any such object is.
    pub(crate) fn oversized(root: &Root, object: &str, size: u64, most: usize) -> Self {
        Self::Oversized {
            object: object.to_owned(),
            location: root.location(),
            size,
            most: most as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_parts_are_cut_and_stay_the_same_bytes() {
        let bytes: Bytes = (0..3 * WRITE_BYTES + 5).map(|at| (at / 7) as u8).collect();
        let parts = [
            bytes.slice(..1),
            bytes.slice(1..1),
            bytes.slice(1..2 * WRITE_BYTES + 1),
            bytes.slice(2 * WRITE_BYTES + 1..),
        ];
        let payload = cut(&parts.into_iter().collect());
        let sizes: Vec<usize> = payload.iter().map(Bytes::len).collect();
        assert_eq!(
            sizes,
            [1, WRITE_BYTES, WRITE_BYTES, WRITE_BYTES, 4],
            "nothing is copied, nothing is empty"
        );
        assert_eq!(Bytes::from(payload), bytes);
        assert_eq!(cut(&PutPayload::new()).content_length(), 0);
    }
}
