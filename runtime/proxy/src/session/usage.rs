//! What each session holds in the proxy, for the status page. Workers count the bytes.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use super::{Tables, lock};

/// The sessions that are open, by number.
#[derive(Debug, Default)]
pub(crate) struct Usages(Mutex<BTreeMap<u64, Arc<Gauges>>>);

/// One session's gauges.
#[derive(Debug)]
struct Gauges {
    arrays: AtomicU64,
    tables: Arc<Tables>,
}

/// What one session holds now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// Array handles, deleted and failed ones included.
    pub(crate) arrays: u64,
    pub(crate) executables: u64,
}

impl Usages {
    /// Lists a session until what is returned is dropped.
    pub(super) fn open(self: &Arc<Self>, number: u64, tables: &Arc<Tables>) -> Usage {
        let gauges = Arc::new(Gauges {
            arrays: AtomicU64::new(0),
            tables: Arc::clone(tables),
        });
        lock(&self.0).insert(number, Arc::clone(&gauges));
        Usage {
            all: Arc::clone(self),
            number,
            gauges,
        }
    }

    /// All sessions now.
    pub(crate) fn held(&self) -> BTreeMap<u64, Held> {
        let held = |gauges: &Gauges| Held {
            arrays: gauges.arrays.load(Relaxed),
            executables: lock(&gauges.tables.programs).len() as u64,
        };
        lock(&self.0)
            .iter()
            .map(|(number, gauges)| (*number, held(gauges)))
            .collect()
    }
}

/// A session's place in the list.
#[derive(Debug)]
pub(super) struct Usage {
    all: Arc<Usages>,
    number: u64,
    gauges: Arc<Gauges>,
}

impl Usage {
    /// Notes how many array handles there are.
    pub(super) fn arrays(&self, count: usize) {
        self.gauges.arrays.store(count as u64, Relaxed);
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        lock(&self.all.0).remove(&self.number);
    }
}
