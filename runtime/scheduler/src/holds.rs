//! Which proxy holds which slices, who waits, and lease epochs. Pure: the caller brings the time, and what is known of the
//! slices.
//!
//! A slice belongs to one proxy at a time. Who wants slices that are not free waits, and those that come later wait behind
//! it, by their tickets. An epoch is given with the slices, not with the request, and is greater than every one given
//! before, and than every one that a worker has served.
//!
//! A proxy that says goodbye gives its slices back. One whose stream broke without it keeps them for a lease, and goes on with
//! its epoch when it is back by then; unless its workers, which served it, say that they do so no more: then it has died. After
//! the lease it may still go on as long as no other proxy was given a slice of it. A resource manager that starts anew does not
//! know who has what. Workers tell it which epoch they serve, and such slices wait for their proxy; of two proxies that
//! say that they had the same slices, the one with the greater epoch had them last. For its first lease it gives out only
//! slices whose workers have all come and are new, and none once it has heard from anybody that it is not the first.

mod text;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use crate::cluster::Place;

/// One proxy's request, until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim(u64);

/// What time it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    /// Unix time in milliseconds. Epochs and tickets start from it, so that they go on growing when the resource manager starts
    /// anew without memory of those that it gave.
    pub(crate) unix_ms: u64,
    /// Since the resource manager has started.
    pub(crate) up: Duration,
}

/// What a proxy asks for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wish {
    /// Names it to others.
    pub(crate) proxy: String,
    /// The proxy's process; 0: not told.
    pub(crate) instance: u64,
    /// How many slices; none: all.
    pub(crate) slices: Option<u32>,
    /// What they are to be; empty: any.
    pub(crate) kind: String,
    /// So many of them may be missing.
    pub(crate) elastic: u32,
    /// Its place in the queue, if it had one.
    pub(crate) ticket: u64,
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
    /// The greatest epoch that they have ever served, where they have.
    pub(crate) last: BTreeMap<u32, u64>,
    /// What the workers that are there say themselves.
    pub(crate) workers: BTreeMap<Place, Says>,
    /// A worker has been with a resource manager before it came to this one.
    pub(crate) again: bool,
}

/// Epochs, 0 for none, as a worker says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Says {
    /// What it serves.
    pub(crate) serves: u64,
    /// The greatest that it has served.
    pub(crate) last: u64,
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
    /// Nothing yet; all slices will be its own when their workers are there, or the first lease is over.
    Expecting,
    /// Nothing yet, and why.
    Waiting(String),
}

#[derive(Debug)]
struct Entry {
    claim: Claim,
    wish: Wish,
    /// Orders those that wait.
    ticket: u64,
    /// Zero for those that wait.
    epoch: u64,
    slices: Vec<u32>,
    /// It says that it had them before: a resource manager before this one may have given them to another proxy since.
    resumed: bool,
    /// Workers that have been seen to serve it.
    served: BTreeSet<Place>,
    /// Its stream broke, and until then it may come back.
    broken: Option<Duration>,
}

/// Those that hold slices and those that wait, each in order.
#[derive(Debug)]
pub(crate) struct Holds {
    slices: u32,
    lease: Duration,
    queue: VecDeque<Entry>,
    last_epoch: u64,
    last_ticket: u64,
    /// The last epoch under which a slice was given away.
    given: BTreeMap<u32, u64>,
    /// Epochs given by this resource manager.
    ours: BTreeSet<u64>,
    /// A proxy has been with a resource manager before this one.
    again: bool,
    next_claim: u64,
}

impl Holds {
    /// `lease`: how long slices are kept for a proxy that is not heard of.
    pub(crate) fn new(slices: u32, lease: Duration) -> Holds {
        Holds {
            slices,
            lease,
            queue: VecDeque::new(),
            last_epoch: 0,
            last_ticket: 0,
            given: BTreeMap::new(),
            ours: BTreeSet::new(),
            again: false,
            next_claim: 0,
        }
    }

    /// Adds a proxy.
    pub(crate) fn claim(&mut self, wish: Wish, view: &View, now: Now) -> Claim {
        let claim = Claim(self.next_claim);
        self.next_claim += 1;
        // A stream that broke, with a word or without, is still there when its proxy comes back: the new one takes its place.
        let known = self.queue.iter_mut().find(|entry| {
            let same = wish.instance != 0 && entry.wish.instance == wish.instance;
            same || (wish.resume != 0 && entry.epoch == wish.resume)
        });
        if let Some(entry) = known {
            entry.claim = claim;
            entry.broken = None;
            return claim;
        }
        self.again |= wish.ticket != 0 || wish.resume != 0;
        self.outdate(&wish, now);
        // Who has had its turn, and lost what it got, is last again.
        let ticket = match (wish.ticket, wish.resume) {
            (1.., 0) => wish.ticket,
            _ => self.last_place(now),
        };
        self.last_ticket = self.last_ticket.max(ticket);
        let mut entries = self.queue.iter();
        let behind = entries.position(|entry| entry.epoch == 0 && entry.ticket > ticket);
        let entry = Entry {
            claim,
            wish,
            ticket,
            epoch: 0,
            slices: Vec::new(),
            resumed: false,
            served: BTreeSet::new(),
            broken: None,
        };
        self.queue.insert(behind.unwrap_or(self.queue.len()), entry);
        self.grant(view, now);
        // A proxy that was told that its slices are lost lets go of what it had there.
        let mut entries = self.queue.iter_mut();
        if let Some(lost) = entries.find(|entry| entry.claim == claim && entry.epoch == 0) {
            lost.wish.resume = 0;
        }
        claim
    }

    /// The claim's stream has ended, who knows why: what it holds is kept for a lease.
    pub(crate) fn broke(&mut self, claim: Claim, view: &View, now: Now) {
        let keeps = |entry: &Entry| entry.claim != claim || entry.epoch != 0;
        self.queue.retain(keeps);
        let mut entries = self.queue.iter_mut();
        if let Some(entry) = entries.find(|entry| entry.claim == claim) {
            entry.broken = Some(now.up + self.lease);
        }
        self.grant(view, now);
    }

    /// A proxy says goodbye; others may get what it held.
    pub(crate) fn give_back(&mut self, instance: u64, view: &View, now: Now) {
        self.queue
            .retain(|entry| instance == 0 || entry.wish.instance != instance);
        self.grant(view, now);
    }

    /// What the claim has, and its ticket; none when it is over, or when a newer stream of its proxy took its place.
    pub(crate) fn get(&self, claim: Claim, view: &View, now: Now) -> Option<(u64, Hold)> {
        let position = self.queue.iter().position(|entry| entry.claim == claim)?;
        let entry = &self.queue[position];
        Some((entry.ticket, self.hold(entry, position, view, now)))
    }

    /// Everybody, with what they have.
    pub(crate) fn all(&self, view: &View, now: Now) -> Vec<(String, Hold)> {
        let all = self.queue.iter().enumerate();
        all.map(|(position, entry)| {
            let hold = self.hold(entry, position, view, now);
            (entry.wish.proxy.clone(), hold)
        })
        .collect()
    }

    /// When something changes by itself: [`Self::grant`] is to be called then.
    pub(crate) fn next_change(&self, now: Now) -> Option<Duration> {
        let broken = self.queue.iter().filter_map(|entry| entry.broken);
        let young = Some(self.lease).filter(|_| self.is_young(now));
        broken.chain(young).min()
    }

    fn hold(&self, entry: &Entry, position: usize, view: &View, now: Now) -> Hold {
        if entry.epoch == 0 {
            let others = self.queue.len() > 1 || !view.epochs.is_empty();
            return match entry.wish.slices {
                None if !others && !self.is_anew(view, now) => Hold::Expecting,
                _ => Hold::Waiting(self.waits_for(entry, position, view, now)),
            };
        }
        let wanted = u32::try_from(entry.slices.len()).unwrap_or(u32::MAX);
        Hold::Held {
            epoch: entry.epoch,
            slices: entry.slices.clone(),
            needed: wanted.saturating_sub(entry.wish.elastic).max(1),
        }
    }

    /// Gives slices to those that wait, in order, until one cannot have what it wants.
    pub(crate) fn grant(&mut self, view: &View, now: Now) {
        let served = view.last.values().copied().max();
        self.last_epoch = self.last_epoch.max(served.unwrap_or(0));
        self.end_broken(view, now);
        self.end_outdated(view, now);
        self.renew(view, now);
        while let Some((next, resumed, slices)) = self.next(view, now) {
            let epoch = resumed.unwrap_or_else(|| self.next_epoch(now));
            self.last_epoch = self.last_epoch.max(epoch);
            self.give(next, epoch, slices);
            self.queue[next].resumed = resumed.is_some();
        }
    }

    /// The ticket of one that comes behind all others.
    fn last_place(&self, now: Now) -> u64 {
        now.unix_ms.max(self.last_ticket.saturating_add(1))
    }

    fn next_epoch(&self, now: Now) -> u64 {
        now.unix_ms.max(self.last_epoch.saturating_add(1))
    }

    fn give(&mut self, next: usize, epoch: u64, slices: Vec<u32>) {
        self.given
            .extend(slices.iter().map(|&slice| (slice, epoch)));
        self.ours.insert(epoch);
        let entry = &mut self.queue[next];
        entry.epoch = epoch;
        entry.slices = slices;
        entry.resumed = false;
        entry.served.clear();
    }

    /// A proxy comes back with a newer epoch than another that was believed before it: that one has lost the slices to it.
    fn outdate(&mut self, wish: &Wish, now: Now) {
        let theirs = |slice: &u32| wish.slices.is_none() || wish.resume_slices.contains(slice);
        let older = self.queue.iter().filter(|entry| {
            entry.resumed && entry.epoch < wish.resume && entry.slices.iter().any(theirs)
        });
        let older = older.map(|entry| entry.claim).collect();
        self.lose(older, now);
    }

    /// Proxies that were believed before their workers had come, which serve another that was given the slices later.
    fn end_outdated(&mut self, view: &View, now: Now) {
        let outdated = self.queue.iter().filter(|entry| {
            let mut serve = entry.slices.iter().filter_map(|s| view.epochs.get(s));
            let newer = |served: &u64| *served > entry.epoch && !self.ours.contains(served);
            entry.resumed && serve.any(newer)
        });
        let outdated = outdated.map(|entry| entry.claim).collect();
        self.lose(outdated, now);
    }

    /// They have nothing more, and wait behind all others.
    fn lose(&mut self, claims: Vec<Claim>, now: Now) {
        for claim in claims {
            let position = self.queue.iter().position(|entry| entry.claim == claim);
            let Some(mut entry) = position.and_then(|at| self.queue.remove(at)) else {
                continue;
            };
            // As when a stream breaks that has nothing.
            if entry.broken.is_some() {
                continue;
            }
            entry.ticket = self.last_place(now);
            self.last_ticket = entry.ticket;
            entry.wish.resume = 0;
            entry.epoch = 0;
            entry.slices.clear();
            entry.resumed = false;
            entry.served.clear();
            self.queue.push_back(entry);
        }
    }

    /// Ends the holds of proxies that have been away for too long, or have died.
    fn end_broken(&mut self, view: &View, now: Now) {
        self.queue.retain_mut(|entry| {
            let epoch = entry.epoch;
            let serve = view.workers.iter().filter(|(place, says)| {
                epoch != 0 && entry.slices.contains(&place.slice) && says.serves == epoch
            });
            entry.served.extend(serve.map(|(place, _)| *place));
            // Those that went while the proxy was heard of have nothing to say of its end.
            if entry.broken.is_none() {
                let knows = |says: &Says| says.last >= epoch;
                entry
                    .served
                    .retain(|p| view.workers.get(p).is_some_and(knows));
            }
            // One that is gone, and one that has come anew in its place, say nothing.
            let ends = |place| {
                let says = view.workers.get(place);
                says.is_some_and(|says| says.last >= epoch && says.serves != epoch)
            };
            let died = !entry.served.is_empty() && entry.served.iter().all(ends);
            entry.broken.is_none_or(|until| now.up < until && !died)
        });
    }

    /// Workers refuse what is older than they have served. The clock of a resource manager of before may have gone ahead of
    /// this one's: a proxy that was given slices before that was known is given them anew.
    fn renew(&mut self, view: &View, now: Now) {
        for index in 0..self.queue.len() {
            let entry = &self.queue[index];
            let mut last = entry.slices.iter().filter_map(|s| view.last.get(s));
            if entry.epoch != 0 && last.any(|last| *last > entry.epoch) {
                let epoch = self.next_epoch(now);
                self.last_epoch = epoch;
                self.give(index, epoch, self.queue[index].slices.clone());
            }
        }
    }

    /// Who is given slices now, under which epoch if it had one, and which.
    fn next(&self, view: &View, now: Now) -> Option<(usize, Option<u64>, Vec<u32>)> {
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
            Some((index, None, self.fitting(&entry.wish, view, now)?))
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
        let not_newer = |of: &BTreeMap<u32, u64>, slice: &u32| {
            of.get(slice).is_none_or(|&epoch| epoch <= wish.resume)
        };
        let fine = |slice: &u32| {
            *slice < self.slices
                && !self.is_held(*slice)
                && not_newer(&self.given, slice)
                && not_newer(&view.last, slice)
        };
        let may = wish.resume != 0 && slices.len() == wanted && slices.iter().all(fine);
        may.then_some(slices)
    }

    /// Slices that are free for a proxy: whole ones first, then, as far as it does without, others.
    fn fitting(&self, wish: &Wish, view: &View, now: Now) -> Option<Vec<u32>> {
        if self.is_anew(view, now) {
            return None;
        }
        let free: Vec<u32> = self.free(view);
        let (mut whole, others): (Vec<u32>, Vec<u32>) = free
            .into_iter()
            .partition(|slice| view.whole.contains(slice));
        let wanted = wish.slices.unwrap_or(self.slices) as usize;
        let needed = match wish.slices {
            // A slice whose workers have not come may be another proxy's.
            _ if self.is_young(now) => wanted,
            // All, whoever of their workers is there.
            None => 0,
            Some(wanted) => wanted.saturating_sub(wish.elastic).max(1) as usize,
        };
        if whole.len() < needed || whole.len() + others.len() < wanted {
            return None;
        }
        whole.extend(others);
        whole.truncate(wanted);
        whole.sort_unstable();
        Some(whole)
    }

    fn free(&self, view: &View) -> Vec<u32> {
        let is_free = |slice: &u32| {
            // One that serves a proxy of before is kept for it.
            let served = view.epochs.get(slice);
            !self.is_held(*slice) && served.is_none_or(|served| self.ours.contains(served))
        };
        (0..self.slices).filter(is_free).collect()
    }

    fn is_held(&self, slice: u32) -> bool {
        self.queue.iter().any(|entry| entry.slices.contains(&slice))
    }

    /// Those that had slices of a resource manager of before may not have come yet.
    fn is_young(&self, now: Now) -> bool {
        now.up < self.lease
    }

    /// There was a resource manager before this one, and those that had slices of it may not have come yet.
    fn is_anew(&self, view: &View, now: Now) -> bool {
        self.is_young(now) && (self.again || view.again)
    }
}

#[cfg(test)]
mod tests;
