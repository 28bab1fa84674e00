//! An item brought into one layout where it is.
//!
//! New things are written first, `_METADATA` last: until then readers take what there was, afterwards what there is. An
//! interruption leaves both, and the same command finishes it: it reads all once more, and writes what is not there as it is to
//! be. What was replaced is removed only when asked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use waystation_checkpoint::zarr::Format;
use waystation_ocdbt::Config;

use super::plan::{Plan, prevailing};
use super::{Options, Report, check_names, no_arrays, write};
use crate::info::METADATA;
use crate::item::{DatabaseKind, Item, index_of, is_metadata, join, owner};
use crate::memory::Memory;
use crate::objects::{is_manifest, is_of_database};
use crate::progress::Progress;
use crate::sink::{self, Resume, Sink};
use crate::{Error, Result};
use waystation_checkpoint::Layout;

/// How deep empty folders are looked for.
const MAX_DEPTH: usize = 128;

/// What was done in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InPlace {
    /// The layout that all arrays have now.
    pub layout: Layout,
    /// What was written.
    pub report: Report,
    /// Whether `_METADATA` was another.
    pub is_metadata_changed: bool,
    /// Objects removed.
    pub removed: u64,
}

/// Brings all arrays of an item into one layout, and `_METADATA` into agreement. Without a layout, the one that least has to
/// be written for: a database where any array lies in one.
///
/// # Errors
/// As [`super::convert`]; options beside the layout, for which another location is needed.
pub async fn in_place(
    item: &Item,
    options: &Options,
    remove_old: bool,
    memory: &Memory,
    progress: &Progress,
) -> Result<InPlace> {
    if !options.is_layout_alone() {
        return Err(Error::Asked(
            "in place only the layout can change; give another location for chunks, element types or compression"
                .to_owned(),
        ));
    }
    item.check_readable()?;
    check_links(item).await?;
    let Some(tree) = &item.tree else {
        return Err(Error::Unfit {
            location: item.place.location().to_owned(),
            reason: "there is no _METADATA, by which a conversion in place is committed".to_owned(),
        });
    };
    let layout = match options.layout {
        Some(layout) => layout,
        None => fitting(item)?,
    };
    check_names(item, layout)?;
    let mut plans = Vec::new();
    for array in item.arrays.values().filter_map(|layouts| layouts.first()) {
        if array.layout != layout {
            plans.push(Arc::new(Plan::new(item, array, layout, options, memory)?));
        }
    }
    let is_unmerged = matches!(item.database, DatabaseKind::Children(_)) && layout.is_ocdbt();
    let mut report = Report::default();
    if !plans.is_empty() || is_unmerged {
        let sink = if layout.is_ocdbt() {
            // Values stay in the files they are in; those of children are referred to there.
            let kept = item.keys.as_ref().clone().into_values();
            Sink::database(&item.place, kept, Resume::Same).await?
        } else {
            Sink::files(&item.place, Resume::Same).await?
        };
        write(plans, sink, memory, progress, &mut report).await?;
    }
    let is_zarr3 = layout.format() != Format::Zarr2;
    let is_metadata_changed =
        tree.use_ocdbt != Some(layout.is_ocdbt()) || tree.use_zarr3.unwrap_or(false) != is_zarr3;
    if is_metadata_changed {
        let bytes = tree.rewritten(layout.is_ocdbt(), is_zarr3, &BTreeMap::new());
        item.place.put(METADATA, bytes).await?;
    }
    let removed = if remove_old {
        remove(item, layout).await?
    } else {
        0
    };
    Ok(InPlace {
        layout,
        report,
        is_metadata_changed,
        removed,
    })
}

/// Refuses folders that are symbolic links: what they lead to may be others', and would be written to and removed.
async fn check_links(item: &Item) -> Result<()> {
    let Some(root) = item.place.local_path() else {
        return Ok(());
    };
    let files = item.files.iter().map(|(file, _)| file.to_owned());
    let inside = item.arrays.keys().map(|name| join(name, "x"));
    let mut folders = BTreeSet::new();
    for file in files.chain(inside).chain(["d/x".to_owned()]) {
        let ends = file.match_indices('/').map(|(at, _)| file[..at].to_owned());
        folders.extend(ends);
    }
    let is_link = move |folder: &String| {
        let found = std::fs::symlink_metadata(root.join(folder));
        found.is_ok_and(|found| found.is_symlink())
    };
    let find = move || folders.into_iter().find(is_link);
    match tokio::task::spawn_blocking(find).await? {
        Some(folder) => Err(Error::Unfit {
            location: item.place.location().to_owned(),
            reason: format!(
                "{folder} is a symbolic link, and what it leads to may belong to others; convert to another location"
            ),
        }),
        None => Ok(()),
    }
}

/// The layout that is nearest.
fn fitting(item: &Item) -> Result<Layout> {
    let arrays = || item.arrays.values().filter_map(|layouts| layouts.first());
    if arrays().next().is_none() {
        return Err(no_arrays(item));
    }
    let is_ocdbt = arrays().any(|array| array.layout.is_ocdbt());
    let said = item.said_layout().map_or(Format::Zarr2, Layout::format);
    Ok(Layout::new(prevailing(arrays(), said), is_ocdbt))
}

/// Removes what arrays have in other layouts than the one they all have now, also what is left of an interrupted removal, and a
/// database that is of no use any more.
async fn remove(item: &Item, layout: Layout) -> Result<u64> {
    // As it is now.
    let item = &Item::open(&item.place).await?;
    let old = old_objects(item, layout, false);
    // Without its metadata an array is none.
    let (metadata, chunks): (Vec<&str>, Vec<&str>) = old
        .iter()
        .map(String::as_str)
        .partition(|key| is_metadata(key.rsplit('/').next().unwrap_or(key)));
    for key in metadata.into_iter().chain(chunks) {
        item.place.delete(key).await?;
    }
    let mut removed = old.len() as u64;
    for name in item.arrays.keys() {
        let is_touched = old.range(join(name, "")..).next();
        if is_touched.is_some_and(|key| key.starts_with(&join(name, ""))) {
            remove_folders(item, name).await?;
        }
    }
    if !layout.is_ocdbt() {
        return Ok(removed + remove_database(item).await?);
    }
    let old = old_objects(item, layout, true);
    if !old.is_empty() {
        let mut values = item.keys.as_ref().clone().into_values();
        values.retain(|key, _| !old.contains(key));
        sink::write(&item.place, Config::orbax(sink::random()), values).await?;
        removed += old.len() as u64;
    }
    Ok(removed)
}

/// The objects of arrays, files or keys, that are not of the layout.
fn old_objects(item: &Item, layout: Layout, is_ocdbt: bool) -> BTreeSet<String> {
    let names: BTreeSet<String> = item.arrays.keys().cloned().collect();
    let is_of_layout = |name: &str, file: &str| {
        let array = item.array(name).filter(|array| array.layout == layout);
        let metadata = array.and_then(|array| array.metadata.as_ref());
        is_ocdbt == layout.is_ocdbt()
            && metadata.is_some_and(|metadata| {
                file == layout.format().metadata_file() || index_of(metadata, file).is_some()
            })
    };
    item.objects(is_ocdbt)
        .iter()
        .filter_map(|(key, _)| Some((key, owner(&names, key)?)))
        // Nothing that is not named as a file of an array.
        .filter(|(_, (_, file))| is_metadata(file) || is_chunk(file))
        .filter(|(_, (name, file))| !is_of_layout(name, file))
        .map(|(key, _)| key.to_owned())
        .collect()
}

/// Whether a file is named as chunks are, in either version of zarr.
fn is_chunk(file: &str) -> bool {
    let is_numbers = |text: &str, separator: char| {
        text.split(separator)
            .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    file == "c"
        || is_numbers(file, '.')
        || is_numbers(file, '/')
        || file
            .strip_prefix("c/")
            .is_some_and(|rest| is_numbers(rest, '/'))
}

/// Removes the database's files, the manifests first.
async fn remove_database(item: &Item) -> Result<u64> {
    if item.database == DatabaseKind::None {
        return Ok(0);
    }
    let files = item.files.iter().map(|(file, _)| file);
    let (manifests, data): (Vec<&str>, Vec<&str>) = files
        .filter(|file| is_of_database(file))
        .partition(|file| is_manifest(file));
    let mut folders = BTreeSet::new();
    let mut removed = 0;
    for file in manifests.into_iter().chain(data) {
        item.place.delete(file).await?;
        folders.extend(file.split_once('/').map(|(folder, _)| folder));
        removed += 1;
    }
    for folder in folders {
        remove_folders(item, folder).await?;
    }
    Ok(removed)
}

/// Folders of a disk that are empty now.
async fn remove_folders(item: &Item, name: &str) -> Result<()> {
    let Some(path) = item.place.local_path() else {
        return Ok(());
    };
    let path = path.join(name);
    Ok(tokio::task::spawn_blocking(move || prune(&path, 0)).await?)
}

/// Removing a folder fails where anything is in it, which is what is wanted.
fn prune(folder: &Path, depth: usize) {
    if depth > MAX_DEPTH {
        return;
    }
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            prune(&entry.path(), depth + 1);
        }
    }
    let _ = std::fs::remove_dir(folder);
}
