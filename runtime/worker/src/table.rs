//! The shard table's values. They live on the dispatch thread alone, hence `Rc` and `Cell`.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use waystation_pjrt::Buffer;

use crate::{
    counters::{self, Counters},
    status::Fault,
};

/// One device's piece of an array: the value behind a shard id. The table forgets the id when the proxy drops it; an op
/// that needs the value holds the slot.
#[derive(Debug)]
pub(crate) struct Slot {
    state: RefCell<State>,
    /// Waiting ops that will read the value: while there are any, an execution must not take the buffer over.
    holds: Cell<u32>,
}

/// What is known of a shard.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// Not there yet. `soon`: it comes out of executions that need nothing from outside this worker.
    Pending { soon: bool },
    /// The plugin has a buffer for it, whose content may still be under way.
    Ready(Rc<Shard>),
    /// It will never be there.
    Failed(Fault),
}

#[derive(Debug)]
enum State {
    Pending { soon: bool, waits: Vec<u64> },
    Ready(Rc<Shard>),
    Failed(Fault),
}

impl Slot {
    pub(crate) fn pending(soon: bool) -> Rc<Slot> {
        Slot::new(State::Pending {
            soon,
            waits: Vec::new(),
        })
    }

    pub(crate) fn failed(fault: Fault) -> Rc<Slot> {
        Slot::new(State::Failed(fault))
    }

    fn new(state: State) -> Rc<Slot> {
        Rc::new(Slot {
            state: RefCell::new(state),
            holds: Cell::new(0),
        })
    }

    /// The value now. A buffer whose making is known to have failed reads as failed.
    pub(crate) fn value(&self) -> Value {
        match &*self.state.borrow() {
            State::Pending { soon, .. } => Value::Pending { soon: *soon },
            State::Failed(fault) => Value::Failed(Arc::clone(fault)),
            State::Ready(shard) => match shard.origin.fault() {
                Some(fault) => Value::Failed(fault),
                None => Value::Ready(Rc::clone(shard)),
            },
        }
    }

    /// Asks to be told by the number of a wait. Only a pending slot keeps it; then `true`.
    pub(crate) fn subscribe(&self, wait: u64) -> bool {
        match &mut *self.state.borrow_mut() {
            State::Pending { waits, .. } => {
                waits.push(wait);
                true
            }
            State::Ready(_) | State::Failed(_) => false,
        }
    }

    /// Gives a pending slot its value; returns the waits to tell. A slot that has a value keeps it.
    pub(crate) fn resolve(&self, result: Result<Shard, Fault>) -> Vec<u64> {
        let mut state = self.state.borrow_mut();
        let State::Pending { waits, .. } = &mut *state else {
            return Vec::new();
        };
        let waits = std::mem::take(waits);
        *state = match result {
            Ok(shard) => State::Ready(Rc::new(shard)),
            Err(fault) => State::Failed(fault),
        };
        waits
    }

    pub(crate) fn hold(&self) {
        self.holds.set(self.holds.get() + 1);
    }

    pub(crate) fn unhold(&self) {
        self.holds.set(self.holds.get().saturating_sub(1));
    }

    pub(crate) fn is_held(&self) -> bool {
        self.holds.get() > 0
    }
}

/// A plugin buffer, accounted while it lives.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) buffer: Buffer,
    pub(crate) origin: Rc<Origin>,
    /// The content is known to be there.
    pub(crate) arrived: Cell<bool>,
    bytes: u64,
    counters: Arc<Counters>,
}

impl Shard {
    /// `bytes`: what the buffer takes on its device.
    pub(crate) fn new(
        buffer: Buffer,
        bytes: u64,
        origin: Rc<Origin>,
        counters: &Arc<Counters>,
    ) -> Shard {
        counters::add(&counters.array_bytes, bytes);
        counters::add(&counters.shards, 1);
        Shard {
            buffer,
            origin,
            arrived: Cell::new(false),
            bytes,
            counters: Arc::clone(counters),
        }
    }

    /// What the buffer takes on its device.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        counters::sub(&self.counters.array_bytes, self.bytes);
        counters::sub(&self.counters.shards, 1);
    }
}

/// The op that made a buffer: what its late failure is reported as. All results of one execution share it.
#[derive(Debug, Default)]
pub(crate) struct Origin {
    pub(crate) user_context: u64,
    fault: RefCell<Option<Fault>>,
}

impl Origin {
    pub(crate) fn new(user_context: u64) -> Rc<Origin> {
        Rc::new(Origin {
            user_context,
            fault: RefCell::default(),
        })
    }

    /// The failure of the making, when it is known.
    pub(crate) fn fault(&self) -> Option<Fault> {
        self.fault.borrow().clone()
    }

    /// Notes the failure; the first one stays and is returned.
    pub(crate) fn fail(&self, fault: Fault) -> Fault {
        Arc::clone(self.fault.borrow_mut().get_or_insert(fault))
    }
}
