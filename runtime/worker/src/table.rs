//! The shard table's values. They live on the dispatch thread alone, hence `Rc` and `Cell`.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use waystation_pjrt::Buffer;

use crate::{
    counters::{self, Counters},
    ledger::Charge,
    status::Fault,
    usage::Cause,
};

/// One device's piece of an array: the value behind a shard id. The table forgets the id when the proxy drops it; an op
/// that needs the value holds the slot.
#[derive(Debug)]
pub(crate) struct Slot {
    state: RefCell<State>,
    /// Waiting ops that will read the value: while there are any, an execution must not take the buffer over.
    holds: Cell<u32>,
    /// Saves that have not copied the value yet, and the waits to tell when they have.
    saves: Cell<u32>,
    after_saves: RefCell<Vec<u64>>,
    /// Those of the holds that end by themselves: the value is copied to the host or sent to other workers. And the waits to tell.
    sends: Cell<u32>,
    after_sends: RefCell<Vec<u64>>,
}

/// Slots that an op reads, held until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    slots: Vec<Rc<Slot>>,
}

impl Held {
    pub(crate) fn of(slots: Vec<Rc<Slot>>) -> Held {
        for slot in &slots {
            slot.hold();
        }
        Held { slots }
    }

    /// What `work` finds out while only others hold them.
    pub(crate) fn beside<T>(&self, work: impl FnOnce(&[Rc<Slot>]) -> T) -> T {
        for slot in &self.slots {
            slot.unhold();
        }
        let found = work(&self.slots);
        for slot in &self.slots {
            slot.hold();
        }
        found
    }
}

impl std::ops::Deref for Held {
    type Target = [Rc<Slot>];

    fn deref(&self) -> &[Rc<Slot>] {
        &self.slots
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for slot in &self.slots {
            slot.unhold();
        }
    }
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
            saves: Cell::new(0),
            after_saves: RefCell::default(),
            sends: Cell::new(0),
            after_sends: RefCell::default(),
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

    /// Holds the value until it has been copied or sent.
    pub(crate) fn begin_send(&self) {
        self.hold();
        self.sends.set(self.sends.get() + 1);
    }

    /// It has been, or never will; returns the waits to tell.
    pub(crate) fn end_send(&self) -> Vec<u64> {
        self.unhold();
        self.sends.set(self.sends.get().saturating_sub(1));
        if self.is_being_sent() {
            return Vec::new();
        }
        self.after_sends.take()
    }

    pub(crate) fn is_being_sent(&self) -> bool {
        self.sends.get() > 0
    }

    /// Asks to be told by the number of a wait when the value is not being sent any more.
    pub(crate) fn await_sends(&self, wait: u64) {
        self.after_sends.borrow_mut().push(wait);
    }

    /// A save is going to copy the value. An execution that takes it over waits for that.
    pub(crate) fn begin_save(&self) {
        self.saves.set(self.saves.get() + 1);
    }

    /// The save has copied it, or never will; returns the waits to tell.
    pub(crate) fn end_save(&self) -> Vec<u64> {
        self.saves.set(self.saves.get().saturating_sub(1));
        if self.is_being_saved() {
            return Vec::new();
        }
        self.after_saves.take()
    }

    pub(crate) fn is_being_saved(&self) -> bool {
        self.saves.get() > 0
    }

    /// Asks to be told by the number of a wait when no save is to copy the value any more.
    pub(crate) fn await_saves(&self, wait: u64) {
        self.after_saves.borrow_mut().push(wait);
    }
}

/// A plugin buffer, accounted while it lives.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) buffer: Buffer,
    pub(crate) origin: Rc<Origin>,
    bytes: u64,
    account: RefCell<Option<Account>>,
}

/// What a shard counts for.
#[derive(Debug)]
struct Account {
    charge: Option<Charge>,
    counters: Arc<Counters>,
}

impl Shard {
    /// `bytes`: what the buffer takes on its device. `charge`: what was reserved for it.
    pub(crate) fn new(
        buffer: Buffer,
        bytes: u64,
        charge: Option<Charge>,
        origin: Rc<Origin>,
        counters: &Arc<Counters>,
    ) -> Shard {
        // What was reserved for the default memory was a guess; another memory's shard has reserved nothing.
        let charge = charge
            .filter(|charge| charge.bytes() > 0)
            .map(|mut charge| {
                charge.correct(bytes);
                charge
            });
        counters::add(&counters.array_bytes, bytes);
        counters::add(&counters.shards, 1);
        origin.cause.client.add(bytes);
        Shard {
            buffer,
            origin,
            bytes,
            account: RefCell::new(Some(Account {
                charge,
                counters: Arc::clone(counters),
            })),
        }
    }

    /// What the buffer takes on its device.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device and what is charged of its default memory; `None` when that is nothing.
    pub(crate) fn charged(&self) -> Option<(usize, u64)> {
        let account = self.account.borrow();
        let charge = account.as_ref()?.charge.as_ref()?;
        Some((charge.device(), charge.bytes()))
    }

    /// An execution takes the buffer over, and its charge.
    pub(crate) fn give_up(&self) -> Option<Charge> {
        let Account { charge, counters } = self.account.borrow_mut().take()?;
        counters::sub(&counters.array_bytes, self.bytes);
        counters::sub(&counters.shards, 1);
        self.origin.cause.client.sub(self.bytes);
        charge
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        drop(self.give_up());
    }
}

/// The op that made a buffer: what its late failure is reported as. All results of one execution share it.
#[derive(Debug)]
pub(crate) struct Origin {
    pub(crate) cause: Cause,
    maker: Maker,
    /// The making is known to have ended.
    done: Cell<bool>,
    /// Waits to tell of that.
    waits: RefCell<Vec<u64>>,
    fault: RefCell<Option<Fault>>,
}

/// What a buffer comes from, for people.
#[derive(Clone, Debug)]
pub(crate) enum Maker {
    /// Host bytes, a copy, a restore: one of our own ops.
    Op(&'static str),
    /// A program's execution.
    Program(Arc<str>),
}

impl Origin {
    pub(crate) fn new(cause: Cause, maker: Maker) -> Rc<Origin> {
        Rc::new(Origin {
            cause,
            maker,
            done: Cell::new(false),
            waits: RefCell::default(),
            fault: RefCell::default(),
        })
    }

    /// The request that made the buffer.
    pub(crate) fn user_context(&self) -> u64 {
        self.cause.user_context
    }

    /// Names what made the buffer.
    pub(crate) fn maker(&self) -> &str {
        match &self.maker {
            Maker::Op(name) => name,
            Maker::Program(name) => name,
        }
    }

    /// Whether the buffer's content is there: an execution must have ended for that, other ops are quick.
    pub(crate) fn is_ready(&self) -> bool {
        self.done.get() || matches!(self.maker, Maker::Op(_))
    }

    /// Whether an execution made the buffer: its end is when the buffer is ready, and its failure has a cause.
    pub(crate) fn is_execution(&self) -> bool {
        matches!(self.maker, Maker::Program(_))
    }

    /// Asks to be told of the execution's end by the number of a wait. Only one that has not ended keeps it; then `true`.
    pub(crate) fn subscribe(&self, wait: u64) -> bool {
        let open = !self.is_ready();
        if open {
            self.waits.borrow_mut().push(wait);
        }
        open
    }

    /// The execution has ended; returns the waits to tell.
    pub(crate) fn end(&self) -> Vec<u64> {
        self.done.set(true);
        self.waits.take()
    }

    /// The failure of the making, when it is known.
    pub(crate) fn fault(&self) -> Option<Fault> {
        self.fault.borrow().clone()
    }

    /// Notes the failure; the first one stays and is returned.
    pub(crate) fn fail(&self, fault: Fault) -> Fault {
        Arc::clone(self.fault.borrow_mut().get_or_insert(fault))
    }

    /// Says more of the failure.
    pub(crate) fn amend(&self, fault: Fault) -> Fault {
        Arc::clone(self.fault.borrow_mut().insert(fault))
    }
}
