//! Launches that span workers.
//!
//! ```text
//! Execute --> opened on the engine --inputs there, or soon--> "here" to the others --all are here, first in
//! the stream--> a thread a device: execute --> the plugin's events --> ended, here
//! ```
//!
//! They start strictly in one order, which is the same on all workers: that of the stream, or, where the proxy says so, that of their
//! Start ops (an input may be long in coming, and others go first). None starts before all its workers can start it.
//! "Here" is not said of a part behind one that some worker cannot start yet: the others would take their devices for it,
//! and wait. It is where all of them have that earlier one too, for they cannot start the later one before it either.
//! So what has started ends by itself, whatever else waits: a device is never taken by a part that waits for another one's
//! input. Until it starts, a launch holds nothing up but later ones that span workers.
//!
//! A failure of any part fails all: the engine tells the others, with the cause.

use std::{rc::Rc, sync::Arc};

use waystation_collectives::{self as collectives, Failure, Process};
use waystation_pjrt::{Buffer, ExecuteContext, Execution, LoadedExecutable, OneExecution};
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::worker::{Execute, Started, reply},
};

use super::{Session, execution::Launch, launch::Prepared, launches::Launches};
use crate::{
    ledger::Charge,
    status::{self, Fault},
    table::{Shard, Slot},
    usage::{self, Usage},
};

/// Where a program's partitions lie, of one that spans workers.
#[derive(Debug)]
pub(super) struct Placement {
    /// The process of each partition.
    pub(super) processes: Arc<[Process]>,
    /// This worker's partitions, ascending.
    pub(super) partitions: Rc<[u32]>,
    /// Local ordinals of their devices.
    pub(super) ordinals: Arc<[usize]>,
}

/// This worker's part of a launch.
#[derive(Clone)]
pub(super) struct Part {
    /// The proxy's number of the launch, which is the same on all workers.
    pub(super) number: u64,
    launch: Arc<collectives::Launch>,
    processes: Arc<[Process]>,
    partitions: Rc<[u32]>,
}

impl Part {
    /// Why the launch has failed, if it has.
    pub(super) fn fault(&self, user_context: u64) -> Option<Fault> {
        let failure = self.launch.failure()?;
        Some(fault_of(&failure, user_context))
    }

    /// Fails the launch on all its workers.
    pub(super) fn fail(&self, fault: &StatusProto, place: &str) {
        self.launch.fail(failure_of(fault, place));
    }
}

/// Where a part comes among the others.
#[derive(Clone, Copy)]
pub(super) enum Place {
    At(u64),
    /// The proxy will say it, under this number of the launch.
    Later(u64),
}

/// A part that has not started.
pub(super) struct Waiting {
    part: Part,
    place: Place,
    /// It counts as an op that waits while it has no place.
    counts: Option<usage::Waiting>,
    /// It got its place later: the proxy is told when it starts.
    told: bool,
    results: Vec<Rc<Slot>>,
    watch: u64,
    user_context: u64,
    client: Arc<Usage>,
    /// Its inputs are there, or come without anything from outside this worker.
    can: bool,
    /// The others were told so.
    said: bool,
    /// All workers can start theirs.
    all_can: bool,
    /// When the inputs are there.
    pub(super) launch: Option<Launch>,
    /// What it was given, where that must be before the others hear that it can start.
    pub(super) prepared: Option<Prepared>,
}

impl Waiting {
    pub(super) fn place(&self) -> Place {
        self.place
    }

    /// Whose it is.
    pub(super) fn client(&self) -> &Arc<Usage> {
        &self.client
    }

    /// Whether it can be handed to the devices.
    pub(super) fn is_ready(&self) -> bool {
        self.all_can && self.launch.is_some()
    }
}

/// A part that is being handed to its devices' threads.
pub(super) struct Starting {
    launch: Launch,
    kept: Vec<i64>,
    shards: Vec<Rc<Shard>>,
    room: Vec<Charge>,
    missing: usize,
    started: Vec<Option<OneExecution>>,
    fault: Option<Fault>,
}

impl Starting {
    pub(super) fn launch(&self) -> &Launch {
        &self.launch
    }
}

/// How failures of one worker's part begin on others.
const ELSEWHERE: &str = "on the worker of ";

/// A fault for other workers, which do not have this one's payloads.
fn failure_of(fault: &StatusProto, place: &str) -> Failure {
    let code = collectives::Code::from_number(fault.code);
    if fault.message.starts_with(ELSEWHERE) {
        return Failure::new(code, fault.message.clone());
    }
    Failure::new(code, format!("{ELSEWHERE}{place}: {}", fault.message))
}

fn fault_of(failure: &Failure, user_context: u64) -> Fault {
    let status = StatusProto {
        code: failure.code().number(),
        message: failure.message().to_owned(),
        ..StatusProto::default()
    };
    Arc::new(status::with_context(status, user_context))
}

/// Whether the others may hear that a part can start, on such processes: `earlier` are the placements of earlier parts that some
/// worker cannot start yet.
fn may_be_said(processes: &[Process], earlier: &[Arc<[Process]>]) -> bool {
    earlier.iter().all(|earlier| {
        std::ptr::eq(&**earlier, processes)
            || processes.iter().all(|process| earlier.contains(process))
    })
}

impl Session {
    /// Opens this worker's part of a launch, and keeps it until it can start.
    pub(super) fn open_part(
        &mut self,
        sequence: u64,
        op: &Execute,
        placement: &Placement,
        results: &[Rc<Slot>],
    ) -> Result<Part, Fault> {
        let epoch = match &self.lease.epoch {
            Ok(epoch) => epoch,
            Err(why) => {
                let status = status::unimplemented(format!("programs over several workers: {why}"));
                return Err(Arc::new(status::with_context(status, op.user_context)));
            }
        };
        let opened = epoch
            .engine
            .open(op.launch, Arc::clone(&placement.processes));
        let launch = opened.map_err(|failure| fault_of(&failure, op.user_context))?;
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        launch.when_all_here(move |outcome| {
            core.post(serial, move |session| session.all_here(sequence, outcome));
        });
        let part = Part {
            number: op.launch,
            launch: Arc::new(launch),
            processes: Arc::clone(&placement.processes),
            partitions: Rc::clone(&placement.partitions),
        };
        let (place, counts) = match op.placed_later {
            false => (Place::At(sequence), None),
            true => (
                Place::Later(op.launch),
                Some(usage::Waiting::of(&self.client)),
            ),
        };
        match place {
            Place::At(place) => self.launches.order.insert(place, sequence),
            Place::Later(launch) => self.launches.unplaced.insert(launch, sequence),
        };
        let waiting = Waiting {
            place,
            counts,
            told: false,
            part: part.clone(),
            results: results.to_vec(),
            watch: op.watch,
            user_context: op.user_context,
            client: Arc::clone(&self.client),
            can: false,
            said: false,
            all_can: false,
            launch: None,
            prepared: None,
        };
        self.launches.parts.insert(sequence, waiting);
        Ok(part)
    }

    /// Gives a part its place, behind all that have one.
    pub(super) fn place_part(&mut self, launch: u64) {
        // It may have failed before.
        let Some(sequence) = self.launches.unplaced.remove(&launch) else {
            self.outbox.send(reply::Reply::Started(Started { launch }));
            return;
        };
        let place = self.mint();
        if let Some(waiting) = self.launches.parts.get_mut(&sequence) {
            waiting.place = Place::At(place);
            waiting.counts = None;
            waiting.told = true;
            self.launches.order.insert(place, sequence);
            self.launches.unsaid = true;
        }
    }

    /// Takes out a part that starts or has failed.
    fn remove_part(&mut self, sequence: u64) -> Option<Waiting> {
        let waiting = self.launches.remove_part(sequence)?;
        if waiting.told {
            let launch = waiting.part.number;
            self.outbox.send(reply::Reply::Started(Started { launch }));
        }
        Some(waiting)
    }

    /// An executable that is not known has no placement; all other workers hear that the launch fails.
    pub(super) fn refuse_part(&self, launch: u64, fault: &StatusProto) {
        if let Ok(epoch) = &self.lease.epoch {
            let failure = failure_of(fault, &self.core.place);
            epoch.engine.refuse(launch, self.lease.others(), &failure);
        }
    }

    /// The inputs of a part are there, or come soon.
    pub(super) fn part_can(&mut self, sequence: u64) {
        if let Some(waiting) = self.launches.parts.get_mut(&sequence) {
            waiting.can = true;
            self.launches.unsaid = true;
        }
    }

    /// The inputs of a part are there; it is gone if it has failed meanwhile.
    pub(super) fn part_ready(&mut self, sequence: u64, launch: Launch) {
        if let Some(waiting) = self.launches.parts.get_mut(&sequence) {
            waiting.launch = Some(launch);
            self.part_can(sequence);
        }
    }

    /// Whether a part waits to be started, and has not failed.
    pub(super) fn part_waits(&self, sequence: u64) -> bool {
        self.launches.parts.contains_key(&sequence)
    }

    /// Whether the others have been told that a part can start.
    pub(super) fn is_said(&self, sequence: u64) -> bool {
        let waiting = self.launches.parts.get(&sequence);
        waiting.is_some_and(|waiting| waiting.said)
    }

    /// Tells the other workers which parts this one can start, of those of which they can hear it.
    pub(super) fn say_here(&mut self) {
        let native = self.is_native();
        if native {
            self.prepare_parts();
        }
        // Where the earlier parts lie that some worker cannot start yet.
        let mut earlier = Vec::new();
        let mut failed = Vec::new();
        let Launches { parts, order, .. } = &mut self.launches;
        for sequence in order.values() {
            let Some(waiting) = parts.get_mut(sequence) else {
                continue;
            };
            let processes = &waiting.part.processes;
            let can = waiting.can && (!native || waiting.prepared.is_some());
            if can && !waiting.said && may_be_said(processes, &earlier) {
                match self.lease.reach(processes) {
                    Ok(true) => {
                        waiting.said = true;
                        waiting.part.launch.here();
                    }
                    Ok(false) => {}
                    Err(failure) => {
                        failed.push((*sequence, fault_of(&failure, waiting.user_context)));
                    }
                }
            }
            let known = || earlier.iter().any(|known| Arc::ptr_eq(known, processes));
            if !waiting.all_can && !known() {
                earlier.push(Arc::clone(processes));
            }
        }
        for (sequence, fault) in failed {
            self.part_fails(sequence, &fault);
        }
    }

    /// All workers can start their parts, or the launch has failed.
    fn all_here(&mut self, sequence: u64, outcome: Result<(), Failure>) {
        let Some(waiting) = self.launches.parts.get_mut(&sequence) else {
            return;
        };
        match outcome {
            Ok(()) => {
                waiting.all_can = true;
                self.launches.unsaid = true;
            }
            Err(failure) => {
                let fault = fault_of(&failure, waiting.user_context);
                self.part_fails(sequence, &fault);
            }
        }
    }

    /// Fails a launch of which this worker's part has not started.
    pub(super) fn part_fails(&mut self, sequence: u64, fault: &Fault) {
        let Some(waiting) = self.remove_part(sequence) else {
            return;
        };
        self.launches.unsaid = true;
        waiting.part.fail(fault, &self.core.place);
        self.launch_failed(&waiting.results, waiting.watch, fault);
        if waiting.prepared.is_some() {
            drop(waiting);
            // There is room that it had.
            self.retry_asks();
        }
    }

    /// Starts the first part; `false` when it has to wait for room.
    pub(super) fn start_part(&mut self) -> bool {
        let Some((_, sequence)) = self.launches.first_part() else {
            return false;
        };
        let waiting = self.launches.parts.get_mut(&sequence);
        let Some(launch) = waiting.and_then(|waiting| waiting.launch.take()) else {
            return false;
        };
        let prepared = self.launches.parts.get_mut(&sequence);
        if let Some(prepared) = prepared.and_then(|waiting| waiting.prepared.take()) {
            self.remove_part(sequence);
            self.start_native(sequence, launch, prepared);
            return true;
        }
        let prepared = match self.prepare(&launch) {
            Ok(Some(prepared)) => Ok(prepared),
            Ok(None) => {
                if let Some(waiting) = self.launches.parts.get_mut(&sequence) {
                    waiting.launch = Some(launch);
                }
                return false;
            }
            Err(fault) => Err(fault),
        };
        let Some(waiting) = self.remove_part(sequence) else {
            return false;
        };
        let (shards, kept, room) = match prepared {
            Ok(prepared) => prepared,
            Err(fault) => {
                waiting.part.fail(&fault, &self.core.place);
                self.launch_failed(&launch.results, launch.watch, &fault);
                return true;
            }
        };
        let devices = launch.ordinals.len();
        let mut jobs = Vec::with_capacity(devices);
        for (device, partition) in waiting.part.partitions.iter().enumerate() {
            let member = waiting.part.launch.member(*partition);
            jobs.push(member.map(|member| Job {
                executable: launch.loaded.executable.clone(),
                ordinal: launch.ordinals.get(device).copied().unwrap_or_default(),
                args: launch.args_of(device, &shards).cloned().collect(),
                options: launch.options(&kept),
                member,
            }));
        }
        let user_context = launch.cause.user_context;
        let starting = Starting {
            launch,
            kept,
            shards,
            room,
            missing: devices,
            started: std::iter::repeat_with(|| None).take(devices).collect(),
            fault: None,
        };
        self.launches.starting.insert(sequence, starting);
        for (device, job) in jobs.into_iter().enumerate() {
            let sent = match job {
                Ok(job) => {
                    let (core, serial) = (Arc::clone(&self.core), self.serial);
                    self.core.spanning.on_device(job.ordinal, move || {
                        let started = job.run(&core.client, user_context);
                        core.post(serial, move |session| {
                            session.part_started(sequence, device, started);
                        });
                    })
                }
                Err(failure) => Err((*fault_of(&failure, user_context)).clone()),
            };
            if let Err(status) = sent {
                self.part_started(sequence, device, Err(Arc::new(status)));
            }
        }
        true
    }

    /// A device's thread has handed the part to the plugin, or the plugin has refused it.
    fn part_started(&mut self, sequence: u64, device: usize, started: Result<OneExecution, Fault>) {
        let place = &self.core.place;
        let Some(starting) = self.launches.starting.get_mut(&sequence) else {
            return;
        };
        starting.missing -= 1;
        match started {
            Ok(execution) => {
                if let Some(slot) = starting.started.get_mut(device) {
                    *slot = Some(execution);
                }
            }
            Err(fault) => {
                if let Some(part) = &starting.launch.part {
                    // The plugin's word for a collective that another worker has failed says less than the cause.
                    let fault = part
                        .fault(starting.launch.cause.user_context)
                        .unwrap_or(fault);
                    // Now, since the other devices wait for this one.
                    part.fail(&fault, place);
                    starting.fault.get_or_insert(fault);
                }
            }
        }
        if starting.missing > 0 {
            return;
        }
        let Some(starting) = self.launches.starting.remove(&sequence) else {
            return;
        };
        let Starting {
            mut launch,
            kept,
            shards,
            room,
            started,
            fault,
            ..
        } = starting;
        if let Some(fault) = fault {
            let device = launch.ordinals.first().copied().unwrap_or(0);
            let fault = self.with_table_if_memory(fault, device, &launch.cause);
            self.launch_failed(&launch.results, launch.watch, &fault);
            // Those that have started hold their room until they have ended.
            launch.watch = 0;
            if started.iter().all(Option::is_none) {
                self.retry_asks();
                return;
            }
        }
        let (mut outputs, mut done) = (Vec::new(), Vec::new());
        for execution in started {
            match execution {
                Some(execution) => {
                    outputs.push(execution.outputs);
                    done.push(execution.done);
                }
                None => outputs.push(Vec::new()),
            }
        }
        self.launched(
            sequence,
            launch,
            &kept,
            shards,
            room,
            Execution { outputs, done },
        );
    }

    /// A device's part has failed, while others may wait for it.
    pub(super) fn part_broke(&mut self, sequence: u64, fault: Fault) {
        let Some(record) = self.launches.in_flight.get(&sequence) else {
            return;
        };
        let Some(part) = record.part.clone() else {
            return;
        };
        if let Some(open) = record.open_input() {
            // The execution that caused it is to be named.
            self.when_ended(&open, move |session| session.part_broke(sequence, fault));
            return;
        }
        let cause = record.cause().unwrap_or(fault);
        part.fail(&cause, &self.core.place);
        self.native_failed(&cause);
    }
}

/// A device's part of a launch, for the device's thread.
struct Job {
    executable: LoadedExecutable,
    ordinal: usize,
    args: Vec<Buffer>,
    options: waystation_pjrt::ExecuteOptions,
    member: collectives::Member,
}

impl Job {
    fn run(
        self,
        client: &waystation_pjrt::Client,
        user_context: u64,
    ) -> Result<OneExecution, Fault> {
        let failed = |error| Arc::new(status::of_plugin(&error, user_context));
        let device = client.devices().get(self.ordinal);
        let device = device.ok_or_else(|| {
            Arc::new(status::invalid(format!(
                "there is no local device {}",
                self.ordinal
            )))
        })?;
        let context =
            ExecuteContext::new(client.plugin(), Arc::new(self.member)).map_err(failed)?;
        let args: Vec<&Buffer> = self.args.iter().collect();
        self.executable
            .execute_on(device, &args, &self.options, Some(&context))
            .map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn here_is_said_behind_another_part_only_where_all_have_that_too() {
        let on = |processes: &[u32]| -> Arc<[Process]> {
            processes.iter().copied().map(Process).collect()
        };
        let (ab, ac, abc) = (on(&[1, 1, 2, 2]), on(&[1, 3]), on(&[1, 2, 3]));
        assert!(may_be_said(&ac, &[]));
        assert!(!may_be_said(&ac, &[Arc::clone(&ab)]), "3 has it not");
        assert!(may_be_said(&ac, &[Arc::clone(&abc)]));
        assert!(may_be_said(&ab, &[Arc::clone(&ab), on(&[2, 1])]));
        assert!(!may_be_said(&abc, &[Arc::clone(&abc), ac]));
    }
}
