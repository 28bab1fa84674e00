//! `checkpoint verify` and `diff`: exit status 1 when something is wrong, or different.

use std::fmt::Write as _;

use serde_json::{Value, json};
use waystation_checkpoint_tools::diff::{Difference, Values};
use waystation_checkpoint_tools::tree::{Kind, Step};
use waystation_checkpoint_tools::verify::{self, Fault};
use waystation_checkpoint_tools::{Checkpoint, Item, Memory, Pattern, Progress};

use super::{Bound, Part, Shown, bar, failure, parse_pattern, tame};
use crate::command::cache::size;
use crate::error::Failure;

/// Read every chunk and hold every file against the others; exit status 1 when something is wrong
#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    /// A folder of steps, a step, or an item
    #[arg(value_name = "LOCATION")]
    location: String,
    /// Only this step, by number or name [default: all]
    #[arg(long = "step", value_name = "STEP")]
    step: Option<String>,
    #[command(flatten)]
    bound: Bound,
    #[command(flatten)]
    shown: Shown,
}

/// Compare the arrays of two checkpoints, whatever their layouts; exit status 1 when they differ
#[derive(Debug, clap::Args)]
pub(crate) struct DiffArgs {
    /// One checkpoint: a folder of steps, a step, or an item
    #[arg(value_name = "FIRST")]
    first: String,
    /// The other
    #[arg(value_name = "SECOND")]
    second: String,
    #[command(flatten)]
    part: Part,
    /// Step of the second, where it is another [default: as of the first]
    #[arg(long = "second_step", value_name = "STEP")]
    second_step: Option<String>,
    /// Only arrays whose names match; may be given several times
    #[arg(long = "only", value_name = "PATTERN", value_parser = parse_pattern)]
    only: Vec<Pattern>,
    #[command(flatten)]
    bound: Bound,
    #[command(flatten)]
    shown: Shown,
}

pub(super) async fn verify(args: &VerifyArgs) -> Result<u8, Failure> {
    let checkpoint = Checkpoint::open(&args.location).await.map_err(failure)?;
    let (memory, progress) = (args.bound.memory(), Progress::default());
    let steps: Vec<&Step> = match &args.step {
        Some(step) => vec![checkpoint.step(Some(step)).map_err(failure)?],
        None => checkpoint.steps.iter().collect(),
    };
    // Of all steps, one may be on its way just now.
    let is_one = args.step.is_some() || checkpoint.kind != Kind::Root;
    let work = async {
        let mut tally = Tally::default();
        for step in steps {
            if !step.commit.is_finished() && !is_one {
                tally.unfinished.push(step.name.clone());
                continue;
            }
            tally
                .step(step, checkpoint.kind, &memory, &progress)
                .await?;
        }
        Ok::<_, Failure>(tally)
    };
    let tally = bar::shown(!args.shown.json, &progress, work).await?;
    let report = tally.report(&args.location);
    args.shown.print(&report, || verify_words(&report))?;
    Ok(u8::from(tally.faults > 0))
}

/// What was found of all items.
#[derive(Default)]
struct Tally {
    items: u64,
    arrays: u64,
    chunks: u64,
    bytes: u64,
    unchecked: u64,
    faults: u64,
    shown: Vec<Value>,
    foreign: Vec<String>,
    unfinished: Vec<String>,
}

impl Tally {
    async fn step(
        &mut self,
        step: &Step,
        kind: Kind,
        memory: &Memory,
        progress: &Progress,
    ) -> Result<(), Failure> {
        // An item by itself may be a part of a step, whose commit is elsewhere.
        if kind != Kind::Item {
            let faults = verify::step(step).await.map_err(failure)?;
            self.faults += faults.len() as u64;
            let shown = faults.iter().map(|fault| about(&step.name, "", fault));
            self.shown.extend(shown);
        }
        for entry in step.arrays(None).map_err(failure)? {
            let item = Item::open(&entry.place).await.map_err(failure)?;
            let found = verify::verify(&item, memory, progress)
                .await
                .map_err(failure)?;
            self.items += 1;
            self.arrays += found.arrays;
            self.chunks += found.chunks;
            self.bytes += found.bytes;
            self.unchecked += found.unchecked_chunks;
            self.faults += found.fault_count();
            let shown = found
                .faults
                .iter()
                .map(|fault| about(&step.name, &entry.name, fault));
            self.shown.extend(shown);
            self.foreign.extend(found.foreign);
        }
        Ok(())
    }

    fn report(&self, location: &str) -> Value {
        json!({
            "location": location,
            "items": self.items,
            "arrays": self.arrays,
            "chunks": self.chunks,
            "bytes": self.bytes,
            "chunks_without_checksum": self.unchecked,
            "faults": self.faults,
            "found": self.shown,
            "foreign_objects": self.foreign,
            "unfinished_steps": self.unfinished,
        })
    }
}

fn about(step: &str, item: &str, fault: &Fault) -> Value {
    json!({
        "step": step,
        "item": item,
        "kind": fault.kind.name(),
        "array": fault.array,
        "object": fault.object,
        "reason": fault.reason,
    })
}

fn verify_words(report: &Value) -> String {
    let text = |value: &Value| tame(value.as_str().unwrap_or_default());
    let mut out = String::new();
    for fault in report["found"].as_array().into_iter().flatten() {
        let place: Vec<String> = ["step", "item", "object"]
            .iter()
            .map(|field| text(&fault[*field]))
            .filter(|part| !part.is_empty())
            .collect();
        let array = match fault["array"].as_str() {
            Some(array) => format!(" array {:?}:", tame(array)),
            None => String::new(),
        };
        let _ = writeln!(
            out,
            "{}: {}:{array} {}",
            text(&fault["kind"]),
            place.join("/"),
            text(&fault["reason"])
        );
    }
    for name in report["foreign_objects"].as_array().into_iter().flatten() {
        let _ = writeln!(out, "of no use: {}", text(name));
    }
    for name in report["unfinished_steps"].as_array().into_iter().flatten() {
        let _ = writeln!(out, "not finished, not looked at: step {}", text(name));
    }
    let _ = writeln!(
        out,
        "{} arrays in {} items, {} chunks read, {}; {} faults",
        report["arrays"],
        report["items"],
        report["chunks"],
        size(report["bytes"].as_u64().unwrap_or(0)),
        report["faults"]
    );
    if report["chunks_without_checksum"] != 0 {
        let _ = writeln!(
            out,
            "{} chunks have no checksum (Orbax writes none): a flipped bit in them may pass for data",
            report["chunks_without_checksum"]
        );
    }
    out
}

pub(super) async fn diff(args: &DiffArgs) -> Result<u8, Failure> {
    let first = args.part.item(&args.first).await?;
    let second_part = Part {
        step: args.second_step.clone().or_else(|| args.part.step.clone()),
        item: args.part.item.clone(),
    };
    let second = second_part.item(&args.second).await?;
    let (memory, progress) = (args.bound.memory(), Progress::default());
    let work =
        waystation_checkpoint_tools::diff::diff(&first, &second, &args.only, &memory, &progress);
    let found = bar::shown(!args.shown.json, &progress, work)
        .await
        .map_err(failure)?;
    let differences: Vec<Value> = found
        .differences
        .iter()
        .map(|(name, difference)| difference_of(name, difference))
        .collect();
    let is_different = !differences.is_empty();
    let report = json!({
        "first": first.place.location(),
        "second": second.place.location(),
        "compared": found.compared,
        "differences": differences,
    });
    args.shown.print(&report, || diff_words(&report))?;
    Ok(u8::from(is_different))
}

fn difference_of(name: &str, difference: &Difference) -> Value {
    let mut about = json!({"array": name});
    match difference {
        Difference::OnlyInFirst => about["kind"] = json!("only_in_first"),
        Difference::OnlyInSecond => about["kind"] = json!("only_in_second"),
        Difference::Shape(first, second) => {
            about["kind"] = json!("shape");
            about["first"] = json!(first);
            about["second"] = json!(second);
        }
        Difference::DType {
            first,
            second,
            values,
        } => {
            about["kind"] = json!("dtype");
            about["first"] = json!(first.v3_name());
            about["second"] = json!(second.v3_name());
            if let Some(values) = values {
                values_of(&mut about, values);
            }
        }
        Difference::Values(values) => {
            about["kind"] = json!("values");
            values_of(&mut about, values);
        }
        Difference::Prng(first, second) => {
            about["kind"] = json!("prng_impl");
            about["first"] = json!(first);
            about["second"] = json!(second);
        }
        Difference::Text(first, second) => {
            about["kind"] = json!("text");
            about["first"] = json!(first);
            about["second"] = json!(second);
        }
    }
    about
}

fn values_of(about: &mut Value, values: &Values) {
    about["differing"] = json!(values.differing);
    about["elements"] = json!(values.elements);
    about["nan_on_one_side"] = json!(values.nan_on_one_side);
    // JSON has no infinity.
    about["max_abs_difference"] = if values.max_abs_difference.is_finite() {
        json!(values.max_abs_difference)
    } else {
        json!("infinite")
    };
}

fn diff_words(report: &Value) -> String {
    let mut out = String::new();
    for found in report["differences"].as_array().into_iter().flatten() {
        let name = tame(found["array"].as_str().unwrap_or_default());
        let kind = found["kind"].as_str().unwrap_or_default();
        let _ = write!(out, "{name}: {}", kind.replace('_', " "));
        if found.get("first").is_some() {
            let _ = write!(out, " {} and {}", found["first"], found["second"]);
        }
        if found.get("differing").is_some() {
            let _ = write!(
                out,
                ", {} of {} elements differ, by {} at most",
                found["differing"], found["elements"], found["max_abs_difference"]
            );
            if found["nan_on_one_side"] != 0 {
                let _ = write!(out, ", {} are NaN on one side", found["nan_on_one_side"]);
            }
        }
        out.push('\n');
    }
    let count = report["differences"].as_array().map_or(0, Vec::len);
    let _ = writeln!(
        out,
        "{} arrays compared, {count} differences",
        report["compared"]
    );
    out
}
