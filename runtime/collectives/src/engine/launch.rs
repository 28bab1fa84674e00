//! What one launch has under way on this process.

use super::exchange::{Exchange, Reduced, Reducer, Slot, Use, lock};
use super::gather::Gather;
use super::reduce;
use super::step::{Step, View};
use crate::call::{Failure, Outputs};
use crate::op::Op;
use crate::scratch::Pool;
use crate::transport::{Key, Process};
use bytes::{Bytes, BytesMut};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release},
};
use std::sync::{Arc, Mutex};

/// How many pieces of one launch may be asked for before they are offered. Partitions ask for those of the operations that
/// they are at, which are far fewer.
const MOST_ASKED: usize = 1 << 20;

/// Bytes of a piece that can go now.
pub(super) struct Action {
    pub(super) key: Key,
    pub(super) offset: u64,
    pub(super) bytes: Bytes,
}

/// A piece for another partition.
struct Offer {
    /// Whether the target has asked for it.
    ready: bool,
    /// What there is of it and was not sent.
    held: Vec<(u64, Bytes)>,
    /// Bytes that were not sent, whether there yet or not.
    left: u64,
}

/// A launch.
pub(super) struct State {
    pub(super) number: u64,
    pub(super) placement: Arc<[Process]>,
    pub(super) failed: Arc<AtomicBool>,
    pub(super) gather: Gather,
    pool: Pool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// How often each partition has run each operation.
    executions: HashMap<(u32, u32), u64>,
    offers: HashMap<Key, Offer>,
    /// Pieces that were asked for before they were offered.
    asked: HashSet<Key>,
    slots: HashMap<Key, Arc<Slot>>,
    failure: Option<Failure>,
    closed: bool,
}

/// What a call that has started has to do next.
pub(super) struct Started {
    /// Pieces to ask for.
    pub(super) asks: Vec<Key>,
    pub(super) actions: Vec<Action>,
    /// The partition's own parts of reductions.
    pub(super) own: Vec<Own>,
}

/// A partition's own part of a reduction that it makes.
pub(super) struct Own {
    pub(super) key: Key,
    pub(super) exchange: Arc<Exchange>,
    pub(super) reducer: Arc<Reducer>,
    pub(super) member: usize,
    pub(super) bytes: Bytes,
}

impl std::fmt::Debug for State {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let inner = lock(&self.inner);
        out.debug_struct("State")
            .field("number", &self.number)
            .field("offers", &inner.offers.len())
            .field("slots", &inner.slots.len())
            .field("failure", &inner.failure)
            .finish_non_exhaustive()
    }
}

/// The bytes of a view of `from`: a part of it where they lie together, else a copy.
fn piece(from: &Bytes, view: &View) -> Bytes {
    if view.is_whole() {
        return from.slice(view.start..view.start + view.len);
    }
    let mut packed = BytesMut::with_capacity(view.len);
    view.runs(0, view.len, |place, _, count| {
        packed.extend_from_slice(&from[place..place + count]);
    });
    packed.freeze()
}

/// Does the steps that need nobody else.
pub(super) fn copies(steps: &[Step], inputs: &[Bytes], outputs: &mut dyn Outputs) {
    for step in steps {
        match step {
            Step::Copy {
                input,
                from,
                output,
                to,
            } => {
                let bytes = piece(&inputs[*input], from);
                let memory = outputs.get(*output);
                to.runs(0, to.len, |place, at, count| {
                    memory[place..place + count].copy_from_slice(&bytes[at..at + count]);
                });
            }
            Step::Zero { output } => outputs.get(*output).fill(0),
            Step::Number { output, value } => {
                outputs.get(*output).copy_from_slice(&value.to_le_bytes());
            }
            Step::Send { .. } | Step::Receive { .. } | Step::Reduce(_) => {}
        }
    }
}

impl State {
    pub(super) fn new(number: u64, placement: Arc<[Process]>, pool: Pool) -> Arc<Self> {
        Arc::new(Self {
            number,
            placement,
            failed: Arc::default(),
            gather: Gather::default(),
            pool,
            inner: Mutex::default(),
        })
    }

    pub(super) fn process_of(&self, partition: u32) -> Option<Process> {
        self.placement.get(partition as usize).copied()
    }

    pub(super) fn is_failed(&self) -> bool {
        self.failed.load(Acquire)
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        lock(&self.inner).failure.clone()
    }

    /// Starts a call whose local steps are done. `None` if there is nothing more to do, because the launch has failed or
    /// the call needs nobody.
    pub(super) fn start(
        &self,
        op: &Op,
        partition: u32,
        steps: Vec<Step>,
        inputs: &[Bytes],
        outputs: Box<dyn Outputs>,
        done: Box<dyn FnOnce(Result<(), Failure>) + Send>,
    ) -> Option<Started> {
        let left = steps
            .iter()
            .filter(|step| match step {
                Step::Receive { to, .. } => to.len > 0,
                Step::Reduce(_) => true,
                _ => false,
            })
            .count();
        let exchange = Exchange::new(outputs, left.max(1), done);
        // Copies, where there are some, are made outside of the lock.
        let pieces: Vec<Bytes> = steps
            .iter()
            .map(|step| match step {
                Step::Send { input, from, .. } => piece(&inputs[*input], from),
                Step::Reduce(reduce) => piece(&inputs[reduce.input], &reduce.from),
                _ => Bytes::new(),
            })
            .collect();
        let mut inner = lock(&self.inner);
        if let Some(failure) = inner.failure.clone() {
            drop(inner);
            exchange.fail(failure);
            return None;
        }
        let execution = inner.executions.entry((partition, op.number)).or_default();
        let base = Key {
            launch: self.number,
            execution: *execution,
            op: op.number,
            lane: 0,
            source: partition,
            target: partition,
        };
        *execution += 1;
        let mut started = Started {
            asks: Vec::new(),
            actions: Vec::new(),
            own: Vec::new(),
        };
        for (step, bytes) in steps.into_iter().zip(pieces) {
            match step {
                Step::Copy { .. } | Step::Zero { .. } | Step::Number { .. } => {}
                Step::Send {
                    lane, target, from, ..
                } => {
                    let key = Key {
                        lane,
                        target,
                        ..base
                    };
                    let held = vec![(0, bytes)];
                    started
                        .actions
                        .extend(inner.offer(key, from.len as u64, held));
                }
                Step::Receive {
                    lane,
                    source,
                    output,
                    to,
                } => {
                    let key = Key {
                        lane,
                        source,
                        ..base
                    };
                    let usage = Use::Place { output, view: to };
                    if to.len > 0 {
                        let slot = Slot::new(Arc::clone(&exchange), usage, to.len);
                        inner.slots.insert(key, slot);
                        started.asks.push(key);
                    }
                }
                Step::Reduce(reduce) => {
                    // `plan` has looked whether there is such a reduction.
                    let Some(fold) = op
                        .reduction
                        .and_then(|reduction| reduce::fold(reduction, reduce.element).ok())
                    else {
                        continue;
                    };
                    let key = Key {
                        lane: reduce.lane,
                        ..base
                    };
                    if let Some(lane) = reduce.publish {
                        for target in &reduce.members {
                            if *target != partition {
                                let key = Key {
                                    lane,
                                    target: *target,
                                    ..base
                                };
                                let none = inner.offer(key, reduce.len as u64, Vec::new());
                                debug_assert!(none.is_empty(), "nothing is reduced yet");
                            }
                        }
                    }
                    let reducer = Reducer::new(reduce, fold, self.pool.clone());
                    for (member, source) in reducer.reduce.members.iter().enumerate() {
                        if *source == partition {
                            started.own.push(Own {
                                key,
                                exchange: Arc::clone(&exchange),
                                reducer: Arc::clone(&reducer),
                                member,
                                bytes: bytes.clone(),
                            });
                            continue;
                        }
                        let key = Key {
                            source: *source,
                            ..key
                        };
                        let usage = Use::Reduce {
                            reducer: Arc::clone(&reducer),
                            member,
                        };
                        let slot = Slot::new(Arc::clone(&exchange), usage, reducer.reduce.len);
                        inner.slots.insert(key, slot);
                        started.asks.push(key);
                    }
                }
            }
        }
        drop(inner);
        if left == 0 {
            exchange.arrived();
        }
        Some(started)
    }

    /// The target of a piece has asked for it. `None` if too much was asked for that is not there.
    pub(super) fn ready(&self, key: Key) -> Option<Vec<Action>> {
        lock(&self.inner).ready(key)
    }

    /// A chunk that was reduced goes to the other members.
    pub(super) fn publish(
        &self,
        key: &Key,
        lane: u32,
        members: &[u32],
        reduced: &Reduced,
    ) -> Vec<Action> {
        let mut inner = lock(&self.inner);
        let mut actions = Vec::new();
        for target in members {
            let key = Key {
                lane,
                source: key.target,
                target: *target,
                ..*key
            };
            if let Some(offer) = inner.offers.get_mut(&key) {
                offer
                    .held
                    .push((reduced.offset as u64, reduced.bytes.clone()));
                actions.extend(inner.release(key));
            }
        }
        actions
    }

    pub(super) fn slot(&self, key: &Key) -> Option<Arc<Slot>> {
        lock(&self.inner).slots.get(key).cloned()
    }

    pub(super) fn remove_slot(&self, key: &Key) {
        lock(&self.inner).slots.remove(key);
    }

    /// Marks the launch as failed; the calls that wait are the caller's to end.
    pub(super) fn fail(&self, failure: &Failure) -> Vec<Arc<Exchange>> {
        self.failed.store(true, Release);
        let (slots, offers) = {
            let mut inner = lock(&self.inner);
            inner.failure.get_or_insert_with(|| failure.clone());
            inner.asked.clear();
            (
                std::mem::take(&mut inner.slots),
                std::mem::take(&mut inner.offers),
            )
        };
        // Memory is let go of outside of the lock.
        drop(offers);
        slots
            .into_values()
            .map(|slot| Arc::clone(&slot.exchange))
            .collect()
    }

    /// No more calls will start. Whether calls are under way.
    pub(super) fn close(&self) -> bool {
        let mut inner = lock(&self.inner);
        inner.closed = true;
        inner.failure.is_none() && !inner.slots.is_empty()
    }

    /// Whether no more calls will start and nothing is left that others will ask for.
    pub(super) fn is_over(&self) -> bool {
        let inner = lock(&self.inner);
        inner.closed && inner.offers.is_empty() && inner.slots.is_empty()
    }
}

impl Inner {
    /// Offers a piece of `len` bytes, of which `held` are there.
    fn offer(&mut self, key: Key, len: u64, held: Vec<(u64, Bytes)>) -> Vec<Action> {
        if len == 0 || self.failure.is_some() {
            return Vec::new();
        }
        let ready = self.asked.remove(&key);
        let offer = Offer {
            ready,
            held,
            left: len,
        };
        self.offers.insert(key, offer);
        self.release(key)
    }

    fn ready(&mut self, key: Key) -> Option<Vec<Action>> {
        if self.failure.is_some() {
            return Some(Vec::new());
        }
        match self.offers.get_mut(&key) {
            Some(offer) => offer.ready = true,
            None if self.asked.len() < MOST_ASKED => {
                self.asked.insert(key);
                return Some(Vec::new());
            }
            None => return None,
        }
        Some(self.release(key))
    }

    /// What can go of an offer.
    fn release(&mut self, key: Key) -> Vec<Action> {
        let Some(offer) = self.offers.get_mut(&key).filter(|offer| offer.ready) else {
            return Vec::new();
        };
        let actions: Vec<_> = offer
            .held
            .drain(..)
            .map(|(offset, bytes)| Action { key, offset, bytes })
            .collect();
        let sent: u64 = actions.iter().map(|action| action.bytes.len() as u64).sum();
        offer.left = offer.left.saturating_sub(sent);
        if offer.left == 0 {
            self.offers.remove(&key);
        }
        actions
    }
}
