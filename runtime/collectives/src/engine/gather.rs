//! A launch is not started before all its processes can start it.
//!
//! A part that runs takes its devices, and with them holds up what comes behind. If it waited there for another process
//! whose part still needs something (an array that is on its way, say, perhaps from behind that very part), both would
//! wait for ever. So each process says when its part can start without anything from outside, and starts it when all
//! have said so. What runs then ends by itself.

use super::exchange::lock;
use super::launch::State;
use super::{EARLY, Engine, Table};
use crate::call::{Code, Failure};
use crate::transport::{Message, Process};
use std::collections::HashSet;
use std::sync::Mutex;

/// What is done when all processes can start, or when the launch has failed before.
type Then = Box<dyn FnOnce(Result<(), Failure>) + Send>;

/// Who can start a launch.
#[derive(Default)]
pub(super) struct Gather(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    here: HashSet<Process>,
    then: Option<Then>,
}

impl Gather {
    /// Whether the launch is not started because others cannot start theirs yet.
    pub(super) fn waits(&self) -> bool {
        lock(&self.0).then.is_some()
    }

    pub(super) fn when(&self, then: Then) {
        lock(&self.0).then = Some(then);
    }

    /// A process can start its part.
    pub(super) fn add(&self, process: Process) {
        lock(&self.0).here.insert(process);
    }

    /// Whether a process has said that it can start its part.
    pub(super) fn has(&self, process: Process) -> bool {
        lock(&self.0).here.contains(&process)
    }

    /// Forgets that a process can start its part, if the launch waits; it will say so again. False if the launch has begun.
    pub(super) fn forgets(&self, process: Process) -> bool {
        let mut inner = lock(&self.0);
        let waits = inner.then.is_some();
        if waits {
            inner.here.remove(&process);
        }
        waits
    }

    fn take_if_all(&self, placement: &[Process]) -> Option<Then> {
        let mut inner = lock(&self.0);
        // Looked through once or twice a launch, and shorter than what a launch does else.
        if inner.here.len() > 1 && placement.iter().all(|each| inner.here.contains(each)) {
            return inner.then.take();
        }
        None
    }

    /// Tells who waits why the launch has failed.
    pub(super) fn fail(&self, failure: &Failure) {
        let then = lock(&self.0).then.take();
        if let Some(then) = then {
            then(Err(failure.clone()));
        }
    }
}

impl Table {
    /// Who can start a launch that was not open here.
    pub(super) fn drop_here(&mut self, launch: u64) -> Vec<Process> {
        let here = self.here.remove(&launch).unwrap_or_default();
        self.here_count -= here.len();
        here
    }

    /// Forgets what a process that is gone could start.
    pub(super) fn drop_here_from(&mut self, process: Process) {
        let mut dropped = 0;
        self.here.retain(|_, processes| {
            let before = processes.len();
            processes.retain(|from| *from != process);
            dropped += before - processes.len();
            !processes.is_empty()
        });
        self.here_count -= dropped;
    }
}

impl Engine {
    /// Fails a launch that this process cannot open, since it does not know where the partitions lie: tells `others`.
    pub fn refuse(
        &self,
        number: u64,
        others: impl IntoIterator<Item = Process>,
        failure: &Failure,
    ) {
        self.end(number, failure.clone(), false);
        for process in others {
            // One that cannot be told is lost, and others will hear of that.
            let message = Message::Fail(number, failure.clone());
            let _ = self.0.transport.send(process, message);
        }
    }

    /// Another process can start its part.
    pub(super) fn here_from(&self, from: Process, number: u64) {
        let mut table = lock(&self.0.table);
        if let Some(state) = table.open.get(&number).cloned() {
            drop(table);
            if state.placement.contains(&from) {
                self.came(&state, from);
            }
            return;
        }
        if let Some(outcome) = table.outcome(number) {
            drop(table);
            self.tell_again(from, number, outcome);
            return;
        }
        if table.here_count < EARLY {
            table.here.entry(number).or_default().push(from);
            table.here_count += 1;
            return;
        }
        let failure = Failure::new(
            Code::ResourceExhausted,
            format!(
                "launch {number} is not open on process {}, and too many others are not either",
                self.0.me.0
            ),
        );
        table.end(number, Some(failure.clone()));
        drop(table);
        let _ = self.0.transport.send(from, Message::Fail(number, failure));
    }

    /// Tells a process that goes on with a launch that has failed here. It was told before, but the connection to it may have
    /// been lost then, and others have been made since.
    pub(super) fn tell_again(&self, to: Process, number: u64, outcome: Option<Failure>) {
        if let Some(failure) = outcome {
            let _ = self.0.transport.send(to, Message::Fail(number, failure));
        }
    }

    /// This process can start its part of a launch.
    pub(super) fn here(&self, state: &State) {
        // First: what cannot be said now, for want of a connection, is said when there is one.
        state.gather.add(self.0.me);
        let mut told = HashSet::from([self.0.me]);
        for process in state.placement.iter() {
            if !told.insert(*process) {
                continue;
            }
            let sent = self.0.transport.send(*process, Message::Here(state.number));
            if let Err(failure) = sent
                && failure.code() != Code::DataLoss
            {
                self.end(state.number, failure, true);
            }
        }
        self.came(state, self.0.me);
    }

    /// A process can start its part of a launch that is open here.
    pub(super) fn came(&self, state: &State, from: Process) {
        state.gather.add(from);
        if let Some(then) = state.gather.take_if_all(&state.placement) {
            then(state.failure().map_or(Ok(()), Err));
        }
    }
}
