//! Host bytes, in recycled memory: fresh pages cost about as much as the transfer itself, and a ceiling should not pay them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use tokio::sync::watch;

use super::lock;

/// Buffers below this size, in bytes, are left to the allocator.
const RECYCLED_FROM_BYTES: usize = 64 << 10;
/// Buffers kept for the next store.
const KEPT: usize = 8;

/// Memory that stores have given back.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Vec<Vec<u8>>>);

/// Contents under way or at rest; their memory returns to the pool with the last reader.
#[derive(Debug)]
pub(super) struct Contents {
    bytes: Vec<u8>,
    pool: Arc<Pool>,
}

impl Contents {
    /// Adds bytes at the end.
    pub(super) fn extend(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }
}

impl AsRef<[u8]> for Contents {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Contents {
    fn drop(&mut self) {
        if self.bytes.capacity() < RECYCLED_FROM_BYTES {
            return;
        }
        let mut kept = lock(&self.pool.0);
        if kept.len() < KEPT {
            self.bytes.clear();
            kept.push(std::mem::take(&mut self.bytes));
        }
    }
}

/// Stored bytes, perhaps still to come.
pub(super) type Stored = watch::Receiver<Option<Bytes>>;

/// The host buffers of one session.
#[derive(Debug)]
pub(super) struct Buffers {
    pool: Arc<Pool>,
    /// By handle; a store and the array made of it come in either order.
    incoming: Mutex<HashMap<u64, watch::Sender<Option<Bytes>>>>,
    outgoing: Mutex<HashMap<u64, Bytes>>,
}

impl Buffers {
    pub(super) fn new(pool: Arc<Pool>) -> Self {
        Self {
            pool,
            incoming: Mutex::default(),
            outgoing: Mutex::default(),
        }
    }

    /// Memory for `size` bytes.
    pub(super) fn take(&self, size: usize) -> Contents {
        let recycled = (size >= RECYCLED_FROM_BYTES).then(|| {
            let mut kept = lock(&self.pool.0);
            let fits = |v: &Vec<u8>| (size..=2 * size).contains(&v.capacity());
            kept.iter()
                .position(fits)
                .map(|index| kept.swap_remove(index))
        });
        Contents {
            // Below a bound that no client's word can move, memory is taken at once.
            bytes: recycled
                .flatten()
                .unwrap_or_else(|| Vec::with_capacity(size.min(1 << 30))),
            pool: Arc::clone(&self.pool),
        }
    }

    /// The end of a store.
    pub(super) fn stored(&self, handle: u64, contents: Contents) {
        let bytes = Some(Bytes::from_owner(contents));
        let mut incoming = lock(&self.incoming);
        // Taken out where the array is there already; else the array finds it.
        match incoming.remove(&handle) {
            Some(sender) => {
                sender.send_replace(bytes);
            }
            None => {
                incoming.insert(handle, watch::Sender::new(bytes));
            }
        }
    }

    /// The bytes an array is made of.
    pub(super) fn consume(&self, handle: u64) -> Stored {
        let mut incoming = lock(&self.incoming);
        match incoming.remove(&handle) {
            Some(sender) => sender.subscribe(),
            None => {
                let (sender, receiver) = watch::channel(None);
                incoming.insert(handle, sender);
                receiver
            }
        }
    }

    /// Puts bytes down for the client to look up.
    pub(super) fn offer(&self, handle: u64, bytes: Bytes) {
        lock(&self.outgoing).insert(handle, bytes);
    }

    /// Bytes that were put down.
    pub(super) fn outgoing(&self, handle: u64) -> Option<Bytes> {
        lock(&self.outgoing).get(&handle).cloned()
    }

    /// Forgets bytes that were put down.
    pub(super) fn delete(&self, handle: u64) {
        lock(&self.outgoing).remove(&handle);
    }
}

/// Waits for stored bytes; nothing where the store never ends.
pub(super) async fn complete(mut stored: Stored) -> Bytes {
    match stored.wait_for(Option::is_some).await {
        Ok(bytes) => bytes.clone().unwrap_or_default(),
        Err(_) => Bytes::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bytes_are_found_whichever_comes_first() {
        let buffers = Buffers::new(Arc::default());
        let store = |handle, byte| {
            let mut contents = buffers.take(100_000);
            contents.extend(&[byte; 100_000]);
            buffers.stored(handle, contents);
        };
        store(1, 7);
        assert_eq!(complete(buffers.consume(1)).await, vec![7; 100_000]);
        let early = buffers.consume(2);
        store(2, 8);
        assert_eq!(complete(early).await, vec![8; 100_000]);
        assert!(lock(&buffers.incoming).is_empty());
    }

    #[test]
    fn memory_is_used_again() {
        let buffers = Buffers::new(Arc::default());
        let mut first = buffers.take(100_000);
        first.extend(&[1; 100_000]);
        let place = first.as_ref().as_ptr();
        drop(first);
        let mut second = buffers.take(90_000);
        second.extend(&[2]);
        assert_eq!(second.as_ref().as_ptr(), place);
        assert_eq!(second.as_ref(), &[2]);
    }
}
