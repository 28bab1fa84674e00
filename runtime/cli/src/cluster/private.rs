//! The folder of a cluster's own, below the temporary folder. It goes with the cluster; when the process was killed, with
//! the next one's start: a lock that ends with its process, however it ends, tells the folders of the living. Not all file
//! systems show one machine the locks of another, so a folder says on which it was made, and others leave it alone.

use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, FileType, FlockOperation, Mode, OFlags, flock, fstat, openat},
    process::geteuid,
};
use tempfile::TempDir;
use tracing::info;

const PREFIX: &str = "waystation-";
/// Bytes of [`LOCK`] that are read.
const MACHINE_BYTES: u64 = 256;
/// The file that is locked, and names the machine. A folder without it is none of ours, not ready yet, or kept for its logs.
const LOCK: &str = "alive";

/// See the module.
#[derive(Debug)]
pub(super) struct Private {
    folder: TempDir,
    _alive: File,
}

impl Private {
    /// Makes the folder, and removes those of clusters whose process is no more.
    pub(super) fn new() -> io::Result<Private> {
        let parent = std::env::temp_dir();
        sweep(&parent);
        Private::below(&parent)
    }

    fn below(parent: &Path) -> io::Result<Private> {
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
        // Under its name only once it is locked, or another process could take this one for dead.
        let new = folder.path().join("new");
        let mut alive = File::create_new(&new)?;
        alive.write_all(machine().as_bytes())?;
        flock(&alive, FlockOperation::NonBlockingLockExclusive)?;
        fs::rename(&new, folder.path().join(LOCK))?;
        Ok(Private {
            folder,
            _alive: alive,
        })
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Leaves the folder to the user.
    pub(super) fn keep(self) -> PathBuf {
        let folder = self.folder.keep();
        if let Err(error) = fs::remove_file(folder.join(LOCK)) {
            tracing::warn!(%error, "the folder goes when another cluster starts");
        }
        folder
    }
}

/// Removes what dead processes of this user have left.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if !entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(PREFIX.as_bytes())
        {
            continue;
        }
        let path = entry.path();
        // Held until the folder is gone, so that nobody else removes it too.
        let Some(_lock) = dead(&path) else { continue };
        match fs::remove_dir_all(&path) {
            Ok(()) => info!(folder = %path.display(), "removed what a killed cluster has left"),
            Err(error) => {
                info!(folder = %path.display(), %error, "a killed cluster's folder stays");
            }
        }
    }
}

/// The lock of a folder of this user's whose process is no more.
fn dead(folder: &Path) -> Option<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let own = |file: &OwnedFd| {
        fstat(file)
            .ok()
            .filter(|stat| stat.st_uid == geteuid().as_raw())
    };
    let folder = openat(CWD, folder, flags | OFlags::DIRECTORY, Mode::empty()).ok()?;
    own(&folder)?;
    let lock = openat(&folder, LOCK, flags, Mode::empty()).ok()?;
    let stat = own(&lock)?;
    if !FileType::from_raw_mode(stat.st_mode).is_file() {
        return None;
    }
    let mut made_on = String::new();
    let lock = File::from(lock);
    (&lock)
        .take(MACHINE_BYTES)
        .read_to_string(&mut made_on)
        .ok()?;
    if made_on.lines().next() != machine().lines().next() {
        return None;
    }
    flock(&lock, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(lock)
}

/// Names this start of the machine, which is one for all its containers, and for people the host.
fn machine() -> String {
    let read = |name: &str| fs::read_to_string(format!("/proc/sys/kernel/{name}"));
    let line = |name: &str| read(name).unwrap_or_default().trim().to_owned();
    format!("{}\n{}\n", line("random/boot_id"), line("hostname"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_dead_processes_go() {
        let parent = tempfile::tempdir().unwrap();
        let (living, kept) = (
            Private::below(parent.path()).unwrap(),
            Private::below(parent.path()).unwrap().keep(),
        );
        let made = |name: &str| {
            let folder = parent.path().join(name);
            fs::create_dir_all(folder.join("below")).unwrap();
            fs::write(folder.join("below").join("log"), "x").unwrap();
            folder
        };
        // As a killed process leaves it: nobody has the lock.
        let killed = made("waystation-killed");
        fs::write(killed.join(LOCK), machine()).unwrap();
        // Of another machine whose locks are not seen here; and of nobody knows whom.
        let remote = made("waystation-remote");
        fs::write(remote.join(LOCK), "0000-0000\nhost\n").unwrap();
        let unknown = made("waystation-unknown");
        fs::write(unknown.join(LOCK), "").unwrap();
        let without = made("waystation-without");
        let other = made("other-folder");
        fs::write(other.join(LOCK), machine()).unwrap();
        let link = parent.path().join("waystation-link");
        std::os::unix::fs::symlink(&other, &link).unwrap();
        let strange = made("waystation-strange");
        std::os::unix::fs::symlink(other.join(LOCK), strange.join(LOCK)).unwrap();
        sweep(parent.path());
        assert!(!killed.exists());
        for folder in [
            living.path(),
            &kept,
            &remote,
            &unknown,
            &without,
            &other,
            &link,
            &strange,
        ] {
            assert!(folder.exists(), "{}", folder.display());
        }
        let path = living.path().to_owned();
        drop(living);
        assert!(!path.exists());
    }
}
