//! User contexts: which of the client's Python lines the server may still name.
//!
//! jaxlib keeps the Python stack of a request under the request's user context id, one reference a request, until a reply says
//! that the server has destroyed that use of it. A use is counted here: whatever can still fail in its name holds it (the
//! shards that the request made, the reply that is awaited, the values that failed), and so does the use of every request
//! that was given such a shard, since a failure spreads to what is made from it. When the last holder goes, the id goes to
//! the list that the next numbered reply takes along. An id reported more often than it was used ends the client's process.
//!
//! A long loop would chain the uses of all its steps. So every [`WATCH_DEPTH`]th link of a chain is watched: when its work has
//! ended well, nothing behind it can fail any more; when it has failed, the one cause alone is kept.

use std::{
    collections::{HashSet, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use super::lock;
use crate::status::{self, Status};

/// Uses in a chain before one is watched. A watch costs the worker one small reply.
const WATCH_DEPTH: u32 = 256;
/// Ids that wait for a numbered reply. Beyond it they are forgotten: the client then keeps a few stacks too long.
const MAX_WAITING: usize = 1 << 20;
/// Ids that one reply takes along.
const MAX_IN_REPLY: usize = 4096;

/// The ids whose use has ended and that no reply has reported yet.
#[derive(Debug, Default)]
pub(crate) struct Destroyed(Mutex<VecDeque<u64>>);

impl Destroyed {
    /// A request's use of an id; 0 is none.
    pub(super) fn used(self: &Arc<Self>, id: u64) -> UserContext {
        UserContext(Arc::new(Use {
            id,
            destroyed: Arc::clone(self),
            one_outcome: AtomicBool::new(false),
            good: AtomicBool::new(false),
            chain: Mutex::new(Chain::default()),
        }))
    }

    /// What the next numbered reply reports.
    pub(super) fn take(&self) -> Vec<u64> {
        let mut ids = lock(&self.0);
        let n = ids.len().min(MAX_IN_REPLY);
        ids.drain(..n).collect()
    }

    fn add(&self, id: u64) {
        let mut ids = lock(&self.0);
        if id != 0 && ids.len() < MAX_WAITING {
            ids.push_back(id);
        }
    }
}

/// One request's use of a user context.
#[derive(Clone, Debug)]
pub(crate) struct UserContext(Arc<Use>);

#[derive(Debug)]
struct Use {
    id: u64,
    destroyed: Arc<Destroyed>,
    /// All that the request makes fails together or not at all.
    one_outcome: AtomicBool,
    /// Nothing that the request makes can fail any more.
    good: AtomicBool,
    chain: Mutex<Chain>,
}

#[derive(Debug, Default)]
struct Chain {
    /// Uses in whose name this request's results may fail.
    causes: Vec<UserContext>,
    /// Links behind this one that no watch has covered.
    depth: u32,
}

impl UserContext {
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// The request is an execution: one outcome for all its results.
    pub(super) fn has_one_outcome(&self) {
        self.0.one_outcome.store(true, Relaxed);
    }

    /// The request was given something that fails in another one's name, if it fails.
    pub(crate) fn depends_on(&self, cause: &UserContext) {
        if Arc::ptr_eq(&self.0, &cause.0) {
            return;
        }
        let mut chain = lock(&self.0.chain);
        // The shards of one array nearly always come from one request.
        let known = chain
            .causes
            .last()
            .is_some_and(|last| Arc::ptr_eq(&last.0, &cause.0));
        if known || cause.0.good.load(Relaxed) {
            return;
        }
        // A cause is older than what it causes, so locks are always taken from the newer to the older.
        chain.depth = chain
            .depth
            .max(lock(&cause.0.chain).depth.saturating_add(1));
        chain.causes.push(cause.clone());
    }

    /// Whether the end of this request's work should be watched, and told to [`Self::settled`]. True once a chain's stretch.
    pub(super) fn wants_watch(&self) -> bool {
        let mut chain = lock(&self.0.chain);
        let due = chain.depth >= WATCH_DEPTH;
        if due {
            chain.depth = 0;
        }
        due
    }

    /// The outcome of all the request's work is known.
    pub(super) fn settled(&self, outcome: &Result<(), Status>) {
        match outcome {
            Ok(()) => self.is_good(),
            Err(status) => {
                let cause = status::user_context(status)
                    .filter(|&id| id != self.0.id)
                    .and_then(|id| self.ancestor(id));
                let freed =
                    std::mem::replace(&mut lock(&self.0.chain).causes, cause.into_iter().collect());
                drop(freed);
            }
        }
    }

    fn is_good(&self) {
        let mut good = vec![self.clone()];
        while let Some(context) = good.pop() {
            context.0.good.store(true, Relaxed);
            let causes = std::mem::take(&mut lock(&context.0.chain).causes);
            // What was used of a request with one outcome tells of all of it; of another request, only of the part used.
            good.extend(
                causes
                    .into_iter()
                    .filter(|cause| cause.0.one_outcome.load(Relaxed)),
            );
        }
    }

    /// The use of an id behind this one.
    fn ancestor(&self, id: u64) -> Option<UserContext> {
        let mut seen = HashSet::new();
        let mut open = lock(&self.0.chain).causes.clone();
        while let Some(context) = open.pop() {
            if context.0.id == id {
                return Some(context);
            }
            if seen.insert(Arc::as_ptr(&context.0)) {
                open.extend(lock(&context.0.chain).causes.iter().cloned());
            }
        }
        None
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.destroyed.add(self.id);
        // One by one and not each inside the other's drop: a chain may be longer than the stack is deep.
        let mut freed = std::mem::take(&mut lock(&self.chain).causes);
        while let Some(UserContext(cause)) = freed.pop() {
            if let Some(last) = Arc::into_inner(cause) {
                freed.append(&mut lock(&last.chain).causes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(destroyed: &Destroyed) -> Vec<u64> {
        let mut ids = destroyed.take();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn an_id_is_destroyed_once_for_each_use_when_its_last_holder_goes() {
        let destroyed = Arc::new(Destroyed::default());
        let (first, second, none) = (destroyed.used(7), destroyed.used(7), destroyed.used(0));
        let shard = first.clone();
        drop((first, none));
        assert_eq!(destroyed.take(), Vec::<u64>::new());
        drop((shard, second));
        assert_eq!(destroyed.take(), [7, 7]);
        assert_eq!(destroyed.take(), Vec::<u64>::new());
    }

    #[test]
    fn a_cause_lives_as_long_as_what_may_fail_with_it() {
        let destroyed = Arc::new(Destroyed::default());
        let (x, y) = (destroyed.used(1), destroyed.used(2));
        y.depends_on(&x);
        y.depends_on(&y);
        drop(x);
        assert_eq!(destroyed.take(), Vec::<u64>::new());
        drop(y);
        assert_eq!(sorted(&destroyed), [1, 2]);
    }

    #[test]
    fn work_that_ended_well_frees_all_behind_it_and_is_no_cause_any_more() {
        let destroyed = Arc::new(Destroyed::default());
        let mut last = destroyed.used(1);
        let mut kept = Vec::new();
        for id in 2..=WATCH_DEPTH.into() {
            let next = destroyed.used(id);
            next.has_one_outcome();
            next.depends_on(&last);
            assert!(!next.wants_watch(), "at {id}");
            if id % 100 == 0 {
                kept.push(next.clone());
            }
            last = next;
        }
        let watched = destroyed.used(1000);
        watched.depends_on(&last);
        drop(last);
        assert!(watched.wants_watch());
        assert!(!watched.wants_watch(), "once");
        watched.settled(&Ok(()));
        let freed: Vec<u64> = (1..=u64::from(WATCH_DEPTH))
            .filter(|id| id % 100 != 0)
            .collect();
        assert_eq!(sorted(&destroyed), freed);
        let after = destroyed.used(1001);
        after.depends_on(&watched);
        drop(watched);
        assert_eq!(destroyed.take(), [1000]);
    }

    #[test]
    fn what_was_not_all_used_stays_a_cause() {
        let destroyed = Arc::new(Destroyed::default());
        let (puts, run) = (destroyed.used(1), destroyed.used(2));
        run.depends_on(&puts);
        run.settled(&Ok(()));
        let other = destroyed.used(3);
        other.depends_on(&puts);
        drop((puts, run));
        assert_eq!(
            destroyed.take(),
            [2],
            "another array of the put may fail yet"
        );
    }

    #[test]
    fn failed_work_keeps_the_cause_alone() {
        let destroyed = Arc::new(Destroyed::default());
        let (cause, between, result) = (destroyed.used(1), destroyed.used(2), destroyed.used(3));
        between.depends_on(&cause);
        result.depends_on(&between);
        drop((cause, between));
        let failed = status::with_user_context(status::invalid_argument("x"), 1);
        result.settled(&Err(failed.clone()));
        assert_eq!(destroyed.take(), [2]);
        drop(result);
        assert_eq!(sorted(&destroyed), [1, 3]);
        let own = destroyed.used(1);
        own.settled(&Err(failed));
        drop(own);
        assert_eq!(destroyed.take(), [1]);
    }

    #[test]
    fn a_chain_that_nothing_watched_goes_without_deep_recursion() {
        let destroyed = Arc::new(Destroyed::default());
        let mut last = destroyed.used(1);
        for id in 2..=300_000 {
            let next = destroyed.used(id);
            next.depends_on(&last);
            last = next;
        }
        drop(last);
        let mut reported = 0;
        loop {
            let ids = destroyed.take();
            assert!(ids.len() <= MAX_IN_REPLY);
            if ids.is_empty() {
                break;
            }
            reported += ids.len();
        }
        assert_eq!(reported, 300_000);
    }
}
