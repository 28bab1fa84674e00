//! Reading everything of an item, and holding what its files say against each other.
//!
//! Nothing stored can tell some things: a bit that flipped in a chunk whose zstd frame has no checksum (Orbax writes none) and
//! that still decodes, or in a chunk that is not compressed; an element type that became another of the same size.

mod chunks;
mod said;

use std::collections::BTreeSet;

use serde_json::Value;

use crate::item::{DatabaseKind, Item, join};
use crate::memory::Memory;
use crate::progress::Progress;
use crate::tree::{CHECKPOINT_METADATA, COMMIT, ItemKind, Step};
use crate::{Error, Result};

/// Faults kept of one item; more are counted.
const MOST_FAULTS: usize = 1000;
/// The largest JSON file of a step.
const MAX_JSON_BYTES: u64 = 64 << 20;
/// The most nodes that a database is taken to have.
const MOST_NODES: u64 = 1 << 24;

/// What kind of fault something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A file that everything begins with is not there or cannot be read.
    Unreadable,
    /// The arrays lie elsewhere than `_METADATA` says: plain Orbax cannot restore them.
    Mismatch,
    /// `_METADATA` speaks of an array that is not there.
    MissingArray,
    /// A chunk is not there.
    MissingChunk,
    /// A chunk is not what the array's metadata says.
    DamagedChunk,
    /// The metadata of an array cannot be read.
    DamagedMetadata,
    /// Two files contradict each other.
    Contradiction,
    /// What is well formed, but what Orbax never writes.
    Unusual,
    /// An object that no grid has a place for, or an array that `_METADATA` does not know.
    Extra,
    /// A database that is damaged, or that nobody has merged.
    Database,
    /// A step without its commit.
    Unfinished,
}

impl Kind {
    /// A word for programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Unreadable => "unreadable",
            Kind::Mismatch => "mismatch",
            Kind::MissingArray => "missing_array",
            Kind::MissingChunk => "missing_chunk",
            Kind::DamagedChunk => "damaged_chunk",
            Kind::DamagedMetadata => "damaged_metadata",
            Kind::Contradiction => "contradiction",
            Kind::Unusual => "unusual",
            Kind::Extra => "extra",
            Kind::Database => "database",
            Kind::Unfinished => "unfinished",
        }
    }
}

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Which kind.
    pub kind: Kind,
    /// The array, where it is about one.
    pub array: Option<String>,
    /// The object, as far as it is about one.
    pub object: String,
    /// What is wrong, and what mends it where something does.
    pub reason: String,
}

/// What was found of an item.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Arrays looked at.
    pub arrays: u64,
    /// Chunks read and decoded, damaged ones too.
    pub chunks: u64,
    /// The bytes of those as stored.
    pub bytes: u64,
    /// Chunks in which a flipped bit may pass for data: raw, or in a zstd frame without a checksum.
    pub unchecked_chunks: u64,
    /// The first faults.
    pub faults: Vec<Fault>,
    /// Faults beside those.
    pub more_faults: u64,
    /// Objects that belong to nothing, but do no harm.
    pub foreign: Vec<String>,
}

impl Report {
    fn fault(&mut self, kind: Kind, array: Option<&str>, object: &str, reason: impl Into<String>) {
        if self.faults.len() >= MOST_FAULTS {
            self.more_faults += 1;
            return;
        }
        self.faults.push(Fault {
            kind,
            array: array.map(str::to_owned),
            object: object.to_owned(),
            reason: reason.into(),
        });
    }

    /// How many faults there are.
    #[must_use]
    pub fn fault_count(&self) -> u64 {
        self.faults.len() as u64 + self.more_faults
    }
}

/// Verifies an item.
///
/// # Errors
/// The store fails. What is wrong with the checkpoint is no error, but in the report; so is an array whose chunks need more
/// memory than is allowed.
pub async fn verify(item: &Item, memory: &Memory, progress: &Progress) -> Result<Report> {
    let mut report = Report::default();
    for fault in &item.faults {
        let kind = match fault.object.as_str() {
            crate::tree::MANIFEST => Kind::Database,
            object if object.starts_with(crate::tree::CHILD_PREFIX) => Kind::Database,
            _ => Kind::Unreadable,
        };
        report.fault(kind, None, &fault.object, &fault.reason);
    }
    nodes(item, &mut report).await?;
    said::check(item, &mut report);
    chunks::check(item, memory, progress, &mut report).await?;
    report.foreign = item.foreign.clone();
    report.foreign.extend(leftovers(item));
    Ok(report)
}

/// Verifies what a step has beside its items.
///
/// # Errors
/// The store fails.
pub async fn step(step: &Step) -> Result<Vec<Fault>> {
    let mut report = Report::default();
    if !step.commit.is_finished() {
        let reason = "the step is not finished: it was being written, or was abandoned";
        report.fault(Kind::Unfinished, None, COMMIT, reason);
    }
    let handlers = match step.place.get(CHECKPOINT_METADATA, MAX_JSON_BYTES).await {
        Ok(None) => None,
        Ok(Some(bytes)) => match serde_json::from_slice::<Value>(&bytes) {
            Ok(json) if json.is_object() => Some(json["item_handlers"].clone()),
            _ => {
                report.fault(
                    Kind::Unreadable,
                    None,
                    CHECKPOINT_METADATA,
                    "no JSON object",
                );
                None
            }
        },
        Err(error @ Error::Storage { .. }) => return Err(error),
        Err(error) => {
            report.fault(Kind::Unreadable, None, CHECKPOINT_METADATA, error.report());
            None
        }
    };
    if let Some(Value::Object(handlers)) = handlers {
        for name in handlers.keys() {
            // Of an item without a name, Orbax says so of what lies in the step itself.
            if !step
                .items
                .iter()
                .any(|item| item.name == *name || item.name.is_empty())
            {
                let reason = format!("it speaks of an item {name:?}, which is not there");
                report.fault(Kind::Contradiction, None, CHECKPOINT_METADATA, reason);
            }
        }
    }
    for item in step
        .items
        .iter()
        .filter(|item| item.kind == ItemKind::Other)
    {
        for (file, size) in item.place.listing().await?.files {
            // What JsonSave and metrics write.
            if !matches!(file.as_str(), "metadata" | "metrics") || size > MAX_JSON_BYTES {
                continue;
            }
            let bytes = item
                .place
                .get(&file, MAX_JSON_BYTES)
                .await?
                .unwrap_or_default();
            if serde_json::from_slice::<Value>(&bytes).is_err() {
                let object = format!("{}/{file}", item.name);
                report.fault(Kind::Unreadable, None, &object, "no JSON");
            }
        }
    }
    Ok(report.faults)
}

/// Every node of the databases, and that their numbers add up.
async fn nodes(item: &Item, report: &mut Report) -> Result<()> {
    if let DatabaseKind::Children(folders) = &item.database {
        report.fault(
            Kind::Database,
            None,
            &folders.join(", "),
            "the databases of the processes are not merged, so Orbax does not find the arrays in them; \
             `convert --in_place` merges them",
        );
    }
    let Some(databases) = &item.databases else {
        return Ok(());
    };
    for (folder, database) in &databases.open {
        match database.check(MOST_NODES).await {
            Ok(_) => {}
            Err(error) if is_storage(&error) => {
                return Err(crate::objects::failed(&item.place, error));
            }
            Err(error) => {
                let manifest = join(folder.trim_end_matches('/'), crate::tree::MANIFEST);
                report.fault(
                    Kind::Database,
                    None,
                    &manifest,
                    crate::error::report(&error),
                );
            }
        }
    }
    Ok(())
}

/// Whether it is the store that failed, not what is stored.
fn is_storage(error: &waystation_ocdbt::Error) -> bool {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<Error>() {
            return matches!(error, Error::Storage { .. });
        }
        source = error.source();
    }
    false
}

/// Arrays that are there once more, in another layout than is read.
fn leftovers(item: &Item) -> BTreeSet<String> {
    item.arrays
        .values()
        .flat_map(|layouts| layouts.iter().skip(1))
        .map(|array| format!("{} ({})", array.name, array.layout))
        .collect()
}
