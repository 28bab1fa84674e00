//! A whole cluster as child processes of this one: `run` and `up`.
//!
//! Every child listens on a free loopback port and says which in a ready file of a private folder. It is in a process
//! group of its own, so that a terminal's Ctrl-C does not reach it, and holds the other end of a pipe on its stdin: when
//! this process ends, however it ends, the pipe closes and the child goes.

mod component;
pub(crate) mod environment;
mod pauses;
pub(crate) mod plan;
mod private;
mod shape;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use tracing::{debug, info, warn};

use crate::{
    error::{Failure, USAGE},
    lifetime::SHUTDOWN_GRACE,
};
use component::{Component, Output};
use plan::{Plan, Role};
use private::Private;

/// Loading a plugin takes seconds, on a machine with other work many of them.
const START_LIMIT: Duration = Duration::from_secs(300);
/// Between two looks at a child that starts.
const LOOK: Duration = Duration::from_millis(20);
/// After this long it is said what is waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// What a child has beyond its own grace before it is killed.
const KILL_MARGIN: Duration = Duration::from_secs(2);

/// The children, in the order of their start.
#[derive(Debug)]
pub(crate) struct Cluster {
    components: Vec<Component>,
    /// Ready files, and logs when no folder was named.
    private: Private,
    output: Output,
    /// A child ended by itself: its log is worth keeping.
    keep_logs: bool,
}

/// Where a started cluster answers.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    pub(crate) proxy: SocketAddr,
    /// The abstract Unix socket that clients shall use instead.
    pub(crate) unix_socket: Option<String>,
    pub(crate) status: SocketAddr,
    /// Where its clients leave large host buffers, when they do.
    pub(crate) large_transfers: PathBuf,
}

impl Cluster {
    /// No child yet. Makes the folders.
    ///
    /// # Errors
    /// [`Failure::usage`] when `log_dir` cannot be made.
    pub(crate) fn new(log_dir: Option<&Path>, verbose: bool) -> Result<Cluster, Failure> {
        let private = Private::new().map_err(|error| {
            Failure::usage(format!(
                "no temporary folder can be made ({error}): look at TMPDIR"
            ))
        })?;
        let output = match log_dir {
            Some(folder) => {
                std::fs::create_dir_all(folder).map_err(|error| {
                    Failure::usage(format!(
                        "--log_dir {} cannot be made ({error}): give another folder",
                        folder.display()
                    ))
                })?;
                Output::Folder(folder.to_owned())
            }
            None if verbose => Output::Stderr,
            None => Output::Folder(private.path().to_owned()),
        };
        Ok(Cluster {
            components: Vec::new(),
            private,
            output,
            keep_logs: false,
        })
    }

    /// Starts everything and returns when the proxy listens and every worker has registered. Cancel-safe: what was
    /// started stays in `self` and is taken down by [`Cluster::take_down`].
    ///
    /// # Errors
    /// When a child ends early or the cluster is not complete in time; the message has the child's last lines.
    pub(crate) async fn start(&mut self, plan: &Plan) -> Result<Addresses, Failure> {
        let since = Instant::now();
        let manager = self.spawn(plan, Role::ResourceManager, None)?;
        let manager = self
            .ready(&manager)
            .await?
            .first()
            .copied()
            .unwrap_or(SocketAddr::from(([127, 0, 0, 1], 0)));
        // Workers and proxy know it by this port.
        let again = plan.arguments(Role::ResourceManager, Some(manager), self.private.path());
        for component in &mut self.components {
            component.start_again_with(again.clone());
        }
        let large_transfers = plan.large_transfer_directory(self.private.path());
        std::fs::create_dir_all(&large_transfers).map_err(|error| {
            Failure::because("the folder for large transfers cannot be made", &error)
        })?;
        let proxy = self.spawn(plan, Role::Proxy, Some(manager))?;
        for (slice, task) in plan.places() {
            self.spawn(plan, Role::Worker { slice, task }, Some(manager))?;
        }
        let addresses = match self.ready(&proxy).await?[..] {
            [proxy, status] => Addresses {
                proxy,
                unix_socket: plan.unix_socket().map(str::to_owned),
                status,
                large_transfers,
            },
            _ => {
                return Err(Failure::internal(
                    "the proxy's ready file does not have two addresses",
                ));
            }
        };
        let address = manager.to_string();
        self.until("workers", async || {
            let status = waystation_scheduler::client::status(&address).await.ok()?;
            let here = status.workers.len() == plan.workers_in_all();
            debug!(progress = status.progress, "workers");
            here.then_some(())
        })
        .await?;
        info!(
            seconds = since.elapsed().as_secs_f32(),
            workers = plan.workers_in_all(),
            "cluster is up"
        );
        Ok(addresses)
    }

    /// Sees to the children: says so when one has ended by itself, with its last lines, and starts it again, after a pause
    /// when it ends again and again. A worker comes back under its device ids, for the clients that come then; the resource
    /// manager on its port, where all others dial it again. Returns the proxy's name when that has ended: the sessions are
    /// gone with it. Cancel-safe.
    pub(crate) async fn lost(&mut self) -> String {
        loop {
            while let Some(component) = self.components.iter_mut().find_map(Component::take_news) {
                self.keep_logs = true;
                warn!("{}", component.epitaph());
                let name = component.name().to_owned();
                if name == Role::Proxy.name() {
                    return name;
                }
                let pause = component.plan_restart();
                if !pause.is_zero() {
                    info!("{name} is started again in {pause:?}");
                }
            }
            self.start_what_is_due();
            let due = self.components.iter().filter_map(Component::due).min();
            let next_start = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due.into()).await,
                    None => std::future::pending().await,
                }
            };
            let running = self.components.iter_mut().filter(|one| one.is_running());
            let ends: Vec<_> = running.map(|one| Box::pin(one.ended())).collect();
            let next_end = async {
                if ends.is_empty() {
                    std::future::pending::<()>().await;
                }
                let _ = futures::future::select_all(ends).await;
            };
            tokio::select! {
                () = next_end => {}
                () = next_start => {}
            }
        }
    }

    fn start_what_is_due(&mut self) {
        let now = Instant::now();
        for component in &mut self.components {
            if component.due().is_none_or(|due| due > now) {
                continue;
            }
            match component.restart(&self.output) {
                Ok(()) if component.name().starts_with("worker") => {
                    info!(
                        "{} is started again; the arrays it held are lost",
                        component.name()
                    );
                }
                Ok(()) => info!("{} is started again", component.name()),
                Err(failure) => warn!("{failure}"),
            }
        }
    }

    /// Ends the children: the proxy first, so that it does not see its workers go, the resource manager last, so that it
    /// is there for both. Returns when none is left.
    pub(crate) async fn take_down(mut self) {
        let stage = |component: &Component| match component.name() {
            "proxy" => 0,
            "resource-manager" => 2,
            _ => 1,
        };
        let mut components: Vec<_> = self.components.drain(..).collect();
        for now in 0..=2 {
            let (group, later): (Vec<_>, Vec<_>) = components
                .into_iter()
                .partition(|component| stage(component) == now);
            let limit = SHUTDOWN_GRACE + KILL_MARGIN;
            futures::future::join_all(group.into_iter().map(|component| component.stop(limit)))
                .await;
            components = later;
        }
        if self.keep_logs
            && matches!(&self.output, Output::Folder(folder) if folder == self.private.path())
        {
            let folder = self.private.keep();
            warn!("the logs are kept in {}", folder.display());
        }
    }

    fn spawn(
        &mut self,
        plan: &Plan,
        role: Role,
        manager: Option<SocketAddr>,
    ) -> Result<PathBuf, Failure> {
        let folder = self.private.path();
        let arguments = plan.arguments(role, manager, folder);
        let ready_file = plan::ready_file(folder, role);
        self.components
            .push(Component::spawn(role.name(), &arguments, &self.output)?);
        Ok(ready_file)
    }

    /// The addresses in a ready file, once it is there.
    async fn ready(&mut self, file: &Path) -> Result<Vec<SocketAddr>, Failure> {
        self.until("a process to listen", async || {
            let text = tokio::fs::read_to_string(file).await.ok()?;
            text.lines().map(|line| line.parse().ok()).collect()
        })
        .await
    }

    /// Polls until there is something, no child having ended meanwhile.
    async fn until<T>(
        &mut self,
        what: &str,
        mut probe: impl AsyncFnMut() -> Option<T>,
    ) -> Result<T, Failure> {
        let since = Instant::now();
        let mut said = false;
        loop {
            if let Some(dead) = self.components.iter_mut().find_map(Component::take_news) {
                self.keep_logs = !dead.failed_on_usage();
                return Err(dead.failure());
            }
            if let Some(found) = probe().await {
                return Ok(found);
            }
            if since.elapsed() > START_LIMIT {
                self.keep_logs = true;
                return Err(Failure::internal(format!(
                    "gave up waiting for {what} after {START_LIMIT:?}"
                )));
            }
            if !said && since.elapsed() > PATIENCE {
                said = true;
                info!("still waiting for {what}");
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// What a child that ended at its start leads to.
fn early_end(name: &str, status: std::process::ExitStatus, last_lines: &str) -> Failure {
    // A child that was refused its command line says why in one line of the form that this process uses, too.
    let last = last_lines
        .lines()
        .last()
        .and_then(|line| line.strip_prefix("waystation: "));
    match last {
        Some(message) if status.code() == Some(i32::from(USAGE)) => Failure::usage(message),
        _ => Failure::internal(format!(
            "{name} ended at its start ({status}); its last lines:\n{last_lines}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn a_refused_command_line_of_a_child_is_shown_as_ones_own() {
        let refused = std::process::ExitStatus::from_raw(i32::from(USAGE) << 8);
        let failure = early_end(
            "worker-0-0",
            refused,
            "INFO x\nwaystation: --pjrt_plugin: nothing there",
        );
        assert_eq!(failure, Failure::usage("--pjrt_plugin: nothing there"));
        let killed = std::process::ExitStatus::from_raw(9);
        let failure = early_end("worker-0-0", killed, "INFO x\nwaystation: y");
        assert_eq!(failure.status, crate::error::INTERNAL);
        assert!(
            failure.message.contains("worker-0-0") && failure.message.contains("INFO x"),
            "{failure}"
        );
    }
}
