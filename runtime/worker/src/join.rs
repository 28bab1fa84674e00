//! Several events as one.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

/// Calls `then` once when all events are there, with the first failure if there is one.
pub(crate) fn join(
    events: Vec<waystation_pjrt::Event>,
    then: impl FnOnce(Result<(), waystation_pjrt::Error>) + Send + 'static,
) {
    struct Join<F> {
        missing: AtomicUsize,
        failure: Mutex<Option<waystation_pjrt::Error>>,
        then: Mutex<Option<F>>,
    }
    if events.is_empty() {
        then(Ok(()));
        return;
    }
    let join = Arc::new(Join {
        missing: AtomicUsize::new(events.len()),
        failure: Mutex::new(None),
        then: Mutex::new(Some(then)),
    });
    for event in events {
        let join = Arc::clone(&join);
        event.on_ready(move |result| {
            if let Err(error) = result {
                join.failure
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .get_or_insert(error);
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
