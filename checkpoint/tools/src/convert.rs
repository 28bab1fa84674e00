//! A checkpoint in another layout, with other chunks, element types or compression; and, in place, what does not fit
//! together mended.
//!
//! What stays as it is is not compressed anew: a chunk is decoded, to see that it is whole, and written as it was stored.

mod in_place;
mod plan;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::{StreamExt as _, TryStreamExt as _};
use waystation_checkpoint::zarr::DType;

pub use in_place::{InPlace, in_place};

use self::plan::{Plan, SharedPlan};
use crate::copy::{copy_object, fingerprint};
use crate::info::{ARRAY_METADATAS, ArrayMetadatas, METADATA, SHARDING, STRINGS};
use crate::item::Item;
use crate::memory::Memory;
use crate::objects::is_of_database;
use crate::pattern::Pattern;
use crate::place::Place;
use crate::progress::Progress;
use crate::sink::{NOTES, Resume, Sink};
use crate::target::{Target, Work};
use crate::tree::{CHECKPOINT_METADATA, COMMIT, Checkpoint, ItemEntry, ItemKind, Kind, MANIFEST};
use crate::{Error, Result};
use waystation_checkpoint::Layout;

/// Chunks on their way at the same time; memory bounds them too.
const WRITES: usize = 16;

/// What is beside the arrays of an item, or may be.
const OTHERS: [&str; 8] = [
    METADATA,
    ARRAY_METADATAS,
    SHARDING,
    STRINGS,
    CHECKPOINT_METADATA,
    COMMIT,
    MANIFEST,
    NOTES,
];

/// How chunks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// zstd of that level.
    Zstd(i32),
}

/// What is to become of the arrays.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The layout; without one, each item's own.
    pub layout: Option<Layout>,
    /// Chunks of so many bytes at most, anew; without it, those there are.
    pub chunk_bytes: Option<u64>,
    /// Other element types; of several patterns that match, the last counts. Typed PRNG keys are never cast.
    pub casts: Vec<(Pattern, DType)>,
    /// Other compression; without it, compressed is what was.
    pub compression: Option<Compression>,
}

impl Options {
    /// Whether arrays stay as they are, but for their layout.
    fn is_layout_alone(&self) -> bool {
        self.chunk_bytes.is_none() && self.casts.is_empty() && self.compression.is_none()
    }
}

/// What was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Arrays written.
    pub arrays: u64,
    /// Chunks written.
    pub chunks: u64,
    /// Chunks that an interrupted run had written already.
    pub kept_chunks: u64,
    /// Other files copied.
    pub files: u64,
}

/// Writes a converted checkpoint to a new location: a whole folder of steps, a step or an item, as the source is. Steps that
/// are not finished are left out.
///
/// # Errors
/// Anything wrong with the source; a target that is there already; a cast that cannot be; memory.
pub async fn convert(
    source: &Checkpoint,
    target: &str,
    options: &Options,
    memory: &Memory,
    progress: &Progress,
) -> Result<Report> {
    let unfinished: Vec<&str> = source
        .steps
        .iter()
        .filter(|step| !step.commit.is_finished())
        .map(|step| step.name.as_str())
        .collect();
    if source.kind == Kind::Step && !unfinished.is_empty() {
        return Err(Error::Unfit {
            location: source.place.location().to_owned(),
            reason: "the step is not finished".to_owned(),
        });
    }
    let work = Work {
        operation: "convert",
        source: source.place.location(),
        fingerprint: fingerprint(&source.place).await?,
        options: format!("{options:?}"),
    };
    // What cannot be done is said before anything is written.
    let meant = || meant(source);
    for (_, entry) in meant() {
        let item = Item::open(&entry.place).await?;
        plans(&item, options, memory)?;
    }
    source.place.check_outside(target)?;
    let target = Target::open(target, &work).await?;
    let mut report = Report::default();
    let mut items = BTreeSet::new();
    for (below, entry) in meant() {
        let item = Item::open(&entry.place).await?;
        let place = target.place.below(&below)?;
        one(&item, &place, options, memory, progress, &mut report).await?;
        items.insert(below);
    }
    let commits = rest(source, &target, &items, &unfinished, &mut report).await?;
    target.commit(commits).await?;
    Ok(report)
}

/// The items with arrays, and where they are below the source. Steps that are not finished are none.
fn meant(source: &Checkpoint) -> impl Iterator<Item = (String, &ItemEntry)> {
    let finished = source
        .steps
        .iter()
        .filter(|step| step.commit.is_finished() || source.kind == Kind::Item);
    finished.flat_map(|step| {
        let arrays = step
            .items
            .iter()
            .filter(|entry| entry.kind == ItemKind::Arrays);
        arrays.map(|entry| {
            let names = [step.name.as_str(), entry.name.as_str()];
            let below: Vec<&str> = names.into_iter().filter(|name| !name.is_empty()).collect();
            (below.join("/"), entry)
        })
    })
}

/// What is to become of an item's arrays.
fn plans(item: &Item, options: &Options, memory: &Memory) -> Result<(Layout, Vec<SharedPlan>)> {
    item.check_readable()?;
    let layout = options.layout.or_else(|| own_layout(item));
    let layout = layout.ok_or_else(|| no_arrays(item))?;
    check_names(item, layout)?;
    let arrays = item.arrays.values().filter_map(|layouts| layouts.first());
    let plans = arrays.map(|array| Plan::new(item, array, layout, options, memory).map(Arc::new));
    Ok((layout, plans.collect::<Result<_>>()?))
}

/// Refuses arrays that would be folders where files are: as keys of a database they may be named as those.
fn check_names(item: &Item, layout: Layout) -> Result<()> {
    if layout.is_ocdbt() {
        return Ok(());
    }
    let folders = item.arrays.keys().flat_map(|name| {
        let ends = name.match_indices('/').map(|(at, _)| at);
        ends.chain([name.len()])
            .map(move |end| (name, &name[..end]))
    });
    for (name, folder) in folders {
        if OTHERS.contains(&folder) || item.files.entry(folder).is_some() {
            return Err(Error::Unfit {
                location: item.place.location().to_owned(),
                reason: format!(
                    "the array {name:?} cannot be a folder: {folder:?} is another file of the checkpoint; keep it in a database, \
                     with --layout=ocdbt or --layout=ocdbt_zarr3"
                ),
            });
        }
    }
    Ok(())
}

/// Writes one item, but for its commit.
async fn one(
    item: &Item,
    place: &Place,
    options: &Options,
    memory: &Memory,
    progress: &Progress,
    report: &mut Report,
) -> Result<()> {
    let (layout, plans) = plans(item, options, memory)?;
    let sink = if layout.is_ocdbt() {
        Sink::database(place, BTreeMap::new(), Resume::Whole).await?
    } else {
        Sink::files(place, Resume::Whole).await?
    };
    write(plans.clone(), sink, memory, progress, report).await?;

    let shapes = write_shapes(item, &plans);
    for (file, json) in &item.metadatas.files {
        let bytes = ArrayMetadatas::rewritten(json, &shapes);
        place.below(ARRAY_METADATAS)?.put(file, bytes).await?;
    }
    if let Some(tree) = &item.tree {
        let is_zarr3 = layout.format() != waystation_checkpoint::zarr::Format::Zarr2;
        let bytes = tree.rewritten(layout.is_ocdbt(), is_zarr3, &shapes);
        place.put(METADATA, bytes).await?;
    }
    Ok(())
}

/// Writes all chunks of arrays, then what makes them readable.
async fn write(
    plans: Vec<SharedPlan>,
    sink: Sink,
    memory: &Memory,
    progress: &Progress,
    report: &mut Report,
) -> Result<()> {
    report.arrays += plans.len() as u64;
    for plan in &plans {
        let elements = crate::item::elements(plan.reader.shape()).unwrap_or(0);
        progress.expect(elements.saturating_mul(plan.reader.item_bytes()));
    }
    write_chunks(&plans, &sink, memory, progress, report).await?;
    for plan in &plans {
        let (key, bytes) = plan.metadata_file()?;
        sink.put(&key, bytes.into()).await?;
    }
    sink.finish().await
}

async fn write_chunks(
    plans: &[SharedPlan],
    sink: &Sink,
    memory: &Memory,
    progress: &Progress,
    report: &mut Report,
) -> Result<()> {
    let chunks = plans
        .iter()
        .flat_map(|plan| plan.chunks().map(move |chunk| (plan, chunk)));
    let mut written = futures::stream::iter(chunks)
        .map(|(plan, chunk)| plan.write(chunk, sink, memory))
        .buffer_unordered(WRITES);
    while let Some((bytes, was_there)) = written.try_next().await? {
        progress.did(1, bytes);
        if was_there {
            report.kept_chunks += 1;
        } else {
            report.chunks += 1;
        }
    }
    Ok(())
}

/// Copies what is not of arrays; returns the commit files, which come last.
async fn rest(
    source: &Checkpoint,
    target: &Target,
    items: &BTreeSet<String>,
    unfinished: &[&str],
    report: &mut Report,
) -> Result<Vec<(String, Vec<u8>)>> {
    let mut commits = Vec::new();
    let mut arrays: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut listed = std::pin::pin!(source.place.list());
    let mut files = Vec::new();
    while let Some((name, _)) = listed.try_next().await? {
        files.push(name);
    }
    files.sort();
    for file in &files {
        if let Some((folder, "zarr.json" | ".zarray")) = file.rsplit_once('/')
            && let Some((item, rest)) = of_item(items, folder)
        {
            arrays.entry(item).or_default().insert(rest.to_owned());
        }
    }
    for file in &files {
        if unfinished
            .iter()
            .any(|step| file.starts_with(&format!("{step}/")))
        {
            continue;
        }
        let base = file.rsplit('/').next().unwrap_or(file);
        if base == COMMIT {
            let folder = file.strip_suffix(COMMIT).unwrap_or_default();
            commits.push((file.clone(), target.commit_text(folder)));
            continue;
        }
        if let Some((item, rest)) = of_item(items, file)
            && (is_of_item(rest) || is_of_array(arrays.get(item), rest))
        {
            continue;
        }
        copy_object(&source.place, &target.place, file, None).await?;
        report.files += 1;
    }
    target.complete(source, &mut commits);
    Ok(commits)
}

/// The item that a file is in, and its name there.
fn of_item<'a, 'b>(items: &'a BTreeSet<String>, file: &'b str) -> Option<(&'a str, &'b str)> {
    items.iter().find_map(|item| {
        let rest = if item.is_empty() {
            file
        } else {
            file.strip_prefix(item.as_str())?.strip_prefix('/')?
        };
        Some((item.as_str(), rest))
    })
}

/// Whether a file of an item is written anew.
fn is_of_item(file: &str) -> bool {
    match file.split_once('/') {
        None => file == METADATA || is_of_database(file),
        Some((folder, _)) => folder == ARRAY_METADATAS || is_of_database(file),
    }
}

fn is_of_array(arrays: Option<&BTreeSet<String>>, file: &str) -> bool {
    arrays.is_some_and(|arrays| crate::item::owner(arrays, file).is_some())
}

/// The layout that an item's arrays have, or most of them.
fn own_layout(item: &Item) -> Option<Layout> {
    let mut counts: BTreeMap<Layout, u64> = BTreeMap::new();
    for array in item.arrays.values().filter_map(|layouts| layouts.first()) {
        *counts.entry(array.layout).or_default() += 1;
    }
    counts
        .into_iter()
        .max_by_key(|(_, count)| *count)
        .map(|(layout, _)| layout)
        .or_else(|| item.said_layout())
}

fn no_arrays(item: &Item) -> Error {
    Error::Unfit {
        location: item.place.location().to_owned(),
        reason: "there are no arrays".to_owned(),
    }
}

/// The shape of what is written at once, of arrays whose chunks are others than they were.
fn write_shapes(item: &Item, plans: &[SharedPlan]) -> BTreeMap<String, Vec<i64>> {
    let mut shapes = BTreeMap::new();
    for plan in plans {
        let (shape, chunks) = (plan.metadata.grid.shape(), plan.metadata.grid.chunks());
        let before = item
            .array(&plan.reader.name)
            .and_then(|array| array.metadata.as_ref());
        if before.is_some_and(|before| before.grid.chunks() == chunks) {
            continue;
        }
        // Where chunks run over the edge, the whole.
        let is_even = shape
            .iter()
            .zip(chunks)
            .all(|(dim, chunk)| dim % chunk == 0);
        let written = if is_even { chunks } else { shape };
        shapes.insert(plan.reader.name.clone(), written.to_vec());
    }
    shapes
}
