//! Host bytes on their way in and out, by session and the client's handle.
//!
//! In: a store and the array that is made of it come over different connections in either order. Chunks are kept as they
//! came until they have been read; a reader follows them while they still come, so a big put flows through. Chunks beyond
//! the memory bound go to an unlinked temporary file, so that stores never make the control stream wait.
//!
//! Out: only where the bytes lie (a worker's transfer, or an array of strings) is kept; lookups relay them. What a session may
//! have lying at workers has a bound as well: beyond it a fetch waits until the client has taken and deleted another.

mod store;

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};

use bytes::{Bytes, BytesMut};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::lock::lock;
use crate::{
    counters::Counters,
    link::{FRAME_BYTES, Link},
    status::{self, Status},
    strings::Strings,
};

pub(crate) use store::Store;

/// The unit in which memory is counted, in bytes: semaphores count in u32.
const UNIT_BYTES: usize = 4096;
/// The unit in which fetched bytes are counted, in bytes. What is smaller comes with the worker's answer and counts as
/// nothing: the number of buffers bounds it.
const FETCH_UNIT_BYTES: u64 = 64 << 10;
/// What one session may have lying at workers, fetched and not deleted, in bytes. An array that is larger has it alone.
const FETCHED_BYTES: u64 = 4 << 30;
/// Buffers of one session at a time, waiting to be consumed. The client has 64 stores in flight at most.
const MAX_BUFFERS: usize = 1 << 16;

/// The memory all sessions share for waiting host buffers.
#[derive(Debug)]
pub(crate) struct HostMemory {
    units: Arc<Semaphore>,
    counters: Arc<Counters>,
}

/// Memory taken from the bound; given back when dropped.
#[derive(Debug)]
pub(crate) struct Held {
    _units: OwnedSemaphorePermit,
    bytes: usize,
    counters: Arc<Counters>,
}

impl Drop for Held {
    fn drop(&mut self) {
        Counters::sub(&self.counters.host_buffer_memory_bytes, self.bytes as u64);
    }
}

impl HostMemory {
    pub(crate) fn new(bytes: u64, counters: Arc<Counters>) -> Self {
        let units = usize::try_from(bytes).unwrap_or(usize::MAX) / UNIT_BYTES;
        Self {
            units: Arc::new(Semaphore::new(units.min(Semaphore::MAX_PERMITS))),
            counters,
        }
    }

    /// Memory from the bound; `None` where too little is left.
    pub(crate) fn try_hold(&self, bytes: usize) -> Option<Held> {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).ok()?;
        let permit = Arc::clone(&self.units).try_acquire_many_owned(units).ok()?;
        Counters::add(&self.counters.host_buffer_memory_bytes, bytes as u64);
        Some(Held {
            _units: permit,
            bytes,
            counters: Arc::clone(&self.counters),
        })
    }
}

#[derive(Debug)]
enum Chunk {
    Memory {
        bytes: Bytes,
        _held: Held,
    },
    File {
        file: Arc<File>,
        offset: u64,
        len: usize,
    },
}

/// A chunk until all its readers have read it.
#[derive(Debug)]
struct Place {
    chunk: Option<Chunk>,
    read_by: usize,
}

#[derive(Debug, Default)]
struct Contents {
    chunks: Vec<Place>,
    /// How many readers there are, once that is known.
    readers: Option<usize>,
    received: u64,
    /// Set when all is there, or never will be.
    end: Option<Result<(), Status>>,
    spill: Option<Arc<File>>,
    spilled: u64,
    /// A file of the client's that holds all of it, in place of chunks. It is cut as it is read, so that the length of a
    /// file costs nothing.
    adopted: Option<Arc<File>>,
}

/// A host buffer that a client stores.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    /// Total size in bytes, known once the store has begun.
    size: Mutex<Option<u64>>,
    contents: Mutex<Contents>,
    grown: Notify,
    /// An array took it: it leaves the table with its store's end.
    taken: AtomicBool,
}

impl Incoming {
    /// Waits for the next chunk; `None` at the end. Cancel-safe.
    pub(crate) async fn chunk(&self, index: usize) -> Result<Option<Bytes>, Status> {
        loop {
            // Registered before the look, so that no wake-up is lost.
            let grown = self.grown.notified();
            tokio::pin!(grown);
            grown.as_mut().enable();
            let found = {
                let contents = lock(&self.contents);
                if let Some(file) = &contents.adopted {
                    let offset = (index as u64).saturating_mul(FRAME_BYTES as u64);
                    let left = contents.received.saturating_sub(offset);
                    let len =
                        usize::try_from(left).map_or(FRAME_BYTES, |left| left.min(FRAME_BYTES));
                    if len == 0 {
                        return Ok(None);
                    }
                    Some((Arc::clone(file), offset, len))
                } else {
                    match contents.chunks.get(index) {
                        Some(place) => match &place.chunk {
                            Some(Chunk::Memory { bytes, .. }) => return Ok(Some(bytes.clone())),
                            Some(Chunk::File { file, offset, len }) => {
                                Some((Arc::clone(file), *offset, *len))
                            }
                            None => {
                                return Err(status::failed_precondition(
                                    "a host buffer was read by more than it has readers",
                                ));
                            }
                        },
                        None => match &contents.end {
                            Some(Ok(())) => return Ok(None),
                            Some(Err(e)) => return Err(e.clone()),
                            None => None,
                        },
                    }
                }
            };
            match found {
                Some((file, offset, len)) => return read_back(file, offset, len).await.map(Some),
                None => grown.await,
            }
        }
    }

    /// Says how many readers there will be; each reads every chunk once, in order.
    pub(crate) fn will_be_read(&self, by: usize) {
        lock(&self.contents).readers = Some(by);
    }

    /// A reader has read a chunk; after the last one its memory is free for those that still come.
    pub(crate) fn is_read(&self, index: usize) {
        let mut contents = lock(&self.contents);
        let readers = contents.readers;
        let gone = contents.chunks.get_mut(index).and_then(|place| {
            place.read_by += 1;
            place.chunk.take_if(|_| Some(place.read_by) == readers)
        });
        drop(contents);
        drop(gone);
    }

    /// Waits until the store has begun, and gives the size it announced.
    pub(crate) async fn size(&self) -> Result<u64, Status> {
        loop {
            let grown = self.grown.notified();
            tokio::pin!(grown);
            grown.as_mut().enable();
            if let Some(size) = *lock(&self.size) {
                return Ok(size);
            }
            if let Some(Err(e)) = &lock(&self.contents).end {
                return Err(e.clone());
            }
            grown.await;
        }
    }

    /// Waits until all bytes are here, or never will be.
    pub(crate) async fn ended(&self) {
        loop {
            let grown = self.grown.notified();
            tokio::pin!(grown);
            grown.as_mut().enable();
            if self.has_ended() {
                return;
            }
            grown.await;
        }
    }

    /// Whether all bytes are here, or never will be.
    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.contents).end.is_some()
    }

    /// All bytes where they are here already and no more than `limit`.
    pub(crate) fn small(&self, limit: u64) -> Option<Bytes> {
        let contents = lock(&self.contents);
        if contents.end != Some(Ok(())) || contents.received > limit || contents.adopted.is_some() {
            return None;
        }
        // The transport may have cut them.
        let mut parts = contents.chunks.iter().map(|place| match &place.chunk {
            Some(Chunk::Memory { bytes, .. }) => Some(bytes),
            _ => None,
        });
        match contents.chunks.len() {
            0 => Some(Bytes::new()),
            1 => parts.next()?.cloned(),
            _ => parts
                .try_fold(BytesMut::new(), |mut all, part| {
                    all.extend_from_slice(part?);
                    Some(all)
                })
                .map(BytesMut::freeze),
        }
    }

    fn begin(&self, size: u64) {
        *lock(&self.size) = Some(size);
        self.grown.notify_waiters();
    }

    fn push(&self, chunk: Chunk, len: usize) {
        {
            let mut contents = lock(&self.contents);
            contents.chunks.push(Place {
                chunk: Some(chunk),
                read_by: 0,
            });
            contents.received += len as u64;
        }
        self.grown.notify_waiters();
    }

    fn adopt(&self, file: File, size: u64) {
        let mut contents = lock(&self.contents);
        contents.adopted = Some(Arc::new(file));
        contents.received = size;
    }

    fn finish(&self, result: Result<(), Status>) {
        lock(&self.contents).end.get_or_insert(result);
        self.grown.notify_waiters();
    }
}

async fn read_back(file: Arc<File>, offset: u64, len: usize) -> Result<Bytes, Status> {
    blocking(move || {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, offset)?;
        Ok(Bytes::from(bytes))
    })
    .await
}

/// Runs a file operation off the runtime's threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, Status> {
    let failed = |e: &dyn std::fmt::Display| {
        status::resource_exhausted(format!(
            "the proxy could not keep a host buffer in a file or read it back ({e}); raise --host_buffer_memory or free disk \
             space in TMPDIR"
        ))
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => Err(failed(&e)),
        Err(e) => Err(failed(&e)),
    }
}

/// Bytes of a fetched array.
#[derive(Debug)]
pub(crate) enum Outgoing {
    /// Numbers.
    AtWorker(Transfer),
    /// Strings.
    Here(Arc<Strings>),
}

/// Bytes of a fetched array, waiting at a worker; released there when dropped.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) link: Arc<Link>,
    pub(crate) transfer: u64,
    pub(crate) size_bytes: u64,
    /// Small results came with the answer.
    pub(crate) inline: Option<Bytes>,
    /// The worker's memory in which the bytes lie, where this process can reach it.
    pub(crate) file: Option<File>,
    /// Not zero: there are only the first so many bytes, the worker is asked for the others piece by piece.
    pub(crate) piece_bytes: u64,
    /// `None`: a piece, whose whole has it.
    pub(crate) _room: Option<FetchRoom>,
}

/// A fetch's part of what its session may have lying at workers; given back when dropped.
#[derive(Debug)]
pub(crate) struct FetchRoom {
    _units: Option<OwnedSemaphorePermit>,
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.link.release(self.transfer);
    }
}

#[derive(Debug)]
enum Entry {
    In(Arc<Incoming>),
    Out(Arc<Outgoing>),
}

/// The host buffers of one session.
#[derive(Debug)]
pub(crate) struct HostBuffers {
    memory: Arc<HostMemory>,
    entries: Mutex<HashMap<u64, Entry>>,
    fetches: Arc<Semaphore>,
    opened: Instant,
    verdict: OnceLock<Status>,
    end: CancellationToken,
}

impl HostBuffers {
    pub(crate) fn new(memory: Arc<HostMemory>) -> Self {
        Self {
            memory,
            entries: Mutex::new(HashMap::new()),
            fetches: Arc::new(Semaphore::new(fetch_units(FETCHED_BYTES) as usize)),
            opened: Instant::now(),
            verdict: OnceLock::new(),
            end: CancellationToken::new(),
        }
    }

    /// When the session began.
    pub(crate) fn opened(&self) -> Instant {
        self.opened
    }

    /// Fails all that the session asks for from now on: its arrays may hold another's bytes.
    pub(crate) fn condemn(&self, status: Status) {
        tracing::error!(reason = %status.message, "a session is refused everything from now on");
        self.verdict.get_or_init(|| status);
    }

    /// Why the session is refused everything, where it is.
    pub(crate) fn verdict(&self) -> Option<&Status> {
        self.verdict.get()
    }

    /// Cancelled when the session has ended.
    pub(crate) fn ended(&self) -> CancellationToken {
        self.end.clone()
    }

    /// Lets go of all there is, and has the calls that still move bytes give up.
    pub(crate) fn end(&self) {
        self.end.cancel();
        // Dropped outside the lock.
        let entries = std::mem::take(&mut *lock(&self.entries));
        drop(entries);
    }

    /// The bound on memory.
    pub(crate) fn memory(&self) -> Arc<HostMemory> {
        Arc::clone(&self.memory)
    }

    /// The buffer of an array that is being made: taken out if its store has begun, else waited for.
    ///
    /// # Errors
    /// INVALID_ARGUMENT when the handle stands for fetched bytes, RESOURCE_EXHAUSTED when too many wait.
    pub(crate) fn consume(&self, handle: u64) -> Result<Arc<Incoming>, Status> {
        let mut entries = lock(&self.entries);
        match entries.get(&handle) {
            Some(Entry::In(incoming)) => {
                let incoming = Arc::clone(incoming);
                if incoming.taken.swap(true, Relaxed) {
                    return Err(status::invalid_argument(format!(
                        "host buffer {handle} is used twice"
                    )));
                }
                // A store still going on, or yet to come, must find it; it is taken out when the store ends.
                if lock(&incoming.contents).end.is_some() {
                    entries.remove(&handle);
                }
                Ok(incoming)
            }
            Some(Entry::Out(_)) => Err(status::invalid_argument(format!(
                "host buffer {handle} holds fetched bytes, not stored ones"
            ))),
            None => {
                check_room(&entries)?;
                let incoming = Arc::new(Incoming::default());
                incoming.taken.store(true, Relaxed);
                entries.insert(handle, Entry::In(Arc::clone(&incoming)));
                Ok(incoming)
            }
        }
    }

    /// Begins a store of `size` bytes.
    ///
    /// # Errors
    /// INVALID_ARGUMENT when the handle is in use, RESOURCE_EXHAUSTED when too many buffers wait.
    pub(crate) fn store(self: &Arc<Self>, handle: u64, size: u64) -> Result<Store, Status> {
        let mut entries = lock(&self.entries);
        let incoming = match entries.get(&handle) {
            None => {
                check_room(&entries)?;
                let incoming = Arc::new(Incoming::default());
                entries.insert(handle, Entry::In(Arc::clone(&incoming)));
                incoming
            }
            Some(Entry::In(incoming)) if lock(&incoming.size).is_none() => Arc::clone(incoming),
            Some(_) => {
                return Err(status::invalid_argument(format!(
                    "host buffer {handle} is stored twice"
                )));
            }
        };
        incoming.begin(size);
        Ok(Store {
            buffers: Arc::clone(self),
            incoming,
            handle,
            size,
            done: false,
        })
    }

    /// Waits until the session may fetch so many bytes more. Deletions come by another way than requests, so a session that
    /// waits here is not in its own way; one that never deletes waits alone.
    pub(crate) async fn room_to_fetch(&self, bytes: u64) -> FetchRoom {
        let units = fetch_units(bytes).min(fetch_units(FETCHED_BYTES));
        let room = Arc::clone(&self.fetches).acquire_many_owned(units).await;
        // Nobody closes the semaphore.
        FetchRoom { _units: room.ok() }
    }

    /// Puts down where a fetch's bytes lie.
    pub(crate) fn offer(&self, handle: u64, outgoing: Outgoing) -> Result<(), Status> {
        let mut entries = lock(&self.entries);
        check_room(&entries)?;
        if entries.contains_key(&handle) {
            return Err(status::invalid_argument(format!(
                "host buffer {handle} is in use"
            )));
        }
        entries.insert(handle, Entry::Out(Arc::new(outgoing)));
        Ok(())
    }

    /// Where a fetch's bytes lie.
    pub(crate) fn lookup(&self, handle: u64) -> Result<Arc<Outgoing>, Status> {
        if let Some(reason) = self.verdict() {
            return Err(reason.clone());
        }
        match lock(&self.entries).get(&handle) {
            Some(Entry::Out(outgoing)) => Ok(Arc::clone(outgoing)),
            _ => Err(status::invalid_argument(format!(
                "unknown host buffer {handle}"
            ))),
        }
    }

    /// Forgets a buffer.
    pub(crate) fn delete(&self, handle: u64) -> Result<(), Status> {
        match lock(&self.entries).remove(&handle) {
            Some(Entry::In(incoming)) => {
                incoming.finish(Err(status::failed_precondition(
                    "the host buffer was deleted before it was complete",
                )));
                Ok(())
            }
            Some(Entry::Out(_)) => Ok(()),
            None => Err(status::invalid_argument(format!(
                "unknown host buffer {handle}"
            ))),
        }
    }
}

fn fetch_units(bytes: u64) -> u32 {
    u32::try_from(bytes / FETCH_UNIT_BYTES).unwrap_or(u32::MAX)
}

fn check_room(entries: &HashMap<u64, Entry>) -> Result<(), Status> {
    if entries.len() >= MAX_BUFFERS {
        return Err(status::resource_exhausted(format!(
            "more than {MAX_BUFFERS} host buffers wait in this session"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
