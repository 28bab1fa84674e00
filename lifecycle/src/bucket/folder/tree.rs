//! The files of a folder, reached from its top without following a symbolic link below it.
//!
//! Each folder is opened from within the one it lies in, so that nobody who may write in the location can lead a reader or
//! a writer out of it, whatever is changed meanwhile. The location itself may lie behind links: the user has named it so.
//! It is opened anew for each request, and never made: one that has gone, or that was a mount point and is none, is a
//! share that is not there, and what is written beneath it would be lost to everybody.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use chrono::{DateTime, Utc};
use object_store::path::{Path, PathPart};
use object_store::{Error, ObjectMeta, PutPayload, Result};
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, Stat, fstat, fsync, linkat, mkdirat, openat, renameat,
    statat, unlinkat,
};
use rustix::io::Errno;

/// Folders below a listed one that are looked into. Ours are six deep; a stranger's may have no end.
const DEPTH: usize = 32;

/// Names that are tried for what is being written, and times that a folder is made which somebody removes.
const ATTEMPTS: usize = 100;

/// What a name of an object leads to where no object can be. It is that name's alone, and says nothing of the others.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(in crate::bucket) struct NoObject {
    what: &'static str,
    #[source]
    source: Option<io::Error>,
}

/// The location itself cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("folder '{}' of the location {what}", path.display())]
struct Unusable {
    path: PathBuf,
    what: &'static str,
    #[source]
    source: Option<io::Error>,
}

/// The store's name in errors.
const STORE: &str = "folder";

fn generic(source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Generic {
        store: STORE,
        source: Box::new(source),
    }
}

fn no_object(what: &'static str, source: Option<io::Error>) -> Error {
    generic(NoObject { what, source })
}

/// What the system says of a name below the location.
fn error(path: &Path, errno: Errno) -> Error {
    let (path, source) = (path.to_string(), io::Error::from(errno));
    match errno {
        Errno::NOENT => Error::NotFound {
            path,
            source: source.into(),
        },
        Errno::EXIST => Error::AlreadyExists {
            path,
            source: source.into(),
        },
        Errno::ACCESS | Errno::PERM => Error::PermissionDenied {
            path,
            source: source.into(),
        },
        Errno::LOOP | Errno::NOTDIR => no_object(
            "a symbolic link, or a file in a folder's place",
            Some(source),
        ),
        Errno::ISDIR | Errno::NXIO | Errno::NODEV => no_object("no regular file", Some(source)),
        Errno::NAMETOOLONG | Errno::INVAL | Errno::ILSEQ => {
            no_object("a name that no file can have", Some(source))
        }
        _ => generic(source),
    }
}

/// Opens a folder that lies in another one and is no link. It may be listed.
pub(crate) fn enter(folder: impl AsFd, name: &str) -> rustix::io::Result<OwnedFd> {
    openat(folder, name, LISTED | OFlags::NOFOLLOW, Mode::empty())
}

/// A folder that is to be listed or written to.
const LISTED: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

/// A folder that only leads to others, and need not be listable by us.
const PASSED: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// See the module.
#[derive(Debug)]
pub(super) struct Tree {
    root: PathBuf,
    is_mount: bool,
}

impl Tree {
    /// The folder is there.
    pub(super) fn open(root: PathBuf) -> io::Result<Tree> {
        let folder = File::open(&root)?;
        Ok(Tree {
            is_mount: is_mount(&folder) == Some(true),
            root,
        })
    }

    pub(super) fn root(&self) -> &std::path::Path {
        &self.root
    }

    fn top(&self, flags: OFlags) -> Result<OwnedFd> {
        let unusable = |what, source| {
            generic(Unusable {
                path: self.root.clone(),
                what,
                source,
            })
        };
        let top = rustix::fs::open(&self.root, flags, Mode::empty()).map_err(|errno| {
            unusable(
                "was there when this process started and cannot be opened now",
                Some(errno.into()),
            )
        })?;
        if self.is_mount && is_mount(&top) == Some(false) {
            return Err(unusable(
                "was a mount point when this process started and is none now",
                None,
            ));
        }
        Ok(top)
    }

    /// The folder that an object lies in, and its name there.
    fn place<'a>(&self, path: &'a Path) -> Result<(OwnedFd, &'a str)> {
        let (folders, name) = parts(path)?;
        let mut folder = self.top(PASSED)?;
        for part in folders {
            let entered = openat(&folder, part, PASSED | OFlags::NOFOLLOW, Mode::empty());
            folder = entered.map_err(|errno| error(path, errno))?;
        }
        Ok((folder, name))
    }

    /// As [`Tree::place`]; folders that are not there are made, and are on disk afterwards.
    fn place_made<'a>(&self, path: &'a Path) -> Result<(OwnedFd, &'a str)> {
        let (folders, name) = parts(path)?;
        let mut folder = self.top(LISTED)?;
        for part in folders {
            folder = enter_made(&folder, part).map_err(|errno| error(path, errno))?;
        }
        Ok((folder, name))
    }

    /// An object's file.
    pub(super) fn read(&self, path: &Path) -> Result<(File, ObjectMeta)> {
        let (folder, name) = self.place(path)?;
        // To open a FIFO is to wait for its writer, in a thread that nothing can call back.
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let failed = |errno| error(path, errno);
        let file = openat(&folder, name, flags, Mode::empty()).map_err(failed)?;
        let stat = fstat(&file).map_err(failed)?;
        if !is_file(&stat) {
            return Err(no_object("no regular file", None));
        }
        Ok((file.into(), meta(path.clone(), &stat)))
    }

    /// Writes an object beside its name, and gives it the name when all of it is on disk.
    pub(super) fn write(&self, path: &Path, payload: &PutPayload, over: bool) -> Result<String> {
        let failed = |errno| error(path, errno);
        for _ in 0..ATTEMPTS {
            let (folder, name) = self.place_made(path)?;
            let half = half_name(name);
            let flags =
                OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = match openat(&folder, &half, flags, Mode::from_raw_mode(0o666)) {
                Ok(file) => File::from(file),
                // Somebody's leavings; or the folder was empty, and has been swept.
                Err(Errno::EXIST | Errno::NOENT) => continue,
                Err(errno) => return Err(failed(errno)),
            };
            let written = fill(file, payload).map_err(generic).and_then(|stat| {
                if over {
                    renameat(&folder, &half, &folder, name).map_err(failed)?;
                } else {
                    linkat(&folder, &half, &folder, name, AtFlags::empty()).map_err(failed)?;
                }
                Ok(tag(&stat))
            });
            if !over || written.is_err() {
                // It has its name, or is of no use.
                let _ = unlinkat(&folder, &half, AtFlags::empty());
            }
            let written = written?;
            fsync(&folder).map_err(failed)?;
            return Ok(written);
        }
        Err(generic(io::Error::from(io::ErrorKind::AlreadyExists)))
    }

    pub(super) fn remove(&self, path: &Path) -> Result<()> {
        let (folder, name) = self.place(path)?;
        unlinkat(&folder, name, AtFlags::empty()).map_err(|errno| error(path, errno))
    }

    /// Gives `take` what is below a prefix, and whatever goes wrong there, until it has enough. `odd` gets the names
    /// that no object can have.
    pub(super) fn list(
        &self,
        prefix: &Path,
        take: &mut dyn FnMut(Result<ObjectMeta>) -> bool,
        odd: &dyn Fn(&str),
    ) {
        let mut walk = Walk { take, odd };
        match self.folder(prefix) {
            Ok(Some(folder)) => {
                walk.folder(folder, prefix, DEPTH);
            }
            Ok(None) => {}
            Err(error) => {
                (walk.take)(Err(error));
            }
        }
    }

    /// `None` where nothing is, or no folder.
    fn folder(&self, prefix: &Path) -> Result<Option<OwnedFd>> {
        let mut folder = self.top(LISTED)?;
        for part in prefix.as_ref().split('/').filter(|part| !part.is_empty()) {
            folder = match enter(&folder, part) {
                Ok(folder) => folder,
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
                Err(errno) => return Err(error(prefix, errno)),
            };
        }
        Ok(Some(folder))
    }
}

struct Walk<'a> {
    take: &'a mut dyn FnMut(Result<ObjectMeta>) -> bool,
    odd: &'a dyn Fn(&str),
}

impl Walk<'_> {
    /// False when there is enough.
    fn folder(&mut self, folder: OwnedFd, path: &Path, depth: usize) -> bool {
        let failed = |errno| Err(error(path, errno));
        let entries = match Dir::read_from(&folder) {
            Ok(entries) => entries,
            Err(errno) => return (self.take)(failed(errno)),
        };
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry,
                Err(errno) => return (self.take)(failed(errno)),
            };
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let Some((name, part)) =
                (name.to_str().ok()).and_then(|name| Some((name, PathPart::parse(name).ok()?)))
            else {
                (self.odd)(&name.to_string_lossy());
                continue;
            };
            let place = path.clone().join(part);
            let goes_on = match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if is_file(&stat) => is_half(name) || (self.take)(Ok(meta(place, &stat))),
                Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_dir() && depth > 0 => {
                    match enter(&folder, name) {
                        Ok(inner) => self.folder(inner, &place, depth - 1),
                        // Removed or replaced meanwhile.
                        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => true,
                        Err(errno) => (self.take)(Err(error(&place, errno))),
                    }
                }
                // Nothing that is an object.
                Ok(_) | Err(Errno::NOENT) => true,
                Err(errno) => (self.take)(Err(error(&place, errno))),
            };
            if !goes_on {
                return false;
            }
        }
        true
    }
}

/// Whether another file system begins here. `None`: not known.
fn is_mount(folder: impl AsFd) -> Option<bool> {
    let here = fstat(&folder).ok()?;
    let above = statat(&folder, "..", AtFlags::empty()).ok()?;
    Some(here.st_dev != above.st_dev)
}

fn parts(path: &Path) -> Result<(impl Iterator<Item = &str>, &str)> {
    let (folders, name) = match path.as_ref().rsplit_once('/') {
        Some((folders, name)) => (folders, name),
        None => ("", path.as_ref()),
    };
    let mut all = folders.split('/').chain([name]);
    let is_bad = |part: &str| matches!(part, "." | "..");
    if name.is_empty() || is_half(name) || all.any(is_bad) {
        return Err(no_object("a name that no object has", None));
    }
    Ok((folders.split('/').filter(|part| !part.is_empty()), name))
}

fn enter_made(folder: &OwnedFd, name: &str) -> rustix::io::Result<OwnedFd> {
    match enter(folder, name) {
        Err(Errno::NOENT) => {}
        entered => return entered,
    }
    match mkdirat(folder, name, Mode::from_raw_mode(0o777)) {
        Ok(()) => fsync(folder)?,
        Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno),
    }
    enter(folder, name)
}

fn fill(mut file: File, payload: &PutPayload) -> io::Result<Stat> {
    for part in payload {
        file.write_all(part)?;
    }
    file.sync_all()?;
    Ok(fstat(&file)?)
}

/// The name of what is being written: as that of `object_store`, whose leavings the sweep knows. Processes of several
/// machines may write in one folder, so it need not be the only one.
fn half_name(name: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let (process, count) = (std::process::id(), COUNT.fetch_add(1, Relaxed));
    format!("{name}#{process}{count:06}")
}

/// Whether a name is that of what is being written.
pub(in crate::bucket) fn is_half(name: &str) -> bool {
    name.split_once('#').is_some_and(|(_, number)| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

fn is_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode).is_file()
}

fn meta(location: Path, stat: &Stat) -> ObjectMeta {
    ObjectMeta {
        location,
        last_modified: modified(stat),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        e_tag: Some(tag(stat)),
        version: None,
    }
}

fn tag(stat: &Stat) -> String {
    let micros = modified(stat).timestamp_micros();
    format!("{:x}-{micros:x}-{:x}", stat.st_ino, stat.st_size)
}

/// 1970 for what is no time: anybody may set a file's.
fn modified(stat: &Stat) -> DateTime<Utc> {
    let nanos = u32::try_from(stat.st_mtime_nsec).unwrap_or(0);
    DateTime::from_timestamp(stat.st_mtime, nanos).unwrap_or(DateTime::UNIX_EPOCH)
}
