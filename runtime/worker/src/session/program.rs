//! Programs of a session: compiling, loaded or failed.

use std::{
    cell::RefCell,
    collections::HashSet,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{runtime::Handle, task::AbortHandle};
use waystation_collectives::Process;
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::worker::{Compile, CompileDone, Load, reply},
};

use super::{Session, span::Placement};
pub(super) use crate::compiler::Loaded;
use crate::{
    compiler::{Artifact, Elsewhere, Request},
    counters,
    status::{self, Fault},
    table::Held,
};

/// What stands behind an executable id.
pub(super) struct Program {
    /// Devices of this worker that it runs on.
    pub(super) devices: usize,
    /// Set if it runs on other workers too.
    pub(super) placement: Option<Placement>,
    /// Set if it should run on other workers too, and this one has refused its part.
    pub(super) misplaced: bool,
    state: RefCell<State>,
}

enum State {
    Compiling {
        waits: Vec<u64>,
        _task: Option<Task>,
    },
    Done(Result<Arc<Loaded>, Fault>),
}

/// Why a program does not run here.
struct Misplaced {
    status: StatusProto,
    /// Other workers may run it.
    spans: bool,
}

/// What the proxy hears of a program that is loaded.
#[derive(Clone, Copy)]
enum Told {
    All,
    /// It knows the rest from another worker.
    Outcome,
}

/// The task of a compile. Dropped before its end, it is broken off some time later: what is compiled for nobody may be of
/// use yet to a client that comes back, but what does not end must not stay.
struct Task {
    task: AbortHandle,
    runtime: Handle,
    patience: Duration,
}

impl Drop for Task {
    fn drop(&mut self) {
        if self.task.is_finished() {
            return;
        }
        let (task, patience) = (self.task.clone(), self.patience);
        self.runtime.spawn(async move {
            tokio::time::sleep(patience).await;
            task.abort();
        });
    }
}

impl Program {
    /// The executable, when it is there.
    pub(super) fn loaded(&self) -> Option<Arc<Loaded>> {
        self.result().ok()
    }

    /// Devices it runs on, with those of other workers.
    pub(super) fn all_devices(&self) -> usize {
        let placement = self.placement.as_ref();
        placement.map_or(self.devices, |placement| placement.processes.len())
    }

    /// The places of this worker's devices among all of them.
    pub(super) fn places(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.devices).map(|device| match &self.placement {
            // No more than there are devices.
            Some(placement) => placement.partitions[device] as usize,
            None => device,
        })
    }

    /// Local ordinals of this worker's devices, in logical order.
    pub(super) fn ordinals(&self, loaded: &Loaded) -> Arc<[usize]> {
        let placement = self.placement.as_ref();
        placement.map_or_else(
            || Arc::clone(&loaded.ordinals),
            |placement| Arc::clone(&placement.ordinals),
        )
    }

    /// How the compile ended.
    pub(super) fn result(&self) -> Result<Arc<Loaded>, Fault> {
        match &*self.state.borrow() {
            State::Done(result) => result.clone(),
            State::Compiling { .. } => {
                Err(Arc::new(status::invalid("the program is not compiled yet")))
            }
        }
    }
}

impl Session {
    pub(super) fn compile(&mut self, op: Compile) {
        let Compile {
            request,
            executable,
            program,
            options,
            device_ids,
            xla_flags,
            processes,
            stand_in,
        } = op;
        let (placement, ordinals) = match stand_in {
            true => (
                Ok(None),
                Arc::new(device_ids.iter().copied().zip(0..).collect()),
            ),
            false => {
                let placement = self.placement(&device_ids, &processes);
                (placement, Arc::clone(&self.ordinals))
            }
        };
        let asked = Request {
            program,
            options,
            ordinals,
            xla_flags,
            spanning: !processes.is_empty(),
            device_ids,
        };
        let compiler = Arc::clone(&self.core.compiler);
        let devices = asked.device_ids.len();
        let work = async move { compiler.load(asked).await };
        self.begin(request, executable, devices, placement, Told::All, work);
    }

    /// Gets a program that spans workers from the one that compiles it.
    pub(super) fn load(&mut self, op: Load) {
        let placement = self.placement(&op.device_ids, &op.processes);
        let from = Elsewhere {
            address: op.from,
            epoch: op.from_epoch,
            secret: self.holder.secret.clone(),
            executable: op.from_executable,
            key: op.key,
            info: op.info.unwrap_or_default(),
        };
        let core = Arc::clone(&self.core);
        let work = async move { core.compiler.fetch(&core.peers, from).await };
        let devices = op.device_ids.len();
        self.begin(
            op.request,
            op.executable,
            devices,
            placement,
            Told::Outcome,
            work,
        );
    }

    /// Has a program loaded beside the dispatch thread.
    fn begin(
        &mut self,
        request: u64,
        executable: u64,
        devices: usize,
        placement: Result<Option<Placement>, Misplaced>,
        told: Told,
        work: impl Future<Output = Result<Arc<Loaded>, StatusProto>> + Send + 'static,
    ) {
        let (placement, misplaced, wrong) = match placement {
            Ok(placement) => (placement, false, None),
            Err(Misplaced { status, spans }) => (None, spans, Some(status)),
        };
        let own = placement
            .as_ref()
            .map(|placement| placement.partitions.len());
        let entry = Rc::new(Program {
            devices: own.unwrap_or(devices),
            placement,
            misplaced,
            state: RefCell::new(State::Compiling {
                waits: Vec::new(),
                _task: None,
            }),
        });
        if self
            .programs
            .insert(executable, Rc::clone(&entry))
            .is_some()
        {
            tracing::warn!(executable, "an executable id was used twice");
        }
        if let Some(status) = wrong.or_else(|| self.room_to_wait().err()) {
            self.compiled(request, executable, told, Err(Arc::new(status)));
            return;
        }
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let begun = Instant::now();
        let task = self.core.runtime.spawn(async move {
            let result = work.await.map_err(Arc::new);
            counters::add(&core.counters.programs, 1);
            counters::add_time(&core.counters.program_nanos, begun.elapsed());
            core.post(serial, move |session| {
                session.compiled(request, executable, told, result)
            });
        });
        // What the task has posted comes only after this.
        entry.state.replace(State::Compiling {
            waits: Vec::new(),
            _task: Some(Task {
                task: task.abort_handle(),
                runtime: self.core.runtime.clone(),
                patience: self.core.limits.unwanted_compile,
            }),
        });
    }

    /// Where the partitions lie, of a program that spans workers: `processes` says it, and is empty for others.
    fn placement(
        &self,
        device_ids: &[i32],
        processes: &[u32],
    ) -> Result<Option<Placement>, Misplaced> {
        let spans = !processes.is_empty();
        let placement = if spans {
            self.spanning_placement(device_ids, processes).map(Some)
        } else {
            self.all_local(device_ids).map(|()| None)
        };
        placement.map_err(|status| Misplaced { status, spans })
    }

    fn spanning_placement(
        &self,
        device_ids: &[i32],
        processes: &[u32],
    ) -> Result<Placement, StatusProto> {
        let epoch = self.lease.epoch.as_ref().map_err(|why| {
            status::unimplemented(format!(
                "programs over several workers, on the worker of {}: {why}",
                self.core.place
            ))
        })?;
        if processes.len() != device_ids.len() {
            return Err(status::invalid(format!(
                "a program on {} devices names the processes of {}",
                device_ids.len(),
                processes.len()
            )));
        }
        let distinct: HashSet<i32> = device_ids.iter().copied().collect();
        if distinct.len() != device_ids.len() {
            return Err(status::invalid("a program names a device twice"));
        }
        let me = epoch.engine.process();
        let (mut partitions, mut ordinals) = (Vec::new(), Vec::new());
        for ((partition, id), process) in (0..).zip(device_ids).zip(processes) {
            if Process(*process) != me {
                continue;
            }
            let ordinal = self.ordinals.get(id);
            let ordinal = ordinal.and_then(|ordinal| usize::try_from(*ordinal).ok());
            partitions.push(partition);
            ordinals.push(
                ordinal.ok_or_else(|| {
                    status::invalid(format!("device {id} is none of this worker's"))
                })?,
            );
        }
        if partitions.is_empty() {
            return Err(status::invalid("a program that runs on other workers only"));
        }
        Ok(Placement {
            processes: processes.iter().copied().map(Process).collect(),
            partitions: partitions.into(),
            ordinals: ordinals.into(),
        })
    }

    /// The serialized form of a program that spans workers, for another of them.
    pub(crate) fn artifact(&mut self, executable: u64) -> Result<Artifact, StatusProto> {
        let program = self.programs.get(&executable).ok_or_else(|| {
            status::invalid(format!("executable {executable} is unknown to this worker"))
        })?;
        let loaded = program.result().map_err(Arc::unwrap_or_clone)?;
        loaded.artifact.clone().ok_or_else(|| {
            status::invalid(format!("executable {executable} does not span workers"))
        })
    }

    /// Refuses programs that run on devices of other workers too.
    fn all_local(&self, device_ids: &[i32]) -> Result<(), StatusProto> {
        let foreign: Vec<i32> = device_ids
            .iter()
            .copied()
            .filter(|id| !self.ordinals.contains_key(id))
            .collect();
        if foreign.is_empty() {
            return Ok(());
        }
        Err(status::invalid(format!(
            "this worker has no devices {foreign:?} of those of the program"
        )))
    }

    fn compiled(
        &mut self,
        request: u64,
        executable: u64,
        told: Told,
        result: Result<Arc<Loaded>, Fault>,
    ) {
        let done = match &result {
            Ok(loaded) => CompileDone {
                request,
                status: None,
                info: match told {
                    Told::All => Some(loaded.info.clone()),
                    Told::Outcome => None,
                },
            },
            Err(fault) => CompileDone {
                request,
                status: Some((**fault).clone()),
                info: None,
            },
        };
        self.outbox.send(reply::Reply::CompileDone(done));
        // Unloaded meanwhile: executions that wait for it have gone with the entry, which they hold.
        let Some(program) = self.programs.get(&executable).map(Rc::clone) else {
            return;
        };
        let before = program.state.replace(State::Done(result));
        if let State::Compiling { waits, .. } = before {
            for wait in waits {
                self.progress(wait);
            }
        }
    }

    pub(super) fn unload(&mut self, executable: u64) {
        let Some(program) = self.programs.remove(&executable) else {
            return;
        };
        // Executions that wait for the compile lose it; one that has begun keeps the executable alive.
        let waits = match &mut *program.state.borrow_mut() {
            State::Compiling { waits, .. } => std::mem::take(waits),
            State::Done(_) => return,
        };
        let fault = Arc::new(status::invalid(format!(
            "executable {executable} was unloaded before it was compiled"
        )));
        program.state.replace(State::Done(Err(fault)));
        for wait in waits {
            self.progress(wait);
        }
    }

    /// Runs `then` when the compile has ended, at once if it has.
    pub(super) fn when_loaded(
        &mut self,
        program: &Rc<Program>,
        then: impl FnOnce(&mut Session) + 'static,
    ) {
        let wait = self.mint();
        let waits = match &mut *program.state.borrow_mut() {
            State::Compiling { waits, .. } => {
                waits.push(wait);
                true
            }
            State::Done(_) => false,
        };
        if waits {
            self.park(wait, 1, Held::of(Vec::new()), then);
        } else {
            then(self);
        }
    }
}
