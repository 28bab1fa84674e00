//! Execute. An execution whose inputs all have buffers goes to the plugin at once, as long as few enough are in flight; the
//! results have buffers then, though the device computes still. Others wait without holding up what comes behind.

use std::{rc::Rc, sync::Arc};

use waystation_pjrt::Execution;
use waystation_proto::{tensorflow::StatusProto, waystation::worker::Execute};

use super::{
    Session,
    execution::{Launch, fits, saved},
    launches::{InFlight, Next},
    program::{Loaded, Program},
    span::Part,
};
use crate::{
    counters,
    join::{Failed, join},
    ledger::Charge,
    status::{self, Fault},
    table::{Held, Maker, Origin, Shard, Slot, Value},
    usage::Cause,
    window::Permit,
};

impl Session {
    pub(super) fn execute(&mut self, op: Execute, permit: Option<Permit>) {
        let Some(program) = self.programs.get(&op.executable).map(Rc::clone) else {
            // Without the program the number of devices is unknown, and so are the result ids. Ops that use them find
            // unknown shards, which is the same failure.
            let message = format!("executable {} is unknown to this worker", op.executable);
            tracing::warn!(launch = op.launch, message);
            self.refuse_part(op.launch, &status::invalid(message.clone()));
            if op.watch != 0 {
                self.watch_done(
                    op.watch,
                    Some(Arc::new(status::with_context(
                        status::invalid(message),
                        op.user_context,
                    ))),
                );
            }
            return;
        };
        if program.misplaced
            && let Err(fault) = program.result()
        {
            // Without a placement there is no part to fail.
            self.refuse_part(op.launch, &fault);
        }
        let devices = program.devices;
        let args = Held::of(op.args.iter().map(|&shard| self.slot(shard)).collect());
        let loaded = program.loaded();
        // Its place may be as long in coming as an input.
        let soon = !op.placed_later
            && loaded.is_some()
            && args
                .iter()
                .all(|slot| !matches!(slot.value(), Value::Pending { soon: false }))
            && loaded.as_ref().is_some_and(|loaded| {
                saved(&args, loaded.donated(&op.non_donatable), devices).is_empty()
            });
        let results = match self.new_results(&op, &program, soon) {
            Ok(results) => results,
            Err(status) => {
                let fault = Arc::new(status::with_context(status, op.user_context));
                self.refuse_part(op.launch, &fault);
                if op.watch != 0 {
                    self.watch_done(op.watch, Some(fault));
                }
                return;
            }
        };
        let sequence = self.mint();
        let mut part = None;
        if let Some(placement) = &program.placement {
            match self.open_part(sequence, &op, placement, &results) {
                Ok(opened) => part = Some(opened),
                Err(fault) => {
                    self.launch_failed(&results, op.watch, &fault);
                    return;
                }
            }
        }
        let begins = Self::goes_on(&self.client).and_then(|()| self.room_to_wait());
        if let Err(status) = begins {
            let fault = Arc::new(status::with_context(status, op.user_context));
            self.give_up(sequence, part.is_some(), &results, op.watch, &fault);
            return;
        }
        if let Some(loaded) = &loaded {
            self.retire_donated(loaded, &op, devices);
        }
        if part.is_some() && soon {
            self.part_can(sequence);
        }
        // An op that waits for something from outside gives its permit back: what it waits for may be behind it.
        let permit = permit.filter(|_| soon);
        let (wanted, retired, entry) = (args.to_vec(), loaded.is_some(), Rc::clone(&program));
        let cause = self.cause(op.user_context);
        self.when_loaded(&entry, move |session| {
            session.when(&wanted, move |session| {
                session.inputs_there(
                    sequence, &op, cause, &program, part, args, results, retired, permit,
                );
            });
        });
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the pieces of one op, in its two steps"
    )]
    fn inputs_there(
        &mut self,
        sequence: u64,
        op: &Execute,
        cause: Cause,
        program: &Program,
        part: Option<Part>,
        args: Held,
        results: Vec<Rc<Slot>>,
        retired: bool,
        permit: Option<Permit>,
    ) {
        if part.is_some() && !self.part_waits(sequence) {
            // It has failed meanwhile.
            return;
        }
        let loaded = match program.result() {
            Ok(loaded) => loaded,
            Err(fault) => {
                self.give_up(sequence, part.is_some(), &results, op.watch, &fault);
                return;
            }
        };
        if let Err(status) = fits(op, &loaded, program.devices) {
            let fault = Arc::new(status::with_context(status, op.user_context));
            self.give_up(sequence, part.is_some(), &results, op.watch, &fault);
            return;
        }
        if !retired {
            self.retire_donated(&loaded, op, program.devices);
        }
        let mut launch = Launch {
            ordinals: program.ordinals(&loaded),
            loaded,
            part,
            args,
            results,
            kept: op
                .non_donatable
                .iter()
                .map(|&index| i64::from(index))
                .collect(),
            launch_id: op.launch_id,
            cause,
            watch: op.watch,
            _permit: permit,
        };
        // What it takes over, a save must have copied first: a copy of its own might not have room.
        let own = launch.loaded.donated(&op.non_donatable);
        let saved = saved(&launch.args, own, program.devices);
        if saved.is_empty() {
            self.launch_ready(sequence, launch);
            return;
        }
        // What it waits for takes as long as it takes.
        launch._permit = None;
        let wait = self.mint();
        for slot in &saved {
            slot.await_saves(wait);
        }
        self.park(wait, saved.len(), Held::of(Vec::new()), move |session| {
            session.launch_ready(sequence, launch);
        });
    }

    /// All that a launch needs is there.
    fn launch_ready(&mut self, sequence: u64, launch: Launch) {
        let spans = launch.part.is_some();
        // Where the others may have begun by the plugin's own collectives, nothing ends them but this part.
        let must = spans && self.is_native() && self.is_said(sequence);
        let goes_on = Self::goes_on(&launch.cause.client);
        if let Some(status) = goes_on.err().filter(|_| !must) {
            self.give_up(
                sequence,
                spans,
                &launch.results,
                launch.watch,
                &Arc::new(status),
            );
        } else if spans {
            self.part_ready(sequence, launch);
        } else {
            self.launches.ready.insert(sequence, launch);
        }
    }

    /// Fails a launch that has not started.
    fn give_up(
        &mut self,
        sequence: u64,
        spans: bool,
        results: &[Rc<Slot>],
        watch: u64,
        fault: &Fault,
    ) {
        if spans {
            self.part_fails(sequence, fault);
        } else {
            self.launch_failed(results, watch, fault);
        }
    }

    /// Pending slots for the results, in the table.
    fn new_results(
        &mut self,
        op: &Execute,
        program: &Program,
        soon: bool,
    ) -> Result<Vec<Rc<Slot>>, StatusProto> {
        // With those of other workers, whose results have numbers too.
        let devices = program.all_devices();
        let count = usize::try_from(op.num_results)
            .ok()
            .and_then(|results| results.checked_mul(devices))
            .filter(|&count| {
                count <= MAX_RESULT_SHARDS && op.first_result.checked_add(count as u64).is_some()
            })
            .ok_or_else(|| {
                status::invalid(format!(
                    "{} results on {devices} devices are too many",
                    op.num_results
                ))
            })?;
        let mut slots = Vec::with_capacity(count);
        for result in (0..count).step_by(devices.max(1)) {
            for device in program.places() {
                let slot = Slot::pending(soon);
                self.insert(op.first_result + (result + device) as u64, Rc::clone(&slot));
                slots.push(slot);
            }
        }
        Ok(slots)
    }

    /// Takes the shards that the execution takes over out of the table: ops behind it shall not find them.
    fn retire_donated(&mut self, loaded: &Loaded, op: &Execute, devices: usize) {
        for parameter in loaded.donated(&op.non_donatable) {
            let Some(shards) = parameter
                .checked_mul(devices)
                .and_then(|start| op.args.get(start..start.checked_add(devices)?))
            else {
                continue;
            };
            for shard in shards {
                if let Some(slot) = self.table.get_mut(shard) {
                    *slot = Rc::clone(&self.donated);
                }
            }
        }
    }

    pub(super) fn launch_failed(&mut self, results: &[Rc<Slot>], watch: u64, fault: &Fault) {
        self.fail_all(results, fault);
        if watch != 0 {
            self.watch_done(watch, Some(Arc::clone(fault)));
        }
    }

    /// Hands the next execution to the plugin; `false` when there is none or enough are in flight.
    pub(super) fn launch_next(&mut self) -> bool {
        if self.room.waiting() > 0 {
            return false;
        }
        match self.launches.next(self.core.limits.launches_in_flight) {
            None => false,
            Some(Next::Part) => self.start_part(),
            Some(Next::Local) => self.start_local(),
        }
    }

    fn start_local(&mut self) -> bool {
        let Some((sequence, launch)) = self.launches.ready.pop_first() else {
            return false;
        };
        let (shards, kept, room) = match self.prepare(&launch) {
            Ok(Some(prepared)) => prepared,
            Ok(None) if self.executes() => {
                self.launches.ready.insert(sequence, launch);
                return false;
            }
            Ok(None) => {
                self.await_sends(sequence, launch);
                return true;
            }
            Err(fault) => {
                self.launch_failed(&launch.results, launch.watch, &fault);
                return true;
            }
        };
        match launch.run(&kept, &shards) {
            Err(error) => {
                let device = launch.ordinals.first().copied().unwrap_or(0);
                let fault = self.plugin_fault(&error, device, &launch.cause);
                self.launch_failed(&launch.results, launch.watch, &fault);
            }
            Ok(execution) => self.launched(sequence, launch, &kept, shards, room, execution),
        }
        true
    }

    /// The inputs of a launch, those of its parameters that are kept, and room for what it makes; `None` when it has to wait for
    /// room that comes free.
    pub(super) fn prepare(&mut self, launch: &Launch) -> Result<Option<Prepared>, Fault> {
        let mut shards: Vec<Rc<Shard>> = Vec::with_capacity(launch.args.len());
        for slot in launch.args.iter() {
            match slot.value() {
                Value::Ready(shard) => shards.push(shard),
                Value::Failed(fault) => return Err(fault),
                Value::Pending { .. } => {
                    return Err(Arc::new(status::invalid(
                        "an execution was started before its inputs were there",
                    )));
                }
            }
        }
        let kept = launch.all_kept();
        match self.core.ledger.reserve(&launch.asks(&kept, &shards)) {
            Ok(room) => Ok(Some((shards, kept, room))),
            // Those in flight hold room that comes free.
            Err(_) if self.executes() => Ok(None),
            // So do inputs that are being sent, when the plugin can take them over.
            Err(_) if !launch.sent().is_empty() => Ok(None),
            Err(full) => {
                let (name, temporaries) = (&launch.loaded.name, launch.loaded.temporaries_need());
                let detail = format!(
                    " to execute '{name}' ({temporaries} of them for temporaries, the rest for results that take no input's place)"
                );
                Err(self.out_of_memory(full, &detail, &launch.cause))
            }
        }
    }

    /// Keeps a launch until none of what it takes over is being sent. Others go on.
    fn await_sends(&mut self, sequence: u64, mut launch: Launch) {
        launch._permit = None;
        let (sent, wait) = (launch.sent(), self.mint());
        for slot in &sent {
            slot.await_sends(wait);
        }
        self.park(wait, sent.len(), Held::of(Vec::new()), move |session| {
            session.launch_ready(sequence, launch);
        });
    }

    /// A shard has been sent, or copied to the host.
    pub(super) fn end_send(&mut self, slot: &Slot) {
        for wait in slot.end_send() {
            self.progress(wait);
        }
        // Room that a part waits for before others hear of it.
        self.launches.unsaid |= !self.launches.parts.is_empty();
    }

    /// Whether the plugin has executions that have not ended.
    pub(super) fn executes(&self) -> bool {
        let launches = &self.launches;
        !(launches.in_flight.is_empty()
            && launches.starting.is_empty()
            && launches.handing.is_empty())
    }

    pub(super) fn launched(
        &mut self,
        sequence: u64,
        launch: Launch,
        kept: &[i64],
        inputs: Vec<Rc<Shard>>,
        mut room: Vec<Charge>,
        execution: Execution,
    ) {
        counters::add(&self.core.counters.executes, 1);
        let Execution { outputs, done } = execution;
        let devices = outputs.len();
        let loaded = Arc::clone(&launch.loaded);
        let origin = Origin::new(
            launch.cause.clone(),
            Maker::Program(Arc::clone(&loaded.name)),
        );
        for (device, shard) in launch.donated(kept, &inputs) {
            if let (Some(pool), Some(charge)) = (room.get_mut(device), shard.give_up()) {
                pool.merge(charge);
            }
        }
        let sizes = loaded.result_bytes(&outputs);
        for (device, buffers) in outputs.into_iter().enumerate() {
            for (result, buffer) in buffers.into_iter().enumerate() {
                let Some(slot) = launch.results.get(result * devices + device) else {
                    continue;
                };
                let bytes = sizes.get(result).copied().unwrap_or_default();
                let charge = room
                    .get_mut(device)
                    .filter(|_| loaded.is_accounted(result))
                    .map(|pool| pool.split(bytes));
                let (origin, counters) = (Rc::clone(&origin), &self.core.counters);
                let shard = Shard::new(buffer, bytes, charge, origin, counters);
                self.resolve(slot, Ok(shard));
            }
        }
        // What was reserved for results and given by inputs is the results' now.
        let temporaries = loaded.temporaries_need();
        room.retain_mut(|pool| {
            pool.correct(temporaries);
            temporaries > 0
        });
        // A plugin that gave fewer buffers than it has outputs.
        self.fail_all(
            &launch.results,
            &Arc::new(status::invalid("the plugin gave no buffer for this result")),
        );
        let record = InFlight {
            loaded,
            origin,
            inputs,
            room,
            watch: launch.watch,
            devices,
            device: launch.ordinals.first().copied().unwrap_or(0),
            part: launch.part,
        };
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let user_context = launch.cause.user_context;
        let failed = record.part.is_some().then(|| {
            let core = Arc::clone(&core);
            Box::new(move |error: &waystation_pjrt::Error| {
                let fault = Arc::new(status::of_plugin(error, user_context));
                core.post(serial, move |session| session.part_broke(sequence, fault));
            }) as Failed
        });
        self.launches.in_flight.insert(sequence, record);
        join(done, failed, move |result| {
            let result = result.map_err(|error| Arc::new(status::of_plugin(&error, user_context)));
            core.post(serial, move |session| session.launch_done(sequence, result));
        });
    }

    fn launch_done(&mut self, sequence: u64, result: Result<(), Fault>) {
        let Some(record) = self.launches.in_flight.get(&sequence) else {
            return;
        };
        // A failure that came with the inputs may be heard of here first; the execution that caused it is to be named.
        if result.is_err()
            && let Some(origin) = record.open_input()
        {
            self.when_ended(&origin, move |session| {
                session.launch_done(sequence, result)
            });
            return;
        }
        // Another worker's part may have failed where this one went on without it.
        let cause = record
            .cause()
            .filter(|_| result.is_err() || record.part.is_some());
        let Some(InFlight {
            origin,
            inputs,
            room,
            watch,
            device,
            part,
            loaded: _loaded,
            ..
        }) = self.launches.in_flight.remove(&sequence)
        else {
            return;
        };
        let fault = cause.or(result.err()).map(|fault| {
            // Its results are no shards any more from here on.
            let fault = origin.fail(fault);
            origin.amend(self.with_table_if_memory(fault, device, &origin.cause))
        });
        if let (Some(part), Some(fault)) = (&part, &fault) {
            part.fail(fault, &self.core.place);
            self.native_failed(fault);
        }
        drop((inputs, room));
        // Room that a part waits for before others hear of it.
        self.launches.unsaid |= !self.launches.parts.is_empty();
        for wait in origin.end() {
            self.progress(wait);
        }
        if watch != 0 {
            self.watch_done(watch, fault);
        }
        self.retry_asks();
    }
}

/// Inputs, kept parameters, and room.
pub(super) type Prepared = (Vec<Rc<Shard>>, Vec<i64>, Vec<Charge>);

/// Result shards that one execution may have.
const MAX_RESULT_SHARDS: usize = 1 << 22;
