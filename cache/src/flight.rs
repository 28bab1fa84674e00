//! One flight per key: of all requests for a key at one time, one looks and compiles, the others wait for it.
//!
//! A flight is a lock with a place for the result. Who holds the lock leads; who gets it next finds the result, or
//! leads in turn. So nothing has to notice that a leader was dropped or failed: its lock is free, and the next waiter
//! goes on. A seat's drop takes an empty flight out of the table.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use waystation_lifecycle::bucket::layout::Digest;

use crate::entry::Entry;

type Cell = Arc<tokio::sync::Mutex<Option<Arc<Entry>>>>;

/// The flights of a cache.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    cells: Mutex<HashMap<Digest, Cell>>,
}

impl Flights {
    /// Takes a seat in the key's flight, opening it where there is none.
    pub(crate) fn board(&self, key: &Digest) -> Seat<'_> {
        let cell = Arc::clone(self.lock().entry(*key).or_default());
        Seat {
            flights: self,
            key: *key,
            cell,
        }
    }

    /// Cuts off the key's flight: those aboard end as they would, those who come later start another.
    pub(crate) fn forget(&self, key: &Digest) {
        self.lock().remove(key);
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Digest, Cell>> {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in a flight.
#[derive(Debug)]
pub(crate) struct Seat<'a> {
    flights: &'a Flights,
    key: Digest,
    cell: Cell,
}

impl Seat<'_> {
    /// Waits for the lead. The value is the result of the one before, where it had one.
    ///
    /// Cancel-safe: a waiter that is dropped leaves the queue.
    pub(crate) async fn lead(&self) -> tokio::sync::MutexGuard<'_, Option<Arc<Entry>>> {
        self.cell.lock().await
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut cells = self.flights.lock();
        // All cells are cloned under this lock, so the count is exact: the table's and ours.
        let last = cells
            .get(&self.key)
            .is_some_and(|cell| Arc::ptr_eq(cell, &self.cell))
            && Arc::strong_count(&self.cell) == 2;
        if last {
            cells.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Digest = [7; 32];

    fn entry() -> Arc<Entry> {
        Arc::new(Entry {
            info: Default::default(),
            executable: bytes::Bytes::from_static(b"x"),
            text: None,
            object: None,
        })
    }

    #[tokio::test]
    async fn a_result_is_handed_on_and_the_table_ends_empty() {
        let flights = Flights::default();
        let first = flights.board(&KEY);
        let second = flights.board(&KEY);
        let mut lead = first.lead().await;
        assert!(lead.is_none());
        *lead = Some(entry());
        drop(lead);
        drop(first);
        assert_eq!(flights.len(), 1, "the second seat is taken");
        assert!(second.lead().await.is_some());
        drop(second);
        assert_eq!(flights.len(), 0);
    }

    #[tokio::test]
    async fn a_dropped_leader_lets_the_next_one_lead() {
        let flights = Flights::default();
        let first = flights.board(&KEY);
        let second = flights.board(&KEY);
        {
            let _lead = first.lead().await;
            let waiting = second.lead();
            tokio::pin!(waiting);
            assert!(futures::poll!(&mut waiting).is_pending());
        }
        drop(first);
        assert!(second.lead().await.is_none(), "no result, so it leads");
        drop(second);
        assert_eq!(flights.len(), 0);
    }

    #[tokio::test]
    async fn a_forgotten_flight_is_not_joined() {
        let flights = Flights::default();
        let old = flights.board(&KEY);
        *old.lead().await = Some(entry());
        flights.forget(&KEY);
        let new = flights.board(&KEY);
        assert!(new.lead().await.is_none());
        drop(old);
        assert_eq!(flights.len(), 1, "the old seat does not end the new flight");
        drop(new);
        assert_eq!(flights.len(), 0);
    }
}
