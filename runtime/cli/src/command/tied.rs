//! `tied`: becomes another program that dies with the parent. Hidden; `run` starts the user's command through it.

use std::{ffi::OsString, io, os::unix::process::CommandExt as _, process::Command};

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::error::{Failure, NOT_FOUND};

/// Exit status of a command that is there and cannot be run, as shells have it.
const NOT_EXECUTABLE: u8 = 126;

/// Become COMMAND, and die when the parent process does
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The parent's process id: when it is another by now, the parent is dead already
    #[arg(long = "parent", value_name = "PID", hide = true)]
    parent: i32,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Returns only when the command cannot be run. Linux keeps the death signal over `exec`.
pub(crate) fn run(args: Args) -> Failure {
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return Failure::because("the command cannot be tied to this process", &error);
    }
    if getppid() != Pid::from_raw(args.parent) {
        return Failure::internal("the parent process is gone");
    }
    let mut words = args.command.into_iter();
    let program = words.next().unwrap_or_default();
    let error = Command::new(&program).args(words).exec();
    Failure {
        status: if error.kind() == io::ErrorKind::NotFound {
            NOT_FOUND
        } else {
            NOT_EXECUTABLE
        },
        message: format!("{} cannot be run: {error}", program.display()),
    }
}
