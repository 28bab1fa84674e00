//! A sweep by the folders, of which `object_store` shows neither those that are empty nor files half written.
//!
//! Whoever shares the location may put anything there, and change it meanwhile. So each folder is opened from within the
//! one it lies in, no symbolic link is followed below the location, and nothing is removed that does not bear a name that
//! is ours in its place.

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, Dir, FileType, Stat, fstat, statat, unlinkat};
use rustix::io::{Errno, Result};

use super::{LOOKED_AT, REMOVED, Swept, is_old, limit};
use crate::bucket::enter;
use crate::bucket::layout::{Place, Prefix};
use crate::policy::{Ttl, expiring};

/// A file that a writer left behind half written is left alone for so long.
const HALF_WRITTEN: Duration = Duration::from_secs(24 * 3600);

/// An empty folder that was not touched for so long goes. A writer that wants it just then makes it again.
const EMPTY_FOLDER: Duration = Duration::from_secs(3600);

/// See the module.
pub(super) struct Walk {
    now: SystemTime,
    seen: u64,
    removed: u64,
    whole: bool,
}

/// A folder that is open.
struct Open<'a> {
    prefix: &'a Prefix,
    /// Names of the folders that lead here from the prefix's own.
    above: Vec<String>,
    folder: OwnedFd,
    limit: Duration,
}

impl Walk {
    pub(super) fn new(now: SystemTime) -> Walk {
        Walk {
            now,
            seen: 0,
            removed: 0,
            whole: true,
        }
    }

    /// Blocks for as long as it takes.
    pub(super) fn all(mut self, root: &Path, ttl: Ttl) -> Swept {
        for prefix in expiring() {
            let walked = top(root, &prefix).and_then(|folder| {
                self.folder(&Open {
                    prefix: &prefix,
                    above: Vec::new(),
                    folder,
                    limit: limit(&prefix, ttl),
                })
            });
            self.note(walked);
        }
        Swept::Here {
            removed: self.removed,
            whole: self.whole,
        }
    }

    fn folder(&mut self, open: &Open<'_>) -> Result<()> {
        for entry in Dir::read_from(&open.folder)? {
            if self.seen >= LOOKED_AT || self.removed >= REMOVED {
                self.whole = false;
                return Ok(());
            }
            let entry = entry?;
            self.seen += 1;
            // None of ours is anything but ASCII.
            let Ok(name) = entry.file_name().to_str() else {
                continue;
            };
            let (plain, half) = half_written(name);
            let walked = match open.prefix.place(&open.above, plain) {
                Some(Place::Folder) if !half => self.below(open, name),
                Some(Place::Object) => self.file(open, entry.file_name(), half),
                _ => Ok(()),
            };
            self.note(walked);
        }
        Ok(())
    }

    fn below(&mut self, open: &Open<'_>, name: &str) -> Result<()> {
        let folder = match enter(&open.folder, name) {
            // A link, or a file.
            Err(Errno::LOOP | Errno::NOTDIR) => return Ok(()),
            folder => folder?,
        };
        let inner = Open {
            prefix: open.prefix,
            above: open
                .above
                .iter()
                .cloned()
                .chain([name.to_owned()])
                .collect(),
            folder,
            limit: open.limit,
        };
        self.folder(&inner)?;
        if is_old(modified(&fstat(&inner.folder)?), self.now, EMPTY_FOLDER) {
            // Fails where something is in it.
            let _ = unlinkat(&open.folder, name, AtFlags::REMOVEDIR);
        }
        Ok(())
    }

    fn file(&mut self, open: &Open<'_>, name: &CStr, half: bool) -> Result<()> {
        let stat = statat(&open.folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let limit = if half {
            open.limit.max(HALF_WRITTEN)
        } else {
            open.limit
        };
        let is_file = FileType::from_raw_mode(stat.st_mode).is_file();
        if is_file && is_old(modified(&stat), self.now, limit) {
            unlinkat(&open.folder, name, AtFlags::empty())?;
            self.removed += 1;
        }
        Ok(())
    }

    fn note(&mut self, walked: Result<()>) {
        // Somebody else removed it, or it never was there.
        self.whole &= matches!(walked, Ok(()) | Err(Errno::NOENT));
    }
}

/// The prefix's own folder. The location itself may lie behind links: the user has named it so.
fn top(root: &Path, prefix: &Prefix) -> Result<OwnedFd> {
    let root =
        File::open(root).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let parts = prefix.path.split('/').filter(|part| !part.is_empty());
    let mut folder = OwnedFd::from(root);
    for part in parts {
        folder = enter(&folder, part)?;
    }
    Ok(folder)
}

/// A name without the suffix that `object_store` gives to what is being written, and whether it has one.
fn half_written(name: &str) -> (&str, bool) {
    match name.split_once('#') {
        Some((plain, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => (plain, true),
        _ => (name, false),
    }
}

/// Before 1970 is 1970.
fn modified(stat: &Stat) -> SystemTime {
    let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
    let nanos = u32::try_from(stat.st_mtime_nsec).unwrap_or(0);
    let since = Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos.into()));
    SystemTime::UNIX_EPOCH
        .checked_add(since)
        .unwrap_or(SystemTime::UNIX_EPOCH)
}
