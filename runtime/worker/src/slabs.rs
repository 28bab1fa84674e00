//! Memory for what saves copy from devices and compress.
//!
//! It comes from the system and goes back there, so that a save holds what it counts and no more: a heap keeps what is freed
//! in many pieces by many threads. A little of it is kept for the next piece, for fresh pages cost time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use waystation_checkpoint::{Buffer, Buffers};
use waystation_pjrt::{AlignedBytes, Error};

/// Smaller pieces are the heap's.
const SMALL_BYTES: usize = 128 << 10;
/// The part of a slab that a smaller piece may leave unused: one in so many bytes.
const SLACK: usize = 8;

/// The slabs of this process.
#[derive(Debug)]
pub(crate) struct Slabs {
    most_idle_bytes: usize,
    /// The one that was used last comes last.
    idle: Mutex<Vec<AlignedBytes>>,
}

impl Slabs {
    /// Keeps no more than so many bytes that nobody uses.
    pub(crate) fn new(most_idle_bytes: usize) -> Arc<Slabs> {
        Arc::new(Slabs {
            most_idle_bytes,
            idle: Mutex::default(),
        })
    }

    /// `len` bytes, whatever they are.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Result<Slab, Error> {
        if len < SMALL_BYTES {
            return Ok(Slab {
                bytes: AlignedBytes::zeroed(len)?,
                home: None,
            });
        }
        let kept = {
            let mut idle = self.idle();
            let fits = |bytes: &AlignedBytes| {
                let capacity = bytes.capacity();
                capacity >= len && capacity - len <= len / SLACK
            };
            idle.iter().rposition(fits).map(|index| idle.remove(index))
        };
        let bytes = match kept {
            Some(bytes) => bytes.recycle(len)?,
            None => AlignedBytes::mapped(len)?,
        };
        Ok(Slab {
            bytes,
            home: Some(Arc::clone(self)),
        })
    }

    /// Gives back what nobody uses.
    pub(crate) fn clear(&self) {
        let gone = std::mem::take(&mut *self.idle());
        // Outside the lock: it takes a while.
        drop(gone);
    }

    fn idle(&self) -> MutexGuard<'_, Vec<AlignedBytes>> {
        // A list of blocks is whole after any panic.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A piece of memory.
#[derive(Debug)]
pub(crate) struct Slab {
    /// May be elsewhere for a while.
    pub(crate) bytes: AlignedBytes,
    home: Option<Arc<Slabs>>,
}

impl Drop for Slab {
    fn drop(&mut self) {
        let (Some(home), bytes) = (self.home.take(), std::mem::take(&mut self.bytes)) else {
            return;
        };
        let mut idle = home.idle();
        let kept: usize = idle.iter().map(AlignedBytes::capacity).sum();
        if bytes.capacity() > 0 && kept + bytes.capacity() <= home.most_idle_bytes {
            idle.push(bytes);
        } else {
            drop(idle);
            drop(bytes);
        }
    }
}

impl AsRef<[u8]> for Slab {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsMut<[u8]> for Slab {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

/// For the checkpoint engine.
#[derive(Debug)]
pub(crate) struct EngineSlabs(pub(crate) Arc<Slabs>);

impl Buffers for EngineSlabs {
    fn take(&self, len: usize) -> Option<Box<dyn Buffer>> {
        Some(Box::new(self.0.take(len).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_little_is_kept_for_the_next_piece() {
        let slabs = Slabs::new(1 << 20);
        let kept = || {
            slabs
                .idle()
                .iter()
                .map(AlignedBytes::capacity)
                .sum::<usize>()
        };
        let (first, second) = (slabs.take(1 << 20).unwrap(), slabs.take(1 << 20).unwrap());
        let place = first.bytes.as_ptr();
        drop(first);
        drop(second);
        assert_eq!(kept(), 1 << 20);
        // One that is much larger than needed is not taken.
        drop(slabs.take(1 << 19).unwrap());
        assert_eq!(kept(), 1 << 20);
        let again = slabs.take((1 << 20) - 100).unwrap();
        assert_eq!(
            (again.bytes.as_ptr(), again.bytes.len()),
            (place, (1 << 20) - 100)
        );
        drop(again);
        drop(slabs.take(100).unwrap());
        slabs.clear();
        assert_eq!(kept(), 0);
        assert!(slabs.take(usize::MAX).is_err());
    }
}
