//! The lock that nobody can poison.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks. For state that nothing changes half-way and panics: what a panic elsewhere has left is whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
