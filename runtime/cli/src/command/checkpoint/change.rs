//! `checkpoint convert` and `copy`: what writes checkpoints.

use std::fmt::Write as _;

use clap::ArgAction;
use serde_json::{Value, json};
use waystation_checkpoint::zarr::Codec;
use waystation_checkpoint_tools::convert::{self, Compression, Options};
use waystation_checkpoint_tools::tree::ItemEntry;
use waystation_checkpoint_tools::{Checkpoint, Item, Layout, Progress};

use super::{Bound, Casts, Shown, bar, failure, tame};
use crate::argv::parse_bool;
use crate::checkpoint_args;
use crate::command::cache::size;
use crate::error::Failure;
use crate::size::parse_some_bytes;

/// Write a checkpoint in another layout, with other chunks, element types or compression; or mend one in place
#[derive(Debug, clap::Args)]
pub(crate) struct ConvertArgs {
    /// A folder of steps, a step, or an item
    #[arg(value_name = "LOCATION")]
    location: String,
    /// Where to write it; not with --in_place
    #[arg(value_name = "TARGET")]
    target: Option<String>,
    /// Only this step, by number or name [default: all that are finished]
    #[arg(long = "step", value_name = "STEP")]
    step: Option<String>,
    /// zarr2, zarr3, ocdbt (zarr v2 in a database) or ocdbt_zarr3 [default: as it is]
    #[arg(long = "layout", value_name = "LAYOUT")]
    layout: Option<Layout>,
    /// Cut arrays anew, into chunks of so many bytes at most [default: as they are]
    #[arg(long = "chunk_bytes", value_name = "SIZE", value_parser = parse_some_bytes)]
    chunk_bytes: Option<u64>,
    #[command(flatten)]
    casts: Casts,
    /// none, or a level of zstd: -7 to 22 [default: compressed is what was]
    #[arg(long = "compression", value_name = "LEVEL|none", value_parser = parse_compression)]
    compression: Option<Compression>,
    /// Bring the arrays of one layout to where _METADATA can say they are, where they lie
    #[arg(long = "in_place", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    in_place: bool,
    /// With --in_place: remove what was replaced
    #[arg(long = "remove_old", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    remove_old: bool,
    #[command(flatten)]
    bound: Bound,
    #[command(flatten)]
    shown: Shown,
}

/// Copy a checkpoint as it is to another location; goes on where an interrupted copy ended
#[derive(Debug, clap::Args)]
pub(crate) struct CopyArgs {
    /// A folder of steps, a step, or an item
    #[arg(value_name = "LOCATION")]
    location: String,
    /// Where to write it
    #[arg(value_name = "TARGET")]
    target: String,
    /// Only this step, by number or name [default: all that are finished]
    #[arg(long = "step", value_name = "STEP")]
    step: Option<String>,
    #[command(flatten)]
    shown: Shown,
}

fn parse_compression(text: &str) -> Result<Compression, String> {
    Ok(match checkpoint_args::parse_compression(text)? {
        Codec::Raw => Compression::None,
        Codec::Zstd { level } => Compression::Zstd(level),
    })
}

/// The checkpoint, or the one step of it that is meant.
async fn meant(location: &str, step: Option<&str>) -> Result<Checkpoint, Failure> {
    let checkpoint = Checkpoint::open(location).await.map_err(failure)?;
    match step {
        None => Ok(checkpoint),
        Some(step) => {
            let place = checkpoint.step(Some(step)).map_err(failure)?.place.clone();
            Checkpoint::at(place).await.map_err(failure)
        }
    }
}

pub(super) async fn convert(args: &ConvertArgs) -> Result<u8, Failure> {
    let source = meant(&args.location, args.step.as_deref()).await?;
    let options = Options {
        layout: args.layout,
        chunk_bytes: args.chunk_bytes,
        casts: args.casts.all()?,
        compression: args.compression,
    };
    let progress = Progress::default();
    let report = match (&args.target, args.in_place) {
        (Some(target), false) => {
            if args.remove_old {
                return Err(Failure::usage("--remove_old is for --in_place"));
            }
            let memory = args.bound.memory();
            let work = convert::convert(&source, target, &options, &memory, &progress);
            let done = bar::shown(!args.shown.json, &progress, work)
                .await
                .map_err(failure)?;
            json!({
                "target": target,
                "arrays": done.arrays,
                "chunks": done.chunks,
                "kept_chunks": done.kept_chunks,
                "files": done.files,
                "bytes": progress.now().bytes,
            })
        }
        (None, true) => {
            let work = in_place(args, &source, &options, &progress);
            bar::shown(!args.shown.json, &progress, work).await?
        }
        _ => return Err(Failure::usage("give either TARGET or --in_place")),
    };
    args.shown.print(&report, || convert_words(&report))?;
    Ok(0)
}

async fn in_place(
    args: &ConvertArgs,
    source: &Checkpoint,
    options: &Options,
    progress: &Progress,
) -> Result<Value, Failure> {
    let memory = args.bound.memory();
    let mut items = Vec::new();
    for step in source.steps.iter().filter(|step| step.commit.is_finished()) {
        let entries: Vec<&ItemEntry> = step.arrays(None).map_err(failure)?;
        for entry in entries {
            let item = Item::open(&entry.place).await.map_err(failure)?;
            let done = convert::in_place(&item, options, args.remove_old, &memory, progress);
            let done = done.await.map_err(failure)?;
            items.push(json!({
                "item": item.place.location(),
                "layout": done.layout.name(),
                "arrays": done.report.arrays,
                "chunks": done.report.chunks,
                "metadata_changed": done.is_metadata_changed,
                "removed": done.removed,
            }));
        }
    }
    Ok(json!({"items": items}))
}

fn convert_words(report: &Value) -> String {
    let Some(items) = report["items"].as_array() else {
        return format!(
            "{}: {} arrays, {} chunks, {} of them there already, {}",
            tame(report["target"].as_str().unwrap_or_default()),
            report["arrays"],
            report["chunks"].as_u64().unwrap_or(0) + report["kept_chunks"].as_u64().unwrap_or(0),
            report["kept_chunks"],
            size(report["bytes"].as_u64().unwrap_or(0))
        );
    };
    let mut out = String::new();
    for item in items {
        let _ = writeln!(
            out,
            "{}: all arrays are {}; {} written in {} chunks, _METADATA {}, {} objects removed",
            tame(item["item"].as_str().unwrap_or_default()),
            item["layout"].as_str().unwrap_or_default(),
            item["arrays"],
            item["chunks"],
            if item["metadata_changed"] == true {
                "changed"
            } else {
                "as it was"
            },
            item["removed"]
        );
    }
    out
}

pub(super) async fn copy(args: &CopyArgs) -> Result<u8, Failure> {
    let source = meant(&args.location, args.step.as_deref()).await?;
    let progress = Progress::default();
    let work = waystation_checkpoint_tools::copy::copy(&source, &args.target, &progress);
    let done = bar::shown(!args.shown.json, &progress, work)
        .await
        .map_err(failure)?;
    let report = json!({
        "target": args.target,
        "objects": done.objects,
        "bytes": done.bytes,
        "kept": done.kept,
        "unfinished_steps": done.unfinished_steps,
    });
    args.shown.print(&report, || {
        format!(
            "{}: {} objects copied, {}, {} were there already, {} unfinished steps left out",
            tame(&args.target),
            done.objects,
            size(done.bytes),
            done.kept,
            done.unfinished_steps
        )
    })?;
    Ok(0)
}
