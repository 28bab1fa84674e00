//! An open item: its arrays, wherever and in whichever layout they lie, and what is said of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::{StreamExt as _, TryStreamExt as _};
use serde_json::Value;
use waystation_checkpoint::Layout;
use waystation_checkpoint::persistence::check_name;
use waystation_checkpoint::zarr::{self, ChunkIndex, Format, Grid, MAX_METADATA_BYTES, Metadata};

use crate::info::{self, ARRAY_METADATAS, ArrayMetadata, ArrayMetadatas, TreeMetadata, or_fault};
use crate::objects::{Databases, Objects, Shared};
use crate::place::Place;
use crate::tree::{CHILD_PREFIX, COMMIT, MANIFEST};
use crate::{Error, Result};

/// Metadata files read at the same time.
const READS: usize = 64;

/// Which databases an item has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DatabaseKind {
    /// None.
    None,
    /// One, which has everything.
    Merged,
    /// Those that processes wrote, in these folders, which nobody has merged.
    Children(Vec<String>),
}

/// An array of an item, in one layout.
#[derive(Debug, Clone)]
pub struct Array {
    /// Its name, which is its folder.
    pub name: String,
    /// How it lies.
    pub layout: Layout,
    /// What its metadata file says; [`None`] where that cannot be read, with the reason in [`Array::fault`].
    pub metadata: Option<Metadata>,
    /// Why its metadata cannot be read.
    pub fault: Option<String>,
    /// How many objects it has, besides the metadata file.
    pub objects: u64,
    /// The bytes of those and of the metadata file.
    pub stored_bytes: u64,
}

impl Array {
    /// The bytes of its elements in memory, one a byte for types narrower than that.
    #[must_use]
    pub fn logical_bytes(&self) -> Option<u64> {
        let metadata = self.metadata.as_ref()?;
        let elements = elements(metadata.grid.shape())?;
        elements.checked_mul(metadata.dtype.item_bytes() as u64)
    }
}

/// The number of elements of a shape.
pub(crate) fn elements(shape: &[i64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |product, &dim| {
        product.checked_mul(u64::try_from(dim).ok()?)
    })
}

/// An open item.
#[derive(Debug, Clone)]
pub struct Item {
    /// Where it is.
    pub place: Place,
    /// `_METADATA`, where there is one.
    pub tree: Option<TreeMetadata>,
    /// The shardings that arrays had, as Orbax spells them.
    pub shardings: BTreeMap<String, Value>,
    /// The leaves that are texts.
    pub strings: BTreeMap<String, String>,
    /// The arrays by name; of one that is there in several layouts, the one that `_METADATA` says comes first.
    pub arrays: BTreeMap<String, Vec<Array>>,
    /// Its databases.
    pub database: DatabaseKind,
    /// What beside arrays cannot be read.
    pub faults: Vec<Fault>,
    pub(crate) metadatas: ArrayMetadatas,
    pub(crate) files: Shared,
    pub(crate) keys: Shared,
    pub(crate) databases: Option<Arc<Databases>>,
    /// Objects of no array, that nothing else is known of either.
    pub(crate) foreign: Vec<String>,
}

/// What of an item cannot be read, without which the rest can be told.
#[derive(Debug, Clone)]
pub struct Fault {
    /// The file.
    pub object: String,
    /// Why.
    pub reason: String,
}

impl Item {
    /// Opens the item in a folder.
    ///
    /// What cannot be read of it does not fail, but is in [`Item::faults`] and [`Array::fault`].
    ///
    /// # Errors
    /// The store fails; more objects than can be listed.
    pub async fn open(place: &Place) -> Result<Item> {
        let mut faults = Vec::new();
        let tree = or_fault(TreeMetadata::read(place).await, &mut faults);
        let shardings = or_fault(info::shardings(place).await, &mut faults);
        let strings = or_fault(info::strings(place).await, &mut faults);
        let metadatas = or_fault(info::array_metadatas(place).await, &mut faults);
        let files = Objects::files(place).await?;

        let merged = files.entry(MANIFEST).is_some();
        let children = children(&files);
        let mut odd = Vec::new();
        let mut databases = None;
        let mut keys = Objects::none(place);
        if merged || !children.is_empty() {
            let read = async {
                let open = Databases::open(place, merged, &children).await?;
                let keys = open.objects(&mut odd).await?;
                Ok::<_, Error>((open, keys))
            };
            match read.await {
                Ok((open, listed)) => {
                    databases = Some(Arc::new(open));
                    keys = listed;
                }
                Err(error @ Error::Storage { .. }) => return Err(error),
                Err(error) => faults.push(error),
            }
        }
        let database = match (merged, children.is_empty()) {
            (true, _) => DatabaseKind::Merged,
            (false, false) => DatabaseKind::Children(children),
            (false, true) => DatabaseKind::None,
        };
        let mut item = Item {
            place: place.clone(),
            tree,
            shardings,
            strings,
            arrays: BTreeMap::new(),
            database,
            faults: faults.iter().map(fault).collect(),
            metadatas,
            files: Arc::new(files),
            keys: Arc::new(keys),
            databases,
            foreign: odd,
        };
        item.find_arrays().await?;
        Ok(item)
    }

    /// The implementation of a typed PRNG key, whose data the array is.
    #[must_use]
    pub fn prng_impl(&self, name: &str) -> Option<&str> {
        self.array_metadatas(name)
            .iter()
            .find_map(|said| said.prng_impl.as_deref())
    }

    pub(crate) fn array_metadatas(&self, name: &str) -> &[ArrayMetadata] {
        let said = self.metadatas.by_array.get(name);
        said.map_or(&[], Vec::as_slice)
    }

    /// The array of that name as it is read.
    #[must_use]
    pub fn array(&self, name: &str) -> Option<&Array> {
        self.arrays.get(name)?.first()
    }

    /// Where `_METADATA` says that arrays lie; where it does not say, where they do.
    #[must_use]
    pub fn said_layout(&self) -> Option<Layout> {
        let tree = self.tree.as_ref()?;
        let is_zarr3 = tree.use_zarr3.unwrap_or(false);
        let format = if is_zarr3 {
            Format::Zarr3
        } else {
            Format::Zarr2
        };
        let is_ocdbt = tree
            .use_ocdbt
            .unwrap_or(self.database != DatabaseKind::None);
        Some(Layout::new(format, is_ocdbt))
    }

    /// That there is nothing that cannot be read: of what is not whole, nothing whole can be made.
    ///
    /// # Errors
    /// The first of [`Item::faults`].
    pub fn check_readable(&self) -> Result<()> {
        match self.faults.first() {
            None => Ok(()),
            Some(fault) => Err(Error::Malformed {
                object: fault.object.clone(),
                location: self.place.location().to_owned(),
                reason: fault.reason.clone(),
            }),
        }
    }

    pub(crate) fn objects(&self, is_ocdbt: bool) -> &Shared {
        if is_ocdbt { &self.keys } else { &self.files }
    }

    async fn find_arrays(&mut self) -> Result<()> {
        let mut found = Vec::new();
        for is_ocdbt in [false, true] {
            let objects = Arc::clone(self.objects(is_ocdbt));
            let mut names = names(&objects);
            // Of a hostile database: a name that leads elsewhere is no array's.
            names.retain(|name| match check_name(name) {
                Ok(()) => true,
                Err(reason) => {
                    self.faults.push(Fault {
                        object: name.clone(),
                        reason: format!("no name of an array: it {reason}"),
                    });
                    false
                }
            });
            let mut sums: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
            for (key, entry) in objects.iter() {
                match owner(&names, key) {
                    Some((name, file)) => {
                        let sum = sums.entry(name).or_default();
                        sum.0 += u64::from(!is_metadata(file));
                        sum.1 += entry.len();
                    }
                    None if !is_ocdbt && is_known(key) => {}
                    None => self.foreign.push(key.to_owned()),
                }
            }
            let all = names.iter().flat_map(|name| {
                Format::ALL
                    .into_iter()
                    .filter(|format| objects.entry(&join(name, format.metadata_file())).is_some())
                    .map(move |format| (name, format))
            });
            let read: Vec<Array> = futures::stream::iter(all)
                .map(|(name, format)| {
                    let sum = sums.get(name.as_str()).copied().unwrap_or_default();
                    array(&objects, name, Layout::new(format, is_ocdbt), sum)
                })
                .buffered(READS)
                .try_collect()
                .await?;
            found.extend(read);
        }
        let said = self.said_layout();
        for array in found {
            self.arrays
                .entry(array.name.clone())
                .or_default()
                .push(array);
        }
        for layouts in self.arrays.values_mut() {
            layouts.sort_by_key(|array| (Some(array.layout) != said, !array.layout.is_ocdbt()));
        }
        Ok(())
    }
}

async fn array(
    objects: &Objects,
    name: &str,
    layout: Layout,
    (count, stored_bytes): (u64, u64),
) -> Result<Array> {
    let file = join(name, layout.format().metadata_file());
    let (metadata, fault) = match objects.get(&file, MAX_METADATA_BYTES as u64).await {
        Err(error @ Error::Storage { .. }) => return Err(error),
        Err(error) => (None, Some(error.report())),
        Ok(bytes) => match Metadata::decode(layout.format(), &bytes.unwrap_or_default()) {
            Ok(metadata) => (Some(metadata), None),
            Err(error) => (None, Some(error.to_string())),
        },
    };
    Ok(Array {
        name: name.to_owned(),
        layout,
        metadata,
        fault,
        objects: count,
        stored_bytes,
    })
}

fn fault(error: &Error) -> Fault {
    match error {
        Error::Malformed { object, reason, .. } => Fault {
            object: object.clone(),
            reason: reason.clone(),
        },
        Error::Database { .. } => Fault {
            object: MANIFEST.to_owned(),
            reason: error.report(),
        },
        other => Fault {
            object: String::new(),
            reason: other.report(),
        },
    }
}

/// The name of a file of an array; the name of an array that is the whole tree is empty.
pub(crate) fn join(name: &str, file: &str) -> String {
    if name.is_empty() {
        file.to_owned()
    } else {
        format!("{name}/{file}")
    }
}

pub(crate) fn is_metadata(file: &str) -> bool {
    Format::ALL
        .iter()
        .any(|format| format.metadata_file() == file)
}

/// The arrays that have a metadata file.
fn names(objects: &Objects) -> BTreeSet<String> {
    objects
        .iter()
        .filter_map(|(key, _)| match key.rsplit_once('/') {
            Some((name, file)) => is_metadata(file).then(|| name.to_owned()),
            None => is_metadata(key).then(String::new),
        })
        .collect()
}

/// The array that a key belongs to, the innermost one, and the rest of the key.
pub(crate) fn owner<'a, 'b>(
    names: &'a BTreeSet<String>,
    key: &'b str,
) -> Option<(&'a str, &'b str)> {
    let ends = key.rmatch_indices('/').map(|(at, _)| at);
    for at in ends {
        if let Some(name) = names.get(&key[..at]) {
            return Some((name, &key[at + 1..]));
        }
    }
    // Of an array without a name, only what looks like its own.
    let is_chunk = key.starts_with("c/") || key.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    if is_metadata(key) || key == "c" || is_chunk {
        return names.get("").map(|name| (name.as_str(), key));
    }
    None
}

fn children(files: &Objects) -> Vec<String> {
    let names: BTreeSet<_> = files
        .below(CHILD_PREFIX)
        .filter_map(|(key, _)| key.split_once('/'))
        .filter(|(_, file)| *file == MANIFEST)
        .map(|(name, _)| name.to_owned())
        .collect();
    names.into_iter().collect()
}

/// Whether a file of an item is one that Orbax and TensorStore write beside arrays.
fn is_known(key: &str) -> bool {
    let known = [
        info::METADATA,
        info::SHARDING,
        info::STRINGS,
        crate::tree::CHECKPOINT_METADATA,
        COMMIT,
        "orbax.checkpoint",
        "checkpoint",
    ];
    match key.split_once('/') {
        None => known.contains(&key) || key.starts_with("manifest."),
        Some((folder, _)) => {
            folder == "d"
                || folder == ARRAY_METADATAS
                || folder == "ocdbt_meta"
                || folder == "ocdbt_data"
                || folder.starts_with(CHILD_PREFIX)
        }
    }
}

/// The place in the grid of a file, if it has one there and is named as its place is.
pub(crate) fn index_of(metadata: &Metadata, file: &str) -> Option<ChunkIndex> {
    let (keys, grid) = (metadata.keys, &metadata.grid);
    let rank = grid.shape().len();
    let numbers = if keys.prefixed {
        let rest = file.strip_prefix('c')?;
        if rank == 0 {
            rest
        } else {
            rest.strip_prefix(keys.separator)?
        }
    } else {
        file
    };
    let index: ChunkIndex = if rank == 0 {
        Vec::new()
    } else {
        let parts = numbers.split(keys.separator);
        parts.map(|part| part.parse().ok()).collect::<Option<_>>()?
    };
    (index.len() == rank && keys.key(&index) == file && is_inside(grid, &index)).then_some(index)
}

fn is_inside(grid: &Grid, index: &[i64]) -> bool {
    index
        .iter()
        .zip(grid.shape().iter().zip(grid.chunks()))
        .all(|(&i, (&dim, &chunk))| i >= 0 && i.checked_mul(chunk).is_some_and(|start| start < dim))
}

/// Why metadata that is there cannot be used.
pub(crate) fn unreadable(item: &Item, array: &Array) -> Error {
    Error::Array {
        array: array.name.clone(),
        location: item.place.location().to_owned(),
        object: array.layout.format().metadata_file().to_owned(),
        source: zarr::Error::Malformed(array.fault.clone().unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_belong_to_the_innermost_array() {
        let names = ["a", "a/b", "d", ""].map(str::to_owned).into();
        for (key, owned) in [
            ("a/0.0", Some(("a", "0.0"))),
            ("a/b/0", Some(("a/b", "0"))),
            ("a/c/0/1", Some(("a", "c/0/1"))),
            ("d/0", Some(("d", "0"))),
            ("0.0", Some(("", "0.0"))),
            ("_METADATA", None),
        ] {
            assert_eq!(owner(&names, key), owned, "{key}");
        }
    }
}
