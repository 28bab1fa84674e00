//! What each client of the proxy holds on this worker.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use waystation_proto::waystation::worker::ClientUse;

/// One client's gauges.
#[derive(Debug)]
pub(crate) struct Usage {
    /// The proxy's number of it.
    pub(crate) client: u64,
    bytes: AtomicU64,
    shards: AtomicU64,
    waiting: AtomicUsize,
    /// Nobody receives anything for it any more.
    pub(crate) ended: AtomicBool,
}

/// One op of a client that waits, for as long as it does.
#[derive(Debug)]
pub(crate) struct Waiting(Arc<Usage>);

impl Waiting {
    pub(crate) fn of(client: &Arc<Usage>) -> Waiting {
        client.waiting.fetch_add(1, Relaxed);
        Waiting(Arc::clone(client))
    }

    /// Whose it is.
    pub(crate) fn client(&self) -> &Arc<Usage> {
        &self.0
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}

impl Usage {
    /// Ops that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }

    /// A shard of so many bytes more.
    pub(crate) fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Relaxed);
        self.shards.fetch_add(1, Relaxed);
    }

    /// A shard of so many bytes less.
    pub(crate) fn sub(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Relaxed);
        self.shards.fetch_sub(1, Relaxed);
    }
}

/// On whose behalf something is done.
#[derive(Clone, Debug)]
pub(crate) struct Cause {
    /// The request, as the client knows its Python stack; 0 is none.
    pub(crate) user_context: u64,
    pub(crate) client: Arc<Usage>,
}

/// The clients that hold something.
#[derive(Debug, Default)]
pub(crate) struct Clients(Mutex<HashMap<u64, Weak<Usage>>>);

impl Clients {
    /// The client's gauges, which live as long as something refers to them.
    pub(crate) fn of(&self, client: u64) -> Arc<Usage> {
        let mut clients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(usage) = clients.get(&client).and_then(Weak::upgrade) {
            return usage;
        }
        clients.retain(|_, usage| usage.strong_count() > 0);
        let usage = Arc::new(Usage {
            client,
            bytes: AtomicU64::new(0),
            shards: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
        });
        clients.insert(client, Arc::downgrade(&usage));
        usage
    }

    /// The gauges now, of the clients that hold shards, by number.
    pub(crate) fn report(&self) -> Vec<ClientUse> {
        let clients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<ClientUse> = clients
            .values()
            .filter_map(Weak::upgrade)
            .map(|usage| ClientUse {
                client: usage.client,
                array_bytes: usage.bytes.load(Relaxed),
                shards: usage.shards.load(Relaxed),
            })
            .filter(|usage| usage.shards > 0)
            .collect();
        all.sort_unstable_by_key(|usage| usage.client);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_counted_while_it_holds_something() {
        let clients = Clients::default();
        let (one, two) = (clients.of(1), clients.of(2));
        one.add(10);
        clients.of(1).add(5);
        two.add(7);
        let seen = |clients: &Clients| {
            let report = clients.report();
            let fields = |usage: ClientUse| (usage.client, usage.array_bytes, usage.shards);
            report.into_iter().map(fields).collect::<Vec<_>>()
        };
        assert_eq!(seen(&clients), [(1, 15, 2), (2, 7, 1)]);
        one.sub(10);
        two.sub(7);
        assert_eq!(seen(&clients), [(1, 5, 1)]);
        drop((one, two));
        let _three = clients.of(3);
        assert_eq!(clients.0.lock().unwrap().len(), 1, "others are forgotten");
    }
}
