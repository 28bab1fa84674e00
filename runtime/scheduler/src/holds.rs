//! Which proxy holds the workers, who waits, and lease epochs. Pure: the caller brings the time.
//!
//! One proxy at a time holds all workers; the others wait in order of arrival. An epoch is given with the hold, not
//! with the request, so the holder's epoch is always the greatest one given. A proxy whose stream broke may go on with
//! its epoch, as long as no other proxy was given a greater one.

use std::collections::VecDeque;

/// One proxy's request, until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim(u64);

/// What a claim has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// The workers, under this lease epoch.
    Held {
        /// Greater than every epoch given before.
        epoch: u64,
    },
    /// Nothing yet.
    Waiting {
        /// Name of the proxy that has the workers.
        holder: String,
        /// Proxies that get them before this one, besides the holder.
        ahead: usize,
    },
}

#[derive(Debug)]
struct Entry {
    claim: Claim,
    proxy: String,
    /// Of the first entry only; zero for those that wait.
    epoch: u64,
    /// The epoch that the proxy wants to go on with; zero for none.
    resume: u64,
}

/// The holder (first) and those that wait.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    queue: VecDeque<Entry>,
    last_epoch: u64,
    next_claim: u64,
}

impl Holds {
    /// Adds a proxy. `resume`: the epoch that it held before, or 0. `now_ms`: Unix time in milliseconds; epochs start from it, so that they go on growing when the
    /// resource manager starts anew without memory of the epochs it gave.
    pub(crate) fn claim(&mut self, proxy: String, resume: u64, now_ms: u64) -> Claim {
        let claim = Claim(self.next_claim);
        self.next_claim += 1;
        // A stream that broke without a word is still in the queue when its proxy comes back: the new one takes its place.
        if let Some(holder) = self.queue.front_mut()
            && resume != 0
            && holder.epoch == resume
        {
            holder.claim = claim;
            return claim;
        }
        self.queue.push_back(Entry {
            claim,
            proxy,
            epoch: 0,
            resume,
        });
        self.grant(now_ms);
        claim
    }

    /// Ends a claim; when it held the workers the next one gets them.
    pub(crate) fn release(&mut self, claim: Claim, now_ms: u64) {
        self.queue.retain(|entry| entry.claim != claim);
        self.grant(now_ms);
    }

    /// What the claim has; none when it was released, or when a newer stream of its proxy took its place.
    pub(crate) fn get(&self, claim: Claim) -> Option<Hold> {
        let position = self.queue.iter().position(|entry| entry.claim == claim)?;
        let holder = self.queue.front()?;
        Some(match position {
            0 => Hold::Held {
                epoch: holder.epoch,
            },
            _ => Hold::Waiting {
                holder: holder.proxy.clone(),
                ahead: position - 1,
            },
        })
    }

    /// Name of the proxy that has the workers.
    pub(crate) fn holder(&self) -> Option<&str> {
        self.queue.front().map(|entry| entry.proxy.as_str())
    }

    fn grant(&mut self, now_ms: u64) {
        if let Some(first) = self.queue.front_mut()
            && first.epoch == 0
        {
            // An epoch of before a restart is greater than any given since, or another proxy has had the workers.
            first.epoch = if first.resume != 0 && first.resume >= self.last_epoch {
                first.resume
            } else {
                now_ms.max(self.last_epoch.saturating_add(1))
            };
            self.last_epoch = first.epoch;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_proxy_holds_and_the_others_wait_in_order() {
        let mut holds = Holds::default();
        let a = holds.claim("a".to_owned(), 0, 1000);
        let b = holds.claim("b".to_owned(), 0, 1001);
        let c = holds.claim("c".to_owned(), 0, 1002);
        assert_eq!(holds.get(a), Some(Hold::Held { epoch: 1000 }));
        let waits = |ahead| {
            Some(Hold::Waiting {
                holder: "a".to_owned(),
                ahead,
            })
        };
        assert_eq!(holds.get(b), waits(0));
        assert_eq!(holds.get(c), waits(1));
        holds.release(b, 1003);
        assert_eq!(holds.get(b), None);
        assert_eq!(holds.get(c), waits(0));
        holds.release(a, 1004);
        assert_eq!(holds.get(c), Some(Hold::Held { epoch: 1004 }));
        assert_eq!(holds.holder(), Some("c"));
        holds.release(c, 1005);
        assert_eq!(holds.holder(), None);
    }

    #[test]
    fn epochs_grow_within_a_millisecond_and_when_the_clock_steps_back() {
        let mut holds = Holds::default();
        let a = holds.claim("a".to_owned(), 0, 1000);
        holds.release(a, 1000);
        let b = holds.claim("b".to_owned(), 0, 1000);
        assert_eq!(holds.get(b), Some(Hold::Held { epoch: 1001 }));
        holds.release(b, 1000);
        let c = holds.claim("c".to_owned(), 0, 5);
        assert_eq!(holds.get(c), Some(Hold::Held { epoch: 1002 }));
    }

    #[test]
    fn a_holder_keeps_its_epoch_while_others_come_and_go() {
        let mut holds = Holds::default();
        let a = holds.claim("a".to_owned(), 0, 7);
        let b = holds.claim("b".to_owned(), 0, 8);
        holds.release(b, 9);
        holds.claim("c".to_owned(), 0, 10);
        assert_eq!(holds.get(a), Some(Hold::Held { epoch: 7 }));
    }
    #[test]
    fn a_proxy_goes_on_with_its_epoch_unless_another_had_the_workers() {
        let mut holds = Holds::default();
        let a = holds.claim("a".to_owned(), 0, 1000);
        holds.release(a, 1001);
        let a = holds.claim("a".to_owned(), 1000, 1002);
        assert_eq!(holds.get(a), Some(Hold::Held { epoch: 1000 }));
        // b waits, gets the workers when a's stream breaks, and a comes too late.
        let b = holds.claim("b".to_owned(), 0, 1003);
        holds.release(a, 1004);
        let a = holds.claim("a".to_owned(), 1000, 1005);
        assert_eq!(holds.get(b), Some(Hold::Held { epoch: 1004 }));
        holds.release(b, 1006);
        assert_eq!(holds.get(a), Some(Hold::Held { epoch: 1006 }));
        // b comes back before its old stream is known to be dead, and before c.
        let mut holds = Holds::default();
        let old = holds.claim("b".to_owned(), 0, 2000);
        let c = holds.claim("c".to_owned(), 0, 2001);
        let new = holds.claim("b".to_owned(), 2000, 2002);
        assert_eq!(holds.get(old), None);
        assert_eq!(holds.get(new), Some(Hold::Held { epoch: 2000 }));
        holds.release(old, 2003);
        assert_eq!(holds.get(new), Some(Hold::Held { epoch: 2000 }));
        assert!(matches!(holds.get(c), Some(Hold::Waiting { ahead: 0, .. })));
        // A resource manager without memory believes the proxy, and goes on from its epoch.
        let mut anew = Holds::default();
        let a = anew.claim("a".to_owned(), 1006, 500);
        assert_eq!(anew.get(a), Some(Hold::Held { epoch: 1006 }));
        anew.release(a, 501);
        let c = anew.claim("c".to_owned(), 0, 502);
        assert_eq!(anew.get(c), Some(Hold::Held { epoch: 1007 }));
    }
}
