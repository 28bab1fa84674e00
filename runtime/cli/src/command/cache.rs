//! `cache`: a look into the compile cache, and what fills and empties it.

mod about;
mod bytecode;
mod remove;
mod show;
mod warm;
mod why_miss;

use clap::ArgAction;
pub(crate) use show::size;
use waystation_lifecycle::bucket::Bucket;

use crate::{argv::parse_bool, error::Failure, location, on_this_thread};

/// Look into the cache of compiled programs, fill it and empty it
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Ls(show::ListArgs),
    Inspect(show::InspectArgs),
    Verify(show::VerifyArgs),
    Stats(show::StatsArgs),
    Rm(remove::RemoveArgs),
    Gc(remove::CollectArgs),
    Warm(Box<warm::Args>),
    #[command(name = "why-miss")]
    WhyMiss(why_miss::Args),
}

/// Which cache is meant, and how it is shown.
#[derive(Debug, clap::Args)]
struct Place {
    /// The cache's location, as the workers have it: gs://BUCKET/PREFIX, s3://..., file:///PATH
    #[arg(value_name = "LOCATION")]
    location: String,
    /// JSON instead of text
    #[arg(long = "json", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    json: bool,
}

impl Place {
    async fn open(&self) -> Result<Bucket, Failure> {
        location::required("LOCATION", &self.location).await
    }
}

/// Does what was asked; returns the exit status.
pub(crate) fn run(args: &Args) -> Result<u8, Failure> {
    match &args.command {
        Command::Ls(args) => on_this_thread(show::list(args)),
        Command::Inspect(args) => on_this_thread(show::inspect(args)),
        Command::Verify(args) => on_this_thread(show::verify(args)),
        Command::Stats(args) => on_this_thread(show::stats(args)),
        Command::Rm(args) => on_this_thread(remove::remove(args)),
        Command::Gc(args) => on_this_thread(remove::collect(args)),
        Command::Warm(args) => warm::run(args),
        Command::WhyMiss(args) => why_miss::run(args).map(|()| 0),
    }
}
