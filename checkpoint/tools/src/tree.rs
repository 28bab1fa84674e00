//! What lies at a location: steps of a manager, items of a step, or one item.

use futures::{StreamExt as _, TryStreamExt as _};

use crate::info::{ARRAY_METADATAS, METADATA};
use crate::place::{Listing, Place};
use crate::{Error, Result};

/// The file that Orbax writes last.
pub const COMMIT: &str = "commit_success.txt";
/// What the folder of a step that is being written is called besides its own name, on disks.
pub(crate) const TMP_SUFFIX: &str = ".orbax-checkpoint-tmp";
/// What Orbax says of a whole step.
pub(crate) const CHECKPOINT_METADATA: &str = "_CHECKPOINT_METADATA";
/// The manifest of a database.
pub(crate) const MANIFEST: &str = "manifest.ocdbt";
/// The folders in which processes write databases of their own.
pub(crate) const CHILD_PREFIX: &str = "ocdbt.process_";

/// Folders looked into for arrays, where nothing else tells.
const LOOKED_INTO: usize = 8;
/// Steps looked at at the same time.
const STEPS: usize = 8;

/// What a location is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A folder of steps.
    Root,
    /// One step, a folder of items.
    Step,
    /// A tree of arrays.
    Item,
}

/// A checkpoint, as far as its folders tell.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// What the location is.
    pub kind: Kind,
    /// Where it is.
    pub place: Place,
    /// Its steps in order; one where it is none of several.
    pub steps: Vec<Step>,
}

/// One step.
#[derive(Debug, Clone)]
pub struct Step {
    /// The name of its folder; empty for what is no folder of steps.
    pub name: String,
    /// The number in the name.
    pub number: Option<u64>,
    /// Where it is.
    pub place: Place,
    /// Whether it is finished.
    pub commit: Commit,
    /// Its items, by name.
    pub items: Vec<ItemEntry>,
}

/// Whether a step is finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commit {
    /// It has its `commit_success.txt`.
    Marked,
    /// It has none, but lies on a disk under its final name, which is how older versions of Orbax commit.
    Renamed,
    /// It is being written, or was abandoned.
    Unfinished,
}

impl Commit {
    /// Whether Orbax would restore it.
    #[must_use]
    pub fn is_finished(self) -> bool {
        self != Commit::Unfinished
    }
}

/// What an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemKind {
    /// A tree of arrays.
    Arrays,
    /// A JSON document, or something of another handler.
    Other,
}

/// An item of a step.
#[derive(Debug, Clone)]
pub struct ItemEntry {
    /// The name of its folder; empty where the step itself is the item.
    pub name: String,
    /// What it is.
    pub kind: ItemKind,
    /// Where it is.
    pub place: Place,
}

impl Checkpoint {
    /// Looks at a location.
    ///
    /// # Errors
    /// A location that cannot be opened, or without anything that Orbax writes.
    pub async fn open(location: &str) -> Result<Checkpoint> {
        Checkpoint::at(Place::open(location).await?).await
    }

    /// As [`Checkpoint::open`], at a place that is open.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub async fn at(place: Place) -> Result<Checkpoint> {
        let listing = place.listing().await?;
        if is_item(&listing) {
            return Ok(Checkpoint::of_one(Kind::Item, place, &listing, Vec::new()));
        }
        let numbered: Vec<_> = listing
            .folders
            .iter()
            .filter_map(|name| Some((name.clone(), step_number(name)?)))
            .collect();
        let is_step = listing.has_file(CHECKPOINT_METADATA) || listing.has_file(COMMIT);
        if !is_step && !numbered.is_empty() {
            let mut steps: Vec<Step> = futures::stream::iter(numbered)
                .map(|(name, number)| step(&place, name, number))
                .buffer_unordered(STEPS)
                .try_collect()
                .await?;
            steps.sort_by(|a, b| (a.number, &a.name).cmp(&(b.number, &b.name)));
            // Arrays of a tree without `_METADATA` may be called so too.
            if steps.iter().any(|step| !step.items.is_empty()) {
                return Ok(Checkpoint {
                    kind: Kind::Root,
                    place,
                    steps,
                });
            }
        }
        let items = items(&place, &listing).await?;
        if items.iter().any(|item| item.kind == ItemKind::Arrays) {
            return Ok(Checkpoint::of_one(Kind::Step, place, &listing, items));
        }
        if has_plain_arrays(&place, &listing).await? {
            return Ok(Checkpoint::of_one(Kind::Item, place, &listing, Vec::new()));
        }
        if is_step {
            return Ok(Checkpoint::of_one(Kind::Step, place, &listing, items));
        }
        Err(Error::Unfit {
            location: place.location().to_owned(),
            reason: "there is no checkpoint of Orbax (no _METADATA, no database, no zarr array, no step)"
                .to_owned(),
        })
    }

    fn of_one(kind: Kind, place: Place, listing: &Listing, items: Vec<ItemEntry>) -> Checkpoint {
        let items = if kind == Kind::Item {
            vec![ItemEntry {
                name: String::new(),
                kind: ItemKind::Arrays,
                place: place.clone(),
            }]
        } else {
            items
        };
        let commit = commit(&place, listing, place.name());
        Checkpoint {
            kind,
            steps: vec![Step {
                name: String::new(),
                number: None,
                place: place.clone(),
                commit,
                items,
            }],
            place,
        }
    }

    /// The step of a number or name; without one, the last that is finished.
    ///
    /// # Errors
    /// There is none.
    pub fn step(&self, wanted: Option<&str>) -> Result<&Step> {
        let unfit = |reason: String| Error::Unfit {
            location: self.place.location().to_owned(),
            reason,
        };
        let Some(wanted) = wanted else {
            return match self.kind {
                Kind::Root => self.steps.iter().rfind(|step| step.commit.is_finished()),
                _ => self.steps.first(),
            }
            .ok_or_else(|| unfit("no step is finished".to_owned()));
        };
        let named = self.steps.iter().find(|step| step.name == wanted);
        let number = wanted.parse::<u64>().ok();
        let numbered = || {
            let mut same = self
                .steps
                .iter()
                .filter(|step| number.is_some() && step.number == number);
            let finished = same.clone().find(|step| step.commit.is_finished());
            finished.or_else(|| same.next())
        };
        named
            .or_else(numbered)
            .ok_or_else(|| unfit(format!("there is no step {wanted}")))
    }
}

impl Step {
    /// The items that are trees of arrays, or the one of a name.
    ///
    /// # Errors
    /// There is none, or it holds no arrays.
    pub fn arrays(&self, wanted: Option<&str>) -> Result<Vec<&ItemEntry>> {
        let found: Vec<_> = self
            .items
            .iter()
            .filter(|item| item.kind == ItemKind::Arrays)
            .filter(|item| wanted.is_none_or(|wanted| item.name == wanted))
            .collect();
        if found.is_empty() {
            return Err(Error::Unfit {
                location: self.place.location().to_owned(),
                reason: match wanted {
                    Some(wanted) => format!("there is no item {wanted:?} with arrays"),
                    None => "there is no item with arrays".to_owned(),
                },
            });
        }
        Ok(found)
    }

    /// The one item that is meant.
    ///
    /// # Errors
    /// There is none, or several.
    pub fn one(&self, wanted: Option<&str>) -> Result<&ItemEntry> {
        match self.arrays(wanted)?.as_slice() {
            [one] => Ok(one),
            several => {
                let names: Vec<_> = several.iter().map(|item| item.name.as_str()).collect();
                Err(Error::Asked(format!(
                    "{} has the items {}: say which with --item",
                    self.place.location(),
                    names.join(", ")
                )))
            }
        }
    }
}

async fn step(root: &Place, name: String, number: u64) -> Result<Step> {
    let place = root.below(&name)?;
    let listing = place.listing().await?;
    let items = if is_item(&listing) {
        vec![ItemEntry {
            name: String::new(),
            kind: ItemKind::Arrays,
            place: place.clone(),
        }]
    } else {
        items(&place, &listing).await?
    };
    Ok(Step {
        commit: commit(&place, &listing, &name),
        name,
        number: Some(number),
        place,
        items,
    })
}

async fn items(place: &Place, listing: &Listing) -> Result<Vec<ItemEntry>> {
    let mut items = Vec::new();
    for name in &listing.folders {
        let below = place.below(name)?;
        let inner = below.listing().await?;
        let kind = if is_item(&inner) || has_plain_arrays(&below, &inner).await? {
            ItemKind::Arrays
        } else {
            ItemKind::Other
        };
        items.push(ItemEntry {
            name: name.clone(),
            kind,
            place: below,
        });
    }
    Ok(items)
}

fn commit(place: &Place, listing: &Listing, name: &str) -> Commit {
    if name.contains(TMP_SUFFIX) {
        Commit::Unfinished
    } else if listing.has_file(COMMIT) {
        Commit::Marked
    } else if place.local_path().is_some() {
        Commit::Renamed
    } else {
        Commit::Unfinished
    }
}

fn is_item(listing: &Listing) -> bool {
    listing.has_file(METADATA)
        || listing.has_file(MANIFEST)
        || listing
            .folders
            .iter()
            .any(|name| name.starts_with(CHILD_PREFIX))
}

/// Whether one of the first folders is an array. Without `_METADATA` nothing else tells.
async fn has_plain_arrays(place: &Place, listing: &Listing) -> Result<bool> {
    let folders = listing
        .folders
        .iter()
        .filter(|name| *name != ARRAY_METADATAS);
    for name in folders.take(LOOKED_INTO) {
        let inner = place.below(name)?.listing().await?;
        if inner.has_file(".zarray") || inner.has_file("zarr.json") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The number of a step: `23`, `0023`, `step_23`, each also while it is being written.
fn step_number(name: &str) -> Option<u64> {
    let name = match name.find(TMP_SUFFIX) {
        Some(at) => &name[..at],
        None => name,
    };
    let digits = name.len() - name.bytes().rev().take_while(u8::is_ascii_digit).count();
    let (prefix, number) = name.split_at(digits);
    if !prefix.is_empty() && !prefix.ends_with('_') {
        return None;
    }
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_known_by_their_names() {
        for (name, number) in [
            ("23", Some(23)),
            ("0023", Some(23)),
            ("step_23", Some(23)),
            ("23.orbax-checkpoint-tmp", Some(23)),
            ("23.orbax-checkpoint-tmp-1700000000", Some(23)),
            ("default", None),
            ("step23", None),
            ("ocdbt.process_0", Some(0)),
            ("", None),
            ("99999999999999999999999", None),
        ] {
            assert_eq!(step_number(name), number, "{name}");
        }
    }
}
