//! `checkpoint`: looks at, verifies, compares, converts, exports and copies checkpoints of Orbax, whoever wrote them.

mod bar;
mod change;
mod check;
mod export;
mod show;

use clap::ArgAction;
use serde_json::Value;
use waystation_checkpoint::zarr::DType;
use waystation_checkpoint_tools::tree::{ItemEntry, Step};
use waystation_checkpoint_tools::{Checkpoint, Error, Item, Memory, Pattern};

use crate::{argv::parse_bool, error::Failure, on_this_thread, output, size::parse_some_bytes};

/// Look at, verify, compare, convert, export and copy checkpoints of Orbax, without devices
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Ls(show::ListArgs),
    Inspect(show::InspectArgs),
    Verify(check::VerifyArgs),
    Diff(check::DiffArgs),
    Convert(change::ConvertArgs),
    Export(export::ExportArgs),
    Copy(change::CopyArgs),
}

/// How the result is shown.
#[derive(Debug, clap::Args)]
struct Shown {
    /// JSON instead of text
    #[arg(long = "json", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    json: bool,
}

impl Shown {
    /// Prints a report, for people by `words`.
    fn print(&self, report: &Value, words: impl FnOnce() -> String) -> Result<(), Failure> {
        output::print(&if self.json {
            format!("{report:#}")
        } else {
            words()
        })
    }
}

/// Which part of a location is meant.
#[derive(Debug, clap::Args)]
struct Part {
    /// Step, by number or name, where the location is a folder of steps [default: the last one that is finished]
    #[arg(long = "step", value_name = "STEP")]
    step: Option<String>,
    /// Item, where a step has several with arrays [default: the only one]
    #[arg(long = "item", value_name = "NAME")]
    item: Option<String>,
}

impl Part {
    fn step<'a>(&self, checkpoint: &'a Checkpoint) -> Result<&'a Step, Failure> {
        checkpoint.step(self.step.as_deref()).map_err(failure)
    }

    fn entry<'a>(&self, checkpoint: &'a Checkpoint) -> Result<&'a ItemEntry, Failure> {
        let step = self.step(checkpoint)?;
        step.one(self.item.as_deref()).map_err(failure)
    }

    /// The one item that is meant, open.
    async fn item(&self, location: &str) -> Result<Item, Failure> {
        let checkpoint = Checkpoint::open(location).await.map_err(failure)?;
        Item::open(&self.entry(&checkpoint)?.place)
            .await
            .map_err(failure)
    }
}

/// The bound on memory.
#[derive(Debug, clap::Args)]
struct Bound {
    /// What of arrays may be in memory at a time; no chunk may need more
    #[arg(long = "memory", value_name = "SIZE", default_value = "4GiB", value_parser = parse_some_bytes)]
    memory: u64,
}

impl Bound {
    fn memory(&self) -> Memory {
        Memory::new(self.memory)
    }
}

/// Other element types.
#[derive(Debug, clap::Args)]
struct Casts {
    /// Cast arrays whose names match: '*.w=bfloat16'; of several that match, the last counts
    #[arg(long = "cast", value_name = "PATTERN=DTYPE", value_parser = parse_cast)]
    cast: Vec<(Pattern, DType)>,
    /// Cast all arrays but typed PRNG keys, before any --cast
    #[arg(long = "dtype", value_name = "DTYPE", value_parser = parse_dtype)]
    dtype: Option<DType>,
}

impl Casts {
    fn all(&self) -> Result<Vec<(Pattern, DType)>, Failure> {
        let mut all = Vec::new();
        if let Some(dtype) = self.dtype {
            all.push((parse_pattern("*").map_err(Failure::usage)?, dtype));
        }
        all.extend(self.cast.iter().cloned());
        Ok(all)
    }
}

fn parse_pattern(text: &str) -> Result<Pattern, String> {
    text.parse().map_err(|_| "no pattern".to_owned())
}

fn parse_dtype(text: &str) -> Result<DType, String> {
    DType::parse_v3(text).ok_or_else(|| {
        let names: Vec<_> = DType::all().map(|dtype| dtype.v3_name()).collect();
        format!("{text:?} is none of {}", names.join(", "))
    })
}

fn parse_cast(text: &str) -> Result<(Pattern, DType), String> {
    let (pattern, dtype) = text
        .rsplit_once('=')
        .ok_or_else(|| format!("{text:?} is not PATTERN=DTYPE"))?;
    Ok((parse_pattern(pattern)?, parse_dtype(dtype)?))
}

/// What the user is told.
fn failure(error: Error) -> Failure {
    let text = error.report();
    if error.is_usage() {
        Failure::usage(text)
    } else {
        Failure::internal(text)
    }
}

/// Names that strangers have chosen stay on their line.
fn tame(name: &str) -> String {
    name.replace(char::is_control, "?")
}

/// Does what was asked; returns the exit status.
pub(crate) fn run(args: &Args) -> Result<u8, Failure> {
    match &args.command {
        Command::Ls(args) => on_this_thread(show::list(args)),
        Command::Inspect(args) => on_this_thread(show::inspect(args)),
        Command::Verify(args) => on_this_thread(check::verify(args)),
        Command::Diff(args) => on_this_thread(check::diff(args)),
        Command::Convert(args) => on_this_thread(change::convert(args)),
        Command::Export(args) => on_this_thread(export::run(args)),
        Command::Copy(args) => on_this_thread(change::copy(args)),
    }
}
