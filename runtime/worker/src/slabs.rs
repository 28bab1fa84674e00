//! Memory for what saves copy from devices and compress, and for what restores read and decode.
//!
//! It comes from the system and goes back there, so that a save holds what it counts and no more: a heap keeps what is freed
//! in many pieces by many threads. What one piece has used is kept for the next one, and for the next save or restore if that
//! comes soon: a page that is new to the process costs more than the copy into it. Saves take small pieces and restores large
//! ones, so what is kept is cut as it is wanted, and joined again.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use waystation_checkpoint::{Buffer, Buffers, Term};
use waystation_pjrt::{AlignedBytes, Error};

/// Smaller pieces are the heap's.
const SMALL_BYTES: usize = 128 << 10;
/// What is taken from the system at a time, where there is room for so much.
const REGION_BYTES: usize = 32 << 20;
/// How long what nobody uses is kept after the last use of any.
const IDLE_TIME: Duration = Duration::from_secs(60);

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
    /// By place, no two that could be joined.
    idle: BTreeMap<usize, AlignedBytes>,
    /// When memory was taken or came back.
    last_use: Option<Instant>,
}

impl State {
    /// The smallest that is large enough, with what it has more cut off.
    fn find(&mut self, len: usize) -> Option<AlignedBytes> {
        let large = self.idle.iter().filter(|(_, idle)| idle.capacity() >= len);
        let (&place, _) = large.min_by_key(|(_, idle)| idle.capacity())?;
        let mut found = self.idle.remove(&place)?;
        self.idle_bytes -= found.capacity();
        if let Some(rest) = found.cut(len) {
            self.keep(rest);
        }
        Some(found)
    }

    /// Keeps what nobody uses, as one with its neighbours.
    fn keep(&mut self, mut bytes: AlignedBytes) {
        self.idle_bytes += bytes.capacity();
        let place = bytes.place();
        let before = self.idle.range(..place.start).next_back();
        if let Some(before) = before.map(|(&at, _)| at)
            && let Some(mut first) = self.idle.remove(&before)
        {
            match first.join(bytes) {
                Ok(()) => bytes = first,
                Err(own) => {
                    self.idle.insert(before, first);
                    bytes = own;
                }
            }
        }
        if let Some(next) = self.idle.remove(&place.end)
            && let Err(next) = bytes.join(next)
        {
            self.idle.insert(place.end, next);
        }
        self.idle.insert(bytes.place().start, bytes);
    }

    /// Takes out what must go for used and idle ones to be no more than `most` bytes, the smallest first: of these the fewest
    /// would be large enough for anything.
    fn evict(&mut self, most: usize) -> Vec<AlignedBytes> {
        let mut gone = Vec::new();
        while self.used_bytes.saturating_add(self.idle_bytes) > most {
            let smallest = self.idle.iter().min_by_key(|(_, idle)| idle.capacity());
            let Some((&place, _)) = smallest else { break };
            if let Some(bytes) = self.idle.remove(&place) {
                self.idle_bytes -= bytes.capacity();
                gone.push(bytes);
            }
        }
        gone
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

    /// `len` bytes, whatever they are. What lasts is no longer on its way, so it is not counted.
    pub(crate) fn take(self: &Arc<Self>, len: usize, term: Term) -> Result<Slab, Error> {
        if len < SMALL_BYTES {
            return Ok(Slab {
                bytes: AlignedBytes::zeroed(len)?,
                counted_bytes: 0,
                home: None,
            });
        }
        let (kept, gone) = {
            let mut state = self.state();
            state.last_use = Some(Instant::now());
            match state.find(len) {
                Some(bytes) => (Some(bytes), Vec::new()),
                None => (None, state.evict(self.budget_bytes.saturating_sub(len))),
            }
        };
        // Outside the lock: it takes a while.
        drop(gone);
        let (bytes, rest) = match kept {
            Some(bytes) => (bytes, None),
            None => self.map(len)?,
        };
        let bytes = bytes.recycle(len)?;
        let counted_bytes = match term {
            Term::Passing => bytes.capacity(),
            Term::Lasting => 0,
        };
        let mut state = self.state();
        state.used_bytes += counted_bytes;
        if let Some(rest) = rest {
            state.keep(rest);
        }
        Ok(Slab {
            bytes,
            counted_bytes,
            home: Some(Arc::clone(self)),
        })
    }

    /// New memory, and what came with it.
    fn map(&self, len: usize) -> Result<(AlignedBytes, Option<AlignedBytes>), Error> {
        let free = {
            let state = self.state();
            let held = state.used_bytes.saturating_add(state.idle_bytes);
            self.budget_bytes.saturating_sub(held)
        };
        if len < REGION_BYTES && REGION_BYTES <= free {
            let mut bytes = AlignedBytes::mapped(REGION_BYTES)?;
            let rest = bytes.cut(len);
            return Ok((bytes, rest));
        }
        Ok((AlignedBytes::mapped(len)?, None))
    }

    /// Gives back what nobody has used for a while.
    pub(crate) fn sweep(&self) {
        let gone = {
            let mut state = self.state();
            let recent = |since: Instant| since.elapsed() < IDLE_TIME;
            if state.last_use.is_none_or(recent) {
                return;
            }
            state.last_use = None;
            state.evict(0)
        };
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
            state.last_use = Some(Instant::now());
            state.keep(bytes);
        } else {
            drop(state);
            drop(bytes);
        }
    }
}

impl From<AlignedBytes> for Slab {
    /// Memory that goes where it came from.
    fn from(bytes: AlignedBytes) -> Slab {
        Slab {
            bytes,
            counted_bytes: 0,
            home: None,
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
    fn take(&self, len: usize, term: Term) -> Option<Box<dyn Buffer>> {
        Some(Box::new(self.0.take(len, term).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn kept(slabs: &Slabs) -> usize {
        let state = slabs.state();
        let idle: usize = state.idle.values().map(AlignedBytes::capacity).sum();
        assert_eq!(idle, state.idle_bytes);
        idle
    }

    fn rest_a_while(slabs: &Slabs) {
        let mut state = slabs.state();
        let since = state.last_use.expect("a use");
        state.last_use = Some(since.checked_sub(IDLE_TIME).expect("a machine that runs"));
    }

    fn passing(slabs: &Arc<Slabs>, len: usize) -> Slab {
        slabs.take(len, Term::Passing).expect("memory")
    }

    #[test]
    fn what_is_used_is_kept_for_the_next_piece_within_the_budget() {
        let slabs = Slabs::new(MIB);
        let (first, second) = (passing(&slabs, MIB), passing(&slabs, MIB));
        // The one that goes first would be beyond the budget beside the other.
        let place = second.bytes.as_ptr();
        drop(first);
        drop(second);
        assert_eq!(kept(&slabs), MIB);
        let again = passing(&slabs, MIB - 100);
        assert_eq!(
            (again.bytes.as_ptr(), again.bytes.len()),
            (place, MIB - 100)
        );
        drop(again);
        drop(passing(&slabs, 100));
        assert_eq!(kept(&slabs), MIB);
        // For what does not fit, what is kept makes room.
        drop(passing(&slabs, 2 * MIB));
        assert_eq!(kept(&slabs), 0);
        drop(passing(&slabs, MIB / 2));
        assert_eq!(kept(&slabs), MIB / 2);
        slabs.sweep();
        assert_eq!(kept(&slabs), MIB / 2, "not yet");
        rest_a_while(&slabs);
        slabs.sweep();
        assert_eq!(kept(&slabs), 0);
        assert!(slabs.take(usize::MAX, Term::Passing).is_err());
    }

    #[test]
    fn what_small_pieces_have_used_serves_a_large_one() {
        let slabs = Slabs::new(2 * REGION_BYTES);
        let small: Vec<Slab> = (0..16).map(|_| passing(&slabs, 2 * MIB)).collect();
        let first = small[0].bytes.as_ptr();
        assert_eq!(kept(&slabs), 0, "they lie in one region");
        // In any order.
        let (even, odd): (Vec<_>, Vec<_>) =
            small.into_iter().enumerate().partition(|(n, _)| n % 2 == 0);
        drop(even);
        assert_eq!(kept(&slabs), REGION_BYTES / 2);
        drop(odd);
        let large = passing(&slabs, REGION_BYTES);
        assert_eq!(large.bytes.as_ptr(), first);
        drop(large);
        // What is left of it serves others.
        let (one, two) = (passing(&slabs, 20 * MIB), passing(&slabs, 12 * MIB));
        assert_eq!((one.bytes.as_ptr(), kept(&slabs)), (first, 0));
        drop((one, two));
        assert_eq!(slabs.state().idle.len(), 1);
    }

    #[test]
    fn what_lasts_is_kept_when_it_ends_and_not_counted_before() {
        let slabs = Slabs::new(4 * MIB);
        let arrays: Vec<Slab> = (0..8)
            .map(|_| slabs.take(MIB, Term::Lasting).expect("memory"))
            .collect();
        drop(passing(&slabs, 3 * MIB));
        assert_eq!(kept(&slabs), 3 * MIB, "arrays leave the budget to others");
        rest_a_while(&slabs);
        slabs.sweep();
        drop(arrays);
        assert_eq!(kept(&slabs), 4 * MIB);
        rest_a_while(&slabs);
        slabs.sweep();
        assert_eq!(kept(&slabs), 0, "however long after the last save");
    }
}
