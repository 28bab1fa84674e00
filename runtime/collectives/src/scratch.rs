//! Memory for bytes on their way, a chunk each, used again: what was touched a moment ago is in the processor's cache, and
//! new memory has to be found and cleared by the system first.

use crate::transport::CHUNK;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Free memory that is kept.
const MOST_FREE: usize = 32;

/// Where free memory is kept. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Pool(Arc<Mutex<Vec<Box<[u8]>>>>);

impl Pool {
    /// Memory of `len` bytes, of any value. What is longer than a chunk is not used again.
    pub(crate) fn take(&self, len: usize) -> Scratch {
        let free = (len <= CHUNK).then(|| self.free().pop()).flatten();
        Scratch {
            memory: free.unwrap_or_else(|| vec![0; len.max(CHUNK)].into()),
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
    /// At least a chunk.
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
        let mut free = self.pool.free();
        if self.memory.len() == CHUNK && free.len() < MOST_FREE {
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
        let first = pool.copy(&[1, 2, 3]);
        assert_eq!(&first[..], [1, 2, 3]);
        let place = first.memory.as_ptr();
        drop(first);
        let again = pool.take(CHUNK);
        assert_eq!((again.memory.as_ptr(), again.len()), (place, CHUNK));
        let many: Vec<_> = (0..2 * MOST_FREE).map(|_| pool.take(1)).collect();
        drop((many, again, pool.take(CHUNK + 1)));
        assert_eq!(pool.free().len(), MOST_FREE);
    }
}
