//! A thread that writes notes to local files, so that a folder that hangs (a home on a dead file server) holds up that
//! thread and nobody else: neither the threads that a runtime has for blocking work, nor its end.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

type Work = Box<dyn FnOnce() + Send>;

/// Work that waits before [`Clerk::post`] refuses more. Each is a short write, so more means that the thread hangs.
const WAITING: usize = 1024;

/// The thread, which does one thing after the other. It ends when all is done and nobody holds this any more.
pub(crate) struct Clerk {
    work: Sender<Work>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    waiting: AtomicUsize,
    /// Somebody has waited in vain, and nothing was done since.
    hangs: AtomicBool,
}

impl Clerk {
    /// # Errors
    /// Where the system gives no thread.
    pub(crate) fn new() -> io::Result<Clerk> {
        let (work, queue) = mpsc::channel();
        let state = Arc::<State>::default();
        let of_thread = Arc::clone(&state);
        let thread = thread::Builder::new().name("notes".to_owned());
        thread.spawn(move || serve(&queue, &of_thread))?;
        Ok(Clerk { work, state })
    }

    /// Has `work` done some time. False where too much waits.
    pub(crate) fn post(&self, work: impl FnOnce() + Send + 'static) -> bool {
        let has_room = self.state.waiting.load(SeqCst) < WAITING;
        if has_room {
            self.send(Box::new(work));
        }
        has_room
    }

    /// Has `work` done some time, however much waits. For what ends other work, and so is bounded by that.
    pub(crate) fn finish(&self, work: impl FnOnce() + Send + 'static) {
        self.send(Box::new(work));
    }

    /// What `work` gives. `None` where it has not ended in time, or what was before it has not; it may yet be done. As long
    /// as that lasts nobody else waits. Blocks.
    pub(crate) fn within<T: Send + 'static>(
        &self,
        deadline: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if self.state.hangs.load(SeqCst) && self.state.waiting.load(SeqCst) > 0 {
            return None;
        }
        let (sender, result) = mpsc::sync_channel(1);
        self.send(Box::new(move || {
            // Too late, what it gives is dropped.
            let _ = sender.send(work());
        }));
        let result = result.recv_timeout(deadline).ok();
        if result.is_none() {
            self.state.hangs.store(true, SeqCst);
        }
        result
    }

    /// Waits until all that was asked for until now is done, at most so long.
    pub(crate) async fn idle(&self, deadline: Duration) {
        let (sender, done) = tokio::sync::oneshot::channel();
        self.send(Box::new(move || {
            let _ = sender.send(());
        }));
        let _ = tokio::time::timeout(deadline, done).await;
    }

    fn send(&self, work: Work) {
        self.state.waiting.fetch_add(1, SeqCst);
        // The thread outlives the sender.
        let _ = self.work.send(work);
    }
}

impl fmt::Debug for Clerk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Clerk").field(&self.state).finish()
    }
}

fn serve(queue: &Receiver<Work>, state: &State) {
    for work in queue {
        work();
        state.waiting.fetch_sub(1, SeqCst);
        state.hangs.store(false, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(20);

    /// Work that goes on until what comes back is dropped.
    fn hang(clerk: &Clerk) -> Sender<()> {
        let (sender, ended) = mpsc::channel();
        clerk.finish(move || {
            let _ = ended.recv();
        });
        sender
    }

    #[test]
    fn who_waits_for_one_that_hangs_waits_once() {
        let clerk = Clerk::new().unwrap();
        let hangs = hang(&clerk);
        assert_eq!(clerk.within(SHORT, || 1), None);
        // A wait of this length would end the test.
        assert_eq!(clerk.within(Duration::MAX, || 2), None);
        drop(hangs);
        clerk.within(LONG, || ());
        while clerk.state.waiting.load(SeqCst) > 0 {
            thread::yield_now();
        }
        assert_eq!(clerk.within(LONG, || 3), Some(3));
    }

    #[test]
    fn what_waits_is_bounded_and_what_ends_something_is_done() {
        let clerk = Clerk::new().unwrap();
        let hangs = hang(&clerk);
        let posted = (0..2 * WAITING).filter(|_| clerk.post(|| ())).count();
        assert!((WAITING - 1..=WAITING).contains(&posted), "{posted}");
        let (sender, done) = mpsc::channel();
        clerk.finish(move || sender.send(()).unwrap());
        drop(hangs);
        assert_eq!(done.recv_timeout(LONG), Ok(()));
    }

    #[tokio::test]
    async fn idle_is_after_all_that_was_posted() {
        let clerk = Clerk::new().unwrap();
        let (sender, done) = mpsc::channel();
        assert!(clerk.post(move || sender.send(7).unwrap()));
        clerk.idle(LONG).await;
        assert_eq!(done.try_recv(), Ok(7));
        let _hangs = hang(&clerk);
        clerk.idle(SHORT).await;
    }
}
