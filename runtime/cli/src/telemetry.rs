//! Logs: one line an event, to stderr.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::error::Failure;

/// The environment variable with the log filter ("info", "debug", "waystation_worker=trace,info", ...).
const VARIABLE: &str = "WAYSTATION_LOG";

/// Sends logs to stderr, filtered by `WAYSTATION_LOG` or else by `default`.
///
/// # Errors
/// When the filter cannot be read.
pub(crate) fn start(default: &str) -> Result<(), Failure> {
    let directives = std::env::var(VARIABLE)
        .ok()
        .filter(|text| !text.trim().is_empty());
    let filter = EnvFilter::try_new(directives.as_deref().unwrap_or(default)).map_err(|error| {
        Failure::usage(format!(
            "{VARIABLE} is no log filter ({error}): write a level such as info or debug"
        ))
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .try_init()
        .map_err(|error| Failure::internal(format!("logs cannot be started: {error}")))
}
