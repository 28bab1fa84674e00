//! Which proxy's lease the worker serves, as others than the dispatch thread need to know it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use tokio::sync::watch;

/// Shared by reference count.
#[derive(Debug)]
pub(crate) struct Lease {
    epochs: Arc<Epochs>,
    /// Op streams that are open.
    streams: watch::Sender<usize>,
}

/// What the resource manager is told of it.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    now: AtomicU64,
    last: AtomicU64,
}

impl Epochs {
    /// The epoch that is served, 0 for none.
    pub(crate) fn now(&self) -> u64 {
        self.now.load(Relaxed)
    }

    /// The greatest one that has been served, 0 for none.
    pub(crate) fn last(&self) -> u64 {
        self.last.load(Relaxed)
    }
}

impl Lease {
    pub(crate) fn new() -> Lease {
        Lease {
            epochs: Arc::default(),
            streams: watch::Sender::new(0),
        }
    }

    /// Kept up to date.
    pub(crate) fn epochs(&self) -> &Arc<Epochs> {
        &self.epochs
    }

    /// The worker serves this epoch, 0 for none.
    pub(crate) fn serves(&self, epoch: u64) {
        self.epochs.last.fetch_max(epoch, Relaxed);
        self.epochs.now.store(epoch, Relaxed);
    }

    /// Counts an op stream until the returned guard drops.
    pub(crate) fn stream(self: &Arc<Self>) -> OpenStream {
        self.streams.send_modify(|open| *open += 1);
        OpenStream(Arc::clone(self))
    }

    /// Waits until no op stream is open.
    pub(crate) async fn no_streams(&self) {
        // The sender lives as long as this.
        let _ = self.streams.subscribe().wait_for(|open| *open == 0).await;
    }
}

/// An op stream.
#[derive(Debug)]
pub(crate) struct OpenStream(Arc<Lease>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.streams.send_modify(|open| *open -= 1);
    }
}
