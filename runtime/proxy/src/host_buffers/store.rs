//! A store under way: the bytes of one host buffer as they come, or as they lie in a file already.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use bytes::Bytes;

use super::{Chunk, Entry, HostBuffers, Incoming, blocking, lock};
use crate::{
    counters::Counters,
    status::{self, Status},
};

/// A store under way. Dropped before its end it fails the buffer, so nobody waits for it for ever.
#[derive(Debug)]
pub(crate) struct Store {
    pub(super) buffers: Arc<HostBuffers>,
    pub(super) incoming: Arc<Incoming>,
    pub(super) handle: u64,
    pub(super) size: u64,
    pub(super) done: bool,
}

impl Store {
    /// Takes the next bytes, into memory or, above the bound, into the buffer's file.
    ///
    /// # Errors
    /// INVALID_ARGUMENT past the announced size, RESOURCE_EXHAUSTED when the file cannot take it.
    pub(crate) async fn push(&self, bytes: Bytes) -> Result<(), Status> {
        let taken = self.take(bytes).await;
        // So that the array fails for this reason too, and not for a store that ended.
        taken.inspect_err(|status| self.end(Err(status.clone())))
    }

    async fn take(&self, bytes: Bytes) -> Result<(), Status> {
        if bytes.is_empty() {
            return Ok(());
        }
        let received = lock(&self.incoming.contents).received;
        if received + bytes.len() as u64 > self.size {
            return Err(status::invalid_argument(format!(
                "host buffer {} was announced with {} bytes, more came",
                self.handle, self.size
            )));
        }
        let len = bytes.len();
        if let Some(held) = self.buffers.memory.try_hold(len) {
            self.incoming
                .push(Chunk::Memory { bytes, _held: held }, len);
            return Ok(());
        }
        let spill = lock(&self.incoming.contents).spill.clone();
        let file = match spill {
            Some(file) => file,
            None => {
                let file = Arc::new(blocking(tempfile::tempfile).await?);
                lock(&self.incoming.contents).spill = Some(Arc::clone(&file));
                file
            }
        };
        let offset = {
            let mut contents = lock(&self.incoming.contents);
            let offset = contents.spilled;
            contents.spilled += len as u64;
            offset
        };
        let target = Arc::clone(&file);
        blocking(move || target.write_all_at(&bytes, offset)).await?;
        Counters::add(
            &self.buffers.memory.counters.host_buffer_spilled_bytes,
            len as u64,
        );
        self.incoming.push(Chunk::File { file, offset, len }, len);
        Ok(())
    }

    /// Takes a whole file of the announced size, as it is.
    ///
    /// # Errors
    /// Those of [`Self::finish`].
    pub(crate) fn adopt(self, file: File) -> Result<(), Status> {
        self.incoming.adopt(file, self.size);
        self.finish()
    }

    /// Ends the store without its bytes.
    pub(crate) fn fail(mut self, status: Status) {
        self.done = true;
        self.end(Err(status));
    }

    /// Ends the store.
    ///
    /// # Errors
    /// INVALID_ARGUMENT when fewer bytes came than announced.
    pub(crate) fn finish(mut self) -> Result<(), Status> {
        let received = lock(&self.incoming.contents).received;
        let result = if received == self.size {
            Ok(())
        } else {
            Err(status::invalid_argument(format!(
                "host buffer {} was announced with {} bytes, {received} came",
                self.handle, self.size
            )))
        };
        self.done = true;
        self.end(result.clone());
        result
    }

    fn end(&self, result: Result<(), Status>) {
        let mut entries = lock(&self.buffers.entries);
        self.incoming.finish(result);
        if self.incoming.taken.load(Relaxed)
            && matches!(entries.get(&self.handle), Some(Entry::In(i)) if Arc::ptr_eq(i, &self.incoming))
        {
            entries.remove(&self.handle);
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if !self.done {
            self.end(Err(status::unavailable(format!(
                "the store of host buffer {} ended before all its bytes came",
                self.handle
            ))));
        }
    }
}
