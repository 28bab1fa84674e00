//! What a shard still needs from outside the workers, and may wait for as long as a client or a storage likes: bytes that a client
//! has not sent, a restore. What is made of a shard needs the same.
//!
//! A launch that spans workers gets its place among the others when nothing more is needed ([`crate::link`]).

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering::Acquire, Ordering::Release},
};

use crate::lock::lock;

/// One thing that is to come.
struct Need {
    met: AtomicBool,
    waits: Mutex<Vec<Then>>,
}

type Then = Box<dyn FnOnce() + Send>;

impl std::fmt::Debug for Need {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Need")
            .field("met", &self.met)
            .finish_non_exhaustive()
    }
}

impl Need {
    fn is_met(&self) -> bool {
        self.met.load(Acquire)
    }
}

/// Held by who brings it. Dropped when it has come, or never will.
#[derive(Debug)]
pub(crate) struct Unmet(Arc<Need>);

impl Drop for Unmet {
    fn drop(&mut self) {
        let waits = {
            let mut waits = lock(&self.0.waits);
            self.0.met.store(true, Release);
            std::mem::take(&mut *waits)
        };
        for then in waits {
            then();
        }
    }
}

/// All that something needs; mostly nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Needs(Option<Arc<[Arc<Need>]>>);

impl Needs {
    /// One thing, which is there when the other value is dropped.
    pub(crate) fn one() -> (Needs, Unmet) {
        let need = Arc::new(Need {
            met: AtomicBool::new(false),
            waits: Mutex::default(),
        });
        let needs = Needs(Some(Arc::new([Arc::clone(&need)])));
        (needs, Unmet(need))
    }

    /// What all of these need now.
    pub(crate) fn of<'a>(all: impl IntoIterator<Item = &'a Needs>) -> Needs {
        let mut unmet: Vec<Arc<Need>> = all
            .into_iter()
            .filter_map(|needs| needs.0.as_deref())
            .flatten()
            .filter(|need| !need.is_met())
            .cloned()
            .collect();
        if unmet.is_empty() {
            return Needs::default();
        }
        unmet.sort_unstable_by_key(Arc::as_ptr);
        unmet.dedup_by(|a, b| Arc::ptr_eq(a, b));
        Needs(Some(unmet.into()))
    }

    fn unmet(&self) -> Option<&Arc<Need>> {
        self.0.as_ref()?.iter().find(|need| !need.is_met())
    }

    /// Whether all is there.
    pub(crate) fn are_met(&self) -> bool {
        self.unmet().is_none()
    }

    /// Has `then` called when one more thing is there; `false`, and never, when all is.
    pub(crate) fn when_one_is_met(&self, then: impl FnOnce() + Send + 'static) -> bool {
        let Some(all) = &self.0 else {
            return false;
        };
        for need in all.iter() {
            let mut waits = lock(&need.waits);
            // Under the lock, so that no one is kept that is not called.
            if !need.is_met() {
                waits.push(Box::new(then));
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;

    #[test]
    fn what_is_made_of_several_needs_what_they_need_and_no_more() {
        let ((one, first), (two, second)) = (Needs::one(), Needs::one());
        let both = Needs::of([&one, &two, &Needs::default(), &one]);
        assert_eq!(both.0.as_ref().map(|all| all.len()), Some(2));
        let calls = Arc::new(AtomicUsize::new(0));
        let call = || {
            let calls = Arc::clone(&calls);
            move || {
                calls.fetch_add(1, Relaxed);
            }
        };
        assert!(both.when_one_is_met(call()));
        drop(first);
        drop(second);
        assert_eq!(calls.load(Relaxed), 1, "told once");
        assert!(both.are_met() && !both.when_one_is_met(call()));
        assert!(Needs::of([&both]).0.is_none());
        assert!(Needs::default().are_met());
    }
}
