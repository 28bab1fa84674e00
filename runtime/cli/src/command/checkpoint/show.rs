//! `checkpoint ls` and `inspect`.

use std::fmt::Write as _;

use serde_json::{Value, json};
use waystation_checkpoint::zarr::{Codec, Metadata};
use waystation_checkpoint_tools::item::DatabaseKind;
use waystation_checkpoint_tools::tree::{Commit, ItemKind, Kind};
use waystation_checkpoint_tools::{Array, Checkpoint, Item, Pattern, sharding_words};

use super::{Part, Shown, failure, parse_pattern, tame};
use crate::command::cache::size;
use crate::error::Failure;

/// List the steps and items at a location: whether they are finished, objects, bytes
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// A folder of steps, a step, or an item: gs://BUCKET/PREFIX, s3://..., file:///PATH
    #[arg(value_name = "LOCATION")]
    location: String,
    #[command(flatten)]
    shown: Shown,
}

/// List the arrays of an item: type, shape, chunks, compression, layout, bytes, sharding
#[derive(Debug, clap::Args)]
pub(crate) struct InspectArgs {
    /// A folder of steps, a step, or an item
    #[arg(value_name = "LOCATION")]
    location: String,
    #[command(flatten)]
    part: Part,
    /// Only arrays whose names match; may be given several times
    #[arg(long = "only", value_name = "PATTERN", value_parser = parse_pattern)]
    only: Vec<Pattern>,
    #[command(flatten)]
    shown: Shown,
}

pub(super) async fn list(args: &ListArgs) -> Result<u8, Failure> {
    let checkpoint = Checkpoint::open(&args.location).await.map_err(failure)?;
    let mut steps = Vec::new();
    for step in &checkpoint.steps {
        let (objects, bytes) = step.place.sum().await.map_err(failure)?;
        let mut items = Vec::new();
        for item in &step.items {
            let (objects, bytes) = if item.name.is_empty() {
                (objects, bytes)
            } else {
                item.place.sum().await.map_err(failure)?
            };
            items.push(json!({
                "name": item.name,
                "kind": match item.kind { ItemKind::Arrays => "arrays", ItemKind::Other => "other" },
                "objects": objects,
                "bytes": bytes,
            }));
        }
        steps.push(json!({
            "step": step.name,
            "number": step.number,
            "finished": step.commit.is_finished(),
            "commit_file": step.commit == Commit::Marked,
            "objects": objects,
            "bytes": bytes,
            "items": items,
        }));
    }
    let kind = match checkpoint.kind {
        Kind::Root => "steps",
        Kind::Step => "step",
        Kind::Item => "item",
    };
    let report = json!({"location": checkpoint.place.location(), "kind": kind, "steps": steps});
    args.shown.print(&report, || list_words(&report))?;
    Ok(0)
}

fn list_words(report: &Value) -> String {
    let text = |value: &Value| tame(value.as_str().unwrap_or_default());
    let bytes = |value: &Value| size(value["bytes"].as_u64().unwrap_or(0));
    let mut out = format!("{}, {}\n", text(&report["location"]), text(&report["kind"]));
    for step in report["steps"].as_array().into_iter().flatten() {
        let name = match step["step"].as_str() {
            Some("") | None => ".".to_owned(),
            Some(name) => tame(name),
        };
        let state = if step["finished"] == true {
            "finished"
        } else {
            "NOT FINISHED"
        };
        let _ = writeln!(
            out,
            "{name:24} {state:12} {:>6} objects {:>11}",
            step["objects"],
            bytes(step)
        );
        for item in step["items"].as_array().into_iter().flatten() {
            let name = text(&item["name"]);
            if !name.is_empty() {
                let _ = writeln!(
                    out,
                    "  {name:22} {:12} {:>6} objects {:>11}",
                    text(&item["kind"]),
                    item["objects"],
                    bytes(item)
                );
            }
        }
    }
    out
}

pub(super) async fn inspect(args: &InspectArgs) -> Result<u8, Failure> {
    let item = args.part.item(&args.location).await?;
    let is_meant =
        |name: &str| args.only.is_empty() || args.only.iter().any(|only| only.matches(name));
    let arrays: Vec<Value> = item
        .arrays
        .iter()
        .filter(|(name, _)| is_meant(name))
        .flat_map(|(_, layouts)| layouts)
        .map(|array| about(&item, array))
        .collect();
    let sum = |field: &str| -> u64 {
        let numbers = arrays.iter().filter_map(|array| array[field].as_u64());
        numbers.fold(0, u64::saturating_add)
    };
    let (database, children) = match &item.database {
        DatabaseKind::None => ("none", Vec::new()),
        DatabaseKind::Merged => ("merged", Vec::new()),
        DatabaseKind::Children(folders) => ("not merged", folders.clone()),
    };
    let report = json!({
        "location": item.place.location(),
        "layout": item.said_layout().map(|layout| layout.name()),
        "use_ocdbt": item.tree.as_ref().and_then(|tree| tree.use_ocdbt),
        "use_zarr3": item.tree.as_ref().and_then(|tree| tree.use_zarr3),
        "database": database,
        "databases_of_processes": children,
        "stored_bytes": sum("stored_bytes"),
        "logical_bytes": sum("logical_bytes"),
        "texts": item.strings,
        "faults": item.faults.iter().map(|fault| json!({"object": fault.object, "reason": fault.reason})).collect::<Vec<_>>(),
        "arrays": arrays,
    });
    args.shown.print(&report, || inspect_words(&report))?;
    Ok(0)
}

fn about(item: &Item, array: &Array) -> Value {
    let name = &array.name;
    let leaf = item.tree.as_ref().and_then(|tree| tree.leaves.get(name));
    let mut about = json!({
        "name": name,
        "layout": array.layout.name(),
        "objects": array.objects,
        "stored_bytes": array.stored_bytes,
        "logical_bytes": array.logical_bytes(),
        "value_type": leaf.map(|leaf| &leaf.value_type),
        "sharding": item.shardings.get(name),
        "prng_impl": item.prng_impl(name),
        "fault": array.fault,
    });
    if let Some(metadata) = &array.metadata {
        about["dtype"] = json!(metadata.dtype.v3_name());
        about["shape"] = json!(metadata.grid.shape());
        about["chunks"] = json!(metadata.grid.chunks());
        if metadata.block() != metadata.grid.chunks() {
            about["inner_chunks"] = json!(metadata.block());
        }
        about["codec"] = json!(codec(metadata));
        about["big_endian"] = json!(metadata.big_endian && metadata.dtype.has_byte_order());
    }
    about
}

fn codec(metadata: &Metadata) -> &'static str {
    match metadata.codec {
        Codec::Raw => "none",
        // Of no matter to a reader, and not kept.
        Codec::Zstd { .. } => "zstd",
    }
}

fn inspect_words(report: &Value) -> String {
    let text = |value: &Value| tame(value.as_str().unwrap_or("-"));
    let bytes = |value: &Value| size(value.as_u64().unwrap_or(0));
    let arrays = report["arrays"].as_array().map_or(&[][..], Vec::as_slice);
    let mut out = format!(
        "{}\n{} arrays, {} stored, {} in memory; _METADATA says {}; database: {}\n",
        text(&report["location"]),
        arrays.len(),
        bytes(&report["stored_bytes"]),
        bytes(&report["logical_bytes"]),
        text(&report["layout"]),
        text(&report["database"]),
    );
    for fault in report["faults"].as_array().into_iter().flatten() {
        let _ = writeln!(
            out,
            "! {}: {}",
            text(&fault["object"]),
            text(&fault["reason"])
        );
    }
    let width = arrays
        .iter()
        .map(|array| text(&array["name"]).chars().count())
        .max()
        .unwrap_or(0)
        .min(60);
    for array in arrays {
        let name = text(&array["name"]);
        if !array["fault"].is_null() {
            let _ = writeln!(
                out,
                "{name:width$} {} unreadable: {}",
                text(&array["layout"]),
                text(&array["fault"])
            );
            continue;
        }
        let _ = write!(
            out,
            "{name:width$} {:13} {:16} chunks {:14} {:4} {:11} {:>10} of {:>10}",
            text(&array["dtype"]),
            array["shape"].to_string(),
            array["chunks"].to_string(),
            text(&array["codec"]),
            text(&array["layout"]),
            bytes(&array["stored_bytes"]),
            bytes(&array["logical_bytes"]),
        );
        if !array["sharding"].is_null() {
            let _ = write!(out, "  {}", tame(&sharding_words(&array["sharding"])));
        }
        if !array["prng_impl"].is_null() {
            let _ = write!(out, "  key of {}", text(&array["prng_impl"]));
        }
        out.push('\n');
    }
    for (name, value) in report["texts"].as_object().into_iter().flatten() {
        let _ = writeln!(out, "{:width$} text {value}", tame(name));
    }
    out
}
