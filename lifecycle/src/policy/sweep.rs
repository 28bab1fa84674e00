//! Removing what is old, where no rule of the store does it: `file://` and `memory://`.
//!
//! * Fifty managers on one folder do not all sweep: who creates `sweep/v1/<hour>` first does, once an hour.
//! * Age is counted by the store's own clock: that of the claim just made, against that of each object.
//! * Only what bears a name of ours goes. Whose the rest is, and what for, is not known.
//! * Nothing that is old is missed by anybody: a reader that has the file open goes on reading, one that comes later has a
//!   miss. A writer publishes under a new file, whose time is now.
//! * One sweep has bounds; what it leaves, the next takes.

mod walk;

use std::time::{Duration, SystemTime};

use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{Error as Store, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};

use self::walk::Walk;
use super::{Ttl, expiring};
use crate::bucket::layout::{self, Prefix};
use crate::bucket::{Bucket, Location};

/// Objects looked at in one sweep.
const LOOKED_AT: u64 = 2_000_000;

/// Objects removed in one sweep.
const REMOVED: u64 = 200_000;

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
            let is_ours = prefix.is_of_ours(&meta.location);
            if is_ours && is_old(meta.last_modified.into(), now, limit(&prefix, ttl)) {
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path as FilePath, PathBuf};

    use super::*;
    use crate::bucket::layout::{Digest, claim as claim_on, claim_over, executable, program};

    const DAY: Duration = Duration::from_secs(24 * HOUR);

    fn folder() -> (tempfile::TempDir, Bucket) {
        let temp = tempfile::tempdir().unwrap();
        let bucket = Bucket::open(&Location::File(temp.path().to_owned())).unwrap();
        (temp, bucket)
    }

    fn key(number: u8) -> Digest {
        let mut key = [0xab; 32];
        key[31] = number;
        key
    }

    fn put(root: &FilePath, name: impl AsRef<str>, age: Duration) -> PathBuf {
        let path = root.join(name.as_ref());
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
            put(root, executable(&key(1), 0), DAY * 31),
            put(root, format!("{}#7", executable(&key(1), 1)), DAY * 31),
            put(root, claim_on(&key(1), 7), DAY * 2),
            put(root, claim_over(&key(1), 7), DAY * 2),
            put(root, "sweep/v1/1", DAY * 2),
        ];
        let folder = executable(&key(1), 0);
        let folder = folder.as_ref().trim_end_matches("/0");
        let kept = [
            put(root, executable(&key(1), 2), DAY * 29),
            put(root, executable(&key(2), 0), Duration::ZERO),
            put(root, claim_on(&key(1), 8), DAY / 2),
            put(root, program(&key(1)), DAY * 400),
            // Nobody knows whose these are.
            put(root, "exe/v1/README", DAY * 400),
            put(root, "exe/v1/ab/cd/k/0", DAY * 400),
            put(root, "exe/v1/ab/notes", DAY * 400),
            put(root, format!("{folder}/4"), DAY * 400),
            put(root, format!("{folder}/3.orig"), DAY * 400),
            put(root, format!("{folder}/3#x"), DAY * 400),
            put(root, format!("{folder}/below/0"), DAY * 400),
            put(root, "claim/v1/ab/ab/7", DAY * 400),
            put(root, "sweep/v1/x", DAY * 400),
            put(root, "dump/x.txt", DAY * 400),
            put(root, "somebody/else", DAY * 400),
        ];
        let swept = sweep(&bucket, Ttl::default()).await.unwrap();
        assert_eq!(
            swept,
            Swept::Here {
                removed: 5,
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
        for number in 0..20 {
            put(temp.path(), executable(&key(number), 0), DAY * 31);
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
    fn empty_folders_go_when_nobody_has_touched_them() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path();
        let file = put(root, executable(&key(1), 0), DAY * 31);
        let touched = put(root, executable(&key(2), 0), DAY * 31);
        let foreign = root.join("exe/v1/ab/empty");
        fs::create_dir(&foreign).unwrap();
        fs::remove_file(&file).unwrap();
        let folder = file.parent().unwrap();
        let parents: Vec<_> = folder.ancestors().take(3).collect();
        for path in parents.into_iter().chain([&*foreign]) {
            make_old(path, DAY);
        }
        let swept = Walk::new(SystemTime::now()).all(root, Ttl::default());
        assert_eq!(
            swept,
            Swept::Here {
                removed: 1,
                whole: true
            }
        );
        assert!(!folder.exists());
        let touched = touched.parent().unwrap();
        assert!(touched.exists(), "touched just now, by its last file's end");
        assert!(foreign.exists());
    }

    #[test]
    fn what_links_point_to_stays() {
        let theirs = tempfile::tempdir().unwrap();
        let name = executable(&key(1), 0);
        let entry = put(theirs.path(), &name, DAY * 400);
        let parts: Vec<_> = name.as_ref().split('/').collect();
        // A link at each height, to what lies there in somebody else's location.
        for height in 1..=parts.len() {
            let ours = tempfile::tempdir().unwrap();
            let below = parts[..height].join("/");
            let link = ours.path().join(&below);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(theirs.path().join(&below), &link).unwrap();
            let swept = Walk::new(SystemTime::now()).all(ours.path(), Ttl::default());
            assert!(matches!(swept, Swept::Here { removed: 0, .. }), "{below}");
            assert!(entry.exists() && link.is_symlink(), "{below}");
        }
        // The location itself may be one.
        let named = theirs.path().join("named");
        std::os::unix::fs::symlink(theirs.path(), &named).unwrap();
        let swept = Walk::new(SystemTime::now()).all(&named, Ttl::default());
        assert!(matches!(swept, Swept::Here { removed: 1, .. }), "{swept:?}");
    }

    #[test]
    fn a_file_that_is_being_written_is_left_alone_for_a_day() {
        let temp = tempfile::tempdir().unwrap();
        let name = format!("{}#1", executable(&key(1), 0));
        let young = put(temp.path(), name, DAY / 2);
        let entry = put(temp.path(), executable(&key(1), 1), DAY / 2);
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
        for name in [
            executable(&key(1), 0),
            claim_on(&key(1), 7),
            program(&key(1)),
            Path::from("exe/v1/x"),
        ] {
            bucket
                .store()
                .put(&name, PutPayload::from_static(b"x"))
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
                4
            )
        );
        assert_eq!(
            left(now + DAY * 2).await,
            (
                Swept::Here {
                    removed: 1,
                    whole: true
                },
                3
            )
        );
        assert_eq!(
            left(now + DAY * 31).await,
            (
                Swept::Here {
                    removed: 1,
                    whole: true
                },
                2
            )
        );
    }
}
