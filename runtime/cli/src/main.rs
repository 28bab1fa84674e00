//! The `waystation` binary: every role of a cluster, and the commands that bring clusters up and look at them.
//!
//! Only this crate reads the environment and the terminal. `args` understands the command line, `command` has one file a
//! command, `cluster` runs a whole cluster as child processes, the rest are small tools of these.

mod anew;
mod args;
mod argv;
mod ask;
mod cache_args;
mod checkpoint_args;
mod cluster;
mod command;
mod disk_cache;
mod duration;
mod error;
mod files;
mod flag_files;
mod health;
mod history;
mod http;
mod large_transfers;
mod library;
mod lifetime;
mod listen;
mod local_transfers;
mod location;
mod output;
mod pathways;
mod plugin;
mod python;
mod record;
mod retention;
mod sharing;
mod signals;
mod simulate;
mod size;
mod telemetry;
mod threads;
mod tpu;
mod worker_cache;
mod xla_flags;

use std::process::ExitCode;

use args::{Command, Parsed, Stop};
use command::{
    cache, checkpoint, compile_child, doctor, proxy, resource_manager, run, status, tied, up,
    worker,
};
use error::Failure;

fn main() -> ExitCode {
    let ended = match args::parse(std::env::args_os().collect()) {
        Ok(parsed) => perform(parsed),
        Err(Stop::Show(text)) => output::print(&text).map(|()| 0),
        Err(Stop::Failure(failure)) => Err(failure),
    };
    let status = ended.unwrap_or_else(|failure| {
        error::show(&failure);
        failure.status
    });
    ExitCode::from(status)
}

/// Does what was asked; returns the exit status.
fn perform(parsed: Parsed) -> Result<u8, Failure> {
    // What a person starts speaks only when there is something to say; what a supervisor starts keeps a log.
    let quiet = !matches!(
        parsed.command,
        Command::Proxy(_) | Command::ResourceManager(_) | Command::Worker(_)
    );
    telemetry::start(if quiet { "warn" } else { "info" })?;
    for warning in parsed.warnings {
        tracing::warn!("{warning}");
    }
    if !quiet {
        files::raise_limit();
    }
    match parsed.command {
        Command::Proxy(args) => proxy::run(args, parsed.xla_flags).map(|()| 0),
        Command::ResourceManager(args) => resource_manager::run(args).map(|()| 0),
        Command::Worker(args) => worker::run(args).map(|()| 0),
        Command::Run(args) => on_this_thread(run::run(args, parsed.xla_flags)),
        Command::Up(args) => on_this_thread(up::run(args, parsed.xla_flags)),
        Command::Status(args) => on_this_thread(status::run(args)).map(|()| 0),
        Command::Doctor(args) => on_this_thread(doctor::run(args)),
        Command::Cache(args) => cache::run(&args),
        Command::Checkpoint(args) => checkpoint::run(&args),
        Command::CompileChild(_) => Err(compile_child::run()),
        Command::Tied(args) => Err(tied::run(args)),
        Command::Server(_) => Err(Failure::internal("server was not resolved to a role")),
    }
}

/// Runs a short or supervising command on a runtime of the main thread.
fn on_this_thread<T>(command: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::because("no runtime can be started", &error))?;
    let ended = runtime.block_on(command);
    runtime.shutdown_background();
    ended
}
