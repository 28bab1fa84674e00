//! `checkpoint export`.

use std::fmt::Write as _;

use clap::ArgAction;
use serde_json::json;
use waystation_checkpoint_tools::export::{Format, Options, export};
use waystation_checkpoint_tools::{Pattern, Progress};

use super::{Bound, Casts, Part, Shown, bar, failure, parse_pattern, tame};
use crate::argv::parse_bool;
use crate::command::cache::size;
use crate::error::Failure;

/// Write arrays as a safetensors file, or as .npy files
#[derive(Debug, clap::Args)]
pub(crate) struct ExportArgs {
    /// A folder of steps, a step, or an item
    #[arg(value_name = "LOCATION")]
    location: String,
    /// The file for safetensors, the folder for npy
    #[arg(value_name = "TARGET")]
    target: String,
    #[command(flatten)]
    part: Part,
    /// safetensors or npy [default: safetensors where the target's name ends so, else npy]
    #[arg(long = "format", value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Only arrays whose names match; may be given several times
    #[arg(long = "only", value_name = "PATTERN", value_parser = parse_pattern)]
    only: Vec<Pattern>,
    #[command(flatten)]
    casts: Casts,
    /// Write what the format has no name for (bfloat16 in npy) as unsigned integers of its bits
    #[arg(long = "as_bits", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    as_bits: bool,
    #[command(flatten)]
    bound: Bound,
    #[command(flatten)]
    shown: Shown,
}

fn parse_format(text: &str) -> Result<Format, String> {
    match text {
        "npy" => Ok(Format::Npy),
        "safetensors" => Ok(Format::Safetensors),
        _ => Err(format!("{text:?} is neither npy nor safetensors")),
    }
}

pub(super) async fn run(args: &ExportArgs) -> Result<u8, Failure> {
    let item = args.part.item(&args.location).await?;
    let format = args
        .format
        .unwrap_or(if args.target.ends_with(".safetensors") {
            Format::Safetensors
        } else {
            Format::Npy
        });
    let options = Options {
        only: args.only.clone(),
        casts: args.casts.all()?,
        as_bits: args.as_bits,
    };
    let (memory, progress) = (args.bound.memory(), Progress::default());
    let work = export(&item, format, &args.target, &options, &memory, &progress);
    let done = bar::shown(!args.shown.json, &progress, work)
        .await
        .map_err(failure)?;
    let report = json!({
        "target": args.target,
        "arrays": done.arrays,
        "bytes": done.bytes,
        "as_bits": done.as_bits,
    });
    args.shown.print(&report, || {
        let mut text = format!(
            "{}: {} arrays, {}",
            tame(&args.target),
            done.arrays,
            size(done.bytes)
        );
        if !done.as_bits.is_empty() {
            let _ = write!(text, "; as bits: {}", tame(&done.as_bits.join(", ")));
        }
        text
    })?;
    Ok(0)
}
