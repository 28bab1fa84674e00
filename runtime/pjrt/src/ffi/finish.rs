//! Threads that tell XLA that calls have ended.
//!
//! XLA goes on with the program on the thread that says so: it computes there, for as long as it may take, and calls the next targets.
//! Whoever ends a call must not have that happen under its locks, on its network threads, or within the call of
//! another target, one deeper for each: so these threads do it, which do nothing else.

use super::future::Ended;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The way to the threads; none if there are none.
static POOL: OnceLock<Option<Sender<Ended>>> = OnceLock::new();

/// Tells XLA soon.
pub(super) fn finish(ended: Ended) {
    // As long as the calls under way, each of which is here once.
    let unsent = match POOL.get_or_init(start) {
        Some(pool) => pool.send(ended).err().map(|error| error.0),
        None => Some(ended),
    };
    if let Some(ended) = unsent {
        ended.tell();
    }
}

fn start() -> Option<Sender<Ended>> {
    let (sender, receiver) = channel();
    let receiver = Arc::new(Mutex::new(receiver));
    let count = std::thread::available_parallelism().map_or(2, |count| count.get().clamp(2, 64));
    let started = (0..count)
        .filter(|_| {
            let receiver = Arc::clone(&receiver);
            std::thread::Builder::new()
                .name("ffi-finish".to_owned())
                .spawn(move || run(&receiver))
                .is_ok()
        })
        .count();
    (started > 0).then_some(sender)
}

fn run(receiver: &Mutex<Receiver<Ended>>) {
    loop {
        // One of the threads waits at the channel, and the others for the lock.
        let next = receiver
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .recv();
        match next {
            Ok(ended) => ended.tell(),
            Err(_) => return,
        }
    }
}
