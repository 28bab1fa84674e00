//! How a role lives and ends: signals, the parent's lifeline, and the limit of a graceful shutdown.

use std::{io::Read as _, process, thread, time::Duration};

use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::{
    error::{Failure, INTERNAL},
    signals::Signals,
};

/// How long a role may take to end after it was told to.
pub(crate) const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// Runs a role on a runtime of its own until it ends. `SIGTERM` and `SIGINT` cancel the token it gets, and so does the
/// end of stdin when `parent_stdin` is set: a parent that dies by `kill -9` closes the pipe too. A role that has not ended
/// [`SHUTDOWN_GRACE`] later is cut off.
///
/// # Errors
/// What the role says, or that there is no runtime.
pub(crate) fn run<R>(parent_stdin: bool, role: R) -> Result<(), Failure>
where
    R: AsyncFnOnce(CancellationToken) -> Result<(), Failure>,
{
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads())
        .enable_all()
        .build()
        .map_err(|error| Failure::because("no runtime can be started", &error))?;
    let stop = CancellationToken::new();
    if parent_stdin {
        let stop = stop.clone();
        thread::spawn(move || {
            wait_for_end_of_stdin();
            stop.cancel();
        });
    }
    let ended = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let watched = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                signal = signals.recv() => info!(?signal, "shutting down"),
                () = watched.cancelled() => info!("stdin has ended, shutting down"),
            }
            watched.cancel();
            // A thread, because a runtime that does not end is what it is for.
            thread::spawn(|| {
                thread::sleep(SHUTDOWN_GRACE);
                error!(grace = ?SHUTDOWN_GRACE, "still running at the end of the grace period, cut off");
                process::exit(i32::from(INTERNAL));
            });
        });
        role(stop).await
    });
    // Blocking work that is still under way must not hold up the end.
    runtime.shutdown_background();
    ended
}

/// Threads for network and sessions: half of the cores. Clients, a worker's dispatch thread and the plugin want the others,
/// and a small request is soonest served where it costs few wake-ups of other threads.
fn threads() -> usize {
    thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1))
}

fn wait_for_end_of_stdin() {
    let mut stdin = std::io::stdin().lock();
    let mut ignored = [0; 64];
    // An error means as much as the end: nobody is at the other side.
    while stdin.read(&mut ignored).is_ok_and(|count| count > 0) {}
}
