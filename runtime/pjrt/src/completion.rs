//! A value that arrives once, from a thread of the plugin, at a future or a callback.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

enum State<T> {
    /// Nothing yet; whom to wake.
    Waiting(Option<Waker>),
    /// Nothing yet; whom to call.
    Calling(Box<dyn FnOnce(T) + Send>),
    /// Arrived and not yet taken.
    Full(T),
    /// Taken, or handed to the callback.
    Taken,
}

struct Shared<T>(Mutex<State<T>>);

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // No code that can panic runs under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end that delivers.
pub(crate) struct Sender<T>(Arc<Shared<T>>);

/// The end that waits.
pub(crate) struct Completion<T>(Arc<Shared<T>>);

/// Both ends of one delivery.
pub(crate) fn pair<T>() -> (Sender<T>, Completion<T>) {
    let shared = Arc::new(Shared(Mutex::new(State::Waiting(None))));
    (Sender(Arc::clone(&shared)), Completion(shared))
}

impl<T> Sender<T> {
    /// Delivers `value`: wakes the future, or calls the callback on this thread.
    pub(crate) fn send(self, value: T) {
        let mut state = self.0.lock();
        match mem::replace(&mut *state, State::Taken) {
            State::Waiting(waker) => {
                *state = State::Full(value);
                drop(state);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            State::Calling(callback) => {
                drop(state);
                callback(value);
            }
            State::Full(_) | State::Taken => {}
        }
    }
}

impl<T> Completion<T> {
    /// Whether the value has arrived.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(*self.0.lock(), State::Full(_) | State::Taken)
    }

    /// Calls `callback` with the value, at once if it is there.
    pub(crate) fn on_ready(self, callback: impl FnOnce(T) + Send + 'static) {
        let mut state = self.0.lock();
        match mem::replace(&mut *state, State::Taken) {
            State::Full(value) => {
                drop(state);
                callback(value);
            }
            State::Waiting(_) => *state = State::Calling(Box::new(callback)),
            // Polled to its end before: the value is gone, as with any future.
            other @ (State::Calling(_) | State::Taken) => *state = other,
        }
    }
}

impl<T> Future for Completion<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut state = self.0.lock();
        match mem::replace(&mut *state, State::Taken) {
            State::Full(value) => Poll::Ready(value),
            State::Waiting(_) => {
                *state = State::Waiting(Some(context.waker().clone()));
                Poll::Pending
            }
            other @ (State::Calling(_) | State::Taken) => {
                *state = other;
                Poll::Pending
            }
        }
    }
}
