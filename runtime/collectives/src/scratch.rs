//! Memory for bytes on their way, of a chunk each used again: what was touched a moment ago is in the processor's cache, and
//! new memory has to be found and cleared by the system first. Short ones have memory of their own length: what comes before its
//! turn is kept, and there may be thousands of those.

use crate::transport::CHUNK;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Free memory that is kept.
const MOST_FREE: usize = 32;

/// Where free memory is kept. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Pool(Arc<Mutex<Vec<Box<[u8]>>>>);

impl Pool {
    /// Memory of `len` bytes, of any value. It is used again if it is at least half of a chunk, and no longer than one.
    pub(crate) fn take(&self, len: usize) -> Scratch {
        let memory = if (CHUNK / 2..=CHUNK).contains(&len) {
            let free = self.free().pop();
            free.unwrap_or_else(|| vec![0; CHUNK].into())
        } else {
            vec![0; len].into()
        };
        Scratch {
            memory,
            len,
            pool: self.clone(),
        }
    }

    /// A copy of bytes.
    pub(crate) fn copy(&self, bytes: &[u8]) -> Scratch {
        let mut copy = self.take(bytes.len());
        copy.copy_from_slice(bytes);
        copy
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<Box<[u8]>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Such memory.
pub(crate) struct Scratch {
    /// `len` bytes, or a chunk.
    memory: Box<[u8]>,
    len: usize,
    pool: Pool,
}

impl Deref for Scratch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.len]
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.len]
    }
}

impl AsRef<[u8]> for Scratch {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.memory.len() != CHUNK {
            return;
        }
        let mut free = self.pool.free();
        if free.len() < MOST_FREE {
            free.push(std::mem::take(&mut self.memory));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_within_bounds() {
        let pool = Pool::default();
        let first = pool.copy(&[7; CHUNK / 2]);
        assert_eq!(&first[..], [7; CHUNK / 2]);
        let place = first.memory.as_ptr();
        drop(first);
        let again = pool.take(CHUNK);
        assert_eq!((again.memory.as_ptr(), again.len()), (place, CHUNK));
        let many: Vec<_> = (0..2 * MOST_FREE).map(|_| pool.take(CHUNK - 1)).collect();
        drop((many, again, pool.take(CHUNK + 1)));
        assert_eq!(pool.free().len(), MOST_FREE);
    }

    #[test]
    fn short_ones_take_no_more_than_they_have() {
        let pool = Pool::default();
        drop(pool.take(CHUNK));
        for len in [0, 1, 4, CHUNK / 2 - 1, CHUNK + 1] {
            let scratch = pool.take(len);
            assert_eq!((scratch.len(), scratch.memory.len()), (len, len));
        }
        assert_eq!(pool.free().len(), 1);
    }
}
