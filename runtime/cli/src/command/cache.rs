//! `cache`: a look into the compile cache.

mod why_miss;

use crate::error::Failure;

/// Look into the cache of compiled programs
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    #[command(name = "why-miss")]
    WhyMiss(why_miss::Args),
}

/// Does what was asked.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.command {
        Command::WhyMiss(args) => why_miss::run(args),
    }
}
