//! Connections that have not said hello.
//!
//! There is room for a few of them, and for fewer from one address. One more takes the place of the one that has been silent for
//! the longest, so however many there are, one that says hello at once is heard.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The connections to a port that have not said hello. Clones share them.
#[derive(Clone, Debug)]
pub struct Strangers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    most: usize,
    most_of_address: usize,
    /// Oldest first.
    silent: Mutex<VecDeque<(IpAddr, Arc<Notify>)>>,
}

impl Strangers {
    /// Room for `most` of them, and for `most_of_address` from one address.
    #[must_use]
    pub fn new(most: usize, most_of_address: usize) -> Self {
        Self(Arc::new(Shared {
            most,
            most_of_address,
            silent: Mutex::default(),
        }))
    }

    fn silent(&self) -> MutexGuard<'_, VecDeque<(IpAddr, Arc<Notify>)>> {
        let silent = self.0.silent.lock();
        silent.unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for one.
    #[must_use]
    pub fn admit(&self, address: IpAddr) -> Stranger {
        // The same machine's, by whichever kind of socket it came.
        let address = address.to_canonical();
        let mut silent = self.silent();
        let of_address = silent.iter().filter(|(other, _)| *other == address).count();
        let victim = if of_address >= self.0.most_of_address {
            silent.iter().position(|(other, _)| *other == address)
        } else {
            (silent.len() >= self.0.most).then_some(0)
        };
        if let Some((_, displaced)) = victim.and_then(|victim| silent.remove(victim)) {
            displaced.notify_one();
        }
        let displaced = Arc::new(Notify::new());
        silent.push_back((address, Arc::clone(&displaced)));
        Stranger {
            strangers: self.clone(),
            displaced,
        }
    }
}

/// One that has been admitted, until it has said hello.
#[derive(Debug)]
pub struct Stranger {
    strangers: Strangers,
    displaced: Arc<Notify>,
}

impl Stranger {
    /// Waits until another one has taken its place.
    pub async fn displaced(&self) {
        self.displaced.notified().await;
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut silent = self.strangers.silent();
        silent.retain(|(_, displaced)| !Arc::ptr_eq(displaced, &self.displaced));
    }
}
