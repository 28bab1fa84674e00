//! What the workers of a group have told each other. Pure, and bounded.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::StoreError;

/// Plugins name communicators after all their devices.
const MAX_KEY_BYTES: usize = 64 << 10;
/// A topology of thousands of devices is a few megabytes.
const MAX_VALUE_BYTES: usize = 16 << 20;
/// Keys of a group.
const MAX_KEYS: usize = 1 << 16;
/// Keys and values of a group.
const MAX_BYTES: usize = 256 << 20;

/// A value and who has put it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) value: Bytes,
    pub(crate) task: u32,
    /// Which of the worker's puts.
    pub(crate) number: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Store {
    entries: BTreeMap<Vec<u8>, Entry>,
    bytes: usize,
}

impl Store {
    /// Gives a key its value. The same put again is no second one.
    pub(crate) fn put(&mut self, key: &[u8], entry: Entry) -> Result<(), StoreError> {
        if let Some(known) = self.entries.get(key) {
            return if *known == entry {
                Ok(())
            } else {
                Err(StoreError::Exists)
            };
        }
        check(key)?;
        let full = |what: String| Err(StoreError::Full(what));
        if entry.value.len() > MAX_VALUE_BYTES {
            return full(format!(
                "a value of {} bytes; at most {MAX_VALUE_BYTES} are kept",
                entry.value.len()
            ));
        }
        let bytes = self.bytes + key.len() + entry.value.len();
        if self.entries.len() == MAX_KEYS || bytes > MAX_BYTES {
            return full(format!(
                "the group has {} keys with {} bytes; at most {MAX_KEYS} and {MAX_BYTES} are kept",
                self.entries.len(),
                self.bytes
            ));
        }
        self.bytes = bytes;
        self.entries.insert(key.to_vec(), entry);
        Ok(())
    }

    /// The value of a key that may have one.
    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StoreError> {
        check(key)?;
        Ok(self.entries.get(key).map(|entry| entry.value.clone()))
    }

    /// Whether a worker has put anything.
    pub(crate) fn has_of(&self, task: u32) -> bool {
        self.entries.values().any(|entry| entry.task == task)
    }
}

/// Whether a key may be kept, and waited for.
fn check(key: &[u8]) -> Result<(), StoreError> {
    if key.len() > MAX_KEY_BYTES {
        return Err(StoreError::Full(format!(
            "a key of {} bytes; at most {MAX_KEY_BYTES} are kept",
            key.len()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(value: &[u8], number: u64) -> Entry {
        Entry {
            value: Bytes::copy_from_slice(value),
            task: 0,
            number,
        }
    }

    #[test]
    fn a_key_has_one_value() {
        let mut store = Store::default();
        assert_eq!(store.get(b"k"), Ok(None));
        store.put(b"k", entry(b"v", 1)).expect("the first");
        store.put(b"k", entry(b"v", 1)).expect("the same again");
        assert_eq!(store.put(b"k", entry(b"v", 2)), Err(StoreError::Exists));
        assert_eq!(store.put(b"k", entry(b"w", 1)), Err(StoreError::Exists));
        assert_eq!(store.get(b"k"), Ok(Some(Bytes::from_static(b"v"))));
    }

    #[test]
    fn nothing_grows_without_bound() {
        let mut store = Store::default();
        let full = |outcome| matches!(outcome, Err(StoreError::Full(_)));
        let long = vec![0; MAX_KEY_BYTES + 1];
        assert!(full(store.put(&long, entry(b"", 0))));
        assert!(full(store.get(&long).map(|_| ())), "nor is it waited for");
        let large = entry(&vec![0; MAX_VALUE_BYTES + 1], 0);
        assert!(full(store.put(b"large", large)));
        let large = entry(&vec![0; MAX_VALUE_BYTES], 0);
        let mut fit = 0_usize;
        while store.put(&fit.to_le_bytes(), large.clone()).is_ok() {
            fit += 1;
        }
        assert_eq!(fit, MAX_BYTES / MAX_VALUE_BYTES - 1, "keys count too");
        assert_eq!(store.get(&fit.to_le_bytes()), Ok(None));

        let mut store = Store::default();
        for key in 0..MAX_KEYS {
            store.put(&key.to_le_bytes(), entry(b"", 0)).expect("room");
        }
        assert!(full(store.put(b"one more", entry(b"", 0))));
        assert_eq!(store.get(b"one more"), Ok(None));
    }
}
