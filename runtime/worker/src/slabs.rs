//! Memory for what saves copy from devices and compress.
//!
//! It comes from the system and goes back there, so that a save holds what it counts and no more: a heap keeps what is freed
//! in many pieces by many threads. What one piece has used is kept for the next one, and for the next save if that comes soon:
//! a page that is new to the process costs more than the copy into it.

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
    budget_bytes: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    used_bytes: usize,
    idle_bytes: usize,
    /// The one that was used last comes last.
    idle: Vec<AlignedBytes>,
}

impl State {
    /// Takes out what must go for used and idle ones to be no more than `most` bytes, oldest first.
    fn evict(&mut self, most: usize) -> Vec<AlignedBytes> {
        let mut gone = 0;
        while gone < self.idle.len() && self.used_bytes.saturating_add(self.idle_bytes) > most {
            self.idle_bytes -= self.idle[gone].capacity();
            gone += 1;
        }
        self.idle.drain(..gone).collect()
    }
}

impl Slabs {
    /// Keeps only so many bytes that nobody uses that all together are no more than these.
    pub(crate) fn new(budget_bytes: usize) -> Arc<Slabs> {
        Arc::new(Slabs {
            budget_bytes,
            state: Mutex::default(),
        })
    }

    /// `len` bytes, whatever they are.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Result<Slab, Error> {
        if len < SMALL_BYTES {
            return Ok(Slab {
                bytes: AlignedBytes::zeroed(len)?,
                counted_bytes: 0,
                home: None,
            });
        }
        let (kept, gone) = {
            let mut state = self.state();
            let fits = |bytes: &AlignedBytes| {
                let capacity = bytes.capacity();
                capacity >= len && capacity - len <= len / SLACK
            };
            match state.idle.iter().rposition(fits) {
                Some(index) => {
                    let bytes = state.idle.remove(index);
                    state.idle_bytes -= bytes.capacity();
                    (Some(bytes), Vec::new())
                }
                None => (None, state.evict(self.budget_bytes.saturating_sub(len))),
            }
        };
        // Outside the lock: it takes a while.
        drop(gone);
        let bytes = match kept {
            Some(bytes) => bytes.recycle(len)?,
            None => AlignedBytes::mapped(len)?,
        };
        let counted_bytes = bytes.capacity();
        self.state().used_bytes += counted_bytes;
        Ok(Slab {
            bytes,
            counted_bytes,
            home: Some(Arc::clone(self)),
        })
    }

    /// Gives back what nobody uses.
    pub(crate) fn clear(&self) {
        let gone = self.state().evict(0);
        drop(gone);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Its numbers are changed together with its list, and nothing in between can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A piece of memory.
#[derive(Debug)]
pub(crate) struct Slab {
    /// May be elsewhere for a while.
    pub(crate) bytes: AlignedBytes,
    counted_bytes: usize,
    home: Option<Arc<Slabs>>,
}

impl Drop for Slab {
    fn drop(&mut self) {
        let (Some(home), bytes) = (self.home.take(), std::mem::take(&mut self.bytes)) else {
            return;
        };
        let mut state = home.state();
        state.used_bytes = state.used_bytes.saturating_sub(self.counted_bytes);
        let (capacity, held) = (bytes.capacity(), state.used_bytes + state.idle_bytes);
        if capacity > 0 && held.saturating_add(capacity) <= home.budget_bytes {
            state.idle_bytes += capacity;
            state.idle.push(bytes);
        } else {
            drop(state);
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
    fn what_is_used_is_kept_for_the_next_piece_within_the_budget() {
        let slabs = Slabs::new(1 << 20);
        let kept = || {
            let state = slabs.state();
            let idle: usize = state.idle.iter().map(AlignedBytes::capacity).sum();
            assert_eq!(idle, state.idle_bytes);
            idle
        };
        let (first, second) = (slabs.take(1 << 20).unwrap(), slabs.take(1 << 20).unwrap());
        // The one that goes first would be beyond the budget beside the other.
        let place = second.bytes.as_ptr();
        drop(first);
        drop(second);
        assert_eq!(kept(), 1 << 20);
        let again = slabs.take((1 << 20) - 100).unwrap();
        assert_eq!(
            (again.bytes.as_ptr(), again.bytes.len()),
            (place, (1 << 20) - 100)
        );
        drop(again);
        drop(slabs.take(100).unwrap());
        // For what does not fit, what is kept makes room.
        let other = slabs.take(1 << 19).unwrap();
        assert_eq!(kept(), 0);
        drop(other);
        assert_eq!(kept(), 1 << 19);
        slabs.clear();
        assert_eq!(kept(), 0);
        assert!(slabs.take(usize::MAX).is_err());
    }
}
