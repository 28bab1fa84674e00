//! Calls of one process's partitions meet those of all others.

mod connection;
mod exchange;
mod gather;
mod launch;
mod member;
mod plan;
mod reduce;
mod step;
#[cfg(test)]
mod tests;

pub use member::{Launch, Member};

use crate::call::{Code, Failure};
use crate::op::MOST_PARTITIONS;
use crate::scratch::{Pool, Scratch};
use crate::transport::{CHUNK, Key, Message, Process, Transfer, Transport};
use bytes::Bytes;
use exchange::{Part, lock};
use launch::{Action, State};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};

/// How many launches that have ended are remembered with their outcome. Of those with smaller numbers, only that they have ended.
const ENDED: usize = 4096;

/// How many pieces may be asked for, of launches that are not open here yet.
const EARLY: usize = 1 << 18;

/// Where bytes go that are about to come.
pub(crate) enum Landing {
    /// Nobody wants them.
    Nowhere,
    /// They are to be handed over by [`Engine::receive`].
    Buffer,
    /// Where they belong.
    Memory(Place),
}

/// A place in a result that bytes are read into.
pub(crate) struct Place {
    state: Arc<State>,
    key: Key,
    slot: Arc<exchange::Slot>,
    output: usize,
    start: usize,
    len: usize,
}

impl Place {
    /// Lends the memory from byte `from` of those that come; `None` if the launch has failed meanwhile.
    pub(crate) fn lend<T>(&self, from: usize, each: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        let place = self.start + from.min(self.len)..self.start + self.len;
        self.slot.exchange.lend(self.output, place, each)
    }

    /// All bytes have come.
    pub(crate) fn done(self) {
        landed(&self.state, &self.key, &self.slot);
    }
}

/// A chunk that was noted is where it belongs.
fn landed(state: &State, key: &Key, slot: &exchange::Slot) {
    if slot.landed() {
        state.remove_slot(key);
        if matches!(slot.usage, exchange::Use::Place { .. }) {
            slot.exchange.arrived();
        }
    }
}

/// The collectives of one process. Clones share it.
#[derive(Clone)]
pub struct Engine(Arc<Shared>);

struct Shared {
    me: Process,
    transport: Arc<dyn Transport>,
    pool: Pool,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    open: HashMap<u64, Arc<State>>,
    /// Pieces that others have asked for, of launches that are not open here yet.
    early: HashMap<u64, Vec<(Process, Key)>>,
    early_count: usize,
    /// Processes that can start launches which are not open here yet.
    here: HashMap<u64, Vec<Process>>,
    here_count: usize,
    /// Launches that have ended, and why those that failed did. Others with greater numbers may have failed before they open here.
    ended: BTreeMap<u64, Option<Failure>>,
    /// The greatest number of those that are not remembered. Launches open in the order of their numbers, so one up to this that is
    /// not open has ended.
    forgotten: Option<u64>,
    /// Processes that are gone, until they come back.
    lost: BTreeMap<Process, Failure>,
}

impl Table {
    fn end(&mut self, launch: u64, failure: Option<Failure>) {
        self.open.remove(&launch);
        self.drop_early(launch);
        self.drop_here(launch);
        self.ended.insert(launch, failure);
        while self.ended.len() > ENDED {
            if let Some((first, _)) = self.ended.pop_first() {
                self.forgotten = self.forgotten.max(Some(first));
            }
        }
    }

    /// Forgets what a process has said of launches that are not open here: what it asked for it will not take.
    fn drop_said_by(&mut self, process: Process) {
        let early: Vec<u64> = self.early.keys().copied().collect();
        for launch in early {
            if let Some(keys) = self.early.get_mut(&launch) {
                let before = keys.len();
                keys.retain(|(from, _)| *from != process);
                self.early_count -= before - keys.len();
            }
        }
        self.early.retain(|_, keys| !keys.is_empty());
        self.drop_here_from(process);
    }

    /// How a launch that is not open has ended, if it has.
    fn outcome(&self, launch: u64) -> Option<Option<Failure>> {
        let remembered = self.ended.get(&launch).cloned();
        remembered.or_else(|| {
            let is_forgotten = Some(launch) <= self.forgotten;
            is_forgotten.then(|| {
                Some(Failure::new(
                    Code::FailedPrecondition,
                    format!("launch {launch} has ended long ago on another worker"),
                ))
            })
        })
    }

    fn drop_early(&mut self, launch: u64) -> Vec<(Process, Key)> {
        let early = self.early.remove(&launch).unwrap_or_default();
        self.early_count -= early.len();
        early
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let table = lock(&self.0.table);
        out.debug_struct("Engine")
            .field("process", &self.0.me.0)
            .field("open", &table.open.len())
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// The engine of the process `me`.
    pub fn new(me: Process, transport: Arc<dyn Transport>) -> Self {
        Self(Arc::new(Shared {
            me,
            transport,
            pool: Pool::default(),
            table: Mutex::default(),
        }))
    }

    /// This process.
    #[must_use]
    pub fn process(&self) -> Process {
        self.0.me
    }

    /// Whether no launch is open here, nor asked for by others: what this process has for them is handed to the transport. Launches
    /// that wait for [`Launch::here`] of some process do not count.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let table = lock(&self.0.table);
        table.early.is_empty() && table.open.values().all(|state| state.gather.waits())
    }

    /// Opens a launch: `placement` says for each partition on which process it runs. `number` is the same on all of these and used
    /// once.
    ///
    /// # Errors
    ///
    /// Why the launch has failed elsewhere already; [`Code::InvalidArgument`] for a number that was used or a wrong placement.
    pub fn open(
        &self,
        number: u64,
        placement: impl Into<Arc<[Process]>>,
    ) -> Result<Launch, Failure> {
        let placement = placement.into();
        let wrong =
            |what: &str| Failure::new(Code::InvalidArgument, format!("launch {number} {what}"));
        if placement.is_empty() || placement.len() > MOST_PARTITIONS as usize {
            return Err(wrong("has no partitions, or too many"));
        }
        if !placement.contains(&self.0.me) {
            return Err(wrong("has no partition on this process"));
        }
        let (state, early, here) = {
            let mut table = lock(&self.0.table);
            if table.open.contains_key(&number) {
                return Err(wrong("is open"));
            }
            match table.outcome(number) {
                Some(Some(failure)) => {
                    table.drop_early(number);
                    table.drop_here(number);
                    // Not all may have heard of it.
                    drop(table);
                    self.tell(number, &placement, &failure);
                    return Err(failure);
                }
                Some(None) => return Err(wrong("has ended")),
                None => {}
            }
            if let Some(failure) = placement.iter().find_map(|each| table.lost.get(each)) {
                let failure = failure.clone();
                table.end(number, Some(failure.clone()));
                drop(table);
                self.tell(number, &placement, &failure);
                return Err(failure);
            }
            let state = State::new(number, placement, self.0.pool.clone());
            table.open.insert(number, Arc::clone(&state));
            (state, table.drop_early(number), table.drop_here(number))
        };
        for process in here {
            if state.placement.contains(&process) {
                state.gather.add(process);
            }
        }
        for (from, key) in early {
            self.receive(from, Message::Ready(key));
        }
        Ok(Launch::new(self.clone(), state))
    }

    /// Takes a message from another process. Work on the data is done here, on the calling thread; nothing blocks.
    pub fn receive(&self, from: Process, message: Message) {
        match message {
            Message::Fail(number, failure) => {
                let open = lock(&self.0.table).open.get(&number).cloned();
                // Who has no part in a launch has no say in it either.
                if open.is_none_or(|state| state.placement.contains(&from)) {
                    self.end(number, failure, false);
                }
            }
            Message::Here(number) => self.here_from(from, number),
            Message::Ready(key) => self.ready(from, key),
            Message::Data(transfer) => {
                if let Some(state) = self.state_for(from, &transfer.key) {
                    self.deliver(&state, transfer.key, transfer.offset, transfer.bytes);
                }
            }
        }
    }

    /// Memory for bytes that are about to come.
    pub(crate) fn scratch(&self, len: usize) -> Scratch {
        self.0.pool.take(len)
    }

    /// Takes a chunk of a piece from another process.
    pub(crate) fn take(&self, from: Process, key: Key, offset: u64, chunk: Scratch) {
        if let Some(state) = self.state_for(from, &key) {
            match usize::try_from(offset) {
                Ok(offset) => {
                    self.deliver_chunk(&state, &key, offset, Part::Own(chunk));
                }
                Err(_) => self.misfit(&state, key),
            }
        }
    }

    /// The launch that bytes from a process are for. `None` if it has failed or ended meanwhile, or now fails for them.
    fn state_for(&self, from: Process, key: &Key) -> Option<Arc<State>> {
        let state = lock(&self.0.table).open.get(&key.launch).cloned()?;
        if state.process_of(key.source) != Some(from) {
            self.disagree(&state, from);
            return None;
        }
        Some(state)
    }

    /// Says where bytes that are about to come can be written to. They are `len`, at `offset` of a piece.
    pub(crate) fn expect(&self, from: Process, key: Key, offset: u64, len: usize) -> Landing {
        let state = lock(&self.0.table).open.get(&key.launch).cloned();
        let Some(state) = state else {
            return Landing::Nowhere;
        };
        let (Some(slot), Ok(offset)) = (state.slot(&key), usize::try_from(offset)) else {
            return Landing::Buffer;
        };
        let exchange::Use::Place { output, view } = slot.usage else {
            return Landing::Buffer;
        };
        // What is wrong is found with the bytes.
        if !view.is_whole() || state.process_of(key.source) != Some(from) || !slot.note(offset, len)
        {
            return Landing::Buffer;
        }
        Landing::Memory(Place {
            state,
            key,
            slot,
            output,
            start: view.start + offset,
            len,
        })
    }

    fn ready(&self, from: Process, key: Key) {
        let state = {
            let mut table = lock(&self.0.table);
            let open = table.open.get(&key.launch).cloned();
            match (open, table.outcome(key.launch)) {
                (Some(state), _) => state,
                (None, Some(outcome)) => {
                    drop(table);
                    self.tell_again(from, key.launch, outcome);
                    return;
                }
                (None, None) if table.early_count < EARLY => {
                    table.early.entry(key.launch).or_default().push((from, key));
                    table.early_count += 1;
                    return;
                }
                (None, None) => {
                    let failure = Failure::new(
                        Code::ResourceExhausted,
                        format!(
                            "launch {} is not open on process {}, which was asked for too many of its pieces",
                            key.launch, self.0.me.0
                        ),
                    );
                    table.end(key.launch, Some(failure.clone()));
                    drop(table);
                    let _ = self
                        .0
                        .transport
                        .send(from, Message::Fail(key.launch, failure));
                    return;
                }
            }
        };
        if state.process_of(key.target) != Some(from)
            || state.process_of(key.source) != Some(self.0.me)
        {
            self.disagree(&state, from);
            return;
        }
        match state.ready(key) {
            Some(actions) => self.act(&state, actions),
            None => self.disagree(&state, from),
        }
    }

    fn disagree(&self, state: &State, from: Process) {
        self.end(
            state.number,
            Failure::new(
                Code::FailedPrecondition,
                format!(
                    "processes {} and {} do not agree on where the partitions of launch {} lie, or what they do",
                    self.0.me.0, from.0, state.number
                ),
            ),
            true,
        );
    }

    /// Sends pieces, or hands them over where the target is here.
    fn act(&self, state: &Arc<State>, actions: Vec<Action>) {
        for action in actions {
            let Some(process) = state.process_of(action.key.target) else {
                continue;
            };
            if process == self.0.me {
                self.deliver(state, action.key, action.offset, action.bytes);
                continue;
            }
            let transfer = Transfer {
                key: action.key,
                offset: action.offset,
                bytes: action.bytes,
                failed: Arc::clone(&state.failed),
            };
            self.send(state, process, Message::Data(transfer));
        }
        if state.is_over() {
            self.close(state);
        }
    }

    fn send(&self, state: &State, to: Process, message: Message) {
        if let Err(failure) = self.0.transport.send(to, message) {
            self.end(state.number, failure, true);
        }
    }

    /// Takes bytes of a piece, cut at chunks.
    fn deliver(&self, state: &Arc<State>, key: Key, offset: u64, bytes: Bytes) {
        let mut rest = bytes;
        let Ok(mut offset) = usize::try_from(offset) else {
            return self.misfit(state, key);
        };
        while !rest.is_empty() {
            let chunk = rest.split_to(rest.len().min(CHUNK));
            let len = chunk.len();
            if !self.deliver_chunk(state, &key, offset, Part::Lent(chunk)) {
                return;
            }
            offset += len;
        }
    }

    /// Takes a chunk of a piece. False if it is wrong, or nobody wants it.
    fn deliver_chunk(&self, state: &Arc<State>, key: &Key, offset: usize, chunk: Part) -> bool {
        let Some(slot) = state.slot(key) else {
            // Failed meanwhile; or a piece that nobody asked for.
            if !state.is_failed() {
                self.misfit(state, *key);
            }
            return false;
        };
        if !slot.note(offset, chunk.bytes().len()) {
            self.misfit(state, *key);
            return false;
        }
        match &slot.usage {
            exchange::Use::Place { output, view } => {
                slot.exchange.place(*output, view, offset, chunk.bytes());
                landed(state, key, &slot);
            }
            exchange::Use::Reduce { reducer, member } => {
                // Before: with the last of them the call ends, and with the call perhaps the launch, which nothing may seem
                // to be missing from then.
                landed(state, key, &slot);
                self.reduce(state, key, &slot.exchange, reducer, *member, offset, chunk);
            }
        }
        true
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one place, and each is a thing of its own"
    )]
    fn reduce(
        &self,
        state: &Arc<State>,
        key: &Key,
        exchange: &exchange::Exchange,
        reducer: &exchange::Reducer,
        member: usize,
        offset: usize,
        part: Part,
    ) {
        let Some(reduced) = reducer.take(member, offset, part) else {
            return;
        };
        let reduce = &reducer.reduce;
        let view = step::View::whole(reduce.at, reduce.len);
        exchange.place(reduce.output, &view, reduced.offset, &reduced.bytes);
        if let Some(lane) = reduce.publish {
            let actions = state.publish(key, lane, &reduce.members, &reduced);
            self.act(state, actions);
        }
        if reducer.landed() {
            exchange.arrived();
        }
    }

    fn misfit(&self, state: &State, key: Key) {
        self.end(
            state.number,
            Failure::new(
                Code::FailedPrecondition,
                format!(
                    "partition {} sent partition {} data of operation {} in launch {} that it does not expect; \
                     do they run the same program?",
                    key.source, key.target, key.op, key.launch
                ),
            ),
            true,
        );
    }

    /// Fails a launch, and with `tell` says so to all its processes.
    fn end(&self, number: u64, failure: Failure, tell: bool) {
        let state = {
            let mut table = lock(&self.0.table);
            let state = table.open.get(&number).cloned();
            if state.is_none() && table.outcome(number).is_some() {
                return;
            }
            table.end(number, Some(failure.clone()));
            state
        };
        let Some(state) = state else {
            return;
        };
        for exchange in state.fail(&failure) {
            exchange.fail(failure.clone());
        }
        state.gather.fail(&failure);
        if tell {
            self.tell(number, &state.placement, &failure);
        }
    }

    fn tell(&self, number: u64, placement: &[Process], failure: &Failure) {
        let mut told = HashSet::from([self.0.me]);
        for process in placement {
            if told.insert(*process) {
                // One that cannot be told is lost, and others will hear of that.
                let message = Message::Fail(number, failure.clone());
                let _ = self.0.transport.send(*process, message);
            }
        }
    }

    fn close(&self, state: &State) {
        let mut table = lock(&self.0.table);
        if table.open.contains_key(&state.number) {
            table.end(state.number, None);
        }
    }

    /// Says that a process is gone: every launch with a partition there fails, now and until [`Engine::found`].
    pub fn lost(&self, process: Process, failure: &Failure) {
        let open: Vec<_> = {
            let mut table = lock(&self.0.table);
            table.lost.insert(process, failure.clone());
            table.drop_said_by(process);
            table.open.values().cloned().collect()
        };
        for state in open {
            if state.placement.contains(&process) {
                self.end(state.number, failure.clone(), true);
            }
        }
    }

    /// Says that a process that was lost, or another in its place, is there: launches with a partition there may be opened.
    pub fn found(&self, process: Process) {
        lock(&self.0.table).lost.remove(&process);
    }
}
