//! Programs of a session: compiling, loaded or failed.

use std::{
    cell::RefCell,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{runtime::Handle, task::AbortHandle};
use waystation_proto::waystation::worker::{Compile, CompileDone, Load, reply};

use super::Session;
pub(super) use crate::compiler::Loaded;
use crate::{
    compiler::Request,
    counters,
    status::{self, Fault},
};

/// What stands behind an executable id.
pub(super) struct Program {
    /// Devices it runs on.
    pub(super) devices: usize,
    state: RefCell<State>,
}

enum State {
    Compiling {
        waits: Vec<u64>,
        _task: Option<Task>,
    },
    Done(Result<Arc<Loaded>, Fault>),
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
            // Not built: devices of others are refused below.
            processes: _,
        } = op;
        let state = RefCell::new(State::Compiling {
            waits: Vec::new(),
            _task: None,
        });
        let entry = Rc::new(Program {
            devices: device_ids.len(),
            state,
        });
        if self
            .programs
            .insert(executable, Rc::clone(&entry))
            .is_some()
        {
            tracing::warn!(executable, "an executable id was used twice");
        }
        if let Err(status) = self
            .all_local(&device_ids)
            .and_then(|()| self.room_to_wait())
        {
            self.compiled(request, executable, Err(Arc::new(status)));
            return;
        }
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let asked = Request {
            program,
            options,
            device_ids,
            ordinals: Arc::clone(&self.ordinals),
            xla_flags,
        };
        let begun = Instant::now();
        let task = self.core.runtime.spawn(async move {
            let compiler = Arc::clone(&core.compiler);
            let result = compiler.load(asked).await.map_err(Arc::new);
            counters::add(&core.counters.programs, 1);
            counters::add_time(&core.counters.program_nanos, begun.elapsed());
            core.post(serial, move |session| {
                session.compiled(request, executable, result)
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

    /// Refuses programs that run on devices of other workers too.
    fn all_local(
        &self,
        device_ids: &[i32],
    ) -> Result<(), waystation_proto::tensorflow::StatusProto> {
        let foreign: Vec<i32> = device_ids
            .iter()
            .copied()
            .filter(|id| !self.ordinals.contains_key(id))
            .collect();
        if foreign.is_empty() {
            return Ok(());
        }
        Err(status::unimplemented(format!(
            "programs that span workers are not built: this worker has no devices {foreign:?} of those of the program"
        )))
    }

    pub(super) fn refuse_load(&self, op: &Load) {
        self.outbox.send(reply::Reply::CompileDone(CompileDone {
            request: op.request,
            status: Some(status::unimplemented(
                "programs that span workers are not built",
            )),
            info: None,
        }));
    }

    fn compiled(&mut self, request: u64, executable: u64, result: Result<Arc<Loaded>, Fault>) {
        let done = match &result {
            Ok(loaded) => CompileDone {
                request,
                status: None,
                info: Some(loaded.info.clone()),
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
            self.park(wait, 1, Vec::new(), then);
        } else {
            then(self);
        }
    }
}
