//! The files of the disk tier and their names. Nothing else touches the disk, but for the index's own files.
//!
//! ```text
//! ab/<key>                            one entry; <key> is 64 hex digits, ab the first two
//! ab/.tmp-<place>-<pid>-<random>      an entry being written
//! misses, misses.old                  the miss history
//! index/, index.lock                  the index, which may be removed at any time
//! ```
//!
//! Entries are programs that run here. So a folder or a shard that another user owns or may write to is not used, nor is
//! such an entry. The user's own processes may still put anything under any name: no symbolic link is followed below the
//! folder, nothing but a regular file is read or counted, no open waits for a peer (a FIFO's), and nothing is removed that
//! does not bear one of the names above.

use std::ffi::CStr;
use std::fs::{DirBuilder, File};
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use waystation_lifecycle::bucket::layout::Digest;

use crate::envelope;

/// Folders that entries are spread over, by the first byte of their key.
pub(super) const SHARDS: usize = 256;

/// A file counts as whole blocks of this size, as it does on most disks.
const BLOCK_BYTES: u64 = 4096;

/// Age at which a temporary file is nobody's, whoever has made it.
const TEMPORARY_AGE: Duration = Duration::from_secs(3600);

/// Only the user may read what programs hold.
const FOLDER_MODE: u32 = 0o700;
pub(super) const FILE_MODE: u32 = 0o600;

/// What says in a mode that others may write.
const OTHERS_WRITE: u32 = 0o022;

/// Of a longer file only so much is read before it is seen to begin as an entry of its length: what has been made long
/// without being written takes no disk, but would take memory.
const FIRST_BYTES: u64 = 1 << 20;

const TEMPORARY: &str = ".tmp-";

/// The folder.
#[derive(Debug, Clone)]
pub(super) struct Folder {
    path: PathBuf,
}

/// What is under a key's name.
#[derive(Debug)]
pub(super) enum Content {
    Absent,
    /// No regular file, a larger one than allowed, or one that is not for us or from us: nothing to read.
    Odd,
    File(Bytes, Read),
}

/// A file that has been read, so that it can be told from what comes after it.
#[derive(Debug)]
pub(super) struct Read {
    file: File,
    identity: (u64, u64),
}

/// A file of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    /// What it takes of the disk.
    pub(super) bytes: u64,
    /// When it was used last, in nanoseconds since 1970, as the file system has it.
    pub(super) used: i64,
}

/// What a shard's folder holds, at one moment.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// The folder's time of modification; `None` where there is no folder.
    pub(super) changed: Option<i64>,
    pub(super) entries: Vec<(Digest, Seen)>,
    pub(super) temporaries: Vec<(String, Seen)>,
}

impl Folder {
    pub(super) fn new(path: PathBuf) -> Folder {
        Folder { path }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads what is under a key's name, up to so many bytes.
    pub(super) fn read(&self, key: &Digest, limit: u64) -> io::Result<Content> {
        let Some(shard) = self.shard(key[0])? else {
            return Ok(Content::Absent);
        };
        // Not waiting for a FIFO's writer, which the flag does nothing else for.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match fs::openat(&shard, hex::encode(key), flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(Content::Absent),
            // A link; a socket or a device without a driver.
            Err(Errno::LOOP | Errno::NXIO | Errno::NODEV) => return Ok(Content::Odd),
            // The shard is ours, as [`Folder::shard`] has seen, so this is about the file alone.
            Err(Errno::ACCESS | Errno::PERM) => return Ok(Content::Odd),
            Err(error) => return Err(error.into()),
        };
        let stat = fs::fstat(&file)?;
        let size = size(&stat);
        if !is_file(&stat) || size > limit || foreign(&stat).is_some() {
            return Ok(Content::Odd);
        }
        let mut file = File::from(file);
        let mut object = Vec::new();
        (&mut file).take(FIRST_BYTES).read_to_end(&mut object)?;
        // What is cut here is found bad, as is one that grows meanwhile.
        if size > FIRST_BYTES && envelope::stated_length(&object) == Some(size) {
            let rest = usize::try_from(size - FIRST_BYTES).unwrap_or(usize::MAX);
            object
                .try_reserve_exact(rest)
                .map_err(|_| io::ErrorKind::OutOfMemory)?;
            (&mut file)
                .take(size - FIRST_BYTES)
                .read_to_end(&mut object)?;
        }
        let identity = identity(&stat);
        Ok(Content::File(object.into(), Read { file, identity }))
    }

    /// Notes that an entry is used now. By the time of modification: the time of access is the mount's to keep or not,
    /// and moves with everything that reads files, a backup for instance.
    pub(super) fn touch(&self, read: &Read) -> io::Result<()> {
        let omit = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        };
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: rustix::fs::UTIME_NOW,
        };
        let times = Timestamps {
            last_access: omit,
            last_modification: now,
        };
        Ok(fs::futimens(&read.file, &times)?)
    }

    /// Removes a file that was read and found bad, unless another has taken its place. True where it is gone.
    pub(super) fn remove_read(&self, key: &Digest, read: &Read) -> io::Result<bool> {
        let Some(shard) = self.shard(key[0])? else {
            return Ok(true);
        };
        let name = hex::encode(key);
        match fs::statat(&shard, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if identity(&stat) == read.identity => unlink(&shard, &name).map(|()| true),
            Ok(_) | Err(Errno::NOENT) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// What tells that which is under a key's name, whatever it is, from what comes after it.
    pub(super) fn mark(&self, key: &Digest) -> Option<(u64, u64, i64)> {
        let shard = self.shard(key[0]).ok()??;
        let stat = fs::statat(&shard, hex::encode(key), AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let (device, inode) = identity(&stat);
        Some((device, inode, modified(&stat)))
    }

    /// Removes an entry. One that is being read stays with its reader.
    pub(super) fn remove(&self, key: &Digest) -> io::Result<()> {
        match self.shard(key[0])? {
            Some(shard) => unlink(&shard, &hex::encode(key)),
            None => Ok(()),
        }
    }

    /// What is under a key's name now, if it is a file.
    pub(super) fn look(&self, key: &Digest) -> io::Result<Option<Seen>> {
        let Some(shard) = self.shard(key[0])? else {
            return Ok(None);
        };
        match fs::statat(&shard, hex::encode(key), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(is_file(&stat).then(|| seen(&stat))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Lists a shard.
    pub(super) fn list(&self, shard: u8) -> io::Result<Listing> {
        let mut listing = Listing::default();
        let Some(folder) = self.shard(shard)? else {
            return Ok(listing);
        };
        // Before the names: what is added while they are read changes it again.
        listing.changed = Some(modified(&fs::fstat(&folder)?));
        for item in fs::Dir::read_from(&folder)? {
            let item = item?;
            let name = item.file_name();
            let (entry, temporary) = (entry_name(name, shard), temporary_name(name));
            if entry.is_none() && temporary.is_none() {
                continue;
            }
            let stat = match fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if is_file(&stat) => stat,
                Ok(_) | Err(Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            };
            if let Some(key) = entry {
                listing.entries.push((key, seen(&stat)));
            } else if let Some(name) = temporary {
                listing.temporaries.push((name.to_owned(), seen(&stat)));
            }
        }
        Ok(listing)
    }

    /// When a shard's folder was changed last. `None` where there is none.
    pub(super) fn changed(&self, root: &OwnedFd, shard: u8) -> io::Result<Option<i64>> {
        match fs::statat(root, hex::encode([shard]), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_dir() => Ok(Some(modified(&stat))),
            Ok(_) | Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The folder itself, if it is there.
    pub(super) fn root(&self) -> io::Result<Option<OwnedFd>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match fs::open(&self.path, flags, Mode::empty()) {
            Ok(root) => {
                if let Some(what) = foreign(&fs::fstat(&root)?) {
                    let path = self.path.display();
                    return Err(io::Error::new(
                        io::ErrorKind::PermissionDenied,
                        format!(
                            "{path} {what}, who could put programs there that run here: give --cache_disk_dir a folder that \
                             only you can write to (chmod go-w)"
                        ),
                    ));
                }
                Ok(Some(root))
            }
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The folder itself, made where it is missing.
    pub(super) fn make_root(&self) -> io::Result<OwnedFd> {
        if let Some(root) = self.root()? {
            return Ok(root);
        }
        DirBuilder::new()
            .recursive(true)
            .mode(FOLDER_MODE)
            .create(&self.path)?;
        self.root()?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Begins a file of so many bytes in the folder of a key.
    pub(super) fn begin(&self, key: &Digest, bytes: u64) -> io::Result<Temporary> {
        let root = self.make_root()?;
        let shard = shard_name(key[0]);
        match fs::mkdirat(&root, &shard, Mode::from_raw_mode(FOLDER_MODE)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        // A file or a link in its place is told from a folder that is no folder itself.
        let folder = open_shard(&root, &shard).map_err(|error| match error {
            Errno::NOTDIR => Errno::LOOP,
            error => error,
        })?;
        let random = RandomState::new().hash_one(SystemTime::now());
        let name = format!(
            "{TEMPORARY}{}-{}-{random:016x}",
            place(),
            std::process::id()
        );
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = fs::openat(&folder, &name, flags, Mode::from_raw_mode(FILE_MODE))?;
        let mut temporary = Temporary {
            folder,
            name,
            file: File::from(file),
            kept: false,
        };
        super::fault::point("temporary created");
        // Counts from here on, for whoever measures the folder.
        temporary.file.set_len(bytes)?;
        temporary.file.flush()?;
        Ok(temporary)
    }

    /// Removes a temporary file if nobody writes it any more. True where it is gone.
    pub(super) fn sweep(&self, shard: u8, name: &str, seen: Seen, now: SystemTime) -> bool {
        let age = now
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default()
            .saturating_sub(Duration::from_nanos(seen.used.try_into().unwrap_or(0)));
        if age < TEMPORARY_AGE && !writer_is_dead(name) {
            return false;
        }
        matches!(self.shard(shard), Ok(Some(folder)) if unlink(&folder, name).is_ok())
    }

    fn shard(&self, shard: u8) -> io::Result<Option<OwnedFd>> {
        let Some(root) = self.root()? else {
            return Ok(None);
        };
        match open_shard(&root, &shard_name(shard)) {
            Ok(folder) => Ok(Some(folder)),
            // A file or a link in the folder's place: there are no entries.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// A file that is not an entry yet. Dropped, it goes.
#[derive(Debug)]
pub(super) struct Temporary {
    folder: OwnedFd,
    name: String,
    file: File,
    kept: bool,
}

impl Temporary {
    /// Fills it and makes it the entry of a key, over what is there.
    ///
    /// It is not synced: a file that a power cut has left empty does not match its checksum, which is a miss, and the
    /// wait for the disk would be paid for each entry.
    ///
    /// # Errors
    /// When it did not become the entry. A folder under the key's name is in the way of every file.
    pub(super) fn keep(mut self, key: &Digest, object: &[u8]) -> io::Result<()> {
        let (first, rest) = object.split_at(object.len() / 2);
        self.file.write_all(first)?;
        super::fault::point("half written");
        self.file.write_all(rest)?;
        super::fault::point("before rename");
        fs::renameat(&self.folder, &self.name, &self.folder, hex::encode(key))?;
        self.kept = true;
        super::fault::point("after rename");
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.kept {
            // If it stays, it is swept within the hour.
            let _ = unlink(&self.folder, &self.name);
        }
    }
}

fn shard_name(shard: u8) -> String {
    hex::encode([shard])
}

/// One that is not ours alone is like a link in its place: no folder of entries.
fn open_shard(root: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = fs::openat(root, name, flags, Mode::empty())?;
    match foreign(&fs::fstat(&folder)?) {
        None => Ok(folder),
        Some(_) => Err(Errno::LOOP),
    }
}

/// Who beside us and the system has a say over a file or folder, if anybody has: the end of a sentence about it.
fn foreign(stat: &Stat) -> Option<String> {
    let owner = stat.st_uid;
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Some(format!("belongs to another user (uid {owner})"));
    }
    let mode = stat.st_mode & 0o7777;
    (mode & OTHERS_WRITE != 0).then(|| format!("can be written to by others (mode {mode:04o})"))
}

fn unlink(folder: &OwnedFd, name: &str) -> io::Result<()> {
    match fs::unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn entry_name(name: &CStr, shard: u8) -> Option<Digest> {
    let name = name.to_bytes();
    let mut key = [0; 32];
    hex::decode_to_slice(name, &mut key).ok()?;
    // Capitals decode as well, and are another file.
    (key[0] == shard && hex::encode(key).as_bytes() == name).then_some(key)
}

fn temporary_name(name: &CStr) -> Option<&str> {
    name.to_str()
        .ok()
        .filter(|name| name.starts_with(TEMPORARY))
}

/// True where the process that a temporary file names is known to have ended. Only of a process on this machine and in
/// this process's numbering of processes can that be said.
fn writer_is_dead(name: &str) -> bool {
    let mut parts = name.trim_start_matches(TEMPORARY).split('-');
    let (Some(its_place), Some(pid)) = (parts.next(), parts.next()) else {
        return false;
    };
    its_place == place()
        && place() != NOWHERE
        && pid
            .parse()
            .ok()
            .and_then(rustix::process::Pid::from_raw)
            .is_some_and(|pid| rustix::process::test_kill_process(pid) == Err(Errno::SRCH))
}

/// What [`place`] says where it does not know.
const NOWHERE: &str = "0";

/// Names the set of processes among which a process id means one process: this boot of this machine, this container.
fn place() -> &'static str {
    static PLACE: OnceLock<String> = OnceLock::new();
    PLACE.get_or_init(|| {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id");
        let space = std::fs::read_link("/proc/self/ns/pid");
        match (boot, space) {
            (Ok(boot), Ok(space)) => {
                let mut hash = Sha256::new();
                hash.update(&boot);
                hash.update(space.as_os_str().as_encoded_bytes());
                hex::encode(&hash.finalize()[..4])
            }
            _ => NOWHERE.to_owned(),
        }
    })
}

fn is_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode).is_file()
}

fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn seen(stat: &Stat) -> Seen {
    Seen {
        bytes: footprint(size(stat)),
        used: modified(stat),
    }
}

/// What a file of so many bytes takes of the disk.
pub(super) fn footprint(bytes: u64) -> u64 {
    bytes
        .checked_next_multiple_of(BLOCK_BYTES)
        .unwrap_or(u64::MAX)
        .max(BLOCK_BYTES)
}

#[allow(
    clippy::unnecessary_cast,
    clippy::useless_conversion,
    reason = "the types of a stat are the architecture's"
)]
fn modified(stat: &Stat) -> i64 {
    (stat.st_mtime as i64)
        .saturating_mul(1_000_000_000)
        .saturating_add(i64::try_from(stat.st_mtime_nsec).unwrap_or(0))
}
