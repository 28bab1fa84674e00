//! What this worker has for programs over several workers: a listener and an engine for each lease, threads that move the
//! collectives' data, and a thread for each device that starts executions.
//!
//! Apart from everything else the process does: XLA goes on with a program on the thread that completes a collective, and
//! runs cheap programs on the thread that starts them, until their collectives have ended.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use crossbeam_channel::Sender;
use tokio::runtime::{Builder, Runtime};
use waystation_collectives::{
    Engine, Process,
    transport::{Config, Secret, Tcp},
};
use waystation_proto::{tensorflow::StatusProto, waystation::worker::Attach};

use crate::{collectives::Collectives, group::Group, status};

/// Threads that move data and go on with programs: as many as there are devices, within these bounds.
const FEWEST_THREADS: usize = 2;
const MOST_THREADS: usize = 16;

/// How often a drain looks whether collectives are at rest.
const DRAIN_POLL: Duration = Duration::from_millis(10);

/// Work for a device's thread.
type Job = Box<dyn FnOnce() + Send>;

/// See the module.
pub(crate) struct Spanning {
    collectives: Collectives,
    /// Where the worker's service listens.
    ip: IpAddr,
    /// The host under which others reach it.
    host: String,
    devices: usize,
    local: bool,
    runtime: OnceLock<Option<Runtime>>,
    threads: OnceLock<Vec<Sender<Job>>>,
    engine: Mutex<Option<Engine>>,
}

/// One lease's connections to other workers. They end with it.
pub(crate) struct Epoch {
    pub(crate) tcp: Tcp,
    pub(crate) engine: Engine,
    /// Where other workers connect to.
    pub(crate) address: String,
}

impl Drop for Epoch {
    fn drop(&mut self) {
        self.tcp.shutdown();
    }
}

impl Spanning {
    /// `listener` is where the worker's service listens, and `advertised` how others reach it. `local` is whether others on this
    /// machine are reached without the network.
    pub(crate) fn new(
        collectives: Collectives,
        listener: SocketAddr,
        advertised: &str,
        devices: usize,
        local: bool,
    ) -> Spanning {
        let host = advertised.rsplit_once(':').map_or("", |(host, _)| host);
        Spanning {
            collectives,
            ip: listener.ip(),
            host: host.to_owned(),
            devices,
            local,
            runtime: OnceLock::new(),
            threads: OnceLock::new(),
            engine: Mutex::new(None),
        }
    }

    /// The group of workers whose plugin moves the collectives' data itself. What is left to do here is to agree on when to start,
    /// and that something has failed.
    pub(crate) fn group(&self) -> Option<&Arc<Group>> {
        self.collectives.group()
    }

    /// Begins a lease. `told` hears of every connection that comes or goes.
    ///
    /// # Errors
    /// Why there are no programs over several workers.
    pub(crate) fn begin(
        &self,
        attach: &Attach,
        told: impl Fn(Process, bool) + Send + Sync + 'static,
    ) -> Result<Epoch, String> {
        if let Some(why) = self.collectives.cannot() {
            return Err(why.to_owned());
        }
        let secret = <[u8; 32]>::try_from(&attach.collectives_secret[..])
            .map(Secret::new)
            .map_err(|_| "the proxy gives workers no secret to know each other by".to_owned())?;
        let runtime = self.runtime().ok_or("its threads cannot be started")?;
        let unable = |error: std::io::Error| format!("it cannot listen for other workers: {error}");
        let listener = std::net::TcpListener::bind((self.ip, 0)).map_err(unable)?;
        listener.set_nonblocking(true).map_err(unable)?;
        let port = listener.local_addr().map_err(unable)?.port();
        let _inside = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener).map_err(unable)?;
        let process = Process(attach.process);
        let config = match attach.lease_ms {
            0 => Config::default(),
            lease => Config {
                silence: Duration::from_millis(lease.into()),
                local: self.local,
                ..Config::default()
            },
        };
        let tcp = Tcp::new(process, secret, config);
        let engine = Engine::new(process, Arc::new(tcp.clone()));
        tcp.on_change(told);
        tcp.listen(listener, engine.clone());
        *self.engine() = Some(engine.clone());
        Ok(Epoch {
            tcp,
            engine,
            address: format!("{}:{port}", self.host),
        })
    }

    /// Runs a task with the connections.
    pub(crate) fn spawn(
        &self,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> Option<tokio::task::AbortHandle> {
        Some(self.runtime()?.spawn(task).abort_handle())
    }

    /// Hands work to a device's thread, which does one after the other.
    pub(crate) fn on_device(
        &self,
        device: usize,
        job: impl FnOnce() + Send + 'static,
    ) -> Result<(), StatusProto> {
        let unable = || status::exhausted("no thread can be started to run programs on a device");
        let threads = self.threads.get_or_init(|| {
            let threads = (0..self.devices).map(start_thread);
            threads.collect::<std::io::Result<_>>().unwrap_or_default()
        });
        let thread = threads.get(device).ok_or_else(unable)?;
        thread.send(Box::new(job)).map_err(|_| unable())
    }

    /// Waits until nothing of this worker is on its way to others.
    pub(crate) async fn at_rest(&self) {
        let engine = self.engine().clone();
        if let Some(engine) = engine {
            while !engine.is_idle() {
                tokio::time::sleep(DRAIN_POLL).await;
            }
        }
    }

    fn engine(&self) -> std::sync::MutexGuard<'_, Option<Engine>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn runtime(&self) -> Option<&Runtime> {
        let start = || {
            Builder::new_multi_thread()
                .worker_threads(self.devices.clamp(FEWEST_THREADS, MOST_THREADS))
                .thread_name("collectives")
                .enable_all()
                .build()
                .inspect_err(|error| tracing::warn!(%error, "there are no threads for collectives"))
                .ok()
        };
        self.runtime.get_or_init(start).as_ref()
    }
}

impl Drop for Spanning {
    fn drop(&mut self) {
        if let Some(Some(runtime)) = self.runtime.take() {
            // It may be dropped by an async task, which must not wait.
            runtime.shutdown_background();
        }
    }
}

/// A thread ends with its sender.
fn start_thread(device: usize) -> std::io::Result<Sender<Job>> {
    // Bounded by the executions in flight.
    let (sender, jobs) = crossbeam_channel::unbounded::<Job>();
    std::thread::Builder::new()
        .name(format!("device {device}"))
        .spawn(move || {
            for job in jobs {
                job();
            }
        })?;
    Ok(sender)
}
