//! Whether several processes that save together see the same folder.
//!
//! Each leaves a file there, under a number that nobody else knows, and looks for those of all others before it writes
//! anything. Then it leaves a second one, that it has seen them. Its files it takes away when it has written its part and all
//! others have seen the first. Where one is ended before that they stay, in a checkpoint that is none.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use waystation_lifecycle::bucket::Location;

use super::Engine;
use crate::{Error, Result};

/// How long all may take to come. They are told at the same time.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long one waits, when it has written its part, for others to have seen its file.
const FAREWELL: Duration = Duration::from_secs(5);
/// Between two looks, at most.
const LONGEST_NAP: Duration = Duration::from_millis(100);

/// Who saves together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Together {
    /// The same for all, and for no other save.
    pub nonce: String,
    /// This process's place among `names`.
    pub place: usize,
    /// All, for messages; the same for all.
    pub names: Vec<String>,
}

/// The folder is shared. Dropped, its files are removed; see [`Meeting::part`].
#[derive(Debug)]
pub struct Meeting(Arc<Files>);

/// Removed when the last who works on them has gone: one that is given up may be just making one.
#[derive(Debug)]
struct Files {
    folder: PathBuf,
    together: Together,
}

impl Engine {
    /// Makes sure that all who save together see the same folder, where the location is one. Nothing else is written.
    ///
    /// # Errors
    /// [`Error::NotShared`]; [`Error::BadRequest`] for what names no process; a folder that cannot be used.
    pub async fn meet(&self, location: &str, together: &Together) -> Result<Option<Meeting>> {
        self.meet_within(location, together, PATIENCE).await
    }

    /// As [`Engine::meet`], for so long.
    ///
    /// # Errors
    /// As [`Engine::meet`].
    pub async fn meet_within(
        &self,
        location: &str,
        together: &Together,
        patience: Duration,
    ) -> Result<Option<Meeting>> {
        let Ok(Location::File(folder)) = Location::parse(location) else {
            return Ok(None);
        };
        let Together {
            nonce,
            place,
            names,
        } = together;
        let is_plain = |nonce: &str| nonce.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if nonce.is_empty() || !is_plain(nonce) || *place >= names.len() {
            return Err(Error::BadRequest {
                array: String::new(),
                reason: format!("place {place} of {} workers, nonce '{nonce}'", names.len()),
            });
        }
        let meeting = Meeting(Arc::new(Files {
            folder,
            together: together.clone(),
        }));
        let failed = |source| unusable(location, source);
        meeting.leave(false).await.map_err(failed)?;
        let until = Instant::now() + patience;
        let mut nap = Duration::from_millis(1);
        // Who gives up before us takes its file away.
        let mut seen = HashSet::new();
        loop {
            seen.extend(meeting.look().await.map_err(failed)?);
            let missing: Vec<&str> = (0..names.len())
                .filter(|&other| !seen.contains(&meeting.0.name(other, false)))
                .map(|other| names[other].as_str())
                .collect();
            if missing.is_empty() {
                break;
            }
            if Instant::now() >= until {
                return Err(Error::NotShared {
                    location: location.to_owned(),
                    here: names[*place].clone(),
                    missing: missing.join(", "),
                    after: patience,
                });
            }
            tokio::time::sleep(nap).await;
            nap = (nap * 2).min(LONGEST_NAP);
        }
        meeting.leave(true).await.map_err(failed)?;
        Ok(Some(meeting))
    }
}

impl Meeting {
    /// Waits a little for the others to have seen this process's files, and removes them.
    pub async fn part(self) {
        let until = Instant::now() + FAREWELL;
        let mut nap = Duration::from_millis(1);
        while Instant::now() < until {
            let Ok(seen) = self.look().await else { return };
            // One that has removed its files knew that all had seen them.
            let waits = |other| {
                let has = |has_seen| seen.contains(&self.0.name(other, has_seen));
                has(false) && !has(true)
            };
            if !(0..self.0.together.names.len()).any(waits) {
                return;
            }
            tokio::time::sleep(nap).await;
            nap = (nap * 2).min(LONGEST_NAP);
        }
    }

    async fn leave(&self, has_seen: bool) -> std::io::Result<()> {
        let files = Arc::clone(&self.0);
        blocking(move || {
            std::fs::create_dir_all(&files.folder)?;
            let name = files.name(files.together.place, has_seen);
            std::fs::File::create_new(files.folder.join(name)).map(drop)
        })
        .await
    }

    /// The names in the folder that are of this save. A list and not look-ups: network file systems remember for a while
    /// what was not there.
    async fn look(&self) -> std::io::Result<HashSet<String>> {
        let files = Arc::clone(&self.0);
        blocking(move || {
            let prefix = format!(".waystation-{}-", files.together.nonce);
            let mut seen = HashSet::new();
            for entry in std::fs::read_dir(&files.folder)? {
                let name = entry?.file_name();
                if let Some(name) = name.to_str().filter(|name| name.starts_with(&prefix)) {
                    seen.insert(name.to_owned());
                }
            }
            Ok(seen)
        })
        .await
    }
}

impl Files {
    fn name(&self, place: usize, has_seen: bool) -> String {
        let end = if has_seen { "-seen" } else { "" };
        format!(".waystation-{}-{place}{end}", self.together.nonce)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // In this order: whoever sees the first without the second takes it for one that is still looking.
        for has_seen in [false, true] {
            // It may not be there yet.
            let _ =
                std::fs::remove_file(self.folder.join(self.name(self.together.place, has_seen)));
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(std::io::Error::other(error)))
}

fn unusable(location: &str, source: std::io::Error) -> Error {
    Error::Storage {
        operation: "looking for the other workers",
        object: "files".to_owned(),
        location: location.to_owned(),
        source: Box::new(object_store::Error::Generic {
            store: "folder",
            source: source.into(),
        }),
    }
}
