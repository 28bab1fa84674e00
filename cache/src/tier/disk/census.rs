//! What the folder holds, as this process last saw it, and who has to go when it is too much.
//!
//! The files are the truth, and other processes add and remove some at any time. A shard whose folder has not been
//! modified since it was listed holds what it held then; so keeping the count costs a look at 256 folders, and a new
//! list of the few that have changed.
//!
//! The size limit holds among processes that know nothing of each other, because each first makes its temporary file
//! as large as it will be, then looks, and writes only if all that it saw, its own file included, is within the limit:
//! of two that come at the same time, the later one sees both.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io;
use std::time::SystemTime;

use waystation_lifecycle::bucket::layout::Digest;

use super::folder::{Folder, Listing, SHARDS, Seen};

/// A folder that was modified so shortly before it was listed may be modified again without its time showing it: file
/// systems have clocks of up to two seconds a tick.
const SETTLED_NANOS: i64 = 2_000_000_000;

/// What has changed in a shard, for the index.
#[derive(Debug, Default)]
pub(super) struct Change {
    pub(super) shard: u8,
    /// The new time of the folder, where it can be relied on.
    pub(super) stamp: Option<i64>,
    pub(super) put: Vec<(Digest, Seen)>,
    pub(super) gone: Vec<Digest>,
}

/// The count.
#[derive(Debug)]
pub(super) struct Census {
    shards: Vec<Shard>,
    bytes: u64,
    entries: u64,
}

#[derive(Debug, Default, Clone)]
struct Shard {
    /// The folder's time when it was listed; `None`: list it again.
    stamp: Option<i64>,
    entries: HashMap<Digest, Seen>,
    temporaries: Vec<(String, Seen)>,
    bytes: u64,
}

/// What the folder may hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    pub(super) bytes: u64,
    pub(super) entries: u64,
}

/// What making room came to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    /// All is within the bounds now.
    pub(super) enough: bool,
    pub(super) evicted: u64,
    pub(super) evicted_bytes: u64,
}

impl Census {
    /// Knows nothing yet.
    pub(super) fn new() -> Census {
        Census {
            shards: vec![Shard::default(); SHARDS],
            bytes: 0,
            entries: 0,
        }
    }

    /// Knows what the index knew.
    pub(super) fn from_index(
        stamps: impl IntoIterator<Item = (u8, i64)>,
        entries: impl IntoIterator<Item = (Digest, Seen)>,
    ) -> Census {
        let mut census = Census::new();
        for (key, seen) in entries {
            census.shards[usize::from(key[0])].entries.insert(key, seen);
        }
        for (shard, stamp) in stamps {
            census.shards[usize::from(shard)].stamp = Some(stamp);
        }
        for shard in &mut census.shards {
            shard.count();
        }
        census.count();
        census
    }

    /// Bytes that entries and files being written take.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Lists what has changed since it was listed last.
    pub(super) fn refresh(&mut self, folder: &Folder, now: SystemTime) -> io::Result<Vec<Change>> {
        let mut changes = Vec::new();
        let root = folder.root()?;
        for number in 0..=u8::MAX {
            let changed = match &root {
                Some(root) => folder.changed(root, number)?,
                None => None,
            };
            let shard = &mut self.shards[usize::from(number)];
            if changed.is_none() && shard.is_empty() {
                continue;
            }
            if changed.is_some() && shard.stamp == changed {
                continue;
            }
            let listing = match changed {
                Some(_) => folder.list(number)?,
                None => Listing::default(),
            };
            changes.push(shard.take(number, listing, now));
        }
        self.count();
        Ok(changes)
    }

    /// Makes all fit into the bounds: first goes what nobody writes any more, then the entries that were used least
    /// recently, until a tenth is free. Looks at each file again before it goes, because others may have used it.
    pub(super) fn make_room(
        &mut self,
        folder: &Folder,
        bounds: Bounds,
        now: SystemTime,
        changes: &mut Vec<Change>,
    ) -> io::Result<Room> {
        let mut room = Room::default();
        if !self.fits(bounds) {
            self.sweep(folder, now);
        }
        if self.fits(bounds) {
            room.enough = true;
            return Ok(room);
        }
        let target = Bounds {
            bytes: bounds.bytes / 10 * 9,
            entries: bounds.entries / 10 * 9,
        };
        let mut oldest: BinaryHeap<Reverse<(i64, Digest)>> = self
            .shards
            .iter()
            .flat_map(|shard| shard.entries.iter())
            .map(|(key, seen)| Reverse((seen.used, *key)))
            .collect();
        while !self.fits(target) {
            let Some(Reverse((used, key))) = oldest.pop() else {
                break;
            };
            let number = key[0];
            let shard = &mut self.shards[usize::from(number)];
            let change = Change {
                shard: number,
                stamp: shard.stamp,
                ..Change::default()
            };
            match folder.look(&key)? {
                Some(seen) if seen.used > used => {
                    shard.entries.insert(key, seen);
                    oldest.push(Reverse((seen.used, key)));
                    changes.push(Change {
                        put: vec![(key, seen)],
                        ..change
                    });
                }
                found => {
                    if let Some(seen) = found {
                        folder.remove(&key)?;
                        room.evicted += 1;
                        room.evicted_bytes += seen.bytes;
                    }
                    shard.entries.remove(&key);
                    changes.push(Change {
                        gone: vec![key],
                        ..change
                    });
                }
            }
            let before = shard.bytes;
            shard.count();
            self.bytes = self.bytes - before + shard.bytes;
            self.entries = self
                .shards
                .iter()
                .map(|shard| shard.entries.len() as u64)
                .sum();
        }
        room.enough = self.fits(bounds);
        Ok(room)
    }

    /// Removes temporary files of processes that are gone.
    pub(super) fn sweep(&mut self, folder: &Folder, now: SystemTime) {
        for (shard, number) in self.shards.iter_mut().zip(0..=u8::MAX) {
            if shard.temporaries.is_empty() {
                continue;
            }
            shard
                .temporaries
                .retain(|(name, seen)| !folder.sweep(number, name, *seen, now));
            shard.count();
        }
        self.count();
    }

    fn fits(&self, bounds: Bounds) -> bool {
        self.bytes <= bounds.bytes && self.entries <= bounds.entries
    }

    fn count(&mut self) {
        self.bytes = self.shards.iter().map(|shard| shard.bytes).sum();
        self.entries = self
            .shards
            .iter()
            .map(|shard| shard.entries.len() as u64)
            .sum();
    }
}

impl Shard {
    fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.temporaries.is_empty()
    }

    fn count(&mut self) {
        let entries = self.entries.values().map(|seen| seen.bytes);
        let temporaries = self.temporaries.iter().map(|(_, seen)| seen.bytes);
        self.bytes = entries.chain(temporaries).fold(0, u64::saturating_add);
    }

    /// Takes a new list, and says what it changes.
    fn take(&mut self, number: u8, listing: Listing, now: SystemTime) -> Change {
        let now = now
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |time| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX));
        // The index does not keep temporary files; where some are, it must not rely on its list.
        self.stamp = listing.changed.filter(|changed| {
            now.saturating_sub(*changed) > SETTLED_NANOS && listing.temporaries.is_empty()
        });
        let entries: HashMap<Digest, Seen> = listing.entries.into_iter().collect();
        let change = Change {
            shard: number,
            stamp: self.stamp,
            put: entries
                .iter()
                .filter(|(key, seen)| self.entries.get(*key) != Some(*seen))
                .map(|(key, seen)| (*key, *seen))
                .collect(),
            gone: self
                .entries
                .keys()
                .filter(|key| !entries.contains_key(*key))
                .copied()
                .collect(),
        };
        self.entries = entries;
        self.temporaries = listing.temporaries;
        self.count();
        change
    }
}
