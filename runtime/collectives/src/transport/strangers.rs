//! Connections that have not said hello.
//!
//! There is room for a few of them, and for fewer from one address. One more takes the place of the one that has been silent for
//! the longest, so however many there are, one that says hello at once is heard.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

pub(super) struct Strangers {
    most: usize,
    most_of_address: usize,
    /// Oldest first.
    silent: Mutex<VecDeque<(IpAddr, Arc<Notify>)>>,
}

impl Strangers {
    pub(super) fn new(most: usize, most_of_address: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            most_of_address,
            silent: Mutex::default(),
        })
    }

    fn silent(&self) -> MutexGuard<'_, VecDeque<(IpAddr, Arc<Notify>)>> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for one.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr) -> Stranger {
        let mut silent = self.silent();
        let of_address = silent.iter().filter(|(other, _)| *other == address).count();
        let victim = if of_address >= self.most_of_address {
            silent.iter().position(|(other, _)| *other == address)
        } else {
            (silent.len() >= self.most).then_some(0)
        };
        if let Some((_, displaced)) = victim.and_then(|victim| silent.remove(victim)) {
            displaced.notify_one();
        }
        let displaced = Arc::new(Notify::new());
        silent.push_back((address, Arc::clone(&displaced)));
        Stranger {
            strangers: Arc::clone(self),
            displaced,
        }
    }
}

/// One that has been admitted, until it has said hello.
pub(super) struct Stranger {
    strangers: Arc<Strangers>,
    displaced: Arc<Notify>,
}

impl Stranger {
    /// Waits until another one has taken its place.
    pub(super) async fn displaced(&self) {
        self.displaced.notified().await;
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut silent = self.strangers.silent();
        silent.retain(|(_, displaced)| !Arc::ptr_eq(displaced, &self.displaced));
    }
}
