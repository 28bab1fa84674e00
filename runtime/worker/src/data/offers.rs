//! The transfers that other workers may fetch now.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use tokio_util::sync::CancellationToken;

use super::Ticket;
use crate::host;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Offers {
    by_ticket: Mutex<HashMap<Ticket, Offer>>,
}

/// A transfer's bytes.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    pub(super) bytes: Bytes,
    /// When nobody wants them any more.
    pub(super) over: CancellationToken,
}

/// A transfer that is offered as long as this is there.
#[derive(Debug)]
pub(crate) struct Offered {
    pub(crate) ticket: Ticket,
    offers: Arc<Offers>,
}

impl Offers {
    /// Offers bytes.
    ///
    /// # Errors
    /// When the system gives no random numbers.
    pub(crate) fn make(self: &Arc<Self>, bytes: Bytes) -> rustix::io::Result<Offered> {
        let mut ticket = Ticket::default();
        host::randomize(&mut ticket)?;
        let offer = Offer {
            bytes,
            over: CancellationToken::new(),
        };
        self.lock().insert(ticket, offer);
        Ok(Offered {
            ticket,
            offers: Arc::clone(self),
        })
    }

    pub(super) fn find(&self, ticket: &Ticket) -> Option<Offer> {
        self.lock().get(ticket).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Ticket, Offer>> {
        self.by_ticket
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        let offer = self.offers.lock().remove(&self.ticket);
        // Outside the lock: the bytes may be an array's.
        if let Some(offer) = offer {
            offer.over.cancel();
        }
    }
}
