//! Several events as one.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

/// What is told of the first failure.
pub(crate) type Failed = Box<dyn Fn(&waystation_pjrt::Error) + Send + Sync>;

/// Calls `then` once when all events are there, with the first failure if there is one; that one is told to `failed` at
/// once, for those that only end then.
pub(crate) fn join(
    events: Vec<waystation_pjrt::Event>,
    failed: Option<Failed>,
    then: impl FnOnce(Result<(), waystation_pjrt::Error>) + Send + 'static,
) {
    struct Join<F> {
        missing: AtomicUsize,
        failure: Mutex<Option<waystation_pjrt::Error>>,
        failed: Option<Failed>,
        then: Mutex<Option<F>>,
    }
    if events.is_empty() {
        then(Ok(()));
        return;
    }
    let join = Arc::new(Join {
        missing: AtomicUsize::new(events.len()),
        failure: Mutex::new(None),
        failed,
        then: Mutex::new(Some(then)),
    });
    for event in events {
        let join = Arc::clone(&join);
        event.on_ready(move |result| {
            if let Err(error) = result {
                let mut failure = join.failure.lock().unwrap_or_else(PoisonError::into_inner);
                if failure.is_none() {
                    if let Some(failed) = &join.failed {
                        failed(&error);
                    }
                    *failure = Some(error);
                }
            }
            if join.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
                let failure = join
                    .failure
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                let then = join
                    .then
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                if let Some(then) = then {
                    then(failure.map_or(Ok(()), Err));
                }
            }
        });
    }
}
