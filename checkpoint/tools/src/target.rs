//! Where a new checkpoint is written: nobody takes it for finished before it is.
//!
//! On disks that is a folder with another name, which becomes the right one by a rename; in buckets the right place, where
//! `commit_success.txt` comes last. A file in it says what is being written, so that only the same piece of work goes on with
//! what an interrupted one has left.

use std::path::Path;

use serde::Serialize;

use crate::item::join;
use crate::place::Place;
use crate::tree::{COMMIT, Checkpoint, TMP_SUFFIX};
use crate::{Error, Result};

/// The file that says what is being written.
const MARKER: &str = "waystation-unfinished.json";
const MAX_MARKER_BYTES: u64 = 1 << 20;
/// How deep folders are looked into.
const MAX_DEPTH: usize = 128;

/// A place that is being filled.
#[derive(Debug)]
pub(crate) struct Target {
    /// Where to write.
    pub(crate) place: Place,
    /// The final name, for what is written into files.
    pub(crate) location: String,
    /// Whether an earlier run has left something.
    pub(crate) is_resumed: bool,
}

/// What is being written, from what.
#[derive(Debug, Serialize)]
pub(crate) struct Work<'a> {
    pub(crate) operation: &'static str,
    pub(crate) source: &'a str,
    /// Of the names and sizes of the source's objects.
    pub(crate) fingerprint: u64,
    pub(crate) options: String,
}

impl Target {
    /// Prepares a location.
    ///
    /// # Errors
    /// There is something else at it.
    pub(crate) async fn open(location: &str, work: &Work<'_>) -> Result<Target> {
        let marker = serde_json::to_vec(work).map_err(|error| Error::Asked(error.to_string()))?;
        let unfit = |reason: &str| Error::Unfit {
            location: location.to_owned(),
            reason: reason.to_owned(),
        };
        let trimmed = location.trim_end_matches('/');
        let is_local = !(trimmed.starts_with("gs://") || trimmed.starts_with("s3://"));
        let place = if is_local {
            if let Ok(there) = Place::open(trimmed).await {
                let listing = there.listing().await?;
                if !listing.files.is_empty() || !listing.folders.is_empty() {
                    return Err(unfit("it is there already; write to another location"));
                }
            }
            Place::create(&format!("{trimmed}{TMP_SUFFIX}")).await?
        } else {
            Place::create(trimmed).await?
        };
        let found = place.get(MARKER, MAX_MARKER_BYTES).await?;
        let is_resumed = match found {
            Some(found) if found == marker => {
                if let Some(folder) = place.local_path() {
                    tokio::task::spawn_blocking(move || sweep(&folder, 0)).await?;
                }
                true
            }
            Some(_) => {
                return Err(unfit(
                    "something else was begun there and not finished; remove it, or write to another location",
                ));
            }
            None => {
                let listing = place.listing().await?;
                if !listing.files.is_empty() || !listing.folders.is_empty() {
                    return Err(unfit("it is not empty; write to another location"));
                }
                place.put(MARKER, marker).await?;
                false
            }
        };
        Ok(Target {
            place,
            location: trimmed.to_owned(),
            is_resumed,
        })
    }

    /// What Orbax writes into a folder when it is finished.
    pub(crate) fn commit_text(&self, folder: &str) -> Vec<u8> {
        let path = join(&self.location, folder);
        let path = path.trim_end_matches('/');
        format!("Checkpoint commit was successful to {path}").into_bytes()
    }

    /// Adds the commit files that a bucket needs, whatever the source's disk had, and puts them in order: what is deeper
    /// first.
    pub(crate) fn complete(&self, source: &Checkpoint, commits: &mut Vec<(String, Vec<u8>)>) {
        if self.place.local_path().is_none() {
            let finished = source.steps.iter().filter(|step| step.commit.is_finished());
            for step in finished {
                let items = step.items.iter().map(|item| match step.name.as_str() {
                    "" => item.name.clone(),
                    name if item.name.is_empty() => name.to_owned(),
                    name => join(name, &item.name),
                });
                for folder in items.chain([step.name.clone()]) {
                    let file = join(&folder, COMMIT);
                    if !commits.iter().any(|(other, _)| *other == file) {
                        commits.push((file, self.commit_text(&folder)));
                    }
                }
            }
        }
        commits.sort_by_key(|(file, _)| std::cmp::Reverse(file.matches('/').count()));
    }

    /// Makes it final. `commits` are the files that say so, the last one last.
    pub(crate) async fn commit(self, commits: Vec<(String, Vec<u8>)>) -> Result<()> {
        for (file, content) in commits {
            self.place.put(&file, content).await?;
        }
        self.place.delete(MARKER).await?;
        let Some(from) = self.place.local_path() else {
            return Ok(());
        };
        let shown = from.display().to_string();
        let to = shown
            .strip_suffix(TMP_SUFFIX)
            .map(std::path::PathBuf::from)
            .unwrap_or_default();
        tokio::task::spawn_blocking(move || {
            // An empty folder may be there; another would be in the way.
            std::fs::rename(&from, &to)?;
            match to.parent() {
                Some(parent) => std::fs::File::open(parent)?.sync_all(),
                None => Ok(()),
            }
        })
        .await?
        .map_err(|source| Error::File {
            operation: "renaming",
            path: shown,
            source,
        })
    }
}

/// Removes what an interruption has left of single files, which the store writes under names of this form first.
fn sweep(folder: &Path, depth: usize) {
    if depth > MAX_DEPTH {
        return;
    }
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.rsplit_once('#'));
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            sweep(&entry.path(), depth + 1);
        } else if number.is_some_and(|(_, number)| {
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        }) {
            // It is of no use, but does no harm.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Whether a file is of the work, not of the checkpoint.
pub(crate) fn is_of_work(file: &str) -> bool {
    file == MARKER
}
