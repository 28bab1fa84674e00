//! Replies on their way to the proxy. The dispatch thread never waits for the proxy; instead the op stream is not read
//! while too many replies lie here.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::{
    Notify,
    mpsc::{UnboundedReceiver, UnboundedSender, WeakUnboundedSender, unbounded_channel},
};
use waystation_proto::waystation::worker::{Reply, reply};

/// The dispatch thread's end.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    replies: UnboundedSender<Reply>,
    gauge: Arc<Gauge>,
}

/// An end that does not keep the stream of replies open.
#[derive(Clone, Debug)]
pub(crate) struct WeakOutbox {
    replies: WeakUnboundedSender<Reply>,
    gauge: Arc<Gauge>,
}

/// How many replies are not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    unsent: AtomicUsize,
    taken: Notify,
}

/// The gRPC service's end.
#[derive(Debug)]
pub(crate) struct Inbox {
    replies: UnboundedReceiver<Reply>,
    gauge: Arc<Gauge>,
}

/// Both ends.
pub(crate) fn outbox() -> (Outbox, Inbox) {
    let (sender, receiver) = unbounded_channel();
    let gauge = Arc::new(Gauge::default());
    (
        Outbox {
            replies: sender,
            gauge: Arc::clone(&gauge),
        },
        Inbox {
            replies: receiver,
            gauge,
        },
    )
}

impl Outbox {
    /// Sends a reply; a proxy that is gone takes none, and its session ends by the end of its stream.
    pub(crate) fn send(&self, reply: reply::Reply) {
        self.gauge.unsent.fetch_add(1, Ordering::Relaxed);
        let _ = self.replies.send(Reply { reply: Some(reply) });
    }

    pub(crate) fn downgrade(&self) -> WeakOutbox {
        WeakOutbox {
            replies: self.replies.downgrade(),
            gauge: Arc::clone(&self.gauge),
        }
    }

    /// The fill level, for the reader of the op stream.
    pub(crate) fn gauge(&self) -> Arc<Gauge> {
        Arc::clone(&self.gauge)
    }
}

impl WeakOutbox {
    /// Sends a reply, if the session that replies is still there.
    pub(crate) fn send(&self, reply: reply::Reply) {
        if let Some(replies) = self.replies.upgrade() {
            let gauge = Arc::clone(&self.gauge);
            Outbox { replies, gauge }.send(reply);
        }
    }
}

impl Inbox {
    /// The next reply; `None` after the session's end.
    pub(crate) async fn next(&mut self) -> Option<Reply> {
        let reply = self.replies.recv().await?;
        self.gauge.unsent.fetch_sub(1, Ordering::Relaxed);
        self.gauge.taken.notify_one();
        Some(reply)
    }
}

impl Gauge {
    /// Waits until fewer than `limit` replies are unsent.
    pub(crate) async fn below(&self, limit: usize) {
        while self.unsent.load(Ordering::Relaxed) >= limit {
            self.taken.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use waystation_proto::waystation::worker::Attached;

    #[tokio::test]
    async fn a_full_outbox_is_waited_for() {
        let (outbox, mut inbox) = outbox();
        outbox.send(reply::Reply::Attached(Attached::default()));
        outbox.send(reply::Reply::Attached(Attached::default()));
        let gauge = outbox.gauge();
        gauge.below(3).await;
        let waiting = tokio::spawn(async move { gauge.below(2).await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        assert!(inbox.next().await.is_some());
        waiting.await.unwrap();
        drop(outbox);
        assert!(inbox.next().await.is_some());
        assert!(inbox.next().await.is_none());
    }
}
