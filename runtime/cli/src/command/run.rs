//! `run`.

use std::{ffi::OsString, io, process::Stdio};

use rustix::process::{Pid, getpgrp, kill_process};
use tokio::process::{Child, Command};
use tracing::{info, warn};

use crate::{
    cluster::{
        Addresses, Cluster, environment,
        plan::{ClusterArgs, Plan},
    },
    error::{Failure, NOT_FOUND},
    python,
    signals::{Signal, Signals},
};

/// Signals that the command gets before the next one kills it.
const POLITE_SIGNALS: u32 = 2;

/// Bring up a cluster on this machine, run COMMAND as its client, take the cluster down
///
/// COMMAND gets the environment that makes JAX use the cluster (JAX_PLATFORMS, JAX_BACKEND_TARGET and what else it
/// takes), WAYSTATION_STATUS_URL for `waystation status`, and this terminal. Its exit status is that of `run`, 128 and the
/// number of the signal when one ended it. SIGINT and SIGTERM go on to COMMAND; the third one kills it. Flags named
/// --xla_... go to the compiler.
///
/// Example: waystation run --devices_per_worker 8 -- python train.py
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
    /// The command and its arguments, after a bare --
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Returns the exit status. Must run on the main thread: the command is tied to the thread that starts it.
pub(crate) async fn run(args: Args, xla_flags: Vec<String>) -> Result<u8, Failure> {
    let mut signals = Signals::new()?;
    let program = args.command.first().cloned().unwrap_or_default();
    if python::find_program(&program).is_none() {
        return Err(Failure {
            status: NOT_FOUND,
            message: format!(
                "{} is no program: give the command after --, as in `waystation run -- python train.py`",
                program.display()
            ),
        });
    }
    let plan = Plan::check(&args.cluster, xla_flags, Some(&program)).await?;
    let mut cluster = Cluster::new(args.cluster.log_dir.as_deref(), args.cluster.verbose)?;
    let started = tokio::select! {
        started = cluster.start(&plan) => started,
        signal = signals.recv() => {
            cluster.take_down().await;
            return Ok(signal.exit_status());
        }
    };
    let ended = match started {
        Ok(addresses) => run_command(&args.command, addresses, &mut cluster, &mut signals).await,
        Err(failure) => Err(failure),
    };
    cluster.take_down().await;
    ended
}

async fn run_command(
    command: &[OsString],
    addresses: Addresses,
    cluster: &mut Cluster,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let mut client = spawn(command, addresses)
        .map_err(|error| Failure::because("the command cannot be started", &error))?;
    let mut received = 0;
    loop {
        tokio::select! {
            status = client.wait() => {
                let status = status.map_err(|error| Failure::because("the command cannot be waited for", &error))?;
                return Ok(exit_status(status));
            }
            signal = signals.recv() => {
                received += 1;
                forward(&mut client, signal, received);
            }
            // The death of any of them is an error in the client, not the end of it.
            _ = cluster.lost() => {}
        }
    }
}

fn spawn(command: &[OsString], addresses: Addresses) -> io::Result<Child> {
    // Through a process that ties itself to this one before it becomes the command: the command must not outlive us.
    let mut tied = Command::new(std::env::current_exe()?);
    tied.arg("tied")
        .arg(format!("--parent={}", std::process::id()))
        .arg("--")
        .args(command);
    tied.envs(environment::variables(&addresses))
        .stdin(Stdio::inherit())
        .kill_on_drop(true);
    tied.spawn()
}

fn forward(client: &mut Child, signal: Signal, received: u32) {
    if received > POLITE_SIGNALS {
        warn!("third signal, killing the command");
        // Fails only when it is gone.
        let _ = client.start_kill();
        return;
    }
    if signal == Signal::Interrupt && in_foreground() {
        // The terminal has sent it to the command as well; twice would interrupt its cleaning up.
        return;
    }
    let pid = client
        .id()
        .and_then(|id| i32::try_from(id).ok())
        .and_then(Pid::from_raw);
    if let Some(pid) = pid {
        info!(?signal, "signal goes on to the command");
        // Fails only when it is gone.
        let _ = kill_process(pid, signal.number());
    }
}

/// Whether this process group is the one that its terminal's Ctrl-C goes to.
fn in_foreground() -> bool {
    let terminal = std::fs::File::open("/dev/tty");
    terminal.is_ok_and(|terminal| {
        rustix::termios::tcgetpgrp(&terminal).is_ok_and(|group| group == getpgrp())
    })
}

/// As shells report it.
fn exit_status(status: std::process::ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt as _;
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok())
        .unwrap_or(u8::MAX)
}
