//! Which proxy holds which slices, who waits, and lease epochs. Pure: the caller brings the time, and what is known of the
//! slices.
//!
//! A slice belongs to one proxy at a time. Who wants slices that are not free waits, and those that come later wait behind
//! it, in order of arrival. An epoch is given with the slices, not with the request, and is greater than every one given
//! before. A proxy whose stream broke may go on with its epoch, as long as no other proxy was given a slice of it. A resource
//! manager that starts anew does not know who has what; workers tell it which epoch they serve, and such slices wait for
//! their proxy.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// One proxy's request, until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim(u64);

/// What a proxy asks for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wish {
    /// Names it to others.
    pub(crate) proxy: String,
    /// How many slices; none: all.
    pub(crate) slices: Option<u32>,
    /// So many of them may be missing.
    pub(crate) elastic: u32,
    /// The epoch that it held before, or 0.
    pub(crate) resume: u64,
    /// The slices that it held under it.
    pub(crate) resume_slices: Vec<u32>,
}

/// What is known of the slices.
#[derive(Debug, Default)]
pub(crate) struct View {
    /// Those that have all their workers.
    pub(crate) whole: Vec<u32>,
    /// The epoch that a slice's workers serve, where they serve one.
    pub(crate) epochs: BTreeMap<u32, u64>,
}

/// What a claim has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Slices, ascending.
    Held {
        /// Greater than every epoch given before.
        epoch: u64,
        slices: Vec<u32>,
        /// How many of them the proxy needs.
        needed: u32,
    },
    /// Nothing yet, and why.
    Waiting(String),
}

#[derive(Debug)]
struct Entry {
    claim: Claim,
    wish: Wish,
    /// Zero for those that wait.
    epoch: u64,
    slices: Vec<u32>,
}

/// Those that hold slices and those that wait, in order of arrival.
#[derive(Debug)]
pub(crate) struct Holds {
    slices: u32,
    queue: VecDeque<Entry>,
    last_epoch: u64,
    /// The last epoch under which a slice was given away.
    given: BTreeMap<u32, u64>,
    /// Epochs given by this resource manager.
    ours: BTreeSet<u64>,
    next_claim: u64,
}

impl Holds {
    pub(crate) fn new(slices: u32) -> Holds {
        Holds {
            slices,
            queue: VecDeque::new(),
            last_epoch: 0,
            given: BTreeMap::new(),
            ours: BTreeSet::new(),
            next_claim: 0,
        }
    }

    /// Adds a proxy. `now_ms`: Unix time in milliseconds; epochs start from it, so that they go on growing when the resource
    /// manager starts anew without memory of the epochs it gave.
    pub(crate) fn claim(&mut self, wish: Wish, view: &View, now_ms: u64) -> Claim {
        let claim = Claim(self.next_claim);
        self.next_claim += 1;
        // A stream that broke without a word is still in the queue when its proxy comes back: the new one takes its place.
        let mut held = self.queue.iter_mut();
        let known = held.find(|entry| wish.resume != 0 && entry.epoch == wish.resume);
        if let Some(entry) = known {
            entry.claim = claim;
            return claim;
        }
        self.queue.push_back(Entry {
            claim,
            wish,
            epoch: 0,
            slices: Vec::new(),
        });
        self.grant(view, now_ms);
        claim
    }

    /// Ends a claim; others may get what it held.
    pub(crate) fn release(&mut self, claim: Claim, view: &View, now_ms: u64) {
        self.queue.retain(|entry| entry.claim != claim);
        self.grant(view, now_ms);
    }

    /// What the claim has; none when it was released, or when a newer stream of its proxy took its place.
    pub(crate) fn get(&self, claim: Claim, view: &View) -> Option<Hold> {
        let position = self.queue.iter().position(|entry| entry.claim == claim)?;
        let entry = &self.queue[position];
        Some(self.hold(entry, position, view))
    }

    /// Everybody, with what they have.
    pub(crate) fn all(&self, view: &View) -> Vec<(String, Hold)> {
        let all = self.queue.iter().enumerate();
        all.map(|(position, entry)| {
            let hold = self.hold(entry, position, view);
            (entry.wish.proxy.clone(), hold)
        })
        .collect()
    }

    fn hold(&self, entry: &Entry, position: usize, view: &View) -> Hold {
        if entry.epoch == 0 {
            return Hold::Waiting(self.waits_for(entry, position, view));
        }
        let wanted = u32::try_from(entry.slices.len()).unwrap_or(u32::MAX);
        Hold::Held {
            epoch: entry.epoch,
            slices: entry.slices.clone(),
            needed: wanted.saturating_sub(entry.wish.elastic).max(1),
        }
    }

    /// Gives slices to those that wait, in order, until one cannot have what it wants.
    pub(crate) fn grant(&mut self, view: &View, now_ms: u64) {
        while let Some((next, resumed, slices)) = self.next(view) {
            let epoch = resumed.unwrap_or_else(|| now_ms.max(self.last_epoch.saturating_add(1)));
            self.last_epoch = self.last_epoch.max(epoch);
            self.given
                .extend(slices.iter().map(|&slice| (slice, epoch)));
            self.ours.insert(epoch);
            let entry = &mut self.queue[next];
            entry.epoch = epoch;
            entry.slices = slices;
        }
    }

    /// Who is given slices now, under which epoch if it had one, and which.
    fn next(&self, view: &View) -> Option<(usize, Option<u64>, Vec<u32>)> {
        let waiting = || {
            let all = self.queue.iter().enumerate();
            all.filter(|(_, entry)| entry.epoch == 0)
        };
        // Who comes back to its own waits behind nobody.
        let back = waiting().find_map(|(index, entry)| {
            let slices = self.resumed(&entry.wish, view)?;
            Some((index, Some(entry.wish.resume), slices))
        });
        back.or_else(|| {
            let (index, entry) = waiting().next()?;
            Some((index, None, self.fitting(&entry.wish, view)?))
        })
    }

    /// What a proxy had before and may go on with: an epoch of before a restart is greater than any given since, or another
    /// proxy has had the slices.
    fn resumed(&self, wish: &Wish, view: &View) -> Option<Vec<u32>> {
        let slices = match wish.slices {
            None => (0..self.slices).collect(),
            Some(_) => wish.resume_slices.clone(),
        };
        let wanted = wish.slices.unwrap_or(self.slices) as usize;
        let fine = |slice: &u32| {
            *slice < self.slices
                && self.is_free(*slice, wish.resume, view)
                && self
                    .given
                    .get(slice)
                    .is_none_or(|&given| given <= wish.resume)
        };
        let may = wish.resume != 0 && slices.len() == wanted && slices.iter().all(fine);
        may.then_some(slices)
    }

    /// Slices that are free for a proxy: whole ones first, then, as far as it does without, others.
    fn fitting(&self, wish: &Wish, view: &View) -> Option<Vec<u32>> {
        let free: Vec<u32> = self.free(view);
        let Some(wanted) = wish.slices else {
            // All, whoever of their workers is there.
            return (free.len() == self.slices as usize).then_some(free);
        };
        let (mut whole, others): (Vec<u32>, Vec<u32>) = free
            .into_iter()
            .partition(|slice| view.whole.contains(slice));
        let needed = wanted.saturating_sub(wish.elastic).max(1) as usize;
        if whole.len() < needed || whole.len() + others.len() < wanted as usize {
            return None;
        }
        whole.extend(others);
        whole.truncate(wanted as usize);
        whole.sort_unstable();
        Some(whole)
    }

    fn free(&self, view: &View) -> Vec<u32> {
        (0..self.slices)
            .filter(|&slice| self.is_free(slice, 0, view))
            .collect()
    }

    /// Whether nobody has the slice, or only the proxy with this epoch.
    fn is_free(&self, slice: u32, epoch: u64, view: &View) -> bool {
        let held = self.queue.iter().any(|entry| entry.slices.contains(&slice));
        let served = view.epochs.get(&slice);
        !held && served.is_none_or(|served| *served == epoch || self.ours.contains(served))
    }

    fn waits_for(&self, entry: &Entry, position: usize, view: &View) -> String {
        let wanted = entry.wish.slices.unwrap_or(self.slices);
        let holders: Vec<String> = self
            .queue
            .iter()
            .filter(|other| other.epoch != 0)
            .map(|other| format!("proxy {} holds {}", other.wish.proxy, other.slices.len()))
            .collect();
        let free = self.free(view);
        let whole = free
            .iter()
            .filter(|slice| view.whole.contains(slice))
            .count();
        let ahead = self
            .queue
            .iter()
            .take(position)
            .filter(|other| other.epoch == 0);
        let ahead = match ahead.count() {
            0 => String::new(),
            ahead => format!("; {ahead} more before this one"),
        };
        let mut why = holders;
        why.push(format!("{whole} free with all workers"));
        let not_there = free.len() - whole;
        if not_there > 0 {
            why.push(format!("{not_there} free without"));
        }
        let foreign = view
            .epochs
            .values()
            .filter(|epoch| !self.ours.contains(epoch))
            .count();
        if foreign > 0 {
            why.push(format!("{foreign} kept for a proxy that is to come back"));
        }
        format!(
            "waiting for {wanted} of {} slice(s): {}{ahead}",
            self.slices,
            why.join(", ")
        )
    }
}

#[cfg(test)]
mod tests;
