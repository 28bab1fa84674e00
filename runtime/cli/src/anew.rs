//! Starts this process anew in another environment: libraries read variables when they are loaded or later, and a process
//! cannot safely change its own.

use std::{
    ffi::{OsStr, OsString},
    os::unix::process::CommandExt as _,
    process::Command,
};

use crate::error::Failure;

/// A variable, and what it is to be; `None`: not set.
pub(crate) type Change = (&'static str, Option<OsString>);

/// Starts this process anew with `changes` made, unless there are none. Must come before anything is opened that a new
/// start would lose; standard input and the process id stay.
///
/// # Errors
/// When the binary cannot be started again.
pub(crate) fn with(changes: Vec<Change>) -> Result<(), Failure> {
    if changes.is_empty() {
        return Ok(());
    }
    let binary = std::env::current_exe()
        .map_err(|e| Failure::because("this binary cannot be found again", &e))?;
    let mut arguments = std::env::args_os();
    let mut command = Command::new(&binary);
    command.arg0(arguments.next().as_deref().unwrap_or(OsStr::new(&binary)));
    command.args(arguments);
    let names: Vec<&str> = changes.iter().map(|(name, _)| *name).collect();
    for (name, value) in changes {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    // Returns only when it fails.
    let failed = command.exec();
    let what = format!(
        "this binary cannot be started again with another {}",
        names.join(" and ")
    );
    Err(Failure::because(&what, &failed))
}
