//! Compiling in a child process of the worker's own binary (ARCHITECTURE.md, D12): a program that makes the plugin break
//! off, throw or overflow its stack ends the child, not the worker with all its arrays.
//!
//! ```text
//! compiler --job--> Compilers --frames over a socket--> resident child (serve): plugin, one thread a program
//!                       |                                   | dies
//!                       '--each job that was in it, once, alone--> a child of its own --> dies: the program is refused
//! ```
//!
//! The resident child has its own client of the same plugin, opened with the same options. What it compiles comes back
//! serialized and is loaded as a cache hit is. A child ends with the worker, however that ends: its socket closes.

mod frame;
mod process;
mod refused;
mod serve;
mod setup;
mod words;

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::sync::{OnceCell, Semaphore};
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::compile::{Done, Job, Setup},
};

pub(crate) use self::refused::Digest;
pub use self::serve::compile_child;
use self::{
    process::{Death, Process, StartError},
    refused::Refused,
};
use crate::{
    config::CompileChild,
    counters::{self, Counters},
    error::chain,
    plugin::{Opened, Spec},
    status,
};

/// After a start that failed, the worker compiles by itself for so long.
const REST: Duration = Duration::from_secs(30);

/// The API that loads an executable under options of its own, without which nothing of a child's could be loaded.
const API: (i32, i32) = (0, 71);

/// The resident child, started by the first who needs it.
type Resident = Arc<OnceCell<Arc<Process>>>;

/// The worker's compile children.
#[derive(Debug)]
pub(crate) struct Compilers {
    child: CompileChild,
    setup: Setup,
    likeness: Vec<String>,
    plugin: Stamped,
    counters: Arc<Counters>,
    resident: Mutex<Option<Resident>>,
    /// One child for a program alone at a time.
    alone: Semaphore,
    refused: Mutex<Refused>,
    failed_start: Mutex<Option<Instant>>,
    off: AtomicBool,
}

/// A file as it was when the worker loaded it. A child must not load another one under the same name.
#[derive(Debug)]
struct Stamped {
    path: PathBuf,
    stamp: Option<Stamp>,
}

/// Device, inode, size, time of the last change.
type Stamp = (u64, u64, u64, i64, i64);

fn stamp(path: &Path) -> Option<Stamp> {
    let file = fs::metadata(path).ok()?;
    Some((
        file.dev(),
        file.ino(),
        file.size(),
        file.mtime(),
        file.mtime_nsec(),
    ))
}

impl Compilers {
    /// The children of a worker that has opened `spec`; `None` when it is to compile by itself.
    pub(crate) fn new(
        child: Option<CompileChild>,
        spec: &Spec,
        opened: &Opened,
        counters: &Arc<Counters>,
    ) -> Option<Compilers> {
        let child = child?;
        let (platform, api) = (
            opened.client.platform_name(),
            opened.client.plugin().api_version(),
        );
        if (child.cpu_only && platform != "cpu") || api < API {
            tracing::info!(platform, ?api, "programs are compiled in this process");
            return None;
        }
        Some(Compilers {
            child,
            setup: setup::encode(spec),
            likeness: opened.likeness(),
            plugin: Stamped {
                stamp: stamp(&spec.path),
                path: spec.path.clone(),
            },
            counters: Arc::clone(counters),
            resident: Mutex::default(),
            alone: Semaphore::new(1),
            refused: Mutex::default(),
            failed_start: Mutex::default(),
            off: AtomicBool::new(false),
        })
    }

    /// Starts the resident child, so that the first compile does not wait for it.
    pub(crate) async fn warm(&self) {
        self.resident().await;
    }

    /// Ends the children that no job is in, and starts no more.
    pub(crate) fn stop(&self) {
        self.off.store(true, Relaxed);
        self.resident
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }

    /// From now on the worker compiles by itself.
    pub(crate) fn give_up(&self, why: &str) {
        if !self.off.swap(true, Relaxed) {
            tracing::warn!(why, "programs are compiled in this process from now on");
        }
        self.stop();
    }

    /// Has a program compiled. `None` when there is no child and the worker has to do it by itself.
    ///
    /// A program whose child dies is tried once more alone, since another one, or somebody from outside, may have killed it.
    /// Dropped before its end, it retires the child, which would else go on with what nobody wants, for ever perhaps.
    ///
    /// # Errors
    /// The plugin's, or that the program kills its compiler.
    pub(crate) async fn compile(
        &self,
        digest: &Digest,
        job: Job,
    ) -> Result<Option<Done>, StatusProto> {
        if let Some(status) = self.refused().get(digest) {
            return Err(status);
        }
        let Some(process) = self.resident().await else {
            return Ok(None);
        };
        let retire = Retire {
            compilers: self,
            process: &process,
        };
        let done = process.ask(job.clone()).await;
        retire.not_now();
        let done = match done {
            Ok(done) => done,
            Err(death) => {
                self.died(&death, &job, "a program is compiled again, alone");
                drop(process);
                self.compile_alone(digest, job).await?
            }
        };
        match done.status {
            Some(status) => Err(status),
            None => Ok(Some(done)),
        }
    }

    async fn compile_alone(&self, digest: &Digest, job: Job) -> Result<Done, StatusProto> {
        let turn = self.alone.acquire().await;
        let _turn = turn.map_err(|_| status::of(Code::Cancelled, "the worker is going down"))?;
        // Asked for twice at the same time, it need not kill twice.
        if let Some(status) = self.refused().get(digest) {
            return Err(status);
        }
        let process = self.start().await.map_err(|error| {
            status::of(
                Code::Unavailable,
                format!(
                    "the compiler has ended, and no other can be started: {}",
                    chain(&error)
                ),
            )
        })?;
        let death = match process.ask(job.clone()).await {
            Ok(done) => return Ok(done),
            Err(death) => death,
        };
        self.died(&death, &job, "the program is refused");
        let name = name(&job);
        let words = death.words();
        if death.is_kill() {
            return Err(status::exhausted(format!(
                "the compiler was killed ({death}) while compiling {name:?}, as the system does when memory runs out: {words}"
            )));
        }
        let status = status::invalid(format!(
            "the compiler ended with {death} while compiling {name:?}: {words}"
        ));
        self.refused().add(*digest, status.clone());
        Err(status)
    }

    /// The resident child, started if there is none.
    async fn resident(&self) -> Option<Arc<Process>> {
        // The second one is there for a first that has died since its last job.
        for _ in 0..2 {
            if self.off.load(Relaxed) || self.is_resting() {
                return None;
            }
            let resident = {
                let mut resident = self.resident.lock().unwrap_or_else(PoisonError::into_inner);
                Arc::clone(resident.get_or_insert_default())
            };
            let started = resident.get_or_try_init(async || self.start().await.map(Arc::new));
            match started.await {
                Ok(process) if process.is_alive() => return Some(Arc::clone(process)),
                Ok(process) => self.retire(process),
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "there is no compile child; programs are compiled in this process for a while"
                    );
                    *self
                        .failed_start
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                    return None;
                }
            }
        }
        None
    }

    fn is_resting(&self) -> bool {
        let failed = self
            .failed_start
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        failed.is_some_and(|at| at.elapsed() < REST)
    }

    async fn start(&self) -> Result<Process, StartError> {
        if stamp(&self.plugin.path) != self.plugin.stamp {
            let changed = "the plugin's file is not the one that this worker has loaded; start the worker anew";
            return Err(StartError::Spawn(io::Error::other(changed)));
        }
        let begun = Instant::now();
        let process =
            Process::start(&self.child, &self.setup, &self.likeness, &self.counters).await?;
        tracing::info!(pid = process.pid(), took = ?begun.elapsed(), "a compile child is ready");
        Ok(process)
    }

    /// Gives `process` no more jobs. It ends when those in it are done.
    fn retire(&self, process: &Arc<Process>) {
        let mut resident = self.resident.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |resident: &Resident| {
            resident
                .get()
                .is_some_and(|other| Arc::ptr_eq(other, process))
        };
        if resident.as_ref().is_some_and(is_it) {
            *resident = None;
        }
    }

    fn died(&self, death: &Death, job: &Job, then: &str) {
        counters::add(&self.counters.compiler_deaths, 1);
        let (words, name) = (death.words(), name(job));
        tracing::warn!(%death, words, name, "the compile child has ended; {then}");
    }

    fn refused(&self) -> std::sync::MutexGuard<'_, Refused> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Retires a child whose job is given up.
struct Retire<'a> {
    compilers: &'a Compilers,
    process: &'a Arc<Process>,
}

impl Retire<'_> {
    fn not_now(self) {
        std::mem::forget(self);
    }
}

impl Drop for Retire<'_> {
    fn drop(&mut self) {
        tracing::info!("nobody waits for a compile any more; its child ends when it has no other");
        self.compilers.retire(self.process);
    }
}

/// The program's name, as far as it can be read.
fn name(job: &Job) -> String {
    let signature = waystation_stablehlo::main_signature(&job.program);
    let name = signature
        .map(|signature| signature.module_name)
        .unwrap_or_default();
    if name.is_empty() {
        "a program without a name".to_owned()
    } else {
        name
    }
}
