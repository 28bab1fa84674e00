//! Removing what is old, where no rule of the store does it: `file://` and `memory://`.
//!
//! * Fifty managers on one folder do not all sweep: who creates `sweep/v1/<hour>` first does, once an hour.
//! * Age is counted by the store's own clock: that of the claim just made, against that of each object.
//! * Nothing that is old is missed by anybody: a reader that has the file open goes on reading, one that comes later has a
//!   miss. A writer publishes under a new file, whose time is now.
//! * One sweep has bounds; what it leaves, the next takes.

use std::fs;
use std::io;
use std::path::{Path as FilePath, PathBuf};
use std::time::{Duration, SystemTime};

use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{Error as Store, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};

use super::{Ttl, expiring};
use crate::bucket::layout::{self, Prefix};
use crate::bucket::{Bucket, Location};

/// Objects looked at in one sweep.
const LOOKED_AT: u64 = 2_000_000;

/// Objects removed in one sweep.
const REMOVED: u64 = 200_000;

/// A file that a writer left behind half written is left alone for so long.
const HALF_WRITTEN: Duration = Duration::from_secs(24 * 3600);

/// An empty folder that was not touched for so long goes. A writer that wants it just then makes it again.
const EMPTY_FOLDER: Duration = Duration::from_secs(3600);

const HOUR: u64 = 3600;

/// What a sweep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swept {
    /// This process swept.
    Here {
        /// Objects that were old and are gone.
        removed: u64,
        /// Whether everything was looked at, and all that is old is gone.
        whole: bool,
    },
    /// Somebody else did, or does, within this hour.
    Elsewhere,
}

/// Removes objects older than `ttl` below the location's expiring prefixes.
///
/// # Errors
/// Where the store does not take the claim or cannot be listed.
pub async fn sweep(bucket: &Bucket, ttl: Ttl) -> Result<Swept, Store> {
    let Some(now) = claim(bucket).await? else {
        return Ok(Swept::Elsewhere);
    };
    match bucket.location() {
        Location::File(root) => {
            let root = root.clone();
            let work = tokio::task::spawn_blocking(move || Walk::new(now).all(&root, ttl));
            work.await.map_err(|source| Store::JoinError { source })
        }
        _ => objects(bucket.store().as_ref(), now, ttl).await,
    }
}

/// The store's time, where this process is the first of the hour.
async fn claim(bucket: &Bucket) -> Result<Option<SystemTime>, Store> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let path = layout::sweep(since.unwrap_or_default().as_secs() / HOUR);
    let create = PutOptions::from(PutMode::Create);
    match bucket
        .store()
        .put_opts(&path, PutPayload::new(), create)
        .await
    {
        Ok(_) => Ok(Some(bucket.store().head(&path).await?.last_modified.into())),
        Err(Store::AlreadyExists { .. } | Store::Precondition { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// How old an object of a prefix may become. What is worth less than the TTL in any case goes earlier.
fn limit(prefix: &Prefix, ttl: Ttl) -> Duration {
    let own = Duration::from_secs(u64::from(prefix.retention_days.unwrap_or(1)) * 24 * HOUR);
    if prefix.is_short_lived() {
        own.min(ttl.duration())
    } else {
        ttl.duration()
    }
}

/// True of times in the future, too: no age.
fn is_old(modified: SystemTime, now: SystemTime, limit: Duration) -> bool {
    now.duration_since(modified).is_ok_and(|age| age > limit)
}

/// By the store's own list.
async fn objects(store: &dyn ObjectStore, now: SystemTime, ttl: Ttl) -> Result<Swept, Store> {
    let (mut seen, mut old) = (0, Vec::new());
    for prefix in expiring() {
        let folder = Path::from(prefix.path);
        let mut list = store.list(Some(&folder));
        while let Some(meta) = list.try_next().await? {
            seen += 1;
            if is_old(meta.last_modified.into(), now, limit(&prefix, ttl)) {
                old.push(meta.location);
            }
            if seen >= LOOKED_AT || old.len() as u64 >= REMOVED {
                break;
            }
        }
    }
    let (mut removed, mut whole) = (0, seen < LOOKED_AT && (old.len() as u64) < REMOVED);
    for path in old {
        match store.delete(&path).await {
            Ok(()) => removed += 1,
            Err(Store::NotFound { .. }) => {}
            Err(_) => whole = false,
        }
    }
    Ok(Swept::Here { removed, whole })
}

/// By the folders, of which `object_store` shows neither those that are empty nor files half written.
struct Walk {
    now: SystemTime,
    seen: u64,
    removed: u64,
    whole: bool,
}

impl Walk {
    fn new(now: SystemTime) -> Walk {
        Walk {
            now,
            seen: 0,
            removed: 0,
            whole: true,
        }
    }

    fn all(mut self, root: &FilePath, ttl: Ttl) -> Swept {
        for prefix in expiring() {
            self.prefix(&root.join(prefix.path), limit(&prefix, ttl));
        }
        Swept::Here {
            removed: self.removed,
            whole: self.whole,
        }
    }

    fn prefix(&mut self, top: &FilePath, limit: Duration) {
        let mut folders = vec![top.to_owned()];
        let mut next = 0;
        while let Some(folder) = folders.get(next).cloned() {
            next += 1;
            let found = self.folder(&folder, limit);
            folders.extend(found.unwrap_or_else(|error| self.failed(&error)));
            if self.seen >= LOOKED_AT || self.removed >= REMOVED {
                self.whole = false;
                break;
            }
        }
        // Those within others first; the top stays.
        for folder in folders.iter().skip(1).rev() {
            let touched = fs::symlink_metadata(folder).and_then(|meta| meta.modified());
            if touched.is_ok_and(|touched| is_old(touched, self.now, EMPTY_FOLDER)) {
                // Fails where something is in it.
                let _ = fs::remove_dir(folder);
            }
        }
    }

    /// Removes the old files of a folder; gives the folders in it. Links are not followed and not removed.
    fn folder(&mut self, folder: &FilePath, limit: Duration) -> io::Result<Vec<PathBuf>> {
        let mut folders = Vec::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            self.seen += 1;
            if self.seen >= LOOKED_AT || self.removed >= REMOVED {
                break;
            }
            let looked_at = entry
                .metadata()
                .and_then(|meta| Ok((meta.modified()?, meta)));
            match looked_at {
                Ok((_, meta)) if meta.is_dir() => folders.push(entry.path()),
                Ok((modified, meta)) if meta.is_file() => {
                    // The suffix that `object_store` gives to what is being written.
                    let half = entry.file_name().to_string_lossy().contains('#');
                    let limit = if half { limit.max(HALF_WRITTEN) } else { limit };
                    if is_old(modified, self.now, limit) {
                        match fs::remove_file(entry.path()) {
                            Ok(()) => self.removed += 1,
                            Err(error) => drop(self.failed(&error)),
                        }
                    }
                }
                Ok(_) => {}
                Err(error) => drop(self.failed(&error)),
            }
        }
        Ok(folders)
    }

    fn failed(&mut self, error: &io::Error) -> Vec<PathBuf> {
        // Somebody else removed it, or it never was there.
        self.whole &= error.kind() == io::ErrorKind::NotFound;
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * HOUR);

    fn folder() -> (tempfile::TempDir, Bucket) {
        let temp = tempfile::tempdir().unwrap();
        let bucket = Bucket::open(&Location::File(temp.path().to_owned())).unwrap();
        (temp, bucket)
    }

    fn put(root: &FilePath, name: &str, age: Duration) -> PathBuf {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = fs::File::create(&path).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
        path
    }

    fn make_old(path: &FilePath, age: Duration) {
        fs::File::open(path)
            .unwrap()
            .set_modified(SystemTime::now() - age)
            .unwrap();
    }

    #[tokio::test]
    async fn what_is_old_goes_and_everything_else_stays() {
        let (temp, bucket) = folder();
        let root = temp.path();
        let old = [
            put(root, "exe/v1/ab/cd/k/0", DAY * 31),
            put(root, "exe/v1/ab/cd/k/1#7", DAY * 31),
            put(root, "claim/v1/ab/cd/k/7", DAY * 2),
            put(root, "sweep/v1/1", DAY * 2),
        ];
        let kept = [
            put(root, "exe/v1/ab/cd/k/2", DAY * 29),
            put(root, "exe/v1/ab/ef/k/0", Duration::ZERO),
            put(root, "claim/v1/ab/cd/k/8", DAY / 2),
            put(root, "programs/v1/ab/cd/k", DAY * 400),
            put(root, "dump/x.txt", DAY * 400),
            put(root, "somebody/else", DAY * 400),
        ];
        let swept = sweep(&bucket, Ttl::default()).await.unwrap();
        assert_eq!(
            swept,
            Swept::Here {
                removed: 4,
                whole: true
            }
        );
        for path in old {
            assert!(!path.exists(), "{}", path.display());
        }
        for path in kept {
            assert!(path.exists(), "{}", path.display());
        }
        // Within the same hour nobody sweeps again. (Where the hour has just changed, there is nothing to sweep.)
        let again = sweep(&bucket, Ttl::default()).await.unwrap();
        assert!(matches!(
            again,
            Swept::Elsewhere | Swept::Here { removed: 0, .. }
        ));
    }

    #[tokio::test]
    async fn fifty_managers_sweep_once() {
        let (temp, bucket) = folder();
        for key in 0..20 {
            put(temp.path(), &format!("exe/v1/ab/cd/{key}/0"), DAY * 31);
        }
        let all = (0..50).map(|_| sweep(&bucket, Ttl::default()));
        let all: Vec<_> = futures::future::try_join_all(all).await.unwrap();
        let removed = all.iter().map(|swept| match swept {
            Swept::Here { removed, .. } => *removed,
            Swept::Elsewhere => 0,
        });
        assert_eq!(removed.sum::<u64>(), 20);
        // Two where the hour has just changed.
        let here = all
            .iter()
            .filter(|swept| **swept != Swept::Elsewhere)
            .count();
        assert!((1..=2).contains(&here), "{here}");
    }

    #[test]
    fn empty_folders_go_when_nobody_has_touched_them_and_links_stay() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path();
        let outside = put(root, "outside/file", DAY * 400);
        let file = put(root, "exe/v1/ab/cd/old/0", DAY * 31);
        put(root, "exe/v1/ab/new/x/0", DAY * 31);
        std::os::unix::fs::symlink(root.join("outside"), root.join("exe/v1/ab/link")).unwrap();
        fs::remove_file(file).unwrap();
        for path in ["exe/v1/ab/cd/old", "exe/v1/ab/cd", "exe/v1/ab"] {
            make_old(&root.join(path), DAY);
        }
        let swept = Walk::new(SystemTime::now()).all(root, Ttl::default());
        assert_eq!(
            swept,
            Swept::Here {
                removed: 1,
                whole: true
            }
        );
        assert!(!root.join("exe/v1/ab/cd/old").exists());
        assert!(root.join("exe/v1/ab/new/x").exists(), "touched just now");
        assert!(outside.exists() && root.join("exe/v1/ab/link").exists());
    }

    #[test]
    fn a_file_that_is_being_written_is_left_alone_for_a_day() {
        let temp = tempfile::tempdir().unwrap();
        let young = put(temp.path(), "exe/v1/ab/cd/k/0#1", DAY / 2);
        let entry = put(temp.path(), "exe/v1/ab/cd/k/1", DAY / 2);
        let swept = Walk::new(SystemTime::now()).all(temp.path(), "1h".parse().unwrap());
        assert_eq!(
            swept,
            Swept::Here {
                removed: 1,
                whole: true
            }
        );
        assert!(young.exists() && !entry.exists());
    }

    #[tokio::test]
    async fn objects_in_memory_are_swept_by_the_stores_times() {
        let bucket = Bucket::open(&Location::Memory).unwrap();
        for name in ["exe/v1/x", "claim/v1/x", "programs/v1/x"] {
            bucket
                .store()
                .put(&Path::from(name), PutPayload::from_static(b"x"))
                .await
                .unwrap();
        }
        let now = SystemTime::now();
        let left = async |now| {
            let swept = objects(bucket.store().as_ref(), now, Ttl::default())
                .await
                .unwrap();
            let names = bucket
                .store()
                .list(None)
                .map_ok(|meta| meta.location.to_string());
            (swept, names.try_collect::<Vec<_>>().await.unwrap().len())
        };
        assert_eq!(
            left(now).await,
            (
                Swept::Here {
                    removed: 0,
                    whole: true
                },
                3
            )
        );
        assert_eq!(
            left(now + DAY * 2).await,
            (
                Swept::Here {
                    removed: 1,
                    whole: true
                },
                2
            )
        );
        assert_eq!(
            left(now + DAY * 31).await,
            (
                Swept::Here {
                    removed: 1,
                    whole: true
                },
                1
            )
        );
    }
}
