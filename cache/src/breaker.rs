//! A pause after failures, so that a bucket that hangs costs one compile its deadline and not every compile.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Failures in a row that open the breaker. One alone may be a hiccup; a time-out counts as this many, because it has
/// cost a wait already.
const FAILURES: u32 = 2;

/// Decides whether the bucket is asked.
#[derive(Debug)]
pub(crate) struct Breaker {
    first: Duration,
    longest: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    failures: u32,
    pause: Duration,
    closed_until: Option<Instant>,
}

impl Breaker {
    pub(crate) fn new(first: Duration, longest: Duration) -> Breaker {
        Breaker {
            first,
            longest,
            state: Mutex::default(),
        }
    }

    /// True where a request may be made. After a pause one request is let through to try; the next ones follow when
    /// it has succeeded, or another pause later.
    pub(crate) fn allows(&self) -> bool {
        self.allows_at(Instant::now())
    }

    fn allows_at(&self, now: Instant) -> bool {
        let mut state = self.lock();
        match state.closed_until {
            None => true,
            Some(until) if now < until => false,
            Some(_) => {
                state.closed_until = now.checked_add(state.pause);
                true
            }
        }
    }

    /// Notes an answer, a miss included. True where it ends a time of failures.
    pub(crate) fn succeeded(&self) -> bool {
        let mut state = self.lock();
        let recovered = state.closed_until.is_some();
        *state = State::default();
        recovered
    }

    /// Notes a failure.
    pub(crate) fn failed(&self, timed_out: bool) {
        self.failed_at(timed_out, Instant::now());
    }

    fn failed_at(&self, timed_out: bool, now: Instant) {
        let mut state = self.lock();
        state.failures = state
            .failures
            .saturating_add(if timed_out { FAILURES } else { 1 });
        if state.failures >= FAILURES {
            state.pause = if state.pause.is_zero() {
                self.first
            } else {
                state.pause.saturating_mul(2).min(self.longest)
            };
            state.closed_until = now.checked_add(state.pause);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn opens_on_a_time_out_or_two_errors_and_tries_again_ever_later() {
        let breaker = Breaker::new(S, 3 * S);
        let start = Instant::now();
        breaker.failed_at(false, start);
        assert!(breaker.allows_at(start), "one error is a hiccup");
        breaker.failed_at(false, start);
        assert!(!breaker.allows_at(start));
        assert!(breaker.allows_at(start + S), "a try after the pause");
        assert!(!breaker.allows_at(start + S), "but only one");
        breaker.failed_at(true, start + S);
        assert!(!breaker.allows_at(start + 2 * S), "2 s now");
        assert!(breaker.allows_at(start + 3 * S));
        breaker.failed_at(true, start + 3 * S);
        assert!(!breaker.allows_at(start + 5 * S));
        assert!(breaker.allows_at(start + 6 * S), "3 s is the longest");
        assert!(breaker.succeeded());
        assert!(breaker.allows_at(start + 6 * S));
        assert!(!breaker.succeeded(), "recovery is said once");
        breaker.failed_at(true, start + 6 * S);
        assert!(!breaker.allows_at(start + 6 * S), "a time-out is enough");
        assert!(breaker.allows_at(start + 7 * S), "from 1 s again");
    }
}
