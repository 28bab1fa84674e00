//! The command line: what clap knows, and what is done before and after it.

use std::{collections::BTreeSet, ffi::OsString};

use clap::{
    ArgAction, CommandFactory as _, FromArgMatches as _,
    error::{ContextKind, ErrorKind},
};

use crate::{
    argv::{self, parse_bool},
    command::{
        cache, checkpoint, compile_child, doctor, proxy, resource_manager, run, server, status,
        tied, up, worker,
    },
    error::Failure,
    pathways::{self, Image},
    simulate::Simulate,
};

/// Waystation: an open, storage-first backend for single-controller JAX.
#[derive(Debug, clap::Parser)]
#[command(name = "waystation", version = version(), after_help = FOOTER, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const FOOTER: &str = "\
Names of flags may be written with underscores or hyphens, booleans as --flag, --flag=false or --noflag.
Every flag can be given as an environment variable: WAYSTATION_ and its name in capitals, as in
WAYSTATION_GCS_SCRATCH_LOCATION; the command line wins. WAYSTATION_LOG filters logs (info, debug, ...).
Exit status: 64 for what a change of the command line or the machine can mend, 1 for other failures.";

/// Ours, and whose clients are served.
fn version() -> String {
    let [oldest, newest] = waystation_proxy::JAXLIB;
    format!(
        "{} (serves jaxlib {oldest} to {newest})",
        env!("CARGO_PKG_VERSION")
    )
}

/// One word, one process.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    Run(run::Args),
    Up(up::Args),
    Status(status::Args),
    Doctor(doctor::Args),
    Proxy(proxy::Args),
    ResourceManager(resource_manager::Args),
    Worker(worker::Args),
    Server(server::Args),
    Cache(cache::Args),
    Checkpoint(checkpoint::Args),
    #[command(hide = true)]
    Tied(tied::Args),
    #[command(hide = true)]
    CompileChild(compile_child::Args),
}

/// What every long-running role takes.
#[derive(Debug, clap::Args)]
pub(crate) struct RoleArgs {
    /// Address to listen on
    #[arg(long = "bind_address", value_name = "IP", default_value = "0.0.0.0")]
    pub(crate) bind_address: std::net::IpAddr,
    /// Port of GET /healthz, /readyz, and /status where there is one (JSON); 0 takes a free one [default: none]
    #[arg(long = "status_port", value_name = "PORT")]
    pub(crate) status_port: Option<u16>,
    /// File to write the bound HOST:PORT to, once it listens
    #[arg(long = "ready_file", value_name = "FILE")]
    pub(crate) ready_file: Option<std::path::PathBuf>,
    /// Let CPU devices take the places of the accelerators that the resource manager's --instance_type asks for: for trying a
    /// deployment without them. Give it to every part, best as WAYSTATION_SIMULATE=cpu
    #[arg(
        long = "simulate",
        value_name = "cpu",
        hide_possible_values = true,
        value_enum
    )]
    pub(crate) simulate: Option<Simulate>,
    /// End when stdin does; set by the parent process
    #[arg(long = "parent_stdin", hide = true, num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub(crate) parent_stdin: bool,
}

/// A command line that was understood.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) command: Command,
    /// `--xla_*` of `proxy`, `run` and `up`.
    pub(crate) xla_flags: Vec<String>,
    /// Said once logs are there.
    pub(crate) warnings: Vec<String>,
}

/// A command line that ends here.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Help or version, for stdout.
    Show(String),
    /// A mistake.
    Failure(Failure),
}

/// Environment variables of Pathways, of TPU machines and of Kubernetes' indexed jobs that stand in for a flag of a worker,
/// after `WAYSTATION_...`; the first one that is set does.
const OTHER_NAMES: &[(&str, &str)] = &[
    ("slice", "MEGASCALE_SLICE_ID"),
    ("task", "TPU_WORKER_ID"),
    ("task", "JOB_COMPLETION_INDEX"),
];

/// Understands a whole command line, program name first.
pub(crate) fn parse(argv: Vec<OsString>) -> Result<Parsed, Stop> {
    let command = command();
    let mut args = argv::normalise(argv, &booleans(&command));
    let usage = |text: String| Stop::Failure(Failure::usage(text));
    let mut taken = pathways::Taken::default();
    let asks_help = args
        .iter()
        .take_while(|arg| *arg != "--")
        .any(|arg| arg == "--help" || arg == "-h");
    match args.get(1).and_then(|word| word.to_str()) {
        Some("server") if !asks_help => {
            let (image, rest) = pathways::server_role(
                args.split_off(2),
                std::env::var("WAYSTATION_NODE_TYPE").ok(),
            )
            .map_err(usage)?;
            args[1] = match image {
                Image::ResourceManager => "resource-manager".into(),
                Image::Worker | Image::Proxy => "worker".into(),
            };
            taken = pathways::take(image, rest);
        }
        Some("proxy") => taken = pathways::take(Image::Proxy, args.split_off(2)),
        Some("resource-manager") => {
            taken = pathways::take(Image::ResourceManager, args.split_off(2))
        }
        Some("worker") => taken = pathways::take(Image::Worker, args.split_off(2)),
        Some("run" | "up") => {
            let (own, foreign) = split_at_dashes(args.split_off(2));
            (taken.xla_flags, taken.rest) = pathways::take_xla(own);
            taken.rest.extend(foreign);
        }
        _ => {}
    }
    args.append(&mut taken.rest);
    let matches = command.try_get_matches_from(args).map_err(stop)?;
    let cli = Cli::from_arg_matches(&matches).map_err(stop)?;
    Ok(Parsed {
        command: cli.command,
        xla_flags: taken.xla_flags,
        warnings: taken.warnings,
    })
}

/// The commands with their environment variables.
fn command() -> clap::Command {
    Cli::command().mut_subcommands(with_variables)
}

fn with_variables(command: clap::Command) -> clap::Command {
    let name = command.get_name().to_owned();
    let command = command.mut_args(|arg| {
        let Some(flag) = arg
            .get_long()
            .filter(|_| !arg.is_hide_set())
            .map(str::to_owned)
        else {
            return arg;
        };
        // A negative number is a value that is refused with the range, not a flag that nobody knows.
        arg.env(variable(&name, &flag))
            .hide_env(true)
            .allow_negative_numbers(true)
    });
    command.mut_subcommands(with_variables)
}

/// The variable that stands in for a flag.
fn variable(command: &str, flag: &str) -> String {
    let own = format!("WAYSTATION_{}", flag.to_uppercase());
    if command != "worker" || std::env::var_os(&own).is_some() {
        return own;
    }
    let others = OTHER_NAMES.iter().filter(|(name, _)| *name == flag);
    others
        .map(|(_, other)| (*other).to_owned())
        .find(|other| std::env::var_os(other).is_some())
        .unwrap_or(own)
}

/// Names of all boolean flags.
fn booleans(command: &clap::Command) -> BTreeSet<String> {
    let own = command
        .get_arguments()
        .filter(|arg| arg.is_require_equals_set());
    let own = own.filter_map(|arg| arg.get_long().map(str::to_owned));
    let nested = command.get_subcommands().flat_map(booleans);
    own.chain(nested).collect()
}

fn split_at_dashes(mut args: Vec<OsString>) -> (Vec<OsString>, Vec<OsString>) {
    let dashes = args
        .iter()
        .position(|arg| arg == "--")
        .unwrap_or(args.len());
    let foreign = args.split_off(dashes);
    (args, foreign)
}

/// clap's verdict in one line.
fn stop(error: clap::Error) -> Stop {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            return Stop::Show(error.render().to_string());
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return Stop::Failure(Failure::usage("no command given: see `waystation --help`"));
        }
        _ => {}
    }
    let text = error.render().to_string();
    // "error: what is wrong", an empty line, "  tip: ..." lines, an empty line, usage.
    let mut line = String::new();
    for part in text.lines().map(str::trim) {
        if part.starts_with("Usage:") || part.starts_with("For more information") {
            break;
        }
        let tip = part.strip_prefix("tip: ");
        // No command here takes values that look like flags.
        if part.is_empty() || tip.is_some_and(|tip| tip.starts_with("to pass")) {
            continue;
        }
        let part = part.strip_prefix("error: ").or(tip).unwrap_or(part);
        let joint = match line.chars().last() {
            None => "",
            Some(':') => " ",
            Some(_) => "; ",
        };
        line = line + joint + part;
    }
    let bare = error
        .get(ContextKind::InvalidArg)
        .is_some_and(|arg| !arg.to_string().starts_with('-'));
    if error.kind() == ErrorKind::UnknownArgument && bare {
        line +=
            "; a command to run stands after a bare --, as in `waystation run -- python train.py`";
    }
    Stop::Failure(Failure::usage(line + "; see `waystation COMMAND --help`"))
}

#[cfg(test)]
mod tests;
