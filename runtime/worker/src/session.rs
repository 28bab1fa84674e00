//! One proxy's hold on this worker: its shards, programs, transfers, and the ops that wait. Lives on the dispatch thread.
//!
//! Ops take effect on the table in stream order. An op whose inputs are pending leaves pending results in the table at once
//! and runs when its inputs are there; ops behind it go on.

mod answers;
mod copy;
mod ended;
mod execution;
mod launch;
mod launches;
mod native;
mod peers;
mod persist;
mod program;
mod put;
mod read;
mod reshard;
mod room;
mod span;
mod watch;

use std::{
    collections::{HashMap, VecDeque},
    rc::Rc,
    sync::Arc,
};

use tokio_util::sync::DropGuard;
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::worker::{Answer, Attach, Ended, Op, op, reply},
};

use self::{
    ended::Gone, launches::Launches, peers::Lease, persist::Persists, program::Program, put::Puts,
    read::Transfers, reshard::Reshards, room::Room, watch::Watches,
};
pub(crate) use self::{
    put::{Begun, Broken},
    read::{Copied, Fetch},
};
use crate::{
    core::Core,
    holder::Holder,
    outbox::Outbox,
    spanning::Epoch,
    status::{self, Fault},
    table::{Held, Origin, Shard, Slot, Value},
    usage::{Cause, Usage, Waiting},
    window::Permit,
};

/// What to do when a wait is over.
type Then = Box<dyn FnOnce(&mut Session)>;

/// An op that waits.
struct Wait {
    missing: usize,
    held: Held,
    then: Then,
    waiting: Waiting,
}

/// See the module.
pub(crate) struct Session {
    /// First, so that other workers see it end, and not launches given up one by one.
    lease: Lease,
    holder: Holder,
    /// Ends with the session.
    _over: DropGuard,
    core: Arc<Core>,
    epoch: u64,
    serial: u64,
    /// Global device id to local ordinal.
    ordinals: Arc<HashMap<i32, u32>>,
    outbox: Outbox,
    table: HashMap<u64, Rc<Slot>>,
    /// Stands in the table for a shard whose buffer an execution has taken over.
    donated: Rc<Slot>,
    waits: HashMap<u64, Wait>,
    /// Waits that are over, in order. A queue and not a call: a failure may run through a long chain of ops.
    runnable: VecDeque<Then>,
    /// Slots that a task outside the thread will fill.
    producers: HashMap<u64, Vec<Rc<Slot>>>,
    next: u64,
    puts: Puts,
    transfers: Transfers,
    watches: Watches,
    programs: HashMap<u64, Rc<Program>>,
    launches: Launches,
    persists: Persists,
    room: Room,
    /// Whose op was the last one, or goes on.
    client: Arc<Usage>,
    reshards: Reshards,
    gone: Gone,
}

impl Session {
    /// `lease` is what programs over several workers need, or why there are none.
    pub(crate) fn new(
        core: Arc<Core>,
        attach: &Attach,
        serial: u64,
        outbox: Outbox,
        lease: Result<Epoch, String>,
    ) -> Session {
        let ordinals = attach
            .device_ids
            .iter()
            .zip(0..)
            .map(|(&id, ordinal)| (id, ordinal))
            .collect();
        let holder = Holder::new(attach.collectives_secret.clone());
        Session {
            lease: Lease::new(lease),
            _over: holder.over.clone().drop_guard(),
            holder,
            client: core.clients.of(0),
            core,
            epoch: attach.epoch,
            serial,
            ordinals: Arc::new(ordinals),
            outbox,
            table: HashMap::new(),
            donated: Slot::failed(Arc::new(status::invalid(
                "the array has been deleted or donated",
            ))),
            waits: HashMap::new(),
            runnable: VecDeque::new(),
            producers: HashMap::new(),
            next: 0,
            puts: Puts::default(),
            transfers: Transfers::default(),
            watches: Watches::default(),
            programs: HashMap::new(),
            launches: Launches::default(),
            persists: Persists::default(),
            room: Room::default(),
            reshards: Reshards::default(),
            gone: Gone::default(),
        }
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn holder(&self) -> &Holder {
        &self.holder
    }

    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    /// Ends for a newer session, and says so.
    pub(crate) fn superseded(self, epoch: u64) {
        let given_away = epoch != self.epoch;
        let why = match given_away {
            false => "the proxy has connected anew".to_owned(),
            true => format!("its slice has been given to another proxy, under lease {epoch}"),
        };
        self.outbox
            .send(reply::Reply::Ended(Ended { why, given_away }));
    }

    /// Applies the next op of the stream.
    pub(crate) fn apply(&mut self, op: Op, permit: Option<Permit>) {
        let only_cleans_up = !op.drops.is_empty() || !op.releases.is_empty();
        for shard in &op.drops {
            self.table.remove(shard);
        }
        self.release(&op.releases);
        let client = op.client;
        let Some(op) = op.op else {
            // A launch may have waited for that.
            self.settle();
            if !only_cleans_up {
                tracing::warn!(
                    "an op that this build does not know was ignored; run the same build everywhere"
                );
            }
            return;
        };
        if self.client.client != client {
            self.client = self.core.clients.of(client);
        }
        match op {
            op::Op::Attach(_) => tracing::warn!("a second Attach on one stream was ignored"),
            op::Op::Put(op) => self.put(op),
            op::Op::CancelPut(op) => self.cancel_put(op),
            op::Op::Copy(op) => self.copy(op),
            op::Op::Bitcast(op) => self.bitcast(op),
            op::Op::Read(op) => self.read(op),
            op::Op::ReadPiece(op) => self.next_piece(&op),
            op::Op::Pull(op) => self.pull(op),
            op::Op::Reshard(op) => self.reshard(op),
            op::Op::Fail(op) => {
                let fault = Arc::new(
                    op.status
                        .unwrap_or_else(|| status::invalid("a failure without a status")),
                );
                for shard in op.shards {
                    self.insert(shard, Slot::failed(Arc::clone(&fault)));
                }
            }
            op::Op::Watch(op) => self.watch(op),
            op::Op::Compile(op) => self.compile(op),
            op::Op::CheckFlags(op) => self.check_flags(op),
            op::Op::Unload(op) => self.unload(op.executable),
            op::Op::Execute(op) => self.execute(op, permit),
            op::Op::ProgramText(op) => self.program_text(&op),
            op::Op::CostAnalysis(op) => self.cost_analysis(&op),
            op::Op::DefaultLayout(op) => self.default_layout(&op),
            op::Op::SaveArrays(op) => self.save_arrays(op),
            op::Op::RestoreArrays(op) => self.restore_arrays(op),
            op::Op::Cancel(op) => self.cancel(op.request),
            op::Op::Peers(op) => self.peers(op),
            op::Op::Load(op) => self.load(op),
            op::Op::Start(op) => self.place_part(op.launch),
            op::Op::ClientEnded(_) => self.client_ended(),
        }
        self.settle();
    }

    /// Runs all that can run now.
    pub(crate) fn settle(&mut self) {
        loop {
            if let Some(then) = self.runnable.pop_front() {
                then(self);
            } else if std::mem::take(&mut self.launches.unsaid) {
                self.say_here();
            } else if !self.launch_next() {
                break;
            }
        }
    }

    /// What the op that is applied now does, it does for this.
    fn cause(&self, user_context: u64) -> Cause {
        Cause {
            user_context,
            client: Arc::clone(&self.client),
        }
    }

    /// A number for a wait, a producer or a launch.
    fn mint(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn insert(&mut self, shard: u64, slot: Rc<Slot>) {
        if let Some(old) = self.table.insert(shard, slot) {
            // The proxy mints ids once. Whoever waits for the old value still gets it.
            tracing::warn!(shard, "a shard id was used twice");
            drop(old);
        }
    }

    /// The slot of a shard; of an unknown one, a failed slot that names it.
    fn slot(&self, shard: u64) -> Rc<Slot> {
        match self.table.get(&shard) {
            Some(slot) => Rc::clone(slot),
            None => Slot::failed(Arc::new(status::invalid(format!(
                "shard {shard} is unknown to this worker"
            )))),
        }
    }

    /// Runs `then` when no slot is pending, at once if so now. The values stay untouched by donation until then.
    fn when(&mut self, slots: &[Rc<Slot>], then: impl FnOnce(&mut Session) + 'static) {
        if slots
            .iter()
            .all(|slot| !matches!(slot.value(), Value::Pending { .. }))
        {
            then(self);
            return;
        }
        let wait = self.mint();
        let missing = slots.iter().filter(|slot| slot.subscribe(wait)).count();
        self.park(wait, missing, Held::of(slots.to_vec()), then);
    }

    /// Keeps what is to be done when `missing` things more are there.
    fn park(
        &mut self,
        wait: u64,
        missing: usize,
        held: Held,
        then: impl FnOnce(&mut Session) + 'static,
    ) {
        let parked = Wait {
            missing,
            held,
            then: Box::new(then),
            waiting: Waiting::of(&self.client),
        };
        self.waits.insert(wait, parked);
    }

    /// Runs `then` when the execution that made a buffer has ended: at once if it has, or if there was none.
    fn when_ended(&mut self, origin: &Origin, then: impl FnOnce(&mut Session) + 'static) {
        let wait = self.mint();
        if !origin.subscribe(wait) {
            then(self);
            return;
        }
        self.park(wait, 1, Held::of(Vec::new()), then);
    }

    /// One thing that a wait misses is there.
    fn progress(&mut self, wait: u64) {
        let Some(entry) = self.waits.get_mut(&wait) else {
            return;
        };
        entry.missing = entry.missing.saturating_sub(1);
        if entry.missing == 0
            && let Some(wait) = self.waits.remove(&wait)
        {
            let Wait {
                held,
                then,
                waiting,
                ..
            } = wait;
            self.runnable.push_back(Box::new(move |session| {
                // What the rest of the op waits for is its client's as well.
                session.client = Arc::clone(waiting.client());
                drop(waiting);
                drop(held);
                then(session);
            }));
        }
    }

    fn resolve(&mut self, slot: &Slot, result: Result<Shard, Fault>) {
        for wait in slot.resolve(result) {
            self.progress(wait);
        }
    }

    fn fail_all(&mut self, slots: &[Rc<Slot>], fault: &Fault) {
        for slot in slots {
            self.resolve(slot, Err(Arc::clone(fault)));
        }
    }

    /// Keeps slots for a task outside the thread, which names them by the number returned.
    fn produce(&mut self, slots: Vec<Rc<Slot>>) -> u64 {
        let producer = self.mint();
        self.producers.insert(producer, slots);
        producer
    }

    fn take_produced(&mut self, producer: u64) -> Vec<Rc<Slot>> {
        self.producers.remove(&producer).unwrap_or_default()
    }

    /// Whether one more op of the client may wait: as long as no more of its ops do than could of others. So there is
    /// always room for another client, however many flood.
    fn room_to_wait(&self) -> Result<(), StatusProto> {
        let all = self.waits.len() + self.room.waiting() + self.launches.unplaced.len();
        let own = self.client.waiting();
        if own < self.core.limits.waiting_ops.saturating_sub(all) {
            return Ok(());
        }
        Err(status::exhausted(format!(
            "{own} ops of this session wait for bytes or programs on this worker, of {all} in all; wait for some of them \
             first"
        )))
    }

    fn answer(&self, request: u64, result: Result<Answer, StatusProto>) {
        let answer = match result {
            Ok(answer) => Answer { request, ..answer },
            Err(status) => Answer {
                request,
                status: Some(status),
                ..Answer::default()
            },
        };
        self.outbox.send(reply::Reply::Answer(answer));
    }
}
