//! Warnings that do not repeat themselves.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time between two warnings of one kind.
const INTERVAL: Duration = Duration::from_secs(60);

/// Lets a warning through at most once a minute.
#[derive(Debug, Default)]
pub(crate) struct Quiet {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    suppressed: u64,
}

impl Quiet {
    /// `Some(how many were held back since)` where the warning is due.
    pub(crate) fn due(&self) -> Option<u64> {
        self.due_at(Instant::now())
    }

    fn due_at(&self, now: Instant) -> Option<u64> {
        let mut state = self
            .state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        match state.last {
            Some(last) if now.duration_since(last) < INTERVAL => {
                state.suppressed += 1;
                None
            }
            _ => {
                state.last = Some(now);
                Some(std::mem::take(&mut state.suppressed))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_a_minute_and_the_rest_are_counted() {
        let quiet = Quiet::default();
        let start = Instant::now();
        assert_eq!(quiet.due_at(start), Some(0));
        assert_eq!(quiet.due_at(start + Duration::from_secs(1)), None);
        assert_eq!(quiet.due_at(start + Duration::from_secs(59)), None);
        assert_eq!(quiet.due_at(start + Duration::from_secs(60)), Some(2));
        assert_eq!(quiet.due_at(start + Duration::from_secs(61)), None);
    }
}
