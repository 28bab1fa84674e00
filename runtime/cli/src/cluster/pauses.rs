//! How long a child that has ended waits for its next start.

use std::time::Duration;

/// What follows the second short life; each further one doubles it.
const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(60);
/// A child that has lived for so long did not end of what the one before it ended of.
const LONG_LIFE: Duration = Duration::from_secs(10);

/// One child's pauses: none at first, then growing ones while it ends soon after each start.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    next: Duration,
}

impl Pauses {
    /// The pause after a life, or a try to start one, of this length.
    pub(super) fn after(&mut self, lived: Duration) -> Duration {
        let pause = if lived >= LONG_LIFE {
            Duration::ZERO
        } else {
            self.next
        };
        self.next = (pause * 2).clamp(FIRST, LONGEST);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_are_forgotten_after_a_long_life() {
        let mut pauses = Pauses::default();
        let mut after = |seconds| pauses.after(Duration::from_secs(seconds)).as_millis();
        let short: Vec<_> = (0..5).map(|_| after(1)).collect();
        assert_eq!(short, [0, 500, 1000, 2000, 4000]);
        assert_eq!((0..20).map(|_| after(0)).max(), Some(60_000));
        assert_eq!(after(0), 60_000);
        assert_eq!([after(10), after(9), after(9)], [0, 500, 1000]);
    }
}
