//! A client that waits for what it has executed most likely does so again, after as many executions as the last time. So
//! the worker tells the end of that execution unasked: when the client asks, the answer is there or on its way, and not a
//! whole round to the worker off, behind what other clients have sent meanwhile.
//!
//! A wrong guess costs one small reply, and there is one guess at most for each time that the client waits.

use std::ops::Range;

/// One session's guesses. `A` is an answer that is on its way.
#[derive(Debug)]
pub(super) struct Foresight<A> {
    /// Executions since the client last waited for one.
    since: u64,
    /// How many they were then.
    usual: u64,
    /// The result shards of the last execution.
    results: Range<u64>,
    /// Tells its end, where that was foreseen.
    end: Option<A>,
}

impl<A> Default for Foresight<A> {
    fn default() -> Self {
        Self {
            since: 0,
            usual: 0,
            results: 0..0,
            end: None,
        }
    }
}

impl<A> Foresight<A> {
    /// The client executes, with these shards as results. Whether its end should be told unasked, to [`Self::foreseen`].
    pub(super) fn executes(&mut self, results: Range<u64>) -> bool {
        self.since += 1;
        self.results = results;
        self.end = None;
        self.since == self.usual && !self.results.is_empty()
    }

    /// What tells the last execution's end.
    pub(super) fn foreseen(&mut self, end: A) {
        self.end = Some(end);
    }

    /// The client waits for these shards. What tells that they are ready, if it was foreseen; given once.
    pub(super) fn waits(&mut self, shards: &[u64]) -> Option<A> {
        let last = |shard| self.results.contains(shard);
        if shards.is_empty() || !shards.iter().all(last) {
            return None;
        }
        if self.since > 0 {
            self.usual = self.since;
            self.since = 0;
        }
        self.end.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Executes so often, one result each; which executions are told.
    fn execute(foresight: &mut Foresight<u64>, results: Range<u64>) -> Vec<u64> {
        let told = results.filter(|&shard| {
            let told = foresight.executes(shard..shard + 1);
            if told {
                foresight.foreseen(shard);
            }
            told
        });
        told.collect()
    }

    #[test]
    fn a_client_that_waits_after_each_execution_is_told_from_the_second_on() {
        let mut foresight = Foresight::default();
        assert!(execute(&mut foresight, 0..1).is_empty());
        assert_eq!(foresight.waits(&[0]), None);
        for shard in 1..5 {
            assert_eq!(execute(&mut foresight, shard..shard + 1), [shard]);
            assert_eq!(foresight.waits(&[shard]), Some(shard));
            assert_eq!(foresight.waits(&[shard]), None, "told once");
        }
    }

    #[test]
    fn the_last_of_as_many_as_before_is_told_and_no_other() {
        let mut foresight = Foresight::default();
        assert!(execute(&mut foresight, 0..100).is_empty());
        assert_eq!(foresight.waits(&[99]), None);
        assert_eq!(execute(&mut foresight, 100..200), [199]);
        assert_eq!(foresight.waits(&[199]), Some(199));
        // It goes on longer this time: the guess is wrong, and the only one.
        assert_eq!(execute(&mut foresight, 200..1000), [299]);
        assert_eq!(foresight.waits(&[999]), None, "not the end of that one");
        assert!(execute(&mut foresight, 1000..1799).is_empty());
        assert_eq!(execute(&mut foresight, 1799..1900), [1799]);
    }

    #[test]
    fn only_results_of_the_last_execution_are_foreseen() {
        let mut foresight = Foresight::default();
        assert!(!foresight.executes(0..4));
        assert_eq!(foresight.waits(&[0, 3]), None);
        assert!(foresight.executes(4..8));
        foresight.foreseen('a');
        assert_eq!(foresight.waits(&[3]), None, "an older one's");
        assert_eq!(foresight.waits(&[4, 99]), None, "not all of them");
        assert_eq!(foresight.waits(&[]), None);
        assert_eq!(foresight.waits(&[5, 7]), Some('a'));
        assert!(!foresight.executes(8..8), "nobody can wait for no results");
    }
}
