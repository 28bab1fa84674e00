//! Decoded entries in this process, the least recently used leaving first.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use waystation_lifecycle::bucket::layout::Digest;

use crate::entry::Entry;

/// Bounded by bytes ([`Entry::memory_bytes`]) and in number. Every call takes microseconds.
#[derive(Debug)]
pub(crate) struct Memory {
    limit_bytes: u64,
    limit_entries: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    held: HashMap<Digest, Held>,
    /// Keys by the time of their last use, oldest first.
    order: BTreeMap<u64, Digest>,
    clock: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Held {
    entry: Arc<Entry>,
    bytes: u64,
    used: u64,
}

impl Memory {
    pub(crate) fn new(limit_bytes: u64, limit_entries: usize) -> Memory {
        Memory {
            limit_bytes,
            limit_entries,
            state: Mutex::default(),
        }
    }

    /// The entry, which counts as used.
    pub(crate) fn get(&self, key: &Digest) -> Option<Arc<Entry>> {
        let mut state = self.lock();
        let State {
            held, order, clock, ..
        } = &mut *state;
        let found = held.get_mut(key)?;
        *clock += 1;
        order.remove(&found.used);
        found.used = *clock;
        order.insert(found.used, *key);
        Some(Arc::clone(&found.entry))
    }

    /// Keeps an entry and lets others go until the bound holds. One that is larger than the bound is not kept.
    pub(crate) fn put(&self, key: &Digest, entry: &Arc<Entry>) {
        let bytes = entry.memory_bytes();
        let mut state = self.lock();
        state.remove(key);
        if bytes > self.limit_bytes || self.limit_entries == 0 {
            return;
        }
        while state.bytes > self.limit_bytes - bytes || state.held.len() >= self.limit_entries {
            let Some((_, oldest)) = state.order.pop_first() else {
                break;
            };
            state.remove(&oldest);
        }
        state.clock += 1;
        let used = state.clock;
        state.order.insert(used, *key);
        state.bytes += bytes;
        let entry = Arc::clone(entry);
        state.held.insert(*key, Held { entry, bytes, used });
    }

    /// Lets an entry go.
    pub(crate) fn remove(&self, key: &Digest) {
        self.lock().remove(key);
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn remove(&mut self, key: &Digest) {
        if let Some(held) = self.held.remove(key) {
            self.order.remove(&held.used);
            self.bytes -= held.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(bytes: usize) -> Arc<Entry> {
        Arc::new(Entry {
            info: Default::default(),
            executable: vec![0; bytes].into(),
            text: None,
            object: None,
        })
    }

    fn size(bytes: usize) -> u64 {
        entry(bytes).memory_bytes()
    }

    #[test]
    fn the_least_recently_used_leaves_first() {
        let memory = Memory::new(3 * size(1000), usize::MAX);
        for key in 0..3 {
            memory.put(&[key; 32], &entry(1000));
        }
        assert!(memory.get(&[0; 32]).is_some(), "used: 1 is the oldest now");
        memory.put(&[3; 32], &entry(1000));
        let held: Vec<bool> = (0..4).map(|key| memory.get(&[key; 32]).is_some()).collect();
        assert_eq!(held, [true, false, true, true]);
        assert_eq!(memory.bytes(), 3 * size(1000));
    }

    #[test]
    fn the_bound_holds_at_all_times() {
        let limit = 10_000;
        let memory = Memory::new(limit, usize::MAX);
        for i in 0..1000usize {
            memory.put(&[(i % 13) as u8; 32], &entry(i * 37 % 4000));
            assert!(memory.bytes() <= limit);
            let state = memory.lock();
            assert_eq!(state.order.len(), state.held.len());
            let sum: u64 = state.held.values().map(|held| held.bytes).sum();
            assert_eq!(state.bytes, sum);
        }
    }

    #[test]
    fn what_is_larger_than_the_bound_is_not_kept_and_drives_nothing_out() {
        let memory = Memory::new(size(1000), usize::MAX);
        memory.put(&[1; 32], &entry(1000));
        memory.put(&[2; 32], &entry(1001));
        assert!(memory.get(&[2; 32]).is_none());
        assert!(memory.get(&[1; 32]).is_some());
        memory.remove(&[1; 32]);
        assert_eq!(memory.bytes(), 0);
        for memory in [Memory::new(0, 8), Memory::new(1 << 20, 0)] {
            memory.put(&[1; 32], &entry(1000));
            assert!(memory.get(&[1; 32]).is_none());
        }
    }

    #[test]
    fn the_number_is_bounded_too() {
        let memory = Memory::new(u64::MAX, 2);
        for key in 0..3 {
            memory.put(&[key; 32], &entry(1000));
        }
        let held: Vec<bool> = (0..3).map(|key| memory.get(&[key; 32]).is_some()).collect();
        assert_eq!(held, [false, true, true]);
        assert_eq!(memory.bytes(), 2 * size(1000));
    }
}
