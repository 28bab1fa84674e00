//! How many ops the proxy may have on the way to this worker, and telling it of those that have been taken.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use crossbeam_channel::Sender;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use waystation_proto::waystation::worker::{Op, Taken, op, reply};

use crate::{core::Event, outbox::WeakOutbox};

/// One session's window. As a rule the proxy is told of a quarter of it at a time, so that small ops cost few replies. It
/// is told at once when it is about to run out while the dispatch thread has nothing else to do: executions that take
/// long leave one by one.
#[derive(Debug)]
pub(crate) struct Window {
    size: usize,
    permits: Arc<Semaphore>,
    /// Permits that came back since the proxy was last told.
    untold: AtomicUsize,
    outbox: WeakOutbox,
    events: Sender<Event>,
}

/// An op's place in the window, given back when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    _place: OwnedSemaphorePermit,
    window: Arc<Window>,
}

/// Whether an op has a place in the window. Word of the other workers has none, nor have cancellations or that of a
/// client's end, and the proxy sends them
/// without credit: the window may be full of launches that wait for a worker which is lost, or for bytes that will not come.
pub(crate) fn takes_place(op: &Op) -> bool {
    !matches!(
        op.op,
        Some(op::Op::Peers(_) | op::Op::CancelPut(_) | op::Op::Cancel(_) | op::Op::ClientEnded(_))
    )
}

impl Window {
    pub(crate) fn new(size: usize, outbox: WeakOutbox, events: Sender<Event>) -> Arc<Window> {
        Arc::new(Window {
            size,
            permits: Arc::new(Semaphore::new(size)),
            untold: AtomicUsize::new(0),
            outbox,
            events,
        })
    }

    /// Waits for a place; `None` when the worker goes down.
    pub(crate) async fn enter(self: &Arc<Window>) -> Option<Permit> {
        let place = Arc::clone(&self.permits).acquire_owned().await.ok()?;
        Some(Permit {
            _place: place,
            window: Arc::clone(self),
        })
    }

    fn taken(&self) {
        let untold = self.untold.fetch_add(1, Relaxed) + 1;
        let batch = (self.size / 4).max(1);
        // What the proxy does not know to be free: this place is both held still and untold.
        let held = self
            .size
            .saturating_sub(self.permits.available_permits() + 1);
        let used = held + untold;
        if untold >= batch || (used + batch > self.size && self.events.is_empty()) {
            let ops = self.untold.swap(0, Relaxed);
            self.outbox.send(reply::Reply::Taken(Taken {
                ops: u32::try_from(ops).unwrap_or(u32::MAX),
            }));
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.window.taken();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbox::{Inbox, Outbox, outbox};
    use futures::FutureExt as _;

    /// A window, and what must be kept while it is used.
    type Kept = (Outbox, crossbeam_channel::Receiver<Event>);

    fn window(size: usize) -> (Arc<Window>, Inbox, Kept) {
        let (outbox, inbox) = outbox();
        let (events, receiver) = crossbeam_channel::unbounded();
        let window = Window::new(size, outbox.downgrade(), events);
        (window, inbox, (outbox, receiver))
    }

    /// Ops that the proxy was told of.
    fn told(inbox: &mut Inbox) -> Vec<u32> {
        std::iter::from_fn(|| inbox.next().now_or_never().flatten())
            .map(|reply| match reply.reply {
                Some(reply::Reply::Taken(taken)) => taken.ops,
                other => panic!("{other:?}"),
            })
            .collect()
    }

    fn enter(window: &Arc<Window>) -> Permit {
        window.enter().now_or_never().flatten().expect("a place")
    }

    #[test]
    fn ops_taken_one_by_one_are_told_in_batches() {
        let (window, mut inbox, _kept) = window(16);
        for _ in 0..12 {
            drop(enter(&window));
        }
        assert_eq!(told(&mut inbox), [4, 4, 4]);
    }

    #[test]
    fn a_full_window_is_told_of_each_place_when_the_thread_is_idle() {
        let (window, mut inbox, kept) = window(8);
        let mut places: Vec<Permit> = (0..8).map(|_| enter(&window)).collect();
        assert!(window.enter().now_or_never().is_none(), "full");
        places.pop();
        assert_eq!(told(&mut inbox), [1]);
        drop(enter(&window));
        assert_eq!(told(&mut inbox), [1]);
        // The thread has more to do: what it does next may free more.
        window.events.send(Event::Stop).expect("open");
        places.pop();
        assert!(told(&mut inbox).is_empty());
        places.pop();
        assert_eq!(told(&mut inbox), [2]);
        drop(kept);
    }

    /// Whatever is held back from telling, the proxy has credit or another place is still to come back.
    #[test]
    fn the_proxy_never_runs_dry() {
        for size in 1..=20 {
            let (window, mut inbox, _kept) = window(size);
            let mut credit = size;
            for _ in 0..100 {
                assert!(credit > 0, "window {size}");
                let held: Vec<Permit> = (0..credit).map(|_| enter(&window)).collect();
                credit = 0;
                drop(held);
                credit += told(&mut inbox).iter().map(|&n| n as usize).sum::<usize>();
            }
        }
    }
}
