//! Decoded nodes that are kept, the least recently used of them dropped beyond a bound; a node that many ask for at once is
//! read once.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::lock::Mutex as AsyncMutex;

use crate::error::Result;
use crate::node::Node;
use crate::reference::Location;

type Cell = Arc<AsyncMutex<Option<Arc<Loaded>>>>;

/// A node, and what is asked of it each time it is met.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) node: Node,
    /// The memory it takes, about.
    pub(super) bytes: usize,
    /// The length of the longest of its keys, without the prefix.
    pub(super) longest_key: usize,
}

impl From<Node> for Loaded {
    fn from(node: Node) -> Self {
        let keys = (0..node.len()).filter_map(|index| node.key(index));
        Self {
            bytes: node.memory(),
            longest_key: keys.map(|key| key.len()).max().unwrap_or(0),
            node,
        }
    }
}

pub(super) struct Kept {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    slots: HashMap<Location, Slot>,
    /// By when they were last used.
    order: BTreeMap<u64, Location>,
    now: u64,
    bytes: usize,
}

struct Slot {
    cell: Cell,
    used: u64,
    /// 0 until it is read.
    bytes: usize,
}

impl Kept {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            state: Mutex::default(),
        }
    }

    /// The node at a location, read with `load` unless it is kept. Cancel-safe: whoever waits for the same node reads it
    /// then.
    pub(super) async fn get(
        &self,
        location: &Location,
        load: impl Future<Output = Result<Node>>,
    ) -> Result<Arc<Loaded>> {
        let cell = self.lock().cell(location);
        let mut filled = cell.lock().await;
        if let Some(node) = &*filled {
            return Ok(Arc::clone(node));
        }
        let node = match load.await {
            Ok(node) => Arc::new(Loaded::from(node)),
            Err(error) => {
                self.lock().drop_unread(location);
                return Err(error);
            }
        };
        *filled = Some(Arc::clone(&node));
        self.lock().filled(location, &cell, node.bytes, self.limit);
        Ok(node)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Whoever holds the lock runs nothing that panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn cell(&mut self, location: &Location) -> Cell {
        self.now += 1;
        let now = self.now;
        let slot = self.slots.entry(location.clone()).or_insert_with(|| Slot {
            cell: Cell::default(),
            used: 0,
            bytes: 0,
        });
        self.order.remove(&slot.used);
        self.order.insert(now, location.clone());
        slot.used = now;
        Arc::clone(&slot.cell)
    }

    fn remove(&mut self, location: &Location) {
        if let Some(slot) = self.slots.remove(location) {
            self.order.remove(&slot.used);
            self.bytes -= slot.bytes;
        }
    }

    fn drop_unread(&mut self, location: &Location) {
        if self.slots.get(location).is_some_and(|slot| slot.bytes == 0) {
            self.remove(location);
        }
    }

    fn filled(&mut self, location: &Location, cell: &Cell, bytes: usize, limit: usize) {
        // It may have been dropped, and come anew, while it was read.
        if let Some(slot) = self.slots.get_mut(location)
            && Arc::ptr_eq(&slot.cell, cell)
        {
            self.bytes = self.bytes - slot.bytes + bytes;
            slot.bytes = bytes;
        }
        while self.bytes > limit {
            let Some((_, oldest)) = self.order.first_key_value() else {
                break;
            };
            let oldest = oldest.clone();
            self.remove(&oldest);
        }
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept")
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}
