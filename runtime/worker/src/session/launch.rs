//! Execute. An execution whose inputs all have buffers goes to the plugin at once, as long as few enough are in flight; the
//! results have buffers then, though the device computes still. Others wait without holding up what comes behind.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    rc::Rc,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use waystation_pjrt::{Buffer, ExecuteOptions, Execution};
use waystation_proto::{tensorflow::StatusProto, waystation::worker::Execute};

use super::{
    Session,
    program::{Loaded, Program},
};
use crate::{
    counters,
    status::{self, Fault},
    table::{Origin, Shard, Slot, Value},
    window::Permit,
};

/// Executions of a session.
#[derive(Default)]
pub(super) struct Launches {
    /// Those whose inputs are there, in stream order.
    ready: BTreeMap<u64, Launch>,
    /// Those handed to the plugin.
    in_flight: HashMap<u64, InFlight>,
}

/// An execution on its way to the plugin.
struct Launch {
    loaded: Arc<Loaded>,
    /// [argument][device].
    args: Vec<Rc<Slot>>,
    /// [result][device].
    results: Vec<Rc<Slot>>,
    /// Inputs that the client keeps.
    kept: Vec<i64>,
    launch_id: i32,
    origin: Rc<Origin>,
    watch: u64,
    /// Held while nothing from outside is needed: it bounds what the stream may pile up here.
    _permit: Option<Permit>,
}

struct InFlight {
    /// Not to be destroyed while it runs.
    _loaded: Arc<Loaded>,
    origin: Rc<Origin>,
    /// What made the inputs: a failure there is the cause of one here.
    causes: Vec<Rc<Origin>>,
    watch: u64,
}

impl Session {
    pub(super) fn execute(&mut self, op: Execute, permit: Permit) {
        let Some(program) = self.programs.get(&op.executable).map(Rc::clone) else {
            // Without the program the number of devices is unknown, and so are the result ids. Ops that use them find
            // unknown shards, which is the same failure.
            let message = format!("executable {} is unknown to this worker", op.executable);
            tracing::warn!(launch = op.launch, message);
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
        let devices = program.devices;
        let args: Vec<Rc<Slot>> = op.args.iter().map(|&shard| self.slot(shard)).collect();
        let loaded = program.loaded();
        let soon = loaded.is_some()
            && args
                .iter()
                .all(|slot| !matches!(slot.value(), Value::Pending { soon: false }));
        let results = match self.new_results(&op, devices, soon) {
            Ok(results) => results,
            Err(status) => {
                let fault = Arc::new(status::with_context(status, op.user_context));
                if op.watch != 0 {
                    self.watch_done(op.watch, Some(fault));
                }
                return;
            }
        };
        if let Err(status) = self.room_to_wait() {
            self.launch_failed(
                &results,
                op.watch,
                &Arc::new(status::with_context(status, op.user_context)),
            );
            return;
        }
        if let Some(loaded) = &loaded {
            self.retire_donated(loaded, &op, devices);
        }
        let sequence = self.mint();
        // An op that waits for something from outside gives its permit back: what it waits for may be behind it.
        let permit = soon.then_some(permit);
        let (held, retired, entry) = (args.clone(), loaded.is_some(), Rc::clone(&program));
        self.when_loaded(&entry, move |session| {
            session.when(&held, move |session| {
                session.inputs_there(sequence, &op, &program, args, results, retired, permit);
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
        program: &Program,
        args: Vec<Rc<Slot>>,
        results: Vec<Rc<Slot>>,
        retired: bool,
        permit: Option<Permit>,
    ) {
        let loaded = match program.result() {
            Ok(loaded) => loaded,
            Err(fault) => {
                self.launch_failed(&results, op.watch, &fault);
                return;
            }
        };
        if let Err(status) = fits(op, &loaded, program.devices) {
            self.launch_failed(
                &results,
                op.watch,
                &Arc::new(status::with_context(status, op.user_context)),
            );
            return;
        }
        if !retired {
            self.retire_donated(&loaded, op, program.devices);
        }
        let launch = Launch {
            loaded,
            args,
            results,
            kept: op
                .non_donatable
                .iter()
                .map(|&index| i64::from(index))
                .collect(),
            launch_id: op.launch_id,
            origin: Origin::new(op.user_context),
            watch: op.watch,
            _permit: permit,
        };
        self.launches.ready.insert(sequence, launch);
    }

    /// Pending slots for the results, in the table.
    fn new_results(
        &mut self,
        op: &Execute,
        devices: usize,
        soon: bool,
    ) -> Result<Vec<Rc<Slot>>, StatusProto> {
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
        let slots: Vec<Rc<Slot>> = std::iter::repeat_with(|| Slot::pending(soon))
            .take(count)
            .collect();
        for (shard, slot) in (op.first_result..).zip(&slots) {
            self.insert(shard, Rc::clone(slot));
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

    fn launch_failed(&mut self, results: &[Rc<Slot>], watch: u64, fault: &Fault) {
        self.fail_all(results, fault);
        if watch != 0 {
            self.watch_done(watch, Some(Arc::clone(fault)));
        }
    }

    /// Hands the next execution to the plugin; `false` when there is none or enough are in flight.
    pub(super) fn launch_next(&mut self) -> bool {
        if self.launches.in_flight.len() >= self.core.limits.launches_in_flight {
            return false;
        }
        let Some((sequence, launch)) = self.launches.ready.pop_first() else {
            return false;
        };
        let mut shards: Vec<Rc<Shard>> = Vec::with_capacity(launch.args.len());
        for slot in &launch.args {
            match slot.value() {
                Value::Ready(shard) => shards.push(shard),
                Value::Failed(fault) => {
                    self.launch_failed(&launch.results, launch.watch, &fault);
                    return true;
                }
                Value::Pending { .. } => {
                    let fault = Arc::new(status::invalid(
                        "an execution was started before its inputs were there",
                    ));
                    self.launch_failed(&launch.results, launch.watch, &fault);
                    return true;
                }
            }
        }
        match launch.run(&shards) {
            Err(error) => {
                let fault = Arc::new(status::of_plugin(&error, launch.origin.user_context));
                self.launch_failed(&launch.results, launch.watch, &fault);
            }
            Ok(execution) => self.launched(sequence, &launch, &shards, execution),
        }
        true
    }

    fn launched(
        &mut self,
        sequence: u64,
        launch: &Launch,
        inputs: &[Rc<Shard>],
        execution: Execution,
    ) {
        counters::add(&self.core.counters.executes, 1);
        let Execution { outputs, done } = execution;
        let devices = outputs.len();
        let sizes = launch.loaded.result_bytes(&outputs);
        for (device, buffers) in outputs.into_iter().enumerate() {
            for (result, buffer) in buffers.into_iter().enumerate() {
                let Some(slot) = launch.results.get(result * devices + device) else {
                    continue;
                };
                let bytes = sizes.get(result).copied().unwrap_or_default();
                let shard = Shard::new(
                    buffer,
                    bytes,
                    Rc::clone(&launch.origin),
                    &self.core.counters,
                );
                self.resolve(slot, Ok(shard));
            }
        }
        // A plugin that gave fewer buffers than it has outputs.
        self.fail_all(
            &launch.results,
            &Arc::new(status::invalid("the plugin gave no buffer for this result")),
        );
        let mut seen = HashSet::new();
        let causes = inputs
            .iter()
            .filter(|shard| !shard.arrived.get() && seen.insert(Rc::as_ptr(&shard.origin)))
            .map(|shard| Rc::clone(&shard.origin))
            .collect();
        let record = InFlight {
            _loaded: Arc::clone(&launch.loaded),
            origin: Rc::clone(&launch.origin),
            causes,
            watch: launch.watch,
        };
        self.launches.in_flight.insert(sequence, record);
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let user_context = launch.origin.user_context;
        join(done, move |result| {
            let result = result.map_err(|error| Arc::new(status::of_plugin(&error, user_context)));
            core.post(serial, move |session| session.launch_done(sequence, result));
        });
    }

    fn launch_done(&mut self, sequence: u64, result: Result<(), Fault>) {
        let Some(InFlight {
            origin,
            causes,
            watch,
            ..
        }) = self.launches.in_flight.remove(&sequence)
        else {
            return;
        };
        let fault = result.err().map(|fault| {
            let cause = causes.iter().find_map(|cause| cause.fault());
            origin.fail(cause.unwrap_or(fault))
        });
        if watch != 0 {
            self.watch_done(watch, fault);
        }
    }
}

/// Result shards that one execution may have.
const MAX_RESULT_SHARDS: usize = 1 << 22;

/// Whether the op's counts are those of the program.
fn fits(op: &Execute, loaded: &Loaded, devices: usize) -> Result<(), StatusProto> {
    let (parameters, results) = (
        loaded.info.parameters.len(),
        loaded.executable.num_outputs(),
    );
    if usize::try_from(op.num_results).ok() != Some(results) {
        return Err(status::invalid(format!(
            "executable {} ({}) has {results} results, {} were asked for",
            op.executable, loaded.info.name, op.num_results
        )));
    }
    if parameters.checked_mul(devices) != Some(op.args.len()) {
        return Err(status::invalid(format!(
            "executable {} ({}) takes {parameters} arguments on {devices} devices, {} shards came",
            op.executable,
            loaded.info.name,
            op.args.len()
        )));
    }
    Ok(())
}

impl Launch {
    fn run(&self, shards: &[Rc<Shard>]) -> Result<Execution, waystation_pjrt::Error> {
        let devices = self.loaded.devices();
        let args: Vec<Vec<&Buffer>> = (0..devices)
            .map(|device| {
                shards
                    .iter()
                    .skip(device)
                    .step_by(devices)
                    .map(|shard| &shard.buffer)
                    .collect()
            })
            .collect();
        let mut non_donatable = self.kept.clone();
        for parameter in self.loaded.donated(&[]) {
            // An op that came earlier still waits to read this input: the plugin must copy instead of taking it over.
            let held = self
                .args
                .iter()
                .skip(parameter * devices)
                .take(devices)
                .any(|slot| slot.is_held());
            if held && let Ok(index) = i64::try_from(parameter) {
                non_donatable.push(index);
            }
        }
        non_donatable.sort_unstable();
        non_donatable.dedup();
        let options = ExecuteOptions {
            launch_id: self.launch_id,
            non_donatable,
        };
        self.loaded.executable.execute(&args, &options)
    }
}

/// Calls `then` once when all events are there, with the first failure if there is one.
fn join(
    events: Vec<waystation_pjrt::Event>,
    then: impl FnOnce(Result<(), waystation_pjrt::Error>) + Send + 'static,
) {
    struct Join<F> {
        missing: AtomicUsize,
        failure: Mutex<Option<waystation_pjrt::Error>>,
        then: Mutex<Option<F>>,
    }
    if events.is_empty() {
        then(Ok(()));
        return;
    }
    let join = Arc::new(Join {
        missing: AtomicUsize::new(events.len()),
        failure: Mutex::new(None),
        then: Mutex::new(Some(then)),
    });
    for event in events {
        let join = Arc::clone(&join);
        event.on_ready(move |result| {
            if let Err(error) = result {
                join.failure
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .get_or_insert(error);
            }
            if join.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
                let failure = join
                    .failure
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                let then = join
                    .then
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                if let Some(then) = then {
                    then(failure.map_or(Ok(()), Err));
                }
            }
        });
    }
}
